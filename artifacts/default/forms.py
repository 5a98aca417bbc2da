"""Other sentences for the same wish, for generate.py: the passive, the gerund, the thing before what is to be done with it.

    show the ten largest files in src       in src, show ...; let me see the ten largest files in src; I'd like the ten largest files in src listed
    delete the last line of x               x: delete the last line; I want the last line of x deleted; would you mind deleting the last line of x

What always holds: only a single verb phrase with a verb of PARTICIPLES is recast (no "and", no comma, no question); fenced slots stay
whole; what a rule does not know for sure stays as it was. What it does not do: choose words (synonyms.py) or dress (generate.py).
"""

import re

IRREGULAR = {"cut": "cut", "find": "found", "hide": "hidden", "keep": "kept", "make": "made", "put": "put", "read": "read", "rebuild": "rebuilt", "build": "built",
             "run": "run", "rerun": "rerun", "send": "sent", "set": "set", "reset": "reset", "show": "shown", "split": "split", "undo": "undone", "write": "written", "draw": "drawn", "rewrite": "rewritten"}
DOUBLED = set("stop drop zip unzip strip trim swap chop grep scan log tag untag flip wrap snap unwrap map ban pin drag clip submit".split())
REGULAR = """add append apply archive assign attach block bundle calculate capitalize cancel check change clear clean clone close combine commit compare compile compress compute concatenate convert
copy count create crop decode decompress decrypt delete deploy describe disable discard display divide download downgrade drop duplicate empty enable encode encrypt enlarge erase export expand extract
fetch filter fix flatten flip format forward generate group gunzip gzip halt highlight import increase indent insert install join kill label launch limit link list load lock lowercase mark measure
merge minify mirror monitor mount move mute name number open order overwrite pack pause prepend print prune publish pull purge push quit rebase reboot recompile redirect refresh reinstall reload
remove rename renew repair repeat replace reset resize restart restore resume reverse revert rotate round save scale scan schedule search shorten shrink shuffle sign skip snapshot sort squash squeeze
stage start stash stop store strip sum summarize suspend swap switch symlink sync synchronize tag terminate test total track transfer transform translate transpose trim truncate unblock uncompress
uninstall unlock unmount unpack unpause unset unstage untar unzip update upgrade upload uppercase validate verify wipe wrap zip""".split()


def participle(verb):
    if verb in IRREGULAR:
        return IRREGULAR[verb]
    if verb in DOUBLED:
        return verb + verb[-1] + "ed"
    if verb.endswith("e"):
        return verb + "d"
    return verb[:-1] + "ied" if verb[-1] == "y" and verb[-2] not in "aeou" else verb + "ed"


def gerund(verb):
    if verb in DOUBLED or verb in ("cut", "put", "run", "rerun", "set", "reset", "split", "get", "dig", "shut", "begin", "quit"):
        return verb + verb[-1] + "ing"
    return verb[:-1] + "ing" if verb.endswith("e") and not verb.endswith("ee") else verb + "ing"


PARTICIPLES = {v: participle(v) for v in [*IRREGULAR, *REGULAR]}
GERUNDS = {v: gerund(v) for v in [*PARTICIPLES, "get", "look", "go", "turn", "take", "back", "give", "tell", "watch", "follow", "see", "view", "use", "allow", "connect", "log"]}
PARTICLES = set("up down out off on away back in over for at to through into me us him her as whether if how what which who where when why whose it again like inside".split())
NOT_AN_OBJECT = set("recursively only just also now every recursive in under from by with without to into for at".split())
STOP = set("with to into by as from using via without so onto after before unless but if when where that which who whose because".split())
OPEN_ENDED = set("""owned named called ending starting beginning finishing containing matching changed modified created equal equals larger bigger smaller older newer other different same belonging
separated delimited sorted ordered grouped listening running used the a an than of and is are has have not last first all any""".split())
WANTED = ["I want {o} {p} {r}", "I need {o} {p} {r}", "I'd like {o} {p} {r}", "I'd like to have {o} {p} {r}", "I want to have {o} {p} {r}", "I need to have {o} {p} {r}", "want {o} {p} {r}", "need {o} {p} {r}",
          "get {o} {p} {r}", "please have {o} {p} {r}", "please get {o} {p} {r}", "can I get {o} {p} {r}", "can I have {o} {p} {r}", "could I have {o} {p} {r}", "could I get {o} {p} {r}", "I need to get {o} {p} {r}",
          "how do I get {o} {p} {r}", "how can I get {o} {p} {r}", "is there a way to get {o} {p} {r}", "is there a way to have {o} {p} {r}", "I would like {o} {p} {r}", "we need {o} {p} {r}", "we want {o} {p} {r}",
          "{o} should be {p} {r}", "{o} must be {p} {r}", "{o} to be {p} {r}", "{o} should get {p} {r}", "{o} ought to be {p} {r}", "can {o} be {p} {r}", "could {o} be {p} {r}", "how can {o} be {p} {r}",
          "make sure to get {o} {p} {r}", "let's get {o} {p} {r}", "I'm supposed to get {o} {p} {r}", "I have to get {o} {p} {r}", "time to get {o} {p} {r}", "someone wants {o} {p} {r}", "my boss wants {o} {p} {r}"]
DOING = ["would you mind {g}", "do you mind {g}", "mind {g}", "help me with {g}", "I need help with {g}", "I need help {g}", "need help {g}", "how about {g}", "what about {g}", "command for {g}", "what's the command for {g}",
         "the command for {g}", "a command for {g}", "which command is for {g}", "I'm having trouble {g}", "I have trouble {g}", "I'm struggling with {g}", "I'm thinking of {g}", "best way of {g}", "what's a good way of {g}",
         "is there a way of {g}", "any way of {g}", "I'm interested in {g}", "I'd appreciate you {g}", "it's about {g}", "tips for {g}", "next up is {g}", "I'm in charge of {g}", "{g}", "{g}, how",
         "{g} - how", "what does one type for {g}", "I was thinking about {g}", "I'm after {g}", "my task is {g}", "the plan is {g}"]
SEEING = ["let me see {o}", "let me have {o}", "let me have a look at {o}", "I want to see {o}", "I'd like to see {o}", "I need to see {o}", "I want {o}", "I need {o}", "I'd like {o}", "I would like to see {o}", "can I see {o}", "could I see {o}",
          "can I have {o}", "could I have {o}", "may I see {o}", "may I have {o}", "can you show me {o}", "could you show me {o}", "can you give me {o}", "could you list {o}", "gimme {o}", "give me {o}", "get me {o}", "{o}", "{o}", "{o} please",
          "please show {o}", "pull up {o}", "bring up {o}", "put {o} on the screen", "put {o} on my screen", "need {o}", "want {o}", "need to see {o}", "want to see {o}", "wanna see {o}", "lemme see {o}", "how do I see {o}", "how do I get {o}",
          "how can I see {o}", "how do I list {o}", "I have to see {o}", "I'm interested in {o}", "I'd be interested in {o}", "I'm curious about {o}", "tell me {o}", "looking for {o}", "I'm looking for {o}", "I'm after {o}", "I could use {o}",
          "is there a way to see {o}", "is there a way to get {o}", "a list of {o}", "show {o} on the screen", "I have to know {o}", "I need to know {o}", "hand me {o}", "present {o}", "fetch me {o}", "where do I see {o}", "where can I find {o}"]
DETERMINED = re.compile(r"(?:the|all|every|each|my|any|only|just|which|files?|folders?|lines?|\x01?\d|number|names|both|(?:two|three|four|five|six|seven|eight|nine|ten)\b)\b")
SHOWING = re.compile(r"(show me|give me|show|list|print|display|output) (?!of\b|out\b|me\b|us\b|up\b|off\b|only\b|in\b|how\b|what\b|who\b|where\b|when\b|if\b|whether\b|that\b|it\b|them\b)")
SLOT = r"(?:(?:the |my |this |that )?(?:file|folder|directory|service|container|branch|package|document|script|log|image|repo|repository|archive|project|table|website|site|page|host|server|machine|user) )?\x01[^\x01\x02]*\x02"
LAST_PLACE = re.compile(rf"^(.+?) (in|of|from|inside|on|for|at|to) ({SLOT})$")
WHOLE = re.compile(rf"^(\S+) ({SLOT})$")
ABOUT = ["{x}: {v}", "{x}, {v}", "{x} - {v}", "for {x}: {v}", "for {x}, {v}", "about {x}: {v}", "regarding {x}: {v}", "with {x}, {v}", "it's about {x}, {v}"]
ON_IT = ["{x}: {v} it", "{x}, {v} it", "{x} - {v} it", "here's {x}, {v} it", "you see {x}? {v} it", "I have {x} here, {v} it", "there's {x}, {v} it", "{x} is the one, {v} it", "take {x} and {v} it", "this is about {x}: {v} it", "{x} next, {v} it"]


def cut(words):
    """Object and rest of what follows a verb; None if the object is none."""
    if not words or words[0] in PARTICLES or words[0] in NOT_AN_OBJECT or words[0] in STOP:
        return None
    fenced, at = False, len(words)
    for i, w in enumerate(words):
        if not fenced and i and w in STOP:
            at = i
            break
        if "\x01" in w or "\x02" in w:
            fenced = w.rfind("\x01") > w.rfind("\x02")
    if words[at - 1] in OPEN_ENDED:
        return None
    return " ".join(words[:at]), " ".join(words[at:])


def recast(text, rng):
    """Another sentence for a verb phrase, or the same."""
    plain = re.sub("\x01[^\x02]*\x02", "\x01\x02", text)
    if re.search(r"[,;:.?!]|\b(and|then|or|but|not|don't|n't|without|unless|if|whether|it|them)\b", plain):
        return text
    first, _, rest = text.partition(" ")
    if not rest:
        return text
    r = rng.random()
    showing = SHOWING.match(text)
    if showing and r < 0.6:
        thing = text[showing.end():]
        if DETERMINED.match(thing) or r < 0.3:
            return rng.choice(SEEING).replace("{o}", thing)
    if r < 0.22 and first in GERUNDS:
        return rng.choice(DOING).replace("{g}", GERUNDS[first] + " " + rest)
    if r < 0.42:
        m = WHOLE.match(text)
        if m and first in PARTICIPLES and first not in ("make", "show", "list", "print", "display", "find", "count", "create", "put", "set"):
            return rng.choice(ON_IT).format(x=m[2], v=first)
        m = LAST_PLACE.match(text)
        if m and first in PARTICIPLES and m[1].count("\x01") == m[1].count("\x02"):
            if m[2] == "to" or rng.random() < 0.5:
                if m[2] in ("of", "to"):
                    return rng.choice(ABOUT).format(x=m[3], v=m[1]) if m[2] == "of" else text
                return m[2] + " " + m[3] + rng.choice([", ", " ", " ", ": "]) + m[1]
            return rng.choice(ABOUT[:6]).format(x=m[3], v=m[1]) if m[2] in ("in", "of", "from", "inside") else m[2] + " " + m[3] + rng.choice([", ", " "]) + m[1]
    if first in PARTICIPLES and first not in ("set", "make", "put", "number", "name", "label", "order", "run", "check", "test", "search", "limit", "log", "track", "round", "scale"):
        parts = cut(rest.split(" "))
        if parts:
            return rng.choice(WANTED).format(o=parts[0], p=PARTICIPLES[first], r=parts[1]).strip()
    return text
