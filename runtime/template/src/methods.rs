//! Methods of strings, maps and loops: those of Python that chat templates use.
//!
//! What is missing is an error that names it.

use crate::arguments::{Given, integer, needed, needed_string, string};
use crate::error::{Error, Result};
use crate::operators::{escape, hashable};
use crate::paid::{Buf, Items, Text};
use crate::python::{is_line_end, is_space};
use crate::sequences;
use crate::value::{Context, List, Shape, Value};

const MAP_METHODS: [&str; 6] = ["get", "keys", "values", "items", "copy", "fromkeys"];
/// What would change a map. Jinja's sandbox hides it, and keys of these names behind it.
pub(crate) const CHANGING: [&str; 5] = ["pop", "update", "clear", "setdefault", "popitem"];
const STRING_METHODS: [&str; 33] = [
    "upper",
    "lower",
    "capitalize",
    "title",
    "swapcase",
    "strip",
    "lstrip",
    "rstrip",
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "replace",
    "split",
    "rsplit",
    "splitlines",
    "partition",
    "rpartition",
    "find",
    "rfind",
    "index",
    "rindex",
    "count",
    "join",
    "format",
    "isdigit",
    "isnumeric",
    "isdecimal",
    "isalpha",
    "isalnum",
    "isspace",
    "islower",
    "isupper",
];
const LIST_METHODS: [&str; 3] = ["index", "count", "copy"];

/// Whether a value has a method of this name, one that can be called here or not.
pub(crate) fn has_method(value: &Value, name: &str) -> bool {
    let known: &[&str] = match value {
        Value::Str(_) => &STRING_METHODS,
        Value::Map(_) => &MAP_METHODS,
        Value::List(_) => &LIST_METHODS,
        _ => &[],
    };
    known.contains(&name)
}

/// `value.name(given)`.
pub(crate) fn method(value: &Value, name: &Text, given: Given<'_>, cx: &Context<'_>) -> Result<Value> {
    let word = name.word()?;
    match value {
        Value::Str(s) => match string_method(s, word, given, cx)? {
            Some(value) => Ok(value),
            None => Err(no_method(value, name, cx)?),
        },
        Value::Map(map) => match word {
            "get" => {
                let [key, default] = given.take(["key", "default"], cx)?;
                hashable(needed(key, &cx.budget)?, &cx.budget)?;
                let found = map.get(needed(key, &cx.budget)?)?;
                Ok(found.or(default).cloned().unwrap_or(Value::None))
            }
            "copy" => {
                given.take([], cx)?;
                Ok(value.clone())
            }
            "keys" | "values" | "items" => {
                given.take([], cx)?;
                let mut out = List::new(&cx.budget)?;
                for entry in map.iter() {
                    let (key, value) = entry?.clone();
                    out.push(match word {
                        "keys" => key,
                        "values" => value,
                        _ => List::pair(key, value, &cx.budget)?,
                    })?;
                }
                Ok(out.finish_as(match word {
                    "keys" => Shape::Keys,
                    "values" => Shape::Values,
                    _ => Shape::Pairs,
                }))
            }
            _ => Err(no_method(value, name, cx)?),
        },
        Value::List(list) => match word {
            "copy" if list.shape() == Shape::List => {
                given.take([], cx)?;
                Ok(value.clone())
            }
            "index" | "count" if list.shape().has_indices() => {
                let [wanted] = given.take(["value"], cx)?;
                let (wanted, mut count) = (needed(wanted, &cx.budget)?, 0);
                for (i, item) in list.iter().enumerate() {
                    if item?.equals(wanted, &cx.budget)? {
                        if word == "index" {
                            return Ok(Value::Int(i as i128));
                        }
                        count += 1;
                    }
                }
                if word == "count" {
                    Ok(Value::Int(count))
                } else {
                    Err(cx.budget.error("expected an item that is there"))
                }
            }
            _ => Err(no_method(value, name, cx)?),
        },
        Value::Loop(at) if word == "cycle" && given.positional.len() > 0 => {
            Ok(given.positional.get(at.at % given.positional.len())?.cloned().unwrap_or(Value::Undefined))
        }
        _ => Err(no_method(value, name, cx)?),
    }
}

fn no_method(value: &Value, name: &Text, cx: &Context<'_>) -> Result<Error> {
    Ok(cx.budget.error(format_args!("expected a method of {}, found {}", value.kind(), name.quoted()?)))
}

/// A method of a string; `None` if it has none of this name.
pub(crate) fn string_method(s: &Text, name: &str, given: Given<'_>, cx: &Context<'_>) -> Result<Option<Value>> {
    let budget = &cx.budget;
    let text = |text: Text| Ok(Some(Value::Str(text)));
    Ok(Some(match name {
        "upper" | "lower" | "swapcase" | "capitalize" | "title" => {
            given.take([], cx)?;
            return text(match name {
                "upper" => recase(s, |_, _| Case::Upper)?,
                "swapcase" => recase(s, |_, c| if c.is_lowercase() { Case::Upper } else { Case::Lower })?,
                "capitalize" => recase(s, |before, _| if before.is_none() { Case::Title } else { Case::Lower })?,
                "title" => recase(s, |before, _| {
                    if before.is_some_and(|b| b.is_lowercase() || b.is_uppercase()) { Case::Lower } else { Case::Title }
                })?,
                _ => recase(s, |_, _| Case::Lower)?,
            });
        }
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = given.take(["chars"], cx)?;
            return text(s.stripped(name != "rstrip", name != "lstrip", string(chars, budget)?)?);
        }
        "startswith" | "endswith" => {
            let [affix] = given.take(["affix"], cx)?;
            let has = |affix: &Value| {
                let affix = needed_string(Some(affix), budget)?;
                if name == "startswith" { s.starts_with(affix) } else { s.ends_with(affix) }
            };
            let mut found = false;
            match needed(affix, budget)? {
                Value::List(several) => {
                    for affix in several.iter() {
                        found |= has(affix?)?;
                    }
                }
                affix => found = has(affix)?,
            }
            Value::Bool(found)
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = given.take(["affix"], cx)?;
            let affix = needed_string(affix, budget)?;
            return text(match name {
                "removeprefix" if s.starts_with(affix)? => s.part(affix.len()..s.len())?,
                "removesuffix" if s.ends_with(affix)? => s.part(0..s.len() - affix.len())?,
                _ => s.clone(),
            });
        }
        "replace" => {
            let [from, to, count] = given.take(["old", "new", "count"], cx)?;
            let (from, to) = (needed_string(from, budget)?, needed_string(to, budget)?);
            let count = usize::try_from(integer(count, -1, budget)?).unwrap_or(usize::MAX);
            let (mut out, mut done) = (Buf::new(budget)?, 0);
            for at in s.matches(from)?.take(count) {
                out.push_part(s, done..at)?;
                if s.is_markup() && !to.is_markup() {
                    escape(to, &mut out)?
                } else {
                    out.push_text(to)?
                }
                done = at + from.len();
            }
            out.push_part(s, done..s.len())?;
            return text(out.finish().marked(s.is_markup()));
        }
        "split" | "rsplit" => {
            let [separator, most] = given.take(["sep", "maxsplit"], cx)?;
            let most = usize::try_from(integer(most, -1, budget)?).unwrap_or(usize::MAX);
            match string(separator, budget)? {
                Some(by) if by.is_empty() => return Err(budget.error("expected a separator that is not empty")),
                Some(by) => split(s, by, most, name == "rsplit")?,
                None => split_at_space(s, most, name == "rsplit")?,
            }
        }
        "splitlines" => {
            let [keep] = given.take(["keepends"], cx)?;
            lines(s, keep.is_some_and(Value::truth))?
        }
        "partition" | "rpartition" => {
            let [by] = given.take(["sep"], cx)?;
            let by = needed_string(by, budget)?;
            if by.is_empty() {
                return Err(budget.error("expected a separator that is not empty"));
            }
            let at = if name == "partition" { s.matches(by)?.next() } else { s.matches_from_right(by)?.next() };
            let cuts = match at {
                Some(at) => [at, at + by.len()],
                None if name == "partition" => [s.len(), s.len()],
                None => [0, 0],
            };
            let mut parts = List::new(budget)?;
            for range in [0..cuts[0], cuts[0]..cuts[1], cuts[1]..s.len()] {
                parts.push(Value::Str(s.part(range)?))?;
            }
            parts.finish_as(Shape::Tuple)
        }
        "find" | "rfind" | "index" | "rindex" => {
            let [part] = given.take(["sub"], cx)?;
            let part = needed_string(part, budget)?;
            let at = if name.starts_with('r') { s.matches_from_right(part)?.next() } else { s.matches(part)?.next() };
            match at {
                Some(at) => Value::Int(s.part(0..at)?.count()? as i128),
                None if name.ends_with("index") => return Err(budget.error("expected a substring that is there")),
                None => Value::Int(-1),
            }
        }
        "count" => {
            let [part] = given.take(["sub"], cx)?;
            Value::Int(s.matches(needed_string(part, budget)?)?.count() as i128)
        }
        "join" => {
            let [over] = given.take(["iterable"], cx)?;
            return text(sequences::join(needed(over, budget)?, s, None, cx)?);
        }
        "format" => return text(format(s, given, cx)?),
        "isdigit" | "isnumeric" | "isdecimal" => all(s, char::is_numeric)?,
        "isalpha" => all(s, char::is_alphabetic)?,
        "isalnum" => all(s, char::is_alphanumeric)?,
        "isspace" => all(s, is_space)?,
        "isascii" => Value::Bool(s.chars()?.all(|c| c.c.is_ascii())),
        "islower" => Value::Bool(is_cased(s, char::is_lowercase, char::is_uppercase)?),
        "isupper" => Value::Bool(is_cased(s, char::is_uppercase, char::is_lowercase)?),
        _ => return Ok(None),
    }))
}

fn all(s: &Text, holds: fn(char) -> bool) -> Result<Value> {
    Ok(Value::Bool(!s.is_empty() && s.chars()?.all(|c| holds(c.c))))
}

/// Whether a string has letters of one case and none of the other.
pub(crate) fn is_cased(s: &Text, right: fn(char) -> bool, wrong: fn(char) -> bool) -> Result<bool> {
    let mut found = false;
    for c in s.chars()? {
        if wrong(c.c) {
            return Ok(false);
        }
        found |= right(c.c);
    }
    Ok(found)
}

/// How a character is to be written.
pub(crate) enum Case {
    Upper,
    Lower,
    /// As the first of a word: of several that upper case makes of one, the first.
    Title,
}

/// Every character in the case that `case` says from the one before (of the original) and itself.
pub(crate) fn recase(s: &Text, case: impl Fn(Option<char>, char) -> Case) -> Result<Text> {
    let (mut out, mut before) = (Buf::with_room(s.budget(), s.len())?, None);
    for c in s.chars()? {
        match case(before, c.c) {
            Case::Upper => c.c.to_uppercase().try_for_each(|u| out.push_char(u, c.typed))?,
            Case::Lower => c.c.to_lowercase().try_for_each(|l| out.push_char(l, c.typed))?,
            Case::Title => {
                let mut upper = c.c.to_uppercase();
                upper.next().map_or(Ok(()), |u| out.push_char(u, c.typed))?;
                upper.flat_map(char::to_lowercase).try_for_each(|l| out.push_char(l, c.typed))?;
            }
        }
        before = Some(c.c);
    }
    Ok(out.finish().marked(s.is_markup()))
}

/// Python's `split` and `rsplit` by a separator.
fn split(s: &Text, by: &Text, most: usize, from_right: bool) -> Result<Value> {
    let mut parts = List::new(s.budget())?;
    if from_right {
        let mut end = s.len();
        for at in s.matches_from_right(by)?.take(most) {
            parts.push(Value::Str(s.part(at + by.len()..end)?))?;
            end = at;
        }
        parts.push(Value::Str(s.part(0..end)?))?;
        parts.reverse()?;
    } else {
        let mut start = 0;
        for at in s.matches(by)?.take(most) {
            parts.push(Value::Str(s.part(start..at)?))?;
            start = at + by.len();
        }
        parts.push(Value::Str(s.part(start..s.len())?))?;
    }
    Ok(parts.finish())
}

/// Python's `split` and `rsplit` at white space.
fn split_at_space(s: &Text, most: usize, from_right: bool) -> Result<Value> {
    let (mut words, mut start) = (Items::new(s.budget())?, None);
    for c in s.chars()? {
        match (is_space(c.c), start) {
            (false, None) => start = Some(c.at),
            (true, Some(at)) => {
                words.add(at..c.at)?;
                start = None;
            }
            _ => {}
        }
    }
    start.map_or(Ok(()), |at| words.add(at..s.len()))?;
    // Words beyond `most` stay together, with the space around them but for the side from which the
    // others were split.
    let (len, together) = (words.len(), words.len().saturating_sub(most));
    let mut parts = List::new(s.budget())?;
    for (i, word) in words.iter().enumerate() {
        let word = word?.clone();
        let range = match (together, from_right) {
            (0 | 1, _) if most >= len => word,
            (_, false) if i < most => word,
            (_, false) if i == most => word.start..s.len(),
            (_, true) if i + most >= len => word,
            (_, true) if i + 1 == together => 0..word.end,
            _ => continue,
        };
        parts.push(Value::Str(s.part(range)?))?;
    }
    Ok(parts.finish())
}

/// Python's `splitlines`.
fn lines(s: &Text, keep_ends: bool) -> Result<Value> {
    let mut out = List::new(s.budget())?;
    let (mut start, mut after_return) = (0, None);
    for c in s.chars()? {
        // A line feed after a carriage return ends the same line.
        if let Some((from, to)) = after_return.take() {
            let end = if c.c == '\n' { c.end() } else { c.at };
            out.push(Value::Str(s.part(from..if keep_ends { end } else { to })?))?;
            start = end;
            if c.c == '\n' {
                continue;
            }
        }
        if c.c == '\r' {
            after_return = Some((start, c.at));
        } else if is_line_end(c.c) {
            out.push(Value::Str(s.part(start..if keep_ends { c.end() } else { c.at })?))?;
            start = c.end();
        }
    }
    match after_return {
        Some((from, to)) => out.push(Value::Str(s.part(from..if keep_ends { s.len() } else { to })?))?,
        None if start < s.len() => out.push(Value::Str(s.part(start..s.len())?))?,
        None => {}
    }
    Ok(out.finish())
}

/// Python's `str.format`, without format specifications: `{}`, `{0}`, `{name}`, and braces that are
/// doubled.
fn format(s: &Text, given: Given<'_>, cx: &Context<'_>) -> Result<Text> {
    let budget = &cx.budget;
    let unpaired = || budget.error("expected a format with braces in pairs");
    let (mut out, mut next) = (Buf::new(budget)?, 0);
    // The brace we are after, and where the text or field that is not written yet starts.
    let (mut brace, mut start) = (None, 0);
    for c in s.chars()? {
        match (brace, c.c) {
            (None, '{' | '}') => {
                out.push_part(s, start..c.at)?;
                (brace, start) = (Some(c.c), c.end());
            }
            (Some(first), again) if first == again && c.at == start => {
                out.push_part(s, c.at..c.end())?;
                (brace, start) = (None, c.end());
            }
            (Some('{'), '}') => {
                let field = s.part(start..c.at)?;
                let place = if field.is_empty() { Some(next) } else { field.word()?.parse().ok() };
                next += 1;
                let mut value = place.map_or(Ok(None), |place| given.positional.get(place))?;
                for argument in given.named.iter() {
                    let (name, named) = argument?;
                    if place.is_none() && cx.text(*name)?.same(&field)? {
                        value = Some(named);
                    }
                }
                let Some(value) = value else {
                    let field = field.quoted()?;
                    return Err(budget.error(format_args!("expected an argument of format for {field}")));
                };
                value.print(&mut out, false)?;
                (brace, start) = (None, c.end());
            }
            (Some('}'), _) => return Err(unpaired()),
            _ => {}
        }
    }
    if brace.is_some() {
        return Err(unpaired());
    }
    out.push_part(s, start..s.len())?;
    Ok(out.finish())
}
