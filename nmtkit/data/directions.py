"""Translation directions of a dataset or model with many languages, and the language tokens that mark them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nmtkit.config import suggestion

LanguageTokens = Literal["both", "target-on-source"]
MAX_DIRECTIONS = 65_535  # the direction of a pair is stored in 16 bits; the largest number means no direction


@dataclass(frozen=True, order=True)
class Direction:
    """A source and a target language. They are equal for monolingual text, which a model learns to reconstruct."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"


def token_of(language: str, tokens: LanguageTokens) -> str:
    """Returns the token of a language: __de__ as in M2M-100, or >>de<< as in multilingual models of Marian."""
    return f"__{language}__" if tokens == "both" else f">>{language}<<"


def named_weights(items: Sequence[str], directions: Sequence[Direction], setting: str) -> dict[int, float]:
    """Parses items such as en-de=2: a direction and a weight. Returns the weight of each direction index.

    Raises ValueError for an unknown or repeated direction, or if a weight is not from 0 to 1,000. The error message
    names `setting`.
    """
    names = [str(direction) for direction in directions]
    weights: dict[int, float] = {}
    for item in items:
        name, _, text = item.partition("=")
        if name not in names:
            raise ValueError(f"{setting} names the direction {name!r}; {suggestion(name, names)}")
        number = names.index(name)
        try:
            weight = float(text)
        except ValueError:
            weight = -1.0
        if not 0 <= weight <= 1_000:
            raise ValueError(f"{setting} {item!r} must be a direction and a weight from 0 to 1,000, such as {name}=2")
        if number in weights:
            raise ValueError(f"{setting} has two weights of {name}; give one of them")
        weights[number] = weight
    return weights


def epoch_weights(rows: Sequence[int], temperature: float | None, weights: dict[int, float]) -> list[float]:
    """Returns the weight of each direction: the mean number of times that an epoch contains each of its pairs.

    Direction i has rows[i] pairs. With a temperature, the share of direction i in an epoch is proportional to
    weights[i] * rows[i]^(1 / temperature), and an epoch has sum(rows) pairs. Without a temperature, the result has the
    given weights. A missing weight is 1.

    Source: Arivazhagan et al. 2019, section 4.2.
    """
    all_weights = [weights.get(number, 1.0) for number in range(len(rows))]
    if temperature is None:
        return all_weights
    shares = [weight * count ** (1 / temperature) for weight, count in zip(all_weights, rows, strict=True)]
    total = sum(shares) or 1.0
    return [share / total * sum(rows) / count if count else 0.0 for share, count in zip(shares, rows, strict=True)]
