#!/usr/bin/env python3
"""Real clients against `loaf serve`, on the built-in model and on a small hybrid. `make serve-clients` calls this.

    tests/clients/run.py [--only PART,PART] [--strict] [--program LOAF] [--bake BAKE]

| part | what asks |
|---|---|
| python | the packages openai and anthropic: every endpoint, whole, streamed and in parallel |
| node | the packages openai and @anthropic-ai/sdk: the same |
| description | Schemathesis, which walks /openapi.json and sends what it allows and what it does not |
| page | a headless browser, at the page on /; leaves page.png |
| balancer | docs/serve/haproxy.cfg before two servers |

Everything that it installs and makes lies in tests/clients/.local, which is not committed: a virtual environment with the packages of
requirements.txt, the packages of package.json, a model with random weights, the picture. Node, Chromium and HAProxy are used if they are here. A
part that lacks something is not run, and the last line says so; with --strict, and for what fails, the exit code is 1. Not part of `make test`, since the packages
come from elsewhere.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOCAL = HERE / ".local"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
PARTS = ("python", "node", "description", "page", "balancer")


class Missing(Exception):
    """A part cannot be run here."""


def install():
    """The virtual environment; returns only inside it."""
    venv = LOCAL / "venv"
    marker, wanted = venv / "complete", (HERE / "requirements.txt").read_text()
    python = venv / "bin" / "python"
    if not marker.exists() or marker.read_text() != wanted:
        print("installing packages into tests/clients/.local", flush=True)
        LOCAL.mkdir(exist_ok=True)
        done = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, text=True)
        if done.returncode == 0:
            arguments = [python, "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt"]
            done = subprocess.run(arguments, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stderr[-2000:]}\nNOTHING WAS RUN: the packages of tests/clients/requirements.txt cannot be installed here")
        marker.write_text(wanted)
    if Path(sys.prefix).resolve() != venv.resolve():
        os.execv(python, [str(python), *sys.argv])


def needed(*names, of):
    """The first of these programs that is here."""
    for name in names:
        if found := shutil.which(name):
            return found
    raise Missing(f"{names[0]} is not here ({of})")


def hybrid(bake, context):
    """A small hybrid with random weights, a tokenizer and a chat template that knows tools and reasoning."""
    source, out = LOCAL / "hybrid", LOCAL / f"hybrid-{context}.loaf"
    source.mkdir(exist_ok=True)
    fixtures = ROOT / "tests" / "fixtures"
    config = json.loads((fixtures / "hf" / "qwen3_next" / "config.json").read_text())
    config |= {"vocab_size": 3072, "eos_token_id": 3002, "max_position_embeddings": 4096}
    template = (fixtures / "serve" / "template.jinja").read_text().rstrip()
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    shutil.copy(fixtures / "tokenizers" / "qwen3.json", source / "tokenizer.json")
    if not out.exists() or out.stat().st_mtime < Path(bake).stat().st_mtime:
        subprocess.run([bake, "build", source, "-o", out, "--random-weights", "7", "--context", str(context)], check=True, capture_output=True)
    return out


class Server:
    """`loaf serve` with both models, or as `more` says."""

    def __init__(self, program, models, *more):
        named = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
        arguments = [program, "serve", "--listen", "127.0.0.1:0", *named, *more]
        self.process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
        line = self.process.stderr.readline()
        found = re.search(r"http://\S+", line)
        if not found:
            sys.exit(f"the server did not start: {line}{self.process.stderr.read()}")
        self.url = found.group()

    def __enter__(self):
        return self

    def __exit__(self, failed, *_):
        self.process.terminate()
        status = self.process.wait(timeout=60)
        if not failed and status:
            sys.exit(f"the server ended with {status}: {self.process.stderr.read()}")


def check(what, is_true, found):
    """One promise."""
    if not is_true:
        sys.exit(f"FAILED: {what}: {found}")
    print(f"ok: {what}", flush=True)


def with_python(a, models):
    from with_python import anthropic_package, openai_package

    with Server(a.program, models) as server:
        for model in models:
            openai_package(server.url, model)
            anthropic_package(server.url, model)


def with_node(a, models):
    node, npm = needed("node", of="Node 20 or newer"), needed("npm", of="comes with Node")
    folder, wanted = LOCAL / "node", (HERE / "package.json").read_text()
    marker = folder / "complete"
    if not marker.exists() or marker.read_text() != wanted:
        folder.mkdir(exist_ok=True)
        shutil.copy(HERE / "package.json", folder)
        done = subprocess.run([npm, "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"npm cannot install the packages of package.json: {done.stderr[-500:]}")
        marker.write_text(wanted)
    # Packages are looked for beside the script that asks for them.
    shutil.copy(HERE / "with_node.mjs", folder)
    with Server(a.program, models) as server:
        done = subprocess.run([node, "with_node.mjs", server.url, *models], cwd=folder)
        check("the packages of Node", done.returncode == 0, f"exit code {done.returncode}")


def with_description(a, models):
    from with_description import walk

    # Some of what the description allows asks for as much as the context holds, so that is small.
    with Server(a.program, {"hybrid": hybrid(a.bake, 256)}, "--max-body", "1M") as server:
        walk(server.url)


def with_page(a, models):
    browser = needed("chromium", "chromium-browser", "google-chrome", of="Debian: apt install chromium")
    from with_page import talk

    with Server(a.program, models) as server:
        talk(server.url, browser, LOCAL / "page.png")


def with_balancer(a, models):
    haproxy = needed("haproxy", of="2.6 or newer; Debian: apt install haproxy")
    from with_balancer import balance

    with Server(a.program, models) as first, Server(a.program, models) as second:
        balance(haproxy, ROOT / "docs" / "serve" / "haproxy.cfg", LOCAL, [first, second], list(models))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--strict", action="store_true", help="fail where a part cannot be run")
    parser.add_argument("--program", default=TARGET / "loaf")
    parser.add_argument("--bake", default=TARGET / "bake")
    a = parser.parse_args()
    install()
    parts = a.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, found {', '.join(unknown)}")
    models = {"default": ROOT / "artifacts" / "default.loaf", "hybrid": hybrid(a.bake, 4096)}
    missing = []
    for part in parts:
        print(f"-- {part}", flush=True)
        try:
            globals()[f"with_{part}"](a, models)
        except Missing as why:
            missing.append(f"{part}: {why}")
    ran = len(parts) - len(missing)
    print(f"{ran} of {len(parts)} parts were run and are well" + "".join(f"\nNOT RUN: {m}" for m in missing))
    if missing and a.strict:
        sys.exit(1)


if __name__ == "__main__":
    main()
