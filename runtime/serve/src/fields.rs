//! Reading requests strictly: every field is asked for by name, and what nobody asked for is an
//! error that names it, and the fields that there are.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::job::Failure;

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    /// One sentence: where, expected, found.
    pub message: String,
    /// The field it is about.
    pub param: Option<String>,
    /// A name that programs know the reason by, where there is one.
    pub code: Option<&'static str>,
    /// Seconds after which to come again, where that may help.
    pub retry_after: Option<u64>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<&Failure> for Refusal {
    fn from(failure: &Failure) -> Refusal {
        let status = match failure {
            Failure::Stopping => 503,
            Failure::Broken(_) => 500,
        };
        Refusal::new(status, failure.to_string())
    }
}

impl Refusal {
    /// A refusal that is about no field.
    pub fn new(status: u16, message: impl Into<String>) -> Refusal {
        Refusal { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// The same about another field than `before`, if it is about that.
    #[must_use]
    pub fn of_field(mut self, before: &str, field: &str) -> Refusal {
        if let Some(rest) = self.message.strip_prefix(before).filter(|rest| rest.starts_with(": ")) {
            self.message = format!("{field}{rest}");
            self.param = Some(field.to_owned());
        }
        self
    }

    /// A bad field.
    pub fn field(name: &str, message: impl fmt::Display) -> Refusal {
        Refusal { param: Some(name.to_owned()), ..Refusal::new(400, format!("{name}: {message}")) }
    }
}

/// The kind of a value, for messages.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A whole number: JSON has one kind of number, so that `3.0` is one.
pub fn whole(value: &Value) -> Option<u64> {
    let whole = |f: f64| f.fract() == 0.0 && (0.0..9e15).contains(&f);
    value.as_u64().or_else(|| value.as_f64().filter(|f| whole(*f)).map(|f| f as u64))
}

/// Values that a body may have in all: each takes many times the memory that its text does.
pub const MOST_VALUES: usize = 1 << 20;

/// Reads JSON of which no object has a name twice, and which has at most [`MOST_VALUES`] values:
/// what is said twice is said by mistake, and readers differ in which of both they take.
///
/// # Errors
/// What is no such JSON, with its place in the text.
pub fn json(text: &[u8]) -> Result<Value, serde_json::Error> {
    let left = Cell::new(MOST_VALUES);
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = Strict(&left).deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Reads one value, and counts it.
#[derive(Clone, Copy)]
struct Strict<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        let Some(left) = self.0.get().checked_sub(1) else {
            return Err(D::Error::custom(format_args!("expected at most {MOST_VALUES} values, found more")));
        };
        self.0.set(left);
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut out = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            out.push(item);
        }
        Ok(Value::Array(out))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            if out.contains_key(&name) {
                let shown = loaf_formats::text::short(&name, 60);
                return Err(A::Error::custom(format_args!("{shown}: expected once, found again")));
            }
            let value = fields.next_value_seed(self)?;
            out.insert(name, value);
        }
        Ok(Value::Object(out))
    }
}

/// An object whose fields are taken out one by one. A field that is null counts as absent.
pub struct Fields {
    map: Map<String, Value>,
    /// Where it stands, such as `messages[2].`; empty at the top.
    place: String,
    /// What was asked for.
    asked: Vec<&'static str>,
}

impl Fields {
    /// The fields of the body of a request.
    ///
    /// # Errors
    /// A value that is no object.
    pub fn of(value: Value) -> Result<Fields, Refusal> {
        Fields::at(value, "")
    }

    /// The fields of a value inside, for which `place` is said.
    ///
    /// # Errors
    /// A value that is no object.
    pub fn at(value: Value, place: &str) -> Result<Fields, Refusal> {
        match value {
            Value::Object(map) => {
                let place = if place.is_empty() { String::new() } else { format!("{place}.") };
                Ok(Fields { map, place, asked: Vec::new() })
            }
            other if place.is_empty() => {
                Err(Refusal::new(400, format!("body: expected a JSON object, found {}", kind(&other))))
            }
            other => Err(Refusal::field(place, format!("expected an object, found {}", kind(&other)))),
        }
    }

    fn name(&self, field: &str) -> String {
        format!("{}{field}", self.place)
    }

    /// The field, if it is there.
    pub fn any(&mut self, field: &'static str) -> Option<Value> {
        if !self.asked.contains(&field) {
            self.asked.push(field);
        }
        self.map.shift_remove(field).filter(|v| !v.is_null())
    }

    /// The field, as `read` reads it.
    ///
    /// # Errors
    /// What `read` does not take: something else was `expected`.
    pub fn typed<T>(
        &mut self,
        field: &'static str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, Refusal> {
        let Some(value) = self.any(field) else { return Ok(None) };
        match read(&value) {
            Some(read) => Ok(Some(read)),
            None => {
                let found = match &value {
                    Value::Number(n) => n.to_string(),
                    other => kind(other).to_owned(),
                };
                Err(Refusal::field(&self.name(field), format!("expected {expected}, found {found}")))
            }
        }
    }

    /// A boolean.
    ///
    /// # Errors
    /// Something else, by name; so for all that follow.
    pub fn bool(&mut self, field: &'static str) -> Result<Option<bool>, Refusal> {
        self.typed(field, "true or false", Value::as_bool)
    }

    /// A whole number within limits.
    ///
    /// # Errors
    /// As [`Fields::bool`].
    pub fn number(&mut self, field: &'static str, low: u64, high: u64) -> Result<Option<u64>, Refusal> {
        let within = |v: &Value| whole(v).filter(|n| (low..=high).contains(n));
        self.typed(field, &format!("a whole number from {low} to {high}"), within)
    }

    /// A number within limits.
    ///
    /// # Errors
    /// As [`Fields::bool`].
    pub fn float(&mut self, field: &'static str, low: f64, high: f64) -> Result<Option<f32>, Refusal> {
        let within = |v: &Value| v.as_f64().filter(|f| (low..=high).contains(f)).map(|f| f as f32);
        self.typed(field, &format!("a number from {low} to {high}"), within)
    }

    /// A number above one limit and up to another.
    ///
    /// # Errors
    /// As [`Fields::bool`].
    pub fn above(&mut self, field: &'static str, low: f64, high: f64) -> Result<Option<f32>, Refusal> {
        // What is above zero stays above it.
        let rounded = |f: f64| (f as f32).max(f32::MIN_POSITIVE);
        let within = |v: &Value| v.as_f64().filter(|f| *f > low && *f <= high).map(rounded);
        self.typed(field, &format!("a number above {low}, at most {high}"), within)
    }

    /// A text.
    ///
    /// # Errors
    /// As [`Fields::bool`].
    pub fn text(&mut self, field: &'static str) -> Result<Option<String>, Refusal> {
        self.typed(field, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// A list.
    ///
    /// # Errors
    /// As [`Fields::bool`].
    pub fn list(&mut self, field: &'static str) -> Result<Option<Vec<Value>>, Refusal> {
        self.typed(field, "an array", |v| v.as_array().cloned())
    }

    /// An object.
    ///
    /// # Errors
    /// As [`Fields::bool`].
    pub fn object(&mut self, field: &'static str) -> Result<Option<Fields>, Refusal> {
        let place = self.name(field);
        self.any(field).map(|value| Fields::at(value, &place)).transpose()
    }

    /// One text or a list of texts.
    ///
    /// # Errors
    /// As [`Fields::bool`].
    pub fn texts(&mut self, field: &'static str) -> Result<Vec<String>, Refusal> {
        let read = |v: &Value| match v {
            Value::String(s) => Some(vec![s.clone()]),
            Value::Array(list) => list.iter().map(|v| v.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        Ok(self.typed(field, "a string or an array of strings", read)?.unwrap_or_default())
    }

    /// A text that must be there.
    ///
    /// # Errors
    /// As [`Fields::bool`], or its absence.
    pub fn needed_text(&mut self, field: &'static str) -> Result<String, Refusal> {
        self.text(field)?.ok_or_else(|| self.missing(field, "a string"))
    }

    /// The refusal of a request that lacks a field.
    pub fn missing(&self, field: &str, expected: &str) -> Refusal {
        Refusal::field(&self.name(field), format!("expected {expected}, found nothing"))
    }

    /// Refuses a field that is there with another value than one that changes nothing.
    ///
    /// # Errors
    /// A refusal that names it.
    pub fn unsupported(&mut self, field: &'static str, harmless: &[Value]) -> Result<(), Refusal> {
        match self.any(field) {
            Some(value) if !harmless.contains(&value) => {
                let but = if harmless.is_empty() { String::new() } else { format!(" but as {}", list(harmless)) };
                Err(Refusal::field(&self.name(field), format!("not supported here{but}")))
            }
            _ => Ok(()),
        }
    }

    /// Takes fields that are labels of the caller's and change no answer.
    pub fn labels(&mut self, fields: &[&'static str]) {
        fields.iter().copied().for_each(|field| drop(self.any(field)));
    }

    /// That nothing is left.
    ///
    /// # Errors
    /// The first field that nobody asked for, beside those that there are.
    pub fn done(self) -> Result<(), Refusal> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            Some((field, _)) => {
                let shown = loaf_formats::text::short(field, 60);
                let message = format!("no such field here; there are {}", self.asked.join(", "));
                Err(Refusal::field(&format!("{}{shown}", self.place), message))
            }
            None => Ok(()),
        }
    }
}

fn list(values: &[Value]) -> String {
    values.iter().map(Value::to_string).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_is_read_as_it_is_but_for_names_that_come_twice_and_for_masses_of_values() {
        let good = r#" {"a": [1, -2, 3.5, 1e300, 18446744073709551615, true, null, "\u00fc"], "b": {"a": {}}} "#;
        assert_eq!(json(good.as_bytes()).unwrap(), serde_json::from_str::<Value>(good).unwrap());
        let said = |text: &str| json(text.as_bytes()).unwrap_err().to_string();
        assert!(said(r#"{"a": 1, "b": 2, "a": 3}"#).starts_with("a: expected once, found again"));
        assert!(said(r#"{"x": [{"y": 1, "y": 1}]}"#).starts_with("y: expected once"));
        assert!(json(format!("[{}0]", "0,".repeat(MOST_VALUES - 2)).as_bytes()).is_ok());
        assert!(said(&format!("[{}0]", "0,".repeat(MOST_VALUES - 1))).contains("1048576 values"));
        for bad in ["", "{", "[1] 2", "1e400", "[01]", "{\"a\" 1}", &"[".repeat(5000)] {
            assert!(json(bad.as_bytes()).is_err(), "{bad:.20}");
        }
    }

    #[test]
    fn what_is_not_asked_for_or_of_another_kind_is_named() {
        let mut f = Fields::of(json!({ "n": 3.0, "x": 7, "t": null, "deep": { "odd": 1 }, "rest": true })).unwrap();
        assert_eq!(f.number("n", 1, 4), Ok(Some(3)));
        assert_eq!(f.number("x", 1, 4).unwrap_err().message, "x: expected a whole number from 1 to 4, found 7");
        assert_eq!(f.text("t"), Ok(None));
        let mut tiny = Fields::of(json!({ "a": 5e-324, "b": 0, "c": 1 })).unwrap();
        assert_eq!(tiny.above("a", 0.0, 1.0), Ok(Some(f32::MIN_POSITIVE)));
        assert!(tiny.above("b", 0.0, 1.0).is_err() && tiny.above("c", 0.0, 1.0) == Ok(Some(1.0)));
        let deep = f.object("deep").unwrap().unwrap();
        assert_eq!(deep.done().unwrap_err().param.as_deref(), Some("deep.odd"));
        assert_eq!(f.done().unwrap_err().message, "rest: no such field here; there are n, x, t, deep");
        assert!(Fields::of(json!([1])).is_err_and(|e| e.status == 400));
    }
}
