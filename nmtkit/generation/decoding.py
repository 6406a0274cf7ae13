"""Which search does what was asked for."""

from collections.abc import Sequence

import torch

from nmtkit.architectures import Architecture
from nmtkit.generation.constrained import ConstrainedSearch
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.sampling import SampleSearch
from nmtkit.generation.search import Hypothesis, Search
from nmtkit.generation.wishes import NO_WISHES, Wishes
from nmtkit.packed import Packed


@torch.inference_mode()
def beam_search(
    models: Sequence[Architecture],
    source: Packed,
    options: SearchOptions,
    wishes: Sequence[Wishes] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """The best `options.nbest` translations of each sentence of `source` (ids ending in eos), best first.

    They are distinct as piece sequences, but for samples. `wishes` and `seeds` (of samples; by default the sentence's
    place) are one for each sentence. A sentence whose every hypothesis overflowed gets one empty translation with
    score -inf, and a warning is logged.
    """
    wishes = [NO_WISHES] * source.layout.sentences if wishes is None else wishes
    if options.sampling:
        return SampleSearch(models, source, options, wishes, seeds or range(len(wishes))).run()
    if any(one.required for one in wishes):
        return ConstrainedSearch(models, source, options, wishes).run()
    return Search(models, source, options, wishes).run()
