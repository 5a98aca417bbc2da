//! Functions, filters, tests, methods and attributes: those of Jinja and Python that chat templates use.
//!
//! Each pays for what it reads (`Budget::work`) and writes (`Buf`, `Items`) as it goes. What is missing is an error that names it.

use std::cmp::Ordering;
use std::rc::Rc;

use super::json::Style;
use super::operators::{binary, compare, order, slice};
use super::text_of;
use super::value::{Budget, Buf, Items, Result, Text, Value};

/// What a template may call without defining it.
pub(super) const FUNCTIONS: [&str; 4] = ["range", "namespace", "dict", "raise_exception"];

/// Arguments of a call.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) positional: &'a [Value],
    pub(super) named: &'a [(&'a str, Value)],
}

impl<'a> Given<'a> {
    /// The arguments by these names, in this order; `None` for what was not given.
    fn take<const N: usize>(self, names: [&str; N], budget: &Budget) -> Result<[Option<&'a Value>; N]> {
        let mut found = [None; N];
        if self.positional.len() > N {
            return Err(budget.error(format_args!("expected at most {N} arguments, found {}", self.positional.len())));
        }
        for (slot, value) in found.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|n| n == name) {
                Some(i) => found[i] = Some(value),
                None => return Err(budget.error(format_args!("expected no argument {}", text_of(name)))),
            }
        }
        Ok(found)
    }
}

fn string<'v>(value: Option<&'v Value>, default: &'v str, budget: &Budget) -> Result<&'v str> {
    match value {
        None => Ok(default),
        Some(Value::Str(s)) => Ok(s),
        Some(other) => Err(budget.error(format_args!("expected a string, found {}", other.kind()))),
    }
}

fn integer(value: Option<&Value>, default: i128, budget: &Budget) -> Result<i128> {
    value.map_or(Ok(default), |v| {
        v.int().ok_or_else(|| budget.error(format_args!("expected an integer, found {}", v.kind())))
    })
}

fn needed<'v>(value: Option<&'v Value>, budget: &Budget) -> Result<&'v Value> {
    value.ok_or_else(|| budget.error("expected another argument"))
}

/// Calls `see` with every item: of a list, keys of a map, characters of a string.
pub(super) fn iterate(over: &Value, budget: &Rc<Budget>, see: &mut dyn FnMut(Value) -> Result<()>) -> Result<()> {
    match over {
        Value::List(items) => items.as_slice().iter().try_for_each(|v| see(v.clone())),
        Value::Map(items) => items.as_slice().iter().try_for_each(|(k, _)| see(k.clone())),
        Value::Str(s) => s.chars().try_for_each(|c| see(budget.text(c.encode_utf8(&mut [0; 4]))?)),
        Value::Undefined => Ok(()),
        other => Err(budget.error(format_args!("expected something with items, found {}", other.kind()))),
    }
}

fn items_of(value: &Value, budget: &Rc<Budget>) -> Result<Items> {
    let mut items = Items::new(budget)?;
    iterate(value, budget, &mut |v| items.push(v))?;
    Ok(items)
}

fn pair(a: Value, b: Value, budget: &Rc<Budget>) -> Result<Value> {
    let mut items = Items::new(budget)?;
    items.push(a)?;
    items.push(b)?;
    Ok(items.finish())
}

fn printed(value: &Value, budget: &Rc<Budget>) -> Result<Value> {
    if let Value::Str(_) = value {
        return Ok(value.clone());
    }
    let mut out = Buf::new(budget)?;
    value.print(&mut out, false)?;
    Ok(out.finish())
}

/// Calls one of [`FUNCTIONS`].
pub(super) fn function(name: &str, given: Given<'_>, budget: &Rc<Budget>) -> Result<Value> {
    match name {
        "range" => {
            let [a, b, step] = given.take(["start", "stop", "step"], budget)?;
            let (first, step) = (integer(a, 0, budget)?, integer(step, 1, budget)?);
            let (mut at, stop) = if b.is_some() { (first, integer(b, 0, budget)?) } else { (0, first) };
            if step == 0 {
                return Err(budget.error("expected a range with a step that is not zero"));
            }
            let mut items = Items::new(budget)?;
            while if step > 0 { at < stop } else { at > stop } {
                items.push(Value::Int(at))?;
                at = at.saturating_add(step);
            }
            Ok(items.finish())
        }
        "namespace" | "dict" => {
            let mut entries = Items::new(budget)?;
            match given.positional {
                [] => {}
                [Value::Map(map)] => {
                    map.as_slice().iter().try_for_each(|(k, v)| entries.insert(k.clone(), v.clone()))?
                }
                _ => return Err(budget.error(format_args!("expected a map as the one argument of {name}"))),
            }
            given.named.iter().try_for_each(|(k, v)| entries.insert(budget.text(k)?, v.clone()))?;
            Ok(if name == "dict" { entries.finish() } else { Value::space(entries) })
        }
        _ => {
            let [message] = given.take(["message"], budget)?;
            Err(budget.error(format_args!("the template refuses: {}", text_of(string(message, "", budget)?))))
        }
    }
}

/// `value.name`.
pub(super) fn attribute(value: &Value, name: &str, budget: &Rc<Budget>) -> Result<Value> {
    Ok(match value {
        Value::Map(map) => map.get_str(name)?.cloned().unwrap_or(Value::Undefined),
        Value::Space(space) => space.get(name)?.unwrap_or(Value::Undefined),
        Value::Loop(l) => {
            let (items, at) = (l.items.as_slice(), l.at);
            let neighbour = |i: Option<usize>| i.and_then(|i| items.get(i)).cloned().unwrap_or(Value::Undefined);
            match name {
                "index" => Value::Int(at as i128 + 1),
                "index0" => Value::Int(at as i128),
                "revindex" => Value::Int((items.len() - at) as i128),
                "revindex0" => Value::Int((items.len() - at) as i128 - 1),
                "length" => Value::Int(items.len() as i128),
                "first" => Value::Bool(at == 0),
                "last" => Value::Bool(at + 1 == items.len()),
                "previtem" => neighbour(at.checked_sub(1)),
                "nextitem" => neighbour(at.checked_add(1)),
                _ => return Err(budget.error(format_args!("expected an attribute of a loop, found {}", text_of(name)))),
            }
        }
        _ => Value::Undefined,
    })
}

/// `value[index]`.
pub(super) fn item(value: &Value, index: &Value, budget: &Rc<Budget>) -> Result<Value> {
    let nth = |len: usize| {
        let i = index.int()?;
        usize::try_from(if i < 0 { i.checked_add(len as i128)? } else { i }).ok().filter(|i| *i < len)
    };
    Ok(match (value, index) {
        (Value::List(items), _) => {
            nth(items.as_slice().len()).map_or(Value::Undefined, |i| items.as_slice()[i].clone())
        }
        (Value::Str(s), _) if index.int().is_some() => {
            budget.work(s.len())?;
            match nth(s.chars().count()).and_then(|i| s.chars().nth(i)) {
                Some(c) => budget.text(c.encode_utf8(&mut [0; 4]))?,
                None => Value::Undefined,
            }
        }
        (Value::Map(map), _) => map.get(index)?.cloned().unwrap_or(Value::Undefined),
        (_, Value::Str(name)) => attribute(value, name, budget)?,
        _ => Value::Undefined,
    })
}

/// `value is name`.
pub(super) fn test(name: &str, value: &Value, given: &[Value], budget: &Rc<Budget>) -> Result<bool> {
    let other = || {
        given.first().ok_or_else(|| budget.error(format_args!("expected an argument of the test {}", text_of(name))))
    };
    Ok(match name {
        "defined" => !matches!(value, Value::Undefined),
        "undefined" => matches!(value, Value::Undefined),
        "none" => matches!(value, Value::None),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Map(_)),
        "iterable" | "sequence" => matches!(value, Value::List(_) | Value::Map(_) | Value::Str(_) | Value::Undefined),
        "number" => matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "callable" => matches!(value, Value::Macro(..) | Value::Function(_)),
        "odd" => integer(Some(value), 0, budget)? % 2 != 0,
        "even" => integer(Some(value), 0, budget)? % 2 == 0,
        "divisibleby" => binary("%", value, other()?, budget)?.int() == Some(0),
        "eq" | "equalto" | "==" | "sameas" => value.equals(other()?, budget)?,
        "ne" | "!=" => !value.equals(other()?, budget)?,
        "lt" | "lessthan" | "<" => compare("<", value, other()?, budget)?,
        "le" | "<=" => compare("<=", value, other()?, budget)?,
        "gt" | "greaterthan" | ">" => compare(">", value, other()?, budget)?,
        "ge" | ">=" => compare(">=", value, other()?, budget)?,
        "in" => compare("in", value, other()?, budget)?,
        "lower" => string(Some(value), "", budget).map(|s| is_cased(s, char::is_uppercase))?,
        "upper" => string(Some(value), "", budget).map(|s| is_cased(s, char::is_lowercase))?,
        _ => return Err(budget.error(format_args!("expected a test, found {}", text_of(name)))),
    })
}

/// Whether a string has letters and none of the wrong case.
fn is_cased(s: &str, wrong: fn(char) -> bool) -> bool {
    s.chars().any(char::is_alphabetic) && !s.chars().any(wrong)
}

/// `value | name(given)`.
pub(super) fn filter(name: &str, value: &Value, given: Given<'_>, budget: &Rc<Budget>) -> Result<Value> {
    match name {
        "default" | "d" => {
            let [default, falsy] = given.take(["default_value", "boolean"], budget)?;
            let missing = matches!(value, Value::Undefined) || falsy.is_some_and(Value::truth) && !value.truth();
            if !missing {
                return Ok(value.clone());
            }
            default.map_or_else(|| budget.text(""), |d| Ok(d.clone()))
        }
        "trim" => method(&printed(value, budget)?, "strip", given, budget),
        "upper" | "lower" | "capitalize" | "replace" => method(&printed(value, budget)?, name, given, budget),
        "string" | "safe" => printed(value, budget),
        // Unlike the method, this leaves what follows a digit or an apostrophe alone.
        "title" => {
            let text = printed(value, budget)?;
            let starts = |c: char| c.is_whitespace() || matches!(c, '-' | '(' | '{' | '[' | '<');
            recase(string(Some(&text), "", budget)?, starts, budget)
        }
        "escape" | "e" => {
            let (text, mut out) = (printed(value, budget)?, Buf::new(budget)?);
            for c in string(Some(&text), "", budget)?.chars() {
                match c {
                    '&' => out.push("&amp;")?,
                    '<' => out.push("&lt;")?,
                    '>' => out.push("&gt;")?,
                    '"' => out.push("&#34;")?,
                    '\'' => out.push("&#39;")?,
                    c => out.push_char(c)?,
                }
            }
            Ok(out.finish())
        }
        "tojson" => {
            let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
            let [ascii, indent, separators, sort_keys] = given.take(names, budget)?;
            let indent = match indent {
                None | Some(Value::None) => None,
                indent => Some(integer(indent, 0, budget)?.clamp(0, 16) as usize),
            };
            let mut style = Style {
                indent,
                item_separator: if indent.is_some() { "," } else { ", " },
                key_separator: ": ",
                sort_keys: sort_keys.is_some_and(Value::truth),
                ascii: ascii.is_some_and(Value::truth),
            };
            if let Some(Value::List(pair)) = separators
                && let [Value::Str(item), Value::Str(key)] = pair.as_slice()
            {
                (style.item_separator, style.key_separator) = (item, key);
            }
            let mut out = Buf::new(budget)?;
            style.write(value, 0, &mut out)?;
            Ok(out.finish())
        }
        "length" | "count" => Ok(Value::Int(match value {
            Value::Str(s) => {
                budget.work(s.len())?;
                s.chars().count() as i128
            }
            Value::List(items) => items.as_slice().len() as i128,
            Value::Map(items) => items.as_slice().len() as i128,
            Value::Undefined => 0,
            other => return Err(budget.error(format_args!("expected something with a length, found {}", other.kind()))),
        })),
        "int" => {
            let [default] = given.take(["default"], budget)?;
            Ok(Value::Int(match value {
                Value::Float(f) => *f as i128,
                Value::Str(s) => match (s.trim().parse(), s.trim().parse::<f64>()) {
                    (Ok(i), _) => i,
                    (_, Ok(f)) if f.is_finite() => f as i128,
                    _ => integer(default, 0, budget)?,
                },
                other => other.int().map_or_else(|| integer(default, 0, budget), Ok)?,
            }))
        }
        "float" => {
            let parsed = if let Value::Str(s) = value { s.trim().parse().ok() } else { value.float() };
            Ok(Value::Float(parsed.unwrap_or(0.0)))
        }
        "abs" => {
            let negative = compare("<", value, &Value::Int(0), budget)?;
            if negative { binary("-", &Value::Int(0), value, budget) } else { Ok(value.clone()) }
        }
        "round" => {
            let [precision] = given.take(["precision"], budget)?;
            let scale = 10f64.powi(integer(precision, 0, budget)?.clamp(-300, 300) as i32);
            let number = value.float().ok_or_else(|| budget.error("expected a number to round"))?;
            Ok(Value::Float((number * scale).round_ties_even() / scale))
        }
        "indent" => {
            let [width, first, blank] = given.take(["width", "first", "blank"], budget)?;
            let width = integer(width, 4, budget)?.clamp(0, 1 << 20) as usize;
            let (first, blank) = (first.is_some_and(Value::truth), blank.is_some_and(Value::truth));
            let mut out = Buf::new(budget)?;
            for (i, line) in string(Some(value), "", budget)?.split('\n').enumerate() {
                out.push(if i == 0 { "" } else { "\n" })?;
                if if i == 0 { first } else { blank || !line.is_empty() } {
                    (0..width).try_for_each(|_| out.push(" "))?;
                }
                out.push(line)?;
            }
            Ok(out.finish())
        }
        "items" => method(value, "items", given, budget),
        "attr" => {
            attribute(value, string(Some(needed(given.take(["name"], budget)?[0], budget)?), "", budget)?, budget)
        }
        _ => sequence(name, value, given, budget),
    }
}

/// Filters of sequences.
fn sequence(name: &str, value: &Value, given: Given<'_>, budget: &Rc<Budget>) -> Result<Value> {
    match name {
        // Nothing in, nothing out, even where that is no sequence.
        "map" | "select" | "reject" | "selectattr" | "rejectattr" if !value.truth() => {
            Ok(Items::<Value>::new(budget)?.finish())
        }
        "list" => Ok(items_of(value, budget)?.finish()),
        "first" | "last" => {
            let items = items_of(value, budget)?;
            let end = if name == "first" { items.as_slice().first() } else { items.as_slice().last() };
            Ok(end.cloned().unwrap_or(Value::Undefined))
        }
        "reverse" => {
            if let Value::Str(_) = value {
                return slice(value, [None, None, Some(-1)], budget);
            }
            let mut items = items_of(value, budget)?;
            items.reverse();
            Ok(items.finish())
        }
        "join" => {
            let [separator, attr] = given.take(["d", "attribute"], budget)?;
            let separator = string(separator, "", budget)?;
            let (mut out, mut first) = (Buf::new(budget)?, true);
            iterate(value, budget, &mut |item| {
                out.push(if std::mem::take(&mut first) { "" } else { separator })?;
                reach(&item, attr, budget)?.print(&mut out, false)
            })?;
            Ok(out.finish())
        }
        "map" => {
            let mut out = Items::new(budget)?;
            if let [Value::Str(other), rest @ ..] = given.positional {
                let rest = Given { positional: rest, named: given.named };
                iterate(value, budget, &mut |item| out.push(filter(other, &item, rest, budget)?))?;
            } else {
                let [attr, default] = given.take(["attribute", "default"], budget)?;
                iterate(value, budget, &mut |item| {
                    let found = reach(&item, attr, budget)?;
                    out.push(match (found, default) {
                        (Value::Undefined, Some(default)) => default.clone(),
                        (found, _) => found,
                    })
                })?;
            }
            Ok(out.finish())
        }
        "select" | "reject" | "selectattr" | "rejectattr" => {
            let by_attr = name.ends_with("attr");
            let (attr, rest) = match given.positional {
                [attr, rest @ ..] if by_attr => (Some(attr), rest),
                [] if by_attr => return Err(budget.error(format_args!("expected an attribute for {name}"))),
                rest => (None, rest),
            };
            let mut out = Items::new(budget)?;
            iterate(value, budget, &mut |item| {
                let tested = reach(&item, attr, budget)?;
                let passes = match rest {
                    [] => tested.truth(),
                    [name, args @ ..] => test(string(Some(name), "", budget)?, &tested, args, budget)?,
                };
                if passes == name.starts_with("select") { out.push(item) } else { Ok(()) }
            })?;
            Ok(out.finish())
        }
        "sort" => {
            let [reverse, case, attr] = given.take(["reverse", "case_sensitive", "attribute"], budget)?;
            let (reverse, fold) = (reverse.is_some_and(Value::truth), !case.is_some_and(Value::truth));
            let mut items = items_of(value, budget)?;
            items.sort(|a, b| {
                let order = order(&reach(a, attr, budget)?, &reach(b, attr, budget)?, fold, budget)?;
                Ok(order == Some(if reverse { Ordering::Greater } else { Ordering::Less }))
            })?;
            Ok(items.finish())
        }
        "dictsort" => {
            let mut items = items_of(&method(value, "items", Given { positional: &[], named: &[] }, budget)?, budget)?;
            items.sort(|a, b| Ok(order(a, b, true, budget)? == Some(Ordering::Less)))?;
            Ok(items.finish())
        }
        "unique" => {
            let mut out = Items::<Value>::new(budget)?;
            iterate(value, budget, &mut |item| {
                for seen in out.as_slice() {
                    if seen.equals(&item, budget)? {
                        return Ok(());
                    }
                }
                out.push(item)
            })?;
            Ok(out.finish())
        }
        "min" | "max" => {
            let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let mut best = None;
            iterate(value, budget, &mut |item| {
                let better = match &best {
                    None => true,
                    Some(best) => order(&item, best, true, budget)? == Some(wanted),
                };
                if better {
                    best = Some(item);
                }
                Ok(())
            })?;
            Ok(best.unwrap_or(Value::Undefined))
        }
        "sum" => {
            let [attr, start] = given.take(["attribute", "start"], budget)?;
            let mut sum = start.cloned().unwrap_or(Value::Int(0));
            iterate(value, budget, &mut |item| {
                sum = binary("+", &sum, &reach(&item, attr, budget)?, budget)?;
                Ok(())
            })?;
            Ok(sum)
        }
        _ => Err(budget.error(format_args!("expected a filter, found {}", text_of(name)))),
    }
}

/// An item's attribute by a path with dots, or the item itself.
fn reach(item: &Value, attr: Option<&Value>, budget: &Rc<Budget>) -> Result<Value> {
    let path = match attr {
        None | Some(Value::None) => return Ok(item.clone()),
        attr => string(attr, "", budget)?,
    };
    let mut value = item.clone();
    for name in path.split('.') {
        value = match name.parse() {
            Ok(i) => self::item(&value, &Value::Int(i), budget)?,
            Err(_) => attribute(&value, name, budget)?,
        };
    }
    Ok(value)
}

/// `value.name(given)`.
pub(super) fn method(value: &Value, name: &str, given: Given<'_>, budget: &Rc<Budget>) -> Result<Value> {
    match value {
        Value::Str(s) => string_method(s, value, name, given, budget),
        Value::Map(map) => match name {
            "get" => {
                let [key, default] = given.take(["key", "default"], budget)?;
                let found = map.get(needed(key, budget)?)?;
                Ok(found.or(default).cloned().unwrap_or(Value::None))
            }
            "keys" | "values" | "items" => {
                given.take([], budget)?;
                let mut out = Items::new(budget)?;
                for (key, value) in map.as_slice() {
                    let key = key.clone();
                    out.push(match name {
                        "keys" => key,
                        "values" => value.clone(),
                        _ => pair(key, value.clone(), budget)?,
                    })?;
                }
                Ok(out.finish())
            }
            _ => Err(no_method(value, name, budget)),
        },
        Value::Loop(at) if name == "cycle" && !given.positional.is_empty() => {
            Ok(given.positional[at.at % given.positional.len()].clone())
        }
        _ => Err(no_method(value, name, budget)),
    }
}

fn no_method(value: &Value, name: &str, budget: &Budget) -> super::TemplateError {
    budget.error(format_args!("expected a method of {}, found {}", value.kind(), text_of(name)))
}

fn string_method(s: &Text, value: &Value, name: &str, given: Given<'_>, budget: &Rc<Budget>) -> Result<Value> {
    budget.work(s.len())?;
    let all = |pred: fn(char) -> bool| Ok(Value::Bool(!s.is_empty() && s.chars().all(pred)));
    match name {
        "upper" | "lower" => {
            given.take([], budget)?;
            let mut out = Buf::with_capacity(budget, s.len())?;
            for c in s.chars() {
                if name == "upper" {
                    c.to_uppercase().try_for_each(|c| out.push_char(c))?;
                } else {
                    c.to_lowercase().try_for_each(|c| out.push_char(c))?;
                }
            }
            Ok(out.finish())
        }
        "capitalize" => recase(s, |_| false, budget),
        "title" => recase(s, |c| !c.is_alphabetic(), budget),
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = given.take(["chars"], budget)?;
            let chars = match chars {
                None | Some(Value::None) => None,
                chars => Some(string(chars, "", budget)?),
            };
            let drop = |c: char| chars.map_or(c.is_whitespace(), |set| set.contains(c));
            budget.work(s.len().saturating_mul(chars.map_or(0, str::len)))?;
            let left = if name == "rstrip" { s } else { s.trim_start_matches(drop) };
            budget.text(if name == "lstrip" { left } else { left.trim_end_matches(drop) })
        }
        "startswith" | "endswith" => {
            let [affix] = given.take(["affix"], budget)?;
            let has = |affix: &Value| {
                let affix = string(Some(affix), "", budget)?;
                Ok(if name == "startswith" { s.starts_with(affix) } else { s.ends_with(affix) })
            };
            let Value::List(several) = needed(affix, budget)? else {
                return has(needed(affix, budget)?).map(Value::Bool);
            };
            for affix in several.as_slice() {
                budget.work(s.len())?;
                if has(affix)? {
                    return Ok(Value::Bool(true));
                }
            }
            Ok(Value::Bool(false))
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = given.take(["affix"], budget)?;
            let affix = string(Some(needed(affix, budget)?), "", budget)?;
            let rest = if name == "removeprefix" { s.strip_prefix(affix) } else { s.strip_suffix(affix) };
            rest.map_or(Ok(value.clone()), |rest| budget.text(rest))
        }
        "replace" => {
            let [from, to, count] = given.take(["old", "new", "count"], budget)?;
            let (from, to) =
                (string(Some(needed(from, budget)?), "", budget)?, string(Some(needed(to, budget)?), "", budget)?);
            let count = usize::try_from(integer(count, -1, budget)?).unwrap_or(usize::MAX);
            let (mut out, mut done) = (Buf::new(budget)?, 0);
            for (at, found) in s.match_indices(from).take(count) {
                out.push(&s[done..at])?;
                out.push(to)?;
                done = at + found.len();
            }
            out.push(&s[done..])?;
            Ok(out.finish())
        }
        "split" | "rsplit" => {
            let [separator, most] = given.take(["sep", "maxsplit"], budget)?;
            let most = usize::try_from(integer(most, -1, budget)?).unwrap_or(usize::MAX);
            let separator = match separator {
                None | Some(Value::None) => None,
                separator => Some(string(separator, "", budget)?),
            };
            if separator == Some("") {
                return Err(budget.error("expected a separator that is not empty"));
            }
            split(s, separator, most, name == "rsplit", budget)
        }
        "splitlines" => {
            given.take([], budget)?;
            let mut out = Items::new(budget)?;
            s.lines().try_for_each(|line| out.push(budget.text(line)?))?;
            Ok(out.finish())
        }
        "find" | "rfind" | "index" => {
            let [part] = given.take(["sub"], budget)?;
            let part = string(Some(needed(part, budget)?), "", budget)?;
            match if name == "rfind" { s.rfind(part) } else { s.find(part) } {
                Some(at) => Ok(Value::Int(s[..at].chars().count() as i128)),
                None if name == "index" => Err(budget.error("expected a substring that is there")),
                None => Ok(Value::Int(-1)),
            }
        }
        "count" => {
            let [part] = given.take(["sub"], budget)?;
            Ok(Value::Int(s.matches(string(Some(needed(part, budget)?), "", budget)?).count() as i128))
        }
        "join" => {
            let [over] = given.take(["iterable"], budget)?;
            let separator = [value.clone()];
            sequence("join", needed(over, budget)?, Given { positional: &separator, named: &[] }, budget)
        }
        "format" => format(s, given, budget),
        "isdigit" | "isnumeric" | "isdecimal" => all(char::is_numeric),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isspace" => all(char::is_whitespace),
        "isascii" => Ok(Value::Bool(s.is_ascii())),
        "islower" => Ok(Value::Bool(is_cased(s, char::is_uppercase))),
        "isupper" => Ok(Value::Bool(is_cased(s, char::is_lowercase))),
        _ => Err(no_method(value, name, budget)),
    }
}

/// Upper case at the start and after what `starts` a word, lower case elsewhere.
fn recase(s: &str, starts: impl Fn(char) -> bool, budget: &Rc<Budget>) -> Result<Value> {
    let (mut out, mut first) = (Buf::with_capacity(budget, s.len())?, true);
    for c in s.chars() {
        if first {
            c.to_uppercase().try_for_each(|c| out.push_char(c))?;
        } else {
            c.to_lowercase().try_for_each(|c| out.push_char(c))?;
        }
        first = starts(c);
    }
    Ok(out.finish())
}

/// Python's `split` and `rsplit`, by a separator or by white space.
fn split(s: &str, separator: Option<&str>, most: usize, from_right: bool, budget: &Rc<Budget>) -> Result<Value> {
    let mut out = Items::new(budget)?;
    let mut rest = Some(s);
    while let Some(text) = rest {
        let text = match (separator, from_right) {
            (Some(_), _) => text,
            (None, false) => text.trim_start(),
            (None, true) => text.trim_end(),
        };
        if separator.is_none() && text.is_empty() {
            break;
        }
        let last = out.as_slice().len() >= most;
        let cut = match (separator, from_right) {
            _ if last => None,
            (Some(by), false) => text.split_once(by),
            (Some(by), true) => text.rsplit_once(by),
            (None, false) => text.split_once(char::is_whitespace),
            (None, true) => text.rsplit_once(char::is_whitespace),
        };
        let (part, left) = match (cut, from_right) {
            (Some((part, left)), false) | (Some((left, part)), true) => (part, Some(left)),
            (None, _) => (text, None),
        };
        out.push(budget.text(part)?)?;
        rest = left;
    }
    if from_right {
        out.reverse();
    }
    Ok(out.finish())
}

/// Python's `str.format`, without format specifications: `{}`, `{0}`, `{name}`, and braces that are doubled.
fn format(s: &str, given: Given<'_>, budget: &Rc<Budget>) -> Result<Value> {
    let (mut out, mut rest, mut next) = (Buf::new(budget)?, s, 0);
    while let Some(at) = rest.find(['{', '}']) {
        out.push(&rest[..at])?;
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            out.push(brace)?;
            rest = after;
            continue;
        }
        let Some((field, after)) = rest.split_once('}').filter(|_| brace == "{") else {
            return Err(budget.error("expected a format with braces in pairs"));
        };
        let place = if field.is_empty() { Some(next) } else { field.parse().ok() };
        next += 1;
        let value = match place {
            Some(place) => given.positional.get(place),
            None => given.named.iter().find(|(n, _)| *n == field).map(|(_, v)| v),
        };
        let missing = || budget.error(format_args!("expected an argument of format for {}", text_of(field)));
        value.ok_or_else(missing)?.print(&mut out, false)?;
        rest = after;
    }
    out.push(rest)?;
    Ok(out.finish())
}
