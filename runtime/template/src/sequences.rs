//! Filters of sequences, but `map`, which applies any filter.

use std::cmp::Ordering;

use crate::arguments::{Given, needed_string, string};
use crate::error::Result;
use crate::functions::{items_of, iterate, reach};
use crate::operators::{binary, order, slice};
use crate::paid::{Buf, Text};
use crate::predicates::test;
use crate::value::{Context, List, Shape, Value};

/// `value | name(given)`, for what goes over items.
pub(crate) fn sequence(name: &Text, value: &Value, given: Given<'_>, cx: &Context<'_>) -> Result<Value> {
    let budget = &cx.budget;
    let word = name.word()?;
    match word {
        // Nothing in, nothing out, even where that is no sequence.
        "map" | "select" | "reject" | "selectattr" | "rejectattr" if !value.truth() => {
            Ok(List::new(budget)?.finish_as(Shape::Generator))
        }
        "list" => Ok(items_of(value, cx)?.finish()),
        "last" if matches!(value, Value::List(list) if list.shape() == Shape::Generator) => {
            Err(budget.error("expected a sequence with an end, found a generator"))
        }
        "first" | "last" => {
            let items = items_of(value, cx)?;
            let at = if word == "first" { Some(0) } else { items.len().checked_sub(1) };
            Ok(at.map_or(Ok(None), |at| items.get(at))?.cloned().unwrap_or(Value::Undefined))
        }
        "reverse" => {
            if let Value::Str(_) = value {
                return slice(value, [None, None, Some(-1)], budget);
            }
            let mut items = items_of(value, cx)?;
            items.reverse()?;
            Ok(items.finish_as(Shape::Generator))
        }
        "join" => {
            let [separator, attr] = given.take(["d", "attribute"], cx)?;
            let separator = string(separator, budget)?.cloned().map_or_else(|| Text::empty(budget), Ok)?;
            join(value, &separator, attr, cx).map(Value::Str)
        }
        "select" | "reject" | "selectattr" | "rejectattr" => {
            let (mut attr, mut rest) = (None, given);
            if word.ends_with("attr") {
                (attr, rest) = given.split_first()?;
                if attr.is_none() {
                    return Err(budget.error(format_args!("expected an attribute for {word}")));
                }
            }
            let (by, args) = rest.split_first()?;
            let mut out = List::new(budget)?;
            iterate(value, cx, &mut |item| {
                let tested = reach(&item, attr, cx)?;
                let passes = match by {
                    None => tested.truth(),
                    Some(name) => test(needed_string(Some(name), budget)?, &tested, args, cx)?,
                };
                if passes == word.starts_with("select") { out.push(item) } else { Ok(()) }
            })?;
            Ok(out.finish_as(Shape::Generator))
        }
        "sort" => {
            let [reverse, case, attr] = given.take(["reverse", "case_sensitive", "attribute"], cx)?;
            let (reverse, fold) = (reverse.is_some_and(Value::truth), !case.is_some_and(Value::truth));
            let mut items = items_of(value, cx)?;
            items.sort(|a, b| {
                let (a, b) = (reach(a, attr, cx)?, reach(b, attr, cx)?);
                // Attributes are compared as lists of one.
                if attr.is_some() && a.equals(&b, budget)? {
                    return Ok(false);
                }
                let order = order(&a, &b, fold, budget)?;
                Ok(order == Some(if reverse { Ordering::Greater } else { Ordering::Less }))
            })?;
            Ok(items.finish())
        }
        "dictsort" => {
            let Value::Map(map) = value else {
                return Err(budget.error(format_args!("expected a map to sort, found {}", value.kind())));
            };
            let [case, by, reverse] = given.take(["case_sensitive", "by", "reverse"], cx)?;
            let at = usize::from(string(by, budget)?.map_or(Ok(false), |by| Ok(by.word()? == "value"))?);
            let (reverse, fold) = (reverse.is_some_and(Value::truth), !case.is_some_and(Value::truth));
            let mut items = List::new(budget)?;
            for entry in map.iter() {
                let (key, value) = entry?.clone();
                items.push(List::pair(key, value, budget)?)?;
            }
            items.sort(|a, b| {
                let (Value::List(a), Value::List(b)) = (a, b) else { return Ok(false) };
                let (Some(a), Some(b)) = (a.get(at)?, b.get(at)?) else { return Ok(false) };
                Ok(order(a, b, fold, budget)? == Some(if reverse { Ordering::Greater } else { Ordering::Less }))
            })?;
            Ok(items.finish())
        }
        "unique" => {
            let [case, attr] = given.take(["case_sensitive", "attribute"], cx)?;
            let fold = !case.is_some_and(Value::truth);
            let (mut out, mut keys) = (List::new(budget)?, List::new(budget)?);
            iterate(value, cx, &mut |item| {
                let key = reach(&item, attr, cx)?;
                for seen in keys.iter() {
                    let same = match (seen?, &key) {
                        (Value::Str(a), Value::Str(b)) if fold => a.order(b, true)?.is_eq(),
                        (seen, key) => seen.equals(key, budget)?,
                    };
                    if same {
                        return Ok(());
                    }
                }
                keys.push(key)?;
                out.push(item)
            })?;
            Ok(out.finish_as(Shape::Generator))
        }
        "min" | "max" => {
            let [case, attr] = given.take(["case_sensitive", "attribute"], cx)?;
            let fold = !case.is_some_and(Value::truth);
            let wanted = if word == "min" { Ordering::Less } else { Ordering::Greater };
            let mut best: Option<(Value, Value)> = None;
            iterate(value, cx, &mut |item| {
                let key = reach(&item, attr, cx)?;
                let better = match &best {
                    None => true,
                    Some((best, _)) => order(&key, best, fold, budget)? == Some(wanted),
                };
                if better {
                    best = Some((key, item));
                }
                Ok(())
            })?;
            Ok(best.map_or(Value::Undefined, |(_, item)| item))
        }
        "sum" => {
            let [attr, start] = given.take(["attribute", "start"], cx)?;
            let mut sum = start.cloned().unwrap_or(Value::Int(0));
            iterate(value, cx, &mut |item| {
                sum = binary("+", &sum, &reach(&item, attr, cx)?, budget)?;
                Ok(())
            })?;
            Ok(sum)
        }
        _ => Err(budget.error(format_args!("expected a filter, found {}", name.quoted()?))),
    }
}

/// Items, or an attribute of each, as text with a separator between them.
pub(crate) fn join(over: &Value, separator: &Text, attr: Option<&Value>, cx: &Context<'_>) -> Result<Text> {
    let (mut out, mut first) = (Buf::new(&cx.budget)?, true);
    iterate(over, cx, &mut |item| {
        if !std::mem::take(&mut first) {
            out.push_text(separator)?;
        }
        reach(&item, attr, cx)?.print(&mut out, false)
    })?;
    Ok(out.finish())
}
