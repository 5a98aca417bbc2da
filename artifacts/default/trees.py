"""The trees in which the judge runs commands.

A tree is a small home folder that is also the working directory: texts, tables, logs, sources, archives, links, hidden files. There
are two variants of each, with other contents, so that a command that is right by chance in one is seen in the other. `plain` has no
repository, `git` is a repository with branches, tags, a stash and a remote, `dirty` is the same with changes that are staged, not
staged and untracked. Everything is written from numbers, so two trees of a kind and variant are equal; times are relative to now.
"""

import gzip
import io
import os
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

KINDS = ("plain", "git", "dirty")
VARIANTS = (1, 2)
DAY = 86400


def plain(root, variant):
    """Files of every sort, under `root`."""
    v = variant
    names = "Ada Bob Chloe Ada Dmitri Eve Bob Ada Farid Greta Hugo Ines Chloe Ada Jun Kofi Lena Mona Eve Nils Oda Pia Bob".split()
    texts = {
        "notes.txt": f"buy apples and foo\nthe cat sat in the catalog\n\nfoo then foo again {v}\nTODO call ada@example.org\n"
        f"BEGIN\ninner apple {v}\nEND\na catalog of birds\n\nwrite to bob.reed{v}@mail.test or ada@example.org\nerror in line {40 + v}\n",
        "draft.txt": f"The First  Draft  \nbuy apples and foo\n  Some   Spaced Words \nversion {v}\t\nEnd of Draft\n",
        "report.txt": "".join(f"the quarterly report line {i} says the {w} is {'very ' * (i % 3)}{w}\n" for i, w in enumerate(
            "good better late early good cold late good warm red".split()[: 8 + v])),
        "names.txt": "\n".join(names[v - 1 :]) + "\n",
        "guests.txt": "Eve\nZara\nAda\nMona\nYuri\nPia\n" + ("Bob\n" if v == 2 else ""),
        "words.txt": "pear\napple\nfig\nlemon\nkiwi\nbanana\n" + ("cherry\n" if v == 2 else ""),
        "numbers.txt": "\n".join(str(n * v) for n in (17, 4, 230, 8, 99, 4, 1005, 56, 31)) + "\n",
        "urls.txt": f"http://example.org/a\nhttps://example.org/b{v}\nhttp://test.net/c?x=http\nhttps://example.org/b{v}\nhttps://zeta.test/\n",
        "contacts.csv": "id,name,email,city,age\n" + "".join(
            f"{i},{n},{n.lower()}@mail.test,{c},{20 + (i * 7 * v) % 45}\n" for i, (n, c) in enumerate(
                zip(["Nora", "Ada", "Zed", "Bob", "Ines", "Kai"], ["Oslo", "Rome", "Oslo", "Lima", "Kyiv", "Rome"]), 1)),
        "sales.csv": "date,region,product,amount\n" + "".join(
            f"2024-0{i % 9 + 1}-1{i % 7},{r},{p},{(i * 173 * v) % 997}\n" for i, (r, p) in enumerate(
                zip("north south east north west south east north west".split(), "tea cup pot tea pot jug cup jug tea".split()), 3)),
        "people.tsv": "Ada\tPine\t41\nBob\tReed\t29\nChloe\tStone\t35\n" + ("Dov\tVale\t18\n" if v == 2 else ""),
        "access.log": "".join(
            f"10.0.{(i * i) % (3 + v)}.{i % 3} - - [0{i % 9 + 1}/Mar/2024] \"{'POST' if i % 5 == 0 else 'GET'} /page{i % 6} HTTP/1.1\" "
            f"{[200, 200, 404, 301, 500][(i * v) % 5]} {i * 31}\n" for i in range(45)),
        "server.log": "".join(
            f"line {i} {['started', 'error opening socket', 'ok', 'panic at worker', 'request done'][(i * (v + 1) + i // 7) % 5]}\n"
            for i in range(1, 90)),
        "app.log": "".join(
            f"2024-03-{i % 28 + 1:02} {['INFO', 'DEBUG', 'WARN', 'ERROR', 'INFO'][(i * v) % 5]} "
            f"{['db timeout', 'cache Timeout', 'db connected', 'login'][i % 4]} {i}\n" for i in range(60)),
        "config.json": '{\n  "name": "kite%d",\n  "version": "1.%d",\n  "server": {\n    "host": "localhost",\n    "port": 80%d0\n  },\n'
        '  "tags": ["a", "b"]\n}\n' % (v, v, v),
        "users.json": '[\n  {"name": "nora", "age": 3%d},\n  {"name": "ada", "age": 28},\n  {"name": "zed", "age": 4%d}%s\n]\n'
        % (v, v, ',\n  {"name": "kai", "age": 66}' if v == 2 else ""),
        "config.yaml": f"# main\nport: 80{v}0\n\n# where\nhost: localhost\npath: /srv # default\n",
        "settings.ini": f"[main]\nport = 8080\ndebug = {v}\nname = kite\n",
        "todo.md": f"# Todo\n- rest {v}\n",
        "README.md": "".join(f"readme line {i * v}\n" for i in range(1, 16)),
        ".env": f"APP_PORT=70{v}0\nSECRET=abc\n",
        ".bashrc": "alias l=ls\n",
        ".hidden/inner.txt": "inner\n",
        "src/main.rs": f'fn main() {{\n    println!("{v}");\n    // TODO tidy\n}}\n',
        "src/lib.rs": "pub fn helper() -> u32 {\n    let x = 4;\n    x\n}\n",
        "src/app.py": f"import util\n\ndef main():\n    # TODO split\n    util.helper({v})\n\n\nmain()\n",
        "src/util.py": "def helper(x):\n    return x\n" + "# pad\n" * v,
        "src/net/client.py": "HOST = 'localhost'\n\ndef connect():\n    pass  # TODO\n",
        "src/net/server.go": "package main\n\nfunc main() {}\n",
        "tests/test_app.py": "def test_main():\n    assert True\n",
        "docs/guide.md": f"# Guide\nsay hello {v}\nhost is localhost\n",
        "docs/intro.md": "# Intro\n" + "word error\n" * v,
        "docs/api/index.html": "<html>api</html>\n",
        "scripts/deploy.sh": f"echo deploy {v}\n",
        "scripts/backup.sh": f"echo backup {v} > backed.txt; echo saved {v}\n",
        "photos/beach.jpg": "beach" * 50,
        "photos/cat.png": "\x89PNG" * 30 * v,
        "photos/IMG_001.JPG": "img one",
        "photos/IMG_002.JPG": "img two",
        "photos/2023/snow.jpg": "snow" * v,
        "music/song.mp3": "song",
        "logs/app.log": f"INFO up\nWarning: low disk {v}\nwarning again\nconnection refused\n",
        "logs/db.log": "start\nWARNING slow query\n" + "connection refused\n" * (v - 1),
        "logs/web.log": f"ok {v}\n",
        "backup/older.txt": "old\n",
        "build/a.o": "obj",
        "build/b.o": "obj2",
        "build/app.bin": "binary",
        "downloads/movie.mp4": "m" * 90000 * v,
        "downloads/song.flac": "f" * 20000,
        "downloads/manual.pdf": "pdf" * 1200,
        "downloads/setup.exe": "exe" * 300 * v,
        "downloads/nothing.part": "",
        "tmp/a.tmp": "a",
        "tmp/b.tmp": "b",
        "tmp/keep.dat": f"{v}",
        "src/net/cache.tmp": "c",
        "zero.txt": "",
        "big.bin": "".join(chr(33 + (i * i + v) % 90) for i in range(250_000 + 5000 * v)),
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin-1")
    (root / "empty").mkdir()
    (root / "shortcut").symlink_to("notes.txt")
    (root / "broken").symlink_to("nowhere")
    (root / "scripts/deploy.sh").chmod(0o755)
    with gzip.open(root / "logs/old.log.gz", "wb") as f:
        f.write(f"2021 connection refused {v}\n2021 fine\n".encode())
    members = {"pack/one.txt": f"one {v}\n", "pack/two.txt": "two\n", "pack/deep/three.txt": "three\n"}
    with tarfile.open(root / "archive.tar.gz", "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(text), 1_700_000_000
            tar.addfile(info, io.BytesIO(text.encode()))
    with zipfile.ZipFile(root / "site.zip", "w") as z:
        for name, text in {"index.html": f"<p>{v}</p>", "css/main.css": "p{}", "about.html": "about"}.items():
            z.writestr(zipfile.ZipInfo(name, (2024, 1, 2, 3, 4, 6)), text)
    age(root, v)


def age(root, variant):
    """Gives every file a time of its own, minutes to months ago."""
    now = int(time.time())
    files = sorted(p for p in root.rglob("*") if not p.is_symlink())
    for i, path in enumerate(files):
        days = (0.2, 40, 3, 12, 90, 0.6, 20)[(i * variant) % 7]
        os.utime(path, (now - days * DAY - i * 120,) * 2)


def repository(root, variant, environment, dirty):
    """A repository in `root`, with its remote beside its files.

    The remote's main branch is behind, and it has a branch `hotfix` that was never fetched.
    """
    v = variant
    script = f"""
set -e
git init -q -b main .; mkdir -p .git/info
echo .remote.git >> .git/info/exclude
echo 'print("one {v}")' > app.py; echo 'x = 1' > lib.py; echo 'note {v}' > notes.txt; echo '# Kite' > README.md
git add -A; git commit -qm 'first files'; git tag v1.0
echo 'print("two")' >> app.py; git commit -qam 'print two'
git branch dev
git checkout -q -b feature/login; echo 'def login(): pass' > login.py; git add -A; git commit -qm 'add login page'
git checkout -q dev; echo 'y = {v}' >> lib.py; git commit -qam 'dev: y'
git checkout -q main; git tag v1.1
echo 'more {v}' >> README.md; GIT_AUTHOR_NAME='Bob Reed' git commit -qam 'longer readme'
git checkout -q -b hotfix v1.1; echo theirs > theirs.txt; git add -A; git commit -qm 'their work'; git checkout -q main
git clone -q --bare . .remote.git
git --git-dir=.remote.git update-ref refs/heads/main refs/tags/v1.1
git --git-dir=.remote.git branch -q -D dev feature/login; git --git-dir=.remote.git tag -d v1.0 v1.1
git branch -q -D hotfix
git remote add origin "$PWD/.remote.git"
git update-ref refs/remotes/origin/main v1.1; git branch -q -u origin/main
git checkout -q -b merged; echo m > m.txt; git add -A; git commit -qm merged; git checkout -q main; git merge -q merged
echo stashed >> notes.txt; git stash -q
"""
    if dirty:
        script += "echo 'staged' >> app.py; git add app.py; echo 'local' >> lib.py; echo new > new.txt\n"
    subprocess.run(["bash", "-c", script], cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def build(root, kind, variant, environment):
    """The tree `kind` in variant `variant`, in the folder `root`, which is made."""
    root = Path(root)
    root.mkdir(parents=True)
    if kind == "plain":
        plain(root, variant)
    else:
        repository(root, variant, environment, kind == "dirty")
