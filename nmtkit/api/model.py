"""A model with its tokenizer: translation, scores, attention weights, and encoder output."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from nmtkit.api.settings import (
    PathLike,
    check_text,
    checked,
    configs,
    items,
    named_arguments_of_methods,
    pairs,
    paths,
    texts,
    translation_options,
)
from nmtkit.config.plugins import load_plugins
from nmtkit.data.packed import Batch, Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer
from nmtkit.jobs.distributed import rank_device
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.hidden_states import decoder_states, encoder_states
from nmtkit.translation.attention import UNLIMITED, Attention, attend
from nmtkit.translation.options import DeviceOptions, TranslatorOptions
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.pivot import PivotTranslator
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request, Translation
from nmtkit.translation.translator import Translator, batch_ends

# S: source pieces with eos, T: target pieces with eos, D: width of the model, V: target vocabulary

LangCode = str | None  # a language code
Strings = Sequence[str]
Pooling = Literal["none", "mean"]
Layers = Literal["last", "all"]


def load(
    path: PathLike | Sequence[PathLike],
    *,
    plugins: PathLike | Sequence[PathLike] = (),
    trainable: bool = False,
    **options: Any,
) -> "Model":
    """Returns the model of a checkpoint, or an ensemble of several checkpoints with the same tokenizer.

    The folder of a run selects the best checkpoint of the run. "hf:ORG/NAME" selects a model of the Hugging Face Hub.

    >>> model = nmtkit.load("averaged.pt", precision="int8")

    `plugins` are Python files or modules to import first, like `--plugin`. `options` are the flags of `nmtkit generate`
    that belong to the model: `device`, `precision`, `engine`, `threads`, `max_tokens`, `max_source_len`, `long_lines`.

    On a CPU, linear layers are replaced by faster layers without parameters and gradients. With `trainable`, the model
    has the same modules as in training, in fp32, so `model.architectures[0]` supports gradients and hooks.

    Raises OSError or ValueError with the name of the file or the option.
    """
    load_plugins(list(map(str, paths(plugins))))  # str, because Path would remove ./ before a file name
    devices, of_translator = configs("nmtkit.load", options, DeviceOptions, TranslatorOptions)
    device = rank_device(devices.named_device, workers=1)
    if devices.threads is not None:
        torch.set_num_threads(devices.threads)
    settings = dataclasses.asdict(of_translator)
    translator = Translator.load(path, device, devices.precision, devices.engine, trainable=trainable, **settings)
    return Model(translator, trainable)


@named_arguments_of_methods
class Model:
    """A model or an ensemble in evaluation mode, with its tokenizer. Use the function `load` to get a `Model`."""

    def __init__(self, translator: Translator, trainable: bool = False) -> None:
        self._translator = translator
        self._gradients = trainable

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
        pivot: str | None = None,
        **options: Any,
    ) -> Any:
        """Translates one text or several. Returns a list for a list, and an iterator for any other iterable of texts.

        >>> model.translate("A dog runs.")
        'Ein Hund rennt.'
        >>> model.translate(["A dog runs.", "Two men."], beam=5, lenpen=1.0)
        ['Ein Hund rennt.', 'Zwei Männer.']
        >>> best, second = model.translate("A dog runs.", nbest=2, alignment="hard").hypotheses

        Without `nbest`, a translation is a str. With any `nbest`, even 1, a translation is a `Translation` with
        `hypotheses`, best first. A hypothesis has `text`, `pieces`, `score` and `log_probability`. The option
        `alignment` adds links to the source pieces. `glossary` adds `terms`: the terms in the source, each with the
        target term found in the translation, if any. `quality` adds an estimate of the model's confidence.

        A text is one line; a newline at the end of the text is ignored. Instead of a text, you can give a `Request`: a
        text with a prefix of the translation, and with phrases that the translation must or must not contain. The
        iterator reads thousands of lines before it yields the first translation, because it sorts the lines by length.

        With `pivot`, a model of several languages translates from `source_lang` into the language `pivot`, and then
        into `target_lang`. Scores, n-best lists and constraints belong to the second step. A `Translation` then has the
        field `pivot`, the text in the pivot language.

        `options` are the other flags of `nmtkit generate` for the search (`beam`, `lenpen`, `sampling`, …) and for the
        text (`split_sentences`, `markup`, `truecase_caps`, `protect_spans`, `protect`, `glossary`), and the settings of
        `logits_processors`, such as `lm` and `lm_weight` of lm_fusion. Raises ValueError for options that are unknown,
        are out of range or cannot be combined, for an item that is neither a text nor a request, and for a language
        model.
        """
        if not all(model.reads_source for model in self._translator.originals):
            hint = 'model.score("", text) returns the log probability of a text'
            raise ValueError(f"this model is a language model, which does not translate; {hint}")
        search, text = translation_options(options, nbest)
        single = isinstance(source, str | Request)
        requests = (_request(line, index) for index, line in enumerate(items(source)))
        if pivot is not None:
            if source_tag is not None:
                raise ValueError("pivot and source_tag cannot be combined: give the tag in the text")
            translations = PivotTranslator(self._translator, self._translator, pivot, search, text).stream(requests)
        else:
            translations = self._translator.stream(requests, self._translator.pipeline(search, text, source_tag))
        results = translations if nbest is not None else (translation.text for translation in translations)
        if single:
            (result,) = results
            return result
        return list(results) if isinstance(source, Sequence) else results

    # A str is also a Sequence[str], so overloads overlap here and below. The first matching overload applies.
    @overload
    def score(self, source: str, target: str, *, per_piece: Literal[False] = False, **languages: LangCode) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def score(
        self, source: Strings, target: Strings, *, per_piece: Literal[False] = False, **languages: LangCode
    ) -> list[float]: ...
    @overload
    def score(self, source: str, target: str, *, per_piece: Literal[True], **languages: LangCode) -> list[float]: ...  # type: ignore[overload-overlap]
    @overload
    def score(
        self, source: Strings, target: Strings, *, per_piece: Literal[True], **languages: LangCode
    ) -> list[list[float]]: ...
    def score(
        self, source: str | Strings, target: str | Strings, *, per_piece: bool = False, **languages: Any
    ) -> float | list[float] | list[list[float]]:
        """Returns the log probability (natural logarithm, eos included) of a translation. For lists, returns a list.

        >>> model.score("A dog runs.", "Ein Hund rennt.")
        -2.71

        With `per_piece`, returns the log probabilities of all target pieces, then the log probability of eos.
        `source_lang` and `target_lang` are for models of several languages.

        Raises ValueError if the two lists differ in length, for missing or unknown languages, and for a text that is
        longer than the model can read.
        """
        requests = pairs(source, target)
        options = SearchOptions(score_reference=True, quality=per_piece, **languages)
        translations = self._translator.stream(requests, self._translator.pipeline(options))
        best = [translation.hypotheses[0] for translation in translations]
        scores: list[Any] = [hypothesis.log_probability for hypothesis in best]
        if per_piece:
            scores = [list(hypothesis.token_log_probabilities or []) for hypothesis in best]
        return scores[0] if isinstance(source, str) else scores

    def batch(
        self,
        source: str | Strings,
        target: str | Strings | None = None,
        *,
        source_lang: LangCode = None,
        target_lang: LangCode = None,
    ) -> Batch:
        """Returns texts and translations as ids on the device of the model: the input of its torch modules.

        >>> batch = model.batch(["A dog runs."], ["Ein Hund rennt."])
        >>> features = model.architectures[0](batch.source, batch.target_input)  # T D

        `source` and `target_input` are `Packed`: concatenated sentences, with their lengths. `to_padded()` returns a
        tensor [sentences, length of the longest sentence]. `target_output` [T] holds the id that each position
        predicts. Without `target`, `target_input` has only bos and the token of the target language, if the model has
        such a token. Every search begins with these tokens. `source_lang` and `target_lang` are for models of several
        languages.

        Raises ValueError for a text that is longer than the model can read, and for lists that are empty or differ in
        length.
        """
        search = SearchOptions(score_reference=True, source_lang=source_lang, target_lang=target_lang)
        pipeline = Pipeline(self.tokenizer, search, max_source_len=UNLIMITED, models=self.architectures)
        if target is None:
            target = "" if isinstance(source, str) else [""] * len(texts(source))
        segments = [leaf.input for line in pipeline.segments(pairs(source, target)) for leaf in line.leaves()]
        if not segments:
            raise ValueError("the lists are empty; give at least one text and its translation")
        references = [list(segment.reference or []) for segment in segments]
        device = self._translator.device
        output = [token for ids in references for token in (*ids, EOS)]
        return Batch(
            source=Packed.from_lists([list(segment.ids) for segment in segments], device),
            target_input=Packed.from_lists([[BOS, *ids] for ids in references], device),
            target_output=torch.tensor(output, device=device),
            target_tokens=len(output),
            pairs=torch.arange(len(segments)),
        )

    @overload
    def logits(self, source: str, target: str, *, padded: bool = False, **languages: LangCode) -> Tensor: ...  # type: ignore[overload-overlap]
    @overload
    def logits(
        self, source: Strings, target: Strings, *, padded: Literal[False] = False, **languages: LangCode
    ) -> list[Tensor]: ...
    @overload
    def logits(self, source: Strings, target: Strings, *, padded: Literal[True], **languages: LangCode) -> Tensor: ...
    def logits(
        self, source: str | Strings, target: str | Strings, *, padded: bool = False, **languages: LangCode
    ) -> Tensor | list[Tensor]:
        """Returns the logits of each target piece, given the source and the preceding target pieces (teacher forcing).

        For a text, the result is a tensor [T, V] with a logit for each of V target pieces. The T rows predict the token
        of the target language (if the decoder reads such a token), the pieces of `target`, and eos. For a list, the
        result is a list of such tensors, or with `padded` a tensor [texts, T of the longest text, V] with zeros after
        the end of each text. `source_lang` and `target_lang` are for models of several languages. If the model was
        loaded with `trainable`, the logits have gradients.

        >>> model.logits("A dog runs.", "Ein Hund rennt.").log_softmax(-1)

        Raises ValueError for an ensemble, and in the same cases as `batch`.
        """
        module, batch = self._single("logits"), self.batch(source, target, **languages)
        with torch.set_grad_enabled(self._gradients):
            features = module(batch.source, batch.target_input)
            logits = batch.target_input.with_values(module.output_projection(features))
        if isinstance(source, str):
            return logits.values
        return logits.to_padded() if padded else list(logits.split())

    def decoder_states(self, source: str, target: str, **languages: LangCode) -> list[Tensor]:
        """Returns the states of the decoder: a tensor [T, D] for the embeddings, then a tensor [T, D] for each layer.

        The T rows, of the model's width D, predict the token of the target language (if the decoder reads such a
        token), the pieces of `target`, and eos. The last tensor is the input of the output projection. `source_lang`
        and `target_lang` are for models of several languages. If the model was loaded with `trainable`, the states have
        gradients.

        Raises ValueError for an ensemble, for lists of texts, for architectures whose layers do not compute one row for
        each token, and in the same cases as `batch`.
        """
        check_text("decoder_states", source)
        module = self._single("decoder_states")
        batch = self.batch(source, target, **languages)
        with torch.set_grad_enabled(self._gradients):
            return decoder_states(module, batch.source, batch.target_input)

    @overload
    def encode(  # type: ignore[overload-overlap]
        self, source: str, *, pooling: Pooling = ..., layers: Literal["last"] = ..., **languages: LangCode
    ) -> Tensor: ...
    @overload
    def encode(
        self, source: Strings, *, pooling: Literal["none"] = ..., layers: Literal["last"] = ..., **languages: LangCode
    ) -> list[Tensor]: ...
    @overload
    def encode(
        self, source: Strings, *, pooling: Literal["mean"], layers: Literal["last"] = ..., **languages: LangCode
    ) -> Tensor: ...
    @overload
    def encode(  # type: ignore[overload-overlap]
        self, source: str, *, pooling: Pooling = ..., layers: Literal["all"], **languages: LangCode
    ) -> list[Tensor]: ...
    @overload
    def encode(
        self, source: Strings, *, pooling: Literal["none"] = ..., layers: Literal["all"], **languages: LangCode
    ) -> list[list[Tensor]]: ...
    @overload
    def encode(
        self, source: Strings, *, pooling: Literal["mean"], layers: Literal["all"], **languages: LangCode
    ) -> list[Tensor]: ...
    @torch.no_grad()  # not inference_mode, because a hook may use the states in a pass with gradients
    def encode(
        self, source: str | Strings, *, pooling: Pooling = "none", layers: Layers = "last", **languages: LangCode
    ) -> Tensor | list[Tensor] | list[list[Tensor]]:
        """Returns the output of the encoder, to which the decoder attends, in fp32 on the CPU.

        For a text, the output is a tensor [S, D] with a row for each piece and a row for eos. Some architectures have a
        different number of rows. For a list, the output is a list of such tensors. `pooling="mean"` returns the mean of
        the rows: a tensor [D] for a text, a tensor [texts, D] for a list. Means of different models are not comparable.

        `layers="all"` returns a list instead: a result for the embeddings with positions, then a result for each layer.
        The last item equals the result of `layers="last"`.

        Models of several languages need `source_lang`; models with tokens such as >>de<< need `target_lang`. For
        these models, the first row belongs to the language token, unless the text is empty.

        Raises ValueError for an ensemble, for missing or unknown languages, for a text that is longer than the model
        can read, and with `layers="all"` for architectures whose layers do not compute one row for each piece.
        """
        checked("encode", {"pooling": pooling, "layers": layers}, {"pooling": Pooling, "layers": Layers})
        model = self._single("encode")
        sentences = source_ids(self.tokenizer, texts(source), **languages)
        for number, ids in enumerate(sentences, 1):
            model.check_length(f"text {number}", len(ids), "source")
        states = states_of(model, sentences, layers == "all", self._translator.max_tokens, self._translator.device)

        def result(layer: int) -> Any:
            rows = [each[layer] for each in states]
            if pooling == "mean":
                means = [row.mean(0) for row in rows]
                return means[0] if isinstance(source, str) else torch.stack(means) if means else torch.empty(0)
            return rows[0] if isinstance(source, str) else rows

        if layers == "last":
            return result(-1)
        return [result(layer) for layer in range(len(states[0]))] if states else []

    def attention(
        self,
        source: str,
        target: str | None = None,
        *,
        beam: int = 4,
        source_lang: LangCode = None,
        target_lang: LangCode = None,
    ) -> Attention:
        """Returns the attention weights of every head.

        Without `target`, the model first translates the source by a search with this `beam`.

        >>> attention = model.attention("A dog runs.", "Ein Hund rennt.")
        >>> attention.weights["cross"][0].shape  # first layer: heads, target pieces, source pieces, both with eos
        (8, 5, 5)
        >>> attention.alignment  # (index of a source piece, index of a target piece)
        [(0, 0), (1, 1), (2, 2), (3, 3)]

        Raises ValueError for an ensemble, a list, an empty or too long source, and a model without attention.
        """
        check_text("attention", source)
        model, languages = self._single("attention"), (source_lang, target_lang)
        return attend(model, self.tokenizer, source, target, beam, languages=languages)

    def _single(self, method: str) -> Architecture:
        if len(self.architectures) > 1:
            raise ValueError(f"{method} needs a single model, but this is an ensemble of {len(self.architectures)}")
        return self.architectures[0]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises TypeError, so that `copy` and `pickle` fail with an explanation."""
        raise TypeError("an nmtkit Model has threads, so it cannot be copied or pickled; call nmtkit.load again")

    def __repr__(self) -> str:
        names = ", ".join(type(model).__name__ for model in self.architectures)
        sizes = f"{self.tokenizer.source_size:,} source and {self.tokenizer.target_size:,} target pieces"
        return f"<nmtkit.Model: {names}, {sizes}, on {self._translator.device}>"


def _request(line: Any, index: int) -> Request:
    if isinstance(line, Request):
        for field in ("required", "avoided"):
            if isinstance(getattr(line, field), str):
                raise ValueError(f"item {index}: {field} is one text; give a list of phrases")
        if line.reference is not None:
            raise ValueError(f"item {index}: translate does not use a reference; call score to score a translation")
        return line
    if not isinstance(line, str):
        raise ValueError(f"item {index} is of type {type(line).__name__}; give a text or a list of texts")
    return Request(line.removesuffix("\n"))


# --- encoder output --------------------------------------------------------------------------------------------------


def source_ids(
    tokenizer: Tokenizer, texts: Sequence[str], source_lang: str | None = None, target_lang: str | None = None
) -> list[list[int]]:
    """Returns the ids of each text. An empty text has only eos.

    If the encoder reads a language token, this token is the first id of each text that is not empty.

    Raises ValueError if the language that the encoder reads is missing or unknown.
    """
    if tokenizer.languages and not tokenizer.has_target_languages_only and target_lang is None:
        target_lang = next(iter(tokenizer.languages))  # any language will do, because only the decoder reads it
    first, _ = tokenizer.language_ids(source_lang, target_lang, ("source_lang", "target_lang"))
    encoded = tokenizer.encode_source(texts).lists()
    return [[*first, *ids] if len(ids) > 1 else ids for ids in encoded]


def states_of(
    model: Architecture, sentences: Sequence[Sequence[int]], all_layers: bool, max_tokens: int, device: torch.device
) -> list[list[Tensor]]:
    """Returns the encoder states of each sentence: tensors [S, D] in fp32 on the CPU.

    With `all_layers`, the list of a sentence has all tensors of `hidden_states.encoder_states`. Otherwise the list has
    only the output of the encoder. S is the number of source pieces of the sentence, eos included, and D is the width
    of the model. A batch has at most `max_tokens` tokens.
    """
    order = sorted(range(len(sentences)), key=lambda index: -len(sentences[index]))
    ends = batch_ends([len(sentences[index]) for index in order], max_tokens, 1)
    states: dict[int, list[Tensor]] = {}  # by index of the sentence
    for start, end in zip([0, *ends], ends, strict=False):
        indices = order[start:end]
        packed = Packed.from_lists([list(sentences[index]) for index in indices], device)
        if all_layers:
            outputs = [packed.with_values(values) for values in encoder_states(model, packed)]
        else:
            outputs = [model.encode(packed)]
        of_texts = zip(*(output.split() for output in outputs), strict=True)
        states |= {index: [x.float().cpu() for x in each] for index, each in zip(indices, of_texts, strict=True)}
    return [states[index] for index in range(len(sentences))]
