"""Which search does what was asked for."""

from collections.abc import Sequence

import torch

from nmtkit.architectures import Architecture
from nmtkit.generation.beam_search import Hypothesis, Search
from nmtkit.generation.constrained_search import ConstrainedBeamSearch
from nmtkit.generation.constraints import NO_CONSTRAINTS, Constraints
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.sampling import SampleSearch
from nmtkit.packed import Packed


@torch.inference_mode()
def beam_search(
    models: Sequence[Architecture],
    source: Packed,
    options: SearchOptions,
    constraints: Sequence[Constraints] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """The best `options.nbest` translations of each sentence of `source` (ids ending in eos), best first.

    They are distinct as piece sequences, but for samples. `constraints` and `seeds` (of samples; by default the
    sentence's
    place) are one for each sentence. A sentence whose every hypothesis overflowed gets one empty translation with
    score -inf, and a warning is logged.
    """
    constraints = [NO_CONSTRAINTS] * source.layout.sentences if constraints is None else constraints
    if options.sampling:
        return SampleSearch(models, source, options, constraints, seeds or range(len(constraints))).run()
    if any(one.required for one in constraints):
        return ConstrainedBeamSearch(models, source, options, constraints).run()
    return Search(models, source, options, constraints).run()
