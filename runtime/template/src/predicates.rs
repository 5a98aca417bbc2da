//! Tests: what stands after `is`.

use crate::arguments::{Given, needed};
use crate::error::Result;
use crate::methods::is_cased;
use crate::operators::{binary, compare};
use crate::paid::Text;
use crate::value::{Context, Value};

/// `value is name`.
pub(crate) fn test(name: &Text, value: &Value, given: Given<'_>, cx: &Context<'_>) -> Result<bool> {
    let budget = &cx.budget;
    let other = || needed(given.split_first()?.0, budget);
    Ok(match name.word()? {
        "defined" => !matches!(value, Value::Undefined),
        "undefined" => matches!(value, Value::Undefined),
        "none" => matches!(value, Value::None),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Map(_)),
        "iterable" => {
            matches!(value, Value::List(_) | Value::Map(_) | Value::Str(_) | Value::Undefined | Value::Loop(_))
        }
        "sequence" => match value {
            Value::List(list) => list.shape().has_indices(),
            _ => matches!(value, Value::Map(_) | Value::Str(_) | Value::Undefined),
        },
        "number" => matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        // An undefined value is one, which fails when it is called.
        "callable" => matches!(value, Value::Macro { .. } | Value::Function(_) | Value::Method | Value::Undefined),
        "odd" => binary("%", value, &Value::Int(2), budget)?.float() == Some(1.0),
        "even" => binary("%", value, &Value::Int(2), budget)?.float() == Some(0.0),
        "divisibleby" => binary("%", value, other()?, budget)?.float() == Some(0.0),
        "sameas" => {
            let other = other()?;
            std::mem::discriminant(value) == std::mem::discriminant(other) && value.equals(other, budget)?
        }
        "eq" | "equalto" | "==" => value.equals(other()?, budget)?,
        "ne" | "!=" => !value.equals(other()?, budget)?,
        "lt" | "lessthan" | "<" => compare("<", value, other()?, budget)?,
        "le" | "<=" => compare("<=", value, other()?, budget)?,
        "gt" | "greaterthan" | ">" => compare(">", value, other()?, budget)?,
        "ge" | ">=" => compare(">=", value, other()?, budget)?,
        "in" => compare("in", value, other()?, budget)?,
        "lower" => is_cased(&value.printed(budget)?, char::is_lowercase, char::is_uppercase)?,
        "upper" => is_cased(&value.printed(budget)?, char::is_uppercase, char::is_lowercase)?,
        _ => return Err(budget.error(format_args!("expected a test, found {}", name.quoted()?))),
    })
}
