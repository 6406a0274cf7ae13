"""A Transformer in training: gradients, dropout, LayerDrop, gradient checkpointing, bfloat16 and torch.compile."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformer_cases import model_of, sentences, variants

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.layers.dropout import Dropout
from nmtkit.models.layers.losses import output_cross_entropy


def loss_and_gradients(model: Transformer) -> tuple[Tensor, list[Tensor | None]]:
    source, target = sentences(4, 9), sentences(5, 7, seed=2)
    loss, _ = output_cross_entropy(model.output_projection, model(source, target), target.values, 0.1)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@variants
def test_every_parameter_gets_a_gradient(changes: dict[str, Any]) -> None:
    _, gradients = loss_and_gradients(model_of(**changes))
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_gradient_checkpointing_changes_no_number() -> None:
    results = []
    for checkpointed in (False, True):
        model = model_of(
            dropout=0.2, attention_dropout=0.2, activation_dropout=0.2, gradient_checkpointing=checkpointed
        )
        torch.manual_seed(3)
        results.append(loss_and_gradients(model))
    (loss, gradients), (again, recomputed) = results
    assert torch.equal(loss, again)
    for one, other in zip(gradients, recomputed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_bfloat16_autocast_stays_near_float32() -> None:
    model = model_of(dropout=0.0)
    loss, gradients = loss_and_gradients(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        near, rounded = loss_and_gradients(model)
    assert near.item() == pytest.approx(loss.item(), rel=0.01)
    errors = []
    for one, other in zip(gradients, rounded, strict=True):
        assert one is not None and other is not None and other.dtype == torch.float32
        errors.append(float((one - other).norm() / one.norm()))
    assert max(errors) < 0.3 and sum(errors) < 0.08 * len(errors)  # torch's autocast has 0.14 and 0.036


# Dropout and LayerDrop


def test_attention_dropout_falls_while_training_alone() -> None:
    model = model_of(dropout=0.0, attention_dropout=0.5)
    source, target = sentences(4, 9), sentences(5, 7, seed=2)
    first, second = (model(source, target) for _ in range(2))
    assert not torch.allclose(first, second)
    plain = model_of(dropout=0.0)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval()(source, target), plain.eval()(source, target))


def test_dropout_modules_of_a_plug_in_are_called_in_training_and_evaluation() -> None:
    class Constant(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model, source = model_of().train(), sentences(4)
    before = model.encode(source).values
    for layer in model.encoder:
        layer.dropout = Constant()
    assert not torch.allclose(model.encode(source).values, before)
    for layer in model.encoder:
        layer.dropout = Dropout(0.5)
    model.eval()
    evaluated = model.encode(source).values
    for layer in model.encoder:
        layer.dropout.train()  # Monte Carlo dropout
    assert not torch.allclose(model.encode(source).values, evaluated)


def test_dropped_layers_are_those_of_the_draw() -> None:
    model = model_of(encoder_layerdrop=0.5, decoder_layerdrop=0.3, dropout=0.0)
    drops, rounds = torch.zeros(4), 2000
    generator = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        model.begin_update(generator)
        drops += torch.tensor([index in model.dropped for index in range(4)])
    torch.testing.assert_close(drops / rounds, torch.tensor([0.5, 0.5, 0.3, 0.3]), atol=0.05, rtol=0)


def test_the_draw_of_layers_depends_on_the_generator_alone() -> None:
    draws = []
    for noise in (1, 2):
        model = model_of(encoder_layerdrop=0.5, decoder_layerdrop=0.5)
        torch.manual_seed(noise)
        model.begin_update(torch.Generator().manual_seed(11))
        draws.append([index in model.dropped for index in range(4)])
    assert draws[0] == draws[1]


def test_a_dropped_layer_passes_its_input_on_while_training_alone() -> None:
    model = model_of(dropout=0.0)
    source = sentences(4, 9)
    shorter = copy.deepcopy(model)
    shorter.encoder = nn.ModuleList([model.encoder[1]])
    whole = model.encode(source).values
    model.dropped = frozenset([0])
    torch.testing.assert_close(model.encode(source).values, shorter.encode(source).values)
    torch.testing.assert_close(model.eval().encode(source).values, whole)


# torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_layerdrop_compiles_once_for_every_draw(checkpointed: bool) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    drops = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5, "gradient_checkpointing": checkpointed}
    eager, counter = model_of(dropout=0.0, **drops), CompileCounter()
    compiled = copy.deepcopy(eager)
    compiled.compile(backend=counter)
    patterns = set()
    for seed in range(8):
        results = []
        for model in (eager, compiled):
            model.begin_update(torch.Generator().manual_seed(seed))
            features = model(sentences(4, 6), sentences(5, 3, seed=2))
            (gradient,) = torch.autograd.grad(features.square().sum(), model.output_projection.weight)
            results.append((features.detach(), gradient))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        patterns.add(tuple(compiled.kept.tolist()))
    assert len(patterns) > 4 and counter.frame_count == 1


@pytest.mark.slow
def test_the_whole_model_is_one_graph_to_the_compiler() -> None:
    """Dynamo finds no graph break, and the graph computes the same values without a compiler."""
    torch._dynamo.reset()
    model = model_of().eval()
    source, target = sentences(4, 6), sentences(5, 3, seed=2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def whole(source: Tensor, lengths: Tensor, target: Tensor, target_lengths: Tensor) -> Tensor:
        return compiled(Packed(source, Layout(lengths, 6, 10)), Packed(target, Layout(target_lengths, 5, 8)))

    result = whole(source.values, source.layout.lengths, target.values, target.layout.lengths)
    torch.testing.assert_close(result, model(source, target), rtol=1e-5, atol=1e-5)
