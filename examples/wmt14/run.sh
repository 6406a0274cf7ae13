#!/usr/bin/env bash
# Reproduces a result of Table 2: trains, averages, translates newstest2014, and computes scores.
#
#   ./run.sh en-de base                               # all GPUs of this machine
#   CUDA_VISIBLE_DEVICES=0 ./run.sh en-de big         # one GPU; the same updates
#   ./run.sh en-de base --max-tokens 12800            # other flags are passed to `nmtkit train`
#
# After an interruption, run it again to resume. For several machines, see slurm.sh.
set -euo pipefail
cd "$(dirname "$0")"

pair=${1:?give en-de or en-fr} size=${2:?give base or big}
shift 2
folder=runs/$pair-$size
nmtkit train "data-bin/$pair" --config "configs/$pair-$size.toml" --save-dir "$folder" "$@"
./evaluate.sh "$pair" "$size"
