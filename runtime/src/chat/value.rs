//! What a template computes with, and the account of it.
//!
//! Every string, list and map lives in a buffer that was paid for before it was allocated: [`Buf`] and [`Items`] are the only ways
//! to make one, they charge a [`Budget`] by capacity, and what they charged is given back when the last owner drops it. So the bytes
//! a rendering holds never exceed the budget, whatever its template does. Values nest to a limited depth, and only plain data goes
//! into containers, so there are no cycles, and dropping or printing a value recurses no further than that depth.
//! What this does not do: it knows no operators, see `eval`.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Deref;
use std::rc::Rc;

use serde_json::Value as Json;

use super::{MAX_MEMORY_BYTES, MAX_STEPS, TemplateError};

/// Containers within containers.
const MAX_VALUE_DEPTH: u32 = 64;
/// Bytes that one step of work may read or write.
const BYTES_PER_STEP: usize = 64;
/// What a string, list or map costs beside its buffer.
const OVERHEAD_BYTES: usize = 128;

pub(super) type Result<T> = std::result::Result<T, TemplateError>;

/// Memory held and work done by one rendering.
#[derive(Default)]
pub(super) struct Budget {
    held: Cell<usize>,
    steps: Cell<u64>,
    /// Line of the statement or expression at work, for errors.
    pub(super) line: Cell<u32>,
}

impl Budget {
    pub(super) fn error(&self, text: impl fmt::Display) -> TemplateError {
        TemplateError::new(Some(self.line.get()), text)
    }

    /// Pays for one step of work and for touching `bytes`.
    pub(super) fn work(&self, bytes: usize) -> Result<()> {
        self.steps.set(self.steps.get() + 1 + (bytes / BYTES_PER_STEP) as u64);
        if self.steps.get() > MAX_STEPS {
            return Err(self.error(format_args!("expected to be done within {MAX_STEPS} steps")));
        }
        Ok(())
    }

    fn hold(self: &Rc<Self>, bytes: usize) -> Result<Held> {
        match self.held.get().checked_add(bytes) {
            Some(held) if held <= MAX_MEMORY_BYTES => self.held.set(held),
            _ => return Err(self.error(format_args!("expected at most {MAX_MEMORY_BYTES} bytes of memory in use"))),
        }
        Ok(Held { budget: self.clone(), bytes })
    }

    /// A copy of `text`.
    pub(super) fn text(self: &Rc<Self>, text: &str) -> Result<Value> {
        let mut out = Buf::with_capacity(self, text.len())?;
        out.push(text)?;
        Ok(out.finish())
    }
}

/// Bytes paid for, until dropped.
struct Held {
    budget: Rc<Budget>,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.held.set(self.budget.held.get() - self.bytes);
    }
}

/// A growing string.
pub(super) struct Buf {
    text: String,
    held: Held,
}

impl Buf {
    pub(super) fn new(budget: &Rc<Budget>) -> Result<Buf> {
        Buf::with_capacity(budget, 0)
    }

    pub(super) fn with_capacity(budget: &Rc<Budget>, bytes: usize) -> Result<Buf> {
        let held = budget.hold(bytes.saturating_add(OVERHEAD_BYTES))?;
        Ok(Buf { text: String::with_capacity(bytes), held })
    }

    pub(super) fn push(&mut self, text: &str) -> Result<()> {
        self.held.budget.work(text.len())?;
        let len = self.text.len() + text.len();
        if len > self.text.capacity() {
            let capacity = len.max(self.text.capacity() * 2);
            // The old buffer stays paid for until the new one is filled.
            let held = self.held.budget.hold(capacity + OVERHEAD_BYTES)?;
            self.text.reserve_exact(capacity - self.text.len());
            self.held = held;
        }
        self.text.push_str(text);
        Ok(())
    }

    pub(super) fn push_char(&mut self, c: char) -> Result<()> {
        self.push(c.encode_utf8(&mut [0; 4]))
    }

    pub(super) fn budget(&self) -> &Rc<Budget> {
        &self.held.budget
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    pub(super) fn finish(self) -> Value {
        Value::Str(Text(Rc::new(self)))
    }

    /// The text itself, for the caller of the rendering.
    pub(super) fn into_string(self) -> String {
        self.text
    }
}

/// An immutable, shared string.
#[derive(Clone)]
pub(super) struct Text(Rc<Buf>);

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        self.0.as_str()
    }
}

/// A growing list of `T`: values, or keys with values.
pub(super) struct Items<T = Value> {
    items: Vec<T>,
    depth: u32,
    held: Held,
}

impl<T> Items<T> {
    pub(super) fn new(budget: &Rc<Budget>) -> Result<Items<T>> {
        Ok(Items { items: Vec::new(), depth: 1, held: budget.hold(OVERHEAD_BYTES)? })
    }

    /// Takes note of the depth of something to be put in.
    fn deepen(&mut self, value: &Value) -> Result<()> {
        let budget = &self.held.budget;
        let depth = value
            .depth()
            .ok_or_else(|| budget.error(format_args!("expected plain data in a container, found {}", value.kind())))?;
        if depth >= MAX_VALUE_DEPTH {
            return Err(budget.error(format_args!("expected lists and maps nested less than {MAX_VALUE_DEPTH} deep")));
        }
        self.depth = self.depth.max(depth + 1);
        Ok(())
    }

    /// Adds an item without looking at it: for what never becomes part of a value.
    pub(super) fn add(&mut self, item: T) -> Result<()> {
        let budget = self.held.budget.clone();
        budget.work(0)?;
        if self.items.len() == self.items.capacity() {
            let capacity = (self.items.capacity() * 2).max(4);
            let held = budget.hold(capacity * size_of::<T>() + OVERHEAD_BYTES)?;
            self.items.reserve_exact(capacity - self.items.len());
            self.held = held;
        }
        self.items.push(item);
        Ok(())
    }

    pub(super) fn as_slice(&self) -> &[T] {
        &self.items
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.items
    }
}

impl Items {
    pub(super) fn push(&mut self, value: Value) -> Result<()> {
        self.deepen(&value)?;
        self.add(value)
    }

    pub(super) fn finish(self) -> Value {
        Value::List(Rc::new(self))
    }

    /// Puts the values in order; `less` pays for what it reads and may fail.
    pub(super) fn sort(&mut self, mut less: impl FnMut(&Value, &Value) -> Result<bool>) -> Result<()> {
        let mut failed = None;
        // The sort's own buffer is half of the list at most.
        let _scratch = self.held.budget.hold(self.items.len() * size_of::<Value>())?;
        self.items.sort_by(|a, b| {
            use std::cmp::Ordering::{Equal, Greater, Less};
            if failed.is_some() {
                return Equal;
            }
            let order = less(a, b).and_then(|ab| {
                Ok(if ab {
                    Less
                } else if less(b, a)? {
                    Greater
                } else {
                    Equal
                })
            });
            order.unwrap_or_else(|e| {
                failed = Some(e);
                Equal
            })
        });
        failed.map_or(Ok(()), Err)
    }

    pub(super) fn reverse(&mut self) {
        self.items.reverse();
    }
}

impl Items<(Value, Value)> {
    /// Sets `key`, in its old place if it has one.
    pub(super) fn insert(&mut self, key: Value, value: Value) -> Result<()> {
        let budget = self.held.budget.clone();
        if key.depth() != Some(0) || matches!(key, Value::Undefined) {
            return Err(
                budget.error(format_args!("expected a string or a number as key of a map, found {}", key.kind()))
            );
        }
        self.deepen(&value)?;
        match self.find(&key)? {
            Some(i) => self.items[i].1 = value,
            None => self.add((key, value))?,
        }
        Ok(())
    }

    fn find(&self, key: &Value) -> Result<Option<usize>> {
        let budget = &self.held.budget;
        for (i, (k, _)) in self.items.iter().enumerate() {
            if k.equals(key, budget)? {
                return Ok(Some(i));
            }
        }
        Ok(None)
    }

    pub(super) fn get(&self, key: &Value) -> Result<Option<&Value>> {
        Ok(self.find(key)?.map(|i| &self.items[i].1))
    }

    pub(super) fn get_str(&self, key: &str) -> Result<Option<&Value>> {
        self.held.budget.work(self.items.len() * 8)?;
        Ok(self.items.iter().find(|(k, _)| matches!(k, Value::Str(k) if **k == *key)).map(|(_, v)| v))
    }

    pub(super) fn finish(self) -> Value {
        Value::Map(Rc::new(self))
    }
}

/// What `namespace()` gives: the one thing a template may change.
pub(super) struct Space(RefCell<Items<(Value, Value)>>);

impl Space {
    pub(super) fn get(&self, name: &str) -> Result<Option<Value>> {
        Ok(self.0.borrow().get_str(name)?.cloned())
    }

    pub(super) fn set(&self, name: Value, value: Value) -> Result<()> {
        self.0.borrow_mut().insert(name, value)
    }
}

/// Where a loop stands.
pub(super) struct Loop {
    pub(super) items: Rc<Items>,
    pub(super) at: usize,
}

/// A value of a template.
#[derive(Clone)]
pub(super) enum Value {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Text),
    List(Rc<Items>),
    Map(Rc<Items<(Value, Value)>>),
    Space(Rc<Space>),
    Loop(Rc<Loop>),
    /// A macro, by its number, and the frame it was defined in.
    Macro(usize, usize),
    /// A function of ours, by name.
    Function(&'static str),
}

impl Value {
    pub(super) fn space(entries: Items<(Value, Value)>) -> Value {
        Value::Space(Rc::new(Space(RefCell::new(entries))))
    }

    /// Levels of containers; `None` for what is not plain data.
    fn depth(&self) -> Option<u32> {
        match self {
            Value::List(items) => Some(items.depth),
            Value::Map(items) => Some(items.depth),
            Value::Space(_) | Value::Loop(_) | Value::Macro(..) | Value::Function(_) => None,
            _ => Some(0),
        }
    }

    /// What it is, for errors.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Undefined => "an undefined value",
            Value::None => "none",
            Value::Bool(_) => "a boolean",
            Value::Int(_) | Value::Float(_) => "a number",
            Value::Str(_) => "a string",
            Value::List(_) => "a list",
            Value::Map(_) => "a map",
            Value::Space(_) => "a namespace",
            Value::Loop(_) => "a loop",
            Value::Macro(..) | Value::Function(_) => "a function",
        }
    }

    pub(super) fn truth(&self) -> bool {
        match self {
            Value::Undefined | Value::None => false,
            Value::Bool(b) => *b,
            Value::Int(i) => *i != 0,
            Value::Float(f) => *f != 0.0,
            Value::Str(s) => !s.is_empty(),
            Value::List(items) => !items.as_slice().is_empty(),
            Value::Map(items) => !items.as_slice().is_empty(),
            _ => true,
        }
    }

    /// An integer, or a boolean as one.
    pub(super) fn int(&self) -> Option<i128> {
        match self {
            Value::Int(i) => Some(*i),
            Value::Bool(b) => Some((*b).into()),
            _ => None,
        }
    }

    pub(super) fn float(&self) -> Option<f64> {
        match self {
            Value::Float(f) => Some(*f),
            other => other.int().map(|i| i as f64),
        }
    }

    /// Python's `==`. A shared part may be seen often, so every visit is paid for.
    pub(super) fn equals(&self, other: &Value, budget: &Budget) -> Result<bool> {
        budget.work(0)?;
        Ok(match (self, other) {
            (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
            (Value::Str(a), Value::Str(b)) => {
                budget.work(a.len().min(b.len()))?;
                **a == **b
            }
            (Value::List(a), Value::List(b)) => {
                let (a, b) = (a.as_slice(), b.as_slice());
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (a, b) in a.iter().zip(b) {
                    if !a.equals(b, budget)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Value::Map(a), Value::Map(b)) => {
                if a.as_slice().len() != b.as_slice().len() {
                    return Ok(false);
                }
                for (key, value) in a.as_slice() {
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
    pub(super) fn print(&self, out: &mut Buf, quoted: bool) -> Result<()> {
        match self {
            Value::Undefined => Ok(()),
            Value::None => out.push("None"),
            Value::Bool(true) => out.push("True"),
            Value::Bool(false) => out.push("False"),
            Value::Int(i) => out.push(&i.to_string()),
            Value::Float(f) => out.push(&float(*f)),
            Value::Str(s) if !quoted => out.push(s),
            Value::Str(s) => repr(s, out),
            Value::List(items) => {
                out.push("[")?;
                for (i, item) in items.as_slice().iter().enumerate() {
                    out.push(if i == 0 { "" } else { ", " })?;
                    item.print(out, true)?;
                }
                out.push("]")
            }
            Value::Map(items) => {
                out.push("{")?;
                for (i, (key, value)) in items.as_slice().iter().enumerate() {
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

    /// A copy of JSON that a caller brought.
    pub(super) fn from_json(json: &Json, budget: &Rc<Budget>) -> Result<Value> {
        Value::from_json_within(json, budget, MAX_VALUE_DEPTH)
    }

    fn from_json_within(json: &Json, budget: &Rc<Budget>, depth: u32) -> Result<Value> {
        let below = || depth.checked_sub(1).ok_or_else(|| budget.error("expected messages that are nested less"));
        Ok(match json {
            Json::Null => Value::None,
            Json::Bool(b) => Value::Bool(*b),
            Json::Number(n) => match (n.as_i64(), n.as_u64()) {
                (Some(i), _) => Value::Int(i.into()),
                (None, Some(u)) => Value::Int(u.into()),
                (None, None) => Value::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(s) => budget.text(s)?,
            Json::Array(list) => {
                let mut items = Items::new(budget)?;
                for json in list {
                    items.push(Value::from_json_within(json, budget, below()?)?)?;
                }
                items.finish()
            }
            Json::Object(map) => {
                let mut items = Items::new(budget)?;
                for (key, json) in map {
                    items.insert(budget.text(key)?, Value::from_json_within(json, budget, below()?)?)?;
                }
                items.finish()
            }
        })
    }
}

/// Python's `repr` of a string.
fn repr(s: &str, out: &mut Buf) -> Result<()> {
    let quote = if s.contains('\'') && !s.contains('"') { "\"" } else { "'" };
    out.push(quote)?;
    for c in s.chars() {
        match c {
            '\n' => out.push("\\n")?,
            '\r' => out.push("\\r")?,
            '\t' => out.push("\\t")?,
            '\\' => out.push("\\\\")?,
            '\'' if quote == "'" => out.push("\\'")?,
            c if c.is_ascii_control() => out.push(&format!("\\x{:02x}", c as u32))?,
            c => out.push_char(c)?,
        }
    }
    out.push(quote)
}

/// Python's `repr` of a float: the shortest digits that read back the same, with an exponent from 16 digits on.
pub(super) fn float(f: f64) -> String {
    if !f.is_finite() {
        return if f.is_nan() {
            "nan".into()
        } else if f > 0.0 {
            "inf".into()
        } else {
            "-inf".into()
        };
    }
    let text = format!("{f:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        e if !(-4..16).contains(&e) => {
            format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.unsigned_abs())
        }
        _ => {
            let plain = format!("{f}");
            if plain.contains('.') { plain } else { format!("{plain}.0") }
        }
    }
}
