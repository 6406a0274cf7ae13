"""Low-rank adapters of layers: their arithmetic in float64, gradients, merging, and the files that hold them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_tiny_transformer, tiny_model, tiny_tokenizer, tiny_transformer
from torch import Tensor, nn

from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Layout, Packed
from nmtkit.models import building, checkpoint
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers import adapters
from nmtkit.models.layers.adapters import AdaptedLinear
from nmtkit.training import averaging, checkpoints

RANK, ALPHA = 3, 6.0


def adapted(model: Architecture, patterns: tuple[str, ...] = ("*",)) -> Architecture:
    """Adds adapters whose B is not zero, like adapters after some updates."""
    torch.manual_seed(5)
    adapters.adapt(model, RANK, ALPHA, patterns, model.output_projection)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter_b"):
                parameter.normal_(std=0.3)
    return model


def features(model: Architecture) -> Tensor:
    lengths = torch.tensor([4, 2])
    tokens = torch.tensor([5, 6, 7, 2, 8, 2])
    return model(Packed(tokens, Layout.of(lengths)), Packed(tokens, Layout.of(lengths)))


def test_a_layer_computes_the_sum_of_both_products_in_training_and_outside() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(7, 5)
    layer = AdaptedLinear(linear, RANK, ALPHA / RANK)
    x = torch.randn(4, 7)
    assert torch.equal(layer(x), linear(x))
    nn.init.normal_(layer.adapter_b)
    w, a, b, bias, wide = (t.detach().double() for t in (layer.weight, layer.adapter_a, layer.adapter_b, layer.bias, x))
    expected = torch.tensor(
        [[(row @ (w[o] + ALPHA / RANK * (b[o] @ a)) + bias[o]).item() for o in range(5)] for row in wide]
    )
    torch.testing.assert_close(layer.train()(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.eval()(x), expected, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer.train()(x).float(), expected, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("name", ["transformer_tiny", "transformer_moe_tiny", "gnmt_small"])
def test_the_first_step_is_the_base_and_only_adapters_have_gradients(name: str) -> None:
    base, model = tiny_model(name), tiny_model(name)
    layers = adapters.adapt(model, RANK, ALPHA, ["*"], model.output_projection)
    assert torch.equal(features(model), features(base))
    assert {key for key in model.state_dict()} >= set(base.state_dict())
    features(adapted(tiny_model(name))).sum()
    model = adapted(tiny_model(name)).train()
    features(model).square().sum().backward()
    trained = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {f"{layer}.{part}" for layer in layers for part in ("adapter_a", "adapter_b")}
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters() if parameter.grad is not None)


def test_the_transformer_gets_adapters_in_attention_and_feed_forward_networks() -> None:
    model = tiny_transformer()
    layers = adapters.adapt(model, RANK, ALPHA, ["*"], model.output_projection)
    assert len(layers) == 4 + 2 * 7  # qkv, out, fc1, fc2; and of the decoder's cross-attention q, kv, out
    assert "decoder.1.cross_attention.kv_proj" in layers and "output_projection" not in layers
    qkv = model.encoder[0].self_attention.qkv_proj
    assert qkv.adapter_b.stacked_rows == qkv.weight.stacked_rows
    chosen = adapters.adapt(
        other := tiny_transformer(tie_output=False), RANK, ALPHA, ["decoder.*.fc?"], other.output_projection
    )
    assert chosen == [f"decoder.{i}.feed_forward.fc{j}" for i in range(2) for j in (1, 2)]
    with pytest.raises(ValueError, match=r"--adapter-layers output_\* .*encoder.0.self"):
        adapters.adapt(last := tiny_transformer(tie_output=False), RANK, ALPHA, ["output_*"], last.output_projection)


def test_layers_that_share_their_weight_get_none() -> None:
    model = tiny_transformer()
    model.decoder[0].feed_forward.fc1.weight = model.decoder[1].feed_forward.fc1.weight
    layers = adapters.adapt(model, RANK, ALPHA, ["decoder.*.fc?"], model.output_projection)
    assert layers == ["decoder.0.feed_forward.fc2", "decoder.1.feed_forward.fc2"]


TIED = {"encoder_layers": 2, "encoder_tied_layers": (1, 1), "decoder_tied_layers": (1, 1)}


def test_tied_layers_share_an_adapter() -> None:
    model = tiny_transformer(**TIED)
    layers = adapters.adapt(model, RANK, ALPHA, ["encoder.*"], model.output_projection)
    assert layers == [
        f"encoder.0.{name}"
        for name in ("self_attention.qkv_proj", "self_attention.out_proj", "feed_forward.fc1", "feed_forward.fc2")
    ]
    assert model.encoder[0] is model.encoder[1]


@pytest.mark.parametrize("config", [{}, TIED], ids=["", "tied layers"])
def test_merged_layers_and_merged_tensors_equal_the_adapters(config: dict[str, Any]) -> None:
    base, model = tiny_transformer(**config), adapted(tiny_transformer(dropout=0.0, **config))
    expected = features(model.train().requires_grad_(False))
    torch.testing.assert_close(features(model.eval()), expected, atol=1e-5, rtol=1e-5)
    merged = adapters.merge(copy.deepcopy(model))
    assert merged.state_dict().keys() == base.state_dict().keys()
    assert not any(isinstance(module, AdaptedLinear) for module in merged.modules())
    torch.testing.assert_close(features(merged), expected, atol=1e-5, rtol=1e-5)
    state = adapters.merge_state(base.state_dict(), adapters.adapters_in(model.state_dict()), ALPHA / RANK)
    base.load_state_dict(state)
    assert torch.equal(features(base), features(merged))
    a, b = (model.state_dict()[f"decoder.1.feed_forward.fc1.adapter_{part}"].double() for part in "ab")
    weight = tiny_transformer(**config).decoder[1].feed_forward.fc1.weight.double() + ALPHA / RANK * b @ a
    torch.testing.assert_close(state["decoder.1.feed_forward.fc1.weight"].double(), weight, atol=1e-6, rtol=1e-6)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Architecture]:
    """Returns a base checkpoint, a checkpoint of adapters, and the model of both."""
    base = save_tiny_transformer(tmp_path / "base.pt", tiny_tokenizer())
    model = adapted(building.from_checkpoint(base)[0])
    contents = checkpoint.load(base)
    facts = {"base": str(base), "fingerprint": checkpoint_file.fingerprint(contents)}
    facts |= {"rank": RANK, "alpha": ALPHA, "layers": ["*"]}
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / checkpoints.file_name(7)
    contents |= {
        "model": adapters.adapters_in(model.state_dict()),
        "adapters": facts,
        "update": 7,
        "training": {"x": 1},
    }
    checkpoint_file.save(path, contents)
    return base, path, model


@pytest.mark.parametrize("mmap", [False, True])
def test_a_checkpoint_of_adapters_is_read_as_the_merged_model(files: Any, mmap: bool) -> None:
    base, path, model = files
    assert path.stat().st_size < base.stat().st_size
    whole = checkpoint.load(path, mmap)
    checkpoint_file.check_values(whole, path)
    assert whole["update"] == 7 and "adapters" not in whole and "training" not in whole
    assert set(checkpoint_file.read(path)["model"]) == set(adapters.adapters_in(model.state_dict()))
    loaded, _ = building.from_checkpoint(path)
    torch.testing.assert_close(features(loaded), features(model), atol=1e-5, rtol=1e-5)


def test_averaging_merges_and_averages_merged_models(files: Any, tmp_path: Path) -> None:
    base, path, _ = files
    averaging.write([path], tmp_path / "merged.pt")
    base_moved = tmp_path / "elsewhere.pt"
    base.rename(base_moved)
    assert "adapters" not in checkpoint_file.read(tmp_path / "merged.pt")
    merged, _ = building.from_checkpoint(tmp_path / "merged.pt")
    with pytest.raises(FileNotFoundError, match=r"update_00000007.pt .*base.pt, .*not exist"):
        checkpoint.load(path)
    (path.parent / "base.pt").symlink_to(base_moved)  # beside it
    loaded, _ = building.from_checkpoint(path)
    assert torch.equal(features(merged), features(loaded))
    averaging.write([path, base_moved], tmp_path / "mean.pt")
    name = "encoder.0.feed_forward.fc2.weight"
    one, other, mean = (checkpoint.load(it)["model"][name] for it in (path, base_moved, tmp_path / "mean.pt"))
    torch.testing.assert_close(mean, (one + other) / 2)


def other_weights(contents: dict[str, Any]) -> None:
    contents["model"]["encoder.0.feed_forward.fc2.weight"][0, 0] += 1e-3


def is_adapters(contents: dict[str, Any]) -> None:
    contents["adapters"] = {}


@pytest.mark.parametrize("change", [other_weights, is_adapters])
def test_another_base_is_refused(files: Any, change: Callable[[dict[str, Any]], None]) -> None:
    base, path, _ = files
    contents = checkpoint.load(base)
    contents["update"] = 99  # is not the model's
    checkpoint_file.save(base, contents)
    checkpoint.load(path)
    change(contents)
    checkpoint_file.save(base, contents)
    with pytest.raises(ValueError, match=r"different base .*base\.pt;"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"rank": "8"}, "the format of nmtkit"),
        ({"layers": ["*"], "more": 1}, "the format of nmtkit"),
    ],
)
def test_facts_of_adapters_are_checked(files: Any, facts: dict[str, Any], message: str) -> None:
    _, path, _ = files
    contents = checkpoint_file.read(path)
    contents["adapters"] |= facts
    checkpoint_file.save(path, contents)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["adapter_a", "adapter_b"])
def test_an_adapter_that_does_not_fit_is_named(files: Any, name: str) -> None:
    _, path, _ = files
    contents = checkpoint_file.read(path)
    del contents["model"][f"encoder.0.feed_forward.fc1.{name}"]
    checkpoint_file.save(path, contents)
    with pytest.raises(ValueError, match=r"encoder\.0\.feed_forward\.fc1 does not match"):
        checkpoint.load(path)
