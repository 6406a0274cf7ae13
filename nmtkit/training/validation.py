"""Validation: loss, perplexity, metrics and translations of a split, and loss and BLEU by sentence length."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.criterions import Criterion
from nmtkit.data.batching import micro_batches
from nmtkit.data.binarized import Split
from nmtkit.layers import adapters
from nmtkit.processes import distributed
from nmtkit.training import precision as precisions
from nmtkit.training.meter import perplexity
from nmtkit.training.metrics import METRICS, Metric, Outputs, counts_of, score_of
from nmtkit.training.report_validation import Example
from nmtkit.training.stopping import StopRequestedError

T = TypeVar("T")

LENGTHS = (10, 20, 30, 40, 60)  # maximum target tokens of each length class; the last class has no limit
RATED = 10  # number of best and of worst translations in the report
FOLLOWED = (0.25, 0.5, 0.75)  # quantiles of length of three sentences whose translations every validation shows

Sums = dict[tuple[str, str], Tensor]  # (metric or "" for the criterion, name) -> sum for each length class


@dataclass(eq=False)
class Validator:
    """Scores a model on `split`. Every rank does a share of the work and gets all scores.

    During this work, a rank starts no collectives, and is in the context `interruptible`, which may raise
    StopRequestedError.
    """

    split: Split
    max_tokens: int
    device: torch.device
    precision: str
    metrics: Mapping[str, Metric]
    # language codes of source and target for a multilingual model
    languages: tuple[str | None, str | None] = (None, None)
    beam: int = 4  # beam size for translations, which are made only if a metric needs them
    sharded: bool = False  # each process has a share of the model (FSDP)
    others: Mapping[str, "Validator"] = field(default_factory=dict)  # validators of other splits, by name
    interruptible: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    target_lang: str | None = None  # language of the references, for metrics
    # results of the last validation
    hypotheses: list[str] = field(default_factory=list)  # in the order of the split
    by_length: list[dict[str, Any]] = field(default_factory=list)  # see `_by_length`; only on rank 0

    def __post_init__(self) -> None:
        self.translates = any(metric.translates for metric in self.metrics.values())
        self.sources = self.split.source_lines() if self.translates else []
        self.references = self.split.references() if self.translates else []
        self.classes = np.searchsorted(LENGTHS, np.asarray(self.split.target.lengths))  # length class of each pair

    def scores(self, model: Architecture, criterion: Criterion) -> dict[str, float] | None:
        """Returns the loss and the counts of the criterion per target token, ppl = exp(nll), and the metrics, by name.

        Scores of other splits are called "loss@SPLIT". Returns None on all ranks if a stop signal interrupts a rank.
        """
        scores = self._own_scores(model, criterion)
        for name, other in self.others.items():
            other.max_tokens = self.max_tokens
            more = None if scores is None else other.scores(model, criterion)
            scores = None if scores is None or more is None else scores | {f"{key}@{name}": more[key] for key in more}
        return scores

    def _own_scores(self, model: Architecture, criterion: Criterion) -> dict[str, float] | None:
        model.eval()
        criterion.eval()
        sums = self._share(lambda: self._sums(model, criterion))
        if sums is None:
            return None
        if self.translates:
            hypotheses = self.translations(model)
            if hypotheses is None:
                return None
            self.hypotheses = hypotheses
        totals = self._totals(sums)
        scores, error = None, None
        try:
            if distributed.is_rank_zero():
                with distributed.long_operation():  # metrics may load and run large models
                    scores = self._scores(totals)
        except Exception as own:
            error = own
        return distributed.broadcast(self._unless_failed(scores, error))

    def _share(self, work: Callable[[], T]) -> T | None:
        """Returns the result of this rank's share of work, or None on all ranks if a rank was interrupted.

        If the work of a rank fails, this rank raises the error, and all other ranks raise PeerError.
        """
        result, error = None, None
        try:
            with self.interruptible():
                result = work()
        except StopRequestedError:
            pass
        except Exception as own:
            error = own
        self._unless_failed(None, error)
        return None if distributed.all_reduce(torch.tensor(int(result is None))) else result

    @staticmethod
    def _unless_failed(result: T, error: Exception | None) -> T:
        """Returns the result, or raises an exception if any rank has an error. Every rank must call this method."""
        failed = distributed.all_reduce(torch.tensor(int(error is not None)))
        if error is not None:
            raise error
        if failed:
            raise distributed.PeerError("the validation has failed in another process")
        return result

    # --- sums over tokens -------------------------------------------------------------------------------------------

    def _sums(self, model: Architecture, criterion: Criterion) -> Sums:
        """Returns the sums of this rank for each length class."""
        sums: Sums = {}
        with torch.no_grad():
            for length, pairs in self.micro_batches():
                batch = self.split.batch(pairs).to(self.device)
                distributed.heartbeat()
                with precisions.autocast(self.precision, self.device):
                    loss = criterion(model, batch)
                    counts = {("", name): value for name, value in {"loss": loss.sum, **loss.counts}.items()}
                    for metric, scorer in self.metrics.items():
                        counts |= {
                            (metric, name): value for name, value in counts_of(metric, scorer, model, batch).items()
                        }
                for name, value in counts.items():
                    if name not in sums:
                        sums[name] = torch.zeros(len(LENGTHS) + 1, dtype=torch.float64, device=self.device)
                    sums[name][length] += value
        return sums

    def micro_batches(self) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """Returns the micro-batches of this rank, each with its length class.

        A micro-batch has at most `max_tokens` tokens. A longer sentence is a separate micro-batch.
        """
        source, target = np.asarray(self.split.source.lengths), np.asarray(self.split.target.lengths)
        limit = max(self.max_tokens, int(source.max()), int(target.max()))
        parts = [
            (int(length), part)
            for length in np.unique(self.classes)
            for part in micro_batches(np.flatnonzero(self.classes == length), source, target, limit)
        ]
        return parts[distributed.rank() :: distributed.world_size()]

    def _totals(self, sums: Sums) -> dict[tuple[str, str], list[float]]:
        """Returns the sums over all ranks."""
        names = distributed.broadcast(list(sums))
        zero = torch.zeros(len(LENGTHS) + 1, dtype=torch.float64, device=self.device)
        total = distributed.all_reduce(torch.stack([sums.get(name, zero) for name in names])).tolist()
        return dict(zip(names, total, strict=True))

    # --- scores, on rank 0 ------------------------------------------------------------------------------------------

    def _scores(self, totals: dict[tuple[str, str], list[float]]) -> dict[str, float]:
        self.by_length = self._by_length(totals["", "loss"])
        tokens = int(np.asarray(self.split.target.lengths).sum())
        shared = {name: sum(values) for (metric, name), values in totals.items() if not metric}
        scores = {name: value / tokens for name, value in shared.items()}
        scores["ppl"] = perplexity(scores["nll"])
        for name, metric in self.metrics.items():
            if name in scores:
                raise ValueError(f"metric {name!r} has the same name as a different score of this run; rename it")
            of_subset = {key: sum(values) for (owner, key), values in totals.items() if owner == name}
            texts: dict[str, Any] = {"hypotheses": self.hypotheses, "references": self.references}
            texts |= {"sources": self.sources, "target_lang": self.target_lang}
            scores[name] = score_of(name, metric, Outputs(sums=shared | of_subset, tokens=tokens, **texts))
        return scores

    def _by_length(self, losses: list[float]) -> list[dict[str, Any]]:
        """Returns a record for each length class that has sentences: "tokens", "sentences", "loss", "bleu"."""
        bleu = self.metrics.get("bleu") or METRICS["bleu"].factory(METRICS["bleu"].preset)
        lengths = np.asarray(self.split.target.lengths)
        records = []
        for number in np.unique(self.classes):
            members = np.flatnonzero(self.classes == number)
            first = LENGTHS[number - 1] + 1 if number else 1
            record: dict[str, Any] = {
                "tokens": f"{first}-{LENGTHS[number]}" if number < len(LENGTHS) else f"{first} and more",
                "sentences": len(members),
                "loss": losses[number] / int(lengths[members].sum()),
            }
            if self.translates:
                texts = {
                    name: [getattr(self, name)[i] for i in members] for name in ("sources", "hypotheses", "references")
                }
                record["bleu"] = score_of(
                    "bleu", bleu, Outputs(sums={}, tokens=0, target_lang=self.target_lang, **texts)
                )
            records.append(record)
        return records

    # --- translations -----------------------------------------------------------------------------------------------

    def translations(self, model: Architecture) -> list[str] | None:
        """Returns the translations of the raw source lines in order, or None if a rank was interrupted."""
        from nmtkit.translation.translator import Translator

        rank, ranks = distributed.rank(), distributed.world_size()
        translator = Translator([self._prepared_copy(model)], self.split.tokenizer)
        source, target = self.languages
        settings: dict[str, Any] = {"beam": self.beam, "source_lang": source, "target_lang": target}
        translations = self._share(lambda: translator.translate(self.sources[rank::ranks], **settings))
        if translations is None:
            return None
        texts = [translation.text for translation in translations]
        hypotheses = [""] * len(self.sources)
        for other, share in enumerate(distributed.all_gather_object(texts)):
            hypotheses[other::ranks] = share
        return hypotheses

    def _prepared_copy(self, model: Architecture) -> Architecture:
        """Returns a copy of the model that is prepared like in `nmtkit generate`.

        The copy has 16-bit weights on a GPU and prepacked weights on a CPU. Autocast is not enough, because it computes
        keys and values in 16 bits, but the cache has 32 bits like the weights. FSDP modules cannot be copied. On a GPU,
        their parameters are gathered in 16 bits.
        """
        from nmtkit.translation.translator import prepare

        if self.sharded:
            return model
        return prepare(
            adapters.merge(copy.deepcopy(model)), str(self.device), "fp32" if self.precision == "fp32" else "auto"
        )

    def followed(self) -> list[dict[str, str]]:
        """Returns source, translation and reference of up to three fixed sentences of different lengths."""
        order = np.argsort(np.asarray(self.split.target.lengths), kind="stable")
        rows = dict.fromkeys(int(order[int(share * len(order))]) for share in FOLLOWED)
        return [
            {"source": self.sources[i], "translation": self.hypotheses[i], "reference": self.references[i]}
            for i in (rows if self.hypotheses else ())
        ]

    def rated(self) -> tuple[list[Example], list[Example]]:
        """Returns the translations with the highest chrF, best first, and with the lowest chrF, worst first."""
        from sacrebleu import sentence_chrf

        rows = [
            (source, hypothesis, reference, float(sentence_chrf(hypothesis, [reference]).score))
            for source, hypothesis, reference in zip(self.sources, self.hypotheses, self.references, strict=False)
        ]
        rows.sort(key=lambda row: row[3])
        return rows[: -RATED - 1 : -1], rows[:RATED]
