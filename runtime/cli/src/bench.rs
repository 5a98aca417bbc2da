//! `loaf bench`: how fast this machine replays a loaf, and how close that is to what its memory
//! gives.
//!
//! Prefill takes random ids from the position `--context` on, decode one random id after another
//! from the same position; each is repeated, and the spread is printed. The context before it is
//! not evaluated: its cache rows are filled with one pattern, which takes as long to read. Bytes
//! are those of the plan's cost model. Sampling and text take no part. The read bandwidth is
//! measured before every repetition of decode, which is judged by that one; their median is
//! printed.
//!
//! With `--ops` one more, untimed repetition is replayed with a clock around every op. Reading the
//! clock costs some tens of nanoseconds a call, so rows of tiny ops are a little too long.

use std::fmt::{self, Write as _};
use std::time::Instant;

use loaf_formats::cost::{Traffic, graph};
use loaf_formats::op::OpKind;
use loaf_formats::plan::Phase;
use serde_json::{Value, json};

use crate::args::BenchArgs;
use crate::progress::Progress;
use crate::{Failure, Io, model};
use loaf_runtime::Session;
use loaf_runtime::bandwidth::BandwidthProbe;
use loaf_runtime::op_times::{OpRow, OpTimes};
use loaf_runtime::sample::SamplerOptions;

/// Tokens measured where the arguments say nothing and the context has room.
const PREFILL: u32 = 512;
const DECODE: u32 = 64;

pub(crate) fn bench(args: &BenchArgs, io: &mut Io<'_>) -> Result<u8, Failure> {
    let loaf = model::open_model(&args.model, io)?;
    let plan = loaf.plan();
    if args.context >= plan.context {
        let (context, found) = (plan.context, args.context);
        let message = format!("--context: expected below {context} (the context of this loaf), found {found}");
        return Err(Failure::Usage(message));
    }
    let room = plan.context - args.context;
    let tokens = |name: &str, asked: Option<u32>, default: u32| match asked {
        Some(n) if n > room => Err(Failure::Usage(format!(
            "--{name}: expected at most {room} tokens (context {} less {}), found {n}",
            plan.context, args.context
        ))),
        n => Ok(n.unwrap_or(default.min(room))),
    };
    let (prefill, decode) = (tokens("prefill", args.prefill, PREFILL)?, tokens("decode", args.decode, DECODE)?);
    let mut session = model::session(&loaf, &args.compute, io)?;
    let (threads, engine) = (session.engine.limits().threads, session.engine.name());
    let bandwidth = BandwidthProbe::new(threads)
        .map_err(|e| Failure::Runtime(format!("memory to measure the read bandwidth: {e}")))?;
    let mut runner = Runner { session: &mut session, vocab: plan.vocab, context: args.context, drawn: 1 };
    let (mut progress, mut done) = (Progress::new(io), 0);
    let all = u64::from(args.repeat) * (u64::from(prefill > 0) + u64::from(decode > 0));
    let mut tick = || {
        progress.at(done, all, format_args!("{done} of {all} repetitions"), io);
        done += 1;
    };
    let prefills = runner.measure(Phase::Prefill, prefill, args.repeat, &mut tick)?;
    let mut bandwidths = vec![];
    let decodes = runner.measure(Phase::Decode, decode, args.repeat, &mut || {
        tick();
        bandwidths.push(bandwidth.measure());
    })?;
    progress.clear(io);
    if bandwidths.is_empty() {
        bandwidths.push(bandwidth.measure());
    }
    let paired: Vec<f64> = decodes.iter().flat_map(|d| &d.all).zip(&bandwidths).map(|(speed, c)| speed / c).collect();
    let bandwidth = Spread::of(bandwidths).median;
    let mut ops = Vec::new();
    for (phase, n) in [(Phase::Prefill, prefill), (Phase::Decode, decode)] {
        if args.ops && n > 0 {
            ops.push((phase, runner.ops(phase, n)?));
        }
    }

    let mut per_token = Traffic::default();
    for template in plan.templates_of(Phase::Decode) {
        (args.context..args.context + decode).for_each(|p| per_token += graph(template, p.into(), 1));
    }
    let per_token = per_token / u64::from(decode.max(1));
    let speed = decodes.as_ref().map(|s| s.median * per_token.bytes() as f64);
    let percent = Spread::of(paired.iter().map(|r| 100.0 * r * per_token.bytes() as f64).collect());
    if args.json {
        let Traffic { weights, state, activations, macs: _ } = per_token;
        let mut object = json!({
            "id": loaf.id().to_string(),
            "engine": engine,
            "threads": threads,
            "context": args.context,
            "prefill": prefill,
            "decode": decode,
            "repeat": args.repeat,
            "prefill_tok_s": prefills.as_ref().map(Spread::json),
            "decode_tok_s": decodes.as_ref().map(Spread::json),
            "decode_bytes_per_token": { "weights": weights, "state": state, "activations": activations },
            "decode_gb_s": speed.map(|s| s / 1e9),
            "decode_percent_of_bandwidth": decodes.as_ref().map(|_| percent.json()),
            "read_bandwidth_gb_s": bandwidth / 1e9,
        });
        for (phase, times) in &ops {
            object["ops"][phase.to_string()] = rows(times, bandwidth).iter().map(Row::json).collect();
        }
        io.show_json(&object)?;
        return Ok(0);
    }
    let mut text = format!(
        "{engine}, context {}, {} repetitions: median (least to most)\nread bandwidth {:>9.1} GB/s\n",
        args.context,
        args.repeat,
        bandwidth / 1e9
    );
    if let Some(s) = &prefills {
        let _ = writeln!(text, "prefill {prefill:<5}{s}");
    }
    if let (Some(s), Some(speed)) = (&decodes, speed) {
        let (mb, gb_s, Spread { median, min, max, .. }) = (per_token.bytes() as f64 / 1e6, speed / 1e9, percent);
        let _ = writeln!(
            text,
            "decode {decode:<6}{s}, {mb:.1} MB a token, {gb_s:.1} GB/s, {median:.0} % of read bandwidth ({min:.0} to {max:.0})"
        );
    }
    if let Some(notes) = session.engine.notes() {
        let _ = writeln!(text, "{notes}");
    }
    for (phase, times) in &ops {
        let _ = writeln!(text, "\n{}", Row::head(*phase));
        rows(times, bandwidth).iter().for_each(|row| text.push_str(&row.line()));
    }
    io.show(text)?;
    Ok(0)
}

/// Figures of repetitions.
struct Spread {
    median: f64,
    min: f64,
    max: f64,
    /// In the order in which they were taken.
    all: Vec<f64>,
}

impl Spread {
    /// Of figures that are numbers; zeros of none.
    fn of(all: Vec<f64>) -> Spread {
        let mut sorted = all.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |i: usize| sorted.get(i).copied().unwrap_or(0.0);
        let n = sorted.len();
        Spread {
            median: (at(n.saturating_sub(1) / 2) + at(n / 2)) / 2.0,
            min: at(0),
            max: at(n.saturating_sub(1)),
            all,
        }
    }

    fn json(&self) -> Value {
        json!({ "median": self.median, "min": self.min, "max": self.max })
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>9.1} tok/s ({:.1} to {:.1})", self.median, self.min, self.max)
    }
}

struct Runner<'s> {
    session: &'s mut Session,
    vocab: u32,
    context: u32,
    drawn: u64,
}

impl Runner<'_> {
    /// A random id; the same ones in every run of the program.
    fn id(&mut self) -> u32 {
        self.drawn = self.drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (((self.drawn >> 32) * u64::from(self.vocab)) >> 32) as u32
    }

    /// Seconds that `n` tokens take after the context: as one prompt, logits of its last token
    /// included, or one by one.
    fn run(&mut self, phase: Phase, n: u32) -> Result<f64, Failure> {
        let Session { engine, sequence } = &mut *self.session;
        engine.pretend(sequence, self.context).map_err(Failure::runtime)?;
        let ids: Vec<u32> = (0..n).map(|_| self.id()).collect();
        if phase == Phase::Decode && self.session.engine.chooser(&SamplerOptions::default(), false).is_some() {
            return self.sample(ids[0], n);
        }
        let start = Instant::now();
        if phase == Phase::Prefill {
            self.session.eval(&ids).map_err(Failure::runtime)?;
        } else {
            ids.iter().try_for_each(|&id| self.session.decode(id).map(drop)).map_err(Failure::runtime)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds that `n` tokens take that the device chooses itself, as it does when text is
    /// generated; `id` comes before them. The clock starts when the first is there, and the second
    /// on its way.
    fn sample(&mut self, id: u32, n: u32) -> Result<f64, Failure> {
        self.session.decode(id).map_err(Failure::runtime)?;
        let (pos, context) = (self.session.position(), self.session.engine.context());
        let options = SamplerOptions::default();
        let Some(chooser) = self.session.engine.chooser(&options, false) else { return Ok(0.0) };
        chooser.start(&options, self.vocab, &[]).map_err(Failure::runtime)?;
        let first = chooser.next(pos, true);
        let start = Instant::now();
        let mut after = (pos + 1)..=(pos + n);
        let chosen = first.and_then(|_| after.try_for_each(|p| chooser.next(p, p < context).map(drop)));
        chooser.end();
        chosen.map_err(Failure::runtime)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Tokens per second over `repeat` repetitions, after one that warms up, `before` before each;
    /// nothing for no tokens.
    fn measure(
        &mut self,
        phase: Phase,
        n: u32,
        repeat: u32,
        before: &mut dyn FnMut(),
    ) -> Result<Option<Spread>, Failure> {
        if n == 0 {
            return Ok(None);
        }
        self.run(phase, n)?;
        let speed = |_| {
            before();
            Ok(f64::from(n) / self.run(phase, n)?)
        };
        Ok(Some(Spread::of((0..repeat.max(1)).map(speed).collect::<Result<Vec<f64>, Failure>>()?)))
    }

    /// What every kind of op took in one repetition.
    fn ops(&mut self, phase: Phase, n: u32) -> Result<OpTimes, Failure> {
        self.session.engine.watch_ops(Some(OpTimes::default()));
        let ran = self.run(phase, n);
        let times = self.session.engine.watch_ops(None);
        ran.map(|_| times.unwrap_or_default())
    }
}

/// A row of the table of ops.
struct Row {
    name: &'static str,
    calls: u64,
    ms: f64,
    bytes: u64,
    gb_s: f64,
    percent: f64,
    gmac_s: f64,
}

fn rows(times: &OpTimes, bandwidth: f64) -> Vec<Row> {
    let row = |(kind, row): (OpKind, OpRow)| {
        // An op may be too short for the clock.
        let seconds = row.time.as_secs_f64().max(1e-9);
        let bytes = row.traffic.bytes();
        let speed = bytes as f64 / seconds;
        Row {
            name: kind.spec().name,
            calls: row.calls,
            ms: seconds * 1e3,
            bytes,
            gb_s: speed / 1e9,
            percent: 100.0 * speed / bandwidth,
            gmac_s: row.traffic.macs as f64 / seconds / 1e9,
        }
    };
    times.rows().into_iter().map(row).collect()
}

impl Row {
    fn head(phase: Phase) -> String {
        format!(
            "{:<20}{:>8}{:>11}{:>10}{:>8}{:>6}{:>9}",
            phase.to_string(),
            "calls",
            "ms",
            "MB",
            "GB/s",
            "%",
            "G MAC/s"
        )
    }

    fn line(&self) -> String {
        let Row { name, calls, ms, bytes, gb_s, percent, gmac_s } = self;
        let mb = *bytes as f64 / 1e6;
        format!("{name:<20}{calls:>8}{ms:>11.2}{mb:>10.1}{gb_s:>8.1}{percent:>6.0}{gmac_s:>9.1}\n")
    }

    fn json(&self) -> Value {
        let Row { name, calls, ms, bytes, gb_s, percent, gmac_s } = self;
        json!({
            "op": name, "calls": calls, "ms": ms, "bytes": bytes, "gb_s": gb_s, "percent_of_bandwidth": percent,
            "gmac_s": gmac_s,
        })
    }
}
