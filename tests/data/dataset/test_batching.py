import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmtkit.data.dataset.batching import BatchSampler, micro_batches


def random_lengths(pairs: int, seed: int = 0, longest: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    source = rng.integers(1, longest, pairs).astype(np.int32)
    return source, np.clip(source + rng.integers(-5, 6, pairs), 1, longest).astype(np.int32)


@pytest.mark.parametrize("window", [10_000, 300, 7])
def test_every_pair_once_an_epoch_within_both_budgets(window: int) -> None:
    source, target = random_lengths(1000)
    sampler = BatchSampler(source, target, 200, seed=3, window_pairs=window)
    for epoch in (1, 2):
        updates = list(sampler.epoch(epoch))
        assert sorted(np.concatenate(updates).tolist()) == list(range(1000))
        assert all(max(source[update].sum(), target[update].sum()) <= 200 for update in updates)
        assert all(update.dtype == np.int64 for update in updates)


def test_the_number_of_updates_is_known_beforehand_within_two_per_cent() -> None:
    source, target = random_lengths(5000)
    sampler = BatchSampler(source, target, 1000, seed=3)
    for epoch in range(3):
        assert abs(len(list(sampler.epoch(epoch))) / sampler.updates_per_epoch - 1) < 0.02


def test_a_function_of_seed_and_epoch_alone() -> None:
    source, target = random_lengths(2000)

    def first(seed: int, epoch: int) -> list[int]:
        return next(iter(BatchSampler(source, target, 300, seed).epoch(epoch))).tolist()

    assert first(1, 1) == first(1, 1)
    assert len({tuple(first(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4


@pytest.mark.parametrize("window", [10_000, 130])
def test_an_epoch_can_be_entered_anywhere(window: int) -> None:
    source, target = random_lengths(1000)
    sampler = BatchSampler(source, target, 200, seed=3, window_pairs=window)
    updates = [update.tolist() for update in sampler.epoch(4)]
    for start in (0, 1, 5, len(updates) - 1, len(updates)):
        assert [update.tolist() for update in sampler.epoch(4, start)] == updates[start:]


def test_updates_are_of_similar_length_and_in_random_order() -> None:
    source, target = random_lengths(20_000)
    updates = list(BatchSampler(source, target, 1000, seed=1).epoch(1))
    assert np.mean([target[update].std() / target[update].mean() for update in updates]) < 0.06
    means = np.array([target[update].mean() for update in updates])
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.2
    filled = [max(source[update].sum(), target[update].sum()) / 1000 for update in updates]
    assert np.mean(filled) > 0.97


def test_pairs_meet_others_in_another_epoch() -> None:
    source, target = random_lengths(20_000, longest=12)
    sampler = BatchSampler(source, target, 500, seed=1)
    update_of = []
    for epoch in (1, 2):
        updates = list(sampler.epoch(epoch))
        numbers = np.empty(20_000, np.int64)
        numbers[np.concatenate(updates)] = np.repeat(np.arange(len(updates)), list(map(len, updates)))
        update_of.append(numbers)
    both = update_of[0] * 10_000 + update_of[1]
    _, sizes = np.unique(both, return_counts=True)
    met_twice = (
        (sizes * (sizes - 1)).sum() / 20_000
    )  # the pairs that share a batch with a pair in both epochs; about 75 share a batch with it in one epoch
    assert met_twice < 10


def test_windows_hold_contiguous_pairs() -> None:
    source, target = random_lengths(1000)
    for update in BatchSampler(source, target, 200, seed=3, window_pairs=250).epoch(1):
        assert len({pair // 250 for pair in update.tolist()}) == 1


def test_a_pair_above_the_budget_is_named_with_one_that_would_do() -> None:
    source, target = random_lengths(1000)
    target[777] = 300
    with pytest.raises(ValueError, match=r"pair 778 .* 300 .*--batch-tokens 200; .*--batch-tokens 300"):
        BatchSampler(source, target, 200, seed=1, window_pairs=100)
    update = np.array([5, 777, 9])
    with pytest.raises(ValueError, match=r"pair 778 .* 300 .*--max-tokens 100; .*--max-tokens 300"):
        micro_batches(update, source, target, 100)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(40, 400), st.integers(0, 5))
def test_micro_batches_hold_the_update_once_in_order_of_length(pairs: int, max_tokens: int, seed: int) -> None:
    source, target = random_lengths(1000, seed)
    update = np.random.default_rng(seed).permutation(1000)[:pairs]
    parts = micro_batches(update, source, target, max_tokens)
    assert sorted(np.concatenate(parts).tolist()) == sorted(update.tolist())
    for part in parts:
        assert max(source[part].sum(), target[part].sum()) <= max_tokens
        keys = list(zip(target[part].tolist(), source[part].tolist(), strict=True))
        assert keys == sorted(keys)
    tokens = max(source[update].sum(), target[update].sum())
    assert len(parts) >= tokens / max_tokens


def test_micro_batches_are_even() -> None:
    source, target = random_lengths(3000)
    update = np.arange(3000)
    largest = max(source.sum(), target.sum())
    limit = int(largest / 3.5)  # four micro-batches, the last of which would be half full
    parts = micro_batches(update, source, target, limit)
    assert len(parts) == 4
    sizes = [max(source[part].sum(), target[part].sum()) for part in parts]
    assert min(sizes) > 0.9 * max(sizes)


def test_repeated_updates_are_the_first_of_epoch_0_over_and_over() -> None:
    lengths = np.random.default_rng(1).integers(2, 30, 400)
    plain, few = (BatchSampler(lengths, lengths, 200, seed=3, repeated=repeated) for repeated in (None, 3))
    first = [pairs.tolist() for pairs in plain.epoch(0)][:3]
    for epoch in (0, 5):
        made = [pairs.tolist() for pairs in few.epoch(epoch)]
        assert len(made) == plain.updates_per_epoch > 10
        assert made == [first[index % 3] for index in range(len(made))]
        assert [pairs.tolist() for pairs in few.epoch(epoch, 4)] == made[4:]
