//! Messages to prompt text, by the Jinja template that came with the model.
//!
//! Templates are written against the `transformers` library, so this is its environment: Python's string and
//! dictionary methods, `tojson` in Python's spelling, `raise_exception`, block trimming, Python's words and quotes
//! in print, maps in the order they were written.
//!
//! A template comes out of a file and is trusted with nothing: it sees the variables below and no more, reads no file, and knows no
//! time. Steps, memory, recursion and output are bounded on every path. That is why the interpreter is our own: in one that was not
//! built for it, any operator, filter or lazy sequence can allocate without asking. Here all that grows is paid for first
//! (`value`), and trees and values nest to a limited depth (`parse`). `strftime_now` in particular is not defined, since a
//! prompt that depends on the day could not be reproduced; templates that ask `is defined` fall back to their own date.
//! What this does not do: it neither tokenises nor parses replies, and a template is one file (no imports, no inheritance).

use std::fmt;
use std::rc::Rc;

use serde_json::Value as Json;

use parse::Tree;
use value::{Budget, Items, Value};

mod builtins;
mod eval;
mod json;
mod lex;
mod operators;
mod parse;
mod value;

/// Steps a rendering may take: a node of the template evaluated, an item made, or 64 bytes read or written.
const MAX_STEPS: u64 = 4_000_000;
/// Bytes a rendering may hold at any time: messages, variables, text on the way, output.
const MAX_MEMORY_BYTES: usize = 64 << 20;
/// Bytes of prompt text a rendering may give.
const MAX_OUTPUT_BYTES: usize = 4 << 20;
/// Statements and expressions within each other, macros included.
const MAX_DEPTH: u32 = 400;
/// Bytes of the template's own text that an error repeats.
const MAX_QUOTED_BYTES: usize = 500;

/// Why a template gives no prompt. One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateError(String);

impl TemplateError {
    fn new(line: Option<u32>, what: impl fmt::Display) -> TemplateError {
        let line = line.map_or_else(String::new, |line| format!("line {line}: "));
        // The text of an error may be the template's own: keep it to a line, and away from the terminal's controls.
        let text: String = what.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        TemplateError(format!("{line}{text}"))
    }
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chat template: {}", self.0)
    }
}

impl std::error::Error for TemplateError {}

/// As much of a template's own text as an error should repeat.
fn text_of(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_QUOTED_BYTES)].to_owned()
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
    tree: Tree,
}

impl ChatTemplate {
    /// Compiles Jinja source.
    ///
    /// # Errors
    /// A syntax error, with its line.
    pub fn new(source: &str) -> Result<ChatTemplate, TemplateError> {
        parse::parse(source).map(|tree| ChatTemplate { tree })
    }

    /// The prompt text.
    ///
    /// # Errors
    /// What the template raises, what it does wrong, or a limit it runs into.
    pub fn render(&self, inputs: &Inputs<'_>) -> Result<String, TemplateError> {
        let budget = Rc::new(Budget::default());
        let list = |json: &[Json]| {
            let mut items = Items::new(&budget)?;
            json.iter().try_for_each(|json| items.push(Value::from_json(json, &budget)?))?;
            Ok(items.finish())
        };
        let tools = if inputs.tools.is_empty() { Value::None } else { list(inputs.tools)? };
        let vars = [
            ("messages", list(inputs.messages)?),
            ("tools", tools),
            ("add_generation_prompt", Value::Bool(inputs.add_generation_prompt)),
            ("enable_thinking", inputs.enable_thinking.map_or(Value::Undefined, Value::Bool)),
            ("bos_token", budget.text(inputs.bos_token.unwrap_or_default())?),
            ("eos_token", budget.text(inputs.eos_token.unwrap_or_default())?),
        ];
        eval::render(&self.tree, &budget, vars)
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
