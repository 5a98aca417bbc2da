"""Runs shell commands where they can do no harm, and says what they did.

`Sandbox.effect` runs one command in a fresh copy of a tree and returns its output and the tree afterwards. What keeps it harmless:

- It runs in namespaces of its own (user, mounts, processes, network: `enter`). Every file system there is read-only except one small
  one in memory, which holds the tree; there is no network, and no process outside can be seen or stopped.
- Its PATH holds only the programs in PROGRAMS, its environment nothing of ours, its input is empty.
- Time, memory, file size and output are limited.
- `refusal` names commands that are not run at all: sudo, devices, absolute paths, ways out of the tree.

Where namespaces cannot be had, `enter` says so, and only commands from our own files (`trusted`) are run.
"""

import bz2
import ctypes
import gzip
import hashlib
import io
import lzma
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import compare
import trees

DAY = trees.DAY
PROGRAMS = """[ awk base64 basename bash bc bunzip2 bzip2 cat chmod cmp column comm command cp cut date dd diff dirname du echo env expand expr
false file find fold git grep egrep fgrep gunzip gzip head iconv id join jq ln ls md5sum mkdir mktemp mv nl numfmt od paste perl printenv
printf pwd readlink realpath rev rm rmdir sed seq sh sha1sum sha256sum shasum shuf sleep sort split stat tac tail tar tee test touch tr
true truncate uniq unlink unxz unzip wc which xargs xxd xz yes zcat zgrep zip zipinfo zless less zstd""".split()
TOP = "bin|boot|dev|etc|home|lib|lib64|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var|work|data|volume1"
SAFE_DEVICES = re.compile(r"/dev/(null|zero|urandom|stdin|stdout|stderr)\b")
SECONDS = 30  # by the clock, so that a busy machine changes nothing; of the CPU, CPU_SECONDS
CPU_SECONDS = 5
OUTPUT_BYTES = 1 << 20
TEMPLATES = 40  # trees prepared for single requests that are kept at a time: all of them would fill the box
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8", "TZ": "UTC", "USER": "nora", "GIT_PAGER": "cat", "PAGER": "cat", "GIT_EDITOR": "true", "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TEMPLATE_DIR": "", "GIT_AUTHOR_NAME": "Ada Pine", "GIT_AUTHOR_EMAIL": "ada@example.org", "GIT_COMMITTER_NAME": "Ada Pine",
    "GIT_COMMITTER_EMAIL": "ada@example.org", "GIT_CONFIG_COUNT": "3", "GIT_CONFIG_KEY_0": "init.defaultBranch",
    "GIT_CONFIG_VALUE_0": "main", "GIT_CONFIG_KEY_1": "safe.directory", "GIT_CONFIG_VALUE_1": "*", "GIT_CONFIG_KEY_2": "advice.diverging",
    "GIT_CONFIG_VALUE_2": "false",
}  # fmt: skip
GIT_STATE = r"""git rev-parse -q --is-inside-work-tree >/dev/null 2>&1 || exit 0
git symbolic-ref -q HEAD || git rev-parse HEAD; git config --local --list | sort | grep -v '^core\.'
git for-each-ref --format='%(refname) %(objecttype) %(upstream)' | while read -r ref rest; do
  echo "$ref $rest"; git log -n 60 --format='%s|%T|%an' "$ref" --; done
git log --format='HEAD %s|%T|%an' -n 60; git stash list --format=%s; git ls-files -s; git worktree list | wc -l
[ -d .remote.git ] && git --git-dir=.remote.git for-each-ref --format='remote %(refname) %(tree)%(*tree)'; true"""


def enter():
    """Moves this process into namespaces of its own by starting it again there; None if it is there, or why it cannot be."""
    if os.environ.get("JUDGE_INSIDE") == "1":
        return None
    unshare = shutil.which("unshare")
    flags = ["--user", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    if not unshare or subprocess.run([unshare, *flags, "true"], capture_output=True).returncode != 0:
        return "this system gives no namespaces (unshare)"
    os.execve(unshare, [unshare, *flags, sys.executable, *sys.argv], {**os.environ, "JUDGE_INSIDE": "1"})


def seal(box):
    """Makes every file system read-only, except one in memory at `box`."""
    libc = ctypes.CDLL(None, use_errno=True)

    class Attributes(ctypes.Structure):
        _fields_ = [(n, ctypes.c_uint64) for n in ("attr_set", "attr_clr", "propagation", "userns_fd")]

    read_only, recursive, here = Attributes(1, 0, 0, 0), 0x8000, -100
    if libc.syscall(442, here, b"/", recursive, ctypes.byref(read_only), ctypes.sizeof(read_only)) != 0:
        raise OSError(ctypes.get_errno(), "mount_setattr: cannot make the file systems read-only")
    if libc.mount(b"box", str(box).encode(), b"tmpfs", 6, b"size=512m,mode=755") != 0:  # no set-uid programs, no devices
        raise OSError(ctypes.get_errno(), "mount: cannot mount the box")


def refusal(command):
    """Why a command is not run at all, or None."""
    text = SAFE_DEVICES.sub("DEVICE", command)
    if re.search(r"\bsudo\b|\bsu\b|\bdoas\b", text):
        return "it asks for another user"
    bare = {"/", "/*", "/."} & set(compare.split(text) or [])
    if bare or re.search(rf"(^|[\s'\"=<>:(])/({TOP})(/|\b)", text):
        return "it names an absolute path"
    if re.search(r"(^|[\s'\"=/<>(])\.\.(/|$|[\s'\")])", text) or "~+" in text or re.search(r"(^|\s)~[a-z-]", text):
        return "it names a path outside the tree"
    return None


class Sandbox:
    """A folder for trees, and the commands run in them."""

    def __init__(self, box, sealed):
        self.box, self.sealed = Path(box), sealed
        if sealed:
            seal(self.box)
        self.home = self.box / "home"
        self.bin = self.box / "bin"
        self.bin.mkdir()
        (self.box / "scratch").mkdir()
        self.programs = set()
        for name in PROGRAMS:
            if found := shutil.which(name):
                (self.bin / name).symlink_to(os.path.realpath(found) if name == "git" else found)
                self.programs.add(name)
        self.environment = {**ENVIRONMENT, "PATH": f"{self.bin}:{self.home / 'bin'}", "HOME": str(self.home), "PWD": str(self.home),
                            "TMPDIR": str(self.box / "scratch")}  # fmt: skip
        self.bash = shutil.which("bash")
        self.templates, self.states, self.effects = {}, {}, {}
        self.made = 0  # trees so far
        self.ready = None  # the tree that lies in the home folder, untouched
        self.now = int(time.time()) // DAY * DAY

    def template(self, kind, variant, setup):
        """The folder that holds a prepared tree; made at its first use."""
        key = (kind, variant, setup)
        if key not in self.templates:
            base = self.template(kind, variant, "") if setup else None  # made in the home folder, if it is not there yet
            self.clear()
            if setup:
                shutil.copytree(base, self.home, symlinks=True)
                for line in setup.split("\n"):
                    done = self.bash_run(f"V={variant}; {line}", 120)
                    if done is None or done[0] != 0:
                        raise ValueError(f"the setup line {line!r} failed: {done}")
            else:
                # A repository names its remote by path, so it is made where it is used.
                environment = {**self.environment, "GIT_AUTHOR_DATE": self.date(), "GIT_COMMITTER_DATE": self.date()}
                trees.build(self.home, kind, variant, environment)
            prepared = [k for k in self.templates if k[2]]
            if len(prepared) >= TEMPLATES:
                oldest = self.templates.pop(prepared[0])
                subprocess.run(["chmod", "-R", "u+rwx", str(oldest)], check=False, capture_output=True)
                shutil.rmtree(oldest)
            self.made += 1
            self.templates[key] = self.box / f"tree{self.made}"
            shutil.copytree(self.home, self.templates[key], symlinks=True)
        return self.templates[key]

    def date(self):
        """When the commits of a tree were made."""
        return f"{self.now - 3 * DAY} +0000"

    def clear(self):
        self.ready = None
        if self.home.exists():
            subprocess.run(["chmod", "-R", "u+rwx", str(self.home)], check=False, capture_output=True)
            shutil.rmtree(self.home)

    def bash_run(self, command, seconds):
        """(exit status, output, errors, last working folder) of one command in the home folder; None if it ran out of time."""
        def limits():
            os.setsid()
            for what, most in ((resource.RLIMIT_CPU, CPU_SECONDS), (resource.RLIMIT_AS, 1 << 30), (resource.RLIMIT_FSIZE, 64 << 20),
                               (resource.RLIMIT_NOFILE, 256), (resource.RLIMIT_CORE, 0)):  # fmt: skip
                resource.setrlimit(what, (most, most))

        cwd_read, cwd_write = os.pipe()
        environment = {**self.environment, "GIT_AUTHOR_DATE": f"{self.now} +0000", "GIT_COMMITTER_DATE": f"{self.now} +0000"}
        wrapped = f"{command}\n__rc=$?; pwd >&{cwd_write}; exit $__rc"
        process = subprocess.Popen([self.bash, "-c", wrapped], cwd=self.home, env=environment, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[cwd_write], preexec_fn=limits)  # fmt: skip
        os.close(cwd_write)
        try:
            out, err = process.communicate(timeout=seconds)
            os.set_blocking(cwd_read, False)
            try:
                cwd = os.read(cwd_read, 4096).decode(errors="replace").strip()
            except BlockingIOError:
                cwd = ""
            return process.returncode, out[:OUTPUT_BYTES].decode(errors="replace"), err[:4096].decode(errors="replace"), cwd
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
        finally:
            os.close(cwd_read)

    def effect(self, command, kind, variant, setup, trusted=False):
        """What a command does: {'out', 'err', 'rc', 'cwd', 'tree', 'touched'}; or a text that says why it was not run."""
        if not trusted and not self.sealed:
            return "commands are run in namespaces only"
        if why := refusal(command):
            return why
        key = (command, kind, variant, setup)
        if key in self.effects:
            return self.effects[key]
        prepared, before, repository = self.prepare(kind, variant, setup)
        start = time.time()
        done = self.bash_run(command, SECONDS)
        if done is None:
            result = f"it took more than {SECONDS} seconds"
        elif done[0] == 127 and re.search(r"command not found|No such file or directory$", done[2].strip()):
            result = "it needs a program that is not there"
        else:
            after = snapshot(self.home)
            touched = sorted(str(p.relative_to(self.home)) for p in walk(self.home) if p.lstat().st_mtime >= start - 0.02)
            same_repository = fingerprint(self.home) == prepared
            state = repository if same_repository else self.state()
            changed = after != before or state != repository
            # What nothing has changed need not be made again.
            self.ready = self.ready if same_repository and not changed and not touched else None
            result = {"rc": done[0], "out": done[1], "err": done[2], "cwd": done[3], "tree": {**after, "GIT": state},
                      "touched": touched, "changed": changed}  # fmt: skip
        if isinstance(result, str):
            self.ready = None
        self.effects[key] = result
        return result

    def prepare(self, kind, variant, setup):
        """Puts a tree into the home folder: (fingerprint of its repository, snapshot, state of its repository)."""
        key = (kind, variant, setup)
        source = self.template(*key)
        if self.ready is None or self.ready[0] != key:
            self.clear()
            shutil.copytree(source, self.home, symlinks=True)
            if key not in self.states:
                self.states[key] = self.state()
                self.clear()
                shutil.copytree(source, self.home, symlinks=True)
            self.ready = (key, fingerprint(self.home), snapshot(self.home))
        return self.ready[1], self.ready[2], self.states[key]

    def state(self):
        """What the repository in the home folder holds, as text."""
        done = self.bash_run(GIT_STATE, 120) if (self.home / ".git").exists() else None
        return done[1] if done else ""


def fingerprint(root):
    """Whether anything was written to the repositories under `root`: equal if nothing was."""
    found = []
    for folder in (root / ".git", root / ".remote.git"):
        for path, _, files in os.walk(folder):
            for name in sorted(files):
                info = os.lstat(os.path.join(path, name))
                found.append((path, name, info.st_mtime_ns, info.st_size))
    return sorted(found)


def walk(root):
    """Every path under `root` but those of repositories, in order."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in (".git", ".remote.git"))
        for name in sorted(folders + files):
            yield Path(folder, name)


def snapshot(root):
    """path -> what is there: sort, permissions, links, a hash of the content (of what an archive holds, for archives)."""
    tree = {}
    for path in walk(root):
        info = path.lstat()
        name = str(path.relative_to(root))
        if stat.S_ISLNK(info.st_mode):
            tree[name] = f"link {os.readlink(path).rstrip('/')}"
        elif stat.S_ISDIR(info.st_mode):
            tree[name] = f"folder {stat.S_IMODE(info.st_mode):o}"
        elif stat.S_ISREG(info.st_mode):
            tree[name] = f"file {stat.S_IMODE(info.st_mode):o} {info.st_nlink} {content(path.read_bytes())}"
        else:
            tree[name] = "special"
    return tree


def content(data):
    """A hash of a file's content; archives of equal members are equal."""
    try:
        for opener, magic in ((gzip.decompress, b"\x1f\x8b"), (bz2.decompress, b"BZh"), (lzma.decompress, b"\xfd7zXZ")):
            if data.startswith(magic):
                return f"packed {magic[:2].hex()} {content(opener(data))}"
        if data.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(io.BytesIO(data)) as z:
                members = [(i.filename, z.read(i)) for i in z.infolist() if not i.is_dir()]
            return hashed(sorted(members))
        if data[257:262] == b"ustar":
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                members = [(os.path.normpath(m.name), m.mode, m.linkname, tar.extractfile(m).read() if m.isreg() else b"")
                           for m in tar.getmembers() if not m.isdir()]  # fmt: skip
            return hashed(sorted(members))
    except (OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, RuntimeError, ValueError):
        pass
    return hashlib.sha256(data).hexdigest()


def hashed(members):
    return hashlib.sha256(repr(members).encode()).hexdigest()
