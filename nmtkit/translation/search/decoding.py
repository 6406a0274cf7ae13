"""Decoding of a batch of sentences: search or sampling of translations, scores of references, and alignments."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.interface import layer_index
from nmtkit.translation.search.beam_search import BeamSearch
from nmtkit.translation.search.candidates import length_penalty
from nmtkit.translation.search.constrained_search import ConstrainedBeamSearch, lacking
from nmtkit.translation.search.constraints import NO_CONSTRAINTS, Constraints, PieceEdges
from nmtkit.translation.search.greedy_search import GreedySearch, is_greedy
from nmtkit.translation.search.limited_search import Models, Search, limited_search
from nmtkit.translation.search.logits_processors import LogitsProcessor
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.sampling import Sampling
from nmtkit.translation.search.scorer import mean_log_probabilities
from nmtkit.translation.search.segments import BatchHypotheses, Hypothesis, SegmentBatch
from nmtkit.translation.search.shortlist import Shortlist

PROJECTED_ROWS = 1024  # largest number of tokens whose distributions are in memory at the same time

# B sentences, T target tokens of all sentences, L and M tokens of the longest target and source


def decode(
    models: Sequence[Architecture],
    batch: SegmentBatch,
    options: SearchOptions,
    device: torch.device,
    edges: PieceEdges | None = None,
    processors: Sequence[LogitsProcessor] = (),
    shortlist: Shortlist | None = None,
) -> BatchHypotheses:
    """Returns the hypotheses of each sentence of a batch, with the results that `options` request.

    `processors` change the log probabilities of the search. Required phrases of whole words need the `edges` of the
    target pieces, and `options.shortlist` needs a `shortlist`.
    """
    if not batch:
        return []
    source = Packed.from_lists([sentence.ids for sentence in batch], device)
    if options.score_reference:
        references = [sentence.reference or [] for sentence in batch]
        language_tokens = [sentence.constraints.language_tokens for sentence in batch]
        scored = score_references(models, source, references, options.lenpen, language_tokens)
        results = [[hypothesis] for hypothesis in scored]
    else:
        constraints, seeds = [sentence.constraints for sentence in batch], [sentence.seed for sentence in batch]
        results = beam_search(models, source, options, constraints, seeds, edges, processors, shortlist)
    return annotated(models, batch, options, device, results)


def annotated(
    models: Sequence[Architecture],
    batch: SegmentBatch,
    options: SearchOptions,
    device: torch.device,
    results: BatchHypotheses,
) -> BatchHypotheses:
    """Adds attention and token log probabilities to the hypotheses in `results`, if `options` request them."""
    aligned, scored = options.alignment is not None or options.replace_unknown, options.quality
    if not batch or not (aligned or scored):
        return results
    source = Packed.from_lists([sentence.ids for sentence in batch], device)
    if scored and not options.score_reference:
        results = with_token_log_probabilities(models, source, results)
    return align(models, source, results) if aligned else results


@torch.inference_mode()
def beam_search(
    models: Sequence[Architecture],
    source: Packed,
    options: SearchOptions,
    constraints: Sequence[Constraints] | None = None,
    seeds: Sequence[int] | None = None,
    edges: PieceEdges | None = None,
    processors: Sequence[LogitsProcessor] = (),
    shortlist: Shortlist | None = None,
) -> BatchHypotheses:
    """Returns the best `options.nbest` translations of each sentence of `source` (ids ending in eos), best first.

    Translations of a sentence differ in their pieces; samples can be equal. `constraints` and `seeds` have one element
    for each sentence; by default, the seed of a sentence is its index. Required phrases of whole words need the `edges`
    of the target pieces, and `options.shortlist` needs a `shortlist`. If all hypotheses of a sentence overflow, a
    warning is logged and its only translation is empty with score -inf.
    """
    constraints = [NO_CONSTRAINTS] * source.layout.sentences if constraints is None else constraints

    def run(search: Search, source: Packed, constraints: Sequence[Constraints]) -> BatchHypotheses:
        if shortlist is None or not options.shortlist:
            return search(models, source, constraints, edges)
        return limited_search(models, source, constraints, edges, shortlist, search)

    def unconstrained(models: Models, source: Packed, constraints: Sequence[Constraints], *_: Any) -> BatchHypotheses:
        if options.sampling:
            return Sampling(models, source, options, constraints, seeds or range(len(constraints)), processors).run()
        kind = GreedySearch if is_greedy(options) else BeamSearch
        return kind(models, source, options, constraints, processors).run()

    def constrained(
        models: Models, source: Packed, constraints: Sequence[Constraints], edges: PieceEdges | None
    ) -> BatchHypotheses:
        return ConstrainedBeamSearch(models, source, options, constraints, edges, processors).run()

    results = run(unconstrained, source, constraints)
    missing = [] if options.sampling else lacking(constraints, results, options, edges)
    if missing:
        # An unconstrained result that contains all phrases is better than a constrained result: until a phrase begins,
        # banks take slots of the beam away from the best hypotheses. So only the other sentences are searched with
        # banks.
        rest = source.select(torch.tensor(missing, device=source.values.device))
        constrained_results = run(constrained, rest, [constraints[index] for index in missing])
        for index, hypotheses in zip(missing, constrained_results, strict=True):
            results[index] = hypotheses
    return results


@torch.inference_mode()
def score_references(
    models: Sequence[Architecture],
    source: Packed,
    references: Sequence[list[int]],
    lenpen: float,
    language_tokens: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """Returns a hypothesis for each reference translation, with the log probability and score that the models give.

    `references` are token ids without eos. The log probability is the sum over the tokens and eos, without the first
    `language_tokens[i]` tokens of reference i, because the user chooses the language token. The score is the log
    probability divided by the length penalty.
    """
    gained = token_log_probabilities(models, source, references)
    totals = [sum(each[free:]) for each, free in zip(gained, language_tokens or [0] * len(references), strict=True)]
    return [
        Hypothesis(ids, total / float(length_penalty(len(ids) + 1, lenpen)), total, token_log_probabilities=each)
        for ids, total, each in zip(references, totals, gained, strict=True)
    ]


def token_log_probabilities(
    models: Sequence[Architecture], source: Packed, outputs: Sequence[list[int]]
) -> list[list[float]]:
    """Returns the log probability of each token of the outputs (ids without eos), and of eos.

    There is one output for each sentence of `source`. All tokens are computed in one pass. The probabilities of
    several models are averaged.
    """
    inputs, targets = _packed([[BOS, *ids] for ids in outputs], source), [[*ids, EOS] for ids in outputs]
    features = [model(source, inputs) for model in models]  # one [T, D] for each model
    target = _packed(targets, source).values[:, None]
    parts = []
    for start in range(0, len(target), PROJECTED_ROWS):
        rows = slice(start, start + PROJECTED_ROWS)
        logits = [model.output_projection(each[rows]) for model, each in zip(models, features, strict=True)]
        parts.append(mean_log_probabilities(logits).gather(1, target[rows])[:, 0].double().cpu())
    gained = torch.cat(parts).nan_to_num_(nan=-math.inf, neginf=-math.inf)
    return [part.tolist() for part in gained.split([len(ids) for ids in targets])]


@torch.inference_mode()
def with_token_log_probabilities(
    models: Sequence[Architecture], source: Packed, results: BatchHypotheses
) -> BatchHypotheses:
    """Adds the log probability of each token to the hypotheses of each sentence."""
    owner = [sentence for sentence, hypotheses in enumerate(results) for _ in hypotheses]
    sources = source.select(torch.tensor(owner, device=source.values.device))
    outputs = [hypothesis.tokens for hypotheses in results for hypothesis in hypotheses]
    gained = iter(token_log_probabilities(models, sources, outputs))
    return [
        [dataclasses.replace(hypothesis, token_log_probabilities=next(gained)) for hypothesis in hypotheses]
        for hypotheses in results
    ]


@torch.inference_mode()
def align(models: Sequence[Architecture], source: Packed, results: BatchHypotheses) -> BatchHypotheses:
    """Adds `attention` to the hypotheses of each sentence: the mean cross-attention of heads and models.

    The weights come from layer `layer_index(None, …)`, which aligns words best. Raises ValueError for an architecture
    without attention.
    """
    owner = [sentence for sentence, hypotheses in enumerate(results) for _ in hypotheses]
    flat = [hypothesis for hypotheses in results for hypothesis in hypotheses]
    sources = source.select(torch.tensor(owner, device=source.values.device))
    inputs = _packed([[BOS, *hypothesis.tokens] for hypothesis in flat], source)
    weights = torch.stack([_cross_attention(model, sources, inputs) for model in models]).mean(0).cpu()
    lengths = sources.layout.lengths.tolist()
    aligned = iter(
        dataclasses.replace(hypothesis, attention=weights[row, : len(hypothesis.tokens), : lengths[row]].tolist())
        for row, hypothesis in enumerate(flat)
    )
    return [[next(aligned) for _ in hypotheses] for hypotheses in results]


def _cross_attention(model: Architecture, source: Packed, inputs: Packed) -> Tensor:
    """Returns the attention weights from which words are aligned: B L M, in fp32."""
    layers = model.attention_weights(source, inputs).get("cross")
    if not layers:
        raise ValueError(f"{type(model).__name__} has no cross-attention, so words cannot be aligned")
    return layers[layer_index(None, len(layers))].float().mean(1)


def _packed(sentences: list[list[int]], like: Packed) -> Packed:
    return Packed.from_lists(sentences, like.values.device)
