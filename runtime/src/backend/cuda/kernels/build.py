#!/usr/bin/env python3
"""Compiles the kernels of this folder: PTX for any card from Ampere on, a cubin for Hopper, and PTX of what is Hopper's alone.

Neither toolkit nor card is needed: NVRTC comes from PyPI (nvidia-cuda-nvrtc-cu12, the version below) into a virtual environment in
target/cuda. The same sources give the same bytes. With --check nothing is written; what is committed must be what comes out. With
--if-there nothing is fetched: without NVRTC that is said, and no failure.

usage: build.py [--check] [--if-there] [--resources]
"""

import argparse
import ctypes
import pathlib
import subprocess
import sys
import venv

HERE = pathlib.Path(__file__).resolve().parent
VENV = HERE.parents[4] / "target/cuda/venv"
VERSION = "12.4.127"
SOURCES = ["common", "ops", "rows", "products", "linear", "tiles", "wide", "blocks", "dense", "recurrent", "attention", "prompt", "fast", "rule", "decode", "hopper", "fast_hopper", "mixture", "delta", "few", "choose", "sample", "shorts"]
TARGETS = {
    "compute_80": ("PTX", "loaf.compute_80.ptx"),
    "sm_90a": ("CUBIN", "loaf.sm_90a.cubin"),
    "compute_90a": ("PTX", "loaf.compute_90a.ptx"),
}
# What is Hopper's alone, whose PTX the tests interpret: what else there is of compute_90a is left out.
HOPPER = ("hopper_", "fast_hopper_")
OPTIONS = ["--fmad=false", "--std=c++17"]


def library(fetch):
    """NVRTC, fetched if it is not there and may be."""
    pattern = "lib/python3*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    found = list(VENV.glob(pattern))
    if not found and not fetch:
        print("NVRTC is not here ('make cuda-kernels' fetches it): nothing compared")
        sys.exit(0)
    if not found:
        venv.create(VENV, with_pip=True)
        subprocess.run([VENV / "bin/pip", "install", "-q", f"nvidia-cuda-nvrtc-cu12=={VERSION}"], check=True)
        found = list(VENV.glob(pattern))
    return ctypes.CDLL(str(found[0]))


def compile_for(lib, source, arch, kind, options):
    """The compiled bytes, and what the compiler has to say."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"loaf.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}", *OPTIONS, *options]
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    status = lib.nvrtcCompileProgram(program, len(options), array)

    def text(name):
        getattr(lib, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(lib, f"nvrtcGet{name}")(program, buffer)
        return buffer.raw

    log = text("ProgramLog").rstrip(b"\0").decode()
    if status:
        sys.exit(f"{arch}: {log}")
    out = text(kind)
    return (out.rstrip(b"\0") if kind == "PTX" else out), log


def only_hopper(ptx):
    """The PTX without kernels that other cards have, too."""
    head, *kernels = ptx.decode().split(".visible .entry ")
    kernels = [k for k in kernels if k.startswith(HOPPER)]
    # After a kernel come declarations of the next one's shared memory.
    return "".join([head, *(".visible .entry " + k for k in kernels)]).encode()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--resources", action="store_true", help="print registers, spills and shared memory of the cubin's kernels")
    parser.add_argument("--if-there", action="store_true")
    args = parser.parse_args()
    lib = library(not args.if_there)
    source = "".join((HERE / f"{source}.cu").read_text() for source in SOURCES)
    for arch, (kind, name) in TARGETS.items():
        resources = args.resources and kind == "CUBIN"
        out, log = compile_for(lib, source, arch, kind, ["--ptxas-options=-v"] if resources else [])
        if arch == "compute_90a":
            out = only_hopper(out)
        if log.strip():
            print(log)
        if resources:
            continue
        if args.check:
            if (HERE / name).read_bytes() != out:
                sys.exit(f"{name}: expected the bytes that its sources compile to, found others; run 'make cuda-kernels'")
            print(f"{name}: as its sources say, {len(out)} bytes")
        else:
            (HERE / name).write_bytes(out)
            print(f"{name}: {len(out)} bytes")


if __name__ == "__main__":
    main()
