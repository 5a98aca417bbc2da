"""Measures a program that answers requests with shell commands, on the requests written by hand in requests/.

    python3 judge.py --program target/release/loaf            table; --failures lists what went wrong, --json for programs
    python3 judge.py --program ... --set second               the same on the second set, requests/second/
    python3 judge.py --self-test [--quick]                    the judge on itself, with both sets

requests/README.md describes the files. A request is *right* if the program's command does what one of the accepted commands does
(executed in prepared trees, sandbox.py), or, where commands cannot be executed, if it says the same (compare.py). Reported:

- right: of all requests of a sort, whether marked unsure or not,
- silent errors: wrong and not marked unsure, of all requests in the domain,
- false alarms: right and yet marked unsure, of all that are right,
- unsure outside: marked unsure, of the requests outside the domain.

An answer counts as marked if the program says so on standard error, or if it is empty or a comment. Nothing here trains anything,
and nobody may train on requests/. Who writes training data may not even read requests/second/, so of that set only totals and groups
are shown, whatever is asked for.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import compare
import sandbox
import trees

REQUESTS = Path(__file__).resolve().parent / "requests"
CLOSED = "second"  # of this set, only totals and groups are shown
SETS = {"first": REQUESTS, "second": REQUESTS / "second"}
LEAST = {"first": {"one": 500, "two": 130, "outside": 130}, "second": {"one": 520, "two": 135, "outside": 100}}
MODES = {"run", "text", "names", "ordered", "number", "cwd", "git", "dirty"}
CHOICE = re.compile(r"\[\[([^\[\]]*\|[^\[\]]*)\]\]")


@dataclass
class Request:
    id: str
    steps: str
    modes: set
    text: str = ""
    setup: list = field(default_factory=list)
    reference: list = field(default_factory=list)  # `>`: what they do is right
    equal: list = field(default_factory=list)  # `=`: do the same as a reference
    by_words: list = field(default_factory=list)  # `~`: right, but what they do differs from run to run
    wrong: list = field(default_factory=list)  # `!`: do something else

    @property
    def category(self):
        return self.id.rsplit("-", 1)[0]

    @property
    def kind(self):
        return next((k for k in ("git", "dirty") if k in self.modes), "plain")

    @property
    def accepted(self):
        return self.reference + self.equal + self.by_words


def choices(line):
    """A line with `[[a|b]]` in it, once for every choice."""
    parts = CHOICE.split(line)
    return ["".join(p) for p in itertools.product(*([p] if i % 2 == 0 else p.split("|") for i, p in enumerate(parts)))]


def read(folder=REQUESTS):
    """All requests, by file and number; a ValueError says where a file is not as it should be."""
    requests = []
    for path in sorted(folder.glob("*.requests")):
        current = None
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.name}:{number}"
            if header := re.fullmatch(r"\[([a-z]+-\d{3})\] (one|two|outside)((?: [a-z]+)*)", line):
                current = Request(header[1], header[2], set(header[3].split()))
                if current.category != path.stem or current.modes - MODES or bool(current.modes) == (header[2] == "outside"):
                    raise ValueError(f"{where}: not a header of {path.stem}: {line!r}")
                requests.append(current)
            elif not line or (current is None and line.startswith("#")):
                continue
            elif current is None:
                raise ValueError(f"{where}: a line before the first header")
            elif not current.text:
                current.text = line
            elif line[:2] in ("> ", "= ", "~ ", "! ", "+ "):
                kept = {">": current.reference, "=": current.equal, "~": current.by_words, "!": current.wrong, "+": current.setup}[line[0]]
                kept.extend([line[2:]] if line[0] == "+" else choices(line[2:]))
            else:
                raise ValueError(f"{where}: expected a line with >, =, ~, ! or +")
    ids = [r.id for r in requests]
    if len(set(ids)) != len(ids) or len({r.text.lower() for r in requests}) != len(requests):
        raise ValueError("an id or a request stands twice")
    if bad := [r.id for r in requests if (r.steps == "outside") == bool(r.reference) or not r.text]:
        raise ValueError(f"without accepted commands, or with some although outside: {bad}")
    return requests


def normal(text, modes):
    """Output as it is compared: see requests/README.md."""
    if "number" in modes:
        total = [line for line in text.splitlines() if re.search(r"\btotal$", line)]
        found = re.search(r"-?\d+(\.\d+)?", total[-1] if total else text)
        return [str(float(found[0]))] if found else []
    lines = [re.sub(r"(^|\s)\./(?=.)", r"\1", " ".join(line.split())).rstrip("/") for line in text.rstrip().splitlines()]
    lines = [line for line in lines if not re.match(r"d[rwx-]{9}.* \.\.?$", line) and not re.match(r"total \d+\w?$", line)]
    if "names" in modes:
        lines = [line.split()[-1] for line in lines if line and not line.endswith(":")]
    return lines if "ordered" in modes else sorted(lines)


def does(expected, found, modes):
    """Whether an effect is the expected one, in one tree."""
    if isinstance(expected, str) or isinstance(found, str) or expected["tree"] != found["tree"]:
        return False
    if "cwd" in modes and expected["cwd"] != found["cwd"]:
        return False
    wanted = normal(expected["out"], modes)
    if not wanted and not expected["changed"]:
        return expected["touched"] == found["touched"] and not normal(found["out"], modes)
    return not wanted or wanted == normal(found["out"], modes)


class Judge:
    def __init__(self, box):
        self.box = box
        self.by = {"effect": 0, "text": 0}

    def effects(self, request, command, trusted=False):
        setup = "\n".join(request.setup)
        return [self.box.effect(command, request.kind, v, setup, trusted) for v in trees.VARIANTS]

    def by_effect(self, request, command, trusted=False):
        """Whether a command does what a reference does, in every tree; None if it cannot be run."""
        if "text" in request.modes:
            return None
        found = self.effects(request, command, trusted)
        if any(isinstance(f, str) and not f.startswith("it took") for f in found):
            return None
        ran = False
        for reference in request.reference:
            expected = self.effects(request, reference, trusted=True)
            ran = ran or not any(isinstance(e, str) for e in expected)
            if all(does(e, f, request.modes) for e, f in zip(expected, found)):
                return True
        return False if ran else None

    def right(self, request, command, trusted=False):
        """Whether a command answers a request."""
        if any(compare.same(command, accepted) for accepted in request.accepted):
            self.by["text"] += 1
            return True
        if self.by_effect(request, command, trusted):
            self.by["effect"] += 1
            return True
        return False


def ask(program, model, request, closed=False):
    """(command, marked unsure) of the program; a RuntimeError, without the request if its set is closed, if it fails."""
    words = [program, "run", *(["-m", model] if model else []), request.text]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
        why = f"ended with {done.returncode}: {done.stderr.strip()}" if done.returncode else ""
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        why = f"did not answer: {e}"
    if why and closed:
        raise RuntimeError(f"the program failed on a request of the group {request.category}")
    if why:
        raise RuntimeError(f"{request.id}: {' '.join(words)!r} {why}")
    command = done.stdout.strip()
    return command, "unsure" in done.stderr or not command or command.startswith("#")


def measure(requests, answers, judge):
    """One row per request, and the figures."""
    rows = []
    for request in requests:
        command, unsure = answers[request.id]
        right = None if request.steps == "outside" else judge.right(request, command)
        rows.append({"id": request.id, "category": request.category, "steps": request.steps, "request": request.text,
                     "answer": command, "unsure": unsure, "right": right, "expected": (request.reference or [""])[0]})  # fmt: skip
    return rows, {"all": figures(rows), **{c: figures([r for r in rows if r["category"] == c]) for c in sorted({r["category"] for r in rows})}}


def figures(rows):
    """The measures over some rows, as [count, of]."""
    inside = [r for r in rows if r["steps"] != "outside"]
    outside = [r for r in rows if r["steps"] == "outside"]
    right = [r for r in inside if r["right"]]
    return {
        "one": [sum(r["steps"] == "one" for r in right), sum(r["steps"] == "one" for r in inside)],
        "two": [sum(r["steps"] == "two" for r in right), sum(r["steps"] == "two" for r in inside)],
        "silent_errors": [sum(not r["right"] and not r["unsure"] for r in inside), len(inside)],
        "false_alarms": [sum(r["unsure"] for r in right), len(right)],
        "unsure_outside": [sum(r["unsure"] for r in outside), len(outside)],
    }


def table(result):
    names = ["one", "two", "silent_errors", "false_alarms", "unsure_outside"]
    lines = ["".join([f"{'category':<12}", *(f"{n.replace('_', ' '):>22}" for n in names)])]
    for category, row in result.items():
        cells = (f"{100 * a / b:.1f} % ({a}/{b})" if b else "-" for a, b in (row[n] for n in names))
        lines.append("".join([f"{category:<12}", *(f"{c:>22}" for c in cells)]))
    return "\n".join(lines)


def report(rows, result, by, closed, as_json=False, failures=False):
    """What is printed of a measurement; of a closed set, only totals and groups."""
    if as_json:
        return json.dumps({"figures": result} if closed else {"figures": result, "rows": rows}, indent=1)
    lines = [table(result), f"right by text: {by['text']}, by what was done: {by['effect']}"]
    for r in rows if failures and not closed else []:
        if r["right"] is False or (r["right"] is None and not r["unsure"]) or (r["right"] and r["unsure"]):
            lines.append(f"\n{r['id']} {'right' if r['right'] else 'wrong'}, {'unsure' if r['unsure'] else 'silent'}: {r['request']}\n"
                         f"  got      {r['answer']}\n  expected {r['expected']}")  # fmt: skip
    return "\n".join(lines)


def told_of_closed():
    """What can be learned of a closed set's single requests and answers, one line each; nothing, if all is well."""
    secret = {"id": "canary-001", "request": "an unseen request", "answer": "an unseen answer", "expected": "an unseen command"}
    rows = [{"category": "canary", "steps": "one", "unsure": False, "right": False, **secret}]
    ways = list(itertools.product((False, True), repeat=2))
    shown = {closed: [report(rows, {"all": figures(rows)}, {"text": 0, "effect": 0}, closed, *way) for way in ways] for closed in (True, False)}
    faults = [f"of a closed set, its {name} is shown" for name, value in secret.items() if any(value in text for text in shown[True])]
    # The canary: of an open set they are shown, so a leak would be seen.
    faults += [f"of an open set, no {name} is shown" for name, value in secret.items() if not any(value in text for text in shown[False])]
    request = Request(secret["id"], "one", {"text"}, secret["request"])
    for program, closed in itertools.product((shutil.which("false"), "/nowhere/program", "no\0program"), (True, False)):
        try:
            ask(program, None, request, closed)
            faults.append("a program that fails is not noticed")
        except RuntimeError as e:
            told = "".join(traceback.format_exception(e))
            if (secret["request"] in told or secret["id"] in told) == closed:
                faults.append(f"a program that fails tells {'of a closed set' if closed else 'nothing of an open set'}")
    asked = [sys.executable, __file__, "--set", CLOSED, "--failures", "--answers", os.devnull]
    if (done := subprocess.run(asked, capture_output=True, text=True, check=False)).returncode != 2 or done.stdout:
        faults.append("the failures of the closed set can be asked for")
    return faults


def in_two_sets(sets):
    """The ids of requests that stand in more than one set, word for word."""
    seen, found = {}, []
    for name, requests in sets.items():
        for r in requests:
            words = tuple(re.findall(r"\w+", r.text.lower())) or r.text
            if words in seen and seen[words][0] != name:
                found.append(f"{seen[words][0]} {seen[words][1]} and {name} {r.id} are one request")
            seen[words] = (name, r.id)
    return found


def self_test(requests, judge, quick, least, closed):
    """What is wrong with the requests or with the judge, one line each; of a closed set, without commands."""
    faults, counts = [], {s: sum(r.steps == s for r in requests) for s in least}
    faults += [f"expected at least {least[s]} requests of sort {s!r}, found {n}" for s, n in counts.items() if n < least[s]]
    said = (lambda command: "a command") if closed else repr
    inside = [r for r in requests if r.steps != "outside"][:: 12 if quick else 1]
    ran = lacking = 0
    for i, request in enumerate(inside):
        read_by_bash = subprocess.run([judge.box.bash, "-n"], input="\n".join(request.accepted), capture_output=True, text=True, check=False)
        if read_by_bash.returncode != 0:
            faults.append(f"{request.id}: bash cannot read it" + ("" if closed else f": {read_by_bash.stderr.strip()}"))
        # The canaries: doing nothing, and the answer to another request, which this one must not take.
        other = inside[(i + 11) % len(inside)].reference[0]
        for command in ("true", *request.wrong, *([other] if "text" in request.modes else [])):
            if judge.right(request, command, trusted=True):
                faults.append(f"{request.id}: a wrong command passes: {said(command)}")
        if not all(judge.right(request, command, trusted=True) for command in request.accepted):
            faults.append(f"{request.id}: an accepted command does not pass")
        if "text" in request.modes:
            continue
        expected = [judge.effects(request, c, trusted=True) for c in request.reference]
        for why in sorted({e for effects in expected for e in effects if isinstance(e, str)}):
            lacking += "program" in why
            faults += [] if "program" in why else [f"{request.id}: a reference is not run: {why}"]
        ran += 1
        for command, effects in zip(request.reference, expected):
            if any(isinstance(e, str) for e in effects):
                continue
            if "cwd" not in request.modes and all(not normal(e["out"], request.modes) and not e["changed"] and not e["touched"] for e in effects):
                faults.append(f"{request.id}: {said(command)} has no effect" + ("" if closed else f": {effects[0]['err'].strip()!r}"))
            again = judge.box.effect(f"{command} ", request.kind, trees.VARIANTS[0], "\n".join(request.setup), True)
            if not does(effects[0], again, request.modes):
                faults.append(f"{request.id}: {said(command)} does something else the second time")
        faults += [f"{request.id}: {said(c)} does something else than every reference" for c in request.equal
                   if judge.by_effect(request, c, trusted=True) is False]  # fmt: skip
    return faults, f"{len(requests)} requests {counts}; {len(inside)} tested, {ran} by running; programs missing here: {lacking}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=os.path.abspath, help="the program to ask, as PROGRAM run REQUEST")
    parser.add_argument("--model", type=os.path.abspath, help="the loaf it is to use (default: its own)")
    parser.add_argument("--answers", type=Path, help="judge these instead: JSON lines with id, answer, unsure")
    parser.add_argument("--json", action="store_true", help="figures and rows as JSON")
    parser.add_argument("--failures", action="store_true", help="list every request that went wrong")
    parser.add_argument("--set", choices=SETS, help="the requests to ask (default: first; with --self-test: both)")
    parser.add_argument("--self-test", action="store_true", help="check the requests and the judge; exit code 1 for a fault")
    parser.add_argument("--quick", action="store_true", help="with --self-test: every twelfth request")
    args = parser.parse_args()
    closed = args.set == CLOSED
    if args.failures and closed:
        parser.error("the second set is closed: totals and groups only")
    sets = {name: read(folder) for name, folder in SETS.items()} if args.self_test else {}
    requests = read(SETS[args.set or "first"])
    no_namespaces = sandbox.enter()
    if no_namespaces and not args.self_test:
        sys.exit(f"judge: {no_namespaces}, so nothing can be run safely")
    answers = {}
    if args.answers:
        answers = {a["id"]: (a["answer"], a["unsure"]) for a in map(json.loads, args.answers.read_text().splitlines())}
    elif args.program:
        try:
            with ThreadPoolExecutor(2) as pool:
                answers = dict(zip([r.id for r in requests], pool.map(lambda r: ask(args.program, args.model, r, closed), requests)))
        except RuntimeError as e:
            sys.exit(f"judge: {e}")
    elif not args.self_test:
        parser.error("one of --program, --answers, --self-test is needed")
    folder = tempfile.mkdtemp(prefix="judge")
    try:
        judge = Judge(sandbox.Sandbox(folder, sealed=not no_namespaces))
    except OSError as e:
        if not args.self_test:
            sys.exit(f"judge: {e}, so nothing can be run safely")
        judge = Judge(sandbox.Sandbox(folder, sealed=False))
    try:
        if args.self_test:
            all_faults = told_of_closed() + in_two_sets(sets)
            print("".join(f"{fault}\n" for fault in all_faults), end="")
            for name in [args.set] if args.set else sets:
                faults, summary = self_test(sets[name], judge, args.quick, LEAST[name], name == CLOSED)
                print("\n".join(faults + [f"{'FAILED' if faults else 'ok'}: {name} set: {summary}"]), flush=True)
                all_faults += faults
            return 1 if all_faults else 0
        try:
            rows, result = measure(requests, answers, judge)
        except ValueError:  # it names a line of the set
            if not closed:
                raise
            sys.exit("judge: a tree of the second set could not be prepared")
        print(report(rows, result, judge.by, closed, args.json, args.failures))
        return 0
    finally:
        if not judge.box.sealed:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
