"""Imported models of Marian give the translations and scores of Marian.

marian/ has small models that Marian trained, and their translations; make_marian.py makes the files. If PYMARIAN names
the program, other lines are compared live: lines of Multi30k for the model that knows their letters, if MULTI30K names
its folder.
"""

import gzip
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from make_marian import FOLDER, KINDS, SEARCHES, translations

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.demo.run import read_corpus
from nmtkit.models import checkpoint
from nmtkit.models.formats import detect, marian
from nmtkit.translation.translator import Translator


def compare(folder: Path, expected: list[dict[str, Any]], temporary: Path) -> None:
    path = temporary / "imported.pt"
    checkpoint_file.save(path, detect.load(folder))
    translator = Translator.load(path)
    for name, beam in SEARCHES.items():
        found = translator.translate(
            [line["source"] for line in expected], beam=beam, lenpen=0.0, max_len_a=3, keep_loops=True
        )
        assert [translation.text for translation in found] == [line[name]["text"] for line in expected]
        for line, translation in zip(expected, found, strict=True):  # Marian prints six digits of a score
            assert translation.hypotheses[0].score == pytest.approx(line[name]["score"], rel=5e-6, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_model_translates_as_marian_did(kind: str, tmp_path: Path) -> None:
    expected = [line for line in json.loads((FOLDER / kind / "expected.json").read_text()) if ends(line)]
    assert len(expected) >= 150
    compare(FOLDER / kind, expected, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_translations_and_scores_are_those_of_marian(kind: str, tmp_path: Path) -> None:
    program = os.environ.get("PYMARIAN") or pytest.skip("PYMARIAN names no program")
    if "MULTI30K" in os.environ and kind == "spm":
        with gzip.open(Path(os.environ["MULTI30K"]) / "test_2016_flickr.en.gz", "rt") as lines:
            sources = [line.rstrip("\n") for line in lines][:200]
    else:
        sources = [english for english, _ in read_corpus()["test"][200:]]
    expected = [line for line in translations(program, FOLDER / kind, sources) if ends(line)]
    assert len(expected) >= 100
    compare(FOLDER / kind, expected, tmp_path)


def ends(line: dict[str, Any]) -> bool:
    """Returns whether all searches ended by themselves. The two programs cut off at different lengths."""
    texts = [line[name]["text"] for name in SEARCHES]
    return all(text.endswith((".", "?", "!")) and len(text) < 2 * len(line["source"]) for text in texts)


def test_the_model_file_alone_is_imported_too(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["import", str(FOLDER / "spm" / "model.npz"), str(tmp_path / "model.pt")])
    assert result.exit_code == 0, result.output
    alone, folder = checkpoint.load(tmp_path / "model.pt"), detect.load(FOLDER / "spm")
    assert all(bool((tensor == folder["model"][name]).all()) for name, tensor in alone["model"].items())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("type: transformer", "type: s2s", "has type s2s"),
        ("transformer-ffn-activation: relu", "transformer-ffn-activation: tanh", "transformer-ffn-activation 'tanh'"),
        ("transformer-decoder-autoreg: self-attention", "transformer-decoder-autoreg: rnn", "dec-cell 'gru'"),
        (
            "transformer-decoder-autoreg: self-attention",
            "transformer-decoder-autoreg: state-space",
            "autoreg state-space, .*self-attention and rnn and average-attention",
        ),
        (
            "transformer-decoder-autoreg: self-attention",
            "transformer-decoder-autoreg: average-attention",
            "transformer-dim-aan 2048; .*64",
        ),
        (
            "transformer-decoder-autoreg: self-attention",
            "transformer-aan-depth: 3\ntransformer-decoder-autoreg: average-attention",
            "transformer-aan-depth 3; .*1 and 2",
        ),
        ('transformer-preprocess: ""', "transformer-preprocess: n", "transformer-preprocess 'n'"),
        (
            "transformer-tied-layers:\n  []",
            "transformer-tied-layers:\n  - 1\n  - 1",
            "has weights decoder_l2_",
        ),
        ("transformer-tied-layers:\n  []", "transformer-tied-layers: a b", "transformer-tied-layers a b"),
        ("transformer-decoder-dim-ffn: 0", "transformer-decoder-dim-ffn: 96", "transformer-decoder-dim-ffn 96"),
        ("enc-depth: 2", "enc-depth: 3", "has no weights encoder_l3_self_Wq"),
        ("dec-depth: 2\n", "", "model.npz: dec-depth is missing"),
    ],
)
def test_what_nmtkit_cannot_compute_is_refused_by_its_setting(old: str, new: str, message: str, tmp_path: Path) -> None:
    def change(text: str) -> str:
        assert f"\n{old}" in text
        return text.replace(f"\n{old}", f"\n{new}", 1)

    with pytest.raises(ValueError, match=message):
        marian.load(changed(change, tmp_path))


def changed(change: Callable[[str], str], folder: Path) -> Path:
    """Returns a copy of a model with other settings."""
    shutil.copytree(FOLDER / "spm", folder, dirs_exist_ok=True)
    with np.load(folder / "model.npz") as arrays:
        weights = {name: arrays[name] for name in arrays.files}
    text = change(weights[marian.SETTINGS].tobytes().rstrip(b"\0").decode())
    weights[marian.SETTINGS] = np.frombuffer(text.encode() + b"\0", dtype=np.int8)
    np.savez(folder / "model.npz", **weights)
    return folder


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "spm", tmp_path, dirs_exist_ok=True)
    contents = (tmp_path / "model.npz").read_bytes()
    (tmp_path / "model.npz").write_bytes(contents[: len(contents) // 2])
    with pytest.raises(ValueError, match=r"model\.npz .*damaged"):
        detect.load(tmp_path)
    (tmp_path / "vocab.spm").unlink()
    (tmp_path / "model.npz").write_bytes(contents)
    with pytest.raises(FileNotFoundError, match=r"vocab\.spm: no such file"):
        detect.load(tmp_path)
    (tmp_path / "model.npz.decoder.yml").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.npz\.decoder\.yml: no such file"):
        detect.load(tmp_path / "model.npz")


def test_a_vector_in_place_of_a_matrix_is_named_without_a_warning_of_torch(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "spm", tmp_path, dirs_exist_ok=True)
    with np.load(tmp_path / "model.npz") as arrays:
        weights = {name: arrays[name] for name in arrays.files}
    weights["encoder_l1_self_Wo"] = weights["encoder_l1_self_Wo"].flatten()
    np.savez(tmp_path / "model.npz", **weights)
    with warnings.catch_warnings(), pytest.raises(ValueError, match=r"self_attention\.out_proj"):
        warnings.simplefilter("error")
        detect.load(tmp_path)


def test_yaml_is_read_as_marian_writes_it() -> None:
    lines = ["a: 1", '"\\\\": 2', "'''': 3", '"\\xa0\\"": 4', ",: 5", "list:", "  - x", '  - "y z"', "empty:", "  []"]
    lines += ["flow: [1, 2]", '"k: v": 6']
    found = marian.parse("\n".join(lines), Path("file.yml"))
    assert found == {
        "a": "1", "\\": "2", "'": "3", '\xa0"': "4", ",": "5", "list": ["x", "y z"], "empty": [], "flow": ["1", "2"],
        "k: v": "6",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"file\.yml, line 1"):
        marian.parse("{", Path("file.yml"))


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ('["a,b.spm", "c.spm"]', ["a,b.spm", "c.spm"]),
        ("['it''s, a', b, \"\\\",\"]", ["it's, a", "b", '",']),
        ("[it's, don't]", ["it's", "don't"]),
        ("[ a , 'b' ,]", ["a", "b"]),
        ("[]", []),
    ],
)
def test_a_comma_in_quotes_is_part_of_an_item(text: str, items: list[str]) -> None:
    assert marian.parse(f"vocabs: {text}", Path("file.yml")) == {"vocabs": items}


def test_only_spaces_and_tabs_surround_a_piece_in_yaml() -> None:
    pieces = ["\u3000", "a\xa0", "\u202fa", "a", "\u2003:", "\x85"]
    lines = [f"{piece}: {id}\r" for id, piece in enumerate(pieces)]
    found = marian.parse("\n".join([*lines, "b \t:\t 6 ", "list:", "- \xa0 "]), Path("file.yml"))
    assert found == {piece: str(id) for id, piece in enumerate(pieces)} | {"b": "6", "list": ["\xa0"]}
