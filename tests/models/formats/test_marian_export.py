"""A Transformer that is exported for Marian translates alike there, and is the same model after an import.

marian/exported has a checkpoint, and the translations of its export by Marian (make_marian.py). If PYMARIAN names the
program, other models are exported and compared live, on lines of Multi30k if MULTI30K names its folder.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import REAL_LINES, save_ending_transformer, save_transformer, tiny_tokenizer, tiny_transformer
from click.testing import CliRunner
from make_huggingface import real_lines
from make_marian import EXPORTED, SEARCHES, translations

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.spm_model import pieces_of, renumbered
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import BOS, Tokenizer
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint, to_checkpoint, vocabulary_of
from nmtkit.models.formats import marian
from nmtkit.models.formats.marian_export import save, to_marian
from nmtkit.translation.translator import Translation, Translator

VARIANTS = {
    "default": {},
    "marian": {"activation": "swish", "attention_bias": True, "output_bias": True, "norm_eps": 1e-6},
    "two matrices": {"share_embeddings": False, "activation": "gelu"},
    "three matrices": {"share_embeddings": False, "tie_output": False},
    "own output": {"tie_output": False, "output_bias": True},
    "tied decoder layers": {"decoder_tied_layers": (1, 1)},
    "zero bos": {"zero_bos": True, "embedding_norm": True},
    "SSRU": {"decoder_self_attention": "ssru", "zero_bos": True, "norm_eps": 1e-6},
    "average attention": {
        "decoder_self_attention": "average",
        "average_separate_gates": True,
        "zero_bos": True,
        "norm_eps": 1e-6,
    },
    "average attention, network alone": {
        "decoder_self_attention": "average",
        "average_gate": False,
        "zero_bos": True,
        "norm_eps": 1e-6,
    },
    "average attention, gate alone": {
        "decoder_self_attention": "average",
        "average_separate_gates": True,
        "average_ffn": False,
        "zero_bos": True,
        "norm_eps": 1e-6,
    },
    "SSRU with norms, tied": {
        "decoder_self_attention": "ssru",
        "ssru_norm": True,
        "zero_bos": True,
        "decoder_tied_layers": (1, 1),
        "norm_eps": 1e-6,
    },
}


def translate(path: Path, lines: list[str], beam: int) -> list[Translation]:
    return Translator.load(path).translate(lines, beam=beam, lenpen=0.0, max_len_a=3, keep_loops=True)


def export(path: Path, folder: Path) -> Path:
    result = CliRunner().invoke(main, ["export", "--format", "marian", str(path), str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.slow
def test_marian_translates_with_an_export_as_nmtkit_does(tmp_path: Path) -> None:
    expected = json.loads((EXPORTED / "expected.json").read_text())
    again = tmp_path / "again.pt"
    checkpoint_file.save(again, marian.load(export(EXPORTED / "model.pt", tmp_path / "folder")))
    for path in (EXPORTED / "model.pt", again):
        for name, beam in SEARCHES.items():
            found = translate(path, [line["source"] for line in expected], beam)
            assert [translation.text for translation in found] == [line[name]["text"] for line in expected]
            for line, translation in zip(expected, found, strict=True):
                assert translation.hypotheses[0].score == pytest.approx(line[name]["score"], rel=5e-5, abs=1e-4)
    assert len({line["beam"]["text"] for line in expected}) > 30


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_translations_and_scores_are_those_of_marian(changes: dict[str, object], tmp_path: Path) -> None:
    program = os.environ.get("PYMARIAN") or pytest.skip("PYMARIAN names no program")
    path = save_ending_transformer(tmp_path / "model.pt", positions="sinusoidal_fairseq", **changes)
    folder, lines = export(path, tmp_path / "folder"), real_lines(200)
    expected = translations(program, folder, lines)
    for name, beam in SEARCHES.items():
        same = better = 0
        for line, translation in zip(expected, translate(path, lines, beam), strict=True):
            score = translation.hypotheses[0].score
            if translation.text == line[name]["text"]:
                assert score == pytest.approx(line[name]["score"], rel=5e-5, abs=2e-4)
                same += 1
            elif beam > 1 and score > line[name]["score"]:  # Marian narrows its beam when a hypothesis ends
                better += 1
            else:  # a hypothesis that does not end: the two programs cut off at different lengths
                assert len(translation.hypotheses[0].pieces) > 30
        assert same > 0.75 * len(lines) and better < 0.03 * len(lines)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_export_and_import_give_the_same_probabilities(changes: dict[str, object], tmp_path: Path) -> None:
    path, again = save_transformer(tmp_path / "model.pt", positions="sinusoidal_fairseq", **changes), tmp_path / "2.pt"
    checkpoint_file.save(again, marian.load(export(path, tmp_path / "folder")))
    (before, tokenizer), (after, other) = from_checkpoint(path), from_checkpoint(again)
    assert before.target_embedding.tokens.weight[BOS].any() and not after.target_embedding.tokens.weight[BOS].any()
    pieces = {piece: id for id, piece in enumerate(other.target_pieces(range(other.target_size)))}
    pieces["<s>"] = pieces[f"<unused {BOS}>"]  # the entry <s> of Marian is not the decoder's first token there
    ids = [pieces[piece] for piece in tokenizer.target_pieces(range(tokenizer.target_size))]  # in `after`
    source, target = (
        side.split() for side in (tokenizer.encode_source(REAL_LINES), tokenizer.encode_target(REAL_LINES))
    )
    found = []
    for model, bos, id_of in ((before, BOS, list(range(len(ids)))), (after, BOS, ids)):
        sources = Packed.from_lists([[id_of[token] for token in line] for line in source], "cpu")
        inputs = Packed.from_lists([[bos, *(id_of[token] for token in line[:-1])] for line in target], "cpu")
        with torch.inference_mode():
            found.append(model.output_projection(model(sources, inputs)).log_softmax(-1)[:, id_of])
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-4)


def test_two_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizer().source_model, train_model(REAL_LINES, 350))
    model = tiny_transformer(vocabulary_of(tokenizer), positions="sinusoidal_fairseq", sharpness=2.0)
    path = tmp_path / "model.pt"
    checkpoint_file.save(path, to_checkpoint(model, "transformer_tiny", model.config, tokenizer, [], 7))
    folder = export(path, tmp_path / "folder")
    assert "vocabs: [source.spm, target.spm]" in (folder / "decoder.yml").read_text()
    checkpoint_file.save(tmp_path / "again.pt", marian.load(folder))
    again = marian.load(folder)
    assert [len(again["model"][f"{side}_embedding.tokens.weight"]) for side in ("source", "target")] == [331, 351]


def test_a_model_card_stands_beside_the_weights(tmp_path: Path) -> None:
    path = save_transformer(tmp_path / "model.pt", positions="sinusoidal_fairseq")
    contents = checkpoint.load(path)
    checkpoint_file.save(path, contents | {"scores": {"bleu": 31.25}, "run": {"command": "nmtkit train data-bin"}})
    card = (export(path, tmp_path / "folder") / "README.md").read_text()
    assert "31.25" in card and "nmtkit train data-bin" in card and "pymarian decode -c decoder.yml" in card


def test_every_setting_that_marian_lacks_is_named_with_what_to_train_with(tmp_path: Path) -> None:
    path = save_transformer(tmp_path / "model.pt", pre_norm=True, window=3)
    with pytest.raises(ValueError, match=r"positions sinusoidal, pre_norm True, window 3") as caught:
        save(path, tmp_path / "folder")
    assert "--positions sinusoidal_fairseq --no-pre-norm --window none" in str(caught.value)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(("kind", "name"), [("ssru", "an SSRU"), ("average", "average attention")])
def test_replacements_of_self_attention_need_a_start_from_zeros(kind: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"zeros, .*{name} .*--zero-bos"):
        to_marian(tiny_transformer(decoder_self_attention=kind))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "--average-separate-gates or --no-average-gate"),
        ({"average_gate": False, "d_model": 16, "d_ff": 16}, "d_ff 16 and d_model 16; .*--d-ff"),
    ],
    ids=["joint gates", "square network"],
)
def test_average_attention_that_marian_lacks_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    changes |= {"decoder_self_attention": "average", "zero_bos": True, "positions": "sinusoidal_fairseq"}
    path = save_transformer(tmp_path / "model.pt", **changes)
    with pytest.raises(ValueError, match=message):
        save(path, tmp_path / "folder")


def test_normalised_embeddings_need_a_start_from_zeros() -> None:
    model = tiny_transformer(embedding_norm=True)
    with pytest.raises(ValueError, match="embedding of bos"):
        to_marian(model)
    with torch.no_grad():
        model.target_embedding.tokens.weight[BOS] = 0
    assert not to_marian(model)["Wemb"][BOS].any()


def test_a_model_of_several_languages_is_refused(tmp_path: Path) -> None:
    from make_huggingface import FOLDER

    from nmtkit.models.formats import detect

    contents = detect.load(FOLDER / "m2m_100")
    config = contents["config"] | {"pre_norm": False, "position_offset": 0, "scale_embeddings": True}
    model = {
        name: tensor for name, tensor in contents["model"].items() if not name.startswith(("encoder_n", "decoder_n"))
    }
    checkpoint_file.save(tmp_path / "model.pt", contents | {"config": config, "model": model})
    with pytest.raises(ValueError, match="is multilingual"):
        save(tmp_path / "model.pt", tmp_path / "folder")


def test_two_bpe_models_over_one_table_are_refused(tmp_path: Path) -> None:
    models = tiny_tokenizer().source_model, train_model(REAL_LINES, 350)
    rest = {piece.text for model in models for piece in pieces_of(model)[3:]}
    tokenizer = Tokenizer(*(renumbered(model, ["<unk>", "<s>", "</s>", *sorted(rest)]) for model in models))
    model = tiny_transformer(vocabulary_of(tokenizer), positions="sinusoidal_fairseq")
    checkpoint_file.save(
        tmp_path / "model.pt", to_checkpoint(model, "transformer_tiny", model.config, tokenizer, [], 7)
    )
    with pytest.raises(ValueError, match="two BPE models"):
        save(tmp_path / "model.pt", tmp_path / "folder")
