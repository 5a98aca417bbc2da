#!/usr/bin/env bash
# The default model, from generator to loaf. Training needs two GPUs with PyTorch and takes about 110 minutes in twenty-three parts;
# everything else runs anywhere. `./make.sh bake` skips the training and bakes the committed checkpoint.
set -euo pipefail
cd "$(dirname "$0")"
root=../..
venv=$root/.venv

if [ "${1:-all}" != bake ]; then
    [ -x $venv/bin/python ] || { python3 -m venv $venv && $venv/bin/pip install --quiet -r requirements.txt; }
    $venv/bin/python tokens.py --out checkpoint
    $venv/bin/python train.py --data checkpoint --out checkpoint --small --minutes 8.25 --warmup 400 --seed 1
    $venv/bin/python train.py --data checkpoint --init checkpoint --out checkpoint --minutes 2.75 --lr 1.5e-3 --warmup 100 --seed 2
    $venv/bin/python -m torch.distributed.run --nproc-per-node 2 train.py --data checkpoint --init checkpoint --out checkpoint --minutes 8 --lr 2.5e-3 --warmup 200 --seed 3
    $venv/bin/python -m torch.distributed.run --nproc-per-node 2 train.py --data checkpoint --init checkpoint --out checkpoint --minutes 8.2 --lr 2.5e-3 --warmup 200 --seed 4
    $venv/bin/python -m torch.distributed.run --nproc-per-node 2 train.py --data checkpoint --init checkpoint --out checkpoint --minutes 4.8 --lr 1.5e-3 --warmup 100 --seed 5
    $venv/bin/python -m torch.distributed.run --nproc-per-node 2 train.py --data checkpoint --init checkpoint --grow --out checkpoint --minutes 7.7 --dropout 0.1 --lr 2.5e-3 --warmup 200 --seed 6
    $venv/bin/python -m torch.distributed.run --nproc-per-node 2 train.py --data checkpoint --init checkpoint --out checkpoint --minutes 8.25 --dropout 0.15 --dropout-end 0.8 --decay 0.08 --lr 2.5e-3 --warmup 200 --seed 7
    $venv/bin/python -m torch.distributed.run --nproc-per-node 2 train.py --data checkpoint --init checkpoint --out checkpoint --minutes 3 --lr 1.6e-3 --warmup 60 --seed 8
    $venv/bin/python -m torch.distributed.run --nproc-per-node 2 train.py --data checkpoint --init checkpoint --out after --minutes 2.15 --lr 1.5e-3 --warmup 60 --seed 10
    $venv/bin/python average.py checkpoint after --out checkpoint && rm -r after
    $venv/bin/python train.py --data checkpoint --init checkpoint --out checkpoint --minutes 8.15 --dropout 0.12 --dropout-end 0.8 --decay 0.08 --lr 2.5e-3 --warmup 200 --seed 11
    $venv/bin/python train.py --data checkpoint --init checkpoint --out after --minutes 2.7 --lr 1.3e-3 --warmup 60 --seed 12
    $venv/bin/python average.py checkpoint after --out checkpoint && rm -r after
    $venv/bin/python train.py --data checkpoint --init checkpoint --out checkpoint --minutes 8 --dropout 0.12 --dropout-end 0.8 --decay 0.08 --lr 2.5e-3 --warmup 200 --seed 13
    $venv/bin/python train.py --data checkpoint --init checkpoint --out after --minutes 3.7 --lr 1.5e-3 --warmup 60 --seed 14
    $venv/bin/python average.py checkpoint after --out checkpoint && rm -r after
    $venv/bin/python train.py --data checkpoint --init checkpoint --out checkpoint --minutes 8 --dropout 0.12 --dropout-end 0.8 --decay 0.08 --lr 2.5e-3 --warmup 200 --seed 15
    $venv/bin/python train.py --data checkpoint --init checkpoint --out after --minutes 3.7 --lr 1.5e-3 --warmup 60 --seed 16
    $venv/bin/python average.py checkpoint after --out checkpoint && rm -r after
    fresh="--data checkpoint --init checkpoint --minutes 5.2 --dropout-end 0.8 --decay 0.08 --lr 2.5e-3 --warmup 200 --workers 14"
    CUDA_VISIBLE_DEVICES=0 $venv/bin/python train.py $fresh --out a --then 2.6:1.5e-3:aa --dropout 0.12 --seed 17 & one=$!
    CUDA_VISIBLE_DEVICES=1 $venv/bin/python train.py $fresh --out b --then 2.6:1.5e-3:bb --dropout 0.18 --seed 18 & two=$!
    wait $one && wait $two
    $venv/bin/python average.py a aa b bb --out checkpoint && rm -r a aa b bb
    next="${fresh/5.2/6.4}"
    CUDA_VISIBLE_DEVICES=0 $venv/bin/python train.py $next --out a --then 3:1.5e-3:aa --dropout 0.12 --seed 22 & one=$!
    CUDA_VISIBLE_DEVICES=1 $venv/bin/python train.py $next --out b --then 3:1.5e-3:bb --dropout 0.18 --seed 23 & two=$!
    wait $one && wait $two
    $venv/bin/python average.py a aa b bb --out checkpoint && rm -r a aa b bb
fi
cargo run --release --quiet --manifest-path $root/Cargo.toml -p loaf-bake -- build checkpoint -o ../default.loaf --quant q6 --chunk 128
cargo run --release --quiet --manifest-path $root/Cargo.toml -p loaf-bake -- lock --update default --root $root
cargo build --release --manifest-path $root/Cargo.toml -p loaf-cli --bin loaf
python3 evaluate.py --loaf $root/target/release/loaf --limit 300 --label "q6 (ships)"
