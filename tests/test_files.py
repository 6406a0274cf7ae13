import os
from pathlib import Path

import pytest

from nmtkit.files import atomic_write


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


@pytest.mark.parametrize("kind", ["device", "folder"])
def test_a_device_or_a_folder_is_not_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    before = path.stat()
    with pytest.raises(OSError, match=rf"cannot write {path}: it is .*give the name of a file"), atomic_write(path):
        pytest.fail("the block must not be reached")
    assert path.stat() == before
    assert os.listdir(tmp_path) == ["output"]
