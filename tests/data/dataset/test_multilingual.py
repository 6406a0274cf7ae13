"""`preprocess --corpora`: the rows, ids and counts of a dataset of many directions, compared with plain Python."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits import digit_rows, spelled, write_digits

from nmtkit.data.dataset.binarized import Dataset, Split, verify
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_tokenizer import sample_languages
from nmtkit.data.dataset.preprocess import preprocess
from nmtkit.data.directions import Direction, epoch_weights, named_weights
from nmtkit.data.tokenizers.spm_model import pieces_of, with_control_pieces
from nmtkit.experiments.inspection import inspect

Triple = tuple[str, str, str]  # direction, source, target
TOML = """
[[corpus]]
languages = ["en", "de"]
train = "ende"

[[corpus]]
languages = ["it", "en"]
train = "iten"
weight = 2
directions = ["it-en"]

[[corpus]]
languages = ["en", "de", "it"]
valid = "val"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with corpora of digits: 60 lines in en and de, 30 lines in it and en, 5 lines in three languages."""
    monkeypatch.chdir(tmp_path)
    write_digits(tmp_path / "ende", digit_rows(60, 1), ("en", "de"))
    write_digits(tmp_path / "iten", digit_rows(30, 2), ("it", "en"))
    write_digits(tmp_path / "val", digit_rows(5, 3), ("en", "de", "it"))
    return tmp_path


Make = Callable[..., Dataset]


@pytest.fixture
def make(here: Path) -> Make:
    """Makes a dataset from the text of a file of corpora."""

    def dataset(toml: str = TOML, name: str = "data", **settings: Any) -> Dataset:
        (here / "corpora.toml").write_text(toml)
        vocabulary = {} if "tokenizer_from" in settings else {"vocab_size": 290}
        options = {"corpora": here / "corpora.toml", "destdir": here / name, "workers": 1, **vocabulary, **settings}
        preprocess(PreprocessConfig(**options))
        return Dataset.open(here / name)

    return dataset


def triples(split: Split) -> Counter[Triple]:
    """Returns the rows of a split as text, decoded without language tokens."""
    tokenizer, index = split.tokenizer, np.asarray(split.direction_index)
    return Counter(
        (
            str(split.directions[index[row]]),
            tokenizer.decode_source(split.source.sentence(row)),
            tokenizer.decode_target(split.target.sentence(row)),
        )
        for row in range(len(split))
    )


def expected(rows: list[list[int]], *directions: str, times: int = 1) -> Counter[Triple]:
    result: Counter[Triple] = Counter()
    for name in directions:
        source, target = name.split("-")
        for row in rows:
            result[name, spelled(row, source), spelled(row, target)] += times
    return result


@pytest.mark.parametrize("tokens", ["both", "target-on-source"])
def test_every_direction_has_the_pairs_of_its_corpora(make: Make, tokens: Any) -> None:
    dataset = make(language_tokens=tokens)
    names = ["en-de", "de-en", "it-en", "en-it", "de-it", "it-de"]
    assert set(map(str, dataset.directions)) == set(names)
    train = expected(digit_rows(60, 1), "en-de", "de-en") + expected(digit_rows(30, 2), "it-en", times=2)
    assert triples(dataset["train"]) == train
    assert triples(dataset["valid"]) == expected(digit_rows(5, 3), *names)
    counts = dict(zip(map(str, dataset.directions), dataset["train"].direction_counts(), strict=True))
    assert counts == {"en-de": 60, "de-en": 60, "it-en": 60, "en-it": 0, "de-it": 0, "it-de": 0}


@pytest.mark.parametrize(
    ("tokens", "source_token", "target_token"),
    [("both", "__{source}__", "__{target}__"), ("target-on-source", ">>{target}<<", None)],
    ids=["both", "target-on-source"],
)
def test_the_ids_of_a_row_are_the_text_between_language_tokens_and_eos(
    make: Make, tokens: Any, source_token: str, target_token: str | None
) -> None:
    dataset = make(language_tokens=tokens)
    tokenizer = dataset.tokenizer
    names = {piece.text: index for index, piece in enumerate(pieces_of(tokenizer.source_model))}
    for split in (dataset["train"], dataset["valid"]):
        rows = np.arange(len(split))
        batch = split.batch(rows)
        assert batch.target_output.tolist() == [token for row in rows for token in split.target.sentence(row)]
        assert batch.source.values.tolist() == [token for row in rows for token in split.source.sentence(row)]
        for row in rows.tolist():
            direction = split.directions[int(np.asarray(split.direction_index)[row])]
            codes = {"source": direction.source, "target": direction.target}
            source, target = split.source.sentence(row), split.target.sentence(row)
            text = tokenizer.decode_source(source), tokenizer.decode_target(target)
            assert source == [names[source_token.format(**codes)], *tokenizer.encode_source([text[0]]).ids]
            first = [] if target_token is None else [names[target_token.format(**codes)]]
            assert target == [*first, *tokenizer.encode_target([text[1]]).ids]
            assert (len(source), len(target)) == (split.source.lengths[row], split.target.lengths[row])
            languages = (None if tokens == "target-on-source" else direction.source), direction.target
            assert tokenizer.language_ids(*languages) == (source[:1], first)


def test_a_sentence_is_stored_once_for_all_directions(make: Make, here: Path) -> None:
    write_digits(here / "three", digit_rows(20, 4), ("en", "de", "it"))
    dataset = make('[[corpus]]\nlanguages = ["en", "de", "it"]\ntrain = "three"\nweight = 3')
    assert len(dataset["train"]) == 20 * 6 * 3
    lines = [spelled(row, language) for language in ("en", "de", "it") for row in digit_rows(20, 4)]
    stored = len(dataset.tokenizer.encode_source(lines).ids) + len(lines)  # a language token before each line
    assert (here / "data" / "train.shared.ids.bin").stat().st_size == 2 * stored


def test_language_tokens_count_towards_the_vocabulary_and_never_occur_in_text(make: Make) -> None:
    tokenizer = make().tokenizer
    assert tokenizer.source_size == 290
    assert tokenizer.languages == {"en": 287, "de": 288, "it": 289}
    assert tokenizer.decode_source([287, *tokenizer.encode_source(["four __en__"]).ids]) == "four __en__"
    assert 287 not in tokenizer.encode_source(["__en__"]).ids


def test_an_empty_line_of_a_corpus_of_three_languages_drops_only_its_pairs(make: Make, here: Path) -> None:
    rows = digit_rows(6, 5)
    write_digits(here / "three", rows, ("en", "de", "it"))
    lines = (here / "three.de").read_text().split("\n")
    lines[2] = ""
    (here / "three.de").write_text("\n".join(lines))
    toml = '[[corpus]]\nlanguages = ["en", "de", "it"]\ntrain = ["three", "ende3"]\nvalid = "three"'
    write_digits(here / "ende3", digit_rows(9, 6), ("en", "de", "it"))
    dataset = make(toml)
    without = [row for index, row in enumerate(rows) if index != 2]
    german = ("en-de", "de-en", "de-it", "it-de")
    whole = expected(rows, "en-it", "it-en") + expected(without, *german)
    assert triples(dataset["valid"]) == whole
    assert triples(dataset["train"]) == whole + expected(digit_rows(9, 6), "en-it", "it-en", *german)
    assert [corpus["dropped"] for corpus in dataset.manifest["report"]["corpora"]] == [{"empty side": 2}, {}]


def test_monolingual_text_is_a_direction_whose_sides_share_the_ids(make: Make) -> None:
    split = make('[[corpus]]\nlanguages = ["it"]\ntrain = "iten"')["train"]
    assert triples(split) == expected(digit_rows(30, 2), "it-it")
    assert np.asarray(split.source.offsets).tolist() == np.asarray(split.target.offsets).tolist()
    assert split.source.ids.filename == split.target.ids.filename  # type: ignore[union-attr]


def test_pairs_with_equal_sides_are_counted_but_not_in_monolingual_text(make: Make, here: Path) -> None:
    write_digits(here / "half", digit_rows(20, 8), ("en", "de"))
    lines = (here / "half.en").read_text().split("\n")
    german = (here / "half.de").read_text().split("\n")
    (here / "half.de").write_text("\n".join([*lines[:5], *german[5:]]))
    toml = '[[corpus]]\nlanguages = ["en", "de"]\ntrain = "half"\n[[corpus]]\nlanguages = ["it"]\ntrain = "iten"'
    for drops, reason in ((False, "kept"), (True, "dropped")):
        reports = make(toml, name=reason, drop_equal=drops).manifest["report"]["corpora"]
        assert [report[reason].get("source equals target", 0) for report in reports] == [5, 0]


def test_the_columns_of_a_table_are_the_languages(make: Make, here: Path) -> None:
    rows = digit_rows(40, 7)
    lines = ["\t".join(spelled(row, language) for language in ("de", "it", "en")) for row in rows]
    (here / "table.tsv").write_text("\n".join(["de\tit\ten", *lines]) + "\n")
    dataset = make('[[corpus]]\nlanguages = ["en", "de", "it"]\ntrain = "table.tsv"')
    every = ("en-de", "de-en", "en-it", "it-en", "de-it", "it-de")
    assert triples(dataset["train"]) == expected(rows, *every)
    for name, columns in (("texts", '["3", "1"]'), ("numbers", "[3, 1]")):
        entry = f'[[corpus]]\nlanguages = ["en", "de"]\ntrain = "table.tsv"\ncolumns = {columns}'
        assert triples(make(entry, name=name, min_len=1)["train"]) == expected(rows, "en-de", "de-en")


def test_worker_processes_and_shards_keep_all_rows(make: Make, here: Path) -> None:
    whole = make()
    parallel = make(name="parallel", workers=2)
    assert parallel.fingerprint == whole.fingerprint
    for number in (1, 2):
        (here / "corpora.toml").write_text(TOML)
        preprocess(
            PreprocessConfig(
                corpora=here / "corpora.toml",
                destdir=here / "shards",
                workers=1,
                tokenizer_from=(here / "data",),
                shard=f"{number}/2",
            )
        )
    sharded = Dataset.open(here / "shards")
    assert triples(sharded["train"]) == triples(whole["train"])
    assert triples(sharded["valid"]) == triples(whole["valid"])
    assert verify(here / "shards", 0) == [
        "valid: 30 pairs, checksums are correct",
        "train: 180 pairs, checksums are correct",
    ]


def test_a_pair_in_a_valid_set_and_a_repeated_pair_are_dropped_from_both_directions(make: Make, here: Path) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [1, 2, 3], *digit_rows(30, 8)]
    write_digits(here / "again", rows, ("de", "en"))
    write_digits(here / "held", [[4, 5, 6]], ("en", "de"))
    toml = '[[corpus]]\nlanguages = ["de", "en"]\ntrain = "again"\n[[corpus]]\nlanguages = ["en", "de"]\nvalid = "held"'
    dataset = make(toml, drop_duplicates=True, drop_overlap=True)
    kept = [list(row) for row in dict.fromkeys(map(tuple, rows)) if row != (4, 5, 6)]
    assert triples(dataset["train"]) == expected(kept, "de-en", "en-de")


def test_an_overlap_needs_a_valid_or_test_set(make: Make) -> None:
    with pytest.raises(ValueError, match="--drop-overlap"):
        make('[[corpus]]\nlanguages = ["en", "de"]\ntrain = "ende"\n', drop_overlap=True)


def test_the_sample_of_the_tokenizer_has_the_shares_of_the_temperature(tmp_path: Path) -> None:
    for language, count in (("aa", 1000), ("bb", 10)):
        (tmp_path / language).write_text("".join(f"{language} {number}\n\n" for number in range(count)))
    texts = {language: [tmp_path / language] for language in ("aa", "bb")}
    # 1000^(1/2) = 31.6 and 10^(1/2) = 3.16: shares 10/11 and 1/11
    counts = Counter(line[:2] for line in sample_languages(texts, 110, 2.0, 1, 1000))
    assert counts == {"aa": 100, "bb": 10}
    # equal shares repeat the ten lines of the small language
    sample = sample_languages(texts, 100, 1e9, 1, 1000)
    assert Counter(line[:2] for line in sample) == {"aa": 50, "bb": 50}
    assert set(Counter(line for line in sample if line[:2] == "bb").values()) == {5}


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("", "has no entry [[corpus]]"),
        ("corpora = 1", "every corpus in an"),
        ("[[corpus]]\n[", "corpora.toml is not TOML"),
        ('[[corpus]]\ntrain = "ende"', "corpus 1 has no languages"),
        ('[[corpus]]\nlanguages = ["en", "de"]', "corpus 1: no text"),
        ('[[corpus]]\nlanguages = ["en", "e n"]\ntrain = "ende"', "'e n' is not"),
        ('[[corpus]]\nlanguages = ["en", "en"]\ntrain = "ende"', "languages has 'en' twice"),
        ('[[corpus]]\nlanguages = ["en", "de"]\ntrain = "ende"\nweigth = 2', "did you mean 'weight'"),
        ('[[corpus]]\nlanguages = ["en", "de"]\ntrain = "ende"\nweight = 0', "weight is 0.0"),
        (TOML + '[[corpus]]\nlanguages = ["en"]\ntrain = "ende"\ndirections = ["en-it"]', "corpus 4: directions names"),
        ('[[corpus]]\nlanguages = ["en", "fr"]\ntrain = "ende"', "no such file: ende.fr"),
        ('[[corpus]]\nlanguages = ["en", "de"]\nvalid = "val"', "no training text"),
        ('[[corpus]]\nlanguages = ["en"]\ntrain = "ende"\ncolumns = ["1"]', "columns have no effect"),
    ],
    ids=lambda value: None if "\n" in value or not value else value[:40],
)  # fmt: skip
def test_errors_name_the_entry_and_the_key(make: Make, toml: str, message: str) -> None:
    with pytest.raises((ValueError, OSError)) as error:
        make(toml)
    assert message in str(error.value)


def test_a_tokenizer_without_a_token_of_a_language_is_an_error(make: Make, here: Path) -> None:
    make()
    write_digits(here / "french", digit_rows(5, 1), ("fr", "en"))
    with pytest.raises(ValueError, match=r"language fr; .*de, en, it"):
        make('[[corpus]]\nlanguages = ["fr", "en"]\ntrain = "french"', "more", tokenizer_from=(here / "data",))


def test_damaged_directions_are_found(make: Make, here: Path) -> None:
    make()
    path = here / "data" / "valid.directions.bin"
    path.write_bytes(np.full(30, 6, np.uint16).tobytes())
    with pytest.raises(ValueError, match=r"valid\.directions\.bin is damaged"):
        Dataset.open(here / "data")
    manifest = json.loads((here / "data" / "manifest.json").read_text())
    manifest["splits"]["valid"]["directions"][0] += 1
    (here / "data" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"splits\.valid\.directions .*30 pairs .*6 directions"):
        Dataset.open(here / "data")


def test_control_pieces_are_appended_once(make: Make) -> None:
    model = make().tokenizer.source_model
    more = with_control_pieces(model, ["__pl__"])
    assert [piece.text for piece in pieces_of(more)] == [*(piece.text for piece in pieces_of(model)), "__pl__"]
    with pytest.raises(ValueError, match="piece '__pl__'"):
        with_control_pieces(more, ["__pl__"])


def test_weights_of_directions() -> None:
    directions = [Direction("en", "de"), Direction("de", "en"), Direction("en", "pl")]
    assert named_weights(["en-pl=3", "en-de=0.5"], directions, "--x") == {2: 3.0, 0: 0.5}
    with pytest.raises(ValueError, match=r"--x .*'en-fr'; did you mean"):
        named_weights(["en-fr=3"], directions, "--x")
    with pytest.raises(ValueError, match=r"0 to 1,000, .*en-pl=2"):
        named_weights(["en-pl"], directions, "--x")
    assert epoch_weights([100, 100, 4], None, {2: 3.0}) == [1, 1, 3]
    # square roots 10, 10 and 2: shares 10/22, 10/22 and 2/22 of 204 rows
    assert epoch_weights([100, 100, 4], 2.0, {}) == pytest.approx([204 / 220, 204 / 220, 204 / 44])
    assert epoch_weights([100, 100, 4], 2.0, {0: 0.0, 2: 5.0}) == pytest.approx([0, 204 / 200, 204 / 8])


def test_extending_the_tokenizer_adds_the_new_languages_of_the_corpora(make: Make, here: Path) -> None:
    old = make().tokenizer
    write_digits(here / "french", digit_rows(30, 9), ("fr", "en"))
    toml = (
        '[[corpus]]\nlanguages = ["fr", "en"]\ntrain = "french"\n[[corpus]]\nlanguages = ["en", "de"]\ntrain = "ende"'
    )
    dataset = make(toml, "more", tokenizer_from=(here / "data",), extend_tokenizer=5)
    assert set(dataset.tokenizer.languages) == {"en", "de", "it", "fr"}
    pieces, before = dataset.tokenizer.source_pieces, old.source_pieces
    texts = old.source_size - len(old.languages)  # pieces that are not language tokens keep their ids
    assert pieces(range(texts)) == before(range(texts))
    train = expected(digit_rows(30, 9), "fr-en", "en-fr") + expected(digit_rows(60, 1), "en-de", "de-en")
    assert triples(dataset["train"]) == train


def test_inspect_lists_the_languages_and_each_file_once(make: Make) -> None:
    write_digits(Path("all"), digit_rows(20, 4), ("en", "de", "it"))
    rows = [Path(f"all.{code}").read_text().splitlines() for code in ("en", "de")]
    Path("pairs.tsv").write_text("en\tde\n" + "".join(f"{x}\t{y}\n" for x, y in zip(*rows, strict=True)))
    dataset = make(f'{TOML}\n[[corpus]]\nlanguages = ["en", "de"]\ntrain = "pairs.tsv"\ncolumns = [1, 2]\n')
    sections = inspect(dataset.folder).sections
    assert sections["Dataset"] == {"languages": ["de", "en", "it"], "shards": 1}
    files = [facts["files"] for title, facts in sections.items() if title.startswith("Training files")]
    assert files == ["ende.en, ende.de", "iten.it, iten.en", "pairs.tsv"]
