"""Bakes a large GGUF file of random blocks, and copies it beside: which share of a copy's speed a bake has.

The file is a Llama model in the mix of types that most published files have (Q4_K_M's: Q4_K, half of `attn_v` and
`ffn_down` Q6_K, embedding Q4_K, head Q6_K), as many layers as fit `--gb`. Its pages are dropped from the system's cache
before every run, so that all of them read the disk; a copy is of 8 MiB blocks, then synced, as a bake's output is.

Usage: python bench/gguf_bake.py --bake target/release/bake [--gb 3] [--folder FOLDER] [--runs 3] [--context 2048]

With --keep the source stays in FOLDER and is found there by later runs; --runs 0 only draws it.
"""

import argparse
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 32000


def blocks(rng, kind, rows, width):
    """Random blocks with tame factors."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.frombuffer(rng.bytes(rows * width // block * size), np.uint8).reshape(-1, size).copy()
    for at in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind.name]:
        raw[:, at + 1] = (raw[:, at + 1] & 0x83) | (3 << 2)
    return raw.reshape(rows, -1)


def write(path, target_bytes):
    rng = np.random.default_rng(7)
    q4, q6 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
    bits = {q4: 4.5, q6: 6.5625}
    shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * 128, HIDDEN), "attn_v": (KV_HEADS * 128, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    }
    kind = lambda name, layer: q6 if name in ("attn_v", "ffn_down") and layer % 2 else q4
    layer_bytes = sum(r * w * bits[kind(n, l)] / 8 for l in (0, 1) for n, (r, w) in shapes.items()) / 2
    layers = max(2, round((target_bytes - VOCAB * HIDDEN * (4.5 + 6.5625) / 8) / layer_bytes))
    print(f"drawing {layers} layers", flush=True)
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(layers)
    out.add_context_length(4096)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(128)
    tensors = [("token_embd.weight", q4, (VOCAB, HIDDEN))]
    for layer in range(layers):
        tensors += [(f"blk.{layer}.{n}.weight", kind(n, layer), s) for n, s in shapes.items()]
        tensors += [(f"blk.{layer}.{n}.weight", None, (HIDDEN,)) for n in ("attn_norm", "ffn_norm")]
    tensors += [("output_norm.weight", None, (HIDDEN,)), ("output.weight", q6, (VOCAB, HIDDEN))]
    for name, quantised, shape in tensors:
        if quantised is None:
            out.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            block, size = gguf.GGML_QUANT_SIZES[quantised]
            row = shape[1] // block * size
            out.add_tensor_info(name, (shape[0], row), np.dtype(np.uint8), shape[0] * row, raw_dtype=quantised)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for _, quantised, shape in tensors:
        out.write_tensor_data(np.ones(shape, np.float32) if quantised is None else blocks(rng, quantised, *shape))
    out.close()


def forget(path):
    """Drops a file's pages from the cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source, target):
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        while block := reader.read(8 << 20):
            writer.write(block)
        os.fsync(writer.fileno())


def timed(work):
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bake", required=True)
    parser.add_argument("--gb", type=float, default=3)
    parser.add_argument("--folder")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    if args.keep and not args.folder:
        parser.error("--keep wants a --folder")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source, target = Path(args.folder if args.keep else folder) / f"{args.gb:g}.gguf", Path(folder) / "out"
        if not source.exists():
            partial = source.with_suffix(".partial")
            write(partial, args.gb * 1e9)
            partial.rename(source)
        size = source.stat().st_size
        print(f"{size / 1e9:.2f} GB", flush=True)
        command = [args.bake, "build", source, "-o", target, "--context", str(args.context)]
        best = {}
        for _ in range(args.runs):
            for name, work in [("copy", lambda: copy(source, target)), ("bake", lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))]:
                forget(source)
                wall, user, system = timed(work)
                forget(target)
                target.unlink()
                best[name] = min(best.get(name, wall), wall)
                more = f", {user:.1f} s user, {system:.1f} s system" if name == "bake" else ""
                print(f"{name}: {wall:.2f} s, {size / wall / 1e6:.0f} MB/s{more}", flush=True)
        if not best:
            return
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        print(f"a bake has {best['copy'] / best['bake']:.2f} of a copy's speed; most memory {peak / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
