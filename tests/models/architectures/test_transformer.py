"""The Transformer against section 3 of its paper."""

import math
from typing import Any

import pytest
import torch
from builders import tiny_transformer
from torch import nn
from transformer_by_hand import TransformerByHand
from transformer_cases import SIZE, VARIANTS, model_of, sentences, variants

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.interface import Architecture, PrefixState, parameter_count
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.layers.attention import PackedContext
from nmtkit.models.layers.relative_positions import sinusoids

# Sections 3.4 and 3.5


@pytest.mark.parametrize("width", [512, 128, 7])
def test_sinusoids_are_those_of_section_3_5(width: int) -> None:
    table = sinusoids(200, width)
    assert table.shape == (200, width)
    for position in (0, 1, 17, 199):
        for column in range(0, width, max(1, width // 40)):
            angle = position / 10000.0 ** (2 * (column // 2) / width)
            right = math.cos(angle) if column % 2 else math.sin(angle)
            assert float(table[position, column]) == pytest.approx(right, abs=1e-6)


def test_embeddings_are_scaled_and_positions_added() -> None:
    model = model_of().eval()
    source = sentences(3, 2)
    layout = source.layout
    x = model.source_embedding(source.values, layout.position_ids, layout.max_length)
    table = sinusoids(3, 16)
    for row, (token, position) in enumerate(zip(source.values.tolist(), [0, 1, 2, 0, 1], strict=True)):
        right = model.source_embedding.tokens.weight[token] * 4 + table[position]
        torch.testing.assert_close(x[row], right)


def test_fresh_embeddings_have_unit_variance_once_scaled() -> None:
    model = tiny_transformer(2000, seed=0, d_model=64)
    assert (model.output_projection.weight * 8).std().item() == pytest.approx(1, abs=0.02)
    bound = math.sqrt(6 / (64 + 24))
    inner = model.encoder[0].feed_forward.fc1
    assert inner.weight.abs().max() <= bound and inner.weight.abs().max() > 0.98 * bound
    assert not inner.bias.any()


def test_sinusoids_have_no_limit() -> None:
    model = model_of().eval()
    assert model.max_source_positions is None
    assert model(sentences(1500), sentences(1100, seed=2)).shape == (1100, 16)


def test_learned_positions_name_their_limit() -> None:
    model = model_of(positions="learned", max_positions=20)
    assert model.max_source_positions == model.max_target_positions == 20
    model.encode(sentences(20))
    with pytest.raises(ValueError, match=r"21 tokens .* 20 positions .*--max-positions"):
        model.encode(sentences(4, 21))


# Vocabularies and shared weights


def test_a_joint_vocabulary_has_one_matrix() -> None:
    model = model_of()
    assert (
        model.output_projection.weight is model.source_embedding.tokens.weight is model.target_embedding.tokens.weight
    )


def test_separate_vocabularies_tie_the_target_side_alone() -> None:
    model = model_of(joint=False)
    assert model.output_projection.weight is model.target_embedding.tokens.weight
    assert model.source_embedding.tokens.weight.shape == (SIZE + 4, 16)
    assert parameter_count(model) == parameter_count(model_of()) + (SIZE + 4) * 16


def test_without_sharing_the_source_embedding_is_its_own() -> None:
    model = model_of(share_embeddings=False)
    assert model.source_embedding.tokens.weight is not model.target_embedding.tokens.weight
    assert model.output_projection.weight is model.target_embedding.tokens.weight


def test_tied_layers_share_all_weights_and_keep_states_of_their_own() -> None:
    model = model_of(decoder_layers=4, decoder_tied_layers=(1, 1, 2, 1), decoder_self_attention="ssru")
    assert model.decoder[0] is model.decoder[1] is model.decoder[3] is not model.decoder[2]
    single = model_of(decoder_layers=2, decoder_self_attention="ssru")
    assert parameter_count(model) == parameter_count(single)
    assert len(model.start(model.encode(sentences(3)), 1).states) == 4


# Section 3.1: the whole model against a Transformer written out in float64


@pytest.mark.parametrize("changes", [v for v in VARIANTS.values() if "window" not in v])
def test_the_model_is_section_3_written_out(changes: dict[str, Any]) -> None:
    model = model_of(**changes).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, which begin as ones and zeros
            nn.init.normal_(parameter, mean=0.5)
    vocabulary_weight = model.target_embedding.tokens.weight
    assert (model.output_projection.weight is vocabulary_weight) == model.config.tie_output
    by_hand = TransformerByHand(model)
    source, target = sentences(6, 3), sentences(4, 9, seed=2)
    features = target.with_values(model(source, target)).split()
    for ours, ids, prefix in zip(features, source.split(), target.split(), strict=True):
        torch.testing.assert_close(ours.double(), by_hand.features(ids.tolist(), prefix.tolist()), rtol=1e-5, atol=2e-5)


# Contracts


@variants
def test_cached_steps_equal_the_full_forward(changes: dict[str, Any]) -> None:
    model = model_of(**changes).eval()
    with torch.no_grad():
        memory = model.encode(sentences(4, 7, 2))
        state, plain = model.start(memory, 2), PrefixState(memory, 2)
        for column in sentences(*[11] * 6, seed=9).to_padded().unbind(1):
            column = column if plain.prefixes[0] else torch.ones_like(column)  # a search begins with bos
            logits, right = model.step(column, state), Architecture.step(model, column, plain)
            torch.testing.assert_close(logits, right, rtol=1e-5, atol=1e-5)
            parents = torch.tensor([1, 0, 2, 2, 5, 5])
            state.reorder(parents)
            plain.reorder(parents)


@variants
def test_a_sentence_scores_alike_alone_and_in_any_batch(changes: dict[str, Any]) -> None:
    model = model_of(**changes).eval()
    source, target = sentences(4, 18, 1, 6), sentences(7, 2, 16, 12, seed=2)
    together = target.with_values(model(source, target)).split()
    for index, right in enumerate(together):
        one = torch.tensor([index])
        torch.testing.assert_close(model(source.select(one), target.select(one)), right, rtol=1e-5, atol=1e-5)


def test_padding_sentences_change_nothing() -> None:
    """A batch of fixed shape ends with a dummy sentence, and its `max_length` is only an upper bound."""
    model = model_of().eval()
    source, target = sentences(4, 6, 5), sentences(3, 5, 4, seed=2)
    right = model(source.select(torch.tensor([0, 1])), target.select(torch.tensor([0, 1])))
    bound = [Packed(x.values, Layout(x.layout.lengths, 32, x.layout.tokens)) for x in (source, target)]
    torch.testing.assert_close(model(*bound)[:8], right, rtol=1e-5, atol=1e-5)


def test_a_window_hides_what_lies_beyond_it() -> None:
    model = model_of(window=3, encoder_layers=1).eval()
    source = sentences(9)
    changed = source.values.clone()
    changed[0] = (changed[0] + 1) % SIZE
    before, after = model.encode(source).values, model.encode(source.with_values(changed)).values
    assert not torch.allclose(before[1], after[1])
    assert torch.equal(before[2:], after[2:])


@variants
def test_attention_weights_are_distributions_over_what_may_be_seen(changes: dict[str, Any]) -> None:
    model = model_of(**changes).eval()
    source, target = sentences(4, 7), sentences(5, 3, seed=2)
    weights_by_kind = model.attention_weights(source, target)
    heads = model.config.heads
    shapes = {"encoder": (2, heads, 7, 7), "decoder": (2, heads, 5, 5), "cross": (2, heads, 5, 7)}
    assert ("encoder" in weights_by_kind) == (model.config.encoder_self_attention == "attention")
    for kind, layers in weights_by_kind.items():
        assert [tuple(weights.shape) for weights in layers] == [shapes[kind]] * 2
        lengths = source.layout.lengths if kind == "encoder" else target.layout.lengths
        for weights in layers:
            for sentence, length in enumerate(lengths.tolist()):
                torch.testing.assert_close(weights[sentence, :, :length].sum(-1), torch.ones(heads, length))
                assert not weights[sentence, :, length:].any()
    assert ("decoder" in weights_by_kind) == (model.config.decoder_self_attention == "attention")
    assert all(not weights.triu(1).any() for weights in weights_by_kind.get("decoder", []))
    assert all(not weights[0, :, :, 4:].any() for weights in weights_by_kind["cross"])


def test_attention_weights_give_back_the_output_of_attention() -> None:
    """The attention weights of the first encoder layer, applied to its values, give the result of its attention."""
    model = model_of().eval()
    source = sentences(4)
    weights_by_kind = model.attention_weights(source, sentences(3, seed=2))
    attention = model.encoder[0].self_attention
    x = model.source_embedding(source.values, source.layout.position_ids, 4)
    _, _, value = attention.split_heads(attention.qkv_proj(x))
    right = torch.einsum("hlm,mhv->lhv", weights_by_kind["encoder"][0][0], value).flatten(1)
    torch.testing.assert_close(
        attention(x, PackedContext(source.layout)), attention.out_proj(right), rtol=1e-5, atol=1e-5
    )


# Configurations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "--d-model 512 .*--heads 3; .*--d-key and --d-value"),
        ({"heads": 3, "d_key": 8}, "--heads 3"),
        ({"dropout": 1.0}, "--dropout is 1.0;"),
        ({"encoder_layerdrop": -0.1}, "--encoder-layerdrop is -0.1"),
        ({"encoder_layers": -1}, "--encoder-layers is -1;"),
        ({"window": 0}, "--window is 0;"),
        ({"ssru_norm": True}, "--ssru-norm .*--decoder-self-attention ssru"),
        ({"average_gate": False}, "--no-average-gate .*--decoder-self-attention average"),
        ({"average_separate_gates": True}, "--average-separate-gates .*--decoder-self-attention average"),
        (
            {"decoder_self_attention": "average", "average_separate_gates": True, "average_gate": False},
            "--average-separate-gates .*--no-average-gate",
        ),
        (
            {"average_ffn": False, "decoder_self_attention": "ssru"},
            "--no-average-ffn .*--decoder-self-attention average",
        ),
        ({"decoder_tied_layers": (1, 1)}, "2 numbers, .*6 decoder layers"),
        ({"encoder_tied_layers": (1,)}, "--encoder-tied-layers has 1 numbers, .*6 encoder layers"),
        ({"kv_heads": 3}, "--heads 8 .*--kv-heads 3"),
        ({"positions": "rotary", "d_key": 5}, "--positions rotary .*not 5; .*--d-key"),
        ({"positions": "alibi", "decoder_self_attention": "ssru"}, "--positions alibi .*not ssru"),
        ({"positions": "none", "position_offset": 2}, "--position-offset .*--positions none"),
        ({"rotary_base": 100.0}, "--rotary-base .*--positions rotary, .*sinusoidal"),
        ({"max_distance": 4, "positions": "alibi"}, "--max-distance .*--positions relative, .*alibi"),
        ({"kernels": (3,)}, "--kernels .*--decoder-self-attention lightconv"),
        ({"encoder_self_attention": "lightconv", "kernels": ()}, "--kernels is empty"),
        (
            {"encoder_self_attention": "lightconv", "positions": "rotary"},
            "--positions rotary .*--encoder-self-attention",
        ),
        ({"base_width": 64, "scale_embeddings": False}, "--base-width .*--no-scale-embeddings"),
        ({"residual": "admin", "pre_norm": True}, "--residual admin .*--pre-norm"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**changes)
