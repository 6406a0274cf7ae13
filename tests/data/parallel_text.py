"""A small made-up parallel text for the tests of the data path."""

import random
from pathlib import Path

ENGLISH = "a the man woman dog cat house green red small large runs walks sees eats in on with and two three".split()  # noqa: SIM905
GERMAN = "ein der Mann Frau Hund Katze Haus grün rot klein groß läuft geht sieht isst in auf mit und zwei drei".split()  # noqa: SIM905


def parallel_lines(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Returns made-up sentence pairs of 1 to 14 words."""
    rng = random.Random(seed)
    rows = [[rng.randrange(len(ENGLISH)) for _ in range(rng.randint(1, 14))] for _ in range(count)]
    return [" ".join(ENGLISH[word] for word in row) for row in rows], [
        " ".join(GERMAN[word] for word in row) for row in rows
    ]


def write_pair(folder: Path, name: str, source: list[str], target: list[str]) -> str:
    """Writes the files NAME.en and NAME.de. Returns the prefix."""
    for language, lines in (("en", source), ("de", target)):
        (folder / f"{name}.{language}").write_bytes("".join(line + "\n" for line in lines).encode())
    return str(folder / name)
