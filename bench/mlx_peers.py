#!/usr/bin/env python3
"""Loaf beside mlx-lm on one GPU: the same random 4-bit weights, decode and prefill, in turns.

For each configuration `bake` makes a loaf of random weights (four bits, groups of 64, bf16 parameters). A loaf is a safetensors file in
MLX's packing, so mlx-lm's own model class takes its tensors as they are: both programs read the same bytes. Then, in
turns and several times: a prompt of N random tokens up to the logits of its last, and generation of M tokens, greedy, after a short prompt.

Loaf runs as `loaf bench --backend mlx --json`, where decoding is what `loaf run` does: tokens are chosen on the device and the next step is
submitted before a token is read. mlx-lm runs as its `generate_step`, which does the same. Medians of each turn; the ratio is Loaf's speed
over mlx-lm's. Nothing of it gates a test.

Prefill chunks are baked at 128, 512 and 2,048 rows; mlx-lm's are 2,048. With --layers the configurations have that many layers only, for
machines whose disk or time does not hold all of them; the ratio is then that of this depth.

Needs: `MLX_VARIANT=cuda13 make mlx` (or macOS), `cargo build --release -p loaf-bake`, and an mlx-lm of the same MLX in the same venv:
`.mlx/cuda13/venv/bin/pip install mlx-lm==0.31.3`.

usage: mlx_peers.py [--only NAME] [--layers N] [--loaf PATH] [--bake PATH] [--python PATH] [--models DIR] [--turns 3] [--json]
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tests/fixtures/configs"
# name: (configuration, prompt lengths, tokens to generate)
MODELS = {"qwen3_0_6b": ("qwen3_0_6b", [512, 4096], 128), "qwen3_next_80b": ("qwen3_coder_next", [512, 4096], 64)}
SEED = 7


def peer(loaf_path, config_path, prompts, tokens, repeat):
    """Runs inside MLX's venv: prints one JSON object of speeds."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import _get_classes

    config = json.loads((pathlib.Path(config_path) / "config.json").read_text())
    weights = {k: v for k, v in mx.load(loaf_path, format="safetensors").items() if not k.startswith("loaf.")}
    weights = {k: v for k, v in weights.items() if not k.startswith("rope.")}
    for name in [k for k in weights if k.endswith("conv1d.weight") and weights[k].ndim == 2]:
        weights[name] = weights[name][:, :, None]
    kind, arguments = _get_classes(config)
    model = kind(arguments.from_dict(config))

    def packed(path, _module):
        if f"{path}.scales" not in weights:
            return False
        codes, scales = weights[f"{path}.weight"].shape[-1], weights[f"{path}.scales"].shape[-1]
        return {"group_size": 64, "bits": codes * 32 // (scales * 64), "mode": "affine"}

    nn.quantize(model, group_size=64, bits=4, class_predicate=packed)
    model.load_weights(list(weights.items()), strict=True)
    mx.eval(model.parameters())
    vocab = config.get("text_config", config)["vocab_size"]
    mx.random.seed(SEED)
    result = {"prefill_tok_s": {}, "decode_tok_s": []}
    for n in prompts:
        ids = mx.random.randint(0, vocab, (n,))
        speeds = []
        for _ in range(repeat + 1):
            cache = make_prompt_cache(model)
            start = time.perf_counter()
            # Its prefill and one token.
            next(iter(generate_step(ids, model, max_tokens=1, prompt_cache=cache)))
            speeds.append(n / (time.perf_counter() - start))
        result["prefill_tok_s"][n] = statistics.median(speeds[1:])
    ids = mx.random.randint(0, vocab, (8,))
    for _ in range(repeat + 1):
        steps = iter(generate_step(ids, model, max_tokens=tokens + 1, prompt_cache=make_prompt_cache(model)))
        next(steps)
        start = time.perf_counter()
        for _ in range(tokens):
            next(steps)
        result["decode_tok_s"].append(tokens / (time.perf_counter() - start))
    result["decode_tok_s"] = statistics.median(result["decode_tok_s"][1:])
    print(json.dumps(result))


def run(*command):
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"mlx_peers: {command[0]} failed with {done.returncode}")
    return done.stdout


def ours(args, loaf, prompts, tokens):
    result = {"prefill_tok_s": {}}
    bench = [args.loaf, "bench", "--backend", "mlx", "-m", loaf, "--repeat", 3, "--json"]
    for n in prompts:
        out = run(*bench, "--prefill", n, "--decode", 0)
        result["prefill_tok_s"][str(n)] = json.loads(out)["prefill_tok_s"]["median"]
    out = run(*bench, "--prefill", 0, "--decode", tokens)
    result["decode_tok_s"] = json.loads(out)["decode_tok_s"]["median"]
    return result


def shallow(config, layers, folder):
    """A folder with the configuration cut to its first layers."""
    folder.mkdir(exist_ok=True)
    whole = json.loads((config / "config.json").read_text())
    text = whole.get("text_config", whole)
    text["num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def main():
    if sys.argv[1:2] == ["--peer"]:
        loaf, config, prompts, tokens, repeat = sys.argv[2:7]
        return peer(loaf, config, [int(n) for n in prompts.split(",")], int(tokens), int(repeat))
    variant = "metal" if sys.platform == "darwin" else "cuda13"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--loaf", default=ROOT / f".mlx/{variant}/bin/loaf")
    parser.add_argument("--bake", default=ROOT / "target/release/bake")
    parser.add_argument("--python", default=ROOT / f".mlx/{variant}/venv/bin/python")
    parser.add_argument("--models", type=pathlib.Path, default=ROOT / "bench/.local")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    report = {}
    for name, (config, prompts, tokens) in MODELS.items():
        if args.only not in (None, name):
            continue
        config = CONFIGS / config
        if args.layers:
            name = f"{name}_l{args.layers}"
            config = shallow(config, args.layers, args.models / name)
        loaf = args.models / f"{name}.loaf"
        if not loaf.exists():
            options = ["--random-weights", SEED, "--quant", "q4", "--context", 8192, "--chunk", "128,512,2048"]
            # As mlx-lm's model class knows them.
            options += ["--stack-experts"]
            run(args.bake, "build", config, "-o", loaf, *options)
        lengths = ",".join(map(str, prompts))
        turns = []
        for _ in range(args.turns):
            theirs = json.loads(run(args.python, __file__, "--peer", loaf, config, lengths, tokens, 3))
            turns.append((ours(args, loaf, prompts, tokens), theirs))
        rows = {f"prefill {n}": [[side["prefill_tok_s"][str(n)] for side in turn] for turn in turns] for n in prompts}
        rows[f"decode {tokens}"] = [[side["decode_tok_s"] for side in turn] for turn in turns]
        report[name] = {}
        for what, pairs in rows.items():
            loaf_speed, peer_speed = (statistics.median(p[i] for p in pairs) for i in (0, 1))
            ratios = sorted(a / b for a, b in pairs)
            report[name][what] = {"loaf": loaf_speed, "mlx_lm": peer_speed, "ratio": statistics.median(ratios), "ratios": ratios}
            if not args.json:
                print(f"{name:16} {what:14} loaf {loaf_speed:9.1f}  mlx-lm {peer_speed:9.1f} tok/s  "
                      f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
