//! `loaf score`: what the model thinks of a text.
//!
//! Every token but the first has a log-probability given those before it. The logits of all
//! positions can be written as they come; the file appears under its name only when it is whole.

use std::io::Write;
use std::path::{Path, PathBuf};

use loaf_formats::output::{self, Output};
use serde_json::json;

use crate::args::ScoreArgs;
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::{Failure, Io, model, printable, read_text_file};
use loaf_runtime::Session;
use loaf_runtime::conversation::text_ids;
use loaf_runtime::sample::log_prob;
use loaf_runtime::tokenizer::Tokenizer;

/// Logits are written in pieces of about this many bytes.
const BUFFER_BYTES: usize = 1 << 20;

pub(crate) fn score(args: &ScoreArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let loaf = model::open_model(&args.model, io)?;
    let tokenizer = model::tokenizer(&loaf)?;
    let ids = ids(args, tokenizer.as_ref(), io)?;
    if ids.is_empty() {
        return Err(Failure::usage("nothing to score: expected at least one token, found none"));
    }
    model::check_fits(ids.len(), &loaf)?;
    let vocab = loaf.plan().vocab;
    if io.signals {
        output::remove_on_signal();
    }
    let inputs: Vec<PathBuf> = model::path(&args.model, io).into_iter().chain(args.file.clone()).collect();
    let create = |path: &Path| LogitsFile::create(path, &inputs, ids.len(), vocab);
    let out = args.logits.as_deref().map(create).transpose()?;
    let mut session = model::session(&loaf, &args.compute, io)?;
    let mut scorer = Scorer { ids: &ids, done: 0, log_probs: Vec::with_capacity(ids.len()), out };
    let interrupt = Interrupt::watch(io.signals);
    let mut progress = Progress::new(io);
    let chunk = if args.decode { 1 } else { session.engine.chunk().max(1) };
    for part in ids.chunks(chunk) {
        if interrupt.raised() {
            progress.clear(io);
            return Ok(130);
        }
        scorer.evaluate(&mut session, part, args.decode)?;
        let (done, all) = (scorer.done, ids.len());
        progress.at(done as u64, all as u64, format_args!("{done} of {all} tokens"), io);
    }
    progress.clear(io);
    let Scorer { log_probs, out, .. } = scorer;
    out.map_or(Ok(()), LogitsFile::finish)?;
    let sum: f64 = log_probs.iter().sum();
    let perplexity = (!log_probs.is_empty()).then(|| libm::exp(-sum / log_probs.len() as f64));
    if args.json {
        let object = json!({
            "ids": ids, "log_probs": log_probs, "tokens": log_probs.len(), "log_prob": sum, "perplexity": perplexity,
        });
        io.show_json(&object)?;
        return Ok(0);
    }
    for (id, log_prob) in ids[1..].iter().zip(&log_probs) {
        let text = tokenizer.as_ref().map_or_else(String::new, |t| quoted(t, *id));
        writeln!(io.stdout, "{id}\t{log_prob:.6}{text}").map_err(Failure::stdout)?;
    }
    match perplexity {
        Some(p) => io.print(format_args!("perplexity {p:.4} over {} tokens\n", log_probs.len()))?,
        None => io.print("perplexity undefined: one token has no prefix to be scored by\n")?,
    }
    Ok(0)
}

/// A token's bytes as a column, escaped.
fn quoted(tokenizer: &Tokenizer, id: u32) -> String {
    format!("\t\"{}\"", printable(&String::from_utf8_lossy(tokenizer.token_bytes(id))))
}

fn ids(args: &ScoreArgs, tokenizer: Option<&Tokenizer>, io: &mut Io<'_>) -> Result<Vec<u32>, Failure> {
    if let Some(ids) = &args.ids {
        return Ok(ids.clone());
    }
    let tokenizer =
        tokenizer.ok_or_else(|| Failure::usage("this loaf has no tokenizer: pass token ids, with --ids 1,2,3"))?;
    let text = match args.file.as_deref() {
        Some(path) if path != Path::new("-") => read_text_file(path)?,
        None if io.stdin_is_terminal => return Err(Failure::usage("no text: pass a file, or pipe it in")),
        _ => io.read_stdin()?,
    };
    Ok(text_ids(tokenizer, &text, args.special))
}

struct Scorer<'i> {
    ids: &'i [u32],
    done: usize,
    log_probs: Vec<f64>,
    out: Option<LogitsFile>,
}

impl Scorer<'_> {
    /// Evaluates the next ids, of which there are at most a chunk.
    fn evaluate(&mut self, session: &mut Session, part: &[u32], decode: bool) -> Result<(), Failure> {
        if !decode {
            session.prefill(part).map_err(Failure::runtime)?;
        }
        let together = session.engine.limits().decode_rows;
        let mut wanted = Vec::with_capacity(together as usize);
        for (row, &id) in (0u32..).zip(part) {
            let logits = if decode {
                session.decode(id).map_err(Failure::runtime)?
            } else {
                if row % together == 0 {
                    wanted.clear();
                    wanted.extend(row..(row + together).min(part.len() as u32));
                    session.engine.logits_of(&wanted).map_err(Failure::runtime)?;
                }
                session.engine.logits((row % together) as usize)
            };
            self.done += 1;
            if let Some(&next) = self.ids.get(self.done) {
                let log_prob = log_prob(logits, next).ok_or_else(|| {
                    Failure::Runtime(format!("logits of token {}: expected a finite value, found none", self.done - 1))
                })?;
                self.log_probs.push(log_prob);
            }
            if let Some(out) = &mut self.out {
                out.write(logits)?;
            }
        }
        Ok(())
    }
}

/// A safetensors file with one tensor, written row by row.
struct LogitsFile {
    output: Output,
    /// Rows that are not written yet.
    buffer: Vec<u8>,
}

impl LogitsFile {
    /// Begins the file at `path`, which is none of the command's `inputs`.
    fn create(path: &Path, inputs: &[PathBuf], tokens: usize, vocab: u32) -> Result<LogitsFile, Failure> {
        let bytes = tokens as u64 * u64::from(vocab) * 4;
        let tensor = json!({ "dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, bytes] });
        let mut header = json!({ "logits": tensor }).to_string();
        // The data start on a multiple of 8 bytes.
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let output = Output::create(path, inputs).map_err(Failure::runtime)?;
        // Room for all of it, before an evaluation that may take long; rows are written from the
        // start on.
        output.reserve(8 + header.len() as u64 + bytes).map_err(Failure::runtime)?;
        let mut buffer = (header.len() as u64).to_le_bytes().to_vec();
        buffer.extend_from_slice(header.as_bytes());
        Ok(LogitsFile { output, buffer })
    }

    fn write(&mut self, logits: &[f32]) -> Result<(), Failure> {
        self.buffer.extend(logits.iter().flat_map(|x| x.to_le_bytes()));
        if self.buffer.len() >= BUFFER_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Failure> {
        let written = self.output.file().write_all(&self.buffer).map_err(self.output.io("write to it"));
        self.buffer.clear();
        written.map_err(Failure::runtime)
    }

    fn finish(mut self) -> Result<(), Failure> {
        self.flush()?;
        self.output.finish().map_err(Failure::runtime)
    }
}
