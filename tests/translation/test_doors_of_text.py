"""One text has one sequence of ids, whether it comes from a dataset, a file, Python or an export."""

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from builders import WORDS, save_tiny_transformer, tiny_tokenizer

import nmtkit
from nmtkit.api.model import source_ids
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.tokenizers import tokenizer as tokenizers
from nmtkit.data.tokenizers.batch_encoder import BatchEncoder
from nmtkit.data.tokenizers.spm_model import preparation_of
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.formats.model_card import preparation_code
from nmtkit.translation.lines import dataset_requests
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import Translator

REMOVED = "\u200b\u00ad\u2060\ufeff\u0007\x00\x7f\x9f"
SPACES = "\u2028\u2029\u0085\u000b\f\r\t\u00a0\u2000\u202f\u3000\x1c"
CHARACTERS = REMOVED + SPACES
FORMS = ["the dog{0} runs", "the do{0}g runs", "{0}the dog", "the dog {0}", "the e{0}\u0301 ▁ cat", "{0}", "{0}{0} a"]
TITLE = "U+{:04X}".format


def lines_with(char: str) -> list[str]:
    """Returns lines with the character, none of which is empty without it or loses a carriage return at its end."""
    return [form.format(char) + "!" for form in FORMS]


def without(line: str, known: str = "") -> str:
    """Returns the line as every door has to prepare it, by the definition of docs/text.md."""
    line = unicodedata.normalize("NFC", line)
    line = "".join(char for char in line if char not in REMOVED or char in known)
    line = re.sub(f"[{SPACES}\u2002\n]", " ", line)  # U+2000 is U+2002 in NFC
    return unicodedata.normalize("NFC", line)


def make_dataset(folder: Path, kind: str, known: str = "") -> Path:
    """Makes a dataset whose valid set has every character. The vocabulary has only the characters in `known`."""
    train = [" ".join(WORDS[i:] + WORDS[:i]) + known for i in range(len(WORDS))]
    valid = [line for char in CHARACTERS for line in lines_with(char)]
    for name, lines in (("train", train), ("val", valid)):
        for side in ("en", "de"):
            (folder / f"{name}.{side}").write_bytes("".join(f"{line}\n" for line in lines).encode())
    settings: dict[str, Any] = {"source_lang": "en", "target_lang": "de", "trainpref": str(folder / "train")}
    settings |= {"validpref": str(folder / "val"), "destdir": folder / "data", "model_type": kind, "vocab_size": 285}
    nmtkit.preprocess(**settings)
    return folder / "data"


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"), request.param)


def raw_ids(translator: Translator, lines: list[Any]) -> list[list[int]]:
    pipeline = translator.pipeline(SearchOptions())
    found = pipeline.segments([line if isinstance(line, Request) else Request(line) for line in lines])
    return [[id for leaf in segment.leaves() for id in leaf.input.ids] for segment in found]


@pytest.mark.parametrize("char", CHARACTERS, ids=map(TITLE, map(ord, CHARACTERS)))
def test_a_row_of_a_dataset_and_the_same_raw_text_have_equal_ids(data: Path, tmp_path: Path, char: str) -> None:
    dataset = Dataset.open(data)
    tokenizer = dataset.tokenizer
    rows = dataset["valid"]
    first = CHARACTERS.index(char) * len(FORMS)
    lines = rows.source_lines()[first : first + len(FORMS)]
    expected = [rows.source.sentence(first + row) for row in range(len(FORMS))]
    assert lines == lines_with(char)
    assert [tokenizer.decode_source(ids) for ids in expected] == [" ".join(without(line).split()) for line in lines]
    translator = Translator.load([save_tiny_transformer(tmp_path / "model.pt", tokenizer)])
    assert raw_ids(translator, lines) == expected
    assert source_ids(tokenizer, lines) == expected
    assert [ids.tolist() for ids in tokenizer.encode_target(lines).split()] == expected
    fast = BatchEncoder(tokenizer.source, "uint16").encode("".join(f"{line}\n" for line in lines))
    assert [ids.tolist() for ids in fast.split()] == expected
    requests = [request for window in dataset_requests(rows, 1024, True) for request in window]
    assert raw_ids(translator, requests[first : first + len(FORMS)]) == expected


def test_the_model_card_has_the_preparation_of_this_vocabulary(data: Path) -> None:
    tokenizer = Dataset.open(data).tokenizer
    code: dict[str, Any] = {}
    exec(preparation_code(tokenizer.source).strip("`").removeprefix("python"), code)
    for line in (line for char in CHARACTERS + "\n" for line in lines_with(char)):
        assert code["prepare"](line) == without(line)


def test_characters_of_the_vocabulary_stay_at_every_door(tmp_path: Path) -> None:
    known = "\u200b\u00a0"
    dataset = Dataset.open(make_dataset(tmp_path, "bpe", known))
    rows = dataset["valid"]
    lines = rows.source_lines()
    expected = [rows.source.sentence(row) for row in range(len(rows))]
    translator = Translator.load([save_tiny_transformer(tmp_path / "model.pt", dataset.tokenizer)])
    assert raw_ids(translator, lines) == expected == source_ids(dataset.tokenizer, lines)
    kept = {char for char in CHARACTERS if dataset.tokenizer.decode_source(source_ids(dataset.tokenizer, [char])[0])}
    assert kept == set(known)


def test_an_old_tokenizer_keeps_its_rule_and_is_told_of(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Dataset.open(data).tokenizer
    mark = new.source_model.rindex(b"nmtkit text preparation")
    old = Tokenizer(new.source_model[: mark - 3])
    assert (preparation_of(old.source_model), preparation_of(new.source_model)) == (1, 2)
    assert old.fingerprint != new.fingerprint
    assert old.decode_source(old.encode_source(["the\u200bdog\x07\ta"]).ids.tolist()) == "the\u200bdog\x07 a"
    path = save_tiny_transformer(tmp_path / "old.pt", old)
    tokenizers._tell_of_rule_1.cache_clear()
    translator = Translator.load([path])
    assert translator.tokenizer.source_model == old.source_model
    assert len([record for record in caplog.records if "zero-width" in record.message]) == 1
    assert raw_ids(translator, ["the\u200b dog\x07\u2028a"]) == source_ids(old, ["the dog a"])
    row = Request("the\u200b dog", source_ids(old, ["the\u200b dog"])[0])
    assert raw_ids(translator, [row]) == [row.ids]


def test_a_tokenizer_of_a_later_rule_is_refused(data: Path) -> None:
    model = Dataset.open(data).tokenizer.source_model
    with pytest.raises(ValueError, match="rule 3"):
        Tokenizer(model.replace(b"nmtkit text preparation 2", b"nmtkit text preparation 3"))


def test_a_line_feed_in_a_text_of_python_is_a_space(data: Path, tmp_path: Path) -> None:
    tokenizer = Dataset.open(data).tokenizer
    path = save_tiny_transformer(tmp_path / "model.pt", tokenizer, sharpness=2.0)
    assert source_ids(tokenizer, ["a\nb", "a\r\nb"]) == source_ids(tokenizer, ["a b", "a b"])
    assert raw_ids(Translator.load([path]), ["a\nb\n", "a\r\nb"]) == source_ids(tokenizer, ["a b", "a b"])
    model = nmtkit.load(path)
    short = {"max_len_a": 0.0, "max_len_b": 6}
    assert model.translate("the dog\nruns", **short) == model.translate("the dog runs", **short)
    assert model.score("the\ndog", "a\ncat") == model.score("the dog", "a cat")


@pytest.mark.slow
def test_links_to_words_between_white_space_of_any_kind(tmp_path: Path) -> None:
    model = nmtkit.load(save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer(), sharpness=2.0))
    options: dict[str, Any] = {"nbest": 1, "alignment": "words", "max_len_a": 0.0, "max_len_b": 8}
    links = model.translate("the dog runs in a park", **options).hypotheses[0].alignment
    assert len(links) > 1
    for space in SPACES + "\n":
        assert model.translate(f"the{space}dog runs{space}in a park", **options).hypotheses[0].alignment == links


HALF = "a\ud800b"


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.translate(HALF),
        lambda model: model.translate(["a", HALF]),
        lambda model: model.translate(Request("a", prefix=HALF)),
        lambda model: model.translate(Request("a", required=[HALF])),
        lambda model: model.translate(Request("a", avoided=[HALF])),
        lambda model: model.translate(HALF, protect_spans=True, markup="html"),
        lambda model: model.score(HALF, "a"),
        lambda model: model.score("a", HALF),
        lambda model: model.encode(HALF),
        lambda model: model.attention(HALF),
        lambda model: model.attention("a", HALF),
        lambda model: nmtkit.score([HALF], ["a"]),
        lambda model: nmtkit.score(["a"], [HALF]),
    ],
)
def test_half_of_a_surrogate_pair_is_an_error_with_its_position(data: Path, tmp_path: Path, call: Any) -> None:
    model = nmtkit.load(save_tiny_transformer(tmp_path / "model.pt", Dataset.open(data).tokenizer))
    with pytest.raises(ValueError, match=r"U\+D800 at position 1"):
        call(model)


def test_scores_take_any_iterable_of_texts() -> None:
    lines, others = ["Ein Hund rennt schnell.", "Zwei."], ["Ein Hund rennt los.", "Zwei."]
    expected = nmtkit.score(lines, others)
    several = nmtkit.score(lines, [others, lines])
    assert nmtkit.score(lines, iter(others)) == expected == nmtkit.score(iter(lines), (line for line in others))
    assert nmtkit.score(tuple(lines), tuple(others)) == expected
    assert nmtkit.score(lines, iter([iter(others), tuple(lines)])) == several
