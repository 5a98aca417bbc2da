#!/usr/bin/env python3
"""Look at a report in a browser: light and dark, no message on the console, nothing fetched.

    python3 tests/page.py [--bake PROGRAM] [--keep FOLDER]

The page is that of tests/vectors/mixture.loaf. It is opened in headless Chromium twice, for a reader who prefers light and for one
who prefers dark: the background has to be that of the scheme, the script has to have added its buttons, and the console has to
be empty, where a browser writes errors of scripts and everything that the page's policy forbade. A page that was tampered with
has to be noticed in each of these ways. Screenshots stay in FOLDER (default: target/page). Without a browser there is nothing to
look with: that is said, and is no failure. What this does not do: it does not compare pictures.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOAF = ROOT / "tests/vectors/mixture.loaf"
NAMES = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome"]
# As blink counts them, and the page's `--back`.
SCHEMES = {"light": ("1", (0xFF, 0xFF, 0xFF)), "dark": ("0", (0x0D, 0x11, 0x17))}


def browser():
    """A Chromium of this machine, if there is one: $CHROMIUM, or one on the path."""
    return next(filter(None, map(shutil.which, filter(None, [os.environ.get("CHROMIUM"), *NAMES]))), None)


def first_pixel(png):
    """Red, green and blue of the upper left corner; of a first row no filter changes the first pixel."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and png[24] == 8 and png[25] in (2, 6), "a PNG of eight bits and RGB"
    at, data = 8, b""
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    return tuple(zlib.decompress(data)[1:4])


def look(program, page, scheme, picture):
    """What a reader with this preference gets: (messages, document after the script, background)."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            program, "--headless", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,3200", f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--no-first-run",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme][0]}", "--enable-logging=stderr", "--log-level=0",
            f"--screenshot={picture}", "--dump-dom", page.as_uri(),
        ]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.insert(1, "--no-sandbox")
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if done.returncode != 0 or not picture.is_file():
        raise SystemExit(f"page: {program}: exit code {done.returncode}, expected a screenshot\n{done.stderr[-2000:]}")
    messages = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
    return messages, done.stdout, first_pixel(picture.read_bytes())


def complaints(scheme, seen):
    """What is wrong with what was seen."""
    messages, document, background = seen
    wrong = [f"on the console: {message}" for message in messages]
    if background != SCHEMES[scheme][1]:
        wrong.append(f"background: expected {SCHEMES[scheme][1]}, found {background}")
    if ">open all</button>" not in document or document.count("</output>") != 2:
        wrong.append("expected what the script adds, found the page without it")
    if document.count("<rect") < 100 or "</html>" not in document:
        wrong.append("expected the whole page, found less")
    return wrong


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bake", help="the program (default: built by cargo)")
    p.add_argument("--keep", default=ROOT / "target/page", type=pathlib.Path, help="where screenshots stay")
    args = p.parse_args()
    program = browser()
    if program is None:
        print("page: SKIPPED: no Chromium here, so no report was looked at (Debian: apt-get install chromium-headless-shell)", file=sys.stderr)
        return
    args.keep.mkdir(parents=True, exist_ok=True)
    cargo = [os.environ.get("CARGO", "cargo"), "run", "--quiet", "-p", "loaf-bake", "--"]
    page = args.keep.resolve() / "report.html"
    subprocess.run([*([args.bake] if args.bake else cargo), "report", LOAF, "-o", page], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    for scheme in SCHEMES:
        wrong = complaints(scheme, look(program, page, scheme, args.keep / f"{scheme}.png"))
        if wrong:
            raise SystemExit("\n".join(f"page: {scheme}: {line}" for line in wrong))
    # Another script than the one that the policy names, something to fetch, and no dark colours.
    text = page.read_text().replace("prefers-color-scheme: dark", "prefers-color-scheme: none")
    text = text.replace('"use strict";', '"use strict"; throw 1;').replace("<h1>", '<h1><img src="http://127.0.0.1:9/x.png">')
    with tempfile.TemporaryDirectory() as folder:
        bad = pathlib.Path(folder) / "bad.html"
        bad.write_text(text)
        wrong = "\n".join(complaints("dark", look(program, bad, "dark", pathlib.Path(folder) / "bad.png")))
    for what in ["script", "127.0.0.1:9", "background", "what the script adds"]:
        if what not in wrong:
            raise SystemExit(f"page: a page that was tampered with: expected a complaint about {what}, found\n{wrong}")
    print(f"page: light and dark, without a message; screenshots in {args.keep}")


if __name__ == "__main__":
    main()
