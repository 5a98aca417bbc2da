//! Splitting what a model writes into reasoning, text and calls of tools, while it is being
//! written.
//!
//! What always holds: the pieces do not depend on how the text was cut on its way here; no
//! character is lost but the marks themselves and white space next to them; what begins like a call
//! and turns out to be something else comes out as text.

use loaf_runtime::tokenizer::Tokenizer;
use serde_json::Value;

use crate::job::Answer;
use crate::job::TokenProbs;

use crate::tools::{self, Call, Style};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// What the model thought.
    Reasoning(String),
    /// What it says.
    Text(String),
    /// What it wants done.
    Call(Call),
}

/// What begins reasoning.
pub const THINK: &str = "<think>";
/// What ends it.
pub const THOUGHT: &str = "</think>";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Nothing has come yet that is not white space.
    Start,
    Reasoning,
    /// Between reasoning and text, where white space is no text.
    Between,
    Text,
    Call,
    /// All of it is kept until the end.
    Json,
}

/// The splitter; see the module's doc.
pub struct Splitter {
    mode: Mode,
    reasons: bool,
    style: Option<Style>,
    tools: Vec<Value>,
    pending: String,
    /// Reasoning has come that is not white space.
    reasoned: bool,
}

impl Splitter {
    /// A splitter for a model whose template is `template`; `thinks` says that the answer begins in
    /// its reasoning, `tools` are those on offer.
    pub fn new(template: &str, thinks: bool, tools: &[Value]) -> Splitter {
        let reasons = template.contains(THINK) || template.contains(THOUGHT);
        let style = Style::of(template).filter(|_| !tools.is_empty());
        let mode = if thinks { Mode::Reasoning } else { Mode::Start };
        Splitter { mode, reasons, style, tools: tools.to_vec(), pending: String::new(), reasoned: false }
    }

    /// Special tokens that are marks to it, so that they have to be part of the text.
    pub fn shown(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let reasoning = [THINK, THOUGHT].into_iter().filter(|_| self.reasons);
        let calls = self.style.map_or(&[][..], Style::marks);
        let ids = reasoning.chain(calls.iter().copied()).filter_map(|mark| tokenizer.id_of(mark));
        ids.filter(|id| tokenizer.is_special(*id)).collect()
    }

    /// One that finds nothing but text.
    pub fn plain() -> Splitter {
        Splitter::new("", false, &[])
    }

    /// Takes text; gives what is certain.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.pending.push_str(text);
        let mut out = Vec::new();
        while self.step(false, &mut out) {}
        out
    }

    /// Nothing follows: gives what is left.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut out = Vec::new();
        while self.step(true, &mut out) {}
        out
    }

    /// One move; whether another may follow.
    fn step(&mut self, ended: bool, out: &mut Vec<Piece>) -> bool {
        let pending = self.pending.as_str();
        match self.mode {
            Mode::Start => {
                if !self.reasons && self.style.is_none() {
                    self.mode = Mode::Text;
                    return !pending.is_empty();
                }
                let start = pending.trim_start();
                let wait = !ended && (start.is_empty() || self.reasons && THINK.starts_with(start));
                if wait {
                    return false;
                }
                if self.reasons && start.starts_with(THINK) {
                    let rest = start[THINK.len()..].to_owned();
                    (self.mode, self.pending) = (Mode::Reasoning, rest);
                    return true;
                }
                self.mode = self.text_mode();
                !self.pending.is_empty()
            }
            Mode::Reasoning => {
                // A template puts a line break behind its mark; it is not what the model thought.
                if !self.reasoned && pending.starts_with(char::is_whitespace) {
                    self.pending = pending.trim_start().to_owned();
                    return true;
                }
                if let Some(at) = pending.find(THOUGHT) {
                    let before = pending[..at].trim_end().to_owned();
                    self.pending.drain(..at + THOUGHT.len());
                    self.mode = Mode::Between;
                    self.reasoning(before, out);
                    return true;
                }
                let held = held(pending, THOUGHT);
                let certain = if ended { pending.trim_end().len() } else { pending.len() - held };
                let text: String = self.pending.drain(..certain).collect();
                if ended {
                    self.pending.clear();
                }
                self.reasoning(text, out);
                false
            }
            Mode::Between => {
                let start = pending.trim_start();
                if start.is_empty() {
                    self.pending.clear();
                    return false;
                }
                self.pending = start.to_owned();
                self.mode = self.text_mode();
                true
            }
            Mode::Text => {
                let Some((begins, _)) = self.style.and_then(Style::tags) else {
                    let text = std::mem::take(&mut self.pending);
                    push_text(text, out);
                    return false;
                };
                if let Some(at) = pending.find(begins) {
                    let before = pending[..at].trim_end().to_owned();
                    self.pending.drain(..at + begins.len());
                    self.mode = Mode::Call;
                    push_text(before, out);
                    return true;
                }
                let held = if ended { 0 } else { held(pending, begins) };
                let certain = pending.len() - held;
                let text: String = self.pending.drain(..certain).collect();
                push_text(text, out);
                false
            }
            Mode::Call => {
                let style = self.style.unwrap_or(Style::Tagged);
                let Some((begins, ends)) = style.tags() else { return false };
                // Without a mark of its end a call goes on to where the next begins.
                let (inside, mark, rest) = match (pending.find(ends.unwrap_or(begins)), ends) {
                    (Some(at), Some(ends)) => (&pending[..at], ends, &pending[at + ends.len()..]),
                    (Some(at), None) => (&pending[..at], "", &pending[at..]),
                    (None, _) if ended => (pending, "", ""),
                    (None, _) => return false,
                };
                match style.read(inside, &self.tools) {
                    Some(calls) => out.extend(calls.into_iter().map(Piece::Call)),
                    None => push_text(format!("{begins}{inside}{mark}"), out),
                }
                self.pending = rest.to_owned();
                self.mode = Mode::Between;
                !self.pending.is_empty()
            }
            Mode::Json => {
                if !ended {
                    if tools::may_be_json(pending) {
                        return false;
                    }
                    self.mode = Mode::Text;
                    return true;
                }
                match tools::json(pending) {
                    Some(calls) => out.extend(calls.into_iter().map(Piece::Call)),
                    None => push_text(self.pending.clone(), out),
                }
                self.pending.clear();
                false
            }
        }
    }

    /// Whether what follows is reasoning, until its end is seen.
    fn is_reasoning(&self) -> bool {
        self.mode == Mode::Reasoning
    }

    fn text_mode(&self) -> Mode {
        if self.style == Some(Style::Json) { Mode::Json } else { Mode::Text }
    }

    fn reasoning(&mut self, text: String, out: &mut Vec<Piece>) {
        if !text.is_empty() {
            self.reasoned = true;
            out.push(Piece::Reasoning(text));
        }
    }
}

fn push_text(text: String, out: &mut Vec<Piece>) {
    if !text.is_empty() {
        out.push(Piece::Text(text));
    }
}

/// Bytes at the end of `text` that may become `mark`, with the white space before them, which would
/// then go.
fn held(text: &str, mark: &str) -> usize {
    let begun = (1..mark.len()).rev().find(|n| mark.is_char_boundary(*n) && text.ends_with(&mark[..*n])).unwrap_or(0);
    let before = &text[..text.len() - begun];
    begun + before.len() - before.trim_end().len()
}

/// A piece, and the tokens that it came with where it is text.
pub type Told = (Piece, Vec<TokenProbs>);

/// A splitter that is told tokens, and says which of them a text came with: for whole answers and
/// for streams, which so say the same.
pub struct Sorter {
    splitter: Splitter,
    /// Tokens of which no text came yet.
    waiting: Vec<TokenProbs>,
    /// Tokens of reasoning.
    pub reasoning: usize,
}

impl Sorter {
    /// One that splits as `splitter` does.
    pub fn new(splitter: Splitter) -> Sorter {
        Sorter { splitter, waiting: Vec::new(), reasoning: 0 }
    }

    /// Takes a token's text; gives what is certain.
    pub fn token(&mut self, text: &str, probs: Option<&TokenProbs>) -> Vec<Told> {
        if self.splitter.is_reasoning() {
            self.reasoning += 1;
            self.waiting.clear();
        }
        self.waiting.extend(probs.cloned());
        let pieces = self.splitter.push(text);
        self.told(pieces)
    }

    /// Takes what comes after the last token; gives what is left.
    pub fn end(&mut self, tail: &str) -> Vec<Told> {
        let mut pieces = self.splitter.push(tail);
        pieces.extend(self.splitter.finish());
        self.told(pieces)
    }

    /// Tokens of which no text came.
    pub fn left(&mut self) -> Vec<TokenProbs> {
        std::mem::take(&mut self.waiting)
    }

    /// Tokens belong to the first text among the pieces that they gave. Those that gave reasoning
    /// or a call belong to no text.
    fn told(&mut self, pieces: Vec<Piece>) -> Vec<Told> {
        let mut probs = if pieces.is_empty() { Vec::new() } else { self.left() };
        let with = |piece: Piece| {
            let probs = if matches!(piece, Piece::Text(_)) { std::mem::take(&mut probs) } else { Vec::new() };
            (piece, probs)
        };
        pieces.into_iter().map(with).collect()
    }

    /// All of an answer at once, neighbours of a kind joined; and how many tokens were reasoning.
    pub fn all(splitter: Splitter, answer: &Answer) -> (Vec<Told>, usize) {
        let mut sorter = Sorter::new(splitter);
        let (mut out, mut from): (Vec<Told>, usize) = (Vec::new(), 0);
        let mut add = |told: Vec<Told>| {
            for (piece, probs) in told {
                match (out.last_mut(), piece) {
                    (Some((Piece::Text(a), all)), Piece::Text(b)) => {
                        a.push_str(&b);
                        all.extend(probs);
                    }
                    (Some((Piece::Reasoning(a), _)), Piece::Reasoning(b)) => a.push_str(&b),
                    (_, piece) => out.push((piece, probs)),
                }
            }
        };
        for (i, to) in answer.ends.iter().enumerate() {
            add(sorter.token(&answer.text[from..*to], answer.probs.get(i)));
            from = *to;
        }
        add(sorter.end(&answer.text[from..]));
        if let Some((Piece::Text(_), probs)) = out.last_mut() {
            probs.extend(sorter.left());
        }
        (out, sorter.reasoning)
    }
}

/// The pieces of a whole answer, neighbours of a kind joined.
pub fn join(pieces: impl IntoIterator<Item = Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (out.last_mut(), piece) {
            (Some(Piece::Text(a)), Piece::Text(b)) | (Some(Piece::Reasoning(a)), Piece::Reasoning(b)) => a.push_str(&b),
            (_, piece) => out.push(piece),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Every way of cutting gives the same.
    fn split(template: &str, thinks: bool, tools: &[Value], text: &str) -> Vec<Piece> {
        let cut = |size: usize| {
            let mut splitter = Splitter::new(template, thinks, tools);
            let chars: Vec<char> = text.chars().collect();
            let pieces: Vec<Piece> =
                chars.chunks(size).flat_map(|c| splitter.push(&c.iter().collect::<String>())).collect();
            join(pieces.into_iter().chain(splitter.finish()))
        };
        let whole = cut(text.len().max(1));
        for size in 1..12 {
            assert_eq!(cut(size), whole, "{size}: {text}");
        }
        whole
    }

    fn text(t: &str) -> Piece {
        Piece::Text(t.to_owned())
    }

    #[test]
    fn reasoning_is_told_apart() {
        let template = "... <think> ... </think>";
        let thought = Piece::Reasoning("Hm < 3".into());
        for (thinks, answer) in [(true, "\nHm < 3\n</think>\n\nYes."), (false, "<think>\nHm < 3\n</think>\n\nYes.")] {
            assert_eq!(split(template, thinks, &[], answer), [thought.clone(), text("Yes.")]);
        }
        assert_eq!(split(template, false, &[], "Yes <think>"), [text("Yes <think>")]);
        assert_eq!(split(template, true, &[], "Hm < 3"), [thought]);
        assert_eq!(split("plain", false, &[], " <think>a</think> "), [text(" <think>a</think> ")]);
    }

    #[test]
    fn tokens_go_with_the_text_that_they_gave() {
        let probs = |id| TokenProbs { id, log_prob: Some(-1.0), top: Vec::new() };
        let answer = |texts: &[&str]| {
            let mut answer = Answer::default();
            for (id, text) in (0..).zip(texts) {
                answer.text.push_str(text);
                answer.ends.push(answer.text.len());
                answer.probs.push(probs(id));
            }
            answer
        };
        let ids = |told: &[Told]| told.iter().map(|(_, p)| p.iter().map(|p| p.id).collect()).collect::<Vec<Vec<u32>>>();
        let tools = [json!({ "function": { "name": "f" } })];
        let template = "tools <tool_call> <think>";
        let call = ["So", ":", " <tool", "_call>", "{\"name\": \"f\"}", "</tool_call>"];
        let (told, reasoning) = Sorter::all(Splitter::new(template, false, &tools), &answer(&call));
        assert!(matches!(&told[..], [(Piece::Text(t), _), (Piece::Call(_), _)] if t == "So:"), "{told:?}");
        // The space before the mark is held back with it.
        assert_eq!((ids(&told), reasoning), (vec![vec![0, 1], vec![]], 0));
        let thought = ["Hm", " <", "</think>", "\n", "Yes", " <tool", "s"];
        let (told, reasoning) = Sorter::all(Splitter::new(template, true, &tools), &answer(&thought));
        assert!(matches!(&told[1], (Piece::Text(t), _) if t == "Yes <tools"), "{told:?}");
        assert_eq!((ids(&told), reasoning), (vec![vec![], vec![3, 4, 5, 6]], 3));
    }

    #[test]
    fn calls_are_told_apart_and_malformed_ones_are_text() {
        let template = "tools <tool_call> ";
        let tools = [json!({ "function": { "name": "f" } })];
        let call = Piece::Call(Call { name: "f".into(), arguments: json!({ "a": 1 }) });
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        assert_eq!(
            split(template, false, &tools, &format!("Well.\n{one}\n{one}")),
            [text("Well."), call.clone(), call.clone()]
        );
        assert_eq!(split(template, false, &tools, &one[..one.len() - 12]), std::slice::from_ref(&call));
        let broken = "<tool_call>\n{\"name\": }\n</tool_call>";
        assert_eq!(split(template, false, &tools, broken), [text(broken)]);
        // Without tools on offer it is what it looks like.
        assert_eq!(split(template, false, &[], one), [text(one)]);
        let json_template = "tools [TOOL_CALLS]";
        assert_eq!(split(json_template, false, &tools, " [{\"name\": \"f\", \"arguments\": {\"a\": 1}}]"), [call]);
        assert_eq!(split(json_template, false, &tools, "[1, 2]"), [text("[1, 2]")]);
        assert_eq!(split(json_template, false, &tools, "No: {}"), [text("No: {}")]);
    }

    #[test]
    fn mistrals_newer_calls_stand_after_text_and_one_after_another() {
        let template = "tools [TOOL_CALLS] [ARGS]";
        let tools = [json!({ "function": { "name": "f" } })];
        let call = |n: u32| Piece::Call(Call { name: "f".into(), arguments: json!({ "a": n }) });
        let (one, two) = ("[TOOL_CALLS]f[ARGS]{\"a\": 1}", "[TOOL_CALLS]f[CALL_ID]abcdefgh9[ARGS]{\"a\": 2}");
        assert_eq!(split(template, false, &tools, &format!("Well.{one}{two}")), [text("Well."), call(1), call(2)]);
        let list =
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"f\", \"arguments\": {\"a\": 2}}]";
        assert_eq!(split(template, false, &tools, list), [call(1), call(2)]);
        for broken in
            ["[TOOL_CALLS]f[ARGS]{\"a\": 1} and more", "[TOOL_CALLS]f[ARGS]3", "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS]"]
        {
            assert_eq!(split(template, false, &tools, broken), [text(broken)]);
            assert_eq!(split(template, false, &tools, &format!("{broken}{two}")), [text(broken), call(2)]);
        }
        assert_eq!(split(template, false, &[], one), [text(one)]);
    }
}
