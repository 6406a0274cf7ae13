"""Refinement by expected sentence reward (Wu et al. 2016, section 5)."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from torch import Tensor
from torch.nn import functional as F

from nmtkit.architectures import Architecture
from nmtkit.criterions.interface import CRITERIONS, Criterion, Loss, with_auxiliary
from nmtkit.data.tokenizer import BOS, EOS, Tokenizer
from nmtkit.generation.decoding import beam_search
from nmtkit.generation.options import SearchOptions
from nmtkit.layers.linear_cross_entropy import output_cross_entropy
from nmtkit.packed import IGNORE_INDEX, Batch, Layout, Packed
from nmtkit.registry import option

# B sentences, C candidate translations of one, R of all, T their tokens, V vocabulary


@dataclass(frozen=True, kw_only=True)
class ExpectedRewardConfig:
    reward: Literal["gleu", "bleu", "chrf"] = option("gleu", "Sentence score to raise: GLEU, smoothed BLEU or chrF2.")
    candidates: Literal["sample", "nbest"] = option("sample", "Where candidates come from: sampling or beam search.")
    candidates_per_sentence: int = option(15, "Candidate translations of each sentence.")
    candidate_extra: int = option(20, "A candidate is at most this many pieces longer than its source.")
    likelihood_weight: float = option(0.017, "Weight of the log-likelihood beside the reward (equation 9, alpha).")

    def __post_init__(self) -> None:
        if self.candidates_per_sentence < 2:
            raise ValueError(
                f"--candidates-per-sentence {self.candidates_per_sentence} leaves nothing to compare; give 2 or more"
            )
        if self.candidate_extra < 0:
            raise ValueError(f"--candidate-extra {self.candidate_extra} is negative")
        if self.likelihood_weight < 0:
            raise ValueError(f"--likelihood-weight {self.likelihood_weight} is negative")


@CRITERIONS.register("expected_reward", ExpectedRewardConfig())
class ExpectedReward(Criterion):
    """-alpha log p(target | source) - E[reward of a candidate], for a model that likelihood has already trained.

    Sampled candidates: the gradient is that of log p(candidate) times (reward - mean reward of the sentence's
    candidates), averaged over them. N-best candidates: the expectation over the list, its probabilities renormalised.
    Candidates are made without dropout. Every candidate is scored as if it were a target, so an update needs
    `candidates_per_sentence` times the memory of likelihood: lower --max-tokens. Validation sees the likelihood alone.
    """

    def __init__(self, config: ExpectedRewardConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.reward = REWARDS[config.reward]

    def forward(self, model: Architecture, batch: Batch) -> Loss:
        memory = model.encode(batch.source)
        features = model.decode(memory, batch.target_input)
        loss, nll = output_cross_entropy(model.output_projection, features, batch.target_output, 0.0)
        if not self.training:
            return with_auxiliary(Loss(loss, {"nll": nll}), model)
        alive = living(batch)
        candidates = self.candidates(model, batch.source.select(alive))
        rewards, owner = self.rewards(candidates, references(batch, alive))
        log_p = log_probabilities(model, memory.select(alive[owner]), [one for group in candidates for one in group])
        counts = {"nll": nll, "reward": mean_by(rewards, owner, len(alive)).sum()}
        weighted = Loss(self.config.likelihood_weight * loss - self.expected(log_p, rewards, owner, len(alive)), counts)
        return with_auxiliary(weighted, model)

    def candidates(self, model: Architecture, source: Packed) -> list[list[list[int]]]:
        """For each sentence its candidates, without eos."""
        size, extra = self.config.candidates_per_sentence, self.config.candidate_extra
        options = SearchOptions(beam=size, nbest=size, lenpen=0.0, max_len_a=1.0, max_len_b=extra)
        with evaluating(model):
            if self.config.candidates == "sample":
                return sampled(model, source, options)
            return [[one.tokens for one in found] for found in beam_search([model], source, options)]

    def rewards(self, candidates: list[list[list[int]]], references: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The reward of each candidate, and the sentence it is of: R, R, on the CPU."""
        texts = self.tokenizer.decode_target_batch([one for group in candidates for one in group])
        owner = [sentence for sentence, group in enumerate(candidates) for _ in group]
        wanted = self.tokenizer.decode_target_batch(references)
        rewards = [self.reward(text, wanted[sentence]) for text, sentence in zip(texts, owner, strict=True)]
        return torch.tensor(rewards), torch.tensor(owner)

    def expected(self, log_p: Tensor, rewards: Tensor, owner: Tensor, sentences: int) -> Tensor:
        """What to raise, summed over sentences: its gradient is that of the expected reward."""
        rewards, owner = rewards.to(log_p.device), owner.to(log_p.device)
        if self.config.candidates == "nbest":
            highest = log_p.new_full((sentences,), -torch.inf).scatter_reduce(0, owner, log_p.detach(), "amax")
            p = (log_p - highest[owner]).exp()
            total = p.new_zeros(sentences).index_add(0, owner, p)
            return (p / total[owner] * rewards).sum()
        advantage = rewards - mean_by(rewards, owner, sentences)[owner]
        return mean_by(advantage * log_p, owner, sentences).sum()


def mean_by(values: Tensor, owner: Tensor, sentences: int) -> Tensor:
    """Mean of the values R of each sentence: B."""
    counts = owner.bincount(minlength=sentences)
    return values.new_zeros(sentences).index_add(0, owner, values) / counts


def living(batch: Batch) -> Tensor:
    """The sentences that are no dead tail: indices, int64."""
    first = batch.target_output[batch.target_input.layout.cu_seqlens[:-1].long()]
    return (first != IGNORE_INDEX).nonzero()[:, 0]


def references(batch: Batch, alive: Tensor) -> list[list[int]]:
    targets = batch.target_input.with_values(batch.target_output).split()
    return [targets[sentence].tolist() for sentence in alive.tolist()]


@contextmanager
def evaluating(model: Architecture) -> Iterator[None]:
    """The model in evaluation mode and without gradients.

    Autocast's cache of cast weights stays out of it: a weight cast here would get no gradient in the pass after it.
    """
    device = next(model.parameters()).device.type
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast:
            yield
    finally:
        model.train(training)


def sampled(model: Architecture, source: Packed, options: SearchOptions) -> list[list[list[int]]]:
    """Candidates drawn token by token from the model's distribution, by torch's global generator; cut when too long."""
    size, device = options.beam, source.values.device
    longest = [options.max_length(length - 1) for length in source.layout.lengths.tolist()]
    limit = min(max(longest), (model.max_target_positions or max(longest) + 1) - 1)
    state = model.start(model.encode(source), size)
    tokens = torch.full((len(longest) * size,), BOS, device=device)
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    columns: list[Tensor] = []
    while len(columns) < limit and not ended.all():
        tokens = model.step(tokens, state).float().softmax(-1).multinomial(1)[:, 0]
        ended |= tokens == EOS
        columns.append(tokens)
    rows = torch.stack(columns, 1).tolist() if columns else [[]] * len(tokens)
    cut = [row[: longest[index // size]] for index, row in enumerate(rows)]
    drawn = [row[: row.index(EOS)] if EOS in row else row for row in cut]
    return [drawn[first : first + size] for first in range(0, len(drawn), size)]


def log_probabilities(model: Architecture, memory: Packed, targets: Sequence[list[int]]) -> Tensor:
    """log p of each target, eos included, given the memory of the same row: R."""
    lengths = torch.tensor([len(target) + 1 for target in targets])
    layout = Layout.of(lengths).to(memory.values.device)
    inputs = torch.tensor([token for target in targets for token in (BOS, *target)]).to(memory.values.device)
    outputs = torch.tensor([token for target in targets for token in (*target, EOS)]).to(memory.values.device)
    logits = model.output_projection(model.decode(memory, Packed(inputs, layout)))
    nll = F.cross_entropy(logits.float(), outputs, reduction="none")
    return nll.new_zeros(len(targets)).index_add(0, layout.segment_ids, -nll)


# Rewards: a candidate and its reference, as text, to a number from 0 to 1


def gleu(candidate: str, reference: str) -> float:
    """The lesser of precision and recall of all n-grams of one to four words (Wu et al. 2016, section 5)."""
    ours, theirs = _ngrams(candidate), _ngrams(reference)
    most = max(ours.total(), theirs.total())
    return (ours & theirs).total() / most if most else 1.0


def _ngrams(text: str) -> Counter[tuple[str, ...]]:
    words = _tokenizer()(text).split()
    return Counter(tuple(words[start : start + n]) for n in range(1, 5) for start in range(len(words) - n + 1))


def sentence_bleu(candidate: str, reference: str) -> float:
    """sacreBLEU's sentence BLEU, exponentially smoothed, of the n-gram orders the candidate has."""
    return float(_metric("bleu").sentence_score(candidate, [reference]).score) / 100


def sentence_chrf(candidate: str, reference: str) -> float:
    """sacreBLEU's sentence chrF2."""
    return float(_metric("chrf").sentence_score(candidate, [reference]).score) / 100


@cache
def _tokenizer() -> Tokenizer13a:
    return Tokenizer13a()  # type: ignore[no-untyped-call]


@cache
def _metric(name: str) -> Any:
    return BLEU(effective_order=True) if name == "bleu" else CHRF()


REWARDS: dict[str, Callable[[str, str], float]] = {"gleu": gleu, "bleu": sentence_bleu, "chrf": sentence_chrf}
