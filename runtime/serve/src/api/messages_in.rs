//! Messages and tools as OpenAI's endpoints take them, turned into what templates expect.

use serde_json::{Map, Value, json};

use crate::fields::{Fields, Refusal, kind};

/// Most messages of a conversation.
const MOST_MESSAGES: usize = 10_000;

/// The text of a message's content: a string, or parts of which all are text.
fn content(value: Option<Value>, place: &str) -> Result<Option<String>, Refusal> {
    match value {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (i, part) in parts.into_iter().enumerate() {
                let place = format!("{place}.content[{i}]");
                let mut part = Fields::at(part, &place)?;
                let kind = part.needed_text("type")?;
                if !["text", "input_text", "output_text", "refusal"].contains(&kind.as_str()) {
                    let shown = loaf_formats::text::short(&kind, 40);
                    return Err(Refusal::field(&place, format!("parts of type {shown} are not supported, text is")));
                }
                text.push_str(&part.needed_text(if kind == "refusal" { "refusal" } else { "text" })?);
                part.labels(&["annotations", "logprobs"]);
                part.done()?;
            }
            Ok(Some(text))
        }
        Some(other) => {
            let message = format!("expected a string or an array of parts, found {}", kind(&other));
            Err(Refusal::field(&format!("{place}.content"), message))
        }
    }
}

/// Arguments as templates want them: an object where they are one.
pub fn arguments(text: &str) -> Value {
    serde_json::from_str::<Value>(text).ok().filter(Value::is_object).unwrap_or_else(|| text.into())
}

fn tool_call(value: Value, place: &str) -> Result<Value, Refusal> {
    let mut call = Fields::at(value, place)?;
    let id = call.text("id")?;
    call.unsupported("type", &["function".into()])?;
    call.labels(&["index"]);
    let mut function = call.object("function")?.ok_or_else(|| call.missing("function", "an object"))?;
    let name = function.needed_text("name")?;
    let text = function.text("arguments")?.unwrap_or_else(|| "{}".to_owned());
    function.done()?;
    call.done()?;
    let mut out = json!({ "type": "function", "function": { "name": name, "arguments": arguments(&text) } });
    if let Some(id) = id {
        out["id"] = id.into();
    }
    Ok(out)
}

/// Messages of a chat.
///
/// # Errors
/// What is no message, with its place.
pub fn messages(list: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    if list.is_empty() || list.len() > MOST_MESSAGES {
        return Err(Refusal::field(
            "messages",
            format!("expected 1 to {MOST_MESSAGES} messages, found {}", list.len()),
        ));
    }
    let one = |(i, value)| {
        let place = format!("messages[{i}]");
        message(Fields::at(value, &place)?, &place)
    };
    list.into_iter().enumerate().map(one).collect()
}

/// That somebody else than the model spoke last.
///
/// # Errors
/// Messages that end with the beginning of an answer, or none at all; the refusal is about `field`.
pub fn ends_well(messages: &[Value], field: &str) -> Result<(), Refusal> {
    match messages.last() {
        Some(last) if last["role"] != "assistant" => Ok(()),
        Some(_) => {
            let message = "expected the user or a tool to speak last; the start of an answer cannot be given here";
            Err(Refusal::field(field, message))
        }
        None => Err(Refusal::field(field, "expected at least one message, found none")),
    }
}

/// One message, which stands at `place`.
///
/// # Errors
/// What is no message.
pub fn message(mut m: Fields, place: &str) -> Result<Value, Refusal> {
    let role = m.needed_text("role")?;
    let text = content(m.any("content"), place)?;
    let mut out = Map::new();
    let name = if role == "developer" { "system" } else { role.as_str() };
    out.insert("role".to_owned(), name.into());
    match role.as_str() {
        "system" | "developer" | "user" => {
            let text = text.ok_or_else(|| m.missing("content", "a text"))?;
            out.insert("content".to_owned(), text.into());
        }
        "tool" => {
            let text = text.ok_or_else(|| m.missing("content", "a text"))?;
            out.insert("content".to_owned(), text.into());
            for field in ["tool_call_id", "name"] {
                if let Some(value) = m.text(field)? {
                    out.insert(field.to_owned(), value.into());
                }
            }
        }
        "assistant" => {
            let calls = m.list("tool_calls")?.unwrap_or_default();
            if text.is_none() && calls.is_empty() {
                return Err(m.missing("content", "a text or tool_calls"));
            }
            out.insert("content".to_owned(), text.unwrap_or_default().into());
            // Names under which servers give it, and take it back.
            let other = m.text("reasoning")?;
            if let Some(reasoning) = m.text("reasoning_content")?.or(other) {
                out.insert("reasoning_content".to_owned(), reasoning.into());
            }
            if !calls.is_empty() {
                let calls = calls.into_iter().enumerate();
                let calls = calls.map(|(i, call)| tool_call(call, &format!("{place}.tool_calls[{i}]")));
                out.insert("tool_calls".to_owned(), calls.collect::<Result<Value, _>>()?);
            }
            m.labels(&["annotations"]);
            for field in ["refusal", "audio", "function_call"] {
                m.unsupported(field, &[])?;
            }
        }
        other => {
            let shown = loaf_formats::text::short(other, 40);
            let message = format!("expected system, developer, user, assistant or tool, found {shown}");
            return Err(Refusal::field(&format!("{place}.role"), message));
        }
    }
    m.done()?;
    Ok(Value::Object(out))
}

/// Tools on offer.
///
/// # Errors
/// What is no function, with its place.
pub fn tools(list: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    list.into_iter().enumerate().map(|(i, value)| tool(value, &format!("tools[{i}]"))).collect()
}

/// An object that goes on as it is.
///
/// # Errors
/// Something else, by name.
pub fn object(fields: &mut Fields, name: &'static str) -> Result<Option<Value>, Refusal> {
    fields.typed(name, "an object", |v| v.is_object().then(|| v.clone()))
}

fn tool(value: Value, place: &str) -> Result<Value, Refusal> {
    let mut tool = Fields::at(value, place)?;
    let kind = tool.needed_text("type")?;
    if kind != "function" {
        let shown = loaf_formats::text::short(&kind, 40);
        return Err(Refusal::field(&format!("{place}.type"), format!("expected function, found {shown}")));
    }
    // Chat puts the function inside, responses lay it flat.
    let mut function = match tool.object("function")? {
        Some(function) => {
            tool.done()?;
            function
        }
        None => tool,
    };
    let name = function.needed_text("name")?;
    let mut out = json!({ "name": name });
    if let Some(description) = function.text("description")? {
        out["description"] = description.into();
    }
    let empty = || json!({ "type": "object", "properties": {} });
    out["parameters"] = object(&mut function, "parameters")?.unwrap_or_else(empty);
    function.unsupported("strict", &[false.into()])?;
    function.done()?;
    Ok(json!({ "type": "function", "function": out }))
}

/// What chat requests say of how tools are used, and of the form of an answer; true if no tool is
/// to be called.
///
/// # Errors
/// What needs a grammar, by name.
pub fn tool_choice(fields: &mut Fields) -> Result<bool, Refusal> {
    fields.unsupported("parallel_tool_calls", &[true.into()])?;
    match fields.any("tool_choice") {
        None => Ok(false),
        Some(Value::String(choice)) if choice == "auto" => Ok(false),
        Some(Value::String(choice)) if choice == "none" => Ok(true),
        Some(_) => Err(Refusal::field("tool_choice", "not supported here but as \"auto\" or \"none\"")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_become_what_templates_expect() {
        let call = json!({ "id": "a", "type": "function", "function": { "name": "f", "arguments": "{\"x\":1}" } });
        let list = json!([
            { "role": "developer", "content": [{ "type": "text", "text": "Be " }, { "type": "text", "text": "kind." }] },
            { "role": "user", "content": "Hi" },
            { "role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [call] },
            { "role": "tool", "tool_call_id": "a", "content": "3" },
        ]);
        let out = messages(list.as_array().cloned().unwrap_or_default()).expect("good messages");
        assert_eq!(out[0], json!({ "role": "system", "content": "Be kind." }));
        assert_eq!(out[2]["tool_calls"][0]["function"]["arguments"], json!({ "x": 1 }));
        assert_eq!((&out[2]["content"], &out[2]["reasoning_content"]), (&json!(""), &json!("hm")));
    }

    #[test]
    fn what_is_no_message_is_named_by_its_place() {
        let bad = [
            (json!({ "role": "user" }), "messages[0].content"),
            (json!({ "role": "bard", "content": "x" }), "messages[0].role"),
            (json!({ "role": "user", "content": "x", "mood": 3 }), "messages[0].mood"),
            (json!({ "role": "user", "content": [{ "type": "image_url" }] }), "messages[0].content[0]"),
            (json!("hello"), "messages[0]"),
        ];
        for (message, place) in bad {
            let refusal = messages(vec![message]).expect_err(place);
            assert_eq!((refusal.status, refusal.param.as_deref()), (400, Some(place)), "{refusal}");
        }
        assert!(messages(Vec::new()).is_err());
        assert_eq!(tools(vec![json!({ "type": "web" })]).unwrap_err().param.as_deref(), Some("tools[0].type"));
    }
}
