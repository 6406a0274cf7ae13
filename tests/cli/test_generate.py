"""`nmtkit generate`: its inputs, its outputs and its errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.corpora.corpus import Pairs
from nmtkit.data.corpora.writer import CorpusWriter
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import checkpoint
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request

WORDS = ["a", "the", "dog", "cat", "runs", "sleeps", "in", "on", "park", "street", ".", "!", "two", "men", "women"]
LINES = ["a dog runs .", "", "two men sleeps in the park !", "  ", "🙂 كلب", "the cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds model.pt, of a random tiny Transformer, and the text test.en and test.de."""
    path = tmp_path_factory.mktemp("generate")
    save_tiny_transformer(path / "model.pt", tiny_tokenizer(), decoder_layers=1)
    for language in ("en", "de"):
        (path / f"test.{language}").write_text("\n".join(LINES) + "\n")
    return path


def run(*arguments: object, text: str | bytes | None = None) -> Result:
    lengths = [] if "--score-reference" in arguments else ["--max-len-a", "0", "--max-len-b", "6"]
    command = ["generate", "--device", "cpu", *lengths, *map(str, arguments)]
    return CliRunner().invoke(main, command, input=text)


def test_standard_input_gives_a_line_for_each_line(folder):
    result = run("--path", folder / "model.pt", "--keep-loops", text="\n".join(LINES))
    assert result.exit_code == 0, result.output
    lines = result.stdout.split("\n")
    assert len(lines) == len(LINES) + 1 and lines[-1] == ""
    assert lines[1] == lines[3] == "" and lines[0] != ""
    assert result.stderr == ""


def test_nothing_in_gives_nothing_out(folder):
    result = run("--path", folder / "model.pt", text="")
    assert (result.exit_code, result.stdout) == (0, "")


def test_files_one_after_the_other_equal_standard_input(folder):
    twice = run("--path", folder / "model.pt", "--input", folder / "test.en", "--input", folder / "test.en")
    assert twice.stdout == run("--path", folder / "model.pt", text="\n".join(LINES)).stdout * 2


def test_workers_equal_one_process(folder):
    one = run("--path", folder / "model.pt", "--input", folder / "test.en")
    two = run("--path", folder / "model.pt", "--input", folder / "test.en", "--workers", 2, "--max-tokens", 8)
    assert two.exit_code == 0 and one.stdout == two.stdout


def test_jsonl_holds_the_nbest(folder):
    result = run("--path", folder / "model.pt", "--format", "jsonl", "--nbest", 3, text="\n".join(LINES))
    rows = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
    assert [row["id"] for row in rows] == list(range(len(LINES)))
    assert [row["source"] for row in rows] == LINES
    for row in rows:
        assert {"text", "pieces", "score", "log_probability"} <= set(row["hypotheses"][0])
    assert [len(row["hypotheses"]) for row in rows] == [3, 1, 3, 1, 3, 3]
    text = run("--path", folder / "model.pt", text="\n".join(LINES)).stdout.split("\n")[:-1]
    assert [row["hypotheses"][0]["text"] for row in rows] == text


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["--path", "nowhere.pt"], "", "--path nowhere.pt"),
        (["--path", "FOLDER/model.pt", "--input", "nowhere.en"], "", "nowhere.en"),
        (["--path", "FOLDER/model.pt", "--input", "FOLDER/empty"], "", "empty is empty"),
        (["--path", "FOLDER/model.pt"], b"fine\nb\xffd\n", "standard input:2: byte 2"),
        (["--path", "FOLDER/model.pt", "--gen-subset", "test"], "", "--gen-subset does nothing"),
        (["--path", "FOLDER/model.pt", "--nbest", "2"], "", "--nbest above 1"),
        (["--path", "FOLDER/model.pt", "--beam", "0"], "", "--beam is 0"),
        (
            ["--path", "FOLDER/model.pt", "--workers", "2", "--threads", "2"],
            "",
            "--workers and --threads",
        ),
        (["FOLDER", "--path", "FOLDER/model.pt"], "", "not an nmtkit dataset"),
    ],
)
def test_mistakes_are_named_and_exit_with_2(folder, arguments, text, message):
    (folder / "empty").write_bytes(b"")
    result = run(*[argument.replace("FOLDER", str(folder)) for argument in arguments], text=text)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == "" or "UTF-8" in message


@pytest.mark.slow
def test_a_reader_that_leaves_early_ends_the_run_quietly(folder):
    command = f"{sys.executable} -m nmtkit generate --device cpu --max-len-b 3 --max-len-a 0 --path {folder}/model.pt"
    lines = "a dog runs .\n" * 4_000
    result = subprocess.run(f"{command} | head -n 1", shell=True, input=lines.encode(), capture_output=True)
    assert result.stdout.count(b"\n") == 1
    assert all(line.startswith(b"engine: ") for line in result.stderr.splitlines())


def beside(folder: Path, name: str, lines: list[str]) -> Path:
    (folder / name).write_text("".join(line + "\n" for line in lines))
    return folder / name


def test_files_beside_the_input_say_how_each_line_is_translated(folder):
    wanted = ["the park\ttwo men", "", "dog", "", "", "a"]
    prefixes = beside(folder, "prefixes", ["two", "", "the", "", "a", "men"])
    lengths = ["--max-len-b", 20]
    phrases = run("--path", folder / "model.pt", "--constraints", beside(folder, "phrases", wanted), *lengths,
                  "--prefix", prefixes, text="\n".join(LINES))  # fmt: skip
    assert phrases.exit_code == 0, phrases.stderr
    lines = phrases.stdout.split("\n")
    assert "the park" in lines[0] and "two men" in lines[0] and lines[0].startswith("two")
    assert lines[1] == "" and lines[2].startswith("the") and "dog" in lines[2]
    avoided = run("--path", folder / "model.pt", "--avoid", beside(folder, "avoid", [lines[0], *LINES[1:]]), *lengths,
                  "--prefix", prefixes, text="\n".join(LINES))  # fmt: skip
    assert avoided.exit_code == 0 and avoided.stdout.split("\n")[0] != lines[0]


@pytest.mark.parametrize(("number", "message"), [(3, "has 3 lines, fewer than"), (9, "more lines than")])
def test_a_file_of_another_length_than_the_input_is_an_error(folder, number, message):
    result = run("--path", folder / "model.pt", "--prefix", beside(folder, "other", ["a"] * number), text="a\n" * 6)
    assert result.exit_code == 2 and message in result.stderr


def test_references_are_scored_line_by_line(folder):
    reference = beside(folder, "reference", ["two men", "a dog"])
    result = run("--path", folder / "model.pt", "--score-reference", "--reference", reference, text="a\nthe cat\n")
    assert result.exit_code == 0, result.stderr
    scores = [float(line) for line in result.stdout.split()]
    assert len(scores) == 2 and max(scores) < 0


def test_a_reference_of_an_empty_line_has_no_links(folder):
    reference = beside(folder, "reference", ["two men", "a dog"])
    flags = ("--score-reference", "--reference", reference, "--format", "jsonl", "--alignment", "hard")
    result = run("--path", folder / "model.pt", *flags, text="\nthe cat\n")
    empty, other = (
        [each["alignment"] for each in json.loads(line)["hypotheses"]] for line in result.stdout.split("\n")[:2]
    )
    assert empty == [[]] and other != [[]]


@pytest.mark.parametrize(
    "flags",
    [
        ["--sampling", "--top-k", "5", "--temperature", "0.7", "--seed", "3", "--nbest", "3"],
        ["--sampling", "--top-p", "0.9", "--nbest", "4", "--mbr", "bleu"],
        ["--diverse-groups", "2", "--nbest", "4", "--no-repeat-ngram", "2"],
        ["--beam", "3", "--nbest", "2", "--min-len", "2", "--alignment", "soft"],
        ["--nbest", "3", "--mbr", "chrf", "--alignment", "hard"],
    ],
)
def test_every_mode_gives_the_same_from_one_process_and_from_two_workers(folder, flags):
    flags = [*flags, "--path", folder / "model.pt", "--format", "jsonl", "--max-tokens", 20]
    one, two = run(*flags, text="\n".join(LINES)), run(*flags, "--workers", 2, text="\n".join(LINES))
    assert one.exit_code == two.exit_code == 0, one.stderr + two.stderr
    for line, other in zip(one.stdout.splitlines(), two.stdout.splitlines(), strict=True):
        ours, theirs = json.loads(line), json.loads(other)
        assert [x["text"] for x in ours["hypotheses"]] == [x["text"] for x in theirs["hypotheses"]]


@pytest.mark.parametrize(
    "flags",
    [
        ["--keep-loops"],
        ["--keep-loops", "--alignment", "hard"],
        ["--keep-loops", "--alignment", "soft"],
        ["--keep-loops", "--alignment", "words"],
        ["--keep-loops", "--mbr", "chrf", "--nbest", "3"],
        ["--mbr", "bleu", "--nbest", "3", "--sampling", "--quality"],
        ["--keep-loops", "--glossary", "terms"],
        ["--keep-loops", "--protect-spans", "--truecase-caps", "--markup", "html"],
    ],
)
def test_a_line_without_words_has_the_fields_of_other_lines(folder, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    beside(tmp_path, "terms", ["dog\tcat"])
    result = run("--path", folder / "model.pt", "--format", "jsonl", *flags, text="a dog\n\n \t\n")
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    fields = [{key for hypothesis in line["hypotheses"] for key in hypothesis} for line in lines]
    assert fields[0] == fields[1] == fields[2] and {"text", "pieces", "score", "log_probability"} <= fields[0]
    assert len(lines[1]["hypotheses"]) == 1 and lines[1]["hypotheses"][0].get("utility", 100.0) == 100.0


@pytest.mark.slow
def test_a_dataset_gives_what_its_text_gives_and_is_checked(folder, tmp_path):
    """A dataset with the tokenizer of the checkpoint is translated; a dataset with another tokenizer is refused."""
    tokenizer = Tokenizer.from_state(checkpoint.load(folder / "model.pt")["tokenizer"])
    tokenizer.save(tmp_path / "tokenizer")
    beside(tmp_path, "train.en", [" ".join(WORDS)] * 3), beside(tmp_path, "train.de", [" ".join(WORDS)] * 3)
    flags = ["preprocess", "-s", "en", "-t", "de", "--trainpref", str(tmp_path / "train"), "--testpref",
             str(folder / "test"), "--destdir"]  # fmt: skip
    own = CliRunner().invoke(
        main, [*flags, str(tmp_path / "own"), "--tokenizer-from", str(tmp_path / "tokenizer/joint.model")]
    )
    assert own.exit_code == 0, own.stderr
    result = run(tmp_path / "own", "--path", folder / "model.pt")
    assert result.stdout == run("--path", folder / "model.pt", "--input", folder / "test.en").stdout
    scored = run(tmp_path / "own", "--path", folder / "model.pt", "--score-reference")
    assert len(scored.stdout.split()) == len(LINES)
    missing = run(tmp_path / "own", "--path", folder / "model.pt", "--gen-subset", "dev")
    assert missing.exit_code == 2 and "no subset 'dev'" in missing.stderr and "test" in missing.stderr
    other = CliRunner().invoke(main, [*flags, str(tmp_path / "other"), "--vocab-size", "300"])
    assert other.exit_code == 0, other.stderr
    result = run(tmp_path / "other", "--path", folder / "model.pt")
    assert result.exit_code == 2 and "have different tokenizers" in result.stderr


def test_a_plug_in_that_is_not_loaded_is_named(folder, tmp_path):
    contents = checkpoint.load(folder / "model.pt")
    del contents["nmtkit"]
    checkpoint_file.save(tmp_path / "plugged.pt", contents | {"architecture": "mine", "plugins": ["mine.py"]})
    result = run("--path", tmp_path / "plugged.pt", text="a\n")
    assert result.exit_code == 2 and "add --plugin mine.py" in result.stderr


@pytest.mark.slow
def test_a_slow_writer_gets_its_lines_while_it_waits(folder):
    """Translations of complete lines are written before the input ends."""
    command = [sys.executable, "-m", "nmtkit", "generate", "--device", "cpu", "--max-len-b", "3", "--max-len-a", "0",
               "--path", str(folder / "model.pt")]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for line in (b"a dog runs .\n", b"\n", b"the cat\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")
        process.stdin.close()
        assert process.stdout.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("device", ["cuda", "cuda:9", "tpu", "meta", "cpu:x", ""])
def test_a_device_that_is_not_there_is_one_clear_line(folder, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    result = run("--path", folder / "model.pt", "--device", device, text="a\n")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert f"--device {device} cannot" in result.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--lenpen", "nan"), ("--lenpen", "inf"), ("--max-len-b", "1e12"), ("--max-len-b", "999999999999"),
     ("--min-len", "1000000"), ("--beam", "99999999"), ("--temperature", "inf"), ("--threads", "100000"),
     ("--workers", "0"), ("--max-tokens", "99999999999999999999"), ("--seed", "-1"), ("--max-source-len", "0")],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_before_anything_is_loaded(tmp_path, flag, value):
    (tmp_path / "no.pt").touch()
    result = CliRunner().invoke(main, ["generate", "--path", str(tmp_path / "no.pt"), flag, value])
    assert result.exit_code == 2 and flag in result.stderr and result.stderr.count("\n") == 1


def test_what_is_protected_is_copied_and_the_flag_may_be_given_twice(folder):
    text = "a {x} dog #1,2 runs\n"
    result = run("--path", folder / "model.pt", "--protect", r"#\d,\d", "--protect", r"\{x\}", text=text)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("#1,2") == result.stdout.count("{x}") == 1
    refused = run(
        "--path", folder / "model.pt", "--protect-spans", "--format", "jsonl", "--alignment", "hard", text=text
    )
    assert refused.exit_code != 0 and "--protect-spans and --alignment" in refused.output


def test_windows_line_ends_and_a_byte_order_mark_change_nothing_and_are_counted(folder):
    plain = run("--path", folder / "model.pt", "--keep-loops", text="a dog runs .\n\nthe cat\n")
    windows = run("--path", folder / "model.pt", "--keep-loops", text=b"\xef\xbb\xbfa dog runs .\r\n\r\nthe cat\r\n")
    assert windows.stdout == plain.stdout and plain.stderr == ""
    assert "input: the byte-order mark" in windows.stderr
    assert "end of 3 lines" in windows.stderr


@pytest.mark.parametrize("space", ["\t", "\u00a0", "\u202f", "\u3000", "\u2028", "\x85"])
def test_white_space_that_the_vocabulary_lacks_is_read_as_spaces(folder, space):
    lines = ["a dog runs .", "the cat  sleeps", " a park"]
    spaced = run("--path", folder / "model.pt", text="\n".join(lines))
    other = run("--path", folder / "model.pt", text="\n".join(line.replace(" ", space) for line in lines))
    assert other.stdout == spaced.stdout


@pytest.mark.parametrize("sign", ["\u200b", "\u00ad", "\u2060", "\ufeff", "\x01"])
def test_invisible_characters_that_the_vocabulary_lacks_are_left_out(folder, sign):
    lines = ["a dog runs .", "the cat  sleeps", " a park"]
    plain = run("--path", folder / "model.pt", text="\n".join(lines))
    other = run("--path", folder / "model.pt", text="\n".join(line.replace("a", f"a{sign}") for line in lines))
    assert other.stdout == plain.stdout


def test_white_space_of_the_vocabulary_stays(tmp_path):
    """A model that was trained on text with no-break spaces reads no-break spaces."""
    tokenizer = Tokenizer(train_model(["a\u00a0dog runs in the\u00a0park", "two\u00a0men sleep"] * 20, 300))
    pipeline = Pipeline(tokenizer, SearchOptions())
    segments = pipeline.segments([Request("a\u00a0dog\truns"), Request("a\u00a0dog runs")])
    ids = [leaf.input.ids for segment in segments for leaf in segment.leaves()]
    assert ids[0] == ids[1] == tokenizer.encode_source(["a\u00a0dog runs"]).ids.tolist()


def test_lines_of_several_sentences_are_told_once(folder):
    lines = "A dog runs. Two men sleep.\nthe cat sleeps . The cat runs .\n"
    told = run("--path", folder / "model.pt", "--keep-loops", text=lines + "the cat\n").stderr
    assert told.startswith("warning: 1 of 3 lines") and told.count("\n") == 1
    assert "--split-sentences" in told
    assert run("--path", folder / "model.pt", "--keep-loops", text=lines + "the cat\n" * 10).stderr == ""


@pytest.mark.parametrize("name", ["model.pt", "terms.tsv", "prefixes"])
def test_the_output_replaces_no_file_that_is_read_beside_the_input(folder, name):
    beside(folder, "terms.tsv", ["dog\tHund"])
    beside(folder, "prefixes", LINES)
    before = (folder / name).read_bytes()
    flags = ["--path", folder / "model.pt", "--input", folder / "test.en"]
    flags += ["--prefix", folder / "prefixes"] if name == "prefixes" else ["--glossary", folder / "terms.tsv"]
    for output in ("--output", "--quality-report"):
        result = run(*flags, output, folder / "." / name)
        assert result.exit_code == 2 and "overwrite a file which" in result.stderr
    for other in (["--input", folder / "test.en"], ["--input", folder / "test.de", "--output", folder / "test.en"]):
        result = run("--path", folder / "model.pt", *other, "--quality-report", folder / "test.en")
        assert result.exit_code == 2 and "--quality-report" in result.stderr
    assert (folder / name).read_bytes() == before and (folder / "test.en").read_text() == "\n".join(LINES) + "\n"


def test_lines_may_be_translated_in_place(folder):
    beside(folder, "text", LINES)
    expected = run("--path", folder / "model.pt", "--input", folder / "text").stdout
    result = run("--path", folder / "model.pt", "--input", folder / "text", "--output", folder / "text")
    assert result.exit_code == 0 and (folder / "text").read_text() == expected


@pytest.mark.parametrize("name", ["c.tsv", "c.tmx", "c.jsonl.gz"])
def test_the_source_side_of_a_corpus_is_translated(folder, tmp_path, name):
    lines = ["the dog runs", "a cat\u2028sleeps"]
    with CorpusWriter(str(tmp_path / name), ("en", "de")) as writer:
        writer.write(Pairs(lines, ["x", "y"], [{}, {}]))
    expected = run("--path", folder / "model.pt", text="\n".join(lines) + "\n").stdout
    corpus = ("--input", tmp_path / name)
    assert run("--path", folder / "model.pt", *corpus).stdout == expected
    if name != "c.jsonl.gz":
        lines_of_file = run("--path", folder / "model.pt", *corpus, "--input-format", "text").stdout
        assert lines_of_file.count("\n") == (tmp_path / name).read_bytes().count(b"\n")


@pytest.mark.parametrize("columns", ["3,2", "3", "text,note", "text"])
def test_columns_select_the_text_to_translate(folder, tmp_path, columns):
    (tmp_path / "c.tsv").write_text("id\tnote\ttext\n1\tx\tthe dog runs\n2\ty\ta cat\n")
    if columns[0] == "3":  # numbers are for a table without a heading
        (tmp_path / "c.tsv").write_text("1\tx\tthe dog runs\n2\ty\ta cat\n")
    model = ("--path", folder / "model.pt")
    expected = run(*model, text="the dog runs\na cat\n").stdout
    corpus = (*model, "--input", tmp_path / "c.tsv", "--columns", columns)
    assert run(*corpus).stdout == expected
    assert run(*corpus, "--output-dir", tmp_path / "shards").exit_code == 0
    assert (tmp_path / "shards/shard-000001.txt").read_text() == expected
    other = run(*model, "--input", tmp_path / "c.tsv", "--columns", "1", "--output-dir", tmp_path / "shards")
    assert other.exit_code == 2 and "--columns" in other.stderr and "other settings" in other.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "text", "--columns", "1"], "--columns does nothing"),
        (["--input", "c.tsv", "--columns", "1,2,3"], "--columns has 3 items"),
        (["--input", "c.tsv", "--columns", "1", "--input-format", "text"], "--columns and --input-format"),
        (["--columns", "1"], "without --input"),
        (["--input", "c.tsv", "--columns", "9"], "c.tsv has 2 columns"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_columns_without_effect_are_refused(folder, tmp_path, flags, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a dog\n")
    (tmp_path / "c.tsv").write_text("a dog\tein Hund\n")
    result = run("--path", folder / "model.pt", *flags, text="a dog\n")
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output


def test_workers_are_refused_for_typed_text(folder, monkeypatch):
    """The prompt translated each line in its own process, with a single thread."""
    monkeypatch.setattr("nmtkit.cli.generate.is_typed", lambda *arguments: True)
    result = run("--path", folder / "model.pt", "--workers", "2", text="")
    assert result.exit_code == 2 and "--workers" in result.stderr and "typed text" in result.stderr
    assert run("--path", folder / "model.pt", "--workers", "1", text="").exit_code == 0


@pytest.mark.parametrize("flag", ["--prefix", "--reference"])
def test_a_corpus_is_no_file_of_lines(folder, tmp_path, flag):
    """The lines of the corpus, with their source sides, were prefixes or references."""
    (tmp_path / "a.tsv").write_text("a\tthe cat\n")
    more = ["--score-reference"] if flag == "--reference" else []
    result = run("--path", folder / "model.pt", *more, flag, tmp_path / "a.tsv", text="a\n")
    assert result.exit_code == 2 and f"{flag} {tmp_path / 'a.tsv'} is a corpus" in " ".join(result.stderr.split())
    (tmp_path / "a.tsv").write_text("the cat\n")  # without a tab, the file has no columns
    assert run("--path", folder / "model.pt", *more, flag, tmp_path / "a.tsv", text="a\n").exit_code == 0
