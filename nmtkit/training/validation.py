"""Validation: loss, perplexity, metrics and translations of a split, and loss and BLEU by sentence length."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nmtkit.data.corpora.dropping import RowNumbers
from nmtkit.data.dataset.batching import micro_batches
from nmtkit.data.dataset.binarized import Split
from nmtkit.data.directions import Direction
from nmtkit.jobs import distributed
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers import adapters, device_of_sums
from nmtkit.training import precision as precisions
from nmtkit.training.criterions import Criterion
from nmtkit.training.due import StopRequestedError
from nmtkit.training.meter import perplexity
from nmtkit.training.metrics import METRICS, Metric, Outputs, RatedTranslation, counts_of, score_of
from nmtkit.translation.languages import codes_for

if TYPE_CHECKING:
    from nmtkit.translation.translator import Translator

T = TypeVar("T")

LENGTHS = (10, 20, 30, 40, 60)  # maximum target tokens of each length class; the last class has no limit
RATED = 10  # number of best and of worst translations in the report
FOLLOWED = (0.25, 0.5, 0.75)  # length quantiles of the three sentences whose translations each validation shows

CLASSES = len(LENGTHS) + 1  # number of length classes

# (metric, or "" for the criterion; name of the sum) -> sums on one rank, a vector of directions x CLASSES values
Sums = dict[tuple[str, str], Tensor]
Totals = dict[tuple[str, str], npt.NDArray[np.float64]]  # the same sums over all ranks, [directions, CLASSES]


@dataclass(eq=False)
class Validator:
    """Scores a model on `split`. Every rank processes a share of the split, and all ranks get all scores.

    A rank processes its share in the context `interruptible`, which may raise StopRequestedError. The rank starts no
    collective operations in this context.
    """

    split: Split
    max_tokens: int
    device: torch.device
    precision: str
    metrics: Mapping[str, Metric]
    # language codes of source and target for a multilingual model
    languages: tuple[str | None, str | None] = (None, None)
    beam: int = 4  # beam size for translations, which are made only if a metric needs them
    sharded: bool = False  # whether each process has only a share of the model (FSDP)
    others: Mapping[str, "Validator"] = field(default_factory=dict)  # validators of other splits, by name
    interruptible: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    target_lang: str | None = None  # language of the references, for metrics
    # for a split of many directions (language pairs): the directions over which the scores are averaged
    averaged: Sequence[Direction] = ()
    told: set[str] = field(default_factory=set)  # engines (implementations of the search) already named in the log
    # results of the last validation
    hypotheses: list[str] = field(default_factory=list)  # in the order of the split
    by_length: list[dict[str, Any]] = field(default_factory=list)  # see `_by_length`; only on rank 0
    by_direction: list[dict[str, Any]] = field(default_factory=list)  # the scores of each direction; only on rank 0
    signatures: dict[str, str] = field(default_factory=dict)  # metric -> signature; only on rank 0

    def __post_init__(self) -> None:
        self.translates = any(metric.translates for metric in self.metrics.values())
        self.sources = self.split.source_lines() if self.translates else []
        self.references = self.split.references() if self.translates else []
        self.lengths = np.asarray(self.split.target.lengths)
        lengths = np.searchsorted(LENGTHS, self.lengths)
        index = self.split.direction_index
        self.directions = np.zeros(len(lengths), np.int64) if index is None else np.asarray(index).astype(np.int64)
        self.classes = self.directions * CLASSES + lengths  # direction and length class of each pair

    def scores(self, model: Architecture, criterion: Criterion) -> dict[str, float] | None:
        """Returns the loss and the counts of the criterion per target token, ppl = exp(nll), and the metrics, by name.

        For a split of many directions, each score is the mean over the directions in `averaged`. Scores of other splits
        are called "loss@SPLIT". Returns None on all ranks if a stop signal interrupts a rank.
        """
        scores = self._own_scores(model, criterion)
        for name, other in self.others.items():
            other.max_tokens = self.max_tokens
            if scores is None or (more := other.scores(model, criterion)) is None:
                return None
            scores |= {f"{key}@{name}": score for key, score in more.items()}
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
        scores = _together(lambda: self._scores(totals) if distributed.is_rank_zero() else None)
        return distributed.broadcast(scores)

    def _share(self, work: Callable[[], T]) -> T | None:
        """Calls `work`, which processes the share of this rank, and returns the result. Raises errors like `_together`.

        Returns None on all ranks if a signal interrupted any rank.
        """

        def result_or_none() -> T | None:
            with contextlib.suppress(StopRequestedError), self.interruptible():
                return work()
            return None

        result = _together(result_or_none)
        return None if distributed.all_reduce(torch.tensor(int(result is None))) else result

    # --- sums over tokens -------------------------------------------------------------------------------------------

    def _sums(self, model: Architecture, criterion: Criterion) -> Sums:
        """Returns the sums over the micro-batches of this rank, for each length class of each direction."""
        sums: Sums = {}
        with torch.no_grad():
            for length, pairs in self.micro_batches():
                batch = self.split.batch(pairs).to(self.device)
                distributed.heartbeat()
                with precisions.autocast(self.precision, self.device):
                    loss = criterion(model, batch)
                    counts = {"": {"loss": loss.sum, **loss.counts}}
                    counts |= {name: counts_of(name, metric, model, batch) for name, metric in self.metrics.items()}
                for owner, values in counts.items():
                    for name, value in values.items():
                        if (owner, name) not in sums:
                            sums[owner, name] = self._zeros()
                        on_device = sums[owner, name].device
                        sums[owner, name][length] += value.to(on_device) if isinstance(value, Tensor) else value
        return sums

    def _zeros(self) -> Tensor:
        size = CLASSES * max(1, len(self.split.directions))
        return torch.zeros(size, dtype=torch.float64, device=device_of_sums(self.device))

    def micro_batches(self) -> list[tuple[int, RowNumbers]]:
        """Returns the micro-batches of this rank as tuples (class, pairs). `classes` has the class of each pair.

        A micro-batch has at most `max_tokens` tokens on each side. If the longest sentence of the split exceeds
        `max_tokens`, the limit is the length of this sentence.
        """
        source, target = np.asarray(self.split.source.lengths), np.asarray(self.split.target.lengths)
        limit = max(self.max_tokens, int(source.max()), int(target.max()))
        parts = [
            (int(length), part)
            for length in np.unique(self.classes)
            for part in micro_batches(np.flatnonzero(self.classes == length), source, target, limit)
        ]
        return parts[distributed.rank() :: distributed.world_size()]

    def _totals(self, sums: Sums) -> Totals:
        """Returns the sums over all ranks."""
        names = distributed.broadcast(list(sums))
        zero = self._zeros()
        total = distributed.all_reduce(torch.stack([sums.get(name, zero) for name in names])).cpu().numpy()
        return {name: values.reshape(-1, CLASSES) for name, values in zip(names, total, strict=True)}

    # --- scores, on rank 0 ------------------------------------------------------------------------------------------

    @distributed.long_operation()  # metrics may load and run large models
    def _scores(self, totals: Totals) -> dict[str, float]:
        self.by_length = self._by_length(totals["", "loss"].sum(0))
        if not self.split.directions:
            sums = {name: float(values.sum()) for name, values in totals.items()}
            of_split = self._scores_of(sums, self.target_lang)
            self.signatures = self._signatures()
            return of_split
        self.by_direction = []
        scores: dict[Direction, dict[str, float]] = {}
        signatures: dict[Direction, dict[str, str]] = {}
        for number in np.unique(self.directions).tolist():
            direction = self.split.directions[number]
            sums = {name: float(values[number].sum()) for name, values in totals.items()}
            rows = np.flatnonzero(self.directions == number)
            scores[direction] = self._scores_of(sums, direction.target, rows)
            signatures[direction] = self._signatures()
            facts = {"source": direction.source, "target": direction.target, "sentences": len(rows)}
            trained = {} if not self.averaged or direction in self.averaged else {"trained": False}
            self.by_direction.append(facts | trained | scores[direction])
        directions = [direction for direction in self.averaged if direction in scores] or list(scores)
        self.signatures = _of_directions({direction: signatures[direction] for direction in directions})
        averaged = [scores[direction] for direction in directions]
        means = {name: sum(of[name] for of in averaged) / len(averaged) for name in averaged[0]}
        return means | {"ppl": perplexity(means["nll"])}

    def _signatures(self) -> dict[str, str]:
        """Returns the signature of the newest score of each metric, by the name of the metric."""
        return {name: metric.signature for name, metric in self.metrics.items() if metric.signature}

    def _outputs(self, target_lang: str | None, rows: RowNumbers | None) -> Outputs:
        """Returns the `Outputs` of `rows` (None: all rows): texts and number of target tokens. `sums` is empty."""
        texts = {"sources": self.sources, "hypotheses": self.hypotheses, "references": self.references}
        if rows is not None and self.translates:
            texts = {name: [lines[row] for row in rows] for name, lines in texts.items()}
        texts["sources"] = list(map(self.split.tokenizer.without_tags, texts["sources"]))
        return Outputs(sums={}, tokens=self.split.counted_tokens(rows), target_lang=target_lang, **texts)

    def _scores_of(
        self, totals: Mapping[tuple[str, str], float], target_lang: str | None, rows: RowNumbers | None = None
    ) -> dict[str, float]:
        """Returns the scores of `rows` (None: all rows). `totals` has the sums over these rows."""
        outputs = self._outputs(target_lang, rows)
        shared = {name: value for (metric, name), value in totals.items() if not metric}
        scores = {name: value / outputs.tokens for name, value in shared.items()}
        scores["ppl"] = perplexity(scores["nll"])
        for name, metric in self.metrics.items():
            if name in scores:
                raise ValueError(f"metric {name!r} has the same name as a different score of this run; rename it")
            sums = {key: value for (owner, key), value in totals.items() if owner == name}
            scores[name] = score_of(name, metric, replace(outputs, sums=shared | sums))
        return scores

    def _by_length(self, losses: npt.NDArray[np.float64]) -> list[dict[str, Any]]:
        """Returns a record for each length class that has sentences: "tokens", "sentences", "loss", "bleu".

        "bleu" is missing if no metric translates. "bleu" is also missing for splits of many directions, because BLEU
        needs one target language.
        """
        bleu = self.metrics.get("bleu") or METRICS["bleu"].factory(METRICS["bleu"].preset)
        records = []
        classes = self.classes % CLASSES
        for number in np.unique(classes):
            members = np.flatnonzero(classes == number)
            outputs = self._outputs(self.target_lang, members)
            first = LENGTHS[number - 1] + 1 if number else 1
            record: dict[str, Any] = {
                "tokens": f"{first}-{LENGTHS[number]}" if number < len(LENGTHS) else f"{first} and more",
                "sentences": len(members),
                "loss": float(losses[number]) / outputs.tokens,
            }
            if self.translates and not self.split.directions:
                record["bleu"] = score_of("bleu", bleu, outputs)
            records.append(record)
        return records

    # --- translations -----------------------------------------------------------------------------------------------

    def translations(self, model: Architecture) -> list[str] | None:
        """Returns the translations of the raw source lines in order, or None if a rank was interrupted."""
        rank, ranks = distributed.rank(), distributed.world_size()
        translator = self._translator(model)
        rows_of_rank = np.arange(len(self.sources))[rank::ranks]

        def translate() -> dict[int, str]:
            texts: dict[int, str] = {}
            for number in np.unique(self.directions[rows_of_rank]).tolist():
                rows = rows_of_rank[self.directions[rows_of_rank] == number].tolist()
                source, target = self.languages
                if self.split.directions:
                    direction = self.split.directions[number]
                    source, target = codes_for(self.split.tokenizer, direction.source, direction.target)
                translations = translator.translate(
                    [self.sources[row] for row in rows],
                    beam=self.beam, source_lang=source, target_lang=target, keep_loops=True,
                )  # fmt: skip
                texts |= {row: translation.text for row, translation in zip(rows, translations, strict=True)}
            return texts

        translated = self._share(translate)
        if translated is None:
            return None
        texts = {row: text for share in distributed.all_gather_object(translated) for row, text in share.items()}
        return [texts[row] for row in range(len(self.sources))]

    def _translator(self, model: Architecture) -> "Translator":
        """Returns a translator that uses a copy of the model, with the engine and the layers of `nmtkit generate`.

        On a CUDA GPU, the copy has bf16 weights unless `precision` is fp32. With fp32 weights and autocast, keys and
        values would have 16 bits, but their cache would have 32 bits, like the weights. FSDP modules cannot be copied,
        so they are used unchanged. On a GPU, FSDP gathers their parameters in 16 bits.
        """
        from nmtkit.translation.engines import Decoder, LoadedModels
        from nmtkit.translation.translator import MAX_TOKENS, Translator, prepare

        tokenizer, max_tokens = self.split.tokenizer, MAX_TOKENS.get(self.device.type, MAX_TOKENS["cpu"])
        if self.sharded:
            loaded = LoadedModels([model], tokenizer, str(self.device), max_tokens)
            return Translator([model], tokenizer, decoder=Decoder(loaded, told=self.told))
        copied = adapters.merge(copy.deepcopy(model))
        prepared = partial(prepare, device=str(self.device), precision="fp32" if self.precision == "fp32" else "auto")
        loaded = LoadedModels([copied], tokenizer, str(self.device), max_tokens, prepare=prepared)
        return Translator([copied], tokenizer, decoder=Decoder.prepared(loaded, told=self.told))

    def followed(self) -> list[dict[str, str]]:
        """Returns source, translation and reference of up to three fixed sentences of different lengths.

        For a split of many directions, each sentence also has its direction, such as en-de.
        """
        order = np.argsort(self.lengths, kind="stable")
        rows = dict.fromkeys(int(order[int(share * len(order))]) for share in FOLLOWED)
        return [
            {
                "source": self.sources[row],
                "translation": self.hypotheses[row],
                "reference": self.references[row],
                **({"direction": str(self.split.directions[self.directions[row]])} if self.split.directions else {}),
            }
            for row in (rows if self.hypotheses else ())
        ]

    def rated(self) -> tuple[list[RatedTranslation], list[RatedTranslation]]:
        """Returns the `RATED` translations with the highest chrF, best first, and with the lowest chrF, worst first."""
        from sacrebleu import sentence_chrf

        rows = [
            (source, hypothesis, reference, float(sentence_chrf(hypothesis, [reference]).score))
            for source, hypothesis, reference in zip(self.sources, self.hypotheses, self.references, strict=False)
        ]
        rows.sort(key=lambda row: row[3])
        return rows[: -RATED - 1 : -1], rows[:RATED]


def _together(work: Callable[[], T]) -> T:
    """Calls `work` and returns the result. Every rank must call this function.

    If the work of a rank fails, this rank raises the error, and all other ranks raise PeerError.
    """
    error = None
    try:
        result = work()
    except Exception as own:
        error = own
    failed = distributed.all_reduce(torch.tensor(int(error is not None)))
    if error is not None:
        raise error
    if failed:
        raise distributed.PeerError("the validation has failed in another process")
    return result


def _of_directions(signatures: Mapping[Direction, Mapping[str, str]]) -> dict[str, str]:
    """Returns the signature of each metric. Different signatures are joined, each after its directions."""
    directions: dict[str, dict[str, list[str]]] = {}  # metric -> signature -> directions
    for direction, of_metrics in signatures.items():
        for name, signature in of_metrics.items():
            directions.setdefault(name, {}).setdefault(signature, []).append(str(direction))
    return {
        name: "; ".join(
            signature if len(of_metric) == 1 else f"{', '.join(of)}: {signature}" for signature, of in of_metric.items()
        )
        for name, of_metric in directions.items()
    }
