//! Chat templates: messages to prompt text, by the Jinja template that comes with a language model.
//!
//! ```
//! use loaf_template::{Inputs, Template, message};
//!
//! let template = Template::parse(
//!     "{%- for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor -%}
//!      {%- if add_generation_prompt %}<|assistant|>{% endif %}",
//! )?;
//! let messages = [message("user", " What does <|end|> do? ")];
//! let rendered = template.render(&Inputs { messages: &messages, add_generation_prompt: true, ..Inputs::default() })?;
//! assert_eq!(rendered.text, "<|user|>What does <|end|> do?<|end|><|assistant|>");
//!
//! // The question is the user's, its angle brackets included; all else is the template's.
//! let question = rendered.typed[0].clone();
//! assert_eq!((rendered.typed.len(), &rendered.text[question]), (1, "What does <|end|> do?"));
//!
//! let error = Template::parse("{% if messages %}\n{{ messages[0] }").err().unwrap();
//! assert_eq!((error.line(), error.column()), (2, 16));
//! # Ok::<(), loaf_template::Error>(())
//! ```
//!
//! Templates are written against the `transformers` library, so this is its environment: Jinja with
//! `trim_blocks` and `lstrip_blocks`, Python's string and dictionary methods, `tojson` in Python's
//! spelling, `raise_exception`, `strftime_now`, `{% break %}` and `{% generation %}`, Python's
//! words and quotes in print, maps in the order they were written.
//!
//! # What a template cannot do
//!
//! A template comes out of a file and is trusted with nothing. It sees its [`Inputs`] and no more:
//! no file, no clock, no environment. Its steps, memory, recursion and output are bounded
//! ([`Limits`]). Everything that it reads or makes is paid for in proportion, before the work is
//! done, and that is held by types: strings and lists can be read in no other way (module `paid`).
//! Trees and values nest to a limited depth.
//!
//! # Who wrote what
//!
//! [`Rendered::typed`] says which bytes of the prompt stem from strings of the caller: messages,
//! tools, variables. The rest is the template's own, and the texts of [`Inputs::bos_token`] and
//! [`Inputs::eos_token`]. So a tokenizer can refuse to read special tokens out of what somebody
//! typed.
//!
//! What this crate does not do: it neither tokenises nor parses replies, and a template is one file
//! (no imports, no inheritance).

use std::ops::Range;
use std::rc::Rc;

use serde_json::Value as Json;

use crate::error::Result;
use crate::paid::{Budget, Text};
use crate::tree::Tree;
use crate::value::{Context, List, MAX_VALUE_DEPTH, Map, Value};

pub use crate::error::{Error, ErrorKind, Position};
pub use crate::paid::Limits;
pub use crate::time::Time;

mod arguments;
mod error;
mod eval;
mod filters;
mod functions;
mod json;
mod lex;
mod methods;
mod operators;
mod paid;
mod parse;
mod predicates;
mod python;
mod sequences;
mod time;
mod tree;
mod value;

/// What a template renders.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inputs<'a> {
    /// Objects with `role` and `content`, and what else the template knows (`tool_calls`,
    /// `reasoning_content`).
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
    /// Other variables, by name (`documents`, `reasoning_effort`). They do not replace those above.
    pub variables: &'a [(&'a str, Json)],
    /// What `strftime_now` shows. The default is a fixed date, see [`Time`].
    pub now: Time,
}

/// A message as templates expect it.
pub fn message(role: &str, content: &str) -> Json {
    serde_json::json!({ "role": role, "content": content })
}

/// What a rendering gives.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rendered {
    /// The prompt.
    pub text: String,
    /// The bytes of `text` that stem from strings of the caller: in order, not empty, apart from
    /// each other, cut between characters.
    ///
    /// Strings of messages, tools and variables count, with one exception: a `role` that is one
    /// word of ASCII letters, digits and underscores does not, since templates make special tokens
    /// of it (`'<|' + role + '|>'`), and it cannot spell one by itself. What is computed from such
    /// strings counts character by character where that can be followed (cut, joined, replaced,
    /// trimmed, changed in case, escaped), whether or not the template looked at it first. The
    /// digits of numbers do not count.
    pub typed: Vec<Range<usize>>,
    /// Steps that the rendering took, of [`Limits::steps`].
    pub steps: u64,
}

/// A parsed template.
pub struct Template {
    tree: Tree,
}

impl Template {
    /// Parses Jinja source.
    ///
    /// # Errors
    /// A syntax error, with line and column. Names of unknown filters, tests and functions are
    /// found when they are used.
    pub fn parse(source: &str) -> Result<Template, Error> {
        parse::parse(source).map(|tree| Template { tree })
    }

    /// The prompt, within the limits that suit every published model.
    ///
    /// # Errors
    /// What the template raises, what it does wrong, or a limit it runs into.
    pub fn render(&self, inputs: &Inputs<'_>) -> Result<Rendered, Error> {
        self.render_within(inputs, Limits::default())
    }

    /// The prompt, within limits of the caller's choice.
    ///
    /// # Errors
    /// As for [`Template::render`].
    pub fn render_within(&self, inputs: &Inputs<'_>, limits: Limits) -> Result<Rendered, Error> {
        let budget = Budget::new(limits);
        let context = Context::new(&budget, &self.tree.literals, inputs.now)?;
        let token = |text: Option<&str>| Text::given(text.unwrap_or_default(), false, &budget).map(Value::Str);
        let tools = if inputs.tools.is_empty() { Value::None } else { list(inputs.tools, &budget)? };
        let mut vars = Vec::with_capacity(inputs.variables.len() + 6);
        for (name, json) in inputs.variables {
            vars.push((*name, value(json, true, MAX_VALUE_DEPTH, &budget)?));
        }
        vars.extend([
            ("messages", list(inputs.messages, &budget)?),
            ("tools", tools),
            ("add_generation_prompt", Value::Bool(inputs.add_generation_prompt)),
            ("bos_token", token(inputs.bos_token)?),
            ("eos_token", token(inputs.eos_token)?),
        ]);
        // As `transformers` does, which always passes this one.
        if inputs.variables.iter().all(|(name, _)| *name != "documents") {
            vars.push(("documents", Value::None));
        }
        vars.extend(inputs.enable_thinking.map(|on| ("enable_thinking", Value::Bool(on))));
        // What the template has no name for, it cannot see.
        let named = vars.into_iter().filter_map(|(name, value)| Some((self.tree.symbol(name)?, value)));
        let (text, typed) = eval::render(&self.tree, &context, named)?;
        Ok(Rendered { text, typed, steps: budget.steps() })
    }
}

fn list(json: &[Json], budget: &Rc<Budget>) -> Result<Value> {
    let mut items = List::new(budget)?;
    json.iter().try_for_each(|json| items.push(value(json, true, MAX_VALUE_DEPTH, budget)?))?;
    Ok(items.finish())
}

/// A copy of JSON that a caller brought.
fn value(json: &Json, typed: bool, depth: u32, budget: &Rc<Budget>) -> Result<Value> {
    let below = || depth.checked_sub(1).ok_or_else(|| budget.limit("expected messages that are nested less"));
    Ok(match json {
        Json::Null => Value::None,
        Json::Bool(b) => Value::Bool(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::Int(i.into()),
            (None, Some(u)) => Value::Int(u.into()),
            (None, None) => Value::Float(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => Value::Str(Text::given(s, typed, budget)?),
        Json::Array(list) => {
            let mut items = List::new(budget)?;
            for json in list {
                items.push(value(json, true, below()?, budget)?)?;
            }
            items.finish()
        }
        Json::Object(map) => {
            let mut items = Map::new(budget)?;
            for (key, json) in map {
                // A word cannot spell a special token, unless the template makes one of it.
                let word = |s: &str| s.len() <= 64 && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
                let typed = !(key == "role" && json.as_str().is_some_and(word));
                items.add_new(Text::given(key, true, budget)?, value(json, typed, below()?, budget)?)?;
            }
            items.finish()
        }
    })
}

#[cfg(test)]
mod tests;
