//! Functions, attributes and items.

use crate::arguments::{Given, integer, needed, needed_string};
use crate::error::{Error, ErrorKind, Result};
use crate::methods::{CHANGING, has_method};
use crate::paid::{Buf, Text};
use crate::value::{Context, List, Map, Shape, Value};

/// What a template may call without defining it.
const FUNCTIONS: [&str; 5] = ["range", "namespace", "dict", "raise_exception", "strftime_now"];

/// The function of this name.
pub(crate) fn named(name: &str) -> Option<&'static str> {
    FUNCTIONS.into_iter().find(|f| *f == name)
}

/// Calls `see` with every item: of a list, keys of a map, characters of a string.
pub(crate) fn iterate(over: &Value, cx: &Context<'_>, see: &mut dyn FnMut(Value) -> Result<()>) -> Result<()> {
    match over {
        Value::List(items) => items.iter_once().try_for_each(|v| see(v?.clone())),
        Value::Map(items) => items.iter().try_for_each(|entry| see(entry?.0.clone())),
        Value::Str(s) => s.chars()?.try_for_each(|c| see(Value::Str(s.part(c.at..c.end())?.marked(false)))),
        Value::Undefined => Ok(()),
        other => Err(cx.budget.error(format_args!("expected something with items, found {}", other.kind()))),
    }
}

pub(crate) fn items_of(value: &Value, cx: &Context<'_>) -> Result<List> {
    let mut items = List::new(&cx.budget)?;
    iterate(value, cx, &mut |v| items.push(v))?;
    Ok(items)
}

/// Calls one of [`FUNCTIONS`].
pub(crate) fn function(name: &str, given: Given<'_>, cx: &Context<'_>) -> Result<Value> {
    let budget = &cx.budget;
    match name {
        "range" => range(given, cx),
        "namespace" | "dict" => {
            let mut entries = Map::new(budget)?;
            let (first, more) = given.split_first()?;
            match first {
                None => {}
                Some(Value::Map(map)) => {
                    for entry in map.iter() {
                        let (key, value) = entry?;
                        entries.insert(key.clone(), value.clone())?;
                    }
                }
                Some(Value::List(pairs)) => {
                    for pair in pairs.iter() {
                        let pair = items_of(pair?, cx)?;
                        match (pair.get(0)?, pair.get(1)?, pair.len()) {
                            (Some(key), Some(value), 2) => entries.insert(key.clone(), value.clone())?,
                            _ => return Err(budget.error(format_args!("expected pairs as the argument of {name}"))),
                        }
                    }
                }
                _ => return Err(budget.error(format_args!("expected a map as the one argument of {name}"))),
            }
            if more.split_first()?.0.is_some() {
                return Err(budget.error(format_args!("expected a map as the one argument of {name}")));
            }
            for argument in given.named.iter() {
                let (key, value) = argument?;
                entries.insert(Value::Str(cx.text(*key)?), value.clone())?;
            }
            if name == "dict" { Ok(entries.finish()) } else { cx.space(entries) }
        }
        "strftime_now" => {
            let [format] = given.take(["format"], cx)?;
            let mut out = Buf::new(budget)?;
            cx.now.strftime(needed_string(format, budget)?, &mut out)?;
            Ok(Value::Str(out.finish()))
        }
        _ => {
            let [message] = given.take(["message"], cx)?;
            let message = needed(message, budget)?.printed(budget)?;
            let what = format_args!("the template refuses: {}", message.quoted()?).to_string();
            Err(Error::new(ErrorKind::Refused, budget.at.get(), what))
        }
    }
}

fn range(given: Given<'_>, cx: &Context<'_>) -> Result<Value> {
    let budget = &cx.budget;
    let [a, b, step] = given.take(["start", "stop", "step"], cx)?;
    let (first, step) = (integer(Some(needed(a, budget)?), 0, budget)?, integer(step, 1, budget)?);
    let (mut at, stop) = if b.is_some() { (first, integer(b, 0, budget)?) } else { (0, first) };
    if step == 0 {
        return Err(budget.error("expected a range with a step that is not zero"));
    }
    let mut items = List::new(budget)?;
    while if step > 0 { at < stop } else { at > stop } {
        items.push(Value::Int(at))?;
        at = at.saturating_add(step);
    }
    Ok(items.finish_as(Shape::Range))
}

/// `value.name`.
pub(crate) fn attribute(value: &Value, name: &Text, cx: &Context<'_>) -> Result<Value> {
    let method = |name: &Text| Ok(if has_method(value, name.word()?) { Value::Method } else { Value::Undefined });
    match value {
        // Python finds a method first, so that `x.items` is one whatever keys there are.
        Value::Map(map) => match method(name)? {
            Value::Undefined if CHANGING.contains(&name.word()?) => Ok(Value::Undefined),
            Value::Undefined => Ok(map.get_text(name)?.cloned().unwrap_or(Value::Undefined)),
            found => Ok(found),
        },
        Value::Space(space) => Ok(cx.space_get(*space, name)?.unwrap_or(Value::Undefined)),
        Value::Loop(l) => {
            let (len, at) = (l.items.len(), l.at);
            let neighbour = |i: Option<usize>| match i {
                Some(i) => Ok(l.items.get(i)?.cloned().unwrap_or(Value::Undefined)),
                None => Ok(Value::Undefined),
            };
            Ok(match name.word()? {
                "index" => Value::Int(at as i128 + 1),
                "index0" => Value::Int(at as i128),
                "revindex" => Value::Int((len - at) as i128),
                "revindex0" => Value::Int((len - at) as i128 - 1),
                "length" => Value::Int(len as i128),
                // Of loops that call themselves, which there are not.
                "depth" => Value::Int(1),
                "depth0" => Value::Int(0),
                "first" => Value::Bool(at == 0),
                "last" => Value::Bool(at + 1 == len),
                "previtem" => neighbour(at.checked_sub(1))?,
                "nextitem" => neighbour(at.checked_add(1))?,
                _ => {
                    let found = name.quoted()?;
                    return Err(cx.budget.error(format_args!("expected an attribute of a loop, found {found}")));
                }
            })
        }
        _ => method(name),
    }
}

/// `value[index]`.
pub(crate) fn item(value: &Value, index: &Value, cx: &Context<'_>) -> Result<Value> {
    let nth = |len: usize| {
        let i = index.int()?;
        usize::try_from(if i < 0 { i.checked_add(len as i128)? } else { i }).ok().filter(|i| *i < len)
    };
    Ok(match (value, index) {
        (Value::List(items), _) if index.int().is_some() && items.shape().has_indices() => match nth(items.len()) {
            Some(i) => items.get(i)?.cloned().unwrap_or(Value::Undefined),
            None => Value::Undefined,
        },
        (Value::Str(s), _) if index.int().is_some() => match nth(s.count()?) {
            Some(i) => match s.chars()?.nth(i) {
                Some(c) => Value::Str(s.part(c.at..c.end())?),
                None => Value::Undefined,
            },
            None => Value::Undefined,
        },
        (Value::Map(map), _) => match (map.get(index)?, index) {
            (Some(found), _) => found.clone(),
            (None, Value::Str(name)) => attribute(value, name, cx)?,
            (None, _) => Value::Undefined,
        },
        (_, Value::Str(name)) => attribute(value, name, cx)?,
        _ => Value::Undefined,
    })
}

/// An item's attribute by a path with dots, or the item itself.
pub(crate) fn reach(item: &Value, attr: Option<&Value>, cx: &Context<'_>) -> Result<Value> {
    let path = match attr {
        None | Some(Value::None) => return Ok(item.clone()),
        Some(Value::Int(_)) => return self::item(item, needed(attr, &cx.budget)?, cx),
        attr => needed_string(attr, &cx.budget)?,
    };
    let (mut value, mut start) = (item.clone(), 0);
    let dot = Text::given(".", false, &cx.budget)?;
    for end in path.matches(&dot)?.chain([path.len()]) {
        let name = path.part(start..end)?;
        let index = name.word()?.parse().map_or(Value::Str(name.clone()), Value::Int);
        value = self::item(&value, &index, cx)?;
        start = end + 1;
    }
    Ok(value)
}
