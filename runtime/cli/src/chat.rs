//! `loaf chat`: a conversation, line by line.
//!
//! Every turn renders the whole conversation through the template, since templates rewrite the past (they drop
//! old reasoning, say). The session then keeps the longest prefix of tokens that it holds already; a model with
//! recurrent state can only keep all or nothing. Whatever goes wrong in a turn, the conversation goes on without it.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Value, json};

use crate::args::ChatArgs;
use crate::interrupt::Interrupt;
use crate::{Bytes, Failure, Io, MAX_TEXT_BYTES, model, printable, read_text};
use loaf_runtime::chat::{ChatTemplate, Inputs, message};
use loaf_runtime::generate::{self, Event, GenerateOptions, Generation, Report, StopReason};
use loaf_runtime::model::{Model as Loaf, SharedTokenizer};
use loaf_runtime::sample::SamplerOptions;
use loaf_runtime::Session;
use loaf_runtime::tokenizer::Scratch;

const HELP: &str = "\
/help         this list
/reset        forget the conversation, keep the system message
/system TEXT  set the system message and start anew; without TEXT, remove it
/save FILE    write the conversation to FILE, as JSON
/load FILE    continue the conversation in FILE
/regen        replace the last answer by another one
/stats        say how full the context is and how fast the last answer came
/exit         leave (so does the end of input)";

pub(crate) fn chat(args: &ChatArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let loaf = model::open_model(&args.model, io)?;
    let sampler = args.sampling.over(&loaf.chat().sampling)?;
    let source =
        loaf.chat().template.as_deref().ok_or_else(|| {
            Failure::usage("this model has no chat template: 'loaf run --raw' continues a text instead")
        })?;
    let template = ChatTemplate::new(source).map_err(Failure::runtime)?;
    let tokenizer = model::tokenizer(&loaf)?
        .ok_or_else(|| Failure::usage("this loaf has no tokenizer: 'loaf run --ids' continues token ids instead"))?;
    let session = model::session(&loaf, &args.compute, io)?;
    let mut talk = Conversation {
        loaf: &loaf,
        session,
        tokenizer,
        template,
        scratch: Scratch::default(),
        args,
        sampler,
        turns: 0,
        system: args.system.clone(),
        messages: Vec::new(),
        held: Vec::new(),
        last: None,
    };
    loop {
        if io.stdin_is_terminal && io.stderr_is_terminal {
            let _ = write!(io.stderr, "> ").and_then(|()| io.stderr.flush());
        }
        let Some(line) = read_line(io)? else { return Ok(0) };
        let step = match line.trim().strip_prefix('/') {
            _ if line.trim().is_empty() => continue,
            Some("exit" | "quit") => return Ok(0),
            Some(command) => talk.command(command, io),
            None => talk.user(line.trim(), io),
        };
        match step {
            Err(Failure::Closed) => return Err(Failure::Closed),
            Err(Failure::Usage(message) | Failure::Runtime(message)) => {
                io.note(format_args!("loaf: error: {}", printable(&message)));
            }
            Ok(()) => {}
        }
    }
}

/// A line of standard input; `None` at its end.
fn read_line(io: &mut Io<'_>) -> Result<Option<String>, Failure> {
    use std::io::{BufRead, Read};
    let mut bytes = Vec::new();
    let read = (&mut io.stdin).take(MAX_TEXT_BYTES).read_until(b'\n', &mut bytes);
    read.map_err(|e| Failure::Runtime(format!("standard input: {e}")))?;
    // A person's terminal may send anything; what is not text becomes U+FFFD.
    Ok((!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned()))
}

struct Conversation<'a> {
    loaf: &'a Loaf,
    session: Session,
    tokenizer: SharedTokenizer,
    template: ChatTemplate,
    scratch: Scratch,
    args: &'a ChatArgs,
    sampler: SamplerOptions,
    /// Answers generated so far; each has its own seed.
    turns: u64,
    system: Option<String>,
    messages: Vec<Value>,
    /// The ids the session holds.
    held: Vec<u32>,
    last: Option<Report>,
}

impl Conversation<'_> {
    fn user(&mut self, text: &str, io: &mut Io<'_>) -> Result<(), Failure> {
        self.messages.push(message("user", text));
        let answered = self.answer(io);
        if answered.is_err() {
            self.messages.pop();
        }
        answered
    }

    /// Generates the next answer and adds it to the conversation. On an error nothing is added.
    fn answer(&mut self, io: &mut Io<'_>) -> Result<(), Failure> {
        let prompt = self.prompt()?;
        let context = self.session.engine.context() as usize;
        if prompt.len() >= context {
            let message = format!(
                "the conversation takes {} tokens, expected fewer than {context} (the context): \
                /reset starts anew; your message was not added",
                prompt.len()
            );
            return Err(Failure::Runtime(message));
        }
        self.keep_prefix(&prompt)?;
        let options = GenerateOptions {
            max_tokens: self.args.sampling.max_tokens,
            sampler: SamplerOptions { seed: self.sampler.seed.wrapping_add(self.turns), ..self.sampler },
            stop_ids: self.loaf.chat().stop_ids.clone(),
            stop_strings: self.args.sampling.stop.clone(),
            continues_text: false,
            log_probs: false,
        };
        self.turns = self.turns.wrapping_add(1);
        let held = self.session.position() as usize;
        let tokenizer = Some(self.tokenizer.clone());
        let generation = Generation::new(self.loaf, tokenizer, &prompt, held, options);
        let mut generation = generation.map_err(Failure::runtime)?;
        let interrupt = Interrupt::watch(io.signals);
        let (mut text, mut failure) = (String::new(), None);
        let Session { engine, sequence } = &mut self.session;
        let report = generate::run(engine, sequence, &mut generation, &mut |event, piece| {
            if let Event::Token(_) | Event::Tail = event {
                text.push_str(piece);
                if !piece.is_empty() {
                    failure = io.print(piece).err();
                }
            }
            if failure.is_some() || interrupt.raised() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        // Also after an error: the session holds what it was given.
        self.held.clear();
        self.held.extend(prompt.iter().chain(generation.ids()).take(self.session.position() as usize));
        if let Some(failure) = failure {
            return Err(failure);
        }
        let report = report.map_err(Failure::runtime)?;
        if !text.ends_with('\n') {
            io.print("\n")?;
        }
        match report.stop {
            StopReason::Context => {
                io.note(format_args!("loaf: warning: the context of {context} tokens is full; /reset starts anew"));
            }
            StopReason::Interrupted => io.note("loaf: interrupted"),
            StopReason::Stop | StopReason::Length => {}
        }
        self.messages.push(message("assistant", &text));
        if self.args.compute.verbose {
            io.note(stats(&report));
        }
        self.last = Some(report);
        Ok(())
    }

    /// The ids of the whole conversation and the start of an answer.
    fn prompt(&mut self) -> Result<Vec<u32>, Failure> {
        let chat = self.loaf.chat();
        let system = self.system.iter().map(|text| message("system", text));
        let messages: Vec<Value> = system.chain(self.messages.iter().cloned()).collect();
        let inputs = Inputs {
            messages: &messages,
            add_generation_prompt: true,
            enable_thinking: self.args.no_thinking.then_some(false),
            bos_token: chat.bos_token.as_deref(),
            eos_token: chat.eos_token.as_deref(),
            ..Inputs::default()
        };
        let text = self.template.render(&inputs).map_err(Failure::runtime)?;
        let mut ids = Vec::new();
        self.tokenizer.get().encode(&text, false, &mut self.scratch, &mut ids);
        Ok(ids)
    }

    /// Cuts the session back to what it shares with `prompt`, less the last token: its logits are needed.
    fn keep_prefix(&mut self, prompt: &[u32]) -> Result<(), Failure> {
        let shared = self.held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let shared = shared.min(prompt.len().saturating_sub(1));
        let keep = self.session.sequence.rewind_point(shared as u32) as usize;
        self.session.rewind(keep as u32).map_err(Failure::runtime)?;
        self.held.truncate(keep);
        Ok(())
    }

    fn command(&mut self, command: &str, io: &mut Io<'_>) -> Result<(), Failure> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "help" => io.note(HELP),
            "reset" => {
                self.messages.clear();
                io.note("the conversation is empty");
            }
            "system" => {
                self.system = (!rest.is_empty()).then(|| rest.to_owned());
                self.messages.clear();
                let set = if rest.is_empty() { "removed" } else { "set" };
                io.note(format_args!("system message {set}, the conversation is empty"));
            }
            "save" => {
                self.save(file_name(rest, "/save FILE")?)?;
                io.note(format_args!("{} messages saved to {rest}", self.messages.len()));
            }
            "load" => {
                self.load(file_name(rest, "/load FILE")?)?;
                io.note(format_args!("{} messages loaded from {rest}", self.messages.len()));
            }
            "regen" => return self.regenerate(io),
            "stats" => self.stats(io),
            _ => {
                let message = format!("/{name}: no such command; /help lists them");
                return Err(Failure::Usage(message));
            }
        }
        Ok(())
    }

    fn regenerate(&mut self, io: &mut Io<'_>) -> Result<(), Failure> {
        let is_answer = |m: &Value| m["role"] == "assistant";
        let Some(answer) = self.messages.pop_if(|m| is_answer(m)) else {
            return Err(Failure::usage("/regen: there is no answer to replace"));
        };
        let again = self.answer(io);
        if again.is_err() {
            self.messages.push(answer);
        }
        again
    }

    fn stats(&self, io: &mut Io<'_>) {
        let plan = self.loaf.plan();
        io.note(format_args!(
            "context: {} of {} tokens, {} messages; state {}, arena {}",
            self.held.len(),
            plan.context,
            self.messages.len(),
            Bytes(plan.state_bytes()),
            Bytes(plan.arena_bytes),
        ));
        if let Some(report) = &self.last {
            io.note(stats(report));
        }
    }

    fn save(&self, path: &Path) -> Result<(), Failure> {
        let text = format!("{:#}\n", json!({ "system": self.system, "messages": self.messages }));
        fs::write(path, text).map_err(|e| Failure::Runtime(format!("{}: {e}", path.display())))
    }

    fn load(&mut self, path: &Path) -> Result<(), Failure> {
        let name = path.display().to_string();
        let mut file = fs::File::open(path).map_err(|e| Failure::Runtime(format!("{name}: {e}")))?;
        let text = read_text(&mut file, &name)?;
        let bad = |what: &str| Failure::Runtime(format!("{name}: {what}; expected what /save writes"));
        let saved: Value = serde_json::from_str(&text).map_err(|e| bad(&e.to_string()))?;
        let messages = saved["messages"].as_array().ok_or_else(|| bad("no array 'messages'"))?;
        if let Some(i) = messages.iter().position(|m| !(m["role"].is_string() && m["content"].is_string())) {
            return Err(bad(&format!("message {i} lacks a text 'role' or 'content'")));
        }
        self.system = saved["system"].as_str().map(str::to_owned);
        self.messages = messages.clone();
        Ok(())
    }
}

fn file_name<'r>(rest: &'r str, usage: &str) -> Result<&'r Path, Failure> {
    if rest.is_empty() { Err(Failure::Usage(format!("expected a file name: {usage}"))) } else { Ok(Path::new(rest)) }
}

fn stats(report: &Report) -> String {
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
