"""Decodes a batch of sentences: searches or samples translations, or scores given ones, and aligns them."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.architectures.interface import layer_index
from nmtkit.data.tokenizer import BOS, EOS
from nmtkit.layers.packed import Packed
from nmtkit.search.beam_search import BeamSearch, length_penalty, mean_log_probabilities
from nmtkit.search.constrained_search import with_required
from nmtkit.search.constraints import NO_CONSTRAINTS, Constraints, PieceEdges
from nmtkit.search.logits_processors import LogitsProcessor
from nmtkit.search.options import SearchOptions
from nmtkit.search.sampling import Sampling
from nmtkit.search.segments import BatchHypotheses, Hypothesis, SegmentBatch

PROJECTED_ROWS = 1024  # tokens whose distributions are in memory together

# B sentences, T target tokens of all, L and M tokens of the longest target and source


def decode(
    models: Sequence[Architecture],
    batch: SegmentBatch,
    options: SearchOptions,
    device: torch.device,
    edges: PieceEdges | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> BatchHypotheses:
    """Returns the hypotheses of each sentence of a batch, with everything that `options` ask for.

    `processors` change the log probabilities of the search. `edges` of the target pieces are for required phrases of
    whole words.
    """
    if not batch:
        return []
    source = Packed.from_lists([sentence.ids for sentence in batch], device)
    if options.score_reference:
        references = [sentence.reference or [] for sentence in batch]
        given = [sentence.constraints.given for sentence in batch]
        found = [[hypothesis] for hypothesis in score_references(models, source, references, options.lenpen, given)]
    else:
        constraints, seeds = [sentence.constraints for sentence in batch], [sentence.seed for sentence in batch]
        found = beam_search(models, source, options, constraints, seeds, edges, processors)
    return annotated(models, batch, options, device, found)


def annotated(
    models: Sequence[Architecture],
    batch: SegmentBatch,
    options: SearchOptions,
    device: torch.device,
    found: BatchHypotheses,
) -> BatchHypotheses:
    """Returns hypotheses of any search with the additions that `options` request: alignments, token probabilities."""
    aligned, scored = options.alignment is not None or options.replace_unknown, options.quality
    if not batch or not (aligned or scored):
        return found
    source = Packed.from_lists([sentence.ids for sentence in batch], device)
    if scored and not options.score_reference:
        found = with_token_log_probabilities(models, source, found)
    return align(models, source, found) if aligned else found


@torch.inference_mode()
def beam_search(
    models: Sequence[Architecture],
    source: Packed,
    options: SearchOptions,
    constraints: Sequence[Constraints] | None = None,
    seeds: Sequence[int] | None = None,
    edges: PieceEdges | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> BatchHypotheses:
    """Returns the best `options.nbest` translations of each sentence of `source` (ids ending in eos), best first.

    They are distinct as piece sequences, except for samples. `constraints` and `seeds` (of samples; by default the
    index of the sentence) are one for each sentence. `edges` of the target pieces are for required phrases of whole
    words. A sentence whose every hypothesis overflowed gets one empty
    translation with score -inf, and a warning is logged.
    """
    constraints = [NO_CONSTRAINTS] * source.layout.sentences if constraints is None else constraints
    if options.sampling:
        return Sampling(models, source, options, constraints, seeds or range(len(constraints)), processors).run()
    found = BeamSearch(models, source, options, constraints, processors).run()
    return with_required(models, source, options, constraints, edges, found, processors)


@torch.inference_mode()
def score_references(
    models: Sequence[Architecture],
    source: Packed,
    references: Sequence[list[int]],
    lenpen: float,
    given: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """Returns each reference (ids without eos) with its log probability, eos included, and its score.

    The first `given` tokens of each cost nothing.
    """
    gained = token_log_probabilities(models, source, references)
    totals = [sum(each[free:]) for each, free in zip(gained, given or [0] * len(references), strict=True)]
    return [
        Hypothesis(ids, total / float(length_penalty(len(ids) + 1, lenpen)), total, token_log_probabilities=each)
        for ids, total, each in zip(references, totals, gained, strict=True)
    ]


def token_log_probabilities(
    models: Sequence[Architecture], source: Packed, outputs: Sequence[list[int]]
) -> list[list[float]]:
    """Returns the log probability of each token of an output (ids without eos) for each sentence, and of its eos.

    One pass over all tokens, whatever found the outputs; of several models, of their mean probabilities.
    """
    inputs, targets = _packed([[BOS, *ids] for ids in outputs], source), [[*ids, EOS] for ids in outputs]
    features = [model(source, inputs) for model in models]  # T D of each
    wanted = _packed(targets, source).values[:, None]
    parts = []
    for start in range(0, len(wanted), PROJECTED_ROWS):
        rows = slice(start, start + PROJECTED_ROWS)
        logits = [model.output_projection(each[rows]) for model, each in zip(models, features, strict=True)]
        parts.append(mean_log_probabilities(logits).gather(1, wanted[rows])[:, 0].double().cpu())
    gained = torch.cat(parts).nan_to_num_(nan=-math.inf, neginf=-math.inf)
    return [part.tolist() for part in gained.split([len(ids) for ids in targets])]


@torch.inference_mode()
def with_token_log_probabilities(
    models: Sequence[Architecture], source: Packed, found: BatchHypotheses
) -> BatchHypotheses:
    """Returns the hypotheses of each sentence with the log probability of each token."""
    owner = [sentence for sentence, hypotheses in enumerate(found) for _ in hypotheses]
    sources = source.select(torch.tensor(owner, device=source.values.device))
    outputs = [hypothesis.tokens for hypotheses in found for hypothesis in hypotheses]
    gained = iter(token_log_probabilities(models, sources, outputs))
    return [
        [dataclasses.replace(hypothesis, token_log_probabilities=next(gained)) for hypothesis in hypotheses]
        for hypotheses in found
    ]


@torch.inference_mode()
def align(models: Sequence[Architecture], source: Packed, found: BatchHypotheses) -> BatchHypotheses:
    """Returns the hypotheses of each sentence with their `attention`.

    It is the cross-attention of the layer where it follows words best (`layer_index`), the mean of its heads and of the
    models.

    Raises ValueError for an architecture without attention.
    """
    owner = [sentence for sentence, hypotheses in enumerate(found) for _ in hypotheses]
    flat = [hypothesis for hypotheses in found for hypothesis in hypotheses]
    sources = source.select(torch.tensor(owner, device=source.values.device))
    inputs = _packed([[BOS, *hypothesis.tokens] for hypothesis in flat], source)
    weights = torch.stack([_cross_attention(model, sources, inputs) for model in models]).mean(0).cpu()
    lengths = sources.layout.lengths.tolist()
    aligned = iter(
        dataclasses.replace(hypothesis, attention=weights[row, : len(hypothesis.tokens), : lengths[row]].tolist())
        for row, hypothesis in enumerate(flat)
    )
    return [[next(aligned) for _ in hypotheses] for hypotheses in found]


def _cross_attention(model: Architecture, source: Packed, inputs: Packed) -> Tensor:
    """Returns the attention weights to align by, B L M, in fp32."""
    layers = model.attention_weights(source, inputs).get("cross")
    if not layers:
        raise ValueError(f"{type(model).__name__} has no cross-attention to align by")
    return layers[layer_index(None, len(layers))].float().mean(1)


def _packed(sentences: list[list[int]], like: Packed) -> Packed:
    return Packed.from_lists(sentences, like.values.device)
