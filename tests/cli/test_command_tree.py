"""Walks every command and every flag, and every command that README, CONTRIBUTING and examples/ show."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner

from nmtkit.cleaning.filters import FILTERS
from nmtkit.cli import COMMANDS, MODULES, main
from nmtkit.cli.command import Command
from nmtkit.cli.flags import flags
from nmtkit.cli.help import tidied
from nmtkit.config.plugins import load_plugin
from nmtkit.config.registry import Registry

ROOT = Path(__file__).parent.parent.parent


# --- flags ----------------------------------------------------------------------------------------------------------


def subcommand(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


def registries() -> list[Registry]:
    from nmtkit.models.architectures import ARCHITECTURES
    from nmtkit.training.criterions import CRITERIONS
    from nmtkit.training.lr_schedulers import LR_SCHEDULERS
    from nmtkit.training.optimizers import OPTIMIZERS

    return [ARCHITECTURES, CRITERIONS, OPTIMIZERS, LR_SCHEDULERS]


def tree() -> Iterator[tuple[str, list[click.Option]]]:
    """Yields every command with its flags, then every registered name with the flags that its config adds to train."""
    for name in COMMANDS:
        yield name, [parameter for parameter in subcommand(name).params if isinstance(parameter, click.Option)]
    for registry in registries():
        for name, entry in registry.entries.items():
            yield f"train {registry.flag} {name}", flags(entry.preset, "")


TREE = list(tree())
IDS = [place for place, _ in TREE]


def help_of(option: click.Option) -> str:
    """Returns the help text of the option without the default, as on the help page."""
    record = option.get_help_record(click.Context(click.Command("any")))
    return re.sub(r"\s*\[default: .*\]$", "", record[1]).strip() if record else ""


def test_every_file_of_a_command_is_registered() -> None:
    files = {path.stem for path in (ROOT / "nmtkit/cli").glob("*.py")}
    modules = {MODULES.get(name, name.replace("-", "_")) for name in COMMANDS}
    parts = {name for name in files if name.startswith("generate_")}
    shared = {"__init__", "command", "components", "flags", "help", "other_toolkits", "progress", "prompt", "shards"}
    assert files - parts - shared == modules


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name: str) -> None:
    command = subcommand(name)
    assert isinstance(command, Command)
    assert command.help and command.help.strip()[0].isupper()


@pytest.mark.parametrize(("place", "options"), TREE, ids=IDS)
def test_no_default_is_shown_as_nothing(place: str, options: list[click.Option]) -> None:
    for option in options:
        record = option.get_help_record(click.Context(click.Command("any")))
        assert record and "[default: ]" not in record[1], f"{place} {option.opts[0]}: {record and record[1]}"


@pytest.mark.parametrize(("place", "options"), TREE, ids=IDS)
def test_every_flag_has_a_help_text(place: str, options: list[click.Option]) -> None:
    for option in options:
        assert not option.hidden, f"{place} {option.opts[0]} is hidden"
        assert len(help_of(option)) > 3, f"{place} {option.opts[0]} has no help text"


@pytest.mark.parametrize(("place", "options"), TREE, ids=IDS)
def test_every_flag_states_its_default(place: str, options: list[click.Option]) -> None:
    context = click.Context(click.Command("any"))
    for option in options:
        default = option.get_default(context)
        if option.is_flag or option.required or option.multiple or not isinstance(default, str | int | float | Path):
            continue
        record = option.get_help_record(context)
        assert record and "default: " in record[1], f"{place} {option.opts[0]} does not say that it is {default!r}"


# Synonyms: a command that has a flag with one of these words must not have the same flag with the other word.
SAME = {
    "maximum": "max",
    "minimum": "min",
    "length": "len",
    "language": "lang",
    "directory": "dir",
    "folder": "dir",
} | {
    "destdir": "dir",
    "number": "num",
    "size": "num",
    "filename": "file",
    "out": "output",
    "lenpen": "length-penalty",
    "learning-rate": "lr",
    "steps": "updates",
    "iterations": "updates",
}


def meaning(flag: str) -> str:
    words = flag.lstrip("-").split("-")
    return "-".join(sorted(SAME.get(word, word) for word in words if word not in ("the", "of", "no")))


@pytest.mark.parametrize(("place", "options"), TREE, ids=IDS)
def test_no_two_flags_have_one_meaning(place: str, options: list[click.Option]) -> None:
    by_help: dict[str, str] = {}
    by_words: dict[str, str] = {}
    for option in options:
        flag = max(option.opts, key=len)
        other = by_help.setdefault(help_of(option).lower(), flag)
        assert other == flag, f"{place}: {flag} and {other} have the same help text"
        other = by_words.setdefault(meaning(flag), flag)
        assert other == flag, f"{place}: {flag} and {other} mean the same"


# --- commands in documents ------------------------------------------------------------------------------------------

DOCUMENTS = [
    path
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.sh")),
    )
    if path.exists()
]
# Values of the shell variables that must name an existing file; other variables are 1.
VARIABLES = {"pair": "en-de", "size": "base", "recipe": "baseline", "here": "."}


def shell_lines(path: Path) -> list[str]:
    """Returns the lines of a script, or of the sh blocks and `$` transcripts of a page, with continuations joined."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blocks = re.findall(r"```(?:sh|console|bash)\n(.*?)```", text, re.DOTALL)
        inline = [code for code in re.findall(r"(?<!`)`(nmtkit [^`]+)`(?!`)", text) if len(code.split()) > 3]
        text = "\n".join([*blocks, *inline])
    return text.replace("\\\n", " ").splitlines()


def calls(path: Path) -> list[list[str]]:
    """Returns the arguments of every `nmtkit …` in a document, with the values of shell variables."""
    found = []
    for line in shell_lines(path):
        if line.lstrip().startswith("#") or "nmtkit" not in line:
            continue
        line = re.sub(r'"?\$(@|\{@:\d+\})"?', "", line)
        line = re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2", line)
        line = re.sub(r"\$\{?(\w+)[^}\s\"$/.-]*\}?", lambda name: VARIABLES.get(name[1], "1"), line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        words = list(lexer)
        for index, word in enumerate(words):
            is_call = word == "nmtkit" or word.endswith("/nmtkit")
            before = words[index - 1] if index else "|"
            if not is_call or before not in ("|", "||", "&&", ";", "(", "$", "-m", "time", "srun", "then", "do"):
                continue
            end = next((i for i, it in enumerate(words[index:], index) if set(it) <= set("|&;<>()")), len(words))
            found.append(words[index + 1 : end])
    return found


def as_the_reader_has_it(folder: Path, page: Path, arguments: list[str]) -> None:
    """Fills the folder for a command of a page: examples/, and the files that the command names.

    The contents of run.toml and of the plug-in questions.py are on the page. Other TOML files are empty.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in arguments:
        if name.endswith(".toml") and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shown = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
            (folder / name).write_text(shown[-1] if shown and name == "run.toml" else "", encoding="utf-8")
        if name == "questions.py":
            (shown,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
            (folder / name).write_text(shown, encoding="utf-8")


EXAMPLES = [(path, arguments) for path in DOCUMENTS for arguments in calls(path) if arguments[1:] != ["…"]]


@pytest.mark.parametrize(
    ("path", "arguments"), EXAMPLES, ids=[f"{path.name}: {' '.join(words)}" for path, words in EXAMPLES]
)
def test_every_command_in_the_documents_parses_and_its_flags_go_together(
    path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(path.parent)  # for the config and plug-in files they name
    if path.parent in (ROOT, ROOT / "docs"):
        as_the_reader_has_it(tmp_path, path, arguments)
        monkeypatch.chdir(tmp_path)
    name, *rest = arguments
    monkeypatch.delitem(FILTERS.entries, "questions", raising=False)  # other tests register filters of the same names
    if path.name == "CONTRIBUTING.md":  # its commands copy this plug-in to the package
        load_plugin(str(ROOT / "examples/plugin/gru.py"))
    if "--finetune-from" in rest:  # the checkpoint is read while flags are parsed
        rest[rest.index("--finetune-from") + 1] = str(save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer()))
    if any(word.startswith("hf:") for word in rest):  # a model of the Hub, which is opened while flags are parsed
        saved = save_tiny_transformer(tmp_path / "hub.pt", tiny_tokenizer())
        monkeypatch.setattr("nmtkit.models.formats.hub_models.checkpoint", lambda _: saved)
    if name.startswith("-"):
        assert name in ("--help", "--version")
        return
    command = subcommand(name)
    try:
        context = command.make_context(name, [word for word in rest if word != "…"])
        if name in ("generate", "score"):  # conditions between flags, too
            monkeypatch.setattr("nmtkit.cli.command.check_paths", lambda context: None)  # the files do not exist
            monkeypatch.setattr(f"nmtkit.cli.{name}.{name}", lambda *settings: None)
            monkeypatch.setattr("nmtkit.cli.generate.open_document", lambda *settings: None)
            monkeypatch.setattr("nmtkit.cli.generate.source_files", lambda *settings: [])
            monkeypatch.setattr("nmtkit.cli.score.score_likelihoods", lambda *settings: None)
            command.invoke(context)
    except click.exceptions.Exit as asked_for_help:
        assert asked_for_help.exit_code == 0
    except click.ClickException as error:
        pytest.fail(f"{path.relative_to(ROOT)}: nmtkit {' '.join(arguments)}: {error.format_message()}")


def test_the_documents_show_every_command() -> None:
    shown = {arguments[0] for path, arguments in EXAMPLES if path.name == "README.md" and arguments}
    assert set(COMMANDS) <= shown, f"README.md shows no example of {', '.join(set(COMMANDS) - shown)}"


def test_help_loads_no_torch() -> None:
    code = """import sys, nmtkit.cli
nmtkit.cli.main(["--help"], standalone_mode=False)
print({"torch", "sacrebleu", "sentencepiece"} & set(sys.modules), file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "set()\n")
    assert "preprocess" in done.stdout


@pytest.mark.parametrize("arguments", [["trian"], ["inspect"], ["score", "--widht", "2"], ["score", "--width", "two"]])
def test_a_wrong_flag_or_command_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="nmtkit")
    assert result.exit_code == 2
    assert result.stderr.startswith("nmtkit: error: ") and result.stderr.count("\n") == 1
    assert "--help" in result.stderr


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_pages_fit_into_80_columns(name: str) -> None:
    result = CliRunner().invoke(main, [*([name] if name else []), "--help"], prog_name="nmtkit", terminal_width=80)
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "width of a sub-layer (section 3.1)  [default: 4 5]",
            "Width of a sub-layer (section 3.1).  [default:\u00a04\u00a05]",
        ),
        ("bleu, chrf or ter", "bleu, chrf or ter."),
        ("html: a page", "html: a page."),
        ("sacreBLEU tokenizer", "sacreBLEU tokenizer."),
        ("Number of lines.", "Number of lines."),
        ("Updates  [1<=x<=5]", "Updates."),
        ("separated by |", "Separated by |"),
    ],
)
def test_a_help_text_is_shown_as_a_sentence_and_names_keep_their_case(text: str, shown: str) -> None:
    assert tidied(text) == shown


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("score --quiet --ref ref --sys ref --sentence-level | head -c 0", 141),  # a slow machine would print progress
        ("score --ref ref --sys nowhere 2> /dev/full", 2),
        ("score --ref ref --sys nowhere 2>&-", 2),
    ],
)
def test_without_anyone_to_read_or_to_be_told_a_command_ends_quietly(command: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "ref").write_text("ein Hund\n" * 20_000)
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m nmtkit {command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")


def test_quiet_leaves_out_the_lines_about_the_work(tmp_path: Path) -> None:
    model = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())
    words = ["attention", "a b", "--path", str(model), "--target", "a", "--output", str(tmp_path / "page.html")]
    lines = {}
    for more in ((), ("--quiet",)):
        result = CliRunner().invoke(main, [*words, *more], prog_name="nmtkit")
        assert result.exit_code == 0 and (tmp_path / "page.html").is_file()
        lines[more] = [line for line in result.stderr.splitlines() if "page.html" in line]
    assert len(lines[()]) == 1 and lines["--quiet",] == []


@pytest.mark.parametrize("words", [["inspect", ""], ["attention", "a", "--path", ""], ["merge", ""]], ids=" ".join)
def test_an_empty_path_is_not_the_working_folder(words: list[str]) -> None:
    result = CliRunner().invoke(main, words, prog_name="nmtkit")
    assert result.exit_code == 2 and "''" in result.stderr and "path" in result.stderr
