//! Arithmetic, comparisons and slices, as Python has them.

use std::cmp::Ordering;
use std::rc::Rc;

use crate::error::Result;
use crate::paid::{Budget, Buf, Items, Text};
use crate::value::{List, Shape, Value};

/// `left op right`.
pub(crate) fn binary(op: &str, left: &Value, right: &Value, budget: &Rc<Budget>) -> Result<Value> {
    let wrong = || {
        let (left, right) = (left.kind(), right.kind());
        budget.error(format_args!("expected operands that go with {op}, found {left} and {right}"))
    };
    let overflow = || budget.error(format_args!("expected a result of {op} that is a number of at most 127 bits"));
    match (op, left, right) {
        ("~", _, _) => {
            let mut out = Buf::new(budget)?;
            left.print(&mut out, false)?;
            right.print(&mut out, false)?;
            return Ok(Value::Str(out.finish()));
        }
        ("+", Value::Str(a), Value::Str(b)) => {
            let mut out = Buf::with_room(budget, a.len() + b.len())?;
            let markup = a.is_markup() || b.is_markup();
            for text in [a, b] {
                if markup && !text.is_markup() { escape(text, &mut out)? } else { out.push_text(text)? }
            }
            return Ok(Value::Str(out.finish().marked(markup)));
        }
        ("+", Value::List(a), Value::List(b)) => {
            let shape = a.shape();
            if shape != b.shape() || !matches!(shape, Shape::List | Shape::Tuple) {
                return Err(wrong());
            }
            let mut items = List::new(budget)?;
            a.iter().chain(b.iter()).try_for_each(|v| items.push(v?.clone()))?;
            return Ok(items.finish_as(shape));
        }
        ("*", Value::List(list), n) | ("*", n, Value::List(list)) if list.shape().is_data() => {
            let n = n.int().ok_or_else(wrong)?.max(0);
            let n = if list.len() == 0 { 0 } else { n };
            let mut items = List::new(budget)?;
            for _ in 0..n {
                list.iter().try_for_each(|item| items.push(item?.clone()))?;
            }
            return Ok(items.finish_as(list.shape()));
        }
        ("*", Value::Str(text), n) | ("*", n, Value::Str(text)) => {
            let n = usize::try_from(n.int().ok_or_else(wrong)?.max(0)).map_err(|_| overflow())?;
            let n = if text.is_empty() { 0 } else { n };
            let mut out = Buf::with_room(budget, text.len().saturating_mul(n))?;
            (0..n).try_for_each(|_| out.push_text(text))?;
            return Ok(Value::Str(out.finish().marked(text.is_markup())));
        }
        _ => {}
    }
    if let (Some(a), Some(b)) = (left.int(), right.int()) {
        let result = match op {
            "+" => a.checked_add(b),
            "-" => a.checked_sub(b),
            "*" => a.checked_mul(b),
            "/" if b != 0 => return Ok(Value::Float(a as f64 / b as f64)),
            "//" | "%" if b != 0 => match (a.checked_div(b), a.checked_rem(b)) {
                (Some(quotient), Some(rest)) => {
                    let below = rest != 0 && (rest < 0) != (b < 0);
                    let down = i128::from(below);
                    Some(if op == "//" { quotient - down } else { rest + down * b })
                }
                _ => None,
            },
            "**" => match u32::try_from(b) {
                Ok(b) => a.checked_pow(b),
                Err(_) => return Ok(Value::Float((a as f64).powf(b as f64))),
            },
            _ => return Err(budget.error("expected a divisor that is not zero")),
        };
        return result.map(Value::Int).ok_or_else(overflow);
    }
    let (Some(a), Some(b)) = (left.float(), right.float()) else { return Err(wrong()) };
    Ok(Value::Float(match op {
        "+" => a + b,
        "-" => a - b,
        "*" => a * b,
        "/" | "//" | "%" if b == 0.0 => return Err(budget.error("expected a divisor that is not zero")),
        "/" => a / b,
        "//" => (a / b).floor(),
        "%" => a - b * (a / b).floor(),
        _ => a.powf(b),
    }))
}

/// Writes a text with what HTML knows as something else in its spelling of it.
pub(crate) fn escape(text: &Text, out: &mut Buf) -> Result<()> {
    let special = |c: char| matches!(c, '&' | '<' | '>' | '"' | '\'');
    text.transcribe(out, special, |out, c| {
        let spelt = match c.c {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '"' => "&#34;",
            _ => "&#39;",
        };
        out.push_str(spelt, c.typed)
    })
}

/// `left op right`, where `op` gives a boolean.
pub(crate) fn compare(op: &str, left: &Value, right: &Value, budget: &Rc<Budget>) -> Result<bool> {
    Ok(match op {
        "==" => left.equals(right, budget)?,
        "!=" => !left.equals(right, budget)?,
        "in" => contains(right, left, budget)?,
        "not in" => !contains(right, left, budget)?,
        _ => {
            let order = order(left, right, false, budget)?;
            match op {
                "<" => order == Some(Ordering::Less),
                ">" => order == Some(Ordering::Greater),
                "<=" => matches!(order, Some(Ordering::Less | Ordering::Equal)),
                _ => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
            }
        }
    })
}

/// How two values stand to each other, upper case as lower case if `fold`. `None` for what has no
/// order (a NaN).
///
/// # Errors
/// For values of kinds that do not compare.
pub(crate) fn order(left: &Value, right: &Value, fold: bool, budget: &Rc<Budget>) -> Result<Option<Ordering>> {
    budget.step()?;
    Ok(match (left, right) {
        (Value::Str(a), Value::Str(b)) => Some(a.order(b, fold)?),
        (Value::List(a), Value::List(b)) if a.shape() == b.shape() && a.shape().is_data() => {
            // Python looks for the first items that are not equal, and then for their order.
            for (a, b) in a.iter().zip(b.iter()) {
                let (a, b) = (a?, b?);
                if !a.equals(b, budget)? {
                    return order(a, b, false, budget);
                }
            }
            Some(a.len().cmp(&b.len()))
        }
        _ => match (left.int(), right.int(), left.float(), right.float()) {
            (Some(a), Some(b), ..) => Some(a.cmp(&b)),
            (_, _, Some(a), Some(b)) => a.partial_cmp(&b),
            _ => {
                let (left, right) = (left.kind(), right.kind());
                return Err(budget.error(format_args!("expected values in an order, found {left} and {right}")));
            }
        },
    })
}

/// Fails for what is never a key of a map.
pub(crate) fn hashable(value: &Value, budget: &Budget) -> Result<()> {
    match value {
        Value::Map(_) => {}
        Value::List(list) if list.shape() == Shape::List => {}
        _ => return Ok(()),
    }
    Err(budget.error(format_args!("expected something that may be a key, found {}", value.kind())))
}

fn contains(container: &Value, value: &Value, budget: &Rc<Budget>) -> Result<bool> {
    match (container, value) {
        (Value::Str(text), Value::Str(part)) => Ok(text.matches(part)?.next().is_some()),
        (Value::List(items), _) => {
            for item in items.iter_once() {
                if item?.equals(value, budget)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        (Value::Map(items), _) => {
            hashable(value, budget)?;
            Ok(items.get(value)?.is_some())
        }
        (Value::Undefined, _) => Ok(false),
        _ => {
            let (container, value) = (container.kind(), value.kind());
            Err(budget
                .error(format_args!("expected something that may be in a container, found {value} in {container}")))
        }
    }
}

/// `value[start:stop:step]`.
pub(crate) fn slice(value: &Value, bounds: [Option<i128>; 3], budget: &Rc<Budget>) -> Result<Value> {
    let step = bounds[2].unwrap_or(1);
    if step == 0 {
        return Err(budget.error("expected a slice with a step that is not zero"));
    }
    match value {
        Value::List(list) if list.shape().has_indices() => {
            let mut items = List::new(budget)?;
            for i in indices(list.len(), bounds, step) {
                list.get(i)?.map_or(Ok(()), |item| items.push(item.clone()))?;
            }
            Ok(items.finish_as(list.shape()))
        }
        Value::Str(text) if step == 1 => {
            let mut indices = indices(text.count()?, bounds, step);
            let Some(first) = indices.next() else { return Ok(Value::Str(Text::empty(budget)?)) };
            let mut within = text.chars()?.skip(first).take(1 + indices.count());
            let Some(start) = within.next() else { return Ok(Value::Str(Text::empty(budget)?)) };
            let end = within.last().unwrap_or(start).end();
            text.part(start.at..end).map(Value::Str)
        }
        Value::Str(text) => {
            let mut chars = Items::new(budget)?;
            text.chars()?.try_for_each(|c| chars.add(c))?;
            let mut out = Buf::new(budget)?;
            for i in indices(chars.len(), bounds, step) {
                chars.get(i)?.map_or(Ok(()), |c| out.push_char(c.c, c.typed))?;
            }
            Ok(Value::Str(out.finish().marked(text.is_markup())))
        }
        other => Err(budget.error(format_args!("expected a list or a string to slice, found {}", other.kind()))),
    }
}

/// Python's indices of a slice of `len` items: all are less than `len`.
fn indices(len: usize, bounds: [Option<i128>; 3], step: i128) -> impl Iterator<Item = usize> {
    let len = len as i128;
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |bound: i128| (if bound < 0 { bound.saturating_add(len) } else { bound }).clamp(low, high);
    let start = bounds[0].map_or(if step > 0 { low } else { high }, clamp);
    let stop = bounds[1].map_or(if step > 0 { high } else { low }, clamp);
    std::iter::successors(Some(start), move |i| i.checked_add(step))
        .take_while(move |i| if step > 0 { *i < stop } else { *i > stop })
        .map(|i| i as usize)
}
