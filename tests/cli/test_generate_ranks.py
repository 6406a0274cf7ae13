"""`torchrun … -m nmtkit generate` writes the output of one process, completely or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import save_tiny_transformer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.jobs.distributed import rank_device


@pytest.fixture(scope="module")
def trained(mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a checkpoint of random weights."""
    path = tmp_path_factory.mktemp("model") / "random.pt"
    return save_tiny_transformer(path, Dataset.open(mirror_data).tokenizer, decoder_layers=1)


FLAGS = ["generate", "--device", "cpu", "--max-len-b", "4", "--max-tokens", "40"]
TEXT = b"".join(line + b"\n" for line in [b"bado kelu miro", b"", b"sate " * 9, b"vonu"] * 12)


def two_processes(*flags: str, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nmtkit"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*torchrun, *FLAGS, *flags], input=text, capture_output=True, env=environment, check=False)


@pytest.mark.slow
def test_two_processes_write_what_one_writes_byte_for_byte(trained: Path) -> None:
    flags = ["--path", str(trained)]
    one, two = CliRunner().invoke(main, [*FLAGS, *flags], input=TEXT), two_processes(*flags, text=TEXT)
    assert (one.exit_code, two.returncode) == (0, 0), two.stderr.decode()
    assert two.stdout == one.stdout_bytes
    assert one.stdout.count("\n") == 48


@pytest.mark.slow
def test_two_processes_find_the_hypotheses_of_one(mirror_data: Path, trained: Path) -> None:
    """Scores differ in their last digits, because the batches depend on the number of processes."""
    flags = ["--path", str(trained), str(mirror_data), "--beam", "3", "--nbest", "2", "--format", "jsonl"]
    one, two = CliRunner().invoke(main, [*FLAGS, *flags]), two_processes(*flags)
    assert (one.exit_code, two.returncode) == (0, 0), two.stderr.decode()
    records, others = ([json.loads(line) for line in out.splitlines()] for out in (one.stdout_bytes, two.stdout))
    assert len(records) == len(others) == 20
    for record, other in zip(records, others, strict=True):
        assert record.keys() == other.keys() and record["id"] == other["id"]
        for hypothesis, counterpart in zip(record["hypotheses"], other["hypotheses"], strict=True):
            assert counterpart["text"] == hypothesis["text"]
            assert counterpart["score"] == pytest.approx(hypothesis["score"], rel=1e-5)


@pytest.mark.slow
def test_a_process_that_dies_ends_all_with_an_error(trained: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "dying.py"
    plugin.write_text(
        "import os\n"
        "from nmtkit.models.architectures.transformer import Transformer\n"
        "encode = Transformer.encode\n"
        "def dying(self, source):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os._exit(9)\n"
        "    return encode(self, source)\n"
        "Transformer.encode = dying\n"
    )
    done = two_processes("--path", str(trained), "--plugin", str(plugin), "--engine", "torch", text=TEXT)
    assert done.returncode != 0
    assert done.stdout.count(b"\n") < 48


def test_each_process_of_torchrun_gets_a_device_and_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_device("cuda", 1) == "cuda" and rank_device("cpu", 4) == "cpu"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device("cpu", 1) == "cpu" and rank_device("cuda:3", 1) == "cuda:3"
    with pytest.raises(ValueError, match="--workers and torchrun"):
        rank_device("cpu", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="--device cuda"):
        rank_device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"process 1 .*no GPU"):
        rank_device("cuda", 1)
