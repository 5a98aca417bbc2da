//! What a template computes with: values, lists, maps, and what a rendering shares.
//!
//! Values nest to a limited depth, and only plain data goes into containers. Namespaces, the one
//! thing that a template may change, are numbers into a table that lives as long as the rendering,
//! so a list may hold one and there are still no cycles: dropping or printing a value recurses no
//! further than the depth.
//! What this does not do: it knows no operators, see `operators`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::error::Result;
use crate::paid::{Budget, Buf, Items, Literal, Text};
use crate::python::{float, is_printable};
use crate::time::Time;

/// Containers within containers.
pub(crate) const MAX_VALUE_DEPTH: u32 = 64;

/// A string of the template by its number.
pub(crate) type Symbol = u32;

/// What the parts of one rendering share.
pub(crate) struct Context<'t> {
    pub(crate) budget: Rc<Budget>,
    pub(crate) now: Time,
    literals: &'t [Literal],
    /// The literals that have been asked for.
    texts: RefCell<Items<Option<Text>>>,
    spaces: RefCell<Items<Map>>,
}

impl<'t> Context<'t> {
    pub(crate) fn new(budget: &Rc<Budget>, literals: &'t [Literal], now: Time) -> Result<Context<'t>> {
        let mut texts = Items::new(budget)?;
        literals.iter().try_for_each(|_| texts.add(None))?;
        let (texts, spaces) = (RefCell::new(texts), RefCell::new(Items::new(budget)?));
        Ok(Context { budget: budget.clone(), now, literals, texts, spaces })
    }

    /// A string of the template.
    pub(crate) fn text(&self, symbol: Symbol) -> Result<Text> {
        let mut texts = self.texts.borrow_mut();
        let (Some(slot), Some(literal)) = (texts.get_mut(symbol as usize)?, self.literals.get(symbol as usize)) else {
            return Text::empty(&self.budget);
        };
        match slot {
            Some(text) => Ok(text.clone()),
            None => Ok(slot.insert(literal.text(&self.budget)?).clone()),
        }
    }

    /// A new namespace with these entries.
    pub(crate) fn space(&self, entries: Map) -> Result<Value> {
        let mut spaces = self.spaces.borrow_mut();
        spaces.add(entries)?;
        Ok(Value::Space(spaces.len() - 1))
    }

    pub(crate) fn space_get(&self, space: usize, name: &Text) -> Result<Option<Value>> {
        let spaces = self.spaces.borrow();
        spaces.get(space)?.map_or(Ok(None), |entries| Ok(entries.get_text(name)?.cloned()))
    }

    pub(crate) fn space_set(&self, space: usize, name: Text, value: Value) -> Result<()> {
        let mut spaces = self.spaces.borrow_mut();
        spaces.get_mut(space)?.map_or(Ok(()), |entries| entries.insert(Value::Str(name), value))
    }
}

/// What a list is in Python, which decides what can be done with it.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Shape {
    List,
    Tuple,
    Range,
    /// What `keys`, `values` and `items` give.
    Keys,
    Values,
    Pairs,
    /// What `map`, `select` and their like give: true, without length or index, and gone once it
    /// was gone through.
    Generator,
}

impl Shape {
    pub(crate) fn has_length(self) -> bool {
        self != Shape::Generator
    }

    pub(crate) fn has_indices(self) -> bool {
        matches!(self, Shape::List | Shape::Tuple | Shape::Range)
    }

    /// Whether it goes into JSON.
    pub(crate) fn is_data(self) -> bool {
        matches!(self, Shape::List | Shape::Tuple)
    }
}

/// A list of values.
pub(crate) struct List {
    items: Items<Value>,
    depth: u32,
    shape: Shape,
    /// Whether it was gone through.
    spent: Cell<bool>,
}

impl List {
    pub(crate) fn new(budget: &Rc<Budget>) -> Result<List> {
        Ok(List { items: Items::new(budget)?, depth: 1, shape: Shape::List, spent: Cell::new(false) })
    }

    pub(crate) fn pair(a: Value, b: Value, budget: &Rc<Budget>) -> Result<Value> {
        let mut pair = List::new(budget)?;
        pair.push(a)?;
        pair.push(b)?;
        Ok(pair.finish_as(Shape::Tuple))
    }

    pub(crate) fn push(&mut self, value: Value) -> Result<()> {
        self.depth = self.depth.max(depth_around(&value, self.items.budget())?);
        self.items.add(value)
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    pub(crate) fn get(&self, index: usize) -> Result<Option<&Value>> {
        self.items.get(index)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Result<&Value>> {
        self.items.iter()
    }

    pub(crate) fn reverse(&mut self) -> Result<()> {
        self.items.reverse()
    }

    pub(crate) fn sort(&mut self, less: impl FnMut(&Value, &Value) -> Result<bool>) -> Result<()> {
        self.items.sort(less)
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// The items, which a generator gives but once.
    pub(crate) fn iter_once(&self) -> impl Iterator<Item = Result<&Value>> {
        let gone = self.shape == Shape::Generator && self.spent.replace(true);
        self.items.iter().take(if gone { 0 } else { usize::MAX })
    }

    pub(crate) fn finish(self) -> Value {
        Value::List(Rc::new(self))
    }

    pub(crate) fn finish_as(self, shape: Shape) -> Value {
        Value::List(Rc::new(List { shape, ..self }))
    }
}

/// Values by key, in the order in which the keys came.
pub(crate) struct Map {
    items: Items<(Value, Value)>,
    depth: u32,
}

impl Map {
    pub(crate) fn new(budget: &Rc<Budget>) -> Result<Map> {
        Ok(Map { items: Items::new(budget)?, depth: 1 })
    }

    /// Sets `key`, in its old place if it has one.
    pub(crate) fn insert(&mut self, key: Value, value: Value) -> Result<()> {
        let budget = self.items.budget().clone();
        if !matches!(key, Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) | Value::Str(_)) {
            let found = key.kind();
            return Err(budget.error(format_args!("expected a string or a number as key of a map, found {found}")));
        }
        let depth = depth_around(&value, &budget)?;
        match self.find(&key)? {
            Some(i) => {
                if let Some((_, old)) = self.items.get_mut(i)? {
                    *old = value;
                }
            }
            None => self.items.add((key, value))?,
        }
        self.depth = self.depth.max(depth);
        Ok(())
    }

    /// Adds a key that is not there yet, without a search.
    pub(crate) fn add_new(&mut self, key: Text, value: Value) -> Result<()> {
        self.depth = self.depth.max(depth_around(&value, self.items.budget())?);
        self.items.add((Value::Str(key), value))
    }

    fn find(&self, key: &Value) -> Result<Option<usize>> {
        let budget = self.items.budget();
        for (i, entry) in self.items.iter().enumerate() {
            if entry?.0.equals(key, budget)? {
                return Ok(Some(i));
            }
        }
        Ok(None)
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Result<&(Value, Value)>> {
        self.items.iter()
    }

    pub(crate) fn get(&self, key: &Value) -> Result<Option<&Value>> {
        match self.find(key)? {
            Some(i) => Ok(self.items.get(i)?.map(|(_, value)| value)),
            None => Ok(None),
        }
    }

    pub(crate) fn get_text(&self, key: &Text) -> Result<Option<&Value>> {
        for entry in self.items.iter() {
            let (k, value) = entry?;
            if let Value::Str(k) = k
                && k.same(key)?
            {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    pub(crate) fn finish(self) -> Value {
        Value::Map(Rc::new(self))
    }
}

/// Depth of a container that holds `value`.
fn depth_around(value: &Value, budget: &Budget) -> Result<u32> {
    let depth = match value {
        Value::List(list) => list.depth,
        Value::Map(map) => map.depth,
        Value::Loop(_) => {
            let found = value.kind();
            return Err(budget.error(format_args!("expected plain data in a container, found {found}")));
        }
        _ => 0,
    };
    if depth >= MAX_VALUE_DEPTH {
        return Err(budget.limit(format_args!("expected lists and maps nested less than {MAX_VALUE_DEPTH} deep")));
    }
    Ok(depth + 1)
}

/// Where a loop stands.
pub(crate) struct Loop {
    pub(crate) items: Rc<List>,
    pub(crate) at: usize,
}

/// A value of a template.
#[derive(Clone)]
pub(crate) enum Value {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Text),
    List(Rc<List>),
    Map(Rc<Map>),
    /// What `namespace()` gives, by its number.
    Space(usize),
    Loop(Rc<Loop>),
    /// A macro, by its number, and the scope it was defined in, by index and serial number.
    Macro {
        id: usize,
        frame: usize,
        serial: u64,
    },
    /// A function of ours, by name.
    Function(&'static str),
    /// A method that was not called.
    Method,
}

impl Value {
    /// What it is, for errors.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Value::Undefined => "an undefined value",
            Value::None => "none",
            Value::Bool(_) => "a boolean",
            Value::Int(_) | Value::Float(_) => "a number",
            Value::Str(_) => "a string",
            Value::List(list) => match list.shape {
                Shape::List => "a list",
                Shape::Tuple => "a tuple",
                Shape::Range => "a range",
                Shape::Keys | Shape::Values | Shape::Pairs => "a view of a map",
                Shape::Generator => "a generator",
            },
            Value::Map(_) => "a map",
            Value::Space(_) => "a namespace",
            Value::Loop(_) => "a loop",
            Value::Macro { .. } | Value::Function(_) => "a function",
            Value::Method => "a method",
        }
    }

    pub(crate) fn truth(&self) -> bool {
        match self {
            Value::Undefined | Value::None => false,
            Value::Bool(b) => *b,
            Value::Int(i) => *i != 0,
            Value::Float(f) => *f != 0.0,
            Value::Str(s) => !s.is_empty(),
            Value::List(list) => list.len() > 0 || list.shape == Shape::Generator,
            Value::Map(map) => map.len() > 0,
            _ => true,
        }
    }

    /// An integer, or a boolean as one.
    pub(crate) fn int(&self) -> Option<i128> {
        match self {
            Value::Int(i) => Some(*i),
            Value::Bool(b) => Some((*b).into()),
            _ => None,
        }
    }

    pub(crate) fn float(&self) -> Option<f64> {
        match self {
            Value::Float(f) => Some(*f),
            other => other.int().map(|i| i as f64),
        }
    }

    /// Python's `==`. A shared part may be seen often, so every visit is paid for.
    pub(crate) fn equals(&self, other: &Value, budget: &Budget) -> Result<bool> {
        budget.touch(8)?;
        Ok(match (self, other) {
            (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
            (Value::Str(a), Value::Str(b)) => a.same(b)?,
            (Value::Space(a), Value::Space(b)) => a == b,
            (Value::Function(a), Value::Function(b)) => a == b,
            (Value::Macro { id: a, serial: s, .. }, Value::Macro { id: b, serial: t, .. }) => a == b && s == t,
            (Value::List(a), Value::List(b)) => {
                if a.len() != b.len() || a.shape != b.shape || a.shape == Shape::Generator {
                    return Ok(false);
                }
                for (a, b) in a.iter().zip(b.iter()) {
                    if !a?.equals(b?, budget)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Value::Map(a), Value::Map(b)) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                for entry in a.iter() {
                    let (key, value) = entry?;
                    match b.get(key)? {
                        Some(other) if value.equals(other, budget)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Value::Int(a), Value::Int(b)) => a == b,
            _ => matches!((self.float(), other.float()), (Some(a), Some(b)) if a == b),
        })
    }

    /// Writes the value as Python's `str`, or its `repr` if it stands within a container.
    pub(crate) fn print(&self, out: &mut Buf, quoted: bool) -> Result<()> {
        match self {
            Value::Undefined if quoted => out.push("Undefined"),
            Value::Undefined => Ok(()),
            Value::None => out.push("None"),
            Value::Bool(true) => out.push("True"),
            Value::Bool(false) => out.push("False"),
            Value::Int(i) => out.push_str(&i.to_string(), false),
            Value::Float(f) => out.push_str(&float(*f), false),
            Value::Str(s) if !quoted => out.push_text(s),
            Value::Str(s) if s.is_markup() => {
                out.push("Markup(")?;
                repr(s, out)?;
                out.push(")")
            }
            Value::Str(s) => repr(s, out),
            Value::List(items) => {
                let (open, close) = match (items.shape, items.len()) {
                    (Shape::List, _) => ("[", "]"),
                    (Shape::Tuple, 1) => ("(", ",)"),
                    (Shape::Tuple, _) => ("(", ")"),
                    (Shape::Keys, _) => ("dict_keys([", "])"),
                    (Shape::Values, _) => ("dict_values([", "])"),
                    (Shape::Pairs, _) => ("dict_items([", "])"),
                    (Shape::Range | Shape::Generator, _) => {
                        let found = self.kind();
                        return Err(out.budget().error(format_args!("expected something to print, found {found}")));
                    }
                };
                out.push(open)?;
                for (i, item) in items.iter().enumerate() {
                    out.push(if i == 0 { "" } else { ", " })?;
                    item?.print(out, true)?;
                }
                out.push(close)
            }
            Value::Map(items) => {
                out.push("{")?;
                for (i, entry) in items.iter().enumerate() {
                    let (key, value) = entry?;
                    out.push(if i == 0 { "" } else { ", " })?;
                    key.print(out, true)?;
                    out.push(": ")?;
                    value.print(out, true)?;
                }
                out.push("}")
            }
            other => Err(out.budget().error(format_args!("expected something to print, found {}", other.kind()))),
        }
    }

    /// The value as text: a string is itself.
    pub(crate) fn printed(&self, budget: &Rc<Budget>) -> Result<Text> {
        if let Value::Str(text) = self {
            return Ok(text.clone());
        }
        let mut out = Buf::new(budget)?;
        self.print(&mut out, false)?;
        Ok(out.finish())
    }
}

/// Python's `repr` of a string.
fn repr(s: &Text, out: &mut Buf) -> Result<()> {
    let (mut single, mut double) = (false, false);
    for c in s.chars()? {
        single |= c.c == '\'';
        double |= c.c == '"';
    }
    let quote = if single && !double { '"' } else { '\'' };
    let mark = if quote == '"' { "\"" } else { "'" };
    out.push(mark)?;
    let special = |c: char| c == quote || c == '\\' || !is_printable(c);
    s.transcribe(out, special, |out, c| {
        let text = match c.c {
            '\n' => "\\n".to_owned(),
            '\r' => "\\r".to_owned(),
            '\t' => "\\t".to_owned(),
            '\\' | '\'' | '"' => format!("\\{}", c.c),
            other => match other as u32 {
                code @ 0..=0xff => format!("\\x{code:02x}"),
                code @ 0..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            },
        };
        out.push_str(&text, c.typed)
    })?;
    out.push(mark)
}
