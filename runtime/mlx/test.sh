#!/usr/bin/env bash
# The MLX suites, with their set-up. Without a network there is nothing to run them with: that is said, and is no failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
variant=${MLX_VARIANT:-cpu}
status=0
python3 runtime/mlx/setup.py "$variant" || status=$?
if [ "$status" = 3 ]; then
  echo "mlx: SKIPPED: the MLX suites were not run, MLX could not be set up without a network" >&2
  exit 0
elif [ "$status" != 0 ]; then
  exit "$status"
fi
config=()
if [ -f ".mlx/$variant/config.toml" ]; then config=(--config ".mlx/$variant/config.toml"); fi
# Products in full f32, where a GPU would round their factors to 11 bits by default.
export MLX_ENABLE_TF32=0
"${CARGO:-cargo}" ${config[@]+"${config[@]}"} test -p loaf-tests --features mlx --test backends --test mlx --test check "$@"
