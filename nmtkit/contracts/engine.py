"""Checks of an engine: with each option, the engine finds the same hypotheses as PyTorch, for a tiny Transformer."""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nmtkit.contracts.checks import Contract, Subject, checks_of, require
from nmtkit.contracts.runs import TINY_CONFIG, dataset, tiny_model
from nmtkit.data import checkpoint_file
from nmtkit.data.tokenizers.tokenizer import EOS, Tokenizer
from nmtkit.models.building import from_checkpoint, to_checkpoint
from nmtkit.translation.engines import ENGINES, Decoder, Engine, LoadedModels
from nmtkit.translation.search.constraints import (
    AvoidedText,
    Constraints,
    PieceTexts,
    RequiredText,
    SpelledPhrase,
    text_bytes,
)
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import BatchHypotheses, Segment, SegmentBatch

SHORT: dict[str, Any] = {"beam": 3, "lenpen": 0.0, "max_len_a": 0.5, "max_len_b": 5}
# Each entry overrides options of SHORT; for sampling, all other options have their defaults. With each entry, an engine
# must find the same hypotheses as PyTorch. An engine without `falls_back` may refuse all entries except the first two
# entries: other checks use these entries.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"beam": 1}, {}, {"beam": 1, "lenpen": 1.0}, {"lenpen": 1.0}, {"lenpen": -0.5}, {"nbest": 3}, {"min_len": 4},
    {"max_len_a": 0.0, "max_len_b": 2}, {"max_len_b": 0, "min_len": 2}, {"no_repeat_ngram": 2}, {"unkpen": 0.5},
    {"replace_unknown": True}, {"diverse_groups": 3}, {"beam": 4, "sampling": True}, {"alignment": "soft"},
    {"quality": True},
)  # fmt: skip
LENGTHS = (4, 1, 7, 2, 5, 3, 12)  # source pieces of the segments
TOLERANCE = 0.05  # maximum difference of scores; CTranslate2 leaves <unk> out of its distributions


@functools.cache
def _checkpoint(tokenizer: Tokenizer | None) -> Path:
    """Writes a checkpoint of a random Transformer whose outputs differ in length, and returns the path of the file."""
    known, folder = dataset(tokenizer).tokenizer, Path(tempfile.mkdtemp(prefix="nmtkit-contract-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model: Any = tiny_model(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
        model.output_projection.weight[EOS] *= 1.5
    checkpoint_file.save(folder / "model.pt", to_checkpoint(model, "transformer_tiny", TINY_CONFIG, known, [], 1))
    return folder / "model.pt"


def _decoders(subject: Subject[Engine]) -> tuple[Decoder, Decoder]:
    """Returns a decoder with the engine, and a decoder with PyTorch."""
    path = _checkpoint(subject.tokenizer)
    model, tokenizer = from_checkpoint(path)
    loaded = LoadedModels([model], tokenizer, "cpu", 2048, [path])
    decoder = Decoder(loaded, "torch")
    decoder.engine, decoder.name = subject.build(loaded), subject.name
    return decoder, Decoder(loaded, "torch")


def _segments(decoder: Decoder) -> SegmentBatch:
    size, generator = decoder.torch.loaded.tokenizer.source_size, torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, size, (length,), generator=generator).tolist() for length in LENGTHS]
    return [Segment([*ids, EOS], seed=index) for index, ids in enumerate(drawn)]


def _decoded(decoder: Decoder, batches: Sequence[SegmentBatch], options: SearchOptions) -> BatchHypotheses:
    results = list(decoder.decoder(options)(batches))
    numbers = sorted(number for number, _ in results)
    complete = numbers == list(range(len(batches)))
    require(complete, f"decode yielded the batches {numbers}; it must yield each of the {len(batches)} batches once")
    return [hypotheses for _, batch in sorted(results, key=lambda result: result[0]) for hypotheses in batch]


def _require_same(found: BatchHypotheses, expected: BatchHypotheses, settings: dict[str, Any]) -> None:
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        tokens = [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in (ours, theirs)]
        require(tokens[0] == tokens[1], f"with {settings}, segment {index} has {tokens[0]}, not {tokens[1]}")
        difference = max(abs(a.score - b.score) for a, b in zip(ours, theirs, strict=True))
        require(difference <= TOLERANCE, f"with {settings}, a score of segment {index} differs by {difference:.3g}")


def hypotheses_and_scores_are_those_of_pytorch_with_each_option(subject: Subject[Engine]) -> None:
    decoder, reference = _decoders(subject)
    segments = _segments(decoder)
    for settings in OPTIONS:
        options = SearchOptions(**SHORT | settings) if "sampling" not in settings else SearchOptions(sampling=True)
        reason: object = decoder.engine.refusal(options)
        right = reason is None or (isinstance(reason, str) and reason)
        require(right, f"refusal returned {reason!r}; it must return a reason or None")
        if reason is None or decoder.engine.falls_back:
            expected = _decoded(reference, [segments], options)
            _require_same(_decoded(decoder, [segments[:3], [], segments[3:]], options), expected, settings)


def a_segment_is_searched_alone_as_in_a_batch(subject: Subject[Engine]) -> None:
    decoder, _ = _decoders(subject)
    segments, options = _segments(decoder), SearchOptions(**SHORT)
    alone = _decoded(decoder, [[segment] for segment in segments], options)
    _require_same(_decoded(decoder, [segments], options), alone, SHORT)


@functools.cache
def character_pieces(size: int) -> PieceTexts:
    """Returns the texts of a vocabulary of `size` pieces in which every piece has a text of one character."""
    return PieceTexts(text_bytes(" " if token == EOS else chr(0x4E00 + token)) for token in range(size))


def avoided_tokens(size: int, *phrases: Sequence[int]) -> tuple[AvoidedText, ...]:
    """Returns an avoided text for each phrase. Only the tokens of the phrase spell the text."""
    pieces = character_pieces(size)
    return tuple(AvoidedText(b"".join(pieces.texts[token] for token in phrase), pieces) for phrase in phrases)


def required_tokens(size: int, *alternatives: Sequence[int]) -> RequiredText:
    """Returns a required text with `alternatives`. Only the tokens of an alternative spell its text."""
    pieces = character_pieces(size)
    texts = [b"".join(pieces.texts[token] for token in phrase).decode() for phrase in alternatives]
    return RequiredText(tuple(map(SpelledPhrase, texts, map(tuple, alternatives))), pieces)


def prefixes_avoided_and_required_phrases_are_kept(subject: Subject[Engine]) -> None:
    decoder, reference = _decoders(subject)
    if not decoder.engine.falls_back:
        return
    segments, options = _segments(decoder), SearchOptions(**SHORT)
    free = _decoded(reference, [segments], options)
    token = next(hypotheses[0].tokens[0] for hypotheses in free if hypotheses[0].tokens)
    other = 3 if token != 3 else 4
    size = decoder.torch.loaded.tokenizer.target_size
    constraints = [
        Constraints(prefix=(other, token)), Constraints(avoided=avoided_tokens(size, [token])), Constraints(),
        Constraints(required=(required_tokens(size, (other, token)),)),
        Constraints(required=(required_tokens(size, (token,)),)),
    ]  # fmt: skip
    batch = [Segment(segment.ids, each) for segment, each in zip(segments, constraints, strict=False)]
    _require_same(_decoded(decoder, [batch], options), _decoded(reference, [batch], options), {"constraints": batch})


def calls_with_different_options_can_be_under_way(subject: Subject[Engine]) -> None:
    decoder, _ = _decoders(subject)
    segments = _segments(decoder)
    settings = [SHORT | {"beam": 1}, SHORT | {"max_len_b": 2}]
    calls = [decoder.decoder(SearchOptions(**each))([[segment] for segment in segments]) for each in settings]
    results: list[dict[int, BatchHypotheses]] = [{}, {}]
    for pair in zip(*calls, strict=True):
        for result, (number, hypotheses) in zip(results, pair, strict=True):
            result[number] = hypotheses
    for each, result in zip(settings, results, strict=True):
        alone = _decoded(decoder, [[segment] for segment in segments], SearchOptions(**each))
        _require_same([result[number][0] for number in range(len(segments))], alone, each)


check_engine = Contract(ENGINES, Engine, checks_of(__name__))
