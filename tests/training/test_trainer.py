"""One update at a time: accumulation, clipping, skipped updates, running means, frozen parts."""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nmtkit.data.dataset.batching import BatchSampler, DirectionSampling
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.directions import Direction
from nmtkit.data.packed import IGNORE_INDEX
from nmtkit.data.tokenizers.tokenizer import UNK
from nmtkit.training.config import JobConfig
from nmtkit.training.initial_weights import start_from
from nmtkit.training.loader import BatchLoader, Position
from nmtkit.training.memory import fit_max_tokens, missing_state_bytes, probe_memory
from nmtkit.training.meter import DivergedError, Meter
from nmtkit.training.parameters import embedding_names, parameter_groups
from nmtkit.training.precision import LossScale
from nmtkit.training.setup import build_trainer, build_transforms
from nmtkit.training.trainer import Trainer, seed_of

CPU = torch.device("cpu")
TINY = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}


def trainer(data: Path, architecture: str = "transformer_tiny", **settings: Any) -> Trainer:
    run = {"batch_tokens": 400, "precision": "fp32", "device": "cpu", "lr": 0.01, "warmup_updates": 1}
    job = JobConfig.read(names={"architecture": architecture}, settings=TINY | run | settings)
    return build_trainer(job, Dataset.open(data).tokenizer, CPU)


def loader_of(data: Path, max_tokens: int = 400, rank: int = 0, ranks: int = 1, **settings: Any) -> BatchLoader:
    split = Dataset.open(data)["train"]
    sampler = BatchSampler(split.source.lengths, split.target.lengths, 400, seed=1)
    return BatchLoader(split, sampler, max_tokens, rank, ranks, CPU, **settings)


def first_update(loader: BatchLoader) -> Any:
    pairs = next(iter(loader.sampler.epoch(0)))
    return loader.update(Position(0, 0), pairs, ends_epoch=False)


def test_a_closed_loader_leaves_no_thread(mirror_data: Path) -> None:
    loader = loader_of(mirror_data)
    next(loader.updates(Position(0, 0)))
    thread = loader.prefetched.thread
    assert thread.is_alive()
    loader.close()
    assert not thread.is_alive()


def gradient(one: Trainer) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in one.engine.gradients()])


def test_an_accumulated_update_equals_one_large_batch(mirror_data: Path) -> None:
    whole, parts = trainer(mirror_data), trainer(mirror_data)
    large = first_update(loader_of(mirror_data))
    small = first_update(loader_of(mirror_data, max_tokens=60))
    assert len(large.micro_batches) == 1
    assert len(small.micro_batches) >= 7
    whole.step(large)
    parts.step(small)
    torch.testing.assert_close(gradient(parts), gradient(whole), atol=1e-6, rtol=1e-4)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        # Adam's first step is the learning rate times the sign, which rounding may turn where the gradient is 0
        assert float((one - other).detach().abs().mean()) < 1e-4


def test_the_loss_is_divided_by_the_target_tokens_of_the_update(mirror_data: Path) -> None:
    one = trainer(mirror_data, criterion="cross_entropy")
    update = first_update(loader_of(mirror_data, max_tokens=60))
    metrics = one.step(update)
    fresh = trainer(mirror_data, criterion="cross_entropy")
    fresh.engine.zero_grad()
    total = sum(fresh.criterion(fresh.model, batch).sum for _, batch in update.micro_batches)
    assert isinstance(total, torch.Tensor)
    (total / sum(batch.target_tokens for _, batch in update.micro_batches)).backward()
    assert float(metrics.norm) == pytest.approx(float(gradient(fresh).norm()), rel=1e-4)


def test_ranks_take_every_micro_batch_once_and_equally_many(mirror_data: Path) -> None:
    shares = [first_update(loader_of(mirror_data, 60, rank, 3)).micro_batches for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    numbered = sorted((number, batch) for share in shares for number, batch in share)
    assert [number for number, _ in numbered] == list(range(len(numbered)))
    counted = [batch for _, batch in numbered if batch.target_tokens]
    dummies = [batch for _, batch in numbered if not batch.target_tokens]
    assert 0 < len(dummies) < 3
    assert all((batch.target_output == IGNORE_INDEX).all() for batch in dummies)
    pairs = torch.cat([batch.pairs for batch in counted])
    assert sorted(pairs.tolist()) == sorted(first_update(loader_of(mirror_data)).pairs.tolist())


def test_the_idle_share_counts_ranks_without_a_micro_batch(mirror_data: Path) -> None:
    counts = [len(update) for update in loader_of(mirror_data, 60)._first_micro_batches()]
    assert min(counts) >= 7
    assert loader_of(mirror_data, 60, 0, 1).idle_share() == 0
    assert loader_of(mirror_data, 400, 0, 4).idle_share() == 0.75  # one micro-batch for four ranks
    five = sum(-(-count // 5) * 5 for count in counts)
    assert loader_of(mirror_data, 60, 0, 5).idle_share() == pytest.approx((five - sum(counts)) / five)


def test_max_sentences_bounds_micro_batches_and_leaves_updates(mirror_data: Path) -> None:
    plain, bounded = (first_update(loader_of(mirror_data, max_sentences=number)) for number in (None, 4))
    assert sorted(bounded.pairs) == sorted(plain.pairs)
    counts = [len(batch.pairs) for _, batch in bounded.micro_batches]
    assert max(counts) == 4 and sum(counts) == len(plain.pairs)


def test_clipping_bounds_the_norm_and_keeps_the_direction(mirror_data: Path) -> None:
    plain, clipped = trainer(mirror_data), trainer(mirror_data, clip_norm=0.01)
    plain.step(first_update(loader_of(mirror_data)))
    metrics = clipped.step(first_update(loader_of(mirror_data)))
    assert float(gradient(clipped).norm()) == pytest.approx(0.01, rel=1e-3)
    cosine = torch.cosine_similarity(gradient(plain), gradient(clipped), dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-5)
    assert float(metrics.norm) == pytest.approx(float(gradient(plain).norm()), rel=1e-4)


def poisoned(one: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every following loss infinite. Gradients stay finite."""
    forward = one.criterion.forward

    def infinite(model: Any, batch: Any) -> Any:
        loss = forward(model, batch)
        object.__setattr__(loss, "sum", loss.sum + math.inf)
        return loss

    monkeypatch.setattr(one.criterion, "forward", infinite)


def test_an_update_that_is_not_finite_changes_nothing_and_is_reported(
    mirror_data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    one = trainer(mirror_data)
    loader = loader_of(mirror_data)
    meter = Meter(CPU, tmp_path)
    meter.add(one.step(first_update(loader)))
    before = [parameter.clone() for parameter in one.model.parameters()]
    state = {name: value.clone() for name, value in one.optimizer.state[next(one.model.parameters())].items()}
    with monkeypatch.context() as patch:
        poisoned(one, patch)
        update = first_update(loader)
        meter.add(one.step(update))
    assert all(torch.equal(old, new) for old, new in zip(before, one.model.parameters(), strict=True))
    assert all(torch.equal(old, one.optimizer.state[next(one.model.parameters())][name]) for name, old in state.items())
    assert "update 2 skipped" in caplog.text
    assert f": {update.pairs[0] + 1}" in caplog.text  # pairs count from 1, as in other messages
    record = meter.read()
    assert record["skipped"] == 1
    assert math.isfinite(record["loss"])


def test_a_count_that_an_update_lacks_is_logged(mirror_data: Path, tmp_path: Path) -> None:
    """guided_alignment has no alignment loss in updates whose LayerDrop skips the supervised layer."""
    one, loader = trainer(mirror_data), loader_of(mirror_data)
    meter = Meter(CPU, tmp_path)
    steps = [one.step(first_update(loader)) for _ in range(2)]
    steps[1].sums["alignment"] = torch.tensor(6.0)
    for step in steps:
        meter.add(step)
    assert meter.read()["alignment"] == pytest.approx(6 / sum(step.target_tokens for step in steps))


def test_too_many_skipped_in_a_row_end_the_run_and_name_the_checkpoint(
    mirror_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "update_00000007.pt").touch()
    (tmp_path / "last.pt").symlink_to("update_00000007.pt")
    monkeypatch.setattr("nmtkit.training.meter.IN_A_ROW", 3)
    one = trainer(mirror_data)
    meter = Meter(CPU, tmp_path)
    poisoned(one, monkeypatch)
    update = first_update(loader_of(mirror_data))
    meter.add(one.step(update))
    meter.add(one.step(update))
    with pytest.raises(DivergedError, match=r"3 updates .*update_00000007.pt"):
        meter.add(one.step(update))


def test_the_loss_scale_halves_on_overflow_and_doubles_after_a_while() -> None:
    scale = LossScale("fp16", CPU, growth_interval=3)
    seen = []
    for finite in (False, True, True, True, True, False):
        scale.update(torch.tensor(finite))
        seen.append(float(scale.value) / 2**15)
    assert seen == [0.5, 0.5, 0.5, 1.0, 1.0, 0.5]
    resumed = LossScale("fp16", CPU)
    resumed.load_state_dict(scale.state_dict())
    assert resumed.state_dict() == scale.state_dict()


def test_running_means_are_swapped_in_and_out(mirror_data: Path) -> None:
    one = trainer(mirror_data, ema_decay=0.5)
    weight = next(one.model.parameters())
    expected = weight.detach().clone()
    update = first_update(loader_of(mirror_data))
    for number in (1, 2, 3):
        one.step(update)
        decay = min(0.5, number / (number + 9))
        expected = decay * expected + (1 - decay) * weight.detach()
    raw = weight.detach().clone()
    with one.evaluated_weights():
        torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(weight, raw)


def test_frozen_parameters_stay_and_unknown_patterns_are_refused(mirror_data: Path) -> None:
    one = trainer(mirror_data, freeze=("encoder.*",))
    before = {name: parameter.clone() for name, parameter in one.model.named_parameters()}
    one.step(first_update(loader_of(mirror_data)))
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("encoder.")
    with pytest.raises(ValueError, match=r"--freeze nothing"):
        trainer(mirror_data, freeze=("nothing.*",))


def test_weight_decay_spares_vectors_and_follows_rules(mirror_data: Path) -> None:
    model = trainer(mirror_data).model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(dict(model.named_parameters()), ("decoder.*weight=0.5",), embedding_names(model))
    decay = {names[id(it)]: group.get("weight_decay") for group in groups for it in group["params"]}
    assert len(decay) == len(names)
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.") and name.endswith("weight"):
            assert decay[name] == 0.5
        else:
            assert decay[name] == (None if parameter.dim() > 1 else 0.0)
    with pytest.raises(ValueError, match="PATTERN=NUMBER"):
        parameter_groups(dict(model.named_parameters()), ("decoder",), ())


def test_an_optimizer_of_other_parameters_is_refused_with_one_that_differs(mirror_data: Path) -> None:
    whole, frozen = trainer(mirror_data), trainer(mirror_data, freeze=("encoder.*norm*",))
    one, last = (
        sorted(name for name, it in frozen.model.named_parameters() if not it.requires_grad)[i] for i in (0, -1)
    )
    assert one != last
    message = rf"different parameter groups .* 4 only in the checkpoint, such as {one}; resume with the same --freeze"
    with pytest.raises(ValueError, match=message):
        frozen.load_state_dict(whole.state_dict(), 0)
    decayed = trainer(mirror_data, weight_decay_for=("encoder.*fc1.weight=0.5",))
    with pytest.raises(ValueError, match=r"groups of \[.*\] and \[.*\]"):
        decayed.load_state_dict(whole.state_dict(), 0)


def test_seeds_differ_by_each_of_run_update_and_micro_batch() -> None:
    seeds = {seed_of(seed, update, part) for seed in range(3) for update in range(20) for part in range(-1, 20)}
    assert len(seeds) == 3 * 20 * 21


def test_transforms_keep_the_pairs_and_count_the_tokens_there_are(mirror_data: Path) -> None:
    names = {"architecture": "transformer_tiny", "transforms": "bpe_dropout"}
    job = JobConfig.read(names=names, settings=TINY | {"bpe_dropout": 0.5, "device": "cpu", "precision": "fp32"})
    loader = loader_of(mirror_data, 60, transforms=build_transforms(job, Dataset.open(mirror_data)["train"]))
    pairs = next(iter(loader.sampler.epoch(0)))
    first, again, later = (loader.update(Position(epoch, 0), pairs, ends_epoch=False) for epoch in (0, 0, 1))
    tokens = [[batch.target_output.tolist() for _, batch in update.micro_batches] for update in (first, again, later)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert np.array_equal(first.pairs, later.pairs)
    one = build_trainer(job, Dataset.open(mirror_data).tokenizer, CPU)
    assert one.step(first).target_tokens == sum(len(output) for output in tokens[0]) != first.target_tokens


@pytest.mark.slow
def test_a_pair_that_an_epoch_has_several_times_is_transformed_anew_each_time(mirror_data: Path) -> None:
    names = {"architecture": "transformer_tiny", "transforms": "word_dropout"}
    job = JobConfig.read(names=names, settings=TINY | {"word_dropout": 0.5})
    split = Dataset.open(mirror_data)["train"]
    sampling = DirectionSampling(np.zeros(len(split), np.uint16), np.array([4.0]))

    def sources(batch_tokens: int, max_tokens: int = 100, ranks: int = 1) -> dict[int, Counter[tuple[int, ...]]]:
        sampler = BatchSampler(split.source.lengths, split.target.lengths, batch_tokens, seed=1, sampling=sampling)
        found: dict[int, Counter[tuple[int, ...]]] = {pair: Counter() for pair in range(len(split))}
        for rank in range(ranks):
            loader = BatchLoader(split, sampler, max_tokens, rank, ranks, CPU, transforms=build_transforms(job, split))
            for index, pairs in enumerate(sampler.epoch(0)):
                for _, batch in loader.update(Position(0, index), pairs, ends_epoch=False).micro_batches:
                    for pair, ids in zip(batch.pairs.tolist(), batch.source.split(), strict=True):
                        found[pair].update([tuple(ids.tolist())] * bool(batch.target_tokens))
        return found

    for batch_tokens in (400, 100_000):  # copies of a pair in different updates, and all in one update
        texts = sources(batch_tokens)
        assert {copies.total() for copies in texts.values()} == {4}
        # a ninth of the pairs has a single source word, which no copy leaves out
        assert sum(len(copies) > 1 for copies in texts.values()) > 0.85 * len(split)
        assert texts == sources(batch_tokens, ranks=2) == sources(batch_tokens, max_tokens=60)


def test_a_batch_that_an_epoch_repeats_is_transformed_anew_each_time(mirror_data: Path) -> None:
    names = {"architecture": "transformer_tiny", "transforms": "word_dropout"}
    job = JobConfig.read(names=names, settings=TINY | {"word_dropout": 0.5})
    split = Dataset.open(mirror_data)["train"]
    sampler = BatchSampler(split.source.lengths, split.target.lengths, 400, seed=1, repeated=1)
    loader = BatchLoader(split, sampler, 400, 0, 1, CPU, transforms=build_transforms(job, split))
    first, second = (
        loader.update(Position(0, index), pairs, False) for index, pairs in enumerate(islice(sampler.epoch(0), 2))
    )
    assert first.pairs.tolist() == second.pairs.tolist()
    texts = [[batch.source.values.tolist() for _, batch in update.micro_batches] for update in (first, second)]
    assert texts[0] != texts[1]


def test_masks_need_pairs_from_a_language_to_itself_which_the_direction_says(mirror_data: Path) -> None:
    job = JobConfig.read(names={"architecture": "transformer_tiny", "transforms": "bpe_dropout,span_masking"})
    split = Dataset.open(mirror_data)["train"]
    with pytest.raises(ValueError, match=r"--transforms span_masking .*--source-lang"):
        build_transforms(job, split)
    directions, index = (Direction("de", "de"), Direction("de", "en")), np.arange(len(split), dtype=np.uint16) % 2
    mixed = replace(split, source=split.target, directions=directions, direction_index=index)  # all sides are equal
    transforms = build_transforms(job, mixed)
    assert transforms is not None
    batch = mixed.batch(np.arange(40), partial(transforms, 0))
    masked = [bool((ids == UNK).any()) for ids in batch.source.split()]
    assert sum(masked[::2]) > 15 and not any(masked[1::2])


@pytest.mark.parametrize(
    ("name", "settings", "works"),
    [
        ("word_dropout", {}, False),
        ("typos", {}, False),
        ("casing", {"casing_sides": "source"}, False),
        ("casing", {}, True),
        ("bpe_dropout", {}, True),
    ],
)
def test_transforms_of_the_source_are_refused_for_language_models(
    mirror_data: Path, name: str, settings: dict[str, Any], works: bool
) -> None:
    split = Dataset.open(mirror_data)["train"]
    model = JobConfig.read(names={"architecture": "transformer_tiny", "transforms": name}, settings=settings)
    assert build_transforms(model, split) is not None
    lm = JobConfig.read(names={"architecture": "transformer_lm_tiny", "transforms": name}, settings=settings)
    with (
        nullcontext()
        if works
        else pytest.raises(ValueError, match=f"--transforms {name} has no effect.*language model")
    ):
        build_transforms(lm, split)


def test_rewards_of_translations_are_refused_for_language_models(mirror_data: Path) -> None:
    names = {"architecture": "transformer_lm_tiny", "criterion": "expected_reward"}
    job = JobConfig.read(names=names, settings={"precision": "fp32", "device": "cpu"})
    with pytest.raises(ValueError, match=r"--criterion expected_reward rewards translations.*language model"):
        build_trainer(job, Dataset.open(mirror_data).tokenizer, CPU)


@pytest.mark.parametrize(
    ("optimizer", "per_weight"),
    [("adam", 8), ("adamw", 8), ("sgd", 0), ("adafactor", 0), ("muon", None), ("lion", 4), ("schedule_free_adamw", 12)],
)
def test_the_probe_reserves_the_state_that_the_first_update_makes(
    mirror_data: Path, optimizer: str, per_weight: int | None
) -> None:
    names = {"architecture": "transformer_tiny", "optimizer": optimizer}
    job = JobConfig.read(names=names, settings=TINY | {"precision": "fp32", "device": "cpu", "batch_tokens": 400})
    one = build_trainer(job, Dataset.open(mirror_data).tokenizer, CPU)
    before = sum(value.nbytes for entries in one.optimizer.state.values() for value in entries.values())
    reserved = missing_state_bytes(one)
    if per_weight is not None:
        assert reserved == per_weight * sum(weight.numel() for weight in one.model.parameters())
    one.step(first_update(loader_of(mirror_data)))
    after = sum(value.nbytes for entries in one.optimizer.state.values() for value in entries.values())
    # optimizers also keep a step counter for each tensor, and Adafactor a number for each row and column
    small = sum(sum(weight.shape) * 4 + 8 for weight in one.model.parameters())
    assert reserved <= after - before <= reserved + small
    assert missing_state_bytes(one) == 0  # like a resumed run


def test_what_does_not_fit_is_refused_with_what_would(mirror_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(mirror_data)
    loader = loader_of(mirror_data)
    before = [parameter.clone() for parameter in one.model.parameters()]
    probe_memory(one, loader)
    assert all(torch.equal(old, new) for old, new in zip(before, one.model.parameters(), strict=True))
    assert not gradient(one).any()
    plain = one.trial_pass

    tried = []

    def small(batch: Any) -> None:
        tried.append(batch.source.layout.sentences)
        if batch.target_tokens > 150:
            raise torch.OutOfMemoryError("too much")
        plain(batch)

    monkeypatch.setattr(one, "trial_pass", small)
    with pytest.raises(ValueError, match=r"--max-tokens 400 .*(\d+) fits") as caught:
        probe_memory(one, loader)
    assert 50 < int(str(caught.value).split()[-2]) <= 150
    assert tried[0] == len(loader.largest_micro_batch()) and tried[1:] == [count // 2 for count in tried[:-1]]


def test_max_tokens_is_lowered_until_tokens_and_sentences_fit(
    mirror_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, loader = trainer(mirror_data), loader_of(mirror_data)
    by_tokens, by_sentences = loader.extreme_micro_batches()
    assert len(by_sentences) >= len(by_tokens) and loader.tokens_of(by_tokens) >= loader.tokens_of(by_sentences)
    before = [parameter.clone() for parameter in one.model.parameters()]
    plain, tried = one.trial_pass, []

    def small(batch: Any) -> None:
        tried.append((batch.target_tokens, batch.source.layout.sentences))
        if batch.target_tokens > 150 or batch.source.layout.sentences > 15:
            raise torch.OutOfMemoryError("too much")
        plain(batch)

    monkeypatch.setattr(one, "trial_pass", small)
    fit_max_tokens(one, loader)
    assert loader.max_tokens in (100, 50)
    assert len({sentences for _, sentences in tried}) > 2
    assert all(torch.equal(old, new) for old, new in zip(before, one.model.parameters(), strict=True))
    assert not gradient(one).any()
    monkeypatch.setattr(one, "trial_pass", lambda batch: small(replace(batch, target_tokens=1_000)))
    with pytest.raises(ValueError, match=r"sentence of \d+ tokens"):
        fit_max_tokens(one, loader)


def test_max_tokens_is_lowered_where_only_the_most_sentences_do_not_fit(
    mirror_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention saves a multiple of 128 rows for each sentence."""
    one, loader = trainer(mirror_data), loader_of(mirror_data)
    by_tokens, by_sentences = loader.extreme_micro_batches()
    assert len(by_tokens) < len(by_sentences)

    def small(batch: Any) -> None:
        if batch.source.layout.sentences >= len(by_sentences):
            raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(one, "trial_pass", small)
    before = loader.max_tokens
    fit_max_tokens(one, loader)
    assert loader.max_tokens == before // 2


@pytest.mark.slow
def test_a_compiled_model_is_compiled_once_for_batches_of_many_shapes(
    mirror_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled, plain = trainer(mirror_data), trainer(mirror_data)
    monkeypatch.setattr(compiled.model, "compile", partial(compiled.model.compile, backend=counter))
    monkeypatch.setattr(torch._dynamo.config, "suppress_errors", False)
    loader = loader_of(mirror_data, max_tokens=60)
    updates = [loader.update(Position(0, 0), pairs, False) for pairs in islice(loader.sampler.epoch(0), 3)]
    batches = [batch for update in updates for _, batch in update.micro_batches]
    shapes = {(batch.source.layout.tokens, batch.source.layout.sentences, batch.source.layout.max_length)
              for batch in batches}  # fmt: skip
    compiled.compile(loader.batch(loader.largest_micro_batch(), 0))
    for update in updates:
        compiled.step(update)
        plain.step(update)
        torch.testing.assert_close(gradient(compiled), gradient(plain), atol=1e-5, rtol=1e-3)
    assert len(shapes) > 10
    assert counter.frame_count <= 4  # batches whose sentences are all of one length are another graph


def test_a_model_that_cannot_be_compiled_trains_all_the_same(
    mirror_data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, plain = trainer(mirror_data), trainer(mirror_data)

    def broken(dynamic: bool) -> None:
        def call(*_: Any) -> None:
            raise RuntimeError("no compiler here\nsecond line")

        one.model._compiled_call_impl = call

    monkeypatch.setattr(one.model, "compile", broken)
    update = first_update(loader_of(mirror_data))
    one.compile(update.micro_batches[0][1])
    assert "no compiler here" in caplog.text
    one.step(update)
    plain.step(update)
    assert torch.equal(gradient(one), gradient(plain))


def test_running_out_of_memory_later_names_the_micro_batch(mirror_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(mirror_data)

    def full(model: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(one.criterion, "forward", full)
    with pytest.raises(ValueError, match=r"update 1, .*\d+ source .*\d+ target .*--max-tokens"):
        one.step(first_update(loader_of(mirror_data)))


def test_finetuning_maps_the_vocabulary_by_piece(mirror_data: Path, tmp_path: Path) -> None:
    from nmtkit.cli import main
    from nmtkit.data import checkpoint_file
    from nmtkit.models import building

    corpus = mirror_data.parent
    smaller = ["-s", "xx", "-t", "yy", "--trainpref", str(corpus / "valid"), "--destdir", str(tmp_path / "small")]
    main(["preprocess", *smaller, "--vocab-size", "300", "--separate-vocab"], standalone_mode=False)
    tokenizer = Dataset.open(mirror_data).tokenizer
    old = trainer(mirror_data)
    chosen = old.job.components["architecture"]
    contents = building.to_checkpoint(old.model, chosen.name, chosen.config, tokenizer, [], 5)
    checkpoint_file.save(tmp_path / "old.pt", contents)

    other = Dataset.open(tmp_path / "small").tokenizer
    new = trainer(tmp_path / "small", finetune_from=tmp_path / "old.pt").model
    fresh = trainer(tmp_path / "small").model
    found = start_from(fresh, chosen.name, chosen.config, other, tmp_path / "old.pt")
    known = {piece: row for row, piece in enumerate(tokenizer.target_pieces(range(tokenizer.target_size)))}
    pieces = other.target_pieces(range(other.target_size))
    shared = [row for row, piece in enumerate(pieces) if piece in known]
    assert found["target"] == len(shared)
    assert 250 < len(shared) < len(pieces)
    weights, before = new.state_dict()["output_projection.weight"], old.model.state_dict()["output_projection.weight"]
    assert all(torch.equal(weights[row], before[known[pieces[row]]]) for row in shared)
    same = "encoder.0.feed_forward.fc1.weight"
    assert torch.equal(new.state_dict()[same], old.model.state_dict()[same])
