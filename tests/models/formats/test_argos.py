"""Packages of Argos Translate: files, translations as Argos Translate computes them, and refused models."""

import json
import zipfile
from pathlib import Path

import pytest
import sentencepiece
from builders import REAL_LINES, save_tiny_transformer, save_transformer, tiny_tokenizer
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.translation.translator import Translator


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", "--format", "argos", *map(str, arguments)])


def test_a_package_translates_like_the_checkpoint(tmp_path: Path) -> None:
    """The steps of `apply_packaged_translation` of Argos Translate 1.11, without its splitting into sentences."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    model = save_transformer(tmp_path / "model.pt")
    result = export(model, tmp_path / "en_de.argosmodel", "--pair", "en-de")
    assert result.exit_code == 0, result.output
    with zipfile.ZipFile(tmp_path / "en_de.argosmodel") as archive:
        archive.extractall(tmp_path / "installed")
    (package,) = (tmp_path / "installed").iterdir()
    metadata = json.loads((package / "metadata.json").read_text())
    assert {metadata[name] for name in ("from_code", "to_code", "from_name", "to_name")} == {
        "en", "de", "English", "German",
    }  # fmt: skip
    card = (package / "README.md").read_text()
    assert "argos-translate --from en --to de" in card and "--lenpen 0.28" in card
    processor = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
    translator = ctranslate2.Translator(str(package / "model"))
    pieces = [processor.encode(line, out_type=str) for line in REAL_LINES]
    never = {"disable_unk": True, "suppress_sequences": [["<s>"]], "max_decoding_length": 20}
    results = translator.translate_batch(pieces, beam_size=1, **never)
    theirs = [processor.decode_pieces(result.hypotheses[0]) for result in results]
    ours = Translator.load(model).translate(REAL_LINES, beam=1, max_len_a=0, max_len_b=20, keep_loops=True)
    assert theirs == [line.text for line in ours]


def test_the_program_itself_opens_the_package(tmp_path: Path) -> None:
    package = pytest.importorskip("argostranslate.package")  # heavy, so it is not in an extra
    assert export(save_transformer(tmp_path / "model.pt"), tmp_path / "a.argosmodel", "--pair", "en-de").exit_code == 0
    with zipfile.ZipFile(tmp_path / "a.argosmodel") as archive:
        archive.extractall(tmp_path)
    assert str(package.Package(tmp_path / "translate-en_de")) == "English → German"


def test_the_pair_must_be_known(tmp_path: Path) -> None:
    path = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())
    result = export(path, tmp_path / "a.argosmodel")
    assert result.exit_code == 2 and "--pair en-de" in result.stderr
    assert export(path, tmp_path / "a.argosmodel", "--pair", "english").exit_code == 2
    assert not (tmp_path / "a.argosmodel").exists()
    other = CliRunner().invoke(
        main, ["export", "--format", "marian", str(path), str(tmp_path / "m"), "--pair", "en-de"]
    )
    assert other.exit_code == 2 and "--pair" in other.stderr


def test_a_model_that_the_engine_lacks_leaves_no_file(tmp_path: Path) -> None:
    path = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer(), residual="deepnorm")
    result = export(path, tmp_path / "a.argosmodel", "--pair", "en-de")
    assert result.exit_code == 2 and "--residual" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
