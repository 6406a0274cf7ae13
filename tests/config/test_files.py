import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.config.files import atomic_write, new_folder, parse_json, read_toml, tidy


def test_a_file_gets_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for contents in (b"old", b"new"):
        with atomic_write(path) as file:
            file.write(contents)
            assert not path.exists() or path.read_bytes() == b"old"
        assert path.read_bytes() == contents
    with pytest.raises(KeyError), atomic_write(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_folder_gets_its_name_only_when_its_files_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, bool]] = []  # file or folder, and whether the new folder has its name
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_ino, (tmp_path / "model").exists()))
    )
    with new_folder(tmp_path / "model") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"1")
        (folder / "config").write_bytes(b"2")
    whole = [tmp_path / "model", *(tmp_path / "model").rglob("*")]
    assert {(path.stat().st_ino, False) for path in whole} <= {*synced} and len(whole) == 4
    assert synced[-1] == (tmp_path.stat().st_ino, True)  # the name itself


@pytest.mark.parametrize("exists", [True, False])
def test_a_new_folder_may_be_written_through_a_link(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "disk").mkdir()
    if exists:
        (tmp_path / "disk" / "model").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk" / "model")
    with new_folder(tmp_path / "model") as folder:
        (folder / "weights").touch()
    assert (tmp_path / "model").is_symlink() and os.listdir(tmp_path / "disk" / "model") == ["weights"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "model"]


def test_a_path_loses_dots_only_if_it_stays_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    assert tidy(tmp_path / "elsewhere" / ".." / "new" / "x") == tmp_path / "new" / "x"
    assert tidy(tmp_path / "link" / ".." / "x") == tmp_path / "link" / ".." / "x"  # elsewhere/x
    assert tidy(Path("../x")) == Path("../x") and tidy(Path("hf:org/name@main")) == Path("hf:org/name@main")


@pytest.mark.parametrize("kind", ["device", "folder"])
def test_a_device_or_a_folder_is_not_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    before = path.stat()
    with pytest.raises(OSError, match=rf"cannot write {path}: "), atomic_write(path):
        pytest.fail("the block must not be reached")
    assert path.stat() == before
    assert os.listdir(tmp_path) == ["output"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limits every file to 100,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "command",
    ["average-checkpoints a.pt b.pt --output out", "export a.pt out --format safetensors"],
    ids=["average", "export"],
)
def test_a_full_disk_is_named_and_leaves_nothing_behind(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if command.startswith("export"):
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("a.pt", "b.pt")):
        save_tiny_transformer(tmp_path / name, tiny_tokenizer(), seed=seed, d_model=64)
    request.getfixturevalue("small_files")
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.split())
    assert said.startswith("nmtkit: error: cannot write") and "out: " in said and "File too large" in said
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]


def test_an_error_of_reading_keeps_its_message(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent"), atomic_write(tmp_path / "out"):
        (tmp_path / "absent").read_bytes()
    assert os.listdir(tmp_path) == []


def test_deep_nesting_is_a_mistake_in_the_file(tmp_path: Path) -> None:
    """The parsers raise RecursionError, which ended a command with a traceback."""
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 200_000)
    (tmp_path / "deep.toml").write_text("a = " + "[" * 200_000)
    with pytest.raises(ValueError, match="nested"):
        read_toml(tmp_path / "deep.toml")
    (tmp_path / "mark.toml").write_bytes(b"\xef\xbb\xbfa = 1\n")  # a byte order mark of Windows
    assert read_toml(tmp_path / "mark.toml") == {"a": 1}
