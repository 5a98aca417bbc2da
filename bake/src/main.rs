//! `bake`: builds loaves and looks into them.

mod remote;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use loaf_bake::build::{BuildOptions, Prepared, Progress, build, build_from};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::checkpoint::gguf::GgmlType;
use loaf_bake::lock::{self, Lock, LockError};
use loaf_bake::passes::{Pass, Pipeline};
use loaf_bake::program;
use loaf_bake::report::measured::Bench;
use loaf_bake::verify;
use loaf_bake::weights::{QuantOptions, QuantRule};
use loaf_bake::{bench, explain, graphs, report};
use loaf_formats::container::{ArtifactId, Container, SectionKind, hex};
use loaf_formats::dtype::DType;
use loaf_formats::experts::{StoredPlane, stored_planes};
use loaf_formats::graphs::Graphs;
use loaf_formats::output::Output;
use loaf_formats::plan::{Phase, Plan, VerifiedPlan};
use loaf_formats::program::Trailer;
use loaf_formats::text;
use loaf_recipes::graph::Graph;
use loaf_recipes::tape::Shape;
use memmap2::{Mmap, MmapOptions};

/// Bakes a language model into one file, a loaf, that `loaf` runs.
#[derive(Parser)]
#[command(name = "bake", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bake a checkpoint folder or a GGUF file into a loaf.
    Build(BuildArgs),
    /// Show what a loaf holds.
    Inspect {
        /// The loaf, or a program made by 'bake executable'.
        file: PathBuf,
        /// List every tensor.
        #[arg(long)]
        tensors: bool,
    },
    /// Write a page about a loaf: layers, weights, memory, ops and hashes.
    Report {
        /// The loaf, or a program made by 'bake executable'.
        file: PathBuf,
        /// The page to write: one HTML file that needs nothing else.
        #[arg(short, long)]
        output: PathBuf,
        /// What 'loaf bench --ops --json' printed for this loaf.
        #[arg(long, value_name = "JSON")]
        bench: Option<PathBuf>,
    },
    /// Print one concrete graph of a loaf, op by op.
    Explain {
        /// The loaf, or a program made by 'bake executable'.
        file: PathBuf,
        /// Position of the first token.
        #[arg(long, default_value_t = 0)]
        position: u32,
        /// Which phase.
        #[arg(long, value_enum, default_value_t = PhaseArg::Decode)]
        phase: PhaseArg,
        /// Valid rows [default: 1, or the largest chunk for prefill].
        #[arg(long)]
        rows: Option<u32>,
        /// End with the graph's Merkle proof: its leaf, the path and the root recorded in the loaf.
        #[arg(long)]
        proof: bool,
    },
    /// Trace and prove every graph of models given by a folder with config.json; no weights are
    /// needed or written.
    #[command(hide = true)]
    BenchGraphs {
        /// Folders with config.json.
        #[arg(required = true)]
        sources: Vec<PathBuf>,
        #[command(flatten)]
        options: ModelArgs,
    },
    /// Check a loaf: structure, every checksum, every tensor, every plan record.
    Verify {
        /// The loaf, or a program made by 'bake executable'.
        file: PathBuf,
        /// The artifact id it must have.
        #[arg(long, value_name = "ID")]
        expect: Option<ArtifactId>,
        /// Also expand every graph and recompute the roots.
        #[arg(long)]
        graphs: bool,
        /// Also trace every shape again from the recipe in the manifest.
        #[arg(long)]
        recipe: bool,
        /// Also run the golden prompts through the interpreter and compare the token ids.
        #[arg(long)]
        run: bool,
    },
    /// Say what differs between two loaves; exit code 0 if nothing does, 1 if something does, 2 if
    /// they cannot be compared.
    Diff {
        /// One loaf.
        a: PathBuf,
        /// The other.
        b: PathBuf,
    },
    /// Bake every artifact of artifacts/lock.toml again and compare ids.
    #[command(hide = true)]
    Lock {
        /// Only these artifacts.
        names: Vec<String>,
        /// The repository that holds artifacts/lock.toml and the sources.
        #[arg(long, default_value = ".")]
        root: PathBuf,
        /// Compare (the default).
        #[arg(long, conflicts_with = "update")]
        check: bool,
        /// Write what comes out instead.
        #[arg(long)]
        update: bool,
    },
    /// Make one self-contained program of a loaf and the runtime.
    Executable {
        /// The loaf.
        file: PathBuf,
        /// The program to write.
        #[arg(short, long)]
        output: PathBuf,
        /// The runtime [default: the 'loaf-small' beside this program].
        #[arg(long, value_name = "PROGRAM")]
        runtime: Option<PathBuf>,
    },
    /// Print the graph a recipe traces, before or after passes.
    #[command(hide = true)]
    Dump {
        /// Folder with config.json and weights (or config.json alone).
        source: PathBuf,
        /// Stop after this pass.
        #[arg(long, value_enum, default_value_t = Pass::Dead)]
        stop_after: Pass,
        /// Position of the first token.
        #[arg(long, default_value_t = 0)]
        position: u32,
        /// Which phase.
        #[arg(long, value_enum, default_value_t = PhaseArg::Decode)]
        phase: PhaseArg,
        /// Valid rows [default: 1, or the largest chunk for prefill].
        #[arg(long)]
        rows: Option<u32>,
        #[command(flatten)]
        options: ModelArgs,
    },
}

#[derive(Args)]
struct BuildArgs {
    /// Folder with config.json and weights (Hugging Face safetensors or an MLX conversion), or a
    /// GGUF file; of a split model any part, the others lying beside it, or all parts.
    /// hf:OWNER/NAME is a repository on the Hugging Face hub, hf:OWNER/NAME:FILE.gguf a file in
    /// one: from the cache on this disk, or downloaded into it.
    #[arg(required = true, value_name = "SOURCE")]
    source: Vec<PathBuf>,
    /// The loaf to write.
    #[arg(short, long)]
    output: PathBuf,
    #[command(flatten)]
    options: ModelArgs,
    /// Print the report as one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct ModelArgs {
    /// Quantise dense weights with MLX's affine scheme.
    #[arg(long, value_enum, default_value_t = Quant::None)]
    quant: Quant,
    /// Weights per scale.
    #[arg(long, value_enum, default_value = "64")]
    group_size: Group,
    /// Quantise the weights whose names fit PATTERN (* stands for any characters) to WIDTH (q2 ..
    /// q8, or none) instead, such as 'model.embed_tokens.weight=q6'; may be given several times,
    /// the first that fits decides.
    #[arg(long, value_name = "PATTERN=WIDTH")]
    quant_as: Vec<QuantRule>,
    /// Context length, in tokens [default: the config's max_position_embeddings].
    #[arg(long)]
    context: Option<u32>,
    /// Batch size of a prefill, in tokens; several, comma-separated, give a graph template each
    /// [default: 128, for mixtures of experts 128,512].
    #[arg(long, value_delimiter = ',')]
    chunk: Vec<u32>,
    /// Element type of KV caches [default: f32 for models that are f32 throughout, else f16].
    #[arg(long, value_enum)]
    kv: Option<Kv>,
    /// Bake random weights of the config's shapes from this seed; needs config.json alone.
    #[arg(long, value_name = "SEED")]
    random_weights: Option<u64>,
    /// Store a mixture's experts projection by projection, under the names and shapes that other
    /// readers of safetensors know, and not expert by expert.
    #[arg(long)]
    stack_experts: bool,
    /// Ids per golden case, 0 for none [default: 16 for models of up to 64 MiB of weights, else 0].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=1024))]
    golden: Option<u32>,
}

/// The options of a locked artifact, as `bake build` takes them.
#[derive(Parser)]
#[command(name = "options", no_binary_name = true, disable_help_flag = true)]
struct LockedOptions {
    #[command(flatten)]
    options: ModelArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Quant {
    None,
    Q8,
    Q6,
    Q5,
    Q4,
    Q3,
    Q2,
}

#[derive(Clone, Copy, ValueEnum)]
enum Group {
    #[value(name = "32")]
    G32 = 32,
    #[value(name = "64")]
    G64 = 64,
    #[value(name = "128")]
    G128 = 128,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kv {
    F32,
    F16,
}

#[derive(Clone, Copy, ValueEnum)]
enum PhaseArg {
    Decode,
    Prefill,
    LmHead,
}

impl From<PhaseArg> for Phase {
    fn from(p: PhaseArg) -> Phase {
        match p {
            PhaseArg::Decode => Phase::Decode,
            PhaseArg::Prefill => Phase::Prefill,
            PhaseArg::LmHead => Phase::LmHead,
        }
    }
}

impl ModelArgs {
    fn options(&self) -> BuildOptions {
        let bits = match self.quant {
            Quant::None => None,
            Quant::Q8 => Some(8),
            Quant::Q6 => Some(6),
            Quant::Q5 => Some(5),
            Quant::Q4 => Some(4),
            Quant::Q3 => Some(3),
            Quant::Q2 => Some(2),
        };
        BuildOptions {
            quant: QuantOptions { bits, group: self.group_size as u64, rules: self.quant_as.clone() },
            context: self.context,
            chunks: self.chunk.clone(),
            kv: self.kv.map(|kv| match kv {
                Kv::F32 => DType::F32,
                Kv::F16 => DType::F16,
            }),
            random: self.random_weights,
            stack_experts: self.stack_experts,
            golden: self.golden,
        }
    }
}

/// Progress on the terminal: one bar per stage, shown only for stages that last.
struct Bars(std::sync::Mutex<ProgressBar>);

impl Progress for Bars {
    fn begin(&self, stage: &str, total: u64, unit: &str) {
        let bar = ProgressBar::new(total);
        let counts = if unit == "bytes" { "{bytes}/{total_bytes} {bytes_per_sec}" } else { "{pos}/{len}" };
        let style = format!("{{prefix:>8}} {{wide_bar}} {counts} {{elapsed}}, {{eta}} left");
        bar.set_style(ProgressStyle::with_template(&style).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_prefix(stage.to_string());
        *self.0.lock().unwrap_or_else(|e| e.into_inner()) = bar;
    }

    fn step(&self, n: u64) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).inc(n);
    }

    fn warn(&self, message: &str) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).suspend(|| complain(&format!("warning: {message}")));
    }
}

/// `bake diff` found something: an answer, not an error.
#[derive(Debug)]
struct Different;

impl std::fmt::Display for Different {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the loaves differ")
    }
}

impl std::error::Error for Different {}

/// The help text's second list: the commands that the first one hides.
fn with_maintainers_commands(command: clap::Command) -> clap::Command {
    let about = |c: &clap::Command| c.get_about().map_or_else(String::new, ToString::to_string);
    let hidden = command.get_subcommands().filter(|c| c.is_hide_set());
    let list: Vec<String> = hidden.map(|c| format!("  {:<13}{}", c.get_name(), about(c))).collect();
    command.after_help(format!("For maintainers of recipes and published artifacts:\n{}", list.join("\n")))
}

fn main() -> ExitCode {
    loaf_formats::output::remove_on_signal();
    let matches = with_maintainers_commands(Cli::command()).get_matches();
    let command = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli.command,
        Err(e) => e.exit(),
    };
    // As for cmp and diff: 1 is a difference, 2 is trouble.
    let trouble = if matches!(command, Command::Diff { .. }) { 2 } else { 1 };
    match run(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.is::<Different>() => ExitCode::FAILURE,
        Err(e) => {
            complain(&format!("error: {e:#}"));
            ExitCode::from(trouble)
        }
    }
}

fn diff(a: &Path, b: &Path) -> Result<()> {
    let (a, b) = (map(a)?, map(b)?);
    match loaf_bake::diff::diff(&a, &b)? {
        None => Ok(()),
        Some(text) => print(&text).and(Err(Different.into())),
    }
}

/// Checks or updates the lock file; every artifact is looked at before the first failure is
/// reported.
fn lock(root: &Path, names: &[String], update: bool) -> Result<()> {
    let path = root.join("artifacts/lock.toml");
    let at = || path.display().to_string();
    let mut locked = Lock::parse(&std::fs::read_to_string(&path).with_context(at)?).with_context(at)?;
    if let Some(name) = names.iter().find(|name| locked.artifacts.iter().all(|e| e.name != **name)) {
        bail!("{}: expected an artifact {name}, found none", at());
    }
    let (mut seen, mut failed) = (0, Vec::new());
    for entry in locked.artifacts.iter_mut().filter(|e| names.is_empty() || names.contains(&e.name)) {
        let bars = Bars(std::sync::Mutex::new(ProgressBar::hidden()));
        let arguments = entry.options.split_whitespace();
        let options = LockedOptions::try_parse_from(arguments).map(|o| o.options.options());
        let options =
            options.map_err(|e| LockError::Options(e.to_string().lines().next().unwrap_or_default().to_string()));
        let result = options.and_then(|options| match update {
            true => lock::bake(root, entry, &options, &bars).map(|new| *entry = new),
            false => lock::check(root, entry, &options, &bars),
        });
        seen += 1;
        match result {
            Ok(()) => print(&format!("{} {}\n", entry.id, entry.name))?,
            Err(e) => {
                complain(&format!("{}: {e}", entry.name));
                failed.push(entry.name.clone());
            }
        }
    }
    if !failed.is_empty() {
        bail!("{} of {seen} artifacts are not what {} says: {}", failed.len(), at(), failed.join(", "));
    }
    if update {
        // It is replaced by what it says after this run, so that it is an input does not matter.
        let output = Output::create::<&Path>(&path, &[])?;
        std::io::Write::write_all(&mut output.file(), locked.render().as_bytes()).with_context(at)?;
        output.finish()?;
    }
    Ok(())
}

fn executable(file: &Path, output: &Path, runtime: Option<PathBuf>) -> Result<()> {
    let runtime = runtime.map_or_else(program::runtime_beside, Ok).context("the folder of this program")?;
    if !runtime.is_file() {
        bail!("{}: no runtime there; build loaf-cli, or say where it is with --runtime", runtime.display());
    }
    let written = program::write(&runtime, file, output)?;
    let (bytes, offset) = (written.bytes, written.offset);
    print(&format!("{}: {bytes} bytes, the loaf at {offset}\nid {}\n", output.display(), written.id))
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Diff { a, b } => diff(&a, &b),
        Command::Lock { names, root, check: _, update } => lock(&root, &names, update),
        Command::Executable { file, output, runtime } => executable(&file, &output, runtime),
        Command::Build(args) => run_build(&args),
        Command::Inspect { file, tensors } => inspect(&file, tensors),
        Command::Report { file, output, bench } => write_report(&file, &output, bench.as_deref()),
        Command::Explain { file, position, phase, rows, proof } => {
            let map = map(&file)?;
            let (container, plan) = open(&map)?;
            let names = explain::Names::new(&container, &plan)?;
            let phase = Phase::from(phase);
            let rows = rows.unwrap_or(if phase == Phase::Prefill { plan.most_rows(phase) } else { 1 });
            match explain::graph(&names, phase, position, rows) {
                Some(text) if !proof => print(&text),
                Some(text) => print(&(text + &merkle_proof(&container, &plan, phase, position, rows)?)),
                None => bail!(
                    "no {phase} graph at position {position} with {rows} rows; the context is {} positions",
                    plan.context
                ),
            }
        }
        Command::Verify { file, expect, graphs, recipe, run } => {
            let map = map(&file)?;
            if let Some(expected) = expect {
                // Cheap, and says what is wrong with a whole file that is another one.
                let found = Container::open(&map).with_context(|| file.display().to_string())?.artifact_id();
                if found != expected {
                    bail!("{}: artifact id: expected {expected}, found {found}", file.display());
                }
            }
            let bars = Bars(std::sync::Mutex::new(ProgressBar::hidden()));
            let id = verify::file(&map, &bars).with_context(|| file.display().to_string())?;
            let deep = verify::Deep { graphs, recipe };
            if run {
                verify::golden(&map).with_context(|| file.display().to_string())?;
            }
            if graphs || recipe {
                verify::graphs(&map, deep, &bars).with_context(|| file.display().to_string())?;
            }
            print(&format!("{id} ok\n"))
        }
        Command::BenchGraphs { sources, options } => {
            let bars = Bars(std::sync::Mutex::new(ProgressBar::hidden()));
            print(&format!("{}\n", bench::HEAD))?;
            for source in &sources {
                let result =
                    bench::graphs(source, &options.options(), &bars).with_context(|| source.display().to_string())?;
                let name = source.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
                print(&format!("{}\n", result.line(&name)))?;
            }
            print(&format!("{}\n", bench::BEFORE))
        }
        Command::Dump { source, stop_after, position, phase, rows, options } => {
            let options = options.options();
            let checkpoint = match options.random {
                Some(_) => Checkpoint::open_config(&source)?,
                None => Checkpoint::open(&source)?,
            };
            let prepared = Prepared::new(&checkpoint, &options, &loaf_bake::build::Silent)?;
            let phase = Phase::from(phase);
            let most = if phase == Phase::Prefill { prepared.model.options.chunk } else { 1 };
            let rows = rows.unwrap_or(most);
            let positions = match phase {
                Phase::LmHead => prepared.model.options.chunk,
                _ => prepared.model.options.context,
            };
            if rows == 0 || rows > most {
                bail!("--rows: expected 1 to {most} in {phase}, found {rows}");
            }
            if position > positions - rows.min(positions) {
                bail!("--position: expected at most {}, found {position}", positions - rows.min(positions));
            }
            let mut graph = Graph::default();
            prepared.model.trace(Shape { phase, pos: position, rows }, &mut graph)?;
            Pipeline::default().run(&mut graph, &prepared.facts(), stop_after, true)?;
            print(&graph.to_string())
        }
    }
}

/// The proof that the graph is one of those the loaf's roots stand for.
fn merkle_proof(container: &Container<'_>, plan: &VerifiedPlan, phase: Phase, p: u32, n: u32) -> Result<String> {
    let stored = Graphs::decode(container.verify_section(SectionKind::Graphs)?, plan)?;
    let Some(proof) = graphs::inclusion(plan, phase, p.into(), n.into(), &loaf_bake::build::Silent) else {
        bail!(
            "the {phase} graph at position {p} with {n} rows is no leaf: leaves have as many rows as fit, at multiples of the step"
        );
    };
    let template = stored.templates.iter().find(|t| t.root == proof.root);
    let Some(template) = template.filter(|t| t.phase == phase) else {
        bail!("expected the {phase} root recorded in the loaf, found {}", hex(&proof.root));
    };
    let mut out = format!("\nleaf {} of {}  {}\n", proof.index, proof.count, hex(&proof.leaf));
    for node in &proof.path {
        out += &format!("path  {}\n", hex(node));
    }
    out += &format!(
        "{phase} root, {} rows  {}\nall graphs  {}\n",
        template.max_rows,
        hex(&template.root),
        hex(&stored.root())
    );
    Ok(out)
}

/// Writes one line to stderr, without what would steer a terminal: much of it may be from a file.
fn complain(message: &str) {
    eprintln!("bake: {}", text::line(message));
}

/// Writes to stdout, without what would steer a terminal; a reader that went away is no error.
fn print(text: &str) -> Result<()> {
    use std::io::Write;
    match write!(std::io::stdout(), "{}", text::lines(text)) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e).context("stdout"),
        _ => Ok(()),
    }
}

fn run_build(args: &BuildArgs) -> Result<()> {
    let bars = Bars(std::sync::Mutex::new(ProgressBar::hidden()));
    let options = args.options.options();
    let sources = remote::sources(&args.source)?;
    let report = match sources.as_slice() {
        [one] => build(one, &args.output, &options, &bars)?,
        parts => build_from(Checkpoint::open_gguf(parts)?, &args.output, &options, &bars)?,
    };
    let graphs: u64 = report.proofs.iter().map(|p| p.graphs).sum();
    if args.json {
        let json = serde_json::json!({
            "id": report.id.to_string(), "file_bytes": report.file_bytes, "weight_bytes": report.weight_bytes,
            "graphs_proved": graphs,
        });
        return print(&format!("{json}\n"));
    }
    let beside = report.file_bytes - report.weight_bytes;
    print(&format!(
        "{}: {} bytes ({beside} beside the weights), {graphs} graphs proved\nid {}\n",
        args.output.display(),
        report.file_bytes,
        report.id
    ))
}

/// The bytes of a loaf: a file of its own, or its part of a program that `bake executable` wrote.
fn map(path: &Path) -> Result<Mmap> {
    let name = || path.display().to_string();
    if !std::fs::metadata(path).with_context(name)?.is_file() {
        bail!("{}: expected a file, found something else", path.display());
    }
    let mut file = std::fs::File::open(path).with_context(name)?;
    let trailer = Trailer::read(&mut file).with_context(name)?;
    let mut options = MmapOptions::new();
    if let Some(Trailer { offset, len, .. }) = trailer {
        options.offset(offset).len(usize::try_from(len).with_context(name)?);
    }
    // SAFETY: mapped read-only; whoever truncates a file while it is being read breaks every
    // program that maps it.
    let map = unsafe { options.map(&file) }.with_context(name)?;
    if let Some(Trailer { id: expected, .. }) = trailer {
        let found = Container::open(&map).with_context(name)?.artifact_id();
        if found != expected {
            bail!("{}: program trailer: artifact id: expected {expected}, found {found}", path.display());
        }
    }
    Ok(map)
}

fn open(bytes: &[u8]) -> Result<(Container<'_>, VerifiedPlan)> {
    let container = Container::open(bytes)?;
    let plan = Plan::decode(container.verify_section(SectionKind::Plan)?)?;
    let plan = plan.verify(container.data().len() as u64)?;
    Ok((container, plan))
}

/// Longest measurement that is read, in bytes.
const MAX_BENCH_BYTES: u64 = 16 << 20;

fn write_report(file: &Path, output: &Path, bench: Option<&Path>) -> Result<()> {
    let at = || file.display().to_string();
    let map = map(file)?;
    let (container, plan) = open(&map).with_context(at)?;
    let measured = match bench {
        None => None,
        Some(path) => {
            let at = || path.display().to_string();
            let mut bytes = Vec::new();
            let input = std::fs::File::open(path).with_context(at)?;
            std::io::Read::read_to_end(&mut std::io::Read::take(input, MAX_BENCH_BYTES), &mut bytes)
                .with_context(at)?;
            Some(Bench::read(&bytes, container.artifact_id()).with_context(at)?)
        }
    };
    let name = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let page = report::page(&name, &container, &plan, measured.as_ref()).with_context(at)?;
    let inputs: Vec<&Path> = [Some(file), bench].into_iter().flatten().collect();
    let written = Output::create(output, &inputs)?;
    std::io::Write::write_all(&mut written.file(), page.as_bytes()).map_err(written.io("write to it"))?;
    written.finish()?;
    print(&format!("{}: {} bytes\nid {}\n", output.display(), page.len(), container.artifact_id()))
}

/// How many bits a weight takes, and what became of each type of a GGUF model; what a manifest does
/// not say is left out.
fn weight_types(manifest: &[u8]) -> String {
    use std::fmt::Write;
    let manifest: serde_json::Value = serde_json::from_slice(manifest).unwrap_or_default();
    let mut out = String::new();
    if let (Some(weights), Some(bytes)) = (manifest["parameters"].as_u64(), manifest["weight_bytes"].as_u64()) {
        let bits = bytes as f64 * 8.0 / weights.max(1) as f64;
        let _ = writeln!(out, "\nweights\n  {weights} in {bytes} bytes, {bits:.2} bits a weight");
    }
    for row in manifest["source"]["gguf"]["stored"].as_array().into_iter().flatten() {
        let (Some(name), Some(format)) = (row["type"].as_str(), row["format"].as_str()) else { continue };
        let (Some(bytes), Some(stored)) = (row["bytes"].as_u64(), row["stored_bytes"].as_u64()) else { continue };
        let there = GgmlType::from_name(name).map_or(0.0, GgmlType::bits_per_weight);
        let here = there * stored as f64 / bytes.max(1) as f64;
        let tensors = row["tensors"].as_u64().unwrap_or(0);
        let _ = writeln!(out, "  {tensors:>5} {name:<8} as {format:<10} {there:>6.2} -> {here:>5.2} bits a weight");
    }
    out
}

fn inspect(file: &Path, tensors: bool) -> Result<()> {
    use std::fmt::Write;
    let map = map(file)?;
    let (container, plan) = open(&map)?;
    let mut out =
        format!("{}\nid      {}\nbytes   {}\n\nsections\n", file.display(), container.artifact_id(), map.len());
    for s in container.sections() {
        let kind = SectionKind::from_code(s.kind).map_or_else(|| s.kind.to_string(), |k| k.to_string());
        writeln!(out, "  {kind:<18} {:>14} bytes at {:>14}", s.len, s.offset)?;
    }
    writeln!(
        out,
        "\nmemory\n  caches    {:>16} bytes a sequence\n  recurrent {:>16} bytes a sequence\n  arena     {:>16} bytes\n  io        {:>16} bytes",
        plan.cache_bytes, plan.recurrent_bytes, plan.arena_bytes, plan.io.bytes
    )?;
    writeln!(out, "\ntemplates (context {}, vocab {}, hidden {})", plan.context, plan.vocab, plan.hidden)?;
    for t in &plan.templates {
        let ops = loaf_formats::plan::records(&t.words).count();
        writeln!(
            out,
            "  {:<8} {:>7} positions, up to {:>4} rows: {ops} ops, {} words",
            t.phase.to_string(),
            t.positions,
            t.max_rows,
            t.words.len()
        )?;
    }
    if let Some(manifest) = container.section(SectionKind::Manifest) {
        out += &weight_types(manifest);
        // Lines of JSON begin as JSON does; of anything else only one is shown.
        match serde_json::from_slice::<serde_json::Value>(manifest) {
            Ok(manifest) => writeln!(out, "\nmanifest\n{manifest:#}")?,
            Err(e) => writeln!(out, "\nmanifest\nexpected JSON, found {}", text::line(e))?,
        }
    }
    if tensors {
        writeln!(out, "\ntensors")?;
        let planes = stored_planes(&container)?;
        for t in container.tensors()?.iter().filter(|t| t.is_weight()) {
            writeln!(out, "  {:>14}  {:<4} {:?}  {}", t.offset, t.dtype.to_string(), t.shape, t.name)?;
            // Of experts, what lies in the first one's record.
            let within = |p: &&StoredPlane| (t.offset..t.offset + t.len).contains(&p.offset) && p.name != t.name;
            for p in planes.iter().filter(within) {
                writeln!(
                    out,
                    "    {:>+14}  {:<4} {:?}  {}",
                    p.offset - t.offset,
                    p.dtype.to_string(),
                    p.shape,
                    p.name
                )?;
            }
        }
    }
    print(&out)
}
