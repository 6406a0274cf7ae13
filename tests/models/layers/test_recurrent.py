import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.layers.recurrent import (
    AdditiveAttention,
    AttentionLSTM,
    PackedLSTM,
    ProductAttention,
    lstm_cell,
    reversal,
)


def layout_of(*lengths: int) -> Layout:
    return Layout.of(torch.tensor(lengths))


def test_reversal_mirrors_each_sentence() -> None:
    assert reversal(layout_of(3, 1, 2)).tolist() == [2, 1, 0, 3, 5, 4]


@pytest.mark.parametrize("projection", [0, 3])
def test_both_directions_equal_torchs_packed_sequences(projection: int) -> None:
    torch.manual_seed(1)
    layout = layout_of(4, 1, 6)
    x = torch.randn(11, 5)
    both = nn.LSTM(5, 7, bidirectional=True, proj_size=projection)
    expected, _ = both(pack_sequence(x.split([4, 1, 6]), enforce_sorted=False))
    expected = torch.cat(unpack_sequence(expected))
    width = projection or 7
    for reverse in (False, True):
        ours = PackedLSTM(5, 7, reverse=reverse, projection=projection)
        for name, parameter in ours.lstm.named_parameters():
            parameter.data = both.get_parameter(name + ("_reverse" if reverse else "")).data
        part = expected[:, width:] if reverse else expected[:, :width]
        torch.testing.assert_close(ours(x, layout), part)


def test_cell_equals_torchs() -> None:
    torch.manual_seed(1)
    cell = nn.LSTMCell(4, 6)
    x, h, c = torch.randn(3, 4), torch.randn(3, 6), torch.randn(3, 6)
    gates = x @ cell.weight_ih.T + h @ cell.weight_hh.T + cell.bias_ih + cell.bias_hh
    for ours, torchs in zip(lstm_cell(gates, c), cell(x, (h, c)), strict=True):
        torch.testing.assert_close(ours, torchs)


def test_additive_attention_is_the_formula() -> None:
    torch.manual_seed(1)
    attention = AdditiveAttention(4, 5, 6)
    query, memory = torch.randn(2, 3, 4), torch.randn(2, 7, 5)
    scores = attention.scores(query, attention.keys(memory))
    hidden = torch.tanh(attention.q_proj(query[1, 2]) + attention.k_proj.weight @ memory[1, 4])
    torch.testing.assert_close(scores[1, 2, 4], attention.v.weight[0] @ hidden)


def test_product_attention_is_the_formula() -> None:
    torch.manual_seed(1)
    attention = ProductAttention(4, 5, 6)
    query, memory = torch.randn(2, 3, 4), torch.randn(2, 7, 5)
    scores = attention.scores(query, attention.keys(memory))
    left = torch.tanh(attention.q_proj.weight @ query[1, 2])
    right = torch.tanh(attention.k_proj.weight @ memory[1, 4])
    torch.testing.assert_close(scores[1, 2, 4], sum(attention.v * left * right))


def test_attention_lstm_queries_with_its_last_output() -> None:
    """Computes the layer token by token, with torch's cell and the context appended to its input."""
    torch.manual_seed(1)
    layer = AttentionLSTM(3, 4, AdditiveAttention(4, 5, 6), 5)
    layout, source = layout_of(4, 2), layout_of(3, 7)
    x, memory = torch.randn(6, 3), Packed(torch.randn(10, 5), source)
    got = layer(x, layout, memory.with_values(layer.with_keys(memory.values)).to_padded(), source.mask)
    for sentence, tokens in enumerate(x.split([4, 2])):
        values = memory.split()[sentence]
        h, c = torch.zeros(4), torch.zeros(4)
        for position, token in enumerate(tokens):
            weights = layer.attention.scores(h[None, None], layer.attention.keys(values)[None])[0, 0].softmax(-1)
            context = weights @ values
            gates = layer.input_proj(token) + layer.context_proj(context) + layer.recurrent_proj(h)
            i, f, g, o = gates.split(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            row = sentence * 4 + position
            torch.testing.assert_close(got.output[row], h)
            torch.testing.assert_close(got.context[row], context)
            torch.testing.assert_close(got.input_gates[row], layer.input_proj(token) + layer.context_proj(context))
            torch.testing.assert_close(got.weights[sentence, position, : len(values)], weights)
