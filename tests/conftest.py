"""A dataset that is small enough to train on in a test: sentences of made-up words and their mirror images."""

import random
from pathlib import Path

import pytest

from nmtkit.cli import main

WORDS = ["bado", "kelu", "miro", "sate", "vonu", "pika", "zulo", "tera", "gano", "feli"]


def write_corpus(prefix: Path, pairs: int, seed: int) -> None:
    """`prefix`.xx and `prefix`.yy: 1 to 9 words, and the same words backwards, in capitals."""
    draw = random.Random(seed)
    sources = [[draw.choice(WORDS) for _ in range(draw.randint(1, 9))] for _ in range(pairs)]
    prefix.with_suffix(".xx").write_text("".join(" ".join(words) + "\n" for words in sources))
    prefix.with_suffix(".yy").write_text("".join(" ".join(reversed(words)).upper() + "\n" for words in sources))


@pytest.fixture(scope="session")
def mirror_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A binarized dataset of 200 training, 20 valid and 20 test pairs."""
    folder = tmp_path_factory.mktemp("mirror")
    for seed, (name, pairs) in enumerate([("train", 200), ("valid", 20), ("test", 20)]):
        write_corpus(folder / name, pairs, seed)
    flags = ["-s", "xx", "-t", "yy", "--destdir", str(folder / "data-bin"), "--vocab-size", "320"]
    for name in ("train", "valid", "test"):
        flags += [f"--{name}pref", str(folder / name)]
    main(["preprocess", *flags], standalone_mode=False)
    return folder / "data-bin"
