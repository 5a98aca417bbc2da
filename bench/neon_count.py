#!/usr/bin/env python3
"""Counts the instructions of NEON's products of one row in the assembly that the compiler writes, as a Markdown table:

    cargo rustc --release -p loaf-kernels --lib --target aarch64-unknown-linux-gnu -- --emit asm -C symbol-mangling-version=v0
    python3 bench/neon_count.py target/aarch64-unknown-linux-gnu/release/deps/loaf_kernels-*.s

For every way of multiplying and every layout: instructions a weight of the loop over a row's codes, and in brackets those that compute with
vectors. Of the loops with products the one with most products is taken, and of those the shortest; both branches inside it count. An
asterisk marks loops that end within the codes: where a group is one of several lengths, adding its sums up comes after them.
"""

import fileinput
import re
import subprocess
import sys

SETS = ("Smull", "Sdot", "Usdot")
# Layout and group of the copies that the compiler makes (0: whatever the group is), by `layout` in runtime/kernels/src/simd.rs.
LAYOUTS = {(44, 64): "4 bits, groups of 64", (44, 0): "4 bits, longer groups", (4, 32): "4 bits, groups of 32 (Q4_0, Q4_K)",
           (4, 0): "4 bits, groups of 32 or less", (2, 0): "2 bits", (3, 0): "3 bits", (5, 0): "5 bits", (6, 0): "6 bits",
           (8, 64): "8 bits, groups of 64", (8, 0): "8 bits", (14, 32): "MXFP4", (24, 16): "NVFP4", (22, 16): "Q2_K", (23, 16): "Q3_K",
           (26, 16): "Q6_K", (34, 32): "IQ4_NL, IQ4_XS"}
# Products of an instruction: of sixteen bytes, or of eight.
PRODUCTS = ((re.compile(r"(us|s)dot\b"), 16), (re.compile(r"sm(?:ul|la)l2?\b"), 8))
MOST = 70  # instructions of a loop over one row's codes


def functions(lines):
    """Symbol and lines of every function."""
    name, body = None, []
    for line in lines:
        if start := re.match(r"(_R\w+):", line):
            name, body = start[1], []
        elif line.startswith("\t.size") and name:
            yield name, body
            name = None
        else:
            body.append(line)


def loops(body):
    """The instructions of everything that ends in a branch back."""
    labels, code = {}, []
    for line in body:
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif re.match(r"\t[a-z]", line):
            code.append(line.strip())
            branch = re.match(r"(?:b(?:\.\w+)?|cbn?z|tbn?z)\s.*?(\.L\w+)$", code[-1])
            if branch and branch[1] in labels:
                yield code[labels[branch[1]]:]


def best(body):
    """Products, instructions, instructions on vectors, and whether sums are added up, of the loop over a row's codes."""
    found = []
    for loop in loops(body):
        products = sum(n for line in loop for what, n in PRODUCTS if what.match(line))
        if products and len(loop) <= MOST:
            vectors = sum(bool(re.search(r"\bv\d+\.", line)) for line in loop)
            found.append((-products, len(loop), vectors, any(re.match(r"addp|st[rpu]+\s+q", line) for line in loop)))
    return min(found, default=None)


def main():
    bodies = dict(f for f in functions(fileinput.input()) if "stream" in f[0])
    names = subprocess.run(["c++filt"], input="\n".join(bodies), capture_output=True, text=True, check=True).stdout.split("\n")
    table = {}
    for name, body in zip(names, bodies.values()):
        what = re.search(r"stream::?<loaf_kernels\[\w+\]::neon::(\w+), (\d+): u8, (\d+): usize, \d+: usize>$", name)
        if what and (loop := best(body)):
            weights, all_, vectors, closes = -loop[0], *loop[1:]
            table[what[1], (int(what[2]), int(what[3]))] = f"{all_ / weights:.2f} ({vectors / weights:.2f}){'' if closes else ' *'}"
    if not table:
        sys.exit("neon_count.py: no products of NEON in these files; expected assembly with v0 symbols")
    print(f"| weights | {' | '.join(s.lower() for s in SETS)} |\n|---|{'---:|' * len(SETS)}")
    for layout, label in LAYOUTS.items():
        row = [table.get((s, layout), "") for s in SETS]
        if any(row):
            print(f"| {label} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
