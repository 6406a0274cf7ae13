"""The Transformer against section 3 of its paper."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from builders import tiny_transformer
from torch import Tensor, nn

from nmtkit.architectures import Vocabulary
from nmtkit.architectures.interface import Architecture, PrefixState, parameter_count
from nmtkit.architectures.transformer import Transformer
from nmtkit.architectures.transformer_config import TransformerConfig
from nmtkit.layers.attention import PackedContext
from nmtkit.layers.dropout import Dropout
from nmtkit.layers.losses import output_cross_entropy
from nmtkit.layers.packed import Layout, Packed
from nmtkit.layers.positions import sinusoids

SIZE = 19
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm": {"pre_norm": True},
    "window": {"window": 3},
    "learned positions": {"positions": "learned", "max_positions": 20},
    "widths of their own": {"d_key": 3, "d_value": 5},
    "narrow heads of 3": {"heads": 3, "d_key": 4, "d_value": 4},
    "nothing shared": {"share_embeddings": False, "tie_output": False},
    "as Marian": {
        "activation": "swish",
        "attention_bias": True,
        "output_bias": True,
        "positions": "sinusoidal_halves",
    },
    "as M2M-100": {
        "pre_norm": True,
        "attention_bias": True,
        "positions": "sinusoidal_fairseq",
        "position_offset": 2,
    },
    "as mBART": {
        "pre_norm": True,
        "activation": "gelu",
        "attention_bias": True,
        "output_bias": True,
        "embedding_norm": True,
        "norm_eps": 0.01,
        "positions": "learned",
        "max_positions": 20,
    },
    "gated": {"activation": "swiglu", "scale_embeddings": False},
    "average attention": {"decoder_self_attention": "average"},
    "average attention, gate alone": {
        "decoder_self_attention": "average",
        "average_ffn": False,
        "attention_bias": True,
        "pre_norm": True,
    },
    "average attention, network alone": {"decoder_self_attention": "average", "average_gate": False},
    "SSRU": {"decoder_self_attention": "ssru", "zero_bos": True},
    "SSRU with norms": {"decoder_self_attention": "ssru", "ssru_norm": True, "pre_norm": True},
    "no feed-forward networks": {"decoder_ffn": "none"},
    "tied layers": {"decoder_tied_layers": (5, 5)},
}
variants = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)


def model_of(joint: bool = True, **changes: Any) -> Transformer:
    vocabulary = Vocabulary(source=SIZE if joint else SIZE + 4, target=SIZE, joint=joint)
    return tiny_transformer(vocabulary, seed=7, **{"encoder_layers": 2, **changes}).train()


def sentences(*lengths: int, seed: int = 1) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    return Packed.from_lists([torch.randint(3, SIZE, (length,), generator=generator).tolist() for length in lengths])


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


# Vocabularies


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


# Section 3.1: the whole against a Transformer written out in float64


def by_hand(model: Transformer, source: list[int], target: list[int]) -> Tensor:
    """Features of one sentence, straight from the formulas of section 3, in float64."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    config = model.config

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def heads(x: Tensor, width: int) -> list[Tensor]:
        return list(x.split(width, -1))

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        result = []
        parts = zip(
            heads(query, config.key_width), heads(key, config.key_width), heads(value, config.value_width), strict=True
        )
        for q, k, v in parts:
            scores = q @ k.T / math.sqrt(config.key_width)
            if causal:
                scores = scores + torch.full_like(scores, -math.inf).triu(1)
            result.append(scores.softmax(-1) @ v)
        return torch.cat(result, -1)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def average_attention(name: str, x: Tensor) -> Tensor:
        past = torch.stack([x[: length + 1].sum(0) / (length + 1) for length in range(len(x))])
        past = feed_forward(f"{name}.feed_forward", past) if config.average_ffn else past
        if not config.average_gate:
            return past
        gates = torch.cat([x, past], -1) @ weights[f"{name}.gate.weight"].T + weights.get(f"{name}.gate.bias", 0.0)
        gates = 1 / (1 + torch.exp(-gates))
        return gates[:, : config.d_model] * x + gates[:, config.d_model :] * past

    def scaled_norm(x: Tensor, scale: Tensor) -> Tensor:
        variance = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) / (variance + config.norm_eps).sqrt() * scale

    def ssru(name: str, x: Tensor) -> Tensor:
        values, forgets = (x @ weights[f"{name}.{part}.weight"].T for part in ("proj", "forget_proj"))
        if config.ssru_norm:
            values = scaled_norm(values, weights[f"{name}.norm.weight"])
            forgets = scaled_norm(forgets, weights[f"{name}.forget_norm.weight"])
        forgets = forgets + weights[f"{name}.forget_{'norm' if config.ssru_norm else 'proj'}.bias"]
        cell, outputs = torch.zeros(config.d_model, dtype=torch.float64), []
        for v, f in zip(values, forgets, strict=True):
            share = 1 / (1 + torch.exp(-f))
            cell = share * cell + (1 - share) * v
            outputs.append(cell.clamp(min=0))
        return torch.stack(outputs)

    def self_attention(name: str, causal: bool, x: Tensor) -> Tensor:
        if causal and config.decoder_self_attention != "attention":
            return {"average": average_attention, "ssru": ssru}[config.decoder_self_attention](name, x)
        width = config.heads * config.key_width
        parts = [width, width, config.heads * config.value_width]
        query, key, value = linear(f"{name}.qkv_proj", x).split(parts, -1)
        return linear(f"{name}.out_proj", attend(query, key, value, causal))

    def cross_attention(memory: Tensor, name: str, x: Tensor) -> Tensor:
        parts = [config.heads * config.key_width, config.heads * config.value_width]
        key, value = linear(f"{name}.kv_proj", memory).split(parts, -1)
        return linear(f"{name}.out_proj", attend(linear(f"{name}.q_proj", x), key, value, False))

    def activation(x: Tensor) -> Tensor:
        return {
            "re": lambda: x.clamp(min=0),
            "ge": lambda: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
            "sw": lambda: x / (1 + torch.exp(-x)),
        }[config.activation[:2]]()

    def feed_forward(name: str, x: Tensor) -> Tensor:
        inner = linear(f"{name}.fc1", x)
        if config.activation.endswith("glu"):
            gate, inner = inner.split(config.d_ff, -1)
            inner = activation(gate) * inner
        else:
            inner = activation(inner)
        return linear(f"{name}.fc2", inner)

    def residual(x: Tensor, name: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if config.pre_norm:
            return x + sublayer(norm(x, name))
        return norm(x + sublayer(x), name)

    def position(at: int, column: int) -> float:
        pairs = config.d_model // 2
        if config.positions == "sinusoidal":
            pair, sine = divmod(column, 2)
        else:
            sine, pair = divmod(column, pairs)
        power = pair / (pairs - 1) if config.positions == "sinusoidal_fairseq" else pair / pairs
        angle = (at + config.position_offset) / 10000**power
        return math.cos(angle) if sine else math.sin(angle)

    def embed(side: str, tokens: list[int]) -> Tensor:
        x = weights[f"{side}_embedding.tokens.weight"][tokens]
        x = x * math.sqrt(config.d_model) if config.scale_embeddings else x
        x = torch.cat([torch.zeros_like(x[:1]), x[1:]]) if config.zero_bos and side == "target" else x
        if config.positions == "learned":
            x = x + weights[f"{side}_embedding.positions.weight"][: len(tokens)]
        else:
            table = [[position(at, column) for column in range(config.d_model)] for at in range(len(tokens))]
            x = x + torch.tensor(table, dtype=torch.float64)
        return norm(x, f"{side}_embedding.norm") if config.embedding_norm else x

    memory = embed("source", source)
    for layer in (f"encoder.{index}" for index in range(config.encoder_layers)):
        memory = residual(
            memory, f"{layer}.self_attention_norm", partial(self_attention, f"{layer}.self_attention", False)
        )
        memory = residual(memory, f"{layer}.feed_forward_norm", partial(feed_forward, f"{layer}.feed_forward"))
    memory = norm(memory, "encoder_norm") if config.pre_norm else memory
    x = embed("target", target)
    for layer in (f"decoder.{index}" for index in range(config.decoder_layers)):
        x = residual(x, f"{layer}.self_attention_norm", partial(self_attention, f"{layer}.self_attention", True))
        x = residual(x, f"{layer}.cross_attention_norm", partial(cross_attention, memory, f"{layer}.cross_attention"))
        if config.decoder_ffn == "all":
            x = residual(x, f"{layer}.feed_forward_norm", partial(feed_forward, f"{layer}.feed_forward"))
    return norm(x, "decoder_norm") if config.pre_norm else x


@pytest.mark.parametrize("changes", [v for v in VARIANTS.values() if "window" not in v])
def test_the_model_is_section_3_written_out(changes: dict[str, Any]) -> None:
    model = model_of(**changes).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, which begin as ones and zeros
            nn.init.normal_(parameter, mean=0.5)
    vocabulary_weight = model.target_embedding.tokens.weight
    assert (model.output_projection.weight is vocabulary_weight) == model.config.tie_output
    source, target = sentences(6, 3), sentences(4, 9, seed=2)
    features = target.with_values(model(source, target)).split()
    for ours, ids, prefix in zip(features, source.split(), target.split(), strict=True):
        torch.testing.assert_close(ours.double(), by_hand(model, ids.tolist(), prefix.tolist()), rtol=1e-5, atol=2e-5)


# Contracts


@variants
def test_cached_steps_equal_the_full_forward(changes: dict[str, Any]) -> None:
    model = model_of(**changes).eval()
    with torch.no_grad():
        memory = model.encode(sentences(4, 7, 2))
        state, plain = model.start(memory, 2), PrefixState(memory, 2)
        for column in sentences(*[11] * 6, seed=9).to_padded().unbind(1):
            column = column if plain.prefixes.shape[1] else torch.ones_like(column)  # a search begins with bos
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
    """A batch of fixed shape ends in a dummy sentence; its `max_length` is only a bound."""
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
    """The weights of the first encoder layer, applied to its values, are what the layer goes on with."""
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


# Modules that a plug-in replaces


def test_dropout_modules_of_a_plug_in_are_called_in_training_and_evaluation() -> None:
    class Constant(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model, source = model_of().train(), sentences(4)
    before = model.encode(source).values
    for layer in model.encoder:
        layer.dropout = Constant()
    assert not torch.allclose(model.encode(source).values, before)
    for layer in model.encoder:
        layer.dropout = Dropout(0.5)
    model.eval()
    evaluated = model.encode(source).values
    for layer in model.encoder:
        layer.dropout.train()  # Monte Carlo dropout
    assert not torch.allclose(model.encode(source).values, evaluated)


# Training options


def loss_and_gradients(model: Transformer) -> tuple[Tensor, list[Tensor | None]]:
    source, target = sentences(4, 9), sentences(5, 7, seed=2)
    loss, _ = output_cross_entropy(model.output_projection, model(source, target), target.values, 0.1)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@variants
def test_every_parameter_gets_a_gradient(changes: dict[str, Any]) -> None:
    _, gradients = loss_and_gradients(model_of(**changes))
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_gradient_checkpointing_changes_no_number() -> None:
    results = []
    for checkpointed in (False, True):
        model = model_of(
            dropout=0.2, attention_dropout=0.2, activation_dropout=0.2, gradient_checkpointing=checkpointed
        )
        torch.manual_seed(3)
        results.append(loss_and_gradients(model))
    (loss, gradients), (again, recomputed) = results
    assert torch.equal(loss, again)
    for one, other in zip(gradients, recomputed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_dropped_layers_are_those_of_the_draw() -> None:
    model = model_of(encoder_layerdrop=0.5, decoder_layerdrop=0.3, dropout=0.0)
    drops, rounds = torch.zeros(4), 2000
    generator = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        model.begin_update(generator)
        drops += torch.tensor([index in model.dropped for index in range(4)])
    torch.testing.assert_close(drops / rounds, torch.tensor([0.5, 0.5, 0.3, 0.3]), atol=0.05, rtol=0)


def test_the_draw_of_layers_depends_on_the_generator_alone() -> None:
    draws = []
    for noise in (1, 2):
        model = model_of(encoder_layerdrop=0.5, decoder_layerdrop=0.5)
        torch.manual_seed(noise)
        model.begin_update(torch.Generator().manual_seed(11))
        draws.append([index in model.dropped for index in range(4)])
    assert draws[0] == draws[1]


def test_a_dropped_layer_passes_its_input_on_while_training_alone() -> None:
    model = model_of(dropout=0.0)
    source = sentences(4, 9)
    shorter = copy.deepcopy(model)
    shorter.encoder = nn.ModuleList([model.encoder[1]])
    whole = model.encode(source).values
    model.dropped = frozenset([0])
    torch.testing.assert_close(model.encode(source).values, shorter.encode(source).values)
    torch.testing.assert_close(model.eval().encode(source).values, whole)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_layerdrop_compiles_once_for_every_draw(checkpointed: bool) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    drops = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5, "gradient_checkpointing": checkpointed}
    eager, counter = model_of(dropout=0.0, **drops), CompileCounter()
    compiled = copy.deepcopy(eager)
    compiled.compile(backend=counter)
    patterns = set()
    for seed in range(8):
        results = []
        for model in (eager, compiled):
            model.begin_update(torch.Generator().manual_seed(seed))
            features = model(sentences(4, 6), sentences(5, 3, seed=2))
            (gradient,) = torch.autograd.grad(features.square().sum(), model.output_projection.weight)
            results.append((features.detach(), gradient))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        patterns.add(tuple(compiled.kept.tolist()))
    assert len(patterns) > 4 and counter.frame_count == 1


def test_attention_dropout_falls_while_training_alone() -> None:
    model = model_of(dropout=0.0, attention_dropout=0.5)
    source, target = sentences(4, 9), sentences(5, 7, seed=2)
    first, second = (model(source, target) for _ in range(2))
    assert not torch.allclose(first, second)
    plain = model_of(dropout=0.0)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval()(source, target), plain.eval()(source, target))


def test_bfloat16_autocast_stays_near_float32() -> None:
    model = model_of(dropout=0.0)
    loss, gradients = loss_and_gradients(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        near, rounded = loss_and_gradients(model)
    assert near.item() == pytest.approx(loss.item(), rel=0.01)
    errors = []
    for one, other in zip(gradients, rounded, strict=True):
        assert one is not None and other is not None and other.dtype == torch.float32
        errors.append(float((one - other).norm() / one.norm()))
    assert max(errors) < 0.3 and sum(errors) < 0.08 * len(errors)  # what torch's own autocast leaves: 0.14, 0.036


@pytest.mark.slow
def test_the_whole_model_is_one_graph_to_the_compiler() -> None:
    """Dynamo finds no graph break, and the graph, run eagerly, computes the same."""
    torch._dynamo.reset()
    model = model_of().eval()
    source, target = sentences(4, 6), sentences(5, 3, seed=2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def whole(source: Tensor, lengths: Tensor, target: Tensor, target_lengths: Tensor) -> Tensor:
        return compiled(Packed(source, Layout(lengths, 6, 10)), Packed(target, Layout(target_lengths, 5, 8)))

    result = whole(source.values, source.layout.lengths, target.values, target.layout.lengths)
    torch.testing.assert_close(result, model(source, target), rtol=1e-5, atol=1e-5)


# Configurations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "--d-model 512 is not a multiple of --heads 3; give --d-key and --d-value"),
        ({"heads": 3, "d_key": 8}, "not a multiple of --heads 3"),
        ({"dropout": 1.0}, "--dropout is 1.0; it must be at least 0 and below 1"),
        ({"encoder_layerdrop": -0.1}, "--encoder-layerdrop is -0.1"),
        ({"encoder_layers": -1}, "--encoder-layers is -1; it must be at least 0"),
        ({"window": 0}, "--window is 0; it must be at least 1"),
        ({"ssru_norm": True}, "--ssru-norm needs --decoder-self-attention ssru, not attention"),
        ({"average_gate": False}, "--no-average-gate needs --decoder-self-attention average, not attention"),
        (
            {"average_ffn": False, "decoder_self_attention": "ssru"},
            "--no-average-ffn needs --decoder-self-attention average, not ssru",
        ),
        ({"decoder_tied_layers": (1, 1)}, "has 2 numbers, and there are 6 decoder layers; give one number for each"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**changes)


def test_tied_layers_share_all_weights_and_keep_states_of_their_own() -> None:
    model = model_of(decoder_layers=4, decoder_tied_layers=(1, 1, 2, 1), decoder_self_attention="ssru")
    assert model.decoder[0] is model.decoder[1] is model.decoder[3] is not model.decoder[2]
    single = model_of(decoder_layers=2, decoder_self_attention="ssru")
    assert parameter_count(model) == parameter_count(single)
    assert len(model.start(model.encode(sentences(3)), 1).states) == 4
