"""DeepNorm and Admin against the formulas of their papers, and the formats that do not have the new variants."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_tiny_transformer, tiny_model, tiny_tokenizer
from torch import Tensor
from transformer_cases import SIZE, model_of

from nmtkit.data.packed import Batch, Packed
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.architectures.transformer_layers import Layer
from nmtkit.models.formats import bergamot, ctranslate2, huggingface_export, marian_export
from nmtkit.training.config import JobConfig
from nmtkit.training.setup import build_trainer

WIDTHS = {"d_model": 32, "d_ff": 64, "encoder_layers": 3, "decoder_layers": 2}


def test_deepnorm_shrinks_all_weights_but_those_of_queries_and_keys() -> None:
    plain, deep = model_of(**WIDTHS), model_of(**WIDTHS, residual="deepnorm")
    beta = {"encoder": 0.87 * (3**4 * 2) ** (-1 / 16), "decoder": 24**-0.25}
    for name, weight in deep.state_dict().items():
        before, factor = plain.state_dict()[name], beta.get(name.partition(".")[0], 1.0)
        if name.endswith("_norm.weight") or name.endswith(".bias") or name.endswith("q_proj.weight"):
            factor = 1.0
        factors = torch.full((len(weight), 1) if weight.dim() > 1 else (), factor)
        if name.endswith(("qkv_proj.weight", "kv_proj.weight")):
            factors[:-32] = 1.0
        torch.testing.assert_close(weight, before * factors)


def outputs_of_sublayers(model: Transformer) -> dict[str, list[float]]:
    """Returns the variances of the input and of the sub-layers' outputs of each stack, for random sentences."""
    generator, variances = torch.Generator().manual_seed(5), {"encoder": [], "decoder": []}

    def record(side: str, output: Tensor) -> None:
        variances[side].append(float(output.detach().var()))

    for side, layers in (("encoder", model.encoder), ("decoder", model.decoder)):
        layers[0].register_forward_pre_hook(lambda module, inputs, side=side: record(side, inputs[0]))
        for layer in layers:
            for name in ("self_attention", "cross_attention", "feed_forward"):
                if getattr(layer, name) is not None:
                    getattr(layer, name).register_forward_hook(lambda m, i, output, side=side: record(side, output))
    source, target = (Packed.from_lists(torch.randint(SIZE, (64, 12), generator=generator).tolist()) for _ in range(2))
    model.eval()(source, target)
    return variances


def test_admin_gives_the_input_the_variance_of_all_sub_layers_before() -> None:
    variances, model = outputs_of_sublayers(model_of(**WIDTHS)), model_of(**WIDTHS, residual="admin")
    for side, layers in (("encoder", model.encoder), ("decoder", model.decoder)):
        total, scales = 0.0, [scale for layer in layers for scale in by_order(layer)]
        for variance, scale in zip(variances[side], scales, strict=False):
            total += variance
            torch.testing.assert_close(scale, torch.full((32,), math.sqrt(total)), rtol=0.1, atol=0.0)
    assert all(scale.requires_grad for layer in model.encoder for scale in by_order(layer))
    assert model.training


def by_order(layer: Layer) -> list[Tensor]:
    names = ("self_attention", "cross_attention", "feed_forward")
    return [scale for name in names if isinstance(scale := layer.scales.get(name), Tensor)]


@pytest.mark.parametrize(("flag", "value"), [("residual", "admin"), ("activation", "swiglu")])
def test_experts_refuse_what_they_do_not_have(flag: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag} {value}"):
        tiny_model("transformer_moe_tiny", **{flag: value})


def changes_of_logits(width: int, base: int | None) -> tuple[float, float]:
    """Returns the size of the logits of a fresh model, and of their change by four updates of Adam."""
    sizes = {"d_model": width, "d_ff": 2 * width, "heads": width // 8, "encoder_layers": 1, "decoder_layers": 1}
    settings = {**sizes, "pre_norm": True, "dropout": 0.0}
    job = JobConfig.read(
        names={"architecture": "transformer_tiny", "lr-scheduler": "fixed"},
        settings={
            **settings,
            "base_width": base,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "lr": 0.002,
            "precision": "fp32",
        },
    )
    torch.manual_seed(4)
    tokenizer = tiny_tokenizer()
    one = build_trainer(job, tokenizer, torch.device("cpu"))
    model, generator = one.model, torch.Generator().manual_seed(2)
    ids = [torch.randint(3, tokenizer.target_size, (9,), generator=generator).tolist() for _ in range(32)]
    source, target = Packed.from_lists(ids), Packed.from_lists([[1, *sentence[:-1]] for sentence in ids])
    batch = Batch(source, target, source.values, len(source.values), torch.arange(32))

    def logits() -> Tensor:
        with torch.no_grad():
            return model.eval().output_projection(model(source, target))

    before = logits()
    for _ in range(4):
        model.train()
        one.engine.zero_grad()
        (one.criterion(model, batch).sum / batch.target_tokens).backward()
        for group in one.optimizer.param_groups:
            group["lr"] = 0.002 * group.get("lr_scale", 1.0)
        one.optimizer.step()
    return float(before.std()), float((logits() - before).std())


@pytest.mark.slow
@pytest.mark.parametrize(("base", "least", "most"), [(None, 1.5, 4.0), (64, 0.7, 1.1)])
def test_a_base_width_makes_updates_of_equal_size_at_every_width(base: int | None, least: float, most: float) -> None:
    """The coordinate check of Yang et al. 2021, section D.1: without the base, changes grow with the width."""
    (_, small), (_, wide) = changes_of_logits(128, base), changes_of_logits(512, base)
    assert least * small < wide < most * small


def test_a_model_with_a_base_width_has_the_papers_rate_of_the_base() -> None:
    settings = {"encoder_layers": 1, "decoder_layers": 1, "heads": 2, "d_model": 32, "base_width": 8}
    job = JobConfig.read(names={"architecture": "transformer_tiny"}, settings=settings)
    trainer = build_trainer(job, tiny_tokenizer(), torch.device("cpu"))
    assert trainer.scheduler.lr(4000) == pytest.approx((8 * 4000) ** -0.5)


@pytest.mark.parametrize("without", [{"encoder_self_attention": "lightconv"}, {"encoder_layers": 0}], ids=str)
def test_a_window_needs_self_attention(without: dict[str, Any]) -> None:
    TransformerConfig(window=5, **without)
    TransformerConfig(window=5, decoder_self_attention="ssru")
    with pytest.raises(ValueError, match="--window needs self-attention, not"):
        TransformerConfig(window=5, decoder_self_attention="ssru", **without)


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_a_base_width_refuses_optimizers_with_other_factors(optimizer: str) -> None:
    names = {"architecture": "transformer_tiny", "optimizer": optimizer}
    with pytest.raises(ValueError, match=f"--base-width .*--optimizer {optimizer}"):
        JobConfig.read(names=names, settings={"base_width": 64})


NEW: dict[str, dict[str, Any]] = {
    "--positions": {"positions": "rotary"},
    "--base-width": {"base_width": 8},
    "--norm": {"norm": "rms"},
    "--kv-heads": {"kv_heads": 1},
    "--no-qk-norm": {"qk_norm": True},
    "--residual": {"residual": "deepnorm"},
    "--encoder-self-attention": {"encoder_self_attention": "lightconv"},
    "--decoder-self-attention": {"decoder_self_attention": "dynamicconv"},
    "--encoder-tied-layers": {"encoder_layers": 2, "encoder_tied_layers": (1, 1)},
}


@pytest.mark.parametrize("flag", NEW)
def test_programs_without_a_variant_refuse_it_by_name(flag: str, tmp_path: Path) -> None:
    saved = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer(), **NEW[flag])
    exports = [marian_export.save, huggingface_export.save, lambda *paths: bergamot.save(*paths, [("a", "b")])]
    if flag not in ("--positions", "--norm", "--kv-heads"):  # see tests/models/formats/test_ctranslate2.py
        exports.append(lambda *paths: ctranslate2.save(*paths, "float32"))
    for export in exports:
        with pytest.raises(ValueError, match=flag):
            export(saved, tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
