"""Corpora of digits, which are written in the words of three languages."""

import random
from pathlib import Path

ALPHABETS = {
    "en": "zero one two three four five six seven eight nine".split(),  # noqa: SIM905
    "de": "null eins zwei drei vier fünf sechs sieben acht neun".split(),  # noqa: SIM905
    "it": "ze un du tr qu ci se st ot no".split(),  # noqa: SIM905
    "fr": list("0123456789"),
}


def digit_rows(count: int, seed: int, longest: int = 6) -> list[list[int]]:
    """Returns random rows of 2 to `longest` digits."""
    rng = random.Random(seed)
    return [[rng.randrange(10) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def spelled(row: list[int], language: str) -> str:
    return " ".join(ALPHABETS[language][digit] for digit in row)


def write_digits(prefix: Path, rows: list[list[int]], languages: tuple[str, ...]) -> None:
    """Writes a file PREFIX.LANG for each language."""
    for language in languages:
        Path(f"{prefix}.{language}").write_text(
            "".join(spelled(row, language) + "\n" for row in rows), encoding="utf-8"
        )
