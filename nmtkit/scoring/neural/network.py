"""The base class of neural metrics: runs a network over texts, each text once, in batches of similar lengths."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmtkit.jobs import progress
from nmtkit.jobs.distributed import usable_device
from nmtkit.scoring.segments import SegmentMetric, TextLines

Texts = tuple[str, ...]  # the texts of one input, such as a translation and its source
BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}  # maximum number of tokens of a batch, padding included
MEMORY = 65_536  # maximum number of results that a metric keeps for later calls


@dataclass(frozen=True)
class ModelFiles:
    """The folder of a model, its name in outputs, and the revision of its weights in signatures.

    `revision` is the commit of a model of the Hub, or the hash of the weights of a local model.
    """

    folder: Path
    name: str
    revision: str


class NeuralMetric(SegmentMetric):
    """A metric that a network computes. The score of a text does not depend on the other texts of its batch."""

    reads_source = True
    scale: float = 1.0  # score = scale x output of the network

    def __init__(self, files: ModelFiles, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.files, self.device, self.dtype = files, usable_device(device), dtype
        self._memory: dict[Texts, Tensor] = {}

    @abstractmethod
    def outputs(self, columns: Sequence[TextLines]) -> Tensor:
        """Returns the output of the network for each translation: [translations].

        `columns` has the translations, the sources and, with `reads_reference`, the references.
        """

    @abstractmethod
    def encode(self, texts: Sequence[Texts]) -> list[list[int]]:
        """Returns the token ids of each input."""

    @abstractmethod
    def run(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns a vector for each input: [inputs, D]. `ids` and `mask` are [inputs, tokens]. Padding has mask 0."""

    padding: int  # id of the padding

    def scores(
        self, hypotheses: TextLines, *, sources: TextLines | None = None, references: TextLines | None = None
    ) -> list[float]:
        columns = [hypotheses]
        read = {"sources": sources, "references": references} if self.reads_reference else {"sources": sources}
        for name, lines in read.items():
            if lines is None:
                remedy = " (give --src FILE, --data or --test-set)" if name == "sources" else ""
                raise ValueError(f"{self.label} reads {name}, but there are none{remedy}")
            if len(lines) != len(hypotheses):
                raise ValueError(f"{self.label}: there are {len(hypotheses)} translations and {len(lines)} {name}")
            columns.append(lines)
        return (self.scale * self.outputs(columns)).tolist()

    def signature(self) -> dict[str, str]:
        """Returns the entries of the signature of a score."""
        from nmtkit import __version__

        precision = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        facts = {"model": self.files.name, "revision": self.files.revision, "precision": precision}
        return facts | {"scale": f"{self.scale:g}", "version": f"nmtkit-{__version__}"}

    def rows(self, inputs: Sequence[Texts]) -> Tensor:
        """Returns the result of each input on the CPU: [inputs, D]. Repeated and recent inputs are computed once."""
        memory = self._memory  # other threads may replace `_memory`, but never remove entries of this dictionary
        new = [texts for texts in dict.fromkeys(inputs) if texts not in memory]
        if new:
            progress.begin(f"Computing {self.label}", "texts", len(new))
        encoded = self.encode(new)
        for batch in batches(list(map(len, encoded)), BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cuda"])):
            rows = [torch.tensor(encoded[index]) for index in batch]
            ids = pad_sequence(rows, batch_first=True, padding_value=self.padding)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            with self.computing():
                output = self.finite(self.run(ids.to(self.device), mask.to(self.device))).float().cpu()
            memory |= {new[index]: row for index, row in zip(batch, output, strict=True)}
            progress.advance(len(batch))
        if len(memory) > MEMORY:
            self._memory = dict([*memory.items()][-MEMORY:])
        return torch.stack([memory[texts] for texts in inputs])

    def finite(self, output: Tensor) -> Tensor:
        """Returns `output`. Raises ValueError if a number is not finite."""
        if not output.isfinite().all():
            raise ValueError(f"{self.label} computes numbers that are not finite; its weights may be damaged")
        return output

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context without gradients, and without the autocast of a training that calls the metric."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yields the indices of the inputs of each batch, longest inputs first.

    A batch has at most `max_tokens` tokens, padding included, but at least one input.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size


def pretrained(architecture: Any, config: Any, weights: Mapping[str, Tensor], path: Path, **options: Any) -> Any:
    """Returns a `transformers` network with given weights. Raises ValueError for missing weights or wrong shapes."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # hides the report of `from_pretrained`
    logging.disable_progress_bar()
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # the report lists the wrong weights
    try:
        network, report = architecture.from_pretrained(None, config=config, state_dict=dict(weights), **options)
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    wrong = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
    if wrong:
        raise ValueError(f"{path}: {len(wrong)} weights are missing or have a wrong shape, such as {wrong[0]}")
    return network.eval()
