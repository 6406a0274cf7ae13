"""Steps of training and decoding on CUDA tensors without contents: one device, types that kernels take, no waiting.

`benchmarks/gpu.py` measures the limits of kernels and the speed on a real GPU.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import checks
import library
import pytest
import torch
from builders import TINY_CONFIGS, tiny_model

pytestmark = pytest.mark.slow

Runner = Callable[..., Any]

EVERY_ARCHITECTURE = list(TINY_CONFIGS)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Calls a function with the arguments after it, in a process whose torch has a device guard for CUDA."""
    built = None
    if not torch.cuda.is_available():
        if torch.version.cuda is not None:
            pytest.skip("this torch is made for CUDA, and its own device guard needs a GPU")
        if library.compiler() is None:
            pytest.skip("no C++ compiler here, to build a device guard for fake CUDA tensors")
        built = library.build(tmp_path_factory.mktemp("guard"))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=library.load, initargs=(built,)) as pool:
        yield lambda function, *arguments: pool.submit(library.attempt, function, *arguments).result()


@pytest.mark.parametrize(
    ("deed", "error"),
    [
        ("item", "DataDependentOutputException"),
        ("bool", "DataDependentOutputException"),
        ("boolean index", "DynamicOutputShapeException"),
        ("nonzero", "DynamicOutputShapeException"),
        ("bincount", "DynamicOutputShapeException"),
        ("copy to the host", "HostTransferError"),
        ("tensor from the host", "HostTransferError"),
        ("number from the host", "HostTransferError"),
        ("two devices", "FakeTensorDeviceMismatchError"),
        ("two types in a product", "MixedTypesError"),
        ("two types in place", "MixedTypesError"),
    ],
)
def test_what_no_step_may_do_is_noticed(run: Runner, deed: str, error: str) -> None:
    with pytest.raises(library.StepError) as caught:
        run(checks.forbidden, deed)
    assert caught.value.kind == error


@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_architecture_goes_forward_and_backward(run: Runner, architecture: str, precision: str) -> None:
    run(checks.forward_and_backward, architecture, precision, {})


@pytest.mark.parametrize(
    "config",
    [
        {"window": 4},
        {"positions": "learned", "pre_norm": True},
        {"attention_dropout": 0.1, "activation_dropout": 0.1},
        {"d_key": 4, "d_value": 12},
        {"d_key": 16, "d_value": 32},
        {"gradient_checkpointing": True},
        {"share_embeddings": False},
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_transformer_goes_forward_and_backward(run: Runner, config: dict[str, Any], precision: str) -> None:
    run(checks.forward_and_backward, "transformer_tiny", precision, config)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adafactor", "sgd", "lion", "schedule_free_adamw"])
def test_an_update_with_every_optimizer_and_precision(run: Runner, optimizer: str, precision: str) -> None:
    run(checks.updates, "transformer_tiny", {"optimizer": optimizer, "precision": precision, "clip_norm": 1.0})


@pytest.mark.parametrize(
    "settings",
    [
        {"ema_decay": 0.99},
        {"criterion": "r_drop"},
        {"criterion": "simcut"},
        {"criterion": "cross_entropy"},
        {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
        {"positions": "learned", "window": 4, "attention_dropout": 0.1},
    ],
)
def test_an_update_of_every_kind(run: Runner, settings: dict[str, Any]) -> None:
    run(checks.updates, "transformer_tiny", {"precision": "bf16"} | settings)


@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
def test_an_update_of_every_architecture(run: Runner, architecture: str) -> None:
    run(checks.updates, architecture, {"precision": "bf16", "lr": 0.001}, 1)


@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
def test_validation_of_every_architecture(run: Runner, architecture: str) -> None:
    run(checks.validation, architecture, "label_smoothed_cross_entropy", "bf16")


@pytest.mark.parametrize("criterion", ["cross_entropy", "r_drop", "expected_reward"])
def test_validation_with_every_criterion(run: Runner, criterion: str) -> None:
    run(checks.validation, "transformer_tiny", criterion, "bf16")


@pytest.mark.parametrize("architecture", [name for name in TINY_CONFIGS if tiny_model(name).supports_static_decoding])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_static_step_of_every_architecture_that_has_one(run: Runner, architecture: str, dtype: str) -> None:
    run(checks.static_step, architecture, dtype, {})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "config", [{"window": 4}, {"positions": "learned", "pre_norm": True}, {"d_key": 4, "d_value": 12}]
)
def test_the_static_step_of_every_transformer(run: Runner, dtype: str, config: dict[str, Any]) -> None:
    run(checks.static_step, "transformer_tiny", dtype, config)


@pytest.mark.parametrize(
    ("projection", "operations"),
    [("linear", ["add_"]), ("hook", ["linear", "erf"]), ("module", ["linear", "div"])],
)
def test_logits_of_a_static_step_have_the_output_bias_and_are_fp32(
    run: Runner, projection: str, operations: list[str]
) -> None:
    assert run(checks.static_logits, projection) == (operations, "torch.float32")


@pytest.mark.parametrize(
    ("dtype", "models", "options", "precision"),
    [
        ("bfloat16", 1, {}, "fp32"),
        ("bfloat16", 2, {"nbest": 4, "min_len": 3}, "fp32"),
        ("float32", 1, {"beam": 1}, "fp32"),
        ("float32", 1, {}, "bf16"),  # like a validation
        ("float32", 1, {}, "fp16"),
    ],
)
def test_a_graph_search(run: Runner, dtype: str, models: int, options: dict[str, Any], precision: str) -> None:
    run(checks.graph_search, "transformer_tiny", dtype, models, options, precision)


def test_a_graph_search_writes_logits_once(run: Runner) -> None:
    """A step makes no log probabilities and no masked copy, because logits are most of the memory traffic of a step."""
    assert run(checks.logits_of_a_step) == ["linear"]


def test_on_a_gpu_text_is_encoded_on_another_thread_than_kernels_are_launched(run: Runner) -> None:
    assert run(checks.encodes_in_background)


def test_where_triton_works_its_kernels_are_called(run: Runner) -> None:
    """One residual connection for each sub-layer: two of an encoder layer, three of each of two decoder layers."""
    assert run(checks.calls_of_kernels) == (2 + 2 * 3, 1)
