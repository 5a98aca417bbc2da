//! Tiny GGUF models whose every byte follows from their names, so that two languages can write the
//! same files.
//!
//! `tests/fixtures/make_gguf_logits.py` writes them too, and has llama.cpp compute their logits. A
//! tensor's bytes are those of splitmix64, seeded by the FNV-1a hash of `MODEL/TENSOR`; factors in
//! f16 get an exponent under which weights stay small, and what is f32 is made of bytes that are
//! exact in f32.

use super::gguf::{File, Tensor, Value};

/// A type of weights: name, code, weights and bytes of a block, where its f16 factors are, their
/// exponent field.
pub type Kind = (&'static str, u32, u64, usize, &'static [usize], u8);

/// The types that matrices come in.
pub const KINDS: [Kind; 15] = [
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
    ("TQ1_0", 34, 256, 54, &[52], 11),
    ("TQ2_0", 35, 256, 66, &[64], 11),
    ("F32", 0, 1, 4, &[], 0),
];

/// Hidden size, and the inner size of every feed-forward block.
pub const HIDDEN: u64 = 256;
/// Tokens.
pub const VOCAB: u64 = 48;

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

struct Model {
    name: String,
    kind: Kind,
    /// Of what files in a mix of types have more bits for.
    better: Kind,
    file: File,
}

impl Model {
    /// A matrix, or several, in the model's type: extents innermost first.
    fn matrix(&mut self, name: &str, extents: &[u64]) {
        let better = name == "output.weight" || ["attn_v.", "ffn_down."].iter().any(|part| name.contains(part));
        let (_, code, block, bytes, factors, exponent) = if better { self.better } else { self.kind };
        let blocks = (extents.iter().product::<u64>() / block) as usize;
        if code == 0 {
            // Weights of about the size of the others.
            return self.vector(name, extents, |b| f32::from(i16::from(b) - 128) / 1024.0);
        }
        let mut data = stream(&format!("{}/{name}", self.name), blocks * bytes);
        for block in data.chunks_exact_mut(bytes) {
            for &at in factors {
                block[at + 1] = block[at + 1] & 0x83 | exponent << 2;
            }
        }
        self.file.tensors.push(Tensor { name: name.into(), extents: extents.to_vec(), kind: code, data });
    }

    /// Numbers in f32, each from a byte.
    fn vector(&mut self, name: &str, extents: &[u64], of: fn(u8) -> f32) {
        let bytes = stream(&format!("{}/{name}", self.name), extents.iter().product::<u64>() as usize);
        let values: Vec<f32> = bytes.into_iter().map(of).collect();
        self.file.f32s(name, extents, &values);
    }

    fn norm(&mut self, name: &str, n: u64) {
        self.vector(name, &[n], |b| 1.0 + f32::from(i16::from(b) - 128) / 1024.0);
    }
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

/// The model of an architecture (`qwen2`, `qwen3`, `qwen35moe`; `qwen35moe+fused` has gate and up
/// rows of every expert in one tensor) with matrices of a type.
///
/// # Panics
/// For a type or an architecture that there is none of.
pub fn model(name: &str, kind: &str) -> File {
    sized(name, kind, Sizes { hidden: HIDDEN, inner: HIDDEN, vocab: VOCAB, blocks: 2, heads: 4 })
}

/// The same in other sizes. `Q4_K_M` is the mix of that name: Q4_K, with values' and down
/// projections and the LM head in Q6_K.
///
/// # Panics
/// As [`model`] does.
pub fn sized(name: &str, kind: &str, sizes: Sizes) -> File {
    let Sizes { hidden, inner, vocab, blocks, heads } = sizes;
    let row = |kind: &str| *KINDS.iter().find(|row| row.0 == kind).expect("a type of the table");
    let (kind_of, better) = if kind == "Q4_K_M" { ("Q4_K", "Q6_K") } else { (kind, kind) };
    let (kind_of, better) = (row(kind_of), row(better));
    let mut m = Model { name: format!("{name}-{kind}"), kind: kind_of, better, file: File::default() };
    let (arch, fused) = name.strip_suffix("+fused").map_or((name, false), |arch| (arch, true));
    let key = |m: &mut Model, name: &str, value: Value| {
        m.file.key(&format!("{arch}.{name}"), value);
    };
    m.file.key("general.architecture", arch).key("general.alignment", Value::U32(32));
    m.file.key("tokenizer.ggml.model", "none");
    for (name, n) in [
        ("block_count", blocks as u32),
        ("context_length", 64),
        ("embedding_length", hidden as u32),
        ("feed_forward_length", inner as u32),
        ("attention.head_count", heads as u32),
        ("attention.head_count_kv", heads as u32 / 2),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
        ("vocab_size", vocab as u32),
    ] {
        key(&mut m, name, Value::U32(n));
    }
    key(&mut m, "attention.layer_norm_rms_epsilon", Value::F32(1e-6));
    key(&mut m, "rope.freq_base", Value::F32(10000.0));
    m.matrix("token_embd.weight", &[hidden, vocab]);
    m.matrix("output.weight", &[hidden, vocab]);
    m.norm("output_norm.weight", hidden);
    if matches!(arch, "qwen2" | "qwen3") {
        for b in 0..blocks {
            attention(&mut m, b, hidden, 64 * heads, [64 * heads, 32 * heads], "ffn_norm");
            m.matrix(&format!("blk.{b}.ffn_gate.weight"), &[hidden, inner]);
            m.matrix(&format!("blk.{b}.ffn_up.weight"), &[hidden, inner]);
            m.matrix(&format!("blk.{b}.ffn_down.weight"), &[inner, hidden]);
        }
        return m.file;
    }
    assert_eq!((arch, blocks, heads), ("qwen35moe", 2, 4));
    for (name, n) in [
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", inner as u32),
        ("expert_shared_feed_forward_length", inner as u32),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 64),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 256),
        ("full_attention_interval", 2),
        ("rope.dimension_count", 16),
    ] {
        key(&mut m, name, Value::U32(n));
    }
    key(&mut m, "rope.dimension_sections", Value::I32s(vec![4, 2, 2, 0]));
    // Key heads of 64, two of them; value heads of 64, four.
    m.norm("blk.0.attn_norm.weight", hidden);
    m.norm("blk.0.post_attention_norm.weight", hidden);
    m.matrix("blk.0.attn_qkv.weight", &[hidden, 512]);
    m.matrix("blk.0.attn_gate.weight", &[hidden, 256]);
    m.matrix("blk.0.ssm_alpha.weight", &[hidden, 4]);
    m.matrix("blk.0.ssm_beta.weight", &[hidden, 4]);
    m.vector("blk.0.ssm_conv1d.weight", &[4, 512], |b| f32::from(i16::from(b) - 128) / 256.0);
    m.vector("blk.0.ssm_a", &[4], |b| -(1.0 + f32::from(b)) / 64.0);
    m.vector("blk.0.ssm_dt.bias", &[4], |b| f32::from(i16::from(b) - 128) / 64.0);
    m.norm("blk.0.ssm_norm.weight", 64);
    m.matrix("blk.0.ssm_out.weight", &[256, hidden]);
    attention(&mut m, 1, hidden, 512, [256, 128], "post_attention_norm");
    for b in 0..2 {
        m.vector(&format!("blk.{b}.ffn_gate_inp.weight"), &[hidden, 4], |b| f32::from(i16::from(b) - 128) / 256.0);
        m.vector(&format!("blk.{b}.ffn_gate_inp_shexp.weight"), &[hidden], |b| f32::from(i16::from(b) - 128) / 1024.0);
        if fused {
            m.matrix(&format!("blk.{b}.ffn_gate_up_exps.weight"), &[hidden, 2 * inner, 4]);
        }
        let apart = [("gate", [hidden, inner]), ("up", [hidden, inner]), ("down", [inner, hidden])];
        for (name, [from, to]) in if fused { &apart[2..] } else { &apart } {
            m.matrix(&format!("blk.{b}.ffn_{name}_exps.weight"), &[*from, *to, 4]);
        }
        for (name, extents) in &apart {
            m.matrix(&format!("blk.{b}.ffn_{name}_shexp.weight"), extents);
        }
    }
    m.file
}

/// Norms and attention of a block; `q` rows of queries, gates included, so many without, and so
/// many of keys.
fn attention(m: &mut Model, b: usize, hidden: u64, q: u64, [heads, keys]: [u64; 2], second_norm: &str) {
    m.norm(&format!("blk.{b}.attn_norm.weight"), hidden);
    m.norm(&format!("blk.{b}.{second_norm}.weight"), hidden);
    m.matrix(&format!("blk.{b}.attn_q.weight"), &[hidden, q]);
    m.matrix(&format!("blk.{b}.attn_k.weight"), &[hidden, keys]);
    m.matrix(&format!("blk.{b}.attn_v.weight"), &[hidden, keys]);
    m.matrix(&format!("blk.{b}.attn_output.weight"), &[heads, hidden]);
    if m.name.starts_with("qwen2-") {
        for (name, n) in [("q", q), ("k", keys), ("v", keys)] {
            m.vector(&format!("blk.{b}.attn_{name}.bias"), &[n], |b| f32::from(i16::from(b) - 128) / 256.0);
        }
        return;
    }
    m.norm(&format!("blk.{b}.attn_q_norm.weight"), 64);
    m.norm(&format!("blk.{b}.attn_k_norm.weight"), 64);
}
