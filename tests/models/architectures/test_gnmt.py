"""GNMT against section 3 written out, one sentence and one token at a time."""

import torch
from torch import Tensor, nn

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Vocabulary
from nmtkit.models.architectures.gnmt import GNMT, GNMTConfig

CONFIG = GNMTConfig(encoder_layers=4, decoder_layers=4, d_model=6, d_attention=5, dropout=0.2, initial_range=0.7)


def model() -> GNMT:
    torch.manual_seed(2)
    return GNMT(CONFIG, Vocabulary(source=11, target=13, joint=False)).eval()


def run(lstm: nn.LSTM, xs: list[Tensor]) -> list[Tensor]:
    """A layer written out with torch's cell."""
    cell = nn.LSTMCell(lstm.input_size, lstm.hidden_size)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in lstm.state_dict().items()})
    state, outputs = None, []
    for x in xs:
        state = cell(x, state)
        outputs.append(state[0])
    return outputs


def test_features_are_those_of_the_paper() -> None:
    gnmt, source, target = model(), [3, 5, 2, 7], [1, 4, 9, 12, 6]
    embedded = [gnmt.source_embedding.weight[token] for token in source]
    forwards = run(gnmt.bottom_encoder.forwards.lstm, embedded)
    backwards = run(gnmt.bottom_encoder.backwards.lstm, embedded[::-1])[::-1]
    x = [torch.cat(pair) for pair in zip(forwards, backwards, strict=True)]
    x = run(gnmt.encoder.layers[0].lstm, x)  # second layer: no residual connection yet
    for layer in gnmt.encoder.layers[1:]:
        x = [a + b for a, b in zip(x, run(layer.lstm, x), strict=True)]
    memory = torch.stack(x)

    bottom, outputs, contexts = gnmt.bottom_decoder, [], []
    h, c = torch.zeros(6), torch.zeros(6)
    for token in target:
        hidden = torch.tanh(
            gnmt.bottom_decoder.attention.q_proj(h) + memory @ gnmt.bottom_decoder.attention.k_proj.weight.T
        )
        context = (hidden @ gnmt.bottom_decoder.attention.v.weight[0]).softmax(0) @ memory
        y = gnmt.target_embedding.weight[token]
        i, f, g, o = (bottom.input_proj(y) + bottom.context_proj(context) + bottom.recurrent_proj(h)).split(6)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
        contexts.append(context)
    x = outputs
    for index, layer in enumerate(gnmt.decoder.layers):
        y = run(layer.lstm, [torch.cat(pair) for pair in zip(x, contexts, strict=True)])
        x = y if index == 0 else [a + b for a, b in zip(x, y, strict=True)]

    features = gnmt(Packed.from_lists([source]), Packed.from_lists([target]))
    torch.testing.assert_close(features, torch.stack(x), rtol=1e-5, atol=1e-5)


def test_parameters_start_in_the_published_range() -> None:
    values = torch.cat([parameter.detach().flatten() for parameter in model().parameters()])
    assert 0.69 < float(values.abs().max()) <= 0.7


def test_one_layer_on_either_side_is_allowed() -> None:
    shallow = GNMT(
        GNMTConfig(encoder_layers=1, decoder_layers=1, d_model=4), Vocabulary(source=9, target=9, joint=True)
    )
    features = shallow(Packed.from_lists([[3, 4, 2]]), Packed.from_lists([[1, 5]]))
    assert features.shape == (2, 4)
