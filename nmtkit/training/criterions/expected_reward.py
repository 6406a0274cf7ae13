"""Refinement by expected sentence reward (Wu et al. 2016, section 5)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.config import Config, option
from nmtkit.data.packed import IGNORE_INDEX, Batch, Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers.losses import output_cross_entropy
from nmtkit.scoring.segments import MetricName, check_available, check_segment_metric
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.training.criterions.interface import CRITERIONS, Criterion, Loss
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.options import SearchOptions

# B sentences, T tokens, C candidates of all sentences together


@dataclass(frozen=True, kw_only=True)
class ExpectedRewardConfig(Config):
    reward: str = option(
        "gleu",
        "Sentence score: gleu, bleu (smoothed), chrf, chrf++, ter, or a neural metric (comet, metricx; without a "
        "reference: cometkiwi, metricx-qe); comet=MODEL takes the model of a folder, or hf:ORG/NAME[@REVISION].",
        metavar="METRIC[=MODEL]",
    )
    candidates: Literal["sample", "nbest"] = option("sample", "Source of candidates: sampling or beam search.")
    candidates_per_sentence: int = option(15, "Number of candidate translations for each sentence.", min=2, max=1000)
    candidate_extra: int = option(
        20, "Maximum number of pieces by which a candidate may be longer than its source.", min=0, max=10_000
    )
    likelihood_weight: float = option(0.017, "Weight of the log-likelihood relative to the reward (equation 9).", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_segment_metric(self.reward, "--reward")


@CRITERIONS.register("expected_reward", ExpectedRewardConfig())
class ExpectedReward(Criterion):
    """The loss -alpha log p(target | source) - E[reward of a candidate], for fine-tuning after training on likelihood.

    alpha is `likelihood_weight`. With sampled candidates, the gradient of the reward of a sentence is the mean over its
    candidates of (reward - mean reward) times the gradient of log p(candidate). With n-best candidates, the expectation
    is over the n-best list, whose probabilities are renormalised to sum to 1. Candidates are generated without dropout.
    They begin with the language token of the target and never contain <unk>. The language token is the same for all
    candidates of a sentence, so it does not change the gradient of the reward. The model scores each candidate like a
    target, so an update needs `candidates_per_sentence` times as much memory, and --max-tokens should be lower.
    Validation computes only the likelihood.
    """

    def __init__(self, config: ExpectedRewardConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        check_available(f"--reward {config.reward}", MetricName.parse(config.reward))

    @staticmethod
    def searched_candidates(config: ExpectedRewardConfig) -> int:
        return config.candidates_per_sentence

    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        memory = model.encode(batch.source)
        features = model.decode(memory, batch.target_input)
        loss, nll = output_cross_entropy(model.output_projection, features, batch.target_output, 0.0)
        if not self.training:
            return Loss(loss, {"nll": nll})
        if not batch.target_tokens:  # the batch is a dummy micro-batch
            return Loss(loss, {"nll": nll, "reward": torch.zeros_like(nll)})
        sentences = real_sentences(batch)
        targets = references(batch, sentences)
        source = batch.source.select(sentences)
        candidates = self.candidates(model, source, self.directions(source, batch.target_input.select(sentences)))
        rewards, owner = (values.to(loss.device) for values in self.rewards(candidates, source, targets, loss.device))
        log_p = log_probabilities(model, memory.select(sentences[owner]), list(chain.from_iterable(candidates)))
        expected = self.expected_reward(log_p, rewards, owner, len(sentences))
        counts = {"nll": nll, "reward": mean_by(rewards, owner, len(sentences)).sum()}
        return Loss(self.config.likelihood_weight * loss - expected, counts)

    def directions(self, source: Packed, target_input: Packed) -> list[Constraints]:
        """Returns the constraints of the candidates of each sentence.

        The constraints have the language tokens at the start of the target as a prefix, and the number of tokens before
        the text of the source.
        """
        languages = self.tokenizer.languages.values()
        tags = {*languages, *self.tokenizer.source_tags}
        # if the vocabulary has only target languages, the language tokens are in sources, but not in targets
        of_targets = set() if self.tokenizer.has_target_languages_only else set(languages)
        directions = []
        for ids, (_, *target) in zip(_id_lists(source), _id_lists(target_input), strict=True):
            prefix = tuple(takewhile(of_targets.__contains__, target))
            tokens = len(list(takewhile(tags.__contains__, ids)))
            directions.append(Constraints(prefix, language_tokens=len(prefix), source_tokens=tokens))
        return directions

    def candidates(
        self, model: Architecture, source: Packed, directions: Sequence[Constraints]
    ) -> list[list[list[int]]]:
        """Returns the candidates of each sentence, in the language of its target, as target ids without eos."""
        size = self.config.candidates_per_sentence
        search: dict[str, Any] = {"beam": size}
        if self.config.candidates == "sample":
            search = {"sampling": True, "seed": int(torch.randint(2**31, ()))}
        options = SearchOptions(nbest=size, lenpen=0.0, max_len_a=1.0, max_len_b=self.config.candidate_extra, **search)
        with evaluating(model):
            results = beam_search([model], source, options, directions)
        return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in results]

    def rewards(
        self, candidates: list[list[list[int]]], sources: Packed, references: list[list[int]], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Returns the reward of each candidate [C], at most 1, and the index of its sentence [C], on the CPU.

        A neural metric is loaded to `device` at the first call.
        """
        metric = segment_metric(self.config.reward, str(device))
        owner = [sentence for sentence, group in enumerate(candidates) for _ in group]
        source_texts = None
        if metric.reads_source:
            source_texts = [
                self.tokenizer.without_tags(self.tokenizer.decode_source(ids)) for ids in _id_lists(sources)
            ]
        reference_texts = self.tokenizer.decode_target_batch(references)
        qualities = metric.qualities(
            self.tokenizer.decode_target_batch(list(chain.from_iterable(candidates))),
            sources=None if source_texts is None else [source_texts[sentence] for sentence in owner],
            references=[reference_texts[sentence] for sentence in owner],
        )
        return torch.tensor(qualities) / 100, torch.tensor(owner)

    def expected_reward(self, log_p: Tensor, rewards: Tensor, owner: Tensor, sentences: int) -> Tensor:
        """Returns a sum over sentences. The gradient of this sum is the gradient of the expected reward."""
        if self.config.candidates == "nbest":
            highest = log_p.new_full((sentences,), -torch.inf).scatter_reduce(0, owner, log_p.detach(), "amax")
            p = (log_p - highest[owner]).exp()
            total = p.new_zeros(sentences).index_add(0, owner, p)
            return (p / total[owner] * rewards).sum()
        advantage = rewards - mean_by(rewards, owner, sentences)[owner]
        return mean_by(advantage * log_p, owner, sentences).sum()


def _id_lists(sentences: Packed) -> list[list[int]]:
    return [ids.tolist() for ids in sentences.split()]


def mean_by(values: Tensor, owner: Tensor, sentences: int) -> Tensor:
    """Returns the means [B] of the `values` [C] of each sentence. `owner` [C] has the sentence of each value."""
    counts = owner.bincount(minlength=sentences)
    return values.new_zeros(sentences).index_add(0, owner, values) / counts


def real_sentences(batch: Batch) -> Tensor:
    """Returns the indices (int64) of the sentences that count. Sentences of a dummy micro-batch do not count."""
    last = batch.target_output[batch.target_input.layout.cu_seqlens[1:].long() - 1]  # eos, or ignored
    return (last != IGNORE_INDEX).nonzero()[:, 0]


def references(batch: Batch, sentences: Tensor) -> list[list[int]]:
    """Returns the ids of the target of each sentence, eos last. Ids that the loss ignores are left out."""
    targets = batch.target_input.with_values(batch.target_output).select(sentences).split()
    return [ids[ids != IGNORE_INDEX].tolist() for ids in targets]


@contextmanager
def evaluating(model: Architecture) -> Iterator[None]:
    """Puts the model in evaluation mode without gradients, for the duration of the context.

    The weight cache of autocast is disabled too: a weight that is cast without gradients and cached would get no
    gradient in the next pass.
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


def log_probabilities(model: Architecture, memory: Packed, targets: Sequence[list[int]]) -> Tensor:
    """Returns a tensor [C]: log p of each target, including eos, given the sentence of `memory` with the same index."""
    device = memory.values.device
    inputs = Packed.from_lists([[BOS, *target] for target in targets]).to(device)
    outputs = torch.tensor([token for target in targets for token in (*target, EOS)]).to(device)
    logits = model.output_projection(model.decode(memory, inputs))
    nll = F.cross_entropy(logits.float(), outputs, reduction="none")
    return nll.new_zeros(len(targets)).index_add(0, inputs.layout.segment_ids, -nll)
