#!/usr/bin/env bash
# Reproduces a result of Table 2 on several machines of a Slurm cluster: sbatch slurm.sh en-de big
#
# An update has 25,000 tokens on any number of GPUs. max_tokens is 4 percent more than 25,000 / GPUs, so that the update
# has one micro-batch for each GPU. A requeued job resumes from its newest checkpoint.
#SBATCH --job-name=nmtkit-wmt14
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=slurm-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}"

pair=${1:?give en-de or en-fr} size=${2:?give base or big}
shift 2
gpus=${SLURM_GPUS_ON_NODE:-8}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
max_tokens=$((26000 / (gpus * SLURM_NNODES)))

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$gpus" \
    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m nmtkit train "data-bin/$pair" --config "configs/$pair-$size.toml" --save-dir "runs/$pair-$size" \
    --max-tokens "$max_tokens" "$@"
./evaluate.sh "$pair" "$size"
