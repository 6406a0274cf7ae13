"""The append-only cache against decoding every prefix anew, over long searches."""

import pytest
import torch
from builders import tiny_transformer

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.interface import PrefixState
from nmtkit.models.layers.kv_cache import cached_attention


@pytest.mark.parametrize("window", [None, 7])
def test_a_long_search_with_random_parents_equals_decoding_every_prefix(window):
    model, beams = tiny_transformer(20, window=window), 3
    generator = torch.Generator().manual_seed(2)
    memory = model.encode(Packed.from_lists([[5, 6, 7, 2], [8, 2], [9, 10, 2], [4, 2]]))
    state, plain = model.start(memory, beams), PrefixState(memory, beams)
    sentences, most, pruned = 4, 0, False
    tokens = torch.ones(sentences * beams, dtype=torch.int64)
    with torch.no_grad():
        for step in range(50):
            logits, expected = model.step(tokens, state), Architecture.step(model, tokens, plain)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            if step == 20:
                for one in (state, plain):
                    one.drop_finished(torch.tensor([0, 2, 3]))
                sentences = 3
            parents = torch.randint(beams, (sentences, beams), generator=generator)
            parents = (parents + torch.arange(sentences)[:, None] * beams).flatten()
            for one in (state, plain):
                one.reorder(parents)
            pruned |= state.used < most
            most = max(most, state.used)
            tokens = torch.randint(3, 20, (sentences * beams,), generator=generator)
    assert pruned


@pytest.mark.parametrize("kind", ["average", "ssru"])
def test_a_long_recurrent_search_equals_decoding_every_prefix_when_sentences_leave_and_enter(kind):
    model, beams = tiny_transformer(20, decoder_self_attention=kind), 3
    generator = torch.Generator().manual_seed(2)
    memory = model.encode(Packed.from_lists([[5, 6, 7, 2], [8, 2], [9, 10, 2], [4, 2]]))
    state, plain = model.start(memory, beams), PrefixState(memory, beams)
    sentences = 4
    tokens = torch.ones(sentences * beams, dtype=torch.int64)
    with torch.no_grad():
        for step in range(20):
            logits, expected = model.step(tokens, state), Architecture.step(model, tokens, plain)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            if step in (0, 9):  # also before the rows of a sentence have separate states
                for one in (state, plain):
                    one.drop_finished(torch.arange(1, sentences))
                sentences -= 1
            if step == 5:
                new = model.encode(Packed.from_lists([[3, 5, 8, 9, 11, 2]]))
                for one in (state, plain):
                    one.insert(torch.tensor([1]), new)
            parents = torch.randint(beams, (sentences, beams), generator=generator)
            parents = (parents + torch.arange(sentences)[:, None] * beams).flatten()
            for one in (state, plain):
                one.reorder(parents)
            tokens = torch.randint(3, 20, (sentences * beams,), generator=generator)


def test_rows_share_one_entry_only_while_they_are_alike():
    model = tiny_transformer(20)
    memory = model.encode(Packed.from_lists([[5, 2], [8, 9, 2]]))
    with torch.no_grad():
        for tokens, entries in (([1, 1, 1, 1], 1), ([1, 3, 1, 1], 2)):
            state, plain = model.start(memory, 2), PrefixState(memory, 2)
            logits = model.step(torch.tensor(tokens), state)
            torch.testing.assert_close(logits, Architecture.step(model, torch.tensor(tokens), plain))
            assert state.used == entries


@pytest.mark.parametrize("d_value", [None, 4])
def test_a_hook_may_return_a_part_of_a_wider_tensor(d_value):
    model = tiny_transformer(20, d_value=d_value)
    memory = model.encode(Packed.from_lists([[5, 2], [8, 9, 2]]))
    for layer in model.decoder:
        projection = layer.self_attention.qkv_proj
        projection.register_forward_hook(lambda module, inputs, x: torch.cat([x, x + 1], 1)[:, : x.shape[1]])
    state, plain = model.start(memory, 2), PrefixState(memory, 2)
    with torch.no_grad():
        for tokens in ([1, 1, 1, 1], [3, 4, 5, 6], [7, 8, 9, 3]):
            logits = model.step(torch.tensor(tokens), state)
            torch.testing.assert_close(logits, Architecture.step(model, torch.tensor(tokens), plain))


@pytest.mark.parametrize("sentences", [1, 2])
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_attend_as_the_reference_does_and_alike_in_either_store(sentences, rows):
    torch.manual_seed(3)
    keys, values = torch.randn(sentences, 3, 16, 8), torch.randn(sentences, 3, 16, 4)  # B H E K, B H E Kv
    query = torch.randn(sentences, 3, rows, 8)
    mask = torch.zeros(sentences * 3, rows, 16).masked_fill(torch.rand(sentences * 3, rows, 16) < 0.5, -torch.inf)
    mask[:, :, 0] = 0.0
    scores = torch.einsum("bhqk,bhek->bhqe", query, keys) / 8**0.5 + mask.view(sentences, 3, rows, 16)
    expected = torch.einsum("bhqe,bhev->bqhv", scores.softmax(-1), values).reshape(-1, 12)
    query, keys, values = query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
    torch.testing.assert_close(cached_attention(query, keys, values, mask, sentences), expected)
    short = [x.to(torch.bfloat16) for x in (query, keys, values, mask)]
    wide = [short[0], *(x.float() for x in short[1:])]  # the same numbers, in fp32
    found = [cached_attention(*arguments, sentences) for arguments in (short, wide)]
    torch.testing.assert_close(found[0].float(), expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(*found, rtol=2**-7, atol=1e-6)  # equal except for the last digit of bf16
