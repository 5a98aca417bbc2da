//! What requests tell the model's chat template beside messages and tools, and what its template
//! makes of it.
//!
//! A template that does not look at a switch would ignore it, so such a switch is refused by the
//! name that the request has for it.

use serde_json::{Value, json};

use crate::answer::Splitter;
use crate::fields::{Fields, Refusal};
use crate::hub::Loaded;
use crate::job::{Reasoning, Text};
use crate::prompt::{self, Prompt, Talk};
use crate::tools;

/// Most tokens that reasoning may be bounded to.
pub const MOST_REASONING: u64 = 1 << 24;

/// What levels are worth in tokens, where a template has a switch for reasoning and no levels. The
/// highest has no bound.
const LEVELS: [(&str, usize); 3] = [("minimal", 256), ("low", 1024), ("medium", 4096)];

/// Switches of a request, each with the name of its field.
#[derive(Debug, Default)]
pub struct Switches {
    /// Whether to reason.
    pub thinking: Option<(bool, &'static str)>,
    effort: Option<(String, &'static str)>,
    most: Option<(usize, &'static str)>,
    variables: Vec<(String, Value)>,
}

impl Switches {
    /// Those of chats.
    ///
    /// # Errors
    /// What is not as it should be, by name.
    pub fn of_chat(fields: &mut Fields) -> Result<Switches, Refusal> {
        let thinking = fields.bool("enable_thinking")?.map(|on| (on, "enable_thinking"));
        let mut out = Switches { thinking, ..Switches::default() };
        if let Some(kwargs) = fields.any("chat_template_kwargs") {
            let Value::Object(map) = kwargs else {
                return Err(Refusal::field("chat_template_kwargs", "expected an object"));
            };
            for (name, value) in map {
                match (name.as_str(), value.as_bool()) {
                    ("enable_thinking", Some(on)) => out.thinking = Some((on, "chat_template_kwargs.enable_thinking")),
                    (
                        "messages" | "tools" | "add_generation_prompt" | "bos_token" | "eos_token" | "enable_thinking",
                        _,
                    ) => {
                        let name = format!("chat_template_kwargs.{name}");
                        return Err(Refusal::field(&name, "not to be set here"));
                    }
                    _ => out.variables.push((name, value)),
                }
            }
        }
        out.budget(fields, "thinking_budget", "thinking_budget")?;
        let effort = fields.text("reasoning_effort")?;
        out.effort(effort, "reasoning_effort")?;
        Ok(out)
    }

    /// How many tokens the model may reason, which a field says that stands at `place`.
    ///
    /// # Errors
    /// What is no such number, or stands beside a switch that turns reasoning off.
    pub fn budget(&mut self, fields: &mut Fields, name: &'static str, place: &'static str) -> Result<(), Refusal> {
        let Some(most) = fields.number(name, 1, MOST_REASONING)? else { return Ok(()) };
        if let Some((_, other)) = self.thinking.filter(|(on, _)| !on) {
            return Err(Refusal::field(place, format!("expected none where {other} turns reasoning off")));
        }
        self.most = Some((most as usize, place));
        Ok(())
    }

    /// How much to reason, which the field `field` says.
    ///
    /// # Errors
    /// A level that there is not.
    pub fn effort(&mut self, level: Option<String>, field: &'static str) -> Result<(), Refusal> {
        let Some(level) = level else { return Ok(()) };
        if !["none", "minimal", "low", "medium", "high"].contains(&level.as_str()) {
            return Err(Refusal::field(field, "expected none, minimal, low, medium or high"));
        }
        if let Some((on, other)) = self.thinking.filter(|(on, _)| *on == (level == "none")) {
            return Err(Refusal::field(field, format!("expected what goes with {other} = {on}, found {level}")));
        }
        if let Some((_, other)) = self.most.filter(|_| level == "none") {
            return Err(Refusal::field(field, format!("expected a level beside {other}, found none")));
        }
        self.effort = Some((level, field));
        Ok(())
    }

    /// Most tokens of reasoning, if that is said in tokens.
    pub fn most_reasoning(&self) -> Option<usize> {
        self.most.map(|(most, _)| most)
    }

    /// Tells the template, whose text is `source`.
    fn tell(self, source: &str, talk: &mut Talk) -> Result<(), Refusal> {
        let mut thinking = self.thinking;
        if let Some((level, field)) = self.effort {
            let has_levels = has_word(source, "reasoning_effort");
            if level != "none" && has_levels {
                talk.variables.push(("reasoning_effort".to_owned(), level.into()));
                thinking = thinking.or(has_word(source, "enable_thinking").then_some((true, field)));
            } else {
                thinking = Some((level != "none", field));
                talk.most_reasoning = LEVELS.iter().find(|l| l.0 == level).map(|l| l.1);
            }
        }
        if let Some((most, field)) = self.most {
            if !source.contains("think>") {
                return Err(Refusal::field(field, "not supported: this model's chat template knows no reasoning"));
            }
            talk.most_reasoning = Some(most);
        }
        match thinking {
            Some((on, _)) if has_word(source, "enable_thinking") => talk.thinking = Some(on),
            // What never reasons need not be told.
            Some((false, _)) if !source.contains("think>") => (),
            Some((_, field)) => {
                let message = "not supported: this model's chat template has no switch for reasoning";
                return Err(Refusal::field(field, message));
            }
            None => (),
        }
        for (name, value) in self.variables {
            if !has_word(source, &name) {
                let name = format!("chat_template_kwargs.{}", loaf_formats::text::short(&name, 60));
                return Err(Refusal::field(&name, "not supported: this model's chat template has no such variable"));
            }
            talk.variables.push((name, value));
        }
        Ok(())
    }

    /// The prompt of a conversation with these switches.
    ///
    /// # Errors
    /// A switch that the template does not have, or what [`prompt::of_talk`] says.
    pub fn render(self, loaded: &Loaded, talk: &mut Talk) -> Result<Prompt, Refusal> {
        if let Some(source) = loaded.model.chat().template.as_deref() {
            self.tell(source, talk)?;
            if tools::needs_nine(source) {
                talk.messages.iter_mut().for_each(fit_ids);
            }
        }
        prompt::of_talk(loaded, talk)
    }
}

/// Tells a text what its model writes that is more than text: marks that have to be seen, and
/// reasoning that may have a bound.
pub fn shape(text: &mut Text, loaded: &Loaded, talk: &Talk, prompt: &Prompt) {
    let template = loaded.model.chat().template.as_deref().unwrap_or_default();
    let splitter = Splitter::new(template, prompt.thinks, &talk.tools);
    text.options.shown = loaded.tokenizer.as_ref().map(|t| splitter.shown(t)).unwrap_or_default();
    text.reasoning = talk.most_reasoning.map(|most| Reasoning { most, begun: prompt.thinks });
}

/// Gives calls and results ids that every template takes.
fn fit_ids(message: &mut Value) {
    let fit = |id: &mut Value| {
        if let Some(text) = id.as_str() {
            *id = json!(tools::nine(text));
        }
    };
    if let Some(id) = message.get_mut("tool_call_id") {
        fit(id);
    }
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten();
    calls.filter_map(|call| call.get_mut("id")).for_each(fit);
}

/// Whether a name stands in a text as a word of its own.
fn has_word(text: &str, name: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    !name.is_empty()
        && text.match_indices(name).any(|(at, _)| {
            !text[..at].chars().next_back().is_some_and(part)
                && !text[at + name.len()..].chars().next().is_some_and(part)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWITCH: &str = "{% if enable_thinking %}<think>{% endif %}";
    const LEVELS: &str = "{{ reasoning_effort }} {{ documents }}";

    /// Whether to think, and the template's variables.
    type Switched = (Option<bool>, Vec<(String, Value)>);

    fn told(source: &str, fields: Value) -> Result<Switched, Option<String>> {
        let mut talk = Talk::default();
        let mut fields = Fields::of(fields).expect("an object");
        let told = Switches::of_chat(&mut fields).and_then(|s| s.tell(source, &mut talk));
        told.map(|()| (talk.thinking, talk.variables)).map_err(|e| e.param)
    }

    #[test]
    fn a_switch_that_a_template_does_not_have_is_refused_by_its_field() {
        for (source, fields, thinking) in [
            (SWITCH, json!({ "enable_thinking": true }), Some(true)),
            (SWITCH, json!({ "reasoning_effort": "high" }), Some(true)),
            (SWITCH, json!({ "reasoning_effort": "none" }), Some(false)),
            (SWITCH, json!({ "chat_template_kwargs": { "enable_thinking": false } }), Some(false)),
            ("plain", json!({ "enable_thinking": false }), None),
            ("plain", json!({ "reasoning_effort": "none" }), None),
        ] {
            assert_eq!(told(source, fields.clone()), Ok((thinking, Vec::new())), "{source}: {fields}");
        }
        let level = vec![("reasoning_effort".to_owned(), json!("low"))];
        assert_eq!(told(LEVELS, json!({ "reasoning_effort": "low" })), Ok((None, level)));
        let documents = vec![("documents".to_owned(), json!([1]))];
        assert_eq!(told(LEVELS, json!({ "chat_template_kwargs": { "documents": [1] } })), Ok((None, documents)));
        let most = |source: &str, fields: Value| {
            let mut talk = Talk::default();
            let mut fields = Fields::of(fields).expect("an object");
            Switches::of_chat(&mut fields).and_then(|s| s.tell(source, &mut talk)).map_err(|e| e.param)?;
            Ok::<_, Option<String>>(talk.most_reasoning)
        };
        for (source, fields, expected) in [
            (SWITCH, json!({ "thinking_budget": 7 }), Ok(Some(7))),
            (SWITCH, json!({ "thinking_budget": 7, "reasoning_effort": "low" }), Ok(Some(7))),
            (SWITCH, json!({ "reasoning_effort": "low" }), Ok(Some(1024))),
            (SWITCH, json!({ "reasoning_effort": "high" }), Ok(None)),
            (SWITCH, json!({ "reasoning_effort": "none" }), Ok(None)),
            (LEVELS, json!({ "reasoning_effort": "low" }), Ok(None)),
            ("plain", json!({ "thinking_budget": 7 }), Err("thinking_budget")),
            (SWITCH, json!({ "thinking_budget": 0 }), Err("thinking_budget")),
            (SWITCH, json!({ "thinking_budget": 7, "enable_thinking": false }), Err("thinking_budget")),
            (SWITCH, json!({ "thinking_budget": 7, "reasoning_effort": "none" }), Err("reasoning_effort")),
        ] {
            let expected = expected.map_err(|name| Some(name.to_owned()));
            assert_eq!(most(source, fields.clone()), expected, "{source}: {fields}");
        }
        for (source, fields, name) in [
            ("plain", json!({ "enable_thinking": true }), "enable_thinking"),
            ("<think>", json!({ "enable_thinking": false }), "enable_thinking"),
            ("plain", json!({ "reasoning_effort": "low" }), "reasoning_effort"),
            (SWITCH, json!({ "reasoning_effort": "much" }), "reasoning_effort"),
            (SWITCH, json!({ "reasoning_effort": "high", "enable_thinking": false }), "reasoning_effort"),
            (LEVELS, json!({ "chat_template_kwargs": { "document": 1 } }), "chat_template_kwargs.document"),
            (LEVELS, json!({ "chat_template_kwargs": { "tools": 1 } }), "chat_template_kwargs.tools"),
        ] {
            assert_eq!(told(source, fields.clone()), Err(Some(name.to_owned())), "{source}: {fields}");
        }
    }

    #[test]
    fn ids_of_calls_and_results_stay_together() {
        let id = "call_0123456789";
        let mut call = json!({ "role": "assistant", "tool_calls": [{ "id": id }, { "id": "abcdefgh9" }, {}] });
        let mut result = json!({ "role": "tool", "tool_call_id": id });
        [&mut call, &mut result].into_iter().for_each(fit_ids);
        assert_eq!(call["tool_calls"][0]["id"], result["tool_call_id"]);
        assert_eq!(call["tool_calls"][1]["id"], "abcdefgh9");
        assert_eq!(result["tool_call_id"].as_str().map(str::len), Some(9));
    }
}
