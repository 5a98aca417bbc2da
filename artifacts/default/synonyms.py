"""Words and phrases that mean the same in a request to a shell, for generate.py.

What always holds: a word keeps its command: "stop" is never "kill", "undo" never "revert", "enable" never "turn on"; NOT_BEFORE and
NOT_AFTER say where a word means something else ("check out", "the list", "trailing space").
"""

WORDS = {
    "add": ["put"], "address": ["addr"], "afterwards": ["after that", "thereafter", "later"], "again": ["once more", "one more time"],
    "all": ["all of the", "all the", "every one of the"], "allow": ["permit"], "alphabetically": ["in alphabetical order", "by name", "from a to z"],
    "append": ["add", "attach", "tack"], "archive": ["tarball", "package"], "archives": ["archive files"], "audio": ["sound"], "average": ["mean"],
    "backup": ["safety copy", "copy"], "backwards": ["in reverse", "from last to first"], "beginning": ["start"], "big": ["large", "huge"],
    "bigger": ["larger", "greater"], "biggest": ["largest", "heaviest"], "blank": ["empty"], "block": ["deny", "forbid", "close"],
    "build": ["compile", "make"], "calculate": ["compute", "work out"], "called": ["named"], "change": ["alter", "modify", "switch"],
    "changed": ["modified", "edited", "altered", "updated"], "changes": ["edits", "modifications", "work"], "characters": ["chars", "letters"],
    "check": ["see", "verify", "inspect"], "clean": ["clear", "tidy"], "clear": ["empty", "clean", "wipe"], "column": ["col"], "columns": ["fields", "cols"],
    "combine": ["merge", "put together"], "commits": ["changesets", "revisions"], "compare": ["diff", "contrast"], "compile": ["build", "make"],
    "compress": ["shrink"], "compute": ["calculate", "work out"], "computer": ["machine", "system", "box"], "config": ["configuration", "settings"],
    "configuration": ["config", "settings"], "contain": ["have", "include", "mention", "hold"], "container": ["docker container", "ctr"],
    "containers": ["docker containers"], "containing": ["that contain", "with", "which contain", "having"], "contains": ["has", "includes", "mentions"],
    "contents": ["content"], "convert": ["turn", "change", "transform"], "copy": ["duplicate", "cp"], "count": ["tally", "count up"],
    "cpu": ["CPU", "processor"], "create": ["make", "generate", "set up"], "current": ["present"], "currently": ["at the moment", "right now", "presently"],
    "daily": ["every day", "once a day"], "database": ["db"], "delete": ["remove", "erase", "drop", "get rid of", "wipe", "discard"],
    "dependencies": ["deps", "requirements"], "determine": ["find out", "work out"], "difference": ["differences", "diff"],
    "differences": ["difference", "diff", "changes"], "different": ["distinct"], "directories": ["folders", "dirs"], "directory": ["folder", "dir"],
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
    "kill": ["end", "terminate", "quit"], "kubernetes": ["k8s"], "large": ["big", "huge"], "larger": ["bigger", "greater"], "largest": ["biggest"],
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
    "program": ["application", "app"], "programs": ["applications", "apps"], "project": ["code", "app"], "put": ["place", "store", "add", "drop"],
    "quickly": ["fast"], "ram": ["memory", "RAM"], "reachable": ["up", "online", "alive"],
    "recursively": ["with all subfolders", "including subfolders", "and subfolders"], "remove": ["delete", "erase", "get rid of", "take out", "eliminate"],
    "rename": ["change the name of", "re-name"], "repeated": ["duplicate"], "replace": ["substitute", "swap", "exchange"], "repos": ["repositories"],
    "repository": ["repo"], "restart": ["reboot", "bounce", "start again", "relaunch", "re-start"], "retrieve": ["get", "fetch"], "row": ["line"],
    "rows": ["lines"], "run": ["execute", "launch"], "running": ["active", "live", "up"], "save": ["write", "store", "keep"], "screenshot": ["screen shot"],
    "screenshots": ["screen shots"], "search": ["look", "grep", "scan"], "seconds": ["secs", "s"], "see": ["view", "check"], "semicolons": ["semi-colons"],
    "send": ["transfer", "copy"], "server": ["host", "box"], "service": ["daemon"], "set": ["put", "change"],
    "show": ["display", "print", "list", "output", "see", "get", "give me"], "shrink": ["compress", "make smaller"], "size": ["sizes"],
    "small": ["little", "tiny"], "smallest": ["tiniest", "littlest"], "sort": ["order", "arrange", "rank"], "sorted": ["ordered"],
    "split": ["cut", "divide", "break"], "start": ["launch", "fire up", "start up"], "starting": ["beginning"], "stop": ["end", "halt", "shut down"],
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
zip it: compress it to a zip, make a zip of it""".strip().splitlines())}
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
