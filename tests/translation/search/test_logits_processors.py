"""Logits processors in every search, against exhaustive search over the changed log probabilities."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_ending_transformer, tiny_transformer
from click.testing import CliRunner
from torch import Tensor

from nmtkit.cli import main
from nmtkit.contracts.engine import required_tokens
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, LogitsProcessorState
from nmtkit.translation.search.options import SearchOptions

SOURCES = [[3, 5, 4, EOS], [6, EOS], [5, 5, 3, 6, EOS]]
LENGTH = 3  # tokens of the longest output
WORDS = range(3, 7)


class Bigrams(LogitsProcessor):
    """Adds log probabilities of a random bigram model: shallow fusion whose state is the last token."""

    def __init__(self, weight: float = 0.7) -> None:
        generator = torch.Generator().manual_seed(4)
        self.table = weight * torch.randn(7, 7, generator=generator).mul(2).log_softmax(1)
        self.begun: list[tuple[int, list[int]]] = []

    def start(self, source: Packed, max_length: Tensor, beams: int) -> "BigramState":
        self.begun.append((beams, max_length.tolist()))
        return BigramState(self, beams)


class BigramState(LogitsProcessorState):
    """Sums the rows of all tokens so far, so that a wrong order of the rows changes the sum."""

    def __init__(self, processor: Bigrams, beams: int) -> None:
        super().__init__(beams)
        self.processor = processor
        self.past: Tensor | None = None

    def step(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        rows = self.processor.table[tokens]
        self.past = rows if self.past is None else self.past + rows
        return log_probs + self.past

    def reorder(self, beam_index: Tensor) -> None:
        assert self.past is not None
        self.past = self.past[beam_index]


def model() -> Any:
    return tiny_transformer(7, sharpness=6.0, seed=3)


def exhaustive(source: list[int], processor: Bigrams) -> dict[tuple[int, ...], float]:
    """Returns the log probability of every output of at most LENGTH words, step by step from the definitions."""
    transformer, memory_source = model(), Packed.from_lists([source])
    scores = {}
    for length in range(LENGTH + 1):
        for words in itertools.product(WORDS, repeat=length):
            inputs = Packed.from_lists([[BOS, *words]])
            with torch.no_grad():
                log_probs = transformer.output_projection(transformer(memory_source, inputs)).log_softmax(1)
            table = processor.table[torch.tensor([BOS, *words])].cumsum(0)
            steps = (log_probs + table)[torch.arange(length + 1), torch.tensor([*words, EOS])]
            scores[words] = float(steps.double().sum())
    return scores


def options(**settings: Any) -> SearchOptions:
    return SearchOptions(lenpen=0, max_len_a=0, max_len_b=LENGTH, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"min_len": 2}], ids=str)
def test_a_wide_beam_finds_the_best_outputs_of_the_fused_scores(settings: dict[str, Any]) -> None:
    processor = Bigrams()
    found = beam_search(
        [model()], Packed.from_lists(SOURCES), options(beam=64, nbest=3, **settings), processors=[processor]
    )
    assert processor.begun == [(64, [LENGTH] * 3)]
    for source, hypotheses in zip(SOURCES, found, strict=True):
        scores = {
            ids: score for ids, score in exhaustive(source, processor).items() if len(ids) >= settings.get("min_len", 0)
        }
        best = sorted(scores, key=lambda ids: -scores[ids])[:3]
        assert [tuple(hypothesis.tokens) for hypothesis in hypotheses] == best
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([scores[ids] for ids in best], abs=1e-4)


def test_required_phrases_and_an_ensemble_are_searched_with_the_processor() -> None:
    processor = Bigrams()
    scores = {ids: score for ids, score in exhaustive(SOURCES[0], processor).items() if 6 in ids}
    best = max(scores, key=lambda ids: scores[ids])
    constraints = [Constraints(required=(required_tokens(7, (6,)),))]
    source = Packed.from_lists(SOURCES[:1])
    ((found, *_),) = beam_search([model()] * 2, source, options(beam=64), constraints, processors=[processor])
    assert tuple(found.tokens) == best
    assert found.score == pytest.approx(scores[best], abs=1e-4)


def test_samples_are_drawn_from_the_changed_distribution() -> None:
    class Only(LogitsProcessor):
        def start(self, source: Packed, max_length: Tensor, beams: int) -> LogitsProcessorState:
            return OnlyState(beams)

    class OnlyState(LogitsProcessorState):
        def step(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
            allowed = torch.zeros(7, dtype=torch.bool)
            allowed[[4, EOS]] = True
            return log_probs.masked_fill(~allowed, -math.inf)

        def reorder(self, beam_index: Tensor) -> None: ...

    sampled = beam_search([model()], Packed.from_lists(SOURCES), options(sampling=True, nbest=20), processors=[Only()])
    tokens = {token for hypotheses in sampled for hypothesis in hypotheses for token in hypothesis.tokens}
    assert tokens == {4}


def test_scores_above_zero_are_refused() -> None:
    class Raises(Bigrams):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.full((7, 7), 50.0)

    with pytest.raises(ValueError, match=r"Raises .*above 0"):
        beam_search([model()], Packed.from_lists(SOURCES), options(beam=2), processors=[Raises()])


@pytest.mark.parametrize("result", [None, torch.zeros(7)], ids=["none", "one-row"])
def test_results_of_a_wrong_shape_are_refused(result: Any) -> None:
    class Wrong(Bigrams):
        def start(self, source: Packed, max_length: Tensor, beams: int) -> LogitsProcessorState:
            state = super().start(source, max_length, beams)
            state.step = lambda tokens, log_probs: result  # type: ignore[method-assign]
            return state

    said = r"step of Wrong returned .*; it must return log probabilities \[N, V\] of shape \[4, 7\]"
    with pytest.raises(ValueError, match=said):
        beam_search([model()], Packed.from_lists(SOURCES[:2]), options(beam=2), processors=[Wrong()])


def test_unknown_words_stay_forbidden() -> None:
    found = beam_search([model()], Packed.from_lists(SOURCES), options(beam=4), processors=[Bigrams()])
    assert all(UNK not in hypothesis.tokens for hypotheses in found for hypothesis in hypotheses)


PLUGIN = """
from dataclasses import dataclass

import torch

from nmtkit.config import Config, option
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, LogitsProcessorState


@dataclass(frozen=True, kw_only=True)
class ForbidConfig(Config):
    forbidden_word: str = option("dog", "word that no translation may hold")


@LOGITS_PROCESSORS.register("forbid", ForbidConfig())
class Forbid(LogitsProcessor):
    def __init__(self, config, tokenizer):
        self.pieces = set(tokenizer.encode_target([config.forbidden_word]).ids[:-1].tolist())

    def start(self, source, max_length, beams):
        return ForbidState(beams, self.pieces)


class ForbidState(LogitsProcessorState):
    def __init__(self, beams, pieces):
        super().__init__(beams)
        self.pieces = list(pieces)

    def step(self, tokens, log_probs):
        log_probs[:, self.pieces] = -torch.inf
        return log_probs

    def reorder(self, beam_index):
        pass
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "forbid.py").write_text(PLUGIN)
    yield tmp_path / "forbid.py"
    LOGITS_PROCESSORS.entries.pop("forbid", None)


def generate(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["generate", *arguments], input="all human beings are born free\n")


@pytest.mark.slow
def test_generate_has_the_flags_of_the_processors_that_it_is_given(tmp_path: Path, plugin: Path) -> None:
    path = save_ending_transformer(tmp_path / "model.pt")
    base = ["--path", str(path), "--plugin", str(plugin), "--beam", "2", "--max-len-a", "0", "--max-len-b", "8"]
    free = generate(*base)
    assert free.exit_code == 0, free.output
    word = free.stdout.split()[0]
    chosen = [*base, "--logits-processors", "forbid", "--forbidden-word", word]
    assert word in free.stdout.split() and word not in generate(*chosen).stdout.split()
    assert word not in generate(*chosen, "--workers", "2").stdout.split()
    assert word not in generate(*chosen, "--sampling", "--nbest", "1").stdout.split()
    page = generate(*base, "--logits-processors", "forbid", "--help")
    assert "Logits processor forbid" in page.stdout and "--forbidden-word TEXT" in page.stdout


@pytest.mark.slow
def test_an_unknown_processor_and_the_flag_of_one_that_is_not_chosen_are_refused(tmp_path: Path, plugin: Path) -> None:
    path = save_ending_transformer(tmp_path / "model.pt")
    base = ["--path", str(path), "--plugin", str(plugin)]
    unknown = generate(*base, "--logits-processors", "forbit")
    assert unknown.exit_code == 2 and "did you mean 'forbid'?" in unknown.stderr
    alone = generate(*base, "--forbidden-word", "dog")
    assert alone.exit_code == 2 and "--forbidden-word" in alone.stderr
