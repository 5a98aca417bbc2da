//! Messages to prompt text, by the Jinja template that came with the model.
//!
//! Templates are written against the `transformers` library, so this is its environment: Python's string and
//! dictionary methods, `tojson` in Python's spelling, `raise_exception`, block trimming, `True`, `False` and `None`
//! in print, maps in the order they were written.
//!
//! A template comes out of a file and is trusted with nothing: it sees the variables below and no more, runs on limited
//! fuel, depth and output, reads no file, and knows no time. `strftime_now` in particular is not defined, since a prompt that
//! depends on the day could not be reproduced; templates that ask `is defined` fall back to their own date.
//! What this does not do: it neither tokenises nor parses replies.

use std::fmt;
use std::io;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind, Value, context};
use serde::Serialize;
use serde_json::Value as Json;

/// Instructions a rendering may take.
const FUEL: u64 = 1_000_000;
/// Bytes of prompt text a rendering may give.
const MAX_OUTPUT_BYTES: usize = 4 << 20;
/// Nested calls and includes.
const MAX_DEPTH: usize = 100;
/// Name of the template in errors.
const NAME: &str = "chat template";

/// Why a template gives no prompt. One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateError(String);

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{NAME}: {}", self.0)
    }
}

impl std::error::Error for TemplateError {}

impl From<JinjaError> for TemplateError {
    fn from(e: JinjaError) -> Self {
        let what = match e.kind() {
            ErrorKind::OutOfFuel => format!("expected to be done within {FUEL} steps"),
            // What was written too much is told by the writer.
            ErrorKind::WriteFailure => format!("expected at most {MAX_OUTPUT_BYTES} bytes of output"),
            kind => e.detail().map_or_else(|| kind.to_string(), |detail| format!("{kind}: {detail}")),
        };
        let line = e.line().map_or_else(String::new, |line| format!("line {line}: "));
        // The text of an error may be the template's own: keep it to a line, and away from the terminal's controls.
        let text: String = what.chars().map(|c| if c.is_control() { ' ' } else { c }).take(500).collect();
        TemplateError(format!("{line}{text}"))
    }
}

/// What a template renders.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inputs<'a> {
    /// Objects with `role` and `content`, and what else the template knows (`tool_calls`, `reasoning_content`).
    pub messages: &'a [Json],
    /// Descriptions of tools, if there are any.
    pub tools: &'a [Json],
    /// Whether to end with the start of a reply.
    pub add_generation_prompt: bool,
    /// Whether the model should think first; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Text of the beginning-of-sequence token.
    pub bos_token: Option<&'a str>,
    /// Text of the end-of-sequence token.
    pub eos_token: Option<&'a str>,
}

/// A message as templates expect it.
pub fn message(role: &str, content: &str) -> Json {
    serde_json::json!({ "role": role, "content": content })
}

/// A compiled template.
pub struct ChatTemplate {
    env: Environment<'static>,
}

impl ChatTemplate {
    /// Compiles Jinja source.
    ///
    /// # Errors
    /// A syntax error, with its line.
    pub fn new(source: &str) -> Result<ChatTemplate, TemplateError> {
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_fuel(Some(FUEL));
        env.set_recursion_limit(MAX_DEPTH);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(|out, state, value| match value.kind() {
            ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }).map_err(JinjaError::from),
            ValueKind::None => out.write_str("None").map_err(JinjaError::from),
            _ => minijinja::escape_formatter(out, state, value),
        });
        env.add_filter("tojson", to_json);
        env.add_function("raise_exception", |message: String| -> Result<Value, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, format!("the template refuses: {message}")))
        });
        env.add_template_owned(NAME, source.to_owned())?;
        Ok(ChatTemplate { env })
    }

    /// The prompt text.
    ///
    /// # Errors
    /// What the template raises, what it does wrong, or a limit it runs into.
    pub fn render(&self, inputs: &Inputs<'_>) -> Result<String, TemplateError> {
        let tools = if inputs.tools.is_empty() { Value::from(()) } else { Value::from_serialize(inputs.tools) };
        let thinking = inputs.enable_thinking.map_or(Value::UNDEFINED, Value::from);
        let context = context! {
            messages => inputs.messages,
            tools => tools,
            add_generation_prompt => inputs.add_generation_prompt,
            enable_thinking => thinking,
            bos_token => inputs.bos_token.unwrap_or_default(),
            eos_token => inputs.eos_token.unwrap_or_default(),
        };
        let mut out = Capped(Vec::new());
        self.env.get_template(NAME)?.render_captured_to(context, &mut out)?;
        String::from_utf8(out.0).map_err(|e| TemplateError(e.to_string()))
    }
}

/// A buffer that refuses to grow past [`MAX_OUTPUT_BYTES`].
struct Capped(Vec<u8>);

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > MAX_OUTPUT_BYTES - self.0.len() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `tojson` as `json.dumps(x, ensure_ascii=False, indent=indent)` spells it, without the HTML escapes of Jinja's own.
fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, JinjaError> {
    let indent = kwargs.get::<Option<usize>>("indent")?.map(|n| n.min(16));
    // Accepted, since templates pass it; text stays as it is.
    kwargs.get::<Option<bool>>("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let mut out = Capped(Vec::new());
    let style = Python { indent: indent.map(|n| vec![b' '; n]), depth: 0, empty: true };
    value
        .serialize(&mut serde_json::Serializer::with_formatter(&mut out, style))
        .map_err(|e| JinjaError::new(ErrorKind::BadSerialization, e.to_string()))?;
    String::from_utf8(out.0)
        .map(Value::from_safe_string)
        .map_err(|e| JinjaError::new(ErrorKind::BadSerialization, e.to_string()))
}

/// Python's separators: `", "` and `": "`, or a line per item if there is an indent.
struct Python {
    indent: Option<Vec<u8>>,
    depth: usize,
    empty: bool,
}

impl Python {
    fn open(&mut self) {
        self.depth += 1;
        self.empty = true;
    }

    fn close<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.line(out)?;
        }
        self.empty = false;
        Ok(())
    }

    fn item<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.empty = false;
        match (&self.indent, first) {
            (None, true) => return Ok(()),
            (None, false) => return out.write_all(b", "),
            (Some(_), true) => {}
            (Some(_), false) => out.write_all(b",")?,
        }
        self.line(out)
    }

    fn line<W: ?Sized + io::Write>(&self, out: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        out.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| out.write_all(indent))
    }
}

impl serde_json::ser::Formatter for Python {
    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open();
        out.write_all(b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out)?;
        out.write_all(b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.empty = false;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open();
        out.write_all(b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out)?;
        out.write_all(b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.empty = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, inputs: &Inputs<'_>) -> Result<String, String> {
        let template = ChatTemplate::new(source).map_err(|e| e.to_string())?;
        template.render(inputs).map_err(|e| e.to_string())
    }

    fn error(source: &str) -> String {
        let error = render(source, &Inputs::default()).unwrap_err();
        assert!(error.starts_with("chat template: ") && error.lines().count() == 1, "{error}");
        error
    }

    fn talk() -> Vec<Json> {
        vec![
            message("system", " Be brief. "),
            message("user", "Hi"),
            message("assistant", "<think>\nwhat now\n</think>\n\nHello!"),
            message("user", "A < B & 'C'?"),
        ]
    }

    #[test]
    fn a_frame_per_message_with_blocks_trimmed() {
        let source = "\
{% for m in messages %}
    {% if loop.first and m.role != 'system' %}
<s>system
{% endif %}
{{ '<s>' + m['role'] + '\n' + m['content'] | trim + '<e>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<s>assistant\n' }}
{%- endif %}
";
        let messages = [message("user", " x ")];
        let inputs = Inputs { messages: &messages, add_generation_prompt: true, ..Inputs::default() };
        assert_eq!(render(source, &inputs).unwrap(), "<s>system\n<s>user\nx<e>\n<s>assistant\n");
    }

    #[test]
    fn namespaces_reversed_slices_and_string_methods_strip_old_thinking() {
        let source = "\
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and m.role == 'user' and m.content is string and not(m.content.startswith('<r>') and m.content.endswith('</r>')) %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{{- '[' ~ reasoning ~ ']' }}
    {%- endif %}
{{- m.role ~ ':' ~ content.strip() ~ ';' }}
{%- endfor %}
{{- ns.last }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<none>' }}{% endif %}";
        let messages = talk();
        let inputs = Inputs { messages: &messages, enable_thinking: Some(false), ..Inputs::default() };
        let expected = "system:Be brief.;user:Hi;[what now]assistant:Hello!;user:A < B & 'C'?;3<none>";
        assert_eq!(render(source, &inputs).unwrap(), expected);
        let inputs = Inputs { enable_thinking: None, ..inputs };
        assert_eq!(render(source, &inputs).unwrap(), expected.replace("<none>", ""));
    }

    #[test]
    fn macros_headers_and_a_default_date() {
        let source = "\
{{- bos_token }}
{%- macro head(role) %}{{ '<h>' + role + '</h>\\n\\n' }}{% endmacro %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now('%d %b %Y') %}
    {%- else %}
        {%- set date_string = '1 Jan 2024' %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- head('system') + date_string + ' ' + system + eos_token }}
{%- for m in messages %}
{{- head(m.role) + m.content + eos_token }}
{%- endfor %}";
        let messages = talk();
        let inputs =
            Inputs { messages: &messages[..2], bos_token: Some("<b>"), eos_token: Some("<e>"), ..Inputs::default() };
        let expected = "<b><h>system</h>\n\n1 Jan 2024 Be brief.<e><h>user</h>\n\nHi<e>";
        assert_eq!(render(source, &inputs).unwrap(), expected);
    }

    #[test]
    fn json_is_spelt_as_python_does_and_keeps_its_order() {
        let tool = serde_json::json!({
            "type": "function", "function": {"name": "é<&'", "args": [1, 2.5, null, true], "none": {}, "empty": []},
        });
        let inputs = Inputs { tools: &[tool], ..Inputs::default() };
        let line = r#"{"type": "function", "function": {"name": "é<&'", "args": [1, 2.5, null, true], "none": {}, "empty": []}}"#;
        assert_eq!(render("{% for t in tools %}{{ t | tojson }}{% endfor %}", &inputs).unwrap(), line);
        let indented = render("{{ {'b': [1, {}], 'a': []} | tojson(indent=2) }}", &inputs).unwrap();
        assert_eq!(indented, "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}");
        let items = "{% for k, v in tools[0].items() %}{{ k }} {% endfor %}";
        assert_eq!(render(items, &inputs).unwrap(), "type function ");
    }

    #[test]
    fn constants_print_as_in_python() {
        assert_eq!(render("{{ true }} {{ none }} {{ tools }}", &Inputs::default()).unwrap(), "True None None");
    }

    #[test]
    fn errors_are_one_line_that_names_the_place() {
        assert!(error("a\n{% if %}").contains("line 2"));
        assert!(error("{{ raise_exception('no\n\u{1b}system') }}").contains("the template refuses: no  system"));
        assert!(error("{{ strftime_now('%Y') }}").contains("strftime_now"));
        assert!(error("{{ missing.field }}").contains("undefined"));
    }

    #[test]
    fn limits_hold() {
        let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        assert!(error(loops).contains("steps"));
        let big = "{% set x = 'x' * 100000 %}{% for a in range(50) %}{{ x }}{% endfor %}";
        assert!(error(big).contains("bytes of output"));
        error("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}");
        error("{% include 'other' %}");
    }
}
