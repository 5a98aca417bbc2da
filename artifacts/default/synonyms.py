"""Words and phrases that mean the same in a request to a shell, for generate.py.

What always holds: a word keeps its command: "stop" is never "kill", "undo" never "revert", "enable" never "turn on"; NOT_BEFORE and
NOT_AFTER say where a word means something else ("check out", "the list", "trailing space").
"""

WORDS = {
    "address": ["addr"], "afterwards": ["after that", "thereafter", "later"], "again": ["once more", "one more time"],
    "all": ["all of the", "all the", "every one of the"], "allow": ["permit"], "alphabetically": ["in alphabetical order", "by name", "from a to z"],
    "append": ["add", "attach", "tack"], "archive": ["tarball", "package"], "archives": ["archive files"], "audio": ["sound"], "average": ["mean"],
    "backup": ["safety copy", "copy"], "backwards": ["in reverse", "from last to first"], "beginning": ["start"], "big": ["large", "huge"],
    "bigger": ["larger", "greater"], "biggest": ["largest", "heaviest"], "blank": ["empty"], "block": ["deny", "forbid", "close"],
    "build": ["compile", "make"], "calculate": ["compute", "work out"], "called": ["named"], "change": ["alter", "modify", "switch"],
    "changed": ["modified", "edited", "altered", "updated"], "changes": ["edits", "modifications", "work"], "characters": ["chars", "letters"],
    "check": ["see", "verify", "inspect"], "clean": ["clear"], "clear": ["empty", "clean", "wipe"], "column": ["col"], "columns": ["fields", "cols"],
    "combine": ["merge", "put together"], "commits": ["changesets", "revisions"], "compare": ["diff", "contrast"], "compile": ["build", "make"],
    "compress": ["shrink"], "compute": ["calculate", "work out"], "computer": ["machine", "system", "box"], "config": ["configuration", "settings"],
    "configuration": ["config", "settings"], "contain": ["have", "include", "mention", "hold"], "container": ["docker container", "ctr"],
    "containers": ["docker containers"], "containing": ["that contain", "with", "which contain", "having"], "contains": ["has", "includes", "mentions"],
    "contents": ["content"], "convert": ["turn", "change", "transform"], "copy": ["duplicate", "cp"], "count": ["tally", "count up"],
    "cpu": ["CPU", "processor"], "create": ["make", "generate", "set up"], "current": ["present"], "currently": ["at the moment", "right now", "presently"],
    "daily": ["every day", "once a day"], "database": ["db"], "delete": ["remove", "erase", "drop", "get rid of", "wipe", "discard"],
    "dependencies": ["deps", "requirements"], "determine": ["find out", "work out"], "difference": ["differences", "diff"],
    "differences": ["difference", "diff"], "different": ["distinct"], "directories": ["folders", "dirs"], "directory": ["folder", "dir"],
    "disable": ["deactivate"], "discard": ["throw away", "drop", "forget"], "disk": ["drive", "hard drive", "hdd"], "display": ["show", "print", "output"],
    "distinct": ["unique", "different"], "document": ["file"], "download": ["fetch", "get", "grab"], "drop": ["remove", "delete"],
    "duplicate": ["repeated", "double"], "duplicates": ["repeats", "dupes", "duplicated lines"], "each": ["every"], "edit": ["change", "modify"],
    "empty": ["blank"], "enable": ["activate"], "ending": ["finishing"], "entire": ["whole", "complete"], "environment": ["env"],
    "erase": ["delete", "remove", "wipe"], "every": ["each"], "everything": ["all of it", "all"], "execute": ["run", "launch"],
    "extension": ["suffix", "file extension", "ext"], "extract": ["unpack", "pull out"], "fetch": ["get", "download"], "field": ["column"],
    "file": ["document"], "files": ["documents"], "find": ["locate", "search for", "look up", "get", "look for"], "folder": ["directory", "dir"],
    "folders": ["directories", "dirs"], "follow": ["watch", "tail", "monitor"], "forever": ["for good"], "free": ["available", "unused"],
    "get": ["fetch", "show", "give me", "retrieve"], "give": ["show"], "hidden": ["dot", "invisible"], "host": ["server", "machine"],
    "hostname": ["host name", "machine name"], "hourly": ["every hour", "once an hour"], "identical": ["the same", "equal"], "image": ["img"],
    "including": ["with", "plus"], "insert": ["add", "put"], "inside": ["in", "within", "under"], "install": ["get", "set up", "put on"],
    "instead": ["rather"], "internet": ["net", "web"], "into": ["to", "in"], "ip": ["IP", "ip address"], "join": ["combine", "merge", "glue"],
    "kill": ["terminate", "quit"], "kubernetes": ["k8s"], "large": ["big", "huge"], "larger": ["bigger", "greater"], "largest": ["biggest"],
    "latest": ["newest", "most recent", "last"], "line": ["row"], "lines": ["rows"], "list": ["show", "display", "print", "give me"],
    "locate": ["find", "search for", "where is"], "location": ["place", "path"], "log": ["logs", "logfile", "log output"], "logfile": ["log file", "log"],
    "logs": ["log", "log output", "log messages"], "longest": ["lengthiest"], "lowercase": ["lower case", "small letters"],
    "machine": ["computer", "system", "box", "pc"], "make": ["create", "produce"], "many": ["much"], "matching": ["containing", "with", "that match"],
    "memory": ["RAM"], "merge": ["join", "combine", "bring in"], "minutes": ["mins", "min"],
    "modified": ["changed", "edited", "altered", "touched", "updated"], "monitor": ["watch", "observe"], "move": ["transfer", "relocate", "shift", "mv"],
    "movie": ["video", "film"], "named": ["called"], "need": ["want", "require"], "new": ["fresh", "brand new"], "newest": ["latest", "most recent"],
    "newline": ["line break"], "newlines": ["line breaks"], "occurrence": ["instance", "appearance", "match", "mention"],
    "occurrences": ["instances", "appearances", "matches", "mentions"], "old": ["outdated", "stale", "ancient"], "only": ["just"], "open": ["bring up"],
    "pack": ["bundle", "compress", "archive", "wrap up"], "package": ["program", "tool"], "packages": ["programs", "software"], "password": ["passwd", "pw"],
    "permanently": ["for good", "forever"], "permissions": ["perms", "access rights"], "photos": ["pictures", "pics", "images"],
    "picture": ["image", "photo", "pic"], "pictures": ["photos", "pics", "images"], "please": ["pls", "plz", "kindly"],
    "pods": ["kubernetes pods", "k8s pods"], "port": ["tcp port"], "print": ["show", "output", "display"], "process": ["task", "job"], "processes": ["procs"],
    "program": ["application", "app"], "programs": ["applications", "apps"], "project": ["code", "app"], "put": ["place", "store"],
    "quickly": ["fast"], "ram": ["memory", "RAM"], "reachable": ["up", "online", "alive"],
    "recursively": ["with all subfolders", "including subfolders", "and subfolders"], "remove": ["delete", "erase", "get rid of", "take out", "eliminate"],
    "rename": ["change the name of", "re-name"], "repeated": ["duplicate"], "replace": ["substitute", "swap", "exchange"], "repos": ["repositories"],
    "repository": ["repo"], "restart": ["reboot", "bounce", "start again", "relaunch", "re-start"], "retrieve": ["get", "fetch"], "row": ["line"],
    "rows": ["lines"], "run": ["execute", "launch"], "running": ["live", "up"], "save": ["write", "store", "keep"], "screenshot": ["screen shot"],
    "screenshots": ["screen shots"], "search": ["look", "grep", "scan"], "seconds": ["secs", "s"], "see": ["view", "check"], "semicolons": ["semi-colons"],
    "send": ["transfer", "copy"], "server": ["host", "box"], "service": ["daemon"], "set": ["put", "change"],
    "show": ["display", "print", "list", "output", "see", "get", "give me"], "shrink": ["compress", "make smaller"], "size": ["sizes"],
    "small": ["little", "tiny"], "smallest": ["tiniest", "littlest"], "sort": ["order", "arrange", "rank"], "sorted": ["ordered"],
    "split": ["cut", "divide", "break"], "start": ["launch", "fire up", "start up"], "starting": ["beginning"], "stop": ["halt", "shut down"],
    "store": ["save", "keep", "put"], "string": ["text"], "subdirectories": ["subfolders", "subdirs"],
    "subfolders": ["subdirectories", "sub-folders", "subdirs"], "sum": ["total", "add up"], "swap": ["exchange", "switch"],
    "tarball": ["archive", "tar file", "tar"], "tests": ["test suite", "unit tests"], "text": ["string"], "throw": ["chuck", "toss"],
    "total": ["overall"], "twice": ["two times"], "under": ["in", "below", "inside", "beneath"],
    "uninstall": ["remove", "delete", "take off"], "unique": ["distinct"], "unpack": ["extract", "decompress", "uncompress"], "update": ["refresh"],
    "upload": ["send", "transfer"], "uppercase": ["upper case", "capitals", "capital letters"], "usage": ["use", "consumption"], "user": ["account", "login"],
    "username": ["user name", "login name"], "users": ["accounts"], "uses": ["takes", "consumes", "needs"], "using": ["with"], "variable": ["var"],
    "variables": ["vars"], "verify": ["check", "make sure of"], "version": ["ver"], "video": ["movie", "clip", "film"], "videos": ["movies", "clips"],
    "virtualenv": ["venv", "virtual environment"], "want": ["would like", "need"], "watch": ["follow", "monitor", "observe", "keep an eye on"],
    "website": ["site", "web site"], "weekly": ["every week", "once a week"], "whitespace": ["white space", "blanks"], "whole": ["entire", "complete"],
    "within": ["inside", "in"], "without": ["excluding", "minus"], "word": ["term", "string"], "words": ["terms"], "write": ["save", "put", "store"],
    "zipped": ["compressed"],
}
# More of them, merged into WORDS.
MORE = {
    "account": ["user", "login"], "accounts": ["users"], "alive": ["up", "running", "responding"], "alone": ["only", "just"],
    "altogether": ["in total", "in all", "all together"], "annoying": ["irritating", "pesky"], "appear": ["occur", "show up", "turn up", "come up"],
    "appears": ["occurs", "shows up", "turns up", "comes up"], "append": ["stick", "put"], "apps": ["programs", "applications"], "asap": ["at once", "immediately"],
    "available": ["free", "left"], "battery": ["battery charge"], "beginning": ["starting", "that begin"], "begins": ["starts"], "below": ["under", "beneath", "in"],
    "broken": ["dead", "dangling", "faulty"], "browse": ["look through", "flip through"], "bundle": ["pack", "wrap"], "busy": ["loaded", "occupied"],
    "capital": ["upper case", "uppercase"], "chop": ["cut", "split"], "chosen": ["given", "picked"], "chuck": ["throw", "toss"],
    "close": ["shut"], "comments": ["remarks", "comment lines"], "complete": ["whole", "entire", "full"], "connect": ["log in", "hook up"],
    "connected": ["hooked up", "attached", "plugged in"], "connection": ["link"], "connections": ["links"], "consume": ["use", "eat"], "consumes": ["eats", "uses"],
    "contain": ["feature", "show"], "crash": ["failure", "breakdown"], "crashed": ["failed", "died", "broke down"], "credentials": ["login data"],
    "damaged": ["broken", "corrupt"], "decrease": ["lower", "reduce"], "delete": ["scrap", "trash", "ditch"], "deleted": ["removed", "erased", "gone"],
    "delimiter": ["separator", "divider"], "details": ["particulars", "full information", "specifics"], "disappear": ["go", "vanish"],
    "doubled": ["duplicate", "repeated"], "drive": ["disk"], "eat": ["use", "consume"], "eating": ["using", "hogging", "consuming"], "eats": ["uses", "hogs"],
    "empty": ["clear"], "ends": ["finishes", "stops"], "entries": ["items", "records", "lines"], "entry": ["item", "record", "line"], "error": ["failure", "fault"],
    "errors": ["failures", "error messages", "faults"], "exact": ["precise"], "exactly": ["precisely"], "exist": ["be there"], "exists": ["is there", "is present"],
    "failed": ["broken", "crashed"], "fast": ["quickly", "rapidly"], "final": ["last", "closing"], "finally": ["at last", "in the end"],
    "find": ["track down", "discover", "spot"], "fits": ["matches"], "fix": ["repair", "correct"], "former": ["previous", "old"], "fresh": ["new", "clean"],
    "full": ["complete", "entire"], "gigabytes": ["gigs", "GB"], "gone": ["removed", "deleted", "away"], "grab": ["fetch", "take", "get"],
    "header": ["heading", "header line", "title line"], "heading": ["header", "title"], "health": ["condition", "state"], "hog": ["use", "eat"],
    "huge": ["very large", "enormous", "giant"], "identical": ["matching"], "ignore": ["skip", "leave out", "disregard"],
    "ignoring": ["skipping", "leaving out", "disregarding"], "immediately": ["at once", "right away", "straight away"], "increase": ["raise"],
    "info": ["information", "details"], "information": ["info", "details", "data"], "installed": ["set up", "present"], "interval": ["period"],
    "invert": ["reverse", "flip"], "invisible": ["hidden"], "keep": ["retain", "preserve"], "keyword": ["word", "term"], "leading": ["initial"],
    "left": ["remaining", "over"], "length": ["size", "extent"], "listen": ["wait"], "listening": ["waiting", "open"], "long": ["lengthy"], "look": ["search"],
    "loses": ["drops"], "lowest": ["smallest", "least"], "matches": ["hits", "occurrences", "fits"], "maximum": ["highest value", "biggest value", "max", "highest"],
    "megabytes": ["MB", "megs"], "message": ["text", "note"], "messages": ["msgs"], "minimum": ["lowest value", "smallest value", "min", "lowest"],
    "mistake": ["error", "slip"], "mistakes": ["errors", "slips"], "names": ["titles"], "network": ["net"], "next": ["following", "subsequent"],
    "numbered": ["with numbers", "with line numbers"], "numbers": ["figures", "digits"], "occupied": ["used", "taken"], "occupies": ["uses", "takes up"],
    "older": ["more ancient", "staler"], "oldest": ["earliest", "most ancient"], "once": ["one time"], "outdated": ["old", "out of date", "stale"],
    "owner": ["proprietor", "person owning it"], "page": ["site"], "parts": ["pieces", "chunks", "portions"], "paste": ["glue", "stick"],
    "pause": ["suspend", "freeze"], "pdf": ["PDF"], "perform": ["do", "carry out", "execute"], "pics": ["photos", "pictures"], "pieces": ["parts", "chunks", "bits"],
    "plus": ["and also", "together with"], "previous": ["last", "former", "prior"], "problem": ["issue", "error", "trouble"],
    "problems": ["issues", "errors", "trouble"], "programme": ["program"], "quit": ["exit", "leave"], "random": ["arbitrary"], "read": ["view", "look at"],
    "ready": ["prepared"], "record": ["row", "line", "entry"], "records": ["rows", "lines", "entries"], "redo": ["repeat", "do again"],
    "reduce": ["lower", "shrink", "decrease"], "refresh": ["update", "renew"], "reload": ["re-read", "load again"], "remaining": ["left", "other"],
    "remotely": ["over the network"], "repeat": ["rerun"], "repeats": ["duplicates", "doubles"], "require": ["need"], "reverse": ["invert", "flip", "turn around"],
    "reversed": ["backwards", "upside down", "inverted"], "rid": ["free"], "rubbish": ["junk", "trash", "garbage"], "scan": ["search", "check"],
    "script": ["shell script", "program"], "secret": ["confidential", "private"], "section": ["part", "passage"], "separate": ["split"],
    "separately": ["on its own", "one at a time"], "separator": ["delimiter"], "settings": ["configuration", "config", "preferences"],
    "shorten": ["cut", "truncate", "trim"], "shuffle": ["mix", "scramble", "randomize"], "shut": ["close"], "similar": ["alike", "comparable"],
    "simultaneously": ["at the same time", "in parallel", "at once"], "single": ["one", "lone"], "site": ["website", "page"], "slow": ["sluggish", "laggy"],
    "software": ["programs", "packages"], "spaces": ["blanks", "space characters", "blank characters"], "specific": ["certain", "particular"],
    "speed": ["rate", "pace"], "spot": ["find", "detect"], "startup": ["boot", "start-up"], "state": ["status", "condition"], "status": ["state", "condition"],
    "stopped": ["halted", "not running", "down"], "storage": ["space", "disk space"], "stuff": ["things", "files"], "substitute": ["replace", "swap"],
    "surplus": ["extra"], "temp": ["temporary", "tmp"], "temporary": ["temp", "tmp"], "term": ["word"], "terminal": ["console", "shell"],
    "things": ["stuff", "items"], "timestamp": ["time stamp", "date"], "timestamps": ["time stamps", "dates"],
    "together": ["into one", "jointly"], "tool": ["program", "utility"], "topmost": ["first", "uppermost"], "tree": ["hierarchy"], "trim": ["cut", "strip"],
    "undo": ["take back", "roll back"], "unneeded": ["unnecessary", "unused", "superfluous"], "unused": ["unneeded", "idle"],
    "unwanted": ["superfluous", "unneeded"], "upper": ["top"], "used": ["taken", "occupied", "consumed"], "useless": ["needless", "pointless"],
    "vanish": ["disappear"], "view": ["see", "look at", "display"], "wanted": ["desired"], "wipe": ["erase", "clear"], "wrap": ["fold", "break"],
    "wrong": ["incorrect", "bad", "false"],
}
for _word, _others in MORE.items():
    WORDS[_word] = WORDS.get(_word, []) + _others
PHRASES = {k: v.split(", ") for k, v in (line.split(": ") for line in """
get rid of: remove, delete, throw out, throw away
most recent: newest, latest
disk space: space on the disk, storage, hard drive space, room on the disk
free space: room left, space left, available space
take up: use, need, occupy
takes up: uses, needs, occupies
number of: amount of, count of, quantity of
look for: search for, hunt for, find
search for: look for, hunt for
look at: check, inspect, have a look at
tell me: let me know, say
show me: let me see, give me, display
let me see: show me
switch to: change to, move to, hop to, go to
change to: switch to, move to
go to: change to, move to, navigate to, head to
go into: enter, step into, cd into, move into
cd into: go into, enter, change into
change into: go into, cd into
move into: go into
make a copy of: copy, duplicate, take a copy of
a copy of: one copy of, a duplicate of
back up: make a backup of, save a copy of
make a backup of: back up, create a backup of, take a backup of
rename the file: change the name of the file, give a new name to the file
last commit: latest commit, most recent commit, newest commit
last line: final line, bottom line
last lines: final lines, bottom lines
first line: top line, line one
first lines: top lines, leading lines
line by line: one line at a time
the whole: the entire, the complete
commit everything: check in everything, commit it all, commit all
commit all: check in all
all changes: every change, all edits, all modifications, all my changes
my changes: my edits, my work, what I changed, my modifications
with the message: with message, using the message, with the commit message, saying
the message: the text
the result: the output, the outcome, what comes out
the output: the result, what it prints
the results: the output, the outcome
the list: the listing
every file: each file, all files
all files: every file, each file, all of the files
all the files: every file, all files
each file: every file
the files: all files, all the files, my files
that contain: containing, that have, with, which have
that mention: mentioning, that contain, with
at the end: at the bottom, in the end
at the beginning: at the start, at the top
at the top: at the beginning, at the start
to the end of: to the bottom of, at the end of, onto the end of
in reverse order: backwards, reversed, the other way round
the other way round: in reverse order, reversed
current directory: current folder, working directory, present directory, cwd
current folder: current directory, working directory
working directory: current directory, current folder
this directory: this folder, the current directory, here
this folder: this directory, the current folder, here
home directory: home folder, home dir
home folder: home directory
parent directory: parent folder, directory above, folder above
parent folder: parent directory, folder above
and everything in it: with everything in it, with all its contents, contents included
in the background: as a background job, detached, in background
right now: at the moment, currently, now
at the moment: right now, currently
at boot: at startup, on boot, when the machine starts, at start-up
on boot: at boot, at startup
command line: terminal, shell
make sure: ensure, check
is running: runs, is up, is alive
are running: run, are up, are active
running processes: active processes, processes that run, tasks
case insensitive: ignoring case, without regard to case, in any case
ignoring case: in any case, case insensitively, whatever the case
one after the other: one by one
one per line: one on each line, each on its own line
per line: on each line, in every line
as well: too, also
so that: such that
do not: don't
is not: isn't
are not: aren't
does not: doesn't
I am: I'm, im
it is: it's
what is: what's
that are: which are
that is: which is
that were: which were
in the last: in the past, within the last, during the last
in the past: in the last, within the past
larger than: bigger than, greater than, of more than, over
bigger than: larger than, over, more than
smaller than: less than, under, below
more than: over, above
less than: under, below, fewer than
sorted by: ordered by, in order of, arranged by
ordered by: sorted by, in order of
separated by: delimited by, split by, divided by
a new: another, a fresh, a brand new, one more
an empty: a blank, a new empty
new folder: fresh folder, new directory
the contents of: what is in, what's in, the content of, everything in
what is in: what's in, the contents of, what's inside
what's in: the contents of, what is inside
on port: at port, using port, over port
log file: logfile, log
zip file: zip archive, zip
zip archive: zip file, zip
ssh key: key for ssh, SSH key
environment variable: env var, env variable, shell variable
environment variables: env vars, env variables
file name: filename, name
file names: filenames, names
source code: code, sources
write it to: save it to, put it in, store it in
save it to: write it to, put it in, store it as, save it in
save it as: store it as, write it to, call it
and save: and store, and write
and then: then, and after that, afterwards
after that: afterwards, then, next
and show: and display, and print, and list
and delete: and remove, and erase, and get rid of
and remove: and delete, and get rid of
and run: and execute, and launch
and start: and launch, and fire up
move it: put it, shift it, transfer it
move them: put them, shift them, transfer them
copy it: duplicate it, put a copy of it
delete it: remove it, get rid of it, erase it
delete them: remove them, get rid of them, erase them
remove it: delete it, get rid of it
open it: bring it up
run it: execute it, launch it
unzip it: extract it, unpack it
extract it: unpack it
zip it: compress it to a zip, make a zip of it
a lot of: many, lots of, plenty of
lots of: a lot of, many
how much: what amount of
how big is: what is the size of, how large is, what size is
how large is: how big is, what is the size of
how many lines: what number of lines
how many files: what number of files
is there: do I have, do we have, have we got
are there: do we have, do I have, have we got, exist
do I have: are there, have I got
what are: which are, what're
which files: what files, the files which
what kind of: what sort of, which kind of, what type of
what type of: what kind of, what sort of
on the screen: on screen, in the terminal, to the terminal
on screen: in the terminal, on my screen
on my machine: on this machine, on my computer, on this box, on my system
on this machine: on my machine, on this computer, here, on this box
on this computer: on this machine, on my computer, on my pc
this machine: this computer, my computer, this box, this system
my computer: this machine, my pc, this box
this computer: my machine, this box, my pc
this project: this repo, my project, the project here
the last week: the past week, the past seven days, the last 7 days
the last hour: the past hour, the past 60 minutes
the last day: the past day, the past 24 hours, the last 24 hours
today's date: the current date, the date of today
within the last: during the past, in the past, over the last
over the last: in the last, during the last
older than: that are older than, not newer than, from more than
newer than: more recent than, younger than, fresher than
with the extension: with extension, ending in, with the suffix, of type
ending in: ending with, that end in, with the extension, that end with
ending with: ending in, that end with, which end in
starting with: beginning with, that start with, that begin with, whose first letters are
beginning with: starting with, that begin with
start with: begin with
starts with: begins with
end with: end in, finish with
ends with: ends in, finishes with
that start with: starting with, that begin with, beginning with
that end with: ending in, ending with, that end in
that don't contain: without, that lack, not containing, that do not have, free of
that do not contain: without, that lack, not containing, which don't have
not containing: without, that don't contain, which lack
that contains: containing, with, which has, having
containing the word: with the word, that contain the word, having the word, in which there is the word
the word: the string, the text, the term
the text: the string, the phrase, the words
the string: the text, the word
at least: no less than, a minimum of
at most: no more than, a maximum of, up to
from the start: from the beginning, from the top
from the end: from the bottom, counted from the end
except for: other than, apart from, but for
apart from: except, except for, other than
other than: except, except for, apart from
everything except: all but, everything but, all except, anything but
everything but: all but, everything except, all except
all but: everything but, everything except, all except
instead of: rather than, in place of
rather than: instead of
only once: just once, a single time, one time only
just once: only once, a single time
more than once: several times, repeatedly, twice or more
several times: more than once, multiple times
at the same time: simultaneously, in one go
in one go: at once, in a single step, with one command
without asking: without confirmation, no questions asked, without prompting
ask me before: ask before, check with me before, prompt before, confirm with me before
before deleting: before removing, before erasing
before overwriting: before replacing
as root: with root rights, as superuser, with sudo, as administrator
by size: by how big they are, according to size, by file size
by name: by their names, alphabetically, according to the name
by date: by time, by when they changed, according to date, chronologically
by time: by date, according to time
newest first: latest first, most recent first, the newest on top, starting with the newest
oldest first: starting with the oldest, the oldest on top
largest first: biggest first, biggest on top, from big to small, in descending size
biggest first: largest first, largest on top, from big to small
smallest first: from small to big, starting with the smallest
in descending order: descending, from high to low, highest first
in ascending order: ascending, from low to high, lowest first
in alphabetical order: alphabetically, from a to z, sorted by name
with line numbers: with numbered lines, with the line numbers, numbering the lines, and line numbers
line numbers: numbers of the lines
blank lines: empty lines, lines with nothing in them
empty lines: blank lines, lines that are empty, lines with nothing on them
duplicate lines: repeated lines, double lines, lines that repeat, lines that occur twice
trailing whitespace: whitespace at the ends of lines, spaces at line ends
first column: leftmost column, column one, column 1
second column: column two, column 2
third column: column three, column 3
last column: rightmost column, final column
first word: leading word, word one
upper case: capital letters, capitals, uppercase
lower case: small letters, lowercase
capital letters: capitals, upper case
side by side: next to each other, in parallel
word count: number of words, count of words
line count: number of lines, count of lines
file size: size of the file
read only: read-only, write protected
for everyone: for everybody, for all users, for all
for everybody: for everyone, for all users
make executable: mark as executable
log in to: connect to, sign in to
log into: connect to, sign in to, get onto
sign in to: log in to, connect to
connect to: log in to, log into, get onto, open a session on
name it: call it
call it: name it
named after: called after
and call it: and name it, under the name, named, with the name
with the name: named, called, under the name
keep an eye on: watch, monitor, keep watching
figure out: find out, work out
find out: figure out, determine, check
check if: see if, check whether, find out if, tell me if
check whether: see whether, check if, find out whether
see if: check if, check whether, find out if
tell me if: say if, let me know if, check if, check whether
tell me whether: let me know whether, check whether
let me know if: tell me if, tell me whether
I want to see: let me see, I'd like to see, show me
which process: what process, which program
what process: which process, what program
which program: which process, what program
what is using: what uses, who is using, which program uses
is using: uses, occupies, is taking up
is listening on: listens on, uses, occupies, sits on
are listening: listen, are waiting for connections
memory usage: memory use, RAM usage, memory consumption
cpu usage: cpu load, processor usage, CPU use
disk usage: disk use, used disk space, how full the disk is
free memory: available memory, unused memory, memory left
how full: how used up
shut down: power off, turn off, switch off
turn off: switch off, power off
switch off: turn off
turn into: convert to, change into
turned into: converted to, changed into
convert to: change to, turn into
put together: combine, join
into one file: into a single file, together in one file, all into one file
into a single file: into one file, together in one file
take out: remove, cut out
throw away: delete, discard, get rid of
throw out: delete, remove, get rid of
kick out: remove, throw out
clean up: tidy up, clear up
free up: make free, reclaim
does not exist: doesn't exist, is not there, isn't there, is missing
doesn't exist: does not exist, isn't there, is missing
already exists: is already there, exists already
still running: still up, still alive, still active
not running: down, stopped, not up
start at boot: start on boot, come up at boot, start with the system
starts at boot: starts on boot, comes up with the machine, starts with the system
every day at: daily at, each day at
every morning at: each morning at
every hour: hourly, once an hour, each hour
every night: each night, nightly
every minute: each minute, once a minute
log messages: log entries, log lines
error messages: errors, error lines
the logs of: the log of, the logs for, the log output of, logs from
the log of: the logs of, the log for
the latest version: the newest version, the current version
who is logged in: who's logged in, which users are logged in, who is on
logged in: signed in, logged on
commit message: message of the commit, message
last commit message: message of the last commit, latest commit message
uncommitted changes: changes that aren't committed, local changes, changes I haven't committed
local changes: uncommitted changes, my changes
new branch: fresh branch, additional branch
main branch: branch main
working copy: working tree, checkout
in a new: in another, into a new
in the folder: in the directory, inside the folder, within the folder
in the directory: in the folder, inside the directory, within the directory
in the file: inside the file, within the file, in the document
inside the file: in the file, within the file
from the file: out of the file, from the document
to the file: into the file, onto the file
of the file: in the file, of the document
in this folder: in here, right here, in this directory, here
in here: in this folder, right here, here
in this directory: in this folder, in here, here
and its subfolders: and subfolders, including subfolders, and everything below, and all folders below
including subfolders: with subfolders, and subfolders, and everything below it, recursively
and everything below: and its subfolders, including subfolders, recursively
all of them: them all, every one of them, each of them
one at a time: one by one, individually
one by one: one at a time, individually
over and over: again and again, repeatedly
again and again: over and over, repeatedly
thank you: thanks
zipped up: zipped, packed
pack up: pack, bundle up, wrap up
zip up: zip, pack into a zip
open up: open
send over: send, transfer
copy over: copy, transfer
move over: move
look inside: look into, peek into, see what is in
look into: look inside, check, inspect
peek into: look into, look inside
have a look at: look at, check, take a look at
take a look at: look at, have a look at, check
go back to: return to, get back to, switch back to
get back: recover, restore, retrieve
bring back: restore, recover, get back
roll back: undo, take back
take back: undo, roll back
go through: walk through, search through
read through: read, go through
go up: move up, step up
one level up: one folder up, up one level, to the parent folder
up one level: one level up, one directory up
swap out: replace, exchange
fill in: enter, put in
leave out: omit, skip, exclude, without
skip the first: leave out the first, omit the first, without the first
the rest: the remainder, what remains, everything else
what remains: the rest, what is left
the difference between: the differences between, what differs between, how do I compare
what changed: what has changed, what is different, the changes
has changed: changed, was changed, got changed, is different
was changed: was modified, was edited, changed
were changed: were modified, were edited, changed
was modified: was changed, was edited
were modified: were changed, were edited, changed
last modified: last changed, last edited, modified last
changed today: modified today, edited today, from today, that I changed today
modified today: changed today, edited today, from today
belongs to: is owned by
belong to: are owned by
belonging to: owned by, of
owned by: belonging to, that belong to, of""".strip().splitlines())}
# Not replaced before these words ("check out", "set up", "home directory") ...
NOT_BEFORE = {"check": {"out", "in", "if", "whether", "that", "how", "for"}, "set": {"up", "of"}, "home": {"directory", "folder", "dir"}, "clean": {"build", "install", "rebuild", "up"}, "change": {"to", "into", "directory", "log", "back"}, "start": {"of", "by", "with", "from", "at", "over"},
              "end": {"of"}, "open": {"port", "ports", "files", "connections", "sockets", "the", "up"}, "free": {"up", "memory", "of"}, "run": {"npm", "cargo", "make", "git", "pip", "apt", "docker", "kubectl", "black", "pytest", "clippy", "ls"}, "make": {"sure", "it", "clean", "test", "install", "up", "them", "me", "backups"},
              "put": {"back", "away", "together"}, "take": {"a", "care"}, "get": {"rid", "back", "out", "into", "in", "inside", "to", "me", "ready"}, "give": {"it", "him", "her", "them", "me", "everyone", "everybody", "back"}, "see": {"if", "whether", "how", "who"}, "many": {"times"}, "text": {"files", "file"},
              "print": {"working"}, "log": {"out", "in", "into"}, "current": {"time"}, "all": {"of", "the", "my", "those", "these", "but"}, "every": {"single", "other"}, "host": {"name", "key"}, "package": {"manager", "lists", "list", "index", "cache"}, "write": {"permission", "access", "rights"},
              "execute": {"permission", "permissions", "rights", "bit"}, "build": {"folder", "directory", "context"}, "image": {"files"}, "add": {"up", "and", "everything", "all"}, "want": {"it", "the", "all", "a", "my"}, "drop": {"shadow"}, "again": {"and"},
              "process": {"id", "ids", "tree", "substitution"}, "service": {"file", "unit"}, "split": {"into"}, "order": {"of"}, "count": {"of"}, "search": {"and"}, "everything": {"else", "but", "except", "that"}}
# ... nor after these.
ARTICLES = {"a", "an", "the", "my", "this", "that", "its", "their", "one", "new", "last", "each", "every", "no", "in", "of", "safety", "backup", "clean", "release"}
TOOLS = {"git", "docker", "npm", "cargo", "pip", "apt", "make", "systemctl", "kubectl", "compose", "brew", "dnf", "helm", "yarn", "go", "ufw"}
NOT_AFTER = {w: ARTICLES for w in """copy move list count change print show display commit run build make sort search get check start stop kill open save write put download upload split
             install update convert send compress extract drop set merge join edit see watch follow restart compare delete remove find create duplicate replace""".split()}
NOT_AFTER.update({"file": {"log", "zip", "env", "to"}, "text": {"plain"}, "server": {"web", "http", "dev", "development", "the"}, "image": {"docker"}, "line": {"command", "one"}, "lines": {"log"}, "group": {"user"}})
