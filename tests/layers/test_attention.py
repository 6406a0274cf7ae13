"""Attention, its fast path and its plain one, against loops in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nmtkit.layers.attention import Backend, attention, attention_weights, backend, plain_attention
from nmtkit.layers.attention_cpu import rectangle_attention
from nmtkit.layers.attention_gpu import document_mask, flex_attention, padded_attention, varlen_attention
from nmtkit.packed import Layout

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


def layout(lengths: list[int]) -> Layout:
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
    if fused:  # strided views, as a fused projection gives them
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
    layouts = layout(lengths), layout(key_lengths)
    weight = torch.randn_like(right)
    right_gradients = torch.autograd.grad((right * weight).sum(), [query, key, value])
    for path in (rectangle_attention, plain_attention, padded_attention):
        result = path(query, key, value, *layouts, causal, window, 0.0)
        torch.testing.assert_close(result.double(), right, atol=1e-6, rtol=1e-5)
        gradients = torch.autograd.grad((result * weight).sum(), [query, key, value])
        for ours, theirs in zip(gradients, right_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[3, 1, 5], [4, 4]])
def test_the_fast_path_reads_the_views_of_a_fused_projection(lengths: list[int]) -> None:
    views = draw(lengths, lengths, torch.float32, fused=True)
    assert not views[1].is_contiguous()
    copies = [view.contiguous() for view in views]
    one = layout(lengths)
    strided, dense = (rectangle_attention(*x, one, one, True, None, 0.0) for x in (views, copies))
    assert torch.equal(strided, dense)


def test_bfloat16_stays_near_the_loops() -> None:
    lengths = [7, 12]
    inputs = [x.bfloat16() for x in draw(lengths, lengths, torch.float32)]
    result = attention(*inputs, layout(lengths), layout(lengths), causal=True)
    assert result.dtype == torch.bfloat16
    right = by_loops(*(x.double() for x in inputs), lengths, lengths, True, None)
    torch.testing.assert_close(result.double(), right, atol=0.03, rtol=0.03)


def test_a_sentence_has_the_same_result_in_any_company() -> None:
    lengths = [5, 30, 2, 11]
    query, key, value = draw(lengths, lengths, torch.float32)
    together = attention(query, key, value, layout(lengths), layout(lengths), causal=True).split(lengths)
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), together, strict=True)
    for q, k, v, right in parts:
        alone = layout([len(q)])
        torch.testing.assert_close(attention(q, k, v, alone, alone, causal=True), right, atol=1e-6, rtol=0)


@pytest.mark.parametrize("path", [rectangle_attention, plain_attention, padded_attention])
def test_dropout_falls_on_the_weights(path: Callable[..., Tensor]) -> None:
    """With values that are the identity, the result is the weights themselves: each is gone or scaled."""
    lengths, p, n = [16] * 40, 0.25, 16
    torch.manual_seed(1)
    query, key = torch.randn(640, H, K), torch.randn(640, H, K)
    value = torch.eye(n).repeat(40, 1)[:, None].expand(-1, H, -1).contiguous().requires_grad_()
    one = layout(lengths)
    weights = path(query, key, value, one, one, False, None, 0.0).detach()
    dropped = path(query, key, value, one, one, False, None, p)
    gone = dropped == 0
    assert abs(gone.float().mean() - p) < 0.02
    torch.testing.assert_close(dropped[~gone], weights[~gone] / (1 - p), atol=1e-4, rtol=1e-4)
    assert torch.equal(attention(query, key, value, one, one, dropout=p), attention(query, key, value, one, one))
    # the gradient of the sum of the results by a value is the sum of the weights it got
    (gradient,) = torch.autograd.grad(dropped.sum(), value)
    right = dropped.detach().view(40, n, H, n).sum(1).transpose(1, 2)  # sentence, key, head
    torch.testing.assert_close(gradient.view(40, n, H, n), right[..., None].expand(-1, -1, -1, n), atol=1e-5, rtol=1e-4)


def test_dropout_gradients_equal_differences() -> None:
    """Central differences in float32, the mask held by the seed."""
    lengths = [3, 2]
    inputs = [x.requires_grad_() for x in draw(lengths, lengths, torch.float32)]
    one = layout(lengths)
    weight = torch.randn(5, H, V)

    def loss(*x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return (rectangle_attention(*x, one, one, False, None, 0.4) * weight).sum()

    gradients = torch.autograd.grad(loss(*inputs), inputs)
    for number, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        moved = [[x + sign * 1e-2 * direction if i == number else x for i, x in enumerate(inputs)] for sign in (1, -1)]
        slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-2
        assert slope.item() == pytest.approx((gradient * direction).sum().item(), rel=2e-2, abs=1e-3)


def test_weights_are_rows_that_sum_to_one_and_see_nothing_hidden() -> None:
    query, key, _ = draw([4, 2], [4, 2], torch.float32)
    one = layout([4, 2])
    weights = attention_weights(query, key, one, one, causal=True, window=3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, 4))
    assert (weights[0].triu(1) == 0).all() and (weights[0].tril(-2) == 0).all()
    assert (weights[1, :, :, 2:] == 0).all()


def test_layouts_do_not_outlive_their_batch() -> None:
    import gc
    import weakref

    one = layout([3, 2])
    attention(*draw([3, 2], [3, 2], torch.float32), one, one, causal=True)
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


# The branches that only a GPU takes


@pytest.mark.parametrize(
    ("device", "dtype", "key_width", "value_width", "dropout", "capability", "right"),
    [
        ("cpu", torch.bfloat16, 64, 64, 0.0, (0, 0), "rectangle"),
        ("cpu", torch.float32, 512, 512, 0.3, (0, 0), "rectangle"),
        ("mps", torch.float32, 64, 64, 0.0, (0, 0), "plain"),
        ("cuda", torch.bfloat16, 64, 64, 0.0, (9, 0), "varlen"),  # base, big
        ("cuda", torch.float16, 64, 64, 0.0, (8, 0), "varlen"),
        ("cuda", torch.bfloat16, 128, 128, 0.0, (9, 0), "varlen"),  # Table 3 (A), 4 heads; (C), d_model 1024
        ("cuda", torch.bfloat16, 32, 32, 0.0, (9, 0), "varlen"),  # (A), 16 heads; (C), d_model 256
        ("cuda", torch.bfloat16, 512, 512, 0.0, (9, 0), "padded"),  # (A), 1 head
        ("cuda", torch.bfloat16, 16, 64, 0.0, (9, 0), "flex"),  # (B), d_k 16
        ("cuda", torch.bfloat16, 32, 64, 0.0, (9, 0), "flex"),  # (B), d_k 32
        ("cuda", torch.float32, 64, 64, 0.0, (9, 0), "flex"),
        ("cuda", torch.float32, 60, 60, 0.0, (9, 0), "padded"),
        ("cuda", torch.bfloat16, 60, 60, 0.0, (9, 0), "padded"),
        ("cuda", torch.bfloat16, 64, 64, 0.1, (9, 0), "padded"),
        ("cuda", torch.float16, 64, 64, 0.0, (7, 5), "padded"),
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


def test_a_compiler_gets_the_plain_path_on_a_cpu() -> None:
    assert backend("cpu", torch.float32, 64, 64, 30, 0.0, compiling=True) == "plain"


def test_long_sentences_leave_the_rectangle() -> None:
    assert backend("cpu", torch.float32, 64, 64, 256, 0.0) == "rectangle"
    assert backend("cpu", torch.float32, 64, 64, 257, 0.0) == "padded"
    assert backend("cpu", torch.float32, 64, 64, 257, 0.1) == "rectangle"  # torch's kernel has no dropout on a CPU


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("lengths", "key_lengths", "causal", "window"), CASES)
def test_flex_attention_equals_the_plain_path(
    lengths: list[int], key_lengths: list[int], causal: bool, window: int | None
) -> None:
    inputs = draw(lengths, key_lengths, torch.float32)
    arguments = *inputs, layout(lengths), layout(key_lengths), causal, window
    torch.testing.assert_close(flex_attention(*arguments), plain_attention(*arguments, 0.0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_tiles_of_the_document_mask_hold_all_that_is_visible(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths, key_lengths = (torch.randint(1, 12, (15,), generator=generator) for _ in range(2))
    one, other, block = Layout.of(lengths), Layout.of(key_lengths), 8
    mask = document_mask(one, other, causal=False, window=None, block=block)
    needed = torch.zeros(-(-one.tokens // block), -(-other.tokens // block), dtype=torch.bool)
    for row, sentence in enumerate(one.segment_ids.tolist()):
        for column, key_sentence in enumerate(other.segment_ids.tolist()):
            needed[row // block, column // block] |= sentence == key_sentence
    visited = torch.zeros_like(needed)
    counts, order = mask.kv_num_blocks[0, 0].tolist(), mask.kv_indices[0, 0].tolist()
    for row, count in enumerate(counts):
        assert len(set(order[row][:count])) == count
        visited[row, order[row][:count]] = True
    assert torch.equal(visited, needed)
    # and, tile by tile, the same for the keys: the backward pass reads this side
    counts, order = mask.q_num_blocks[0, 0].tolist(), mask.q_indices[0, 0].tolist()
    turned = torch.zeros_like(needed)
    for column, count in enumerate(counts):
        turned[order[column][:count], column] = True
    assert torch.equal(turned, needed)


@pytest.mark.parametrize(("lengths", "key_lengths", "causal", "window"), CASES)
def test_varlen_attention_is_called_as_documented(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], key_lengths: list[int], causal: bool, window: int | None
) -> None:
    """The kernel has no CPU version; here it is one written from torch's documentation."""
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
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (max_q, max_k) == (max(lengths), max(key_lengths))
        result = torch.empty_like(query)
        ends = zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], cu_seq_k.tolist(), cu_seq_k.tolist()[1:], strict=False)
        for start, end, key_start, key_end in ends:
            q, k, v = query[start:end], key[key_start:key_end], value[key_start:key_end]
            distance = torch.arange(len(k)) - torch.arange(len(q))[:, None]  # keys to the right are positive
            left, right = window_size
            hidden = torch.zeros_like(distance, dtype=torch.bool)
            hidden |= (distance < -left) if left >= 0 else hidden
            hidden |= (distance > right) if right >= 0 else hidden
            scores = torch.einsum("lhk,mhk->hlm", q, k) / math.sqrt(q.shape[-1])
            result[start:end] = torch.einsum("hlm,mhk->lhk", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        return result

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    query, key, _ = draw(lengths, key_lengths, torch.float32)
    arguments = query, key, key.flip(0), layout(lengths), layout(key_lengths), causal, window
    torch.testing.assert_close(varlen_attention(*arguments), plain_attention(*arguments, 0.0), atol=1e-6, rtol=1e-5)


def test_attention_calls_the_chosen_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from nmtkit.layers import attention as module

    one = layout([3, 2])
    inputs = draw([3, 2], [3, 2], torch.float32)
    for name in ("varlen", "flex", "padded", "rectangle", "plain"):
        monkeypatch.setattr(module, "_backend_of", lambda *_, name=name: name)
        monkeypatch.setattr(module, f"{name}_attention", lambda *_, name=name: name)
        assert attention(*inputs, one, one) == name
