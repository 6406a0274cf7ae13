#!/usr/bin/env bash
# Translates a large text in a job array of Slurm: each task makes every N-th shard. Submit the job again to continue.
#
#   sbatch --array=1-64 generate.sh averaged.pt mono.de shards --beam 4      # other flags are passed to nmtkit generate
#   nmtkit merge shards --output mono.en
#
# To repeat only some tasks, give the number of all tasks: PARTS=64 sbatch --array=3,17 generate.sh …
# The model, the text and the folder must have the same paths for all tasks. The first task makes the plan of shards.
#SBATCH --job-name=nmtkit-generate
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --output=slurm-%A-%a.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

model=${1:?give the checkpoint} input=${2:?give the text} shards=${3:?give the folder of the shards}
shift 3
# without a GPU, a process for each core translates
[[ -n ${SLURM_GPUS_ON_NODE:-} ]] || set -- --workers "${SLURM_CPUS_PER_TASK:-1}" --device cpu "$@"
exec nmtkit generate --path "$model" --input "$input" --output-dir "$shards" \
    --shard "$SLURM_ARRAY_TASK_ID/${PARTS:-$SLURM_ARRAY_TASK_MAX}" "$@"
