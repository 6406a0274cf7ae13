"""A tiny dataset, and short runs on it: what checks of whole trainings need."""

import atexit
import functools
import logging
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nmtkit import checkpoint
from nmtkit.data.binarized import Dataset
from nmtkit.data.config import PreprocessConfig
from nmtkit.data.preprocess import preprocess
from nmtkit.layers.packed import Batch
from nmtkit.testing.checks import require
from nmtkit.training.config import JobTemplate
from nmtkit.training.progress import Lines
from nmtkit.training.run import Run

WORDS = ["bado", "kelu", "miro", "sate", "vonu", "pika", "zulo", "tera", "gano", "feli"]
PAIRS = {"train": 120, "valid": 8}
TINY_TRANSFORMER = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "d_ff": 24, "heads": 2}
RUN = {
    "batch_tokens": 200,
    "max_tokens": 120,
    "precision": "fp32",
    "device": "cpu",
    "threads": 1,
    "validate_interval": None,
    "validate_interval_updates": 2,
    "save_interval": None,
    "save_interval_updates": 2,
    "log_interval": 1,
}


def write_corpus(prefix: Path, pairs: int, seed: int) -> None:
    """Writes `prefix`.xx and `prefix`.yy: 1 to 9 words, and the same words backwards, in capitals."""
    draw = random.Random(seed)
    sources = [[draw.choice(WORDS) for _ in range(draw.randint(1, 9))] for _ in range(pairs)]
    prefix.with_suffix(".xx").write_text("".join(" ".join(words) + "\n" for words in sources))
    prefix.with_suffix(".yy").write_text("".join(" ".join(reversed(words)).upper() + "\n" for words in sources))
    links = [" ".join(f"{i}-{len(words) - 1 - i}" for i in range(len(words))) for words in sources]
    prefix.with_suffix(".links").write_text("".join(line + "\n" for line in links))


@contextmanager
def quiet() -> Iterator[None]:
    """The context in which runs log warnings alone, and the number of torch's threads is given back."""
    log, threads = logging.getLogger("nmtkit"), torch.get_num_threads()
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(level)
        torch.set_num_threads(threads)


@functools.cache
def tiny_dataset() -> Path:
    """Returns the folder of a binarized dataset with word alignments, made once for this process and then removed."""
    folder = Path(tempfile.mkdtemp(prefix="nmtkit-check-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for seed, (name, pairs) in enumerate(PAIRS.items()):
        write_corpus(folder / name, pairs, seed)
    config = PreprocessConfig(
        source_lang="xx",
        target_lang="yy",
        train=(str(folder / "train"),),
        valid=(str(folder / "valid"),),
        alignments=(folder / "train.links",),
        destdir=folder / "data-bin",
        vocab_size=320,
    )
    with quiet():
        preprocess(config)
    return folder / "data-bin"


@functools.cache
def dataset() -> Dataset:
    return Dataset.open(tiny_dataset())


def batch(*pairs: int) -> Batch:
    """Returns these training pairs of the tiny dataset as a micro-batch."""
    return dataset()["train"].batch(torch.tensor(pairs).numpy())


def train(names: Mapping[str, str], settings: Mapping[str, Any], save_dir: Path, max_update: int) -> None:
    """Makes or continues a run of the components `names` by kind, to `max_update` updates of some 60 words."""
    settings = RUN | dict(settings) | {"save_dir": save_dir, "max_update": max_update}
    with quiet():
        Run(JobTemplate.read(names={"metrics": "none"} | dict(names)).job(settings), tiny_dataset(), Lines()).run()


def check_resume(names: Mapping[str, str], settings: Mapping[str, Any], folder: Path) -> None:
    """Raises ContractError unless four updates at once, and two and two, give the very same weights."""
    train(names, settings, folder / "whole", 4)
    train(names, settings, folder / "parts", 2)
    train(names, settings, folder / "parts", 4)
    whole, parts = (checkpoint.load(folder / name / "last.pt")["model"] for name in ("whole", "parts"))
    differ = [name for name, tensor in whole.items() if not torch.equal(tensor, parts[name])]
    require(
        not differ,
        f"a run that was resumed after update 2 has other weights after update 4 than one that was not: {differ[:3]}; "
        "what an update depends on must be in the state that is saved (state_dict, state), or follow from the "
        "arguments and torch's generator alone",
    )
