"""The Transformer's step in tensors of fixed shape, against the slow state that decodes every prefix again."""

import warnings

import pytest
import torch
from builders import tiny_model

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.interface import PrefixState
from nmtkit.models.architectures.transformer_layers import CrossAttention
from nmtkit.models.layers.static_kv_cache import CacheLengths

VOCABULARY = 30


def tiny(name: str = "transformer_tiny", **changes: object) -> Architecture:
    return tiny_model(name, VOCABULARY, seed=3, **changes)


def memories(model: Architecture, *lengths: int) -> Packed:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return model.encode(Packed.from_lists(tokens))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 4},
        {"pre_norm": True, "d_key": 4, "d_value": 12, "positions": "learned"},
        {"name": "transformer_moe_tiny"},
        {"name": "student_tiny"},
        {"decoder_self_attention": "average"},
        {"positions": "rotary", "qk_norm": True},
        {"positions": "relative", "max_distance": 3, "heads": 4, "kv_heads": 2},
        {"positions": "alibi", "heads": 4, "kv_heads": 1, "d_value": 3},
        {"decoder_self_attention": "lightconv", "kernels": (3, 5)},
        {"decoder_self_attention": "dynamicconv", "kernels": (4, 2)},
        {"positions": "none", "norm": "rms", "residual": "admin", "kv_heads": 1},
    ],
)
@torch.inference_mode()
def test_static_steps_equal_decoding_every_prefix_again_when_rows_change_places_and_slots_are_refilled(changes):
    model, beams, slots = tiny(**changes), 3, 2
    generator = torch.Generator().manual_seed(1)
    static = model.static_start(slots, beams, 16, 12)
    first = memories(model, 5, 9)
    static.insert(torch.arange(slots), first)
    prefixes = PrefixState(first, beams)
    position = torch.zeros(slots, dtype=torch.int64)
    for turn in range(12):
        if turn == 5:  # the second sentence has ended, and a new sentence takes its slot
            new = memories(model, 4)
            static.insert(torch.tensor([1]), new)
            prefixes.insert(torch.tensor([1]), new)
            position[1] = 0
        tokens = torch.randint(3, VOCABULARY, (slots * beams,), generator=generator)
        lengths = CacheLengths(int(position.max()) + 1 + turn % 3, 9 + turn % 4)
        got = model.static_step(tokens, position, static, lengths)
        row = torch.arange(slots * beams)
        packed, memory = prefixes.append(tokens)
        features = model.decode(memory, packed)
        expected = model.output_projection(features[packed.layout.cu_seqlens[1:].long() - 1])
        assert torch.allclose(got, expected, atol=1e-5)
        parents = torch.randint(0, beams, (slots, beams), generator=generator)
        static.reorder(parents, lengths)
        prefixes.reorder((parents + row.view(slots, beams)[:, :1]).flatten())
        position += 1


@pytest.mark.parametrize("kind", ["attention", "average", "ssru"])
@torch.inference_mode()
def test_a_sentence_that_overflowed_leaves_nothing_behind_in_its_slot(kind):
    model = tiny(decoder_self_attention=kind)
    state, slot, lengths = model.static_start(1, 2, 8, 8), torch.tensor([0]), CacheLengths(4, 8)
    fresh, used = memories(model, 3), memories(model, 6)
    state.insert(slot, used.with_values(torch.full_like(used.values, torch.nan)))
    tokens, position = torch.tensor([1, 1]), torch.tensor([0])
    assert model.static_step(tokens, position, state, lengths).isnan().all()
    state.insert(slot, fresh)
    got = model.static_step(tokens, position, state, lengths)
    expected = model.step(tokens, model.start(fresh, 2))
    assert torch.allclose(got, expected, atol=1e-5)


def test_the_transformers_own_way_to_decode_is_static():
    from torch.distributed.fsdp import FSDPModule

    model = tiny()
    assert model.supports_static_decoding
    model.__class__ = type(
        "FSDPTransformer", (FSDPModule, type(model)), {}
    )  # fully_shard replaces the class in this way
    assert model.supports_static_decoding
    assert tiny("transformer_moe_tiny").supports_static_decoding
    assert tiny("student_tiny").supports_static_decoding
    assert not tiny("convs2s_small").supports_static_decoding
    model.__class__ = type("Other", (type(model),), {"step": lambda *_: None})
    assert not model.supports_static_decoding


def test_static_decoding_is_off_where_it_would_bypass_code_of_a_plug_in():
    class Projecting(CrossAttention):
        def project(self, memory):
            key, value = super().project(memory)
            return 2 * key, value

    model = tiny()
    model.decoder[1].cross_attention.__class__ = Projecting
    assert not model.supports_static_decoding
    model = tiny()
    hook = model.decoder[0].feed_forward.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert not model.supports_static_decoding
    hook.remove()
    assert model.supports_static_decoding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(
            model.decoder[0].feed_forward.fc1
        )  # a CUDA graph records the operations of this hook
    assert model.supports_static_decoding


@torch.inference_mode()
def test_every_way_to_decode_uses_queries_keys_and_values_as_a_plug_in_changes_them():
    model = tiny(d_key=4, d_value=12)
    for layer in model.decoder:
        split = layer.self_attention.split_heads

        def normalized(qkv, split=split):
            query, key, value = split(qkv)
            return torch.nn.functional.normalize(query, dim=-1), torch.nn.functional.normalize(key, dim=-1), value

        layer.self_attention.split_heads = normalized
    memory, target = memories(model, 5), Packed.from_lists([[1, 7, 9, 4]])
    expected = model.output_projection(model.decode(memory, target))[3]
    state, static = model.start(memory, 2), model.static_start(1, 2, 8, 8)
    static.insert(torch.tensor([0]), memory)
    for position, token in enumerate(target.values.tolist()):
        tokens = torch.tensor([token, token])
        logits = model.step(tokens, state)
        static_logits = model.static_step(tokens, torch.tensor([position]), static, CacheLengths(8, 8))
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(static_logits[0], expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_static_steps_under_autocast_stay_near_those_in_fp32():
    model = tiny()
    memory, slots, tokens = memories(model, 5, 9), torch.arange(2), torch.tensor([1, 1, 1, 1])
    logits = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            state = model.static_start(2, 2, 8, 12)
            state.insert(slots, memory)
            for position in range(3):
                got = model.static_step(tokens + position, torch.full((2,), position), state, CacheLengths(4, 9))
            logits.append(got)
        assert state.keys.dtype == (torch.bfloat16 if enabled else torch.float32)
    assert logits[1].dtype == torch.float32
    assert 0 < (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].abs().max()


@torch.inference_mode()
def test_a_step_in_16_bits_mixes_no_types_or_devices_and_never_waits():
    """Runs on tensors without contents, which know their types and refuse to be read."""
    model = tiny().to("meta", torch.bfloat16)
    state, lengths = model.static_start(4, 2, 32, 32), CacheLengths(16, 16)
    values = torch.empty(11, 16, device="meta", dtype=torch.bfloat16)
    layout = Layout(torch.empty(3, device="meta", dtype=torch.int64), 5, 11)
    state.insert(torch.empty(3, device="meta", dtype=torch.int64), Packed(values, layout))
    position = torch.empty(4, device="meta", dtype=torch.int64)
    tokens = torch.empty(8, device="meta", dtype=torch.int64)
    logits = model.static_step(tokens, position, state, lengths)
    state.reorder(torch.empty(4, 2, device="meta", dtype=torch.int64), lengths)
    assert (logits.dtype, logits.shape) == (torch.float32, (8, VOCABULARY))
