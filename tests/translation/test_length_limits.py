"""A model with learned positions has a limit of lengths, which is checked before the first batch, for all engines."""

from pathlib import Path

import pytest
from builders import REAL_LINES, save_tiny_transformer, save_transformer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.models.building import from_checkpoint
from nmtkit.translation import translator as translator_module
from nmtkit.translation.engines import ENGINES, Decoder, TorchEngine

POSITIONS = 30
SHORT = {"max_len_a": 0.0, "max_len_b": 5, "beam": 1}
WORDS = ["All", "No one", "or to", "free and", "life", "Everyone has"]  # of at most 8 pieces


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("learned") / "model.pt"
    return save_transformer(file, positions="learned", max_positions=POSITIONS)


@pytest.fixture(params=ENGINES.names())
def model(request, path) -> nmtkit.Model:
    if request.param in ("numba", "ctranslate2"):
        pytest.importorskip(request.param)
    return nmtkit.load(path, engine=request.param, device="cpu")


def text_of(model: nmtkit.Model, pieces: int) -> str:
    """Returns a text that the tokenizer segments into this number of pieces."""
    ids = model.tokenizer.encode_target(REAL_LINES).ids.tolist()
    words = [id for id in ids if id > 2]
    for start in range(len(words) - pieces):
        text = model.tokenizer.decode_target(words[start : start + pieces])
        if model.tokenizer.encode_target([text]).ids[:-1].tolist() == words[start : start + pieces]:
            return text
    raise AssertionError(pieces)


def refuses(model: nmtkit.Model, **options: object) -> bool:
    try:
        model.translate("All", **SHORT | options)
    except ValueError as error:
        assert "--engine ctranslate2" in str(error)
        return True
    return False


def test_outputs_end_at_the_last_position(model):
    """The lengths of the options are above the positions. One position is for eos."""
    found = model.translate(WORDS, nbest=1, beam=1)
    lengths = [len(translation.hypotheses[0].pieces) for translation in found]
    assert max(lengths) == POSITIONS - 1
    torch = nmtkit.load(model._translator.paths[0], device="cpu")
    assert [each.text for each in found] == torch.translate(WORDS, beam=1)


def test_a_minimum_length_above_the_positions_is_refused(model):
    if refuses(model, min_len=1):
        return
    (hypothesis,) = model.translate("All", nbest=1, min_len=POSITIONS - 1).hypotheses
    assert len(hypothesis.pieces) == POSITIONS - 1
    with pytest.raises(ValueError, match=rf"--min-len {POSITIONS}.* {POSITIONS} positions"):
        model.translate("All", min_len=POSITIONS)


def test_constraints_that_need_more_positions_are_refused_with_their_line(model, monkeypatch):
    longest, too_long = text_of(model, POSITIONS - 1), text_of(model, POSITIONS)
    lines = [nmtkit.Request("All"), nmtkit.Request("All", prefix=longest)]
    assert model.translate(lines, **SHORT)[1] == longest
    monkeypatch.setattr(Decoder, "completed", lambda *_: pytest.fail("a batch is decoded"))
    for fields in ({"prefix": too_long}, {"required": [text_of(model, 20), text_of(model, 12)]}):
        with pytest.raises(ValueError, match=rf"line 3: .* {POSITIONS} positions"):
            model.translate([*lines, nmtkit.Request("All", **fields)], **SHORT)


def test_texts_to_score_that_need_more_positions_are_refused_with_their_line(model):
    longest, too_long = text_of(model, POSITIONS - 1), text_of(model, POSITIONS)
    assert len(model.score([longest, "All"], ["All", longest])) == 2
    with pytest.raises(ValueError, match=rf"line 2: the reference has {POSITIONS} pieces.* {POSITIONS} positions"):
        model.score(["All", "All"], ["All", too_long])
    with pytest.raises(ValueError, match=rf"line 1: the source has {POSITIONS} pieces.* {POSITIONS} positions"):
        model.score([too_long, "All"], ["All", "All"])


def test_the_lines_of_files_are_checked_before_the_first_batch(path, tmp_path, monkeypatch):
    """Windows have two lines. Of a stream, only the windows before the line are translated."""
    monkeypatch.setattr(translator_module, "WINDOW", 2)
    searched: list[int] = []
    search = TorchEngine.search

    def counted(engine, batch, *rest):
        searched.append(len(batch))
        return search(engine, batch, *rest)

    monkeypatch.setattr(TorchEngine, "search", counted)
    source, prefixes = tmp_path / "source", tmp_path / "prefixes"
    source.write_bytes(b"All\r\n" * 6)
    too_long = text_of(nmtkit.load(path, device="cpu"), POSITIONS)
    prefixes.write_text("\n" * 4 + f"{too_long}\n\n")
    flags = ["generate", "--path", str(path), "--device", "cpu", "--max-len-b", "5", "--beam", "1", "--keep-loops"]
    result = CliRunner().invoke(main, [*flags, "--input", str(source), "--prefix", str(prefixes)])
    assert result.exit_code == 2 and "line 5" in result.stderr and not searched and not result.stdout
    result = CliRunner().invoke(main, [*flags, "--prefix", str(prefixes)], input=source.read_bytes())
    assert result.exit_code == 2 and "line 5" in result.stderr and searched == [2, 2]
    prefixes.write_text("\n" * 6)
    result = CliRunner().invoke(main, [*flags, "--input", str(source), "--prefix", str(prefixes)])
    assert result.exit_code == 0 and result.stderr.count("carriage return") == 1 and result.stdout.count("\n") == 6
    references = tmp_path / "references"
    references.write_text("All\n" * 5 + f"{too_long}\n")
    flags = ["generate", "--path", str(path), "--device", "cpu", "--score-reference", "--input", str(source)]
    result = CliRunner().invoke(main, [*flags, "--reference", str(references)])
    assert result.exit_code == 2 and "line 6" in result.stderr and not result.stdout


@pytest.mark.parametrize("name", ["lm_fusion", "contrastive"])
def test_the_model_of_a_logits_processor_limits_lengths(path, tmp_path, name):
    tokenizer = from_checkpoint(path)[1]
    changes = {"encoder_layers": 0} if name == "lm_fusion" else {}
    second = tmp_path / "second.pt"
    save_tiny_transformer(second, tokenizer, positions="learned", max_positions=9, **changes)
    model = nmtkit.load(path, device="cpu")
    options = {"logits_processors": (name,), "lm" if name == "lm_fusion" else "contrast": second}
    found = model.translate(WORDS, nbest=1, **options)
    assert max(len(translation.hypotheses[0].pieces) for translation in found) == 8
    with pytest.raises(ValueError, match=r"--min-len 9.* 9 positions"):
        model.translate("All", min_len=9, **options)
    with pytest.raises(ValueError, match=r"line 2: .* 9 positions"):
        model.translate(["All", nmtkit.Request("All", prefix=text_of(model, 9))], **options)


def test_a_line_of_any_length_is_translated_in_parts(tmp_path):
    """Two positions are enough for one piece and eos."""
    path = save_transformer(tmp_path / "two.pt", positions="learned", max_positions=2)
    assert len(nmtkit.load(path, device="cpu").translate(REAL_LINES)) == len(REAL_LINES)
    path = save_transformer(tmp_path / "one.pt", positions="learned", max_positions=1)
    with pytest.raises(ValueError, match=r"line 1: the source has 1 pieces.* 1 positions"):
        nmtkit.load(path, device="cpu").translate(REAL_LINES)
