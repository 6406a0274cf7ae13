"""The five commands as a user types them, in a shell, on a corpus of a few hundred sentences."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.demo.run import read_corpus, write_corpus

pytestmark = pytest.mark.slow  # each command is a process
TRAIN = (
    "nmtkit train data-bin --arch transformer_tiny --encoder-layers 1 --decoder-layers 1 --d-model 32 --d-ff 64 "
    "--batch-tokens 800 --lr 0.01 --warmup-updates 10 --max-update 24 --save-interval-updates 8 --metrics none "
    "--threads 1 --save-dir checkpoints"
)
PREPROCESS = (
    "nmtkit preprocess -s en -t de --trainpref data/train --validpref data/valid --testpref data/test "
    "--destdir data-bin --vocab-size 600"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the text and the results of the first four commands."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "data").mkdir()
    corpus, sizes = read_corpus(), {"train": 400, "valid": 20, "test": 30}
    write_corpus({subset: corpus[subset][:size] for subset, size in sizes.items()}, folder / "data")
    test = folder / "data" / "test.en"
    test.write_text(test.read_text() + "\n", encoding="utf-8")  # an empty line must stay a line
    german = folder / "data" / "test.de"
    german.write_text(german.read_text() + "\n", encoding="utf-8")
    shell(PREPROCESS, folder)
    shell(TRAIN, folder)
    shell("nmtkit average-checkpoints checkpoints --last 2 --output averaged.pt", folder)
    return folder


def shell(line: str, folder: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the line in a shell, where `nmtkit` runs in this interpreter."""
    program = f'nmtkit() {{ "{sys.executable}" -m nmtkit "$@"; }}; set -o pipefail; '
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        ["bash", "-c", program + line], cwd=folder, env=environment, text=True, capture_output=True, encoding="utf-8"
    )
    assert result.returncode == status, result.stderr
    return result


def test_generate_pipes_into_score(home: Path) -> None:
    piped = shell(
        "nmtkit generate data-bin --gen-subset test --path averaged.pt --max-len-b 5 | tee test.de | "
        "nmtkit score --data data-bin --format json",
        home,
    )
    names = [score["name"] for score in json.loads(piped.stdout)]
    assert names == ["BLEU", "chrF2", "TER"]
    assert (home / "test.de").read_bytes().count(b"\n") == 31


def test_raw_text_from_standard_input_gives_the_same_lines_as_the_dataset(home: Path) -> None:
    flags = "--path averaged.pt --beam 2 --max-len-b 3"
    from_data = shell(f"nmtkit generate data-bin --gen-subset test {flags}", home)
    from_text = shell(f"nmtkit generate {flags} < data/test.en", home)
    assert from_data.stdout == from_text.stdout
    assert from_text.stdout.count("\n") == 31


def test_what_is_piped_has_no_control_characters(home: Path) -> None:
    for line in ("nmtkit inspect averaged.pt", "nmtkit inspect data-bin", "nmtkit --help", "nmtkit train --help"):
        result = shell(line, home)
        for text in (result.stdout, result.stderr):
            assert "\x1b" not in text and "\r" not in text
    log = shell(TRAIN.replace("--max-update 24", "--max-update 25"), home)
    assert "\x1b" not in log.stderr and "\r" not in log.stderr and log.stdout == ""


def test_inspect_names_the_command_that_goes_on(home: Path) -> None:
    described = json.loads(shell("nmtkit inspect checkpoints/last.pt --format json", home).stdout)
    resumed = shell(described["commands"]["resume"], home)
    assert "Traceback" not in resumed.stderr


def test_a_mistake_is_one_line_and_exit_code_2(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [shell("nmtkit score --data data-bin --sys data/nothing.de", home, status=2).stderr]
    monkeypatch.chdir(home)
    generate = "generate data-bin --gen-subset nonsense --path averaged.pt"
    for line in ("train data-bin --arch my_rnn", generate, PREPROCESS[7:]):
        result = CliRunner().invoke(main, shlex.split(line))
        assert result.exit_code == 2
        errors.append(result.stderr)
    for error in errors:
        assert error.startswith("nmtkit: error: ") and error.count("\n") == 1, error
