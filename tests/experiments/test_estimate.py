"""The cost estimate of a run, against formulas."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.experiments import estimate
from nmtkit.models.architectures import ARCHITECTURES, Vocabulary
from nmtkit.models.building import vocabulary_of
from nmtkit.training.config import JobConfig
from nmtkit.training.plan import RunPlan, check_launched, expected_world_size, resolve
from nmtkit.training.run_config import RunConfig

PIECES = Vocabulary(source=37_000, target=37_000, joint=True)
TWO_LAYERS = {"encoder_layers": 2, "decoder_layers": 2}


def plan(architecture: str, world_size: int = 1, **settings: Any) -> RunPlan:
    settings = {"batch_tokens": 25_000, "device": "cpu", "precision": "fp32"} | settings
    return resolve(JobConfig.read(names={"architecture": architecture}, settings=settings), world_size)


# --- FLOP -------------------------------------------------------------------------------------------------------------


def transformer_flop(tokens: int, sentence: int, d: int, feed_forward: int, layers: int, vocabulary: int) -> int:
    """Forward and backward, by hand; `feed_forward` is the multiplications of one token in one such layer."""
    encoder = 4 * d * d + feed_forward + 2 * sentence * d  # query, key, value, output; Q K^T and its product with V
    decoder = encoder + 4 * d * d + 2 * sentence * d  # and cross-attention
    return 3 * 2 * tokens * (layers * (encoder + decoder) + d * vocabulary)


@pytest.mark.parametrize(("name", "d", "inner"), [("transformer_base", 512, 2048), ("transformer_big", 1024, 4096)])
def test_flop_of_a_transformer_are_those_of_the_formula(name: str, d: int, inner: int) -> None:
    expected = estimate.estimate(plan(name, **TWO_LAYERS), PIECES, sentence_tokens=64)
    assert expected.flops == transformer_flop(25_000, 64, d, 2 * d * inner, 2, 37_000)


@pytest.mark.slow
def test_flop_of_a_mixture_are_those_of_the_active_experts() -> None:
    config = ARCHITECTURES["transformer_moe"].preset
    expected = estimate.estimate(plan("transformer_moe", **TWO_LAYERS), PIECES, sentence_tokens=64)
    d = config.d_model
    gate = 2 * d * config.experts  # scores and their noise
    mixture = gate + config.active_experts * 2 * d * config.d_ff
    assert expected.flops == transformer_flop(25_000, 64, d, mixture, 2, 37_000)


@pytest.mark.slow
def test_a_running_teacher_costs_its_forward_pass_and_memory(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    path = save_tiny_transformer(tmp_path / "teacher.pt", tokenizer, **TWO_LAYERS, d_model=16, d_ff=24)
    alone = plan("transformer_base", **TWO_LAYERS)
    names = {"architecture": "transformer_base", "criterion": "kd_cross_entropy"}
    settings = {"batch_tokens": 25_000, "device": "cpu", "precision": "fp32", "teacher": (path,), **TWO_LAYERS}
    taught = resolve(JobConfig.read(names=names, settings=settings), 1)
    pieces = vocabulary_of(tokenizer)
    student, both = (estimate.estimate(each, pieces, sentence_tokens=64) for each in (alone, taught))
    forward = transformer_flop(25_000, 64, 16, 2 * 16 * 24, 2, pieces.target) / 3
    assert both.flops - student.flops == forward
    teacher = checkpoint_file.read(path)["model"]
    counted = {tensor.data_ptr(): tensor.numel() for tensor in teacher.values()}
    assert both.state_bytes - student.state_bytes == 4 * sum(counted.values())
    assert both.parameters == student.parameters


@pytest.mark.slow
def test_rewards_cost_a_search_and_a_scored_pass_for_each_candidate() -> None:
    def cost(criterion: str, **settings: Any) -> estimate.Estimate:
        names = {"architecture": "transformer_base", "criterion": criterion}
        settings = {"batch_tokens": 25_000, "device": "cpu", "precision": "fp32", **TWO_LAYERS} | settings
        return estimate.estimate(resolve(JobConfig.read(names=names, settings=settings), 1), PIECES, sentence_tokens=64)

    d, inner, layers, sentence = 512, 2048, 2, 64
    encoder = 2 * layers * (4 * d * d + 2 * d * inner + 2 * sentence * d)  # a forward pass of a token
    decoder = encoder + 2 * (layers * (4 * d * d + 2 * sentence * d) + d * 37_000)
    # likelihood: 3 passes; the search encodes once and decodes 5 candidates; each of them is scored in 3 passes
    forward = 3 * (encoder + decoder) + encoder + 5 * decoder + 5 * 3 * decoder
    one, rewards = cost("cross_entropy"), cost("expected_reward", candidates_per_sentence=5)
    assert rewards.flops == 25_000 * forward
    assert 3 * one.activation_bytes < rewards.activation_bytes < 6 * one.activation_bytes
    assert cost("r_drop").activation_bytes == 2 * one.activation_bytes


@pytest.mark.slow
def test_moving_averages_are_a_second_copy_of_the_trained_weights() -> None:
    plain, averaged = (estimate.estimate(plan("transformer_tiny", **more), PIECES) for more in ({}, {"ema_decay": 0.9}))
    assert averaged.state_bytes - plain.state_bytes == 4 * sum(plain.parameters.values())


VARIANTS: list[dict[str, Any]] = [
    *({"positions": name} for name in ("learned", "rotary", "relative", "alibi", "none")),
    *({"residual": name} for name in ("deepnorm", "admin")),
    *({"encoder_self_attention": name, "decoder_self_attention": name} for name in ("lightconv", "dynamicconv")),
    {"decoder_self_attention": "average"},
    {"decoder_self_attention": "ssru"},
    {"norm": "rms", "qk_norm": True, "kv_heads": 1, "activation": "swiglu", "pre_norm": True},
    {"encoder_layers": 3, "encoder_tied_layers": (1, 1, 2), "base_width": 64},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda settings: ",".join(map(str, settings.values())))
def test_every_variant_of_the_transformer_has_an_estimate(settings: dict[str, Any]) -> None:
    small = Vocabulary(source=90, target=90, joint=True)
    planned = plan("transformer_tiny", **{"encoder_layers": 1, "decoder_layers": 1} | settings)
    model = ARCHITECTURES["transformer_tiny"].factory(planned.job.components["architecture"].config, small)
    expected = estimate.estimate(planned, small)
    assert sum(expected.parameters.values()) == sum(parameter.numel() for parameter in model.parameters())
    assert expected.flops > 0


@pytest.mark.slow
def test_a_model_of_billions_of_parameters_is_not_allocated() -> None:
    expected = estimate.estimate(plan("moe"), PIECES)
    assert sum(expected.parameters.values()) > 8e9
    assert expected.flops < 20e12


@pytest.mark.slow
def test_activations_are_those_that_a_real_update_keeps() -> None:
    """A hidden unit of a feed-forward layer is kept once, in fp32, behind the ReLU."""
    one, other = (estimate.estimate(plan("transformer_tiny", dropout=0.0, d_ff=width), PIECES) for width in (256, 512))
    layers = 2 * ARCHITECTURES["transformer_tiny"].preset.encoder_layers
    assert other.activation_bytes - one.activation_bytes == 4096 * layers * 256 * 4


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_dry_run_plans_as_many_processes_as_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = JobConfig.read().run
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert expected_world_size(config) == 8
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert expected_world_size(config) == 16
    assert plan("transformer_base", 16, batch_tokens=None, update_freq=2).batch_tokens == 2 * 4096 * 16


def test_processes_that_torchrun_has_not_started_are_refused(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun -m nmtkit train --nproc-per-node 2` has the flag behind the module, where torchrun does not read it."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    arguments = ["train", str(mirror_data), "--nproc-per-node", "2", "--device", "cpu", "--save-dir", str(tmp_path)]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2 and "--nproc-per-node 2" in refused.stderr and "torchrun" in refused.stderr
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="--nproc-per-node 2"):
        nmtkit.train({"nproc_per_node": 2, "save_dir": tmp_path}, mirror_data)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_launched(RunConfig(nproc_per_node=2))


def test_a_plan_has_the_batch_size_in_tokens() -> None:
    assert plan("transformer_base", batch_tokens=1000).max_tokens == 1000
    job = JobConfig.read(settings={"device": "cpu"})
    assert resolve(job, 4, resumed_batch_tokens=777).batch_tokens == 777
    assert plan("transformer_base", max_update=None, max_epoch=3).updates(100) == (300, True)
    assert plan("transformer_base", max_update=200, max_epoch=3).updates(100) == (200, False)
    assert plan("transformer_base", max_update=None).updates(100) == (None, False)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmtkit.training.plan.device_of", lambda config: torch.device("cuda", 0))


def test_max_tokens_is_a_share_of_the_update_on_a_gpu_and_4096_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan("transformer_base").max_tokens == 4096
    assert plan("transformer_base", max_tokens=500).max_tokens == 500
    assert not plan("transformer_base").fits_max_tokens
    on_a_gpu(monkeypatch)
    one, eight = plan("transformer_base"), plan("transformer_base", 8)
    assert (one.max_tokens, eight.max_tokens) == (25_000, 3_438)  # 10 % above an eighth
    assert one.fits_max_tokens and one.job.run.max_tokens is None  # a run on another machine measures it again
    assert one.batch_tokens == eight.batch_tokens == 25_000
    given = plan("transformer_base", max_tokens=500)
    assert given.max_tokens == 500 and not given.fits_max_tokens
    # the size of an update does not depend on the memory of a device
    assert plan("transformer_base", 2, batch_tokens=None).batch_tokens == 2 * 4096


def test_every_process_gets_a_share_of_the_update_unless_max_tokens_is_set() -> None:
    assert plan("transformer_base", 2, batch_tokens=400).max_tokens == 220  # 10 % above a half
    assert plan("transformer_base", 2, batch_tokens=400, max_tokens=400).max_tokens == 400
    assert plan("transformer_base", 4, batch_tokens=25_000).max_tokens == 4096
    # 25,000 tokens in 7 micro-batches of 4096 for 16 processes: 16 micro-batches have 1563 and 10 % more
    assert plan("transformer_base", 16, max_tokens=4096).even_max_tokens(4096) == 1719
    # in 9 micro-batches for 8 processes: 16
    assert plan("transformer_base", 8, max_tokens=2800).even_max_tokens(2800) == 1719


def test_the_time_of_a_run_is_flop_by_a_third_of_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan("transformer_tiny", **TWO_LAYERS, max_update=1000)
    expected = estimate.estimate(planned, PIECES)
    monkeypatch.setattr(estimate, "product_ceiling", lambda *arguments, **settings: 3e9)
    here, advice, gpu = estimate.times(expected, planned)
    assert "--dry-run-updates" in advice
    assert "this CPU" in here and estimate.duration(1000 * expected.flops / 1e9) in here
    # NVIDIA: 312 TFLOP/s of the A100 in bf16
    assert "A100" in gpu and estimate.duration(1000 * expected.flops / 104e12) in gpu
    assert estimate.times(replace(expected, updates=None), planned) == []


@pytest.mark.slow
def test_a_dry_run_for_a_gpu_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = ["--arch", "transformer_tiny", "--device", "cuda", "--batch-tokens", "25000"]
    result = CliRunner().invoke(main, ["train", *flags, "--nproc-per-node", "8", "--vocab-size", "1000", "--dry-run"])
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.stdout.split("\n") if line)
    assert lines["processes"] == "8"
    assert [line for line in result.stdout.splitlines() if line.startswith("time on")] == [
        line for line in result.stdout.splitlines() if "A100" in line
    ]
    refused = CliRunner().invoke(main, ["train", *flags, "--save-dir", str(tmp_path)])
    assert refused.exit_code == 2


def test_a_gpu_multiplies_fp32_in_tf32_and_adds_in_a_fixed_order_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--deterministic is for GPUs"):
        plan("transformer_base", deterministic=True)
    on_a_gpu(monkeypatch)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.get_float32_matmul_precision()
    try:
        plan("transformer_base").configure_torch()
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.are_deterministic_algorithms_enabled()
        plan("transformer_base", deterministic=True).configure_torch()
        assert torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" in os.environ
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_onednn_keeps_code_of_few_shapes_unless_the_user_has_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "500")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1")  # monkeypatch restores the value after the test
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    try:
        plan("transformer_base").configure_torch()
        assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "500" and os.environ["LRU_CACHE_CAPACITY"] == "96"
    finally:
        torch.set_num_threads(threads)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--device cuda: .*no CUDA"):
        plan("transformer_base", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"3 processes .*has 2"):
        plan("transformer_base", 3, device="cuda", nproc_per_node=3)
    with pytest.raises(ValueError, match="for GPUs"):
        plan("transformer_base", precision="fp16")
