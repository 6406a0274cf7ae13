"""Transforms of training pairs by name (`--transforms a,b`), in the order given: noise, casing, tags.

A registered factory is called as `factory(config, tokenizer)`. Transforms see every pair of the training set each time
it is trained on, and never those of a validation.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np

from nmtkit.registry import Registry

Side = Any  # of a pair: a text, or an array of ids [tokens] without eos, as the transform's `level` says


class Transform(ABC):
    """Changes a training pair, at random perhaps."""

    level: ClassVar[Literal["text", "ids"]] = "ids"  # what `transform` takes and returns

    @abstractmethod
    def transform(self, source: Side, target: Side, generator: np.random.Generator) -> tuple[Side, Side]:
        """Returns the pair to train on. `generator` is seeded by (seed, epoch, sentence) and is the only randomness."""


TRANSFORMS: Registry[Transform] = Registry("transform", "--transforms", several=True)
