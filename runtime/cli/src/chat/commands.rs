//! What lines that start with `/` do.

use std::io::Write;
use std::path::Path;
use std::str::FromStr;

use loaf_formats::output::Output;

use super::Chat;
use crate::slash::COMMANDS;
use crate::{Bytes, Failure, Io, read_text_file};
use loaf_runtime::generate::Report;
use serde_json::Value;

/// Longest text that `/read` takes, in bytes.
const MAX_READ_BYTES: usize = 4 << 20;

fn help() -> String {
    let line = |(name, argument, what): &(&str, &str, &str)| format!("{:<16} {what}\n", format!("/{name} {argument}"));
    let lines: String = COMMANDS.iter().map(line).collect();
    lines + "A message that ends in '\\' goes on in the next line. Ctrl-C stops an answer."
}

impl Chat<'_> {
    /// Carries out a command, without its `/`.
    pub(super) fn command(&mut self, command: &str, io: &mut Io<'_>) -> Result<(), Failure> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "help" => io.note(help()),
            "reset" => {
                self.talk.clear();
                self.attached.clear();
                io.note("the conversation is empty");
            }
            "system" => {
                self.talk.set_system((!rest.is_empty()).then(|| rest.to_owned()));
                self.talk.clear();
                let set = if rest.is_empty() { "removed" } else { "set" };
                io.note(format_args!("system message {set}, the conversation is empty"));
            }
            "read" => self.read(file_name(rest, "/read FILE")?, io)?,
            "save" => {
                let path = file_name(rest, "/save FILE")?;
                let text = format!("{:#}\n", self.talk.save());
                let output = Output::create(path, &self.inputs).map_err(Failure::runtime)?;
                let written = output.file().write_all(text.as_bytes()).map_err(output.io("write to it"));
                written.and_then(|()| output.finish()).map_err(Failure::runtime)?;
                io.note(format_args!("{} messages saved to {rest}", self.talk.messages().len()));
            }
            "load" => {
                self.load(file_name(rest, "/load FILE")?)?;
                io.note(format_args!("{} messages loaded from {rest}", self.talk.messages().len()));
            }
            "regen" => return self.regenerate(io),
            "set" => self.set(rest, io)?,
            "stats" => self.stats(io),
            _ => return Err(Failure::Usage(format!("/{name}: no such command; /help lists them"))),
        }
        Ok(())
    }

    fn read(&mut self, path: &Path, io: &mut Io<'_>) -> Result<(), Failure> {
        let text = read_text_file(path)?;
        let name = path.display();
        if self.attached.len() + text.len() > MAX_READ_BYTES {
            let (expected, found) = (MAX_READ_BYTES - self.attached.len(), text.len());
            return Err(Failure::Runtime(format!("{name}: expected at most {expected} bytes, found {found}")));
        }
        self.attached.push_str(text.trim_end());
        self.attached.push_str("\n\n");
        io.note(format_args!("{} lines of {name} go before your next message", text.lines().count()));
        Ok(())
    }

    fn load(&mut self, path: &Path) -> Result<(), Failure> {
        let name = path.display();
        let text = read_text_file(path)?;
        let bad = |what: &str| Failure::Runtime(format!("{name}: {what}"));
        let saved: Value = serde_json::from_str(&text).map_err(|e| bad(&format!("{e}; expected what /save writes")))?;
        self.talk.load(&saved).map_err(|e| bad(&e.to_string()))
    }

    fn set(&mut self, rest: &str, io: &mut Io<'_>) -> Result<(), Failure> {
        let Some((name, value)) = rest.split_once(char::is_whitespace) else {
            if !rest.is_empty() {
                return Err(Failure::Usage(format!("/set {rest}: expected a value: /set NAME VALUE")));
            }
            let o = &self.sampler;
            io.note(format_args!(
                "temperature {}, top_k {}, top_p {}, min_p {}, repeat_penalty {}, presence_penalty {}, \
                 frequency_penalty {}, seed {}, max_tokens {}, thinking {}",
                o.temperature,
                o.top_k,
                o.top_p,
                o.min_p,
                o.repetition_penalty,
                o.presence_penalty,
                o.frequency_penalty,
                o.seed,
                self.most.map_or("none".to_owned(), |n| n.to_string()),
                match self.talk.thinking {
                    None => "as the template has it",
                    Some(true) => "on",
                    Some(false) => "off",
                },
            ));
            return Ok(());
        };
        let value = value.trim();
        let mut o = self.sampler;
        match name {
            "temperature" => o.temperature = number(name, value)?,
            "top_k" => o.top_k = number(name, value)?,
            "top_p" => o.top_p = number(name, value)?,
            "min_p" => o.min_p = number(name, value)?,
            "repeat_penalty" => o.repetition_penalty = number(name, value)?,
            "presence_penalty" => o.presence_penalty = number(name, value)?,
            "frequency_penalty" => o.frequency_penalty = number(name, value)?,
            "seed" => {
                o.seed = number(name, value)?;
                self.turns = 0;
            }
            "max_tokens" => self.most = if value == "none" { None } else { Some(number(name, value)?) },
            "thinking" => {
                self.talk.thinking = Some(match value {
                    "on" => true,
                    "off" => false,
                    _ => return Err(Failure::Usage(format!("/set thinking: expected on or off, found {value:?}"))),
                });
            }
            _ => {
                return Err(Failure::Usage(format!("/set {name}: no such setting; /set alone lists them")));
            }
        }
        o.check().map_err(|e| Failure::Usage(e.to_string()))?;
        self.sampler = o;
        Ok(())
    }

    fn stats(&self, io: &mut Io<'_>) {
        let plan = self.loaf.plan();
        io.note(format_args!(
            "context: {} of {} tokens, {} messages; state {}, arena {}",
            self.session.position(),
            plan.context,
            self.talk.messages().len(),
            Bytes(plan.state_bytes()),
            Bytes(plan.arena_bytes),
        ));
        if let Some(report) = &self.last {
            io.note(stats(report));
        }
    }
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, Failure> {
    value.parse().map_err(|_| Failure::Usage(format!("/set {name}: expected a number, found {value:?}")))
}

fn file_name<'r>(rest: &'r str, usage: &str) -> Result<&'r Path, Failure> {
    if rest.is_empty() { Err(Failure::Usage(format!("expected a file name: {usage}"))) } else { Ok(Path::new(rest)) }
}

/// How an answer came.
pub(super) fn stats(report: &Report) -> String {
    format!(
        "last answer: {} prompt tokens kept, {} evaluated at {:.1}/s, {} generated at {:.1}/s, ended by {}",
        report.reused,
        report.prefilled,
        report.prefill_tok_s(),
        report.tokens,
        report.decode_tok_s(),
        report.stop.name(),
    )
}
