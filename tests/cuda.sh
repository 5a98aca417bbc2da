#!/bin/sh
# The CUDA suites on a card: every way to take a step, whole models, the CPU's bits. Then, where compute-sanitizer is, the small ones under
# memcheck and racecheck (which sees shared memory alone). `make test` runs the same suites on an interpreter of the committed PTX.
set -eu
cd "$(dirname "$0")/.."

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
export LOAF_TEST_CUDA=1
"${CARGO:-cargo}" test -p loaf-tests --test cuda -- --test-threads 1
if ! command -v compute-sanitizer > /dev/null; then
    echo "cuda.sh: no compute-sanitizer here, so neither memcheck nor racecheck"
    exit 0
fi
suite=$("${CARGO:-cargo}" test -p loaf-tests --test cuda --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))/\1/p')
case $suite in /*) ;; *) suite=$PWD/$suite ;; esac
cd tests
for tool in memcheck racecheck; do
    echo "cuda.sh: $tool"
    compute-sanitizer --tool $tool --error-exitcode 9 "$suite" --test-threads 1 rows_together snapshots
done
