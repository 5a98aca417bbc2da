#!/usr/bin/env bash
# Builds loaf with the MLX backend and puts it into the local folder that holds its MLX.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "$(uname)" = Darwin ]; then variant=metal; else variant=${MLX_VARIANT:-cpu}; fi
python3 runtime/mlx/setup.py "$variant"
config=()
if [ -f ".mlx/$variant/config.toml" ]; then config=(--config ".mlx/$variant/config.toml"); fi
"${CARGO:-cargo}" ${config[@]+"${config[@]}"} build --release -p loaf-cli --bin loaf --features mlx
mkdir -p ".mlx/$variant/bin"
cp "${CARGO_TARGET_DIR:-target}/release/loaf" ".mlx/$variant/bin/loaf"
echo "mlx: .mlx/$variant/bin/loaf run --backend mlx ...  (--backend mlx-cpu on a machine without a GPU)"
