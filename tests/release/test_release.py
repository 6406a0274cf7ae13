"""The built packages work without the repository, and the files of a container name things that exist."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SERVICE = ROOT / "examples/service"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the wheel and the source package, built from a copy of the repository."""
    folder = tmp_path_factory.mktemp("release")
    for name in ("pyproject.toml", "README.md", "LICENSE", "nmtkit"):
        if (ROOT / name).is_dir():  # Python may write to __pycache__ meanwhile
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-m", "build", "-q", folder], check=True, capture_output=True)
    (wheel,), (source,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, source


@pytest.mark.slow
def test_the_packages_pass_the_check_of_the_index_and_have_all_files(packages: tuple[Path, Path]) -> None:
    wheel, source = packages
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, source], check=True, capture_output=True)
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "nmtkit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        assert in_tree == {name for name in archive.namelist() if name.startswith("nmtkit/")}
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert in_tree | {"LICENSE", "README.md", "pyproject.toml"} <= packed


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_in_a_clean_environment(packages: tuple[Path, Path], tmp_path: Path) -> None:
    """The environment has the packages of this environment, but the nmtkit of the wheel."""
    venv.create(tmp_path / "venv", with_pip=False)
    python, folder = tmp_path / "venv/bin/python", tmp_path / "work"
    folder.mkdir()
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", packages[0]]
    subprocess.run(install, check=True, capture_output=True)
    paths = sysconfig.get_paths(vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")})
    (Path(paths["purelib"]) / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words: str | Path) -> str:
        result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    assert str(tmp_path) in run(python, "-c", "import nmtkit; print(nmtkit.__file__)")
    said = run(tmp_path / "venv/bin/nmtkit", "demo")
    score = re.search(r"BLEU\D*(\d+\.\d)", said)
    assert score and float(score[1]) > 80, said


def test_the_version_is_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {nmtkit.__version__}\n" in citation
    assert f"\n## {nmtkit.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_all_has_every_extra_for_users() -> None:
    """Only tools of developers are not in `all`. The documentation has a row for each extra."""
    extras = PROJECT["optional-dependencies"]
    (all_of_them,) = extras["all"]
    named = re.fullmatch(r"nmtkit\[([\w,]+)\]", all_of_them)
    assert named is not None
    assert named[1].split(",") == sorted(set(extras) - {"all", "dev", "docs", "test"})
    table = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
    rows = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert set(extras) <= rows, set(extras) - rows


def test_the_documentation_says_where_each_bundled_file_comes_from() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = set(configuration["tool"]["setuptools"]["package-data"]["nmtkit"]) - {"py.typed"}
    section = (ROOT / "docs/installation.md").read_text(encoding="utf-8").partition("\n## Licences\n")[2]
    assert patterns <= set(re.findall(r"`([\w/*.]+)`", section))
    others = [
        path
        for path in (ROOT / "nmtkit").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".typed")
        and not any(path.match(pattern) for pattern in patterns)
    ]  # fmt: skip
    assert not others
    texts = [path for path in (ROOT / "nmtkit").rglob("*") if path.suffix in (".js", ".css", ".html", ".svg", ".json")]
    foreign = re.compile(r"copyright|licen[cs]e|https?://(?!www\.w3\.org|localhost)", re.IGNORECASE)
    assert not [path for path in texts if foreign.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_a_dockerfile_names_files_extras_and_flags_that_exist(name: str) -> None:
    text = (SERVICE / name).read_text(encoding="utf-8").replace("\\\n", " ")
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    (extras,) = re.findall(r"/source\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (command,) = re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE)
    page = CliRunner().invoke(main, ["serve", "--help"]).output
    assert all(flag in page for flag in re.findall(r"--[\w-]+", command))
    assert "\nUSER nmtkit\n" in text  # the service does not run as root


def test_the_compose_file_uses_the_image_and_protects_the_system() -> None:
    text = (SERVICE / "compose.yaml").read_text(encoding="utf-8")
    (dockerfile,) = re.findall(r"dockerfile: (\S+)", text)
    assert (ROOT / dockerfile).is_file()
    for line in ("read_only: true", "cap_drop: [ALL]", "/models:ro", "no-new-privileges:true"):
        assert line in text
