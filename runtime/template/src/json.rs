//! `tojson`: a value as Python's `json.dumps` spells it, without the HTML escapes of Jinja's own
//! filter.

use crate::error::Result;
use crate::paid::{Buf, Items, Text};
use crate::python::float;
use crate::value::Value;

/// How `json.dumps` was asked to write.
pub(crate) struct Style {
    /// What is put before an item once per level, one item a line; `None` for all on one line.
    pub(crate) indent: Option<Text>,
    pub(crate) item_separator: Text,
    pub(crate) key_separator: Text,
    pub(crate) sort_keys: bool,
    pub(crate) ascii: bool,
}

impl Style {
    fn line(&self, depth: usize, out: &mut Buf) -> Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        out.push("\n")?;
        (0..depth).try_for_each(|_| out.push_text(indent))
    }

    /// Writes `value`, which stands within `depth` containers.
    pub(crate) fn write(&self, value: &Value, depth: usize, out: &mut Buf) -> Result<()> {
        match value {
            Value::None => out.push("null"),
            Value::Bool(b) => out.push(if *b { "true" } else { "false" }),
            Value::Int(i) => out.push_str(&i.to_string(), false),
            Value::Float(f) if f.is_nan() => out.push("NaN"),
            Value::Float(f) if f.is_infinite() => out.push(if *f > 0.0 { "Infinity" } else { "-Infinity" }),
            Value::Float(f) => out.push_str(&float(*f), false),
            Value::Str(s) => self.string(s, out),
            Value::List(items) if items.shape().is_data() => {
                out.push("[")?;
                for (i, item) in items.iter().enumerate() {
                    self.separate(i, depth, out)?;
                    self.write(item?, depth + 1, out)?;
                }
                if items.len() > 0 {
                    self.line(depth, out)?;
                }
                out.push("]")
            }
            Value::Map(items) => {
                out.push("{")?;
                let mut order = Items::new(out.budget())?;
                items.iter().try_for_each(|entry| order.add(entry?))?;
                if self.sort_keys {
                    order.sort(|(a, _), (b, _)| match (a, b) {
                        (Value::Str(a), Value::Str(b)) => Ok(a.order(b, false)?.is_lt()),
                        _ => Ok(matches!((a.float(), b.float()), (Some(a), Some(b)) if a < b)),
                    })?;
                }
                for (i, entry) in order.iter().enumerate() {
                    let (key, value) = entry?;
                    self.separate(i, depth, out)?;
                    self.key(key, out)?;
                    out.push_text(&self.key_separator)?;
                    self.write(value, depth + 1, out)?;
                }
                if items.len() > 0 {
                    self.line(depth, out)?;
                }
                out.push("}")
            }
            other => Err(out.budget().error(format_args!("expected data to write as JSON, found {}", other.kind()))),
        }
    }

    fn separate(&self, at: usize, depth: usize, out: &mut Buf) -> Result<()> {
        if at > 0 {
            out.push_text(&self.item_separator)?;
        }
        self.line(depth + 1, out)
    }

    /// A key: what is no string becomes one.
    fn key(&self, key: &Value, out: &mut Buf) -> Result<()> {
        if let Value::Str(key) = key {
            return self.string(key, out);
        }
        out.push("\"")?;
        self.write(key, 0, out)?;
        out.push("\"")
    }

    fn string(&self, text: &Text, out: &mut Buf) -> Result<()> {
        out.push("\"")?;
        let special = |c: char| c < ' ' || matches!(c, '"' | '\\') || self.ascii && !c.is_ascii();
        text.transcribe(out, special, |out, c| match c.c {
            '"' => out.push_str("\\\"", c.typed),
            '\\' => out.push_str("\\\\", c.typed),
            '\n' => out.push_str("\\n", c.typed),
            '\r' => out.push_str("\\r", c.typed),
            '\t' => out.push_str("\\t", c.typed),
            '\u{8}' => out.push_str("\\b", c.typed),
            '\u{c}' => out.push_str("\\f", c.typed),
            other => {
                let mut units = [0; 2];
                let mut units = other.encode_utf16(&mut units).iter();
                units.try_for_each(|unit| out.push_str(&format!("\\u{unit:04x}"), c.typed))
            }
        })?;
        out.push("\"")
    }
}
