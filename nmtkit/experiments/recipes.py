"""Settings to start from, by the size of the training set."""

import shlex
from pathlib import Path

# Each entry of RECIPES is a row of the table in docs/settings.md. The settings of an entry are for training sets with
# fewer pairs than the number in the entry. Larger sets start from the default settings.
TINY, SMALL = "--arch transformer_tiny --dropout 0.3", "--arch transformer_iwslt_de_en --dropout 0.3"
MUON = "--pre-norm --positions rotary --optimizer muon --lr-scheduler cosine"  # see examples/ablation
RECIPES = (
    (10_000, f"{TINY} --batch-tokens 2048 --lr 0.003 --warmup-updates 2000 --patience 10"),
    (100_000, f"{TINY} --batch-tokens 4096 {MUON} --lr 0.005 --warmup-updates 500 --max-update 2300"),
    (500_000, f"{SMALL} --batch-tokens 8192 --lr 0.0005 --warmup-updates 4000 --max-update 50000"),
)


def train_command(dataset: Path, pairs: int) -> str:
    """Returns the command that trains on `dataset`, with settings for its number of training `pairs` (0: unknown)."""
    settings = next((recipe.split() for limit, recipe in RECIPES if 0 < pairs < limit), [])
    return shlex.join(["nmtkit", "train", str(dataset), *settings, "--save-dir", "checkpoints"])
