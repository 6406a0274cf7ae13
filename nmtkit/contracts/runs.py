"""A tiny dataset, and short training runs on it."""

import atexit
import logging
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nmtkit.config import derive
from nmtkit.contracts.checks import Subject, require
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.preprocess import preprocess
from nmtkit.data.packed import Batch
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES, Architecture
from nmtkit.models.building import vocabulary_of
from nmtkit.training.config import REGISTRIES, JobConfig
from nmtkit.training.run import Run
from nmtkit.training.run_log import Lines

WORDS = ["bado", "kelu", "miro", "sate", "vonu", "pika", "zulo", "tera", "gano", "feli"]
PAIRS = {"train": 120, "valid": 8}
TINY_TRANSFORMER = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "d_ff": 24, "heads": 2}
TINY_CONFIG = derive(ARCHITECTURES["transformer_tiny"].preset, TINY_TRANSFORMER, "check")
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
    """Writes sources, targets and word alignments: the files `prefix`.xx, `prefix`.yy and `prefix`.links.

    Source lines have 1 to 9 words. Target lines have the same words in reverse order and in capitals.
    """
    draw = random.Random(seed)
    sources = [[draw.choice(WORDS) for _ in range(draw.randint(1, 9))] for _ in range(pairs)]
    prefix.with_suffix(".xx").write_text("".join(" ".join(words) + "\n" for words in sources))
    prefix.with_suffix(".yy").write_text("".join(" ".join(reversed(words)).upper() + "\n" for words in sources))
    links = [" ".join(f"{i}-{len(words) - 1 - i}" for i in range(len(words))) for words in sources]
    prefix.with_suffix(".links").write_text("".join(line + "\n" for line in links))


@contextmanager
def quiet() -> Iterator[None]:
    """Hides log messages below warnings, and restores the number of threads of torch at the end."""
    log, threads = logging.getLogger("nmtkit"), torch.get_num_threads()
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(level)
        torch.set_num_threads(threads)


def dataset(tokenizer: Tokenizer | None = None, *, target_lang: str = "yy") -> Dataset:
    """Returns the tiny dataset, segmented with `tokenizer`, or by default with a tokenizer of 320 pieces.

    The source language is xx. With the target language xx, both sides of each pair are the same line (monolingual).
    """
    key = ("" if tokenizer is None else tokenizer.fingerprint, target_lang)
    if key not in _datasets:
        _datasets[key] = Dataset.open(_make_dataset(tokenizer, target_lang))
    return _datasets[key]


# fingerprint of the tokenizer, or "" for the default tokenizer, and target language -> dataset
_datasets: dict[tuple[str, str], Dataset] = {}


def _make_dataset(tokenizer: Tokenizer | None, target_lang: str) -> Path:
    """Preprocesses a random corpus with word alignments. Returns the folder of the dataset, for `Dataset.open`.

    If `tokenizer` is None, a tokenizer of 320 pieces is trained. The files are removed when the process exits.
    """
    folder = Path(tempfile.mkdtemp(prefix="nmtkit-check-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for seed, (name, pairs) in enumerate(PAIRS.items()):
        write_corpus(folder / name, pairs, seed)
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer")
    config = PreprocessConfig(
        source_lang="xx",
        target_lang=target_lang,
        train=(str(folder / "train"),),
        valid=(str(folder / "valid"),),
        alignments=(folder / "train.links",),
        destdir=folder / "data-bin",
        **({"vocab_size": 320} if tokenizer is None else {"tokenizer_from": (folder / "tokenizer",)}),
    )
    with quiet():
        preprocess(config)
    return folder / "data-bin"


def batch(*pairs: int, tokenizer: Tokenizer | None = None) -> Batch:
    """Returns a micro-batch of the tiny dataset. `pairs` are the indices of its training pairs."""
    return dataset(tokenizer)["train"].batch(torch.tensor(pairs).numpy())


def train(data: Path, names: Mapping[str, str], settings: Mapping[str, Any], save_dir: Path, max_update: int) -> None:
    """Trains on the dataset `data` until update `max_update`. Resumes an existing run in `save_dir`.

    `names` maps kinds of components to registered names, for example "criterion" to "cross_entropy".
    """
    settings = RUN | dict(settings) | {"save_dir": save_dir, "max_update": max_update}
    with quiet():
        Run(JobConfig.read(names={"metrics": "none"} | dict(names), settings=settings), data, Lines()).run()


def tiny_model(tokenizer: Tokenizer | None = None) -> Architecture:
    """Returns a tiny Transformer for the tiny dataset. Seeds the generator of torch, so all calls give equal models."""
    torch.manual_seed(1)
    return ARCHITECTURES["transformer_tiny"].factory(TINY_CONFIG, vocabulary_of(dataset(tokenizer).tokenizer))


def resume_is_exact(subject: Subject[Any]) -> None:
    """Raises ContractError unless a run of four updates gives the same weights as a run resumed after two updates."""
    with tempfile.TemporaryDirectory() as folder:
        check_resume(subject, Path(folder))


def check_resume(subject: Subject[Any], folder: Path) -> None:
    """Runs the check of `resume_is_exact`, and leaves the checkpoints of both runs in `folder`."""
    kind = next(kind for kind, registry in REGISTRIES.items() if registry is subject.registry)
    names = {"architecture": "transformer_tiny", kind: subject.name}
    settings = {"lr": 0.01, "warmup_updates": 4} | ({} if kind == "architecture" else TINY_TRANSFORMER)
    settings |= subject.settings
    monolingual = getattr(subject.registry[subject.name].factory, "monolingual", False)  # only transforms declare it
    data = dataset(subject.tokenizer, target_lang="xx" if monolingual else "yy").folder
    train(data, names, settings, folder / "whole", 4)
    train(data, names, settings, folder / "parts", 2)
    train(data, names, settings, folder / "parts", 4)
    whole, parts = (checkpoint.load(folder / name / "last.pt")["model"] for name in ("whole", "parts"))
    differ = [name for name, tensor in whole.items() if not torch.equal(tensor, parts[name])]
    require(
        not differ,
        f"after update 4, a run resumed after update 2 has different weights from an uninterrupted run: {differ[:3]}; "
        "an update may depend only on the saved state (state_dict, state), the arguments and torch's generator",
    )
