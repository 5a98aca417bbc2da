//! What holds of the MLX backend alone: the delta rule, what is compiled when, choosing on the
//! device, refusals.
#![cfg(feature = "mlx")]

#[path = "mlx/kernels.rs"]
mod kernels;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use loaf_bake::build::BuildOptions;
use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::plan::{Phase, Template};
use loaf_runtime::backend::mlx::array::{Array, Type};
use loaf_runtime::backend::mlx::compile::Compiled;
use loaf_runtime::backend::mlx::delta::{self, Scan};
use loaf_runtime::backend::mlx::kernels::{Attend, Kernels as DeviceKernels};
use loaf_runtime::backend::mlx::ops::Mlx;
use loaf_runtime::backend::mlx::{Device, MlxDevice, MlxOptions, device};
use loaf_runtime::backend::{Device as _, DeviceError, SlotRun};
use loaf_runtime::generate::{self, GenerateOptions, Generation};
use loaf_runtime::kernels::Kernels;
use loaf_runtime::sample::SamplerOptions;
use loaf_runtime::schedule::{Schedule, Work};
use loaf_runtime::{Engine, Model, Sequence, Session};
use loaf_tests::engines::{has_gpu, mlx, mlx_as};
use loaf_tests::{Expected, assert_bits, bake, bake_dir, fixture, max_diff, session};

/// The only slot's next rows.
fn rows(pos: u32, rows: u32) -> [SlotRun; 1] {
    [SlotRun { slot: 0, rows, pos, from: 0, to: 0, each: false }]
}

/// A sequence on MLX.
fn on_mlx(model: &Model) -> Session {
    Session::new(Engine::on(model, Box::new(mlx(model)))).expect("a slot")
}

fn open() -> (Mlx, Device) {
    device::open(true).or_else(|_| device::open(false)).unwrap_or_else(|e| panic!("{e}"))
}

/// Numbers in [-1, 1) that depend on the seed alone.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Operands of the rule, on the host.
struct Case {
    rows: usize,
    heads: [usize; 2],
    dims: [usize; 2],
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
    state: Vec<f32>,
}

impl Case {
    /// Keys have unit length, as after their norm; with `repeat`, every row has the same, and is
    /// learnt all but entirely.
    fn new(rows: usize, heads: [usize; 2], dims: [usize; 2], repeat: bool) -> Case {
        let [hk, hv] = heads;
        let [dk, dv] = dims;
        let mut k = numbers(2, rows * hk * dk);
        if repeat {
            for r in 1..rows {
                k.copy_within(0..hk * dk, r * hk * dk);
            }
        }
        for key in k.chunks_mut(dk) {
            let norm = key.iter().map(|x| x * x).sum::<f32>().sqrt();
            key.iter_mut().for_each(|x| *x /= norm);
        }
        let unit = |seed, n| numbers(seed, n).into_iter().map(|x| x * 0.5 + 0.5);
        Case {
            rows,
            heads,
            dims,
            q: numbers(1, rows * hk * dk),
            k,
            v: numbers(3, rows * hv * dv),
            g: unit(4, rows * hv).map(|x| if repeat { -1e-3 * x } else { -3.0 * x }).collect(),
            beta: unit(5, rows * hv).map(|x| if repeat { 0.999 } else { x }).collect(),
            state: numbers(6, hv * dk * dv),
        }
    }

    fn scan(&self) -> Scan {
        let [hk, hv, dk, dv] = [self.heads[0], self.heads[1], self.dims[0], self.dims[1]].map(|n| n as i32);
        let n = self.rows as i32;
        Scan {
            q: Array::from_slice(&self.q, &[n, hk, dk]),
            k: Array::from_slice(&self.k, &[n, hk, dk]),
            v: Array::from_slice(&self.v, &[n, hv, dv]),
            log_decay: Array::from_slice(&self.g, &[n, hv]),
            beta: Array::from_slice(&self.beta, &[n, hv]),
            state: Array::from_slice(&self.state, &[hv, dk, dv]),
        }
    }

    /// The recurrence as it is written, in f64: outputs of the first `valid` rows, and the state
    /// after them.
    fn naive(&self, valid: usize) -> (Vec<f32>, Vec<f32>) {
        let ([hk, hv], [dk, dv]) = (self.heads, self.dims);
        let mut s: Vec<f64> = self.state.iter().map(|&x| x.into()).collect();
        let mut out = Vec::new();
        for t in 0..valid {
            for h in 0..hv {
                let key = (t * hk + h / (hv / hk)) * dk;
                let s = &mut s[h * dk * dv..(h + 1) * dk * dv];
                let decay = f64::from(self.g[t * hv + h]).exp();
                s.iter_mut().for_each(|x| *x *= decay);
                for j in 0..dv {
                    let recalled: f64 = (0..dk).map(|i| s[i * dv + j] * f64::from(self.k[key + i])).sum();
                    let delta =
                        f64::from(self.beta[t * hv + h]) * (f64::from(self.v[(t * hv + h) * dv + j]) - recalled);
                    (0..dk).for_each(|i| s[i * dv + j] += f64::from(self.k[key + i]) * delta);
                    out.push((0..dk).map(|i| s[i * dv + j] * f64::from(self.q[key + i])).sum::<f64>() as f32);
                }
            }
        }
        (out, s.into_iter().map(|x| x as f32).collect())
    }
}

fn host(m: &Mlx, a: &Array) -> Vec<f32> {
    let a = m.contiguous(a).expect("a copy");
    m.eval([&a]).expect("computed");
    let mut out = vec![0.0; a.size()];
    a.copy_to(&mut out).expect("f32");
    out
}

fn close(what: &str, got: &[f32], want: &[f32]) {
    let scale = want.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    let diff = max_diff(got, want) / scale;
    assert!(diff <= 2e-5, "{what}: {diff} of {scale}");
}

#[test]
fn every_step_that_has_a_kernel_uses_it() {
    for name in ["hf/llama3", "hf/qwen3", "hf/qwen3_5", "hf/qwen3_moe", "hf/qwen3_next", "hf/qwen3_5_moe"] {
        let baked = bake(name, &BuildOptions { kv: Some(DType::F32), ..BuildOptions::default() });
        let plan = baked.loaf.plan();
        let device = mlx_as(&baked.loaf, Type::F32, !has_gpu());
        // Opening lowers decode and the largest prefill that fits the first caches.
        let lowered = |t: &&Template| match t.phase {
            Phase::Decode => true,
            Phase::Prefill => {
                t.max_rows <= 256
                    && plan.templates_of(Phase::Prefill).all(|o| o.max_rows > 256 || o.max_rows <= t.max_rows)
            }
            Phase::LmHead => false,
        };
        let mut wanted =
            BTreeMap::from([("heads", 0), ("delta_prepare", 0), ("norm_gate", 0), ("top_k", 0), ("mix", 0)]);
        for template in plan.templates.iter().filter(lowered) {
            let schedule = Schedule::new(plan, template).unwrap_or_else(|e| panic!("{name}: {e}"));
            for step in &schedule.steps {
                let kernels: &[&str] = match step.work {
                    Work::Attend(_) => &["heads"],
                    Work::Delta(_) => &["delta_prepare", "norm_gate"],
                    Work::Route(_) => &["top_k"],
                    Work::ExpertsOut(_) => &["mix"],
                    _ => &[],
                };
                kernels.iter().for_each(|k| *wanted.get_mut(k).expect("one of them") += 1);
            }
        }
        let used = device.kernels_used();
        let used: BTreeMap<&str, usize> = wanted.keys().map(|k| (*k, used.get(k).copied().unwrap_or(0))).collect();
        assert_eq!(used, wanted, "{name}");
    }
}

#[test]
fn the_chunked_rule_is_the_recurrence() {
    let (m, _) = open();
    for repeat in [false, true] {
        for (rows, valid) in [(2, 1), (2, 2), (63, 63), (64, 64), (65, 65), (128, 127), (128, 128), (192, 129)] {
            let case = Case::new(rows, [2, 4], [12, 16], repeat);
            let (want, state) = case.naive(valid);
            let count = Array::from_slice(&[valid as i32], &[1]);
            let (got, after) = delta::chunked(&m, &case.scan(), &count).expect("a graph");
            let what = format!("{valid} of {rows} rows, repeated keys: {repeat}");
            close(&what, &host(&m, &got)[..want.len()], &want);
            close(&format!("{what}, state"), &host(&m, &after), &state);
        }
    }
}

#[test]
fn a_step_is_the_recurrence_as_operations_and_as_a_kernel() {
    let (m, device) = open();
    let kernels = DeviceKernels::new(device).expect("kernels");
    for (heads, dims) in [([2, 4], [12, 16]), ([2, 4], [64, 64]), ([16, 32], [128, 128])] {
        let case = Case::new(1, heads, dims, false);
        let (want, state) = case.naive(1);
        let (got, after) = delta::step(&m, &case.scan()).expect("a graph");
        close("operations", &host(&m, &got), &want);
        close("operations, state", &host(&m, &after), &state);
        let fused = kernels.delta_step(&m, &case.scan()).expect("a launch");
        assert_eq!(fused.is_some(), device != Device::Cpu && dims[0] >= 64, "{device:?}, {dims:?}");
        if let Some((got, after)) = fused {
            close("kernel", &host(&m, &got), &want);
            close("kernel, state", &host(&m, &after), &state);
        }
    }
}

#[test]
fn attention_of_one_row_is_the_definition_as_a_kernel() {
    let (m, device) = open();
    let kernels = DeviceKernels::new(device).expect("kernels");
    let (heads, kv_heads, capacity) = (4, 2, 300);
    for (dim, last, window) in [(32, 0, 0), (64, 5, 0), (128, 255, 0), (128, 299, 37), (256, 40, 64)] {
        let (q, k) = (numbers(1, heads * dim), numbers(2, kv_heads * capacity * dim));
        let (v, scale) = (numbers(3, kv_heads * capacity * dim), 0.3);
        let mut want = vec![0.0f32; heads * dim];
        for h in 0..heads {
            let row = |a: &[f32], p: usize, i: usize| f64::from(a[((h / (heads / kv_heads)) * capacity + p) * dim + i]);
            let first = if window == 0 { 0 } else { (last + 1usize).saturating_sub(window) };
            let score = |p| (0..dim).map(|i| f64::from(q[h * dim + i]) * row(&k, p, i)).sum::<f64>() * scale;
            let weights: Vec<f64> = (first..=last).map(|p| score(p).exp()).collect();
            let total: f64 = weights.iter().sum();
            for i in 0..dim {
                let sum: f64 = weights.iter().zip(first..).map(|(w, p)| w * row(&v, p, i)).sum();
                want[h * dim + i] = (sum / total) as f32;
            }
        }
        let cache = |a: &[f32]| Array::from_slice(a, &[kv_heads as i32, capacity as i32, dim as i32]);
        let (q, k, v) = (Array::from_slice(&q, &[heads as i32, dim as i32]), cache(&k), cache(&v));
        let last = Array::from_slice(&[last as i32], &[1]);
        let attend = Attend { q: &q, caches: [&k, &v], last: &last, scale: scale as f32, window: window as i32 };
        let got = kernels.attend(&m, &attend, Type::F32).expect("a launch");
        assert_eq!(got.is_some(), device != Device::Cpu);
        if let Some(got) = got {
            close(&format!("{dim} wide, window {window}"), &host(&m, &got), &want);
        }
    }
}

/// Sequences that take steps together say what each says alone.
#[test]
fn several_sequences_share_a_device() {
    for name in ["hf/qwen3", "hf/qwen3_next"] {
        let baked = bake(name, &BuildOptions::default());
        let ids = Expected::read(name).ids;
        let text = |i: usize| -> Vec<u32> { ids.iter().cycle().skip(11 * i).take(24 + i).copied().collect() };
        for reference in [false, !has_gpu()] {
            let device = mlx_as(&baked.loaf, Type::F32, reference);
            let mut alone = Session::new(Engine::on(&baked.loaf, Box::new(device))).expect("a slot");
            let want: Vec<Vec<Vec<f32>>> = (0..3)
                .map(|i| {
                    alone.rewind(0).expect("a start");
                    let t = text(i);
                    alone.prefill(&t[..9 + i]).expect("a chunk");
                    let first = alone.logits_of(8 + i as u32).expect("a row").to_vec();
                    let rest = t[9 + i..].iter().map(|id| alone.decode(*id).expect("a step").to_vec());
                    std::iter::once(first).chain(rest).collect()
                })
                .collect();
            let gpu = !reference && has_gpu();
            let options =
                MlxOptions { gpu, reference, slots: 4, activations: Some(Type::F32), ..MlxOptions::default() };
            let device = MlxDevice::open(&baked.loaf, options).unwrap_or_else(|e| panic!("{e}"));
            let mut engine = Engine::on(&baked.loaf, Box::new(device));
            let mut all: Vec<Sequence> = (0..3).map(|_| engine.sequence().expect("a slot")).collect();
            let texts: Vec<Vec<u32>> = (0..3).map(text).collect();
            let mut parts: Vec<(&mut Sequence, &[u32])> =
                all.iter_mut().enumerate().map(|(i, s)| (s, &texts[i][..9 + i])).collect();
            engine.prefill(&mut parts).expect("prompts together");
            engine.logits_of(&[8, 18, 29]).expect("rows of the step");
            for (i, want) in want.iter().enumerate() {
                close(&format!("{name}, prompt {i}"), engine.logits(i), &want[0]);
            }
            for step in 0..15 {
                if step == 5 {
                    // Put aside and back, in another slot.
                    let aside = engine.snapshot(&all[1]).expect("a snapshot");
                    drop(all.remove(1));
                    all.insert(1, engine.restore(&aside).expect("a slot"));
                }
                if step == 8 {
                    // A fork goes its own way; the sequence it comes from does not notice.
                    let mut other = engine.fork(&all[0]).expect("a slot");
                    let before = other.position() as usize;
                    engine.decode_one(&mut other, 3).expect("a step");
                    let mut same = engine.fork(&all[0]);
                    assert!(same.is_err(), "four slots");
                    drop(other);
                    same = engine.fork(&all[0]);
                    let mut same = same.expect("a slot");
                    let logits = engine.decode_one(&mut same, texts[0][before]).expect("a step").to_vec();
                    close(&format!("{name}, fork"), &logits, &want[0][step + 1]);
                }
                let mut rows: Vec<(&mut Sequence, u32)> =
                    all.iter_mut().enumerate().map(|(i, s)| (s, texts[i][9 + i + step])).collect();
                engine.decode(&mut rows).expect("a step together");
                for (i, want) in want.iter().enumerate() {
                    close(&format!("{name}, sequence {i}, step {step}"), engine.logits(i), &want[step + 1]);
                }
            }
        }
    }
}

#[test]
fn nothing_is_traced_again_between_tokens() {
    let baked = bake("hf/qwen3_next", &BuildOptions::default());
    let ids = Expected::read("hf/qwen3_next").ids;
    let mut backend = mlx(&baked.loaf);
    let traces = backend.traces();
    assert_eq!(traces, 3, "decode, the largest prefill and the head");
    for (pos, id) in (0..100).zip(&ids) {
        backend.decode(&[*id], &rows(pos, 1)).expect("a step");
    }
    backend.prefill(&ids[100..128], &rows(100, 28)).expect("a chunk");
    for row in 0..5 {
        backend.lm_head(&[row]).expect("a row");
    }
    assert_eq!(backend.traces(), traces);
}

#[test]
fn a_compiled_function_may_hand_an_input_back() {
    let (m, _) = open();
    let ones = Array::from_slice(&[1.0f32; 3], &[3]);
    m.eval([&ones]).expect("computed");
    let address = ones.address();
    let (inner, _) = open();
    let mut f = Compiled::new(move |x| Ok(vec![inner.add(&x[0], &x[0])?, x[0].clone()])).expect("a function");
    for _ in 0..2 {
        let out = f.apply(vec![ones.clone()]).expect("results");
        assert_eq!((host(&m, &out[0]), out[1].address()), (vec![2.0; 3], address));
    }
}

#[test]
fn caches_are_written_in_place() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let mut backend = mlx(&baked.loaf);
    backend.decode(&[5], &rows(0, 1)).expect("a step");
    let before = backend.cache_addresses();
    assert!(!before.is_empty() && before.iter().all(|a| *a != 0));
    for pos in 1..6 {
        backend.decode(&[7], &rows(pos, 1)).expect("a step");
    }
    assert_eq!(backend.cache_addresses(), before);
}

#[test]
fn a_sequence_can_start_over_and_step_back() {
    for name in ["hf/qwen3_next", "hf/mistral"] {
        let baked = bake(name, &BuildOptions::default());
        let ids = Expected::read(name).ids;
        let mut s = on_mlx(&baked.loaf);
        let play = |s: &mut Session, ids: &[u32]| -> Vec<Vec<f32>> {
            ids.iter().map(|&id| s.decode(id).expect("a step").to_vec()).collect()
        };
        let want = play(&mut s, &ids[..20]);
        s.rewind(0).expect("a session can always start over");
        assert_bits(name, &play(&mut s, &ids[..10]), &want[..10]);
        // A step is submitted ahead and taken back.
        let chooser = s.engine.chooser(&SamplerOptions::default(), true).expect("a device that chooses");
        chooser.start(&SamplerOptions::default(), 10, &[]).expect("started");
        chooser.next(10, true).expect("a token");
        chooser.end();
        assert_eq!(s.position(), 10);
        assert_bits(name, &play(&mut s, &ids[10..20]), &want[10..]);
    }
}

/// Ids generated, position afterwards, and mean log-probability.
fn generate(
    session: &mut Session,
    prompt: &[u32],
    n: usize,
    sampler: SamplerOptions,
    stop: &[u32],
) -> (Vec<u32>, u32, f64) {
    let options = GenerateOptions {
        max_tokens: Some(n),
        sampler,
        stop_ids: stop.to_vec(),
        log_probs: true,
        ..GenerateOptions::default()
    };
    let Session { engine, sequence } = session;
    let mut generation = Generation::new(engine.model(), None, prompt, 0, options).expect("valid options");
    let report =
        generate::run(engine, sequence, &mut generation, &mut |_, _| ControlFlow::Continue(())).expect("a run");
    (generation.ids().to_vec(), session.position(), report.mean_log_prob().expect("asked for"))
}

#[test]
fn choices_on_the_device_are_the_samplers() {
    let baked =
        bake("hf/qwen3_5_moe", &BuildOptions { kv: Some(loaf_formats::dtype::DType::F32), ..Default::default() });
    let ids = Expected::read("hf/qwen3_5_moe").ids;
    let greedy = SamplerOptions::default();
    let cases = [
        greedy,
        SamplerOptions { repetition_penalty: 1.7, ..greedy },
        SamplerOptions { presence_penalty: 3.0, frequency_penalty: 0.5, ..greedy },
        // Filters that leave one token.
        SamplerOptions { temperature: 1.3, top_k: 1, ..greedy },
        SamplerOptions { temperature: 0.8, top_p: 1e-6, ..greedy },
        SamplerOptions { temperature: 0.8, min_p: 0.999_999, ..greedy },
    ];
    for sampler in cases {
        let want = generate(&mut session(&baked.loaf, Kernels::detect(), 2), &ids[..30], 24, sampler, &[]);
        let got = generate(&mut on_mlx(&baked.loaf), &ids[..30], 24, sampler, &[]);
        assert_eq!((&got.0, got.1), (&want.0, want.1), "{sampler:?}");
        assert!((got.2 - want.2).abs() < 1e-3, "{sampler:?}: {} and {}", got.2, want.2);
        // Ended by a token, after which a step was on its way.
        let stop = &[want.0[9]];
        let want = generate(&mut session(&baked.loaf, Kernels::detect(), 2), &ids[..30], 24, sampler, stop);
        let got = generate(&mut on_mlx(&baked.loaf), &ids[..30], 24, sampler, stop);
        assert_eq!((got.0, got.1), (want.0, want.1), "{sampler:?}, stopped");
    }
}

#[test]
fn draws_follow_the_seed_and_the_filters() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let ids = Expected::read("hf/qwen3").ids;
    let run = |seed, top_k| {
        let sampler = SamplerOptions { temperature: 2.0, top_k, seed, ..SamplerOptions::default() };
        generate(&mut on_mlx(&baked.loaf), &ids[..9], 20, sampler, &[]).0
    };
    assert_eq!(run(1, 0), run(1, 0));
    assert_ne!(run(1, 0), run(2, 0));
    // Of two tokens each time, so never the third: the CPU ranks them.
    let drawn = run(3, 2);
    let mut cpu = session(&baked.loaf, Kernels::detect(), 1);
    let mut logits = cpu.eval(&ids[..9]).expect("a prompt").to_vec();
    for id in drawn {
        let better = logits.iter().filter(|x| **x > logits[id as usize]).count();
        assert!(better < 2, "{id} has rank {better}");
        logits = cpu.decode(id).expect("a step").to_vec();
    }
}

#[test]
fn halves_stay_near() {
    let gpu = open().1 != Device::Cpu;
    let mut far = Vec::new();
    // Experts are kept as bf16 in one of them; heads of 16 are what cuDNN takes.
    for name in ["hf/llama_bf16", "hf/qwen3_5", "hf/qwen3_moe"] {
        let (baked, expected) = (bake(name, &BuildOptions::default()), Expected::read(name));
        for (kind, reference) in [Type::F16, Type::Bf16].into_iter().flat_map(|k| [(k, false), (k, true)]) {
            if reference && gpu {
                continue;
            }
            let device = Box::new(mlx_as(&baked.loaf, kind, reference));
            let mut s = Session::new(Engine::on(&baked.loaf, device)).expect("a slot");
            s.prefill(&expected.ids[..40]).expect("a chunk");
            let mut near = |row: usize, got: &[f32]| {
                let diff = max_diff(got, expected.logits_at(row)) / expected.scale;
                // 8 and 11 bits of mantissa, a few dozen roundings deep.
                if !(diff > 0.0 && diff < if kind == Type::F16 { 0.02 } else { 0.1 }) {
                    far.push(format!("{name}, {kind:?}, chains of operations: {reference}, row {row}: {diff}"));
                }
            };
            near(39, s.logits_of(39).expect("a row"));
            near(40, s.decode(expected.ids[40]).expect("a step"));
        }
    }
    assert!(far.is_empty(), "{far:#?}");
}

#[test]
fn what_cannot_run_is_refused_in_one_line() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let options = MlxOptions { gpu: false, activations: None, memory: Some(1 << 16), ..MlxOptions::default() };
    let error = MlxDevice::open(&baked.loaf, options).err().expect("64 KiB are too few").to_string();
    assert!(error.starts_with("MLX: memory: expected at most 65536 bytes, found "), "{error}");
    assert!(error.ends_with("bake with a smaller --context") && !error.contains('\n'), "{error}");
    if device::open(true).is_err() {
        let options = MlxOptions { gpu: true, ..MlxOptions::default() };
        let error = MlxDevice::open(&baked.loaf, options).err().expect("no GPU").to_string();
        assert_eq!(error, "MLX: no GPU that this build of MLX can use");
    }
    let blocks = bake_dir(&fixture("gguf/mixed/model.gguf"), &BuildOptions::default());
    let options = MlxOptions { gpu: false, ..MlxOptions::default() };
    let error = MlxDevice::open(&blocks.loaf, options).err().expect("formats that MLX lacks");
    assert!(matches!(error, DeviceError::Format(WeightFormat::Block(_))), "{error}");
    assert_eq!(error.to_string(), "this backend does not take weights in q6_k; the CPU and CUDA do");
    let (m, _) = open();
    let (a, b) = (Array::from_slice(&[1.0f32; 6], &[2, 3]), Array::from_slice(&[1.0f32; 6], &[2, 3]));
    let error = m.matmul(&a, &b).err().expect("shapes that do not fit").to_string();
    assert!(error.starts_with("MLX: [matmul]") && !error.contains('\n'), "{error}");
}
