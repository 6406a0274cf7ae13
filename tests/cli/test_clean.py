"""`nmtkit clean`: each dropped pair has one reason, no pair is lost, and good data of unusual kinds stays."""

import contextlib
import json
import os
import random
import re
import signal
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from nmtkit.cleaning import blocks
from nmtkit.cleaning import clean as cleaning
from nmtkit.cleaning.scores import ScoreWriter, checksums
from nmtkit.cli import main
from nmtkit.data.corpora.corpus import Pairs, locate
from nmtkit.data.corpora.pairs import pairs
from nmtkit.data.corpora.writer import CorpusWriter
from nmtkit.demo.run import read_corpus


def clean(*arguments: object, languages: tuple[str, str] = ("en", "de")) -> Result:
    flags = ["-s", languages[0], "-t", languages[1], *map(str, arguments)]
    return CliRunner().invoke(main, ["clean", *flags, *([] if "--workers" in flags else ["--workers", "1"])])


def succeeds(*arguments: object, languages: tuple[str, str] = ("en", "de")) -> str:
    result = clean(*arguments, languages=languages)
    assert result.exit_code == 0, result.output
    return result.stderr


def write(path: Path, rows: list[tuple[str, str]], extras: list[dict[str, object]] | None = None) -> Path:
    with CorpusWriter(str(path), ("en", "de")) as writer:
        writer.write(Pairs([row[0] for row in rows], [row[1] for row in rows], extras or [{} for _ in rows]))
    return path


def read(path: Path) -> list[tuple[str, str, dict[str, object]]]:
    return [row for part in pairs(locate(str(path), "en", "de")) for row in zip(part.sources, part.targets, part.extras,
                                                                               strict=True)]  # fmt: skip


GOOD = read_corpus()["train"][:1200]
NAME = "Die Firma beschäftigt jetzt mehr als zweihundert Menschen in drei verschiedenen Ländern."
BAD = {
    "empty": [("A dog runs in the park.", ""), ("...", "Ein Hund läuft im Park.")],
    "length": [("word " * 500, "wort " * 500)],
    "overlap": [("This sentence is part of the test set.", "Dieser Satz gehört zur Testmenge.")],
    "copy": [("You should see the old house near the river.", "You should see the old house near the river.")],
    "boilerplate": [("Home | News | About us | Contact", "Start | Aktuelles | Über uns | Kontakt")],
    "repetition": [("The cat sleeps on the sofa all day long here.", "Die Katze " * 9 + "schläft den ganzen Tag.")],
    "script": [("The small boat is at the harbour.", "Маленькая лодка стоит в гавани.")],
    "swapped": [(NAME, "The company now employs more than two hundred people in three different countries.")],
    "language": [("The company now employs many people.", "L'entreprise emploie maintenant deux cents personnes.")],
    "length_ratio": [("The old man is reading.", f"Der alte Mann liest. {NAME} Das steht heute in der Zeitung.")],
    "numbers": [("The train leaves at 17:45 on platform 6.", "Der Zug fährt um 16:45 auf Gleis 9 ab.")],
    "urls": [("Read more at https://example.org/en today.", "Lesen Sie heute mehr auf www.anders.de/heute.")],
    "currencies": [("The ticket costs 20 € for children.", "Die Karte kostet 20 $ für Kinder.")],
    "duplicate": [(GOOD[0][0].upper(), GOOD[0][1].upper() + " !")],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds noisy.tsv, in which the column `class` is the expected reason, and the results of cleaning the file."""
    path = tmp_path_factory.mktemp("clean")
    rows = [("good", pair) for pair in dict.fromkeys(GOOD)]
    rows += [(name, pair) for name, bad in BAD.items() for pair in bad]
    first, *rest = rows
    random.Random(3).shuffle(rest)
    write(path / "noisy.tsv", [pair for _, pair in (first, *rest)], [{"class": name} for name, _ in (first, *rest)])
    write(path / "test.tsv", BAD["overlap"])
    report = succeeds(
        path / "noisy.tsv", "--exclude", path / "test.tsv", "--output", path / "out.tsv", "--dropped",
        path / "dropped.jsonl", "--scores", path / "scores.parquet", "--report", path / "report.html",
    )  # fmt: skip
    (path / "stderr").write_text(report)
    return path


@pytest.mark.slow
def test_each_kind_of_noise_has_its_reason(folder: Path) -> None:
    reasons = {(source, target): others["reason"] for source, target, others in read(folder / "dropped.jsonl")}
    for name, rows in BAD.items():
        for source, target in rows:
            assert reasons[" ".join(source.split()), " ".join(target.split())] == name


@pytest.mark.slow
def test_good_pairs_stay_and_no_pair_is_lost(folder: Path) -> None:
    kept, dropped = read(folder / "out.tsv"), read(folder / "dropped.jsonl")
    before = read(folder / "noisy.tsv")
    assert sorted((row[0], row[1]) for row in (*kept, *dropped)) == sorted(
        (" ".join(source.split()), " ".join(target.split())) for source, target, _ in before
    )
    lost = [row for row in dropped if row[2]["class"] == "good"]
    assert len(lost) <= 0.01 * len(GOOD), lost
    assert [row for row in before if row in kept] == kept  # in order, with the other columns
    count = f"{len(before):,} pairs read, {len(dropped):,} dropped, {len(kept):,} kept"
    assert count in (folder / "stderr").read_text()


@pytest.mark.slow
def test_the_scores_have_a_row_for_each_pair(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(folder / "scores.parquet").to_pylist()
    assert [row["line"] for row in rows] == list(range(1, len(read(folder / "noisy.tsv")) + 1))
    reasons = [row["reason"] for row in rows if row["reason"]]
    assert sorted(reasons) == sorted(others["reason"] for _, _, others in read(folder / "dropped.jsonl"))
    long = next(row for row in rows if row["reason"] == "length")
    assert long["length"] == 2499  # 500 words of four letters, and the spaces between the words


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scores.parquet", "scores.tsv.gz"])
def test_scores_are_applied_again_with_other_limits(name: str, folder: Path, tmp_path: Path) -> None:
    if name.endswith("gz"):
        flags = ("--exclude", folder / "test.tsv", "--output", tmp_path / "first.tsv", "--scores", tmp_path / name)
        succeeds(folder / "noisy.tsv", *flags)
    scores = (folder if name.endswith("parquet") else tmp_path) / name
    succeeds(folder / "noisy.tsv", "--output", tmp_path / "same.tsv", "--from-scores", scores)
    assert (tmp_path / "same.tsv").read_bytes() == (folder / "out.tsv").read_bytes()
    flags = ("--output", tmp_path / "more.tsv", "--dropped", tmp_path / "dropped.tsv", "--from-scores", scores)
    succeeds(folder / "noisy.tsv", *flags, "--max-characters", "40")
    assert all(max(len(row[0]), len(row[1])) <= 40 for row in read(tmp_path / "more.tsv"))
    assert len(read(tmp_path / "more.tsv")) + len(read(tmp_path / "dropped.tsv")) == len(read(folder / "noisy.tsv"))


@pytest.mark.parametrize("name", ["scores.parquet", "scores.tsv"])
def test_the_best_duplicate_has_the_highest_probability_in_the_file(name: str, tmp_path: Path) -> None:
    pairs = [("one two", "eins"), ("one two", "eins zwei"), ("one two", "zwei")]
    write(tmp_path / "c.tsv", pairs)
    columns = {"empty": [4, 7, 4], "model": [0.5, 0.4, 0.3], "probability": [0.2, 0.9, np.nan]}
    with contextlib.ExitStack() as stack:
        writer = ScoreWriter(tmp_path / name, list(columns), stack)
        values = np.array([*columns.values()], np.float32).T
        writer.write(0, 1, checksums(*zip(*pairs, strict=True)), values, [None, None, None])
    flags = ("--filters", "empty", "--duplicates", "source", "--from-scores", tmp_path / name)
    succeeds(tmp_path / "c.tsv", *flags, "--output", tmp_path / "out.tsv")
    assert [row[:2] for row in read(tmp_path / "out.tsv")] == [("one two", "eins zwei")]


def test_scores_of_another_corpus_are_refused(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "short.tsv", GOOD[:5])
    write(tmp_path / "long.tsv", GOOD * 2)
    for name, message in (
        ("short.tsv", "rows, but the corpora have 5 pairs"),
        ("long.tsv", f"but the corpora have {2 * len(GOOD):,} pairs"),
    ):
        flags = ("--output", tmp_path / "o.tsv", "--from-scores", folder / "scores.parquet")
        result = clean(tmp_path / name, *flags)
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output
    assert not (tmp_path / "o.tsv").exists()


@pytest.mark.parametrize("suffix", ["parquet", "tsv"])
def test_scores_of_an_equally_long_corpus_are_refused(suffix: str, folder: Path, tmp_path: Path) -> None:
    scores, output = tmp_path / f"scores.{suffix}", tmp_path / "o.tsv"
    write(tmp_path / "one.tsv", GOOD)
    write(tmp_path / "two.tsv", [*GOOD[:2], (GOOD[2][0], GOOD[2][1] + "!"), *GOOD[3:]])
    succeeds(tmp_path / "one.tsv", "--output", output, "--filters", "empty,length", "--scores", scores)
    kept = output.read_bytes()
    result = clean(tmp_path / "two.tsv", "--output", output, "--filters", "empty,length", "--from-scores", scores)
    message = " ".join(result.stderr.split())
    assert result.exit_code == 2 and f"row 3 of {scores}" in message, result.output
    assert output.read_bytes() == kept
    old = tmp_path / "old.tsv"
    old.write_text("corpus\tline\tempty\treason\n0\t1\t0\t\n")
    result = clean(tmp_path / "one.tsv", "--output", output, "--filters", "empty", "--from-scores", old)
    assert result.exit_code == 2 and "no column checksum" in " ".join(result.stderr.split())


def test_the_checksum_of_a_pair_is_the_crc_of_its_mended_text(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [("caf\u00c3\u00a9 &amp; bar", "x")])
    succeeds(tmp_path / "c.tsv", "--output", tmp_path / "o.tsv", "--filters", "empty", "--scores", tmp_path / "s.tsv")
    heading, row = ((tmp_path / "s.tsv").read_text().splitlines()[i].split("\t") for i in (0, 1))
    assert row[heading.index("checksum")] == str(zlib.crc32("caf\u00e9 & bar\tx".encode()))


def test_the_report_has_counts_histograms_and_examples(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    for text in ("Home | News | About us", "length_ratio", "Overlap", "<svg", "kept, next to the limit"):
        assert text in page
    reasons, rest = page.split("<h2>Reasons</h2>")[1].split("<h2>Dropped pairs</h2>")
    rows = re.findall(r"<tr><td[^>]*>([^<]*)</td><td[^>]*>([\d,]+)</td><td[^>]*>([\d,]+)</td>", reasons)
    dropped = [int(count.replace(",", "")) for _, count, _ in rows]
    assert dropped == sorted(dropped, reverse=True) and all(int(each.replace(",", "")) for _, _, each in rows)
    # a filter without effect is named once, and its chart is in the folded part
    (idle,) = re.findall(r"beyond the limit of ([^<]*)\.</p>", reasons)
    shown, folded = rest.split("<details>")
    for name in idle.split(", "):
        assert name not in [row[0] for row in rows]
        assert f"<b>{name}</b>" not in shown and f"<b>{name}</b>" in folded
    overlap = shown.split("<h2>Overlap</h2>")[1].split("</table>")[0]
    counts = [int(each.replace(",", "")) for each in re.findall(r'<td class="number">([\d,]+)</td>', overlap)]
    assert 0 < len(counts) <= 12 and counts == sorted(counts, reverse=True) and counts[-1] > 0


@pytest.mark.slow
def test_workers_give_the_bytes_of_one_process(folder: Path, tmp_path: Path) -> None:
    flags = ("--exclude", folder / "test.tsv", "--output", tmp_path / "o.tsv", "--workers", "3")
    succeeds(folder / "noisy.tsv", *flags)
    assert (tmp_path / "o.tsv").read_bytes() == (folder / "out.tsv").read_bytes()


@pytest.mark.slow
def test_a_killed_worker_leaves_no_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main_process, checked_scores = os.getpid(), blocks.checked_scores

    def killed(*arguments: object) -> object:
        if os.getpid() != main_process:
            os.kill(os.getpid(), signal.SIGKILL)
        return checked_scores(*arguments)

    monkeypatch.setattr(blocks, "checked_scores", killed)
    monkeypatch.setattr(cleaning, "BLOCK", 1000)
    flags = ("--output", tmp_path / "o.tsv", "--dropped", tmp_path / "d.tsv", "--scores", tmp_path / "s.tsv")
    result = clean(folder / "noisy.tsv", *flags, "--workers", "2")
    assert result.exit_code == 2 and "ended unexpectedly (SIGKILL)" in result.stderr, result.output
    assert list(tmp_path.iterdir()) == []


KINDS = {
    "short lines": [("Yes.", "Ja."), ("OK", "OK"), ("Help", "Hilfe"), ("Thanks!", "Danke!"), ("?", "?"), ("7", "7")],
    "number words": [("I have 2 dogs and 3 cats.", "Ich habe zwei Hunde und drei Katzen."),
                     ("It happened in the 1980s.", "Das geschah in den 80ern."),
                     ("It costs 1,000.50 dollars now.", "Es kostet jetzt 1.000,5 Dollar."),
                     ("We meet at 3 pm today.", "Wir treffen uns heute um 15 Uhr.")],
    "names": [("Barack Obama", "Barack Obama"), ("Microsoft Windows Server", "Microsoft Windows Server"),
              ("Johann Sebastian Bach and Antonio Vivaldi", "Johann Sebastian Bach und Antonio Vivaldi"),
              ("EuroBraille (AzerBraille, Clio, Iris, Scriba)", "EuroBraille (AzerBraille, Clio, Iris, Scriba);"),
              ("Another Twitter IRC gateway", "Another Twitter IRC Gateway")],
    "addresses": [("Write to info@example.org for help.", "Schreiben Sie an info@example.org um Hilfe."),
                  ("See https://example.org/en/page for more.", "Mehr unter https://www.example.org/de/seite finden.")],
}  # fmt: skip


@pytest.fixture(scope="module")
def dropped_good(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, object]]:
    """Returns the pairs that are dropped from a corpus with all of KINDS, and their reasons."""
    path = tmp_path_factory.mktemp("kinds")
    write(path / "c.tsv", [*GOOD, *(pair for rows in KINDS.values() for pair in rows)])
    succeeds(path / "c.tsv", "--output", path / "o.jsonl", "--dropped", path / "d.jsonl", "--preset", "crawl")
    return [(source, target, others["reason"]) for source, target, others in read(path / "d.jsonl")]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_classes_of_good_data_stay(kind: str, dropped_good: list[tuple[str, str, object]]) -> None:
    assert [row for row in dropped_good if row[:2] in KINDS[kind]] == []


CHINESE = ["我们", "他们", "今天", "明天", "在学校", "在家里", "看书", "吃饭", "学习中文", "很高兴", "认识你", "的朋友"]


def test_languages_without_spaces_stay(tmp_path: Path) -> None:
    generator = random.Random(1)
    english = ["we", "they", "today", "tomorrow", "at school", "at home", "read books", "eat", "learn Chinese",
               "are happy", "to know you", "friends"]  # fmt: skip
    rows = []
    for _ in range(400):
        words = generator.sample(range(12), generator.randint(2, 9))
        rows.append((" ".join(english[word] for word in words) + ".", "".join(CHINESE[word] for word in words) + "。"))
    with CorpusWriter(str(tmp_path / "c"), ("en", "zh")) as writer:
        writer.write(Pairs([row[0] for row in rows], [row[1] for row in rows], [{}] * 400))
    flags = ("--duplicates", "none", "--dropped", tmp_path / "d.jsonl")
    succeeds(tmp_path / "c", "--output", tmp_path / "o", *flags, languages=("en", "zh"))
    assert len((tmp_path / "o.zh").read_text().split("\n")) - 1 >= 396, (tmp_path / "d.jsonl").read_text()


def test_duplicates_of_one_side(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [("a b", "x"), ("A b!", "y"), ("c", "x"), ("c d", "z"), ("a b", "x")])
    flags = (tmp_path / "c.tsv", "--filters", "empty", "--output", tmp_path / "o.tsv")
    for mode, kept in (("pair", "xyxz"), ("source", "xxz"), ("target", "xyz"), ("none", "xyxzx")):
        succeeds(*flags, "--duplicates", mode)
        assert "".join(row[1] for row in read(tmp_path / "o.tsv")) == kept, mode


def test_the_most_probable_of_two_translations_stays(tmp_path: Path) -> None:
    source, target = GOOD[0]
    rows = [(source, f"{target} {GOOD[1][1]}"), *dict.fromkeys(GOOD[:300])]  # the first target is too long
    write(tmp_path / "c.tsv", rows)
    flags = (tmp_path / "c.tsv", "--filters", "length_ratio", "--max-length-z", "50", "--duplicates", "source")
    for more, expected in (((), rows[0][1]), (("--min-probability", "0"), target)):
        succeeds(*flags, *more, "--output", tmp_path / "o.tsv")
        assert [row[1] for row in read(tmp_path / "o.tsv") if row[0] == source] == [expected]


def test_the_first_of_pairs_that_differ_in_punctuation_stays_whatever_their_scores(tmp_path: Path) -> None:
    source, target = GOOD[0]
    first = (source, f"{target} {'. ' * 15}.")
    write(tmp_path / "c.tsv", [first, *dict.fromkeys(GOOD[:300])])
    flags = (tmp_path / "c.tsv", "--filters", "length_ratio", "--max-length-z", "50", "--min-probability", "0")
    succeeds(*flags, "--scores", tmp_path / "s.tsv", "--output", tmp_path / "o.tsv")
    heading, *rows = ((tmp_path / "s.tsv").read_text().splitlines()[line].split("\t") for line in range(3))
    longer, shorter = (float(row[heading.index("probability")]) for row in rows)
    assert shorter > longer + 0.1  # the second pair has the better score
    assert [row[:2] for row in read(tmp_path / "o.tsv") if row[0] == source] == [first]


def test_a_filter_of_a_plug_in_has_flags_and_reasons(tmp_path: Path) -> None:
    (tmp_path / "questions.py").write_text(
        "from dataclasses import dataclass\nimport numpy as np\nfrom nmtkit.config import Config, option\n"
        "from nmtkit.cleaning.filters import FILTERS, Filter\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass QuestionsConfig(Config):\n"
        '    max_marks: int = option(0, "drop pairs with more question marks", min=0)\n\n\n'
        '@FILTERS.register("question_marks", QuestionsConfig())\nclass Questions(Filter):\n'
        "    def __init__(self, config, context):\n        super().__init__(config, context)\n"
        "        self.highest = config.max_marks\n\n    def score(self, block):\n"
        '        return np.array([line.count("?") for line in block.sides[0].lines], np.float32)\n'
    )
    write(tmp_path / "c.tsv", [("a?", "b"), ("a??", "b"), ("c", "d")])
    flags = (tmp_path / "c.tsv", "--plugin", tmp_path / "questions.py", "--filters", "empty,question_marks")
    succeeds(*flags, "--output", tmp_path / "o.tsv", "--dropped", tmp_path / "d.jsonl", "--max-marks", "1")
    assert [row[0] for row in read(tmp_path / "o.tsv")] == ["a?", "c"]
    assert json.loads((tmp_path / "d.jsonl").read_text()) == {"en": "a??", "de": "b", "reason": "question_marks"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--filters", "lenght"], "unknown filter 'lenght'"),
        (["--filters", "empty,empty"], "--filters repeats empty"),
        (["--filters", "empty", "--max-characters", "9"], "--max-characters does nothing"),
        (["--from-scores", "{texts}/s.txt"], ".parquet or .tsv"),
        (["--from-scores", "{texts}/s.tsv", "--sample", "100"], "--from-scores and --sample"),
        (["--dropped", "{folder}/o.tsv"], "overwrite a file"),
        (["--exclude", "nothing"], "no such file: nothing.en"),
        (["--domain", "nothing"], "no such file: nothing.en"),
        (["--min-domain", "0.5"], "--min-domain does nothing"),
        (["--filters", "empty", "--exclude", "{texts}/s.tsv"], "--exclude does nothing"),
        (["--filters", "empty", "--domain", "{texts}/s.tsv"], "--domain does nothing"),
        (["--filters", "empty", "--lid-model", "{texts}/s.tsv"], "--lid-model does nothing"),
        (["--from-scores", "{texts}/s.tsv", "--alignment-iterations", "9"], "--from-scores and --alignment-iter"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_named(flags: list[str], message: str, folder: Path, tmp_path: Path) -> None:
    flags = [flag.format(folder=tmp_path, texts=folder) for flag in flags]
    for name in ("s.txt", "s.tsv"):
        (folder / name).touch()
    result = clean(folder / "noisy.tsv", "--output", tmp_path / "o.tsv", *flags)
    assert result.exit_code == 2 and message.lower() in " ".join(result.stderr.split()).lower(), result.output
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_is_not_replaced_whatever_its_files_are_called(tmp_path: Path) -> None:
    for name in ("one.gz", "two"):
        write(tmp_path / name, GOOD[:5])
    (tmp_path / "two.en").rename(tmp_path / "two.en-GB")
    for corpus, output in (("one", "one.gz"), ("two", "two.en-GB")):
        files = {path: path.read_bytes() for path in tmp_path.iterdir()}
        flag = "--output" if corpus == "one" else "--scores"
        more = () if corpus == "one" else ("--output", tmp_path / "o.tsv")
        result = clean(tmp_path / corpus, "--filters", "empty", flag, tmp_path / output, *more)
        assert result.exit_code == 2 and "would overwrite a file" in result.stderr, result.output
        assert files == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_column_of_the_input_is_not_replaced_by_the_reason(tmp_path: Path) -> None:
    pairs = [("", "ein Hund"), ("a dog", "ein Hund"), ("a cat", "eine Katze")]
    write(tmp_path / "c.tsv", pairs, [{"reason": f"of the input {row}"} for row in range(3)])
    flags = (tmp_path / "c.tsv", "--filters", "empty", "--output", tmp_path / "out.tsv", "--dropped")
    result = clean(*flags, tmp_path / "dropped.tsv")
    assert result.exit_code == 2 and "'reason'" in result.stderr and not (tmp_path / "out.tsv").exists()
    succeeds(*flags, tmp_path / "dropped")  # two files of text have no columns
    assert [others["reason"] for _, _, others in read(tmp_path / "out.tsv")] == ["of the input 1", "of the input 2"]


def test_exchanged_languages_leave_nothing_and_say_so(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [(target, source) for source, target in GOOD[:1200]])
    result = clean(tmp_path / "c.tsv", "--output", tmp_path / "o.tsv", "--filters", "swapped,language")
    assert result.exit_code == 2 and "swapped: 1,199" in result.stderr and not (tmp_path / "o.tsv").exists()


def test_a_fasttext_model_identifies_languages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        """Stands for the model of the package fasttext-predict: the first word is the language."""

        def predict(self, line: str, k: int) -> tuple[list[str], list[float]]:
            assert k == 5 and "\n" not in line
            code = "de" if "der" in line else "fr" if "le" in line.split() else "en"
            return [f"__label__{code}", "__label__nl"], [0.9, 0.1]

    module = types.ModuleType("fasttext")
    module.load_model = lambda path: Model() if path.endswith("lid.ftz") else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fasttext", module)
    (tmp_path / "lid.ftz").write_bytes(b"model")
    right = ("The company is hiring people.", "der Betrieb stellt Menschen ein.")
    wrong = ("The company is hiring people now.", "le monde est un grand village.")
    write(tmp_path / "c.tsv", [right, wrong, (right[1], right[0])])
    flags = (tmp_path / "c.tsv", "--filters", "swapped,language", "--output", tmp_path / "o.tsv", "--lid-model")
    succeeds(*flags, tmp_path / "lid.ftz", "--dropped", tmp_path / "d.jsonl")
    assert [row[:2] for row in read(tmp_path / "o.tsv")] == [right]
    assert [row[2]["reason"] for row in read(tmp_path / "d.jsonl")] == ["language", "swapped"]
    result = clean(*flags, tmp_path / "missing.ftz")
    assert result.exit_code == 2 and "missing.ftz: no such file" in " ".join(result.stderr.split())


@pytest.mark.parametrize("flags", [("--duplicate-similarity", "0.8"), ("--quality", "cometkiwi=absent")])
def test_missing_packages_and_models_are_noticed_before_pairs_are_scored(
    flags: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "c.tsv", GOOD[:5])
    monkeypatch.setitem(sys.modules, "rensa", None)
    monkeypatch.setattr(cleaning, "score_corpora", lambda *arguments: pytest.fail("the pairs were scored"))
    result = clean(tmp_path / "c.tsv", *flags, "--output", tmp_path / "o.tsv")
    assert result.exit_code == 2 and flags[0] in result.stderr


def test_similar_pairs_are_duplicates_and_the_better_pair_stays(tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    english = "The old captain shows his young guests every corner of the large wooden ship in the harbour"
    german = "Der alte Kapitän zeigt seinen jungen Gästen jede Ecke des großen hölzernen Schiffes im Hafen"
    rows = [(f"{english}.", f"{german}. {GOOD[1][1]}"), *GOOD[:300], (f"{english} today.", f"{german} heute."),
            (f"{english} today!", f"{german} jetzt."), (f"{english}.", "Das ist etwas anderes.")]  # fmt: skip
    write(tmp_path / "c.tsv", rows)
    flags = (tmp_path / "c.tsv", "--filters", "length_ratio", "--max-length-z", "50", "--output", tmp_path / "o.tsv")
    for more, kept in (
        ((), [0, 301, 302, 303]),
        (("--duplicate-similarity", "0.5"), [0, 303]),  # without scores, the first pair of similar pairs stays
        (("--duplicate-similarity", "0.5", "--min-probability", "0"), [301, 303]),
        (("--duplicate-similarity", "0.5", "--duplicates", "source"), [0]),
    ):
        succeeds(*flags, *more)
        assert [row[:2] for row in read(tmp_path / "o.tsv") if english in row[0]] == [rows[index] for index in kept]
    result = clean(*flags, "--duplicate-similarity", "0.5", "--duplicates", "none")
    assert result.exit_code == 2 and "--duplicate-similarity does nothing" in result.stderr


PO = 'msgid ""\nmsgstr "Language: de\\n"\n\nmsgid "{0}"\nmsgstr "{1}"\n'


@pytest.mark.parametrize(
    "name", ["test", "test.tsv", "test.tmx", "test.jsonl.gz", "test.parquet", "test.zip", "test.po", "folder"]
)
def test_pairs_of_test_sets_in_all_formats_are_dropped(name: str, tmp_path: Path) -> None:
    pair = GOOD[3]
    if name.endswith(".po"):
        (tmp_path / name).write_text(PO.format(*pair))
    elif name == "folder":
        pytest.importorskip("pyarrow")
        (tmp_path / name).mkdir()
        write(tmp_path / name / "part.parquet", [pair])
    else:
        write(tmp_path / name, [pair])
    write(tmp_path / "c.tsv", GOOD[:6])
    flags = ("--filters", "empty,overlap", "--exclude", tmp_path / name)
    succeeds(tmp_path / "c.tsv", *flags, "--output", tmp_path / "o.tsv")
    assert [row[:2] for row in read(tmp_path / "o.tsv")] == [*GOOD[:3], *GOOD[4:6]]


@pytest.mark.parametrize(("mend", "kept"), [("--mend", []), ("--no-mend", ["a mended copy"])])
def test_test_sets_are_mended_like_the_corpus(mend: str, kept: list[str], tmp_path: Path) -> None:
    raw = ("Tom&apos;s dog doesn&apos;t bark at the cafÃ©.", "Der Hund von Tom bellt im CafÃ© nicht &quot;laut&quot;.")
    mended = ("Tom's dog doesn't bark at the café.", 'Der Hund von Tom bellt im Café nicht "laut".')
    write(tmp_path / "test.tsv", [raw])
    write(tmp_path / "c.tsv", [raw, mended, GOOD[0]], [{"kind": kind} for kind in ("raw", "a mended copy", "other")])
    flags = ("--filters", "empty,overlap", "--duplicates", "none", "--exclude", tmp_path / "test.tsv", mend)
    succeeds(tmp_path / "c.tsv", *flags, "--output", tmp_path / "o.tsv")
    assert [row[2]["kind"] for row in read(tmp_path / "o.tsv")] == [*kept, "other"]
