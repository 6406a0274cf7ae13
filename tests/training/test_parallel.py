"""`--parallel` on two real processes makes the updates of one process. Both can continue from each checkpoint."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.jobs.distributed import launch
from nmtkit.models import checkpoint

FLAGS = shlex.split("""
    --arch transformer_tiny --d-model 15 --heads 3 --d-ff 31 --encoder-layers 2 --decoder-layers 1 --dropout 0.1
    --batch-tokens 400 --max-tokens 150 --precision fp32 --device cpu --valid-beam 2 --lr 0.01 --warmup-updates 10
    --clip-norm 1 --log-interval 1 --threads 1
""")


def flags(data: Path, save_dir: Path, *more: object) -> list[str]:
    return ["train", str(data), *FLAGS, "--save-dir", str(save_dir), *map(str, more)]


def one_process(*arguments: str) -> int:
    """Returns the exit code of a run in this process: the command without a second start of Python and torch."""
    return CliRunner().invoke(main, arguments).exit_code


def assert_alike(one: Path, other: Path) -> None:
    """Asserts that two checkpoints are equal: names, shapes, numbers except for rounding, optimizer and scores."""
    a, b = (checkpoint.load(path / "last.pt") for path in (one, other))
    assert list(a["model"]) == list(b["model"])
    for name, tensor in a["model"].items():
        torch.testing.assert_close(b["model"][name], tensor, atol=2e-4, rtol=1e-3)
    states = [it["training"]["optimizer"]["state"] for it in (a, b)]
    assert list(states[0]) == list(states[1])
    for index, entries in states[0].items():
        for name, value in entries.items():
            torch.testing.assert_close(states[1][index][name], value, atol=2e-4, rtol=1e-2)
    for name, score in a["scores"].items():
        assert b["scores"][name] == pytest.approx(score, rel=1e-3)


@pytest.mark.slow
def test_sharded_and_replicated_runs_go_on_from_each_other(mirror_data: Path, tmp_path: Path) -> None:
    # three micro-batches for two processes: one of them gets a dummy in every update
    features = (
        "--ema-decay",
        0.9,
        "--encoder-layerdrop",
        0.5,
        "--gradient-checkpointing",
        "--freeze",
        "decoder.*norm*",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert launch(flags(mirror_data, parts, *features, "--max-update", 3, "--parallel", "fsdp"), 2) == 0
    assert one_process(*flags(mirror_data, parts, *features, "--max-update", 5)) == 0
    assert launch(flags(mirror_data, parts, *features, "--max-update", 7, "--parallel", "ddp"), 2) == 0
    assert launch(flags(mirror_data, parts, *features, "--max-update", 8, "--parallel", "fsdp"), 2) == 0
    assert one_process(*flags(mirror_data, whole, *features, "--max-update", 8)) == 0
    assert_alike(whole, parts)
    shared = checkpoint.load(parts / "last.pt")["model"]
    names = ("output_projection.weight", "source_embedding.tokens.weight")
    assert len({shared[name].data_ptr() for name in names}) == 1


POISONED = """
import math
from nmtkit.jobs import distributed
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from nmtkit.training.criterions.interface import Loss

@CRITERIONS.register("poisoned", CrossEntropyConfig())
class Poisoned(CrossEntropy):
    calls = 0
    def forward(self, model, batch):
        loss = super().forward(model, batch)
        self.calls += self.training
        # two passes an update: the third is the first of update 2
        bad = self.training and self.calls == 3 and distributed.rank() == distributed.world_size() - 1
        return Loss(loss.sum + math.inf, loss.counts) if bad else loss
"""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_loss_that_is_infinite_on_one_rank_skips_the_update_on_all(
    mirror_data: Path, tmp_path: Path, parallel: str
) -> None:
    (tmp_path / "plugin.py").write_text(POISONED)
    more = ["--plugin", tmp_path / "plugin.py", "--criterion", "poisoned", "--max-tokens", 110]
    assert launch(flags(mirror_data, tmp_path / "run", *more, "--max-update", 3, "--parallel", parallel), 2) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line.get("skipped", 0) for line in lines if line["kind"] == "train"] == [0, 1, 0]
    state = checkpoint.load(tmp_path / "run" / "last.pt")["training"]["optimizer"]["state"]
    assert {float(entries["step"]) for entries in state.values()} == {2.0}


@pytest.mark.slow
def test_composite_optimizers_and_transforms_make_the_same_updates_on_two_processes(
    mirror_data: Path, tmp_path: Path
) -> None:
    # the tokens differ from the tokens on disk, and each process makes only its own tokens
    more = ["--optimizer", "muon", "--transforms", "word_dropout,bpe_dropout,word_shuffle,casing", "--max-update", 3]
    assert launch(flags(mirror_data, tmp_path / "two", *more), 2) == 0
    assert one_process(*flags(mirror_data, tmp_path / "one", *more)) == 0
    assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "model",
    [
        "--criterion r_drop --pre-norm --optimizer sgd",
        "--decoder-self-attention ssru --decoder-ffn none",
        "--arch transformer_moe_tiny --experts 4 --d-model 16 --heads 2",
        "--arch moe_small --d-model 16 --d-hidden 32 --d-expert 16",
        "--arch gnmt_small --d-model 16",
        "--arch convs2s_small",
        "--arch bytenet_small --d-model 16",
        "--arch deep_att_small --d-model 16",
    ],
)
def test_every_architecture_trains_on_two_processes(
    mirror_data: Path, tmp_path: Path, model: str, parallel: str
) -> None:
    for name, more in (("two", ["--parallel", parallel, "--nproc-per-node", "2"]), ("one", [])):
        arguments = flags(mirror_data, tmp_path / name, "--max-update", 3, *more)
        start = arguments.index("--arch")
        if "--arch" in model:  # other architectures have other flags than the Transformer
            del arguments[start : arguments.index("--dropout")]
        words = [*arguments, *shlex.split(model)]
        command = [sys.executable, "-m", "nmtkit", *words]
        assert (subprocess.run(command, check=False).returncode if more else one_process(*words)) == 0
    assert_alike(tmp_path / "one", tmp_path / "two")


UNDECLARED = """
import torch
from nmtkit.training.optimizers import OPTIMIZERS
from nmtkit.training.optimizers.elementwise import AdamConfig

@OPTIMIZERS.register("undeclared", AdamConfig())
def undeclared(config, groups):
    return torch.optim.Adam(groups, lr=0.0)
"""


@pytest.mark.parametrize(
    ("component", "said"),
    [
        (["--optimizer", "adafactor"], "--optimizer adafactor needs whole"),
        (["--optimizer", "muon"], "--optimizer muon needs whole"),
        (["--plugin", "undeclared.py", "--optimizer", "undeclared"], "--optimizer undeclared needs whole"),
        (["--criterion", "expected_reward"], "--criterion expected_reward needs whole"),
        (["--compile"], "--compile and --parallel fsdp"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, component: list[str], said: str
) -> None:
    (tmp_path / "undeclared.py").write_text(UNDECLARED)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, flags(mirror_data, tmp_path, "--parallel", "fsdp", *component))
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")
