//! A conversation and the prompts it makes: turns in, token ids out.
//!
//! Every prompt renders the whole conversation through the model's template, since templates
//! rewrite the past (they drop old reasoning, say). What always holds: nothing that a message says
//! becomes a special token unless [`Conversation::special`] is set; a prompt never depends on what
//! was asked before. What this does not do: it evaluates nothing and keeps no state of the model;
//! [`crate::Session::keep_prefix`] says how much of a prompt a sequence holds already.

use std::fmt;

use loaf_formats::chat::Chat;
use serde_json::{Value, json};

use crate::chat::{ChatTemplate, Inputs, TemplateError, message};
use crate::tokenizer::{EncodeOptions, Scratch, Tokenizer};

/// Messages and how they become a prompt.
///
/// ```
/// use loaf_runtime::{Conversation, Model};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../artifacts/default.loaf");
/// let model = Model::open(path.as_ref())?;
/// let tokenizer = model.tokenizer()?.ok_or("a loaf without a tokenizer")?;
/// let mut conversation = Conversation::new(model.chat())?.ok_or("a loaf without a chat template")?;
/// conversation.push_user("undo the last commit");
/// let prompt = conversation.prompt(&tokenizer, &mut Default::default())?;
/// // What a message says spells no special token; the template's own words do.
/// assert!(tokenizer.is_special(prompt.ids[0]));
/// conversation.pop();
/// conversation.push_user("<|user|>");
/// let typed = conversation.prompt(&tokenizer, &mut Default::default())?;
/// let special = |ids: &[u32]| ids.iter().filter(|id| tokenizer.is_special(**id)).count();
/// assert_eq!(special(&typed.ids), special(&prompt.ids));
/// # Ok(())
/// # }
/// ```
pub struct Conversation {
    template: ChatTemplate,
    bos_token: Option<String>,
    eos_token: Option<String>,
    system: Option<String>,
    messages: Vec<Value>,
    /// What the template is told of thinking; `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// Whether text of messages may spell special tokens.
    pub special: bool,
}

/// A prompt, ready to be evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its token ids.
    pub ids: Vec<u32>,
    /// Whether it ends inside the model's reasoning, so that the answer begins there.
    pub thinks: bool,
}

/// Why there is no prompt, or no conversation.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConversationError {
    /// The template fails on these messages.
    Template(TemplateError),
    /// The last message alone leaves no room for an answer.
    TooLong {
        /// Tokens of the prompt with nothing left to drop.
        tokens: usize,
        /// Positions there are.
        context: usize,
    },
    /// What was saved has no array 'messages'.
    NoMessages,
    /// A message of what was saved lacks a text 'role' or 'content'.
    NoMessage {
        /// Its place in the array.
        index: usize,
    },
}

impl fmt::Display for ConversationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConversationError::Template(e) => e.fmt(f),
            ConversationError::TooLong { tokens, context } => {
                write!(f, "the message takes {tokens} tokens, expected fewer than {context} (the context)")
            }
            ConversationError::NoMessages => write!(f, "no array 'messages'; expected what /save writes"),
            ConversationError::NoMessage { index } => {
                write!(f, "message {index} lacks a text 'role' or 'content'; expected what /save writes")
            }
        }
    }
}

impl std::error::Error for ConversationError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ConversationError::Template(e) => Some(e),
            _ => None,
        }
    }
}

impl From<TemplateError> for ConversationError {
    fn from(e: TemplateError) -> Self {
        ConversationError::Template(e)
    }
}

impl Conversation {
    /// An empty conversation in the words of `chat`; `None` if it has no template.
    ///
    /// # Errors
    /// A template that does not parse.
    pub fn new(chat: &Chat) -> Result<Option<Conversation>, TemplateError> {
        let Some(source) = chat.template.as_deref() else { return Ok(None) };
        Ok(Some(Conversation {
            template: ChatTemplate::parse(source)?,
            bos_token: chat.bos_token.clone(),
            eos_token: chat.eos_token.clone(),
            system: None,
            messages: Vec::new(),
            thinking: None,
            special: false,
        }))
    }

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Sets or removes the system message.
    pub fn set_system(&mut self, text: Option<String>) {
        self.system = text;
    }

    /// The messages after the system message, oldest first.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// Adds what the user says.
    pub fn push_user(&mut self, text: &str) {
        self.messages.push(message("user", text));
    }

    /// Adds what the model answered.
    pub fn push_answer(&mut self, text: &str) {
        self.messages.push(message("assistant", text));
    }

    /// Takes the last message back.
    pub fn pop(&mut self) -> Option<Value> {
        self.messages.pop()
    }

    /// Takes the last message back if it is an answer.
    pub fn pop_answer(&mut self) -> Option<Value> {
        self.messages.pop_if(|m| m["role"] == "assistant")
    }

    /// Puts a message back that was taken.
    pub fn push(&mut self, message: Value) {
        self.messages.push(message);
    }

    /// Forgets every message but the system message.
    pub fn clear(&mut self) {
        self.messages.clear();
    }

    /// Forgets the oldest turn: a user's message and everything up to the next. Says how many
    /// messages that were; 0 if one turn is all there is.
    pub fn drop_oldest(&mut self) -> usize {
        let dropped = self.turn_starts().nth(1).unwrap_or(0);
        self.messages.drain(..dropped);
        dropped
    }

    /// Where turns begin: at each message of the user.
    fn turn_starts(&self) -> impl Iterator<Item = usize> {
        (0..self.messages.len()).filter(|&i| self.messages[i]["role"] == "user")
    }

    /// The ids of the whole conversation and of the start of an answer.
    ///
    /// # Errors
    /// What the template says.
    pub fn prompt(&self, tokenizer: &Tokenizer, scratch: &mut Scratch) -> Result<Prompt, ConversationError> {
        self.prompt_from(0, tokenizer, scratch)
    }

    /// The prompt without the first `skip` messages.
    fn prompt_from(
        &self,
        skip: usize,
        tokenizer: &Tokenizer,
        scratch: &mut Scratch,
    ) -> Result<Prompt, ConversationError> {
        let system = self.system.iter().map(|text| message("system", text));
        let messages: Vec<Value> = system.chain(self.messages[skip..].iter().cloned()).collect();
        let inputs = Inputs {
            messages: &messages,
            add_generation_prompt: true,
            enable_thinking: self.thinking,
            bos_token: self.bos_token.as_deref(),
            eos_token: self.eos_token.as_deref(),
            ..Inputs::default()
        };
        Ok(render(&self.template, &inputs, self.special, tokenizer, scratch)?)
    }

    /// The prompt, after as few of the oldest turns were dropped as leave room for `room` tokens of
    /// an answer in a context of `context` tokens; and how many messages were dropped. With one
    /// turn left, any room will do.
    ///
    /// # Errors
    /// What the template says; a last turn that does not fit by itself, with nothing dropped then.
    pub fn prompt_within(
        &mut self,
        context: usize,
        room: usize,
        tokenizer: &Tokenizer,
        scratch: &mut Scratch,
    ) -> Result<(Prompt, usize), ConversationError> {
        let whole = self.prompt(tokenizer, scratch)?;
        if whole.ids.len().saturating_add(room) <= context {
            return Ok((whole, 0));
        }
        // Prompts get shorter as more is dropped, so that the fewest are found by bisection.
        let starts: Vec<usize> = self.turn_starts().skip(1).collect();
        let (mut low, mut high, mut best) = (0, starts.len(), None);
        while low < high {
            let middle = low + (high - low) / 2;
            let prompt = self.prompt_from(starts[middle], tokenizer, scratch)?;
            if prompt.ids.len().saturating_add(room) <= context || middle + 1 == starts.len() {
                (high, best) = (middle, Some((prompt, starts[middle])));
            } else {
                low = middle + 1;
            }
        }
        let (prompt, dropped) = best.unwrap_or((whole, 0));
        if prompt.ids.len() >= context {
            return Err(ConversationError::TooLong { tokens: prompt.ids.len(), context });
        }
        self.messages.drain(..dropped);
        Ok((prompt, dropped))
    }

    /// The conversation as JSON.
    pub fn save(&self) -> Value {
        json!({ "system": self.system, "messages": self.messages })
    }

    /// Continues a conversation that was saved.
    ///
    /// # Errors
    /// [`ConversationError::NoMessages`], [`ConversationError::NoMessage`]; then nothing changes.
    pub fn load(&mut self, saved: &Value) -> Result<(), ConversationError> {
        let messages = saved["messages"].as_array().ok_or(ConversationError::NoMessages)?;
        let is_message = |m: &Value| m["role"].is_string() && m["content"].is_string();
        if let Some(index) = messages.iter().position(|m| !is_message(m)) {
            return Err(ConversationError::NoMessage { index });
        }
        self.system = saved["system"].as_str().map(str::to_owned);
        self.messages = messages.clone();
        Ok(())
    }
}

/// The prompt that a template makes of its inputs. What messages, tools and variables say spells
/// special tokens only if `special`.
///
/// # Errors
/// What the template says.
pub fn render(
    template: &ChatTemplate,
    inputs: &Inputs<'_>,
    special: bool,
    tokenizer: &Tokenizer,
    scratch: &mut Scratch,
) -> Result<Prompt, TemplateError> {
    let rendered = template.render(inputs)?;
    let typed = if special { &[][..] } else { &rendered.typed };
    let mut ids = Vec::new();
    tokenizer.encode_typed(&rendered.text, typed, false, scratch, &mut ids);
    Ok(Prompt { ids, thinks: rendered.text.trim_end().ends_with("<think>") })
}

/// The ids of a text by itself, with what the tokenizer puts around one. It spells special tokens
/// only if `special`.
pub fn text_ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    let mut ids = Vec::new();
    let options = EncodeOptions { add_special: true, parse_special: special };
    tokenizer.encode_with(text, options, &mut Scratch::default(), &mut ids);
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talk() -> Conversation {
        let template = "{% for m in messages %}{{ m.content }}{% endfor %}".to_owned();
        let chat = Chat { template: Some(template), ..Chat::default() };
        Conversation::new(&chat).expect("it parses").expect("there is one")
    }

    #[test]
    fn turns_are_dropped_whole_and_the_last_one_stays() {
        let mut talk = talk();
        for text in ["one", "two", "three"] {
            talk.push_user(text);
            talk.push_answer(text);
        }
        talk.push_user("four");
        assert_eq!(talk.drop_oldest(), 2);
        assert_eq!(talk.messages()[0]["content"], "two");
        assert_eq!((talk.drop_oldest(), talk.drop_oldest(), talk.drop_oldest()), (2, 2, 0));
        assert_eq!(talk.messages().len(), 1);
    }

    #[test]
    fn what_was_saved_is_loaded_and_other_things_are_not() {
        let mut talk = talk();
        talk.set_system(Some("be kind".into()));
        talk.push_user("hello");
        let saved = talk.save();
        for bad in [json!(3), json!({ "messages": 1 }), json!({ "messages": [{ "role": "user" }] })] {
            assert!(talk.load(&bad).is_err(), "{bad}");
            assert_eq!(talk.save(), saved);
        }
        let mut other = super::tests::talk();
        other.load(&saved).expect("what save gave");
        assert_eq!(other.save(), saved);
    }
}
