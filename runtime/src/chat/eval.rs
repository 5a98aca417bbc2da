//! Walking the tree: statements, expressions, scopes.
//!
//! Whatever grows is a [`Buf`] or an [`Items`], paid for from the rendering's budget: variables and arguments too, since
//! recursion multiplies them. Recursion itself is counted.

use std::rc::Rc;

use super::builtins::{self, Given};
use super::parse::{Args, Expr, For, Kind, Macro, Stmt, Target, Tree};
use super::value::{Budget, Buf, Items, Loop, Result, Value};
use super::{MAX_DEPTH, MAX_OUTPUT_BYTES, operators, text_of};

/// What comes after a statement.
#[derive(Clone, Copy, PartialEq)]
enum Flow {
    On,
    Break,
    Continue,
}

/// Variables of one scope, and the scope around it.
struct Frame<'t> {
    vars: Items<(&'t str, Value)>,
    parent: Option<usize>,
}

/// One rendering.
pub(super) struct Machine<'t> {
    budget: Rc<Budget>,
    macros: Vec<Option<&'t Macro>>,
    frames: Vec<Frame<'t>>,
    /// The output, and captured text within it.
    out: Vec<Buf>,
    depth: u32,
}

/// Renders a tree with these variables.
pub(super) fn render(tree: &Tree, budget: &Rc<Budget>, vars: [(&'static str, Value); 6]) -> Result<String> {
    let mut machine = Machine {
        budget: budget.clone(),
        macros: vec![None; tree.macros],
        frames: Vec::new(),
        out: vec![Buf::new(budget)?],
        depth: 0,
    };
    machine.enter(None)?;
    for (name, value) in vars {
        machine.set(name, value)?;
    }
    machine.body(&tree.body)?;
    Ok(machine.out.pop().map_or_else(String::new, Buf::into_string))
}

impl<'t> Machine<'t> {
    fn enter(&mut self, parent: Option<usize>) -> Result<()> {
        self.frames.push(Frame { vars: Items::new(&self.budget)?, parent });
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
            return Err(self.budget.error(format_args!("expected recursion of at most {MAX_DEPTH} levels")));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// What `inner` writes.
    fn captured(&mut self, inner: impl FnOnce(&mut Self) -> Result<()>) -> Result<Value> {
        self.out.push(Buf::new(&self.budget)?);
        let result = inner(self);
        let text = self.out.pop().map_or(Value::None, Buf::finish);
        result.map(|()| text)
    }

    fn write(&mut self, put: impl FnOnce(&mut Buf) -> Result<()>) -> Result<()> {
        let main = self.out.len() == 1;
        let Some(out) = self.out.last_mut() else { return Ok(()) };
        put(out)?;
        if main && out.as_str().len() > MAX_OUTPUT_BYTES {
            return Err(self.budget.error(format_args!("expected at most {MAX_OUTPUT_BYTES} bytes of output")));
        }
        Ok(())
    }

    fn set(&mut self, name: &'t str, value: Value) -> Result<()> {
        let here = self.here();
        let vars = &mut self.frames[here].vars;
        self.budget.work(vars.as_slice().len() * 8)?;
        match vars.as_mut_slice().iter_mut().find(|(n, _)| *n == name) {
            Some((_, slot)) => *slot = value,
            None => vars.add((name, value))?,
        }
        Ok(())
    }

    fn get(&self, name: &str) -> Result<Value> {
        let mut frame = Some(self.here());
        while let Some(at) = frame {
            let Frame { vars, parent } = &self.frames[at];
            self.budget.work(vars.as_slice().len() * 8)?;
            if let Some((_, value)) = vars.as_slice().iter().find(|(n, _)| *n == name) {
                return Ok(value.clone());
            }
            frame = *parent;
        }
        Ok(builtins::FUNCTIONS.iter().find(|f| **f == name).map_or(Value::Undefined, |f| Value::Function(f)))
    }

    fn body(&mut self, body: &'t [Stmt]) -> Result<Flow> {
        self.deeper(|m| {
            for stmt in body {
                m.budget.work(0)?;
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
            Stmt::Raw(text) => self.write(|out| out.push(text))?,
            Stmt::Emit(expr) => {
                let value = self.eval(expr)?;
                self.budget.line.set(expr.line);
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
            Stmt::For(each) => self.each(each)?,
            Stmt::Set(target, expr) => {
                let value = self.eval(expr)?;
                self.budget.line.set(expr.line);
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
                let mut values = Items::new(&self.budget)?;
                for (name, expr) in vars {
                    let value = self.eval(expr)?;
                    values.add((name, value))?;
                }
                return self.scoped(here, |m| {
                    values.as_slice().iter().try_for_each(|(name, value)| m.set(name, value.clone()))?;
                    m.body(body)
                });
            }
            Stmt::Macro(made) => {
                let value = self.define(made);
                self.set(&made.name, value)?;
            }
            Stmt::Call(expr, made) => {
                let caller = self.define(made);
                let value = self.call(expr, Some(caller))?;
                self.write(|out| value.print(out, false))?;
            }
            Stmt::Break => return Ok(Flow::Break),
            Stmt::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::On)
    }

    fn define(&mut self, made: &'t Macro) -> Value {
        self.macros[made.id] = Some(made);
        Value::Macro(made.id, self.here())
    }

    /// What a block writes, put through filters.
    fn filtered(&mut self, filters: &'t Expr, body: &'t [Stmt]) -> Result<Value> {
        let here = self.here();
        self.scoped(here, |m| {
            let text = m.captured(|m| m.body(body).map(drop))?;
            m.set("", text)?;
            m.eval(filters)
        })
    }

    fn assign(&mut self, target: &'t Target, value: Value) -> Result<()> {
        match target {
            Target::Name(name) => self.set(name, value),
            Target::Attr(space, name) => match self.get(space)? {
                Value::Space(space) => space.set(self.budget.text(name)?, value),
                other => Err(self.budget.error(format_args!("expected a namespace to set, found {}", other.kind()))),
            },
            Target::Names(names) => {
                let Value::List(items) = value else {
                    return Err(self.budget.error(format_args!("expected a list to unpack, found {}", value.kind())));
                };
                let found = items.as_slice().len();
                if found != names.len() {
                    let expected = names.len();
                    return Err(self.budget.error(format_args!("expected {expected} values to unpack, found {found}")));
                }
                names.iter().zip(items.as_slice()).try_for_each(|(name, value)| self.set(name, value.clone()))
            }
        }
    }

    fn each(&mut self, each: &'t For) -> Result<()> {
        let over = self.eval(&each.over)?;
        self.budget.line.set(each.over.line);
        let here = self.here();
        let budget = self.budget.clone();
        let mut items = Items::new(&budget)?;
        builtins::iterate(&over, &budget, &mut |item| {
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
        if items.as_slice().is_empty() {
            return self.scoped(here, |m| m.body(&each.otherwise)).map(drop);
        }
        for (at, item) in items.as_slice().iter().enumerate() {
            let flow = self.scoped(here, |m| {
                m.assign(&each.target, item.clone())?;
                m.set("loop", Value::Loop(Rc::new(Loop { items: items.clone(), at })))?;
                m.body(&each.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    fn eval(&mut self, expr: &'t Expr) -> Result<Value> {
        self.budget.work(0)?;
        let line = self.budget.line.replace(expr.line);
        let value = self.deeper(|m| m.kind(expr))?;
        self.budget.line.set(line);
        Ok(value)
    }

    fn kind(&mut self, expr: &'t Expr) -> Result<Value> {
        match &expr.kind {
            Kind::Name(name) => self.get(name),
            Kind::Str(text) => self.budget.text(text),
            Kind::Int(i) => Ok(Value::Int(*i)),
            Kind::Float(f) => Ok(Value::Float(*f)),
            Kind::Bool(b) => Ok(Value::Bool(*b)),
            Kind::None => Ok(Value::None),
            Kind::List(list) => self.list(list),
            Kind::Map(pairs) => self.map(pairs),
            Kind::Attr(object, name) => {
                let value = self.eval(object)?;
                self.defined(object, &value)?;
                builtins::attribute(&value, name, &self.budget)
            }
            Kind::Item(object, index) => {
                let (value, index) = (self.eval(object)?, self.eval(index)?);
                self.defined(object, &value)?;
                builtins::item(&value, &index, &self.budget)
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
                            self.budget.error(format_args!("expected integers in a slice, found {}", value.kind()))
                        })?),
                    };
                }
                operators::slice(&value, bounds, &self.budget)
            }
            Kind::Call(..) => self.call(expr, None),
            Kind::Filter(value, name, args) => {
                let value = self.eval(value)?;
                let (positional, named) = self.args(args)?;
                let given = Given { positional: positional.as_slice(), named: named.as_slice() };
                builtins::filter(name, &value, given, &self.budget)
            }
            Kind::Test(value, name, args) => {
                let value = self.eval(value)?;
                let mut given = Items::new(&self.budget)?;
                for arg in args {
                    let arg = self.eval(arg)?;
                    given.add(arg)?;
                }
                builtins::test(name, &value, given.as_slice(), &self.budget).map(Value::Bool)
            }
            Kind::Not(value) => Ok(Value::Bool(!self.eval(value)?.truth())),
            Kind::Neg(value) => {
                let value = self.eval(value)?;
                operators::binary("-", &Value::Int(0), &value, &self.budget)
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
                operators::binary(op, &left, &right, &self.budget)
            }
            Kind::Compare(first, rest) => {
                let mut left = self.eval(first)?;
                for (op, expr) in rest {
                    let right = self.eval(expr)?;
                    if !operators::compare(op, &left, &right, &self.budget)? {
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
                Err(self.budget.error(format_args!("expected a value, but {} is undefined", text_of(name))))
            }
            (Value::Undefined, _) => Err(self.budget.error("expected a value, found an undefined one")),
            _ => Ok(()),
        }
    }

    fn list(&mut self, list: &'t [Expr]) -> Result<Value> {
        let mut items = Items::new(&self.budget)?;
        for expr in list {
            let value = self.eval(expr)?;
            items.push(value)?;
        }
        Ok(items.finish())
    }

    fn map(&mut self, pairs: &'t [(Expr, Expr)]) -> Result<Value> {
        let mut items = Items::new(&self.budget)?;
        for (key, value) in pairs {
            let key = self.eval(key)?;
            let value = self.eval(value)?;
            items.insert(key, value)?;
        }
        Ok(items.finish())
    }

    fn args(&mut self, args: &'t Args) -> Result<(Items, Items<(&'t str, Value)>)> {
        let (mut positional, mut named) = (Items::new(&self.budget)?, Items::new(&self.budget)?);
        for expr in &args.positional {
            let value = self.eval(expr)?;
            positional.add(value)?;
        }
        for (name, expr) in &args.named {
            let value = self.eval(expr)?;
            named.add((name.as_str(), value))?;
        }
        Ok((positional, named))
    }

    fn call(&mut self, expr: &'t Expr, caller: Option<Value>) -> Result<Value> {
        let Kind::Call(callee, args) = &expr.kind else { return Err(self.budget.error("expected a call")) };
        if let Kind::Attr(object, name) = &callee.kind {
            let value = self.eval(object)?;
            self.defined(object, &value)?;
            let (positional, named) = self.args(args)?;
            let given = Given { positional: positional.as_slice(), named: named.as_slice() };
            return builtins::method(&value, name, given, &self.budget);
        }
        let value = self.eval(callee)?;
        self.defined(callee, &value)?;
        let (positional, named) = self.args(args)?;
        let given = Given { positional: positional.as_slice(), named: named.as_slice() };
        match value {
            Value::Function(name) => builtins::function(name, given, &self.budget),
            Value::Macro(id, frame) => match self.macros[id] {
                Some(made) => self.invoke(made, frame, given, caller),
                None => Ok(Value::Undefined),
            },
            other => Err(self.budget.error(format_args!("expected a function to call, found {}", other.kind()))),
        }
    }

    /// Runs a macro in the scope it was defined in. That scope is still there: a macro cannot leave it.
    fn invoke(&mut self, made: &'t Macro, frame: usize, given: Given<'_>, caller: Option<Value>) -> Result<Value> {
        let name = &made.name;
        let known = |n: &str| made.params.iter().any(|(p, _)| p == n);
        if given.positional.len() > made.params.len() {
            let (most, found) = (made.params.len(), given.positional.len());
            let name = text_of(name);
            return Err(self.budget.error(format_args!("expected at most {most} arguments of {name}, found {found}")));
        }
        if let Some((wrong, _)) = given.named.iter().find(|(n, _)| !known(n)) {
            let (name, wrong) = (text_of(name), text_of(wrong));
            return Err(self.budget.error(format_args!("expected an argument of {name}, found {wrong}")));
        }
        self.scoped(frame, |m| {
            for (i, (param, default)) in made.params.iter().enumerate() {
                m.budget.work(given.named.len() * 8)?;
                let named = given.named.iter().find(|(n, _)| n == param).map(|(_, v)| v);
                let value = match (given.positional.get(i).or(named), default) {
                    (Some(value), _) => value.clone(),
                    (None, Some(default)) => m.eval(default)?,
                    (None, None) => Value::Undefined,
                };
                m.set(param, value)?;
            }
            if let Some(caller) = caller {
                m.set("caller", caller)?;
            }
            m.captured(|m| m.body(&made.body).map(drop))
        })
    }
}
