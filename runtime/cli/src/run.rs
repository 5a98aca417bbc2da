//! `loaf run`: one prompt, one answer.

use std::ops::ControlFlow;
use std::time::Instant;

use loaf_formats::chat::Answers;
use serde_json::json;

use crate::advise::advise;
use crate::args::RunArgs;
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::style::Reasoning;
use crate::{Failure, Io, model};
use loaf_runtime::Model;
use loaf_runtime::Session;
use loaf_runtime::conversation::{Conversation, text_ids};
use loaf_runtime::generate::{self, Event, GenerateOptions, Generation, Report, StopReason};
use loaf_runtime::tokenizer::{Scratch, Tokenizer};

/// A prompt ready to be evaluated.
struct Prompt {
    ids: Vec<u32>,
    /// The answer goes on where the prompt's text ends.
    continues_text: bool,
    /// The answer begins inside its reasoning.
    thinks: bool,
}

pub(crate) fn run(args: &RunArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let start = Instant::now();
    let loaf = model::open_model(&args.model, io)?;
    let sampler = args.sampling.over(loaf.chat())?;
    let tokenizer = model::tokenizer(&loaf)?;
    let prompt = prompt(args, &loaf, tokenizer.as_ref(), io)?;
    model::check_fits(prompt.ids.len(), &loaf)?;
    let mut session = model::session(&loaf, &args.compute, io)?;
    let options = GenerateOptions {
        max_tokens: args.sampling.most(loaf.chat()),
        sampler,
        stop_ids: loaf.chat().stop_ids.clone(),
        stop_strings: args.sampling.stop.clone(),
        shown: Vec::new(),
        continues_text: prompt.continues_text,
        log_probs: args.json || loaf.chat().unsure_below.is_some(),
        mark_prompt: false,
    };
    let has_text = tokenizer.is_some();
    let generation = Generation::new(&loaf, tokenizer, &prompt.ids, 0, options);
    let mut generation = generation.map_err(Failure::runtime)?;
    let interrupt = Interrupt::watch(io.signals);
    let record = args.json || loaf.chat().answers == Answers::ShellCommand;
    let silent = args.json;
    let reasoning = Reasoning::new(io.stdout_style(), prompt.thinks);
    let progress = Progress::new(io);
    let (text, open_line, failure) = (String::new(), false, None);
    let mut out = Output { io, text, record, silent, has_text, open_line, reasoning, progress, failure };
    let Session { engine, sequence } = &mut session;
    let report = generate::run(engine, sequence, &mut generation, &mut |event, text| {
        if interrupt.raised() || out.take(event, text).is_break() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    out.progress.clear(out.io);
    let report = report.map_err(Failure::runtime)?;
    out.finish();
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
        io.show_json(&object)?;
    } else if open_line {
        io.print("\n")?;
    }
    advise(&text, &report, loaf.chat(), io);
    if let Some(notes) = session.engine.notes().filter(|_| args.compute.verbose) {
        io.note(format_args!("loaf: {notes}"));
    }
    finish(&report, &loaf, start, args.compute.verbose, io)
}

/// Warnings and statistics after the answer, and the exit code.
fn finish(report: &Report, loaf: &Model, start: Instant, verbose: bool, io: &mut Io<'_>) -> Result<u8, Failure> {
    if report.stop == StopReason::Context {
        let context = loaf.plan().context;
        io.warn(format_args!("the context of {context} tokens is full, the answer is cut off"));
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
fn prompt(args: &RunArgs, loaf: &Model, tokenizer: Option<&Tokenizer>, io: &mut Io<'_>) -> Result<Prompt, Failure> {
    if let Some(ids) = &args.ids {
        return Ok(Prompt { ids: ids.clone(), continues_text: true, thinks: false });
    }
    let tokenizer = tokenizer
        .ok_or_else(|| Failure::usage("this loaf has no tokenizer: pass the prompt as token ids, with --ids 1,2,3"))?;
    let text = match args.prompt.join(" ") {
        text if !args.prompt.is_empty() && text != "-" => text,
        _ if args.prompt.is_empty() && io.stdin_is_terminal => {
            return Err(Failure::usage(
                "no prompt: pass one as an argument, or pipe it in; 'loaf chat' talks turn by turn",
            ));
        }
        _ => without_last_newline(io.read_stdin()?),
    };
    let talk = if args.raw { None } else { Conversation::new(loaf.chat()).map_err(Failure::runtime)? };
    match talk {
        Some(mut talk) => {
            if text.trim().is_empty() {
                return Err(Failure::usage("the prompt is empty: pass a request as an argument, or pipe it in"));
            }
            talk.special = args.special;
            talk.thinking = args.no_thinking.then_some(false);
            talk.set_system(args.system.clone());
            talk.push_user(&text);
            let prompt = talk.prompt(tokenizer, &mut Scratch::default());
            let prompt = prompt.map_err(|e| Failure::Runtime(format!("{e}; --raw goes without the template")))?;
            Ok(Prompt { ids: prompt.ids, continues_text: false, thinks: prompt.thinks })
        }
        None if args.system.is_some() || args.no_thinking => {
            Err(Failure::usage("this model has no chat template, so there is no place for --system or --no-thinking"))
        }
        None => {
            let ids = text_ids(tokenizer, &text, args.special);
            if ids.is_empty() {
                return Err(Failure::usage("the prompt is empty: pass a text as an argument, or pipe it in"));
            }
            Ok(Prompt { ids, continues_text: true, thinks: false })
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
    reasoning: Reasoning,
    progress: Progress,
    failure: Option<Failure>,
}

impl Output<'_, '_> {
    /// Prints what may have become a mark and did not.
    fn finish(&mut self) {
        if self.failure.is_none() && !self.silent {
            self.failure = self.io.print(self.reasoning.finish()).err();
        }
    }

    fn take(&mut self, event: Event, text: &str) -> ControlFlow<()> {
        let printed = match event {
            Event::Prefill(done, all) => {
                let what = format_args!("{done} of {all} tokens of the prompt");
                if done < all {
                    self.progress.at(done as u64, all as u64, what, self.io);
                } else {
                    self.progress.clear(self.io);
                }
                return ControlFlow::Continue(());
            }
            Event::Token(_) | Event::Tail if self.has_text => {
                if self.record {
                    self.text.push_str(text);
                }
                if self.silent || text.is_empty() {
                    return ControlFlow::Continue(());
                }
                self.open_line = !text.ends_with('\n');
                self.io.print(self.reasoning.take(text))
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
