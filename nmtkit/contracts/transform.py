"""Checks of a transform, on a few pairs of the tiny dataset."""

from collections.abc import Iterable
from itertools import chain

import numpy as np

from nmtkit.contracts.checks import Contract, Subject, checks_of, require
from nmtkit.contracts.runs import batch, dataset, resume_is_exact
from nmtkit.data.dataset.transforms import TRANSFORMS, Side, Transform
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures.contract import ContractError, described

PAIRS = range(12)


def build(subject: Subject[Transform]) -> Transform:
    transform = subject.build(dataset(subject.tokenizer).tokenizer)
    levels = ("ids", "text")
    require(transform.level in levels, f'the level of the class is {transform.level!r}; it must be "ids" or "text"')
    return transform


def pairs_for(transform: Transform, vocabulary: Tokenizer | None) -> list[tuple[Side, Side]]:
    """Returns pairs of the type that the transform takes. One pair lacks source words, another lacks target words."""
    tokenizer, pairs = dataset(vocabulary).tokenizer, batch(*PAIRS, tokenizer=vocabulary)
    sources = [ids[:-1].numpy() for ids in pairs.source.split()]
    targets = [ids[1:].numpy() for ids in pairs.target_input.split()]
    sources[-1], targets[-2] = sources[-1][:0], targets[-2][:0]
    if transform.level == "ids":
        return list(zip(sources, targets, strict=True))
    return [
        (tokenizer.decode_source(source.tolist()), tokenizer.decode_target(target.tolist()))
        for source, target in zip(sources, targets, strict=True)
    ]


def _transformed(transform: Transform, pairs: list[tuple[Side, Side]], order: Iterable[int]) -> list[tuple[Side, Side]]:
    """Transforms the pairs with the indices `order`, in this order. The index of a pair seeds its generator."""
    return [transform.transform(*pairs[index], np.random.default_rng([3, index])) for index in order]


def _equal(pairs: Iterable[tuple[Side, Side]], others: Iterable[tuple[Side, Side]]) -> bool:
    sides = zip(chain(*pairs), chain(*others), strict=True)
    return all(side == other if isinstance(side, str) else np.array_equal(side, other) for side, other in sides)


def pairs_of_its_level_are_returned(subject: Subject[Transform]) -> None:
    transform, tokenizer = build(subject), dataset(subject.tokenizer).tokenizer
    sizes = tokenizer.source_size, tokenizer.target_size
    for pair in pairs_for(transform, subject.tokenizer):
        for seed in range(8):
            result: object = transform.transform(*pair, np.random.default_rng(seed))
            if not isinstance(result, tuple) or len(result) != 2:
                raise ContractError(f"transform returned {described(result)}; it must return a tuple (source, target)")
            for side, value, size in zip(("source", "target"), result, sizes, strict=True):
                found = f"the returned {side} is {described(value)}"
                if transform.level == "text":
                    require(isinstance(value, str), f'{found}; with level = "text" it must be a str')
                    continue
                if isinstance(value, np.ndarray):
                    found += f" of {value.dtype}, shape {list(value.shape)}"
                right = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
                require(right, f'{found}; with level = "ids" it must be a one-dimensional array of whole numbers')
                inside = not len(value) or (int(value.min()) >= 0 and int(value.max()) < size)
                require(
                    inside, f"the returned {side} has ids outside the vocabulary, 0 to {size - 1}: {value.tolist()}"
                )


def what_is_given_is_left_alone(subject: Subject[Transform]) -> None:
    transform = build(subject)
    pairs, before = pairs_for(transform, subject.tokenizer), pairs_for(transform, subject.tokenizer)
    _transformed(transform, pairs, PAIRS)
    require(_equal(pairs, before), "transform changes its arguments in place; change and return copies")


def it_repeats_with_the_generator(subject: Subject[Transform]) -> None:
    transform = build(subject)
    pairs = pairs_for(transform, subject.tokenizer)
    first, backwards = _transformed(transform, pairs, PAIRS), _transformed(transform, pairs, reversed(PAIRS))
    require(
        _equal(first, reversed(backwards)),
        "the same pair with the same generator gives a different result, or the result depends on earlier pairs; "
        "draw random numbers only from `generator`, and keep no state between calls, because resumed runs and runs "
        "of several processes need equal results",
    )


check_transform = Contract(TRANSFORMS, Transform, checks_of(__name__, resume_is_exact))
