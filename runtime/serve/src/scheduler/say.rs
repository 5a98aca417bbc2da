//! What has a say in which token follows, beside the model: what a request adds to logits, and the
//! end of reasoning that has taken as long as it may.

use loaf_runtime::generate::Constraint;
use loaf_runtime::tokenizer::{EncodeOptions, Scratch, Tokenizer};

use crate::answer::{THINK, THOUGHT};
use crate::job::{Reasoning, Text};

/// What is written where reasoning has to end, as models write it that end it themselves.
const END: &str = "\n</think>\n\n";

/// Where an answer is.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// It may still begin to reason.
    Start,
    /// So many tokens into its reasoning.
    Reasoning(usize),
    /// So many tokens into [`END`].
    Ending(usize),
    /// The answer itself.
    Answer,
}

/// Reasoning that is being counted.
struct Bound {
    tokenizer: Tokenizer,
    most: usize,
    /// [`END`] as tokens.
    end: Vec<u32>,
    place: Place,
    /// The bytes last written: as many as may become a mark.
    tail: Vec<u8>,
}

/// What has a say; see the module's doc.
pub(super) struct Say {
    /// Added to logits, by token.
    bias: Vec<(u32, f32)>,
    bound: Option<Bound>,
}

impl Say {
    /// What a request has to say, if it has.
    pub(super) fn of(text: &Text, tokenizer: Option<&Tokenizer>) -> Option<Say> {
        let bound = text.reasoning.zip(tokenizer).map(|(r, t)| Bound::new(r, t.clone()));
        (!text.bias.is_empty() || bound.is_some()).then(|| Say { bias: text.bias.clone(), bound })
    }
}

impl Constraint for Say {
    fn restrict(&mut self, logits: &mut [f32]) {
        if let Some(id) = self.bound.as_ref().and_then(Bound::forced) {
            logits.fill(f32::NEG_INFINITY);
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = 0.0;
            }
            return;
        }
        for (id, x) in &self.bias {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += x;
            }
        }
    }

    fn accept(&mut self, id: u32) {
        if let Some(bound) = &mut self.bound {
            bound.accept(id);
        }
    }
}

impl Bound {
    fn new(reasoning: Reasoning, tokenizer: Tokenizer) -> Bound {
        let mut end = Vec::new();
        let options = EncodeOptions { add_special: false, parse_special: true };
        tokenizer.encode_with(END, options, &mut Scratch::default(), &mut end);
        let place = if reasoning.begun { Place::Reasoning(0) } else { Place::Start };
        let mut bound = Bound { tokenizer, most: reasoning.most, end, place, tail: Vec::new() };
        bound.count(0);
        bound
    }

    /// The token that has to follow, if one has to.
    fn forced(&self) -> Option<u32> {
        if let Place::Ending(at) = self.place { self.end.get(at).copied() } else { None }
    }

    /// So many tokens of reasoning were written.
    fn count(&mut self, n: usize) {
        if let Place::Reasoning(_) = self.place {
            self.place = if n >= self.most { Place::Ending(0) } else { Place::Reasoning(n) };
        }
    }

    fn accept(&mut self, id: u32) {
        match self.place {
            Place::Start => {
                self.tail.extend_from_slice(self.tokenizer.token_bytes(id));
                let start = self.tail.trim_ascii_start();
                if start.starts_with(THINK.as_bytes()) {
                    self.place = Place::Reasoning(0);
                    self.tail.clear();
                    self.count(0);
                } else if !THINK.as_bytes().starts_with(start) {
                    self.place = Place::Answer;
                }
            }
            Place::Reasoning(n) => {
                self.tail.extend_from_slice(self.tokenizer.token_bytes(id));
                if self.tail.windows(THOUGHT.len()).any(|w| w == THOUGHT.as_bytes()) {
                    self.place = Place::Answer;
                    return;
                }
                let kept = self.tail.len().saturating_sub(THOUGHT.len() - 1);
                self.tail.drain(..kept);
                self.count(n + 1);
            }
            Place::Ending(at) => {
                self.place = if at + 1 < self.end.len() { Place::Ending(at + 1) } else { Place::Answer };
            }
            Place::Answer => (),
        }
    }
}
