"""Sentences without padding: indices against plain Python loops."""

import torch

from nmtkit.data.packed import Layout, Packed

SENTENCES = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14]]


def test_indices_of_a_layout_match_a_loop_over_sentences() -> None:
    layout = Packed.from_lists(SENTENCES).layout
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 8, 10]
    assert layout.segment_ids.tolist() == [i for i, ids in enumerate(SENTENCES) for _ in ids]
    assert layout.position_ids.tolist() == [j for ids in SENTENCES for j in range(len(ids))]
    assert (layout.tokens, layout.sentences, layout.max_length) == (10, 4, 4)


def test_padding_fills_the_ends_and_its_inverse_gives_the_tokens_back() -> None:
    packed = Packed.from_lists(SENTENCES)
    padded = packed.to_padded(fill=-1)
    assert padded.tolist() == [ids + [-1] * (4 - len(ids)) for ids in SENTENCES]
    assert Packed.from_padded(padded, packed.layout).values.tolist() == packed.values.tolist()


def test_sentences_of_one_length_are_padded_without_a_copy() -> None:
    packed = Packed.from_lists([[1, 2], [3, 4]])
    assert packed.to_padded().data_ptr() == packed.values.data_ptr()


def test_select_takes_sentences_in_any_order_and_repeatedly() -> None:
    features = Packed.from_lists(SENTENCES)
    features = features.with_values(torch.stack([features.values, -features.values], 1).float())
    chosen = features.select(torch.tensor([2, 0, 2]))
    assert [part[:, 0].tolist() for part in chosen.split()] == [SENTENCES[2], SENTENCES[0], SENTENCES[2]]
    assert torch.equal(chosen.values[:, 1], -chosen.values[:, 0])


def test_padding_passes_gradients_to_the_tokens_alone() -> None:
    packed = Packed.from_lists(SENTENCES)
    values = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    packed.with_values(values).to_padded().square().sum().backward()
    assert torch.allclose(values.grad, 2 * values.detach())


def test_moving_a_layout_keeps_what_python_knows_of_it() -> None:
    layout = Layout.of(torch.tensor([2, 3])).to("cpu")
    assert (layout.tokens, layout.max_length, layout.lengths.tolist()) == (5, 3, [2, 3])


def test_the_host_keeps_the_lengths_of_a_layout_that_moves() -> None:
    layout = Layout.of(torch.tensor([3, 1, 2]))
    moved = layout.to("meta")  # whose tensors have no values
    assert moved.lengths.is_meta and moved.host_lengths == [3, 1, 2]
