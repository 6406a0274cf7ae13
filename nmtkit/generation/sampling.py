"""Samples from a model's distribution, as a search whose rows never compete."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import EOS
from nmtkit.generation.beam_search import Candidates, Search
from nmtkit.generation.constraints import Constraints
from nmtkit.generation.options import SearchOptions
from nmtkit.packed import Packed

# B sentences, R samples (rows) of each, N = B x R, V target vocabulary


class SampleSearch(Search):
    """Draws `options.nbest` samples for each sentence; they are sorted by score, and two may be equal.

    All chance is one number for each sentence, sample and step, drawn from (options.seed, the sentence's own seed), so
    that samples depend on nothing else.
    """

    distinct = False

    def __init__(
        self,
        models: Sequence[Architecture],
        source: Packed,
        options: SearchOptions,
        constraints: Sequence[Constraints],
        seeds: Sequence[int],
    ) -> None:
        super().__init__(models, source, options, constraints)
        self.log_probability.zero_()
        self.generators = [np.random.Generator(np.random.Philox([options.seed, seed])) for seed in seeds]

    def advance(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        sentences, rows = self.log_probability.shape
        chance = np.stack([self.generators[sentence].random(rows) for sentence in self.sentence.tolist()])
        drawn = draw(steps, torch.from_numpy(chance).flatten().to(steps.device), self.options)
        gained = steps.gather(1, drawn[:, None]).double().cpu().view(sentences, rows)
        tokens = drawn.cpu().view(sentences, rows)
        places = torch.arange(rows).expand(sentences, -1)
        self.finish(Candidates(self.log_probability + gained, places, tokens))
        self.log_probability = (self.log_probability + gained).masked_fill(tokens == EOS, -math.inf)
        self.history = torch.cat([self.history, tokens[:, :, None]], 2)
        return places + torch.arange(sentences)[:, None] * rows, tokens

    def over(self) -> Tensor:
        return ~self.log_probability.isfinite().any(1)


def draw(steps: Tensor, chance: Tensor, options: SearchOptions) -> Tensor:
    """A token for each row of log probabilities N V: where its share of `chance` [N], in [0, 1), falls."""
    scaled = steps.double() / options.temperature
    if options.top_k:
        scaled, columns = scaled.topk(min(options.top_k, scaled.shape[1]), dim=1)
    elif options.top_p < 1:
        scaled, columns = scaled.sort(dim=1, descending=True, stable=True)
    else:
        columns = torch.arange(scaled.shape[1], device=steps.device).expand_as(scaled)
    probabilities = scaled.softmax(1)
    if options.top_p < 1:
        before = probabilities.cumsum(1) - probabilities
        probabilities = probabilities.masked_fill(before >= options.top_p, 0.0)
    upto = probabilities.nan_to_num().cumsum(1)
    place = torch.searchsorted(upto, chance[:, None] * upto[:, -1:], right=True)
    last = (probabilities > 0).to(torch.uint8).cumsum(1, dtype=torch.int64).argmax(1, keepdim=True)  # rounding
    return columns.gather(1, torch.minimum(place, last))[:, 0]
