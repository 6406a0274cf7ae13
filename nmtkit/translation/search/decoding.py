"""Searches one batch with required phrases, scores references, and annotates complete translations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.interface import layer_index
from nmtkit.translation.search.beam_search import free_search, run_search
from nmtkit.translation.search.constrained_search import RequiredTextSelector, lacking_sentences
from nmtkit.translation.search.constraints import NO_CONSTRAINTS, Constraints
from nmtkit.translation.search.logits_processors import LogitsProcessor
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import length_penalty
from nmtkit.translation.search.scorer import mean_log_probabilities
from nmtkit.translation.search.shortlist import Shortlist
from nmtkit.translation.search.types import BatchHypotheses, Hypothesis, SegmentBatch

PROJECTED_ROWS = 1024  # largest number of tokens whose distributions are in memory at the same time

# B sentences, T target tokens of all sentences, L and M tokens of the longest target and source, D model width


@torch.inference_mode()
def beam_search(
    models: Sequence[Architecture],
    source: Packed,
    options: SearchOptions,
    constraints: Sequence[Constraints] | None = None,
    seeds: Sequence[int] | None = None,
    processors: Sequence[LogitsProcessor] = (),
    shortlist: Shortlist | None = None,
) -> BatchHypotheses:
    """Returns the best `options.nbest` translations of each sentence of `source` (ids ending in eos), best first.

    Translations of a sentence differ in their pieces; samples can be equal. `constraints` and `seeds` have one element
    for each sentence; by default, the seed of a sentence is its index. `options.shortlist` needs a `shortlist`. If all
    hypotheses of a sentence overflow, a warning is logged and its only translation is empty with score -inf.
    """
    constraints = [NO_CONSTRAINTS] * source.layout.sentences if constraints is None else constraints
    results = free_search(models, source, options, constraints, seeds, processors, shortlist)
    return with_required_phrases(models, source, results, options, constraints, processors, shortlist)


@torch.inference_mode()
def with_required_phrases(
    models: Sequence[Architecture],
    source: Packed,
    results: BatchHypotheses,
    options: SearchOptions,
    constraints: Sequence[Constraints],
    processors: Sequence[LogitsProcessor],
    shortlist: Shortlist | None,
) -> BatchHypotheses:
    """Returns `results`, with new hypotheses for each sentence whose hypotheses lack a required text.

    An unconstrained hypothesis that contains all texts is better than the result of a constrained search, because
    `RequiredTextSelector` divides the beam into banks, so fewer of the best hypotheses stay open. So only sentences
    that lack a text are searched again.
    """
    lacking = [] if options.sampling else lacking_sentences(constraints, results, options)
    if not lacking:
        return results

    rest = source.select(torch.tensor(lacking, device=source.values.device))
    constrained, selector_of = [constraints[index] for index in lacking], partial(RequiredTextSelector, options)
    found = run_search(models, rest, options, constrained, selector_of, processors, shortlist)
    replaced = dict(zip(lacking, found, strict=True))
    return [replaced.get(index, hypotheses) for index, hypotheses in enumerate(results)]


def needs_attention(options: SearchOptions) -> bool:
    """Returns whether the results of a search with `options` need attention weights."""
    return options.alignment is not None or options.replace_unknown


@torch.inference_mode()
def annotated(
    models: Sequence[Architecture], source: Packed, options: SearchOptions, results: BatchHypotheses
) -> BatchHypotheses:
    """Adds attention and token log probabilities to the hypotheses in `results`, if `options` request them.

    Some engines have already added these fields. Such hypotheses stay the same. Raises ValueError if `options`
    request attention and an architecture has no cross-attention.
    """
    if options.quality and not options.score_reference:
        results = _completed("token_log_probabilities", token_log_probabilities, models, source, results)
    if needs_attention(options):
        results = _completed("attention", _attention, models, source, results)
    return results


def _completed(
    field: str, compute: Callable[..., list[Any]], models: Sequence[Architecture], source: Packed,
    results: BatchHypotheses,
) -> BatchHypotheses:  # fmt: skip
    """Sets a field of the hypotheses that lack the field. `compute` has the parameters of `token_log_probabilities`."""
    lacking = [(row, each) for row, own in enumerate(results) for each in own if getattr(each, field) is None]
    if not lacking:
        return results
    sources = source.select(torch.tensor([row for row, _ in lacking], device=source.values.device))
    values = iter(compute(models, sources, [each.tokens for _, each in lacking]))
    return [
        [each if getattr(each, field) is not None else replace(each, **{field: next(values)}) for each in own]
        for own in results
    ]


@torch.inference_mode()
def score_references(
    models: Sequence[Architecture], source: Packed, batch: SegmentBatch, lenpen: float
) -> BatchHypotheses:
    """Returns a hypothesis for the reference of each segment, with the log probability and score that the models give.

    `source` are the ids of the segments. The log probability is the sum over the tokens and eos, without language
    tokens, because the user chooses the language. The score is the log probability divided by the length penalty.
    """
    references = [segment.reference or [] for segment in batch]
    results = []
    gained = token_log_probabilities(models, source, references)
    for segment, ids, each in zip(batch, references, gained, strict=True):
        language_tokens = segment.constraints.language_tokens
        total = sum(each[language_tokens:])
        score = total / length_penalty(len(ids) + 1, lenpen, language_tokens=language_tokens)
        results.append([Hypothesis(ids, score, total, token_log_probabilities=each)])
    return results


def token_log_probabilities(
    models: Sequence[Architecture], source: Packed, outputs: Sequence[list[int]]
) -> list[list[float]]:
    """Returns the log probability of each token of the outputs (ids without eos), and of eos.

    There is one output for each sentence of `source`. All tokens are computed in one pass. The probabilities of
    several models are averaged.
    """
    inputs, targets = _packed([[BOS, *ids] for ids in outputs], source), [[*ids, EOS] for ids in outputs]
    features = [model(source, inputs) for model in models]  # a tensor [T, D] for each model
    target = _packed(targets, source).values[:, None]
    parts = []
    for start in range(0, len(target), PROJECTED_ROWS):
        rows = slice(start, start + PROJECTED_ROWS)
        logits = [model.output_projection(each[rows]) for model, each in zip(models, features, strict=True)]
        parts.append(mean_log_probabilities(logits).gather(1, target[rows])[:, 0].cpu().double())
    gained = torch.cat(parts).nan_to_num_(nan=-math.inf, neginf=-math.inf)
    return [part.tolist() for part in gained.split([len(ids) for ids in targets])]


def _attention(models: Sequence[Architecture], source: Packed, outputs: Sequence[list[int]]) -> list[list[list[float]]]:
    """Returns `Hypothesis.attention` of the outputs: the mean cross-attention of heads and models.

    The weights come from layer `layer_index(None, …)`, which aligns words best. Raises ValueError for an architecture
    without cross-attention.
    """
    inputs, each = _packed([[BOS, *ids] for ids in outputs], source), []
    for model in models:
        layers = model.attention_weights(source, inputs).get("cross")
        if not layers:
            raise ValueError(f"{type(model).__name__} has no cross-attention, so words cannot be aligned")
        each.append(layers[layer_index(None, len(layers))].float().mean(1))
    weights = torch.stack(each).mean(0).cpu()  # B L M
    sizes = zip(weights, outputs, source.layout.lengths.tolist(), strict=True)
    return [rows[: len(ids), :length].tolist() for rows, ids, length in sizes]


def _packed(sentences: list[list[int]], like: Packed) -> Packed:
    return Packed.from_lists(sentences, like.values.device)
