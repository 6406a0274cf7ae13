"""Quantisation-aware training: the forward pass of int8 inference, and gradients that ignore the rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_transformer
from torch import nn

from nmtkit import checkpoint
from nmtkit.cli import main
from nmtkit.layers.packed import Packed
from nmtkit.layers.prepack import Int8Linear, prepack
from nmtkit.layers.quantization import RoundedLinear, quantize_aware
from nmtkit.models import from_checkpoint


def test_a_layer_rounds_as_int8_inference_does() -> None:
    torch.manual_seed(1)
    linear, x = nn.Linear(512, 24), torch.randn(7, 512)
    with torch.no_grad():
        linear.weight[3] *= 50  # each output has a scale
        x[2] *= 100  # each row has a scale
        plain, expected = linear(x), Int8Linear(linear)(x)
        assert quantize_aware(nn.Sequential(linear)) == 1
        result = linear(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert (result - plain).abs().max() > 1e-2


def test_gradients_are_those_of_the_rounded_values_in_a_plain_product() -> None:
    torch.manual_seed(2)
    linear, x = nn.Linear(512, 5), torch.randn(3, 512, requires_grad=True)
    quantize_aware(nn.Sequential(linear))
    linear(x).square().sum().backward()

    def steps(values: torch.Tensor, limit: int) -> torch.Tensor:
        """Rounds each row to `limit` steps, number by number."""
        rows = []
        for row in values.tolist():
            step = max(map(abs, row)) / limit
            rows.append([round(value / step) * step for value in row])
        return torch.tensor(rows)

    inputs = steps(x.detach(), 127)
    weights = steps(linear.weight.detach(), linear.limit)  # type: ignore[arg-type]
    outputs = inputs @ weights.t() + linear.bias.detach()
    assert x.grad is not None and linear.weight.grad is not None
    torch.testing.assert_close(x.grad, 2 * outputs @ weights, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(linear.weight.grad, 2 * outputs.t() @ inputs, rtol=1e-3, atol=1e-3)


def test_a_model_computes_as_in_int8_inference() -> None:
    source, target = Packed.from_lists([[5, 6, 7, 2], [9, 2]]), Packed.from_lists([[1, 5, 8], [1, 6, 9, 4]])
    plain, aware, packed, int8 = (tiny_transformer(40, d_ff=512, sharpness=3.0).eval() for _ in range(4))
    prepack(packed, "int8")
    of_inference = {name for name, part in packed.named_modules() if isinstance(part, Int8Linear)}
    assert quantize_aware(aware) == len(of_inference) == 3  # the networks have second layers with 512 inputs
    assert of_inference == {name for name, part in aware.named_modules() if type(part) is RoundedLinear}
    for name in of_inference:  # other layers of `packed` are in fp16
        parent, _, child = name.rpartition(".")
        setattr(int8.get_submodule(parent), child, packed.get_submodule(name))
    with torch.inference_mode():
        logits = [model.output_projection(model(source, target)) for model in (plain, aware, int8)]
    assert (logits[2] - logits[0]).abs().max() > 1e-2
    torch.testing.assert_close(logits[1], logits[2], rtol=1e-3, atol=1e-3)


def test_training_rounds_and_saves_a_plain_checkpoint(mirror_data: Path, tmp_path: Path, capfd: Any) -> None:
    flags = ["--arch", "transformer_tiny", "--encoder-layers", "1", "--decoder-layers", "1", "--d-model", "16"]
    flags += ["--heads", "2", "--d-ff", "512", "--max-update", "3", "--metrics", "none", "--threads", "1"]
    with pytest.raises(SystemExit) as ending:
        main(
            ["train", str(mirror_data), *flags, "--quantize-aware", "--save-dir", str(tmp_path)], standalone_mode=False
        )
    assert ending.value.code == 0
    assert "2 layers are trained with the rounding of int8" in " ".join("".join(capfd.readouterr()).split())
    model, _ = from_checkpoint(tmp_path / "last.pt")
    assert type(model.encoder[0].feed_forward.fc2) is nn.Linear
    assert checkpoint.load(tmp_path / "last.pt")["update"] == 3


def test_a_model_that_int8_inference_does_not_round_is_refused() -> None:
    with pytest.raises(
        ValueError, match="--quantize-aware has no effect: int8 inference rounds layers with 512 inputs"
    ):
        quantize_aware(tiny_transformer(40))
