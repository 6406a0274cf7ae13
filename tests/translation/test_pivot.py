"""A translation through a pivot language equals two translations, one after the other."""

import json
from pathlib import Path

import pytest
from builders import REAL_LINES, save_ending_transformer, save_tiny_transformer, save_transformer, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.corpora.corpus import Pairs
from nmtkit.data.corpora.writer import CorpusWriter
from nmtkit.translation.options import TextOptions
from nmtkit.translation.pivot import PivotTranslator
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import Translator

SHORT = {"max_len_a": 0.0, "max_len_b": 6}
LINES = [*REAL_LINES, "", "right to life"]
IN, OUT = {"source_lang": "it", "target_lang": "en"}, {"source_lang": "en", "target_lang": "de"}
THROUGH = {"source_lang": "it", "target_lang": "de", "pivot": "en"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ending_transformer(tmp_path_factory.mktemp("model") / "model.pt", languages=("en", "it", "de"))


def run(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(each) for each in arguments], input=stdin)
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def generated(path: Path, *flags: str, lines: list[str] = LINES) -> list[str]:
    short = ["--max-len-a", "0", "--max-len-b", "6"]
    code, out, err = run("generate", "--path", path, *short, *flags, stdin="\n".join(lines) + "\n")
    assert code == 0, err
    return out.split("\n")[:-1]


@pytest.mark.slow
def test_both_steps_equal_two_commands(path: Path) -> None:
    model = nmtkit.load(path)
    english = model.translate(LINES, **SHORT, **IN)
    expected = model.translate(english, **SHORT, **OUT)
    assert len(set(expected)) > 3
    assert expected != model.translate(LINES, source_lang="it", target_lang="de", **SHORT)
    assert model.translate(LINES, **SHORT, **THROUGH) == expected
    flags = ["--source-lang", "it", "--target-lang", "de", "--pivot", "en"]
    assert generated(path, *flags) == expected
    assert generated(path, *flags, "--workers", "2") == expected
    assert generated(path, *flags, "--pivot-path", str(path)) == expected


def test_scores_and_n_best_lists_are_those_of_the_second_step(path: Path) -> None:
    model = nmtkit.load(path)
    english = model.translate(LINES, **SHORT, **IN)
    second = model.translate(english, nbest=3, **SHORT, **OUT)
    through = model.translate(LINES, nbest=3, **SHORT, **THROUGH)
    for one, other, source, pivot in zip(through, second, LINES, english, strict=True):
        assert [(each.text, each.score) for each in one.hypotheses] == [
            (each.text, each.score) for each in other.hypotheses
        ]
        assert (one.source, one.pivot) == (source, pivot)
    flags = ["--source-lang", "it", "--target-lang", "de", "--pivot", "en", "--nbest", "3", "--format", "jsonl"]
    objects = [json.loads(line) for line in generated(path, *flags)]
    assert [each["pivot"] for each in objects] == english
    assert [each["source"] for each in objects] == LINES


def test_prefixes_begin_the_translation_of_the_second_step(path: Path) -> None:
    model = nmtkit.load(path)
    (english,) = model.translate(["All are equal"], **SHORT, **IN)
    expected = model.translate(Request(english, prefix="right"), **SHORT, **OUT)
    assert model.translate(Request("All are equal", prefix="right"), **SHORT, **THROUGH) == expected
    assert expected.startswith("right")


def test_windows_are_numbered_and_empty_windows_pass_through(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    translator = Translator.load(path, max_source_len=9)
    search = SearchOptions(**SHORT, source_lang="it", target_lang="de")
    steps = PivotTranslator(translator, translator, "en", search)
    windows = [[Request("right")], [], [Request("to"), Request(" ".join(["equal"] * 20))]]
    found = list(steps.run(windows))
    assert [each.id for each in found] == [0, 1, 2]
    assert "line 3 has" in caplog.text and "line 2 has" not in caplog.text


@pytest.mark.slow
def test_two_models_of_one_pair_each(tmp_path: Path) -> None:
    first, second = save_transformer(tmp_path / "it-en.pt"), save_transformer(tmp_path / "en-de.pt", d_model=16)
    expected = generated(second, lines=generated(first))
    assert len(set(expected)) > 3
    assert generated(second, "--pivot", "en", "--pivot-path", str(first)) == expected


def in_languages(path: Path, source: str, target: str) -> Path:
    """Records the languages of a bilingual model in its checkpoint."""
    checkpoint_file.save(path, checkpoint_file.read(path) | {"origin": {"languages": [source, target]}})
    return path


@pytest.mark.slow
def test_a_corpus_has_the_source_of_the_first_model_and_the_target_of_the_second(tmp_path: Path) -> None:
    first = in_languages(save_transformer(tmp_path / "it-en.pt"), "it", "en")
    second = in_languages(save_transformer(tmp_path / "en-de.pt", d_model=16), "en", "de")
    corpus = str(tmp_path / "corpus.tmx")
    with CorpusWriter(corpus, ("it", "de")) as writer:
        writer.write(Pairs(LINES[:3], ["Recht"] * 3, [{}] * 3))
    flags = ["--pivot", "en", "--pivot-path", str(first)]
    assert generated(second, *flags, "--input", corpus) == generated(second, *flags, lines=LINES[:3])


@pytest.mark.slow
def test_models_of_other_directions_are_refused(tmp_path: Path) -> None:
    """Both gave nonsense: models in the wrong order, and a model of one direction for both steps."""
    first = in_languages(save_transformer(tmp_path / "it-en.pt"), "it", "en")
    second = in_languages(save_transformer(tmp_path / "en-de.pt", d_model=16), "en_US", "de")
    for flags, named in (
        (["--path", first, "--pivot-path", second], f"{second} translates from en_US into de"),
        (["--path", second, "--pivot-path", second], f"{second} translates from en_US into de"),
        (["--path", first, "--pivot-path", first], f"{first} translates from it into en"),
        (["--path", save_transformer(tmp_path / "any.pt")], "--pivot-path"),
    ):
        code, _, err = run("generate", *flags, "--pivot", "en", stdin="right\n")
        assert code == 2 and named in err, err
    group = in_languages(save_transformer(tmp_path / "gem-de.pt"), "gem", "de")
    assert run("generate", "--path", group, "--pivot-path", first, "--pivot", "en", stdin="right\n")[0] == 0
    with pytest.raises(ValueError, match="one direction"):
        nmtkit.load(first).translate("right", pivot="en")


@pytest.mark.slow
def test_a_dataset_has_the_vocabulary_of_the_model_that_reads_it(tmp_path: Path) -> None:
    first = save_transformer(tmp_path / "first.pt")
    second = save_tiny_transformer(tmp_path / "second.pt", tiny_tokenizer(), sharpness=2.0)
    for side in ("it", "de"):
        (tmp_path / f"test.{side}").write_text("".join(f"{line}\n" for line in REAL_LINES))
    flags = ["--pivot", "en", "--pivot-path", str(first)]
    for path in (first, second):
        data = tmp_path / f"data-{path.stem}"
        prefix = ["--trainpref", tmp_path / "test", "--testpref", tmp_path / "test", "--validpref", tmp_path / "test"]
        code, _, err = run("preprocess", "-s", "it", "-t", "de", *prefix, "--tokenizer-from", path, "--destdir", data)
        assert code == 0, err
    expected = generated(second, *flags, lines=REAL_LINES)
    assert generated(second, str(tmp_path / "data-first"), *flags) == expected
    code, _, err = run("generate", tmp_path / "data-second", "--path", second, *flags)
    assert code == 2 and f"data-second and {first} have different tokenizers" in err


def test_tags_pass_through_both_steps(path: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>All are <b>equal</b> before the law.</p>\n<p>right</p>\n")
    flags = ["--input", page, "--source-lang", "it", "--target-lang", "de", "--pivot", "en"]
    code, out, err = run("generate", "--path", path, "--max-len-a", "0", "--max-len-b", "6", *flags)
    assert code == 0, err
    model, text = nmtkit.load(path), {"markup": "html", **SHORT}
    english = model.translate(["All are <b>equal</b> before the law.", "right"], **text, **IN)
    german = model.translate(english, **text, **OUT)
    assert out == f"<p>{german[0]}</p>\n<p>{german[1]}</p>\n"


def test_sentences_are_split_by_the_rules_of_each_language(path: Path) -> None:
    pytest.importorskip("sentencex")
    translator = Translator.load(path)
    search = SearchOptions(source_lang="it", target_lang="de")
    steps = PivotTranslator(translator, translator, "en", search, TextOptions(split_sentences="it"))
    assert [pipeline.text.split_sentences for pipeline in steps.pipelines] == ["it", "en"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pivot", "it"], "--pivot it equals"),
        (["--pivot", "de"], "--pivot de equals --target-lang"),
        (["--pivot", "xx"], "known: de, en, it"),
        (["--pivot", "en", "--shortlist", "--device", "cpu"], "no shortlist"),
        (["--pivot-path", __file__], "--pivot-path does nothing"),
        (["--pivot", "en", "--alignment", "hard", "--format", "jsonl"], "--pivot and --alignment"),
        (["--pivot", "en", "--source-tag", "<x>"], "--pivot and --source-tag"),
    ],
    ids=["source", "target", "unknown", "shortlist", "path-alone", "alignment", "tag"],
)
def test_a_pivot_that_cannot_be_is_refused(path: Path, flags: list[str], message: str) -> None:
    code, _, err = run(
        "generate", "--path", path, "--source-lang", "it", "--target-lang", "de", *flags, stdin="right\n"
    )
    assert code == 2 and message in err, err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pivot": "de"}, "--pivot de equals --target-lang"),
        ({"pivot": "en", "nbest": 1, "alignment": "hard"}, "--pivot and --alignment"),
        ({"pivot": "en", "source_tag": "<x>"}, "pivot and source_tag"),
    ],
    ids=["target", "alignment", "tag"],
)
def test_python_refuses_the_same(path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nmtkit.load(path).translate("right", source_lang="it", target_lang="de", **options)


def test_an_unknown_language_is_not_called_untrained(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    translator = Translator.load([path], "cpu")
    translator.directions = {("en", "de")}
    with pytest.raises(ValueError, match="--target-lang fr: "):
        translator.pipeline(SearchOptions(source_lang="en", target_lang="fr"))
    assert "zero-shot" not in caplog.text
    translator.pipeline(SearchOptions(source_lang="it", target_lang="de"))
    assert "zero-shot" in caplog.text
