#!/usr/bin/env python3
"""The mean of checkpoints of one model, weight by weight: each has learned something else since they were one.

    python3 average.py BEFORE AFTER ... --out checkpoint

What always holds: all folders have the same tensors; the mean is taken in float32 and written in the types of the first.
"""

import argparse
import os

from safetensors.torch import load_file, save_file


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folders", nargs="+", help="checkpoint folders")
    p.add_argument("--out", required=True)
    args = p.parse_args()
    all_of_them = [load_file(os.path.join(folder, "model.safetensors")) for folder in args.folders]
    first = all_of_them[0]
    for folder, other in zip(args.folders, all_of_them):
        if first.keys() != other.keys():
            raise SystemExit(f"average: {folder} and {args.folders[0]} differ in {sorted(first.keys() ^ other.keys())}")
    mean = {k: (sum(t[k].float() for t in all_of_them) / len(all_of_them)).to(w.dtype) for k, w in first.items()}
    save_file(mean, os.path.join(args.out, "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
