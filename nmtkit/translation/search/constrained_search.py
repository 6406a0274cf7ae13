"""Beam search for translations that contain required texts.

Source: Post and Vilar 2018, "Fast Lexically Constrained Decoding with Dynamic Beam Allocation". Hypotheses are divided
into banks by the number of required tokens that they have produced; a hypothesis competes within its bank. When the
remaining length is just enough for the missing texts, only the tokens of these texts are allowed. An automaton tracks
the progress of a hypothesis.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.translation.search.beam_search import Search, Selector
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import NONE
from nmtkit.translation.search.scorer import Candidates, continuations
from nmtkit.translation.search.text_automaton import TextAutomaton
from nmtkit.translation.search.types import Hypothesis

# B sentences, R hypotheses of each, V target vocabulary, C candidates of a sentence


def lacking_sentences(
    constraints: Sequence[Constraints], results: Sequence[Sequence[Hypothesis]], options: SearchOptions
) -> list[int]:
    """Returns the indices of sentences with fewer than `options.nbest` hypotheses that contain all required texts."""
    result = []
    for index, (sentence, hypotheses) in enumerate(zip(constraints, results, strict=True)):
        if sentence.required:
            automaton = TextAutomaton(sentence.required, options.ordered_constraints)
            if sum(automaton.holds(hypothesis.tokens) for hypothesis in hypotheses) < options.nbest:
                result.append(index)
    return result


class RequiredTextSelector(Selector):
    """Finishes only hypotheses that contain all required texts, in order if `options.ordered_constraints`."""

    def __init__(self, options: SearchOptions, constraints: Sequence[Constraints]) -> None:
        ordered, self.group = options.ordered_constraints, options.beam
        self.automata = [TextAutomaton(sentence.required, ordered) for sentence in constraints]
        self.states = [[0] * options.beam for _ in constraints]  # B R: state of the automaton for each open hypothesis

    def select(self, search: Search, scores: Tensor) -> Candidates:
        kept = search.finish_among(self.candidates(search, scores), self.group)
        columns = kept.beam_index, kept.tokens, kept.log_probability.isfinite()
        self.states = [
            [automaton.next(states[row], token) if possible else 0 for row, token, possible in zip(*rest, strict=True)]
            for automaton, states, *rest in zip(self.automata, self.states, *map(Tensor.tolist, columns), strict=True)
        ]
        return kept

    def candidates(self, search: Search, scores: Tensor) -> Candidates:
        """Returns the best continuations. `round_robin` takes them from each bank in turn."""
        sentences, rows = search.log_probability.shape
        useful = self.useful_tokens()  # [B, R, number of useful tokens]
        padded = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).view(
            sentences, rows, -1
        )  # the last column is for the token NONE
        index = useful.where(useful != NONE, scores.shape[1]).to(scores.device)
        useful_values = padded.gather(2, index).cpu().double()
        others = padded.scatter_(2, index, -math.inf).flatten(0, 1)[:, None, :-1]
        before = scores.new_zeros(len(scores), 1, dtype=torch.float64)
        values, tokens = continuations(others, before, rows + 1)
        values, tokens = values.cpu().view(sentences, rows, -1), tokens.cpu().view(sentences, rows, -1)
        values, tokens = torch.cat([values, useful_values], 2), torch.cat([tokens, useful.clamp_min(0)], 2)
        remaining, banks = self.after(tokens, values.isfinite())
        # number of tokens that can still follow
        free = (search.constraint_processor.max_length - search.history.shape[2] - 1)[:, None, None]
        forbidden = torch.where(tokens == EOS, remaining > 0, remaining > free)
        totals = (search.log_probability[:, :, None] + values).masked_fill(forbidden, -math.inf).flatten(1)
        best = round_robin(totals, banks.flatten(1), min(2 * rows, totals.shape[1]))
        beam_index = torch.arange(rows)[None, :, None].expand_as(tokens).flatten(1)
        return Candidates(totals.gather(1, best), beam_index.gather(1, best), tokens.flatten(1).gather(1, best))

    def useful_tokens(self) -> Tensor:
        """Returns the tokens that begin or continue a required text of each open hypothesis: [B, R, tokens].

        Shorter lists of tokens are padded with NONE.
        """
        lists = [automaton.useful(state) for automaton, state in self.rows()]
        width = max(map(len, lists))
        padded = [tokens + [NONE] * (width - len(tokens)) for tokens in lists]
        return torch.tensor(padded, dtype=torch.int64).view(len(self.states), self.group, width)

    def after(self, tokens: Tensor, possible: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the effect of each candidate token on the required texts of its hypothesis.

        `tokens` [B, R, C] are the candidates. The first result [B, R, C] is the number of tokens that the hypothesis
        still needs after the candidate. The second result [B, R, C] is the bank: the progress by which `round_robin`
        groups hypotheses. Both are 0 for candidates that are not `possible`.
        """
        facts = []
        candidates = tokens.flatten(0, 1).tolist(), possible.flatten(0, 1).tolist()
        for (automaton, state), *row in zip(self.rows(), *candidates, strict=True):
            for token, allowed in zip(*row, strict=True):
                facts.append(automaton.facts(automaton.next(state, token)) if allowed else (0, 0))
        remaining, banks = torch.tensor(facts).view(*tokens.shape, 2).unbind(3)
        return remaining, banks

    def rows(self) -> list[tuple[TextAutomaton, int]]:
        """Returns the automaton and its state for each open hypothesis of all sentences."""
        pairs = zip(self.automata, self.states, strict=True)
        return [(automaton, state) for automaton, states in pairs for state in states]

    def drop_finished(self, kept: Tensor) -> None:
        self.automata = [self.automata[index] for index in kept.tolist()]
        self.states = [self.states[index] for index in kept.tolist()]


def round_robin(scores: Tensor, banks: Tensor, number: int) -> Tensor:
    """Chooses `number` of C candidates for each of B sentences. Returns their indices, [B, number].

    `scores` [B, C] and `banks` [B, C] have the score and the bank of each candidate. The bank counts the tokens of
    required texts. Each round takes the best remaining candidate of each bank, the highest bank first.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    bank = banks.gather(1, order)
    same_bank = bank[:, :, None] == bank[:, None, :]  # B C C
    better = torch.ones(same_bank.shape[1:], dtype=torch.bool).tril(-1)
    rank = (same_bank & better).sum(2)  # number of better candidates of the same bank
    most = int(banks.max()) + 1
    closed = ~scores.gather(1, order).isfinite()
    key = rank * (most + 1) - bank + closed * (scores.shape[1] + 1) * (most + 1)
    return order.gather(1, key.argsort(dim=1, stable=True)[:, :number])
