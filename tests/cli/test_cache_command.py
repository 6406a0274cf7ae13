"""`nmtkit cache` lists the models of the Hub and other cached files, and removes or prunes them."""

import os
import time
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner, Result
from hub_server import HubServer

from nmtkit.cli import main
from nmtkit.config.files import checkpoint_of, user_cache
from nmtkit.models.formats import hub_models


def cache(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["cache", *arguments], prog_name="nmtkit")
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def commits(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """Caches two models, the first of them in two commits. Returns the commits by name."""
    save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())
    contents = (tmp_path / "model.pt").read_bytes()
    known = {}
    for name, revision, card in (("org/one", "main", b"1"), ("org/one", "v2", b"2"), ("org/two", "main", b"3")):
        known[f"hf:{name}@{revision}"] = hub.add(name, {"model.pt": contents, "README.md": card}, revision=revision)
        checkpoint_of(Path(f"hf:{name}@{revision}"))
    return known


@pytest.mark.slow
def test_the_list_has_names_sizes_and_last_uses(commits: dict[str, str]) -> None:
    (user_cache() / "machine-code-0123").mkdir()
    (user_cache() / "machine-code-0123" / "code").write_bytes(bytes(2_000_000))
    lines = cache().stdout.splitlines()
    assert len(lines) == 4
    for name, commit in commits.items():
        repository, revision = name.split("@")
        (line,) = [line for line in lines if commit[:12] in line]
        assert line.startswith(repository) and line.endswith(revision) and "used today" in line
    assert "2.0 MB" in next(line for line in lines if "machine-code" in line)
    assert "4 entries" in cache("list").stderr
    assert cache("dir").stdout == f"{user_cache()}\n"


@pytest.mark.slow
def test_models_are_removed_by_name(commits: dict[str, str], hub: HubServer) -> None:
    cache("remove", "hf:org/one@v2")
    assert [line.split()[0] for line in cache().stdout.splitlines()] == [
        f"hf:org/one@{commits['hf:org/one@main'][:12]}", f"hf:org/two@{commits['hf:org/two@main'][:12]}"
    ]  # fmt: skip
    cache("remove", "hf:org/one", f"hf:org/two@{commits['hf:org/two@main'][:7]}")
    assert cache().stdout == "" and not list((user_cache() / "models").iterdir())
    assert checkpoint_of(Path("hf:org/one")).is_file()  # again, from the cache of the client
    assert len(hub.asked(f"GET /lfs/{commits['hf:org/one@main']}/model.pt")) == 1


@pytest.mark.slow
def test_a_wrong_name_removes_nothing(commits: dict[str, str]) -> None:
    before = cache().stdout
    for names in (["hf:org/none"], ["hf:org/one", "hf:org/none"], ["hf:org/one@v9"], ["hf:org/one@"], []):
        result = CliRunner().invoke(main, ["cache", "remove", *names])
        assert result.exit_code == 2
        if names:
            assert names[-1] in result.stderr and "hf:org/two" in result.stderr
    for wrong in (["list", "hf:org/one"], ["list", "--days", "3"], ["dir", "x"]):
        assert CliRunner().invoke(main, ["cache", *wrong]).exit_code == 2
    assert cache().stdout == before


@pytest.mark.slow
def test_prune_removes_imports_of_other_versions_leftovers_and_unused_models(commits: dict[str, str]) -> None:
    folder = user_cache() / "models" / "org--two"
    (current,) = (path for path in folder.iterdir() if path.is_dir())
    old = current.with_name(f"{current.name.partition('-')[0]}-0.9")
    os.rename(current, old)
    left, running = folder / ".abc.123", folder / ".def.456"
    for path in (left, running):
        path.mkdir()
        (path / "model.pt").write_bytes(b"half")
    os.utime(left, (time.time() - 1e5,) * 2)
    assert "prune" in next(line for line in cache().stdout.splitlines() if "org/two" in line)
    cache("prune")
    assert not old.exists() and not left.exists() and running.exists()
    one = checkpoint_of(Path("hf:org/one")).parent
    os.utime(one, (time.time() - 40 * 86400,) * 2)
    cache("prune", "--days", "50")
    assert one.exists()
    cache("prune", "--days", "30")
    assert not one.exists() and len(cache().stdout.splitlines()) == 1
    hub_models._opened.clear()
    assert checkpoint_of(Path("hf:org/one")).parent == one


def test_an_empty_cache(hub: HubServer) -> None:
    assert cache().stdout == "" and "0 entries" in cache().stderr
    cache("prune")
