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
    patterns      the task's sentence pattern, as written in the task file, was never used in training (harder):
                  one in ten of what fresh_*.tasks say; of the parts of composed requests and of scenes,
                  one in four gives up a pattern
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

from chains import ARCHIVED, ARCHIVES, GONE, SAME, TELLING, Bound, GROUP, MAKES, POINTERS, backwards, join, load_scenes, original, pointer, slots_of, thing
from compose import ATTRIBUTES, CONSUMERS, DIR_ATTRIBUTES, FOR_BARE, FOR_DIRS, FOR_LINKS, MODIFIERS, ONLY_DIRS, TYPES
from forms import recast
from grammar import BATCHES, CLOSE, FENCE, OPEN, TO_ME, bucket, expand, fill, is_verbal, parse, tidy
from slots import KINDS, NUMBERS, ORDINALS, PROCESSES, SERVICES, WEEKDAYS, user as person, word
from synonyms import NOT_AFTER, NOT_BEFORE, PHRASES, TOOLS, WORDS as SYNONYMS

HERE = os.path.dirname(os.path.abspath(__file__))
SPLITS = ("slots", "phrasings", "patterns", "combinations")
QUESTION = re.compile(r"(what|which|how|who|where)|(is|are|does|did|has|have we|on which|at which|in which|can anyone)\b|do (i|we|you|they|my|any|these|those|both)\b|when (is|was|were|did|does|do|has|will|are)\b", re.I)
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
        self.said = {}       # the words for values
        self.keys = []       # pairs of parts used together
        self.open_slots = 0
        self.bound = None    # what "it" is
        self.carried = None  # words for what a scene's step before had
        self.place = ""      # the words that say where, once drawn

    def draw(self, name, kind):
        if self.carried is not None and kind not in KINDS:  # a second step speaks of what the first had
            return self.carried(name)
        if name in self.said and self.values.get(name) == self.said[name][1]:
            return self.said[name][0]        # said a second time in the same request
        if self.bound is not None:
            text = self.bound.draw(kind, self.rng)
            if text is not None:
                self.values["dir" if kind == "in" else name] = self.bound.value
                return text
        for _ in range(20):
            text, value = KINDS[kind](self)
            if name == "in":
                name = "dir"
            if name == "b" and kind in ("line", "upto") and int(value) <= int(self.values.get("a", "0")):
                continue
            if value not in self.values.values() or kind in ("in", "col", "delim", "mode", "size", "age", "agea", "mins", "hrs", "hrsa", "days", "daysa", "anysize"):
                break
        else:
            raise Retry
        self.open_slots += kind not in ("in", "ext", "dotext", "delim", "mode", "col", "size", "age", "agea", "mins", "hrs", "hrsa", "days", "daysa", "anysize", "small", "secs") or (kind == "in" and value not in (".", "~", ".."))
        self.values[name] = value
        self.said[name] = (text, value)
        if kind == "in":
            self.place = text
        return text

    def say(self, nodes, task=None, index=0, count=1):
        """Expand a pattern; for a task's own wording, keep to the side of the split."""
        out, skeleton = [], []
        expand(nodes, self.rng, self.draw, out, skeleton)
        if task is not None:
            # One part of composed requests in four gives up a pattern (never its first, nor one that opens with the command's own name);
            # one wording in twelve is held out where a pattern has at least six.
            wording = tidy("".join(skeleton))
            own = wording.split(" ")[0] == task.split(" ")[0]
            pattern_held = (task, index) in HELD or (count >= 3 and bucket(task, 4) == 0 and task not in COMMANDS and index == 1 + bucket("pattern" + task, count - 1) and not own)
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
        HELD.update((self.command, i) for i, p in enumerate(self.nouns + self.verbs) if p in FRESH and self.count > 1 and bucket("told" + p, 10) == 0)
        self.nouns = [(i, parse(p)) for i, p in enumerate(self.nouns)]
        self.verbs = [(i + len(self.nouns), parse(p)) for i, p in enumerate(self.verbs)]
        self.noun_weights, self.verb_weights = ([0.5 + math.log2(1 + p.wordings) for _, p in ps] for ps in (self.nouns, self.verbs))
        self.noun_part = sum(self.noun_weights) / (sum(self.noun_weights) + sum(self.verb_weights))
        # What people ask for every day is asked for in more ways, and drawn more often.
        self.weight = min(9.0, 1.2 + 0.36 * self.count) * (2.0 if self.command in EVERYDAY else 1.0)
        self.thing, self.original = thing(self.command), original(self.command)
        words = self.command.split()
        self.pipeable = self.kind == "|" and words[0] in PIPEABLE and not any(
            w in self.command for w in ("head -n", "tail -n", "END", "wc -", "--count", "-sd,", "-q ", "rev-parse", "--show-current", "http_code", "ppid", " -h", "shortlog"))


def load_tasks():
    tasks, known = [], {}
    for path in sorted(glob.glob(os.path.join(HERE, "tasks", "*.tasks"))):
        new, fresh = (os.path.basename(path).startswith(start) for start in (("new_", "wide_", "deep_", "fresh_", "next_"), "fresh_"))
        with open(path) as f:
            for number, line in enumerate(f, 1):
                line = line.rstrip("\n")
                if not line.strip() or line.startswith("#"):
                    continue
                if fresh and line[:2] not in ("= ", "| ", "- "):
                    FRESH.add(line.removeprefix("! "))
                if line[:2] in ("= ", "| ", "- "):
                    task = known.get(line[2:])
                    if new or os.path.basename(path) in COMMON:
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
    """The requests of the closed test sets, as `plain` writes them."""
    closed = set()
    for path in glob.glob(os.path.join(HERE, "requests", "**", "*.requests"), recursive=True):
        with open(path) as f:
            lines = f.read().splitlines()
        closed.update(plain(b) for a, b in zip(lines, lines[1:]) if re.match(r"\[[a-z]+-\d+\] ", a))
    return closed


def plain(text):
    """A request in small letters, without marks at its end."""
    return " ".join(text.lower().split()).strip(" .?!")


COMMON = ("everyday.tasks", "wordings.tasks", "everywhere.tasks", "lines.tasks", "plain_files.tasks", "plain_text.tasks", "plain_steps.tasks", "said_steps.tasks",
          "more_text.tasks", "more_files.tasks", "asked_text.tasks", "asked_files.tasks", "told_text.tasks", "told_files.tasks", "told_work.tasks", "told_steps.tasks")
REMARK = 0.05        # the part of the requests with a remark behind them
RECAST = 0.20        # the part of the verb phrases that becomes another sentence (forms.py)
SCENE_PART = 0.55    # the part of the requests with several steps that comes from scenes.txt
EVERYDAY = set()     # commands that are drawn more often
FRESH = set()        # the patterns of the newest files, fresh_*.tasks: older ones are all trained by now
HELD = set()         # (command, number of the pattern) of those held out of them
TASKS = load_tasks()
COMMANDS = {t.command for t in TASKS}
NOT_COMMANDS = [pattern for batch in BATCHES for pattern in load_patterns(f"{batch}outside.txt")]
CLOSED = load_closed()
LINES = [t for t in TASKS if t.pipeable]
NOUNS = [t for t in LINES if t.nouns]


class Pool:
    """Tasks drawn by weight; with `usual`, those of every day four times as often again."""

    def __init__(self, tasks, usual=False):
        self.tasks, self.sums = tasks, list(accumulate(t.weight * (4 if usual and t.command in EVERYDAY else 1) for t in tasks))

    def draw(self, rng):
        return rng.choices(self.tasks, cum_weights=self.sums)[0]


EVERY, NOUN_POOL, LINE_POOL = Pool(TASKS), Pool(NOUNS), Pool(LINES)
SIMPLE = [t for t in TASKS if t.kind in "=|" and not t.command.endswith("&") and " && " not in t.command]   # one step each
ACTIONS = Pool([t for t in SIMPLE if t.kind == "="], True)
OUTPUTS = Pool(SIMPLE, True)
FIRST = Pool([t for t in SIMPLE if t.kind == "=" and (t.thing or t.original) and not GONE.match(t.command)], True)
FOLLOW = {group: Pool([t for t in TASKS if not MAKES.match(t.command) and not t.command.endswith("&") and " && " not in t.command and [GROUP.get(k) for k in slots_of(t.command).values()].count(group) == 1
                       and not t.command.startswith(("cp -r {a", "rsync"))], True)
          for group in sorted(set(GROUP.values()))}
ENTER = next(t for t in TASKS if t.command == "cd {path}")
ALIKE = Pool([t for t in SIMPLE if t.kind == "=" and list(slots_of(t.command).values()) in (["file"], ["leaf"], ["svc"], ["ctr"], ["pkg"], ["path"]) and t.command.count("{") == 1], True)
SCENES = Pool(load_scenes(KINDS))
SHOW = parse("<show>")
DETERMINER = parse("(all|all the|the||the|all of the|)")


def is_question(text):
    return QUESTION.match(text) is not None


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
        r = 0.53 + 0.47 * r
    if r < 0.015:
        return mention(ctx)
    if r < 0.53:
        task = EVERY.draw(rng)
        text = verb_phrase(ctx, task)
        if not one_kind(task, ctx, text):
            raise Retry
        command = right_here(text, fill(task.command, ctx.values))
        if rng.random() < 0.02 and ctx.split == "train" and "{a" not in task.command:
            return OPEN + command + CLOSE, command, task.command  # who types the command gets the command
        return place_first(ctx, text), command, task.command
    if r < 0.67:
        text, command, lines, name, noun = find_request(ctx)
        if lines and rng.random() < 0.25:
            text, command = modified(ctx, text, command, name, noun)
            return text, command, name + "+pipe"
        return place_first(ctx, text), right_here(text, command), name
    if r < 0.75:
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
    text = verb_phrase(ctx, task)
    return text, right_here(text, fill(task.command, ctx.values))


def scene(ctx):
    """Two or three steps of scenes.txt with the same thing."""
    rng = ctx.rng
    block = SCENES.draw(rng)
    first, last = rng.choice(block.firsts), None
    steps = [first, rng.choice(block.thens)]
    if rng.random() < 0.15 and not steps[1].ends:
        steps.append(rng.choice(block.thens))
    if len({s.command for s in steps}) < len(steps) or (GONE.match(first.command) and any("{x}" in s.command for s in steps[1:])):
        raise Retry
    texts, commands, known = [], [], {}
    for n, step in enumerate(steps):
        ctx.values = dict(known)
        if n:
            if any(c not in known for c in step.carries):
                raise Retry
            ctx.carried = lambda name: pointer(name, block, first, known, rng) if name in POINTERS else OPEN + known[name].strip("\"'") + CLOSE
        i = rng.choices(range(len(step.patterns)), step.weights)[0]
        try:
            text = ctx.say(step.patterns[i], "scene " + step.command, i, len(step.patterns))
        except KeyError:
            raise Retry from None
        finally:
            ctx.carried = None
        texts.append(tidy(text))
        try:
            commands.append(fill(step.command, ctx.values))
        except KeyError:
            raise Retry from None   # a second step that speaks of what this first step does not have
        if n == 0:
            known = dict(ctx.values)
            if first.thing:
                known["x"] = fill(first.thing, known)
            if first.original:
                known["o"] = fill(first.original, known)
    if any(map(is_question, texts[:-1])):
        raise Retry
    command = " && ".join(commands)
    if len(texts) == 2 and first.thing == "{x}" and rng.random() < 0.05:
        text = backwards(texts, steps, known["x"], rng)
        if text is not None:
            return text, command, "scene"
    return together(texts, rng), command, "scene"


def together(texts, rng):
    """Steps as one request; the last may be a question."""
    if is_question(texts[-1]):
        return " and then ".join(texts[:-1]) + rng.choice(TELLING) + texts[-1]
    return join(texts, rng)


MENTIONS = {
    "file": ["there is a file called {}", "I have a file {}", "I have this file {}", "there's {} in this folder", "you know the file {}", "look at {}", "take the file {}", "take {}", "in this folder is a file {}", "we have a file named {}", "about {}", "I just made {}", "someone sent me {}", "I got the file {}"],
    "folder": ["there is a folder called {}", "I have a folder {}", "we have a directory {}", "take the folder {}", "you know the folder {}", "about the folder {}", "there's a folder named {} here", "look at the folder {}"],
    "service": ["the service {} makes trouble", "we run the service {}", "about the service {}", "{} is a service here", "the {} service is acting up"],
    "container": ["there is a container called {}", "the container {} makes trouble", "about the container {}", "I have a container {}"],
    "branch": ["there is a branch {}", "I have a branch called {}", "about the branch {}"],
    "package": ["there is a package {}", "about the package {}"],
    "user": ["there is a user {}", "we have a user called {}", "about the user {}"],
}


def mention(ctx):
    """One step with its thing named before: "there is a file called x. make it executable"."""
    rng = ctx.rng
    group = rng.choice(("file", "file", "file", "folder", "folder", *MENTIONS))
    draw = {"file": "leaf", "folder": "name", "service": "svc", "container": "ctr", "branch": "branch", "package": "pkg", "user": "user"}[group]
    named = ctx.draw("x", draw)
    ctx.bound = Bound(group, ctx.values["x"], ["it", "it", "it", "that", "them" if group == "user" else "it"], rng)
    task = FOLLOW[group].draw(rng)
    text, command = step(ctx, task)
    text = ctx.bound.finish(tidy(text)) if ctx.bound.used else None
    ctx.bound = None
    if text is None or task.command.startswith("cd "):
        raise Retry
    said = rng.choice(MENTIONS[group])
    joints = [". ", ", ", ", ", "; "] + ([", please ", ". please ", ". now "] if is_verbal(text) else []) + ([" and "] if said.startswith(("take", "look at")) and is_verbal(text) else [])
    return said.format(named) + rng.choice(joints) + text, command, "mention"


def chain(ctx):
    """Two or three tasks one after the other."""
    rng = ctx.rng
    r = rng.random()
    if r < SCENE_PART:
        return scene(ctx)
    r = (r - SCENE_PART) / (1 - SCENE_PART)
    if r < 0.42:  # the second does something with what the first made or used
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
        if then is None or then.count(",") > 1 or (ARCHIVES.match(first.command) and not ARCHIVED.match(second.command)):
            raise Retry
        steps = [(first, text, command), (second, then, more)]
    elif r < 0.50:  # first go somewhere
        text, command = step(ctx, ENTER)
        second = OUTPUTS.draw(rng)
        steps = [(ENTER, text, command), (second, *step(ctx, second))]
    elif r < 0.57:  # "show the a and the b"
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
    elif r < 0.62:  # "and the same for b"
        task = ALIKE.draw(rng)
        text, command = step(ctx, task)
        (name, kind), = slots_of(task.command).items()
        if is_question(text):
            raise Retry
        other = ctx.draw("other", kind)
        return text + rng.choice(SAME).format(other), command + " && " + fill(task.command, {name: ctx.values["other"]}), "same"
    else:
        steps = []
        for n in range(2 if rng.random() < 0.88 else 3):
            task = (ACTIONS if rng.random() < (0.75 if n == 0 else 0.6) else OUTPUTS).draw(rng)
            steps.append((task, *step(ctx, task)))
    ctx.keys += [f"{a[0].command}*{b[0].command}" for a, b in zip(steps, steps[1:])]
    texts, command = [tidy(t) for _, t, _ in steps], " && ".join(c for _, _, c in steps)
    if any(is_question(t) for t in texts[:-1]) or len({c for _, _, c in steps}) < len(steps):
        raise Retry
    return together(texts, rng), command, "chain"


WRAPPERS = ["please {}", "{} please", "{}, please", "can you {}", "could you {}", "how do I {}", "how to {}", "how can I {}", "I want to {}", "I need to {}",
            "i'd like to {}", "help me {}", "a command to {}", "command to {}", "give me a command to {}", "what's the command to {}", "show me how to {}", "is there a way to {}",
            "{} for me", "I would like to {}", "how would I {}", "what is the command to {}", "let's {}", "we need to {}", "now {}", "quickly {}", "just {}", "would you {}", "tell me how to {}",
            "hey, {}", "ok, {}", "ok {}", "now {}", "then {}", "so {}", "hi, {}", "{} now", "{} if you can", "{}, thanks", "{} thanks", "{} thank you", "I'd like you to {}", "I have to {}", "we want to {}", "I must {}",
            "try to {}", "go ahead and {}", "can we {}", "can I {}", "will you {}", "could you please {}", "can you please {}", "please can you {}", "how does one {}", "how do you {}", "how do we {}", "what do I type to {}",
            "which command will {}", "shell command to {}", "bash: {}", "linux: {}", "one-liner to {}", "i need a command to {}", "my task is to {}", "help: {}", "simply {}", "I want you to {}", "it would be nice to {}",
            "i wanna {}", "gotta {}", "need to {}", "want to {}", "how to quickly {}", "is it possible to {}", "{} asap", "{} real quick", "{} for me please", "I was asked to {}", "what would {}", "all I want is to {}",
            "I'm trying to {}", "trying to {}", "I've been asked to {}", "my boss wants me to {}", "I was wondering if you could {}", "any chance you could {}", "would it be possible to {}", "is there some way to {}", "is there a command to {}",
            "what's the easiest way to {}", "what's the fastest way to {}", "what's the best way to {}", "what is the quickest way to {}", "I forgot how to {}", "I don't remember how to {}", "remind me how to {}", "not sure how to {}", "I don't know how to {}",
            "no idea how to {}", "I'm supposed to {}", "I should {}", "I need help to {}", "I need a way to {}", "I need a one-liner to {}", "looking for a way to {}", "looking for a command to {}", "your job is to {}", "time to {}", "it's time to {}",
            "be so kind and {}", "kindly {}", "could you kindly {}", "do me a favor and {}", "do me a favour and {}", "you should {}", "you need to {}", "I need you to {}", "I'd love to {}", "I would like you to {}", "next, {}", "one more: {}", "task: {}", "todo: {}",
            "is there any way to {}", "what command do I use to {}", "which command can {}", "what should I type to {}", "what would be the command to {}", "how am I supposed to {}", "teach me how to {}", "explain how to {}", "give me the command to {}",
            "give me a one-liner to {}", "write a command to {}", "write me a command to {}", "please show me how to {}", "the goal is to {}", "i have to {}", "let me {}", "let us {}", "please help me {}", "im trying to {}", "can u {}", "could u {}", "pls {}", "plz {}", "i need u to {}"]
POLITE_WRAPPERS = [w for w in WRAPPERS if w.startswith(("please {", "{}", "can you", "could you", "would you {", "will you", "can u", "could u", "pls", "plz", "ok", "hey", "hi,", "kindly", "I want you", "I need you", "i need u", "go ahead", "just {", "now {", "so {", "next", "quickly"))]
# Those for what is no verb phrase: "the ten largest files", "I can't open x, make it readable".
NEUTRAL_WRAPPERS = ["{} please", "{}, please", "{}, thanks", "{} thanks", "{} thank you", "ok, {}", "ok {}", "hey, {}", "hi, {}", "hello, {}", "so {}", "so, {}", "now {}", "bash: {}", "linux: {}", "help: {}", "task: {}", "todo: {}", "next: {}",
                    "one more: {}", "next, {}", "please: {}", "well, {}", "{} asap", "{} if you can", "{}, if you can", "question: {}", "listen, {}", "terminal: {}", "command: {}", "command wanted: {}", "shell: {}"]
QUESTION_WRAPPERS = ["tell me {}", "can you tell me {}", "I want to know {}", "do you know {}", "I wonder {}", "please tell me {}", "{} please", "ok, {}", "hey, {}", "find out {}", "show me {}", "check {}", "I'd like to know {}", "so {}", "let me know {}"]
ASKING = ("can you", "could you", "how", "what", "is there", "would you", "will you", "can we", "can I", "please can", "is it", "which", "do you")
# What stands before a request without changing it, and what stands behind it.
OPENINGS = """hey|hi|hello|hi there|hey there|good morning|ok|okay|right|alright|so|well|um|hmm|yo|listen|sorry|sorry to bother you|excuse me|quick question|quick one|one more thing|next|and now|actually|dear computer|dude|mate|friend|
as always|if you don't mind|if it's not too much trouble|if possible|if you can|when you have a second|when you get a chance|to be safe|just to be sure|to save space|to save some space|to free up space|to make room|for debugging|for my backup|for a backup|for the backup|
for a report|for the report|for my homework|for the meeting|for a colleague|for the team|for the docs|before I forget|before I go home|before the weekend|before lunch|as part of the cleanup|on this machine|on this computer|on my laptop|on this box|in my terminal|in the terminal|
from the command line|in bash|on linux|with one command|in one go|my disk is nearly full|my disk is full|I'm running out of space|I am running out of disk space|I'm cleaning up|I am tidying up this machine|I'm new to linux|I am new here|it's late and I'm tired|we have a release tomorrow|
I'm preparing a backup|the server is slow|the server acts up|something is wrong here|something went wrong yesterday|I broke something|I'm writing a report|my laptop is slow|I forgot the syntax|I can never remember this|I always forget this|I'm on a new machine|my boss is waiting|
my colleague needs this|I'm in a hurry|I have no time|this is a mess|it is a bit messy here|I need some order here|I'm working on a project|I have a demo in an hour|I want to check something|I have to check something|I'm debugging|I'm debugging a problem|we are moving to a new server|
the build is broken|the deadline is today|I'm learning the shell|it's for a script|for a script|for later|this is urgent|urgent|I'm setting up a new project|I have too many files|there are too many files here|I don't need the old stuff any more|my teacher wants this|I have no idea how this works, I just got access and need to do one thing|a customer is on the phone and waits|I am helping my father with his computer|we had a power cut last night|somebody messed with this box while I was away|I inherited this machine from a colleague who left|
the last guy left no notes|I'm on call tonight and just got woken up|nobody here knows unix|I usually do this with the mouse|on windows I'd know how to do this|coming from windows here|I did this once years ago|this worked last week|google was no help|the manual is too long|
I've tried a few things and none of them worked|my script depends on this|the auditors want proof|the docs say nothing about it|we are about to run out of quota|before I send this off|before I touch anything|before I break something|before I hand in my thesis|
it's the first time I do this|this may be a silly question|silly question|stupid question maybe|not sure if that's possible|if that is at all possible|I know this is basic|I know there's a trick for this|there must be an easier way than doing it by hand|
I don't want to do this by hand|doing it by hand takes forever|there are hundreds of them and I won't click through all|as part of the migration|for the release notes|for the invoice|for the newsletter|for the audit|for accounting|for the presentation tomorrow|for my own notes|
so that I can send it to a friend|so I can compare later|my editor keeps crashing|I only have a terminal here|there is no desktop on this box|over a slow connection right now|I'm connected over ssh|I'm on the train with bad internet|typing on my phone, sorry for typos|
in case that matters, I use bash|nothing fancy|as simple as possible|keep it short|no explanations please|just the command please|the short way please|don't explain, just do it|real quick|one small thing|small favour|could use a hand here|help|stuck here|I'm stuck|
long story short|to make a long story short|anyway|by the way|oh and|oh|hm|hmm ok|well|you know what|here's the thing|the thing is this|same as every monday|like every morning|as I do every month|it's that time of the year again|I'm cleaning up after a workshop|
I exported this from some tool|I got this from a customer|someone sent me this|I copied it from my camera|I downloaded it yesterday|it came by mail|I'm preparing a talk|I'm teaching a class|I'm grading homework|I'm sorting my stuff|I'm moving to a new laptop|I'm packing up a project|
a test fails and I want to know why|it has been acting weird since this morning|users complain|the site feels slow today|it worked on my machine|prod is on fire|we are short on space again|my colleague swears it's there|I lost track of things here|I can't remember where I was""".replace("\n", "").split("|")
OPENING_JOINTS = [", ", ", ", ", ", ". ", ". ", ": ", " - ", " so ", ", so ", ", please ", ". please ", ", can you ", ". can you ", ". could you ", ", I need to ", ". I need to ", ", I want to ", ", so please ", "; "]
CLOSINGS = """, thanks|, thanks a lot|, thx| thx| ty| pls| plz| please|, please| please!|, it's urgent| asap| asap please|, cheers|, much appreciated| thanks in advance|, thank you|, thank you so much| if possible|, if that's possible| when you can|, I'm in a hurry|, no rush|
 for my backup| for a report| for the report| to save space| to free up some space| to save some disk space| on this machine| on this computer| on my laptop| here on my machine| from the terminal| in the terminal| in bash| on linux| on the command line| with one command| in one go|
 because I need it| before I forget| for me| for the team| for my colleague| right now| now please| once and for all| ok?|, ok?|, can you?|, how?| how do i do that|, how do I do that?|, what's the command?|, what is the command for that| - what's the command|, what do I type?|
, which command is that?|, any idea?|, is that possible?|, you know what I mean|, that's all|, nothing else|, that would be great|, would be nice|, my boss is waiting|, I have to check something|, I keep forgetting how| again| real quick| quickly| for once| today| at last|, finally|, if you'd be so kind|, whenever you're ready|, that's what I'm after|, that's all I need|, that is all I want to know|, I forgot the command|, I can't remember the flag| without much fuss|, no explanations please|, just the command| for the audit| for the release| for my notes| before the meeting|
 so I can send it to someone| so I can have a look| so that I can go home| because my boss asked|, as always|, as usual|, like last time|, it's for a script|, I'm stuck|, help| would ya|, would you?|, could you?|, will you?|, possible?| (bash)| in linux| using the shell| - thanks!| :)|, cheers mate|, dear| my friend|, if it's not too much to ask""".replace("\n", "").split("|")
# Remarks that change nothing: who, when, what for. What stands in brackets may matter ("(column 3)") or not, and the model is to tell.
REMARKS = """it is from {p}|the one {p} sent me|the one {p} made|we made it last {d}|I made it on {d}|it belongs to the {w} project|it's about the {w} thing|I think {p} wrote it|it's for the {w} team|{p} needs it on {d}|{p} asked for it|
as {p} does it|I did that on {d} too|it came with the {w}|we have {n} of those|there are about {n} of them|{p} and {p} wait for it|the {w} meeting is on {d}|that was the idea of {p}|{p} says so|since {p} left nobody cares for it|it is part of {w}|
not the one of last week|it's the only one|the real one|whatever that is|you know which|we talked about it on {d}|ticket {n}|see ticket {n}|for ticket {n}|for {p}|for {w}|asked by {p}|until {d}|before {d}|today is {d}|a wish of {p}|step {s} of my list|task {s}|
nr. {s} on my list|chapter {s} of the course|exercise {s}|lesson {s}|as in the {w} course|for the {w} workshop|my {w} depends on it|it's old|it's new|it's big|it's a small one|it's important|it's not important|nothing special|that is enough|and no more than that|
only that|and nothing else please|that and nothing more|no need for more|the rest I can do myself|I do the rest|the others come later|more tomorrow|the next one is for {p}|no typo|spelled like that|yes, really|I mean it|I'm sure|don't ask why|for reasons""".replace("\n", "").split("|")
SLANG = {"you": ["u"], "your": ["ur"], "are": ["r"], "please": ["pls", "plz", "plse"], "thanks": ["thx", "tx", "ty"], "want to": ["wanna"], "going to": ["gonna"], "have to": ["gotta"], "give me": ["gimme", "giv me"], "let me": ["lemme"],
         "what is": ["whats", "wats"], "what's": ["whats", "wats"], "because": ["cuz", "cause", "bc"], "with": ["w/", "wit"], "without": ["w/o"], "and": ["n", "&", "an"], "message": ["msg"], "number": ["num", "nr"], "something": ["smth"], "people": ["ppl"],
         "show me": ["show"], "where is": ["wheres"], "who is": ["whos"], "it is": ["its"], "that is": ["thats"], "the": ["teh", "da", "th"], "okay": ["k"], "directory": ["dir"], "directories": ["dirs"], "repository": ["repo"], "about": ["abt"], "should": ["shd"],
         "could": ["cud", "cld"], "would": ["wud", "wld"], "right now": ["rn"], "kind of": ["kinda"], "for": ["fr"], "from": ["frm"], "this": ["dis", "ths"], "what": ["wat", "wht"], "how": ["hw"], "every": ["evry"], "in": ["n"], "information": ["info"]}
MISSPELT = {"the": "teh hte th", "and": "adn nad anf", "file": "fiel flie fil fle", "files": "fiels fles filles", "folder": "foler fodler floder foldr folde", "directory": "direcotry directoy dirctory directry diretory derectory", "that": "taht tht thta", "with": "wiht wth whit", "from": "form frm fomr",
            "which": "wich whcih", "there": "thier ther tehre", "their": "thier", "all": "al alll", "for": "fro", "of": "fo", "to": "ot too", "is": "si", "in": "ni", "this": "thsi tihs", "delete": "delte deleet dleete", "remove": "remvoe reomve remov", "create": "creat craete crate", "rename": "renmae reanme",
            "copy": "cpoy coppy", "move": "moev mvoe", "list": "lsit lits", "show": "shwo sohw", "find": "fidn fnd", "search": "serach seach saerch", "replace": "repalce relpace replce", "lines": "liens lnes", "line": "lien", "count": "coutn cuont", "largest": "larget largset", "biggest": "bigest biggets",
            "running": "runing runnign", "process": "proces porcess", "processes": "procceses proceses", "service": "serivce servcie", "container": "contianer cotnainer contaner", "containers": "contianers containes", "install": "instal intall isntall", "package": "pacakge packge", "packages": "pacakges packges",
            "commit": "comit commmit commti", "branch": "brach brnach bracnh", "changes": "chnages chanegs", "extract": "exract extrcat", "archive": "archve achive arcive", "compress": "compres comrpess", "permission": "permision", "permissions": "permisions persmissions", "recursively": "recursivly recursivelly",
            "separated": "seperated", "occurrences": "occurences ocurrences", "command": "comand commnad", "between": "betwen bewteen", "receive": "recieve", "executable": "excutable executeable", "current": "curent currnet", "status": "staus sattus", "restart": "restrat restar", "download": "downlaod donwload dowload",
            "memory": "memmory memroy", "usage": "useage usgae", "modified": "modifed modifide", "containing": "contianing containg", "contents": "contnets conetnts", "empty": "emtpy empy", "hidden": "hiden hidde", "without": "withuot wihtout", "first": "frist firts", "each": "eahc", "every": "evry eveyr", "under": "udner",
            "then": "tehn thne", "after": "aftre afetr", "please": "plase pleaes pelase", "print": "pritn prnit", "number": "nubmer numbr", "name": "naem", "called": "caled callde", "than": "then tahn", "text": "txet tetx", "words": "wrods", "column": "colum coloumn", "size": "szie siez", "space": "sapce", "system": "sytem systme"}
MISSPELT = {word: wrong.split() for word, wrong in MISSPELT.items()}
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
PROTECTED = set(NUMBERS) | set(ORDINALS) | {"thirty", "forty", "fifty", "hundred"}


def typo(word, rng):
    """One slip of the finger in a word of three letters or more."""
    if word in MISSPELT and rng.random() < 0.35:
        return rng.choice(MISSPELT[word])
    i = rng.randrange(1, len(word) - 1)
    r = rng.random()
    if r < 0.30:
        return word[:i] + word[i + 1:]
    if r < 0.36:
        return word[:-1]
    if r < 0.60:
        return word[:i] + word[i + 1] + word[i] + word[i + 2:]
    if r < 0.78:
        return word[:i] + word[i] + word[i:]
    if r < 0.94:  # the key beside it
        row = next((k for k in KEYBOARD if word[i] in k), "aeiou")
        at = max(row.find(word[i]), 0)
        near = row[max(0, at - 1):at] + row[at + 1:at + 2]
        return word[:i] + rng.choice(near) + word[i + (r < 0.90):]
    return word[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz") + word[i + 1:]


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
        kept = [(t, inside) for i, (t, inside) in enumerate(pieces) if inside or t.lower() not in small or rng.random() < chance or (t == "file" and not (i + 1 < len(pieces) and pieces[i + 1][1]))]
        return " ".join(t for t, _ in kept) or text
    if r > 0.75:
        text = phrased(text, rng)
        if r > 0.92:
            return text
        pieces = fenced_words(text)
    plain_words = [None if inside else t.strip(",.;:").lower() for t, inside in pieces] + [None]
    spots = [i for i, (t, inside) in enumerate(pieces) if not inside and t in SYNONYMS and plain_words[i + 1] not in NOT_BEFORE.get(t, ())
             and (i == 0 or plain_words[i - 1] not in TOOLS and plain_words[i - 1] not in NOT_AFTER.get(t, ()))]
    for i in rng.sample(spots, min(len(spots), rng.choice((1, 1, 1, 2, 2, 3)))):
        pieces[i] = (rng.choice(SYNONYMS[pieces[i][0]]), False)
    if 0.3 <= r < 0.36 and not tiny:
        outer = [i for i, (t, inside) in enumerate(pieces) if not inside]
        if outer:
            pieces.insert(rng.choice(outer), (rng.choice(FILLERS), False))
    return " ".join(t for t, _ in pieces)


PHRASE = re.compile(r"(?<![\w'\x02-])(%s)(?![\w'\x01-])" % "|".join(sorted(map(re.escape, PHRASES), key=len, reverse=True)))


def phrased(text, rng):
    """Another phrase for one or two of those in PHRASES."""
    found = PHRASE.findall(outside_slots(text, lambda p: p))
    chosen = set(rng.sample(found, min(len(found), rng.choice((1, 1, 2)))))
    return outside_slots(text, lambda p: PHRASE.sub(lambda m: rng.choice(PHRASES[m.group(1)]) if m.group(1) in chosen else m.group(1), p))


def misspell(text, rng, most=3):
    """Typos in up to `most` plain words; fenced slots, numbers and very short words stay whole."""
    pieces = fenced_words(text)
    spots = [i for i, (t, inside) in enumerate(pieces) if not inside and t.isalpha() and (len(t) >= 4 or t in MISSPELT) and t.lower() not in PROTECTED]
    for i in rng.sample(spots, min(len(spots), rng.choice((1, 1, 1, 2, 2, 3, 4, 5)[:2 * most]))):
        t = pieces[i][0]
        pieces[i] = (typo(t, rng) if len(t) > 2 else rng.choice(MISSPELT[t]), False)
    if rng.random() < 0.10:  # a space forgotten or slipped in
        outer = [i for i in range(len(pieces) - 1) if not pieces[i][1] and not pieces[i + 1][1] and pieces[i][0].isalpha()]
        if outer:
            i = rng.choice(outer)
            pieces[i:i + 2] = [(pieces[i][0] + pieces[i + 1][0], False)] if rng.random() < 0.7 or len(pieces[i][0]) < 4 else [(pieces[i][0][:2] + " " + pieces[i][0][2:], False), pieces[i + 1]]
    return " ".join(t for t, _ in pieces)


def outside_slots(text, change):
    """`change` applied to what is not fenced."""
    parts = re.split("(\x01[^\x02]*\x02)", text)
    return "".join(p if p.startswith(OPEN) else change(p) for p in parts)


def chatty(text, rng):
    """Slang for some words, as in a chat."""
    known = [k for k in SLANG if re.search(rf"(?<![\w'\x02]){re.escape(k)}(?![\w'\x01])", text)]
    for k in rng.sample(known, min(len(known), rng.choice((1, 1, 2, 3)))):
        to = rng.choice(SLANG[k])
        text = outside_slots(text, lambda p: re.sub(rf"(?<![\w']){re.escape(k)}(?![\w'])", to, p, count=1))
    return text


ORDINAL = re.compile(r"(?<![\w\x02])(?:(a hundred|%s)|(\x01?)(\d+)(\x02?))th\b" % "|".join([*NUMBERS, "thirty", "forty", "fifty"]))
ROUND = {"twenty": "twentieth", "thirty": "thirtieth", "forty": "fortieth", "fifty": "fiftieth", "a hundred": "hundredth", "twelve": "twelfth", "zero": "zeroth"}
TWICE = re.compile(r"\b(the |my |)(folder|directory|file|files|home directory|home folder|directories|folders) (?:the |)\2\b|\b(?:the|a|my) (?=(?:the|my) )", re.I)


def ordinal(m):
    """"five" + "th" is "fifth", "2" + "th" is "2nd"."""
    if m.group(1):
        word = m.group(1)
        return ORDINALS[NUMBERS.index(word) - 1] if word in NUMBERS[1:11] else ROUND.get(word, word + "th")
    n = int(m.group(3))
    return m.group(2) + str(n) + ("th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")) + m.group(4)


def polished(text):
    """What putting parts together left: "fiveth", "the directory the directory x", "home directory directory"."""
    text = ORDINAL.sub(ordinal, text)
    return tidy(outside_slots(text, lambda p: TWICE.sub(lambda m: (m.group(1) + m.group(2)) if m.group(2) else "", p)))


def remark(rng):
    """Words beside a request that change nothing."""
    return re.sub(r"\{(\w)\}", lambda m: {"p": lambda: person(rng).capitalize(), "w": lambda: word(rng), "d": lambda: rng.choice(WEEKDAYS)[0], "n": lambda: str(rng.randint(2, 9999)), "s": lambda: str(rng.randint(1, 20))}[m.group(1)](), rng.choice(REMARKS))


def dress(text, rng):
    """Wrap, capitalise, punctuate and misspell a request, as people do."""
    text = tidy(text)
    if text[0] == OPEN and text[-1] == CLOSE and text.count(OPEN) == 1 and " " in text:
        return FENCE.sub("", text)
    text = polished(text)
    if is_verbal(text) and rng.random() < RECAST:
        text = recast(text, rng)
    asking, verbal = is_question(text), is_verbal(text)
    asked = not verbal and not asking and text.startswith(ASKING)
    if rng.random() < 0.48:
        text = reword(text, rng)
    wrapped = rng.random() < (0.10 if asking or asked else 0.36 if verbal else 0.12)
    if wrapped:
        wrapper = rng.choice(QUESTION_WRAPPERS if asking else NEUTRAL_WRAPPERS if not verbal else POLITE_WRAPPERS if TO_ME.match(text) else WRAPPERS)
        text = wrapper.replace("{}", text)
        asking = asking or wrapper.startswith(ASKING)
    asking = asking or asked
    if rng.random() < 0.13:
        joint = rng.choice(OPENING_JOINTS if verbal and not wrapped and not TO_ME.match(text) else OPENING_JOINTS[:8])
        text = rng.choice(OPENINGS) + joint + text
    if rng.random() < 0.10:
        text += rng.choice(CLOSINGS)
    if rng.random() < REMARK:
        text += rng.choice([" ({})", " ({})", ", {}", " - {}", ". {}", "; {}"]).format(remark(rng))
    sloppy = rng.random() < 0.16
    if sloppy:
        if rng.random() < 0.5:
            text = chatty(text, rng)
        if rng.random() < 0.5:
            text = misspell(text, rng, 4)
        if rng.random() < 0.6:
            text = outside_slots(text, lambda p: p.replace("'", ""))
        if rng.random() < 0.5:
            text = outside_slots(text, lambda p: p.replace(", ", " ").replace(". ", " "))
    elif rng.random() < 0.12:
        text = misspell(text, rng, rng.choice((1, 2, 3)))
    r = rng.random()
    if sloppy and r < 0.75 or 0.25 <= r < 0.42:  # all small letters
        if OPEN not in text[:2] or r > 0.3:
            text = outside_slots(text, str.lower)
    elif r < 0.25 and text[0] != OPEN:
        text = text[0].upper() + text[1:]
    elif r < 0.43:
        text = outside_slots(text, str.upper)
    r = rng.random()
    if asking:
        text += "?" if r < 0.45 else "??" if r < 0.47 else ""
    elif not sloppy or r < 0.02:
        text += "." if r < 0.06 else "!" if r < 0.075 else "..." if r < 0.085 else "?" if r < 0.10 else "!!" if r < 0.105 else ""
    return FENCE.sub("", text)


def sample(rng, split="train", tiny=False):
    """One (request, command, task name) of a split; `tiny` draws open slots from a handful of values and leaves out the dressing."""
    while True:
        ctx = Context(rng, split, tiny)
        try:
            text, command, name = raw(ctx)
        except Retry:
            continue
        if FENCE.sub("", text) != command:  # who types a command gets that one
            command = agreed(command)
        held_combination = any(bucket(k, 8) == 0 for k in ctx.keys)
        if held_combination != (split == "combinations"):
            continue
        if split == "slots" and not ctx.open_slots:
            continue
        if tiny:
            text = polished(tidy(text))
            if is_verbal(text) and rng.random() < RECAST:
                text = recast(text, rng)
            return FENCE.sub("", reword(text, rng, True) if rng.random() < 0.5 else text), command, name
        request = dress(text, rng)
        if plain(request) not in CLOSED:
            return request, command, name


def held_out(rng, count, most=2):
    """[(request, command, the task's command)] of single tasks, each of a sentence pattern of fresh_*.tasks that no training sees, of
    a pattern at most `most`; fewer than `count` if there are no more patterns."""
    tasks, out = {t.command: t for t in TASKS}, []
    for _ in range(most):
        held = sorted(HELD)
        rng.shuffle(held)
        for command, index in held:
            if len(out) == count:
                return out
            task, noun = tasks[command], None
            nodes = next((n for i, n in task.verbs if i == index), None)
            if nodes is None:
                noun = next(n for i, n in task.nouns if i == index)
            for _ in range(20):
                ctx = Context(rng, "patterns")
                try:
                    text = noun_request(ctx, ctx.say(noun, command, index, task.count)) if noun else ctx.say(nodes, command, index, task.count)
                except Retry:
                    continue
                if not one_kind(task, ctx, text):
                    continue
                answer = agreed(right_here(text, fill(command, ctx.values)))
                request = dress(place_first(ctx, text), rng)
                if plain(request) not in CLOSED:
                    out.append((request, answer, command))
                    break
    return out


AGREED = [(re.compile(a), b) for a, b in (
    (r"\bgit add \.(?= |$)", "git add -A"), (r"\bapt upgrade -y", "apt upgrade"), (r"\bgit revert (?!-)", "git revert --no-edit "), (r"\bshutdown -h \+", "shutdown +"),
    (r'\bdate -d "([\d-]+)"', r"date -d \1"), (r"\bgit log --format=%an \| sort \| uniq -c \| sort -rn", "git shortlog -sn"), (r"^printenv (\w+)$", r"echo $\1"),
    (r"\bgit branch (\S+) && git switch \1(?= |$)", r"git switch -c \1"),
    # columns and lines
    (r"\bawk -F, '\{print \$(\d+)\}' ", r"cut -d, -f\1 "), (r"\bawk -F , '", "awk -F, '"), (r"\bcut -d , -f ", "cut -d, -f"), (r"\bcolumn -s , -t ", "column -s, -t "),
    (r"\bcut -d ' ' -f 1 ", "awk '{print $1}' "), (r"\bawk 'NR >= (\d+) && NR <= (\d+)' ", r"sed -n '\1,\2p' "), (r"\bsed '(\d+)q' ", r"head -n \1 "), (r"\bsed -n '\$p' ", "tail -n 1 "),
    (r"\bawk 'NR % 2 == 0' ", "sed -n '2~2p' "), (r"\bsed '/\^\$/d' ", "grep -v '^$' "), (r"\bsort (\S+) \| uniq > ", r"sort -u \1 > "), (r"\bsed -i 1d ", "sed -i '1d' "), (r"\bjq 'keys' ", "jq keys "),
    (r"^cat (\S+) && cat (\S+)$", r"cat \1 \2"), (r"\becho ([\w-]+) (>>?) (?!\.gitignore)", r'echo "\1" \2 '),
    # files
    (r"\breadlink -f ", "realpath "), (r"\bgzip -d (\S+\.gz)", r"gunzip \1"), (r"\bmkdir (?!-)", "mkdir -p "), (r"\bfind (\S+) -perm -o\+w -type f", r"find \1 -type f -perm -o+w"),
    (r"\brename 's/\\\.(\w+)\$/\.(\w+)/' \*\.\1(?= |$)", r'for f in *.\1; do mv "$f" "${f%.\1}.\2"; done'),
    # the rest
    (r"\bjournalctl -p err -b", "journalctl -b -p err"), (r"\bshutdown -h now", "shutdown now"), (r"\bcurl -s https://api\.ipify\.org", "curl -s ifconfig.me"), (r"\bid -Gn\b", "groups"),
    (r"\bcurl -d (\S+) -H 'Content-Type: application/json' ", r"curl -X POST -H 'Content-Type: application/json' -d \1 "), (r"\bcurl -d '", "curl -X POST -d '"),
    (r"^ss -tlnp \| grep :(\d+)", r"lsof -i :\1"), (r"\bkill \$\(lsof -ti :(\d+)\)", r"fuser -k \1/tcp"), (r"\bgit fetch origin && ", "git fetch && "),
    (r"^git reset ([^-\s]\S*)(?= |$)", r"git restore --staged \1"), (r"\bgit restore --source=(\S+) (\S+)", r"git checkout \1 -- \2"),
    (r"\bsort (\S+) \| uniq \| wc -l", r"sort -u \1 | wc -l"), (r"\bsort (\S+) \| uniq$", r"sort -u \1"), (r"^sed -n '1p;\$p' (\S+)$", r"head -n 1 \1 && tail -n 1 \1"),
    (r"^grep -m (\d{2,}|[2-9]) (\"[^\"]*\"|'[^']*'|\S+) (\S+)$", r"grep \2 \3 | head -n \1"), (r"\bcurl -LO (\S+) && (?=unzip |tar )", r"curl -O \1 && "),
    (r"^\[ -f (\S+) \] && rm \1$", r"rm -f \1"), (r"^\[ -[ef] (\S+) \] \|\| cp (\S+) \1$", r"cp -n \2 \1"),
    (r"^systemctl is-active (\S+) && systemctl restart \1$", r"systemctl try-restart \1"), (r"\bgit restore --staged (\S+) && git restore \1(?= |$)", r"git restore --staged --worktree \1"),
    (r"\brsync -av --partial --progress ", "rsync -avP "), (r"\b(scp [^&|]*\w@\S+:[^\s'*]*[^\s'*/:])/(?= |$)", r"\1"), (r"\btar -cvzf ", "tar -czvf "), (r"\bdpkg-deb -x ", "dpkg -x "), (r"\bcat (\S+) \| tar -xzf -(?= |$)", r"cat \1 | tar -xz"), (r"\busermod -e (\S+) (\S+)", r"chage -E \1 \2"), (r"^cd && ", "cd ~ && "),
    (r"\bdocker compose build( \S+|) && docker compose up -d\1(?= |$)", r"docker compose up -d --build\1"),
    (r"\bqpdf --decrypt (--password=\S+) ", r"qpdf \1 --decrypt "),
    (r"\bjq (\.[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?= (?![^|&]*>)|$)", r"jq -r \1"), (r"\bjq '(\.\[\]\.\w+)'(?= (?![^|&]*>)|$)", r"jq -r '\1'"))]


def agreed(command):
    """The same meaning in the same words, where it could be said in two ways."""
    for a, b in AGREED:
        command = a.sub(b, command)
    return command


# "The python files here" are those right here, unless it is only said which there are; without a place, or below one, find goes through all of them.
FILES_HERE = re.compile(r"find \. -type f (?:-name '(\*\.\w+)'|\\\( -name '(\*\.\w+)' -o -name '(\*\.\w+)' \\\)) (.+)")
HERE_WORDS = re.compile(r"\bhere\b|\b(this|current|present|working) (folder|directory|dir)\b|\bcwd\b")
BELOW_WORDS = re.compile(r"below|under|sub-?(fold|dir)|recurs|depth|level|where\b.*\bhere|nested|\btree\b|deep")
RIGHT_HERE = [(re.compile(a), b) for a, b in (
    (r"-delete", "rm @"), (r"-print -delete", "rm -v @"), (r"-exec (rm -i) {} \+", r"\1 @"), (r"-exec (mv|cp|mv -n|cp -n) -t (\S+) {} \+", r"\1 @ \2/"),
    (r"-exec (gzip|chmod \S+|chown \S+|wc -l|head -n \d+|ls -lh) {} \+", r"\1 @"), (r"-exec cat {} \+ (\| wc -l|> \S+)", r"cat @ \1"), (r"-exec zip (\S+) {} \+", r"zip \1 @"),
    (r"-print0 \| tar -czf (\S+) --null -T -", r"tar -czf \1 @"), (r"-print0 \| du -ch --files0-from=- \| tail -n 1", "du -ch @ | tail -n 1"))]
ALL_HERE = [("find . -type f -printf '%T@ %p\\n' | sort -rn | head -n 1", "ls -t | head -n 1"), ("find . -type f -printf '%T@ %p\\n' | sort -n | head -n 1", "ls -tr | head -n 1"), ("find . -type f -name '.*'", "ls -d .*")]


def right_here(text, command):
    """The command of one step, where the request speaks of the files of this folder alone."""
    if not command.startswith("find . "):
        return command
    said = re.sub("\x01[^\x02]*\x02", "", text)
    if not HERE_WORDS.search(said) or BELOW_WORDS.search(said):
        return command
    m = FILES_HERE.fullmatch(command)
    if m:
        for a, b in RIGHT_HERE:
            if a.fullmatch(m.group(4)):
                return a.sub(b, m.group(4)).replace("@", m.group(1) or m.group(2) + " " + m.group(3))
    return dict(ALL_HERE).get(command, command)


NO_SERVICE = re.compile("process|program|pid|app|tool|command")


def one_kind(task, ctx, text):
    """Whether a name is asked after as what it is: "is x running" means a service, unless x is a known program or called one."""
    return task.command != "pgrep -a {proc}" or NO_SERVICE.search(text) or (ctx.values.get("proc") in PROCESSES and ctx.values["proc"] not in SERVICES)


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
