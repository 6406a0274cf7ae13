"""Help pages that can be skimmed, suggestions for typos, and the completion of the shell."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from nmtkit.cli import COMMANDS, GROUPS, main
from nmtkit.cli.command import Command
from nmtkit.cli.help import cut, write_records
from nmtkit.cli.train import NAMES, families
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.training.config import REGISTRIES


def call(*arguments: str, color: bool = False) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="nmtkit", terminal_width=80, color=color)


def command_of(name: str) -> Command:
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, Command)
    return command


# --- pages ----------------------------------------------------------------------------------------------------------


def test_every_command_is_in_one_group() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names)) and set(names) == set(COMMANDS)
    page = call("--help").stdout
    for title, group in GROUPS.items():
        section = page.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  ([a-z-]+)  ", section, re.MULTILINE) == list(group)


@pytest.mark.parametrize("words", [["-h"], *([name, "-h"] for name in COMMANDS)], ids=" ".join)
def test_the_page_of_h_fits_on_a_screen_of_50_lines_and_80_columns(words: list[str]) -> None:
    lines = call(*words).stdout.splitlines()
    assert 0 < len(lines) <= 50
    assert [line for line in lines if len(line) > 80] == []
    assert "--help" in lines[-1]


@pytest.mark.slow
def test_no_page_of_h_imports_torch() -> None:
    code = """import sys
from nmtkit.cli import COMMANDS, main
for name in COMMANDS:
    for flags in ([], ["--quiet"]):
        try:
            main([name, *flags, "-h"], standalone_mode=False)
        except SystemExit as end:
            assert not end.code
    print(name, {"torch", "sacrebleu", "sentencepiece"} & set(sys.modules), file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()) == (0, [f"{name} set()" for name in COMMANDS])


SHORT = [name for name in COMMANDS if command_of(name).common]


@pytest.mark.parametrize("name", SHORT)
def test_the_flags_of_a_short_page_exist_with_their_placeholders_and_defaults(name: str) -> None:
    context = command_of(name).make_context(name, [], resilient_parsing=True)
    records = dict(
        record
        for parameter in context.command.get_params(context)
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context))
    )
    pages = {re.sub(r"--(\S+) / --no-\1$", r"--[no-]\1", flag): text for flag, text in records.items()}
    for flag, text in (command_of(name).common or {}).items():
        flag = flag if flag in pages else re.sub("--", "--[no-]", flag)
        assert flag in pages, f"nmtkit {name} has no {flag}"
        given, default = (re.search(r"default: ([^\])]+)[\])]", each) for each in (text, pages[flag]))
        if given is not None and default is not None:
            assert given[1] == default[1], f"nmtkit {name} {flag}"


@pytest.mark.parametrize("name", SHORT)
def test_the_short_page_names_every_group_of_other_flags(name: str) -> None:
    short, full = call(name, "-h").stdout, call(name, "--help").stdout
    titles = re.findall(r"^(\S.*):$", full, re.MULTILINE)
    of_components = {"train": r".* [a-z_]+$", "clean": "Filter .*"}.get(name)  # these need the import of components
    static = [title for title in titles if title != "Messages" and not re.match(of_components or "$", title)]
    runs = ["Length of the run", "Arithmetic and devices"] if name == "train" else []
    for title in [*static, *runs]:
        flags = re.findall(
            r"^  (?:-\w, )?(--\S+)", full.partition(f"\n{title}:\n")[2].partition("\n\n")[0], re.MULTILINE
        )
        assert flags and (f"\n  {title} " in short or all(f"{flag} " in short for flag in flags))
    assert len(full.splitlines()) > len(short.splitlines())


def test_no_page_has_a_default_of_nothing() -> None:
    for name in COMMANDS:
        page = call(name, "--help").stdout
        assert "[default: none]" not in page and "[default: ]" not in page


def test_the_flags_that_choose_components_are_those_of_the_registries() -> None:
    assert {table: (registry.flag, registry.several) for table, registry in REGISTRIES.items()} == {
        table: (flag, metavar.endswith("…")) for table, (flag, metavar, _) in NAMES.items()
    }


def test_families_of_architectures_have_a_line_each() -> None:
    lines = families(ARCHITECTURES.names()).split("\n")
    assert "gnmt_small, gnmt" in lines
    assert sorted(name for line in lines for name in line.split(", ")) == sorted(ARCHITECTURES.names())
    assert families(["adam", "sgd"]) == "adam, sgd"
    assert families(several := [f"{letter}_one" for letter in "abcdefghijklmno"]) == ", ".join(several)  # no families
    assert "gnmt_small, gnmt\n" in call("train", "--help").stdout


def test_generate_begins_with_beam_and_languages() -> None:
    page = call("generate", "--help").stdout
    flags = re.findall(r"^  (--[a-z-]+)", page, re.MULTILINE)
    assert flags[3:6] == ["--beam", "--source-lang", "--target-lang"]


def test_headings_have_colour_in_a_terminal_unless_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for arguments in (("--help",), ("train", "-h"), ("merge", "--help")):
        assert "\x1b[" in call(*arguments, color=True).stdout
        assert "\x1b[" not in call(*arguments).stdout
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b[" not in call(*arguments, color=True).stdout
        monkeypatch.delenv("NO_COLOR")


def test_records_are_in_two_columns_and_line_feeds_begin_lines() -> None:
    formatter = click.HelpFormatter(width=40)
    formatter.indent()
    write_records(formatter, [("--one N", "a b\nc d"), ("--a-flag-that-is-too-long NAME", "word " * 6)])
    lines = formatter.getvalue().splitlines()
    assert lines[:2] == ["  --one N" + " " * 19 + "a b", " " * 28 + "c d"]
    formatter.write("\n")
    write_records(formatter, [("--kind " + "|".join(["choice"] * 12), "text")])
    choices = [line for line in formatter.getvalue().split("\n\n")[1].splitlines() if "choice" in line]
    assert "".join(map(str.strip, choices)) == "--kind " + "|".join(["choice"] * 12)
    assert max(map(len, choices)) <= 40
    assert lines[2] == "  --a-flag-that-is-too-long NAME" and lines[3] == " " * 28 + "word word"


def test_names_are_cut_with_their_number() -> None:
    assert cut(["--a", "--b"], 40) == "--a, --b"
    assert cut(["--alpha", "--beta", "--gamma"], 20) == "--alpha, … (2 more)"
    assert cut(["--alpha", "--beta"], 5) == "2 flags"


# --- typos ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["genrate"], "generate"),
        (["train", "--label-smoothng", "0.1"], "--label-smoothing"),
        (["generate", "--path", "x", "--baem", "2"], "--beam"),
        (["train", "--arch", "transformer_bse"], "transformer_base"),
        (["train", "--metrics", "blue"], "bleu"),
        (["train", "--precision", "bf61"], "bf16"),
        (["score", "--metric", "chfr", "--ref", "REF", "--sys", "REF"], "chrf"),
        (["score", "--tokenize", "intll", "--ref", "REF", "--sys", "REF"], "intl"),
        (["generate", "--path", "MODEL", "--engine", "nubma"], "numba"),
        (["generate", "--path", "MODEL", "--logits-processors", "lm_fuson"], "lm_fusion"),
        (["clean", "x", "-s", "en", "-t", "de", "--output", "o", "--filters", "lenght"], "length"),
        (["preprocess", "--destdir", "d", "--model-type", "unigramm"], "unigram"),
    ],
)
def test_a_typo_names_the_nearest_word(arguments: list[str], nearest: str, tmp_path: Path) -> None:
    (tmp_path / "ref").write_text("a\n", encoding="utf-8")
    model = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())
    values = {"REF": str(tmp_path / "ref"), "MODEL": str(model)}
    result = call(*(values.get(word, word) for word in arguments))
    assert result.exit_code == 2
    assert re.search(rf"[Dd]id you mean (one of: )?'?{nearest}\b", result.stderr), result.stderr


# --- completion -----------------------------------------------------------------------------------------------------


def completions(*words: str) -> list[str]:
    """Returns the words that the shell offers for the last word."""
    *before, incomplete = words
    items = ShellComplete(main, {}, "nmtkit", "_NMTKIT_COMPLETE").get_completions(before, incomplete)
    return [item.value for item in items if item.type == "plain"]


def test_commands_flags_and_names_are_completed() -> None:
    assert completions("ex") == ["export"]
    assert set(COMMANDS) <= set(completions(""))
    assert "--batch-tokens" in completions("train", "--batch")
    assert completions("train", "--label-sm") == ["--label-smoothing"]  # a flag of a component
    named = [name for name in ARCHITECTURES.names() if name.startswith("conv")]
    assert completions("train", "--arch", "conv") == named != []
    assert completions("train", "--metrics", "bleu,ch") == ["bleu,chrf"]
    assert completions("generate", "--precision", "i") == ["int8"]
    assert completions("score", "--test-set", "wmt14,wmt21/A") == ["wmt14,wmt21/AB", "wmt14,wmt21/AC"]
    assert completions("generate", "--test-set", "wmt14/") == ["wmt14/full"]
    assert completions("fetch", "op") == ["opus:"] and completions("fetch", "") == ["opus:", "sacrebleu:", "hf:"]
    assert completions("fetch", "opus:Books", "sacrebleu:wmt14/") == ["sacrebleu:wmt14/full"]
    assert "--help" in completions("train", "--he")
    assert completions("train", "--arch", "nonsense", "--batch-t") == ["--batch-tokens"]


def test_checkpoints_and_runs_are_completed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("model.pt", "notes.txt", "run/best.pt", "run/log.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "data").mkdir()
    expected = [f"{tmp_path}/model.pt", f"{tmp_path}/run"]
    for words in (["generate", "--path"], ["inspect"], ["train", "--finetune-from"], ["rerank", "--lm"]):
        assert completions(*words, f"{tmp_path}/") == expected
    assert completions("inspect", f"{tmp_path}/run/b") == [f"{tmp_path}/run/best.pt"]
    assert completions("generate", "--input", f"{tmp_path}/") == []  # the shell completes files
