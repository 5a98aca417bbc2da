//! What can be said on the command line, and its help.
//!
//! Values are checked here as far as they can be without a model; what depends on one is checked
//! where it is known.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use loaf_formats::chat::{Answers, Chat};

use crate::Failure;
use crate::config::Config;
use loaf_runtime::kernels::Kernels;
use loaf_runtime::sample::SamplerOptions;

/// Runs language models that `bake` made.
///
/// What does not begin with a command is a request: 'loaf show the largest files' is 'loaf run show
/// the largest files', and 'loaf model.loaf hello' asks that loaf.
#[derive(Parser)]
#[command(name = "loaf", version, long_version = long_version(cfg!(feature = "default-model")))]
#[command(max_term_width = 100, subcommand_required = true)]
#[command(after_help = environment())]
pub(crate) struct Args {
    #[command(subcommand)]
    pub command: Command,
}

/// Runs one language model, which it carries.
#[derive(Parser)]
#[command(name = "loaf", version, long_version = long_version(false), max_term_width = 100, subcommand_required = true)]
pub(crate) struct SmallArgs {
    #[command(subcommand)]
    pub command: SmallCommand,
}

/// Names of the kernels that this CPU can run, the best first.
fn kernels() -> String {
    Kernels::all().map(|kernels| kernels.isa().name()).collect::<Vec<_>>().join(", ")
}

/// What the environment may say.
fn environment() -> String {
    format!(
        "Environment:
  LOAF_MODEL  the loaf to use where -m is not given: a file, or a name of 'loaf list'
  LOAF_HOME   folder of models/ and config.toml; without it they are in
              ~/.local/share/loaf and ~/.config/loaf, or where XDG_DATA_HOME and
              XDG_CONFIG_HOME say
  HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT
              for 'loaf pull', as for other programs of the Hugging Face hub
  LOAF_ISA    kernels to use, of those this CPU has (the same results with all):
              {}
  NO_COLOR    no colour, if set to anything

config.toml sets, a line each, KEY = VALUE: model, threads, max_tokens, temperature,
top_k, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty.",
        kernels()
    )
}

/// The version with what was compiled in, a model or not, and what this CPU can run.
fn long_version(model: bool) -> &'static str {
    let features: Vec<&str> = [("default-model", model), ("mlx", cfg!(feature = "mlx"))]
        .into_iter()
        .filter_map(|(name, on)| on.then_some(name))
        .collect();
    let features = if features.is_empty() { "none".to_owned() } else { features.join(", ") };
    let text = format!("{}\nfeatures: {features}\nkernels of this CPU: {}", env!("CARGO_PKG_VERSION"), kernels());
    // Once in a run: clap wants a text that lives on.
    text.leak()
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Answer or continue one prompt.
    ///
    /// The prompt is the argument, or standard input if there is none or it is '-'. If the model
    /// has a chat template, the prompt becomes a user message; otherwise, or with --raw, the model
    /// continues the text. Standard output gets the text alone.
    Run(RunArgs),
    /// Talk with a model, turn by turn.
    ///
    /// Each line of standard input is a message, and one that ends in '\' goes on in the next;
    /// lines that start with '/' are commands (see /help). Ctrl-C stops an answer, Ctrl-D ends the
    /// conversation.
    Chat(ChatArgs),
    /// Serve models over HTTP and a Unix socket, with the APIs that clients of OpenAI and Anthropic
    /// speak.
    ///
    /// Requests run beside each other, and conversations are remembered: a follow-up evaluates what
    /// is new alone. An answer has the same bytes whether it ran alone or beside others, and
    /// whatever was remembered. docs/serve.md says the rest.
    Serve(Box<ServeArgs>),
    /// Give the log-probability of every token of a text, and its perplexity.
    Score(ScoreArgs),
    /// Measure how fast this machine runs a model, beside the bandwidth of its memory.
    Bench(BenchArgs),
    /// Compare engines op by op on a prompt; exit code 1 if any result diverges.
    Check(CheckArgs),
    /// Say what a loaf is and what it needs.
    Info(InfoArgs),
    /// Check a loaf whole: every checksum, structure, tensors, tables; with --run, what it says.
    Verify(VerifyArgs),
    /// List the models that have a name here: the loaves in the folder 'models' of LOAF_HOME.
    List(ListArgs),
    /// Remove models that 'loaf list' shows.
    Rm(RmArgs),
    /// Fetch a loaf from the Hugging Face hub and give it a name here.
    ///
    /// The one command that uses the network, and only for what the Hugging Face cache lacks. A
    /// download that stops is taken up by the next call; what arrives is checked. Of a file that is
    /// no loaf the path in the cache is printed.
    Pull(PullArgs),
    /// Print completions for a shell, to be put where it looks for them.
    Completions(CompletionsArgs),
    /// Print the manual page: 'loaf man | man -l -'.
    Man,
}

/// Commands of the small program.
#[derive(Subcommand)]
pub(crate) enum SmallCommand {
    /// Answer or continue one prompt: the argument, or standard input.
    Run(RunArgs),
    /// Talk with the model, turn by turn.
    Chat(ChatArgs),
    /// Say what the model is and what it needs.
    Info(InfoArgs),
    /// Check the model whole: every checksum; with --run, what it says.
    Verify(VerifyArgs),
}

impl SmallCommand {
    /// What the command says of its model.
    pub fn model_mut(&mut self) -> &mut ModelArgs {
        match self {
            SmallCommand::Run(args) => &mut args.model,
            SmallCommand::Chat(args) => &mut args.model,
            SmallCommand::Info(args) => &mut args.model,
            SmallCommand::Verify(args) => &mut args.model,
        }
    }
}

impl Command {
    /// Whether there is a model in it, and so a use for settings.
    pub fn runs_a_model(&self) -> bool {
        !matches!(self, Command::List(_) | Command::Rm(_) | Command::Pull(_) | Command::Completions(_) | Command::Man)
    }

    /// Puts the settings where the arguments say nothing, and the running program where it carries
    /// a loaf.
    pub fn configure(&mut self, config: &Config, program: Option<&Path>) {
        let (model, compute, sampling) = match self {
            Command::Run(args) => (&mut args.model, Some(&mut args.compute), Some(&mut args.sampling)),
            Command::Chat(args) => (&mut args.model, Some(&mut args.compute), Some(&mut args.sampling)),
            Command::Score(args) => (&mut args.model, Some(&mut args.compute), None),
            Command::Bench(args) => (&mut args.model, Some(&mut args.compute), None),
            Command::Serve(args) => (&mut args.model, Some(&mut args.compute), None),
            Command::Check(args) => (&mut args.model, None, None),
            Command::Info(args) => (&mut args.model, None, None),
            Command::Verify(args) => (&mut args.model, None, None),
            Command::List(_) | Command::Rm(_) | Command::Pull(_) | Command::Completions(_) | Command::Man => return,
        };
        model.program = program.map(Path::to_path_buf);
        model.configured = config.model.clone();
        if let Some(compute) = compute {
            compute.threads = compute.threads.or(config.threads);
        }
        if let Some(sampling) = sampling {
            sampling.config = config.clone();
        }
    }
}

#[derive(ClapArgs, Clone, Default)]
pub(crate) struct ModelArgs {
    /// The loaf to use, a file or a name that 'loaf list' shows [default: the one this program
    /// carries, what LOAF_MODEL or config.toml says, or the built-in one]
    #[arg(short, long, value_name = "FILE|NAME")]
    pub model: Option<PathBuf>,
    /// What config.toml says.
    #[arg(skip)]
    pub configured: Option<PathBuf>,
    /// The running program, if it carries a loaf.
    #[arg(skip)]
    pub program: Option<PathBuf>,
}

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendArg {
    /// The CPU; the same bits everywhere
    #[default]
    Cpu,
    /// The GPU, through MLX (Apple silicon, NVIDIA)
    Mlx,
    /// MLX's CPU device; slow, for comparing
    MlxCpu,
    /// An NVIDIA GPU; the CPU's bits
    Cuda,
    /// An NVIDIA GPU if there is one with room, else the CPU
    Auto,
}

#[derive(ClapArgs, Default)]
pub(crate) struct ComputeArgs {
    /// What to compute with
    #[arg(long, value_name = "BACKEND", value_enum, default_value_t)]
    pub backend: BackendArg,
    /// Compute attention and the delta rule of prompts by tensor cores, near the CPU's bits and not
    /// with them (with --backend cuda alone)
    #[arg(long)]
    pub fast: bool,
    /// Threads of the CPU backend; results do not depend on it [default: one per physical core,
    /// fewer for small models]
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Leave weights on their pages until they are first read, so that less memory counts as this
    /// program's
    #[arg(long)]
    pub no_prefetch: bool,
    /// Print timings and sizes on standard error
    #[arg(short, long)]
    pub verbose: bool,
}

#[derive(ClapArgs)]
#[command(next_help_heading = "Sampling (defaults come with the model)")]
pub(crate) struct SamplingArgs {
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
    /// Choose among the most probable tokens that together have probability P, above 0 and at most
    /// 1
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
    /// What config.toml says.
    #[arg(skip)]
    pub config: Config,
}

impl SamplingArgs {
    /// The sampler's options: these arguments over the settings file over the model's defaults. The
    /// settings are not for models whose answers are commands.
    pub fn over(&self, chat: &Chat) -> Result<SamplerOptions, Failure> {
        let mut o = SamplerOptions::new(&chat.sampling, self.seed.unwrap_or_else(random_seed));
        let none = Config::default();
        let config = if chat.answers == Answers::Text { &self.config } else { &none };
        let greedy = self.greedy.then_some(0.0);
        o.temperature = self.temperature.or(greedy).or(config.temperature).unwrap_or(o.temperature);
        o.top_k = self.top_k.or(config.top_k).unwrap_or(o.top_k);
        o.top_p = self.top_p.or(config.top_p).unwrap_or(o.top_p);
        o.min_p = self.min_p.or(config.min_p).unwrap_or(o.min_p);
        o.repetition_penalty = self.repeat_penalty.or(config.repeat_penalty).unwrap_or(o.repetition_penalty);
        o.presence_penalty = self.presence_penalty.or(config.presence_penalty).unwrap_or(o.presence_penalty);
        o.frequency_penalty = self.frequency_penalty.or(config.frequency_penalty).unwrap_or(o.frequency_penalty);
        o.check().map_err(|e| Failure::Usage(e.to_string()))?;
        Ok(o)
    }

    /// Most tokens to generate.
    pub fn most(&self, chat: &Chat) -> Option<usize> {
        self.max_tokens.or(self.config.max_tokens.filter(|_| chat.answers == Answers::Text))
    }
}

/// A seed from the keys that the standard library draws for its hash maps.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

#[derive(ClapArgs)]
pub(crate) struct RunArgs {
    /// The prompt, one word or several; '-' or nothing reads standard input
    pub prompt: Vec<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long)]
    pub raw: bool,
    /// Let the prompt spell special tokens, such as '</s>'; otherwise they are the characters they
    /// are written with
    #[arg(long)]
    pub special: bool,
    /// The prompt as token ids, separated by commas; no template, nothing added
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', conflicts_with_all = ["prompt", "system", "no_thinking"])]
    pub ids: Option<Vec<u32>>,
    /// Put this system message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Ask the chat template for an answer without thinking first
    #[arg(long, conflicts_with = "raw")]
    pub no_thinking: bool,
    /// Print one JSON object instead: prompt_ids, ids, text, stop, ttft_ms, prefill_tok_s,
    /// decode_tok_s, seed
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub compute: ComputeArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(ClapArgs)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Start with this system message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Ask the chat template for answers without thinking first
    #[arg(long)]
    pub no_thinking: bool,
    /// Let messages spell special tokens, such as '</s>'; otherwise they are the characters they
    /// are written with
    #[arg(long)]
    pub special: bool,
    /// Refuse a message that the context has no room for, rather than forget the oldest turns
    #[arg(long)]
    pub keep_all: bool,
    /// Keep the lines typed in this file, for the next conversation
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    #[command(flatten)]
    pub compute: ComputeArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(ClapArgs)]
pub(crate) struct ServeArgs {
    /// What the environment, the settings or the program say of the model.
    #[arg(skip)]
    pub model: ModelArgs,
    /// A loaf to serve, a file or a name that 'loaf list' shows, under its own name or as
    /// NAME=FILE; may be given several times [default: as for 'loaf run']
    #[arg(short = 'm', long = "model", value_name = "FILE|NAME=FILE")]
    pub models: Vec<PathBuf>,
    /// Address to listen on; may be given several times [default: 127.0.0.1:8080, or none beside
    /// --socket]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Vec<SocketAddr>,
    /// Listen on this Unix socket too, which only you can open: HTTP, or a JSON object a line
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Keys that clients have to know one of, a line each; needed for addresses that others can
    /// reach
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Another name under which clients may reach this server; may be given several times
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Requests that run at once, each in a slot of its own
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub parallel: u32,
    /// Requests that wait for a slot; one more is refused with status 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub queue: usize,
    /// Milliseconds that work on one prompt may keep other answers waiting
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub max_stall: u64,
    /// Memory for conversations that are not in a slot, such as 512M or 4G; 0 for none
    #[arg(long, value_name = "BYTES", default_value = "2G", value_parser = bytes)]
    pub cache_memory: u64,
    /// Folder in which conversations outlive the server; what was said can be had from its files
    #[arg(long, value_name = "FOLDER")]
    pub cache_dir: Option<PathBuf>,
    /// Bytes that the folder may have for each model
    #[arg(long, value_name = "BYTES", default_value = "32G", value_parser = bytes)]
    pub cache_disk: u64,
    /// Let a model go that nobody asked anything for so long; it is opened again when needed
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub idle_unload: Option<u64>,
    /// Append a JSON object to this file for each request: time, hashes, seed, tokens, timings
    #[arg(long, value_name = "FILE")]
    pub audit: Option<PathBuf>,
    /// Put the texts of requests and answers into that file too
    #[arg(long, requires = "audit")]
    pub audit_texts: bool,
    /// Bytes that a request may have
    #[arg(long, value_name = "BYTES", default_value = "8M", value_parser = bytes)]
    pub max_body: u64,
    /// Connections at once
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_connections: usize,
    /// Seconds that running requests get after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
    #[command(flatten)]
    pub compute: ComputeArgs,
}

/// Reads a number of bytes, with K, M, G or T behind it.
fn bytes(text: &str) -> Result<u64, String> {
    let bad = || format!("expected a number of bytes such as 512M or 4G, found {text:?}");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().trim_end_matches("IB").trim_end_matches('B') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(bad()),
    };
    let number: u64 = digits.parse().map_err(|_| bad())?;
    number.checked_mul(1 << shift).ok_or_else(bad)
}

#[derive(ClapArgs)]
pub(crate) struct ScoreArgs {
    /// A text file; '-' or nothing reads standard input
    pub file: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids to score instead of a text, separated by commas
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', conflicts_with = "file")]
    pub ids: Option<Vec<u32>>,
    /// Let the text spell special tokens, such as '</s>'; otherwise they are the characters they
    /// are written with
    #[arg(long)]
    pub special: bool,
    /// Write the logits after every token to this file: safetensors, one tensor 'logits', f32
    /// [tokens, vocab]
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
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tokens of the prompt, 0 for none [default: 512, or as many as fit]
    #[arg(long, value_name = "N")]
    pub prefill: Option<u32>,
    /// Tokens generated one by one, 0 for none [default: 64, or as many as fit]
    #[arg(long, value_name = "N")]
    pub decode: Option<u32>,
    /// Context length already in use; its KV cache is filled, not computed
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub context: u32,
    /// Repetitions, after one that warms up
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Print a row per kind of op: calls, time, bytes, speeds
    #[arg(long)]
    pub ops: bool,
    /// Print one JSON object instead: prefill_tok_s, decode_tok_s (each median, min, max),
    /// read_bandwidth_gb_s, ...
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub compute: ComputeArgs,
}

#[derive(ClapArgs)]
pub(crate) struct CheckArgs {
    /// The prompt [default: standard input, or the ids of the file of activations]
    pub prompt: Option<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids to compare on instead of a text, separated by commas
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', conflicts_with = "prompt")]
    pub ids: Option<Vec<u32>>,
    /// Let the prompt spell special tokens
    #[arg(long)]
    pub special: bool,
    /// What to check (the CPU with the kernels that LOAF_ISA names, or else the best)
    #[arg(long, value_name = "BACKEND", value_enum, default_value_t)]
    pub backend: BackendArg,
    /// What to hold it to: cpu, a name that LOAF_ISA takes, mlx, mlx-cpu, cuda, or a safetensors
    /// file of activations (tests/fixtures/make_activations.py) [default: scalar if the CPU is what
    /// is checked, else cpu]
    #[arg(long, value_name = "ENGINE|FILE")]
    pub against: Option<String>,
    /// Differences up to this fraction of a result's largest magnitude pass [default: 0 between the
    /// CPU's kernels and with CUDA, else 0.001; 0.1 if the CPU rounds activations to eight bits]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub tolerance: Option<f32>,
    /// List every result, rather than the ten furthest apart
    #[arg(long)]
    pub all: bool,
    /// Print one JSON object instead: against, tolerance, results, first
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs)]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Print one JSON object instead
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Replay the loaf's golden prompts too, and compare the token ids
    #[arg(long)]
    pub run: bool,
    /// What to replay them with
    #[arg(long, value_name = "BACKEND", value_enum, default_value_t, requires = "run")]
    pub backend: BackendArg,
    /// Print one JSON object instead: id, file_bytes, tensors, and with --run golden_ids
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs)]
pub(crate) struct ListArgs {
    /// Print one JSON object instead: folder, models
    #[arg(long)]
    pub json: bool,
}

#[derive(ClapArgs)]
pub(crate) struct PullArgs {
    /// hf:OWNER/NAME[@REVISION][:FILE]; without FILE the repository's one loaf
    #[arg(value_name = "SOURCE")]
    pub source: String,
    /// The name it gets here [default: the file's]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
}

#[derive(ClapArgs)]
pub(crate) struct RmArgs {
    /// Names, as 'loaf list' shows them
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

#[derive(ClapArgs)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}
