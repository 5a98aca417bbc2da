#!/usr/bin/env python3
"""Record a terminal session with `loaf` as one SVG: docs/session.svg on the front page.

    python3 docs/session.py --program target/release/loaf -o docs/session.svg

Every command below is really run, and what the picture shows is what it printed; lines appear one after the other. Light and
dark follow the reader's settings, and whoever wants no motion sees the last state. What this does not do: time anything.
"""

import argparse
import html
import os
import subprocess

SESSION = [
    "show the ten largest files under src",
    "find all pdf files and copy them to backup",
    "which process is using port 8080",
    "create a folder called site and go into it",
    "delete the folder build and everything in it",
    "who wrote hamlet",
]
WIDTH, LINE, LEFT, TOP = 860, 22, 18, 52


def record(program, model):
    """[(kind, text)]: what is typed, what is answered, what is said beside the answer."""
    lines = []
    for request in SESSION:
        lines.append(("typed", f'loaf "{request}"'))
        command = [program, "run"] + (["-m", model] if model else []) + [request]
        environment = dict(os.environ, NO_COLOR="1")
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, env=environment)
        if result.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: exit code {result.returncode}: {result.stderr.strip()}")
        lines += [("answer", line) for line in result.stdout.splitlines()]
        lines += [("aside", line) for line in result.stderr.splitlines()]
    return lines


def draw(lines):
    height = TOP + LINE * len(lines) + 18
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="t">',
           '<title id="t">A terminal: requests in English, and the shell commands that loaf answers</title>',
           "<style>",
           "text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; fill: #24292f }",
           ".frame { fill: #ffffff; stroke: #d0d7de } .dot { fill: #d0d7de } .answer { fill: #0550ae } .aside { fill: #9a6700 } .prompt { fill: #6e7781 }",
           "g { opacity: 0; animation: show .01s forwards } @keyframes show { to { opacity: 1 } }",
           "@media (prefers-reduced-motion: reduce) { g { animation: none; opacity: 1 } }",
           "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .frame { fill: #0d1117; stroke: #30363d } .dot { fill: #30363d }",
           "  .answer { fill: #79c0ff } .aside { fill: #d29922 } .prompt { fill: #8b949e } }",
           "</style>",
           f'<rect class="frame" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>']
    out += [f'<circle class="dot" cx="{20 + 18 * i}" cy="20" r="6"/>' for i in range(3)]
    time = 0.4
    for number, (kind, text) in enumerate(lines):
        shown = html.escape(text)
        if kind == "typed":
            time += 0.9
            shown = f'<tspan class="prompt">$ </tspan>{shown}'
        else:
            time += 0.35
        y = TOP + LINE * number
        out.append(f'<g style="animation-delay:{time:.2f}s"><text class="{kind}" x="{LEFT}" y="{y}">{shown}</text></g>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", default="target/release/loaf")
    p.add_argument("--model", help="a loaf (default: the one in the program)")
    p.add_argument("-o", "--output", default="docs/session.svg")
    args = p.parse_args()
    lines = record(args.program, args.model)
    longest = max(len(text) for _, text in lines)
    if LEFT * 2 + 8.5 * (longest + 2) > WIDTH:
        raise SystemExit(f"a line of {longest} characters does not fit into {WIDTH} units")
    with open(args.output, "w") as f:
        f.write(draw(lines))


if __name__ == "__main__":
    main()
