"""Models with random weights, written once for both engines.

A model is a config.json. Its weights are drawn in the order of the file, rounded to bf16, and written to two files that
hold the same numbers: `model.safetensors` under the names of published checkpoints, for `bake`, and `model.gguf`, for
llama.cpp's own quantiser. Matrices have zero mean and variance 1 / inputs, so activations stay sane. A byte-level
vocabulary of the true size, made of random merges, stands in both as well, since loading it is part of starting up.

What this does not do: the numbers say nothing; only shapes, formats and sizes are those of published models.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

VOCAB = 151936
TEXT_TOKENS = 151643

SHARED = {"rms_norm_eps": 1e-6, "vocab_size": VOCAB, "attention_bias": False, "hidden_act": "silu", "eos_token_id": 151645,
          "max_position_embeddings": 40960}

CONFIGS = {
    "dense": {  # Qwen3-0.6B
        **SHARED, "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    "moe": {  # Qwen3-30B-A3B, narrower and with fewer experts and layers
        **SHARED, "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 3072, "moe_intermediate_size": 768,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rope_theta": 1000000, "tie_word_embeddings": False,
    },
    "hybrid": {  # Qwen3.6-35B-A3B, narrower and with fewer experts and layers
        "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
        "text_config": {
            **SHARED, "model_type": "qwen3_5_moe_text", "hidden_size": 1024, "num_hidden_layers": 12,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 64,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        },
    },
}


# Too large to be drawn in bf16 and quantised: see `write_direct`.
FULL = Path(__file__).resolve().parent.parent / "tests/fixtures/configs/qwen3_6_35b_a3b/config.json"


@dataclass
class Weight:
    """One weight: its name in either file, its shape (outermost first), and how it is drawn."""

    hf: str
    gguf: str
    shape: tuple
    law: str = "matrix"

    @property
    def dense_in_gguf(self):
        """Whether GGUF files keep it in f32: vectors, convolutions, routers."""
        return len(self.shape) == 1 or self.law in ("conv", "router", "gate")


def text(config):
    return config.get("text_config", config)


def weights(config):
    """Every weight of a model, in file order."""
    c = text(config)
    hidden, heads, kv, dim = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    hybrid, moe = c["model_type"] == "qwen3_5_moe_text", "num_experts" in c
    # Norms of the hybrid family are stored as an offset from 1.
    norm = "zero" if hybrid else "one"
    yield Weight("model.embed_tokens.weight", "token_embd.weight", (c["vocab_size"], hidden))
    for l in range(c["num_hidden_layers"]):
        h, g = f"model.layers.{l}.", f"blk.{l}."
        yield Weight(h + "input_layernorm.weight", g + "attn_norm.weight", (hidden,), norm)
        if hybrid and (l + 1) % c["full_attention_interval"]:
            keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
            v_heads = c["linear_num_value_heads"]
            values = v_heads * c["linear_value_head_dim"]
            a = h + "linear_attn."
            yield Weight(a + "in_proj_qkv.weight", g + "attn_qkv.weight", (2 * keys + values, hidden))
            yield Weight(a + "in_proj_z.weight", g + "attn_gate.weight", (values, hidden))
            yield Weight(a + "in_proj_b.weight", g + "ssm_beta.weight", (v_heads, hidden))
            yield Weight(a + "in_proj_a.weight", g + "ssm_alpha.weight", (v_heads, hidden))
            yield Weight(a + "conv1d.weight", g + "ssm_conv1d.weight", (2 * keys + values, c["linear_conv_kernel_dim"]), "conv")
            yield Weight(a + "A_log", g + "ssm_a", (v_heads,), "a_log")
            yield Weight(a + "dt_bias", g + "ssm_dt.bias", (v_heads,), "dt_bias")
            yield Weight(a + "norm.weight", g + "ssm_norm.weight", (c["linear_value_head_dim"],), "one")
            yield Weight(a + "out_proj.weight", g + "ssm_out.weight", (hidden, values))
        else:
            a = h + "self_attn."
            # The hybrid's queries bring their own gates.
            yield Weight(a + "q_proj.weight", g + "attn_q.weight", ((2 if hybrid else 1) * heads * dim, hidden))
            yield Weight(a + "k_proj.weight", g + "attn_k.weight", (kv * dim, hidden))
            yield Weight(a + "v_proj.weight", g + "attn_v.weight", (kv * dim, hidden))
            yield Weight(a + "o_proj.weight", g + "attn_output.weight", (hidden, heads * dim))
            yield Weight(a + "q_norm.weight", g + "attn_q_norm.weight", (dim,), norm)
            yield Weight(a + "k_norm.weight", g + "attn_k_norm.weight", (dim,), norm)
        ffn_norm = "post_attention_norm.weight" if hybrid else "ffn_norm.weight"
        yield Weight(h + "post_attention_layernorm.weight", g + ffn_norm, (hidden,), norm)
        if not moe:
            inner = c["intermediate_size"]
            yield Weight(h + "mlp.gate_proj.weight", g + "ffn_gate.weight", (inner, hidden))
            yield Weight(h + "mlp.up_proj.weight", g + "ffn_up.weight", (inner, hidden))
            yield Weight(h + "mlp.down_proj.weight", g + "ffn_down.weight", (hidden, inner))
            continue
        experts, inner = c["num_experts"], c["moe_intermediate_size"]
        yield Weight(h + "mlp.gate.weight", g + "ffn_gate_inp.weight", (experts, hidden), "router")
        m = h + "mlp.switch_mlp."
        yield Weight(m + "gate_proj.weight", g + "ffn_gate_exps.weight", (experts, inner, hidden))
        yield Weight(m + "up_proj.weight", g + "ffn_up_exps.weight", (experts, inner, hidden))
        yield Weight(m + "down_proj.weight", g + "ffn_down_exps.weight", (experts, hidden, inner))
        if hybrid:
            inner, s = c["shared_expert_intermediate_size"], h + "mlp.shared_expert"
            yield Weight(s + ".gate_proj.weight", g + "ffn_gate_shexp.weight", (inner, hidden))
            yield Weight(s + ".up_proj.weight", g + "ffn_up_shexp.weight", (inner, hidden))
            yield Weight(s + ".down_proj.weight", g + "ffn_down_shexp.weight", (hidden, inner))
            yield Weight(s + "_gate.weight", g + "ffn_gate_inp_shexp.weight", (1, hidden), "gate")
    yield Weight("model.norm.weight", "output_norm.weight", (hidden,), norm)
    if not config.get("tie_word_embeddings"):
        yield Weight("lm_head.weight", "output.weight", (c["vocab_size"], hidden))


def draw(w, rng):
    """The weight's values, f32."""
    if w.law in ("one", "zero"):
        return np.full(w.shape, 1.0 if w.law == "one" else 0.0, np.float32)
    if w.law == "a_log":
        return np.log(rng.integers(1, 17, w.shape)).astype(np.float32)
    if w.law == "dt_bias":
        return rng.uniform(-6.9, -2.25, w.shape).astype(np.float32)
    if w.law == "conv":
        return rng.uniform(-0.5, 0.5, w.shape).astype(np.float32)
    return rng.standard_normal(w.shape, np.float32) * np.float32(1 / math.sqrt(w.shape[-1]))


def to_bf16(x):
    """Upper halves, rounded to nearest even, as u16."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def gguf_values(w, stored, config):
    """What a GGUF file holds for a weight that is not a matrix, f32, from the bf16 values of the checkpoint."""
    values = from_bf16(stored)
    if w.law == "a_log":
        return -np.exp(values)
    if w.law == "zero":
        return values + 1
    return values.reshape(w.shape[-1:]) if w.law == "gate" else values


def write(config, out, seed=1):
    """Writes the checkpoint folder `out` (config, tokenizer, weights) and `out/model.gguf`, both in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    tokens, merges = vocabulary()
    write_tokenizer(out / "tokenizer.json", tokens, merges)
    all_weights = list(weights(config))
    writer = gguf.GGUFWriter(out / "model.gguf", describe(config)[0])
    put_header(writer, config, tokens, merges)
    for w in all_weights:
        n = math.prod(w.shape)
        if w.dense_in_gguf:
            writer.add_tensor_info(w.gguf, w.shape[-1:] if w.law == "gate" else w.shape, np.dtype(np.float32), 4 * n)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            byte_shape = (*w.shape[:-1], 2 * w.shape[-1])
            writer.add_tensor_info(w.gguf, byte_shape, np.dtype(np.uint8), 2 * n, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    header, at = {}, 0
    for w in all_weights:
        shape = [w.shape[0], 1, w.shape[1]] if w.law == "conv" else list(w.shape)
        header[w.hf] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * math.prod(shape)]}
        at += 2 * math.prod(shape)
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    rng = np.random.default_rng(seed)
    with open(out / "model.safetensors", "wb") as f:
        f.write(len(blob).to_bytes(8, "little") + blob)
        for w in all_weights:
            stored = to_bf16(draw(w, rng))
            stored.tofile(f)
            data = gguf_values(w, stored, config) if w.dense_in_gguf else stored.view(np.uint8)
            writer.write_tensor_data(data)
    writer.close()


# Where a block has its f16 factor, where that of its minimums, and how much larger that one is, so that weights have no mean.
FACTORS = {"Q4_0": (0, None, 0), "Q8_0": (0, None, 0), "Q6_K": (208, None, 0), "Q4_K": (0, 2, 7.5), "Q5_K": (0, 2, 15.5)}
TILE_BYTES = 16 << 20


def direct_type(mix, config, w):
    """The type of a weight in a file that is written directly; None for f32."""
    if w.dense_in_gguf:
        return None
    head = "token_embd.weight" if config.get("tie_word_embeddings") else "output.weight"
    if mix == "q4_0":  # what llama.cpp's quantiser would choose
        return "Q6_K" if w.gguf == head else "Q4_0"
    # Unsloth's UD-Q4_K_M of Qwen3.6-35B-A3B, by its count of types: experts in K-quants, all else in eight bits.
    part, layers = w.gguf.split(".")[-2], text(config)["num_hidden_layers"]
    if part in ("ffn_gate_exps", "ffn_up_exps"):
        return "Q4_K"
    if part == "ffn_down_exps":
        return "Q6_K" if int(w.gguf.split(".")[1]) in (0, layers // 2, layers - 1) else "Q5_K"
    if part in ("ssm_alpha", "ssm_beta"):
        return None
    return "Q6_K" if w.gguf == head else "Q8_0"


def direct_tile(kind, inputs, count, rng):
    """So many random blocks whose weights have variance 1 / inputs."""
    kind = gguf.GGMLQuantizationType[kind]
    at, minimums, ratio = FACTORS[kind.name]
    tile = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)

    def scaled(blocks, scale):
        for where, factor in ((at, scale), (minimums, ratio * scale)):
            if where is not None:
                blocks[:, where : where + 2] = np.frombuffer(np.float16(factor).tobytes(), np.uint8)
        return blocks

    deviation = gguf.quants.dequantize(scaled(tile[:4096].copy(), 1 / 64), kind).std() * 64
    return scaled(tile, 1 / math.sqrt(inputs) / deviation)


def write_direct(config, path, seed=1):
    """Writes `path`, named after its mix, without bf16 weights in between: codes are drawn as they are stored, one stretch of them
    over and over. `bake --random-weights` does the same for a loaf, which needs config and tokenizer beside it."""
    out = path.parent
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    tokens, merges = vocabulary()
    write_tokenizer(out / "tokenizer.json", tokens, merges)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, describe(config)[0])
    put_header(writer, config, tokens, merges)
    all_weights = [(w, direct_type(path.stem, config, w)) for w in weights(config)]
    for w, kind in all_weights:
        if kind is None:
            writer.add_tensor_info(w.gguf, w.shape[-1:] if w.law == "gate" else w.shape, np.dtype(np.float32), 4 * math.prod(w.shape))
            continue
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        shape = (*w.shape[:-1], w.shape[-1] // block * size)
        writer.add_tensor_info(w.gguf, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for w, kind in all_weights:
        if kind is None:
            writer.write_tensor_data(gguf_values(w, to_bf16(draw(w, rng)), config))
            continue
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        count = math.prod(w.shape) // block
        tile = direct_tile(kind, w.shape[-1], min(count, TILE_BYTES // size), rng)
        writer.write_tensor_data(np.resize(tile, (count, size)))
    writer.close()
    partial.rename(path)


def describe(config):
    """llama.cpp's architecture and metadata of a model: (architecture, [(key, value)])."""
    c = text(config)
    arch = {"qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5_moe_text": "qwen35moe"}[c["model_type"]]
    rope = c.get("rope_parameters", c)
    keys = [("context_length", c["max_position_embeddings"]), ("embedding_length", c["hidden_size"]),
            ("block_count", c["num_hidden_layers"]),
            ("attention.head_count", c["num_attention_heads"]), ("attention.head_count_kv", c["num_key_value_heads"]),
            ("attention.key_length", c["head_dim"]), ("attention.value_length", c["head_dim"]),
            ("attention.layer_norm_rms_epsilon", float(c["rms_norm_eps"])), ("rope.freq_base", float(rope["rope_theta"]))]
    if "intermediate_size" in c:
        keys += [("feed_forward_length", c["intermediate_size"])]
    if "num_experts" in c:
        keys += [("expert_count", c["num_experts"]), ("expert_used_count", c["num_experts_per_tok"]),
                 ("expert_feed_forward_length", c["moe_intermediate_size"])]
    if arch == "qwen35moe":
        half = int(c["head_dim"] * rope["partial_rotary_factor"]) // 2
        # Three position axes share the rotated pairs; for text they are equal, so how they share does not matter.
        keys += [("expert_shared_feed_forward_length", c["shared_expert_intermediate_size"]),
                 ("rope.dimension_count", 2 * half), ("rope.dimension_sections", [(half + 2) // 3, (half + 1) // 3, half // 3, 0]),
                 ("ssm.conv_kernel", c["linear_conv_kernel_dim"]), ("ssm.state_size", c["linear_key_head_dim"]),
                 ("ssm.group_count", c["linear_num_key_heads"]), ("ssm.time_step_rank", c["linear_num_value_heads"]),
                 ("ssm.inner_size", c["linear_num_value_heads"] * c["linear_value_head_dim"]),
                 ("full_attention_interval", c["full_attention_interval"])]
    return arch, keys


def put_header(writer, config, tokens, merges):
    arch, keys = describe(config)
    for key, value in keys:
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    rows = text(config)["vocab_size"]
    extra = [f"<|extra_{i}|>" for i in range(rows - len(tokens))]
    writer.add_token_list(tokens + extra)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(extra))
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_eos_token_id(text(config)["eos_token_id"])


def vocabulary():
    """A byte-level vocabulary of the size of Qwen's: the bytes, then random merges of earlier tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    tokens = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    letters = [i for i, t in enumerate(tokens) if t.isascii() and t.isalpha()]
    seen, merges, rng = set(tokens), [], np.random.default_rng(7)
    pool = [tokens[i] for i in letters]
    while len(tokens) < TEXT_TOKENS:
        for a, b in rng.integers(0, len(pool), (4096, 2)):
            left, right = pool[a], pool[b]
            joined = left + right
            if len(tokens) < TEXT_TOKENS and len(joined) <= 12 and joined not in seen:
                seen.add(joined)
                tokens.append(joined)
                pool.append(joined)
                merges.append((left, right))
    return tokens, merges


def write_tokenizer(path, tokens, merges):
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    steps = [{"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}, byte_level]
    file = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)}, "merges": [list(m) for m in merges],
        },
    }
    path.write_text(json.dumps(file, ensure_ascii=False), encoding="utf-8")


def tensor_types(path):
    """Of every tensor of a GGUF file: name -> (type name, bytes)."""
    return {t.name: (t.tensor_type.name, int(t.n_bytes)) for t in gguf.GGUFReader(path).tensors}
