import contextlib
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from sacrebleu.significance import PairedTest

from nmtkit.cli import main
from nmtkit.data.corpora.corpus import Pairs
from nmtkit.data.corpora.writer import CorpusWriter

SENTENCE = "ein Hund läuft über die Wiese, und der Mann sagt: »Ja!« z.B. 3,5 km/h (naïve) don't a-b… 東京 ½"
WORDS = [*SENTENCE.split(), "\u2028", "x\x85y", "Ende\r"]
WORDS += ["\u2028", "x\x85y", "Ende\r"]


def nmtkit_score(*arguments, stdin=None):
    return CliRunner().invoke(main, ["score", *map(str, arguments)], input=stdin)


# A process that imports sacreBLEU once, and runs each command in a fork.
SACREBLEU = """
import json, os, sys, traceback
from sacrebleu.sacrebleu import main
for line in sys.stdin:
    words, output = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.dup2(os.open(output, os.O_WRONLY), 1)
            sys.argv[1:] = words
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def sacrebleu_command(tmp_path_factory):
    """Returns a function that returns the output of sacreBLEU's own command."""
    output = tmp_path_factory.mktemp("sacrebleu") / "output"
    process = subprocess.Popen(
        [sys.executable, "-c", SACREBLEU], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip

    def run(*arguments):
        output.write_text("")
        process.stdin.write(json.dumps([list(map(str, arguments)), str(output)]) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n"
        return output.read_text()

    with process:
        yield run
        process.stdin.close()


def generated_text(generator, lines):
    return [" ".join(generator.choices(WORDS, k=generator.randrange(15))) for _ in range(lines)]


def garbled(generator, text, rate):
    """Returns the text with some words dropped, doubled or exchanged."""
    return [
        " ".join(
            generator.choice([word, word, word, generator.choice(WORDS), "", f"{word} {word}"])
            if generator.random() < rate
            else word
            for word in line.split(" ")
        )
        for line in text
    ]


def figures(text):
    """Returns all numbers and stars of the output except the ratio of the lengths."""
    return re.findall(r"[\d.]+|\*", re.sub(r"ratio ?= ?\S+", "", text))


def write(path, lines):
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


CORPUS_CASES = [
    # (references, our flags, sacrebleu's flags)
    (1, [], []),
    (1, [], []),
    (1, ["--width", 4], ["-w", 4]),
    (2, [], []),
    (3, ["--width", 2], ["-w", 2]),
    (1, ["--lowercase"], ["-lc", "--chrf-lowercase"]),
    (2, ["--lowercase"], ["-lc", "--chrf-lowercase"]),
    (1, ["--tokenize", "intl"], ["-tok", "intl"]),
    (1, ["--tokenize", "char"], ["-tok", "char"]),
    (2, ["--tokenize", "none", "--width", 3], ["-tok", "none", "-w", 3]),
    (1, ["--tokenize", "zh"], ["-tok", "zh"]),
    (1, ["--metric", "bleu,chrf++,ter"], ["--chrf-word-order", 2]),
    (1, ["--confidence"], ["--confidence"]),
    (2, ["--confidence", "--samples", 200, "--width", 3], ["--confidence", "--confidence-n", 200, "-w", 3]),
]


@pytest.mark.parametrize(("seed", "case"), list(enumerate(CORPUS_CASES)))
def test_corpus_scores_equal_the_sacrebleu_command(seed, case, tmp_path, sacrebleu_command):
    count, ours, theirs = case
    generator = random.Random(seed)
    text = generated_text(generator, 25)
    references = [write(tmp_path / f"ref{i}", garbled(generator, text, 0.2 * i)) for i in range(count)]
    system = write(tmp_path / "sys", garbled(generator, text, generator.uniform(0.2, 0.9)))
    output = sacrebleu_command(*references, "-i", system, "-m", "bleu", "chrf", "ter", "-f", "text", *theirs)
    expected = {}
    for line in output.splitlines():
        heading, numbers = line.strip().split(" = ", 1)
        name, signature = heading.split("|", 1)
        expected[name] = (figures(numbers), signature)

    flags = [flag for path in references for flag in ("--ref", path)]
    result = nmtkit_score(*flags, *ours, stdin=system.read_bytes())

    assert result.exit_code == 0, result.output
    numbers, signatures = (block.splitlines() for block in result.stdout.rstrip("\n").split("\n\n"))
    got = {
        line.split()[0]: (figures(line.split(maxsplit=1)[1]), signature.split()[1])
        for line, signature in zip(numbers, signatures, strict=True)
    }
    assert got == expected


@pytest.mark.parametrize("metric", ["bleu", "chrf", "ter"])
def test_sentence_scores_equal_the_sacrebleu_command(metric, tmp_path, sacrebleu_command):
    generator = random.Random(metric)
    text = generated_text(generator, 20)
    reference, system = write(tmp_path / "ref", text), write(tmp_path / "sys", garbled(generator, text, 0.5))
    output = sacrebleu_command(reference, "-i", system, "-m", metric, "-sl", "-f", "text", "-w", 3)
    expected = [line.split(" = ", 1)[1].split()[0] for line in output.splitlines()]
    signature = output.split(" = ", 1)[0]

    result = nmtkit_score("--ref", reference, "--sys", system, "--metric", metric, "--sentence-level", "--width", 3)

    assert result.stdout.splitlines() == [signature, *expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (["--samples", 100], ["--paired-bs", "--paired-bs-n", 100]),
        (["--test", "randomization", "--samples", 200], ["--paired-ar", "--paired-ar-n", 200]),
        (["--metric", "bleu,chrf++,ter"], ["--paired-bs", "--chrf-word-order", 2]),
    ],
)
def test_comparisons_equal_the_sacrebleu_command(ours, theirs, tmp_path, monkeypatch, sacrebleu_command):
    monkeypatch.chdir(tmp_path)
    generator = random.Random(3)
    text = generated_text(generator, 30)
    write(tmp_path / "ref", text)
    systems = {"sys0": 0.5, "sys1": 0.4, "sys2": 0.1}
    for name, rate in systems.items():
        write(tmp_path / name, garbled(generator, text, rate))
    paths = [tmp_path / name for name in systems]
    output = sacrebleu_command(
        tmp_path / "ref", "-i", *paths, "-m", "bleu", "chrf", "ter", "-f", "latex", "-w", 3, *theirs
    )
    rows = [line.removesuffix(r"\\").split("&") for line in output.splitlines() if "&" in line]
    names = [heading.split()[0] for heading in rows[0][1:]]
    expected = {
        (name, row[0].split()[-1].rpartition("/")[2]): row[1 + k] for row in rows[1:] for k, name in enumerate(names)
    }

    flags = [flag for name in systems for flag in ("--sys", name)]
    result = nmtkit_score("--ref", "ref", *flags, *ours, "--width", 3)

    got, metric = {}, None
    for line in result.stdout.splitlines()[:-1]:
        if line.startswith("  "):
            system, *numbers = line.split()
            got[metric, system] = numbers
        elif line:
            metric, signature = line.split()
            assert signature in output
    assert {place: figures(" ".join(numbers)) for place, numbers in got.items()} == {
        place: figures(numbers) for place, numbers in expected.items()
    }


def test_the_better_system_is_told_from_the_baseline_and_a_copy_is_not(tmp_path):
    generator = random.Random(5)
    text = generated_text(generator, 40)
    bad = garbled(generator, text, 0.8)
    files = {"ref": text, "base": bad, "copy": bad, "good": garbled(generator, text, 0.1)}
    paths = {name: write(tmp_path / name, lines) for name, lines in files.items()}
    flags = [flag for name in ("base", "copy", "good") for flag in ("--sys", paths[name])]
    text_output = nmtkit_score("--ref", paths["ref"], *flags, "--metric", "bleu", "--samples", 100).stdout
    base, copy, good = text_output.splitlines()[1:4]
    assert "p =" not in base and "*" not in copy and good.endswith("*")
    assert "paired bootstrap, 100 samples" in text_output


def test_p_values_of_older_versions_of_sacrebleu_are_shown(tmp_path, monkeypatch):
    """sacreBLEU 2.4 returns numbers of NumPy, which ended the report with a traceback."""
    original = PairedTest.__call__

    def call(self):
        signatures, scores = original(self)
        for result in (each for results in scores.values() for each in results if hasattr(each, "p_value")):
            result.p_value = None if result.p_value is None else np.float64(result.p_value)
        return signatures, scores

    monkeypatch.setattr(PairedTest, "__call__", call)
    one, two = write(tmp_path / "one", ["ein Hund"] * 3), write(tmp_path / "two", ["ein Kater"] * 3)
    result = nmtkit_score("--sys", one, "--sys", two, "--ref", one, "--metric", "chrf", "--samples", "50")
    assert result.exit_code == 0 and "p = 0." in result.stdout


def test_the_references_kept_in_a_dataset_are_used(tmp_path):
    text = ["ein Hund\rläuft da", "ein \u2028 zweiter", ""]
    for language in ("en", "de"):
        write(tmp_path / f"x.{language}", text[:2] * 20)
        write(tmp_path / f"y.{language}", text)
    make = ["preprocess", "-s", "en", "-t", "de", "--trainpref", "x", "--validpref", "y", "--testpref", "x,y"]
    with contextlib.chdir(tmp_path):
        made = CliRunner().invoke(main, [*make, "--destdir", "data-bin", "--vocab-size", "300"])
    assert made.exit_code == 0, made.stderr
    stdin = "".join(line + "\n" for line in text)
    for subset in ("valid", "test1"):
        result = nmtkit_score("--data", tmp_path / "data-bin", "--gen-subset", subset, "--format", "json", stdin=stdin)
        assert json.loads(result.stdout)[0]["score"] == pytest.approx(100)
    wrong = nmtkit_score("--data", tmp_path / "data-bin", stdin=stdin)
    assert wrong.exit_code == 2 and "standard input has 3" in wrong.stderr and "(test) has 40" in wrong.stderr


@pytest.mark.parametrize(
    ("files", "flags", "message"),
    [
        ({"ref": b"a\nb\n", "sys": b"a\n"}, ["--ref", "ref", "--sys", "sys"], "sys has 1, ref has 2"),
        ({"ref": b"a\n", "sys": b""}, ["--ref", "ref", "--sys", "sys"], "sys is empty"),
        ({"ref": b"a\n"}, ["--ref", "ref"], "standard input is empty"),
        (
            {"ref": b"a\n\xff\n", "sys": b"a\nb\n"},
            ["--ref", "ref", "--sys", "sys"],
            "ref:2: byte 1",
        ),
        ({"sys": b"a\n"}, ["--ref", "ref", "--sys", "sys"], "ref: no such file"),
        ({"ref": b"b\n", "a.tsv": b"a\tb\n"}, ["--ref", "ref", "--sys", "a.tsv"], "--sys a.tsv"),
        ({"sys": b"a\n"}, ["--sys", "sys"], "--ref FILE, as --data FOLDER"),
        ({"ref": b"a\n", "sys": b"a\n"}, ["--ref", "ref", "--sys", "sys", "--metric", "blue"], "unknown metric 'blue'"),
        ({"ref": b"a\n", "sys": b"a\n"}, ["--ref", "ref", "--sys", "sys", "--sys", "sys"], "--sys sys"),
        (
            {"ref": b"a\n", "sys": b"a\n"},
            ["--ref", "ref", "--sys", "sys", "--metric", "tokenized-bleu"],
            "the language of the",
        ),
    ],
)
def test_a_mistake_is_named_and_exits_with_2(files, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "tokenized-bleu" in flags:
        pytest.importorskip("sacremoses")
    for name, contents in files.items():
        (tmp_path / name).write_bytes(contents)
    result = nmtkit_score(*flags, stdin=b"")
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert result.stdout == ""


ACTS = {  # a value of every flag, and the metric that the flag belongs to
    "--gen-subset": (["test"], ["--data"]),
    "--tokenize": (["char"], ["bleu"]),
    "--lowercase": ([], ["bleu", "chrf", "chrf++"]),
    "--target-lang": (["de"], ["tokenized-bleu", "bleu"]),
    "--src": (["ref"], ["comet"]),
    "--device": (["cpu"], ["comet"]),
    "--test": (["randomization"], ["several"]),
    "--samples": (["50"], ["several", "--confidence"]),
    "--width": (["3"], ["text"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("metric", ["bleu", "chrf", "chrf++", "ter"])
@pytest.mark.parametrize("flag", ACTS)
def test_a_flag_that_would_do_nothing_is_refused(flag, metric, several, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("ref", "ein Hund läuft da ."), ("one", "ein hund läuft ."), ("two", "Hund läuft da hin .")):
        write(tmp_path / name, [text] * 3)
    values, belongs = ACTS[flag]
    systems = ["--sys", "one", *(["--sys", "two"] if several else [])]
    for extra in ([], ["--confidence"], ["--format", "json"]):
        present = {metric, *extra, "several" if several else "", "" if "json" in extra else "text"}
        result = nmtkit_score("--ref", "ref", *systems, "--metric", metric, flag, *values, *extra)
        assert result.exit_code == (0 if present & set(belongs) else 2), result.output
        if result.exit_code == 2:
            assert flag in result.stderr and "does nothing without" in result.stderr


def test_perplexities_are_not_resampled(tmp_path):
    model, one, two = (write(tmp_path / name, ["ein Hund"]) for name in ("lm.pt", "one", "two"))
    result = nmtkit_score("--path", model, "--sys", one, "--sys", two, "--samples", "50")
    assert result.exit_code == 2 and "--path and --samples" in result.stderr


@pytest.mark.parametrize("flags", [[], ["--metric", "ter"]])
def test_json_holds_confidence_intervals(flags, tmp_path):
    reference = write(tmp_path / "ref", ["ein Hund läuft da .", "eine Katze schläft ."])
    result = nmtkit_score("--ref", reference, "--sys", reference, "--confidence", "--format", "json", *flags)
    assert result.exit_code == 0, result.output
    assert all(row["interval"] == 0 for row in json.loads(result.stdout))


@pytest.mark.parametrize(("metric", "said"), [("bleu,bleu", "once"), ("", "list is empty"), (",", "list is empty")])
def test_each_metric_is_named_once(metric, said, tmp_path):
    reference = write(tmp_path / "ref", ["ein Hund"])
    result = nmtkit_score("--ref", reference, "--sys", reference, "--metric", metric)
    assert result.exit_code == 2 and said in result.stderr


def test_the_target_language_chooses_the_tokenizer_of_bleu(tmp_path):
    reference = write(tmp_path / "ref", ["他今天早上去学校了。"])
    files = ["--ref", reference, "--sys", reference, "--metric", "bleu"]
    assert "|tok:zh|" in nmtkit_score(*files, "--target-lang", "zh").stdout
    assert "|tok:char|" in nmtkit_score(*files, "--tokenize", "char").stdout
    both = nmtkit_score(*files, "--tokenize", "char", "--target-lang", "zh")
    assert both.exit_code == 2 and "--target-lang does nothing without" in both.stderr
    for language in ("en", "zh"):
        write(tmp_path / f"x.{language}", ["他今天早上去学校了。", "我非常喜欢吃苹果和香蕉。"] * 20)
    make = ["preprocess", "-s", "en", "-t", "zh", "--trainpref", "x", "--testpref", "x", "--destdir", "bin"]
    with contextlib.chdir(tmp_path):
        made = CliRunner().invoke(main, [*make, "--vocab-size", "300"])
        assert made.exit_code == 0, made.stderr
        assert "|tok:zh|" in nmtkit_score("--data", "bin", "--sys", "x.zh", "--metric", "bleu").stdout


@pytest.mark.parametrize("name", ["out.jsonl", "standard input"])
def test_json_lines_of_generate_are_scored_by_their_best_translation(name, tmp_path):
    reference = write(tmp_path / "ref", ["ein Hund läuft da .", "eine Katze schläft dort ."])
    lines = ["ein Hund läuft da .", "eine Katze schläft da ."]
    records = [
        json.dumps({"id": i, "source": "x", "hypotheses": [{"text": line, "score": -1.0}, {"text": "schlecht"}]})
        for i, line in enumerate(lines)
    ]
    plain = nmtkit_score("--ref", reference, "--sys", write(tmp_path / "plain", lines)).stdout
    if name == "out.jsonl":
        result = nmtkit_score("--ref", reference, "--sys", write(tmp_path / name, records))
    else:
        result = nmtkit_score("--ref", reference, stdin="\n".join(records) + "\n")
    assert result.stdout == plain
    assert f"{name}: scoring the best" in result.stderr.replace("\n", " ")
    mixed = nmtkit_score("--ref", reference, stdin=records[0] + "\n{}\n")
    assert mixed.exit_code == 2 and "standard input:2: the first" in mixed.stderr


@pytest.mark.parametrize("line", ['{"translation": "ein Hund"}', '{"hypotheses": []}', '{"hypotheses": [{}]}'])
def test_json_of_another_program_is_told(line, tmp_path):
    reference = write(tmp_path / "ref", ["ein Hund"])
    said = nmtkit_score("--ref", reference, stdin=f"{line}\n").stderr
    assert "JSON without a translation" in said
    assert "JSON" not in nmtkit_score("--ref", reference, stdin="{ein Hund}\n").stderr


@pytest.mark.parametrize(("name", "flags"), [("ref.tsv", ()), ("ref.tmx", ("-t", "de")), ("ref.jsonl", ("-t", "de"))],
                         ids=["tsv", "tmx", "jsonl"])  # fmt: skip
def test_the_target_side_of_a_corpus_is_the_reference(name, flags, tmp_path):
    with CorpusWriter(str(tmp_path / name), ("en", "de")) as writer:
        writer.write(Pairs(["a b c d", "e"], ["w x y z", "v\u2028w"], [{}, {}]))
    (tmp_path / "plain.de").write_text("w x y z\nv\u2028w\n")
    system = "w x y z\nv\u2028u\n"
    expected = nmtkit_score("--ref", tmp_path / "plain.de", *flags, stdin=system)
    assert expected.exit_code == 0, expected.output
    assert nmtkit_score("--ref", tmp_path / name, *flags, stdin=system).stdout == expected.stdout


def test_a_tsv_of_one_column_is_a_text(tmp_path):
    """Translations in a .tsv were refused as a corpus, and references in a .tsv as a table with too few columns."""
    lines = ["ein Hund läuft da .", "eine Katze schläft da ."]
    plain, table = (write(tmp_path / name, lines) for name in ("plain", "one.tsv"))
    reference = write(tmp_path / "ref", ["ein Hund läuft da .", "eine Katze schläft dort ."])
    for ours, theirs in ((("--sys", table, "--ref", reference), plain), (("--ref", table, "--sys", reference), plain)):
        result = nmtkit_score(*ours)
        assert result.exit_code == 0, result.output
        assert result.stdout == nmtkit_score(*(theirs if word == table else word for word in ours)).stdout
    two = write(tmp_path / "two.tsv", ["a dog\tein Hund", "a cat\teine Katze"])
    refused = nmtkit_score("--sys", two, "--ref", reference)
    assert refused.exit_code == 2 and "two.tsv" in refused.stderr


def test_the_languages_choose_a_side_of_a_corpus_of_several_languages(tmp_path):
    """`-t de` was refused with chrf, which needs no language itself."""
    texts = {"en": "a dog", "de": "ein Hund", "fr": "un chien"}
    variants = "".join(f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in texts.items())
    path = tmp_path / "c.tmx"
    path.write_text(f'<tmx version="1.4"><header srclang="en"/><body><tu>{variants}</tu></body></tmx>')
    for code, score in (("de", 100), ("fr", 0)):
        result = nmtkit_score("--ref", path, "--metric", "chrf", "-t", code, stdin="ein Hund\n")
        assert result.exit_code == 0 and (f" {score}.0" in result.stdout) == (score == 100), result.output
    unnamed = nmtkit_score("--ref", path, "--metric", "chrf", stdin="ein Hund\n")
    assert unnamed.exit_code == 2 and "(en, de, fr); name" in unnamed.stderr


@pytest.mark.slow
def test_columns_select_the_reference(tmp_path):
    (tmp_path / "c.tsv").write_text("1\ta b\tw x y z\n2\te\tv w\n")
    (tmp_path / "plain").write_text("w x y z\nv w\n")
    expected = nmtkit_score("--ref", tmp_path / "plain", stdin="w x y z\nv u\n")
    result = nmtkit_score("--ref", tmp_path / "c.tsv", "--columns", "2,3", stdin="w x y z\nv u\n")
    assert (result.exit_code, result.stdout) == (0, expected.stdout), result.output
    result = nmtkit_score("--ref", tmp_path / "plain", "--columns", "2,3", stdin="w x y z\nv u\n")
    assert result.exit_code == 2 and "--columns does nothing" in result.stderr
