//! Arguments of functions, filters, tests and methods.

use std::rc::Rc;

use crate::error::Result;
use crate::paid::{Budget, Items, Text};
use crate::value::{Context, Symbol, Value};

/// Arguments of a call.
pub(crate) struct Arguments {
    pub(crate) positional: Items<Value>,
    pub(crate) named: Items<(Symbol, Value)>,
}

impl Arguments {
    pub(crate) fn new(budget: &Rc<Budget>) -> Result<Arguments> {
        Ok(Arguments { positional: Items::new(budget)?, named: Items::new(budget)? })
    }

    pub(crate) fn given(&self) -> Given<'_> {
        Given { positional: &self.positional, named: &self.named, taken: 0 }
    }
}

/// Arguments as a function sees them.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub(crate) positional: &'a Items<Value>,
    pub(crate) named: &'a Items<(Symbol, Value)>,
    /// How many of the positional ones were taken already.
    taken: usize,
}

impl<'a> Given<'a> {
    /// The first positional argument, and the others.
    pub(crate) fn split_first(self) -> Result<(Option<&'a Value>, Given<'a>)> {
        Ok((self.positional.get(self.taken)?, Given { taken: self.taken + 1, ..self }))
    }

    /// The arguments by these names, in this order; `None` for what was not given.
    pub(crate) fn take<const N: usize>(self, names: [&str; N], cx: &Context<'_>) -> Result<[Option<&'a Value>; N]> {
        let mut found = [None; N];
        let count = self.positional.len().saturating_sub(self.taken);
        if count > N {
            return Err(cx.budget.error(format_args!("expected at most {N} arguments, found {count}")));
        }
        for (i, slot) in found.iter_mut().enumerate().take(count) {
            *slot = self.positional.get(self.taken + i)?;
        }
        for argument in self.named.iter() {
            let (name, value) = argument?;
            let name = cx.text(*name)?;
            let word = name.word()?;
            match names.iter().position(|n| *n == word) {
                Some(i) => found[i] = Some(value),
                None => return Err(cx.budget.error(format_args!("expected no argument {}", name.quoted()?))),
            }
        }
        Ok(found)
    }
}

/// The string given, if one was.
pub(crate) fn string<'v>(value: Option<&'v Value>, budget: &Budget) -> Result<Option<&'v Text>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(value) => needed_string(Some(value), budget).map(Some),
    }
}

pub(crate) fn needed_string<'v>(value: Option<&'v Value>, budget: &Budget) -> Result<&'v Text> {
    match needed(value, budget)? {
        Value::Str(text) => Ok(text),
        other => Err(budget.error(format_args!("expected a string, found {}", other.kind()))),
    }
}

pub(crate) fn integer(value: Option<&Value>, default: i128, budget: &Budget) -> Result<i128> {
    value.map_or(Ok(default), |v| {
        v.int().ok_or_else(|| budget.error(format_args!("expected an integer, found {}", v.kind())))
    })
}

pub(crate) fn needed<'v>(value: Option<&'v Value>, budget: &Budget) -> Result<&'v Value> {
    value.ok_or_else(|| budget.error("expected another argument"))
}
