#!/usr/bin/env python3
"""`loaf serve` beside llama.cpp's server: the same weights, shapes and threads, in turns. `make bench-serve` calls this.

    bench/serve.py [--only load,follow,paired,turns] [--models dense,hybrid] [--rounds N]

Models, packages and llama.cpp's sources are those of peers.py, in bench/.local; its server (llama-server) is built beside the library that peers.py
builds, from the same sources with the same options. With --package it is the server in the package xllamacpp, which is a later llama.cpp compiled by
others for AVX2; loaf is held to AVX2 then too, unless LOAF_ISA says otherwise. Nothing is built then, and weights are drawn as they are stored,
one for one of the same types but not the same numbers. Results: bench/.local/serve.md and serve.json.

**load**: 1, 4 and 16 clients, each of which asks again as soon as it was answered: a prompt of its own (256 random token ids) and 64 tokens, greedy,
streamed. Figures are tokens generated a second, over all clients, and the time to the first token, at the median and at the 99th percentile.
llama.cpp has a slot for each client, and of its settings (flash attention or not, one cache for all slots or one each) those with the best
median count, figure by figure; loaf has `--parallel 16` for all.

**follow**: what another question costs after a long conversation: 20,000 tokens of history, the answer to the first question, and 64 tokens to be
evaluated. Time to the first token: cold; of a follow-up, and of one more after that; of a branch, that is of another question in place of the first
follow-up and of the first answer; of a follow-up after the server was ended and started again with its cache on disk (loaf; llama.cpp's server keeps
no such cache). It is held against what evaluating the new tokens alone takes at that place (`loaf bench --context
20000 --prefill 64`). `state` is a model whose recurrent state and caches have the true size of Qwen3.6-35B-A3B (62.8 MiB, 20 KiB a token) with small
experts; it is loaf's alone.

**paired**: how much a follow-up's first token takes beyond the evaluation of its new tokens, which is a few milliseconds where that evaluation is
seconds, and more than either varies. So both are taken of the same request: the time to the first token as the client sees it, and what the server's
steps of the engine took meanwhile (`loaf_step_us_total`); 32 follow-ups of 4 tokens each in a row after 20,000. Then the same after a restart, at
once, and 8 seconds later. With `--keep FOLDER` the history stays on disk there, for the next run.

**turns**: three conversations that begin with `--history` tokens each and go on in turn, 16 new tokens at a time, on a server with one slot, so that
each question comes after another conversation's. Both keep what they can in memory; time to the first token of six follow-ups.

A client of this script costs some tenths of a millisecond an event, in both. A figure is only as good as the machine is idle: the load average stands
in the table.
"""

import argparse
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import peers
from peers import HERE, LOAF, LOCAL, SOURCE, run

HISTORY, NEW, ANSWER = 20_000, 64, 16
CONTEXT = 22_528
# Follow-ups of the part paired, and seconds after a restart in which sessions come back.
PAIRS, LATER = 32, 8
# Conversations of the part turns.
TALKS = 3
# Another's build of llama.cpp's server.
PACKAGE = "xllamacpp==2026.10.11549"
WANTED = {("load", 4): 1.5, ("load", 16): 2.0}

# Qwen3.6-35B-A3B's attention and delta rule at their true sizes, its experts and width small.
STATE = {
    "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
    "text_config": {
        "rms_norm_eps": 1e-6, "vocab_size": 32768, "attention_bias": False, "hidden_act": "silu", "eos_token_id": 32767,
        "max_position_embeddings": 40960, "model_type": "qwen3_5_moe_text", "hidden_size": 1024, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    },
}


def build_server():
    """llama.cpp's server, in the build that peers.py made: only what the server adds is compiled."""
    source, build = LOCAL / "-".join(SOURCE) / "vendor" / "llama.cpp", LOCAL / "build-native"
    program, marker = build / "bin" / "llama-server", build / "complete-server"
    options = ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"]
    wanted = " ".join([*SOURCE, *options])
    if not marker.exists() or marker.read_text() != wanted:
        print("building llama.cpp's server, which takes some minutes", flush=True)
        tools = {**os.environ, "PATH": f"{peers.VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        run("cmake", "-S", source, "-B", build, *options, env=tools)
        run("cmake", "--build", build, "--target", "llama-server", "--parallel", os.cpu_count(), env=tools)
        marker.write_text(wanted)
    return program


class Loaf:
    """`loaf serve`, and how it is asked for tokens by ids."""

    def __init__(self, loaf, threads, *more):
        arguments = [LOAF, "serve", "-m", loaf, "--listen", "127.0.0.1:0", "--threads", threads, *more]
        self.process = subprocess.Popen([str(a) for a in arguments], stderr=subprocess.PIPE, text=True)
        line = self.process.stderr.readline()
        found = re.search(r"http://(\S+)", line)
        if not found:
            sys.exit(f"loaf serve did not start: {line}{self.process.stderr.read()}")
        self.address = found[1]

    path = "/v1/completions"

    @staticmethod
    def body(ids, tokens):
        return {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}

    @staticmethod
    def tokens(event):
        return [id for choice in event.get("choices", ()) for id in choice.get("token_ids", ())]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(timeout=300):
            sys.exit("loaf serve ended badly")


class Llama:
    """llama-server, likewise."""

    def __init__(self, program, gguf, threads, slots, context, flash, unified):
        if program == PACKAGE:
            arguments = [sys.executable, HERE / "llama_server.py", gguf, threads, slots, context, flash, "unified" if unified else "each"]
            self.log = tempfile.TemporaryFile()
            self.process = subprocess.Popen([str(a) for a in arguments], stdout=subprocess.PIPE, stderr=self.log, text=True)
            line = self.process.stdout.readline()
            found = re.search(r"http://([^/\s]+)", line)
            if not found:
                self.log.seek(0)
                sys.exit(f"xllamacpp did not start: {line}{self.log.read()[-3000:].decode(errors='replace')}")
            self.address = found[1]
            return
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.log = tempfile.TemporaryFile()
        arguments = [program, "-m", gguf, "--host", "127.0.0.1", "--port", port, "-t", threads, "-np", slots, "-c", slots * context,
                     "--no-webui", "--no-slots", "-fa", flash, "--kv-unified" if unified else "--no-kv-unified"]
        self.process = subprocess.Popen([str(a) for a in arguments], stdout=self.log, stderr=self.log)
        start = time.monotonic()
        while True:
            try:
                connection = http.client.HTTPConnection(self.address, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() - start > 300:
                self.log.seek(0)
                sys.exit(f"llama-server did not start: {self.log.read()[-3000:].decode(errors='replace')}")
            time.sleep(0.05)

    path = "/completion"

    @staticmethod
    def body(ids, tokens):
        return {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_tokens": True, "cache_prompt": True}

    @staticmethod
    def tokens(event):
        return event.get("tokens", []) if not event.get("stop") else []

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=60)


def ask(server, ids, tokens):
    """Seconds to the first token and to the end, and the tokens."""
    connection = http.client.HTTPConnection(server.address, timeout=3600)
    body = json.dumps(server.body(ids, tokens))
    start = time.perf_counter()
    connection.request("POST", server.path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"{server.path}: {response.status}: {response.read()[:1000]}")
    first, said = None, []
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        new = server.tokens(json.loads(line[6:]))
        if new and first is None:
            first = time.perf_counter() - start
        said += new
    seconds = time.perf_counter() - start
    connection.close()
    # A server may hold tokens back that end in the middle of a character.
    if first is None or not tokens - 3 <= len(said) <= tokens:
        sys.exit(f"expected {tokens} tokens, found {len(said)}")
    return first, seconds, said


def prompt(random_ids, n, vocab):
    return [random_ids.randrange(1000, vocab - 1000) for _ in range(n)]


def load(server, clients, a, seed):
    """All clients at once: tokens a second, and every time to the first token."""
    firsts, failed = [], []
    barrier = threading.Barrier(clients + 1)

    def client(n):
        draw = random.Random(seed * 1000 + n)
        try:
            barrier.wait()
            for _ in range(a.requests):
                firsts.append(ask(server, prompt(draw, a.prompt, 150_000), a.answer)[0])
        except BaseException as why:
            failed.append(why)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for t in threads:
        t.start()
    barrier.wait()
    start = time.perf_counter()
    for t in threads:
        t.join()
    seconds = time.perf_counter() - start
    if failed:
        sys.exit(f"a client failed: {failed[0]}")
    return clients * a.requests * a.answer / seconds, firsts


def percentile(values, p):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))]


def measure_load(name, model, llama, a, results):
    """A table of one model: every engine and setting in turns."""
    modes = [(f"flash {flash}, {'one cache' if cache == 'one' else 'a cache a slot'}", flash, cache == "one")
             for flash, cache in (mode.split() for mode in a.modes.split(","))]
    samples = results.setdefault("load", {}).setdefault(name, {})
    context = -(-(a.prompt + a.answer + 64) // 256) * 256
    for turn in range(a.rounds):
        for clients in a.clients:
            plan = [("loaf", None)] + ([("llama.cpp", mode) for mode in modes] if llama else [])
            for engine, mode in plan[turn % len(plan):] + plan[:turn % len(plan)]:
                if engine == "loaf":
                    server, who = Loaf(model["loaf"], a.threads, "--parallel", 16, *a.loaf.split()), "loaf"
                else:
                    label, flash, unified = mode
                    server, who = Llama(llama, model["gguf"], a.threads, clients, context, flash, unified), f"llama.cpp {label}"
                try:
                    ask(server, prompt(random.Random(0), a.prompt, 150_000), 4)
                    rate, firsts = load(server, clients, a, turn)
                finally:
                    server.stop()
                kept = samples.setdefault(str(clients), {}).setdefault(who, {"rate": [], "first": [], "load": []})
                kept["rate"].append(rate)
                kept["first"] += firsts
                kept["load"].append(os.getloadavg()[0])
                print(f"{name}, {clients} clients, {who}: {rate:.1f} tokens/s, first token {1e3 * statistics.median(firsts):.0f} ms", flush=True)
    return load_table(name, samples)


def load_table(name, samples):
    lines = [f"## {name}: load", "", "| clients | figure | loaf | llama.cpp | its best setting | ratio | wanted |", "|---:|---|---:|---:|---|---:|---:|"]
    for clients, engines in samples.items():
        figures = [("tokens/s", lambda s: statistics.median(s["rate"]), max), ("first token, median, ms", lambda s: 1e3 * statistics.median(s["first"]), min),
                   ("first token, 99th percentile, ms", lambda s: 1e3 * percentile(s["first"], 99), min)]
        for figure, of, best in figures:
            ours = of(engines["loaf"])
            theirs = {who: of(s) for who, s in engines.items() if who != "loaf"}
            who = best(theirs, key=theirs.get) if theirs else None
            ratio = f"{ours / theirs[who]:.2f}" if who else ""
            wanted = WANTED.get(("load", int(clients))) if figure == "tokens/s" and name == "dense" else None
            lines.append(f"| {clients} | {figure} | {ours:.0f} | {theirs[who]:.0f} | {who.removeprefix('llama.cpp ')} | {ratio} | {f'≥ {wanted}' if wanted else ''} |"
                         if who else f"| {clients} | {figure} | {ours:.0f} | | | | |")
    loads = [x for engines in samples.values() for s in engines.values() for x in s["load"]]
    return lines + ["", f"Load average {min(loads):.1f} to {max(loads):.1f}.", ""]


def measure_follow(name, model, llama, a, results):
    """Times to the first token of a long conversation's first and second question."""
    samples = results.setdefault("follow", {}).setdefault(name, {})
    add = lambda figure, seconds: (samples.setdefault(figure, []).append(1e3 * seconds), print(f"{name}, {figure}: {1e3 * seconds:.0f} ms", flush=True))
    for turn in range(a.rounds):
        draw = random.Random(turn)
        history, new = prompt(draw, a.history, model["vocab"]), prompt(draw, NEW, model["vocab"])
        out = json.loads(run(LOAF, "bench", "-m", model["loaf"], "--context", a.history, "--prefill", NEW, "--decode", 0, "--threads", a.threads, "--json"))
        add("the new tokens alone", NEW / out["prefill_tok_s"]["median"])
        # An answer's last token was not evaluated yet, so that it is one of the new ones.
        after = lambda ids, said, k: ids + said + [1000 + k] + new[2:]

        def conversation(server, who):
            try:
                first, _, said = ask(server, history, ANSWER)
                add(f"{who}, cold", first)
                ids, answer = history, said
                for k in range(2):
                    ids = after(ids, answer, k)
                    first, _, answer = ask(server, ids, ANSWER)
                    add(f"{who}, follow-up", first)
                # Another question after the first answer, and one in place of that answer.
                for ids in (after(history, said, 2), history + [1003] + new[1:]):
                    add(f"{who}, branch", ask(server, ids, ANSWER)[0])
            finally:
                server.stop()
            return said

        with tempfile.TemporaryDirectory(dir=LOCAL) as folder:
            more = ["--cache-dir", folder]
            said = conversation(Loaf(model["loaf"], a.threads, *more), "loaf")
            server = Loaf(model["loaf"], a.threads, *more)
            try:
                add("loaf, follow-up after a restart", ask(server, after(history, said, 4), ANSWER)[0])
            finally:
                server.stop()
        if llama and model.get("gguf"):
            conversation(Llama(llama, model["gguf"], a.threads, 1, CONTEXT, "auto", False), "llama.cpp")
    middle = {figure: statistics.median(values) for figure, values in samples.items()}
    alone = middle["the new tokens alone"]
    lines = [f"## {name}: a follow-up after {a.history} tokens", "", "| time to first token, ms | median | least | most | wanted |", "|---|---:|---:|---:|---|"]
    for figure, values in samples.items():
        wanted = {"loaf, follow-up": f"≤ {alone + 20:.0f}", "loaf, branch": f"≤ {alone + 20:.0f}", "loaf, follow-up after a restart": f"≤ {alone + 200:.0f}"}.get(figure, "")
        lines.append(f"| {figure} | {middle[figure]:.0f} | {min(values):.0f} | {max(values):.0f} | {wanted} |")
    if "llama.cpp, follow-up" in middle:
        wanted = "; wanted: ≤ 0.1" if name == "hybrid" else ""
        lines += ["", f"Follow-up, loaf to llama.cpp: {middle['loaf, follow-up'] / middle['llama.cpp, follow-up']:.3f}{wanted}."]
    return lines + ["", f"Load average {os.getloadavg()[0]:.1f}.", ""]


def measure_turns(name, model, llama, a, results):
    """Follow-ups of several conversations in turn, on servers with one slot."""
    samples = results.setdefault("turns", {}).setdefault(name, {})
    servers = [("loaf", lambda: Loaf(model["loaf"], a.threads, "--parallel", 1))]
    if llama and model.get("gguf"):
        servers.append(("llama.cpp", lambda: Llama(llama, model["gguf"], a.threads, 1, a.history + 512, "on", False)))
    for turn in range(a.rounds):
        for who, start in servers[turn % len(servers):] + servers[:turn % len(servers)]:
            draw, server = random.Random(turn), start()
            try:
                asked = [prompt(draw, a.history, model["vocab"]) for _ in range(TALKS)]
                for k in range(3 * TALKS):
                    first, _, said = ask(server, asked[k % TALKS], 4)
                    asked[k % TALKS] += said + prompt(draw, 15, model["vocab"])
                    figure = f"{who}, {'cold' if k < TALKS else 'follow-up'}"
                    samples.setdefault(figure, []).append(1e3 * first)
                    print(f"{name}, {figure}: {1e3 * first:.0f} ms", flush=True)
            finally:
                server.stop()
    lines = [f"## {name}: {TALKS} conversations of {a.history} tokens in turn, one slot", "",
             "| time to first token, ms | median | least | most |", "|---|---:|---:|---:|"]
    middle = {figure: statistics.median(values) for figure, values in samples.items()}
    lines += [f"| {figure} | {middle[figure]:.0f} | {min(values):.0f} | {max(values):.0f} |" for figure, values in samples.items()]
    if "llama.cpp, follow-up" in middle:
        lines += ["", f"Follow-up, loaf to llama.cpp: {middle['loaf, follow-up'] / middle['llama.cpp, follow-up']:.3f}; wanted of the hybrid: ≤ 0.1."]
    return lines + ["", f"Load average {os.getloadavg()[0]:.1f}.", ""]


def stepped(server):
    """Milliseconds that steps of the engine took so far."""
    with urllib.request.urlopen(f"http://{server.address}/metrics") as metrics:
        found = re.search(r"^loaf_step_us_total\{.*\} (\d+)$", metrics.read().decode(), re.M)
    return int(found[1]) / 1e3


def measure_paired(name, model, a, results):
    """What a follow-up takes beyond its steps, in a row and after restarts."""
    draw = random.Random(3)
    history = prompt(draw, a.history, model["vocab"])
    beyond = results.setdefault("paired", {}).setdefault(name, {})

    def follow(server, ids, figure):
        before = stepped(server)
        first, _, said = ask(server, ids, 1)
        step = stepped(server) - before
        beyond.setdefault(figure, []).append((1e3 * first, step))
        print(f"{name}, {figure}: {1e3 * first:.1f} ms, steps {step:.1f} ms, beyond them {1e3 * first - step:.1f} ms", flush=True)
        return ids + said + prompt(draw, 3, model["vocab"])

    with tempfile.TemporaryDirectory(dir=LOCAL) as folder:
        more = ["--cache-dir", str(Path(a.keep).resolve() / name) if a.keep else folder]
        server = Loaf(model["loaf"], a.threads, *more)
        try:
            ids = history + ask(server, history, 1)[2] + prompt(draw, 3, model["vocab"])
            for _ in range(PAIRS):
                ids = follow(server, ids, "follow-up")
        finally:
            server.stop()
        for wait in (0, LATER, 0, LATER):
            server = Loaf(model["loaf"], a.threads, *more)
            try:
                time.sleep(wait)
                follow(server, ids, f"{wait} s after a restart" if wait else "at once after a restart")
            finally:
                server.stop()
    lines = [f"## {name}: beyond the new tokens, after {a.history} tokens", "",
             "| | first token, ms | its steps | beyond them, median | most | wanted |", "|---|---:|---:|---:|---:|---|"]
    for figure, pairs in beyond.items():
        rest = [first - step for first, step in pairs]
        wanted = "≤ 20" if figure == "follow-up" else "≤ 200"
        lines.append(f"| {figure} | {statistics.median(p[0] for p in pairs):.0f} | {statistics.median(p[1] for p in pairs):.0f} | "
                     f"{statistics.median(rest):.1f} | {max(rest):.1f} | {wanted} |")
    return lines + ["", f"Load average {os.getloadavg()[0]:.1f}.", ""]


def bake_state():
    """The model of true state size; a loaf alone, without a tokenizer."""
    folder = LOCAL / "models" / "state"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(STATE))
    loaf = peers.bake(folder, folder / f"q4-{CONTEXT}.loaf", "q4", ["--random-weights", 1], CONTEXT)
    return {"loaf": loaf, "vocab": STATE["text_config"]["vocab_size"]}


def main():
    parser = argparse.ArgumentParser(description="loaf serve beside llama.cpp's server, on random weights, in turns.")
    parser.add_argument("--only", default="load,follow", help="load, follow, paired and turns [default: load,follow]")
    parser.add_argument("--models", default="dense,hybrid,state", help="models of bench/peer_models.py, and state [default: dense,hybrid,state]")
    parser.add_argument("--rounds", type=int, default=2, help="processes of every engine and setting [default: 2]")
    parser.add_argument("--clients", type=lambda s: [int(n) for n in s.split(",")], default=[1, 4, 16], help="how many ask at once [default: 1,4,16]")
    parser.add_argument("--requests", type=int, default=4, help="requests of each client [default: 4]")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt [default: 256]")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer [default: 64]")
    parser.add_argument("--history", type=int, default=HISTORY, help="tokens before the follow-up [default: 20000]")
    parser.add_argument("--keep", help="folder that keeps the history of the part paired")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of either [default: all]")
    parser.add_argument("--loaf", default="", help="more arguments of loaf serve under load, such as '--max-stall 400'")
    parser.add_argument("--package", action="store_true", help="llama.cpp's server from the package xllamacpp; both for AVX2, unless LOAF_ISA names another set")
    parser.add_argument("--modes", default="on each,on one,off each,off one",
                        help="settings of llama.cpp that are tried: flash attention, and a cache for each slot or one [default: all]")
    parser.add_argument("--without-llama", action="store_true", help="loaf alone")
    a = parser.parse_args()
    direct = a.package or a.without_llama
    peers.set_up("native", not direct)
    llama = None if a.without_llama else PACKAGE if a.package else build_server()
    if a.package:
        os.environ.setdefault("LOAF_ISA", "avx2")
        run(sys.executable, "-m", "pip", "install", "--no-deps", PACKAGE)
    import peer_models

    parts, names = a.only.split(","), a.models.split(",")
    about = peers.machine("native", PACKAGE if direct else None)
    ours = os.environ.get("LOAF_ISA", "this machine")
    kernels = f"kernels of loaf for {ours}, of llama.cpp for AVX2 as {PACKAGE} has them" if a.package else f"kernels for {ours}"
    lines = ["# loaf serve beside llama.cpp's server", "",
             f"{about['cpu']}, {about['cores']} cores; {a.threads} threads; {a.rounds} rounds; Q4_0; {kernels}.", ""]
    results = {"machine": about, "arguments": vars(a)}
    for name in names:
        if name == "state":
            model = bake_state()
        else:
            model = {**peers.make_models(peer_models, name, "q4_0", (CONTEXT - 1024,), False, direct), "vocab": 150_000}
        if "load" in parts and name != "state":
            lines += measure_load(name, model, llama, a, results)
        if "follow" in parts:
            lines += measure_follow(name, model, llama, a, results)
        if "turns" in parts:
            lines += measure_turns(name, model, llama, a, results)
        if "paired" in parts:
            lines += measure_paired(name, model, a, results)
        # After every model, so that an interrupted run keeps what it has.
        (LOCAL / "serve.md").write_text("\n".join(lines))
        (LOCAL / "serve.json").write_text(json.dumps(results, indent=1))
    print("\n".join(lines))
    print(f"saved in {LOCAL / 'serve.md'} and serve.json")


if __name__ == "__main__":
    main()
