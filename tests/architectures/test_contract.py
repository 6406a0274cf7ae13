"""The contract of every registered architecture with trainers and searches, at tiny sizes."""

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from testing import TINY_CONFIGS, tiny_model
from torch import Tensor

from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.architectures.interface import PrefixState
from nmtkit.generation.decoding import beam_search
from nmtkit.generation.options import SearchOptions
from nmtkit.packed import Layout, Packed
from nmtkit.registry import derive, plain

SIZE = 13
TINY_NAMES = list(TINY_CONFIGS)


def tiny(name: str, size: int = SIZE, **changes: Any) -> Architecture:
    """A small model of the architecture; its gates, where it has some, are no longer all zero."""
    model = tiny_model(name, size, seed=3, **changes)
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() > 1:
            torch.nn.init.normal_(parameter)
    return model


def sentences(*lengths: int, seed: int = 5) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    return Packed.from_lists([torch.randint(3, SIZE, (length,), generator=generator).tolist() for length in lengths])


def reference(model: Architecture, source: list[int], prefix: list[int]) -> Tensor:
    """Logits [V] of what follows the prefix, by a full forward pass over one sentence."""
    features = model(Packed.from_lists([source]), Packed.from_lists([prefix]))
    return model.output_projection(features[-1:])[0]


def test_every_factory_is_tried() -> None:
    ours = {entry.factory for entry in ARCHITECTURES.entries.values() if entry.factory.__module__.startswith("nmtkit.")}
    assert ours == {ARCHITECTURES[name].factory for name in TINY_CONFIGS}


@pytest.mark.parametrize("name", TINY_NAMES)
def test_alone_equals_in_any_batch(name: str) -> None:
    model = tiny(name).eval()
    source, target = sentences(4, 9, 1, 6), sentences(7, 2, 5, 12, seed=6)
    together = target.with_values(model(source, target)).split()
    turned = torch.tensor([2, 0, 3, 1])
    reordered = model(source.select(turned), target.select(turned))
    again = target.select(turned).with_values(reordered).split()
    for index in range(4):
        single = torch.tensor([index])
        alone = model(source.select(single), target.select(single))
        torch.testing.assert_close(together[index], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again[turned.tolist().index(index)], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_padding_sentences_and_a_loose_bound_change_nothing(name: str) -> None:
    model = tiny(name).eval()
    source, target = sentences(4, 9), sentences(7, 2, seed=6)
    expected = model(source, target)

    def with_padding(packed: Packed) -> Packed:
        lengths = torch.cat([packed.layout.lengths, torch.tensor([3, 2])])
        values = torch.cat([packed.values, torch.tensor([2, 2, 2, 2, 2])])
        return Packed(values, Layout(lengths, 64, len(values)))

    got = model(with_padding(source), with_padding(target))
    torch.testing.assert_close(got[: len(expected)], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_features_depend_on_earlier_tokens_alone(name: str) -> None:
    model = tiny(name).eval()
    source, target = sentences(5, 3), sentences(8, 6, seed=6)
    changed = target.values.clone()
    changed[5:8] = (changed[5:8] + 1) % SIZE
    before, after = model(source, target), model(source, target.with_values(changed))
    torch.testing.assert_close(before[:5], after[:5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(before[8:], after[8:], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[5:8], after[5:8])


@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_source_token_matters(name: str) -> None:
    model = tiny(name).eval()
    source, target = sentences(6), sentences(6, seed=6)
    features = model(source, target)
    for index in range(6):
        changed = source.values.clone()
        changed[index] = (changed[index] + 1) % SIZE
        assert not torch.allclose(features, model(source.with_values(changed), target), rtol=0, atol=1e-6), index


@pytest.mark.parametrize("name", TINY_NAMES)
def test_cached_step_equals_full_forward(name: str) -> None:
    model = tiny(name).eval()
    with torch.no_grad():
        source = sentences(4, 7, 2)
        memory = model.encode(source)
        beams = 2
        rows = sentences(*[11] * 6, seed=9).to_padded()
        state, plain_state = model.start(memory, beams), PrefixState(memory, beams)
        assert not isinstance(state, PrefixState)
        for column in rows.unbind(1):
            logits, expected = model.step(column, state), Architecture.step(model, column, plain_state)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_reorder_drop_and_insert_keep_rows_right(name: str) -> None:
    """A search over three sentences is shuffled, thinned and topped up; each row still follows its own prefix."""
    model = tiny(name).eval()
    with torch.no_grad():
        source = [ids.tolist() for ids in sentences(4, 7, 2).split()]
        fresh = [ids.tolist() for ids in sentences(9, 3, seed=8).split()]
        tokens = torch.randint(3, SIZE, (9, 6), generator=torch.Generator().manual_seed(1))
        state = model.start(model.encode(Packed.from_lists(source)), 2)
        owners, prefixes = [0, 0, 1, 1, 2, 2], [[] for _ in range(6)]

        def step(column: Tensor) -> None:
            logits = model.step(column, state)
            for row, token in enumerate(column.tolist()):
                prefixes[row] = [*prefixes[row], token]
                expected = reference(model, source[owners[row]], prefixes[row])
                torch.testing.assert_close(logits[row], expected, rtol=1e-5, atol=1e-5)

        def reorder(parents: list[int]) -> None:
            nonlocal prefixes
            state.reorder(torch.tensor(parents))
            prefixes = [prefixes[parent] for parent in parents]

        step(tokens[0])
        reorder([1, 1, 2, 3, 5, 4])
        step(tokens[1])
        state.drop_finished(torch.tensor([0, 2]))
        owners, prefixes = [0, 0, 2, 2], prefixes[:2] + prefixes[4:]
        step(tokens[2, :4])
        state.insert(torch.tensor([1]), model.encode(Packed.from_lists(fresh[:1])))
        source.append(fresh[0])
        owners, prefixes = [0, 0, 3, 3], [*prefixes[:2], [], []]
        step(tokens[3, :4])
        reorder([1, 0, 3, 2])
        step(tokens[4, :4])
        state.insert(torch.tensor([1, 0]), model.encode(Packed.from_lists(fresh)))
        source.append(fresh[1])
        owners, prefixes = [4, 4, 3, 3], [[], [], [], []]
        for column in tokens[5:]:
            step(column[:4])
        state.drop_finished(torch.tensor([0]))
        owners, prefixes = owners[:2], prefixes[:2]
        step(tokens[0, :2])


@pytest.mark.parametrize("name", TINY_NAMES)
def test_beam_search_equals_exhaustive_search(name: str) -> None:
    """Two words, at most four of them: 31 translations, each scored by a forward pass of its own."""
    model = tiny(name, size=5).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5  # less uniform
        sources = [[3, 4, 3, 2], [4, 2]]
        options = SearchOptions(beam=32, nbest=5, lenpen=0.6, max_len_a=0.0, max_len_b=4)
        found = beam_search([model], Packed.from_lists(sources), options)
        for source, hypotheses in zip(sources, found, strict=True):
            scores = {}
            for length in range(5):
                for words in itertools.product([3, 4], repeat=length):
                    logits = model.output_projection(
                        model(Packed.from_lists([source]), Packed.from_lists([[1, *words]]))
                    )
                    tokens = torch.tensor([*words, 2])
                    total = logits.double().log_softmax(-1)[torch.arange(length + 1), tokens].sum()
                    scores[words] = float(total) / ((5 + length + 1) / 6) ** 0.6
            best = sorted(scores, key=lambda words: -scores[words])[:5]
            assert [tuple(hypothesis.tokens) for hypothesis in hypotheses] == best
            assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(
                [scores[words] for words in best], abs=1e-4
            )


@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_parameter_gets_a_finite_gradient(name: str) -> None:
    model = tiny(name).train()
    features = model(sentences(5, 8, 3), sentences(7, 4, 9, seed=6))
    loss = torch.nn.functional.cross_entropy(
        model.output_projection(features), sentences(20, seed=7).values, reduction="sum"
    )
    (loss + sum(model.auxiliary_losses().values())).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
    assert sum(bool(parameter.grad.any()) for parameter in model.parameters()) == len(list(model.parameters()))


@pytest.mark.parametrize("name", TINY_NAMES)
def test_bf16_autocast_trains_and_steps(name: str) -> None:
    model = tiny(name, dropout=0.0).train()
    source, target = sentences(5, 8, 3), sentences(7, 4, 9, seed=6)
    exact = model.eval()(source, target).detach()
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        features = model(source, target)
        loss = model.output_projection(features).float().logsumexp(-1).sum() + sum(model.auxiliary_losses().values())
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    if "moe" not in name:  # noise
        assert (features.float() - exact).abs().max() < 0.05 * exact.abs().max()
    model.eval()
    for cast in (False, True):
        model = copy.deepcopy(model).bfloat16() if cast else model
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not cast):
            state = model.start(model.encode(source), 2)
            first = model.step(target.values[:6], state)
            second = model.step(target.values[6:12], state)
        assert first.isfinite().all() and second.isfinite().all()


@pytest.mark.parametrize("name", TINY_NAMES)
def test_training_repeats_with_the_seed_of_the_global_generator(name: str) -> None:
    model = tiny(name, dropout=0.3).train()
    source, target = sentences(5, 8, 3), sentences(7, 4, 9, seed=6)

    def features() -> Tensor:
        torch.manual_seed(11)
        return model(source, target)

    first = features()
    assert torch.equal(first, features())
    assert not torch.equal(first, model(source, target))


@pytest.mark.parametrize("name", TINY_NAMES)
def test_auxiliary_losses_are_silent_in_evaluation(name: str) -> None:
    model = tiny(name).eval()
    model(sentences(5, 8), sentences(7, 4, seed=6))
    assert model.auxiliary_losses() == {}


@pytest.mark.parametrize("name", TINY_NAMES)
def test_config_survives_a_round_trip(name: str) -> None:
    model_config = derive(ARCHITECTURES[name].preset, TINY_CONFIGS[name], "test")
    assert derive(ARCHITECTURES[name].preset, plain(model_config), "test") == model_config


@pytest.mark.parametrize("name", TINY_NAMES)
def test_weights_survive_a_round_trip(name: str) -> None:
    model, other = tiny(name).eval(), tiny(name).eval()
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.load_state_dict(model.state_dict())
    source, target = sentences(5, 8), sentences(7, 4, seed=6)
    assert torch.equal(model(source, target), other(source, target))


@pytest.mark.parametrize("name", ARCHITECTURES.names())
def test_bad_sizes_are_refused_by_name(name: str) -> None:
    preset = ARCHITECTURES[name].preset
    assert any(field.name == "dropout" for field in dataclasses.fields(preset))
    with pytest.raises(ValueError, match="dropout is"):
        derive(preset, {"dropout": 1.5}, "test")


@pytest.mark.parametrize("name", TINY_NAMES)
def test_attention_weights_are_distributions(name: str) -> None:
    model = tiny(name).eval()
    source, target = sentences(5, 8), sentences(7, 4, seed=6)
    if name == "bytenet_small":
        with pytest.raises(ValueError, match="no attention"):
            model.attention_weights(source, target)
        return
    for kind, layers in model.attention_weights(source, target).items():
        queries = source.layout if kind == "encoder" else target.layout
        for weights in layers:
            torch.testing.assert_close(weights.sum(-1)[:, 0], queries.mask.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES.names() if name.endswith(("_small", "_tiny"))])
def test_a_fresh_small_model_depends_on_its_source(name: str) -> None:
    """Another source changes the logits by 5 % of their deviation or more; where it changes none, learning is slow."""
    torch.manual_seed(3)
    entry = ARCHITECTURES[name]
    model = entry.factory(entry.preset, Vocabulary(source=200, target=200, joint=True)).eval()
    with torch.no_grad():
        target = sentences(9, 12, 10, seed=6)
        logits, others = (model.output_projection(model(sentences(9, 12, 10, seed=seed), target)) for seed in (5, 7))
    assert (logits - others).std() > 0.05 * logits.std()
    assert logits.std() < 3  # and no saturated softmax
