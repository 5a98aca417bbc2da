#!/usr/bin/env python3
"""The mean of two checkpoints of one model, weight by weight: what it knew before and what it has learned since.

    python3 average.py --a BEFORE --b AFTER --out checkpoint

What always holds: both folders have the same tensors; the mean is taken in float32 and written in the types of `--a`.
"""

import argparse
import os

from safetensors.torch import load_file, save_file


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--a", required=True, help="checkpoint folder before")
    p.add_argument("--b", required=True, help="checkpoint folder after")
    p.add_argument("--out", required=True)
    p.add_argument("--part", type=float, default=0.5, help="weight of --b")
    args = p.parse_args()
    a, b = (load_file(os.path.join(folder, "model.safetensors")) for folder in (args.a, args.b))
    if a.keys() != b.keys():
        raise SystemExit(f"average: the folders differ in {sorted(a.keys() ^ b.keys())}")
    mean = {k: ((1 - args.part) * a[k].float() + args.part * b[k].float()).to(a[k].dtype) for k in a}
    save_file(mean, os.path.join(args.out, "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
