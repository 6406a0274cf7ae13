"""A tokenizer gets the pieces and the token of a new language, and training of its model continues."""

from pathlib import Path

import pytest
from builders import REAL_LINES, save_transformer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.data.tokenizers.spm_training import extended, train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.building import from_checkpoint
from nmtkit.models.formats import huggingface

IMPORTED = Path(__file__).parents[2] / "models" / "formats" / "huggingface"
POLISH = [
    "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.",
    "Każdy człowiek ma prawo do życia, wolności i bezpieczeństwa swej osoby.",
    "Nie wolno nikogo czynić niewolnikiem ani nakładać na nikogo służebności.",
    "Nie wolno nikogo torturować ani karać lub traktować w sposób okrutny i nieludzki.",
    "Wszyscy są równi wobec prawa i mają prawo do jednakowej ochrony prawnej.",
]


def many(tmp_path: Path, *languages: str) -> Tokenizer:
    return from_checkpoint(save_transformer(tmp_path / "many.pt", languages=languages))[1]


def check_extension(old: Tokenizer, new: Tokenizer, old_codes: list[str], code: str) -> None:
    end = old.source_size - len(old_codes)
    assert new.source_pieces(range(end)) == old.source_pieces(range(end))
    assert list(new.languages) == [*old_codes, code]
    assert list(new.languages.values()) == list(range(new.source_size - len(old_codes) - 1, new.source_size))
    lengths = [[len(each.encode_source([line]).ids) for line in POLISH] for each in (old, new)]
    assert sum(lengths[1]) < 0.8 * sum(lengths[0]), lengths
    for line in (*POLISH, *REAL_LINES):
        assert new.decode_target(new.encode_target([line]).ids.tolist()) == line


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_new_text_gets_pieces_and_old_text_keeps_its_own(tmp_path: Path, model_type: str) -> None:
    old = many(tmp_path, "en", "it") if model_type == "bpe" else Tokenizer(train_model(REAL_LINES, 350, "unigram"))
    codes = ["en", "it"] if model_type == "bpe" else []
    new = extended(old, POLISH, 60, ["pl"])
    # the text is too small for 60 new pieces of a unigram model
    assert new.source_size == old.source_size + 61 or model_type == "unigram"
    check_extension(old, new, codes, "pl")
    assert new.source_pieces([new.languages["pl"]]) == ["__pl__"]
    characters = {character for line in POLISH for character in line if not character.isascii()}
    assert characters <= set(new.source_pieces(range(new.source_size)))
    before, after = ([each.encode_source([line]).ids.tolist() for line in REAL_LINES] for each in (old, new))
    assert sum(one == other for one, other in zip(before, after, strict=True)) >= len(REAL_LINES) // 2


def test_imported_models_are_extended_in_their_own_form(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    for name, token in (("m2m_100", "__szl__"), ("nllb", "szl")):
        old = Tokenizer.from_state(huggingface.load(IMPORTED / name)["tokenizer"])
        new = extended(old, POLISH, 40, ["szl"])
        assert new.source_pieces([new.source_size - 1]) == [token]
        assert list(new.languages) == [*old.languages, "szl"]
        end = old.source_size - len(old.languages)
        assert new.source_pieces(range(end)) == old.source_pieces(range(end))
        lengths = [len(each.encode_source([POLISH[0]]).ids) for each in (old, new)]
        assert lengths[1] < lengths[0], (name, lengths)
        assert new.encode_source(["All are equal."]).ids.tolist() == old.encode_source(["All are equal."]).ids.tolist()


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (lambda: Tokenizer(train_model(REAL_LINES, 330), train_model(POLISH, 330)), "one tokenizer"),
        (lambda: Tokenizer(train_model(REAL_LINES, 330, "char")), "bpe and unigram"),
    ],
    ids=["two", "char"],
)
def test_other_tokenizers_are_refused(tokenizer, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extended(tokenizer(), POLISH, 10, ["pl"])


@pytest.mark.slow
def test_a_model_learns_a_new_language_by_three_commands(tmp_path: Path) -> None:
    save_transformer(tmp_path / "old.pt", languages=("en", "it"))
    (tmp_path / "text.en").write_text("\n".join(REAL_LINES[:5]) + "\n")
    (tmp_path / "text.pl").write_text("\n".join(POLISH) + "\n")

    def run(*arguments: object, stdin: str = "") -> str:
        result = CliRunner().invoke(main, [str(each) for each in arguments], input=stdin)
        assert result.exit_code == 0, result.output
        return result.stdout

    text, data = tmp_path / "text", tmp_path / "data"
    run("preprocess", "-s", "en", "-t", "pl", "--trainpref", text, "--validpref", text, "--destdir", data,
        "--tokenizer-from", tmp_path / "old.pt", "--extend-tokenizer", 60, "--source-language-token", "en",
        "--target-language-token", "pl", "--workers", 1)  # fmt: skip
    run("train", data, "--finetune-from", tmp_path / "old.pt", "--new-language-from", "it", "--max-update", 1,
        "--device", "cpu", "--lr", 1e-9, "--save-dir", tmp_path / "run")  # fmt: skip
    old, before = from_checkpoint(tmp_path / "old.pt")
    new, after = from_checkpoint(tmp_path / "run/last.pt")
    row = new.output_projection.weight[after.languages["pl"]]
    assert (row - old.output_projection.weight[before.languages["it"]]).abs().max() < 1e-6
    assert (row - old.output_projection.weight[before.languages["en"]]).abs().max() > 1e-2
    lines = run("generate", "--path", tmp_path / "run/last.pt", "--source-lang", "en", "--target-lang", "pl",
                "--max-len-a", 0, "--max-len-b", 3, stdin="right\n")  # fmt: skip
    assert lines.count("\n") == 1


def test_the_added_pieces_and_tokens_are_counted_and_nothing_new_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="nmtkit")
    old = many(tmp_path, "en", "it")
    new = extended(old, POLISH, 60, ["pl"])
    (message,) = caplog.messages
    assert "60 new pieces" in message and message.endswith("pl")
    caplog.clear()
    assert extended(new, POLISH, 1, []).source_size == new.source_size
    (message,) = caplog.messages
    assert "--extend-tokenizer adds nothing" in message


def test_the_flag_needs_a_tokenizer(tmp_path: Path) -> None:
    base = ["preprocess", "-s", "en", "-t", "pl", "--trainpref", str(tmp_path / "x"), "--destdir", str(tmp_path / "d")]
    result = CliRunner().invoke(main, [*base, "--extend-tokenizer", "60"])
    assert result.exit_code == 2 and "--extend-tokenizer does nothing" in result.stderr
