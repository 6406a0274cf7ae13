"""For a flag of another toolkit, the error suggests a flag of nmtkit, and every suggested flag exists."""

import re

import click
import pytest
from click.testing import CliRunner

from nmtkit.cli import COMMANDS, main, other_toolkits
from nmtkit.cli.flags import flags
from nmtkit.training.config import REGISTRIES

ROWS = [
    (command, toolkit, flag, text)
    for command, rows in other_toolkits.FLAGS.items()
    for toolkit, names in rows.items()
    for flag, text in names.items()
]


def flags_of(command: str, of_components: bool) -> set[str]:
    """Returns the flags of a command. The flags of `train` include the flags of all components, or of its defaults."""
    found = main.get_command(click.Context(main), command)
    assert found is not None
    options = list(found.params)
    if command == "train" and of_components:
        for registry in REGISTRIES.values():
            options += [option for entry in registry.entries.values() for option in flags(entry.preset)]
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts)} | {"--quiet"}


@pytest.mark.parametrize(("command", "toolkit", "flag", "text"), ROWS, ids=[f"{row[0]} {row[2]}" for row in ROWS])
def test_every_row_names_a_flag_that_is_not_here_and_others_that_are(
    command: str, toolkit: str, flag: str, text: str
) -> None:
    assert flag not in flags_of(command, of_components=False), f"{command} has {flag} itself"
    where = command
    for word in re.findall(r"nmtkit ([a-z-]+)|(?<![\w-])(--[a-z][a-z0-9-]+)", text):
        if word[0]:
            where = word[0]
            assert where in COMMANDS
        elif word[1] not in ("--nproc-per-node",):  # torchrun has this flag, too
            assert word[1] in flags_of(where, of_components=True), f"{where} has no {word[1]}"


def test_every_command_that_is_answered_for_leads_to_one_that_exists() -> None:
    for names in other_toolkits.COMMANDS.values():
        for name, text in names.items():
            assert name not in COMMANDS
            assert {word for word in re.findall(r"nmtkit ([a-z-]+)", text) if word != "has"} <= set(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("train data-bin --fp16", "--precision fp16"),
        ("train data-bin --arch gnmt --batch-size 64", "--max-sentences"),
        ("train data-bin --train_steps=5", "--max-update"),
        ("generate --path a.pt --remove-bpe", "not needed"),
        ("generate --path a.pt --beam-size 5", "--beam here"),
        ("preprocess --joined-dictionary", "default"),
        ("interactive data-bin", "nmtkit generate --path averaged.pt"),
        ("fairseq-train data-bin", "nmtkit train"),
        ("translate", "nmtkit generate"),
        ("trian", "did you mean 'train'?"),
        ("train data-bin --no-such-thing", "No such option '--no-such-thing'"),
    ],
)
def test_a_name_of_another_toolkit_is_answered_with_the_name_here(arguments: str, expected: str) -> None:
    result = CliRunner().invoke(main, arguments.split(), prog_name="nmtkit")
    assert result.exit_code == 2
    assert expected in result.stderr and result.stderr.count("\n") == 1
    assert "--help" in result.stderr
