"""Word-level distillation (Kim and Rush 2016, section 3.1), with a running teacher or with stored probabilities."""

from collections.abc import Callable, Sequence
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
        distribution = self.running(batch) if self.stored is None else self.read(self.stored, batch)
        sums = features.new_zeros(2, dtype=torch.float32)
        for start in range(0, len(features), CHUNK):
            chunk = slice(start, start + CHUNK)
            target, (ids, probabilities) = batch.target_output[chunk], distribution(chunk)
            # the backward pass computes the logits again, so the forward pass does not keep them
            sums = sums + checkpoint(
                losses, model.output_projection, features[chunk], target, ids, probabilities, use_reentrant=False
            )
        nll, divergence = sums.unbind()
        total = (1 - self.weight) * nll + self.weight * divergence
        return Loss(total, {"nll": nll.detach(), "teacher": divergence.detach()})

    @torch.no_grad()
    def running(self, batch: Batch) -> Callable[[slice], tuple[Tensor, Tensor]]:
        """Runs the teachers. Returns a function that maps a slice of tokens to the candidates of these tokens.

        The function returns the ids [T, C] of the candidates, and their probabilities [T, C], whose sum is 1.
        """
        states = [teacher(batch.source, batch.target_input) for teacher in self.teachers]

        def distribution(tokens: slice) -> tuple[Tensor, Tensor]:
            rows = [state[tokens] for state in states]
            ids, probabilities = most_probable(self.teachers, rows, self.candidates)
            return ids, probabilities / probabilities.sum(-1, keepdim=True)

        return distribution

    def read(self, stored: TeacherFile, batch: Batch) -> Callable[[slice], tuple[Tensor, Tensor]]:
        """Reads stored candidates. Returns a function like the function that `running` returns."""
        target = batch.target_output.cpu().numpy()
        rows = stored.read(batch.pairs.tolist(), target, target != IGNORE_INDEX)
        ids, log_probabilities = (torch.from_numpy(part[:, : self.candidates]) for part in rows)
        device = batch.target_output.device
        ids, probabilities = ids.to(device), log_probabilities.to(device).softmax(-1)
        return lambda tokens: (ids[tokens], probabilities[tokens])


@torch.no_grad()
def most_probable(teachers: Sequence[Architecture], states: Sequence[Tensor], number: int) -> tuple[Tensor, Tensor]:
    """Returns the ids [T, C] and the probabilities [T, C] of the most probable pieces, best first.

    The probabilities are means over the teachers. `states` has the features [T, D] of each teacher.
    """
    outputs = [teacher.output_projection(state) for teacher, state in zip(teachers, states, strict=True)]
    mean = torch.stack([output.float().softmax(-1) for output in outputs]).mean(0)
    probabilities, ids = mean.topk(min(number, mean.shape[-1]), -1)
    return ids, probabilities


@torch.inference_mode()
def teacher_rows(
    teachers: Sequence[Architecture], split: Split, pairs: range, stored: TeacherFile, max_tokens: int
) -> Any:
    """Computes the predictions of the teachers for each target token of `pairs`, as an array of type `stored.dtype`.

    Each row has the id of the target token, and the ids and log probabilities of its most probable pieces (candidates).
    """
    device = next(teachers[0].parameters()).device
    lengths = stored.lengths[pairs.start : pairs.stop]
    rows = np.empty(int(lengths.sum()), stored.dtype)
    parts = micro_batches(np.arange(pairs.start, pairs.stop), split.source.lengths, split.target.lengths, max_tokens)
    for part in parts:
        batch = split.batch(part).to(device)
        states = [teacher(batch.source, batch.target_input) for teacher in teachers]
        results = [
            most_probable(teachers, [state[start : start + CHUNK] for state in states], stored.candidates)
            for start in range(0, len(batch.target_output), CHUNK)
        ]
        ids, probabilities = (torch.cat(each).cpu() for each in zip(*results, strict=True))
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
        raise ValueError(
            f"{path} has a different tokenizer than the dataset; make the dataset with preprocess "
            f"--tokenizer-from {path}"
        )
    return model.requires_grad_(False)
