"""Every attention backend against loops in float64, and the choice between them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nmtkit.data.packed import Layout
from nmtkit.models.layers.attention import Backend, attention, backend, sdpa_attention, varlen_attention
from nmtkit.models.layers.attention_cpu import bmm_attention
from nmtkit.models.layers.attention_reference import AttentionSpec, attention_weights, reference_attention

H, K, V = 2, 4, 6
CASES = [
    pytest.param([3, 1, 5], [3, 1, 5], True, None, id="causal"),
    pytest.param([3, 1, 5], [3, 1, 5], False, None, id="encoder"),
    pytest.param([3, 1, 5], [2, 6, 1], False, None, id="cross"),
    pytest.param([9, 4], [9, 4], False, 3, id="window"),
    pytest.param([9, 4], [9, 4], True, 4, id="causal window"),
    pytest.param([4, 4, 4], [4, 4, 4], True, None, id="equal lengths"),
    pytest.param([1], [20], False, None, id="one token"),
    pytest.param([40, 17], [40, 17], True, None, id="longer than a register"),
]


def layout_of(lengths: list[int]) -> Layout:
    return Layout.of(torch.tensor(lengths))


def by_loops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    key_lengths: list[int],
    causal: bool,
    window: int | None,
) -> Tensor:
    result = []
    for q, k, v in zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True):
        for i in range(len(q)):
            seen = [
                j for j in range(len(k)) if (not causal or j <= i) and (window is None or abs(i - j) <= window // 2)
            ]
            for h in range(q.shape[1]):
                scores = [
                    sum(a * b for a, b in zip(q[i, h], k[j, h], strict=True)) / math.sqrt(q.shape[2]) for j in seen
                ]
                weights = torch.softmax(torch.stack(scores), 0)
                result.append(sum(weight * v[j, h] for weight, j in zip(weights, seen, strict=True)))
    return torch.stack(result).view(len(query), query.shape[1], -1)


def draw(lengths: list[int], key_lengths: list[int], dtype: torch.dtype, fused: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    if fused:  # strided views, like the results of a fused projection
        x = torch.randn(sum(lengths), 3 * H * K, dtype=dtype)
        return [part.unflatten(-1, (H, K)) for part in x.split(H * K, -1)]
    sizes = [(sum(lengths), K), (sum(key_lengths), K), (sum(key_lengths), V)]
    return [torch.randn(tokens, H, width, dtype=dtype) for tokens, width in sizes]


@pytest.mark.parametrize(("lengths", "key_lengths", "causal", "window"), CASES)
def test_every_path_equals_the_loops(
    lengths: list[int], key_lengths: list[int], causal: bool, window: int | None
) -> None:
    query, key, value = (x.requires_grad_() for x in draw(lengths, key_lengths, torch.float32))
    right = by_loops(query.double(), key.double(), value.double(), lengths, key_lengths, causal, window)
    layouts = layout_of(lengths), layout_of(key_lengths)
    weight = torch.randn_like(right)
    right_gradients = torch.autograd.grad((right * weight).sum(), [query, key, value])
    for path in (bmm_attention, reference_attention, sdpa_attention):
        result = path(query, key, value, *layouts, AttentionSpec(causal, window))
        torch.testing.assert_close(result.double(), right, atol=1e-6, rtol=1e-5)
        gradients = torch.autograd.grad((result * weight).sum(), [query, key, value])
        for ours, theirs in zip(gradients, right_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[3, 1, 5], [4, 4]])
def test_the_fast_path_reads_the_views_of_a_fused_projection(lengths: list[int]) -> None:
    views = draw(lengths, lengths, torch.float32, fused=True)
    assert not views[1].is_contiguous()
    copies = [view.contiguous() for view in views]
    layout = layout_of(lengths)
    strided, dense = (bmm_attention(*x, layout, layout, AttentionSpec(causal=True)) for x in (views, copies))
    assert torch.equal(strided, dense)


def test_bfloat16_stays_near_the_loops() -> None:
    lengths = [7, 12]
    inputs = [x.bfloat16() for x in draw(lengths, lengths, torch.float32)]
    result = attention(*inputs, layout_of(lengths), layout_of(lengths), AttentionSpec(causal=True))
    assert result.dtype == torch.bfloat16
    right = by_loops(*(x.double() for x in inputs), lengths, lengths, True, None)
    torch.testing.assert_close(result.double(), right, atol=0.03, rtol=0.03)


def test_a_sentence_has_the_same_result_in_any_company() -> None:
    lengths = [5, 30, 2, 11]
    query, key, value = draw(lengths, lengths, torch.float32)
    together = attention(query, key, value, layout_of(lengths), layout_of(lengths), AttentionSpec(causal=True)).split(
        lengths
    )
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), together, strict=True)
    for q, k, v, right in parts:
        alone = layout_of([len(q)])
        torch.testing.assert_close(
            attention(q, k, v, alone, alone, AttentionSpec(causal=True)), right, atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("path", [bmm_attention, reference_attention, sdpa_attention])
def test_dropout_falls_on_the_weights(path: Callable[..., Tensor]) -> None:
    """If the values are the identity, the results are the attention weights. Each weight is dropped or scaled."""
    lengths, p, n = [16] * 40, 0.25, 16
    torch.manual_seed(1)
    query, key = torch.randn(640, H, K), torch.randn(640, H, K)
    value = torch.eye(n).repeat(40, 1)[:, None].expand(-1, H, -1).contiguous().requires_grad_()
    layout = layout_of(lengths)
    weights = path(query, key, value, layout, layout, AttentionSpec()).detach()
    dropped = path(query, key, value, layout, layout, AttentionSpec(dropout=p))
    gone = dropped == 0
    assert abs(gone.float().mean() - p) < 0.02
    torch.testing.assert_close(dropped[~gone], weights[~gone] / (1 - p), atol=1e-4, rtol=1e-4)
    # the gradient of the sum of the results by a value is the sum of the weights of the value
    (gradient,) = torch.autograd.grad(dropped.sum(), value)
    right = dropped.detach().view(40, n, H, n).sum(1).transpose(1, 2)  # sentence, key, head
    torch.testing.assert_close(gradient.view(40, n, H, n), right[..., None].expand(-1, -1, -1, n), atol=1e-5, rtol=1e-4)


def test_dropout_gradients_equal_differences() -> None:
    """Central differences in float32, the mask held by the seed."""
    lengths = [3, 2]
    inputs = [x.requires_grad_() for x in draw(lengths, lengths, torch.float32)]
    layout = layout_of(lengths)
    weight = torch.randn(5, H, V)

    def loss(*x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return (bmm_attention(*x, layout, layout, AttentionSpec(dropout=0.4)) * weight).sum()

    gradients = torch.autograd.grad(loss(*inputs), inputs)
    for number, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        moved = [[x + sign * 1e-2 * direction if i == number else x for i, x in enumerate(inputs)] for sign in (1, -1)]
        slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-2
        assert slope.item() == pytest.approx((gradient * direction).sum().item(), rel=2e-2, abs=1e-3)


def test_weights_are_rows_that_sum_to_one_and_see_nothing_hidden() -> None:
    query, key, _ = draw([4, 2], [4, 2], torch.float32)
    layout = layout_of([4, 2])
    weights = attention_weights(query, key, layout, layout, AttentionSpec(causal=True, window=3))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, 4))
    assert (weights[0].triu(1) == 0).all() and (weights[0].tril(-2) == 0).all()
    assert (weights[1, :, :, 2:] == 0).all()


def test_layouts_do_not_outlive_their_batch() -> None:
    import gc
    import weakref

    layout = layout_of([3, 2])
    attention(*draw([3, 2], [3, 2], torch.float32), layout, layout, AttentionSpec(causal=True))
    gone = weakref.ref(layout)
    del layout
    gc.collect()
    assert gone() is None


# The branches that only a GPU takes


@pytest.mark.parametrize(
    ("device", "dtype", "key_width", "value_width", "dropout", "capability", "right"),
    [
        ("cpu", torch.bfloat16, 64, 64, 0.0, (0, 0), "bmm"),
        ("cpu", torch.float32, 512, 512, 0.3, (0, 0), "bmm"),
        ("mps", torch.float32, 64, 64, 0.0, (0, 0), "reference"),
        ("cuda", torch.bfloat16, 64, 64, 0.0, (9, 0), "varlen"),  # base, big
        ("cuda", torch.float16, 64, 64, 0.0, (8, 0), "varlen"),
        ("cuda", torch.bfloat16, 128, 128, 0.0, (9, 0), "varlen"),  # Table 3 (A), 4 heads; (C), d_model 1024
        ("cuda", torch.bfloat16, 32, 32, 0.0, (9, 0), "varlen"),  # (A), 16 heads; (C), d_model 256
        ("cuda", torch.bfloat16, 512, 512, 0.0, (9, 0), "sdpa"),  # (A), 1 head
        ("cuda", torch.bfloat16, 16, 64, 0.0, (9, 0), "varlen"),  # (B), d_k 16
        ("cuda", torch.bfloat16, 32, 64, 0.0, (9, 0), "varlen"),  # (B), d_k 32
        ("cuda", torch.bfloat16, 60, 60, 0.0, (9, 0), "varlen"),
        ("cuda", torch.float16, 64, 256, 0.0, (9, 0), "varlen"),
        ("cuda", torch.float16, 64, 257, 0.0, (9, 0), "sdpa"),
        ("cuda", torch.float32, 64, 64, 0.0, (9, 0), "sdpa"),
        ("cuda", torch.bfloat16, 64, 64, 0.1, (9, 0), "sdpa"),
        ("cuda", torch.float16, 64, 64, 0.0, (7, 5), "sdpa"),
    ],
)
def test_the_backend_is_chosen_by_shape(
    device: str,
    dtype: torch.dtype,
    key_width: int,
    value_width: int,
    dropout: float,
    capability: tuple[int, int],
    right: Backend,
) -> None:
    assert backend(device, dtype, key_width, value_width, 30, dropout, capability=capability) == right


def test_a_compiler_gets_the_reference_on_a_cpu() -> None:
    assert backend("cpu", torch.float32, 64, 64, 30, 0.0, compiling=True) == "reference"


def test_long_sentences_leave_the_batched_products() -> None:
    assert backend("cpu", torch.float32, 64, 64, 256, 0.0) == "bmm"
    assert backend("cpu", torch.float32, 64, 64, 257, 0.0) == "sdpa"
    assert backend("cpu", torch.float32, 64, 64, 257, 0.1) == "bmm"  # torch's kernel has no dropout on a CPU


@pytest.mark.parametrize("widths", [(8, 8), (3, 8), (8, 5), (4, 6)])
@pytest.mark.parametrize(("lengths", "key_lengths", "causal", "window"), CASES)
def test_varlen_attention_is_called_as_documented(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    key_lengths: list[int],
    causal: bool,
    window: int | None,
    widths: tuple[int, int],
) -> None:
    """The kernel has no CPU version, so the test replaces it by a function written from torch's documentation."""
    from torch.nn.attention import varlen

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (max_q, max_k) == (max(lengths), max(key_lengths))
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
        result = torch.empty_like(query)
        ends = zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], cu_seq_k.tolist(), cu_seq_k.tolist()[1:], strict=False)
        for start, end, key_start, key_end in ends:
            q, k, v = query[start:end], key[key_start:key_end], value[key_start:key_end]
            distance = torch.arange(len(k)) - torch.arange(len(q))[:, None]  # keys to the right are positive
            left, right = window_size
            hidden = torch.zeros_like(distance, dtype=torch.bool)
            hidden |= (distance < -left) if left >= 0 else hidden
            hidden |= (distance > right) if right >= 0 else hidden
            scores = torch.einsum("lhk,mhk->hlm", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
            result[start:end] = torch.einsum("hlm,mhk->lhk", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        return result

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    torch.manual_seed(0)
    query = torch.randn(sum(lengths), H, widths[0])
    key, value = (torch.randn(sum(key_lengths), H, width) for width in widths)
    arguments = query, key, value, layout_of(lengths), layout_of(key_lengths), AttentionSpec(causal, window)
    torch.testing.assert_close(varlen_attention(*arguments), reference_attention(*arguments), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 4)])
def test_spare_sentences_queries_and_rows_change_nothing(causal: bool, window: int | None, dropout: float) -> None:
    """In bf16 with gradients, attention pads to more and longer sentences than the batch has."""
    torch.manual_seed(1)
    lengths = [int(n) for n in torch.randint(1, 10, (37,))]
    layout, spec = layout_of(lengths), AttentionSpec(causal, window, dropout)
    inputs = [torch.randn(layout.tokens, H, width).bfloat16() for width in (K, K, V)]
    spare = [torch.cat([x, torch.full((3, H, x.shape[2]), 7.0).bfloat16()]).requires_grad_() for x in inputs]
    weight = torch.randn(layout.tokens, H, V)
    torch.manual_seed(2)
    attended = bmm_attention(*spare, layout, layout, spec)
    assert attended.shape[0] == layout.tokens + 3 and not attended[layout.tokens :].any()
    (attended[: layout.tokens] * weight).sum().backward()
    for x in spare:
        assert x.grad is not None and not x.grad[layout.tokens :].any()
    if not dropout:
        plain = [x.float().requires_grad_() for x in inputs]
        expected = reference_attention(*plain, layout, layout, spec)
        torch.testing.assert_close(attended[: layout.tokens].float(), expected, atol=0.02, rtol=0.02)
        (expected * weight).sum().backward()
        for ours, theirs in zip(spare, plain, strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert (ours.grad[: layout.tokens] - theirs.grad).norm() < 0.02 * theirs.grad.norm()
