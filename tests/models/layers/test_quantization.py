"""Quantisation-aware training: the forward pass of 8-bit weights, and gradients that ignore the rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_tiny_transformer, tiny_tokenizer, tiny_transformer
from torch import nn

from nmtkit.cli import main
from nmtkit.data.packed import Packed
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint
from nmtkit.models.layers.prepack import Int8Linear, largest_int8_weight
from nmtkit.models.layers.quantization import quantize_aware


@pytest.mark.skipif(largest_int8_weight() < 127, reason="without VNNI, products of 8-bit weights overflow")
def test_a_layer_rounds_as_int8_inference_does() -> None:
    torch.manual_seed(1)
    linear, x = nn.Linear(512, 24), torch.randn(7, 512)
    with torch.no_grad():
        linear.weight[3] *= 50  # each output has a scale
        x[2] *= 100  # each row has a scale
        plain, expected = linear(x), Int8Linear(linear, limit=127)(x)
        assert quantize_aware(nn.Sequential(linear)) == (1, 1)
        result = linear(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert (result - plain).abs().max() > 1e-2


def test_gradients_are_those_of_the_rounded_values_in_a_plain_product() -> None:
    torch.manual_seed(2)
    linear = nn.Linear(512, 5)
    quantize_aware(nn.Sequential(linear))

    def far_from_ties(rows: int, limit: int) -> torch.Tensor:
        """Returns numbers that are at most 0.3 steps from a multiple of a step, so that their rounding is certain."""
        values = torch.randint(1 - limit, limit, (rows, 512)) + 0.6 * (torch.rand(rows, 512) - 0.5)
        values[:, 0] = limit
        return values / limit

    x = far_from_ties(3, 127).requires_grad_()
    with torch.no_grad():
        linear.weight.copy_(far_from_ties(5, 127))
    linear(x).square().sum().backward()

    def steps(values: torch.Tensor, limit: int) -> torch.Tensor:
        """Rounds each number of a row to one of `limit` steps."""
        rows = []
        for row in values.tolist():
            step = max(map(abs, row)) / limit
            rows.append([round(value / step) * step for value in row])
        return torch.tensor(rows)

    inputs = steps(x.detach(), 127)
    weights = steps(linear.weight.detach(), 127)
    outputs = inputs @ weights.t() + linear.bias.detach()
    assert x.grad is not None and linear.weight.grad is not None
    torch.testing.assert_close(x.grad, 2 * outputs @ weights, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(linear.weight.grad, 2 * outputs.t() @ inputs, rtol=1e-3, atol=1e-3)


class Expected(nn.Linear):
    """A linear layer that rounds its inputs to 127 steps, and has rounded weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = x.double().abs().amax(-1, keepdim=True) / 127
        rounded = (x.double() / step).round() * step
        return super().forward(rounded.float())


@pytest.mark.parametrize(("positions", "tables"), [("sinusoidal", 0), ("learned", 2), ("relative", 3 * 2)])
def test_the_logits_are_those_of_the_file_with_8_bit_weights(tmp_path: Path, positions: str, tables: int) -> None:
    """All linear layers round their inputs, like the compiled engine."""
    tokenizer = tiny_tokenizer()
    path = save_tiny_transformer(tmp_path / "model.pt", tokenizer, d_ff=512, sharpness=3.0, positions=positions)
    checkpoint.export(checkpoint.load(path), tmp_path / "small.pt", in_8_bits=True)
    plain, aware, expected = (from_checkpoint(tmp_path / name)[0] for name in ("model.pt", "model.pt", "small.pt"))
    # 3 networks, 5 attentions of 2 or 3 layers, the output projection and the embedding that both sides share
    layers = [module for module in expected.modules() if type(module) is nn.Linear]
    assert quantize_aware(aware) == (3 * 2 + 3 * 2 + 2 * 3 + 2 + tables, len(layers))
    for layer in layers:
        layer.__class__ = Expected
    source, target = Packed.from_lists([[5, 6, 7, 2], [9, 2]]), Packed.from_lists([[1, 5, 8], [1, 6, 9, 4]])
    with torch.inference_mode():
        logits = [model.output_projection(model(source, target)) for model in (plain, aware, expected)]
    assert (logits[1] - logits[0]).abs().max() > 1e-2
    torch.testing.assert_close(logits[1], logits[2], rtol=1e-4, atol=1e-4)


def test_gradients_of_embeddings_ignore_the_rounding() -> None:
    torch.manual_seed(3)
    embedding = nn.Embedding(6, 8)
    assert quantize_aware(nn.Sequential(embedding)) == (1, 0)
    vectors = embedding(torch.tensor([4, 1, 4]))
    step = embedding.weight.detach().abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(vectors / step[[4, 1, 4]], (vectors / step[[4, 1, 4]]).round(), rtol=0, atol=1e-2)
    (vectors * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad[:, 0].tolist() == [0, 2, 0, 0, 5, 0]


@pytest.mark.slow
def test_training_rounds_and_saves_a_plain_checkpoint(mirror_data: Path, tmp_path: Path, capfd: Any) -> None:
    flags = ["--arch", "transformer_tiny", "--encoder-layers", "1", "--decoder-layers", "1", "--d-model", "16"]
    flags += ["--heads", "2", "--d-ff", "512", "--max-update", "3", "--metrics", "none", "--threads", "1"]
    with pytest.raises(SystemExit) as ending:
        main(
            ["train", str(mirror_data), *flags, "--quantize-aware", "--save-dir", str(tmp_path)], standalone_mode=False
        )
    assert ending.value.code == 0
    # two networks, three attentions, the output projection and the embedding
    said = " ".join("".join(capfd.readouterr()).split())
    assert "13 layers and" in said
    model, _ = from_checkpoint(tmp_path / "last.pt")
    assert type(model.encoder[0].feed_forward.fc2) is nn.Linear
    assert checkpoint.load(tmp_path / "last.pt")["update"] == 3


def test_a_model_without_rounded_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--quantize-aware .*8 weights"):
        quantize_aware(tiny_transformer(40, d_model=4, d_ff=4))
