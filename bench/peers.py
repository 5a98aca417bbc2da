#!/usr/bin/env python3
"""Loaf beside llama.cpp: the same weights, shapes and threads, in turns, in one run. `make bench-peers` calls this.

Everything it installs, makes and writes lies in bench/.local, which is not committed: a virtual environment with cmake and the gguf
package; llama.cpp, which comes inside the source package llama-cpp-python, built with -DGGML_NATIVE=ON, or for the instruction
set that --isa names, which Loaf is then held to as well (its library alone: half an hour of one core); models with random weights
(peer_models.py); results.md and results.json, or results-ISA. Delete the folder to begin anew.

A table is made in pieces, if need be: --add keeps the samples of earlier runs on the same machine, and --before names a command that
every measured process is started by, such as `nice -n -5`. With --rounds 0 models are made and nothing is measured.

How it measures:
- A loaf is baked from the same bf16 numbers that llama.cpp's own quantiser turns into Q4_0, Q4_K_M or Q8_0. Every tensor of the
  loaf then gets the width that tensor has there (`bake build --quant-as`), so both read about the same bytes for a token; both
  numbers are printed. The column "all 4 bits" gives the loaf 4 bits for everything, beside the same GGUF.
- With --same-file the loaf is baked from llama.cpp's own file, whose weights it keeps as they are: the same file beside itself.
  Tables of that kind stand in files of their own (results-same).
- Each engine runs as a process of its own, loaf and every mode of llama.cpp (repacked or not, flash attention or not) in turns, the
  same number of rounds; each process repeats a figure as often as the other's. Of llama.cpp the mode with the best median
  counts, figure by figure.
- Prefill gives logits of the last token alone. Decode at a context fills the caches and does not compute them, in both.
- Before every round every file leaves memory and is read anew through a mapping that asks for large pages: whether a file that was
  just written lies in large pages or in small ones is chance, and reading from small ones is slower; and where it lies decides a fifth
  of decode for as long as it is cached, so each round is likely to have a place of its own.
- With --winners the modes of llama.cpp that were best at nothing in the rounds before are not run again, nor is the loaf of 4 bits
  throughout: more rounds for the time. Several modes that are as fast as each other are several chances to be lucky, so figures of
  a single round flatter llama.cpp on a noisy machine.
- Start-up is from exec to the first byte of the first token's text, ids given, files in the page cache; peak memory is what the
  system says that process used at most, mapped weights included.
- The read bandwidth is measured by every loaf process before every repetition of decode, which is judged by that one.

A figure is only as good as the machine is idle: the load average stands in the table.
"""

import argparse
import fnmatch
import json
import mmap
import os
import re
import statistics
import subprocess
import shlex
import sys
import tarfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCAL = HERE / ".local"
VENV = LOCAL / "venv"
# The source package that carries llama.cpp.
SOURCE = ("llama-cpp-python", "0.3.36")
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent / "target")) / "release"
LOAF, BAKE = TARGET / "loaf", TARGET / "bake"

# Name of the GGUF mix -> (llama.cpp's number for it, our width for most weights).
MIXES = {"q4_0": (2, "q4"), "q4_k_m": (15, "q4"), "q8_0": (7, "q8")}
# Those whose files are only compared with themselves.
SAME_FILE = {**MIXES, "q6_k": (18, None), "iq4_xs": (30, None), "q5_k_m": (17, None)}
# Their types and the widths that cost about as many bits: 4.5, 5.5, 6.5 and 8.5 a weight, scales included.
WIDTHS = {"Q4_0": "q4", "Q4_1": "q4", "Q4_K": "q4", "Q5_0": "q5", "Q5_K": "q5", "Q6_K": "q6", "Q8_0": "q8"}
# Mixes of the model at its true size: those above that can be drawn directly.
FULL_MIXES = {False: ("q4_0",), True: ("q4_0", "ud-q4_k_m")}
# Bytes a weight of stored formats, but for affine ones.
STORED = {"f32": 4, "f16": 2, "bf16": 2, "q4_0": 18 / 32, "q5_0": 22 / 32, "q8_0": 34 / 32, "iq4_nl": 18 / 32, "q2_k": 84 / 256,
          "q3_k": 110 / 256, "q4_k": 144 / 256, "q5_k": 176 / 256, "q6_k": 210 / 256, "iq4_xs": 138 / 256, "tq2_0": 66 / 256}
# Whose build of llama.cpp an instruction set takes, if not its own: with AMX it may end as soon as it repacks weights.
BUILDS = {"amx": "avx512"}
# BMI2 comes with AVX2 in every CPU.
AVX2 = ["-DGGML_NATIVE=OFF", "-DGGML_AVX=ON", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON"]
# What --isa may name: cmake's options for llama.cpp, and what it must then say of itself.
ISAS = {
    "native": (["-DGGML_NATIVE=ON"], {}),
    "avx2": ([*AVX2, "-DGGML_AVX512=OFF", "-DGGML_AVX_VNNI=OFF"],
             {"AVX2 = 1": True, "AVX512 = 1": False, "AVX_VNNI = 1": False}),
    # What a CPU with AMX has besides.
    "avx512": ([*AVX2, "-DGGML_AVX512=ON", "-DGGML_AVX512_VBMI=ON", "-DGGML_AVX512_VNNI=ON", "-DGGML_AVX512_BF16=ON"],
               {"AVX512 = 1": True, "AVX512_VBMI = 1": True, "AVX512_VNNI = 1": True, "AMX_INT8 = 1": False}),
}
ISAS["amx"] = ISAS[BUILDS["amx"]]
PREFILLS, DECODE, CONTEXTS, DEEP = (128, 512), 64, (4096, 16384), 16


def run(*args, **options):
    """Runs a program; on failure ends with what it said."""
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, args))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def set_up(isa, build=True):
    """Installs what is not there yet, and names the peer, which is made unless `build` says no; returns only inside the virtual environment."""
    global PEER
    built = BUILDS.get(isa, isa)
    PEER = LOCAL / f"llama_peer-{built}"
    python = VENV / "bin" / "python"
    marker = VENV / "complete"
    wanted = (HERE / "requirements.txt").read_text()
    if not marker.exists() or marker.read_text() != wanted:
        LOCAL.mkdir(exist_ok=True)
        run(sys.executable, "-m", "venv", VENV)
        run(python, "-m", "pip", "install", "-r", HERE / "requirements.txt")
        marker.write_text(wanted)
    if Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])
    run("cargo", "build", "--release", "-p", "loaf-cli", "-p", "loaf-bake", cwd=HERE.parent)
    if not build:
        return
    source = LOCAL / "-".join(SOURCE) / "vendor" / "llama.cpp"
    if not source.exists():
        run(python, "-m", "pip", "download", "--no-deps", "--no-binary", SOURCE[0], "==".join(SOURCE), "-d", LOCAL)
        package, = LOCAL.glob(f"llama_cpp_python-{SOURCE[1]}.tar.gz")
        with tarfile.open(package) as tar:
            tar.extractall(LOCAL, filter="data")
        (LOCAL / package.name.removesuffix(".tar.gz")).rename(source.parent.parent)
    build = LOCAL / f"build-{built}"
    marker = build / "complete"
    wanted = " ".join([*SOURCE, *ISAS[isa][0]])
    if not marker.exists() or marker.read_text() != wanted:
        print("building llama.cpp, which takes some minutes", flush=True)
        tools = {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_RPATH=$ORIGIN", *ISAS[isa][0]]
        run("cmake", "-S", source, "-B", build, *options, env=tools)
        run("cmake", "--build", build, "--target", "llama", "--parallel", os.cpu_count(), env=tools)
        marker.write_text(wanted)
    ours, lib = HERE / "llama_peer.c", build / "bin"
    if not PEER.exists() or PEER.stat().st_mtime < max(ours.stat().st_mtime, marker.stat().st_mtime):
        libraries = ["-lllama", "-lggml", "-lggml-base", "-lggml-cpu"]
        run(os.environ.get("CC", "cc"), "-O2", "-Wall", f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}", ours, "-o", PEER,
            f"-L{lib}", *libraries, f"-Wl,-rpath,{lib}")


def machine(isa, package=None):
    """What this machine is, and that llama.cpp was built for it, or for the instruction set asked for; unless it is in a package."""
    info = package or run(PEER, "-", 1, 0, 0, "info").strip()
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpu = ""
    field = lambda name: next(iter(re.findall(rf"^{name}\s*: (.*)$", cpu, re.M)), "")
    flags = set(field("flags").split())
    shown = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI", "avx_vnni": "AVX_VNNI"}
    for what, is_so in ISAS[isa][1].items() if not package else ():
        if (what in info) != is_so:
            sys.exit(f"llama.cpp was not built for {isa}: {info}")
    for flag, name in shown.items() if isa == "native" and not package else ():
        if flag in flags and f"{name} = 1" not in info:
            sys.exit(f"llama.cpp was not built for this CPU: it has {flag}, but the build says: {info}")
    name = field("model name") or os.uname().machine
    features = [f for f in shown if f in flags] or [f for f in ("asimddp", "i8mm") if f in field("Features").split()]
    return {"cpu": name, "features": features, "isa": isa, "cores": os.cpu_count(), "llama_cpp": info}


def loaf_options(models, config, types, base):
    """`--quant-as` for every weight whose type in the GGUF is not the width of most; and the tensor table."""
    options, table = [], []
    for w in models.weights(config):
        kind, theirs = types[w.gguf]
        width = WIDTHS.get(kind)
        table.append((w.hf, w.gguf, kind, theirs))
        if width not in (None, base) and w.law == "matrix":
            options += ["--quant-as", f"{w.hf}={width}"]
    return options, table


def bake(source, out, width, options, context):
    # A baker built since may plan otherwise.
    if not out.exists() or out.stat().st_mtime < BAKE.stat().st_mtime:
        run(BAKE, "build", source, "-o", out, "--quant", width, "--context", context, *options)
    return out


def stored_bytes(loaf):
    """Bytes of every weight of a loaf, scales and biases included, by canonical name."""
    with open(loaf, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        begin, end = header["loaf.manifest"]["data_offsets"]
        f.seek(begin, os.SEEK_CUR)
        experts = json.loads(f.read(end - begin)).get("experts", [])
    total = {}
    # The experts of a layer are one tensor; the manifest says what a record of it holds.
    for tensor in experts:
        for m in tensor["matrices"]:
            affine = re.fullmatch(r"q(\d+)g(\d+)/(\w+)", m["format"])
            if affine:
                row = m["inputs"] * int(affine[1]) // 8 + 2 * (m["inputs"] // int(affine[2])) * STORED[affine[3]]
            else:
                row = int(m["inputs"] * STORED[m["format"]])
            total[m["name"].removesuffix(".weight")] = tensor["experts"] * m["outputs"] * row
    recorded = {tensor["tensor"] for tensor in experts}
    for name, t in header.items():
        if name.startswith(("loaf.", "__")) or name in recorded:
            continue
        module = re.sub(r"\.(weight|scales|biases|supers|table_scales)$", "", name)
        total[module] = total.get(module, 0) + t["data_offsets"][1] - t["data_offsets"][0]
    return total


def touched(config, name, size):
    """Bytes of a weight that decoding one token reads."""
    c = config.get("text_config", config)
    if ".switch_mlp." in name:
        return size * c["num_experts_per_tok"] // c["num_experts"]
    if name.startswith("model.embed_tokens"):
        return size if config.get("tie_word_embeddings") else size // c["vocab_size"]
    return size


def bytes_table(config, table, loaf):
    """Per kind of tensor: their type and bytes for a token, and ours."""
    ours = stored_bytes(loaf)
    rows = {}
    for hf, _, kind, theirs in table:
        role = re.sub(r"\.\d+\.", ".*.", hf)
        row = rows.setdefault((role, kind), [0, 0, 0])
        row[0] += 1
        row[1] += touched(config, hf, theirs)
        row[2] += touched(config, hf, ours[hf.removesuffix(".weight")])
    return rows


# A process inherits the peak memory of the one that starts it, so a small one does. It prints seconds from exec to the first
# byte of output, and the peak in KiB.
TIMER = """
import os, subprocess, sys, time
start = time.perf_counter()
p = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
first = p.stdout.read(1)
seconds = time.perf_counter() - start
p.stdout.read()
_, status, usage = os.wait4(p.pid, 0)
p.returncode = os.waitstatus_to_exitcode(status)
print(seconds, usage.ru_maxrss)
sys.exit(p.returncode or not first)
"""


def timed(before, args):
    """A process's seconds from exec to its first byte of output, and its peak memory in bytes."""
    seconds, peak = run(*before, sys.executable, "-I", "-S", "-c", TIMER, *args).split()
    return float(seconds), int(peak) * 1024


class Figures:
    """name -> engine or mode -> samples."""

    def __init__(self):
        self.samples = {}

    def add(self, figure, who, value):
        self.samples.setdefault(figure, {}).setdefault(who, []).append(value)

    def best(self, figure, who, lower=False):
        """The mode of `who` with the best median: (mode, samples)."""
        modes = {m: s for m, s in self.samples.get(figure, {}).items() if m.split()[0] == who}
        if not modes:
            return None
        pick = min if lower else max
        return pick(modes.items(), key=lambda item: statistics.median(item[1]))


LARGE = 2 << 20


def read_anew(*files):
    """Has files leave the page cache, if they can, and come back in large pages."""
    for file in files:
        with open(file, "rb+") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for file in files:
        with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as data:
            data.madvise(mmap.MADV_HUGEPAGE)
            sum(data[i] for i in range(0, len(data), LARGE))


def measure(model, a, figures, notes):
    """One round of one model: every engine and mode once, in turns."""
    threads, repeat, before = a.threads, a.repeat, shlex.split(a.before)
    loaves = [("loaf", model["loaf"])] + ([("loaf-4bit", model["all4"])] if model["all4"] else [])
    modes = [(r, f) for r in (0, 1) for f in (0, 1)]
    mode = lambda r, f: f"llama.cpp {'repacked' if r else 'plain'}{', flash' if f else ''}"
    if a.winners and notes["rounds"]:
        best = {figures.best(figure, "llama.cpp")[0] for figure in figures.samples if figure.split()[0] in ("prefill", "decode")}
        loaves, modes = loaves[:1], [m for m in modes if mode(*m) in best]
    read_anew(*(path for _, path in loaves), model["gguf"])
    plan = [("loaf", who, path) for who, path in loaves]
    # A loaf between any two modes would make it run more often; all run once a round, starting elsewhere each round.
    plan += [("llama", mode(r, f), (r, f)) for r, f in modes]
    turn = notes["rounds"] % len(plan)
    for engine, who, what in plan[turn:] + plan[:turn]:
        notes["load"].append(os.getloadavg()[0])
        if engine == "loaf":
            for n in PREFILLS:
                out = json.loads(run(*before, LOAF, "bench", "-m", what, "--prefill", n, "--decode", DECODE if n == PREFILLS[-1] else 0,
                                     "--threads", threads, "--repeat", repeat, "--json"))
                figures.add(f"prefill {n}", who, out["prefill_tok_s"]["median"])
                notes["bandwidth"].append(out["read_bandwidth_gb_s"])
                if out["decode_tok_s"]:
                    figures.add(f"decode {DECODE}", who, out["decode_tok_s"]["median"])
                    notes[f"{who} bytes"] = out["decode_bytes_per_token"]
                    figures.add("decode, % of bandwidth", who, out["decode_percent_of_bandwidth"]["median"])
            for n in a.contexts:
                out = json.loads(run(*before, LOAF, "bench", "-m", what, "--prefill", 0, "--decode", DEEP, "--context", n,
                                     "--threads", threads, "--repeat", repeat, "--json"))
                figures.add(f"decode at {n}", who, out["decode_tok_s"]["median"])
            start = [LOAF, "run", "-m", what, "--ids", 1, "-n", 1, "--greedy", "--threads", threads]
        else:
            peer = [PEER, model["gguf"], threads, *what]
            lines = run(*before, *peer, "speed", ",".join(map(str, PREFILLS)), DECODE, repeat).splitlines()
            for n in a.contexts:
                lines += run(*before, *peer, "depth", n, DEEP, repeat).splitlines()
            seconds = {}
            for line in lines:
                name, value = line.split()
                seconds.setdefault(name, []).append(float(value))
            for name, values in seconds.items():
                part = name.split("_")
                figure = f"{part[0]} at {part[3]}" if "at" in part else f"{part[0]} {part[1]}"
                figures.add(figure, who, int(part[1]) / statistics.median(values))
            start = [*peer, "startup"]
        took = [timed(before, start) for _ in range(repeat)]
        figures.add("start-up, s", who, statistics.median(t for t, _ in took))
        figures.add("peak memory of one token, MiB", who, max(m for _, m in took) / 2**20)


LOWER = ("start-up, s", "peak memory of one token, MiB")
# Ratios wanted of a model, or of a model in one mix: decode, prefill of 512, decode at 4,096.
TARGETS = {"dense/q4_0": (1.4, 2, 1.5), "dense/q4_k_m": (1.3, 2, 1.5), "dense/q8_0": (1.15, 2.5, 1.3), "moe": (1.4, 2.5, 1.6),
           "hybrid": (1.4, 2.5, 1.5), "full": (1.3, 2, 1.3)}


def number(x):
    return f"{x:.3g}" if x < 100 else f"{x:.0f}"


def spread(samples):
    return f"{number(statistics.median(samples))} ({number(min(samples))}–{number(max(samples))})"


def report(name, mix, model, figures, notes):
    """The table of one model and mix, in markdown, and the same as data."""
    lines = [f"## {name}, {mix}", ""]
    bandwidth = notes["bandwidth"]
    lines += [f"Read bandwidth {spread(bandwidth)} GB/s; load average {spread(notes['load'])}; {notes['rounds']} rounds; median (least–most).", ""]
    lines += ["| | loaf | llama.cpp | its best mode | ratio | wanted | loaf, all 4 bits |", "|---|---:|---:|---|---:|---:|---:|"]
    ratios = TARGETS.get(f"{name}/{mix}") or TARGETS.get(name) or ()
    targets = {"start-up, s": "≤ 0.20", "decode, % of bandwidth": "≥ 85"}
    targets |= {figure: f"≥ {wanted}" for figure, wanted in zip((f"decode {DECODE}", "prefill 512", "decode at 4096"), ratios)}
    data = {"figures": figures.samples, "read_bandwidth_gb_s": bandwidth, "load": notes["load"], "rounds": notes["rounds"], "ratios": {}}
    for figure in figures.samples:
        lower = figure in LOWER
        ours, theirs = figures.best(figure, "loaf", lower), figures.best(figure, "llama.cpp", lower)
        four = figures.best(figure, "loaf-4bit", lower)
        cells = [spread(x[1]) if x else "" for x in (ours, theirs)]
        ratio = ""
        if ours and theirs:
            value = statistics.median(ours[1]) / statistics.median(theirs[1])
            data["ratios"][figure] = value
            ratio = f"{value:.2f}"
        wanted = targets.get(figure, "")
        mode = theirs[0].removeprefix("llama.cpp ") if theirs else ""
        lines.append(f"| {figure} | {cells[0]} | {cells[1]} | {mode} | {ratio} | {wanted} | {spread(four[1]) if four else ''} |")
    lines += ["", "Bytes of weights for one token:", "", "| weights | tensors | llama.cpp | MB | loaf MB |", "|---|---:|---|---:|---:|"]
    total = [0, 0]
    for (role, kind), (count, theirs, ours) in model["bytes"].items():
        total[0] += theirs
        total[1] += ours
        if max(theirs, ours) >= 1e5:
            lines.append(f"| {role} | {count} | {kind} | {theirs / 1e6:.1f} | {ours / 1e6:.1f} |")
    lines += [f"| all, small ones included | | | {total[0] / 1e6:.1f} | {total[1] / 1e6:.1f} |", ""]
    data["weight_bytes_per_token"] = {"llama.cpp": total[0], "loaf": total[1]}
    return lines, data


def make_models(models, name, mix, contexts, same_file, direct=False):
    """Writes what is missing of one model in one mix; returns where everything is. With `direct` codes are drawn as they are stored, as
    for the model at its true size: the same shapes and types, other numbers, and no quantiser of llama.cpp's is needed."""
    full = direct or name == "full"
    folder = LOCAL / "models" / (f"{name}-direct" if direct else name)
    config = json.loads(models.FULL.read_text()) if name == "full" else models.CONFIGS[name]
    gguf = folder / f"{mix}.gguf"
    if full and not gguf.exists():
        print(f"{name}: drawing codes", flush=True)
        models.write_direct(config, gguf)
    if not full and not (folder / "model.gguf").exists():
        print(f"{name}: drawing weights", flush=True)
        models.write(config, folder)
    if not gguf.exists():
        print(f"{name}: quantising to {mix}", flush=True)
        run(PEER, folder / "model.gguf", os.cpu_count(), 0, 0, "quantize", SAME_FILE[mix][0], gguf)
    context = max([1024, *contexts]) + 1024
    if same_file:
        loaf = folder / f"{mix}-same-{context}.loaf"
        if not loaf.exists() or loaf.stat().st_mtime < BAKE.stat().st_mtime:
            run(BAKE, "build", gguf, "-o", loaf, "--context", context)
        _, table = loaf_options(models, config, models.tensor_types(gguf), None)
        return {"gguf": gguf, "loaf": loaf, "all4": None, "bytes": bytes_table(config, table, loaf)}
    width = MIXES[mix][1]
    options, table = loaf_options(models, config, models.tensor_types(gguf), width)
    if full:
        options += ["--random-weights", 1]
    loaf = bake(folder, folder / f"{mix}-{context}.loaf", width, options, context)
    # A third file of twenty gigabytes would tell little.
    all4 = bake(folder, folder / f"all4-{context}.loaf", "q4", [], context) if width == "q4" and options and not full else None
    return {"gguf": gguf, "loaf": loaf, "all4": all4, "bytes": bytes_table(config, table, loaf)}


def main():
    parser = argparse.ArgumentParser(description="Loaf beside llama.cpp, on random weights, in turns.")
    parser.add_argument("--only", default="*", help="models and mixes, such as 'dense' or 'moe/q4_*' [default: all]")
    parser.add_argument("--isa", choices=ISAS, default="native",
                        help="instruction set that both engines are held to, with amx Loaf alone and llama.cpp to avx512 [default: what this CPU has]")
    parser.add_argument("--rounds", type=int, default=3, help="processes of every engine and mode [default: 3]")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions within a process [default: 3]")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of either [default: all]")
    parser.add_argument("--full", action="store_true",
                        help="also Qwen3.6-35B-A3B at its true size, in Q4_0 and, with --same-file, in the published mix of Q4_K, Q5_K, "
                             "Q6_K and Q8_0: 40 GB of disk each, and memory to keep 20 GB cached")
    parser.add_argument("--add", action="store_true", help="keep the samples of earlier runs")
    parser.add_argument("--before", default="", help="a command that starts every measured process")
    parser.add_argument("--winners", action="store_true", help="from the second round on without the modes that were best at nothing")
    parser.add_argument("--same-file", action="store_true",
                        help="bake loaves from llama.cpp's files; also of Q5_K_M, Q6_K and IQ4_XS")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="contexts to decode at; empty for none")
    a = parser.parse_args()
    a.contexts = [int(n) for n in a.contexts.split(",") if n]
    set_up(a.isa)
    if a.isa != "native":
        os.environ["LOAF_ISA"] = a.isa
    import peer_models as models

    names = list(models.CONFIGS)
    pairs = [(n, m) for n in names for m in (SAME_FILE if a.same_file else MIXES)]
    pairs += [("full", m) for m in FULL_MIXES[a.same_file]] if a.full else []
    wanted = [p for p in pairs if any(fnmatch.fnmatch(t, a.only) for t in ("/".join(p), p[0]))]
    about = machine(a.isa)
    lines = ["# Loaf beside llama.cpp", "", f"{about['cpu']}, {about['cores']} cores, {' '.join(about['features'])}; kernels: {a.isa}; {a.threads} threads.", "",
             f"llama.cpp: {about['llama_cpp']}", "", "Speeds in tokens per second.", ""]
    results = {"machine": about, "threads": a.threads, "models": {}}
    out = LOCAL / "-".join(["results", *([] if a.isa == "native" else [a.isa]), *(["same"] if a.same_file else [])])
    if a.add and out.with_suffix(".json").exists():
        saved = json.loads(out.with_suffix(".json").read_text())
        if saved["machine"] == about and saved["threads"] == a.threads:
            results = saved
    for name, mix in wanted:
        model = make_models(models, name, mix, a.contexts, a.same_file)
        figures, notes = Figures(), {"rounds": 0, "load": [], "bandwidth": []}
        if earlier := results["models"].get(f"{name}/{mix}"):
            figures.samples, notes["rounds"] = earlier["figures"], earlier["rounds"]
            notes["load"], notes["bandwidth"] = earlier["load"], earlier["read_bandwidth_gb_s"]
        for _ in range(a.rounds):
            measure(model, a, figures, notes)
            notes["rounds"] += 1
        if not notes["rounds"]:
            continue
        table, data = report(name, mix, model, figures, notes)
        print("\n".join(table), flush=True)
        lines += table
        results["models"][f"{name}/{mix}"] = data
        # After every model, so that an interrupted run keeps what it has.
        out.with_suffix(".md").write_text("\n".join(lines))
        out.with_suffix(".json").write_text(json.dumps(results, indent=1))
    print(f"saved in {out}.md and {out.name}.json")


if __name__ == "__main__":
    main()
