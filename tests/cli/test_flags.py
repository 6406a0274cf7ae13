"""Each field of a config becomes a flag with a type, a short form and a heading."""

from pathlib import Path
from typing import Any

import click
import pytest
from builders import NeedyConfig, ThingConfig
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.cli.flags import flags
from nmtkit.config import COMMAND_LINE, derive


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--width", "7"], {"width": 7}),
        (["--rate", "0.5"], {"rate": 0.5}),
        (["--rate", "none"], {}),
        (["--kind", "new"], {"kind": "new"}),
        (["--betas", "0.9, 0.999"], {"betas": (0.9, 0.999)}),
        (["--fast"], {"fast": True}),
        (["--no-fast"], {"fast": False}),
        (["--folder", "a/b"], {"folder": Path("a/b")}),
        (["--files", "a/b, c"], {"files": (Path("a/b"), Path("c"))}),
        (["--tags", ""], {"tags": (None,)}),
        (["--tags", "<x>,,<y>"], {"tags": ("<x>", None, "<y>")}),
    ],
)
def test_flags_parse_to_the_fields_types(arguments: list[str], expected: dict[str, Any]) -> None:
    seen: dict[str, Any] = {}
    command = click.Command(
        "c", params=list(flags(ThingConfig(), "Thing")), callback=lambda **given: seen.update(given)
    )
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert {name: value for name, value in seen.items() if value is not None} == expected


def test_a_flag_may_have_a_short_form_a_metavar_a_heading_and_no_default() -> None:
    language, workers = flags(NeedyConfig, "Other")
    assert language.opts == ["-s", "--source-lang"] and language.metavar == "LANG" and language.required
    assert (language.section, workers.section) == ("Files", "Running")  # type: ignore[attr-defined]
    assert "default" not in language.help and "default" not in workers.help  # type: ignore[operator]
    assert derive(NeedyConfig, {"source_lang": "en"}, COMMAND_LINE) == NeedyConfig(source_lang="en")
    with pytest.raises(ValueError, match=r"^--workers is 0;"):
        derive(NeedyConfig, {"source_lang": "en", "workers": 0}, COMMAND_LINE)


def test_a_missing_required_flag_is_an_error_of_the_command_line() -> None:
    command = click.Command("c", params=list(flags(NeedyConfig, "Other")), callback=lambda **given: None)
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 2 and "Missing option '-s' / '--source-lang'" in result.output


@pytest.mark.parametrize("value", ["0", "2"])
def test_a_value_of_zero_is_given(value: str, tmp_path: Path) -> None:
    (tmp_path / "lists").write_text("{}\n")
    result = CliRunner().invoke(main, ["rerank", str(tmp_path / "lists"), "--seed", value])
    assert result.exit_code == 2 and "--seed does nothing" in result.output
