"""Sampling from the distribution of a model: a search whose hypotheses do not compete."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.translation.search.beam_search import BeamSearch
from nmtkit.translation.search.candidates import Candidates
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.logits_processors import LogitsProcessor
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.scorer import SearchModel

# B sentences, R samples of each, N = B x R rows, V target vocabulary


class Sampling(BeamSearch):
    """A search that draws `options.nbest` samples for each sentence. Samples are sorted by score. Some can be equal.

    Each step of each sample uses one random number. The random numbers depend only on `options.seed` and on the seed of
    the sentence.
    """

    distinct = False

    def __init__(
        self,
        models: Sequence[SearchModel],
        source: Packed,
        options: SearchOptions,
        constraints: Sequence[Constraints],
        seeds: Sequence[int],
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        super().__init__(models, source, options, constraints, processors)
        self.log_probability.zero_()
        self.generators = [np.random.Generator(np.random.Philox([options.seed, seed])) for seed in seeds]

    def scores(self, tokens: Tensor) -> Tensor:
        return self.scorer.step(tokens)

    def advance(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        sentences, rows = self.log_probability.shape
        uniform = np.stack([self.generators[sentence].random(rows) for sentence in self.sentence.tolist()])
        drawn = draw(log_probs, torch.from_numpy(uniform).flatten().to(log_probs.device), self.options)
        gained = log_probs.gather(1, drawn[:, None]).double().cpu().view(sentences, rows)
        tokens = drawn.cpu().view(sentences, rows)
        beam_index = torch.arange(rows).expand(sentences, -1)
        self.finish(Candidates(self.log_probability + gained, beam_index, tokens))
        self.log_probability = (self.log_probability + gained).masked_fill(tokens == EOS, -math.inf)
        self.history = torch.cat([self.history, tokens[:, :, None]], 2)
        return beam_index + torch.arange(sentences)[:, None] * rows, tokens

    def is_done(self) -> Tensor:
        return ~self.log_probability.isfinite().any(1)


def draw(log_probs: Tensor, uniform: Tensor, options: SearchOptions) -> Tensor:
    """Samples a token for each row of `log_probs` [N, V], from random numbers `uniform` [N] in [0, 1)."""
    scaled = log_probs.double() / options.temperature
    if options.top_k:
        scaled, columns = scaled.topk(min(options.top_k, scaled.shape[1]), dim=1)
    elif options.top_p < 1:
        scaled, columns = scaled.sort(dim=1, descending=True, stable=True)
    else:
        columns = torch.arange(scaled.shape[1], device=log_probs.device).expand_as(scaled)
    probabilities = scaled.softmax(1)
    if options.top_p < 1:
        before = probabilities.cumsum(1) - probabilities
        probabilities = probabilities.masked_fill(before >= options.top_p, 0.0)
    cumulative = probabilities.nan_to_num().cumsum(1)
    index = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    # because of rounding, the index can be beyond the last token of positive probability
    last = (probabilities > 0).to(torch.uint8).cumsum(1, dtype=torch.int64).argmax(1, keepdim=True)
    return columns.gather(1, torch.minimum(index, last))[:, 0]
