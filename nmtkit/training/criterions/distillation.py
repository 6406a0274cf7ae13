"""Word-level distillation (Kim and Rush 2016, section 3.1), with a running teacher or with stored probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmtkit.config import changed_flags, option
from nmtkit.data.dataset.batching import micro_batches
from nmtkit.data.dataset.binarized import Split
from nmtkit.data.dataset.teacher_file import TeacherFile
from nmtkit.data.packed import IGNORE_INDEX, Batch
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.jobs import progress
from nmtkit.models.architectures import Architecture
from nmtkit.models.building import check_translation_models, from_checkpoint
from nmtkit.training.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from nmtkit.training.criterions.interface import CRITERIONS, Loss

# T tokens, D model width, V vocabulary, C candidates: the most probable pieces of the teacher

CHUNK = 1024  # number of tokens whose logits exist at the same time


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(CrossEntropyConfig):
    teacher: tuple[Path, ...] = option(
        (),
        "Checkpoint of the teacher; repeat the flag for an ensemble, whose probabilities are averaged.",
        repeatable=True,
        metavar="RUN|FILE",
        checkpoint=True,
    )
    teacher_probabilities: Path | None = option(
        None,
        "Instead of --teacher: folder in which nmtkit distill has stored the probabilities of a teacher.",
        metavar="FOLDER",
        access="read",
    )
    teacher_weight: float = option(
        0.5, "Weight w of the cross-entropy with the teacher; the target has the weight 1 - w.", min=0, max=1
    )
    teacher_candidates: int = option(
        32,
        "Number of the teacher's most probable pieces; their probabilities are renormalised. With "
        "--teacher-probabilities, the default is lowered to the number of stored pieces.",
        min=1,
        max=1_000_000,
    )


@CRITERIONS.register("kd_cross_entropy", DistillationConfig())
class Distillation(CrossEntropy):
    """(1 - w) times the cross-entropy of the target, plus w times the cross-entropy with the teacher's distribution.

    The teacher reads the same source and the same target as the student, without dropout. Stored probabilities were
    computed from the source without --transforms. Teacher and student must have the same tokenizer. Validation computes
    only the cross-entropy of the target.
    """

    def __init__(self, config: DistillationConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.weight, self.candidates = config.teacher_weight, config.teacher_candidates
        if bool(config.teacher) == (config.teacher_probabilities is not None):
            raise ValueError(
                "--criterion kd_cross_entropy needs either --teacher, the checkpoint of a trained model, or "
                "--teacher-probabilities, a folder of nmtkit distill"
            )
        self.stored: TeacherFile | None = None
        if config.teacher_probabilities is not None:
            self.stored = TeacherFile.open(config.teacher_probabilities, tokenizer.fingerprint)
            stored, wanted = self.stored.candidates, min(self.candidates, tokenizer.target_size)
            if wanted > stored and "--teacher-candidates" in changed_flags(config):
                raise ValueError(
                    f"--teacher-candidates is {self.candidates}, but {config.teacher_probabilities} has {stored} "
                    f"pieces for each token; give --teacher-candidates {stored}, or store more with nmtkit distill "
                    f"--top-k {wanted}"
                )
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
        ids, probabilities = self.running(batch) if self.stored is None else self.read(self.stored, batch)
        sums = features.new_zeros(2, dtype=torch.float32)
        for start in range(0, len(features), CHUNK):
            chunk = slice(start, start + CHUNK)
            tokens = features[chunk], batch.target_output[chunk], ids[chunk], probabilities[chunk]
            # the backward pass computes the logits again, so the forward pass does not keep them
            sums = sums + checkpoint(losses, model.output_projection, *tokens, use_reentrant=False)
        nll, divergence = sums.unbind()
        total = (1 - self.weight) * nll + self.weight * divergence
        return Loss(total, {"nll": nll.detach(), "teacher": divergence.detach()})

    def running(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Runs the teachers. Returns the ids [T, C] and the probabilities [T, C] of the candidates of each token.

        The probabilities of a token sum to 1.
        """
        ids, probabilities = most_probable(self.teachers, batch, self.candidates)
        return ids, probabilities / probabilities.sum(-1, keepdim=True)

    def read(self, stored: TeacherFile, batch: Batch) -> tuple[Tensor, Tensor]:
        """Reads stored candidates. Returns their ids and probabilities, like `running`."""
        target = batch.target_output.cpu().numpy()
        rows = stored.read(batch.pairs.tolist(), target, target != IGNORE_INDEX)
        ids, log_probabilities = (torch.from_numpy(part[:, : self.candidates]) for part in rows)
        device = batch.target_output.device
        return ids.to(device), log_probabilities.to(device).softmax(-1)


@torch.no_grad()
def most_probable(teachers: Sequence[Architecture], batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    """Returns the ids [T, C] and the probabilities [T, C] of the most probable pieces, best first.

    The probabilities are means over the teachers.
    """
    states = [teacher(batch.source, batch.target_input) for teacher in teachers]
    best = []
    for start in range(0, len(batch.target_output), CHUNK):
        rows = [state[start : start + CHUNK] for state in states]
        outputs = [teacher.output_projection(row) for teacher, row in zip(teachers, rows, strict=True)]
        mean = torch.stack([output.float().softmax(-1) for output in outputs]).mean(0)
        best.append(mean.topk(min(number, mean.shape[-1]), -1))
    probabilities, ids = (torch.cat(each) for each in zip(*best, strict=True))
    return ids, probabilities


@torch.inference_mode()
def teacher_rows(
    teachers: Sequence[Architecture], split: Split, pairs: range, stored: TeacherFile, max_tokens: int
) -> Any:
    """Computes the predictions of the teachers for each target token of `pairs`, as an array of type `stored.dtype`.

    Each row has the id of the target token. The row also has the ids and log probabilities of the candidates. The
    candidates are the pieces that the teachers find most probable at the position of this token.
    """
    device = next(teachers[0].parameters()).device
    lengths = stored.lengths[pairs.start : pairs.stop]
    rows = np.empty(int(lengths.sum()), stored.dtype)
    parts = micro_batches(np.arange(pairs.start, pairs.stop), split.source.lengths, split.target.lengths, max_tokens)
    for part in parts:
        batch = split.batch(part).to(device)
        ids, probabilities = (each.cpu() for each in most_probable(teachers, batch, stored.candidates))
        where = np.concatenate([np.r_[stored.rows_of(pair)[1]] for pair in part.tolist()])
        rows["target"][where], rows["ids"][where] = batch.target_output.cpu().numpy(), ids.numpy()
        rows["log_probabilities"][where] = probabilities.clamp_min(1e-30).log().numpy()
        progress.advance(len(part))
    return rows


def losses(output: nn.Module, features: Tensor, target: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
    """Returns sums over tokens as a tensor [2]: cross-entropy of the target, and cross-entropy with the teacher."""
    log_q = output(features).float().log_softmax(-1)
    mask = target != IGNORE_INDEX
    nll = -log_q.gather(1, target.clamp(min=0)[:, None])[:, 0]
    divergence = -(probabilities * log_q.gather(1, ids)).sum(-1)
    return torch.stack([nll, divergence]).where(mask, 0).sum(1)


def load_teacher(path: Path, tokenizer: Tokenizer) -> Architecture:
    """Returns the model of a checkpoint, with fixed parameters.

    Raises ValueError if the tokenizer is different, or if the model is a language model.
    """
    model, other = from_checkpoint(path)
    check_translation_models([path], [model])
    if other.fingerprint != tokenizer.fingerprint:
        raise ValueError(f"{path} has a different tokenizer than the dataset; preprocess with --tokenizer-from {path}")
    return model.requires_grad_(False)
