"""Commands that nmtkit prints for models of several languages are typed as they are printed."""

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from digits import digit_rows, spelled, write_digits

import nmtkit
from nmtkit.cli import main
from nmtkit.cli.command import PROGRAM, program, show_next

LANGUAGES = ("en", "de", "it")
CORPORA = """
[[corpus]]
languages = ["en", "de", "it"]
train = "train"
valid = "val"
test = "test"
"""
TINY = shlex.split("""
    --d-model 16 --d-ff 16 --heads 2 --decoder-layers 1 --precision fp32 --device cpu --threads 1 --max-update 4
    --save-interval none --save-interval-updates 2 --batch-tokens 400 --max-tokens 400 --validate-interval none
    --patience none
""")
MODULE = str(Path(nmtkit.__file__).with_name("__main__.py"))
KINDS = ("both", "target-on-source", "one direction")


def invoke(*words: object, text: str | None = None) -> Result:
    result = CliRunner().invoke(main, list(map(str, words)), input=text)
    assert result.exit_code == 0, f"{shlex.join(map(str, words))}\n{result.output}"
    return result


def typed(line: str) -> Result:
    """Runs a printed command as a shell does, with < and >. Every --sys and < file exists."""
    for words in (shlex.split(part) for part in line.split("&&")):
        files = {sign: Path(words.pop(words.index(sign) + 1)) for sign in "<>" if sign in words}
        words = [word for word in words if word not in files]
        assert words[0] == "nmtkit"
        more = TINY if words[1] == "train" else []
        result = invoke(*words[1:], *more, text=files["<"].read_text() if "<" in files else None)
        if ">" in files:
            files[">"].write_text(result.stdout)
    return result


def next_commands(stderr: str) -> list[str]:
    return re.findall(r"^(?:next|then): (.*)$", stderr, re.MULTILINE)


@pytest.fixture(scope="module", params=KINDS)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a dataset with language tokens, and `lm` and `mt`, models of this dataset."""
    folder = tmp_path_factory.mktemp("a home")  # the space must be quoted
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, count, seed in (("train", 60, 1), ("val", 4, 2), ("test", 4, 3), ("text", 4, 4)):
            write_digits(Path(name), digit_rows(count, seed, 3), LANGUAGES)
        Path("source.txt").write_text("one two\nthree\n")
        Path("text.txt").write_text("eins zwei\ndrei\n")
        Path("corpora.toml").write_text(CORPORA)
        tokens = "both" if request.param == "one direction" else request.param
        words = ["--model-type", "word", "--vocab-size", 36, "--workers", 1]
        preprocess = ["preprocess", "--corpora", "corpora.toml", *words, "--language-tokens", tokens]
        result = invoke(*preprocess, "--destdir", "data bin")
        if request.param == "one direction":
            given = ["-s", "en", "-t", "de", "--trainpref", "train", "--validpref", "val", "--testpref", "test"]
            given += ["--source-language-token", "en", "--target-language-token", "de"]
            result = invoke("preprocess", *given, "--tokenizer-from", "data bin", "--destdir", "one bin")
        (line,) = next_commands(result.stderr)
        data = shlex.split(line)[2]
        for name, layers in (("mt", 1), ("lm", 0)):
            arch = ["--arch", "transformer_tiny" if layers else "transformer_lm_tiny", "--encoder-layers", layers]
            result = invoke("train", data, *arch, *TINY, "--save-dir", name, *(["--dropout", 0] if layers else []))
            Path(f"{name}.txt").write_text(result.stderr)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mt", "lm"])
def test_the_next_commands_of_train_and_inspect(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    commands = next_commands(Path(f"{name}.txt").read_text())
    assert len(commands) == 2
    outputs = [typed(line).stdout for line in commands]
    assert ("perplexity" in outputs[-1]) == (name == "lm")
    for path in (f"{name}/last.pt", "data bin"):
        for line in json.loads(invoke("inspect", path, "--format", "json").stdout)["commands"].values():
            shutil.rmtree("again", ignore_errors=True)  # the folder of "repeat the training"
            typed(line.replace("checkpoints/best.pt", "mt/last.pt"))


@pytest.mark.parametrize("is_on_path", [True, False], ids=["on the PATH", "not on the PATH"])
@pytest.mark.parametrize(
    ("called", "environment", "words", "launcher"),
    [
        ("pytest", {}, ["nmtkit"], ["nmtkit"]),
        ("nmtkit", {}, ["{bin}nmtkit"], ["{bin}nmtkit"]),
        (MODULE, {}, ["{bin}python3", "-m", "nmtkit"], ["{bin}python3", "-m", "nmtkit"]),
        (MODULE, {PROGRAM: "nmtkit"}, ["nmtkit"], ["nmtkit"]),  # a process that `nmtkit train` has started
        (
            MODULE,
            {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"},
            ["{bin}python3", "-m", "nmtkit"],
            ["{bin}torchrun", "--nproc-per-node", "2", "-m", "nmtkit"],
        ),
    ],
    ids=["python", "script", "module", "rank", "torchrun"],
)
def test_commands_begin_with_the_words_that_started_nmtkit(
    called: str,
    environment: dict[str, str],
    words: list[str],
    launcher: list[str],
    is_on_path: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A virtual environment that is not activated needs the paths of its programs: the PATH has another python3."""
    system, own = tmp_path / "system", tmp_path / "environment"
    for folder in (system, own):
        folder.mkdir()
        for name in ("python3", "nmtkit", "torchrun"):
            (folder / name).touch(mode=0o755)
    (own / "python3").unlink()
    (own / "python3").symlink_to(system / "python3")
    shell_path = f"{own}:{system}" if is_on_path else str(system)
    monkeypatch.setattr("os.environ", {"PATH": shell_path, **environment})
    monkeypatch.setattr("sys.executable", f"{own}/python3")
    monkeypatch.setattr("sys.argv", [str(own / called), "train", "my data"])
    start = "" if is_on_path else f"{own}/"
    expected = [[word.replace("{bin}", start) for word in each] for each in (words, launcher)]
    assert [program(), program(launcher=True)] == expected
    with click.Context(click.Command("train")):
        show_next("nmtkit one")
    assert capsys.readouterr().err == f"next: {shlex.join(expected[0])} one\n"


@pytest.mark.slow
def test_the_next_command_of_rerank(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    tokenizer = nmtkit.load("mt/last.pt").tokenizer
    languages = [] if tokenizer.has_target_languages_only else ["--source-lang", "en"]
    (line,) = [line for line in next_commands(Path("mt.txt").read_text()) if " generate " in line]
    base = ["generate", "--path", "mt/last.pt", *languages, "--target-lang", "de", "--nbest", 2, "--beam", 2]
    for name in ("val", "test"):
        result = invoke(*base, "--format", "jsonl", text=Path(f"{name}.en").read_text())
        Path(f"{name}.jsonl").write_text(result.stdout)
    models = ["--backward", "mt/last.pt", "--lm", "lm/last.pt", "--source-lang", "en", "--target-lang", "de"]
    tuned = invoke("rerank", "val.jsonl", *models, "--tune", "val.de", "--trials", 3)
    (line,) = next_commands(tuned.stderr)
    typed(line)
    assert len(Path("test.out").read_text().splitlines()) == 4
    # the models, asked with the direction of the request, give the same log probabilities
    scored = invoke("rerank", "test.jsonl", *models, "--format", "jsonl").stdout
    back, lm = nmtkit.load("mt/last.pt"), nmtkit.load("lm/last.pt")
    backward = (
        {"target_lang": "en"} if tokenizer.has_target_languages_only else {"source_lang": "de", "target_lang": "en"}
    )
    of_lm = {} if tokenizer.has_target_languages_only else {"target_lang": "de"}
    for record in map(json.loads, scored.splitlines()):
        for each in record["hypotheses"]:
            expected = back.score(each["text"], record["source"], **backward)
            assert each["backward_log_probability"] == pytest.approx(expected, abs=1e-3)
            assert each["lm_log_probability"] == pytest.approx(lm.score("", each["text"], **of_lm), abs=1e-3)
    if not tokenizer.has_target_languages_only:
        other = invoke("rerank", "test.jsonl", "--lm", "lm/last.pt", "-t", "it", "--format", "jsonl").stdout
        first = [json.loads(text.splitlines()[0])["hypotheses"][0]["lm_log_probability"] for text in (scored, other)]
        assert first[0] != first[1]


def test_the_next_command_of_rerank_begins_with_the_words_that_started_nmtkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command began with nmtkit, which `python -m nmtkit` need not find."""
    monkeypatch.setenv(PROGRAM, "python3 -m nmtkit")
    hypotheses = [{"text": text, "log_probability": -1.0, "pieces": ["▁" + text]} for text in ("eins", "zwei")]
    (tmp_path / "nbest.jsonl").write_text(json.dumps({"source": "one", "hypotheses": hypotheses}) + "\n")
    (tmp_path / "one.de").write_text("eins\n")
    tuned = invoke("rerank", tmp_path / "nbest.jsonl", "--tune", tmp_path / "one.de", "--trials", 1)
    (line,) = next_commands(tuned.stderr)
    assert line.startswith("python3 -m nmtkit rerank ")


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (["--lm", "lm/last.pt"], "--target-lang"),
        (["--backward", "mt/last.pt", "-t", "de"], "--source-lang"),
        (["--backward", "mt/last.pt", "-s", "en"], "--target-lang"),
        (["--lm", "lm/last.pt", "-t", "xx"], "--target-lang"),
    ],
)
def test_a_missing_language_is_named(
    flags: list[str], missing: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    if nmtkit.load("mt/last.pt").tokenizer.has_target_languages_only and missing == "--target-lang":
        pytest.skip("this model needs the language of the sources only")
    nbest = {"source": "one", "hypotheses": [{"text": "eins", "log_probability": -1, "pieces": ["▁eins"]}]}
    result = CliRunner().invoke(main, ["rerank", *flags], input=json.dumps(nbest) + "\n")
    assert result.exit_code == 2
    assert missing in result.stderr and "de, en, it" in result.stderr


def test_perplexity_of_a_language_needs_its_code_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    model = nmtkit.load("lm/last.pt")
    if model.tokenizer.has_target_languages_only:
        pytest.skip("the language model has no tokens of languages")
    line = spelled([1, 2], "de")
    expected = model.score("", line, target_lang="de")
    assert len(model.logits("", line, target_lang="de")) == len(line.split()) + 2
    shown = invoke("score", "--path", "lm/last.pt", "-t", "de", "--sentence-level", text=line + "\n").stdout
    assert float(shown.split("\t")[0]) == pytest.approx(expected, abs=1e-3)
    for words in (["--path", "lm/last.pt"], ["--path", "lm/last.pt", "-s", "en", "-t", "de"]):
        refused = CliRunner().invoke(main, ["score", *words], input=line + "\n")
        assert refused.exit_code == 2 and ("--target-lang" in refused.stderr or "--source-lang" in refused.stderr)
