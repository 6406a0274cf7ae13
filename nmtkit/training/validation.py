"""Validation: loss and perplexity of a split's targets, and BLEU of its translations against the raw references."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nmtkit import distributed
from nmtkit.architectures import Architecture
from nmtkit.criterions import Criterion
from nmtkit.data.batching import micro_batches
from nmtkit.data.binarized import Split
from nmtkit.training import precision as precisions
from nmtkit.training.meter import perplexity

T = TypeVar("T")

EXAMPLES = 20  # worst translations that the report shows


class StopRequestedError(Exception):
    """A stop signal came while this rank was at its share of a validation."""


@dataclass(eq=False)
class Validator:
    """Scores a model on `split`. Every rank takes a share of the work, and gets all scores.

    Ranks work on their shares, without collectives, in the context `interruptible`; it may raise StopRequestedError.
    """

    split: Split
    max_tokens: int
    device: torch.device
    precision: str
    beam: int | None  # of the translation behind BLEU; None leaves BLEU out
    sharded: bool = False  # the model is FSDP's
    interruptible: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    worst: list[tuple[str, str, str, float]] = field(default_factory=list)
    """Source, translation, reference and chrF of the last validation's sentences with the lowest chrF, on rank 0."""

    def scores(self, model: Architecture, criterion: Criterion) -> dict[str, float] | None:
        """Returns loss and the criterion's counts by name, per target token; ppl = exp(nll); and bleu.

        Returns None, on all ranks, when one was interrupted.
        """
        model.eval()
        criterion.eval()
        sums = self._share(lambda: self._sums(model, criterion))
        if sums is None:
            return None
        means = self._means(sums)
        scores = means | {"ppl": perplexity(means["nll"])}
        if self.beam is not None:
            bleu = self.bleu(model)
            if bleu is None:
                return None
            scores["bleu"] = bleu
        return scores

    def _share(self, work: Callable[[], T]) -> T | None:
        """Returns the result of this rank's share of work; None, on all ranks, when one was interrupted."""
        result = None
        with contextlib.suppress(StopRequestedError), self.interruptible():
            result = work()
        return None if distributed.all_reduce(torch.tensor(int(result is None))) else result

    def _sums(self, model: Architecture, criterion: Criterion) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        with torch.no_grad():
            for pairs in self.micro_batches():
                batch = self.split.batch(pairs).to(self.device)
                distributed.heartbeat()
                with precisions.autocast(self.precision, self.device):
                    loss = criterion(model, batch)
                for name, value in {"loss": loss.sum, **loss.counts}.items():
                    value = value.double()
                    sums[name] = sums[name] + value if name in sums else value
        return sums

    def micro_batches(self) -> list[np.ndarray]:
        """Returns this rank's pairs in parts of at most `max_tokens`, or of one longer sentence."""
        source, target = np.asarray(self.split.source.lengths), np.asarray(self.split.target.lengths)
        limit = max(self.max_tokens, int(source.max()), int(target.max()))
        parts = micro_batches(np.arange(len(self.split)), source, target, limit)
        return parts[distributed.rank() :: distributed.world_size()]

    def _means(self, sums: dict[str, Tensor]) -> dict[str, float]:
        names = distributed.broadcast(list(sums))
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = distributed.all_reduce(torch.stack([sums.get(name, zero) for name in names])).tolist()
        tokens = int(np.asarray(self.split.target.lengths).sum())
        return {name: value / tokens for name, value in zip(names, total, strict=True)}

    def bleu(self, model: Architecture) -> float | None:
        """Returns BLEU of translations by beam search, from the raw source lines; None when a rank was interrupted."""
        from nmtkit.generation.translator import Translator
        from nmtkit.scoring.metrics import score

        rank, ranks = distributed.rank(), distributed.world_size()
        assert self.beam is not None
        lines = self.split.source_lines()
        translator = Translator([self._prepared_copy(model)], self.split.tokenizer)
        translations = self._share(lambda: translator.translate(lines[rank::ranks], beam=self.beam))
        if translations is None:
            return None
        texts = [translation.text for translation in translations]
        hypotheses = [""] * len(lines)
        for other, share in enumerate(distributed.all_gather_object(texts)):
            hypotheses[other::ranks] = share
        references = self.split.references()
        if distributed.is_rank_zero():
            self.worst = _worst(lines, hypotheses, references)
        return score(hypotheses, [references], metrics=("bleu",))[0].value

    def _prepared_copy(self, model: Architecture) -> Architecture:
        """Returns a copy of the model as `nmtkit generate` has it: with 16-bit weights on a GPU, prepacked on a CPU.

        Autocast would not do: it makes keys and values in 16 bits for a cache in the weights' 32. FSDP's modules cannot
        be copied; on a GPU their parameters are gathered in 16 bits already.
        """
        from nmtkit.generation.translator import prepare

        if self.sharded:
            return model
        return prepare(copy.deepcopy(model), str(self.device), "fp32" if self.precision == "fp32" else "auto")


def _worst(sources: list[str], hypotheses: list[str], references: list[str]) -> list[tuple[str, str, str, float]]:
    from sacrebleu import sentence_chrf

    rated = [
        (source, hypothesis, reference, float(sentence_chrf(hypothesis, [reference]).score))
        for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True)
    ]
    return sorted(rated, key=lambda row: row[3])[:EXAMPLES]
