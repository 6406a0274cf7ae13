"""Every registered architecture with every criterion and optimizer."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY_CONFIGS, WITHOUT_ATTENTION, save_tiny_transformer

from nmtkit.config import derive
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.models.architectures import ARCHITECTURES, Vocabulary
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.optimizers import OPTIMIZERS
from nmtkit.training.parameters import embedding_names, parameter_groups


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_every_criterion_and_optimizer_takes_an_update(mirror_data: Path, tmp_path: Path, name: str) -> None:
    data = Dataset.open(mirror_data)
    batch = replace(data["train"].batch(torch.arange(3).numpy()), alignments=torch.tensor([[0, 0, 0], [2, 1, 0]]))
    tokenizer = data.tokenizer
    torch.manual_seed(1)
    vocabulary = Vocabulary(source=tokenizer.source_size, target=tokenizer.target_size, joint=tokenizer.joint)
    fresh = ARCHITECTURES[name].factory(derive(ARCHITECTURES[name].preset, TINY_CONFIGS[name], "test"), vocabulary)
    optimizers = list(OPTIMIZERS.entries.values())
    for index, entry in enumerate(CRITERIONS.entries.values()):
        if name in WITHOUT_ATTENTION and entry.name == "guided_alignment":
            continue
        model = copy.deepcopy(fresh).train()
        cheap: dict[str, Any] = {}
        if entry.name == "expected_reward":
            cheap = {"candidates_per_sentence": 2, "candidate_extra": 0}
        if entry.name == "kd_cross_entropy":
            cheap = {"teacher": (save_tiny_transformer(tmp_path / "teacher.pt", tokenizer),)}
        loss = entry.factory(derive(entry.preset, cheap, "test"), tokenizer).train()(model, batch)
        assert loss.sum.isfinite() and "nll" in loss.counts
        assert ("load" in loss.counts) == ("moe" in name)
        loss.sum.backward()
        for optimizer in optimizers if index == 0 else optimizers[:1]:
            changed = copy.deepcopy(model)
            for ours, theirs in zip(changed.parameters(), model.parameters(), strict=True):
                ours.grad = theirs.grad
            groups = parameter_groups(dict(changed.named_parameters()), [], embedding_names(changed))
            optimizer.factory(optimizer.preset, groups).step()
            assert all(parameter.isfinite().all() for parameter in changed.parameters())
