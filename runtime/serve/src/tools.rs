//! Calls of tools in what models write, for the model families that are baked.
//!
//! | style | families | what it looks like |
//! |---|---|---|
//! | [`Style::Tagged`] | Qwen2.5, Qwen3, Hermes; Qwen3-Coder, Qwen3-Next, Qwen3.5 | `<tool_call>` with JSON, or with `<function=NAME>` and `<parameter=NAME>` inside |
//! | [`Style::Marked`] | Mistral, newer | `[TOOL_CALLS]NAME[ARGS]` and JSON, for each call; `[CALL_ID]` and an id may stand between |
//! | [`Style::Json`] | Llama 3.x, Mistral | the answer is JSON: an object, or a list of them, with `name` and `arguments` or `parameters` |
//!
//! What does not parse stays text, as it was written. What this does not do: it calls nothing and
//! checks no argument against a schema; the schema is looked at for one thing, whether a tagged
//! parameter is to be a string.

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Between `<tool_call>` and `</tool_call>`.
    Tagged,
    /// After `[TOOL_CALLS]`, name and arguments with `[ARGS]` between.
    Marked,
    /// The whole answer is JSON.
    Json,
}

const BEGINS: &str = "[TOOL_CALLS]";
const ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

impl Style {
    /// The style that a chat template shows its model.
    pub fn of(template: &str) -> Option<Style> {
        if template.contains("<tool_call>") {
            Some(Style::Tagged)
        } else if template.contains(ARGUMENTS) {
            Some(Style::Marked)
        } else if template.contains(BEGINS) || template.contains("\"parameters\"") && template.contains("tools") {
            Some(Style::Json)
        } else {
            None
        }
    }

    /// What begins a call, and what ends it where something does; nothing if it is the whole
    /// answer.
    pub fn tags(self) -> Option<(&'static str, Option<&'static str>)> {
        match self {
            Style::Tagged => Some(("<tool_call>", Some("</tool_call>"))),
            Style::Marked => Some((BEGINS, None)),
            Style::Json => None,
        }
    }

    /// Every mark of it.
    pub fn marks(self) -> &'static [&'static str] {
        match self {
            Style::Tagged => &["<tool_call>", "</tool_call>"],
            Style::Marked => &[BEGINS, ID, ARGUMENTS],
            Style::Json => &[],
        }
    }

    /// The calls that stand between its tags, if they are such. `tools` are those that were
    /// offered.
    pub fn read(self, inside: &str, tools: &[Value]) -> Option<Vec<Call>> {
        match self {
            Style::Tagged => tagged(inside, tools).map(|call| vec![call]),
            Style::Marked => marked(inside),
            Style::Json => json(inside),
        }
    }
}

/// The calls after a mark: one with its name before the arguments, or a list of them in JSON, as
/// older models of the family have it.
fn marked(inside: &str) -> Option<Vec<Call>> {
    let Some((name, arguments)) = inside.split_once(ARGUMENTS) else { return json(inside) };
    let name = name.split_once(ID).map_or(name, |(name, _)| name).trim();
    let arguments: Value = serde_json::from_str(arguments).ok()?;
    (!name.is_empty() && arguments.is_object()).then(|| vec![Call { name: name.to_owned(), arguments }])
}

/// A call.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The tool's name.
    pub name: String,
    /// Its arguments, a JSON object.
    pub arguments: Value,
}

/// The call inside a pair of tags, if it is one. `tools` are those that were offered.
pub fn tagged(inside: &str, tools: &[Value]) -> Option<Call> {
    let inside = inside.trim();
    if inside.starts_with('{') {
        return call_of(serde_json::from_str(inside).ok()?);
    }
    let rest = inside.strip_prefix("<function=")?;
    let (name, mut rest) = rest.split_once('>')?;
    let mut arguments = Map::new();
    loop {
        rest = rest.trim_start();
        if let Some(end) = rest.strip_prefix("</function>") {
            let call = Call { name: name.trim().to_owned(), arguments: Value::Object(arguments) };
            return (end.trim().is_empty() && !call.name.is_empty()).then_some(call);
        }
        let (key, after) = rest.strip_prefix("<parameter=")?.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let is_text = schema(tools, name, key).is_some_and(|s| s["type"] == "string");
        let parsed = if is_text { None } else { serde_json::from_str(value).ok() };
        arguments.insert(key.to_owned(), parsed.unwrap_or_else(|| value.into()));
        rest = after;
    }
}

/// An id for a call: nine letters and digits, which is the one form that every template takes
/// (Mistral's refuse others). It follows from `seed`.
pub fn call_id(seed: &str) -> String {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let hash = Sha256::digest(seed);
    let mut n = hash[..8].iter().fold(0, |n, b| n << 8 | u64::from(*b));
    let mut digit = || {
        let digit = DIGITS[(n % 62) as usize];
        n /= 62;
        char::from(digit)
    };
    (0..9).map(|_| digit()).collect()
}

/// An id as it is, if it has that form; else one that follows from it, the same for a call and its
/// result.
pub fn nine(id: &str) -> String {
    let fits = id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric());
    if fits { id.to_owned() } else { call_id(id) }
}

/// Whether a template takes ids of nine characters alone.
pub fn needs_nine(template: &str) -> bool {
    let plain: String = template.split_whitespace().collect();
    ["length!=9", "length==9"].iter().any(|check| plain.contains(check))
}

fn schema<'a>(tools: &'a [Value], name: &str, key: &str) -> Option<&'a Value> {
    let tool = tools.iter().map(|t| &t["function"]).find(|f| f["name"] == name)?;
    tool["parameters"]["properties"].get(key)
}

/// The calls that an answer in JSON is, if it is nothing else.
pub fn json(answer: &str) -> Option<Vec<Call>> {
    let answer = answer.trim();
    let answer = answer.strip_prefix("<|python_tag|>").unwrap_or(answer).trim();
    let answer = answer.strip_prefix(BEGINS).unwrap_or(answer).trim();
    let calls = match serde_json::from_str(answer).ok()? {
        Value::Array(calls) => calls.into_iter().map(call_of).collect::<Option<Vec<_>>>()?,
        one => vec![call_of(one)?],
    };
    (!calls.is_empty()).then_some(calls)
}

/// Whether an answer that begins so may be calls in JSON.
pub fn may_be_json(start: &str) -> bool {
    let start = start.trim_start();
    start.starts_with(['{', '['])
        || ["<|python_tag|>", BEGINS].iter().any(|t| t.starts_with(start) || start.starts_with(t))
}

fn call_of(mut value: Value) -> Option<Call> {
    let name = value["name"].as_str().filter(|n| !n.is_empty())?.to_owned();
    let arguments = value.as_object_mut()?;
    let arguments =
        arguments.remove("arguments").or_else(|| arguments.remove("parameters")).unwrap_or_else(|| json!({}));
    let arguments = match arguments {
        // Some write the arguments as a text that is JSON, as the wire has them.
        Value::String(text) => serde_json::from_str(&text).ok()?,
        other => other,
    };
    arguments.is_object().then_some(Call { name, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, arguments: Value) -> Call {
        Call { name: name.to_owned(), arguments }
    }

    #[test]
    fn calls_of_every_style_are_read() {
        let weather = json!({ "city": "Rome", "days": 3 });
        let text = "\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 3}}\n";
        assert_eq!(tagged(text, &[]), Some(call("weather", weather.clone())));
        let tool = json!({ "function": { "name": "weather", "parameters": { "properties": { "zip": { "type": "string" } } } } });
        let text = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
            <parameter=zip>\n00100\n</parameter>\n</function>";
        let arguments = json!({ "city": "Rome", "days": 3, "zip": "00100" });
        assert_eq!(tagged(text, &[tool]), Some(call("weather", arguments)));
        let text = "[{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 3}}]";
        assert_eq!(json(text), Some(vec![call("weather", weather.clone())]));
        let text =
            "<|python_tag|>{\"name\": \"weather\", \"parameters\": \"{\\\"city\\\":\\\"Rome\\\",\\\"days\\\":3}\"}";
        assert_eq!(json(text), Some(vec![call("weather", weather)]));
    }

    #[test]
    fn ids_have_nine_letters_and_digits() {
        let ids = ["call_a_0", "call_a_1", "toolu_x"].map(nine);
        assert!(ids.iter().all(|id| id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric())), "{ids:?}");
        assert!(ids[0] != ids[1] && ids[1] != ids[2]);
        assert_eq!((nine(&ids[0]), nine("call_a_0")), (ids[0].clone(), ids[0].clone()));
        assert!(needs_nine("{%- if tool_call.id|length != 9 %}") && !needs_nine("{%- if messages|length < 9 %}"));
    }

    #[test]
    fn what_is_malformed_is_no_call() {
        let bad = [
            "",
            "{",
            "{\"name\": 3}",
            "{\"name\": \"f\", \"arguments\": [1]}",
            "<function=f>",
            "<function=>\n</function>",
        ];
        for text in bad.iter().chain(&["<function=f><parameter=a>1</function>", "<function=f></function> more"]) {
            assert_eq!(tagged(text, &[]), None, "{text}");
        }
        for text in ["[]", "hello", "{\"name\": \"f\"} and more", "[{\"name\": \"f\"}, 3]"] {
            assert_eq!(json(text), None, "{text}");
        }
    }
}
