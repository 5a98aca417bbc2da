//! The CUDA backend's kernels as they are committed give the CPU's bits: interpreted, so that no
//! card is needed; with LOAF_TEST_CUDA set (`make test-cuda`), on the first card there is.
#![cfg(target_os = "linux")]

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, OnceLock};

use loaf_bake::build::BuildOptions;
use loaf_bake::weights::QuantOptions;
use loaf_formats::dtype::DType;
use loaf_formats::op::{OpAttrs, OpKind, gdn_scan};
use loaf_runtime::backend::cuda::driver::{Driver, Function, Pinned};
use loaf_runtime::backend::cuda::launch::{
    ASK_SHARED, Bases, CHOICE_ROOM, Choose, HowAt, Kernel, Launch, OWN_SHARED, Operand, Rule, SAMPLE_ROOM, Sample,
    Step, rule_fits, rule_room,
};
use loaf_runtime::backend::cuda::nvidia::Nvidia;
use loaf_runtime::backend::cuda::{CudaDevice, CudaOptions, PTX};
use loaf_runtime::backend::{DeviceError, Trace};
use loaf_runtime::compare::CpuTrace;
use loaf_runtime::generate;
use loaf_runtime::kernels::Kernels;
use loaf_runtime::sample::{Sampler, SamplerOptions, best};
use loaf_runtime::{Engine, EngineError, GenerateOptions, Generation, Model, Sequence, Session};
use loaf_tests::{
    Baked, Expected, assert_bits, bake, bake_dir, decode_logits, fixture, fixtures, prefill_logits, session,
};
use loaf_tests::{gguf, gguf_models};
use loaf_tests_gpu::{Emulated, HOPPER_PTX, Module, Record, Work};

/// Whether tests run on a card, which is quick enough for long texts.
fn has_card() -> bool {
    std::env::var_os("LOAF_TEST_CUDA").is_some()
}

fn driver() -> Box<dyn Driver> {
    if has_card() {
        return Box::new(Nvidia::open(0).unwrap_or_else(|e| panic!("{e}")));
    }
    Box::new(Emulated::new().0)
}

fn engine(model: &Model, options: CudaOptions) -> Engine {
    let device = CudaDevice::on(model, driver(), options).unwrap_or_else(|e| panic!("{e}"));
    Engine::on(model, Box::new(device))
}

fn cuda(model: &Model, options: CudaOptions) -> Session {
    Session::new(engine(model, options)).expect("a slot")
}

/// One sequence, with the kernels that LOAF_CUDA_IMAGE names, if it does.
fn options() -> CudaOptions {
    static IMAGE: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let read = || std::env::var_os("LOAF_CUDA_IMAGE").map(|path| std::fs::read(path).expect("compiled kernels"));
    CudaOptions { image: IMAGE.get_or_init(read).clone(), ..CudaOptions::default() }
}

/// Every way to take a decode step.
fn ways() -> [CudaOptions; 4] {
    let of = |graphs, fused| CudaOptions { graphs, fused, ..options() };
    [of(false, false), of(false, true), of(true, false), of(true, true)]
}

/// Plays a text in every way, half of it as a prompt; on a card it is played twice, and then by the
/// token alone.
fn check(name: &str, model: &Model, ids: &[u32]) {
    let want = decode_logits(&mut session(model, Kernels::detect(), 1), ids);
    let half = ids.len() / 2;
    let all = ways();
    // Interpreted, a graph is what it was captured from.
    let ways = if has_card() { &all[..] } else { &all[2..] };
    for options in ways {
        let what = format!("{name}, graphs {}, fused {}", options.graphs, options.fused);
        let mut cuda = cuda(model, options.clone());
        let mut got = prefill_logits(&mut cuda, &ids[..half], &[half.min(100)]);
        got.extend(decode_logits(&mut cuda, &ids[half..]));
        assert_bits(&what, &got, &want);
        if has_card() {
            cuda.rewind(0).expect("the start");
            assert_bits(&format!("{what}, by the token"), &decode_logits(&mut cuda, ids), &want);
        }
    }
}

fn text(vocab: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 5) % vocab).collect()
}

/// Tokens of a text: few where they are interpreted.
fn length(few: usize) -> usize {
    if has_card() { 120 } else { few }
}

fn four_bits(group: u64) -> QuantOptions {
    QuantOptions { bits: Some(4), group, ..QuantOptions::default() }
}

#[test]
fn every_family_has_the_bits_of_the_cpu() {
    for name in fixtures("hf") {
        let baked = bake(&name, &BuildOptions::default());
        check(&name, &baked.loaf, &text(baked.loaf.plan().vocab, length(4)));
    }
}

#[test]
fn every_stored_format_has_the_bits_of_the_cpu() {
    for name in fixtures("mlx") {
        let baked = bake(&name, &BuildOptions::default());
        check(&name, &baked.loaf, &text(baked.loaf.plan().vocab, length(4)));
    }
}

#[test]
fn every_width_has_the_bits_of_the_cpu() {
    for (bits, group) in [(2, 32), (3, 64), (4, 32), (4, 64), (5, 32), (6, 64), (8, 32)] {
        let quant = QuantOptions { bits: Some(bits), ..four_bits(group) };
        let baked = bake("stories260k", &BuildOptions { quant, ..BuildOptions::default() });
        check(&format!("stories260k q{bits}g{group}"), &baked.loaf, &text(500, length(2)));
    }
}

/// Prompts whose products are tiles: several tiles of rows, and rows and outputs that do not fill
/// the last.
#[test]
fn prompts_by_tiles_have_the_bits_of_the_cpu() {
    let made = |bits, group| {
        let quant = QuantOptions { bits: Some(bits), ..four_bits(group) };
        bake("stories260k", &BuildOptions { quant, ..BuildOptions::default() })
    };
    let mut all = vec![("q4g32", made(4, 32)), ("q4g64", made(4, 64)), ("q6g64", made(6, 64))];
    for name in ["mlx/qwen3_5_mxfp4", "mlx/qwen3_moe_affine8", "mlx/qwen3_next_affine4"] {
        all.push((name, bake(name, &BuildOptions::default())));
    }
    for (name, baked) in all {
        let ids = text(baked.loaf.plan().vocab, 70);
        let want = session(&baked.loaf, Kernels::detect(), 2).eval(&ids).expect("a prompt").to_vec();
        let got = cuda(&baked.loaf, options()).eval(&ids).expect("a prompt").to_vec();
        assert_bits(name, &[got], &[want]);
    }
}

/// Every float result of a prompt's chunks and of a token, by name.
fn traced(device: &mut dyn Trace, parts: &[&[u32]]) -> Vec<(String, Vec<u32>)> {
    let (mut all, mut pos) = (Vec::new(), 0);
    for part in parts {
        device
            .play(pos, part, &mut |record, operand, values| {
                let name = format!("{} of {} rows from {pos}, operand {operand}", record.kind.spec().name, part.len());
                all.push((name, values.iter().map(|v| v.to_bits()).collect()));
            })
            .expect("a part that fits");
        pos += part.len() as u32;
    }
    all
}

/// Holds a GGUF model to the CPU: every result of a prompt of tiles, of three rows, and of a token,
/// op by op; then the logits of a prompt and two tokens in the steps that runs take.
fn check_gguf(name: &str, file: &gguf::File, prompt: usize, kernels: &[&str]) {
    let source = tempfile::tempdir().expect("a temporary folder");
    let path = source.path().join("model.gguf");
    std::fs::write(&path, file.bytes()).expect("a file");
    let options = BuildOptions { context: Some(64), chunks: vec![32], ..BuildOptions::default() };
    let baked = bake_dir(&path, &options);
    let ids = text(baked.loaf.plan().vocab, 31);
    let parts = [&ids[..27], &ids[27..30], &ids[30..]];
    let want = traced(&mut CpuTrace::new(&baked.loaf, Kernels::detect()).expect("memory"), &parts);
    let (emulated, record) = Emulated::new();
    let driver: Box<dyn Driver> = if has_card() { driver() } else { Box::new(emulated) };
    let device = CudaDevice::on(&baked.loaf, driver, self::options());
    let got = traced(&mut device.unwrap_or_else(|e| panic!("{name}: {e}")), &parts);
    assert_eq!(got.len(), want.len(), "{name}");
    for ((what, got), (_, want)) in got.iter().zip(&want) {
        let off = got.iter().zip(want).filter(|(a, b)| a != b).count();
        assert!(off == 0 && got.len() == want.len(), "{name}, {what}: {off} of {} differ", want.len());
    }
    let launched = launched(&record);
    for kernel in kernels.iter().filter(|_| !has_card()) {
        assert!(launched.contains(&(*kernel).to_owned()), "{name}: expected {kernel}, found {launched:?}");
    }
    let run = |mut session: Session| {
        let mut logits = vec![session.eval(&ids[..prompt]).expect("a prompt").to_vec()];
        logits.extend(decode_logits(&mut session, &ids[29..]));
        logits
    };
    let want = run(session(&baked.loaf, Kernels::detect(), 1));
    // Interpreted, a graph is what it was captured from.
    let all = ways();
    for options in if has_card() { &all[..] } else { &all[3..] } {
        assert_bits(name, &run(cuda(&baked.loaf, options.clone())), &want);
    }
}

/// Rows of a prompt that is run whole: many for some types, for what is interpreted takes long.
fn gguf_prompt(kind: &str) -> usize {
    if has_card() || ["Q4_K", "Q6_K"].contains(&kind) { 29 } else { 3 }
}

/// The kernels of a type of GGUF's: those of one row, and tiles.
fn gguf_kernels(kind: &str) -> [String; 2] {
    let of = match kind {
        "Q4_0" | "Q8_0" | "Q4_K" | "Q5_K" | "Q6_K" => kind.to_lowercase(),
        // Affine ones of 4 and of 5 bits.
        "Q4_1" => "q4".to_owned(),
        "Q5_1" => "any".to_owned(),
        // Tiles of E2M1 codes have groups of 32.
        "NVFP4" => return ["linear_e2m1_1x4", "linear_e2m1_8x4"].map(String::from),
        "MXFP4" => "e2m1".to_owned(),
        _ => "block".to_owned(),
    };
    [format!("linear_{of}_1x4"), format!("tiles_{of}")]
}

/// Matrices in each of GGUF's formats: embedding, products of one, three and many rows, LM head, of
/// sizes that fill neither a warp's outputs, nor a tile's, nor a chunk of inputs.
#[test]
fn every_format_of_gguf_has_the_bits_of_the_cpu() {
    for (kind, _, unit, ..) in gguf_models::KINDS.iter().filter(|k| k.0 != "F32") {
        let (hidden, inner) = if *unit == 32 { (288, 1056) } else { (256, 1280) };
        let sizes = gguf_models::Sizes { hidden, inner, vocab: 75, blocks: 1, heads: 4 };
        let kernels = gguf_kernels(kind);
        let file = gguf_models::sized("qwen3", kind, sizes);
        check_gguf(kind, &file, gguf_prompt(kind), &kernels.each_ref().map(String::as_str));
    }
}

/// NVFP4 with scales beside its matrices.
#[test]
fn factors_of_rows_have_the_bits_of_the_cpu() {
    let sizes = gguf_models::Sizes { hidden: 320, inner: 1088, vocab: 75, blocks: 1, heads: 4 };
    let dense = gguf_models::sized("qwen3+scaled", "NVFP4", sizes);
    let mixture = gguf_models::model("qwen35moe+scaled", "NVFP4");
    for (name, file) in [("factors of rows", dense), ("factors of experts' rows", mixture)] {
        check_gguf(name, &file, gguf_prompt("NVFP4"), &["linear_block_1x4", "tiles_block"]);
    }
}

/// The same of mixtures: experts of one row, of slots that fill no tile, and of several tiles.
#[test]
fn experts_in_every_format_of_gguf_have_the_bits_of_the_cpu() {
    for (kind, ..) in gguf_models::KINDS.iter().filter(|k| k.0 != "F32") {
        let kernels = gguf_kernels(kind);
        let name = format!("a mixture in {kind}");
        let file = gguf_models::model("qwen35moe", kind);
        check_gguf(&name, &file, gguf_prompt(kind), &kernels.each_ref().map(String::as_str));
    }
}

/// A random model of a fixture's config with other numbers in it.
fn random(config: &str, numbers: &[(&str, u64)], options: &BuildOptions) -> Baked {
    let source = tempfile::tempdir().expect("a temporary folder");
    let text = std::fs::read(fixture(config).join("config.json")).expect("a fixture");
    let mut json: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let inner = match json.get("text_config") {
        Some(_) => &mut json["text_config"],
        None => &mut json,
    };
    for (key, value) in numbers {
        inner[*key] = (*value).into();
    }
    inner["eos_token_id"] = 1.into();
    std::fs::write(source.path().join("config.json"), json.to_string()).expect("a file");
    bake_dir(source.path(), &BuildOptions { random: Some(7), ..options.clone() })
}

/// A small random Qwen3 of one layer with heads of `dim` elements.
fn one_layer(hidden: u64, intermediate: u64, heads: [u64; 3], options: &BuildOptions) -> Baked {
    let [heads, kv, dim] = heads;
    // So many that the short kernels go over the vocabulary several times.
    let vocab = if hidden < 1024 { 512 } else { 4608 };
    let numbers = [
        ("hidden_size", hidden),
        ("intermediate_size", intermediate),
        ("num_hidden_layers", 1),
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv),
        ("head_dim", dim),
        ("vocab_size", vocab),
        ("max_position_embeddings", 600),
    ];
    random("configs/qwen3_0_6b", &numbers, options)
}

/// Attention of prompts by tiles: each size of heads, groups that do not fill a tile, caches of
/// both types, windows, blocks that are merged.
#[test]
fn attention_by_tiles_has_the_bits_of_the_cpu() {
    let options = |kv| BuildOptions { quant: four_bits(64), kv: Some(kv), ..BuildOptions::default() };
    let window =
        [("num_hidden_layers", 1), ("sliding_window", 100), ("head_dim", 32), ("max_position_embeddings", 600)];
    let cases = [
        ("64", one_layer(64, 64, [2, 1, 64], &options(DType::F16)), 300, "attention_tile_64"),
        ("128, three heads", one_layer(64, 64, [3, 1, 128], &options(DType::F16)), 90, "attention_tile_128"),
        ("128, f32", one_layer(64, 64, [2, 2, 128], &options(DType::F32)), 30, "attention_tile_128"),
        ("256", one_layer(64, 64, [2, 1, 256], &options(DType::F16)), 40, "attention_tile_256"),
        ("window", random("hf/mistral", &window, &options(DType::F32)), 290, "attention_tile_64"),
    ];
    for (name, baked, n, kernel) in cases {
        let ids = text(baked.loaf.plan().vocab, n);
        let want = session(&baked.loaf, Kernels::detect(), 2).eval(&ids).expect("a prompt").to_vec();
        let got = cuda(&baked.loaf, self::options()).eval(&ids).expect("a prompt").to_vec();
        assert_bits(name, &[got], &[want]);
        if !has_card() {
            let (mut engine, record) = recorded(&baked.loaf, self::options()).expect("room");
            let mut sequence = engine.sequence().expect("a slot");
            engine.eval(&mut sequence, &ids[..20]).expect("a prompt");
            assert!(launched(&record).contains(&kernel.to_owned()), "{name}: expected {kernel}");
        }
    }
    // Prompts of several sequences in one step, each with a tile that it does not fill.
    let baked = one_layer(64, 64, [2, 1, 64], &options(DType::F16));
    let ids = text(512, 100);
    let lengths = [20, 40, 17];
    let mut engine = engine(&baked.loaf, CudaOptions { slots: 3, ..self::options() });
    let mut all: Vec<Sequence> = (0..3).map(|_| engine.sequence().expect("a slot")).collect();
    let mut parts: Vec<(&mut Sequence, &[u32])> = all.iter_mut().zip(lengths).map(|(s, n)| (s, &ids[..n])).collect();
    engine.prefill(&mut parts).expect("a step that fits");
    let want = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 1), &ids[..41]);
    for (sequence, n) in all.iter_mut().zip(lengths) {
        let got = engine.decode_one(sequence, ids[n]).expect("one token").to_vec();
        assert_bits("prompts together", &[got], &want[n..n + 1]);
    }
}

/// The sizes of a small hybrid of mixtures: inputs of an expert, and elements of the delta rule's
/// keys and values.
fn small_hybrid(expert: u64, [key, value]: [u64; 2]) -> [(&'static str, u64); 16] {
    [
        ("hidden_size", 128),
        ("num_hidden_layers", 2),
        ("full_attention_interval", 2),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("head_dim", 64),
        ("num_experts", 4),
        ("num_experts_per_tok", 2),
        ("moe_intermediate_size", expert),
        ("shared_expert_intermediate_size", expert),
        ("linear_num_key_heads", 2),
        ("linear_num_value_heads", 4),
        ("linear_key_head_dim", key),
        ("linear_value_head_dim", value),
        ("vocab_size", 512),
        ("max_position_embeddings", 600),
    ]
}

/// Prompts whose products are the larger tiles, in steps that make norms, int8 forms and heads as
/// those of few rows do: tiles that rows and outputs do not fill, and slots of experts.
#[test]
fn prompts_by_larger_tiles_have_the_bits_of_the_cpu() {
    let options = BuildOptions { quant: four_bits(64), chunks: vec![256], ..BuildOptions::default() };
    let mixture = small_hybrid(128, [32, 32]);
    let cases: [(&str, Baked, usize, &[&str]); 3] = [
        (
            "1,024",
            one_layer(1024, 1024, [3, 1, 64], &options),
            30,
            &["norm_codes_1", "few_heads_64", "gated_codes", "wide_32", "wide_128"],
        ),
        ("rows of two tiles", one_layer(128, 256, [8, 1, 64], &options), 200, &["quantize_64", "wide_64", "wide_128"]),
        ("a mixture", random("configs/qwen3_coder_next", &mixture, &options), 140, &["wide_32", "wide_64"]),
    ];
    for (name, baked, n, kernels) in cases {
        let ids = text(512, n);
        let want = session(&baked.loaf, Kernels::detect(), 2).eval(&ids).expect("a prompt").to_vec();
        if has_card() {
            let got = cuda(&baked.loaf, self::options()).eval(&ids).expect("a prompt").to_vec();
            assert_bits(name, &[got], &[want]);
            continue;
        }
        let (mut engine, record) = recorded(&baked.loaf, self::options()).expect("room");
        let mut sequence = engine.sequence().expect("a slot");
        let got = engine.eval(&mut sequence, &ids).expect("a prompt").to_vec();
        assert_bits(name, &[got], &[want]);
        let launched = launched(&record);
        for kernel in kernels {
            assert!(launched.contains(&(*kernel).to_owned()), "{name}: expected {kernel}, found {launched:?}");
        }
    }
}

/// The logits of a prompt on a card that has Hopper's own kernels, which `ptx` is, and what was
/// launched.
fn by_hopper(model: &Model, ids: &[u32], ptx: &str, fast: bool) -> (Vec<f32>, Vec<String>) {
    let (driver, record) = Emulated::hopper(ptx);
    let device = CudaDevice::on(model, Box::new(driver), CudaOptions { fast, ..self::options() }).expect("room");
    let mut engine = Engine::on(model, Box::new(device));
    let mut sequence = engine.sequence().expect("a slot");
    let logits = engine.eval(&mut sequence, ids).expect("a prompt").to_vec();
    (logits, launched(&record))
}

/// Prompts whose products are Hopper's own tiles: outputs and rows that do not fill them, stages
/// that are used again, rows of two tiles, slots of experts.
#[test]
fn prompts_by_hoppers_tiles_have_the_bits_of_the_cpu() {
    let options = BuildOptions { quant: four_bits(64), chunks: vec![256], ..BuildOptions::default() };
    let mut mixture = small_hybrid(256, [32, 32]);
    mixture[0].1 = 256;
    let both: &[&str] = &["hopper_128", "hopper_pairs_128"];
    let cases = [
        ("six chunks, and outputs of three tiles and a half", one_layer(768, 448, [12, 2, 64], &options), 27, both),
        ("rows of two tiles", one_layer(256, 512, [6, 1, 64], &options), 150, both),
        ("a mixture", random("configs/qwen3_coder_next", &mixture, &options), 140, both),
    ];
    for (name, baked, n, kernels) in cases {
        let ids = text(512, n);
        let want = session(&baked.loaf, Kernels::detect(), 2).eval(&ids).expect("a prompt").to_vec();
        if has_card() {
            let got = cuda(&baked.loaf, self::options()).eval(&ids).expect("a prompt").to_vec();
            assert_bits(name, &[got], &[want]);
            continue;
        }
        let (got, launched) = by_hopper(&baked.loaf, &ids, HOPPER_PTX, false);
        assert_bits(name, &[got], &[want]);
        for kernel in kernels {
            assert!(launched.contains(&(*kernel).to_owned()), "{name}: expected {kernel}, found {launched:?}");
        }
    }
}

/// A wait on a barrier in shared memory, and what has passed it at once.
const WAIT: &str = "mbarrier.try_wait.parity.shared::cta.b64 is, [";
const PASSED: &str = "setp.ne.b32 is, 1, 0; ld.shared.b64 was, [";
/// Copies that arrive at one, and what arrives without them.
const COPIES_ARRIVE: &str = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [";
const ARRIVES: &str = "mbarrier.arrive.shared::cta.b64 was, [";

/// A fault of a kernel: its name, what stands in the text, what is put there, how often at most and
/// how often it must be.
type Fault = (&'static str, &'static str, &'static str, usize, usize);

/// That each fault in the text of one of Hopper's kernels is seen: a panic, or other results of
/// `run`, which takes the text.
fn faults_are_seen(kernel: &str, faults: &[Fault], run: &dyn Fn(&str) -> Vec<f32>) {
    let want = run(HOPPER_PTX);
    let begin = HOPPER_PTX.find(&format!(".entry {kernel}(")).expect("the kernel");
    let end = HOPPER_PTX[begin + 1..].find(".entry ").map_or(HOPPER_PTX.len(), |n| begin + 1 + n);
    for &(what, find, put, most, least) in faults {
        let count = HOPPER_PTX[begin..end].matches(find).count().min(most);
        assert!(count >= least, "{kernel}: {what}: {count} times");
        let body = HOPPER_PTX[begin..end].replacen(find, put, most);
        let ptx = [&HOPPER_PTX[..begin], &body, &HOPPER_PTX[end..]].concat();
        // That it is read is no fault that is seen.
        Module::parse(&ptx);
        let got = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&ptx)));
        let differs = |got: &Vec<f32>| got.iter().zip(&want).any(|(a, b)| a.to_bits() != b.to_bits());
        assert!(got.as_ref().map_or(true, differs), "{kernel}: {what}: nothing was seen");
    }
}

/// What the interpreter would see of Hopper's tiles: a descriptor that is wrong, a wait that is
/// missing, a stage that is written before it is free or read before it is there.
#[test]
fn faults_of_hoppers_tiles_are_seen() {
    if has_card() {
        return;
    }
    let options = BuildOptions { quant: four_bits(64), chunks: vec![32], ..BuildOptions::default() };
    let baked = one_layer(768, 448, [12, 2, 64], &options);
    let ids = text(512, 25);
    let faults = [
        ("eight rows are 1,024 bytes apart", "4611686293305360384", "4611686155866406912", 9, 1),
        ("the second half of a group's codes", "4611686293305360386", "4611686293305360385", 9, 1),
        ("half a group is added to the other", "setp.ne.b32 more, 1, 0;", "setp.ne.b32 more, 0, 0;", 99, 10),
        ("products are waited for", "wgmma.wait_group.sync.aligned 0;", "", 99, 5),
        ("copies are waited for", WAIT, PASSED, 9, 3),
        ("free stages are waited for", WAIT, PASSED, 1, 1),
        ("copies arrive before others read", COPIES_ARRIVE, ARRIVES, 9, 1),
    ];
    for kernel in ["hopper_128", "hopper_pairs_128"] {
        faults_are_seen(kernel, &faults, &|ptx| by_hopper(&baked.loaf, &ids, ptx, false).0);
    }
}

/// The same of its fast attention, over more chunks of keys than there are stages.
#[test]
fn faults_of_hoppers_fast_attention_are_seen() {
    if has_card() {
        return;
    }
    let options =
        BuildOptions { quant: four_bits(64), kv: Some(DType::F16), chunks: vec![512], ..BuildOptions::default() };
    let baked = one_layer(64, 64, [2, 1, 64], &options);
    let ids = text(512, 330);
    let faults = [
        ("eight rows are 1,024 bytes apart", "4611686293305360384", "4611686155866406912", 9, 1),
        ("products are waited for", "wgmma.wait_group.sync.aligned 0;", "", 99, 5),
        ("copies are waited for", WAIT, PASSED, 99, 3),
        ("copies arrive before others read", COPIES_ARRIVE, ARRIVES, 9, 2),
    ];
    faults_are_seen("fast_hopper_64", &faults, &|ptx| by_hopper(&baked.loaf, &ids, ptx, true).0);
}

/// What a prompt's first layer computes, by name.
struct Played {
    queries: Vec<f32>,
    keys: Vec<f32>,
    most_value: f32,
    attention: Vec<f32>,
}

fn played(model: &Model, ids: &[u32], fast: bool, driver: Box<dyn Driver>) -> Played {
    let mut device = CudaDevice::on(model, driver, CudaOptions { fast, ..options() }).unwrap_or_else(|e| panic!("{e}"));
    let (mut turned, mut most_value, mut attention) = (Vec::new(), 0f32, Vec::new());
    device
        .play(0, ids, &mut |record, _, values| match record.kind {
            OpKind::Rope => turned.push(values.to_vec()),
            // Values are among the outputs of the products before attention.
            OpKind::LinearQuant | OpKind::LinearDense if attention.is_empty() => {
                most_value = values.iter().fold(most_value, |m, x| m.max(x.abs()));
            }
            OpKind::Attention => attention = values.to_vec(),
            _ => {}
        })
        .expect("a prompt");
    let [queries, keys] = <[Vec<f32>; 2]>::try_from(turned).expect("queries and keys are rotated");
    Played { queries, keys, most_value, attention }
}

/// `--fast`: attention of prompts by tensor cores. Queries are rounded to F16, so a score is off by
/// 2^-11 of the sum of its products' magnitudes at most, d; weights are then off by e^(2d) - 1 of
/// all of them, and by 2^-11 once more as they are rounded; values are what the cache has. What
/// f32 adds is far below. Logits come after four int8 forms (output, gate and up, down, head), in
/// each of which values that moved may be rounded to another step, 1/127 of their group's largest:
/// all of them at worst, since what moved a little makes more of the next move. Two roundings that
/// have nothing to do with each other differ by a step over the root of six in the mean square, and
/// the largest of 64 values is some four times their mean square's root at most; four of these add
/// as squares do.
#[test]
fn fast_attention_of_prompts_is_near_the_exact() {
    let options =
        |kv| BuildOptions { quant: four_bits(64), kv: Some(kv), chunks: vec![256], ..BuildOptions::default() };
    let window = [("num_hidden_layers", 1), ("sliding_window", 70), ("head_dim", 32), ("max_position_embeddings", 600)];
    // The kernel for any card, and Hopper's own.
    let kernels =
        ["fast_attention_64", "fast_attention_128", "fast_attention_256", "fast_hopper_64", "fast_hopper_128"];
    let [any64, any128, any256, own64, own128] = kernels;
    let cases = [
        ("64", one_layer(64, 64, [2, 1, 64], &options(DType::F16)), [2, 1, 64], 0, 150, [any64, own64]),
        ("three heads", one_layer(64, 64, [3, 1, 128], &options(DType::F16)), [3, 1, 128], 0, 50, [any128, own128]),
        ("tiles", one_layer(64, 64, [4, 2, 128], &options(DType::F16)), [4, 2, 128], 0, 240, [any128, own128]),
        ("256", one_layer(64, 64, [2, 1, 256], &options(DType::F16)), [2, 1, 256], 0, 20, [any256; 2]),
        ("window", random("hf/mistral", &window, &options(DType::F16)), [4, 1, 32], 70, 150, [any64, own64]),
    ];
    let drivers: [fn() -> Box<dyn Driver>; 2] = match has_card() {
        true => [driver; 2],
        false => [|| Box::new(Emulated::new().0), || Box::new(Emulated::hopper(HOPPER_PTX).0)],
    };
    for (name, baked, [heads, kv, dim], window, n, kernels) in cases {
        let ids = text(baked.loaf.plan().vocab, n);
        let exact = played(&baked.loaf, &ids, false, driver());
        assert_eq!(exact.queries.len(), n * heads * dim, "{name}");
        let want = cuda(&baked.loaf, self::options()).eval(&ids).expect("a prompt").to_vec();
        for (driver, kernel) in drivers.iter().zip(kernels) {
            let fast = played(&baked.loaf, &ids, true, driver());
            assert_eq!((&exact.queries, &exact.keys), (&fast.queries, &fast.keys), "{name}: what attention is of");
            let (scale, mut largest) = (1.0 / (dim as f64).sqrt(), 0f64);
            for row in 0..n {
                for head in 0..heads {
                    let q = &exact.queries[(row * heads + head) * dim..][..dim];
                    let first = if window > 0 { (row + 1).saturating_sub(window) } else { 0 };
                    let magnitude = |at: usize| -> f64 {
                        let k = &exact.keys[(at * kv + head * kv / heads) * dim..][..dim];
                        q.iter().zip(k).map(|(a, b)| f64::from(a * b).abs()).sum()
                    };
                    let most = (first..=row).map(magnitude).fold(0.0, f64::max);
                    // Keys in the cache are rounded themselves, in both.
                    let step = 1.0 / 2048.0;
                    let allowed =
                        ((2.0 * 1.01 * most * scale * step).exp_m1() + step + 1e-5) * f64::from(exact.most_value);
                    for i in 0..dim {
                        let at = (row * heads + head) * dim + i;
                        let off = f64::from(exact.attention[at] - fast.attention[at]).abs();
                        assert!(
                            off <= allowed,
                            "{name}, {kernel}: row {row}, head {head}: {off} off, {allowed} allowed"
                        );
                        largest = largest.max(off / allowed);
                    }
                }
            }
            assert!(largest > 0.0, "{name}, {kernel}: tensor cores give other bits");
            println!("{name}, {kernel}: at most {largest:.3} of what is allowed");
            let device = CudaDevice::on(&baked.loaf, driver(), CudaOptions { fast: true, ..self::options() });
            let mut engine = Engine::on(&baked.loaf, Box::new(device.expect("room")));
            let mut sequence = engine.sequence().expect("a slot");
            let got = engine.eval(&mut sequence, &ids).expect("a prompt").to_vec();
            let square = |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
            let off = square(&mut want.iter().zip(&got).map(|(a, b)| a - b)) / square(&mut want.iter().copied());
            assert!(off < 2.0 * 4.0 / 127.0 / 6f64.sqrt(), "{name}, {kernel}: logits are {off} off");
            // Hopper's own leaves its result's int8 form, which is that of the result.
            let single = CudaOptions { fast: true, fused: false, ..self::options() };
            let device = CudaDevice::on(&baked.loaf, driver(), single).expect("room");
            let mut engine = Engine::on(&baked.loaf, Box::new(device));
            let mut sequence = engine.sequence().expect("a slot");
            let alone = engine.eval(&mut sequence, &ids).expect("a prompt").to_vec();
            assert_bits(&format!("{name}, {kernel}, record by record"), &[got], &[alone]);
        }
        if !has_card() {
            let fast = CudaOptions { fast: true, ..self::options() };
            for (own, kernel) in kernels.iter().enumerate() {
                let (driver, record) = if own == 0 { Emulated::new() } else { Emulated::hopper(HOPPER_PTX) };
                let device = CudaDevice::on(&baked.loaf, Box::new(driver), fast.clone()).expect("room");
                let mut engine = Engine::on(&baked.loaf, Box::new(device));
                let mut sequence = engine.sequence().expect("a slot");
                engine.eval(&mut sequence, &ids[..17]).expect("a prompt");
                let launched = launched(&record);
                let after = launched.iter().position(|l| l == kernel).map(|i| &launched[i + 1]);
                let next = after.unwrap_or_else(|| panic!("{name}: expected {kernel}, found {launched:?}"));
                let form = next.starts_with("quantize") || next == "few_codes";
                let left = kernel.starts_with("fast_hopper") && dim % 64 == 0;
                assert_eq!(form, !left, "{name}, {kernel}: then {next}");
            }
        }
    }
}

/// Whether blocks of this card have the shared memory that the rule in chunks takes; says so if
/// not.
fn takes_the_fast_rule() -> bool {
    let shared = driver().card().shared;
    let takes = rule_fits(shared - OWN_SHARED);
    if !takes {
        println!("blocks of {shared} bytes of shared memory take the exact rule");
    }
    takes
}

/// What a delta rule of prompts is of: lengths of runs, key heads, value heads, how they belong
/// together, and how gates, beta and keys are.
struct RuleCase {
    what: &'static str,
    runs: &'static [usize],
    heads: [usize; 2],
    tiled: bool,
    /// Logarithms of gates, drawn from by the row.
    gates: &'static [f32],
    beta: &'static [f32],
    /// How much of a key all keys share.
    common: f32,
}

/// Its operands: rows of `(heads, 128)`, and states of `(runs, value heads, 128, 128)`.
#[derive(Clone)]
struct RuleValues {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
    state: Vec<f32>,
}

const DIM: usize = 128;

impl RuleCase {
    fn values(&self) -> RuleValues {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut draw = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let (rows, [kh, vh]) = (self.runs.iter().sum::<usize>(), self.heads);
        let shared: Vec<f32> = (0..DIM).map(|_| draw()).collect();
        let mut unit = |common: f32, length: f32| -> Vec<f32> {
            let mut out = Vec::new();
            for _ in 0..rows * kh {
                let x: Vec<f32> = shared.iter().map(|s| common * s + (1.0 - common) * draw()).collect();
                let by = length / x.iter().map(|x| x * x).sum::<f32>().sqrt();
                out.extend(x.iter().map(|x| x * by));
            }
            out
        };
        let (q, k) = (unit(0.0, 128f32.sqrt().recip()), unit(self.common, 1.0));
        let mut many = |n: usize, by: f32| (0..n).map(|_| by * draw()).collect::<Vec<f32>>();
        let (v, state) = (many(rows * vh * DIM, 2.0), many(self.runs.len() * vh * DIM * DIM, 0.5));
        let (decay, beta) = (0..rows * vh)
            .map(|i| (self.gates[i * 7 / 3 % self.gates.len()].exp(), self.beta[i * 5 / 3 % self.beta.len()]))
            .unzip();
        RuleValues { q, k, v, decay, beta, state }
    }

    fn key_head(&self, head: usize) -> usize {
        let [kh, vh] = self.heads;
        if self.tiled { head % kh } else { head / (vh / kh) }
    }
}

/// The rule in f64, row by row: rows `(rows, value heads, 128)` and states.
fn rule_exactly(case: &RuleCase, x: &RuleValues) -> (Vec<f64>, Vec<f64>) {
    let [kh, vh] = case.heads;
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let (q, k, v, mut state) = (wide(&x.q), wide(&x.k), wide(&x.v), wide(&x.state));
    let mut out = vec![0.0; v.len()];
    let mut first = 0;
    for (run, rows) in case.runs.iter().enumerate() {
        for head in 0..vh {
            let s = &mut state[(run * vh + head) * DIM * DIM..][..DIM * DIM];
            for row in first..first + rows {
                let at = (row * kh + case.key_head(head)) * DIM;
                let (decay, beta) = (f64::from(x.decay[row * vh + head]), f64::from(x.beta[row * vh + head]));
                let out = &mut out[(row * vh + head) * DIM..][..DIM];
                let mut d = v[(row * vh + head) * DIM..][..DIM].to_vec();
                for (s, k) in s.chunks_exact_mut(DIM).zip(&k[at..]) {
                    s.iter_mut().zip(&mut d).for_each(|(s, d)| {
                        *s *= decay;
                        *d -= *s * k;
                    });
                }
                for ((s, k), q) in s.chunks_exact_mut(DIM).zip(&k[at..]).zip(&q[at..]) {
                    s.iter_mut().zip(&d).for_each(|(s, d)| *s += k * beta * d);
                    s.iter().zip(&mut *out).for_each(|(s, out)| *out += s * q);
                }
            }
        }
        first += rows;
    }
    (out, state)
}

/// Rows by columns.
#[derive(Clone)]
struct Matrix {
    columns: usize,
    of: Vec<f64>,
}

impl Matrix {
    fn new(rows: usize, columns: usize, of: impl Fn(usize, usize) -> f64) -> Matrix {
        Matrix { columns, of: (0..rows * columns).map(|i| of(i / columns, i % columns)).collect() }
    }

    fn rows(&self) -> usize {
        self.of.len() / self.columns
    }

    fn turned(&self) -> Matrix {
        Matrix::new(self.columns, self.rows(), |i, j| self.of[j * self.columns + i])
    }

    fn by(&self, other: &Matrix) -> Matrix {
        let mut out = Matrix::new(self.rows(), other.columns, |_, _| 0.0);
        for (to, row) in out.of.chunks_exact_mut(other.columns).zip(self.of.chunks_exact(self.columns)) {
            for (x, other) in row.iter().zip(other.of.chunks_exact(other.columns)).filter(|(x, _)| **x != 0.0) {
                to.iter_mut().zip(other).for_each(|(to, y)| *to += x * y);
            }
        }
        out
    }

    fn map(&self, of: impl Fn(usize, usize, f64) -> f64) -> Matrix {
        Matrix::new(self.rows(), self.columns, |i, j| of(i, j, self.of[i * self.columns + j]))
    }

    fn plus(&self, other: &Matrix) -> Matrix {
        self.map(|i, j, x| x + other.at(i, j))
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        self.of[i * self.columns + j]
    }

    /// Element by element.
    fn times(&self, other: &Matrix) -> Matrix {
        self.map(|i, j, x| x * other.at(i, j))
    }

    fn scaled(&self, by: f64) -> Matrix {
        self.map(|_, _, x| by * x)
    }

    fn abs(&self) -> Matrix {
        self.map(|_, _, x| x.abs())
    }

    /// What rounding so much to F16 is off by at most.
    fn rounding(&self) -> Matrix {
        self.map(|_, _, x| x.abs() / 2048.0 + (0.5f64).powi(25))
    }
}

/// A chunk of a head as the fast rule computes it, in f64: matrices of its rows, what the state is
/// before it, powers of sums of gates, and what rows write.
struct RuleChunk {
    /// The first row, the head, and the run.
    at: [usize; 3],
    k: Matrix,
    q: Matrix,
    v: Matrix,
    state: Matrix,
    beta: Vec<f64>,
    /// From the chunk's begin to each row, from each row to the chunk's end, from column to row.
    since: Vec<f64>,
    until: Vec<f64>,
    between: Matrix,
    inverse: Matrix,
    weights: Matrix,
    r: Matrix,
    d: Matrix,
}

impl RuleChunk {
    /// All chunks, heads one after the other.
    fn all(case: &RuleCase, x: &RuleValues) -> Vec<RuleChunk> {
        let [kh, vh] = case.heads;
        let (mut out, mut first) = (Vec::new(), 0);
        for (run, rows) in case.runs.iter().enumerate() {
            for head in 0..vh {
                let from = &x.state[(run * vh + head) * DIM * DIM..][..DIM * DIM];
                let mut state = Matrix::new(DIM, DIM, |i, j| f64::from(from[i * DIM + j]));
                for start in (0..*rows).step_by(64) {
                    let (n, at) = ((rows - start).min(64), first + start);
                    let of_key = |of: &[f32]| {
                        Matrix::new(n, DIM, |i, j| f64::from(of[((at + i) * kh + case.key_head(head)) * DIM + j]))
                    };
                    let (k, q) = (of_key(&x.k), of_key(&x.q));
                    let v = Matrix::new(n, DIM, |i, j| f64::from(x.v[((at + i) * vh + head) * DIM + j]));
                    let gate = |i: usize| f64::from(x.decay[(at + i) * vh + head]);
                    let beta: Vec<f64> = (0..n).map(|i| f64::from(x.beta[(at + i) * vh + head])).collect();
                    let product = |j: usize, i: usize| (j + 1..=i).map(gate).product::<f64>();
                    let between = Matrix::new(n, n, |i, j| if j <= i { product(j, i) } else { 0.0 });
                    let since: Vec<f64> = (0..n).map(|i| gate(0) * product(0, i)).collect();
                    let until: Vec<f64> = (0..n).map(|i| product(i, n - 1)).collect();
                    let weights = q.by(&k.turned()).times(&between);
                    let a = k.by(&k.turned()).times(&between);
                    let r = k.by(&state).map(|i, j, x| beta[i] * (v.at(i, j) - since[i] * x));
                    let mut inverse = Matrix::new(n, n, |i, j| f64::from(u8::from(i == j)));
                    for i in 0..n {
                        for j in 0..i {
                            let by = beta[i] * a.at(i, j);
                            (0..=j).for_each(|c| inverse.of[i * n + c] -= by * inverse.of[j * n + c]);
                        }
                    }
                    let d = inverse.by(&r);
                    let after = k.turned().by(&d.map(|i, _, x| until[i] * x));
                    let after = state.map(|_, _, x| since[n - 1] * x).plus(&after);
                    let at = [at, head, run];
                    out.push(RuleChunk { at, k, q, v, state, beta, since, until, between, inverse, weights, r, d });
                    state = after;
                }
            }
            first += rows;
        }
        out
    }

    fn rows(&self) -> usize {
        self.k.rows()
    }

    /// The places of a row's results.
    fn results(&self, case: &RuleCase, i: usize) -> std::ops::Range<usize> {
        let first = ((self.at[0] + i) * case.heads[1] + self.at[1]) * DIM;
        first..first + DIM
    }
}

/// What the rule in chunks may be off by: each result, and the length of each column of the state.
///
/// The rule's step is linear in the state, and makes no state larger: keys are no longer than one,
/// beta and gates are between zero and one. So what the state is off by at a chunk's begin is
/// scaled by the chunk's gates, adds to row `i` no more than its length times that of the query and
/// the gates up to `i`, and each chunk adds what it rounds itself. That is, each by its magnitudes:
/// keys, queries, the state, R, T, P and d by 2^-11 as F16 (or 2^-25, below its smallest normal
/// number). T is the inverse of 1 + A, so where A is off by D, it is off by T D T, and again by
/// what that is off by. All other arithmetic is f32 with sums of 128 at most: 2^-16 of the
/// magnitudes.
fn rule_allowed(case: &RuleCase, chunks: &[RuleChunk]) -> (Vec<f64>, Vec<f64>) {
    let f32s = (0.5f64).powi(16);
    let mut results = vec![0.0; case.runs.iter().sum::<usize>() * case.heads[1] * DIM];
    let mut state_off = vec![0.0; case.runs.len() * case.heads[1] * DIM];
    for c in chunks {
        let (n, first) = (c.rows(), (c.at[2] * case.heads[1] + c.at[1]) * DIM);
        let off = &mut state_off[first..first + DIM];
        let (k, q, t) = (c.k.abs(), c.q.abs(), c.inverse.abs());
        let (r, d, weights) = (c.r.abs(), c.d.abs(), c.weights.abs());
        let state = c.state.abs().map(|_, j, x| x + off[j]);
        // A product of two that are rounded before it.
        let product = |a: &Matrix, b: &Matrix| {
            let rounded = a.rounding().by(b).plus(&a.plus(&a.rounding()).by(&b.rounding()));
            rounded.plus(&a.by(b).scaled(f32s))
        };
        let with_keys = |a: &Matrix| product(a, &k.turned()).times(&c.between);
        let r_off = product(&k, &state).map(|i, j, x| {
            let v = c.v.at(i, j).abs();
            c.beta[i] * (c.since[i] * x + f32s * v) + f32s * r.at(i, j)
        });
        let r_off = r_off.plus(&r.plus(&r_off).rounding());
        let again = t.by(&with_keys(&k).map(|i, j, x| if j < i { c.beta[i] * x } else { 0.0 }));
        let mut t_off = Matrix::new(n, n, |_, _| 0.0);
        for i in 0..n {
            for j in 0..i {
                let by = again.at(i, j);
                (0..=j).for_each(|c| t_off.of[i * n + c] += by * (t.at(j, c) + t_off.at(j, c)));
            }
        }
        let t_off = t_off.plus(&t.plus(&t_off).rounding().map(|i, j, x| if j <= i { x } else { 0.0 }));
        let d_off = t_off.by(&r.plus(&r_off)).plus(&t.by(&r_off)).plus(&t.by(&r).scaled(f32s));
        let weights_off = with_keys(&q);
        let weights_off = weights_off
            .plus(&weights.plus(&weights_off).rounding().times(&c.between.map(|_, _, x| f64::from(u8::from(x > 0.0)))));
        let operand_off = d_off.plus(&d.plus(&d_off).rounding());
        let late = d.plus(&d_off).map(|i, _, x| c.until[i] * x);
        let late_off = d_off.map(|i, _, x| c.until[i] * x).plus(&late.rounding()).plus(&late.scaled(f32s));
        let out = product(&q, &state).map(|i, _, x| c.since[i] * x);
        let out = out.plus(&weights_off.by(&d.plus(&operand_off))).plus(&weights.by(&operand_off));
        let out = out.plus(&weights.by(&d).scaled(f32s));
        for i in 0..n {
            let length = c.since[i] * (0..DIM).map(|j| q.at(i, j).powi(2)).sum::<f64>().sqrt();
            for (j, to) in c.results(case, i).enumerate() {
                results[to] = out.at(i, j) + 1.001 * length * off[j];
            }
        }
        let k = k.turned();
        let own = k.rounding().by(&late.plus(&late_off)).plus(&k.by(&late_off)).plus(&k.by(&late).scaled(f32s));
        let own = own.plus(&state.scaled(f32s * c.since[n - 1]));
        for (j, off) in off.iter_mut().enumerate() {
            *off = 1.001 * c.since[n - 1] * *off + (0..DIM).map(|i| own.at(i, j).powi(2)).sum::<f64>().sqrt();
        }
    }
    (results, state_off)
}

/// What the rule in chunks is off by in the mean square if its roundings have nothing to do with
/// each other: the same with squares, which add up, a rounding being a third of the square of 2^-11
/// at most, and queries having nothing to do with what the state is off by.
fn rule_expected(case: &RuleCase, chunks: &[RuleChunk]) -> [f64; 2] {
    let mut results = 0.0;
    let mut state_off = vec![0.0; case.runs.len() * case.heads[1] * DIM];
    for c in chunks {
        let (n, first) = (c.rows(), (c.at[2] * case.heads[1] + c.at[1]) * DIM);
        let off = &mut state_off[first..first + DIM];
        let square = |m: &Matrix| m.times(m);
        let [k, q, state, t, r, d, weights, between] =
            [&c.k, &c.q, &c.state, &c.inverse, &c.r, &c.d, &c.weights, &c.between].map(square);
        let rounding = |m: &Matrix| m.scaled((0.5f64).powi(22) / 3.0);
        let product = |a: &Matrix, b: &Matrix| rounding(a).by(b).plus(&a.by(&rounding(b)));
        let by_rows = |m: &Matrix, of: &[f64]| m.map(|i, _, x| of[i] * of[i] * x);
        let r_off = by_rows(&by_rows(&product(&k, &state), &c.since), &c.beta).plus(&rounding(&r));
        let a_off = by_rows(&product(&k, &k.turned()).times(&between), &c.beta);
        let a_off = a_off.map(|i, j, x| if j < i { x } else { 0.0 });
        let t_off = t.by(&a_off).by(&t).plus(&rounding(&t));
        let d_off = t_off.by(&r).plus(&t.by(&r_off));
        let weights_off = product(&q, &k.turned()).times(&between).plus(&rounding(&weights));
        let out = by_rows(&product(&q, &state), &c.since).plus(&weights_off.by(&d));
        let out = out.plus(&weights.by(&d_off.plus(&rounding(&d))));
        let lengths: f64 =
            (0..n).flat_map(|i| (0..DIM).map(move |j| (i, j))).map(|(i, j)| q.at(i, j) * c.since[i].powi(2)).sum();
        results += out.of.iter().sum::<f64>() + lengths * off.iter().sum::<f64>() / DIM as f64;
        let late = by_rows(&d_off.plus(&rounding(&d)), &c.until);
        let own = rounding(&k).turned().by(&by_rows(&d, &c.until)).plus(&k.turned().by(&late));
        for (j, off) in off.iter_mut().enumerate() {
            *off = c.since[n - 1].powi(2) * *off + (0..DIM).map(|i| own.at(i, j)).sum::<f64>();
        }
    }
    let rows = case.runs.iter().sum::<usize>() * case.heads[1];
    let mean = |sum: f64, n: usize| (sum / n as f64).sqrt();
    [mean(results, rows * DIM), mean(state_off.iter().sum(), state_off.len() * DIM)]
}

/// Rows and states as the kernels leave them. Rows of operands lie apart, as they do in steps.
fn rule_by_tensor_cores(case: &RuleCase, x: &RuleValues) -> (Vec<f32>, Vec<f32>) {
    let ([kh, vh], rows) = (case.heads, case.runs.iter().sum::<usize>());
    let mut driver = driver();
    driver.enter().expect("a card");
    let cubin = include_bytes!("../../runtime/src/backend/cuda/kernels/loaf.sm_90a.cubin");
    let own: &[u8] = if driver.card().capability == (9, 0) { cubin } else { PTX.as_bytes() };
    let image = options().image.unwrap_or_else(|| own.to_vec());
    let functions = driver.load(&image, &["fast_rule_chunks", "fast_rule"]).expect("compiled kernels");
    for function in &functions {
        driver.allow_shared(*function, driver.card().shared - OWN_SHARED).expect("as much as there is");
    }
    let host = driver.pinned(4 * x.state.len().max(2 * rows * vh * DIM) + 4096).expect("memory");
    let mut put = |words: &[u32]| {
        let at = driver.allocate(4 * words.len() as u64).expect("memory");
        // SAFETY: pinned memory that is long enough for each of these; the copy is waited for.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), host.at.cast(), words.len()) };
        driver.copy_in(at, host, 0, 4 * words.len()).expect("a copy");
        driver.wait().expect("an end");
        at
    };
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let mut apart = |x: &[f32], heads: usize, dim: usize, more: usize| {
        let mut all = bits(x);
        all = all.chunks_exact(heads * dim).flat_map(|r| [r, &vec![u32::MAX; more]].concat()).collect();
        Operand { at: put(&all), row: (heads * dim + more) as u64, head: dim as u32, dtype: DType::F32 as u32 }
    };
    let mut operands = [Operand::default(); 12];
    operands[0] = apart(&x.q, kh, DIM, 8);
    operands[1] = apart(&x.k, kh, DIM, 4);
    operands[2] = apart(&x.v, vh, DIM, 12);
    operands[3] = apart(&x.decay, 1, vh, 1);
    operands[4] = apart(&x.beta, 1, vh, 3);
    operands[5] = apart(&x.state, vh * DIM, DIM, 0);
    (operands[5].row, operands[5].head) = ((DIM * DIM) as u64, DIM as u32);
    operands[6] = apart(&vec![f32::NAN; rows * vh * DIM], vh, DIM, 4);
    let (bytes, mut runs, mut first) = (4 * (vh * DIM * DIM) as u64, vec![], 0);
    // States stand where they were; as many more for what becomes of them.
    let after = apart(&vec![f32::NAN; x.state.len()], vh * DIM, DIM, 0).at;
    for (i, n) in case.runs.iter().enumerate() {
        let (from, to) = (i as u64 * bytes, after.wrapping_sub(operands[5].at).wrapping_add(i as u64 * bytes));
        runs.extend([first, *n as u32, 0, 0, 0, 0, from as u32, 0, to as u32, (to >> 32) as u32, 0, 0]);
        first += *n as u32;
    }
    let step = Step { head: put(&[case.runs.len() as u32, 0, 0, 0]), runs: put(&runs), rows: 0 };
    let attrs = [rows, kh, vh, DIM, DIM, usize::from(case.tiled), 0, 0, 0, 0, 0, 0].map(|n| n as u64);
    let room = rule_room(&gdn_scan::Attrs::of(&attrs), rows as u64, case.runs.len() as u32);
    let chunks = driver.allocate(room).expect("memory");
    let (runs, shared) = (case.runs.len() as u32, driver.card().shared - OWN_SHARED);
    let bases = Bases { fast: true, chunks, runs, shared, ..Bases::default() };
    let rule = Rule::of(&operands, &attrs, &bases, step).expect("what it takes");
    for (function, launch) in functions.iter().zip([rule.before().expect("chunks"), rule]) {
        driver.launch(*function, launch.shape, launch.parameter.bytes()).expect("a launch");
    }
    let mut get = |at: u64, n: usize| {
        driver.copy_out(host, 0, at, 4 * n).expect("a copy");
        driver.wait().expect("an end");
        // SAFETY: as above; the copy is done.
        unsafe { std::slice::from_raw_parts(host.at.cast::<f32>(), n).to_vec() }
    };
    let width = vh * DIM;
    let out = get(operands[6].at, rows * (width + 4));
    (out.chunks_exact(width + 4).flat_map(|r| r[..width].to_vec()).collect(), get(after, x.state.len()))
}

/// How far results and states are from a reference: at most, in units of what is allowed, and in
/// the mean square, in units of what is expected.
fn rule_off(
    got: &(Vec<f32>, Vec<f32>),
    want: &(Vec<f64>, Vec<f64>),
    (results, columns): &(Vec<f64>, Vec<f64>),
    expected: [f64; 2],
) -> [f64; 4] {
    let squares = |got: &[f32], want: &[f64]| -> Vec<f64> {
        got.iter().zip(want).map(|(got, want)| (f64::from(*got) - want).powi(2)).collect()
    };
    let off = [squares(&got.0, &want.0), squares(&got.1, &want.1)];
    let most =
        |all: &mut dyn Iterator<Item = f64>| all.fold(0.0, |m, x| if x.is_nan() { f64::INFINITY } else { x.max(m) });
    let column = |c: usize| off[1][c / DIM * DIM * DIM + c % DIM..].iter().step_by(DIM).take(DIM).sum::<f64>();
    let mean = |of: &[f64]| (of.iter().sum::<f64>() / of.len() as f64).sqrt();
    [
        most(&mut off[0].iter().zip(results).map(|(off, allowed)| off.sqrt() / allowed)),
        most(&mut columns.iter().enumerate().map(|(c, allowed)| column(c).sqrt() / allowed)),
        mean(&off[0]) / expected[0],
        mean(&off[1]) / expected[1],
    ]
}

/// What a canary changes of a case's values.
type Change<'a> = &'a dyn Fn(&mut RuleValues);

/// `--fast`: the delta rule of prompts in chunks by tensor cores, held to what it rounds
/// ([`rule_allowed`], [`rule_expected`]): one chunk, chunks that are not full, several of them and
/// several runs; as many value heads as key heads and more, in both orders; gates that keep nearly
/// all and gates that keep nothing; beta near zero and one; keys that are nearly the same. What
/// leaves anything of it out is further away than allowed.
#[test]
fn the_fast_rule_of_prompts_is_near_the_exact() {
    if !takes_the_fast_rule() {
        return;
    }
    let usual: &[f32] = &[-0.01, -0.2, -0.05, -1.5, -0.001, -0.4, -0.00001];
    let between: &[f32] = &[0.5, 0.9, 0.1, 0.7, 0.99];
    let cases = [
        RuleCase {
            what: "a chunk",
            runs: &[64],
            heads: [1, 1],
            tiled: false,
            gates: usual,
            beta: between,
            common: 0.3,
        },
        RuleCase { what: "tiled", runs: &[150], heads: [2, 4], tiled: true, gates: usual, beta: between, common: 0.3 },
        RuleCase {
            what: "runs",
            runs: &[65, 1, 129],
            heads: [1, 3],
            tiled: false,
            gates: usual,
            beta: between,
            common: 0.3,
        },
        RuleCase {
            what: "strong gates",
            runs: &[200],
            heads: [1, 2],
            tiled: false,
            gates: &[-40.0, -0.01, -0.0001, -200.0, -0.5, -0.1, -3.0, -90.0, -0.02, -0.03, -0.2, -0.004, -0.3],
            beta: &[1.0, 0.0, 0.999, 1e-6, 0.5, 1.0, 0.7],
            common: 0.3,
        },
        RuleCase {
            what: "nothing forgotten",
            runs: &[256],
            heads: [1, 1],
            tiled: false,
            gates: &[0.0, -1e-6, -1e-7],
            beta: &[1.0, 0.9, 0.99],
            common: 0.95,
        },
    ];
    for case in cases {
        let x = case.values();
        let (got, want, chunks) = (rule_by_tensor_cores(&case, &x), rule_exactly(&case, &x), RuleChunk::all(&case, &x));
        let (allowed, expected) = (rule_allowed(&case, &chunks), rule_expected(&case, &chunks));
        let off = rule_off(&got, &want, &allowed, expected);
        println!("{}: of what is allowed, and of what is expected: {off:.3?}", case.what);
        assert!(off.iter().all(|off| *off > 0.0 && *off <= 1.0), "{}: {off:?}", case.what);
        let faults: [(&str, Change); 5] = [
            ("the first row's gate", &|y| y.decay[..case.heads[1]].fill(0.5)),
            ("gates", &|y| y.decay.fill(0.999)),
            ("beta", &|y| y.beta.fill(0.8)),
            ("the state", &|y| y.state.fill(0.0)),
            ("the last row's values", &|y| {
                let row = y.v.len() - case.heads[1] * DIM;
                y.v[row..].fill(0.0);
            }),
        ];
        for (fault, change) in faults {
            let mut y = x.clone();
            change(&mut y);
            let off = rule_off(&got, &rule_exactly(&case, &y), &allowed, expected);
            println!("  without {fault}: {off:.3?}");
            assert!(off.iter().any(|off| *off > 1.0), "{}: without {fault} {off:?}", case.what);
        }
    }
}

/// Prompts, a further prompt that begins from what chunks have left, and tokens after it, with
/// `--fast`: near what is exact, and by the kernels that are meant. Few rows and other heads go by
/// the exact rule. Logits come after eight int8 forms at most, each of which may go another way, as
/// in attention's test.
#[test]
fn prompts_by_the_fast_rule_are_near_the_exact() {
    if !takes_the_fast_rule() {
        return;
    }
    let options = BuildOptions { quant: four_bits(64), chunks: vec![256], ..BuildOptions::default() };
    let baked = random("configs/qwen3_coder_next", &small_hybrid(64, [128, 128]), &options);
    let ids = text(512, 260);
    let fast = CudaOptions { fast: true, ..self::options() };
    let [mut exact, mut near] = [self::options(), fast.clone()].map(|o| cuda(&baked.loaf, o));
    let square = |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    for (i, part) in [&ids[..150], &ids[150..255], &ids[255..256], &ids[256..257]].into_iter().enumerate() {
        let [want, got] = [&mut exact, &mut near].map(|s| s.eval(part).expect("a prompt").to_vec());
        let off = square(&mut want.iter().zip(&got).map(|(a, b)| a - b)) / square(&mut want.iter().copied());
        println!("part {i}: logits are {off:.4} off");
        assert!(off > 0.0 && off < 8f64.sqrt() * 4.0 / 127.0 / 6f64.sqrt(), "part {i}: logits are {off} off");
    }
    if has_card() {
        return;
    }
    let kernels = |baked: &Baked, n: usize, options: CudaOptions| {
        let (mut engine, record) = recorded(&baked.loaf, options).expect("room");
        let mut sequence = engine.sequence().expect("a slot");
        engine.eval(&mut sequence, &ids[..n]).expect("a prompt");
        let names = launched(&record);
        names.into_iter().filter(|n| n.starts_with("fast_rule") || n.starts_with("gdn_scan")).collect::<Vec<_>>()
    };
    assert_eq!(kernels(&baked, 64, fast.clone()), ["fast_rule_chunks", "fast_rule"]);
    assert_eq!(kernels(&baked, 63, fast.clone()), ["gdn_scan_128"]);
    assert_eq!(kernels(&baked, 64, self::options()), ["gdn_scan_128"]);
    let options = BuildOptions { quant: QuantOptions::default(), ..options };
    let other = random("configs/qwen3_coder_next", &small_hybrid(64, [128, 64]), &options);
    assert_eq!(kernels(&other, 64, fast), ["gdn_scan_128"]);
}

/// Names of the kernels that were launched.
fn launched(record: &Arc<Mutex<Record>>) -> Vec<String> {
    let record = record.lock().expect("one thread");
    let launches = record.work.iter().filter_map(|w| match w {
        Work::Launch(kernel, ..) => Some(record.names[*kernel].clone()),
        _ => None,
    });
    launches.collect()
}

/// Names of the kernels that two tokens launch, whose logits are the CPU's. Interpreted, a token
/// takes long, so no other way is tried; the second finds states that the first has left.
fn launched_for_two_tokens(what: &str, model: &Model) -> Vec<String> {
    let ids = text(512, 2);
    let want = decode_logits(&mut session(model, Kernels::detect(), 1), &ids);
    let (mut engine, record) = recorded(model, options()).expect("room");
    let mut sequence = engine.sequence().expect("a slot");
    for (id, want) in ids.iter().zip(&want) {
        let got = engine.decode_one(&mut sequence, *id).expect("one token").to_vec();
        assert_bits(what, &[got], std::slice::from_ref(want));
    }
    launched(&record)
}

/// The short kernels of one row: whole lots of 1,024 inputs, groups of 64, heads of 64 and 128.
#[test]
fn short_kernels_have_the_bits_of_the_cpu() {
    let options = BuildOptions { quant: four_bits(64), ..BuildOptions::default() };
    // The interpreted card has few multiprocessors, so that the second has more blocks of attention
    // than those.
    let cases: [(u64, u64, [u64; 3], &[&str]); 2] = [
        (1024, 3072, [8, 2, 128], &["row_norm_1", "row_pairs_1", "row_plain_1", "row_plain_3", "attention_row_128"]),
        (2048, 1024, [32, 4, 64], &["row_norm_2", "row_pairs_2", "row_plain_2", "row_plain_1", "attention_late_64"]),
    ];
    for (hidden, intermediate, heads, kernels) in cases {
        let baked = one_layer(hidden, intermediate, heads, &options);
        if has_card() {
            check(&format!("{hidden}"), &baked.loaf, &text(512, 4));
            continue;
        }
        let launched = launched_for_two_tokens(&format!("{hidden}"), &baked.loaf);
        let head = if hidden == 1024 { "row_head_1" } else { "row_head_2" };
        for kernel in kernels.iter().chain(&[head]) {
            assert!(launched.contains(&(*kernel).to_owned()), "{hidden}: expected {kernel}, found {launched:?}");
        }
    }
}

/// A model of a GGUF file with random codes.
fn gguf_model(kind: &str, sizes: gguf_models::Sizes) -> Baked {
    let source = tempfile::tempdir().expect("a temporary folder");
    let path = source.path().join("model.gguf");
    std::fs::write(&path, gguf_models::sized("qwen3", kind, sizes).bytes()).expect("a file");
    bake_dir(&path, &BuildOptions { context: Some(64), ..BuildOptions::default() })
}

/// The short kernels of one row with weights in blocks: every format that they know, every size,
/// pairs, residual sums, a head that goes over the vocabulary several times.
#[test]
fn short_kernels_of_blocks_have_the_bits_of_the_cpu() {
    // The interpreted card has twelve blocks of such a product at a time.
    let sizes = |hidden, inner, vocab| gguf_models::Sizes { hidden, inner, vocab, blocks: 1, heads: 16 };
    let cases = [
        ("Q4_K", sizes(1024, 3072, 512), ["blocks_norm_1", "blocks_plain_1", "blocks_plain_3"]),
        ("Q6_K", sizes(2048, 1024, 512), ["blocks_norm_2", "blocks_plain_1", "blocks_plain_1"]),
        ("Q8_0", sizes(1024, 2048, 512), ["blocks_norm_1", "blocks_plain_1", "blocks_plain_2"]),
        ("Q4_0", sizes(1024, 4096, 512), ["blocks_norm_1", "blocks_plain_1", "blocks_plain_4"]),
        ("Q5_K", sizes(2048, 2048, 512), ["blocks_norm_2", "blocks_plain_1", "blocks_plain_2"]),
        ("Q6_K", sizes(1024, 4096, 512), ["blocks_norm_1", "blocks_plain_1", "blocks_plain_4"]),
        ("Q4_K", sizes(2048, 1024, 512), ["blocks_norm_2", "blocks_plain_1", "blocks_plain_1"]),
        ("Q8_0", sizes(2048, 3072, 512), ["blocks_norm_2", "blocks_plain_1", "blocks_plain_3"]),
    ];
    for (kind, sizes, kernels) in cases {
        let what = format!("{kind}, {} and {}", sizes.hidden, sizes.inner);
        let baked = gguf_model(kind, sizes);
        if has_card() {
            check(&what, &baked.loaf, &text(512, 4));
            continue;
        }
        let launched = launched_for_two_tokens(&what, &baked.loaf);
        for kernel in kernels {
            assert!(launched.contains(&kernel.to_owned()), "{what}: expected {kernel}, found {launched:?}");
        }
        let general: Vec<_> = launched.iter().filter(|k| k.starts_with("linear_")).collect();
        assert!(general.is_empty(), "{what}: {general:?}");
    }
}

/// What a token of a mix of formats launches: five kernels a layer, values in a format of their own
/// beside queries and keys; six where the sizes are not those of short kernels.
#[test]
fn a_mix_of_blocks_takes_five_launches_a_layer() {
    if has_card() {
        return;
    }
    let layer = |hidden, inner| {
        let sizes = gguf_models::Sizes { hidden, inner, vocab: 512, blocks: 2, heads: 16 };
        // The second token is the graph of the first.
        launched_for_two_tokens(&format!("{hidden}"), &gguf_model("Q4_K_M", sizes).loaf)
    };
    let short = ["blocks_norm_1", "attention_late_64", "blocks_plain_1", "blocks_norm_1", "blocks_plain_3"];
    let expected: Vec<&str> = ["begin"].into_iter().chain(short).chain(short).chain(["blocks_norm_1"]).collect();
    assert_eq!(layer(1024, 3072), expected);
    let general = [
        "linear_q4_k_1x4",
        "linear_q6_k_1x4",
        "attention_late_64",
        "blocks_plain_1",
        "linear_q4_k_1x4",
        "linear_q6_k_1x4",
    ];
    let expected: Vec<&str> = ["begin"].into_iter().chain(general).chain(general).chain(["linear_q6_k_1x4"]).collect();
    assert_eq!(layer(512, 768), expected);
}

/// The short attention over several blocks: merged by one thread block, and by whichever comes
/// last.
#[test]
fn short_attention_has_the_bits_of_the_cpu_over_many_blocks() {
    let options = BuildOptions { quant: four_bits(64), ..BuildOptions::default() };
    // The second half of a block's values comes later than its keys, so the first position of it,
    // too.
    for (dim, n, last) in [(128, 127, 2), (64, 255, 2), (128, 257, 2), (64, 515, 2)] {
        let baked = one_layer(64, 64, [2, 1, dim], &options);
        let ids = text(512, n + last);
        follows_a_prompt(&format!("{dim}"), &baked.loaf, &ids, n);
    }
}

/// Tokens after a prompt of `n` that the CPU has computed.
fn follows_a_prompt(what: &str, model: &Model, ids: &[u32], n: usize) {
    let mut cpu = loaf_tests::engine(model, Kernels::detect(), 2, 1);
    let mut sequence = cpu.sequence().expect("a slot");
    cpu.eval(&mut sequence, &ids[..n]).expect("a prompt");
    let snapshot = cpu.snapshot(&sequence).expect("memory");
    let mut engine = engine(model, self::options());
    let mut other = engine.restore(&snapshot).expect("a slot");
    for id in &ids[n..] {
        let want = cpu.decode_one(&mut sequence, *id).expect("one token").to_vec();
        let got = engine.decode_one(&mut other, *id).expect("one token").to_vec();
        assert_bits(what, &[got], &[want]);
    }
}

/// Heads of 256 elements of which a quarter is rotated, over blocks that are merged, two heads of a
/// block and one.
#[test]
fn short_attention_of_wide_heads_has_the_bits_of_the_cpu() {
    let numbers = [
        ("hidden_size", 64),
        ("num_hidden_layers", 1),
        ("full_attention_interval", 1),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("head_dim", 256),
        ("num_experts", 4),
        ("num_experts_per_tok", 2),
        ("moe_intermediate_size", 64),
        ("shared_expert_intermediate_size", 64),
        ("vocab_size", 512),
        ("max_position_embeddings", 600),
    ];
    let options = BuildOptions { quant: four_bits(64), ..BuildOptions::default() };
    let baked = random("configs/qwen3_coder_next", &numbers, &options);
    for (n, last) in [(127, 2), (255, 2), (515, 2)] {
        follows_a_prompt("256", &baked.loaf, &text(512, n + last), n);
    }
}

/// Steps of several rows by the kernels that read weights once for all of them: rows of several
/// sequences, then rows of one.
#[test]
fn few_rows_together_have_the_bits_of_rows_alone() {
    let options = BuildOptions { quant: four_bits(64), ..BuildOptions::default() };
    let cases: [(u64, u64, [u64; 3], &[&str]); 2] = [
        (
            1024,
            3072,
            [8, 2, 128],
            &["few_codes", "few_norm_1", "few_wide_1", "few_pairs_1", "few_plain_3", "few_head_1", "few_heads_128"],
        ),
        (
            2048,
            1024,
            [32, 4, 64],
            &["few_norm_2", "few_wide_2", "few_pairs_2", "few_plain_2", "few_plain_1", "few_heads_64"],
        ),
    ];
    for (hidden, intermediate, heads, kernels) in cases.into_iter().take(if has_card() { 2 } else { 1 }) {
        let baked = one_layer(hidden, intermediate, heads, &options);
        let what = format!("{hidden}");
        let ids = text(512, 16);
        let want = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 2), &ids[..3]);
        // Each row alone, at the start.
        let alone: Vec<Vec<f32>> =
            ids.iter().flat_map(|id| decode_logits(&mut session(&baked.loaf, Kernels::detect(), 2), &[*id])).collect();
        // On a card every number of rows there is.
        for rows in if has_card() { 2..=16 } else { 10..=10 } {
            let (slots, same) = (rows as u32, usize::min(rows, 3));
            let (mut engine, record) = if has_card() {
                (engine(&baked.loaf, CudaOptions { slots, ..self::options() }), Arc::default())
            } else {
                recorded(&baked.loaf, CudaOptions { slots, ..self::options() }).expect("room")
            };
            let mut all: Vec<Sequence> = (0..rows).map(|_| engine.sequence().expect("a slot")).collect();
            let mut parts: Vec<(&mut Sequence, u32)> = all.iter_mut().zip(ids.iter().copied()).collect();
            engine.decode(&mut parts).expect("a step that fits");
            let got: Vec<Vec<f32>> = (0..rows).map(|row| engine.logits(row).to_vec()).collect();
            assert_bits(&what, &got, &alone[..rows]);
            if !has_card() {
                let launched = launched(&record);
                for kernel in kernels {
                    assert!(
                        launched.contains(&(*kernel).to_owned()),
                        "{hidden}: expected {kernel}, found {launched:?}"
                    );
                }
            }
            drop(all.pop());
            engine.rewind(&mut all[0], 0).expect("the start");
            engine.extend(&mut all[0], &ids[..same]).expect("a step that fits");
            for (i, want) in want.iter().enumerate().take(same) {
                assert_bits(
                    &format!("{what}, row {i} of one"),
                    &[engine.logits(i).to_vec()],
                    std::slice::from_ref(want),
                );
            }
        }
    }
}

/// Attention of rows together, each at a position of its own, and of rows of one sequence over the
/// end of a block.
#[test]
fn attention_of_rows_together_has_the_bits_of_rows_alone() {
    let options = BuildOptions { quant: four_bits(64), ..BuildOptions::default() };
    for (dim, lengths) in [(128, [20, 127, 300]), (64, [128, 515, 1])] {
        let baked = one_layer(64, 64, [2, 1, dim], &options);
        let ids = text(512, 530);
        let mut cpu = loaf_tests::engine(&baked.loaf, Kernels::detect(), 2, 2);
        let mut engine = engine(&baked.loaf, CudaOptions { slots: 3, ..self::options() });
        let (mut want, mut all) = (Vec::new(), Vec::new());
        for n in lengths {
            let mut sequence = cpu.sequence().expect("a slot");
            cpu.eval(&mut sequence, &ids[..n]).expect("a prompt");
            all.push(engine.restore(&cpu.snapshot(&sequence).expect("memory")).expect("a slot"));
            want.push(cpu.decode_one(&mut sequence, ids[n]).expect("one token").to_vec());
        }
        let mut rows: Vec<(&mut Sequence, u32)> = all.iter_mut().zip(lengths).map(|(s, n)| (s, ids[n])).collect();
        engine.decode(&mut rows).expect("a step that fits");
        let got: Vec<_> = (0..3).map(|i| engine.logits(i).to_vec()).collect();
        assert_bits(&format!("{dim}, together"), &got, &want);
        drop(all);
        let mut sequence = cpu.sequence().expect("a slot");
        cpu.eval(&mut sequence, &ids[..254]).expect("a prompt");
        let mut other = engine.restore(&cpu.snapshot(&sequence).expect("memory")).expect("a slot");
        let want: Vec<_> =
            ids[254..258].iter().map(|id| cpu.decode_one(&mut sequence, *id).expect("one token").to_vec()).collect();
        engine.extend(&mut other, &ids[254..258]).expect("a step that fits");
        let got: Vec<_> = (0..4).map(|i| engine.logits(i).to_vec()).collect();
        assert_bits(&format!("{dim}, of one sequence"), &got, &want);
    }
}

/// More than two blocks of attention, so that blocks are put aside and merged.
#[test]
fn long_texts_have_the_bits_of_the_cpu() {
    let baked = bake("stories260k", &BuildOptions { quant: four_bits(64), ..BuildOptions::default() });
    let (n, last) = if has_card() { (510, 130) } else { (257, 2) };
    let ids = text(500, n);
    let mut cpu = session(&baked.loaf, Kernels::detect(), 2);
    let mut want = vec![cpu.eval(&ids[..n - last]).expect("a prompt").to_vec()];
    want.extend(decode_logits(&mut cpu, &ids[n - last..]));
    for options in ways().into_iter().skip(if has_card() { 0 } else { 3 }) {
        let mut cuda = cuda(&baked.loaf, options.clone());
        if !has_card() {
            // A prompt of that length takes the interpreter too long: the CPU's state goes over.
            let mut cpu = loaf_tests::engine(&baked.loaf, Kernels::detect(), 2, 1);
            let mut sequence = cpu.sequence().expect("a slot");
            cpu.eval(&mut sequence, &ids[..n - last]).expect("a prompt");
            let snapshot = cpu.snapshot(&sequence).expect("memory");
            let Session { engine, sequence } = cuda;
            drop(sequence);
            let mut engine = engine;
            let sequence = engine.restore(&snapshot).expect("a slot");
            cuda = Session { engine, sequence };
        } else {
            let got = cuda.eval(&ids[..n - last]).expect("a prompt").to_vec();
            assert_bits("a long prompt", &[got], &want[..1]);
        }
        let got = decode_logits(&mut cuda, &ids[n - last..]);
        assert_bits("after a long prompt", &got, &want[1..]);
    }
}

#[test]
fn rows_together_and_rows_taken_back_have_the_bits_of_rows_alone() {
    for name in ["hf/qwen3", "hf/qwen3_next"] {
        let baked = bake(name, &BuildOptions::default());
        let ids = Expected::read(name).ids;
        let want = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 1), &ids[..10]);
        let mut engine = engine(&baked.loaf, CudaOptions { slots: 3, ..options() });
        let mut all: Vec<Sequence> = (0..3).map(|_| engine.sequence().expect("a slot")).collect();
        // Prompts of three lengths in one step, then a token each, then some tokens of one of them.
        let mut parts: Vec<(&mut Sequence, &[u32])> =
            all.iter_mut().enumerate().map(|(i, s)| (s, &ids[..2 + i])).collect();
        engine.prefill(&mut parts).expect("a step that fits");
        let mut rows: Vec<(&mut Sequence, u32)> = all.iter_mut().enumerate().map(|(i, s)| (s, ids[2 + i])).collect();
        engine.decode(&mut rows).expect("a step that fits");
        for i in 0..3 {
            assert_bits(name, &[engine.logits(i).to_vec()], &want[2 + i..3 + i]);
        }
        let mut wrong = ids[3..7].to_vec();
        wrong[2] = (wrong[2] + 1) % baked.loaf.plan().vocab;
        engine.extend(&mut all[0], &wrong).expect("a step that fits");
        assert_bits(name, &[engine.logits(0).to_vec(), engine.logits(1).to_vec()], &want[3..5]);
        engine.rewind(&mut all[0], 5).expect("the state after each row was kept");
        let got = engine.decode_one(&mut all[0], ids[5]).expect("one token").to_vec();
        assert_bits(name, &[got], &want[5..6]);
        let mut fork = {
            drop(all.pop());
            engine.fork(&all[0]).expect("a slot")
        };
        let got = engine.decode_one(&mut fork, ids[6]).expect("one token").to_vec();
        assert_bits(name, &[got], &want[6..7]);
    }
}

#[test]
fn snapshots_go_from_the_card_to_the_cpu_and_back() {
    let name = "hf/qwen3_5";
    let baked = bake(name, &BuildOptions::default());
    let ids = Expected::read(name).ids;
    let want = decode_logits(&mut session(&baked.loaf, Kernels::detect(), 1), &ids[..8]);
    let mut card = engine(&baked.loaf, options());
    let mut cpu = loaf_tests::engine(&baked.loaf, Kernels::detect(), 1, 1);
    let mut first = card.sequence().expect("a slot");
    card.eval(&mut first, &ids[..5]).expect("a prompt");
    let snapshot = card.snapshot(&first).expect("memory");
    let mut second = cpu.restore(&snapshot).expect("a slot");
    let got = cpu.decode_one(&mut second, ids[5]).expect("one token").to_vec();
    assert_bits("on the CPU", &[got], &want[5..6]);
    let snapshot = cpu.snapshot(&second).expect("memory");
    drop(first);
    let mut third = card.restore(&snapshot).expect("a slot");
    let got = card.decode_one(&mut third, ids[6]).expect("one token").to_vec();
    assert_bits("on the card", &[got], &want[6..7]);
}

/// An interpreted card with a model on it, and what it was asked.
fn recorded(model: &Model, options: CudaOptions) -> Result<(Engine, Arc<Mutex<Record>>), DeviceError> {
    let (driver, record) = Emulated::new();
    let device = CudaDevice::on(model, Box::new(driver), options)?;
    Ok((Engine::on(model, Box::new(device)), record))
}

#[test]
fn a_token_is_one_launch_and_one_wait() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let (mut engine, record) = recorded(&baked.loaf, options()).expect("room");
    let mut sequence = engine.sequence().expect("a slot");
    engine.decode_one(&mut sequence, 1).expect("one token");
    record.lock().expect("one thread").calls.clear();
    for id in 2..5 {
        engine.decode_one(&mut sequence, id).expect("one token");
    }
    let calls = record.lock().expect("one thread").calls.clone();
    assert_eq!((calls.get("replay"), calls.get("wait")), (Some(&3), Some(&3)));
    let others: Vec<_> = calls.keys().filter(|c| !matches!(**c, "replay" | "wait" | "wait_for")).collect();
    assert!(others.is_empty(), "{others:?}");
}

/// The best token of each row, for any number of known tokens: one launch and one wait, and no
/// logits are copied.
#[test]
fn best_tokens_of_rows_are_those_of_their_logits() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let vocab = baked.loaf.plan().vocab;
    let options = CudaOptions { slots: 3, ..options() };
    let mut by_logits = self::engine(&baked.loaf, options.clone());
    let (mut engine, record) = recorded(&baked.loaf, options).expect("room");
    let mut all: [Vec<Sequence>; 2] =
        [&mut by_logits, &mut engine].map(|e| (0..3).map(|_| e.sequence().expect("a slot")).collect());
    for (step, known) in [(0, vocab), (1, 7), (2, vocab)] {
        if step == 1 {
            record.lock().expect("one thread").calls.clear();
        }
        let ids = text(vocab, 9)[3 * step..].to_vec();
        let [first, second] = &mut all;
        let mut rows: Vec<_> = first.iter_mut().zip(ids.iter().copied()).collect();
        by_logits.decode(&mut rows).expect("a step that fits");
        let want: Vec<_> = (0..3).map(|i| best(&by_logits.logits(i)[..known as usize]).map(|b| b.0)).collect();
        let mut rows: Vec<_> = second.iter_mut().zip(ids.iter().copied()).collect();
        assert_eq!(engine.decode_best(&mut rows, known).expect("a step that fits"), want);
    }
    let calls = record.lock().expect("one thread").calls.clone();
    assert_eq!((calls.get("replay"), calls.get("wait")), (Some(&2), Some(&2)));
    assert!(calls.keys().all(|c| matches!(*c, "replay" | "wait" | "wait_for")), "{calls:?}");
}

/// Greedy answers to a prompt, until `stop`: ids, position, and the logits of what then follows a
/// token.
fn answer(mut session: Session, prompt: &[u32], n: usize, stop: &[u32]) -> (Vec<u32>, u32, Vec<f32>) {
    let Session { engine, sequence } = &mut session;
    let options = GenerateOptions { max_tokens: Some(n), stop_ids: stop.to_vec(), ..GenerateOptions::default() };
    let mut generation = Generation::new(engine.model(), None, prompt, 0, options).expect("valid options");
    generate::run(engine, sequence, &mut generation, &mut |_, _| ControlFlow::Continue(())).expect("a run");
    let (ids, pos) = (generation.ids().to_vec(), sequence.position());
    (ids, pos, session.decode(7).expect("a step").to_vec())
}

/// Tokens are chosen on the device, a step ahead; the last step is taken back where nothing follows
/// it, after even and odd numbers of them.
#[test]
fn tokens_chosen_on_the_device_are_those_that_the_cpu_chooses() {
    for name in ["hf/qwen3", "hf/qwen3_next"] {
        let baked = bake(name, &BuildOptions::default());
        let prompt = &Expected::read(name).ids[..5];
        let cpu = || session(&baked.loaf, Kernels::detect(), 1);
        let (all, ..) = answer(cpu(), prompt, 8, &[]);
        let cases = [(4, vec![all[1]]), (4, vec![all[2]]), (8, vec![]), (8, vec![all[5]]), (1, vec![])];
        // Interpreted, every step takes long.
        for (n, stop) in cases.into_iter().take(if has_card() { 5 } else { 2 }) {
            let want = answer(cpu(), prompt, n, &stop);
            let ways = if has_card() { ways().to_vec() } else { vec![options()] };
            for options in ways {
                let got = answer(cuda(&baked.loaf, options), prompt, n, &stop);
                assert_eq!((&got.0, got.1), (&want.0, want.1), "{name}");
                assert_bits(name, &[got.2], std::slice::from_ref(&want.2));
            }
        }
    }
}

/// A whole answer drawn on the device, and one by penalised logits; the state is then that of the
/// answer.
#[test]
fn answers_drawn_on_the_device_are_those_that_the_cpu_draws() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let prompt = &Expected::read("hf/qwen3").ids[..5];
    let penalised = SamplerOptions { repetition_penalty: 1.2, ..sampling(0.0, 0, 1.0, 0.0) };
    for (sampler, n) in [(sampling(0.9, 0, 0.95, 0.02), 64), (penalised, 8)] {
        let answer = |mut session: Session| {
            let Session { engine, sequence } = &mut session;
            let options = GenerateOptions { max_tokens: Some(n), sampler, ..GenerateOptions::default() };
            let mut generation = Generation::new(engine.model(), None, prompt, 0, options).expect("valid options");
            generate::run(engine, sequence, &mut generation, &mut |_, _| ControlFlow::Continue(())).expect("a run");
            let (ids, pos) = (generation.ids().to_vec(), sequence.position());
            (ids, pos, session.decode(7).expect("a step").to_vec())
        };
        let want = answer(session(&baked.loaf, Kernels::detect(), 1));
        let got = answer(cuda(&baked.loaf, options()));
        assert_eq!((&got.0, got.1), (&want.0, want.1), "{sampler:?}");
        assert_bits("what follows", &[got.2], &[want.2]);
    }
}

/// With other options nothing is captured again, and a drawn token is one launch and one wait.
#[test]
fn a_token_that_the_device_draws_is_one_launch_and_no_logits() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let (mut engine, record) = recorded(&baked.loaf, options()).expect("room");
    let mut sequence = engine.sequence().expect("a slot");
    let penalised = SamplerOptions { presence_penalty: 0.5, ..sampling(1.5, 3, 1.0, 0.0) };
    for (i, sampler) in [sampling(0.8, 20, 0.9, 0.1), penalised].into_iter().enumerate() {
        engine.eval(&mut sequence, &[1, 2, 3]).expect("a prompt");
        let pos = sequence.position();
        let chooser = engine.chooser(&sampler, false).expect("a device that chooses");
        chooser.start(&sampler, 10, &[1, 2, 3]).expect("started");
        if i == 0 {
            chooser.next(pos, true).expect("a step").expect("a token");
        }
        let first = pos + u32::from(i == 0);
        record.lock().expect("one thread").calls.clear();
        for pos in first..first + 3 {
            chooser.next(pos, true).expect("a step").expect("a token");
        }
        let calls = record.lock().expect("one thread").calls.clone();
        assert_eq!(calls, [("replay", 3), ("mark", 3), ("wait_for", 3)].into_iter().collect());
        chooser.end();
    }
    let bad = SamplerOptions { temperature: f32::NAN, ..sampling(1.0, 0, 1.0, 0.0) };
    let error = engine.chooser(&bad, false).expect("a device").start(&bad, 10, &[]).expect_err("no temperature");
    assert!(error.to_string().contains("temperature"), "{error}");
}

#[test]
fn a_token_that_the_device_chooses_is_one_launch_and_no_logits() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let (mut engine, record) = recorded(&baked.loaf, options()).expect("room");
    let mut sequence = engine.sequence().expect("a slot");
    engine.eval(&mut sequence, &[1, 2, 3]).expect("a prompt");
    let greedy = GenerateOptions::default().sampler;
    assert!(engine.chooser(&greedy, true).is_none(), "log-probabilities are computed by the host");
    let chooser = engine.chooser(&greedy, false).expect("a device that chooses");
    chooser.start(&greedy, 10, &[]).expect("started");
    chooser.next(3, true).expect("a step").expect("a token");
    record.lock().expect("one thread").calls.clear();
    for pos in 4..7 {
        chooser.next(pos, true).expect("a step").expect("a token");
    }
    let calls = record.lock().expect("one thread").calls.clone();
    assert_eq!(calls, [("replay", 3), ("mark", 3), ("wait_for", 3)].into_iter().collect());
    chooser.end();
}

/// Ties, zeros of both signs, NaNs and infinities: the rules of [`best`], for any number of known
/// tokens.
#[test]
fn the_device_chooses_by_the_rules_of_the_sampler() {
    const VOCAB: usize = 70_000;
    let mut driver = driver();
    driver.enter().expect("a card");
    let cubin = include_bytes!("../../runtime/src/backend/cuda/kernels/loaf.sm_90a.cubin");
    let image: &[u8] = if driver.card().capability == (9, 0) { cubin } else { PTX.as_bytes() };
    let choose = driver.load(image, &["choose"]).expect("compiled kernels")[0];
    // Head, run, row and id, as they lie in the memory of a step.
    let host = driver.pinned(VOCAB * 4 + 256).expect("memory");
    let device = driver.allocate((VOCAB * 4 + 256) as u64).expect("memory");
    let (parts, results) = (driver.allocate(CHOICE_ROOM).expect("memory"), driver.pinned(64).expect("memory"));
    driver.fill(parts, 0, CHOICE_ROOM as usize).expect("a fill");
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let noise = |i: usize| ((i * 7919) % 1009) as f32 - 2000.0;
    let cases: [(&[(usize, f32)], usize); 9] = [
        (&[(900, 5.0), (40_000, 5.0), (899, 4.9)], VOCAB),
        (&[(69_999, 5.0)], VOCAB),
        (&[(69_999, 5.0), (11, 3.0)], 69_999),
        (&[(5, -0.0), (3, 0.0), (4, -0.0)], VOCAB),
        (&[(5, 0.0), (3, -0.0)], VOCAB),
        (&[(7, nan), (8, 1.0), (33_000, nan), (33_001, 1.0)], VOCAB),
        (&[(7, inf), (6, f32::MAX), (9, inf)], VOCAB),
        (&[(0, nan), (1, -inf)], 2),
        (&[(0, -inf), (1, nan), (2, f32::MIN)], 3),
    ];
    for (i, (special, known)) in cases.into_iter().enumerate() {
        let mut logits: Vec<f32> = (0..VOCAB).map(noise).collect();
        special.iter().for_each(|(at, x)| logits[*at] = *x);
        let pos = 10 + i as u32;
        // Runs and tokens that may be chosen; a run: first, rows, position, nothing, cache, from,
        // to, stride; a row: run, position, cache; the id.
        let mut words = [0u32; 64];
        (words[0], words[1], words[6]) = (1, known as u32, pos - 1);
        (words[10], words[12], words[17], words[20]) = (111, 222, pos - 1, 77);
        // SAFETY: pinned memory of that length, which nothing else uses until the copy is waited
        // for.
        unsafe {
            std::ptr::copy_nonoverlapping(logits.as_ptr().cast::<u8>(), host.at, VOCAB * 4);
            std::ptr::copy_nonoverlapping(words.as_ptr().cast::<u8>(), host.at.add(VOCAB * 4), 256);
        }
        driver.copy_in(device, host, 0, VOCAB * 4 + 256).expect("a copy");
        let head = device + VOCAB as u64 * 4;
        let (run, row, id) = (head + 16, head + 64, head + 80);
        let (counter, results_at) = (parts + CHOICE_ROOM - 8, results.at as u64);
        let p = Choose { logits: device, head, run, row, id, parts, counter, results: results_at, ..Choose::default() };
        let Launch { shape, parameter, .. } = p.launch(1);
        driver.launch(choose, shape, parameter.bytes()).expect("a launch");
        driver.copy_out(host, 0, head, 256).expect("a copy");
        driver.wait().expect("an end");
        // SAFETY: as above; the copy is done.
        let (got, after) = unsafe {
            let got = results.at.cast::<u32>().add(4 * (pos as usize & 3)).read_volatile();
            (got, std::slice::from_raw_parts(host.at.cast::<u32>(), 64))
        };
        let want = best(&logits[..known]).map(|b| b.0);
        assert_eq!((got != u32::MAX).then_some(got), want, "case {i}");
        assert_eq!((after[6], after[10], after[12], after[17], after[20]), (pos, 222, 111, pos, want.unwrap_or(0)));
    }
}

/// Draws on a card, without a model.
struct Draws {
    driver: Box<dyn Driver>,
    kernels: Vec<Function>,
    host: Pinned,
    results: Pinned,
    sample: Sample,
}

impl Draws {
    const VOCAB: usize = 70_000;
    const STEP: usize = 128;

    fn new() -> Draws {
        let mut driver = driver();
        driver.enter().expect("a card");
        let cubin = include_bytes!("../../runtime/src/backend/cuda/kernels/loaf.sm_90a.cubin");
        let image: &[u8] = if driver.card().capability == (9, 0) { cubin } else { PTX.as_bytes() };
        let kernels = driver.load(image, &["sample_best", "sample_weigh", "sample_pick"]).expect("compiled kernels");
        let bytes = (8 * Self::VOCAB + 2 * Self::STEP) as u64;
        let mut of = |bytes: u64| {
            let at = driver.allocate(bytes).expect("memory");
            driver.fill(at, 0, bytes as usize).expect("a fill");
            at
        };
        let (logits, parts, room) = (of(bytes), of(CHOICE_ROOM), of(SAMPLE_ROOM));
        let host = driver.pinned(bytes as usize).expect("memory");
        let results = driver.pinned(64).expect("memory");
        let head = logits + 8 * Self::VOCAB as u64;
        let choose = Choose {
            logits,
            head,
            parts,
            counter: parts + CHOICE_ROOM - 8,
            results: results.at as u64,
            ..Choose::default()
        };
        let (how, seen) = (head + Self::STEP as u64, logits + 4 * Self::VOCAB as u64);
        Draws { driver, kernels, host, results, sample: Sample { choose, how, room, seen } }
    }

    /// Draws so many tokens, one after the other, by the same logits, after a prompt.
    fn draw(&mut self, logits: &[f32], options: &SamplerOptions, prompt: &[u32], n: usize) -> Vec<Option<u32>> {
        let mut words = vec![0u32; 2 * Self::VOCAB + Self::STEP / 4];
        words.iter_mut().zip(logits).for_each(|(w, x)| *w = x.to_bits());
        prompt.iter().for_each(|id| words[Self::VOCAB + *id as usize] = 1 << 31);
        words[2 * Self::VOCAB + 1] = logits.len() as u32;
        let how = HowAt::new(options, options.seed);
        // SAFETY: pinned memory of that length, which nothing else uses until the copy is waited
        // for.
        unsafe {
            std::ptr::copy_nonoverlapping(words.as_ptr().cast::<u8>(), self.host.at, words.len() * 4);
            self.host.at.add(words.len() * 4).cast::<HowAt>().write_unaligned(how);
        }
        let bytes = words.len() * 4 + size_of::<HowAt>();
        self.driver.copy_in(self.sample.choose.logits, self.host, 0, bytes).expect("a copy");
        (0..n)
            .map(|_| {
                for (kernel, Launch { shape, parameter, .. }) in self.kernels.iter().zip(self.sample.launches(1)) {
                    self.driver.launch(*kernel, shape, parameter.bytes()).expect("a launch");
                }
                self.driver.wait().expect("an end");
                // SAFETY: as above; the kernels are done.
                let id = unsafe { self.results.at.cast::<u32>().read_volatile() };
                (id != u32::MAX).then_some(id)
            })
            .collect()
    }

    /// Compares draws with the sampler's.
    fn check(&mut self, what: &str, logits: &[f32], options: &SamplerOptions, prompt: &[u32], n: usize) {
        let mut sampler = Sampler::new(*options, logits.len()).expect("valid options");
        sampler.observe_prompt(prompt);
        let want: Vec<Option<u32>> = (0..n)
            .map(|_| {
                let id = sampler.pick(logits).ok();
                id.iter().for_each(|id| sampler.observe_output(*id));
                id
            })
            .collect();
        assert_eq!(self.draw(logits, options, prompt, n), want, "{what}: {} logits, {options:?}", logits.len());
    }
}

/// Numbers that look like noise.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Between 0 and 1, one of 2^23.
    fn part(&mut self) -> f32 {
        (self.next() & 0x7f_ffff) as f32 / (1 << 23) as f32
    }

    /// A sum of six of them, spread about 0: as logits are.
    fn bell(&mut self) -> f32 {
        (0..6).map(|_| self.part() - 0.5).sum::<f32>() * 1.4
    }
}

fn sampling(temperature: f32, top_k: u32, top_p: f32, min_p: f32) -> SamplerOptions {
    SamplerOptions { temperature, top_k, top_p, min_p, seed: 11, ..SamplerOptions::default() }
}

/// Distributions of every form, vocabularies of any size, filters alone and together.
#[test]
fn the_device_draws_the_tokens_that_the_sampler_draws() {
    let mut draws = Draws::new();
    let mut noise = Noise(3);
    let filters = [
        sampling(1.0, 0, 1.0, 0.0),
        sampling(0.7, 0, 1.0, 0.1),
        sampling(0.8, 20, 0.95, 0.0),
        sampling(1.3, 0, 0.9, 0.02),
        sampling(1.0, 40, 1.0, 0.05),
        sampling(1.0, 1, 1.0, 0.0),
        sampling(1.0, 0, 1e-12, 0.0),
        sampling(1e-30, 0, 0.5, 0.0),
        sampling(100.0, 7, 1.0, 0.0),
        sampling(1.0, 1 << 20, 1.0, 0.999),
    ];
    for (turn, vocab) in [1, 33, 511, 1537, 5003].into_iter().enumerate() {
        let bell: Vec<f32> = (0..vocab).map(|_| 3.0 * noise.bell()).collect();
        let few: Vec<f32> = (0..vocab).map(|_| (3.0 * noise.bell()).round()).collect();
        let peaked: Vec<f32> = bell.iter().enumerate().map(|(i, x)| if i == vocab / 2 { 40.0 } else { *x }).collect();
        let flat = vec![-1.5; vocab];
        let all = [("as logits are", &bell), ("ties", &few), ("a peak", &peaked), ("flat", &flat)];
        for (i, options) in filters.iter().enumerate() {
            // Interpreted, one of them, another one for each vocabulary.
            let some = if has_card() { 0..4 } else { (i + turn) % 4..(i + turn) % 4 + 1 };
            for (what, logits) in &all[some] {
                draws.check(what, logits, options, &[], 1);
            }
        }
    }
}

/// More tokens than the list takes: before the first filter ends, in one bucket of equals, in one
/// of different ones.
#[test]
fn the_device_draws_among_more_tokens_than_it_lists() {
    let mut draws = Draws::new();
    let mut noise = Noise(5);
    let bell: Vec<f32> = (0..6011).map(|_| noise.bell()).collect();
    let near: Vec<f32> = (0..6011).map(|_| 9.0 + 0.004 * noise.part()).collect();
    let equal: Vec<f32> = (0..6011).map(|i| if i % 2 == 0 { 4.25 } else { -2.0 }).collect();
    let filters = [
        sampling(1.0, 0, 0.95, 0.0),
        sampling(1.0, 5000, 0.8, 0.05),
        sampling(1.0, 3000, 1.0, 0.0),
        sampling(2.0, 100_000, 1.0, 0.3),
        sampling(1.0, 4000, 0.01, 0.0),
        // As many as the first half of equals are.
        sampling(1.0, 1503, 1.0, 0.0),
    ];
    for options in filters {
        for (what, logits) in [("as logits are", &bell), ("near each other", &near), ("equal", &equal)] {
            draws.check(what, logits, &options, &[], 1);
        }
    }
}

/// What is no number, what is infinite, zeros of both signs, logits whose differences overflow.
#[test]
fn the_device_draws_by_the_rules_for_special_logits() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let mut draws = Draws::new();
    let mut noise = Noise(7);
    let cases: [Vec<f32>; 8] = [
        vec![nan, -inf, nan],
        vec![-inf, f32::MIN, nan],
        vec![inf, f32::MAX, 3.0e38, inf, f32::MIN],
        vec![0.0, -0.0, 0.0, -0.0, -0.0],
        vec![f32::MIN, f32::MIN, -inf],
        vec![1e-40, -1e-40, 2e-45, 0.0],
        vec![1.0, 1.0 - 27.0, 1.0 - 27.000_002, 1.0 - 26.999_998],
        (0..3000).map(|_| f32::from_bits(noise.next() as u32 ^ (noise.next() as u32) << 8)).collect(),
    ];
    for logits in &cases {
        for options in [
            sampling(1.0, 0, 1.0, 0.0),
            sampling(1.0, 3, 1.0, 0.0),
            sampling(1.0, 0, 0.6, 0.0),
            sampling(3e-39, 2, 0.99, 0.5),
            sampling(0.0, 0, 1.0, 0.0),
        ] {
            draws.check("special", logits, &options, &[], 1);
        }
    }
}

/// Penalties follow the tokens that are drawn, and greedy choices among penalised logits, too.
#[test]
fn the_device_penalises_what_it_has_drawn() {
    let mut draws = Draws::new();
    let mut noise = Noise(9);
    let logits: Vec<f32> = (0..777).map(|_| 2.0 * noise.bell()).collect();
    let greedy = sampling(0.0, 0, 1.0, 0.0);
    for (base, repetition_penalty, presence_penalty, frequency_penalty) in [
        (greedy, 1.3, 0.0, 0.0),
        (sampling(0.6, 0, 1.0, 0.0), 1.0, 0.7, 0.0),
        (greedy, 1.0, 0.0, 0.4),
        (sampling(0.9, 10, 0.9, 0.05), 0.8, 1.5, -0.3),
    ] {
        let options = SamplerOptions { repetition_penalty, presence_penalty, frequency_penalty, ..base };
        draws.check("penalties", &logits, &options, &[5, 700, 5, 31], 6);
    }
}

/// A vocabulary as models have them.
#[test]
fn the_device_draws_from_a_large_vocabulary() {
    let mut draws = Draws::new();
    let mut noise = Noise(13);
    let logits: Vec<f32> = (0..69_999).map(|_| 3.0 * noise.bell()).collect();
    for options in [sampling(0.7, 20, 0.8, 0.0), sampling(1.0, 0, 1.0, 0.0), sampling(1.0, 0, 0.95, 0.01)] {
        draws.check("a large vocabulary", &logits, &options, &[], 1);
    }
}

/// Blocks of one launch must not depend on each other, apart from whichever comes last.
#[test]
fn the_order_of_blocks_does_not_matter() {
    for name in ["hf/qwen3", "mlx/qwen3_moe_affine8"] {
        let baked = bake(name, &BuildOptions::default());
        let ids = text(baked.loaf.plan().vocab, 3);
        let play = |backwards: bool| {
            let (mut engine, record) = recorded(&baked.loaf, options()).expect("room");
            record.lock().expect("one thread").backwards = backwards;
            let mut sequence = engine.sequence().expect("a slot");
            ids.iter().map(|id| engine.decode_one(&mut sequence, *id).expect("one token").to_vec()).collect::<Vec<_>>()
        };
        assert_bits(name, &play(true), &play(false));
    }
}

#[test]
fn a_fused_step_has_few_launches() {
    let baked = bake("stories260k", &BuildOptions { quant: four_bits(32), ..BuildOptions::default() });
    let count = |fused: bool| {
        let (mut engine, record) = recorded(&baked.loaf, CudaOptions { fused, ..options() }).expect("room");
        let mut sequence = engine.sequence().expect("a slot");
        engine.decode_one(&mut sequence, 1).expect("one token");
        launched(&record)
    };
    let layers = baked.loaf.plan().states.len() / 2;
    let (fused, single) = (count(true), count(false).len());
    // Embedding, table of rotations, head; projections, attention, output, gate, up, down.
    // Gate and up are two products here, so that the gate is a launch too, and the last is in f32.
    assert!(fused.len() <= 3 + 7 * layers && 2 * fused.len() < single, "{single} records: {fused:?}");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_allocated() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let (driver, record) = Emulated::new();
    record.lock().expect("one thread").free = Some(64 << 20);
    let error = CudaDevice::on(&baked.loaf, Box::new(driver), CudaOptions::default()).err().expect("no room");
    let text = error.to_string();
    assert!(matches!(error, DeviceError::Memory { .. }) && text.contains("has 64 MiB free; expected"), "{text}");
    assert!(!text.contains('\n') && record.lock().expect("one thread").calls.is_empty(), "{text}");
}

#[test]
fn faults_of_the_driver_are_one_line_each() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    for call in ["allocate", "pinned", "load"] {
        let (driver, record) = Emulated::new();
        record.lock().expect("one thread").fails = Some((call, 0));
        let error = CudaDevice::on(&baked.loaf, Box::new(driver), CudaOptions::default()).err().expect(call);
        assert!(error.to_string().contains("CUDA_ERROR_UNKNOWN") && !error.to_string().contains('\n'), "{error}");
    }
    // A card that goes away in mid-token.
    let (mut engine, record) = recorded(&baked.loaf, options()).expect("room");
    let mut sequence = engine.sequence().expect("a slot");
    engine.decode_one(&mut sequence, 1).expect("one token");
    record.lock().expect("one thread").fails = Some(("replay", 0));
    let error = engine.decode_one(&mut sequence, 2).expect_err("a replay that fails");
    assert!(matches!(error, EngineError::Device(DeviceError::Failed(_))), "{error}");
    assert_eq!(sequence.position(), 1, "a token that failed is not the sequence's");
}

#[test]
fn no_driver_is_one_line() {
    if has_card() {
        return;
    }
    let baked = bake("hf/qwen3", &BuildOptions::default());
    match CudaDevice::open(&baked.loaf, CudaOptions::default()) {
        Ok(_) => println!("there is a card here"),
        Err(e) => assert!(matches!(e, DeviceError::Missing(_)) && !e.to_string().contains('\n'), "{e}"),
    }
}

/// What the compiled kernels take: name, registers of a thread, bytes of stack of a thread, bytes
/// of shared memory of a block's own.
fn resources(cubin: &[u8]) -> Vec<(String, u32, u32, u32)> {
    let u = |at: usize, n: usize| cubin[at..at + n].iter().rev().fold(0usize, |v, b| v << 8 | usize::from(*b));
    let name = |at: usize| {
        let end = at + cubin[at..].iter().position(|b| *b == 0).expect("a string that ends");
        String::from_utf8_lossy(&cubin[at..end]).into_owned()
    };
    // ELF: sections of 64 bytes each; symbols of 24; what the driver is told of functions is in
    // `.nv.info`.
    let (start, count, strings) = (u(0x28, 8), u(0x3c, 2), u(0x3e, 2));
    let section = |i: usize| start + 64 * i;
    let (place, size) = (|i: usize| u(section(i) + 24, 8), |i: usize| u(section(i) + 32, 8));
    let symbols = (0..count).find(|i| u(section(*i) + 4, 4) == 2).expect("symbols");
    let symbol = |i: usize| name(place(u(section(symbols) + 40, 4)) + u(place(symbols) + 24 * i, 4));
    let info =
        (0..count).find(|i| name(place(strings) + u(section(*i), 4)) == ".nv.info").expect("what the driver is told");
    let (mut at, end) = (place(info), place(info) + size(info));
    let mut out: Vec<(String, u32, u32, u32)> = Vec::new();
    while at < end {
        let (form, kind, len) = (cubin[at], cubin[at + 1], u(at + 2, 2));
        at += 4;
        if form == 4 {
            let which = if len >= 8 { symbol(u(at, 4)) } else { String::new() };
            let entry = out.iter().position(|e| e.0 == which).unwrap_or_else(|| {
                out.push((which, 0, 0, 0));
                out.len() - 1
            });
            match kind {
                0x2f => out[entry].1 = u(at + 4, 4) as u32,
                0x11 => out[entry].2 = u(at + 4, 4) as u32,
                _ => {}
            }
            at += len;
        }
    }
    out.retain(|e| Kernel::NAMES.contains(&e.0.as_str()));
    for i in 0..count {
        let section_name = name(place(strings) + u(section(i), 4));
        let own = section_name.strip_prefix(".nv.shared.");
        if let Some(entry) = own.and_then(|kernel| out.iter_mut().find(|e| e.0 == kernel)) {
            // The first 1,024 bytes are the driver's there, and no part of what a block may have.
            entry.3 = (size(i) as u32).saturating_sub(1024);
        }
    }
    out
}

#[test]
fn compiled_kernels_keep_to_their_registers_and_stack() {
    let cubin = include_bytes!("../../runtime/src/backend/cuda/kernels/loaf.sm_90a.cubin");
    let all = resources(cubin);
    assert_eq!(all.len(), Kernel::NAMES.len(), "{all:?}");
    let larger = all.iter().find(|e| e.0 == "wide_128").expect("larger tiles");
    assert!(larger.3 > 1024, "tables of their own: {larger:?}");
    for (name, registers, stack, own) in all {
        let asks = ASK_SHARED.iter().any(|with| name.starts_with(with));
        assert!(!asks || own <= OWN_SHARED, "{name}: {own} bytes of shared memory besides what launches may ask for");
        // Threads of a block: what the launches ask for.
        let threads = match name.as_str() {
            "expert_sort" => 1024,
            "hopper_128" | "hopper_pairs_128" | "fast_hopper_64" | "fast_hopper_128" => 384,
            "gdn_scan_128" => 128,
            // Three blocks on a multiprocessor.
            "fast_rule_chunks" => 3 * 128,
            "choose" | "sample_best" | "sample_weigh" | "sample_pick" | "row_plain_4" | "experts_in_2"
            | "experts_in_5" | "experts_out" => 512,
            _ => 256,
        };
        assert!(registers > 0 && registers * threads <= 65536, "{name}: {registers} registers of {threads} threads");
        // Tiles of attention and of products put some aside that they need once a block, so that
        // two blocks fit on a multiprocessor.
        let most = match name.as_str() {
            name if name.starts_with("attention_tile") => 64,
            name if name.starts_with("wide_") => 96,
            name if ["attention_row", "attention_late"].iter().any(|with| name.starts_with(with)) => 32,
            _ => 16,
        };
        assert!(stack <= most, "{name}: expected at most {most} bytes of stack, found {stack}");
    }
}

/// Kernels name attributes and operands as the op table does.
#[test]
fn names_in_kernels_are_those_of_the_op_table() {
    let mut expected = String::new();
    for spec in OpKind::ALL.iter().map(|k| k.spec()).filter(|s| s.in_plan) {
        let attrs: Vec<&str> = spec.attrs.iter().map(|a| a.name).collect();
        let (mut operands, mut next) = (Vec::new(), 0);
        for (i, o) in spec.operands.iter().enumerate() {
            // Of a weight's planes the first has the name.
            if spec.operand_index(o.name) == Some(i) {
                operands.push(if i == next { o.name.to_owned() } else { format!("{} = {i}", o.name) });
                next = i + 1;
            }
        }
        let list = |names: &str, which| format!("struct {which} {{ enum {{ {names} }}; }};\n");
        let (attrs, operands) = (list(&attrs.join(", "), "A"), list(&operands.join(", "), "O"));
        expected += &format!("namespace {}_op {{\n{attrs}{operands}}}\n", spec.name);
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../runtime/src/backend/cuda/kernels/ops.cu");
    let text = std::fs::read_to_string(path).expect("committed");
    let found = &text[text.find("namespace").expect("a namespace")..];
    assert!(found == expected, "ops.cu after its comment should be:\n{expected}");
}

/// What is committed is what the sources compile to, where the compiler is at hand.
#[test]
fn compiled_kernels_are_those_of_their_sources() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../runtime/src/backend/cuda/kernels/build.py");
    match std::process::Command::new("python3").args([script, "--check", "--if-there"]).output() {
        Ok(out) => {
            let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
            print!("{text}");
            assert!(out.status.success(), "{text}");
        }
        Err(e) => println!("no python3 here: {e}"),
    }
}

/// The 80B-A3B with its true numbers where they decide how steps are fused, and few experts.
#[test]
fn a_hybrid_mixture_of_true_shape_has_the_bits_of_the_cpu() {
    let numbers = [
        ("hidden_size", 128),
        ("num_hidden_layers", 4),
        ("num_attention_heads", 4),
        ("head_dim", 64),
        ("num_experts", 16),
        ("num_experts_per_tok", 3),
        ("moe_intermediate_size", 64),
        ("shared_expert_intermediate_size", 64),
        ("linear_num_key_heads", 2),
        ("linear_num_value_heads", 4),
        ("linear_key_head_dim", 32),
        ("linear_value_head_dim", 32),
        ("vocab_size", 512),
        ("max_position_embeddings", 600),
    ];
    for group in [64, 32] {
        let options = BuildOptions { quant: four_bits(group), ..BuildOptions::default() };
        let baked = random("configs/qwen3_coder_next", &numbers, &options);
        check(&format!("groups of {group}"), &baked.loaf, &text(512, length(4)));
    }
}

/// Prompts of hybrids with keys of 128 elements: more rows than the rule's kernel holds operands
/// of, no whole lot of them, the last of them from a state that others have left; values that are a
/// whole number of its columns, and values that are not.
#[test]
fn prompts_by_the_delta_rule_have_the_bits_of_the_cpu() {
    for (dim, quant, kernels) in [
        (128, four_bits(64), &["gdn_scan_128", "conv_silu_4", "gated_codes"][..]),
        (73, QuantOptions::default(), &["gdn_scan_128", "conv_silu_4"]),
    ] {
        let numbers = small_hybrid(64, [128, dim]);
        let what = format!("values of {dim}");
        let baked = random("configs/qwen3_coder_next", &numbers, &BuildOptions { quant, ..BuildOptions::default() });
        let ids = text(512, 81);
        let mut cpu = session(&baked.loaf, Kernels::detect(), 2);
        let mut recorder = None;
        let mut card = if has_card() {
            cuda(&baked.loaf, options())
        } else {
            let (engine, record) = recorded(&baked.loaf, options()).expect("room");
            recorder = Some(record);
            Session::new(engine).expect("a slot")
        };
        for part in [&ids[..75], &ids[75..80], &ids[80..]] {
            let want = cpu.eval(part).expect("a prompt").to_vec();
            let got = card.eval(part).expect("a prompt").to_vec();
            assert_bits(&what, &[got], &[want]);
        }
        if let Some(record) = recorder {
            let launched = launched(&record);
            for kernel in kernels {
                assert!(launched.contains(&(*kernel).to_owned()), "{what}: {kernel}, found {launched:?}");
            }
        }
    }
}

/// Mixtures and hybrids whose routers, gates and experts are quantised, too.
#[test]
fn quantised_hybrids_have_the_bits_of_the_cpu() {
    for name in ["hf/qwen3_next", "hf/qwen3_5_moe", "hf/qwen3"] {
        let baked = bake(name, &BuildOptions { quant: four_bits(32), ..BuildOptions::default() });
        check(name, &baked.loaf, &text(baked.loaf.plan().vocab, length(4)));
    }
}

/// A mixture of the widths that have kernels of their own, of one layer with the delta rule and one
/// with attention: both ways to lay out what the rule's projections make, routers of one and
/// several lots of 32 experts, and a width that the short kernels do not take.
#[test]
fn short_kernels_of_mixtures_have_the_bits_of_the_cpu() {
    let numbers = |experts, k, inner, dim, head_dim| {
        vec![
            ("num_hidden_layers", 2),
            ("full_attention_interval", 2),
            ("num_attention_heads", 2),
            ("num_key_value_heads", 1),
            ("head_dim", head_dim),
            ("num_experts", experts),
            ("num_experts_per_tok", k),
            ("moe_intermediate_size", inner),
            ("shared_expert_intermediate_size", inner),
            ("linear_num_key_heads", 2),
            ("linear_num_value_heads", 4),
            ("linear_key_head_dim", dim),
            ("linear_value_head_dim", dim),
            ("vocab_size", 512),
            ("max_position_embeddings", 600),
        ]
    };
    let all = ["experts_in_5", "attention_late_256", "route_2", "experts_out", "delta_row_128", "experts_in_2"];
    // The interpreted card has few multiprocessors, so ten experts are cut as where they are more
    // blocks than those.
    let cases: [(&str, _, &[&str]); 4] = [
        ("configs/qwen3_coder_next", numbers(96, 10, 512, 128, 256), &all[..5]),
        ("configs/qwen3_6_35b_a3b", numbers(32, 3, 512, 128, 64), &all[2..]),
        // Experts that are no whole lot of 32, heads that the rule's kernel does not take.
        ("configs/qwen3_coder_next", numbers(40, 3, 512, 64, 64), &[]),
        ("configs/qwen3_coder_next", numbers(32, 3, 256, 128, 64), &["delta_row_128"]),
    ];
    let options = BuildOptions { quant: four_bits(64), ..BuildOptions::default() };
    for (config, numbers, kernels) in cases {
        let baked = random(config, &numbers, &options);
        let what = format!("{config} {:?}", &numbers[5..8]);
        if has_card() {
            check(&what, &baked.loaf, &text(512, 12));
            continue;
        }
        let launched = launched_for_two_tokens(&what, &baked.loaf);
        for kernel in all {
            let found = launched.contains(&kernel.to_owned());
            assert_eq!(found, kernels.contains(&kernel), "{what}: {kernel}, found {launched:?}");
        }
    }
}
