import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import tiny_transformer
from torch import Tensor

from nmtkit.data.packed import IGNORE_INDEX, Batch, Packed
from nmtkit.models.architectures import Architecture
from nmtkit.scoring.sentence_metrics import gleu, segment_metric
from nmtkit.training.criterions.expected_reward import ExpectedReward, ExpectedRewardConfig
from nmtkit.translation.search.constraints import Constraints

SIZE = 7


class Letters:
    """Returns ids 3, 4, … as words a, b, …"""

    languages: Mapping[str, int] = {}
    source_tags: frozenset[int] = frozenset()
    has_target_languages_only = False

    def decode_target_batch(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        return [" ".join(chr(94 + token) for token in tokens if token > 2) for tokens in sentences]


def model(size: int = SIZE, dropout: float = 0.0) -> Architecture:
    return tiny_transformer(size, seed=3, decoder_layers=1, d_model=8, d_ff=8, dropout=dropout).train()


def batch(padding: bool = False) -> Batch:
    targets = [[3, 4, 5, 2], [6, 2]]
    source = [[3, 5, 2], [4, 2]]
    output = [token for target in targets for token in target]
    inputs = [[1, *target[:-1]] for target in targets]
    if padding:
        source, inputs, output = [*source, [2] * 5], [*inputs, [1] * 4], [*output, *[IGNORE_INDEX] * 4]
    pairs = torch.arange(len(source))
    return Batch(Packed.from_lists(source), Packed.from_lists(inputs), torch.tensor(output), 6, pairs)


def criterion(**settings: Any) -> ExpectedReward:
    return ExpectedReward(ExpectedRewardConfig(**settings), Letters())  # type: ignore[arg-type]


def log_p(net: Architecture, source: list[int], words: Sequence[int]) -> Tensor:
    logits = net.output_projection(net(Packed.from_lists([source]), Packed.from_lists([[1, *words]])))
    return logits.log_softmax(-1)[range(len(words) + 1), [*words, 2]].sum()


def gradients(net: Architecture, value: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, list(net.parameters()))])


def test_gleu_is_the_lesser_of_precision_and_recall() -> None:
    assert gleu("the cat sat", "the cat sat") == 1.0
    # a b c: a, b, c, ab, bc, abc (6); a b d e: 4 + 3 + 2 + 1 (10); common: a, b, ab
    assert gleu("a b c", "a b d e") == 3 / 10
    assert gleu("a b d e", "a b c") == 3 / 10
    assert gleu("a a a", "a") == 1 / 6
    assert gleu("", "a") == 0.0
    assert gleu("the cat.", "the cat .") == 1.0


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_rewards_run_from_nothing_to_one(name: str) -> None:
    def reward(text: str, reference: str) -> float:
        return segment_metric(name).qualities([text], references=[reference])[0] / 100

    assert reward("the old cat sat here", "the old cat sat here") == pytest.approx(1.0)
    assert reward("xx", "the old cat sat here") < 0.05
    assert 0.05 < reward("the old dog sat there", "the old cat sat here") < 0.9
    assert reward("", "the old cat") == 0.0


def test_sampled_loss_pushes_by_reward_above_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    net, loss_of = model(), criterion(candidates_per_sentence=3, likelihood_weight=0.25).train()
    drawn = [[[3, 4, 5], [3], [6, 6]], [[6], [4, 6], [6]]]
    monkeypatch.setattr(loss_of, "candidates", lambda model, source, directions: drawn)
    loss = loss_of(net, batch())
    rewards = [[1.0, 1 / 6, 0.0], [1.0, 1 / 3, 1.0]]
    expected = -0.25 * (log_p(net, [3, 5, 2], [3, 4, 5]) + log_p(net, [4, 2], [6]))
    for source, candidates, values in zip([[3, 5, 2], [4, 2]], drawn, rewards, strict=True):
        mean = sum(values) / 3
        for words, value in zip(candidates, values, strict=True):
            expected = expected - (value - mean) * log_p(net, source, words) / 3
    torch.testing.assert_close(gradients(net, loss.sum), gradients(net, expected), rtol=1e-4, atol=1e-6)
    assert float(loss.counts["reward"]) == pytest.approx(sum(sum(values) / 3 for values in rewards))


def test_nbest_loss_is_the_expectation_over_the_list() -> None:
    net, loss_of = model(5), criterion(candidates="nbest", candidates_per_sentence=16, candidate_extra=1).train()
    one = Batch(Packed.from_lists([[3, 2]]), Packed.from_lists([[1, 3]]), torch.tensor([3, 2]), 2, torch.arange(1))
    loss = loss_of(net, one)
    every = [words for length in range(3) for words in itertools.product([3, 4], repeat=length)]
    scores = torch.stack([log_p(net, [3, 2], words) for words in every])
    rewards = torch.tensor([gleu(" ".join(map(str, words)), "3") for words in every])
    expected = -0.017 * log_p(net, [3, 2], [3]) - (scores.softmax(0) * rewards).sum()
    torch.testing.assert_close(loss.sum, expected)
    torch.testing.assert_close(gradients(net, loss.sum), gradients(net, expected), rtol=1e-4, atol=1e-6)


def test_samples_follow_the_models_distribution() -> None:
    net, loss_of = model(5).train(), criterion(candidates_per_sentence=1000, candidate_extra=0)
    torch.manual_seed(8)
    (drawn,) = loss_of.candidates(net, Packed.from_lists([[3, 2]]), [Constraints()])
    assert max(len(words) for words in drawn) == 1
    logits = net.output_projection(net(Packed.from_lists([[3, 2]]), Packed.from_lists([[1]])))[0]
    p = logits[[2, 3, 4]].softmax(0)  # of eos and the words; no sample holds <unk> or bos
    for words, share in zip(([], [3], [4]), p.tolist(), strict=True):
        assert sum(tokens == words for tokens in drawn) / 1000 == pytest.approx(share, abs=0.05)
    assert loss_of.candidates(net, Packed.from_lists([[3, 2]]), [Constraints()]) != [drawn]


def test_sampling_repeats_with_the_seed_and_leaves_the_mode_alone() -> None:
    net, loss_of = model(dropout=0.3).train(), criterion(candidates_per_sentence=4).train()
    torch.manual_seed(5)
    first = loss_of(net, batch()).sum
    torch.manual_seed(5)
    assert torch.equal(first, loss_of(net, batch()).sum)
    assert net.training and all(module.training for module in net.modules())


def test_padding_earns_nothing() -> None:
    net = model().train()
    for candidates in ("sample", "nbest"):
        loss_of = criterion(candidates_per_sentence=4, candidates=candidates, candidate_extra=2).train()
        losses = []
        for padding in (False, True):
            torch.manual_seed(5)
            losses.append(loss_of(net, batch(padding)).sum)
        torch.testing.assert_close(*losses)


def test_a_dummy_micro_batch_has_no_reward() -> None:
    """A process with fewer micro-batches than others gets a dummy micro-batch, whose tokens do not count."""
    net, loss_of = model().train(), criterion(candidates_per_sentence=4).train()
    dummy = replace(batch(), target_output=torch.full((6,), IGNORE_INDEX), target_tokens=0)
    loss = loss_of(net, dummy)
    loss.sum.backward()
    assert float(loss.sum.detach()) == float(loss.counts["reward"]) == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in net.parameters())


def test_autocast_loses_no_gradient() -> None:
    net, loss_of = model().train(), criterion(candidates_per_sentence=4).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(net, batch())
    loss.sum.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in net.parameters())


def test_validation_sees_the_likelihood_alone() -> None:
    net, loss_of = model().eval(), criterion().eval()
    loss = loss_of(net, batch())
    expected = -(log_p(net, [3, 5, 2], [3, 4, 5]) + log_p(net, [4, 2], [6]))
    torch.testing.assert_close(loss.sum, expected)
    assert set(loss.counts) == {"nll"}


@pytest.mark.slow
def test_rewards_rise_when_it_is_minimised() -> None:
    net, loss_of = model(), criterion(candidates_per_sentence=16, candidate_extra=2, likelihood_weight=0.0).train()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    torch.manual_seed(1)
    rewards = []
    for _ in range(60):
        loss = loss_of(net, batch())
        optimizer.zero_grad()
        loss.sum.backward()
        optimizer.step()
        rewards.append(float(loss.counts["reward"]) / 2)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_one_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--candidates-per-sentence is 1; .*2"):
        ExpectedRewardConfig(candidates_per_sentence=1)
