"""Replaces some source pieces by random pieces of the vocabulary (Wang et al. 2018, SwitchOut, on one side)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nmtkit.extend import TRANSFORMS, Config, Tokenizer, Transform, option

Ids = npt.NDArray[np.integer]
FIRST = 3  # smaller ids are <unk>, bos and eos


@dataclass(frozen=True, kw_only=True)
class SwitchOutConfig(Config):
    switchout: float = option(0.1, "Share of source pieces to replace.", min=0, max=1)


@TRANSFORMS.register("switchout", SwitchOutConfig())
class SwitchOut(Transform):
    level = "ids"  # with "text", `transform` takes and returns lines

    def __init__(self, config: SwitchOutConfig, tokenizer: Tokenizer) -> None:
        self.share, self.size = config.switchout, tokenizer.source_size

    def transform(self, source: Ids, target: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        replaced = generator.random(len(source)) < self.share
        drawn = generator.integers(FIRST, self.size, len(source))
        return np.where(replaced, drawn, source).astype(source.dtype), target
