"""`nmtkit fetch hf:…` with the real client against a local Hub: layouts, names, rights and faults."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from hub_server import TOKEN, Fault, HubServer

from nmtkit.cli import main
from nmtkit.data.fetch.hub_datasets import DataFile, DatasetName, described, parsed

PAIRS = [(f"Line {number} .", f"Zeile {number} .") for number in range(30)]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def nested(first: int, end: int) -> list[dict[str, Any]]:
    return [{"id": str(number), "translation": {"de": target, "en": source}}
            for number, (source, target) in enumerate(PAIRS[first:end], first)]  # fmt: skip


BOOKS = {
    "README.md": b"# Books",
    "de-en/train-00000-of-00002.parquet": parquet(nested(0, 20)),
    "de-en/train-00001-of-00002.parquet": parquet(nested(20, 30)),
    "en-fr/train-00000-of-00001.parquet": parquet([{"translation": {"en": "Yes .", "fr": "Oui ."}}]),
}
FLORES = {
    f"{split}/{code}.parquet": parquet([{"id": number, "text": pair[side], "iso_639_3": code[:3]}
                                        for number, pair in enumerate(PAIRS[:10])])
    for split in ("dev", "devtest") for side, code in enumerate(("eng_Latn", "deu_Latn"))
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fetch(*arguments: str, languages: tuple[str, str] = ("en", "de")) -> Result:
    return CliRunner().invoke(main, ["fetch", *arguments, "-s", languages[0], "-t", languages[1], "-o", "data"])


def texts(prefix: str, languages: tuple[str, str] = ("en", "de")) -> list[tuple[str, ...]]:
    sides = [Path(f"data/{prefix}.{code}").read_text(encoding="utf-8").splitlines() for code in languages]
    return list(zip(*sides, strict=True))


def written() -> list[str]:
    return sorted(str(path) for path in Path("data").rglob("*") if path.is_file()) if Path("data").exists() else []


def test_a_column_with_both_texts_and_the_config_of_the_pair(hub: HubServer) -> None:
    commit = hub.add("org/opus_books", BOOKS, kind="dataset", license="cc-by-4.0")
    result = fetch("hf:org/opus_books")
    assert result.exit_code == 0, result.stderr
    assert texts("opus_books.en-de") == PAIRS
    facts = json.loads(Path("data/opus_books.en-de.provenance.json").read_text())
    expected = {"source": "Hugging Face", "repository": "org/opus_books", "commit": commit, "license": "cc-by-4.0",
                "config": "de-en", "split": "train", "pairs": 30}  # fmt: skip
    assert expected.items() <= facts.items() and len(facts["hashes"]) == 2
    assert not hub.asked("en-fr/train|README")  # other files are not downloaded


@pytest.mark.parametrize(
    "name", ["hf:org/opus_books:de-en/train", "hf:org/opus_books:de-en", "hf:org/opus_books/train"]
)
def test_parts_of_the_name_are_parts_of_the_files(hub: HubServer, name: str) -> None:
    hub.add("org/opus_books", BOOKS, kind="dataset")
    result = fetch(name)
    assert result.exit_code == 0, result.stderr
    prefix = name.partition("/")[2].replace(":", "-").replace("/", "-")
    assert result.stdout == f"data/{prefix}.en-de\n" and texts(f"{prefix}.en-de") == PAIRS


def test_a_revision_is_pinned(hub: HubServer) -> None:
    old = hub.add("org/opus_books", {"de-en/train.parquet": parquet(nested(0, 5))}, kind="dataset")
    hub.add("org/opus_books", BOOKS, kind="dataset")
    assert fetch(f"hf:org/opus_books@{old}:de-en").exit_code == 0
    assert texts("opus_books-de-en.en-de") == PAIRS[:5]


def test_one_file_for_each_language_of_a_gated_dataset(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/flores_plus", FLORES, kind="dataset", gated=True)
    codes = ("eng_Latn", "deu_Latn")
    refused = fetch("hf:org/flores_plus/devtest", languages=codes)
    assert refused.exit_code == 2 and len(refused.stderr.splitlines()) == 1
    assert "HF_TOKEN" in refused.stderr and not written()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = fetch("hf:org/flores_plus/devtest", languages=codes)
    assert result.exit_code == 0, result.stderr
    assert texts("flores_plus-devtest.eng_Latn-deu_Latn", codes) == PAIRS[:10]
    assert fetch("hf:org/flores_plus/dev").exit_code == 0  # en and de are related codes
    assert texts("flores_plus-dev.en-de") == PAIRS[:10]


@pytest.mark.parametrize(
    ("files", "flags"),
    [
        ({"data/train.jsonl": jsonl([{"source": s, "target": t} for s, t in PAIRS])}, []),
        ({"train.jsonl.gz": gzip.compress(jsonl([{"en": s, "de": t} for s, t in PAIRS]))}, []),
        ({"train.tsv": "".join(f"{s}\t{t}\n" for s, t in PAIRS).encode()}, []),
        ({"x.parquet": parquet([{"a": s, "b": t, "c": 1} for s, t in PAIRS])}, ["--columns", "a,b"]),
        ({"train/0000.parquet": parquet([{"en": s, "de": t} for s, t in PAIRS])}, []),
        ({"eng.jsonl": jsonl([{"sentence": s} for s, _ in PAIRS]),
          "deu.jsonl": jsonl([{"sentence": t} for _, t in PAIRS])}, []),
        ({"eng.jsonl": jsonl([{"x": s} for s, _ in PAIRS]),
          "deu.jsonl": jsonl([{"y": t} for _, t in PAIRS])}, ["--columns", "x,y"]),
    ],
)  # fmt: skip
def test_layouts(hub: HubServer, files: dict[str, bytes], flags: list[str]) -> None:
    hub.add("org/data", files, kind="dataset")
    result = fetch("hf:org/data", *flags)
    assert result.exit_code == 0, result.stderr
    assert texts("data.en-de") == PAIRS


@pytest.mark.parametrize("flags", [[], ["--columns", "target,source"]])
@pytest.mark.parametrize("order", [1, -1])
def test_sides_without_codes_have_the_order_of_the_config(hub: HubServer, order: int, flags: list[str]) -> None:
    if flags and order == 1:
        pytest.skip("the columns are those of the other order")
    rows = jsonl([{"lp": "en-de_DE", "source": source, "target": target} for source, target in PAIRS])
    hub.add("org/wmt24pp", {"en-de_DE.jsonl": rows, "en-fr_FR.jsonl": jsonl([{"source": "a", "target": "b"}])},
            kind="dataset")  # fmt: skip
    languages = ("en", "de")[::order]
    result = fetch("hf:org/wmt24pp", *flags, languages=languages)
    assert result.exit_code == 0, result.stderr
    assert texts(f"wmt24pp.{'-'.join(languages)}", languages) == [pair[::order] for pair in PAIRS]


def test_a_complete_dataset_needs_no_hub(hub: HubServer) -> None:
    hub.add("org/opus_books", BOOKS, kind="dataset")
    assert fetch("hf:org/opus_books").exit_code == 0
    before = len(hub.requests)
    assert fetch("hf:org/opus_books").exit_code == 0 and len(hub.requests) == before


SEVERAL = {
    "de-en/train.parquet": BOOKS["de-en/train-00000-of-00002.parquet"],
    "de-en/test.parquet": parquet(nested(0, 2)),
}
SHORT = {**FLORES, "dev/deu_Latn.parquet": parquet([{"id": n, "text": "x"} for n in range(9)])}
SHIFTED = {**FLORES, "dev/deu_Latn.parquet": parquet([{"id": n + 1, "text": "x"} for n in range(10)])}


@pytest.mark.parametrize(
    ("files", "name", "languages", "facts"),
    [
        (BOOKS, "hf:org/data:de-enn", ("en", "de"), ["'de-enn'", "'de-en'"]),
        (BOOKS, "hf:org/data", ("en", "fi"), ["configs", "de-en", "en-fr"]),
        (BOOKS, "hf:org/data:de-en", ("en", "fi"), ["fi", "de"]),
        (BOOKS, "hf:org/data:de-en/tran", ("en", "de"), ["'tran'", "'train'"]),
        (SEVERAL, "hf:org/data", ("en", "de"), ["/test", "/train"]),
        (BOOKS, "hf:org/data@v9", ("en", "de"), ["v9"]),
        (BOOKS, "hf:org/dataset", ("en", "de"), ["org/dataset"]),
        (FLORES, "hf:org/data/dev", ("en", "fi"), ["'fi'"]),
        (SHORT, "hf:org/data/dev", ("en", "de"), ["row 10"]),
        (SHIFTED, "hf:org/data/dev", ("en", "de"), ["row 1 ", "id"]),
        ({"README.md": b"x", "train.bin": b"x"}, "hf:org/data", ("en", "de"), ["parquet", "train.bin"]),
        ({"train.parquet": b"PAR1 broken PAR1"}, "hf:org/data", ("en", "de"), ["train.parquet"]),
        ({"train.jsonl": b'{"en": "a", "de": "\xff"}\n'}, "hf:org/data", ("en", "de"), ["UTF-8"]),
        ({"train.jsonl": b'{"a": 1, "b": "x"}\n'}, "hf:org/data", ("en", "de"), ["--columns"]),
        ({"train.jsonl": b'{"en": "a"}\n'}, "hf:org/data", ("en", "de"), ["de"]),
    ],
)
def test_a_wrong_name_or_content_is_one_line_and_leaves_nothing(
    hub: HubServer, files: dict[str, bytes], name: str, languages: tuple[str, str], facts: list[str]
) -> None:
    hub.add("org/data", files, kind="dataset")
    result = fetch(name, languages=languages)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert all(fact in result.stderr for fact in facts), result.stderr
    assert not written()


@pytest.mark.parametrize(
    "fault",
    [Fault("GET .*parquet", truncate=100), Fault("GET .*parquet", corrupt=True), Fault("GET .*api", status=503)],
)
def test_a_broken_download_is_one_line_and_leaves_nothing(hub: HubServer, fault: Fault) -> None:
    hub.add("org/opus_books", BOOKS, kind="dataset")
    hub.faults.append(fault)
    result = fetch("hf:org/opus_books")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert not written()
    hub.faults.clear()
    assert fetch("hf:org/opus_books").exit_code == 0


def test_a_missing_part_of_a_dataset_is_named(hub: HubServer) -> None:
    hub.add("org/data", {name: data for name, data in BOOKS.items() if "00001-of-00002" not in name}, kind="dataset")
    result = fetch("hf:org/data")
    assert result.exit_code == 2 and "de-en/train-00001-of-00002.parquet" in result.stderr and not written()


def test_flags_of_downloads_do_nothing_for_the_hub(hub: HubServer) -> None:
    result = fetch("hf:org/opus_books", "--attempts", "2")
    assert result.exit_code == 2 and "--attempts" in result.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/data", DatasetName("org/data", None, None, None)),
        ("org/data/train", DatasetName("org/data", None, None, "train")),
        ("org/data@v1:de-en/train", DatasetName("org/data", "v1", "de-en", "train")),
        ("org/data@refs/convert/parquet:de-en", DatasetName("org/data", "refs/convert/parquet", "de-en", None)),
        ("org/data:de-en", DatasetName("org/data", None, "de-en", None)),
    ],
)
def test_names(name: str, expected: DatasetName) -> None:
    assert parsed(name) == expected


@pytest.mark.parametrize("name", ["org/data@", "org/data:", "org/data/", "a/b/c/d", "org/data:../x", "org/data@a:b:c"])
def test_names_of_a_wrong_form(name: str) -> None:
    with pytest.raises(ValueError, match="hf:"):
        parsed(name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("de-en/train-00000-of-00003.parquet", ("de-en", "train", None)),
        ("data/validation.jsonl", (None, "validation", None)),
        ("data/de-en/dev.tsv", ("de-en", "dev", None)),
        ("devtest/eng_Latn.parquet", (None, "devtest", "eng_Latn")),
        ("de-en/train/0000.parquet", ("de-en", "train", None)),
        ("corpus.jsonl.zst", (None, "corpus", None)),
        ("en-de_DE.jsonl", ("en-de_DE", None, None)),
        ("data/zh-TW.jsonl", (None, None, "zh-TW")),
        ("README.md", None),
        ("dataset_infos.json", None),
    ],
)
def test_the_path_of_a_file_has_its_config_split_and_language(path: str, expected: tuple[Any, ...] | None) -> None:
    assert described(path) == (None if expected is None else DataFile(path, *expected))
