"""README and docs are correct: their Python runs, links have a target, and commands and flags exist."""

import dataclasses
import functools
import math
import re
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nmtkit.cleaning.filters import FILTERS
from nmtkit.cli import main
from nmtkit.training.config import REGISTRIES
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_interface_shown_works(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--arch transformer_tiny --encoder-layers 1 --decoder-layers 1 --max-update 2 --batch-tokens 200 --threads 1"
    )
    trained = CliRunner().invoke(
        main, ["train", str(mirror_data), *flags.split(), "--metrics", "none", "--save-dir", str(tmp_path)]
    )
    assert trained.exit_code == 0, trained.output
    (tmp_path / "averaged.pt").symlink_to("last.pt")
    (code,) = [block for block in blocks("python") if "nmtkit.load" in block]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count("\n") == 2


PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md"), *ROOT.glob("benchmarks/*.md")]
)
pages = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@pages
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), f"{page} links to {target}, which is not there"
            assert not anchor or anchor in anchors(file), f"{page} links to {target}#{anchor}, which has no heading"


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_and_name_of_the_walks_in_contributing_is_true() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walks = re.search(r"## Three walks.*?(?=\n## )", text, re.DOTALL)
    assert walks
    steps = re.findall(r"^\d\. .*(?:\n   .*)*", walks[0], re.MULTILINE)
    assert len(steps) == 16
    for step in steps:
        files = [ROOT / "nmtkit" / name for name in re.findall(r"`([\w/]+\.py)`", step)]
        sources = "".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`([A-Za-z_]\w*)`", step):
            assert re.search(rf"\b{name}\b", sources), f"{name} is in none of the files of: {step}"


@functools.cache
def known_flags() -> set[str]:
    """Returns the flags of every command and of every registered component."""
    context = click.Context(main)
    commands = [main.get_command(context, name) for name in main.list_commands(context)]
    flags = {flag for command in (main, *commands) for option in command.params for flag in option.opts}
    pages = [CliRunner().invoke(main, [name, "--help"]).stdout for name in main.list_commands(context)]
    flags |= {flag for page in pages for flag in re.findall(r"--[a-z-]+", page)}
    for registry in (*REGISTRIES.values(), FILTERS, LOGITS_PROCESSORS):
        for entry in registry.entries.values():
            flags |= {"--" + field.name.replace("_", "-") for field in dataclasses.fields(entry.preset)}
    for plugin in (ROOT / "examples/plugin").glob("*.py"):
        names = re.findall(r"^    (\w+): .*= option\(", plugin.read_text(encoding="utf-8"), re.MULTILINE)
        flags |= {"--" + name.replace("_", "-") for name in names}
    return flags | {"--no-" + flag[2:] for flag in flags}


OTHERS = """
--extra-index-url --help
--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --standalone
--shm-size --strict
--cpus --cpuset-cpus --no-cache-dir --cpu-threads
--parts --normalize
"""


NAMING_FLAGS = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("name", NAMING_FLAGS)
def test_every_flag_that_a_page_names_exists(name: str) -> None:
    flags = known_flags() | set(OTHERS.split())
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if "fairseq" in name and line.startswith("|"):
            line = line.split("|")[2]  # the left column has the flags of fairseq
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line):
            assert flag in flags, f"{name} names {flag}, which no command has: {line}"


@pytest.mark.parametrize("last", ["nmtkit demo", "pytest -n auto"])
def test_two_commands_need_nothing_but_python_and_pip(last: str) -> None:
    (line,) = [line for block in blocks("sh") for line in block.splitlines() if line.endswith(last)]
    steps = [step.split()[0] for step in line.split(" && ")]
    assert steps == ["python3", ".venv/bin/pip", f".venv/bin/{last.split()[0]}"]


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 137


@pytest.mark.parametrize("gpus", [8, 16, 24])
def test_the_slurm_script_gives_every_process_work(gpus: int) -> None:
    script = (ROOT / "examples/wmt14/slurm.sh").read_text(encoding="utf-8")
    (formula,) = re.findall(r"max_tokens=(\$\(\(.*\)\))", script)
    sizes = {"SLURM_NNODES": str(gpus // 8), "gpus": "8", "PATH": "/bin:/usr/bin"}
    said = subprocess.run(["bash", "-c", f"echo {formula}"], env=sizes, check=True, capture_output=True, text=True)
    assert math.ceil(25_000 / int(said.stdout)) == gpus


def test_shell_completion_knows_the_commands() -> None:
    result = CliRunner().invoke(
        main,
        prog_name="nmtkit",
        env={"_NMTKIT_COMPLETE": "bash_complete", "COMP_WORDS": "nmtkit ge", "COMP_CWORD": "1"},
    )
    assert "generate" in result.output
