"""Every registered architecture in a whole run: criterions, optimizers, resume, averaging, ensembles."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from testing import TINY_CONFIGS

from nmtkit import averaging, checkpoint
from nmtkit.architectures import ARCHITECTURES, Vocabulary
from nmtkit.criterions import CRITERIONS
from nmtkit.data.binarized import Dataset
from nmtkit.generation.translator import Translator
from nmtkit.optimizers import OPTIMIZERS
from nmtkit.registry import derive
from nmtkit.training.config import JobTemplate
from nmtkit.training.progress import Lines
from nmtkit.training.run import Run

RUN = {
    "batch_tokens": 200,
    "max_tokens": 120,
    "precision": "fp32",
    "device": "cpu",
    "lr": 0.01,
    "warmup_updates": 4,
    "validate_interval": None,
    "save_interval": None,
    "save_interval_updates": 2,
}


def train(data: Path, save_dir: Path, name: str, max_update: int) -> None:
    settings = TINY_CONFIGS[name] | RUN | {"save_dir": save_dir, "max_update": max_update}
    Run(JobTemplate.read(names={"architecture": name}).job(settings), data, Lines()).run()


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_resume_is_exact_and_checkpoints_average_and_ensemble(mirror_data: Path, tmp_path: Path, name: str) -> None:
    train(mirror_data, tmp_path / "whole", name, 4)
    train(mirror_data, tmp_path / "parts", name, 2)
    train(mirror_data, tmp_path / "parts", name, 4)
    whole, parts = (checkpoint.load(tmp_path / folder / "last.pt")["model"] for folder in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[key]) for key, tensor in whole.items())

    paths = averaging.last_of(tmp_path / "whole", 2)
    averaged = averaging.average(paths)
    first = checkpoint.load(paths[0])["model"]
    for key, tensor in averaged["model"].items():
        torch.testing.assert_close(tensor, (first[key] + whole[key]) / 2)
    checkpoint.save(tmp_path / "averaged.pt", averaged)

    lines = ["bado kelu", "", "miro sate vonu pika"]
    single = Translator.load(tmp_path / "averaged.pt").translate(lines, beam=2, max_len_b=3)
    several = Translator.load([tmp_path / "averaged.pt"] * 2).translate(lines, beam=2, max_len_b=3)
    assert [translation.text for translation in single] == [translation.text for translation in several]


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_every_criterion_and_optimizer_takes_an_update(mirror_data: Path, name: str) -> None:
    data = Dataset.open(mirror_data)
    batch = replace(data["train"].batch(torch.arange(3).numpy()), alignments=torch.tensor([[0, 0, 0], [2, 1, 0]]))
    tokenizer = data.tokenizer
    torch.manual_seed(1)
    vocabulary = Vocabulary(source=tokenizer.source_size, target=tokenizer.target_size, joint=tokenizer.joint)
    fresh = ARCHITECTURES[name].factory(derive(ARCHITECTURES[name].preset, TINY_CONFIGS[name], "test"), vocabulary)
    optimizers = list(OPTIMIZERS.entries.values())
    for index, entry in enumerate(CRITERIONS.entries.values()):
        if (name, entry.name) == ("bytenet_small", "guided_alignment"):  # it has no attention
            continue
        model = copy.deepcopy(fresh).train()
        cheap = {"candidates_per_sentence": 2, "candidate_extra": 0} if entry.name == "expected_reward" else {}
        loss = entry.factory(derive(entry.preset, cheap, "test"), tokenizer).train()(model, batch)
        assert loss.sum.isfinite() and "nll" in loss.counts
        assert ("load" in loss.counts) == ("moe" in name)
        loss.sum.backward()
        for optimizer in optimizers if index == 0 else optimizers[:1]:
            changed = copy.deepcopy(model)
            for ours, theirs in zip(changed.parameters(), model.parameters(), strict=True):
                ours.grad = theirs.grad
            optimizer.factory(optimizer.preset, [{"params": list(changed.parameters())}]).step()
            assert all(parameter.isfinite().all() for parameter in changed.parameters())
