//! Walking the tree: statements, expressions, scopes.
//!
//! Whatever grows is paid for from the rendering's budget: variables and arguments too, since
//! recursion multiplies them. Recursion itself is counted.

use std::ops::Range;
use std::rc::Rc;

use crate::arguments::{Arguments, Given};
use crate::error::Result;
use crate::filters;
use crate::functions;
use crate::methods;
use crate::operators;
use crate::paid::{Buf, Items};
use crate::predicates;
use crate::tree::{Args, BLOCK, CALLER, Expr, For, Kind, LOOP, Macro, Stmt, Target, Tree};
use crate::value::{Context, List, Loop, Map, Shape, Symbol, Value};

/// Statements and expressions within each other, macros included.
const MAX_DEPTH: u32 = 400;

/// What comes after a statement.
#[derive(Clone, Copy, PartialEq)]
enum Flow {
    On,
    Break,
    Continue,
}

/// Variables of one scope, and the scope around it.
struct Frame {
    vars: Items<(Symbol, Value)>,
    parent: Option<usize>,
    /// How many scopes there were before this one.
    serial: u64,
}

/// One rendering.
pub(crate) struct Machine<'t> {
    cx: &'t Context<'t>,
    macros: Items<Option<&'t Macro>>,
    frames: Vec<Frame>,
    /// The output, and captured text within it.
    out: Vec<Buf>,
    depth: u32,
    /// How many scopes there have been.
    scopes: u64,
}

/// Renders a tree with these variables: the text, and the ranges of it that came from the caller.
pub(crate) fn render<'t>(
    tree: &'t Tree,
    cx: &'t Context<'t>,
    vars: impl Iterator<Item = (Symbol, Value)>,
) -> Result<(String, Vec<Range<usize>>)> {
    let mut machine = Machine {
        cx,
        macros: Items::new(&cx.budget)?,
        frames: Vec::new(),
        out: vec![Buf::new(&cx.budget)?],
        depth: 0,
        scopes: 0,
    };
    (0..tree.macros).try_for_each(|_| machine.macros.add(None))?;
    machine.enter(None)?;
    for (name, value) in vars {
        machine.set(name, value)?;
    }
    machine.body(&tree.body)?;
    Ok(machine.out.pop().map_or_else(Default::default, Buf::into_parts))
}

impl<'t> Machine<'t> {
    fn enter(&mut self, parent: Option<usize>) -> Result<()> {
        self.frames.push(Frame { vars: Items::new(&self.cx.budget)?, parent, serial: self.scopes });
        self.scopes += 1;
        Ok(())
    }

    /// Index of the innermost scope.
    fn here(&self) -> usize {
        self.frames.len() - 1
    }

    /// Runs `inner` in a scope of its own.
    fn scoped<T>(&mut self, parent: usize, inner: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.enter(Some(parent))?;
        let result = inner(self);
        self.frames.pop();
        result
    }

    /// Runs `inner` one level of recursion deeper.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth >= MAX_DEPTH {
            return Err(self.cx.budget.limit(format_args!("expected recursion of at most {MAX_DEPTH} levels")));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// What `inner` writes.
    fn captured(&mut self, inner: impl FnOnce(&mut Self) -> Result<()>) -> Result<Value> {
        self.out.push(Buf::new(&self.cx.budget)?);
        let result = inner(self);
        let text = self.out.pop().map_or(Value::None, |out| Value::Str(out.finish()));
        result.map(|()| text)
    }

    fn write(&mut self, put: impl FnOnce(&mut Buf) -> Result<()>) -> Result<()> {
        let main = self.out.len() == 1;
        let Some(out) = self.out.last_mut() else { return Ok(()) };
        put(out)?;
        let most = self.cx.budget.limits().output_bytes;
        if main && out.len() > most {
            return Err(self.cx.budget.limit(format_args!("expected at most {most} bytes of output")));
        }
        Ok(())
    }

    fn set(&mut self, name: Symbol, value: Value) -> Result<()> {
        let here = self.here();
        let vars = &mut self.frames[here].vars;
        match vars.position(name, |(n, _)| *n)? {
            Some(i) => {
                if let Some((_, slot)) = vars.get_mut(i)? {
                    *slot = value;
                }
            }
            None => vars.add((name, value))?,
        }
        Ok(())
    }

    fn get(&self, name: Symbol) -> Result<Value> {
        let mut frame = Some(self.here());
        while let Some(at) = frame {
            let Frame { vars, parent, .. } = &self.frames[at];
            if let Some(i) = vars.position(name, |(n, _)| *n)? {
                return Ok(vars.get(i)?.map_or(Value::Undefined, |(_, value)| value.clone()));
            }
            frame = *parent;
        }
        let name = self.cx.text(name)?;
        Ok(functions::named(name.word()?).map_or(Value::Undefined, Value::Function))
    }

    fn body(&mut self, body: &'t [Stmt]) -> Result<Flow> {
        self.deeper(|m| {
            for stmt in body {
                m.cx.budget.step()?;
                let flow = m.statement(stmt)?;
                if flow != Flow::On {
                    return Ok(flow);
                }
            }
            Ok(Flow::On)
        })
    }

    fn statement(&mut self, stmt: &'t Stmt) -> Result<Flow> {
        match stmt {
            Stmt::Raw(text) => {
                let text = self.cx.text(*text)?;
                self.write(|out| out.push_text(&text))?;
            }
            Stmt::Emit(expr) => {
                let value = self.eval(expr)?;
                self.cx.budget.at.set(expr.at);
                self.write(|out| value.print(out, false))?;
            }
            Stmt::If(arms, otherwise) => {
                for (condition, body) in arms {
                    if self.eval(condition)?.truth() {
                        return self.body(body);
                    }
                }
                return self.body(otherwise);
            }
            Stmt::For(each) => return self.each(each),
            Stmt::Set(target, expr) => {
                let value = self.eval(expr)?;
                self.cx.budget.at.set(expr.at);
                self.assign(target, value)?;
            }
            Stmt::SetBlock(target, filters, body) => {
                let value = self.filtered(filters, body)?;
                self.assign(target, value)?;
            }
            Stmt::Filter(filters, body) => {
                let value = self.filtered(filters, body)?;
                self.write(|out| value.print(out, false))?;
            }
            Stmt::With(vars, body) => {
                let here = self.here();
                let mut values = Items::new(&self.cx.budget)?;
                for (name, expr) in vars {
                    let value = self.eval(expr)?;
                    values.add((*name, value))?;
                }
                return self.scoped(here, |m| {
                    for entry in values.iter() {
                        let (name, value) = entry?;
                        m.set(*name, value.clone())?;
                    }
                    m.body(body)
                });
            }
            Stmt::Macro(made) => {
                let value = self.define(made)?;
                self.set(made.name, value)?;
            }
            Stmt::Call(expr, made) => {
                let caller = self.define(made)?;
                let value = self.call(expr, Some(caller))?;
                self.write(|out| value.print(out, false))?;
            }
            Stmt::Break => return Ok(Flow::Break),
            Stmt::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::On)
    }

    fn define(&mut self, made: &'t Macro) -> Result<Value> {
        if let Some(slot) = self.macros.get_mut(made.id)? {
            *slot = Some(made);
        }
        let frame = self.here();
        Ok(Value::Macro { id: made.id, frame, serial: self.frames[frame].serial })
    }

    /// What a block writes, put through filters.
    fn filtered(&mut self, filters: &'t Expr, body: &'t [Stmt]) -> Result<Value> {
        let here = self.here();
        self.scoped(here, |m| {
            let text = m.captured(|m| m.body(body).map(drop))?;
            m.set(BLOCK, text)?;
            m.eval(filters)
        })
    }

    fn assign(&mut self, target: &'t Target, value: Value) -> Result<()> {
        match target {
            Target::Name(name) => self.set(*name, value),
            Target::Attr(space, name) => match self.get(*space)? {
                Value::Space(space) => self.cx.space_set(space, self.cx.text(*name)?, value),
                other => Err(self.cx.budget.error(format_args!("expected a namespace to set, found {}", other.kind()))),
            },
            Target::Names(names) => {
                let mut items = List::new(&self.cx.budget)?;
                match value {
                    // Of which there are as many as are unpacked, or an error comes first.
                    Value::List(ref list) if list.len() != names.len() => {}
                    Value::List(_) | Value::Map(_) | Value::Str(_) => {
                        functions::iterate(&value, self.cx, &mut |item| items.push(item))?;
                    }
                    _ => {
                        let found = value.kind();
                        return Err(self.cx.budget.error(format_args!("expected a list to unpack, found {found}")));
                    }
                }
                let found = if let Value::List(list) = &value { list.len() } else { items.len() };
                if found != names.len() {
                    let expected = names.len();
                    return Err(self
                        .cx
                        .budget
                        .error(format_args!("expected {expected} values to unpack, found {found}")));
                }
                for (name, item) in names.iter().zip(items.iter()) {
                    self.set(*name, item?.clone())?;
                }
                Ok(())
            }
        }
    }

    fn each(&mut self, each: &'t For) -> Result<Flow> {
        let over = self.eval(&each.over)?;
        self.cx.budget.at.set(each.over.at);
        let here = self.here();
        let mut items = List::new(&self.cx.budget)?;
        functions::iterate(&over, self.cx, &mut |item| {
            let keep = match &each.only {
                None => true,
                Some(only) => self.scoped(here, |m| {
                    m.assign(&each.target, item.clone())?;
                    Ok(m.eval(only)?.truth())
                })?,
            };
            if keep { items.push(item) } else { Ok(()) }
        })?;
        let items = Rc::new(items);
        if items.len() == 0 {
            return self.scoped(here, |m| m.body(&each.otherwise));
        }
        for (at, item) in items.iter().enumerate() {
            let item = item?.clone();
            let flow = self.scoped(here, |m| {
                m.assign(&each.target, item)?;
                m.set(LOOP, Value::Loop(Rc::new(Loop { items: items.clone(), at })))?;
                m.body(&each.body)
            });
            if flow? == Flow::Break {
                break;
            }
        }
        Ok(Flow::On)
    }

    fn eval(&mut self, expr: &'t Expr) -> Result<Value> {
        self.cx.budget.step()?;
        let at = self.cx.budget.at.replace(expr.at);
        let value = self.deeper(|m| m.kind(expr))?;
        self.cx.budget.at.set(at);
        Ok(value)
    }

    fn kind(&mut self, expr: &'t Expr) -> Result<Value> {
        match &expr.kind {
            Kind::Name(name) => self.get(*name),
            Kind::Str(text) => self.cx.text(*text).map(Value::Str),
            Kind::Int(i) => Ok(Value::Int(*i)),
            Kind::Float(f) => Ok(Value::Float(*f)),
            Kind::Bool(b) => Ok(Value::Bool(*b)),
            Kind::None => Ok(Value::None),
            Kind::List(list) => self.list(list).map(List::finish),
            Kind::Tuple(list) => Ok(self.list(list)?.finish_as(Shape::Tuple)),
            Kind::Map(pairs) => self.map(pairs),
            Kind::Attr(object, name) => {
                let value = self.eval(object)?;
                self.defined(object, &value)?;
                functions::attribute(&value, &self.cx.text(*name)?, self.cx)
            }
            Kind::Item(object, index) => {
                let (value, index) = (self.eval(object)?, self.eval(index)?);
                self.defined(object, &value)?;
                functions::item(&value, &index, self.cx)
            }
            Kind::Slice(object, parts) => {
                let value = self.eval(object)?;
                self.defined(object, &value)?;
                let mut bounds = [None; 3];
                for (bound, part) in bounds.iter_mut().zip(parts) {
                    let Some(part) = part else { continue };
                    *bound = match self.eval(part)? {
                        Value::None => None,
                        value => Some(value.int().ok_or_else(|| {
                            self.cx.budget.error(format_args!("expected integers in a slice, found {}", value.kind()))
                        })?),
                    };
                }
                operators::slice(&value, bounds, &self.cx.budget)
            }
            Kind::Call(..) => self.call(expr, None),
            Kind::Filter(value, name, args) => {
                let value = self.eval(value)?;
                let arguments = self.args(args)?;
                filters::filter(&self.cx.text(*name)?, &value, arguments.given(), self.cx)
            }
            Kind::Test(value, name, args) => {
                let value = self.eval(value)?;
                let mut arguments = Arguments::new(&self.cx.budget)?;
                for arg in args {
                    let arg = self.eval(arg)?;
                    arguments.positional.add(arg)?;
                }
                predicates::test(&self.cx.text(*name)?, &value, arguments.given(), self.cx).map(Value::Bool)
            }
            Kind::Not(value) => Ok(Value::Bool(!self.eval(value)?.truth())),
            Kind::Neg(value) => {
                let value = self.eval(value)?;
                operators::binary("-", &Value::Int(0), &value, &self.cx.budget)
            }
            Kind::And(a, b) => {
                let left = self.eval(a)?;
                if left.truth() { self.eval(b) } else { Ok(left) }
            }
            Kind::Or(a, b) => {
                let left = self.eval(a)?;
                if left.truth() { Ok(left) } else { self.eval(b) }
            }
            Kind::Binary(op, a, b) => {
                let (left, right) = (self.eval(a)?, self.eval(b)?);
                if *op != "~" {
                    self.defined(a, &left)?;
                    self.defined(b, &right)?;
                }
                operators::binary(op, &left, &right, &self.cx.budget)
            }
            Kind::Compare(first, rest) => {
                let mut left = self.eval(first)?;
                for (op, expr) in rest {
                    let right = self.eval(expr)?;
                    if !operators::compare(op, &left, &right, &self.cx.budget)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
            Kind::Cond(condition, then, otherwise) => match (self.eval(condition)?.truth(), otherwise) {
                (true, _) => self.eval(then),
                (false, Some(otherwise)) => self.eval(otherwise),
                (false, None) => Ok(Value::Undefined),
            },
        }
    }

    /// Fails for an undefined value, with its name.
    fn defined(&self, expr: &Expr, value: &Value) -> Result<()> {
        match (value, &expr.kind) {
            (Value::Undefined, Kind::Name(name) | Kind::Attr(_, name)) => {
                let name = self.cx.text(*name)?;
                Err(self.cx.budget.error(format_args!("expected a value, but {} is undefined", name.quoted()?)))
            }
            (Value::Undefined, _) => Err(self.cx.budget.error("expected a value, found an undefined one")),
            _ => Ok(()),
        }
    }

    fn list(&mut self, list: &'t [Expr]) -> Result<List> {
        let mut items = List::new(&self.cx.budget)?;
        for expr in list {
            let value = self.eval(expr)?;
            items.push(value)?;
        }
        Ok(items)
    }

    fn map(&mut self, pairs: &'t [(Expr, Expr)]) -> Result<Value> {
        let mut items = Map::new(&self.cx.budget)?;
        for (key, value) in pairs {
            let key = self.eval(key)?;
            let value = self.eval(value)?;
            items.insert(key, value)?;
        }
        Ok(items.finish())
    }

    fn args(&mut self, args: &'t Args) -> Result<Arguments> {
        let mut arguments = Arguments::new(&self.cx.budget)?;
        for expr in &args.positional {
            let value = self.eval(expr)?;
            arguments.positional.add(value)?;
        }
        if let Some(expr) = &args.spread {
            let values = self.eval(expr)?;
            functions::iterate(&values, self.cx, &mut |value| arguments.positional.add(value))?;
        }
        for (name, expr) in &args.named {
            let value = self.eval(expr)?;
            arguments.named.add((*name, value))?;
        }
        Ok(arguments)
    }

    fn call(&mut self, expr: &'t Expr, caller: Option<Value>) -> Result<Value> {
        let Kind::Call(callee, args) = &expr.kind else { return Err(self.cx.budget.error("expected a call")) };
        if let Kind::Attr(object, name) = &callee.kind {
            let value = self.eval(object)?;
            self.defined(object, &value)?;
            let arguments = self.args(args)?;
            return methods::method(&value, &self.cx.text(*name)?, arguments.given(), self.cx);
        }
        let value = self.eval(callee)?;
        self.defined(callee, &value)?;
        let arguments = self.args(args)?;
        let given = arguments.given();
        match value {
            Value::Function(name) => functions::function(name, given, self.cx),
            Value::Macro { id, frame, serial } => match self.macros.get(id)? {
                Some(Some(made)) if self.frames.get(frame).is_some_and(|f| f.serial == serial) => {
                    self.invoke(made, frame, given, caller)
                }
                _ => Err(self.cx.budget.error("expected a macro whose scope is still there")),
            },
            other => Err(self.cx.budget.error(format_args!("expected a function to call, found {}", other.kind()))),
        }
    }

    /// Runs a macro in the scope it was defined in, which is still there.
    fn invoke(&mut self, made: &'t Macro, frame: usize, given: Given<'_>, caller: Option<Value>) -> Result<Value> {
        let budget = &self.cx.budget;
        if given.positional.len() > made.params.len() {
            let (most, found) = (made.params.len(), given.positional.len());
            let name = self.cx.text(made.name)?;
            let name = name.quoted()?;
            return Err(budget.error(format_args!("expected at most {most} arguments of {name}, found {found}")));
        }
        for argument in given.named.iter() {
            let (wrong, _) = argument?;
            budget.touch(made.params.len() * 8)?;
            if made.params.iter().all(|(known, _)| known != wrong) {
                let (name, wrong) = (self.cx.text(made.name)?, self.cx.text(*wrong)?);
                let (name, wrong) = (name.quoted()?, wrong.quoted()?);
                return Err(budget.error(format_args!("expected an argument of {name}, found {wrong}")));
            }
        }
        self.scoped(frame, |m| {
            for (i, (param, default)) in made.params.iter().enumerate() {
                let named = given.named.position(*param, |(name, _)| *name)?;
                let value = match (given.positional.get(i)?, named, default) {
                    (Some(value), ..) => value.clone(),
                    (None, Some(named), _) => {
                        given.named.get(named)?.map_or(Value::Undefined, |(_, value)| value.clone())
                    }
                    (None, None, Some(default)) => m.eval(default)?,
                    (None, None, None) => Value::Undefined,
                };
                m.set(*param, value)?;
            }
            if let Some(caller) = caller {
                m.set(CALLER, caller)?;
            }
            m.captured(|m| m.body(&made.body).map(drop))
        })
    }
}
