//! Filters of single values: what stands after `|`. Those of sequences are in `sequences`.

use crate::arguments::{Given, integer, needed, needed_string, string};
use crate::error::Result;
use crate::functions::{attribute, items_of, iterate, reach};
use crate::json::Style;
use crate::methods::{self, Case, recase, string_method};
use crate::operators::{binary, compare, escape};
use crate::paid::{Buf, Text};
use crate::python::is_space;
use crate::sequences::sequence;
use crate::value::{Context, List, Shape, Value};

/// The most blanks that a level of `indent` may have.
const MAX_INDENT: i128 = 1 << 20;

/// `value | name(given)`.
pub(crate) fn filter(name: &Text, value: &Value, given: Given<'_>, cx: &Context<'_>) -> Result<Value> {
    let budget = &cx.budget;
    let word = name.word()?;
    let method = |text: &Text, method: &str| Ok(string_method(text, method, given, cx)?.unwrap_or(Value::Undefined));
    match word {
        "default" | "d" => {
            let [default, falsy] = given.take(["default_value", "boolean"], cx)?;
            let missing = matches!(value, Value::Undefined) || falsy.is_some_and(Value::truth) && !value.truth();
            match (missing, default) {
                (false, _) => Ok(value.clone()),
                (true, Some(default)) => Ok(default.clone()),
                (true, None) => Ok(Value::Str(Text::empty(budget)?)),
            }
        }
        "trim" => method(&value.printed(budget)?, "strip"),
        "upper" | "lower" | "capitalize" => method(&value.printed(budget)?, word),
        "replace" => method(&value.printed(budget)?.marked(false), word),
        "string" => Ok(Value::Str(value.printed(budget)?)),
        "safe" => Ok(Value::Str(value.printed(budget)?.marked(true))),
        // Unlike the method, this leaves what follows a digit or an apostrophe alone.
        "title" => {
            let starts = |c: char| is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
            let text = value.printed(budget)?.marked(false);
            recase(&text, |before, _| if before.is_none_or(starts) { Case::Title } else { Case::Lower }).map(Value::Str)
        }
        "escape" | "e" | "forceescape" => {
            let text = value.printed(budget)?;
            if text.is_markup() && word != "forceescape" {
                return Ok(Value::Str(text));
            }
            let mut out = Buf::new(budget)?;
            escape(&text, &mut out)?;
            Ok(Value::Str(out.finish().marked(true)))
        }
        "tojson" => tojson(value, given, cx),
        "length" | "count" => Ok(Value::Int(match value {
            Value::Str(s) => s.count()? as i128,
            Value::List(items) if items.shape().has_length() => items.len() as i128,
            Value::Map(items) => items.len() as i128,
            Value::Undefined => 0,
            other => return Err(budget.error(format_args!("expected something with a length, found {}", other.kind()))),
        })),
        "int" => {
            let [default] = given.take(["default"], cx)?;
            let number = match value {
                Value::Undefined => return Err(budget.error("expected a value, found an undefined one")),
                Value::Float(f) => f.is_finite().then_some(*f as i128),
                Value::Str(s) => {
                    let word = digits(s)?;
                    let float = || word.parse::<f64>().ok().filter(|f| f.is_finite()).map(|f| f as i128);
                    word.parse().ok().or_else(float)
                }
                other => other.int(),
            };
            Ok(Value::Int(number.map_or_else(|| integer(default, 0, budget), Ok)?))
        }
        "float" => {
            let [default] = given.take(["default"], cx)?;
            let number = match value {
                Value::Undefined => return Err(budget.error("expected a value, found an undefined one")),
                Value::Str(s) => digits(s)?.parse().ok(),
                other => other.float(),
            };
            Ok(Value::Float(number.or(default.and_then(Value::float)).unwrap_or(0.0)))
        }
        "abs" => {
            let negative = compare("<", value, &Value::Int(0), budget)?;
            binary(if negative { "-" } else { "+" }, &Value::Int(0), value, budget)
        }
        "round" => {
            let [precision] = given.take(["precision"], cx)?;
            let precision = integer(precision, 0, budget)?.clamp(-300, 300);
            match (value.int(), value.float()) {
                (Some(i), _) if precision >= 0 => Ok(Value::Int(i)),
                // Formatting rounds exactly, and ties to even.
                (None, Some(f)) if precision >= 0 => {
                    Ok(Value::Float(format!("{f:.*}", precision as usize).parse().unwrap_or(f)))
                }
                (_, Some(f)) => {
                    let scale = 10f64.powi(-precision as i32);
                    let rounded = (f / scale).round_ties_even() * scale;
                    Ok(if value.int().is_some() { Value::Int(rounded as i128) } else { Value::Float(rounded) })
                }
                _ => Err(budget.error("expected a number to round")),
            }
        }
        "indent" => indent(value, given, cx),
        "items" => match value {
            Value::Undefined => Ok(List::new(budget)?.finish_as(Shape::Generator)),
            _ => Ok(items_of(&methods::method(value, name, given, cx)?, cx)?.finish_as(Shape::Generator)),
        },
        "attr" => {
            let [name] = given.take(["name"], cx)?;
            match value {
                // Attributes alone, not the keys of a map.
                Value::Map(_) => Ok(Value::Undefined),
                _ => attribute(value, needed_string(name, budget)?, cx),
            }
        }
        "map" if value.truth() => map(value, given, cx),
        _ => sequence(name, value, given, cx),
    }
}

/// A filter or an attribute of every item.
fn map(value: &Value, given: Given<'_>, cx: &Context<'_>) -> Result<Value> {
    let mut out = List::new(&cx.budget)?;
    let (first, rest) = given.split_first()?;
    if let Some(Value::Str(name)) = first {
        iterate(value, cx, &mut |item| out.push(filter(name, &item, rest, cx)?))?;
        return Ok(out.finish_as(Shape::Generator));
    }
    let [attr, default] = given.take(["attribute", "default"], cx)?;
    iterate(value, cx, &mut |item| {
        let found = reach(&item, attr, cx)?;
        out.push(match (found, default) {
            (Value::Undefined, Some(default)) => default.clone(),
            (found, _) => found,
        })
    })?;
    Ok(out.finish_as(Shape::Generator))
}

/// What Python reads a number from: without white space around it, and underscores between digits.
fn digits(text: &Text) -> Result<String> {
    let text = text.stripped(true, true, None)?;
    let word = text.word()?;
    let between =
        |at: usize| at > 0 && [at - 1, at + 1].iter().all(|i| word.as_bytes().get(*i).is_some_and(u8::is_ascii_digit));
    let misplaced = word.match_indices('_').any(|(at, _)| !between(at));
    Ok(if misplaced { String::new() } else { word.replace('_', "") })
}

fn tojson(value: &Value, given: Given<'_>, cx: &Context<'_>) -> Result<Value> {
    let budget = &cx.budget;
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort_keys] = given.take(names, cx)?;
    let words = |text: &str| Text::given(text, false, budget);
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Str(by)) => Some(by.clone()),
        Some(by) => {
            let blanks = integer(Some(by), 0, budget)?.clamp(0, 16) as usize;
            Some(words(&"                "[..blanks])?)
        }
    };
    let mut style = Style {
        item_separator: words(if indent.is_some() { "," } else { ", " })?,
        key_separator: words(": ")?,
        indent,
        sort_keys: sort_keys.is_some_and(Value::truth),
        ascii: ascii.is_some_and(Value::truth),
    };
    if let Some(Value::List(pair)) = separators
        && let (Some(Value::Str(item)), Some(Value::Str(key))) = (pair.get(0)?, pair.get(1)?)
    {
        (style.item_separator, style.key_separator) = (item.clone(), key.clone());
    }
    let mut out = Buf::new(budget)?;
    style.write(value, 0, &mut out)?;
    Ok(Value::Str(out.finish()))
}

/// Jinja's `indent`: something put before every line but the first, and before empty ones only if
/// asked.
fn indent(value: &Value, given: Given<'_>, cx: &Context<'_>) -> Result<Value> {
    let budget = &cx.budget;
    let [width, first, blank] = given.take(["width", "first", "blank"], cx)?;
    let by = match width {
        Some(Value::Str(by)) => by.clone(),
        width => {
            let width = integer(width, 4, budget)?.clamp(0, MAX_INDENT) as usize;
            let blanks =
                binary("*", &Value::Str(Text::given(" ", false, budget)?), &Value::Int(width as i128), budget)?;
            string(Some(&blanks), budget)?.cloned().map_or_else(|| Text::empty(budget), Ok)?
        }
    };
    let (first, blank) = (first.is_some_and(Value::truth), blank.is_some_and(Value::truth));
    let text = needed_string(Some(needed(Some(value), budget)?), budget)?;
    let line_feed = Text::given("\n", false, budget)?;
    let (mut out, mut start) = (Buf::new(budget)?, 0);
    for end in text.matches(&line_feed)?.chain([text.len()]) {
        if if start == 0 { first } else { blank || start < end } {
            out.push_text(&by)?;
        }
        // With its line feed, which the last one has not.
        let next = (end + 1).min(text.len());
        out.push_part(text, start..if end < text.len() { next } else { end })?;
        start = end + 1;
    }
    Ok(Value::Str(out.finish().marked(text.is_markup())))
}
