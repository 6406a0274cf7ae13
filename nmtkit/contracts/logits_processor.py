"""The checks of a logits processor.

Each check runs searches over a few sentences of random pieces, with random log probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nmtkit.contracts.checks import Contract, Subject, checks_of, require
from nmtkit.contracts.runs import dataset
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer
from nmtkit.models.architectures.contract import ContractError, described
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, LogitsProcessorState

# B sentences, R hypotheses of each, N = B x R rows, V target vocabulary

LENGTHS = (4, 1, 7)  # number of random pieces from which the text of each source sentence is made
BEAMS = 3
STEPS = 12
FIRST = 3  # smaller ids are <unk>, bos and eos
ENDED = 4  # in this step, the input token of the last hypothesis of each sentence is eos, so this hypothesis has ended
EVERY = tuple(range(len(LENGTHS)))
ROUNDING = 1e-4


@dataclass(eq=False)
class SmallSearch:
    """A search for some of the sentences. Random numbers depend only on the sentence, the hypothesis and the step."""

    processor: LogitsProcessor
    tokenizer: Tokenizer
    sentences: tuple[int, ...] = EVERY  # indices in LENGTHS
    tokens: list[Tensor] = field(default_factory=list)  # [N] for each step
    results: list[Tensor] = field(default_factory=list)  # [N, V] for each step

    def __post_init__(self) -> None:
        self.source = Packed.from_lists([self.pieces(sentence) for sentence in self.sentences])
        self.state = self.processor.start(self.source, 2 * self.source.layout.lengths + 10, BEAMS)
        right = isinstance(self.state, LogitsProcessorState)
        require(right, f"start returned {described(self.state)}; it must return a LogitsProcessorState")

    def pieces(self, sentence: int) -> list[int]:
        drawn = np.random.default_rng([sentence]).integers(FIRST, self.tokenizer.source_size, LENGTHS[sentence])
        text = self.tokenizer.decode_source(drawn.tolist()).strip() or "a"
        return list(self.tokenizer.encode_source([text]).ids.tolist())

    def log_probs(self, step: int) -> Tensor:
        """Returns random log probabilities [N, V] for a step of the search, because the check has no model."""
        seeds = [[sentence, beam, step] for sentence in self.sentences for beam in range(BEAMS)]
        rows = [np.random.default_rng(seed).normal(0, 2, self.tokenizer.target_size) for seed in seeds]
        return torch.from_numpy(np.stack(rows)).float().log_softmax(1)

    def next_tokens(self) -> Tensor:
        """Returns a token for each row: first bos, then the most probable token, and random tokens after eos."""
        if not self.results:
            return torch.full((len(self.sentences) * BEAMS,), BOS)
        last, step = self.results[-1].clone(), len(self.results)
        if step < ENDED:
            last[:, EOS] = -torch.inf  # as in a search with --min-len
        tokens = last.argmax(1)
        if step == ENDED:
            tokens[BEAMS - 1 :: BEAMS] = EOS
        ended = (torch.stack(self.tokens) == EOS).any(0)
        for row in ended.nonzero().flatten().tolist():
            draw = np.random.default_rng([self.sentences[row // BEAMS], row % BEAMS, step, 1])
            tokens[row] = int(draw.integers(0, self.tokenizer.target_size))
        return tokens

    def step(self, tokens: Tensor | None = None, log_probs: Tensor | None = None) -> Tensor:
        """Makes a step of the search, and returns a copy of the changed log probabilities: [N, V]."""
        tokens = self.next_tokens() if tokens is None else tokens
        log_probs = self.log_probs(len(self.results)) if log_probs is None else log_probs
        before = tokens.clone()
        result: object = self.state.step(tokens, log_probs.clone())
        if not isinstance(result, Tensor) or result.shape != log_probs.shape or not result.is_floating_point():
            raise ContractError(
                f"step returned {described(result)} for {len(before)} rows; it must return log probabilities [N, V] of "
                f"shape {list(log_probs.shape)}"
            )
        unchanged = torch.equal(tokens, before)
        require(unchanged, "step changes its argument `tokens` in place; only log_probs may be changed")
        self.tokens.append(before)
        self.results.append(result.clone())
        return self.results[-1]

    def run(self, steps: int = STEPS) -> "SmallSearch":
        while len(self.results) < steps:
            self.step()
        return self

    def open_rows(self, step: int) -> Tensor:
        """Returns the indices of the rows whose hypothesis has not ended: no token up to step `step` is eos."""
        return (~(torch.stack(self.tokens[: step + 1]) == EOS).any(0)).nonzero().flatten()


def search(subject: Subject[LogitsProcessor], sentences: tuple[int, ...] = EVERY) -> SmallSearch:
    tokenizer = dataset().tokenizer if subject.tokenizer is None else subject.tokenizer
    return SmallSearch(subject.build(tokenizer), tokenizer, sentences)


def _require_equal(result: Tensor, expected: Tensor, message: str) -> None:
    require(torch.allclose(result, expected, rtol=ROUNDING, atol=ROUNDING), message)


def log_probabilities_of_the_same_shape_are_returned(subject: Subject[LogitsProcessor]) -> None:
    small = search(subject)
    before = small.source.values.clone()
    small.run()
    require(torch.equal(small.source.values, before), "the ids of the source sentences are changed in place")
    for step, result in enumerate(small.results):
        values = result[small.open_rows(step)]
        require(not values.isnan().any(), f"step returned NaN at token {step}")
        highest = float(values.max()) if values.numel() else 0.0
        require(
            highest <= ROUNDING,
            f"step returned {highest:.4g} at token {step}; log probabilities must be at most 0, because search ends "
            "when no open hypothesis can still win",
        )


def a_token_is_always_allowed(subject: Subject[LogitsProcessor]) -> None:
    small = search(subject).run()
    for step, result in enumerate(small.results):
        dead = ~result[small.open_rows(step)].isfinite().any(1)
        require(
            not dead.any(),
            f"every token is forbidden after {step} tokens of a hypothesis, so that the hypothesis can neither go on "
            "nor end; allow at least one token, such as eos",
        )


def the_same_search_gives_the_same_log_probabilities(subject: Subject[LogitsProcessor]) -> None:
    first = search(subject)
    second = SmallSearch(first.processor, first.tokenizer)
    for step in range(STEPS):
        got, expected = second.step(), first.step()  # two searches with the same processor take turns
        _require_equal(
            got,
            expected,
            f"two searches for the same sentences differ at token {step}; keep the data of a search in the state "
            "that start returns, and draw no random numbers",
        )


def a_sentence_is_searched_alone_as_in_a_batch(subject: Subject[LogitsProcessor]) -> None:
    together = search(subject).run()
    for sentence in EVERY:
        alone = search(subject, (sentence,)).run()
        for step, result in enumerate(alone.results):
            beams = alone.open_rows(step)
            _require_equal(
                together.results[step][sentence * BEAMS + beams],
                result[beams],
                f"the log probabilities of sentence {sentence} at token {step} depend on the other sentences of the "
                "batch; row n belongs to sentence n // beams",
            )


def _replayed(small: SmallSearch, rows: Sequence[int], sentences: tuple[int, ...]) -> SmallSearch:
    """Returns a new search for `sentences` that repeats the steps of the rows `rows` of `small`."""
    again = SmallSearch(small.processor, small.tokenizer, sentences)
    for step, tokens in enumerate(small.tokens):
        again.step(tokens[rows], small.log_probs(step)[rows])
    return again


def _require_continues(small: SmallSearch, again: SmallSearch, message: str) -> None:
    """Continues both searches with the same tokens. Raises ContractError if their log probabilities differ.

    In `message`, {} is replaced by the number of the token at which the searches differ.
    """
    for step in range(ENDED, STEPS):
        tokens, log_probs = again.next_tokens(), again.log_probs(step)
        expected = again.step(tokens, log_probs)
        _require_equal(small.step(tokens, log_probs), expected, message.format(step))


def rows_follow_reorder(subject: Subject[LogitsProcessor]) -> None:
    small = search(subject).run(ENDED)
    beam_index = torch.tensor([sentence * BEAMS + beam for sentence in EVERY for beam in (1, 1, 0)])
    again = _replayed(small, beam_index.tolist(), EVERY)
    small.state.reorder(beam_index)
    _require_continues(
        small,
        again,
        "after reorder, a row at token {} differs from a row with the same tokens that was not reordered; reorder must "
        "move everything that the state keeps for a row",
    )


def sentences_can_be_dropped(subject: Subject[LogitsProcessor]) -> None:
    small = search(subject).run(ENDED)
    kept = (0, 2)
    again = _replayed(small, [sentence * BEAMS + beam for sentence in kept for beam in range(BEAMS)], kept)
    small.state.drop_finished(torch.tensor(kept))
    _require_continues(
        small,
        again,
        "after drop_finished, the remaining sentences differ at token {} from a search for these sentences alone; the "
        "state must keep only the rows of the given sentences",
    )


check_logits_processor = Contract(LOGITS_PROCESSORS, LogitsProcessor, checks_of(__name__))
