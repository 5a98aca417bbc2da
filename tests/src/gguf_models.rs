//! Tiny GGUF models whose every byte follows from their names, so that two languages can write the
//! same files.
//!
//! `tests/fixtures/make_gguf_logits.py` writes them too, and has llama.cpp compute their logits. A
//! tensor's bytes are those of splitmix64, seeded by the FNV-1a hash of `MODEL/TENSOR`; factors in
//! f16 get an exponent under which weights stay small, and what is f32 is made of bytes that are
//! exact in f32.

use super::gguf::{File, Tensor, Value};

/// A type of weights: name, code, weights and bytes of a block, where its f16 factors are, their
/// exponent field. Of types with E2M1 codes: where their scales are, a byte each, and the least.
pub type Kind = (&'static str, u32, u64, usize, &'static [usize], u8);

/// The types that matrices come in.
pub const KINDS: [Kind; 17] = [
    ("Q4_0", 2, 32, 18, &[0], 9),
    ("Q4_1", 3, 32, 20, &[0, 2], 7),
    ("Q5_0", 6, 32, 22, &[0], 8),
    ("Q5_1", 7, 32, 24, &[0, 2], 6),
    ("Q8_0", 8, 32, 34, &[0], 5),
    ("Q2_K", 10, 256, 84, &[80, 82], 7),
    ("Q3_K", 11, 256, 110, &[108], 6),
    ("Q4_K", 12, 256, 144, &[0, 2], 3),
    ("Q5_K", 13, 256, 176, &[0, 2], 2),
    ("Q6_K", 14, 256, 210, &[208], 1),
    ("IQ4_NL", 20, 32, 18, &[0], 5),
    ("IQ4_XS", 23, 256, 136, &[0], 1),
    ("MXFP4", 39, 32, 17, &[0], 116),
    ("NVFP4", 40, 64, 36, &[0, 1, 2, 3], 8),
    ("TQ1_0", 34, 256, 54, &[52], 11),
    ("TQ2_0", 35, 256, 66, &[64], 11),
    ("F32", 0, 1, 4, &[], 0),
];

/// Hidden size, and the inner size of every feed-forward block.
pub const HIDDEN: u64 = 256;
/// Tokens.
pub const VOCAB: u64 = 48;

const USUAL: &[&str] = &["F32", "Q4_K", "Q6_K"];
const WITH_Q8_0: &[&str] = &["F32", "Q4_K", "Q6_K", "Q8_0"];

/// Every model whose logits by llama.cpp are committed, and the types that its matrices come in;
/// no type stands for all.
const MODELS: [(&str, &[&str]); 15] = [
    ("llama", WITH_Q8_0),
    ("llama+tied", USUAL),
    ("llama+freqs", USUAL),
    ("mistral", USUAL),
    ("mistral+window", &["Q4_K"]),
    ("qwen2", USUAL),
    ("qwen3", &[]),
    ("qwen3+scaled", &["NVFP4"]),
    ("qwen3moe", WITH_Q8_0),
    ("qwen3moe+scaled", &["NVFP4"]),
    ("qwen3next", WITH_Q8_0),
    ("qwen35", WITH_Q8_0),
    ("qwen35moe", &["F32", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS"]),
    ("qwen35moe+fused", &["F32", "Q4_K"]),
    ("qwen35moe+scaled", &["NVFP4"]),
];

/// Drawn a second time. The delta rule's first output is a multiple of v by the product of q and
/// k, which a norm then takes to one size: at first that product was 6e-4 of 1, less than int8
/// rounding, so that rounding chose the sign.
const REDRAWN: [&str; 1] = ["qwen3next-Q6_K"];

/// Models whose logits by llama.cpp are committed, and their types.
pub fn models() -> Vec<(&'static str, &'static str)> {
    let mut out = Vec::new();
    for (name, kinds) in MODELS {
        out.extend(kinds.iter().map(|kind| (name, *kind)));
        out.extend(KINDS.iter().filter(|_| kinds.is_empty()).map(|kind| (name, kind.0)));
    }
    out
}

/// `n` bytes of the stream of a name.
pub fn stream(name: &str, n: usize) -> Vec<u8> {
    let mut x =
        name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
    let mut next = || {
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    let mut out = Vec::with_capacity(n + 8);
    while out.len() < n {
        out.extend(next().to_le_bytes());
    }
    out.truncate(n);
    out
}

/// Extents of a model, of which a hybrid has two blocks.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Hidden size.
    pub hidden: u64,
    /// Inner size of every feed-forward block.
    pub inner: u64,
    /// Tokens.
    pub vocab: u64,
    /// Blocks.
    pub blocks: usize,
    /// Heads of 64 elements, half as many for keys and values.
    pub heads: u64,
}

/// A model with matrices of a type: of an architecture, or `mistral`, which is `llama` with heads
/// that are together wider than the hidden state, as Mistral Nemo's are. A variant may follow:
/// `+tied`, without an LM head of its own; `+freqs`, with divisors of rope's frequencies;
/// `+window`, with a window as wide as Mistral 7B's; `+fused`, with gate and up rows of every
/// expert in one tensor; `+scaled`, of NVFP4, with a tensor of scales beside every matrix.
///
/// # Panics
/// For a type or an architecture that there is none of.
pub fn model(name: &str, kind: &str) -> File {
    let heads = if name.starts_with("mistral") { 8 } else { 4 };
    sized(name, kind, Sizes { hidden: HIDDEN, inner: HIDDEN, vocab: VOCAB, blocks: 2, heads })
}

/// The same in other sizes. `Q4_K_M` is the mix of that name: Q4_K, with values' and down
/// projections and the LM head in Q6_K.
///
/// # Panics
/// As [`model`] does.
pub fn sized(name: &str, kind: &str, sizes: Sizes) -> File {
    let row = |kind: &str| *KINDS.iter().find(|row| row.0 == kind).expect("a type of the table");
    let (kind_of, better) = if kind == "Q4_K_M" { ("Q4_K", "Q6_K") } else { (kind, kind) };
    let (family, variant) = name.split_once('+').unwrap_or((name, ""));
    let arch = if family == "mistral" { "llama" } else { family };
    let mut stream = format!("{name}-{kind}");
    if REDRAWN.contains(&stream.as_str()) {
        stream.push('2');
    }
    let mut m = Model {
        stream,
        kind: row(kind_of),
        better: row(better),
        arch: arch.into(),
        variant: variant.into(),
        hybrid: matches!(arch, "qwen3next" | "qwen35" | "qwen35moe"),
        mixture: matches!(arch, "qwen3moe" | "qwen3next" | "qwen35moe"),
        sizes,
        file: File::default(),
    };
    assert!(m.hybrid || matches!(arch, "llama" | "qwen2" | "qwen3" | "qwen3moe"), "{arch}");
    m.write();
    m.file
}

struct Model {
    /// Whose bytes tensors take.
    stream: String,
    kind: Kind,
    /// Of what files in a mix of types have more bits for.
    better: Kind,
    arch: String,
    variant: String,
    /// Has blocks of the delta rule.
    hybrid: bool,
    /// Has experts.
    mixture: bool,
    sizes: Sizes,
    file: File,
}

impl Model {
    fn write(&mut self) {
        let Sizes { hidden, vocab, blocks, .. } = self.sizes;
        self.keys();
        self.matrix("token_embd.weight", &[hidden, vocab]);
        if self.variant != "tied" {
            self.matrix("output.weight", &[hidden, vocab]);
        }
        self.norm("output_norm.weight", hidden);
        if self.variant == "freqs" {
            self.vector("rope_freqs.weight", &[32], |b| 1.0 + f32::from(b) / 32.0);
        }
        assert!(!self.hybrid || blocks == 2);
        for b in 0..blocks {
            let block = format!("blk.{b}");
            self.norm(&format!("{block}.attn_norm.weight"), hidden);
            let second = if self.hybrid { "post_attention_norm" } else { "ffn_norm" };
            self.norm(&format!("{block}.{second}.weight"), hidden);
            if self.hybrid && b == 0 {
                self.delta_rule(&block);
            } else {
                self.attention(&block);
            }
            if self.mixture {
                self.experts(&block);
            } else {
                self.feed_forward(&block, "");
            }
        }
    }

    fn keys(&mut self) {
        let Sizes { hidden, inner, vocab, blocks, heads } = self.sizes;
        let arch = self.arch.clone();
        self.file.key("general.architecture", arch.as_str()).key("general.alignment", Value::U32(32));
        self.file.key("tokenizer.ggml.model", "none");
        let mut numbers = vec![
            ("block_count", blocks as u64),
            ("context_length", 64),
            ("embedding_length", hidden),
            ("feed_forward_length", inner),
            ("attention.head_count", heads),
            ("attention.head_count_kv", heads / 2),
            ("attention.key_length", 64),
            ("attention.value_length", 64),
            ("vocab_size", vocab),
        ];
        if self.variant == "window" {
            numbers.push(("attention.sliding_window", 4096));
        }
        if self.mixture {
            numbers.extend([("expert_count", 4), ("expert_used_count", 2), ("expert_feed_forward_length", inner)]);
        }
        if self.mixture && self.hybrid {
            numbers.push(("expert_shared_feed_forward_length", inner));
        }
        if self.hybrid {
            numbers.extend([
                ("ssm.conv_kernel", 4),
                ("ssm.state_size", 64),
                ("ssm.group_count", 2),
                ("ssm.time_step_rank", 4),
                ("ssm.inner_size", 256),
                ("full_attention_interval", 2),
                ("rope.dimension_count", 16),
            ]);
        }
        for (name, n) in numbers {
            self.file.key(&format!("{arch}.{name}"), Value::U32(n as u32));
        }
        self.file.key(&format!("{arch}.attention.layer_norm_rms_epsilon"), Value::F32(1e-6));
        self.file.key(&format!("{arch}.rope.freq_base"), Value::F32(10000.0));
        if arch.starts_with("qwen35") {
            // In turns, as published; a frequency that falls to none is not turned by llama.cpp.
            self.file.key(&format!("{arch}.rope.dimension_sections"), Value::I32s(vec![3, 3, 2, 0]));
        }
    }

    fn attention(&mut self, block: &str) {
        let Sizes { hidden, heads, .. } = self.sizes;
        let (q, k) = (64 * heads, 32 * heads);
        // Of queries, and of gates.
        let rows = if self.hybrid { 2 * q } else { q };
        self.matrix(&format!("{block}.attn_q.weight"), &[hidden, rows]);
        self.matrix(&format!("{block}.attn_k.weight"), &[hidden, k]);
        self.matrix(&format!("{block}.attn_v.weight"), &[hidden, k]);
        self.matrix(&format!("{block}.attn_output.weight"), &[q, hidden]);
        match self.arch.as_str() {
            "qwen2" => {
                for (name, n) in [("q", q), ("k", k), ("v", k)] {
                    self.vector(&format!("{block}.attn_{name}.bias"), &[n], |b| signed(b) / 256.0);
                }
            }
            "llama" => {}
            _ => {
                self.norm(&format!("{block}.attn_q_norm.weight"), 64);
                self.norm(&format!("{block}.attn_k_norm.weight"), 64);
            }
        }
    }

    /// Key heads of 64, two of them; value heads of 64, four.
    fn delta_rule(&mut self, block: &str) {
        let hidden = self.sizes.hidden;
        self.matrix(&format!("{block}.attn_qkv.weight"), &[hidden, 512]);
        self.matrix(&format!("{block}.attn_gate.weight"), &[hidden, 256]);
        let apart: &[(&str, u64)] = if self.arch == "qwen3next" { &[("ba", 8)] } else { &[("alpha", 4), ("beta", 4)] };
        for (name, rows) in apart {
            self.matrix(&format!("{block}.ssm_{name}.weight"), &[hidden, *rows]);
        }
        self.vector(&format!("{block}.ssm_conv1d.weight"), &[4, 512], |b| signed(b) / 256.0);
        self.vector(&format!("{block}.ssm_a"), &[4], |b| -(1.0 + f32::from(b)) / 64.0);
        self.vector(&format!("{block}.ssm_dt.bias"), &[4], |b| signed(b) / 64.0);
        self.norm(&format!("{block}.ssm_norm.weight"), 64);
        self.matrix(&format!("{block}.ssm_out.weight"), &[256, hidden]);
    }

    fn feed_forward(&mut self, block: &str, suffix: &str) {
        let Sizes { hidden, inner, .. } = self.sizes;
        for (name, extents) in [("gate", [hidden, inner]), ("up", [hidden, inner]), ("down", [inner, hidden])] {
            self.matrix(&format!("{block}.ffn_{name}{suffix}.weight"), &extents);
        }
    }

    /// Four of them, and one that the hybrids share.
    fn experts(&mut self, block: &str) {
        let Sizes { hidden, inner, .. } = self.sizes;
        self.vector(&format!("{block}.ffn_gate_inp.weight"), &[hidden, 4], |b| signed(b) / 256.0);
        if self.hybrid {
            self.vector(&format!("{block}.ffn_gate_inp_shexp.weight"), &[hidden], |b| signed(b) / 1024.0);
        }
        if self.variant == "fused" {
            self.matrix(&format!("{block}.ffn_gate_up_exps.weight"), &[hidden, 2 * inner, 4]);
        } else {
            self.matrix(&format!("{block}.ffn_gate_exps.weight"), &[hidden, inner, 4]);
            self.matrix(&format!("{block}.ffn_up_exps.weight"), &[hidden, inner, 4]);
        }
        self.matrix(&format!("{block}.ffn_down_exps.weight"), &[inner, hidden, 4]);
        if self.hybrid {
            self.feed_forward(block, "_shexp");
        }
    }

    /// A matrix, or several, in the model's type: extents innermost first.
    fn matrix(&mut self, name: &str, extents: &[u64]) {
        let better = name == "output.weight" || ["attn_v.", "ffn_down."].iter().any(|part| name.contains(part));
        let (_, code, block, bytes, factors, exponent) = if better { self.better } else { self.kind };
        let blocks = (extents.iter().product::<u64>() / block) as usize;
        if code == 0 {
            // Weights of about the size of the others.
            return self.vector(name, extents, |b| signed(b) / 1024.0);
        }
        let mut data = stream(&format!("{}/{name}", self.stream), blocks * bytes);
        // llama.cpp has none for embeddings.
        let scaled = self.variant == "scaled" && name != "token_embd.weight";
        for block in data.chunks_exact_mut(bytes) {
            for &at in factors {
                match code {
                    // Scales of NVFP4 are 64 times as large where another number makes up for it.
                    39 | 40 => block[at] = (block[at] & 7) + exponent + if scaled { 48 } else { 0 },
                    _ => block[at + 1] = block[at + 1] & 0x83 | exponent << 2,
                }
            }
        }
        self.file.tensors.push(Tensor { name: name.into(), extents: extents.to_vec(), kind: code, data });
        if scaled {
            let matrices = extents.get(2).copied().unwrap_or(1);
            let name = name.replace(".weight", ".scale");
            self.vector(&name, &[matrices], |b| (1.0 + f32::from(b) / 256.0) / 64.0);
        }
    }

    /// Numbers in f32, each from a byte.
    fn vector(&mut self, name: &str, extents: &[u64], of: fn(u8) -> f32) {
        let bytes = stream(&format!("{}/{name}", self.stream), extents.iter().product::<u64>() as usize);
        let values: Vec<f32> = bytes.into_iter().map(of).collect();
        self.file.f32s(name, extents, &values);
    }

    fn norm(&mut self, name: &str, n: u64) {
        self.vector(name, &[n], |b| 1.0 + signed(b) / 1024.0);
    }
}

/// A byte around zero.
fn signed(b: u8) -> f32 {
    f32::from(i16::from(b) - 128)
}
