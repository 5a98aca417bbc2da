//! `loaf run`: one prompt, one answer.

use std::ops::ControlFlow;
use std::time::Instant;

use loaf_formats::chat::Answers;
use serde_json::json;

use crate::args::RunArgs;
use loaf_runtime::Session;
use crate::interrupt::Interrupt;
use crate::shell;
use crate::{Failure, Io, model};
use loaf_runtime::chat::{ChatTemplate, Inputs, message};
use loaf_runtime::generate::{self, Event, GenerateOptions, Generation, Report, StopReason};
use loaf_runtime::model::Model as Loaf;
use loaf_runtime::model::SharedTokenizer;
use loaf_runtime::tokenizer::{Scratch, Tokenizer};

/// A prompt ready to be evaluated.
struct Prompt {
    ids: Vec<u32>,
    /// The answer goes on where the prompt's text ends.
    continues_text: bool,
}

pub(crate) fn run(args: &RunArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let start = Instant::now();
    let loaf = model::open_model(&args.model, io)?;
    let sampler = args.sampling.over(&loaf.chat().sampling)?;
    let tokenizer = model::tokenizer(&loaf)?;
    let prompt = prompt(args, &loaf, tokenizer.as_ref().map(SharedTokenizer::get), io)?;
    model::check_fits(prompt.ids.len(), &loaf)?;
    let mut session = model::session(&loaf, &args.compute, io)?;
    let options = GenerateOptions {
        max_tokens: args.sampling.max_tokens,
        sampler,
        stop_ids: loaf.chat().stop_ids.clone(),
        stop_strings: args.sampling.stop.clone(),
        continues_text: prompt.continues_text,
        log_probs: args.json || loaf.chat().unsure_below.is_some(),
    };
    let has_text = tokenizer.is_some();
    let generation = Generation::new(&loaf, tokenizer, &prompt.ids, 0, options);
    let mut generation = generation.map_err(Failure::runtime)?;
    let interrupt = Interrupt::watch(io.signals);
    let record = args.json || loaf.chat().answers == Answers::ShellCommand;
    let silent = args.json;
    let mut out = Output { io, text: String::new(), record, silent, has_text, open_line: false, failure: None };
    let Session { engine, sequence } = &mut session;
    let report = generate::run(engine, sequence, &mut generation, &mut |event, text| {
        if interrupt.raised() || out.take(event, text).is_break() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    let report = report.map_err(Failure::runtime)?;
    let Output { text, open_line, failure, .. } = out;
    if let Some(failure) = failure {
        return Err(failure);
    }
    if args.json {
        let mut object = json!({ "prompt_ids": prompt.ids, "ids": generation.ids() });
        if has_text {
            object["text"] = text.as_str().into();
        }
        object["stop"] = report.stop.name().into();
        object["ttft_ms"] = report.first_token.map(|at| (at - start).as_secs_f64() * 1e3).into();
        object["prefill_tok_s"] = report.prefill_tok_s().into();
        object["decode_tok_s"] = report.decode_tok_s().into();
        object["mean_logprob"] = report.mean_log_prob().into();
        object["seed"] = sampler.seed.into();
        io.print(format_args!("{object}\n"))?;
    } else if open_line {
        io.print("\n")?;
    }
    advise(&text, &report, &loaf, io);
    if let Some(notes) = session.engine.notes().filter(|_| args.compute.verbose) {
        io.note(format_args!("loaf: {notes}"));
    }
    finish(&report, &loaf, start, args.compute.verbose, io)
}

/// Says on stderr what a reader of the answer should know before using it.
fn advise(text: &str, report: &Report, loaf: &Loaf, io: &mut Io<'_>) {
    let chat = loaf.chat();
    let threshold = chat.unsure_below.map(f64::from);
    if let (Some(mean), Some(threshold)) = (report.mean_log_prob(), threshold)
        && mean < threshold
    {
        io.note(format_args!("loaf: unsure: this request is unlike what the model knows; read the answer with care"));
    }
    if chat.answers == Answers::ShellCommand
        && let Some(why) = shell::danger(text)
    {
        io.note(format_args!("loaf: warning: {why}; nothing was run"));
    }
}

/// Warnings and statistics after the answer, and the exit code.
fn finish(report: &Report, loaf: &Loaf, start: Instant, verbose: bool, io: &mut Io<'_>) -> Result<u8, Failure> {
    if report.stop == StopReason::Context {
        let context = loaf.plan().context;
        io.note(format_args!("loaf: warning: the context of {context} tokens is full, the answer is cut off"));
    }
    if verbose {
        let first = report.first_token.map_or(0.0, |at| (at - start).as_secs_f64() * 1e3);
        io.note(format_args!(
            "loaf: {} prompt tokens at {:.1}/s, first token after {first:.1} ms, {} tokens at {:.1}/s, ended by {}",
            report.prefilled,
            report.prefill_tok_s(),
            report.tokens,
            report.decode_tok_s(),
            report.stop.name(),
        ));
    }
    Ok(if report.stop == StopReason::Interrupted { 130 } else { 0 })
}

/// The prompt's ids, from wherever the arguments say.
fn prompt(args: &RunArgs, loaf: &Loaf, tokenizer: Option<Tokenizer<'_>>, io: &mut Io<'_>) -> Result<Prompt, Failure> {
    if let Some(ids) = &args.ids {
        return Ok(Prompt { ids: ids.clone(), continues_text: true });
    }
    let tokenizer = tokenizer
        .ok_or_else(|| Failure::usage("this loaf has no tokenizer: pass the prompt as token ids, with --ids 1,2,3"))?;
    let text = match args.prompt.as_deref() {
        Some(text) if text != "-" => text.to_owned(),
        None if io.stdin_is_terminal => {
            return Err(Failure::usage("no prompt: pass one as an argument, or pipe it in"));
        }
        _ => without_last_newline(io.read_stdin()?),
    };
    let mut ids = Vec::new();
    match loaf.chat().template.as_deref().filter(|_| !args.raw) {
        Some(source) => {
            let template = ChatTemplate::new(source).map_err(Failure::runtime)?;
            let system = args.system.iter().map(|text| message("system", text));
            let messages: Vec<_> = system.chain([message("user", &text)]).collect();
            let inputs = Inputs {
                messages: &messages,
                add_generation_prompt: true,
                enable_thinking: args.no_thinking.then_some(false),
                bos_token: loaf.chat().bos_token.as_deref(),
                eos_token: loaf.chat().eos_token.as_deref(),
                ..Inputs::default()
            };
            let text = template
                .render(&inputs)
                .map_err(|e| Failure::Runtime(format!("{e}; --raw goes without the template")))?;
            tokenizer.encode(&text, false, &mut Scratch::default(), &mut ids);
            Ok(Prompt { ids, continues_text: false })
        }
        None if args.system.is_some() || args.no_thinking => {
            Err(Failure::usage("this model has no chat template, so there is no place for --system or --no-thinking"))
        }
        None => {
            tokenizer.encode(&text, true, &mut Scratch::default(), &mut ids);
            Ok(Prompt { ids, continues_text: true })
        }
    }
}

/// What `echo` adds is not part of a prompt.
fn without_last_newline(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

/// Where events go: to standard output as they come, or into one text.
struct Output<'i, 'a> {
    io: &'i mut Io<'a>,
    text: String,
    /// Text is kept, to be looked at or reported afterwards.
    record: bool,
    /// Nothing is printed while it comes.
    silent: bool,
    has_text: bool,
    /// Something was printed, and no newline after it.
    open_line: bool,
    failure: Option<Failure>,
}

impl Output<'_, '_> {
    fn take(&mut self, event: Event, text: &str) -> ControlFlow<()> {
        let printed = match event {
            Event::Token(_) | Event::Tail if self.has_text => {
                if self.record {
                    self.text.push_str(text);
                }
                if self.silent || text.is_empty() {
                    return ControlFlow::Continue(());
                }
                self.open_line = !text.ends_with('\n');
                self.io.print(text)
            }
            Event::Token(id) if !self.silent => {
                let gap = if self.open_line { " " } else { "" };
                self.open_line = true;
                self.io.print(format_args!("{gap}{id}"))
            }
            _ => return ControlFlow::Continue(()),
        };
        match printed {
            Ok(()) => ControlFlow::Continue(()),
            Err(failure) => {
                self.failure = Some(failure);
                ControlFlow::Break(())
            }
        }
    }
}
