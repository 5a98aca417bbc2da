//! `tojson`: a value as Python's `json.dumps` spells it, without the HTML escapes of Jinja's own filter.

use super::value::{Buf, Result, Value, float};

/// How `json.dumps` was asked to write.
pub(super) struct Style<'a> {
    /// Blanks per level, one item a line; `None` for all on one line.
    pub(super) indent: Option<usize>,
    pub(super) item_separator: &'a str,
    pub(super) key_separator: &'a str,
    pub(super) sort_keys: bool,
    pub(super) ascii: bool,
}

impl Style<'_> {
    fn line(&self, depth: usize, out: &mut Buf) -> Result<()> {
        let Some(indent) = self.indent else { return Ok(()) };
        out.push("\n")?;
        (0..depth * indent).try_for_each(|_| out.push(" "))
    }

    /// Writes `value`, which stands within `depth` containers.
    pub(super) fn write(&self, value: &Value, depth: usize, out: &mut Buf) -> Result<()> {
        match value {
            Value::None => out.push("null"),
            Value::Bool(b) => out.push(if *b { "true" } else { "false" }),
            Value::Int(i) => out.push(&i.to_string()),
            Value::Float(f) if f.is_nan() => out.push("NaN"),
            Value::Float(f) if f.is_infinite() => out.push(if *f > 0.0 { "Infinity" } else { "-Infinity" }),
            Value::Float(f) => out.push(&float(*f)),
            Value::Str(s) => self.string(s, out),
            Value::List(items) => {
                out.push("[")?;
                for (i, item) in items.as_slice().iter().enumerate() {
                    out.push(if i == 0 { "" } else { self.item_separator })?;
                    self.line(depth + 1, out)?;
                    self.write(item, depth + 1, out)?;
                }
                if !items.as_slice().is_empty() {
                    self.line(depth, out)?;
                }
                out.push("]")
            }
            Value::Map(items) => {
                out.push("{")?;
                let mut order = super::value::Items::new(out.budget())?;
                (0..items.as_slice().len()).try_for_each(|i| order.add(i))?;
                if self.sort_keys {
                    let key = |i: &usize| match &items.as_slice()[*i].0 {
                        Value::Str(key) => &**key,
                        _ => "",
                    };
                    order.as_mut_slice().sort_by(|a, b| key(a).cmp(key(b)));
                }
                for (n, i) in order.as_slice().iter().enumerate() {
                    let (key, value) = &items.as_slice()[*i];
                    out.push(if n == 0 { "" } else { self.item_separator })?;
                    self.line(depth + 1, out)?;
                    self.key(key, out)?;
                    out.push(self.key_separator)?;
                    self.write(value, depth + 1, out)?;
                }
                if !items.as_slice().is_empty() {
                    self.line(depth, out)?;
                }
                out.push("}")
            }
            other => Err(out.budget().error(format_args!("expected data to write as JSON, found {}", other.kind()))),
        }
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

    fn string(&self, text: &str, out: &mut Buf) -> Result<()> {
        out.push("\"")?;
        for c in text.chars() {
            match c {
                '"' => out.push("\\\"")?,
                '\\' => out.push("\\\\")?,
                '\n' => out.push("\\n")?,
                '\r' => out.push("\\r")?,
                '\t' => out.push("\\t")?,
                '\u{8}' => out.push("\\b")?,
                '\u{c}' => out.push("\\f")?,
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push(&format!("\\u{unit:04x}"))?;
                    }
                }
                c => out.push_char(c)?,
            }
        }
        out.push("\"")
    }
}
