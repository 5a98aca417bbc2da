//! `loaf chat`: a conversation, message by message.
//!
//! What the messages become is [`Conversation`]'s business. The session keeps the longest prefix of
//! tokens that it holds already. Where the context has no room, the oldest turns are forgotten, and
//! that is said. Whatever goes wrong in a turn, the conversation goes on without it.

mod commands;

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;

use loaf_formats::output::{self, Output};

use crate::advise::advise;
use crate::args::ChatArgs;
use crate::editor::{Editor, Line, goes_on, joined, read_history};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::style::Reasoning;
use crate::{Failure, Io, MAX_TEXT_BYTES, model};
use loaf_runtime::Model;
use loaf_runtime::Session;
use loaf_runtime::conversation::Conversation;
use loaf_runtime::generate::{self, Event, GenerateOptions, Generation, Report, StopReason};
use loaf_runtime::sample::SamplerOptions;
use loaf_runtime::tokenizer::Scratch;
use loaf_runtime::tokenizer::Tokenizer;

pub(crate) fn chat(args: &ChatArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    if io.signals {
        output::remove_on_signal();
    }
    let loaf = model::open_model(&args.model, io)?;
    let sampler = args.sampling.over(loaf.chat())?;
    let mut talk = Conversation::new(loaf.chat())
        .map_err(Failure::runtime)?
        .ok_or_else(|| Failure::usage("this model has no chat template: 'loaf run --raw' continues a text instead"))?;
    talk.set_system(args.system.clone());
    talk.thinking = args.no_thinking.then_some(false);
    talk.special = args.special;
    let tokenizer = model::tokenizer(&loaf)?
        .ok_or_else(|| Failure::usage("this loaf has no tokenizer: 'loaf run --ids' continues token ids instead"))?;
    let session = model::session(&loaf, &args.compute, io)?;
    let mut chat = Chat {
        loaf: &loaf,
        session,
        tokenizer,
        scratch: Scratch::default(),
        talk,
        sampler,
        most: args.sampling.most(loaf.chat()),
        stop: args.sampling.stop.clone(),
        keep_all: args.keep_all,
        verbose: args.compute.verbose,
        turns: 0,
        last: None,
        inputs: model::path(&args.model, io).into_iter().collect(),
        attached: String::new(),
    };
    let mut lines = Lines::open(args, io);
    let mut failed = None;
    while failed.is_none() {
        let line = match lines.next(&chat, io) {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(e) => {
                failed = Some(e);
                break;
            }
        };
        let step = match line.trim().strip_prefix('/') {
            _ if line.trim().is_empty() => continue,
            Some("exit" | "quit") => break,
            Some(command) => chat.command(command, io),
            None => chat.user(line.trim(), io),
        };
        match step {
            Err(Failure::Closed) => failed = Some(Failure::Closed),
            Err(Failure::Usage(message) | Failure::Runtime(message)) => io.error(&message),
            Ok(()) => {}
        }
    }
    lines.close(args, &chat.inputs)?;
    failed.map_or(Ok(0), Err)
}

/// Where messages come from: an editor, or standard input as it is.
struct Lines {
    editor: Option<Box<dyn Editor>>,
}

impl Lines {
    fn open(args: &ChatArgs, io: &mut Io<'_>) -> Lines {
        // Without an editor lines are read all the same.
        let typed = io.stdin_is_terminal && io.stdout_is_terminal;
        let mut editor = io.editor.filter(|_| typed).and_then(|open| open().ok());
        if let (Some(editor), Some(path)) = (&mut editor, &args.history) {
            editor.remember(&read_history(path));
        }
        Lines { editor }
    }

    /// The next message or command; `None` at the end of input.
    fn next(&mut self, chat: &Chat<'_>, io: &mut Io<'_>) -> Result<Option<String>, Failure> {
        let prompt = chat.gauge();
        if let Some(editor) = &mut self.editor {
            return match editor.read(&prompt).map_err(|e| Failure::Runtime(format!("the terminal: {e}")))? {
                Line::Text(text) => Ok(Some(text)),
                Line::Never => Ok(Some(String::new())),
                Line::End => Ok(None),
            };
        }
        let mut text = String::new();
        loop {
            if io.stdin_is_terminal && io.stderr_is_terminal {
                let prompt = if text.is_empty() { prompt.as_str() } else { "  " };
                let _ = write!(io.stderr, "{prompt}").and_then(|()| io.stderr.flush());
            }
            let Some(line) = read_line(io)? else { return Ok((!text.is_empty()).then_some(text)) };
            text.push_str(&line);
            let whole = text.trim_end_matches(['\n', '\r']);
            if !goes_on(whole) {
                return Ok(Some(joined(whole)));
            }
        }
    }

    fn close(self, args: &ChatArgs, inputs: &[PathBuf]) -> Result<(), Failure> {
        let (Some(editor), Some(path)) = (self.editor, &args.history) else { return Ok(()) };
        let output = Output::create(path, inputs).map_err(Failure::runtime)?;
        let written = output.file().write_all(editor.history().as_bytes()).map_err(output.io("write to it"));
        written.and_then(|()| output.finish()).map_err(Failure::runtime)
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

struct Chat<'a> {
    loaf: &'a Model,
    session: Session,
    tokenizer: Tokenizer,
    scratch: Scratch,
    talk: Conversation,
    sampler: SamplerOptions,
    /// Most tokens of an answer.
    most: Option<usize>,
    stop: Vec<String>,
    /// A message that does not fit is refused, and nothing forgotten.
    keep_all: bool,
    verbose: bool,
    /// Answers generated so far; each has its own seed.
    turns: u64,
    last: Option<Report>,
    /// Files that nothing is written over.
    inputs: Vec<PathBuf>,
    /// Text of files that goes before the next message.
    attached: String,
}

/// What became of an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answered {
    Whole,
    Interrupted,
}

impl Chat<'_> {
    /// What stands before a line that is to be typed: how full the context is.
    fn gauge(&self) -> String {
        let percent = 100 * self.session.sequence.ids().len() / (self.session.engine.context() as usize).max(1);
        if percent == 0 { "> ".to_owned() } else { format!("{percent}% > ") }
    }

    fn user(&mut self, text: &str, io: &mut Io<'_>) -> Result<(), Failure> {
        let text = format!("{}{text}", self.attached);
        self.talk.push_user(&text);
        match self.answer(io) {
            Ok((answer, Answered::Interrupted)) if answer.is_empty() => {
                self.talk.pop();
                io.note("loaf: your message was not added");
                Ok(())
            }
            // What was said so far is part of the conversation.
            Ok((answer, _)) => {
                self.talk.push_answer(&answer);
                self.attached.clear();
                Ok(())
            }
            Err(e) => {
                self.talk.pop();
                Err(e)
            }
        }
    }

    /// Another answer in place of the last. If it is interrupted, the last one stays.
    fn regenerate(&mut self, io: &mut Io<'_>) -> Result<(), Failure> {
        let Some(old) = self.talk.pop_answer() else {
            return Err(Failure::usage("/regen: there is no answer to replace"));
        };
        match self.answer(io) {
            Ok((answer, Answered::Whole)) => {
                self.talk.push_answer(&answer);
                Ok(())
            }
            Ok((_, Answered::Interrupted)) => {
                self.talk.push(old);
                io.note("loaf: the answer before stays");
                Ok(())
            }
            Err(e) => {
                self.talk.push(old);
                Err(e)
            }
        }
    }

    /// The prompt of the next answer, with the oldest turns forgotten if need be.
    fn prompt(&mut self, io: &mut Io<'_>) -> Result<(Vec<u32>, bool), Failure> {
        let context = self.session.engine.context() as usize;
        // An eighth of the context is room for an answer; what is forgotten leaves a quarter, so
        // that not every turn forgets.
        let room = |part: usize| self.most.unwrap_or(usize::MAX).min(context / part).max(1);
        let prompt = self.talk.prompt(&self.tokenizer, &mut self.scratch).map_err(Failure::runtime)?;
        let fits = prompt.ids.len() + room(8) <= context;
        if fits || (self.keep_all && prompt.ids.len() < context) {
            return Ok((prompt.ids, prompt.thinks));
        }
        if self.keep_all {
            let tokens = prompt.ids.len();
            return Err(Failure::Runtime(format!(
                "the conversation takes {tokens} tokens, expected fewer than {context} (the context); /reset starts anew; \
                 your message was not added"
            )));
        }
        let room = room(4);
        let within = self.talk.prompt_within(context, room, &self.tokenizer, &mut self.scratch);
        let (prompt, dropped) =
            within.map_err(|e| Failure::Runtime(format!("{e}; shorten it; your message was not added")))?;
        if dropped > 0 {
            io.note(format_args!("loaf: the context is full: the {dropped} oldest messages are forgotten"));
        }
        Ok((prompt.ids, prompt.thinks))
    }

    /// Generates the next answer. On an error the conversation is as it was, but for turns that
    /// were forgotten.
    fn answer(&mut self, io: &mut Io<'_>) -> Result<(String, Answered), Failure> {
        let (prompt, thinks) = self.prompt(io)?;
        let keep = self.session.keep_prefix(&prompt).map_err(Failure::runtime)?;
        let chat = self.loaf.chat();
        let options = GenerateOptions {
            max_tokens: self.most,
            sampler: SamplerOptions { seed: self.sampler.seed.wrapping_add(self.turns), ..self.sampler },
            stop_ids: chat.stop_ids.clone(),
            stop_strings: self.stop.clone(),
            shown: Vec::new(),
            continues_text: false,
            log_probs: chat.unsure_below.is_some(),
            // Templates rewrite answers (they drop reasoning), seldom what comes before them.
            mark_prompt: true,
        };
        self.turns = self.turns.wrapping_add(1);
        let tokenizer = Some(self.tokenizer.clone());
        let generation = Generation::new(self.loaf, tokenizer, &prompt, keep, options);
        let mut generation = generation.map_err(Failure::runtime)?;
        let interrupt = Interrupt::watch_all(io.signals);
        let mut reasoning = Reasoning::new(io.stdout_style(), thinks);
        let mut progress = Progress::new(io);
        let (mut text, mut failure) = (String::new(), None);
        let Session { engine, sequence } = &mut self.session;
        let report = generate::run(engine, sequence, &mut generation, &mut |event, piece| {
            match event {
                Event::Prefill(done, all) if done < all => {
                    progress.at(done as u64, all as u64, format_args!("{done} of {all} tokens of the prompt"), io);
                }
                Event::Prefill(..) => progress.clear(io),
                _ => {
                    text.push_str(piece);
                    if !piece.is_empty() {
                        failure = io.print(reasoning.take(piece)).err();
                    }
                }
            }
            if failure.is_some() || interrupt.raised() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        progress.clear(io);
        if let Some(failure) = failure {
            return Err(failure);
        }
        let report = report.map_err(Failure::runtime)?;
        io.print(reasoning.finish())?;
        if !text.ends_with('\n') {
            io.print("\n")?;
        }
        if report.stop == StopReason::Context {
            io.warn("the context is full, the answer is cut off; the next message forgets the oldest turns");
        }
        let answered = match report.stop {
            StopReason::Interrupted => {
                io.note("loaf: interrupted");
                Answered::Interrupted
            }
            _ => Answered::Whole,
        };
        advise(&text, &report, self.loaf.chat(), io);
        if self.verbose {
            io.note(commands::stats(&report));
        }
        self.last = Some(report);
        Ok((text, answered))
    }
}
