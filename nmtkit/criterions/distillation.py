"""Word-level knowledge distillation (Kim and Rush 2016, section 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmtkit.architectures import Architecture
from nmtkit.config import option
from nmtkit.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from nmtkit.criterions.interface import CRITERIONS, Loss
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.layers.packed import IGNORE_INDEX, Batch
from nmtkit.models import from_checkpoint

# T tokens, D model width, V vocabulary, C candidates: the most probable pieces of the teacher

CHUNK = 1024  # number of tokens whose logits exist at the same time


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(CrossEntropyConfig):
    teacher: tuple[Path, ...] = option(
        (),
        "Checkpoint of the teacher; repeat the flag for an ensemble, whose probabilities are averaged.",
        repeatable=True,
    )
    teacher_weight: float = option(
        0.5, "Weight of the cross-entropy with the teacher; the target has the rest.", min=0, max=1
    )
    teacher_candidates: int = option(
        32, "Number of most probable pieces of the teacher; their probabilities are renormalised.", min=1, max=1_000_000
    )


@CRITERIONS.register("kd_cross_entropy", DistillationConfig())
class Distillation(CrossEntropy):
    """(1 - w) times the cross-entropy of the target, plus w times the cross-entropy with the teacher's distribution.

    The teacher reads the same source and the same target as the student, without dropout. Teacher and student must have
    the same tokenizer. Validation computes only the cross-entropy of the target.
    """

    def __init__(self, config: DistillationConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.weight, self.candidates = config.teacher_weight, config.teacher_candidates
        if not config.teacher:
            raise ValueError("--criterion kd_cross_entropy needs --teacher, the checkpoint of a trained model")
        teachers = nn.ModuleList(load_teacher(path, tokenizer) for path in config.teacher)
        self.teachers = cast(Sequence[Architecture], teachers)

    def train(self, mode: bool = True) -> "Distillation":
        super().train(mode)
        for teacher in self.teachers:
            teacher.eval()
        return self

    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        if not self.training:
            return super().compute_loss(model, batch)
        features = model(batch.source, batch.target_input)
        with torch.no_grad():
            expected = [teacher(batch.source, batch.target_input) for teacher in self.teachers]
        sums = features.new_zeros(2, dtype=torch.float32)
        for start in range(0, len(features), CHUNK):
            chunk = slice(start, start + CHUNK)
            target, states = batch.target_output[chunk], [state[chunk] for state in expected]
            ids, probabilities = self.teacher_distribution(states)
            # recomputes the logits in the backward pass instead of keeping them
            sums = sums + checkpoint(
                losses, model.output_projection, features[chunk], target, ids, probabilities, use_reentrant=False
            )
        nll, divergence = sums.unbind()
        total = (1 - self.weight) * nll + self.weight * divergence
        return Loss(total, {"nll": nll.detach(), "teacher": divergence.detach()})

    @torch.no_grad()
    def teacher_distribution(self, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the candidates of the teachers and their probabilities, both [T, C]. `states` are features T D."""
        mean = torch.stack(
            [
                teacher.output_projection(state).float().softmax(-1)
                for teacher, state in zip(self.teachers, states, strict=True)
            ]
        ).mean(0)
        probabilities, ids = mean.topk(min(self.candidates, mean.shape[-1]), -1)
        return ids, probabilities / probabilities.sum(-1, keepdim=True)


def losses(output: nn.Module, features: Tensor, target: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
    """Returns two sums over tokens: the cross-entropy of the target, and the cross-entropy with the teacher."""
    log_q = output(features).float().log_softmax(-1)
    mask = target != IGNORE_INDEX
    nll = -log_q.gather(1, target.clamp(min=0)[:, None])[:, 0]
    divergence = -(probabilities * log_q.gather(1, ids)).sum(-1)
    return torch.stack([nll, divergence]).where(mask, 0).sum(1)


def load_teacher(path: Path, tokenizer: Tokenizer) -> Architecture:
    """Returns the model of a checkpoint without gradients. Raises ValueError if it has another tokenizer."""
    model, other = from_checkpoint(path)
    if other.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"--teacher {path} has a different tokenizer than the dataset; make the dataset with preprocess "
            f"--tokenizer-from {path}"
        )
    return model.requires_grad_(False)
