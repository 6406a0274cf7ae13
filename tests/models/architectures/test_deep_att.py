"""Deep-Att against section 3 written out, one sentence and one token at a time."""

from pathlib import Path

import torch
from builders import write_corpus
from torch import Tensor

from nmtkit.cli import main
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import UNK
from nmtkit.models.architectures import Vocabulary
from nmtkit.models.architectures.deep_att import DeepAtt, DeepAttConfig, FastForwardStack
from nmtkit.translation.translator import Translator

H = 4
CONFIG = DeepAttConfig(
    encoder_layers=3, decoder_layers=3, d_embedding=3, d_model=H, d_memory=6, d_attention=5, dropout=0.1
)


def column(stack: FastForwardStack, xs: list[Tensor], starts_backwards: bool) -> list[Tensor]:
    """f^k = W^k [Half(f^{k-1}), h^{k-1}], read from alternating ends; [f, h] of the top layer."""
    for number, layer in enumerate(stack.layers):
        lstm = layer.lstm.lstm
        backwards = (number % 2 == 0) == starts_backwards and len({part.lstm.reverse for part in stack.layers}) > 1
        order = range(len(xs))[::-1] if backwards else range(len(xs))
        tops: dict[int, Tensor] = {}
        h, c = torch.zeros(H), torch.zeros(H)
        for position in order:
            f = lstm.weight_ih_l0 @ xs[position] + lstm.bias_ih_l0
            i, f_gate, g, o = (f + lstm.weight_hh_l0 @ h + lstm.bias_hh_l0).split(H)
            c = f_gate.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            tops[position] = torch.cat([f if layer is stack.layers[-1] else f[: 2 * H], h])
        xs = [tops[position] for position in range(len(xs))]
    return xs


def test_features_are_those_of_the_paper() -> None:
    torch.manual_seed(2)
    model = DeepAtt(CONFIG, Vocabulary(source=11, target=13, joint=False)).eval()
    source, target = [3, 5, 2, 7], [1, 4, 9, 12, 6]
    embedded = [model.source_embedding.weight[token] for token in source]
    first = column(model.forwards_first, embedded, starts_backwards=False)
    second = column(model.backwards_first, embedded, starts_backwards=True)
    memory = torch.stack([model.interface.weight @ torch.cat(pair) for pair in zip(first, second, strict=True)])

    h, c, above = torch.zeros(H), torch.zeros(H), []
    for token in target:
        hidden = torch.tanh(
            model.bottom_decoder.attention.q_proj(h) + memory @ model.bottom_decoder.attention.k_proj.weight.T
        )
        context = (hidden @ model.bottom_decoder.attention.v.weight[0]).softmax(0) @ memory
        f = model.bottom_decoder.input_proj(model.target_embedding.weight[token]) + model.bottom_decoder.context_proj(
            context
        )
        i, f_gate, g, o = (f + model.bottom_decoder.recurrent_proj(h)).split(H)
        c = f_gate.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        above.append(torch.cat([f[: 2 * H], h]))
    assert model.decoder is not None
    expected = torch.stack(column(model.decoder, above, starts_backwards=False))

    features = model(Packed.from_lists([source]), Packed.from_lists([target]))
    assert features.shape == (5, 5 * H)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)


def test_directions_alternate_and_the_columns_differ() -> None:
    model = DeepAtt(CONFIG, Vocabulary(source=11, target=13, joint=False))
    assert [layer.lstm.reverse for layer in model.forwards_first.layers] == [False, True, False]
    assert [layer.lstm.reverse for layer in model.backwards_first.layers] == [True, False, True]


def test_alignment_gives_every_target_token_a_source_token() -> None:
    model = DeepAtt(CONFIG, Vocabulary(source=11, target=13, joint=False)).eval()
    source, target = Packed.from_lists([[3, 5, 2], [4, 2]]), Packed.from_lists([[1, 4], [1, 6, 7, 8]])
    (weights,) = model.attention_weights(source, target)["cross"]
    assert weights.shape == (2, 1, 4, 3)  # B H L S
    assert weights[1, 0].argmax(-1).max() < 2
    assert not weights[0, 0, 2:].any() and not weights[1, 0, :, 2].any()


def test_one_layer_on_either_side_is_allowed() -> None:
    config = DeepAttConfig(encoder_layers=1, decoder_layers=1, d_embedding=3, d_model=H, d_memory=6, d_attention=5)
    model = DeepAtt(config, Vocabulary(source=9, target=9, joint=True)).eval()
    source, target = Packed.from_lists([[3, 4, 2]]), Packed.from_lists([[1, 5]])
    logits = model.output_projection(model(source, target))
    state = model.start(model.encode(source), 1)
    for position, token in enumerate([1, 5]):
        torch.testing.assert_close(model.step(torch.tensor([token]), state)[0], logits[position])


def test_unknown_words_are_replaced_by_the_words_they_attend_to(tmp_path: Path) -> None:
    """PosUnk, on a word vocabulary: a model that knows nothing but <unk> copies source words."""
    write_corpus(tmp_path / "train", 200, seed=1)
    sides = ("preprocess", "-s", "xx", "-t", "yy", "--model-type", "word", "--separate-vocab", "--vocab-size", "13")
    main([*sides, "--trainpref", str(tmp_path / "train"), "--destdir", str(tmp_path / "bin")], standalone_mode=False)
    tokenizer = Dataset.open(tmp_path / "bin").tokenizer
    model = DeepAtt(CONFIG, Vocabulary(source=tokenizer.source_size, target=tokenizer.target_size, joint=False))
    torch.nn.init.constant_(model.output_projection.bias[UNK], 100.0)
    (translation,) = Translator([model.eval()], tokenizer).translate(
        ["bado xylophon kelu"], beam=2, max_len_a=0.0, max_len_b=3, replace_unknown=True
    )
    words = translation.text.split()
    assert len(words) == 3
    assert set(words) <= {"bado", "xylophon", "kelu"}
