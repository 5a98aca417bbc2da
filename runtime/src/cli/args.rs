//! What can be said on the command line, and its help.
//!
//! Values are checked here as far as they can be without a model; what depends on one is checked where it is
//! known.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use loaf_formats::chat::Sampling;

use super::Failure;
use crate::kernels::Kernels;
use crate::sample::SamplerOptions;

/// Runs language models that `bake` made.
#[derive(Parser)]
#[command(name = "loaf", version, about, max_term_width = 100, subcommand_required = true)]
#[command(after_help = environment())]
pub(super) struct Args {
    #[command(subcommand)]
    pub command: Command,
}

/// What the environment may say.
fn environment() -> String {
    let names: Vec<_> = Kernels::all().map(|kernels| kernels.isa().name()).collect();
    format!(
        "Environment:\n  LOAF_MODEL  the loaf to use where -m is not given\n  LOAF_ISA    kernels to use, of those this CPU has: {} \
         (default: the first; results are the same)",
        names.join(", ")
    )
}

#[derive(Subcommand)]
pub(super) enum Command {
    /// Answer or continue one prompt.
    ///
    /// The prompt is the argument, or standard input if there is none or it is '-'. If the model has a chat template, the
    /// prompt becomes a user message; otherwise, or with --raw, the model continues the text. Standard output gets the
    /// text alone.
    Run(RunArgs),
    /// Talk with a model, turn by turn.
    ///
    /// Each line of standard input is a message; lines that start with '/' are commands (see /help).
    Chat(ChatArgs),
    /// Give the log-probability of every token of a text, and its perplexity.
    Score(ScoreArgs),
    /// Measure how fast this machine replays a loaf, beside how fast it reads memory.
    Bench(BenchArgs),
    /// Compare engines op by op on a prompt; exit code 1 if any result diverges.
    Check(CheckArgs),
    /// Say what a loaf is and what it needs.
    Info(InfoArgs),
    /// Prove every byte of a loaf: all hashes, structure, tensors, tables; with --run, what it says.
    Verify(VerifyArgs),
}

impl Command {
    /// What the command says of its model.
    pub fn model_mut(&mut self) -> &mut ModelArgs {
        match self {
            Command::Run(args) => &mut args.model,
            Command::Chat(args) => &mut args.model,
            Command::Score(args) => &mut args.model,
            Command::Bench(args) => &mut args.model,
            Command::Check(args) => &mut args.model,
            Command::Info(args) => &mut args.model,
            Command::Verify(args) => &mut args.model,
        }
    }
}

#[derive(ClapArgs)]
pub(super) struct ModelArgs {
    /// The loaf to use [default: the one this program carries, what LOAF_MODEL says, or the built-in one]
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// The running program, if it carries a loaf.
    #[arg(skip)]
    pub program: Option<PathBuf>,
}

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum BackendArg {
    /// The CPU; the same bits everywhere
    #[default]
    Cpu,
    /// The GPU, through MLX (Apple silicon, NVIDIA)
    Mlx,
    /// MLX's CPU device; slow, for comparing
    MlxCpu,
}

#[derive(ClapArgs, Default)]
pub(super) struct ComputeArgs {
    /// What to compute with
    #[arg(long, value_name = "BACKEND", value_enum, default_value_t)]
    pub backend: BackendArg,
    /// Threads of the CPU backend; results do not depend on it [default: one per physical core, fewer
    /// for small models]
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Print timings and sizes on standard error
    #[arg(short, long)]
    pub verbose: bool,
}

#[derive(ClapArgs)]
#[command(next_help_heading = "Sampling (defaults come with the model)")]
pub(super) struct SamplingArgs {
    /// Most tokens to generate [default: until the model stops or the context is full]
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Always take the most probable token; the same as --temperature 0
    #[arg(long, conflicts_with = "temperature")]
    pub greedy: bool,
    /// Divide logits by this, from 0 (greedy) to 100; higher is more surprising
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Choose among the K most probable tokens; 0 for all
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Choose among the most probable tokens that together have probability P, above 0 and at most 1
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Drop tokens less probable than P times the best, from 0 to below 1
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Make tokens of prompt and output less probable; 1 for not at all
    #[arg(long, value_name = "R")]
    pub repeat_penalty: Option<f32>,
    /// Subtract this from the logits of tokens in the output [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract this from the logits of tokens in the output, once per occurrence [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Seed of the draws: the same seed gives the same text [default: another one each time]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Stop before this text appears; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

impl SamplingArgs {
    /// The sampler's options: these arguments over the model's defaults.
    pub fn over(&self, defaults: &Sampling) -> Result<SamplerOptions, Failure> {
        let mut o = SamplerOptions::new(defaults, self.seed.unwrap_or_else(random_seed));
        if self.greedy {
            o.temperature = 0.0;
        }
        o.temperature = self.temperature.unwrap_or(o.temperature);
        o.top_k = self.top_k.unwrap_or(o.top_k);
        o.top_p = self.top_p.unwrap_or(o.top_p);
        o.min_p = self.min_p.unwrap_or(o.min_p);
        o.repetition_penalty = self.repeat_penalty.unwrap_or(o.repetition_penalty);
        o.presence_penalty = self.presence_penalty.unwrap_or(o.presence_penalty);
        o.frequency_penalty = self.frequency_penalty.unwrap_or(o.frequency_penalty);
        o.check().map_err(|e| Failure::Usage(e.to_string()))?;
        Ok(o)
    }
}

/// A seed from the keys that the standard library draws for its hash maps.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

#[derive(ClapArgs)]
pub(super) struct RunArgs {
    /// The prompt; '-' or nothing reads standard input
    pub prompt: Option<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long)]
    pub raw: bool,
    /// The prompt as token ids, separated by commas; no template, nothing added
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', conflicts_with_all = ["prompt", "system", "no_thinking"])]
    pub ids: Option<Vec<u32>>,
    /// Put this system message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Ask the chat template for an answer without thinking first
    #[arg(long, conflicts_with = "raw")]
    pub no_thinking: bool,
    /// Print one JSON object instead: prompt_ids, ids, text, stop, ttft_ms, prefill_tok_s, decode_tok_s, seed
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub compute: ComputeArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(ClapArgs)]
pub(super) struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Start with this system message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Ask the chat template for answers without thinking first
    #[arg(long)]
    pub no_thinking: bool,
    #[command(flatten)]
    pub compute: ComputeArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(ClapArgs)]
pub(super) struct ScoreArgs {
    /// A text file; '-' or nothing reads standard input
    pub file: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids to score instead of a text, separated by commas
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', conflicts_with = "file")]
    pub ids: Option<Vec<u32>>,
    /// Write the logits after every token to this file: safetensors, one tensor 'logits', f32 [tokens, vocab]
    #[arg(long, value_name = "OUT.safetensors")]
    pub logits: Option<PathBuf>,
    /// Evaluate token by token rather than in chunks; slower, and the same bits
    #[arg(long)]
    pub decode: bool,
    /// Print one JSON object instead: ids, log_probs, tokens, log_prob, perplexity
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub compute: ComputeArgs,
}

#[derive(ClapArgs)]
pub(super) struct BenchArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tokens of the prompt, 0 for none [default: 512, or as many as fit]
    #[arg(long, value_name = "N")]
    pub prefill: Option<u32>,
    /// Tokens generated one by one, 0 for none [default: 64, or as many as fit]
    #[arg(long, value_name = "N")]
    pub decode: Option<u32>,
    /// Positions in use before what is measured; their cache is filled, not computed
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub context: u32,
    /// Repetitions, after one that warms up
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Print a row per kind of op: calls, time, bytes, speeds
    #[arg(long)]
    pub ops: bool,
    /// Print one JSON object instead: prefill_tok_s, decode_tok_s (each median, min, max), read_ceiling_gb_s, ...
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub compute: ComputeArgs,
}

#[derive(ClapArgs)]
pub(super) struct CheckArgs {
    /// The prompt [default: standard input, or the ids of the file of activations]
    pub prompt: Option<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids to compare on instead of a text, separated by commas
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', conflicts_with = "prompt")]
    pub ids: Option<Vec<u32>>,
    /// What to check (the CPU with the kernels that LOAF_ISA names, or else the best)
    #[arg(long, value_name = "BACKEND", value_enum, default_value_t)]
    pub backend: BackendArg,
    /// What to hold it to: cpu, a name that LOAF_ISA takes, mlx, mlx-cpu, or a safetensors file of activations
    /// (tests/fixtures/make_activations.py) [default: scalar for the CPU, else cpu]
    #[arg(long, value_name = "ENGINE|FILE")]
    pub against: Option<String>,
    /// Differences up to this fraction of a result's largest magnitude pass [default: 0 between CPU kernels, else 0.001;
    /// 0.1 if the CPU rounds activations to eight bits]
    #[arg(long, value_name = "X")]
    pub tolerance: Option<f32>,
    /// List every result, rather than the ten furthest apart
    #[arg(long)]
    pub all: bool,
    /// Print one JSON object instead: against, tolerance, results, first
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs)]
pub(super) struct InfoArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Print one JSON object instead
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs)]
pub(super) struct VerifyArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Replay the loaf's golden prompts too, and compare the token ids
    #[arg(long)]
    pub run: bool,
    /// Print one JSON object instead: id, file_bytes, tensors, and with --run golden_ids
    #[arg(long)]
    pub json: bool,
}
