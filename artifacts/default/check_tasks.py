#!/usr/bin/env python3
"""Checks the task files: every pattern parses, says all that its command needs, and every command is one for bash.

    python3 check_tasks.py            # exit code 1 and a line for each fault
    python3 check_tasks.py --canary   # the same over faulty tasks: every fault must be found

A pattern is worded several times, the slots of its command are filled from it, and `bash -n` reads the result. The steps of scenes.txt are
worded in the same way, a second step behind any first of its block that has what it speaks of. Counted are distinct commands, sentence
patterns and scenes; fewer than LEAST of any is a fault. What a command does is not checked here.
"""

import argparse
import glob
import os
import random
import re
import subprocess
import sys

from grammar import BATCHES, FENCE, MACROS, Choice, Macro, Slot, expand, fill, sequence, tidy

HERE = os.path.dirname(os.path.abspath(__file__))
LEAST = {"commands": 1500, "patterns": 4000, "outside": 150, "blocks of scenes": 90, "wordings of scenes": 2000}
WORDINGS = 6
CANARY = """= rm {file}
remove the file
(remove|delete {file}
= echo 'open
say open
= ls {file}
list <nothing> {file}
= cat {unheard}
show {unheard}
= true {} ; ; true
do {file}
remove nothing from {file:unknown}
= test -e {file} || touch {file}
make {file} unless it is there
"""
CANARY_SCENES = """thing it, that
first touch {x:leaf}
make {x}
first ls {x:leaf}
then cat {x}
show @
show <nothing> @
then rm {x}
then chmod {mode} {x}
change it
then true ; ; true
fail with @
then rm {o}
remove @o
all
first cp {leaf} {b:leaf}
copy {leaf}
first ls
(list
then cat {x}
show it
then pwd
where is @
thing it
first true
do it
thing it
first cp {a:leaf} {b:leaf} => {c}
copy {a} to {b}
then pwd
where is it
"""


def entries(text, name):
    """(where, kind and command, pattern) of a task file; the pattern is None for a command without any."""
    command, count, where = None, 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line[:2] in ("= ", "| ", "- "):
            if command and not count:
                yield where, command, None
            command, count, where = line, 0, f"{name}:{number}"
        else:
            count += 1
            yield f"{name}:{number}", command, line[2:] if line.startswith("! ") else line
    if command and not count:
        yield where, command, None


def parts(nodes):
    """All macros and slots below some nodes."""
    for node in nodes:
        if isinstance(node, Choice):
            for option in node.options:
                yield from parts(option)
        elif not isinstance(node, str):
            yield node


class Values(dict):
    """The slots drawn for one wording."""

    def __init__(self, rng):
        super().__init__()
        import generate
        self.context = generate.Context(rng, "train")
        self.retry = generate.Retry

    def draw(self, name, kind):
        return self.context.draw(name, kind)


def parse_loosely(pattern):
    """As `parse`, before it is known whether every macro exists."""
    nodes, end = sequence(pattern, 0, "")
    if end != len(pattern):
        raise ValueError(f"unbalanced bracket at {end}")
    return nodes


def faults_of(files):
    """(faults, commands, patterns) of (name, text) pairs."""
    from slots import KINDS
    faults, commands, marks, patterns, filled, worded = [], set(), {}, 0, [], []
    for name, text in files:
        for where, command, pattern in entries(text, name):
            if command is None:
                faults.append(f"{where}: a pattern before the first command")
                continue
            kind, template = command[0], command[2:]
            commands.add(template)
            if kind != "-" and re.search(r"\|\||(?<!\\);(?![^(]*\))(?!;)", re.sub(r"'[^']*'|\"[^\"]*\"", "", template)) and not template.startswith(("for ", "until ", "(")):
                faults.append(f"{where}: {template!r} has a list in it, so nothing may follow it: mark it with '-'")
            if marks.setdefault(template, kind) != kind:
                faults.append(f"{where}: {template!r} is marked {marks[template]!r} elsewhere")
            if pattern is None:
                faults.append(f"{where}: {template!r} has no pattern")
                continue
            patterns += 1
            try:
                nodes = parse_loosely(pattern)
                for part in parts(nodes):
                    if isinstance(part, Macro) and part.name not in MACROS:
                        raise ValueError(f"unknown macro <{part.name}>")
                    if isinstance(part, Slot) and part.kind not in KINDS:
                        raise ValueError(f"unknown kind of slot {{{part.kind}}}")
            except (ValueError, KeyError) as e:
                faults.append(f"{where}: {pattern!r}: {e}")
                continue
            worded.append((where, template, nodes))
    rng = random.Random(5)
    for where, template, nodes in worded:
        for _ in range(WORDINGS):
            values = Values(rng)
            out = []
            try:
                expand(nodes, rng, values.draw, out, [])
                request = FENCE.sub("", tidy("".join(out)))
                command = fill(template, values.context.values)
            except values.retry:
                continue
            except KeyError as e:
                faults.append(f"{where}: {e.args[0]}")
                break
            if re.search(r"[<>\[\]()|{}]", re.sub(r"\$\(.*?\)", "", request)) and not re.search(r"[<>\[\]()|{}]", template):
                faults.append(f"{where}: brackets are left in {request!r}")
                break
            filled.append((where, command))
    faults += unread(filled)
    return faults, commands, patterns


def faults_of_scenes(name, text):
    """(faults, blocks, wordings) of a text like scenes.txt."""
    from chains import POINTERS, read_scenes
    from slots import KINDS
    faults, filled, wordings = [], [], 0
    rng = random.Random(6)
    try:
        scenes = read_scenes(text)
    except ValueError as e:
        return [str(e)], 0, 0
    for scene in scenes:
        block = f"{name}:{scene.number}"
        if not scene.firsts or not scene.thens:
            faults.append(f"{block}: a block without {'thens' if scene.firsts else 'firsts'}")
        for step in scene.firsts + scene.thens:
            if not step.patterns:
                faults.append(f"{name}:{step.number}: {step.command!r} has no wording")
            for (number, line), pattern in zip(step.lines, step.patterns):
                try:
                    for part in parts(parse_loosely(pattern)):
                        if isinstance(part, Macro) and part.name not in MACROS:
                            raise ValueError(f"unknown macro <{part.name}>")
                    if re.search(r"[{](?:it|here|orig)[}]", pattern) and (step in scene.firsts or (not scene.names and "{orig}" not in pattern)):
                        raise ValueError("nothing that @ could be")
                except ValueError as e:
                    faults.append(f"{name}:{number}: {line!r}: {e}")
        try:
            for step in scene.firsts + scene.thens:
                step.finish(KINDS)
        except (ValueError, KeyError):
            continue  # said above
        for step in scene.firsts + scene.thens:
            for (number, line), nodes in zip(step.lines, step.patterns):
                wordings += 1
                where, missing, met = f"{name}:{number}", set(), 0
                for first in [None] * 3 if step in scene.firsts else rng.sample(scene.firsts, len(scene.firsts)):
                    values = Values(rng)
                    try:
                        if first is not None:
                            if not first.patterns:
                                continue
                            expand(rng.choice(first.patterns), rng, values.draw, [], [])
                            known = dict(values.context.values)
                            if first.thing:
                                known["x"] = fill(first.thing, known)
                            if first.original:
                                known["o"] = fill(first.original, known)
                            values.context.values = dict(known)
                            values.context.carried = lambda slot: known[{"it": "x", "here": "x", "orig": "o"}.get(slot, slot)]
                        out = []
                        expand(nodes, rng, values.draw, out, [])
                        command = fill(step.command, values.context.values)
                        for said in (step.thing, step.original):
                            if said:
                                fill(said, values.context.values)
                    except values.retry:
                        continue
                    except KeyError as e:
                        missing.add(str(e.args[0]))
                        continue
                    request = FENCE.sub("", tidy("".join(out)))
                    if re.search(r"[<>\[\]()|{}]", request) and not re.search(r"[<>\[\]()|{}]", step.command):
                        missing.add(f"brackets are left in {request!r}")
                        continue
                    filled.append((where, command))
                    met += 1
                    if met == 3:
                        break
                if not met and missing or (missing and step in scene.firsts):
                    faults.append(f"{where}: {line!r} of {step.command!r}: nothing gives {', '.join(sorted(missing))}")
    return faults + unread(filled), len(scenes), wordings


def unread(filled):
    """A fault for each (where, command) that bash does not read: it is asked to define a function with that body, and runs nothing."""
    script = """while IFS= read -r -d '' c; do eval "f() { $c"$'\n}' 2>/dev/null && echo read || echo unread; done"""
    done = subprocess.run(["bash", "-c", script], input="".join(f"{c}\0" for _, c in filled), capture_output=True, text=True, check=True)
    answers = done.stdout.split()
    if len(answers) != len(filled):
        return [f"bash: expected {len(filled)} answers, found {len(answers)}"]
    return [f"{where}: bash does not read {command!r}" for (where, command), answer in zip(filled, answers) if answer != "read"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canary", action="store_true", help="check faulty tasks instead; exit code 1 if a fault is not found")
    args = parser.parse_args()
    if args.canary:
        faults, _, _ = faults_of([("canary", CANARY)])
        faults += faults_of_scenes("scenes", CANARY_SCENES)[0]
        wanted = {f"canary:{n}" for n in (2, 3, 5, 7, 9, 11, 12, 14)} | {f"scenes:{n}" for n in (4, 7, 8, 19, 23, 24)}
        # A block with a fault in its brackets is not worded; these are read apart.
        lines = CANARY_SCENES.splitlines()
        faults += faults_of_scenes("worded", "\n".join(lines[:6] + lines[8:14]))[0] + faults_of_scenes("worded2", "\n".join(lines[14:17] + lines[19:21]))[0]
        faults += faults_of_scenes("worded3", "\n".join(lines[26:]))[0]
        wanted |= {"worded3:3"}
        wanted |= {f"worded:{n}" for n in (8, 10, 12)} | {f"worded2:{n}" for n in (3, 5)}
        missed = wanted - {":".join(f.split(":")[:2]) for f in faults}
        print(f"missed: {sorted(missed)}" if missed else f"ok: all {len(wanted)} faults found")
        return 1 if missed else 0
    files = []
    for path in sorted(glob.glob(os.path.join(HERE, "tasks", "*.tasks"))):
        with open(path, encoding="utf-8") as f:
            files.append((os.path.basename(path), f.read()))
    faults, commands, patterns = faults_of(files)
    outside, blocks, wordings = [], 0, 0
    for name in (f"{batch}outside.txt" for batch in BATCHES):
        with open(os.path.join(HERE, name), encoding="utf-8") as f:
            outside += [line for line in f.read().splitlines() if line.strip() and not line.startswith("#")]
    for name in (f"{batch}scenes.txt" for batch in BATCHES):
        with open(os.path.join(HERE, name), encoding="utf-8") as f:
            more, found, worded = faults_of_scenes(name, f.read())
        faults, blocks, wordings = faults + more, blocks + found, wordings + worded
    for what, count in (("commands", len(commands)), ("patterns", patterns), ("outside", len(outside)), ("blocks of scenes", blocks), ("wordings of scenes", wordings)):
        if count < LEAST[what]:
            faults.append(f"expected at least {LEAST[what]} {what}, found {count}")
    print("\n".join([*sorted(set(faults)), f"{'FAILED' if faults else 'ok'}: {len(commands)} commands, {patterns} patterns, {len(outside)} patterns outside, {blocks} blocks of scenes with {wordings} wordings"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
