//! `loaf check`: one engine against another, op by op.
//!
//! Both evaluate the same prompt, chunk by chunk and its last token as a decode step, each with its
//! own state. Every float result is compared as it is made; the first op whose elements differ by
//! more than the tolerance is where to look. The exit code is 1 if there is one.

use std::fmt::Write as _;

use loaf_formats::op::OpKind;
use loaf_formats::plan::{Phase, Record, records};
use serde_json::json;

use crate::args::{BackendArg, CheckArgs};
use crate::progress::Progress;
use crate::{Failure, Io, model};
use loaf_runtime::Model;
use loaf_runtime::backend::Trace;
use loaf_runtime::compare::{Activations, CpuTrace, Difference, Names};
use loaf_runtime::conversation::text_ids;
use loaf_runtime::kernels::{Isa, Kernels};

/// What an engine is held to.
enum Reference {
    Engine(Box<dyn Trace>),
    File(Activations),
}

/// A compared result.
struct Row {
    at: String,
    name: String,
    difference: Difference,
}

pub(crate) fn check(args: &CheckArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    if let Some(tolerance) = args.tolerance.filter(|t| !(t.is_finite() && *t >= 0.0)) {
        return Err(Failure::Usage(format!("--tolerance: expected a number from 0 on, found {tolerance}")));
    }
    let loaf = model::open_model(&args.model, io)?;
    let (on_cpu, mut subject): (bool, Box<dyn Trace>) = match args.backend {
        BackendArg::Cpu => (true, cpu(&loaf, model::kernels(io)?)?),
        BackendArg::Mlx => (false, model::tracer(&loaf, true)?),
        BackendArg::MlxCpu => (false, model::tracer(&loaf, false)?),
        BackendArg::Cuda => (false, model::gpu(&loaf, io)?.into_trace()),
        BackendArg::Auto => match model::gpu(&loaf, io) {
            Ok(gpu) => (false, gpu.into_trace()),
            Err(_) => (true, cpu(&loaf, model::kernels(io)?)?),
        },
    };
    let default = if on_cpu { "scalar" } else { "cpu" };
    let against = args.against.as_deref().unwrap_or(default);
    let isa = Isa::ALL.into_iter().find(|known| known.name() == against);
    let against_cpu = against == "cpu" || isa.is_some();
    let mut reference = match against {
        "cpu" => Reference::Engine(cpu(&loaf, Kernels::detect())?),
        "mlx" => Reference::Engine(model::tracer(&loaf, true)?),
        "cuda" => Reference::Engine(model::gpu(&loaf, io)?.into_trace()),
        "mlx-cpu" => Reference::Engine(model::tracer(&loaf, false)?),
        isa if against_cpu => {
            let kernels = Kernels::named(isa).map_err(|e| Failure::Usage(format!("--against {isa}: {e}")))?;
            Reference::Engine(cpu(&loaf, kernels)?)
        }
        path => {
            let bytes = std::fs::read(path).map_err(|e| {
                Failure::Runtime(format!("--against {path}: expected an engine or a file of activations: {e}"))
            })?;
            Reference::File(Activations::read(&bytes).map_err(|e| Failure::Runtime(format!("{path}: {e}")))?)
        }
    };
    let ids = prompt(args, &loaf, &reference, io)?;
    model::check_fits(ids.len(), &loaf)?;
    let vocab = loaf.plan().vocab;
    if let Some(id) = ids.iter().find(|id| **id >= vocab) {
        return Err(Failure::Runtime(format!("token id: expected below {vocab}, found {id}")));
    }
    let exact = matches!(args.backend, BackendArg::Cpu | BackendArg::Cuda | BackendArg::Auto);
    let tolerance = args.tolerance.unwrap_or(if exact && (against_cpu || against == "cuda") {
        0.0
    } else if quantises(&loaf) {
        0.1
    } else {
        1e-3
    });

    let names = Names::new(&loaf);
    let mut rows = Vec::new();
    let chunk = loaf.plan().most_rows(Phase::Prefill) as usize;
    // The last token alone, so that decode is compared too.
    let (most, last) = ids.split_at(if ids.len() > 1 { ids.len() - 1 } else { 0 });
    let (mut pos, mut progress) = (0, Progress::new(io));
    for part in most.chunks(chunk).chain([last]) {
        compare(subject.as_mut(), &mut reference, (pos, part), &names, tolerance, &mut rows)?;
        pos += part.len();
        progress.at(pos as u64, ids.len() as u64, format_args!("{pos} of {} tokens compared", ids.len()), io);
    }
    progress.clear(io);
    if rows.is_empty() {
        return Err(Failure::runtime(format!(
            "--against {against}: expected results of this loaf's modules, found none"
        )));
    }
    report(args, against, tolerance, &rows, io)
}

fn cpu(loaf: &Model, kernels: Kernels) -> Result<Box<dyn Trace>, Failure> {
    Ok(Box::new(CpuTrace::new(loaf, kernels).map_err(Failure::runtime)?))
}

/// Whether the CPU rounds activations to eight bits, which other engines do not.
fn quantises(loaf: &Model) -> bool {
    loaf.plan().templates.iter().flat_map(|t| records(&t.words)).flatten().any(|r| r.kind == OpKind::Quantize)
}

fn prompt(args: &CheckArgs, loaf: &Model, reference: &Reference, io: &mut Io<'_>) -> Result<Vec<u32>, Failure> {
    if let Reference::File(activations) = reference {
        return Ok(activations.ids.clone());
    }
    if let Some(ids) = args.ids.clone().filter(|ids| !ids.is_empty()) {
        return Ok(ids);
    }
    let tokenizer = model::tokenizer(loaf)?
        .ok_or_else(|| Failure::usage("this loaf has no tokenizer: pass token ids, with --ids 1,2,3"))?;
    let text = match args.prompt.as_deref() {
        Some(text) => text.to_owned(),
        None if io.stdin_is_terminal => {
            return Err(Failure::usage("no prompt: pass one as an argument, or pipe it in"));
        }
        None => io.read_stdin()?,
    };
    let ids = text_ids(&tokenizer, &text, args.special);
    if ids.is_empty() {
        return Err(Failure::usage("the prompt: expected at least one token, found none"));
    }
    Ok(ids)
}

/// Plays some tokens on both sides.
fn compare(
    subject: &mut dyn Trace,
    reference: &mut Reference,
    (pos, ids): (usize, &[u32]),
    names: &Names,
    tolerance: f32,
    rows: &mut Vec<Row>,
) -> Result<(), Failure> {
    let failure = Failure::runtime;
    let place = |i: usize| format!("{} {pos}, result {i}", if ids.len() == 1 { "decode" } else { "prefill" });
    let at = pos as u32;
    match reference {
        Reference::Engine(engine) => {
            let mut wanted: Vec<Vec<f32>> = Vec::new();
            engine.play(at, ids, &mut |_, _, values| wanted.push(values.to_vec())).map_err(failure)?;
            let mut i = 0;
            let mut seen = |r: &Record<'_>, _: usize, values: &[f32]| {
                if let Some(want) = wanted.get(i) {
                    // A device computes a whole chunk's rows; those that count come first.
                    let n = values.len().min(want.len());
                    let (values, want) = (&values[..n], &want[..n]);
                    rows.push(Row {
                        at: place(i),
                        name: names.of(r),
                        difference: Difference::of(values, want, tolerance),
                    });
                }
                i += 1;
            };
            subject.play(at, ids, &mut seen).map_err(failure)?;
            if i != wanted.len() {
                return Err(Failure::Runtime(format!("expected {} results, found {i}", wanted.len())));
            }
        }
        Reference::File(file) => {
            let mut i = 0;
            let mut seen = |r: &Record<'_>, operand: usize, values: &[f32]| {
                i += 1;
                let whole = matches!(r.kind, OpKind::Embed | OpKind::RmsNorm | OpKind::AddRmsNorm);
                let linear = matches!(r.kind, OpKind::LinearDense | OpKind::LinearQuant);
                let result = r.kind.spec().operands[operand].name == "out";
                let Some(dims) = r.dims(operand).filter(|_| result && (whole || linear)) else { return };
                let width = (dims[1] * dims[2]) as usize;
                for (module, first, count) in names.modules(r) {
                    // A product with the embedding is the head that is tied to it.
                    let module = if linear && module.ends_with("embed_tokens") { "lm_head" } else { module };
                    let Some(want) = file.rows(module, pos, ids.len()) else { continue };
                    let columns = if whole { 0..width } else { first..(first + count).min(width) };
                    let got: Vec<f32> =
                        values.chunks(width).take(ids.len()).flat_map(|row| row[columns.clone()].to_vec()).collect();
                    let difference = Difference::of(&got, want, tolerance);
                    rows.push(Row { at: place(i - 1), name: module.to_owned(), difference });
                }
            };
            subject.play(at, ids, &mut seen).map_err(failure)?;
        }
    }
    Ok(())
}

fn report(args: &CheckArgs, against: &str, tolerance: f32, rows: &[Row], io: &mut Io<'_>) -> Result<u8, Failure> {
    let diverging: Vec<&Row> = rows.iter().filter(|r| r.difference.violations > 0).collect();
    let code = u8::from(!diverging.is_empty());
    let object = |r: &Row| {
        let d = &r.difference;
        json!({ "at": r.at, "op": r.name, "scale": d.scale, "max_abs": d.max_abs, "max_rel": d.max_rel, "rms": d.rms,
                "violations": d.violations, "elements": d.len })
    };
    if args.json {
        let all = json!({ "against": against, "tolerance": tolerance, "results": rows.iter().map(object).collect::<Vec<_>>(),
                          "first": diverging.first().map(|r| object(r)) });
        io.show_json(&all)?;
        return Ok(code);
    }
    let of_scale = |r: &Row| r.difference.max_abs / r.difference.scale.max(f32::MIN_POSITIVE);
    let mut worst: Vec<&Row> = rows.iter().collect();
    if !args.all {
        worst.sort_by(|a, b| of_scale(b).total_cmp(&of_scale(a)));
        worst.truncate(10);
    }
    let mut text =
        format!("{:>9} {:>9} {:>9} {:>9} {:>9}  result\n", "max abs", "of scale", "max rel", "rms", "beyond");
    for r in worst.into_iter().chain(diverging.first().copied()) {
        let d = &r.difference;
        let _ = writeln!(
            text,
            "{:9.2e} {:9.2e} {:9.2e} {:9.2e} {:9}  {}: {}",
            d.max_abs,
            of_scale(r),
            d.max_rel,
            d.rms,
            d.violations,
            r.at,
            r.name
        );
    }
    let elements: usize = rows.iter().map(|r| r.difference.len).sum();
    let beyond: usize = rows.iter().map(|r| r.difference.violations).sum();
    let _ = writeln!(
        text,
        "{} results, {elements} elements, {beyond} beyond {tolerance:e} of their result's scale, against {against}",
        rows.len()
    );
    let _ = match diverging.first() {
        Some(r) => writeln!(text, "first to diverge (last line of the table): {}: {}", r.at, r.name),
        None => writeln!(text, "nothing diverges"),
    };
    io.show(text)?;
    Ok(code)
}
