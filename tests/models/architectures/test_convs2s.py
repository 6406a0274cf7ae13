"""ConvS2S against section 3 written out, one sentence at a time."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Vocabulary
from nmtkit.models.architectures.convs2s import ConvolutionBlock, ConvS2S, ConvS2SConfig
from nmtkit.models.layers.attention import attention

CONFIG = ConvS2SConfig(
    encoder_widths=(4, 6),
    encoder_kernels=(3, 5),
    decoder_widths=(4, 6, 6),
    decoder_kernels=(3, 2, 1),
    d_embedding=5,
    d_output=7,
    dropout=0.1,
    max_positions=20,
)


def model() -> ConvS2S:
    torch.manual_seed(2)
    return ConvS2S(CONFIG, Vocabulary(source=11, target=13, joint=False)).eval()


def gated(block: ConvolutionBlock, x: Tensor, causal: bool) -> Tensor:
    """v(conv(x)): L C' -> L C."""
    kernel = block.convolution.kernel
    weight = block.convolution.linear.direction.unflatten(1, (kernel, -1)).transpose(1, 2)
    pad = (kernel - 1, 0) if causal else (kernel // 2, kernel // 2)
    a, b = F.conv1d(F.pad(x.T[None], pad), weight, block.convolution.linear.bias)[0].T.chunk(2, -1)
    return a * torch.sigmoid(b)


def test_features_are_those_of_the_paper() -> None:
    convs2s, source, target, half = model(), torch.tensor([3, 5, 2, 7]), torch.tensor([1, 4, 9, 12, 6]), math.sqrt(0.5)
    e = convs2s.source_embedding.tokens.weight[source] + convs2s.source_embedding.positions.weight[:4]
    x = convs2s.encoder_in_proj(e)
    for block in convs2s.encoder:
        x = (gated(block, x, causal=False) + block.residual(x)) * half
    z = convs2s.encoder_out_proj(x)
    g = convs2s.target_embedding.tokens.weight[target] + convs2s.target_embedding.positions.weight[:5]
    x = convs2s.decoder_in_proj(g)
    for block in convs2s.decoder:
        h = gated(block, x, causal=True)
        d = (block.attention.in_proj(h) + g) * half
        c = (d @ z.T).softmax(-1) @ ((z + e) * half)
        h = (h + block.attention.out_proj(c * 4 * math.sqrt(1 / 4))) * half
        x = (h + block.residual(x)) * half
    features = convs2s(Packed.from_lists([source.tolist()]), Packed.from_lists([target.tolist()]))
    torch.testing.assert_close(features, convs2s.decoder_out_proj(x), rtol=1e-5, atol=1e-5)


def test_encoder_gradients_are_divided_by_the_number_of_attentions() -> None:
    convs2s = model()
    memory = convs2s.encode(Packed.from_lists([[3, 5, 2]]))
    z, _ = memory.values.chunk(2, -1)
    weight = convs2s.encoder_out_proj.bias
    (scaled,) = torch.autograd.grad(z.sum(), weight, retain_graph=True)
    torch.testing.assert_close(scaled, torch.full((5,), 3 / 3.0))  # 3 tokens, 3 decoder blocks


def test_activations_keep_their_scale_through_the_published_depth() -> None:
    torch.manual_seed(3)
    config = ConvS2SConfig(
        encoder_widths=(64,) * 12,
        encoder_kernels=(3,) * 12,
        decoder_widths=(64,) * 12,
        decoder_kernels=(3,) * 12,
        d_embedding=64,
        d_output=64,
        dropout=0.0,
    )
    deep = ConvS2S(config, Vocabulary(source=50, target=50, joint=True)).eval()
    with torch.no_grad():
        source = Packed(torch.randint(0, 50, (40,)), Packed.from_lists([[1] * 20, [1] * 20]).layout)
        z = deep.encode(source).values[:, :64]
    embedded = 0.1 * math.sqrt(2)
    assert embedded / 8 < float(z.std()) < embedded * 8


def test_a_sentence_beyond_the_learned_positions_is_refused() -> None:
    convs2s = model()
    assert convs2s.max_source_positions == 20
    with pytest.raises(ValueError, match=r"21 tokens .*20 positions"):
        convs2s.encode(Packed.from_lists([[3] * 21]))


def test_an_even_encoder_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="must be odd"):
        ConvS2SConfig(encoder_widths=(4,), encoder_kernels=(2,))
    with pytest.raises(ValueError, match=r"one width .*one kernel"):
        ConvS2SConfig(decoder_widths=(4, 4), decoder_kernels=(3,))


def test_its_attention_runs_in_the_type_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    types = set()

    def recorded(*arguments: Any) -> torch.Tensor:
        result = attention(*arguments)
        types.add(result.dtype)
        return result

    monkeypatch.setattr("nmtkit.models.architectures.convs2s.attention", recorded)
    convs2s = model()
    source, target = Packed.from_lists([[3, 5, 2], [4, 2]]), Packed.from_lists([[1, 4], [1, 6, 7]])
    with torch.autocast("cpu", torch.bfloat16):
        convs2s(source, target).float().sum().backward()
    assert types == {torch.bfloat16}
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in convs2s.encoder.parameters()
    )


def test_a_decoder_without_states_attends_to_the_sentences_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a search kept the memory of dropped and replaced sentences if no layer had a state."""
    monkeypatch.setattr(ConvS2S, "stateful_layers", lambda _: ())
    torch.manual_seed(2)
    config = replace(CONFIG, decoder_kernels=(1, 1, 1))  # such a decoder needs no states
    convs2s = ConvS2S(config, Vocabulary(source=11, target=13, joint=False)).eval()
    sources = [[3, 5, 2], [7, 4, 8, 2], [9, 2]]
    bos = torch.tensor([1])

    def alone(source: list[int]) -> Tensor:
        return convs2s.step(bos, convs2s.start(convs2s.encode(Packed.from_lists([source])), 1))

    state = convs2s.start(convs2s.encode(Packed.from_lists(sources[:2])), 1)
    state.drop_finished(torch.tensor([1]))
    torch.testing.assert_close(convs2s.step(bos, state), alone(sources[1]))
    state.insert(torch.tensor([0]), convs2s.encode(Packed.from_lists(sources[2:])))
    torch.testing.assert_close(convs2s.step(bos, state), alone(sources[2]))
