"""A model with its tokenizer: translation, scores, attention weights, and the encoder's representation of a text."""

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from nmtkit.api.settings import PathLike, configs, names_of, texts
from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.layers.packed import Packed
from nmtkit.plugins import load_plugins
from nmtkit.search.options import SearchOptions
from nmtkit.translation.attention import Attention, attend
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.parallel import rank_device
from nmtkit.translation.requests import Request, Translation
from nmtkit.translation.translator import Translator, batch_ends

# B: number of texts, S: number of source pieces with eos, D: width of the model

Pooling = Literal["none", "mean"]
_OF_LOAD = (*names_of(DeviceOptions), *names_of(TranslatorOptions))


def load(
    path: PathLike | Sequence[PathLike], *, plugins: Sequence[PathLike] = (), trainable: bool = False, **options: Any
) -> "Model":
    """Returns the model of a checkpoint, or an ensemble of several checkpoints with the same tokenizer.

    >>> model = nmtkit.load("averaged.pt", precision="int8")

    `plugins` are Python files or modules to import first, as with `--plugin`. `options` are the flags of
    `nmtkit generate` that belong to the model: `device`, `precision`, `engine`, `threads`, `max_tokens`,
    `max_source_len`, `long_lines`.

    On a CPU, linear layers are replaced by faster ones without parameters and gradients. With `trainable`, the
    model has the same modules as in training, in fp32: `model.architectures[0]` has all parameters, gradients and
    hooks.

    Raises OSError or ValueError with the name of the file or the option.
    """
    load_plugins([str(plugin) for plugin in plugins])
    devices, of_translator = configs("nmtkit.load", options, DeviceOptions, TranslatorOptions)
    device = rank_device(devices.named_device, workers=1)
    if devices.threads is not None:
        torch.set_num_threads(devices.threads)
    paths = [path] if isinstance(path, str | Path) else path
    settings = dataclasses.asdict(of_translator)
    return Model(Translator.load(paths, device, devices.precision, devices.engine, trainable=trainable, **settings))


class Model:
    """A model or an ensemble in evaluation mode, with the tokenizer. `load` creates it."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    @property
    def tokenizer(self) -> Tokenizer:
        return self._translator.tokenizer

    @property
    def architectures(self) -> list[Architecture]:
        """The torch modules: one for a single model, several for an ensemble."""
        return self._translator.models

    @overload
    def translate(self, source: str | Request, *, nbest: None = None, **options: Any) -> str: ...
    @overload
    def translate(self, source: str | Request, *, nbest: int, **options: Any) -> Translation: ...
    @overload
    def translate(self, source: Sequence[str | Request], *, nbest: None = None, **options: Any) -> list[str]: ...
    @overload
    def translate(self, source: Sequence[str | Request], *, nbest: int, **options: Any) -> list[Translation]: ...
    @overload
    def translate(self, source: Iterable[str | Request], *, nbest: None = None, **options: Any) -> Iterator[str]: ...
    @overload
    def translate(self, source: Iterable[str | Request], *, nbest: int, **options: Any) -> Iterator[Translation]: ...
    def translate(
        self,
        source: str | Request | Iterable[str | Request],
        *,
        nbest: int | None = None,
        source_tag: str | None = None,
        **options: Any,
    ) -> Any:
        """Translates texts: returns one translation for a text, a list for a list, an iterator for any other iterable.

        >>> model.translate("A dog runs.")
        'Ein Hund rennt.'
        >>> model.translate(["A dog runs.", "Two men."], beam=5, lenpen=1.0)
        ['Ein Hund rennt.', 'Zwei Männer.']
        >>> best, second = model.translate("A dog runs.", nbest=2, alignment="hard").hypotheses

        Without `nbest`, a translation is a str. With any `nbest`, even 1, a translation is a `Translation` with
        `hypotheses`, best first. A hypothesis has `text`, `pieces`, `score` and `log_probability`. The option
        `alignment` adds the source pieces that each piece attends to. `glossary` adds `terms`: the terms in
        the source, each with the target term found in the translation, if any. `quality` adds an estimate of the
        model's confidence.

        A text is one line; a newline at the end of the text is ignored. A `Request` can be given instead of a text: it
        also has a prefix of the translation, and phrases that the translation must or must not contain. The iterator
        reads thousands of lines before it yields the first translation, because it sorts the lines by length.

        `options` are the other flags of `nmtkit generate` for the search (`beam`, `lenpen`, `sampling`, …) and for the
        text (`split_sentences`, `markup`, `truecase_caps`, `protect_spans`, `protect`, `glossary`). Raises ValueError
        for options that are unknown, out of range or cannot be combined, and for an item that is neither a text nor a
        request.
        """
        for name in ("alignment", "quality"):
            if nbest is None and options.get(name):
                raise ValueError(f"{name} does nothing without nbest, with which translations are objects")
        given = options if nbest is None else options | {"nbest": nbest}
        search, text = configs("translate", given, SearchOptions, TextOptions, elsewhere=("nmtkit.load", _OF_LOAD))
        if search.score_reference:
            raise ValueError("score_reference is the method score of a model")
        if search.mbr is not None and nbest is None:
            raise ValueError("mbr chooses among nbest translations; give nbest")
        if text.rewriting and search.alignment is not None:
            names = ", ".join(text.rewriting)
            raise ValueError(f"alignment is that of the text a model reads; leave it out with {names}")
        alone = isinstance(source, str | Request)
        lines = typing.cast(Iterable[str | Request], [source] if alone else source)
        requests = (_request(line, index) for index, line in enumerate(lines))
        found = self._translator.stream(requests, self._translator.pipeline(search, text, source_tag))
        results = found if nbest is not None else (translation.text for translation in found)
        if alone:
            (result,) = results
            return result
        return list(results) if isinstance(source, Sequence) else results

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]; the first overload applies
        self, source: str, target: str, *, source_lang: str | None = None, target_lang: str | None = None
    ) -> float: ...
    @overload
    def score(
        self,
        source: Sequence[str],
        target: Sequence[str],
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> list[float]: ...
    def score(
        self,
        source: str | Sequence[str],
        target: str | Sequence[str],
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> float | list[float]:
        """Returns the log probability (natural logarithm, eos included) of a translation, or a list for a list.

        >>> model.score("A dog runs.", "Ein Hund rennt.")
        -2.71

        Raises ValueError if the two lists differ in length.
        """
        sources, targets = texts(source), texts(target)
        if isinstance(source, str) != isinstance(target, str) or len(sources) != len(targets):
            raise ValueError(f"there are {len(sources)} sources and {len(targets)} translations; give one for each")
        requests = [Request(text, reference=other) for text, other in zip(sources, targets, strict=True)]
        options = SearchOptions(score_reference=True, source_lang=source_lang, target_lang=target_lang)
        found = self._translator.stream(requests, self._translator.pipeline(options))
        scores = [translation.hypotheses[0].log_probability for translation in found]
        return scores[0] if isinstance(source, str) else scores

    @overload
    def encode(self, source: str, *, pooling: Pooling = "none") -> Tensor: ...  # type: ignore[overload-overlap]
    @overload
    def encode(self, source: Sequence[str], *, pooling: Literal["none"] = "none") -> list[Tensor]: ...
    @overload
    def encode(self, source: Sequence[str], *, pooling: Literal["mean"]) -> Tensor: ...
    @torch.inference_mode()
    def encode(self, source: str | Sequence[str], *, pooling: Pooling = "none") -> Tensor | list[Tensor]:
        """Returns the output of the encoder, to which the decoder attends, in fp32 on the CPU.

        For a text, the output is a tensor S D with a row for each piece and a row for eos (some architectures have a
        different number of rows). For a list, the output is a list of such tensors. `pooling="mean"` returns the mean
        of the rows: D for a text, B D for a list. Means from the same model can be compared.

        Raises ValueError for an ensemble, and for a text that is longer than the model can read.
        """
        if pooling not in ("none", "mean"):
            raise ValueError(f"pooling is {pooling!r}; it must be none or mean")
        model = self._single("encode")
        sentences = self.tokenizer.encode_source(texts(source)).split()
        limit = model.max_source_positions
        for number, ids in enumerate(sentences, 1):
            if limit is not None and len(ids) > limit:
                raise ValueError(f"text {number} has {len(ids)} pieces; this model reads {limit} at most")
        order = sorted(range(len(sentences)), key=lambda index: -len(sentences[index]))
        ends = batch_ends([len(sentences[index]) for index in order], self._translator.max_tokens, 1)
        rows: dict[int, Tensor] = {}
        for start, end in zip([0, *ends], ends, strict=False):
            batch = order[start:end]
            packed = Packed.from_lists([sentences[index].tolist() for index in batch], self._translator.device)
            rows |= zip(batch, (memory.float().cpu() for memory in model.encode(packed).split()), strict=True)
        memories = [rows[index] for index in range(len(sentences))]
        if pooling == "mean":
            means = [memory.mean(0) for memory in memories]
            return means[0] if isinstance(source, str) else torch.stack(means) if means else torch.empty(0)
        return memories[0] if isinstance(source, str) else memories

    def attention(
        self,
        source: str,
        target: str | None = None,
        *,
        beam: int = 4,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> Attention:
        """Returns the attention weights of every head. Without `target`, the model translates the source first.

        >>> attention = model.attention("A dog runs.", "Ein Hund rennt.")
        >>> attention.weights["cross"][0].shape  # first layer: heads, target pieces, source pieces, both with eos
        (8, 5, 5)
        >>> attention.alignment  # pairs of a source and a target piece
        [(0, 0), (1, 1), (2, 2), (3, 3)]

        Raises ValueError for an ensemble, an empty or too long source, and a model without attention.
        """
        return attend(self._single("attention"), self.tokenizer, source, target, beam, source_lang, target_lang)

    def _single(self, method: str) -> Architecture:
        if len(self.architectures) > 1:
            raise ValueError(f"{method} is of one model, and this is an ensemble of {len(self.architectures)}")
        return self.architectures[0]

    def __repr__(self) -> str:
        names = ", ".join(type(model).__name__ for model in self.architectures)
        sizes = f"{self.tokenizer.source_size:,} source and {self.tokenizer.target_size:,} target pieces"
        return f"<nmtkit.Model: {names}, {sizes}, on {self._translator.device}>"


def _request(line: Any, index: int) -> Request:
    if isinstance(line, Request):
        return line
    if not isinstance(line, str):
        raise ValueError(f"item {index} is of type {type(line).__name__}; give a text, or texts")
    return Request(line.removesuffix("\n"))
