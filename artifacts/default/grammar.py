"""Phrase grammar: a pattern is written once and expanded into many sentences.

Syntax: ``(a|b|)`` picks one alternative, ``[x]`` is x or nothing, ``<name>`` expands a shared macro,
``{name:type}`` draws a slot (``{type}`` is short for ``{type:type}``), a backslash takes what follows as it is. Nothing
else is special.

What always holds: a pattern is parsed once; expansion depends on the given random generator alone;
the text of a slot is fenced by ``FENCE`` marks, so that later steps (typos, capitals) leave it whole.
What it does not do: know what a slot means (slots.py) or what a command is (generate.py).
"""

import re
import zlib

# What the names of the files begin with that have more of the same: more scenes, more of what is outside.
BATCHES = ("", "new_", "wide_", "deep_", "fresh_", "next_")
OPEN, CLOSE = "\x01", "\x02"
FENCE = re.compile("[\x01\x02]")
SLOT = re.compile(r"\{([a-z][a-z0-9]*)(?::([a-z0-9]+))?\}")


def bucket(text, buckets):
    """Bucket of a text, the same on every machine and in every run (CRC-32)."""
    return zlib.crc32(text.encode()) % buckets


class Choice:
    """One of several alternatives, each a list of nodes."""

    def __init__(self, options):
        self.options = options


class Macro:
    def __init__(self, name):
        self.name = name


class Slot:
    def __init__(self, name, kind):
        self.name, self.kind = name, kind


def expansions(nodes):
    """In how many ways a parsed pattern can be worded, slots aside."""
    total = 1
    for node in nodes:
        if isinstance(node, Choice):
            total *= sum(expansions(option) for option in node.options)
        elif isinstance(node, Macro):
            total *= expansions(MACROS[node.name])
    return total


class Pattern(list):
    """Parsed nodes (str, Choice, Macro, Slot); `wordings` is in how many ways they can be worded, slots aside."""

    wordings = 1


def parse(pattern):
    """Parse a pattern."""
    nodes, end = sequence(pattern, 0, "")
    if end != len(pattern):
        raise ValueError(f"pattern {pattern!r}: unbalanced bracket at {end}")
    parsed = Pattern(nodes)
    parsed.wordings = expansions(parsed)
    return parsed


def sequence(s, i, stop):
    nodes, text = [], []

    def flush():
        if text:
            nodes.append("".join(text))
            text.clear()

    while i < len(s) and s[i] not in stop:
        c = s[i]
        if c == "\\":
            text.append(s[i + 1])
            i += 2
        elif c == "(" or c == "[":
            flush()
            close = ")" if c == "(" else "]"
            options = []
            i += 1
            while True:
                option, i = sequence(s, i, "|" + close)
                options.append(option)
                if i >= len(s):
                    raise ValueError(f"pattern {s!r}: {c} is never closed")
                i += 1
                if s[i - 1] == close:
                    break
            if c == "[":
                options.append([])
            nodes.append(Choice(options))
        elif c == "<":
            flush()
            j = s.index(">", i)
            nodes.append(Macro(s[i + 1:j]))
            i = j + 1
        elif c == "{":
            m = SLOT.match(s, i)
            if not m:
                raise ValueError(f"pattern {s!r}: bad slot at {i}")
            flush()
            nodes.append(Slot(m.group(1), m.group(2) or m.group(1)))
            i = m.end()
        else:
            text.append(c)
            i += 1
    flush()
    return nodes, i


MACRO_TEXT = {
    "show": "(show|show me|list|display|print|give me|find|get|list|show)",
    "print": "(print|show|show me|display|output)",
    "find": "(find|list|show|locate|search for|look for|show me)",
    "delete": "(delete|remove|erase|get rid of|delete|remove)",
    "create": "(create|make|create|add|set up)",
    "count": "(count|count up|tell me how many)",
    "change": "(change|set|switch)",
    "the": "(the|my|the|)",
    "folder": "(folder|directory|dir)",
    "named": "(named|called|with the name)",
    "containing": "(containing|that contain|with|matching|that match|that mention|having|which contain)",
    "search": "(search|grep|look|search)",
    "largest": "(largest|biggest|largest|heaviest)",
    "using": "(using|with|via)",
    "into": "(into|to|in)",
    "kill": "(kill|stop|terminate|end)",
    "download": "(download|fetch|get|grab)",
    "upload": "(upload|send|copy|push)",
    "extract": "(extract|unpack|untar|decompress|expand)",
    "compress": "(compress|pack|archive)",
    "branch": "(branch|git branch|branch)",
    "file": "(the file |file |)",
    "current": "(current|present)",
    "recursively": "(recursively|and everything in it|with everything inside|with all its contents)",
    "field": "(column|field)",
    "all": "(all|all the|every one of the|the|)",
    "sep": "(separated by|delimited by|split by|using|with)",
}
MACROS = {name: parse(text) for name, text in MACRO_TEXT.items()}


def expand(nodes, rng, draw, out, skeleton):
    """Append the expansion of `nodes` to `out` (with fenced slots) and to `skeleton` (slots as names).

    `draw(name, kind)` returns the request text of a slot, or None where the slot renders nothing.
    """
    for node in nodes:
        if isinstance(node, str):
            out.append(node)
            skeleton.append(node)
        elif isinstance(node, Choice):
            expand(rng.choice(node.options), rng, draw, out, skeleton)
        elif isinstance(node, Macro):
            expand(MACROS[node.name], rng, draw, out, skeleton)
        else:
            text = draw(node.name, node.kind)
            skeleton.append("{" + node.kind + "}")
            out.append(text)


# First words of a verb phrase: "can you ..." and "I want to ..." go before these and nothing else.
VERBS = set("""abort accept activate add adjust align allow alphabetize alphabetise amend announce analyse analyze append apply archive arrange ask assign attach auto-rotate back bind black block blur boot bounce branch break brighten bring browse
build bump bundle burn bzip2 cache calculate call cancel capitalise capitalize capture cat cd change chart chase check checkout cherry-pick chgrp chmod choose chop chown chuck clean cleanup clear clone close collect colour combine comment commit compare compile
compress compute concatenate condense configure connect consult continue convert copy count cp crash create crop curl cut daemonize deactivate debug decode decompress decrypt decrease define delete demote deny deploy describe destroy detach detect
determine diff dig disable discard disconnect discover display ditch divide do docker double download downgrade downscale drain draw drop dump duplicate echo edit eject eliminate email embed empty enable encode encrypt end enlarge enter enumerate erase estimate evaluate
examine exclude exec execute exit expand explain export expose extend extract fetch figure fill filter find finish fire fix flatten flip flush follow fold force force-push forget forbid fork format forward free freeze gather generate get git give go grab
grant grayscale grep group guess gunzip gzip halt hand hard-reset hash have head hibernate hide highlight hold hop hunt identify ignore import increase increment indent inflate init initialise initialize insert inspect install interleave interrupt invert invoke
isolate join jump keep kick kill knock label launch leave let level limit line-wrap link lint list load locate lock log look lower lowercase ls mail make mark match measure merge migrate minify mirror mkdir mock modify monitor mount move mute mv name navigate
negate nice normalise normalize note nuke number obtain omit open optimise optimize order organise organize output overwrite pack package pad page park paste patch pause peek pick ping pipe place play point pop post prefix prepare prepend preview print probe process produce
promote prune publish pull purge push put query queue quit quote rank re-create re-run reapply rearrange rebase reboot rebuild recompile recompress record recover recreate redirect reduce refresh regenerate register reindex reinstall release relaunch reload relocate remove rename renew renice
reopen reorder repack repair repeat replace report request rerun reset resize resolve restart restore restrict resume retag retrieve return reveal reverse revert rewind rewrite roll rotate round run sample save say scale scan schedule scp scramble scroll search see select send separate
set shelve shift shorten shove show shred shrink shuffle shut sign simplify sketch skip sleep slice slow snapshot sort source spawn speed spell split squash squeeze ssh stage start stash stick stop store stream strip submit substitute subtract sum summarise summarize suspend swap
switch symlink sync synchronise synchronize tabulate tack tag tail take tally tar tear tell terminate test throw tidy time toggle total touch trace track transfer transform translate transpose trash traverse trim truncate try turn type unarchive unblock uncomment uncompress undo
unfreeze uninstall unify unload unlock unmask unmount unpack unpause unplug unset unstage unstash untag untar unzip up update upgrade uppercase upload upscale use validate verify view visit wait wake watch weed wget wipe wrap write xz yank zero zip""".split())
NO_VERB = re.compile(r"(?:step|task|todo|number|line|group|user|file|log|size|time|process|port|head|tail|number|order|point|up|back|black|level|free|empty|open|double|label|package|release|nice|round|query|queue|image) (?:\x01?\d|one\b|files?\b|folders?\b|directories\b|ports?\b|lines?\b|containers?\b|disk\b|memory\b|space\b|users?\b|lists?\b|usage\b)|\w+ of ")

TO_ME = re.compile(r"[A-Za-z]+ (?:me|us)\b")     # "show me ...": one wants it, one does not want to do it


def is_verbal(text):
    """Whether a request is a verb phrase, so that "please" or "can you" may stand before it."""
    first = text.split(" ", 1)[0]
    return first.rstrip(",").lower() in VERBS and not first.endswith(":") and not (NO_VERB.match(text) and not text.startswith(("get rid of", "back up", "free up", "empty ", "open ")))


SPACES = re.compile(" +")


def tidy(text):
    """Collapse the doubled spaces that empty alternatives leave."""
    return SPACES.sub(" ", text).replace(" ,", ",").strip()


def fill(template, values):
    """Put slot values into a command template; a missing value is an error in the grammar.

    `{xbase}` is the last part of the path or address `x`, as git and curl would name it here.
    """

    def value(m):
        if m.group(1) not in values and m.group(1).removesuffix("base") in values:
            return values[m.group(1).removesuffix("base")].rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1].removesuffix(".git")
        if m.group(1) not in values:
            raise KeyError(f"command {template!r}: no value for slot {m.group(1)!r}")
        return values[m.group(1)]

    return SLOT.sub(value, template)
