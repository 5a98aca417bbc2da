"""Several steps in one request: tasks one after the other, and what "it" means in the second.

What always holds: one meaning has one command; steps are joined by `&&` in the order in which they happen; "it", "that folder"
and the like stand only where the first step has one thing that they can mean.
What it does not do: pipes and sets of files (compose.py), or choose splits (generate.py).
"""

import re

from grammar import CLOSE, OPEN, SLOT, fill

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


def slots_of(command):
    """Name -> kind of the slots of a command."""
    return {m.group(1): m.group(2) or m.group(1) for m in SLOT.finditer(command)}


def thing(command):
    """What "it" means after a command: (group, command text with slots, what else it may be called), or None."""
    slots = slots_of(command)
    m = re.match(r"(?:tar -x\w+|unzip|dpkg -i|gunzip|bash|\./) ?(\{\w+\}(?:\.\w+)+)(?: -[dC] \{\w+\})?$", command)
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


IRREGULAR = {w: w + w[-1] + "ing" for w in "run get put set stop zip tar cut drop split swap unzip untar trim strip kill scan map tag cat grep rm mv cp bin commit reset submit plug shut".split()}
IRREGULAR.update(kill="killing", commit="committing", reset="resetting", scan="scanning", rm="removing", mv="moving", cp="copying", grep="grepping", be="being", tie="tying")


def gerund(text):
    """"create the folder x" -> "creating the folder x"; None where the first word is not a plain verb."""
    first, _, rest = text.partition(" ")
    if not first.isalpha() or not first.islower() or not rest or first in ("new", "the", "a", "my", "in", "at", "as", "docker", "git", "kubectl", "sudo", "npm", "cargo", "pip", "apt", "please", "i", "total", "top", "all"):
        return None
    if first in IRREGULAR:
        ing = IRREGULAR[first]
    elif first.endswith("e") and not first.endswith("ee"):
        ing = first[:-1] + "ing"
    else:
        ing = first + "ing"
    return ing + " " + rest
