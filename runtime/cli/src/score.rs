//! `loaf score`: what the model thinks of a text.
//!
//! Every token but the first has a log-probability given those before it. The logits of all positions can be
//! written as they come; the file appears under its name only when it is whole.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::args::ScoreArgs;
use crate::interrupt::Interrupt;
use crate::{Failure, Io, model, printable, read_text};
use loaf_runtime::sample::log_prob;
use loaf_runtime::Session;
use loaf_runtime::model::SharedTokenizer;
use loaf_runtime::tokenizer::{Scratch, Tokenizer};

pub(crate) fn score(args: &ScoreArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let loaf = model::open_model(&args.model, io)?;
    let tokenizer = model::tokenizer(&loaf)?;
    let ids = ids(args, tokenizer.as_ref().map(SharedTokenizer::get).as_ref(), io)?;
    if ids.is_empty() {
        return Err(Failure::usage("nothing to score: expected at least one token, found none"));
    }
    model::check_fits(ids.len(), &loaf)?;
    let mut session = model::session(&loaf, &args.compute, io)?;
    let vocab = loaf.plan().vocab;
    let out = args.logits.as_deref().map(|path| LogitsFile::create(path, ids.len(), vocab)).transpose()?;
    let mut scorer = Scorer { ids: &ids, done: 0, log_probs: Vec::with_capacity(ids.len()), out };
    let interrupt = Interrupt::watch(io.signals);
    let chunk = if args.decode { 1 } else { session.engine.chunk().max(1) };
    for part in ids.chunks(chunk) {
        if interrupt.raised() {
            return Ok(130);
        }
        scorer.evaluate(&mut session, part, args.decode)?;
        if io.stderr_is_terminal && ids.len() > chunk {
            let _ = write!(io.stderr, "\r{} of {} tokens", scorer.done, ids.len());
        }
    }
    if io.stderr_is_terminal && ids.len() > chunk {
        io.note("");
    }
    let Scorer { log_probs, out, .. } = scorer;
    out.map_or(Ok(()), LogitsFile::finish)?;
    let sum: f64 = log_probs.iter().sum();
    let perplexity = (!log_probs.is_empty()).then(|| libm::exp(-sum / log_probs.len() as f64));
    if args.json {
        let object = json!({
            "ids": ids, "log_probs": log_probs, "tokens": log_probs.len(), "log_prob": sum, "perplexity": perplexity,
        });
        io.print(format_args!("{object}\n"))?;
        return Ok(0);
    }
    for (id, log_prob) in ids[1..].iter().zip(&log_probs) {
        let text = tokenizer.as_ref().map_or_else(String::new, |t| quoted(&t.get(), *id));
        writeln!(io.stdout, "{id}\t{log_prob:.6}{text}").map_err(Failure::stdout)?;
    }
    match perplexity {
        Some(p) => io.print(format_args!("perplexity {p:.4} over {} tokens\n", log_probs.len()))?,
        None => io.print("perplexity undefined: one token has no prefix to be scored by\n")?,
    }
    Ok(0)
}

/// A token's bytes as a column, escaped.
fn quoted(tokenizer: &Tokenizer<'_>, id: u32) -> String {
    format!("\t\"{}\"", printable(&String::from_utf8_lossy(tokenizer.token_bytes(id)).replace('\n', "\\n")))
}

fn ids(args: &ScoreArgs, tokenizer: Option<&Tokenizer<'_>>, io: &mut Io<'_>) -> Result<Vec<u32>, Failure> {
    if let Some(ids) = &args.ids {
        return Ok(ids.clone());
    }
    let tokenizer =
        tokenizer.ok_or_else(|| Failure::usage("this loaf has no tokenizer: pass token ids, with --ids 1,2,3"))?;
    let text = match args.file.as_deref() {
        Some(path) if path != Path::new("-") => {
            let name = path.display().to_string();
            let mut file = File::open(path).map_err(|e| Failure::Runtime(format!("{name}: {e}")))?;
            read_text(&mut file, &name)?
        }
        None if io.stdin_is_terminal => return Err(Failure::usage("no text: pass a file, or pipe it in")),
        _ => io.read_stdin()?,
    };
    let mut ids = Vec::new();
    tokenizer.encode(&text, true, &mut Scratch::default(), &mut ids);
    Ok(ids)
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

/// A safetensors file with one tensor, written row by row under a temporary name.
struct LogitsFile {
    file: BufWriter<File>,
    temporary: PathBuf,
    path: PathBuf,
    renamed: bool,
}

impl LogitsFile {
    fn create(path: &Path, tokens: usize, vocab: u32) -> Result<LogitsFile, Failure> {
        let name =
            path.file_name().ok_or_else(|| Failure::Usage(format!("{}: expected a file name", path.display())))?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.partial", std::process::id()));
        let temporary = path.with_file_name(hidden);
        let bytes = tokens as u64 * u64::from(vocab) * 4;
        let tensor = json!({ "dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, bytes] });
        let mut header = json!({ "logits": tensor }).to_string();
        // The data start on a multiple of 8 bytes.
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let file = File::create(&temporary).map_err(|e| Failure::Runtime(format!("{}: {e}", temporary.display())))?;
        let mut out = LogitsFile { file: BufWriter::new(file), temporary, path: path.to_path_buf(), renamed: false };
        let write = |out: &mut BufWriter<File>| -> io::Result<()> {
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(header.as_bytes())
        };
        write(&mut out.file).map_err(|e| out.failure(e))?;
        Ok(out)
    }

    fn write(&mut self, logits: &[f32]) -> Result<(), Failure> {
        for x in logits {
            self.file.write_all(&x.to_le_bytes()).map_err(|e| self.failure(e))?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), Failure> {
        let done = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        done.and_then(|()| fs::rename(&self.temporary, &self.path)).map_err(|e| self.failure(e))?;
        self.renamed = true;
        Ok(())
    }

    fn failure(&self, error: io::Error) -> Failure {
        Failure::Runtime(format!("{}: {error}", self.path.display()))
    }
}

impl Drop for LogitsFile {
    fn drop(&mut self) {
        if !self.renamed {
            // Nothing more can be done about a file that cannot be removed.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}
