#!/usr/bin/env python3
"""Makes MLX buildable on Linux: everything that feature `mlx` of loaf-cli needs, in one local folder.

On macOS there is nothing to do: mlx-sys builds as published. On Linux the build script of mlx-sys links Apple's frameworks,
so this script does its work instead, in `.mlx/VARIANT` (ignored by git):

  venv/          MLX's wheel (the library and its headers), CMake, Ninja and libclang, by pip
  mlxc/          mlx-c, built from the sources inside the mlx-sys crate that Cargo.lock names
  bindings.rs    what bindgen makes of mlx-c's headers
  config.toml    settings to hand to cargo: `cargo --config .mlx/VARIANT/config.toml ... --features mlx`
  stamp          the versions all of that was made for; the same stamp means there is nothing to do

The default build reads none of it. Nothing is installed outside the folder; no system package is needed beyond a C++ compiler and Rust.

usage: setup.py [cpu | cuda13]    (default: $MLX_VARIANT, or cpu)
exit codes: 0 ready, 3 not ready because there is no network, 1 anything else
"""

import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys

MLX = "0.32.2"
BINDGEN = "0.72.1"
TOOLS = ["cmake==4.4.4", "ninja==1.13.2", "libclang==18.1.1"]
WHEELS = {"cpu": [f"mlx=={MLX}", f"mlx-cpu=={MLX}"], "cuda13": [f"mlx=={MLX}", f"mlx-cuda-13=={MLX}"]}
NO_NETWORK = 3

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class Unavailable(Exception):
    """Something that must be fetched cannot be."""


def run(*command, cwd=ROOT, env=None):
    """Runs a command; returns what it prints. Its output is shown only if it fails."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} {command[1]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def fetch(*command):
    """Runs a command that needs the network unless what it wants is cached."""
    try:
        return run(*command)
    except RuntimeError as e:
        signs = ["Could not find a version", "Connection", "connection", "resolve host", "resolve hostname", "network", "Retrying", "download"]
        if any(sign in str(e) for sign in signs):
            raise Unavailable(str(e).strip().splitlines()[-1]) from e
        raise


def crate_folder(cargo):
    """Where cargo keeps the sources of mlx-sys that Cargo.lock names."""
    metadata = json.loads(fetch(cargo, "metadata", "--format-version", "1", "--locked", "--features", "loaf-cli/mlx"))
    found = [p for p in metadata["packages"] if p["name"] == "mlx-sys"]
    if len(found) != 1:
        raise RuntimeError(f"expected one mlx-sys in Cargo.lock, found {len(found)}")
    return pathlib.Path(found[0]["manifest_path"]).parent


def install_wheels(folder, variant):
    python = folder / "venv/bin/python"
    run(sys.executable, "-m", "venv", "--clear", folder / "venv")
    fetch(python, "-m", "pip", "install", "--quiet", *WHEELS[variant], *TOOLS)
    found = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    return pathlib.Path(found.strip())


def build_mlx_c(folder, site, source):
    """A static library; MLX itself stays the wheel's shared one."""
    cmake = folder / "venv/bin/cmake"
    build, package = folder / "mlxc", folder / "cmake"
    shutil.rmtree(build, ignore_errors=True)
    # In place of the wheel's own: that of the CUDA wheel asks for a CUDA toolkit, which calling the library does not take.
    package.mkdir(exist_ok=True)
    (package / "MLXConfig.cmake").write_text(f"""\
add_library(mlx SHARED IMPORTED)
set_target_properties(mlx PROPERTIES IMPORTED_LOCATION "{site}/mlx/lib/libmlx.so" INTERFACE_INCLUDE_DIRECTORIES "{site}/mlx/include")
target_compile_features(mlx INTERFACE cxx_std_20)
""")
    run(
        cmake, "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={folder / 'venv/bin/ninja'}",
        "-DCMAKE_BUILD_TYPE=Release", "-DMLX_C_USE_SYSTEM_MLX=ON", f"-DMLX_DIR={package}",
        "-DMLX_C_BUILD_EXAMPLES=OFF", f"-DCMAKE_CXX_FLAGS=-include {HERE / 'format.h'} -O1",
    )  # fmt: skip
    run(cmake, "--build", build)


def make_bindings(folder, site, source, cargo):
    """What the build script of mlx-sys would make."""
    # Unoptimised: building the generator is most of the time this takes.
    env = dict(os.environ, CARGO_PROFILE_DEV_DEBUG="0", CARGO_TARGET_DIR=str(folder / "bindgen"))
    if not (folder / "bin/bindgen").exists():
        command = [cargo, "install", "--debug", "bindgen-cli", "--version", BINDGEN, "--locked", "--no-default-features"]
        try:
            run(*command, "--features", "runtime", "--root", folder, env=env)
        except RuntimeError as e:
            raise Unavailable(str(e).strip().splitlines()[-1]) from e
    shutil.rmtree(folder / "bindgen", ignore_errors=True)
    headers = sorted((source / "mlx/c").glob("*.h"))
    all_headers = folder / "headers.h"
    all_headers.write_text("".join(f'#include "mlx/c/{h.name}"\n' for h in headers))
    # libclang's wheel brings no headers of its own.
    compiler = run(os.environ.get("CC", "cc"), "-print-file-name=include").strip()
    run(
        folder / "bin/bindgen", all_headers, "--no-layout-tests", "--formatter", "none", "--blocklist-function", "malloc|realloc",
        "--output", folder / "bindings.rs", "--", f"-I{source}", f"-isystem{compiler}",
        env=dict(os.environ, LIBCLANG_PATH=str(site / "clang/native")),
    )  # fmt: skip


def write_config(folder, site, host):
    text = f"""\
# Made by runtime/mlx/setup.py; stands for the build script of mlx-sys.
[target.{host}.mlx]
rustc-link-search = ["native={folder / "mlxc"}", "native={site / "mlx/lib"}"]
rustc-link-lib = ["static=mlxc", "dylib=mlx", "dylib=stdc++"]
rustc-env = {{ OUT_DIR = "{folder}" }}

# Read by the build scripts of loaf-runtime, loaf-cli and loaf-tests, which put it into what they link.
[env]
LOAF_MLX_RPATH = "{site / "mlx/lib"}"
"""
    (folder / "config.toml").write_text(text)


def stamp(variant, host, source):
    digest = hashlib.sha256()
    for file in [pathlib.Path(__file__).resolve(), HERE / "format.h", source / "CMakeLists.txt"]:
        digest.update(file.read_bytes())
    return f"{variant} {host} {' '.join(WHEELS[variant] + TOOLS)} {source} {ROOT} {digest.hexdigest()}\n"


def main():
    variant = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("MLX_VARIANT", "cpu")
    if platform.system() == "Darwin":
        print("mlx: nothing to set up on macOS: mlx-sys builds as published")
        return 0
    if platform.system() != "Linux" or variant not in WHEELS:
        print(f"mlx: expected Linux or macOS and a variant of {sorted(WHEELS)}, found {platform.system()}, {variant!r}", file=sys.stderr)
        return 1
    cargo = os.environ.get("CARGO", "cargo")
    folder = ROOT / ".mlx" / variant
    try:
        folder.mkdir(parents=True, exist_ok=True)
        host = [l for l in run(os.environ.get("RUSTC", "rustc"), "-vV").splitlines() if l.startswith("host: ")][0][6:]
        source = crate_folder(cargo) / "src/mlx-c"
        wanted = stamp(variant, host, source)
        if (folder / "stamp").is_file() and (folder / "stamp").read_text() == wanted:
            return 0
        (folder / "stamp").unlink(missing_ok=True)
        print(f"mlx: setting up {folder.relative_to(ROOT)} (a few minutes, once)", flush=True)
        site = install_wheels(folder, variant)
        build_mlx_c(folder, site, source)
        make_bindings(folder, site, source, cargo)
        write_config(folder, site, host)
        (folder / "stamp").write_text(wanted)
    except Unavailable as e:
        print(f"mlx: not set up, no network: {e}", file=sys.stderr)
        return NO_NETWORK
    except (RuntimeError, OSError) as e:
        print(f"mlx: {e}", file=sys.stderr)
        return 1
    print(f"mlx: ready; cargo --config .mlx/{variant}/config.toml build -p loaf-cli --features mlx")
    return 0


if __name__ == "__main__":
    sys.exit(main())
