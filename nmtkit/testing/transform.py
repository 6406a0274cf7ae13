"""Checks of a transform, on a few pairs of the tiny dataset."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nmtkit.architectures.contract import described
from nmtkit.config import derive
from nmtkit.data.transforms import TRANSFORMS, Side, Transform
from nmtkit.testing.checks import Check, require, require_all
from nmtkit.testing.runs import TINY_TRANSFORMER, batch, check_resume, dataset

PAIRS = range(12)


class TransformSubject:
    """A transform under test: its registered name, and settings over its preset."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.settings = settings
        entry = TRANSFORMS[name]
        self.config = derive(entry.preset, settings, f"transform {name}")
        self.factory = entry.factory

    def __str__(self) -> str:
        return f"transform {self.name}"

    def build(self) -> Transform:
        transform: object = self.factory(self.config, dataset().tokenizer)
        require(
            isinstance(transform, Transform),
            f"the factory of {self.name!r} returned {described(transform)}; it must return a Transform",
        )
        assert isinstance(transform, Transform)
        require(
            transform.level in ("ids", "text"),
            f'level is {transform.level!r}; it must be "ids" or "text" (of the class)',
        )
        return transform

    def pairs(self) -> list[tuple[Side, Side]]:
        """Returns pairs as the transform takes them, an empty sentence on either side among them."""
        tokenizer, pairs = dataset().tokenizer, batch(*PAIRS)
        sources = [ids[:-1].numpy() for ids in pairs.source.split()]
        targets = [ids[1:].numpy() for ids in pairs.target_input.split()]
        sources[-1], targets[-2] = sources[-1][:0], targets[-2][:0]
        if self.build().level == "ids":
            return list(zip(sources, targets, strict=True))
        decode = tokenizer.decode_source, tokenizer.decode_target
        return [
            (decode[0](one.tolist()), decode[1](other.tolist())) for one, other in zip(sources, targets, strict=True)
        ]


def check_transform(name: str, **settings: Any) -> None:
    """Raises ContractError unless the transform passes all checks."""
    require_all(TRANSFORM_CHECKS, TransformSubject(name, settings))


def _transformed(transform: Transform, pairs: list[tuple[Side, Side]], seed: int) -> list[tuple[Side, Side]]:
    """Returns what becomes of pairs, the numbers of each drawn from a generator of its own."""
    return [transform.transform(*pair, np.random.default_rng([seed, index])) for index, pair in enumerate(pairs)]


def _equal(one: Side, other: Side) -> bool:
    return one == other if isinstance(one, str) else np.array_equal(one, other)


def pairs_of_its_level_are_returned(subject: TransformSubject) -> None:
    transform, tokenizer = subject.build(), dataset().tokenizer
    sizes = tokenizer.source_size, tokenizer.target_size
    for pair in subject.pairs():
        for seed in range(8):
            result: object = transform.transform(*pair, np.random.default_rng(seed))
            require(
                isinstance(result, tuple) and len(result) == 2,
                f"transform returned {described(result)}; it must return a tuple (source, target)",
            )
            assert isinstance(result, tuple)
            for side, value, size in zip(("source", "target"), result, sizes, strict=True):
                if transform.level == "text":
                    require(isinstance(value, str), f"the {side} returned is {described(value)}; with level = "
                            '"text" it must be a str')  # fmt: skip
                    continue
                right = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
                require(
                    right,
                    f"the {side} returned is {described(value)}"
                    + (f" of {value.dtype}, shape {list(value.shape)}" if isinstance(value, np.ndarray) else "")
                    + '; with level = "ids" it must be a one-dimensional array of whole numbers',
                )
                inside = not len(value) or (int(value.min()) >= 0 and int(value.max()) < size)
                require(
                    inside, f"the {side} returned has ids outside the vocabulary, 0 to {size - 1}: {value.tolist()}"
                )


def what_is_given_is_left_alone(subject: TransformSubject) -> None:
    transform, pairs, before = subject.build(), subject.pairs(), subject.pairs()
    _transformed(transform, pairs, 3)
    same = all(_equal(pairs[index][side], before[index][side]) for index in range(len(pairs)) for side in (0, 1))
    require(same, "transform changes the array it is given, in place; change and return a copy")


def it_repeats_with_the_generator(subject: TransformSubject) -> None:
    transform, pairs = subject.build(), subject.pairs()
    first = _transformed(transform, pairs, 3)
    backwards = reversed(range(len(pairs)))
    again = {index: transform.transform(*pairs[index], np.random.default_rng([3, index])) for index in backwards}
    same = all(_equal(again[index][side], first[index][side]) for index in again for side in (0, 1))
    require(
        same,
        "the same pair with the same generator becomes another one, or depends on the pairs before it; draw from "
        "`generator` alone, and keep nothing between two calls: resume and runs in several processes rely on it",
    )


def resume_is_exact(subject: TransformSubject) -> None:
    names = {"architecture": "transformer_tiny", "transforms": subject.name}
    with tempfile.TemporaryDirectory() as folder:
        check_resume(names, {**TINY_TRANSFORMER, "lr": 0.01, **subject.settings}, Path(folder))


TRANSFORM_CHECKS: tuple[Check, ...] = (
    pairs_of_its_level_are_returned,
    what_is_given_is_left_alone,
    it_repeats_with_the_generator,
    resume_is_exact,
)
