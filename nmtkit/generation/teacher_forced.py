"""What models say of translations that are known already: their probabilities, and what they attend to."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import BOS, EOS
from nmtkit.generation.beam_search import Hypothesis, penalty
from nmtkit.packed import Packed

# B sentences, T target tokens in all of them, V target vocabulary, H heads, L and M longest target and source


@torch.inference_mode()
def score_references(
    models: Sequence[Architecture], source: Packed, references: Sequence[list[int]], lenpen: float
) -> list[Hypothesis]:
    """Each reference (ids without eos) with its log probability, eos included, and its score."""
    inputs, outputs = _packed([[BOS, *ids] for ids in references], source), [[*ids, EOS] for ids in references]
    each = [
        model.output_projection(model(source, inputs)).log_softmax(-1, dtype=torch.float32) for model in models
    ]  # T V
    mean = each[0] if len(each) == 1 else torch.stack(each).logsumexp(0) - math.log(len(each))
    gained = mean.gather(1, _packed(outputs, source).values[:, None])[:, 0].double().cpu()
    totals = [float(part.sum()) for part in gained.split([len(ids) for ids in outputs])]
    return [
        Hypothesis(ids, total / float(penalty(len(ids) + 1, lenpen)), total)
        for ids, total in zip(references, totals, strict=True)
    ]


@torch.inference_mode()
def align(models: Sequence[Architecture], source: Packed, found: Sequence[list[Hypothesis]]) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence with their `alignment`.

    It is the cross-attention of the last layer but one (of the only one, if there is but one), the mean of its heads
    and of the models: there it follows words best (Garg et al. 2019, "Jointly Learning to Align and Translate").

    Raises ValueError for an architecture without attention.
    """
    owner = [place for place, hypotheses in enumerate(found) for _ in hypotheses]
    flat = [hypothesis for hypotheses in found for hypothesis in hypotheses]
    sources = source.select(torch.tensor(owner, device=source.values.device))
    inputs = _packed([[BOS, *one.tokens] for one in flat], source)
    maps = [_cross(model, sources, inputs) for model in models]
    weights = torch.stack(maps).mean(0).cpu()
    lengths = sources.layout.lengths.tolist()
    aligned = iter(
        dataclasses.replace(one, alignment=weights[row, : len(one.tokens), : lengths[row]].tolist())
        for row, one in enumerate(flat)
    )
    return [[next(aligned) for _ in hypotheses] for hypotheses in found]


def _cross(model: Architecture, source: Packed, inputs: Packed) -> Tensor:
    """The attention to align by, B L M, in fp32."""
    maps = model.attention_weights(source, inputs).get("cross")
    if not maps:
        raise ValueError(f"{type(model).__name__} has no cross-attention to align by")
    return maps[max(0, len(maps) - 2)].float().mean(1)


def _packed(sentences: list[list[int]], like: Packed) -> Packed:
    return Packed.from_lists(sentences, like.values.device)
