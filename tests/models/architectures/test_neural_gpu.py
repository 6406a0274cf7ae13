"""The Extended Neural GPU against equations 1 to 5 of Kaiser and Bengio (2016), written out in float64 loops."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Vocabulary
from nmtkit.models.architectures.neural_gpu import CGRU, ExtendedNeuralGPU, NeuralGPUConfig

Array = npt.NDArray[np.float64]

CONFIG: dict[str, Any] = {"d_model": 5, "layers": 2, "image_width": 3, "image_factor": 1.5, "image_extra": 1}
SOURCE, TARGET = [3, 5, 2, 7, 1], [2, 4, 6, 3, 5, 8, 7]


def model(seed: int = 2, **settings: Any) -> ExtendedNeuralGPU:
    torch.manual_seed(seed)
    built = ExtendedNeuralGPU(NeuralGPUConfig(**CONFIG | settings), Vocabulary(source=9, target=10, joint=False))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return built.eval()


def numbers(tensor: torch.Tensor | None) -> Array:
    assert tensor is not None
    return tensor.detach().double().numpy()


def convolution(kernel: Array, image: Array) -> Array:
    """Equation 1: (U * s)[x, y, i] = sum over u, v, c of s[x + u, y + v, c] U[u, v, c, i]; `image` is [W, C, D]."""
    rows, columns, _ = image.shape
    half = kernel.shape[2] // 2
    result = np.zeros((rows, columns, len(kernel)))
    for x in range(rows):
        for y in range(columns):
            for u in range(-half, half + 1):
                for v in range(-half, half + 1):
                    if 0 <= x + u < rows and 0 <= y + v < columns:
                        result[x, y] += kernel[:, :, u + half, v + half] @ image[x + u, y + v]
    return result


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def unit(cgru: CGRU, s: Array, tape: tuple[Array, Array, Array] = (np.zeros(1),) * 3) -> Array:
    """Equation 2, and with the convolved `tape` equation 5."""
    filters = s.shape[2]
    gates, biases = numbers(cgru.gates.weight), numbers(cgru.gates.bias)
    u = sigmoid(convolution(gates[:filters], s) + biases[:filters] + tape[0])
    r = sigmoid(convolution(gates[filters:], s) + biases[filters:] + tape[1])
    candidate = convolution(numbers(cgru.candidate.weight), r * s) + numbers(cgru.candidate.bias) + tape[2]
    return u * s + (1 - u) * np.tanh(candidate)


def final_image(gpu: ExtendedNeuralGPU, source: list[int]) -> Array:
    columns = math.ceil(1.5 * len(source)) + 1
    s = np.zeros((3, columns, 5))
    s[0, : len(source)] = numbers(gpu.source_embedding.weight)[source]
    for _ in source:  # as many steps as tokens (equation 3)
        for cgru in gpu.encoder:
            s = unit(cgru, s)
    return s


def tape_kernels(gpu: ExtendedNeuralGPU, layer: int) -> Array:
    """Returns W, W' and W'' [3, D, D, kernel, kernel]; the lower rows, which only meet zeros, are random."""
    upper = numbers(gpu.tape[layer].linear.weight).reshape(3, 5, 2, 3, 5)  # gate, filter out, row, column, filter in
    kernels = np.random.default_rng(1).normal(size=(3, 5, 5, 3, 3))
    for row in range(2):
        for column in range(3):
            # a word in row 0 changes row `row` by the kernel's row u = -row, and column `column - 1` by v = 1 - column
            kernels[:, :, :, 1 - row, 2 - column] = upper[:, :, row, column]
    return kernels


def written_out(gpu: ExtendedNeuralGPU, source: list[int], target: list[int]) -> Array:
    """Returns the features of every target word, the tape's convolutions computed anew at each step (equation 4)."""
    d = final_image(gpu, source)
    tape = np.zeros_like(d)
    features = []
    for position, token in enumerate(target):
        if position:
            tape[0, position - 1] = numbers(gpu.target_embedding.weight)[token]
        for layer, cgru in enumerate(gpu.decoder):
            kernels = tape_kernels(gpu, layer)
            d = unit(cgru, d, tuple(convolution(kernel, tape) for kernel in kernels))  # type: ignore[arg-type]
        features.append(d[0, position])
    return np.stack(features)


def test_a_unit_computes_equation_2() -> None:
    cgru = model().encoder[0]
    s = torch.randn(1, 5, 3, 4)
    expected = unit(cgru, numbers(s[0].permute(1, 2, 0)))
    changed = cgru(s, torch.ones(1, 1, 1, 4))
    np.testing.assert_allclose(numbers(changed[0].permute(1, 2, 0)), expected, rtol=1e-5, atol=1e-5)


def test_a_sentence_is_encoded_and_decoded_as_the_equations_say() -> None:
    gpu = model()
    features = gpu(Packed.from_lists([SOURCE]), Packed.from_lists([TARGET]))
    np.testing.assert_allclose(numbers(features), written_out(gpu, SOURCE, TARGET), rtol=1e-4, atol=1e-4)


def test_independent_outputs_are_the_first_row_of_the_image() -> None:
    gpu = model(outputs="independent")
    features = gpu(Packed.from_lists([SOURCE]), Packed.from_lists([TARGET]))
    np.testing.assert_allclose(numbers(features), final_image(gpu, SOURCE)[0, : len(TARGET)], rtol=1e-5, atol=1e-5)


def test_a_markovian_output_depends_on_the_word_before_it_and_on_no_other() -> None:
    gpu = model(outputs="markovian")
    source = Packed.from_lists([SOURCE])
    before = gpu(source, Packed.from_lists([TARGET]))
    after = gpu(source, Packed.from_lists([[*TARGET[:2], 9, *TARGET[3:]]]))
    changed = (before - after).abs().amax(1) > 1e-6
    assert changed.tolist() == [False, False, True, False, False, False, False]


@pytest.mark.parametrize("outputs", ["extended", "markovian", "independent"])
def test_sentences_beside_longer_ones_keep_their_features(outputs: str) -> None:
    gpu = model(outputs=outputs)
    alone = gpu(Packed.from_lists([SOURCE[:2]]), Packed.from_lists([TARGET[:3]]))
    sources = Packed.from_lists([SOURCE[:2], [3] * 20, SOURCE])
    together = gpu(sources, Packed.from_lists([TARGET[:3], TARGET * 2, TARGET]))
    torch.testing.assert_close(together[:3], alone, rtol=1e-5, atol=1e-6)


def test_words_beyond_the_last_column_are_decoded() -> None:
    gpu = model()
    source, target = Packed.from_lists([[3, 1]]), Packed.from_lists([TARGET * 2])  # 4 columns, 14 words
    state, stepped = gpu.start(gpu.encode(source), 1), []
    for token in TARGET * 2:
        stepped.append(gpu.step(torch.tensor([token]), state))
    torch.testing.assert_close(torch.cat(stepped), gpu.output_projection(gpu(source, target)), rtol=1e-4, atol=1e-5)


def test_the_backward_pass_keeps_no_image_of_a_step() -> None:
    """Saved tensors grow by less than an eighth of the images that the steps make."""
    gpu = model(d_model=8, image_extra=0).train()
    saved = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    source, target = Packed.from_lists([[3] * 40]), Packed.from_lists([[4] * 40])
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        features = gpu(source, target)
    images = 80 * 2 * 8 * 3 * 60  # steps, units, filters, rows, columns; a unit makes six
    assert saved < images
    features.sum().backward()
    assert all(parameter.grad is not None for name, parameter in gpu.named_parameters() if "output" not in name)
