"""Corpora of random words, and `nmtkit preprocess` of them in this process."""

from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result

from nmtkit.cli.preprocess import command

WORDS = "bado kelu miro sate vonu pika zulo tera gano feli".split()  # noqa: SIM905
FLAGS = ["-s", "xx", "-t", "yy"]


def lines(count: int, seed: int) -> list[list[str]]:
    """Returns the two sides of random pairs. A target is the source with its words in reverse order and in capitals."""
    rng = np.random.default_rng(seed)
    sources = [[WORDS[index] for index in rng.integers(0, 10, rng.integers(2, 9))] for _ in range(count)]
    return [[" ".join(words) for words in sources], [" ".join(words[::-1]).upper() for words in sources]]


def write(prefix: Path, sides: list[list[str]]) -> str:
    """Writes the files PREFIX.xx and PREFIX.yy. Returns the prefix, for --trainpref."""
    for language, side in zip(("xx", "yy"), sides, strict=True):
        prefix.with_name(f"{prefix.name}.{language}").write_bytes("".join(line + "\n" for line in side).encode())
    return str(prefix)


def preprocess(*flags: str | Path) -> Result:
    workers = [] if any(str(flag).startswith("--workers") for flag in flags) else ["--workers", "1"]
    return CliRunner().invoke(command, [*FLAGS, *workers, *map(str, flags)])


def refused(message: str, *flags: str | Path) -> str:
    """Runs a preprocess that must fail with `message`, as an error of the user. Returns all its messages."""
    result = preprocess(*flags)
    assert result.exit_code == 2, result.output
    text = " ".join(result.stderr.split())
    assert message in text, text
    return text


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of all files in a folder and its subfolders, by their paths in the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
