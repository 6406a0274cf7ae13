"""Hostile numbers and paths on the command line end with exit code 2 and one line, without a huge allocation."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from builders import save_tiny_transformer
from forked import Forks, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmtkit.data.dataset.binarized import Dataset

# Names of files in the `hostile` folder below, and of files that do not exist.
PATHS = ["missing", "folder", "empty", "garbage", "garbage/under", "loop", "a" * 300, "b\udcffd", "broken", "cut.pt"]
PATHS += ["text", "data", "/dev/null", "", " "]
REFUSED = ["nan", "inf", "-inf", "1e999", "", " ", "two", "0x10"]  # invalid numbers for every flag
NUMBERS = [*REFUSED, "-1", "0", "-0.0", "0.5", "1", "1e-400", "1e12", "1e30", "100000000", str(2**31), str(2**63)]
NUMBERS += ["9" * 20, "9" * 5000]
TRAIN = "train data --dry-run --device cpu --arch"
COMMANDS = {  # with names of files of the `hostile` folder
    "generate": "generate --device cpu --path a.pt --max-len-a 0 --max-len-b 3",
    "generate sampling": "generate --device cpu --path a.pt --max-len-a 0 --max-len-b 3 --sampling",
    "score": "score --sys text --ref text --metric bleu",
    "inspect": "inspect a.pt",
    "attention": "attention --path a.pt --output new miro",
    "average-checkpoints": "average-checkpoints a.pt b.pt --output new",
    "shortlist": "shortlist data --path a.pt --output new --entries 2 --frequent 2",
    "export": "export --format safetensors a.pt new",
    "preprocess": "preprocess -s xx -t yy --trainpref text --destdir new --workers 1 --tokenizer-from data",
    "preprocess train": "preprocess -s xx -t yy --trainpref text --destdir new --workers 1 --vocab-size 290",
    "train": f"{TRAIN} transformer_tiny",
    "train r_drop": f"{TRAIN} gnmt_small --criterion r_drop --optimizer sgd --lr-scheduler polynomial",
    "train expected_reward": f"{TRAIN} convs2s_small --criterion expected_reward --optimizer adafactor",
    "train moe": f"{TRAIN} moe_small --optimizer adamw --lr-scheduler cosine",
    "train bytenet": f"{TRAIN} bytenet_small --lr-scheduler step",
    "train deep_att": f"{TRAIN} deep_att_small --lr-scheduler plateau",
    "train transformer_moe": f"{TRAIN} transformer_moe_tiny --lr-scheduler fixed",
}
UNTRIED = {"--dry-run-updates"}  # many of these combinations take long


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@pytest.fixture(scope="module")
def material(mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of files that commands read, good and bad ones."""
    folder = tmp_path_factory.mktemp("hostile") / "material"
    folder.mkdir()
    tokenizer = Dataset.open(mirror_data).tokenizer
    save_tiny_transformer(folder / "a.pt", tokenizer)
    save_tiny_transformer(folder / "b.pt", tokenizer, seed=2)
    shutil.copytree(mirror_data, folder / "data")
    shutil.copytree(mirror_data, folder / "broken")
    (folder / "broken" / "manifest.json").write_text("{}")
    for name in ("text", "text.xx", "text.yy"):
        (folder / name).write_text("bado kelu\nmiro\n" * 20)
    (folder / "empty").write_bytes(b"")
    (folder / "garbage").write_bytes(bytes(range(256)) * 40)
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "cut.pt").write_bytes((folder / "a.pt").read_bytes()[:3000])
    return folder


@cache
def flags_of(forks: Forks, command: str) -> dict[str, list[str]]:
    """Returns the flags of the command that take a number, and the flags that take a path, from its help page."""
    name, *arguments = COMMANDS[command].split()
    text = forks.run(name, *(arguments[1:] if name == "train" else []), "--help").stdout
    found = re.findall(r"^ +(?:-\w, )?(--[a-z0-9-]+) (\S+)", text, re.MULTILINE)
    kinds = {"number": ("N", "X", "N,…", "X,…"), "path": ("FILE", "PATH", "FOLDER", "PREFIX,…", "PATH,…", "FILE.html")}
    flags = {
        kind: [f for f, metavar in found if metavar in names and f not in UNTRIED] for kind, names in kinds.items()
    }
    assert flags["number"] or name in ("inspect", "export")
    return flags


def attempt(forks: Forks, material: Path, command: str, flag: str | int, value: str) -> Result:
    """Runs the command with `flag` set to `value`, or the argument at that index replaced, on a copy of the files."""
    folder = material.parent / "hostile"
    if value in NUMBERS and (folder / "data").exists():  # only "new" is written to
        subprocess.run(["rm", "-rf", folder / "new"], check=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(material, folder, symlinks=True, copy_function=os.link)
    names = {path.name for path in material.iterdir()} | {"new"}
    arguments = [str(folder / word) if word in names else word for word in COMMANDS[command].split()]
    if isinstance(flag, int):
        arguments[flag] = value
    else:
        arguments.append(f"{flag}={value}")
    return forks.run(*arguments, text="bado kelu\n\nmiro sate\n", seconds=30)


def check(result: Result, refused: bool) -> None:
    """Asserts exit code 2 and one line of error, or, unless the value must be refused, that the command succeeded."""
    assert "Traceback" not in result.stderr, result.stderr
    if result.code == 0 and not refused:
        return
    assert result.code == 2, f"exit code {result.code}: {result.stderr}"
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("nmtkit: error: ") and len(lines[-1]) > 25, result.stderr
    assert sum("error:" in line for line in lines) == 1, result.stderr


def try_number(forks: Forks, material: Path, data: st.DataObject) -> None:
    command = data.draw(st.sampled_from(sorted(COMMANDS)))
    flags = flags_of(forks, command)["number"]
    if flags:
        flag, value = data.draw(st.sampled_from(flags)), data.draw(st.sampled_from(NUMBERS))
        result = attempt(forks, material, command, flag, value)
        check(result, refused=value in REFUSED)
        assert result.code == 0 or flag in result.stderr or value not in REFUSED, (
            f"{flag} is not named: {result.stderr}"
        )


def try_path(forks: Forks, material: Path, data: st.DataObject) -> None:
    command = data.draw(st.sampled_from([name for name in sorted(COMMANDS) if not name.startswith("train ")]))
    words = COMMANDS[command].split()
    positions = [i for i in range(1, len(words)) if words[i] in ("a.pt", "b.pt", "text", "data", "new")]
    flag = data.draw(st.sampled_from([*flags_of(forks, command)["path"], *positions]))
    name = data.draw(st.sampled_from(PATHS))
    value = str(material.parent / "hostile" / name) if name.strip() else name
    check(attempt(forks, material, command, flag, value), refused=value == "")


QUICK = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=90)


@pytest.mark.slow
@QUICK
@given(data=st.data())
def test_a_hostile_number_is_refused_in_one_line(forks: Forks, material: Path, data: st.DataObject) -> None:
    try_number(forks, material, data)


@pytest.mark.slow
@QUICK
@given(data=st.data())
def test_a_hostile_path_is_refused_in_one_line(forks: Forks, material: Path, data: st.DataObject) -> None:
    try_path(forks, material, data)


@pytest.mark.slow
@LONG
@given(data=st.data())
def test_many_hostile_numbers_are_refused_in_one_line(forks: Forks, material: Path, data: st.DataObject) -> None:
    try_number(forks, material, data)


@pytest.mark.slow
@LONG
@given(data=st.data())
def test_many_hostile_paths_are_refused_in_one_line(forks: Forks, material: Path, data: st.DataObject) -> None:
    try_path(forks, material, data)
