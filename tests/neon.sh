#!/bin/sh
# The kernels' tests on emulated aarch64 CPUs: one without dot instructions, one with dotprod, one with i8mm as well.
# Needs the aarch64 standard library of the compiler in use (RUSTC names another than rustup's), a cross linker and
# qemu-user. Says nothing about speed.
set -eu
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
missing() {
    echo "neon.sh: missing $1" >&2
    exit 1
}
command -v aarch64-linux-gnu-gcc > /dev/null || missing "aarch64-linux-gnu-gcc (Debian: gcc-aarch64-linux-gnu)"
command -v qemu-aarch64-static > /dev/null || missing "qemu-aarch64-static (Debian: qemu-user-static)"
ls "$("${RUSTC:-rustc}" --print target-libdir --target $target)"/libstd-* > /dev/null 2>&1 ||
    missing "the standard library (rustup target add $target)"

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
for cpu in cortex-a53 cortex-a76 max; do
    echo "neon.sh: $cpu"
    QEMU_CPU=$cpu "${CARGO:-cargo}" test -p loaf-kernels -p loaf-runtime --lib --test kernels --target $target
done
