"""Several steps in one request: tasks one after the other, and what "it" means in the second.

Two sources: any task whose slots fit (`Bound`), and scenes.txt, what people do one after the other with the same thing (`Scene`).
`join` puts the sentences together.

What always holds: one meaning has one command; steps are joined by `&&` in the order in which they happen; "it", "that folder"
and the like stand only where the first step has one thing that they can mean.
What it does not do: pipes and sets of files (compose.py), or choose splits (generate.py).
"""

import os
import re

from grammar import BATCHES, CLOSE, FENCE, OPEN, SLOT, TO_ME, fill, is_verbal, parse

# What a slot of a kind is, for a pronoun.
GROUP = {kind: group for group, kinds in {
    "file": "file leaf csv json script video audio pic", "folder": "dir name path", "branch": "branch", "service": "svc", "container": "ctr",
    "package": "pkg pypkg npmpkg", "pod": "pod", "deployment": "dep", "user": "user", "image": "image", "tag": "tag", "process": "pid"}.items() for kind in kinds.split()}
NOUNS = {
    "file": ["the file", "that file", "this file", "the new file"], "folder": ["the folder", "that folder", "the directory", "that directory", "the new folder"],
    "branch": ["the branch", "that branch"], "service": ["the service", "that service"], "container": ["the container", "that container"],
    "package": ["the package", "that package"], "pod": ["the pod", "that pod"], "deployment": ["the deployment"], "user": ["the user", "that user", "this user"],
    "image": ["the image", "that image"], "tag": ["the tag", "that tag"], "process": ["the process"]}
HERE = ["in it", "in it", "inside it", "in there", "there", "in that folder", "in that directory", "inside"]
MARK = "\x03"        # stands for the thing until the sentence is whole
KIND_WORDS = ("file|folder|directory|dir|git branch|branch|service|daemon|server|container|package|python package|npm package|pod|deployment|user|account|image|tag|"
              "process|pid|program|script|archive|csv|json|json file|csv file|video|picture|image|photo|manifest|tool|app|python script|shell script|python program")
AROUND = re.compile(rf"(?:\b(?:the|a|an|my|this|that|new|old|whole|entire|docker|stopped|running|local|compressed)\s+)*(?:\b(?:{KIND_WORDS})\s+)*{MARK}(?:\s+(?:{KIND_WORDS})\b)?(?:/)?")
NAMING = re.compile(rf"\b(?:called|named|as|name|call it)\s+{MARK}")
MAKES = re.compile(r"mkdir|touch|useradd|groupadd|ln |dd |git (?:switch -c|branch \{|tag|init|clone)|docker (?:run|build|tag|pull)|.*> \{|cargo new|python3 -m venv")
RESULT_LAST = re.compile(r"cp |mv |convert |ffmpeg |ln |sort .*>|cat .*>|curl -o|wget -O|tr .*>|jq .*>|tar -c|zip |head .*>|grep .*>")
# After these there is nothing left that "it" could be; an archive has no lines to count.
GONE = re.compile(r"rm |rmdir |shred |userdel |groupdel |xargs rm|docker (?:rm|rmi|volume rm|network rm) |kubectl delete |git (?:rm|branch -[dD]|tag -d|push \S+ --delete|remote remove|worktree remove) |(?:apt|dnf) (?:remove|purge) |"
                  r"(?:npm|pip|cargo|brew|snap|flatpak) (?:uninstall|remove) |apk del |yarn remove |pacman -R|helm uninstall ")
ARCHIVES = re.compile(r"tar -|unzip |zip |gzip |xz |bzip2 |zstd ")
ARCHIVED = re.compile(r"(?:mv|cp|scp|rsync|ls|du|stat|rm|sha\d+sum|md5sum|chmod|chown|chgrp|file|gpg|unzip|tar|gunzip|unxz|zcat|realpath|readlink|basename|curl -[TF]|xdg-open|ln|test|docker cp|kubectl cp|split -b|shred|touch|cmp|base64)\b")


def slots_of(command):
    """Name -> kind of the slots of a command."""
    return {m.group(1): m.group(2) or m.group(1) for m in SLOT.finditer(command)}


def thing(command):
    """What "it" means after a command: (group, command text with slots, what else it may be called), or None."""
    slots = slots_of(command)
    m = re.match(r"mv (\{file\}) (\{file\}\.\w+)$", command)
    if m:
        return "file", m.group(2), None
    m = re.match(r"(gzip|xz|bzip2|zstd) (\{\w+\})$", command)
    if m:
        return "file", m.group(2) + {"gzip": ".gz", "xz": ".xz", "bzip2": ".bz2", "zstd": ".zst"}[m.group(1)], None
    m = re.match(r"(?:gunzip|unxz|bunzip2) (\{\w+\})\.\w+$", command)
    if m:
        return "file", m.group(1), None
    m = re.match(r"(?:tar -x\w+|unzip|dpkg -i|bash|\./) ?(\{\w+\}(?:\.\w+)+)(?: -[dC] \{\w+\})?$", command)
    if m:
        return "file", m.group(1), ["the archive", "the archive", "the original archive"] if command[0] in "tu" else None
    m = re.match(r"(?:tar -c\w+|zip -r|zip|tar -czf) (\{\w+(?::\w+)?\}\.(?:tar\.\w+|tgz|zip|tar)) ", command)
    if m:
        return "file", m.group(1), ["it", "the archive", "the archive", "the new archive"]
    found = [(name, GROUP[kind]) for name, kind in slots.items() if kind in GROUP]
    if len(found) == 1:
        return found[0][1], "{" + found[0][0] + "}", None
    if len(found) == 2 and found[0][1] == found[1][1] and RESULT_LAST.match(command):
        extra = ["it", "the copy", "the new one"] if command.startswith("cp ") else None
        return found[1][1], "{" + found[1][0] + "}", extra
    return None


def original(command):
    """What "the original" means after a copy or a conversion: (group, command text), or None."""
    m = re.match(r"(?:cp|convert|ffmpeg -i|sort|tr|jq)\b.*?(\{a:\w+\}).*\{b:\w+\}", command)
    if m:
        return GROUP.get(slots_of(command)["a"], "file"), m.group(1)
    m = re.match(r"tar -czf \{(?:\w+:)?\w+\}\.tar\.gz (\{[\w:]+\})$|zip -r \{[\w:]+\}\.zip (\{[\w:]+\})$", command)
    return ("folder", m.group(1) or m.group(2)) if m else None


class Bound:
    """A value that the second step takes from the first."""

    def __init__(self, group, value, names, rng):
        self.group, self.value, self.used = group, value, False
        r = rng.random()
        if names is not None and r < 0.75:
            self.name = rng.choice(names)
        elif r < 0.5:
            self.name = "it" if group != "user" else rng.choice(["them", "him", "her", "it"])
        elif r < 0.72:
            self.name = rng.choice(NOUNS[group])
        else:
            self.name = OPEN + value.strip("\"'") + CLOSE

    def draw(self, kind, rng):
        """Request text for a slot of this kind, or None if the thing is none of the kind."""
        if self.used:
            return None
        if kind == "in" and self.group == "folder":
            self.used = True
            return rng.choice(HERE)
        if GROUP.get(kind) != self.group:
            return None
        self.used = True
        return MARK

    def finish(self, text):
        """Put the name where the mark stands; None if that makes no sense."""
        if NAMING.search(text):
            return None
        return AROUND.sub(lambda m: self.name, text)


IRREGULAR = {w: w + w[-1] + "ing" for w in "run get put set stop zip tar cut drop split swap unzip untar trim strip kill scan map tag cat grep rm mv cp bin commit reset submit plug shut gunzip chop ship skip strip wrap flip crop dig drag quit begin let sit log plan".split()}
IRREGULAR.update(kill="killing", commit="committing", reset="resetting", scan="scanning", rm="removing", mv="moving", cp="copying", grep="grepping", be="being", tie="tying")


def gerund(text):
    """"create the folder x" -> "creating the folder x"; None where the first word is not a plain verb."""
    first, _, rest = text.partition(" ")
    if not first.isalpha() or not first.islower() or not rest or not is_verbal(text) or first in ("docker", "git", "ls", "up", "let", "tell", "have"):
        return None
    if first in IRREGULAR:
        ing = IRREGULAR[first]
    elif first.endswith("e") and not first.endswith("ee"):
        ing = first[:-1] + "ing"
    else:
        ing = first + "ing"
    return ing + " " + rest


IRREGULAR_DONE = dict(p.split(":") for p in """make:made put:put get:got go:gone take:taken build:built find:found send:sent cut:cut write:written run:run set:set bring:brought give:given show:shown throw:thrown undo:undone hide:hidden shut:shut
split:split choose:chosen keep:kept read:read rewrite:rewritten rerun:rerun rebuild:rebuilt freeze:frozen do:done draw:drawn tear:torn see:seen say:said break:broken hold:held leave:left let:let catch:caught forget:forgotten stick:stuck shrink:shrunk
reset:reset overwrite:overwritten wake:woken""".split())


def done(text):
    """"create the folder x" -> "created the folder x"; None where the first word is not a plain verb."""
    ing = gerund(text)
    if ing is None:
        return None
    first, _, rest = text.partition(" ")
    if first in IRREGULAR_DONE:
        return IRREGULAR_DONE[first] + " " + rest
    if first in IRREGULAR:
        return ing.split(" ")[0][:-3] + "ed " + rest
    return (first + "d" if first.endswith("e") else first[:-1] + "ied" if first.endswith("y") and first[-2] not in "aeiou" else first + "ed") + " " + rest


# ---- scenes.txt ---------------------------------------------------------------------------------------------------------

HERE_FORMS = ["into it", "into it", "in it", "there", "in there", "inside it", "inside", "in that folder", "into that folder", "into the new folder", "in the folder"]
ORIGINALS = ["the original", "the original", "the original", "the source", "the old one"]
POINTERS = {"it": "{it}", "here": "{here}", "orig": "{orig}"}   # slots that stand for the thing, not for a value of their own


class Step:
    """One command of a scene: its wordings, and what the next step may speak of."""

    def __init__(self, command, thing=None, original=None, names=()):
        self.command, self.thing, self.original, self.names, self.patterns, self.lines = command, thing, original, list(names), [], []

    def finish(self, kinds):
        """Parse the wordings; a slot without a kind has the one that the command gives it, or is carried from the step before."""
        given = {m.group(1): m.group(2) for m in SLOT.finditer(self.command) if m.group(2)}
        self.patterns = [parse(SLOT.sub(lambda m: "{%s:%s}" % (m.group(1), m.group(2) or given.get(m.group(1), m.group(1))), p)) for p in self.patterns]
        self.weights = [0.5 + p.wordings.bit_length() for p in self.patterns]
        self.carries = [m.group(1) for m in SLOT.finditer(self.command) if (m.group(2) or given.get(m.group(1), m.group(1))) not in kinds]
        # What is moved, deleted or left behind is no longer what "it" was.
        self.ends = bool(re.match(r"(mv|rm|cd|gzip|docker rm|git branch -d|rmdir|zip|tar) ?", self.command)) or "&&" in self.command


class Scene:
    """A block of scenes.txt."""

    def __init__(self, names):
        self.names, self.firsts, self.thens = names, [], []

    def finish(self, kinds):
        for step in self.firsts + self.thens:
            step.finish(kinds)
        self.weight = (len(self.firsts) * len(self.thens)) ** 0.5


def read_scenes(text):
    """The blocks of a text like scenes.txt, their wordings not yet parsed."""
    scenes, step = [], None
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "thing" or line == "all":
            scenes.append(Scene([n.strip() for n in rest.split(",") if n.strip()]))
            scenes[-1].number = number
            step = None
        elif word == "first" and scenes:
            # A pipe in the command is apart from the names by what stands behind it: names have neither marks nor options.
            m = re.fullmatch(r"(.*?)(?: => (.*?))?(?: ~ (\S+))?(?: \| ([a-z{][^|]*))?", rest) if not PIPED.search(rest) else re.fullmatch(r"(.*)()()()", rest)
            step = Step(m.group(1), m.group(2) or ("{x}" if "{x" in rest else None), m.group(3) or None, m.group(4).split(", ") if m.group(4) else ())
            scenes[-1].firsts.append(step)
        elif word == "then" and scenes:
            step = Step(rest)
            scenes[-1].thens.append(step)
        elif step is None:
            raise ValueError(f"scenes.txt:{number}: a wording before the first command")
        else:
            step.lines.append((number, line))
            step.patterns.append(re.sub(r"@(@|o\b)?", lambda m: {"@": "{here}", "o": "{orig}", None: "{it}"}[m.group(1)], line))
            continue
        if step is not None:
            step.number = number
    return scenes


PIPED = re.compile(r" \| (?:sort|head|tail|wc|grep|uniq|awk|tee|less|xargs|crontab|tar)\b")


def load_scenes(kinds):
    """The blocks of scenes.txt; `kinds` are the kinds of slots that have values."""
    scenes = []
    for batch in BATCHES:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{batch}scenes.txt")) as f:
            scenes += read_scenes(f.read())
    for scene in scenes:
        scene.finish(kinds)
    return scenes


def pointer(which, scene, step, values, rng):
    """The words for the thing ("it"), the place ("here") or the original ("orig") in a second step."""
    value = values["o" if which == "orig" else "x"]
    plain = OPEN + value.strip("\"'") + CLOSE
    r = rng.random()
    if which == "here":
        return rng.choice(["into ", "in ", "inside ", "to "]) + plain if r < 0.12 else rng.choice(HERE_FORMS)
    if r < 0.2:
        return plain
    if which == "orig":
        return rng.choice(ORIGINALS)
    if step.names and r < 0.5:
        return OPEN + fill(rng.choice(step.names), values) + CLOSE
    return rng.choice(scene.names)


def backwards(texts, steps, value, rng):
    """The second step said first, and the first with "it": "before deleting x, back it up". None where that makes no sense."""
    named = OPEN + value.strip("\"'") + CLOSE
    a, b = texts
    if MAKES.match(steps[0].command) or a.count(named) != 1 or "{x}" not in steps[1].command or MARKED.search(FENCE.sub("", a)) or not is_verbal(a) or not is_verbal(b):
        return None
    if MARKED.search(FENCE.sub("", b)):
        b, n = MARKED.subn(lambda m: named if m.group(1) in ("it", "that", "them") else m.group(0), b, count=1)
        if named not in b or MARKED.search(FENCE.sub("", b)):
            return None
    elif named not in b:
        return None
    a = a.replace(named, MARK)
    if NAMING.search(a):
        return None
    a = AROUND.sub("it", a)
    doing, rest = gerund(b), done(a)
    frames = ["{b} but {a} first", "{b}, but {a} first", "{b}, but first {a}", "before you {b}, {a}", "I want to {b} but {a} first", "I need to {b}, but before that {a}", "{b}, but before that {a}"]
    if doing is not None:
        frames += ["before {doing}, {a}", "before {doing}, {a}", "before {doing} {a}"]
    return rng.choice(frames).replace("{a}", a).replace("{b}", b).replace("{doing}", doing or "")


# ---- sentences ----------------------------------------------------------------------------------------------------------

CONNECTORS = [" and then ", ", then ", " and ", " and ", " and ", " and ", ", and then ", " then ", " and after that ", "; then ", ", after that ", ". then ", ", and ", " and afterwards ",
              " && ", "; ", " and finally ", " and also ", ", and also ", " and when that is done ", ", next ", " and if that works ", ". after that ", ". Then ", ". After that, ", ". Then ",
              ", afterwards ", " and once that's done ", " and once that is done ", ". once that's done ", ", once done ", ". When that's done, ", " and when it's finished ", ". Next, ", ". next ",
              " and right after that ", " and straight away ", ", plus ", " plus ", " & ", " + ", ", ", ". Also ", ". also ", ". Finally, ", ", finally ", "; after that ", "; next ",
              " and subsequently ", ", and when you're done ", " and if it succeeds ", ", and if that went well ", " -> ", ". now ", " and now ", ", now ", " and later ", ". Afterwards, ", ", and lastly ", " and in the end ", ", in the end ", " and thereafter ", " and from there ", ", as soon as that's done ", " and as soon as that is done ", " and once it's finished ", ", and once it's through ",
              " and then, ", ". Then please ", ", then please ", " and please ", " and also please ", ". And then ", ". and ", ". And ", "... then ", " => ", " , ", " and, when that has worked, ", " and only then ", " (then ", " and additionally ", "; then ", ". Once that's done, ",
              ". As soon as it's done, ", " and last ", ". After that ", "; and then ", ", and after this ", ". When finished, ", " and when it works ", " and subsequently "]
TELLING = [" and tell me ", ", then tell me ", ". ", " and check ", " and then find out ", " and see ", " and then tell me ", " and say ", ". Then tell me ", ", ", " and let me know ", ", after that tell me ",
          " and also tell me ", ". after that, ", " and report ", " - ", " and show me "]
FRAMES = ["first {0}, then {1}", "first {0}, then {1}", "First {0}. Then {1}", "first {0} and then {1}", "first {0}, and then {1}", "first, {0}, then {1}", "{0} first, then {1}", "{0} first and then {1}",
          "1. {0} 2. {1}", "1) {0} 2) {1}", "step 1: {0}, step 2: {1}", "two things: {0} and {1}", "two things: {0}, then {1}", "do two things: {0} and then {1}", "first of all {0}, after that {1}",
          "to start {0}, then {1}", "firstly {0}, secondly {1}", "a) {0} b) {1}", "(1) {0} (2) {1}", "1. {0}, 2. {1}", "1: {0} 2: {1}", "step one: {0}. step two: {1}", "one: {0}, two: {1}", "in this order: {0}, {1}", "{0} (and then {1})", "{0}; when that has finished, {1}",
          "both please: {0} and {1}", "{0} as the first step and {1} as the second", "1. {0} and 2. {1}", "start with this: {0}. Then {1}", "{0}. Second: {1}", "two steps: {0}; {1}", "First, {0}. Second, {1}", "First, {0}. After that, {1}", "first {0}, afterwards {1}",
          "first {0}, next {1}", "first {0} and finally {1}", "{0}, and when all that is done, {1}"]
# For verb phrases on both sides.
WISHES = ["I want to {0} and {1}", "I want to {0} and then {1}", "I need to {0}, then {1}", "I need to {0} and {1}", "I'd like to {0} and then {1}", "I would like to {0} and {1}", "I have to {0} and after that {1}", "could you {0} and then {1}", "can you {0} and {1}",
          "please {0} and {1}", "please {0}, then {1}", "let's {0} and then {1}", "go ahead and {0}, then {1}", "{0} so that I can {1}", "{0}, so I can {1}", "{0} so I can {1}", "{0} because I want to {1}", "{0} because I have to {1}", "{0}, I need to {1}",
          "{0}, I want to {1}", "{0}, and could you also {1}", "{0}. Could you also {1}", "{0}. I also need to {1}", "{0}. Then I want to {1}", "{0}, then I want to {1}", "{0} and then I need to {1}", "{0} - and while you're at it {1}",
          "{0}, and while you're at it, {1}", "{0} and while you are at it {1}", "{0}. While you're at it, {1}", "I want you to {0} and {1}", "you should {0} and then {1}", "{0}. Please also {1}", "{0} and please {1}", "{0}, and please also {1}",
          "help me {0} and {1}", "{0} in order to {1}", "{0}, don't forget to {1}", "{0} and don't forget to {1}", "{0}, and make sure to {1}", "try to {0} and if it works {1}", "{0}, if that worked {1}", "can you please {0}, and then {1}", "how do I {0} and then {1}",
          "how can I {0} and {1} in one go", "what's the command to {0} and then {1}", "I want to {0}. After that I want to {1}", "I need you to {0}, and then to {1}", "{0} to then {1}", "{0}, the next step is to {1}", "all I want is to {0} and {1}"]
WISHES_BACK = ["I want to {1} but {0} first", "I want to {1}, but first {0}", "I need to {1}, but before that {0}", "I'd like to {1}, so {0} first", "to be able to {1}, {0} first", "{0} before we {1}", "{0} before I {1}", "I'm about to {1}, so {0} first"]
HAVING = ["once you have {p}, {1}", "once you've {p}, {1}", "after you have {p}, {1}", "after you've {p}, {1}", "when you have {p}, {1}", "when you've {p}, {1}", "as soon as you have {p}, {1}", "having {p}, {1}"]
HAVING_BACK = ["{1} once you have {p}", "{1} after you have {p}", "{1} as soon as you've {p}"]
REVERSED = ["{1} but first {0}", "{1}, but {0} first", "{1}, but first {0}", "{1}, but before that {0}", "before you {1}, {0}", "{0} before you {1}", "before you {1} please {0}"]
DOING = ["after {a}, {1}", "after {a}, {1}", "after {a} {1}", "once done with {a}, {1}", "start by {a}, then {1}", "begin by {a} and then {1}", "when you're done {a}, {1}", "when finished {a}, {1}", "start by {a} and then {1}", "start with {a}, then {1}",
         "right after {a}, {1}", "begin with {a} and {1} afterwards", "when you are done with {a}, {1}"]
DOING_LAST = ["before {b}, {0}", "{0} before {b}", "{0} before {b}", "{0} followed by {b}", "{0}, followed by {b}", "{0} prior to {b}"]
SAME = [" and do the same for {}", " and do the same with {}", " and the same for {}", ", then do the same to {}", ", and the same for {}", " and then the same with {}", ". Do the same for {}", ". same for {}", " and likewise {}",
        ", same with {}", " and do that for {} too", " and also do it for {}", " and do the same thing to {}"]
MARKED = re.compile(r"\b(it|its|them|there|that|this|inside|those|him|her|they|the (?:new |extracted )?(?:file|folder|directory|archive|copy|original|script|repo|branch|zip|tarball|result|project|list|output))\b")


def join(texts, rng):
    """Sentences for steps in this order, as one request."""
    if len(texts) == 2:
        a, b = texts
        r = rng.random()
        put = lambda frame, **more: re.sub(r"\{(\w)\}", lambda m: {"0": a, "1": b, **more}[m.group(1)], frame)
        if r < 0.10:
            return put(rng.choice(FRAMES))
        free = not MARKED.search(FENCE.sub("", b))
        verbal = is_verbal(a) and is_verbal(b) and not (TO_ME.match(a) or TO_ME.match(b))
        if r < 0.16 and free:
            return put(rng.choice(REVERSED + WISHES_BACK if verbal else REVERSED))
        if r < 0.22:
            doing = gerund(a if r < 0.19 else b)
            if doing is not None and r < 0.19:
                return put(rng.choice(DOING), a=doing)
            if doing is not None:
                return put(rng.choice(DOING_LAST[2:] if not free else DOING_LAST), b=doing)
        if r < 0.32 and verbal:
            return put(rng.choice(WISHES))
        if r < 0.35:
            having = done(a)
            if having is not None:
                return put(rng.choice(HAVING + HAVING_BACK if free else HAVING), p=having)
    text = texts[0]
    for n, t in enumerate(texts[1:], 1):
        if n < len(texts) - 1 and rng.random() < 0.4:
            text += ", " + t
        else:
            joint = rng.choice(CONNECTORS)
            if "please" in joint and not is_verbal(t):
                joint = " and then "
            if joint == " (then ":
                t += ")"
            text += joint + (t[0].upper() + t[1:] if joint.strip() in (".", ";") and rng.random() < 0.5 else t)
    return text
