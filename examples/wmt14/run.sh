#!/usr/bin/env bash
# One number of Table 2: train, average, translate newstest2014, score.
#
#   ./run.sh en-de base                               # all GPUs of this machine
#   CUDA_VISIBLE_DEVICES=0 ./run.sh en-de big         # one GPU; the same updates, in more micro-batches
#   ./run.sh en-de base --max-tokens 12800            # more flags go to `nmtkit train`
#
# Run it again after an interruption: training resumes. For several machines, see slurm.sh.
set -euo pipefail
cd "$(dirname "$0")"

pair=${1:?give en-de or en-fr} size=${2:?give base or big}
shift 2
folder=runs/$pair-$size
nmtkit train "data-bin/$pair" --config "configs/$pair-$size.toml" --save-dir "$folder" "$@"
./evaluate.sh "$pair" "$size"
