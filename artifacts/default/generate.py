#!/usr/bin/env python3
"""Seeded generator of (request, command) pairs: the whole data recipe of the default model.

    python3 generate.py --split train --count 20 --seed 1        # tab separated: request, command, task
    python3 generate.py --check 200000                           # one request, one command?

Task files (tasks/*.tasks) hold one entry per command. The line with the command starts with `= ` (an action, can be
chained with &&), `| ` (prints lines, can be piped on) or `- ` (interactive: alone). Lines below it are phrasings:
verb phrases, or, under `|`, noun phrases, with verb phrases marked `! `.

Splits, all disjoint from `train` by a CRC-32 of what is held out:
    slots         every open value (name, path, pattern, host ...) comes from the held-out tenth
    phrasings     the task's wording (after choosing alternatives) is one of the held-out twelfth of its wordings
    patterns      the task's sentence pattern, as written in the task file, was never used in training (harder);
                  one task in four gives up a pattern, those of everyday.tasks give up none
    combinations  a pair of parts (task and pipe stage, file attribute and action, two chained tasks) never seen together
    outside       requests outside the domain, with the learned answer REFUSAL (patterns of outside.txt, one in ten held out)
    ood           requests outside the domain, without a command (ood.txt), never trained on

What is asked in requests/ (the closed test set) is never drawn.

What always holds: (seed, split) gives the same pairs on every machine; standard library only.
"""

import argparse
import glob
import math
import os
import random
import re
import sys
from itertools import accumulate

from chains import Bound, GROUP, MAKES, gerund, original, slots_of, thing
from compose import ATTRIBUTES, CONSUMERS, DIR_ATTRIBUTES, FOR_BARE, FOR_DIRS, FOR_LINKS, MODIFIERS, ONLY_DIRS, TYPES
from grammar import CLOSE, FENCE, OPEN, bucket, expand, fill, parse, tidy
from slots import KINDS, NUMBERS, ORDINALS

HERE = os.path.dirname(os.path.abspath(__file__))
SPLITS = ("slots", "phrasings", "patterns", "combinations")
QUESTION = ("what", "which", "how", "who", "where", "when", "is ", "are ", "do ", "does ", "on which", "did", "at which")
# Commands whose output is worth piping on.
REFUSAL = "# I don't know a command for that"   # a comment, so that even running it does nothing
OUTSIDE = 0.06                                  # the part of the training data that is outside
PIPEABLE = set("""ls grep ps git df ss lsof who last docker kubectl dpkg journalctl dmesg history env awk cut tr comm diff tar unzip strings
zgrep zcat mount lsblk pip systemctl apt ip dig pgrep curl jq du crontab groups sed uniq""".split())


class Retry(Exception):
    """The draw fell on the wrong side of a split: draw again."""


class Context:
    """One request in the making: its random generator, its split, and the slot values drawn so far."""

    def __init__(self, rng, split, tiny=False):
        self.rng, self.split, self.tiny = rng, split, tiny
        self.held_slots = split == "slots"
        self.values = {}
        self.keys = []       # pairs of parts used together
        self.open_slots = 0
        self.bound = None    # what "it" is
        self.place = ""      # the words that say where, once drawn

    def draw(self, name, kind):
        if self.bound is not None:
            text = self.bound.draw(kind, self.rng)
            if text is not None:
                self.values["dir" if kind == "in" else name] = self.bound.value
                return text
        for _ in range(20):
            text, value = KINDS[kind](self)
            if name == "in":
                name = "dir"
            if name == "b" and kind == "line" and int(value) <= int(self.values.get("a", "0")):
                continue
            if value not in self.values.values() or kind in ("in", "col", "delim", "mode", "size", "age", "agea", "mins"):
                break
        else:
            raise Retry
        self.open_slots += kind not in ("in", "ext", "dotext", "delim", "mode", "col", "size", "age", "agea", "mins", "small", "secs") or (kind == "in" and value not in (".", "~", ".."))
        self.values[name] = value
        if kind == "in":
            self.place = text
        return text

    def say(self, nodes, task=None, index=0, count=1):
        """Expand a pattern; for a task's own wording, keep to the side of the split."""
        out, skeleton = [], []
        expand(nodes, self.rng, self.draw, out, skeleton)
        if task is not None:
            # One task in four, the everyday ones aside, gives up a pattern (never its first, nor one that opens with the command's own name);
            # one wording in twelve is held out where a pattern has at least six.
            wording = tidy("".join(skeleton))
            own = wording.split(" ")[0] == task.split(" ")[0]
            pattern_held = count >= 3 and bucket(task, 4) == 0 and task not in EVERYDAY and index == 1 + bucket("pattern" + task, count - 1) and not own
            wording_held = nodes.wordings >= 6 and bucket(task + wording, 12) == 0
            if self.split == "patterns":
                held, wanted = pattern_held, True
            elif self.split == "phrasings":
                held, wanted = wording_held and not pattern_held, True
            else:
                held, wanted = wording_held or pattern_held, False
            if held != wanted:
                raise Retry
        return "".join(out)


class Task:
    def __init__(self, kind, command):
        self.kind, self.command = kind, command
        self.verbs, self.nouns = [], []

    def finish(self):
        """Number all patterns of the task together, nouns first."""
        self.count = len(self.nouns) + len(self.verbs)
        self.nouns = [(i, parse(p)) for i, p in enumerate(self.nouns)]
        self.verbs = [(i + len(self.nouns), parse(p)) for i, p in enumerate(self.verbs)]
        self.noun_weights, self.verb_weights = ([0.5 + math.log2(1 + p.wordings) for _, p in ps] for ps in (self.nouns, self.verbs))
        self.noun_part = sum(self.noun_weights) / (sum(self.noun_weights) + sum(self.verb_weights))
        # What people ask for every day is asked for in more ways, and drawn more often.
        self.weight = min(6.0, 0.6 + 0.4 * self.count) * (2.0 if self.command in EVERYDAY else 1.0)
        self.thing, self.original = thing(self.command), original(self.command)
        words = self.command.split()
        self.pipeable = self.kind == "|" and words[0] in PIPEABLE and not any(
            w in self.command for w in ("head -n", "tail -n", "END", "wc -", "--count", "-sd,", "-q ", "rev-parse", "--show-current", "http_code", "ppid", " -h", "shortlog"))


def load_tasks():
    tasks, known = [], {}
    for path in sorted(glob.glob(os.path.join(HERE, "tasks", "*.tasks"))):
        with open(path) as f:
            for number, line in enumerate(f, 1):
                line = line.rstrip("\n")
                if not line.strip() or line.startswith("#"):
                    continue
                if line[:2] in ("= ", "| ", "- "):
                    task = known.get(line[2:])
                    if os.path.basename(path) in COMMON:
                        EVERYDAY.add(line[2:])
                    if task is None:
                        task = known[line[2:]] = Task(line[0], line[2:])
                        tasks.append(task)
                    elif task.kind != line[0]:
                        raise ValueError(f"{path}:{number}: {line!r} is marked {task.kind!r} elsewhere")
                elif line.startswith("! "):
                    task.verbs.append(line[2:])
                elif task.kind == "|":
                    task.nouns.append(line)
                else:
                    task.verbs.append(line)
    for t in tasks:
        t.finish()
    return tasks


def load_patterns(name):
    """The patterns of a file with one a line."""
    with open(os.path.join(HERE, name)) as f:
        return [parse(line.strip()) for line in f if line.strip() and not line.startswith("#")]


def load_closed():
    """The requests of the closed test set, as `plain` writes them."""
    closed = set()
    for path in glob.glob(os.path.join(HERE, "requests", "*.requests")):
        with open(path) as f:
            lines = f.read().splitlines()
        closed.update(plain(b) for a, b in zip(lines, lines[1:]) if re.match(r"\[[a-z]+-\d+\] ", a))
    return closed


def plain(text):
    """A request in small letters, without marks at its end."""
    return " ".join(text.lower().split()).strip(" .?!")


COMMON = ("everyday.tasks", "wordings.tasks", "everywhere.tasks", "lines.tasks")
EVERYDAY = set()     # commands whose every pattern is trained
TASKS = load_tasks()
NOT_COMMANDS = load_patterns("outside.txt")
CLOSED = load_closed()
LINES = [t for t in TASKS if t.pipeable]
NOUNS = [t for t in LINES if t.nouns]


class Pool:
    """Tasks drawn by weight."""

    def __init__(self, tasks):
        self.tasks, self.sums = tasks, list(accumulate(t.weight for t in tasks))

    def draw(self, rng):
        return rng.choices(self.tasks, cum_weights=self.sums)[0]


EVERY, NOUN_POOL, LINE_POOL = Pool(TASKS), Pool(NOUNS), Pool(LINES)
ACTIONS = Pool([t for t in TASKS if t.kind == "=" and not t.command.endswith("&")])
OUTPUTS = Pool([t for t in TASKS if t.kind in "=|" and not t.command.endswith("&")])
FIRST = Pool([t for t in TASKS if t.kind == "=" and not t.command.endswith("&") and (t.thing or t.original)])
FOLLOW = {group: Pool([t for t in TASKS if not MAKES.match(t.command) and not t.command.endswith("&") and [GROUP.get(k) for k in slots_of(t.command).values()].count(group) == 1
                       and not t.command.startswith(("cp -r {a", "rsync"))])
          for group in sorted(set(GROUP.values()))}
ENTER = next(t for t in TASKS if t.command == "cd {path}")
SHOW = parse("<show>")
DETERMINER = parse("(all|all the|the||the|all of the|)")


def is_question(text):
    return text.lower().startswith(QUESTION)


def verb_phrase(ctx, task):
    """A request for a task as a verb phrase (or a question, or a fragment)."""
    rng = ctx.rng
    if task.nouns and rng.random() < task.noun_part:
        i, nodes = rng.choices(task.nouns, task.noun_weights)[0]
        noun = ctx.say(nodes, task.command, i, task.count)
        return noun_request(ctx, noun)
    i, nodes = rng.choices(task.verbs, task.verb_weights)[0]
    return ctx.say(nodes, task.command, i, task.count)


def noun_request(ctx, noun):
    r = ctx.rng.random()
    if r < 0.62:
        return ctx.say(SHOW) + " " + ctx.say(DETERMINER) + " " + noun
    if r < 0.85:
        return noun
    return ctx.rng.choice(["what are the", "which are the", "I need", "I want to see", "let me see", "where are the"]) + " " + noun


def file_set(ctx, consumer):
    """A set of files: returns (noun phrase, singular noun phrase, find expression, ids of attributes)."""
    rng = ctx.rng
    kind, head, chosen = "f", None, []
    r = rng.random()
    if consumer in ONLY_DIRS or (consumer in FOR_DIRS and r < 0.15):
        name, kind, head = TYPES[0][0], TYPES[0][1], TYPES[0][2]
    elif consumer in FOR_LINKS and r > 0.95:
        name, kind, head = TYPES[1][0], TYPES[1][1], TYPES[1][2]
    if kind == "f":
        count = rng.choice([1, 1, 1, 1, 2, 2, 3]) if not (consumer in FOR_BARE and rng.random() < 0.3) else 0
        pool = ATTRIBUTES
    else:
        ctx.keys.append(f"{consumer}*{name}")
        count = rng.choice([0, 1, 1, 2])
        pool = [a for a in ATTRIBUTES if a[0] in DIR_ATTRIBUTES]
    places = set()
    for _ in range(count):
        a = ATTRIBUTES[0] if kind == "f" and rng.random() < 0.3 else rng.choice(pool)
        if a[1] // 10 not in {p // 10 for p in places} or (a[1] >= 40 and a[1] not in places):
            places.add(a[1])
            chosen.append(a)
    ids = sorted(a[0] for a in chosen)
    for i, x in enumerate(ids):
        ctx.keys.append(f"{consumer}*{x}")
        for y in ids[i + 1:]:
            ctx.keys.append(f"{x}*{y}")
    before, after, noun = [], [], None
    rng.shuffle(chosen)
    for a in chosen:
        i = rng.randrange(len(a[3]))
        where, nodes = a[3][i]
        text = ctx.say(nodes, "set " + a[0], i, len(a[3]))
        if where == "H":
            noun = text
        elif where == "N":
            before.append(text)
        else:
            after.append(text)
    if head is not None:
        noun = ctx.say(head)
    if noun is None:
        noun = "files"
    place = ctx.draw("dir", "in")
    if rng.random() < 0.5:
        parts = before + [noun, place] + after
    else:
        parts = before + [noun] + after + [place]
    depth = ""
    if rng.random() < 0.03:
        depth = " -maxdepth " + ctx.values.setdefault("depth", str(rng.randint(1, 6)))
        parts.append(rng.choice(["at most {} levels deep", "not deeper than {} levels", "up to depth {}"]).format(ctx.values["depth"]))
        ctx.keys.append(f"{consumer}*depth")
    plural = " ".join(p for p in parts if p)
    single = [p for p in parts if p]
    at = len(before)
    single[at] = singular(single[at])
    single = " ".join(single).replace(" that are ", " that is ").replace(" that were ", " that was ").replace(" that have ", " that has ").replace(" that end ", " that ends ").replace(" that start ", " that starts ").replace(" that belong ", " that belongs ")
    tests = "".join(" " + fill(a[2], ctx.values) for a in sorted(chosen, key=lambda a: a[1]))
    return plural, single, f"find {ctx.values['dir']}{depth} -type {kind}{tests}", ids


def singular(noun):
    for plural, one in (("subdirectories", "subdirectory"), ("directories", "directory"), ("folders", "folder"), ("symlinks", "symlink"), ("symbolic links", "symbolic link"), ("files", "file")):
        if noun.endswith(plural):
            return noun[:-len(plural)] + one
    return noun


def find_request(ctx):
    """A request about a set of files: (request, command, prints lines, task name, bare noun phrase or None)."""
    rng = ctx.rng
    consumer, command, lines, texts = CONSUMERS[0] if rng.random() < 0.25 else rng.choice(CONSUMERS)
    plural, single, find, ids = file_set(ctx, consumer)
    only_ext = ids == ["ext"]
    if not ids and "-type f" in find and consumer not in FOR_BARE:
        raise Retry
    if consumer in ("grep", "grepl") and only_ext:
        raise Retry  # grep -r --include says it better
    i = rng.randrange(len(texts))
    text = ctx.say(texts[i], "do " + consumer, i, len(texts))
    if "@@" in text:
        text = text.replace("@@", rng.choice(["every", "each", "every single"]) + " " + single)
    elif "@" in text:
        determiner = ctx.say(DETERMINER)
        if text == "@":
            determiner = rng.choice(["", "all", "all the"])
        text = text.replace("@", (determiner + " " + plural).strip())
    elif "~1" in text:
        text = text.replace("~1", single)
    else:
        text = text.replace("~", plural)
    return text, find + fill(command, ctx.values), lines, "find:" + consumer, (plural if consumer == "list" else None)


def modified(ctx, text, command, name, noun):
    """Put one or two pipe stages behind a command that prints lines."""
    rng = ctx.rng
    stages = sorted({rng.randrange(len(MODIFIERS)) for _ in range(1 if rng.random() < 0.75 else 2)}, key=lambda i: MODIFIERS[i][1])
    stages = [MODIFIERS[i] for i in stages]
    if len({s[1] for s in stages}) < len(stages):
        raise Retry
    for n, (stage, _, cmd, suffixes, whole) in enumerate(stages):
        ctx.keys.append(f"{name}*{stage}")
        if n:
            ctx.keys.append(f"{stages[0][0]}*{stage}")
        if n == 0 and noun is not None and whole and rng.random() < 0.75:
            i = rng.randrange(len(whole))
            text = ctx.say(whole[i], "whole " + stage, i, len(whole)).replace("#", noun)
        else:
            if is_question(text):
                raise Retry
            i = rng.randrange(len(suffixes))
            suffix = ctx.say(suffixes[i], "then " + stage, i, len(suffixes))
            text += ("" if suffix.startswith(("in ", "as ", "into ", "with ")) else rng.choice(["", ","])) + " " + suffix
        command += fill(cmd, ctx.values)
    return text, command


CONNECTORS = [" and then ", ", then ", " and ", " and ", " and ", ", and then ", " then ", " and after that ", "; then ", ", after that ", ". then ", ", and ", " and afterwards ",
              " && ", "; ", " and finally ", " and also ", ", and also ", " and when that is done ", ", next ", " and if that works ", ". after that "]
MARKED = re.compile(r"\b(it|them|there|that|this|the (?:file|folder|directory|archive|copy|original))\b")


def outside(ctx):
    """A request that no command answers, and the answer that says so."""
    i = ctx.rng.randrange(len(NOT_COMMANDS))
    if (bucket(f"outside {i}", 10) == 0) != (ctx.split == "outside"):
        raise Retry
    text = ctx.say(NOT_COMMANDS[i])
    if not tidy(FENCE.sub("", text)):
        raise Retry
    return text, REFUSAL, "outside"


def raw(ctx):
    """(request, command, task name) before wrapping."""
    rng = ctx.rng
    if ctx.split == "outside" or (ctx.split == "train" and not ctx.tiny and rng.random() < OUTSIDE):
        return outside(ctx)
    r = rng.random()
    if ctx.split == "combinations":
        r = 0.45 + 0.55 * r
    if r < 0.45:
        task = EVERY.draw(rng)
        text = verb_phrase(ctx, task)
        command = fill(task.command, ctx.values)
        if rng.random() < 0.02 and ctx.split == "train" and "{a" not in task.command:
            return OPEN + command + CLOSE, command, task.command  # who types the command gets the command
        return place_first(ctx, text), command, task.command
    if r < 0.62:
        text, command, lines, name, noun = find_request(ctx)
        if lines and rng.random() < 0.25:
            text, command = modified(ctx, text, command, name, noun)
            return text, command, name + "+pipe"
        return place_first(ctx, text), command, name
    if r < 0.72:
        if rng.random() < 0.45:
            task = NOUN_POOL.draw(rng)
            i, nodes = rng.choice(task.nouns)
            noun = ctx.say(nodes, task.command, i, task.count)
            text = ctx.say(SHOW) + " " + ctx.say(DETERMINER) + " " + noun
        else:
            task = LINE_POOL.draw(rng)
            noun = None
            text = verb_phrase(ctx, task)
        text, command = modified(ctx, text, fill(task.command, ctx.values), task.command, noun)
        return text, command, "pipe"
    return chain(ctx)


def place_first(ctx, text):
    """At times the place comes first: "in src, how many files are there"."""
    if ctx.place and ctx.rng.random() < 0.10 and text.count(ctx.place) == 1 and not ctx.place.startswith("there"):
        rest = tidy(text.replace(ctx.place, ""))
        if rest and "," not in rest:
            return ctx.place + ctx.rng.choice([", ", ", ", " ", ": "]) + rest
    return text


def step(ctx, task):
    """The next step as (text, command): its own slots, apart from what is bound."""
    ctx.values = {}
    return verb_phrase(ctx, task), fill(task.command, ctx.values)


def chain(ctx):
    """Two or three tasks one after the other."""
    rng = ctx.rng
    r = rng.random()
    if r < 0.45:  # the second does something with what the first made or used
        first = FIRST.draw(rng)
        text, command = step(ctx, first)
        if is_question(text):
            raise Retry
        group, value, names = first.thing or first.original + (["the original"],)
        if first.original and rng.random() < 0.3:
            (group, value), names = first.original, ["the original", "the original", "the old one", "the source"]
        ctx.bound = Bound(group, fill(value, ctx.values), names, rng)
        second = FOLLOW[group].draw(rng)
        then, more = step(ctx, second)
        then = ctx.bound.finish(tidy(then)) if ctx.bound.used else None
        ctx.bound = None
        if then is None or then.count(",") > 1:
            raise Retry
        steps = [(first, text, command), (second, then, more)]
    elif r < 0.55:  # first go somewhere
        text, command = step(ctx, ENTER)
        second = OUTPUTS.draw(rng)
        steps = [(ENTER, text, command), (second, *step(ctx, second))]
    elif r < 0.62:  # "show the a and the b"
        one, two = NOUN_POOL.draw(rng), NOUN_POOL.draw(rng)
        parts = []
        for task in (one, two):
            ctx.values = {}
            i, nodes = rng.choice(task.nouns)
            parts.append((ctx.say(nodes, task.command, i, task.count), fill(task.command, ctx.values)))
        ctx.keys.append(f"{one.command}*{two.command}")
        the = rng.choice(["the ", "", "the ", "my "])
        if one is two or ("- " in one.kind):
            raise Retry
        return ctx.say(SHOW) + " " + the + parts[0][0] + rng.choice([" and ", " and also ", " and then ", " as well as "]) + the + parts[1][0], " && ".join(c for _, c in parts), "chain"
    else:
        steps = []
        for n in range(2 if rng.random() < 0.88 else 3):
            task = (ACTIONS if rng.random() < (0.75 if n == 0 else 0.6) else OUTPUTS).draw(rng)
            steps.append((task, *step(ctx, task)))
    ctx.keys += [f"{a[0].command}*{b[0].command}" for a, b in zip(steps, steps[1:])]
    texts, command = [t for _, t, _ in steps], " && ".join(c for _, _, c in steps)
    asks = [is_question(t) for t in texts]
    if asks[0] or any(asks[1:-1]):
        raise Retry
    if asks[-1]:
        return " and then ".join(texts[:-1]) + rng.choice([" and tell me ", ", then tell me ", ". ", " and check ", " and then find out ", " and see "]) + texts[-1], command, "chain"
    r = rng.random()
    if len(texts) == 2 and r < 0.12:
        if MARKED.search(texts[1]):
            r = 0.05
        which = gerund(tidy(texts[0] if r < 0.08 else texts[1]))
        if which is not None and r < 0.05:
            return rng.choice(["after ", "once done with "]) + which + rng.choice([", ", " "]) + texts[1], command, "chain"
        if which is not None and r < 0.08:
            return texts[1] + rng.choice([" after ", ", after "]) + which, command, "chain"
        if which is not None:
            return rng.choice([f"before {which}, {texts[0]}", f"{texts[0]} before {which}", f"{texts[0]} before {which}"]), command, "chain"
    text = texts[0]
    for t in texts[1:]:
        text += rng.choice(CONNECTORS) + t
    if rng.random() < 0.06:
        text = "first " + text
    return text, command, "chain"


WRAPPERS = ["please {}", "{} please", "{}, please", "can you {}", "could you {}", "how do I {}", "how to {}", "how can I {}", "I want to {}", "I need to {}",
            "i'd like to {}", "help me {}", "a command to {}", "command to {}", "give me a command to {}", "what's the command to {}", "show me how to {}", "is there a way to {}",
            "{} for me", "I would like to {}", "how would I {}", "what is the command to {}", "let's {}", "we need to {}", "now {}", "quickly {}", "just {}", "would you {}", "tell me how to {}",
            "hey, {}", "ok, {}", "ok {}", "now {}", "then {}", "so {}", "hi, {}", "{} now", "{} if you can", "{}, thanks", "{} thanks", "{} thank you", "I'd like you to {}", "I have to {}", "we want to {}", "I must {}",
            "try to {}", "go ahead and {}", "can we {}", "can I {}", "will you {}", "could you please {}", "can you please {}", "please can you {}", "how does one {}", "how do you {}", "how do we {}", "what do I type to {}",
            "which command will {}", "shell command to {}", "bash: {}", "linux: {}", "one-liner to {}", "i need a command to {}", "my task is to {}", "help: {}", "simply {}", "I want you to {}", "it would be nice to {}",
            "i wanna {}", "gotta {}", "need to {}", "want to {}", "how to quickly {}", "is it possible to {}", "{} asap", "{} real quick", "{} for me please", "I was asked to {}", "what would {}", "all I want is to {}"]
QUESTION_WRAPPERS = ["tell me {}", "can you tell me {}", "I want to know {}", "do you know {}", "I wonder {}", "please tell me {}", "{} please", "ok, {}", "hey, {}", "find out {}", "show me {}", "check {}", "I'd like to know {}", "so {}", "let me know {}"]
ASKING = ("can you", "could you", "how", "what", "is there", "would you", "will you", "can we", "can I", "please can", "is it", "which", "do you")
PROTECTED = set(NUMBERS) | set(ORDINALS) | {"thirty", "forty", "fifty", "hundred"}


def typo(word, rng):
    """One slip of the finger in a word of four letters or more."""
    i = rng.randrange(1, len(word) - 1)
    r = rng.random()
    if r < 0.35:
        return word[:i] + word[i + 1:]
    if r < 0.62:
        return word[:i] + word[i + 1] + word[i] + word[i + 2:]
    if r < 0.85:
        return word[:i] + word[i] + word[i:]
    return word[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz") + word[i + 1:]


SYNONYMS = {
    "show": ["display", "print", "list", "output", "see", "get", "give me"], "list": ["show", "display", "print", "enumerate", "give me"],
    "print": ["show", "display", "output"], "display": ["show", "print", "output"],
    "delete": ["remove", "erase", "drop", "get rid of", "wipe", "discard"], "remove": ["delete", "erase", "get rid of", "take out", "eliminate"],
    "create": ["make", "generate", "add"], "find": ["locate", "search for", "look up", "get", "look for"],
    "folder": ["directory", "dir"], "directory": ["folder", "dir"], "folders": ["directories", "dirs"], "directories": ["folders", "dirs"],
    "modified": ["changed", "edited", "altered", "touched", "updated"], "changed": ["modified", "edited", "altered", "updated"],
    "largest": ["biggest"], "biggest": ["largest"], "newest": ["latest", "most recent"], "copy": ["duplicate", "cp"], "move": ["transfer", "relocate", "shift", "mv"],
    "count": ["tally", "count up", "get the number of"], "replace": ["substitute", "swap", "exchange"], "repository": ["repo"],
    "containing": ["that contain", "with", "which contain", "having"], "lines": ["rows"], "line": ["row"], "sorted": ["ordered"], "unique": ["distinct"],
    "convert": ["turn", "change", "transform", "translate"], "permissions": ["perms", "access rights"], "processes": ["procs"],
    "each": ["every"], "every": ["each"], "larger": ["bigger", "greater"], "bigger": ["larger", "greater"], "using": ["with", "by means of"],
    "named": ["called"], "called": ["named"], "compress": ["shrink"], "start": ["launch", "fire up", "start up"], "computer": ["machine", "system", "box"],
    "machine": ["computer", "system", "box"], "contents": ["content"], "beginning": ["start"], "starting": ["beginning"], "duplicates": ["repeats", "dupes", "duplicated lines"],
    "extension": ["suffix", "file extension", "ext"], "only": ["just"], "last": ["final"], "characters": ["chars", "letters"], "column": ["col"], "memory": ["RAM"],
    "download": ["fetch", "get", "grab"], "switch": ["change", "go", "move"], "changes": ["modifications", "edits"], "want": ["would like", "wish", "need"],
    "please": ["pls", "plz", "kindly"], "without": ["excluding", "minus"], "save": ["write", "store", "put"], "programs": ["applications", "apps"],
}
SYNONYMS.update({
    "get": ["fetch", "show", "give me", "obtain", "retrieve"], "give": ["hand", "show"], "see": ["view", "look at", "check", "show"], "check": ["see", "look", "verify", "test", "find out", "inspect"],
    "make": ["create", "build", "produce", "set up"], "add": ["put", "insert", "attach", "append", "include"], "put": ["place", "store", "add", "drop"], "erase": ["delete", "remove", "wipe"],
    "search": ["look", "hunt", "grep", "scan", "seek"], "look": ["search", "check"], "locate": ["find", "search for", "where is"], "open": ["view", "launch", "bring up"], "run": ["execute", "start", "launch", "call", "do"],
    "execute": ["run", "start", "launch"], "stop": ["end", "halt", "shut down", "terminate", "kill", "quit"], "kill": ["stop", "end", "terminate", "quit", "shut down"], "restart": ["reboot", "bounce", "start again", "relaunch", "re-start"],
    "rename": ["call", "change the name of", "retitle", "rename"], "install": ["get", "add", "set up", "put on"], "uninstall": ["remove", "delete", "take off"], "update": ["refresh", "renew"],
    "build": ["compile", "make", "construct"], "compile": ["build", "make"], "unpack": ["extract", "unzip", "open", "decompress", "uncompress"], "extract": ["unpack", "get", "pull out", "take"], "pack": ["bundle", "compress", "archive", "wrap up"],
    "archive": ["tarball", "package", "bundle"], "tarball": ["archive", "tar file", "tar"], "send": ["transfer", "copy", "push", "upload"], "upload": ["send", "transfer", "push", "copy"], "fetch": ["get", "download"],
    "log": ["logs", "logfile", "log output"], "logs": ["log", "log output", "log messages"], "watch": ["follow", "monitor", "observe", "keep an eye on"], "follow": ["watch", "tail", "monitor"], "monitor": ["watch", "observe"],
    "running": ["active", "live", "up"], "process": ["program", "task", "job"], "program": ["application", "app", "process"], "service": ["daemon", "server"], "server": ["machine", "host", "box"], "host": ["server", "machine"],
    "file": ["document"], "files": ["documents", "items"], "text": ["string", "words"], "string": ["text"], "word": ["term", "string"], "words": ["terms"], "empty": ["blank"], "blank": ["empty"], "hidden": ["dot", "invisible"],
    "big": ["large", "huge"], "large": ["big", "huge"], "small": ["little", "tiny"], "old": ["outdated", "stale", "ancient"], "new": ["fresh", "brand new"], "current": ["present", "this"], "recent": ["latest", "newest", "last"], "latest": ["newest", "most recent", "last"],
    "total": ["overall", "complete", "whole"], "whole": ["entire", "complete", "full"], "entire": ["whole", "complete"], "size": ["sizes", "space"], "sort": ["order", "arrange", "rank"], "order": ["sort", "arrange"], "number": ["amount"],
    "many": ["much"], "user": ["account", "login"], "users": ["accounts", "people"], "group": ["team"], "password": ["passwd", "pw"], "port": ["tcp port"], "address": ["addr"], "image": ["picture", "img"], "picture": ["image", "photo", "pic"],
    "video": ["movie", "clip", "film"], "audio": ["sound"], "commit": ["check in", "record"], "commits": ["changesets", "revisions"], "changes": ["edits", "modifications", "work"], "undo": ["revert", "take back", "roll back", "cancel"], "discard": ["throw away", "drop", "undo", "forget"],
    "merge": ["join", "combine", "bring in"], "join": ["merge", "combine", "concatenate", "glue"], "combine": ["merge", "join"], "split": ["cut", "divide", "break"], "compare": ["diff", "contrast"], "difference": ["differences", "diff"], "differences": ["difference", "diff", "changes"],
    "write": ["save", "put", "store"], "store": ["save", "keep", "put"], "append": ["add", "attach", "tack"], "insert": ["add", "put"], "swap": ["exchange", "switch"], "change": ["alter", "modify", "set", "edit", "switch"], "set": ["change", "make", "put"],
    "edit": ["change", "modify", "open"], "enable": ["turn on", "activate", "switch on"], "disable": ["turn off", "deactivate", "switch off"], "allow": ["let", "permit", "enable"], "block": ["deny", "forbid", "close"], "clean": ["clear", "tidy"], "clear": ["empty", "clean", "wipe"],
    "test": ["check", "try"], "tests": ["test suite", "unit tests", "specs"], "project": ["code", "repo", "app"], "dependencies": ["deps", "packages", "libs"], "packages": ["programs", "software"], "package": ["program", "lib", "tool"], "version": ["release", "ver"],
    "container": ["docker container", "ctr"], "containers": ["docker containers"], "pods": ["kubernetes pods", "k8s pods"], "directory": ["folder", "dir"], "home": ["home folder", "home directory"], "owner": ["possessor", "user"], "contain": ["have", "include", "mention", "hold"],
    "contains": ["has", "includes", "mentions"], "occurrences": ["instances", "appearances", "matches", "mentions"], "occurrence": ["instance", "appearance", "match", "mention"], "matching": ["containing", "with", "that match"], "starting": ["beginning"], "ending": ["finishing"], "first": ["top", "leading"],
    "under": ["in", "below", "inside", "beneath"], "inside": ["in", "within", "under"], "within": ["inside", "in"], "into": ["to", "in"], "recursively": ["with all subfolders", "including subfolders", "and subfolders"], "permanently": ["for good", "forever"], "including": ["with", "plus"],
    "print": ["show", "output", "echo", "display", "list"], "tell": ["show", "let"], "need": ["want", "require"], "use": ["take", "consume", "need"], "using": ["with", "via", "through"], "all": ["every", "all of the", "all the", "each of the"],
    "average": ["mean"], "sum": ["total", "add up"], "row": ["line"], "rows": ["lines"], "columns": ["fields"], "field": ["column", "value"], "remote": ["server", "origin"], "tag": ["label", "mark"], "machine": ["computer", "system", "box", "pc", "server"], "disk": ["drive", "hard drive", "hdd"],
    "space": ["room", "storage"], "free": ["available", "unused"], "usage": ["use", "consumption"], "uses": ["takes", "consumes", "needs"], "quickly": ["fast"], "seconds": ["secs", "s"], "minutes": ["mins", "min"], "backup": ["back up", "safety copy", "copy"], "shrink": ["compress", "make smaller"],
})
DROPPED = {"the", "a", "an", "my", "me", "of", "please", "all", "is", "are", "to", "that", "for", "with", "file", "called", "named", "do", "I", "from", "there", "it"}
HARMLESS = {"the", "a", "an", "my", "me", "please", "of"}
FILLERS = ["just", "quickly", "please", "now", "actually", "somehow", "really", "also", "simply", "then", "again"]


def fenced_words(text):
    """Words of a request with the mark whether they belong to a slot."""
    pieces, fenced = [], False
    for token in text.split(" "):
        inside = fenced or OPEN in token
        if OPEN in token or CLOSE in token:
            fenced = token.rfind(OPEN) > token.rfind(CLOSE)
        pieces.append((token, inside))
    return pieces


def reword(text, rng, tiny=False):
    """Synonyms for a word or two or three, small words left out as in notes to oneself, a filler slipped in."""
    pieces = fenced_words(text)
    r = rng.random()
    if r < 0.3:
        chance, small = (0.3, HARMLESS) if tiny or rng.random() < 0.55 else (0.5, DROPPED)
        kept = [(t, inside) for t, inside in pieces if inside or t.lower() not in small or rng.random() < chance]
        return " ".join(t for t, _ in kept) or text
    spots = [i for i, (t, inside) in enumerate(pieces) if not inside and t in SYNONYMS]
    for i in rng.sample(spots, min(len(spots), rng.choice((1, 1, 1, 2, 2, 3)))):
        pieces[i] = (rng.choice(SYNONYMS[pieces[i][0]]), False)
    if r > 0.92 and not tiny:
        outer = [i for i, (t, inside) in enumerate(pieces) if not inside]
        if outer:
            pieces.insert(rng.choice(outer), (rng.choice(FILLERS), False))
    return " ".join(t for t, _ in pieces)


def misspell(text, rng):
    """Typos in one or two plain words; fenced slots, numbers and short words stay whole."""
    pieces = fenced_words(text)
    spots = [i for i, (t, inside) in enumerate(pieces) if not inside and t.isalpha() and len(t) >= 4 and t.lower() not in PROTECTED]
    for i in rng.sample(spots, min(len(spots), rng.choice((1, 1, 1, 1, 2, 2, 3)))):
        pieces[i] = (typo(pieces[i][0], rng), False)
    if rng.random() < 0.08:  # a space forgotten or slipped in
        outer = [i for i in range(len(pieces) - 1) if not pieces[i][1] and not pieces[i + 1][1] and pieces[i][0].isalpha()]
        if outer:
            i = rng.choice(outer)
            pieces[i:i + 2] = [(pieces[i][0] + pieces[i + 1][0], False)]
    return " ".join(t for t, _ in pieces)


def dress(text, rng):
    """Wrap, capitalise, punctuate and misspell a request, as people do."""
    text = tidy(text)
    if text[0] == OPEN and text[-1] == CLOSE and text.count(OPEN) == 1 and " " in text:
        return FENCE.sub("", text)
    if rng.random() < 0.45:
        text = reword(text, rng)
    asking = is_question(text)
    if rng.random() < (0.10 if asking else 0.40):
        wrapper = rng.choice(QUESTION_WRAPPERS if asking else WRAPPERS)
        text = wrapper.format(text) if "{" not in text else wrapper.replace("{}", text)
        asking = asking or wrapper.startswith(ASKING)
    if rng.random() < 0.13:
        text = misspell(text, rng)
    r = rng.random()
    if r < 0.25 and text[0] != OPEN:
        text = text[0].upper() + text[1:]
    elif r < 0.45 and OPEN not in text[:2]:  # all small letters
        text = " ".join(t if inside else t.lower() for t, inside in fenced_words(text))
    elif r < 0.46:
        text = " ".join(t if inside else t.upper() for t, inside in fenced_words(text))
    r = rng.random()
    if asking:
        text += "?" if r < 0.5 else ""
    elif r < 0.06:
        text += "."
    elif r < 0.075:
        text += "!"
    return FENCE.sub("", text)


def sample(rng, split="train", tiny=False):
    """One (request, command, task name) of a split; `tiny` draws open slots from a handful of values and leaves out the dressing."""
    while True:
        ctx = Context(rng, split, tiny)
        try:
            text, command, name = raw(ctx)
        except Retry:
            continue
        held_combination = any(bucket(k, 8) == 0 for k in ctx.keys)
        if held_combination != (split == "combinations"):
            continue
        if split == "slots" and not ctx.open_slots:
            continue
        if tiny:
            return FENCE.sub("", reword(tidy(text), rng, True) if rng.random() < 0.5 else tidy(text)), command, name
        request = dress(text, rng)
        if plain(request) not in CLOSED:
            return request, command, name


def out_of_domain():
    """Requests that no shell command answers, expanded from ood.txt, in a fixed order."""
    rng = random.Random(7)
    out = []
    with open(os.path.join(HERE, "ood.txt")) as f:
        for line in f:
            if line.strip() and not line.startswith("#"):
                out.append(dress(line.strip(), rng))
    return out


def check(count):
    """The same request must never have two commands; print what breaks that."""
    seen, clashes = {}, {}
    rng = random.Random(11)
    longest = 0
    for _ in range(count):
        split = rng.choice(("train", "train", "phrasings", "patterns", "combinations"))
        text, command, name = sample(rng, split, tiny=True)
        longest = max(longest, len(text) + len(command))
        key = text
        if seen.setdefault(key, (command, name))[0] != command:
            clashes[key] = (seen[key], (command, name))
    for key, (a, b) in sorted(clashes.items())[:400]:
        print(f"{key}\n    {a}\n    {b}")
    print(f"{count} samples, {len(seen)} different requests, {len(clashes)} requests with two commands, longest pair {longest} characters; "
          f"{len(TASKS)} tasks in files, {len(CONSUMERS)} actions on {len(ATTRIBUTES)} attributes of files, {len(MODIFIERS)} pipe stages")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--split", default="train", choices=("train", "outside", "ood") + SPLITS)
    p.add_argument("--count", type=int, default=20)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--check", type=int, metavar="N", help="draw N pairs and look for requests with two commands")
    args = p.parse_args()
    if args.check:
        return check(args.check)
    if args.split == "ood":
        print("\n".join(out_of_domain()))
        return
    rng = random.Random(f"{args.split}-{args.seed}")
    for _ in range(args.count):
        print("\t".join(sample(rng, args.split)))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
