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
evaluated. Time to the first token: cold; of a follow-up, and of one more after that; of a question after the last answer was taken out, as chats do
that take reasoning out of their history; of a branch, that is of another question in place of the first follow-up and of the first answer; of a
follow-up after the server was ended and started again (loaf with its cache on disk; llama.cpp's servers write none by themselves). It is held against what evaluating the new tokens alone takes at that place (`loaf bench --context
20000 --prefill 64`). `state` is a model whose recurrent state and caches have the true size of Qwen3.6-35B-A3B (62.8 MiB, 20 KiB a token) with small
experts; it is loaf's alone.

**paired**: how much a follow-up's first token takes beyond the evaluation of its new tokens, which is a few milliseconds where that evaluation is
seconds, and more than either varies. So both are taken of the same request: the time to the first token as the client sees it, and what the server's
steps of the engine took meanwhile (`loaf_step_us_total`); 32 follow-ups of 4 tokens each in a row after 20,000. Then the same after a restart: at
once, as soon as `/health` says 200, as clients do that wait for it (and how long that took), and 8 seconds later. With `--keep FOLDER` the history stays on disk there, for the next run.

**turns**: three conversations that begin with `--history` tokens each and go on in turn, 16 new tokens at a time, on a server with one slot, so that
each question comes after another conversation's. Both keep what they can in memory; time to the first token of six follow-ups.

With --python the server that llama-cpp-python itself ships (`llama_cpp.server`) takes part in follow and turns, over the library that peers.py builds,
with flash attention, with its cache of sessions in memory and without. It takes texts alone: then all tokens are digits and signs, which are tokens of their own in
any text, and its answers are one of them again and again, by a bias.

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
# What the server in llama-cpp-python's package needs.
PYTHON = ["diskcache==5.6.3", "fastapi==0.165.0", "jinja2==3.1.6", "pydantic-settings==2.16.3", "sse-starlette==3.7.0", "starlette-context==0.3.6",
          "typing-extensions==4.16.0", "uvicorn==0.54.0"]
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
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.log = tempfile.TemporaryFile()
        arguments = [program, "-m", gguf, "--host", "127.0.0.1", "--port", port, "-t", threads, "-np", slots, "-c", slots * context,
                     "--no-webui", "--no-slots", "-fa", flash, "--kv-unified" if unified else "--no-kv-unified"]
        self.process = subprocess.Popen([str(a) for a in arguments], stdout=self.log, stderr=self.log)
        wait_for(self, "/health")

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


class Python:
    """`llama_cpp.server` of llama-cpp-python, likewise. It knows texts: `symbols` are ids of tokens, and their texts."""

    path = "/v1/completions"

    def __init__(self, gguf, symbols, threads, context, isa, cache):
        port = free_port()
        self.address, self.symbols, self.said = f"127.0.0.1:{port}", symbols, next(iter(symbols))
        self.log = tempfile.TemporaryFile()
        # Its log-probabilities would take memory for the logits of a whole context.
        settings = {"model": gguf, "host": "127.0.0.1", "port": port, "n_ctx": context, "n_threads": threads, "n_threads_batch": threads,
                    "logits_all": "false", "flash_attn": "true", "cache": cache, "verbose": "false"}
        arguments = [sys.executable, "-m", "llama_cpp.server", *(part for name, value in settings.items() for part in (f"--{name}", str(value)))]
        paths = {"PYTHONPATH": str(LOCAL / "-".join(SOURCE)), "LLAMA_CPP_LIB_PATH": str(LOCAL / f"build-{isa}" / "bin")}
        self.process = subprocess.Popen(arguments, stdout=self.log, stderr=self.log, env={**os.environ, **paths})
        wait_for(self, "/v1/models")
        every = [a + b for a in symbols.values() for b in symbols.values()]
        counted = urllib.request.Request(f"http://{self.address}/extras/tokenize/count", json.dumps({"input": "".join(every)}).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(counted) as response:
            if (found := json.load(response)["count"]) != 2 * len(every):
                sys.exit(f"expected {2 * len(every)} tokens, found {found}")

    def body(self, ids, tokens):
        return {"prompt": "".join(self.symbols[id] for id in ids), "max_tokens": tokens, "temperature": 0, "stream": True,
                "logit_bias": {self.said: 1000}, "logit_bias_type": "input_ids"}

    def tokens(self, event):
        return [self.said] * event["choices"][0]["text"].count(self.symbols[self.said])

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=60)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(server, path):
    """Waits until a server answers with 200 there; the seconds."""
    start = time.monotonic()
    while True:
        try:
            connection = http.client.HTTPConnection(server.address, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return time.monotonic() - start
        except OSError:
            pass
        if server.process.poll() is not None or time.monotonic() - start > 300:
            log = getattr(server, "log", server.process.stderr)
            if log.seekable():
                log.seek(0)
            sys.exit(f"{path} of {server.address} is not well: {log.read()[-3000:]}")
        time.sleep(0.01)


def symbols_of(tokenizer):
    """Tokens that are tokens of their own in any text, with their texts: the vocabularies of peer_models.py join letters alone."""
    vocab = json.loads(tokenizer.read_text())["model"]["vocab"]
    return {id: token for token, id in vocab.items() if len(token) == 1 and token.isascii() and not token.isalpha()}


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
    """Tokens below a number, or of some."""
    return random_ids.choices(list(vocab), k=n) if isinstance(vocab, dict) else [random_ids.randrange(1000, vocab - 1000) for _ in range(n)]


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
        others = prompt(draw, 8, model["vocab"])
        # An answer's last token was not evaluated yet, so that it is one of the new ones.
        after = lambda ids, said, k: ids + said + [others[k]] + new[2:]

        def conversation(start, who):
            server = start()
            try:
                first, _, said = ask(server, history, ANSWER)
                add(f"{who}, cold", first)
                ids, answer = history, said
                for k in range(2):
                    ids = after(ids, answer, k)
                    first, _, answer = ask(server, ids, ANSWER)
                    add(f"{who}, follow-up", first)
                add(f"{who}, last answer taken out", ask(server, ids + [others[5]] + new[1:], ANSWER)[0])
                # Another question after the first answer, and one in place of that answer.
                for ids in (after(history, said, 2), history + [others[3]] + new[1:]):
                    add(f"{who}, branch", ask(server, ids, ANSWER)[0])
            finally:
                server.stop()
            server = start()
            try:
                add(f"{who}, follow-up after a restart", ask(server, after(history, said, 4), ANSWER)[0])
            finally:
                server.stop()

        with tempfile.TemporaryDirectory(dir=LOCAL) as folder:
            conversation(lambda: Loaf(model["loaf"], a.threads, "--cache-dir", folder), "loaf")
        for who, start in peers_of(model, llama, a, a.history + 1024, "auto"):
            conversation(start, who)
    middle = {figure: statistics.median(values) for figure, values in samples.items()}
    alone = middle["the new tokens alone"]
    lines = [f"## {name}: a follow-up after {a.history} tokens", "", "| time to first token, ms | median | least | most | wanted |", "|---|---:|---:|---:|---|"]
    for figure, values in samples.items():
        wanted = {"loaf, follow-up": f"≤ {alone + 20:.0f}", "loaf, branch": f"≤ {alone + 20:.0f}", "loaf, follow-up after a restart": f"≤ {alone + 200:.0f}"}.get(figure, "")
        lines.append(f"| {figure} | {middle[figure]:.0f} | {min(values):.0f} | {max(values):.0f} | {wanted} |")
    return lines + ratios(middle, name) + [f"Load average {os.getloadavg()[0]:.1f}.", ""]


def peers_of(model, llama, a, context, flash):
    """What loaf stands beside, and how it is started."""
    if llama and model.get("gguf"):
        yield "llama.cpp", lambda: Llama(llama, model["gguf"], a.threads, 1, context, flash, False)
    if a.python and model.get("gguf"):
        for who, cache in ("llama_cpp.server", "false"), ("llama_cpp.server --cache", "true"):
            yield who, lambda cache=cache: Python(model["gguf"], model["vocab"], a.threads, context, a.isa, cache)


def ratios(middle, name):
    """Loaf's times beside others'."""
    lines = [""]
    for figure, ours in middle.items():
        who, _, kind = figure.partition(", ")
        theirs = {other: ms for other, ms in middle.items() if who == "loaf" and other != figure and other.endswith(f", {kind}")}
        for other, ms in theirs.items():
            wanted = "; wanted: ≤ 0.1" if name == "hybrid" and kind == "follow-up" else ""
            lines += [f"{kind[0].upper()}{kind[1:]}, loaf to {other.partition(', ')[0]}: {ours / ms:.3f}{wanted}.", ""]
    return lines


def measure_turns(name, model, llama, a, results):
    """Follow-ups of several conversations in turn, on servers with one slot."""
    samples = results.setdefault("turns", {}).setdefault(name, {})
    servers = [("loaf", lambda: Loaf(model["loaf"], a.threads, "--parallel", 1)), *peers_of(model, llama, a, a.history + 512, "on")]
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
    return lines + ratios(middle, name) + [f"Load average {os.getloadavg()[0]:.1f}.", ""]


def stepped(server):
    """Milliseconds that steps of the engine took so far."""
    with urllib.request.urlopen(f"http://{server.address}/metrics") as metrics:
        found = re.search(r"^loaf_step_us_total\{.*\} (\d+)$", metrics.read().decode(), re.M)
    return int(found[1]) / 1e3


def measure_paired(name, model, a, results):
    """What a follow-up takes beyond its steps, in a row and after restarts."""
    draw = random.Random(3)
    history = prompt(draw, a.history, model["vocab"])
    beyond, waited = results.setdefault("paired", {}).setdefault(name, {}), results.setdefault("waited", {}).setdefault(name, {})

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
        waits = {"at once after a restart": lambda server: 0, "when it is ready": lambda server: wait_for(server, "/health"),
                 f"{LATER} s after a restart": lambda server: time.sleep(LATER) or LATER}
        for figure in [*waits, *waits]:
            server = Loaf(model["loaf"], a.threads, *more)
            try:
                seconds = waits[figure](server)
                waited.setdefault(figure, []).append(1e3 * seconds)
                follow(server, ids, figure)
            finally:
                server.stop()
    lines = [f"## {name}: beyond the new tokens, after {a.history} tokens", "",
             "| | waited before, ms | first token, ms | its steps | beyond them, median | most | wanted |", "|---|---:|---:|---:|---:|---:|---|"]
    for figure, pairs in beyond.items():
        rest = [first - step for first, step in pairs]
        wanted = "≤ 20" if figure == "follow-up" else "≤ 200"
        before = f"{statistics.median(waited[figure]):.0f}" if figure in waited else ""
        lines.append(f"| {figure} | {before} | {statistics.median(p[0] for p in pairs):.0f} | {statistics.median(p[1] for p in pairs):.0f} | "
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
    parser.add_argument("--python", action="store_true", help="llama_cpp.server too, which llama-cpp-python ships, in follow and turns")
    parser.add_argument("--modes", default="on each,on one,off each,off one",
                        help="settings of llama.cpp that are tried: flash attention, and a cache for each slot or one [default: all]")
    parser.add_argument("--without-llama", action="store_true", help="loaf alone")
    a = parser.parse_args()
    direct = a.package or a.without_llama
    a.isa = "avx2" if direct else "native"
    peers.set_up(a.isa, a.python or not direct)
    llama = None if a.without_llama else PACKAGE if a.package else build_server()
    if a.package:
        os.environ.setdefault("LOAF_ISA", "avx2")
        run(sys.executable, "-m", "pip", "install", "--no-deps", PACKAGE)
    if a.python:
        run(sys.executable, "-m", "pip", "install", *PYTHON)
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
            if a.python:
                model["vocab"] = symbols_of(Path(model["gguf"]).parent / "tokenizer.json")
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
