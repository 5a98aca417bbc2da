"""Whether two shell commands say the same, for commands that cannot be run here.

Both are split into words as a shell would, and every simple command is put into one form: a name, options without an order, and
arguments in order. Long options become short ones where SYNONYMS says so; `sudo` and the options in HARMLESS are dropped. Nothing
is guessed: what no table names must be equal word for word. Commands in LITERAL keep the order of all their words.
"""

import re
import shlex

OPERATORS = ("|", "||", "&&", ";", "&", "<", ">", ">>", "(", ")", "<<<", "|&", ">&", ";;")
# The order of their words means something, or their options are words after one dash.
LITERAL = {"find", "ffmpeg", "ffprobe", "convert", "magick", "mogrify", "identify", "openssl", "echo", "printf", "test", "[", "jq",
           "nmcli", "ip", "for", "while", "if", "export", "alias", "date", "tree", "expr", "java", "go", "xargs"}  # fmt: skip
NAMES = {"python": "python3", "pip3": "pip", "apt-get": "apt", "nodejs": "node", "vi": "vim"}
# Options that change how a command asks or pages, not what it does.
HARMLESS = {
    "apt": {"-y"}, "dnf": {"-y"}, "journalctl": {"--no-pager"}, "systemctl": {"--no-pager"}, "git": {"--no-pager"},
}  # fmt: skip
SYNONYMS = {
    "docker": {"--all": "-a", "--force": "-f", "--follow": "-f", "--detach": "-d", "--interactive": "-i", "--tty": "-t",
               "--publish": "-p", "--volume": "-v", "--env": "-e", "--tag": "-t", "--quiet": "-q", "--output": "-o", "-n": "--tail",
               "--file": "-f", "--volumes": "-v"},
    "kubectl": {"--namespace": "-n", "--all-namespaces": "-A", "--output": "-o", "--filename": "-f", "--follow": "-f",
                "--container": "-c", "--stdin": "-i", "--tty": "-t", "--selector": "-l", "--previous": "-p", "--watch": "-w"},
    "git": {"--message": "-m", "--all": "-a", "--force": "-f", "--verbose": "-v"},
    "rsync": {"--archive": "-a", "--verbose": "-v", "--compress": "-z", "--dry-run": "-n", "--recursive": "-r", "--human-readable": "-h"},
    "ssh": {}, "scp": {}, "tar": {"--create": "-c", "--extract": "-x", "--gzip": "-z", "--file": "-f", "--verbose": "-v"},
    "curl": {"--location": "-L", "--head": "-I", "--output": "-o", "--remote-name": "-O", "--silent": "-s", "--request": "-X",
             "--data": "-d", "--header": "-H", "--user": "-u", "--show-error": "-S", "--fail": "-f", "--continue-at": "-C"},
    "wget": {"--continue": "-c", "--output-document": "-O", "--quiet": "-q"},
    "journalctl": {"--unit": "-u", "--follow": "-f", "--boot": "-b", "--priority": "-p", "--lines": "-n", "--dmesg": "-k",
                   "-S": "--since", "-U": "--until", "--grep": "-g"},
    "systemctl": {"-t": "--type"},
    "pip": {"--upgrade": "-U", "--requirement": "-r", "--yes": "-y"},
    "npm": {"--save-dev": "-D", "--global": "-g", "--yes": "-y"},
    "cargo": {"--release": "-r", "--package": "-p", "--features": "-F"},
    "make": {"--dry-run": "-n", "--just-print": "-n", "--jobs": "-j", "--directory": "-C"},
    "ls": {"--all": "-a", "--almost-all": "-A", "--human-readable": "-h", "--recursive": "-R", "--reverse": "-r"},
    "df": {"--human-readable": "-h", "--inodes": "-i"}, "du": {"--human-readable": "-h", "--summarize": "-s", "--max-depth": "-d"},
    "free": {"--human": "-h", "--mega": "-m"}, "ps": {}, "head": {"--lines": "-n"}, "tail": {"--lines": "-n", "--follow": "-f"},
    "useradd": {"--create-home": "-m", "--shell": "-s", "--groups": "-G"}, "userdel": {"--remove": "-r"},
    "usermod": {"--lock": "-L", "--append": "-a", "--groups": "-G", "--shell": "-s"}, "chown": {"--recursive": "-R"},
    "chgrp": {"--recursive": "-R"}, "chmod": {"--recursive": "-R"}, "rm": {"--recursive": "-r", "--force": "-f", "-R": "-r"},
    "cp": {"--recursive": "-r", "--archive": "-a", "-R": "-r"}, "grep": {"--ignore-case": "-i", "--recursive": "-r", "--line-number": "-n"},
    "shuf": {"--head-count": "-n", "--input-range": "-i"}, "watch": {"--interval": "-n"}, "ping": {"--count": "-c"},
    "ss": {"--listening": "-l", "--tcp": "-t", "--udp": "-u", "--numeric": "-n", "--processes": "-p"},
    "zip": {"--encrypt": "-e", "--recurse-paths": "-r"}, "lsblk": {"--fs": "-f"}, "crontab": {}, "renice": {"--priority": "-n", "--pid": "-p"},
}  # fmt: skip
# Options that take the next word; with a subcommand where it decides.
VALUES = {
    "docker": "--tail --name -p -v -e --network -o -w -u --filter --format", "docker build": "-t -f", "docker run": "-p -v -e -w -u",
    "docker compose": "-p", "kubectl": "-n -o -c -l --replicas --sort-by --tail --since --context --image --port", "kubectl apply": "-f",
    "kubectl create": "-f", "kubectl delete": "-f", "git": "-m -C --depth -b --since --until --author --grep", "rsync": "-e --exclude --include --bwlimit",
    "ssh": "-p -i -l -L -R -D -J -o", "scp": "-P -i -o -l", "sftp": "-P -i", "ssh-keygen": "-t -b -C -f -R", "tar": "-f -C --exclude",
    "curl": "-o -X -d -H -u -w -C -F --oauth2-bearer --json -x --retry -m", "wget": "-O -P -o",
    "journalctl": "-u -p -n --since --until -g --vacuum-size --vacuum-time", "systemctl": "--type --state -p", "pip": "-r -t -i",
    "cargo": "-p -F --bin --example --features", "make": "-C -f -j", "du": "-d", "df": "-t", "head": "-n -c", "tail": "-n -c",
    "useradd": "-s -G -g -d -u -c", "usermod": "-s -G -g -d -l -c", "shuf": "-i -n", "watch": "-n", "ping": "-c -i -W",
    "ps": "-u -U -p -o -eo --sort -C", "lsof": "-p -u", "pgrep": "-u", "pkill": "-u", "crontab": "-u", "renice": "-p",
    "traceroute": "-m", "cmake": "-S -B -G", "pytest": "-k --maxfail", "timeout": "-s -k", "last": "-n", "tcpdump": "-i -w -r -c",
    "host": "-t", "dig": "-t -p", "nmap": "-p", "chsh": "-s", "gpasswd": "-a -d", "split": "-b -l",
}  # fmt: skip
# `-n5` is `-n 5` for these, and `-20` is `-n 20` for head and tail.
GLUED = re.compile(r"^(-[a-zA-Z])=?(\d\S*|https?:\S+)$")


def split(command):
    """The words and operators of a command line; None if its quotes do not close."""
    lexer = shlex.shlex(command.strip(), posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return None


def simple(words):
    """One simple command in its form."""
    while words and words[0] == "sudo" and len(words) > 1 and not words[1].startswith("-") and words[1] != "su":
        words = words[1:]
    if not words:
        return ()
    name = words[0].rsplit("/", 1)[-1] if words[0].startswith("/") else words[0]
    rest = words[1:]
    if name == "docker-compose":
        name, rest = "docker", ["compose", *rest]
    name = NAMES.get(name, name)
    if name == "python3" and rest[:2] == ["-m", "pip"]:
        name, rest = "pip", rest[2:]
    if name == "service" and len(rest) == 2:
        name, rest = "systemctl", [rest[1], rest[0]]
    if name in LITERAL or "=" in name:
        return (name, *rest)
    subcommand = next((w for w in rest if not w.startswith("-")), "")
    values = set(VALUES.get(name, "").split()) | set(VALUES.get(f"{name} {subcommand}", "").split())
    synonyms, harmless = SYNONYMS.get(name, {}), HARMLESS.get(name, set())
    options, arguments, queue = [], [], list(rest)
    while queue:
        word = queue.pop(0)
        if word == "--" and name in ("kubectl", "docker", "git", "npm"):
            arguments += [word, *queue]
            break
        if name == "ssh" and arguments and not word.startswith("-"):
            arguments.append(form(" ".join([word, *queue])))
            break
        if name == "tar" and not options and not arguments and re.fullmatch(r"[cxtrvzjJfpk]+", word):
            word = "-" + word
        if name in ("head", "tail") and re.fullmatch(r"-\d+", word):
            queue[:0] = ["-n", word[1:]]
            continue
        glued = GLUED.match(word)
        if glued and not word.startswith("--") and name not in ("kill", "shutdown"):
            queue[:0] = [glued[1], glued[2]]
            if glued[1] not in values:
                options.append(word)
                del queue[:2]
            continue
        if word.startswith("--") and "=" in word:
            option, value = word.split("=", 1)
            option = synonyms.get(option, option)
            options.append(f"{option} {value}")
            continue
        if word.startswith("--") or (word.startswith("-") and word in values):
            option = synonyms.get(word, word)
            if word in values or option in values:
                option += " " + (queue.pop(0) if queue else "")
            if option not in harmless:
                options.append(option)
            continue
        if word.startswith("-") and len(word) > 1 and not re.fullmatch(r"-[\d.]+", word):
            letters = [f"-{c}" for c in word[1:]] if re.fullmatch(r"-[a-zA-Z0-9]+", word) else [word]
            for letter in letters:
                option = synonyms.get(letter, letter)
                if (letter in values or option in values) and letter == letters[-1] and queue:
                    option += " " + queue.pop(0)
                if option not in harmless:
                    options.append(option)
            continue
        arguments.append(word)
    return (name, *sorted(options), *arguments)


def form(command):
    """The command line in its form: equal forms say the same."""
    words = split(command)
    if words is None:
        return " ".join(command.split())
    parts, current = [], []
    for word in words:
        if word in OPERATORS:
            parts += [simple(current), word]
            current = []
        else:
            current.append(word)
    parts.append(simple(current))
    return repr([p for p in parts if p])


def same(left, right):
    """Whether two command lines say the same."""
    return form(left) == form(right)
