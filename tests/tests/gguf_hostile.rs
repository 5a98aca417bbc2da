//! Headers of GGUF files from someone who means harm: 20,000 structured mutations of a valid file,
//! the same ones every time, of a file through the parser and of a whole model through all that a
//! bake does before graphs. None may panic, take memory beyond a bound or an error of more than a
//! line; what is accepted has tensors within the file that do not overlap. A counting allocator
//! measures, and canaries show that it does and that mutations reach every stage.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use loaf_bake::build::{BuildOptions, Prepared, Silent};
use loaf_bake::checkpoint::Checkpoint;
use loaf_bake::checkpoint::gguf::{Header, parse_header};
use loaf_bake::weights::produce;
use loaf_bake::{front, tokenizer};
use loaf_tests::gguf::{self, File, Tensor, Value};

struct Measuring;

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn took(bytes: usize) {
    NOW.with(|now| {
        now.set(now.get().wrapping_add(bytes));
        PEAK.with(|peak| peak.set(peak.get().max(now.get())));
    });
}

fn gave(bytes: usize) {
    NOW.with(|now| now.set(now.get().saturating_sub(bytes)));
}

// SAFETY: all work is the system allocator's; counting touches thread-locals that need no
// allocation.
unsafe impl GlobalAlloc for Measuring {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's contract, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        gave(layout.size());
        // SAFETY: the caller's contract, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        took(size);
        gave(layout.size());
        // SAFETY: the caller's contract, passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Measuring = Measuring;

/// Most bytes that `work` held at once beyond what it began with.
fn peak(work: impl FnOnce()) -> usize {
    let before = NOW.with(Cell::get);
    PEAK.with(|peak| peak.set(before));
    work();
    PEAK.with(Cell::get) - before
}

/// A xorshift generator (Marsaglia's triple 13, 7, 17): mutations need variety, not quality.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// A number that a careless reader trips over.
    fn awkward(&mut self) -> u64 {
        let n =
            [0, 1, 2, 3, 31, 32, 33, 255, 1 << 16, 1 << 31, u64::from(u32::MAX), 1 << 32, 1 << 61, 1 << 63, u64::MAX];
        n[self.below(n.len())].wrapping_add(self.next() % 3).wrapping_sub(1)
    }
}

/// A small file with a key of every kind and tensors of several types.
fn valid() -> File {
    let mut file = File::default();
    file.key("general.architecture", "llama").key("general.alignment", Value::U32(32));
    file.key("a.u64", Value::U64(7)).key("a.i32", Value::I32(-7)).key("a.f32", Value::F32(0.5));
    file.key("a.flag", Value::Bool(true)).key("split.no", Value::U16(0));
    file.key("tokens", Value::Texts(["<s>", "a", "", "bc"].map(String::from).into()));
    file.key("types", Value::I32s(vec![1, 2, 3])).key("scores", Value::F32s(vec![0.0, -1.0]));
    file.f32s("token_embd.weight", &[8, 4], &[0.25; 32]);
    file.f32s("output_norm.weight", &[8], &[1.0; 8]);
    for (name, kind, bytes) in
        [("blk.0.attn_q.weight", 2, 18), ("blk.0.attn_k.weight", 8, 34), ("blk.0.attn_v.weight", 39, 17)]
    {
        file.tensors.push(Tensor { name: name.into(), extents: vec![32, 3], kind, data: vec![5; bytes * 3] });
    }
    file
}

/// Where the parts of a header lie: every count, length, type and offset by its first byte and its
/// size.
fn fields(file: &File) -> Vec<(usize, usize)> {
    let mut at = 24;
    let mut out = vec![(0, 4), (4, 4), (8, 8), (16, 8)];
    for (key, value) in &file.keys {
        out.push((at, 8));
        at += 8 + key.len();
        out.push((at, 4));
        let mut bytes = Vec::new();
        gguf::value(&mut bytes, value);
        let is_array = matches!(value, Value::Texts(_) | Value::I32s(_) | Value::F32s(_));
        if is_array {
            out.extend([(at + 4, 4), (at + 8, 8), (at + 16, 4)]);
        } else {
            out.push((at + 4, (bytes.len() - 4).min(8)));
        }
        at += bytes.len();
    }
    for t in &file.tensors {
        out.push((at, 8));
        at += 8 + t.name.len();
        out.push((at, 4));
        at += 4;
        for _ in &t.extents {
            out.push((at, 8));
            at += 8;
        }
        out.extend([(at, 4), (at + 4, 8)]);
        at += 12;
    }
    out
}

/// One mutation: of the description, or of a field of the bytes, or of any byte.
fn mutate(rng: &mut Rng, valid: &File) -> Vec<u8> {
    let mut file = valid.clone();
    for _ in 0..rng.below(3) {
        match rng.below(8) {
            0 => {
                let i = rng.below(file.keys.len());
                let key = file.keys[i].clone();
                file.keys.push(key);
            }
            1 => {
                let i = rng.below(file.tensors.len());
                let tensor = file.tensors[i].clone();
                file.tensors.push(tensor);
            }
            2 => {
                let i = rng.below(file.tensors.len());
                file.tensors[i].extents = (0..rng.below(6)).map(|_| rng.awkward()).collect();
            }
            3 => {
                let i = rng.below(file.tensors.len());
                file.tensors[i].kind = rng.below(48) as u32;
            }
            4 => {
                let i = rng.below(file.tensors.len());
                let n = rng.below(200);
                file.tensors[i].data.resize(n, 1);
            }
            5 => {
                let numbers = file.keys.iter_mut().filter(|k| matches!(k.1, Value::U32(_) | Value::F32(_)));
                let mut numbers: Vec<_> = numbers.collect();
                let i = rng.below(numbers.len());
                numbers[i].1 = match rng.below(4) {
                    0 => Value::F32(f32::from_bits(rng.next() as u32)),
                    1 => Value::I32(rng.awkward() as i32),
                    _ => Value::U32(rng.awkward() as u32),
                };
            }
            6 => {
                // A tensor more than the model has, or one less.
                let i = rng.below(file.tensors.len());
                let names = ["blk.0.ffn_up.bias", "blk.1.attn_q.weight", "output.scale", "blk.0.ffn_down.scale"];
                file.tensors[i].name = names[rng.below(names.len())].into();
            }
            _ => {
                let i = rng.below(file.keys.len());
                file.keys[i].0 = ["", "\n", "general.alignment", "\u{0}\u{7f}"][rng.below(4)].repeat(1 + rng.below(3));
            }
        }
    }
    let mut bytes = file.bytes();
    let fields = fields(&file);
    for _ in 0..rng.below(4) {
        match rng.below(4) {
            0 => {
                let at = rng.below(bytes.len());
                bytes[at] = rng.next() as u8;
            }
            1 => {
                let end = rng.below(bytes.len());
                bytes.truncate(end.max(1));
            }
            _ => {
                let (at, size) = fields[rng.below(fields.len())];
                let value = match rng.below(3) {
                    0 => rng.awkward(),
                    1 => rng.next() % 16,
                    // The type of an array, where a value's type stands: arrays of arrays.
                    _ => 9,
                };
                if let Some(field) = bytes.get_mut(at..at + size) {
                    field.copy_from_slice(&value.to_le_bytes()[..size]);
                }
            }
        }
    }
    bytes
}

/// What a header that is accepted promises.
fn check(header: &Header, bytes: &[u8]) {
    let mut end = 0;
    for t in &header.tensors {
        assert!(end <= t.begin && t.begin <= t.end && t.end <= bytes.len() as u64, "{}", t.name);
        let weights: u64 = t.shape.iter().product();
        assert_eq!((t.end - t.begin) * t.kind.block(), weights * t.kind.block_bytes(), "{}", t.name);
        end = t.end;
    }
    assert!(header.tensors.len() <= bytes.len() / 32 && header.metadata.len() <= bytes.len() / 13);
}

#[test]
fn mutated_headers_are_refused_in_one_line_or_kept_within_the_file() {
    let (mut rng, valid) = (Rng(0x6A09_E667_F3BC_C909), valid());
    let (mut accepted, mut complaints) = (0, std::collections::BTreeSet::new());
    for round in 0..20_000 {
        let bytes = mutate(&mut rng, &valid);
        let mut result = None;
        let taken = peak(|| result = Some(parse_header(&bytes)));
        // Names, values and a list or two of them; never what a header claims.
        assert!(taken <= 64 * bytes.len() + 4096, "round {round}: {taken} bytes for a file of {}", bytes.len());
        match result.unwrap() {
            Ok(header) => {
                accepted += 1;
                check(&header, &bytes);
            }
            Err(e) => {
                let line = e.to_string();
                assert!(!line.contains(char::is_control) && line.len() < 4096, "round {round}: {line:?}");
                complaints.insert(e.expected.chars().filter(|c| !c.is_ascii_digit()).collect::<String>());
            }
        }
    }
    // The mutations reach deep enough: some survive, the others meet most of the checks.
    assert!(accepted > 1000, "{accepted}");
    for expected in [
        "\"GGUF\"",
        " or ",
        "an array of plain values",
        "each key once",
        "extents of at least ",
        "a tensor type that is known",
        "a power of two of at most ",
        "it at byte ",
        "a flag of  or ",
        " to  extents",
        "a name",
        "UTF-",
        "at most ",
        "a value type of  to ",
        "at most  bytes",
        "an offset that is a multiple of ",
    ] {
        assert!(complaints.contains(expected), "no mutation met {expected:?}: {complaints:?}");
    }
}

/// A whole model: one layer, a vocabulary, a chat template.
fn model() -> File {
    let mut file = File::default();
    file.key("general.architecture", "llama").key("general.alignment", Value::U32(32));
    file.one_layer(&[("attention.head_count_kv", 2), ("rope.dimension_count", 16), ("vocab_size", 32)]);
    file.key("llama.rope.freq_base", Value::F32(1e4)).key("general.sampling.temp", Value::F32(0.6));
    file.key("tokenizer.ggml.model", "gpt2").key("tokenizer.ggml.pre", "qwen2");
    file.key("tokenizer.ggml.tokens", Value::Texts(["a", "b", "ab", "<|im_end|>"].map(String::from).into()));
    file.key("tokenizer.ggml.token_type", Value::I32s(vec![1, 1, 1, 3]));
    file.key("tokenizer.ggml.merges", Value::Texts(vec!["a b".into()]));
    file.key("tokenizer.ggml.eos_token_id", Value::U32(3)).key("tokenizer.ggml.add_bos_token", Value::Bool(false));
    file.key("tokenizer.chat_template", "{{ messages[0].content }}");
    file.f32s("token_embd.weight", &[32, 32], &[0.25; 1024]);
    file.norms_of_one_layer();
    // Q4_0, Q8_0, MXFP4, Q4_1, IQ4_NL, Q5_0, F16: code, bytes of a row of 32.
    let kinds = [(2, 18), (8, 34), (39, 17), (3, 20), (20, 18), (6, 22), (1, 64)];
    let names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    for (name, (kind, bytes)) in names.iter().zip(kinds) {
        let name = format!("blk.0.{name}.weight");
        file.tensors.push(Tensor { name, extents: vec![32, 32], kind, data: vec![5; bytes * 32] });
    }
    file
}

/// The same with pieces and scores for a vocabulary, and with tensors of scales.
fn scored() -> File {
    let mut file = model();
    file.keys.retain(|(key, _)| !key.starts_with("tokenizer.") && key != "llama.feed_forward_length");
    file.key("llama.feed_forward_length", Value::U32(64)).key("tokenizer.ggml.model", "llama");
    let pieces = ["<unk>", "<s>", "</s>", "\u{2581}", "a", "b", "ab", "\u{2581}ab"];
    file.key("tokenizer.ggml.tokens", Value::Texts(pieces.map(String::from).into()));
    file.key("tokenizer.ggml.scores", Value::F32s(vec![0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0]));
    file.key("tokenizer.ggml.token_type", Value::I32s(vec![2, 3, 3, 1, 1, 1, 1, 1]));
    file.key("tokenizer.ggml.add_space_prefix", Value::Bool(true));
    // NVFP4: 36 bytes for 64 weights.
    file.tensors.retain(|t| !t.name.starts_with("blk.0.ffn") || t.name.contains("norm"));
    for (name, extents, kind, bytes) in
        [("gate", [32, 64], 8, 34 * 64), ("up", [32, 64], 2, 18 * 64), ("down", [64, 32], 40, 36 * 32)]
    {
        let (name, extents) = (format!("blk.0.ffn_{name}.weight"), extents.to_vec());
        file.tensors.push(Tensor { name, extents, kind, data: vec![5; bytes] });
    }
    file.f32s("blk.0.ffn_down.scale", &[1], &[0.5]).f32s("output.weight", &[32, 32], &[0.5; 1024]);
    file.f32s("output.scale", &[1], &[2.0]);
    file
}

/// What a bake does before its graphs, and what it does with every block of weights after them.
fn prepare(path: &Path, whole: bool) -> Result<(), String> {
    let one_line = |e: &dyn std::fmt::Display| e.to_string();
    let checkpoint = Checkpoint::open(path).map_err(|e| one_line(&e))?;
    let options = BuildOptions { context: Some(32), ..BuildOptions::default() };
    let prepared = Prepared::new(&checkpoint, &options, &Silent).map_err(|e| one_line(&e))?;
    front::chat(&checkpoint, prepared.model.vocab()).map_err(|e| one_line(&e))?;
    if whole && let Some(json) = checkpoint.read_file("tokenizer.json").map_err(|e| one_line(&e))? {
        tokenizer::compile(&json).map_err(|e| one_line(&e))?;
    }
    let sink = |_, _, _, _: &[u8]| Ok::<(), String>(());
    produce(&prepared.resolved, &sink, &|_| {}).map_err(|e| one_line(&e))
}

#[test]
fn mutated_models_are_refused_in_one_line_on_the_road_of_a_bake() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let valid = [model(), scored()];
    for valid in &valid {
        std::fs::write(&path, valid.bytes()).unwrap();
        assert_eq!(prepare(&path, true), Ok(()));
    }
    let mut rng = Rng(0xBB67_AE85_84CA_A73B);
    let (mut accepted, mut complaints) = (0, String::new());
    for round in 0..20_000 {
        let mut bytes = mutate(&mut rng, &valid[round % 2]);
        if rng.below(8) == 0 {
            // Scales that are no numbers.
            let at = bytes.len() - rng.below(bytes.len().min(6000));
            bytes[at..].iter_mut().take(40).for_each(|b| *b = 0xff);
        }
        // A new file: some file systems write one to disk that is written over.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        let mut result = None;
        let taken = peak(|| result = Some(prepare(&path, round % 50 < 2)));
        // As many layers as a recipe allows are declared before the first of their tensors is
        // missed; compiled tokenizers have a class for every character there is.
        assert!(taken <= 64 * bytes.len() + (32 << 20), "round {round}: {taken} bytes for a file of {}", bytes.len());
        match result.unwrap() {
            Ok(()) => accepted += 1,
            Err(line) => {
                assert!(!line.contains(char::is_control) && line.len() < 4096, "round {round}: {line:?}");
                complaints += &line;
                complaints.push('\n');
            }
        }
    }
    assert!(accepted > 1000, "{accepted}");
    for stage in [
        "magic: expected \"GGUF\"",
        "expected each key once",
        "expected it at byte",
        "key \"general.architecture\": expected one of",
        "key \"llama.block_count\": expected",
        "key \"tokenizer.ggml.pre\": expected one of",
        "key \"tokenizer.ggml.merges\": expected",
        "generation_config.json: temperature: expected",
        "config.json: \"rms_norm_eps\": expected",
        "expected a finite number",
        "expected shape",
        "looked for blk.0.",
        "expected only what the model has",
        "key \"tokenizer.ggml.scores\": expected",
        "tensor output.scale: expected",
        "weight model.layers.0.mlp.down_proj.weight, row ",
    ] {
        assert!(complaints.contains(stage), "no mutation met {stage:?}");
    }
}

#[test]
fn the_valid_file_is_read_and_the_allocator_measures() {
    let bytes = valid().bytes();
    let header = parse_header(&bytes).unwrap();
    check(&header, &bytes);
    assert_eq!((header.version, header.tensors.len(), header.metadata.len()), (3, 5, 10));
    assert!(peak(|| drop(std::hint::black_box(vec![0u8; 1 << 20]))) >= 1 << 20);
    // Version 2 has the same layout; 1 and big-endian files do not.
    for (version, complaint) in
        [(2u32, None), (1, Some("expected 2 or 3, found 1")), (3 << 24, Some("a big-endian one"))]
    {
        let mut other = bytes.clone();
        other[4..8].copy_from_slice(&version.to_le_bytes());
        let error = parse_header(&other).err().map(|e| e.to_string());
        assert!(error.as_deref().unwrap_or_default().contains(complaint.unwrap_or_default()), "{error:?}");
        assert_eq!(error.is_none(), complaint.is_none());
    }
}
