"""Translates through a third language: from the source into the pivot language, and from there into the target."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from nmtkit.config import changed_flags, check_flags, suggestion
from nmtkit.models.building import languages_of
from nmtkit.text.languages import NAMES, same_language, subtags
from nmtkit.translation.languages import codes_for
from nmtkit.translation.options import PIVOT_RULE, TextOptions
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import BatchDecoder, Request, Translation
from nmtkit.translation.translator import WINDOW, Translator

# Options that apply to both steps. In the first step, all other options have their defaults: one translation, no
# sampling, no <unk>, and no logits processors, because the processors are for the target language.
OF_BOTH_STEPS = ("beam", "lenpen", "max_len_a", "max_len_b", "min_len", "no_repeat_ngram", "keep_loops", "shortlist")


def of_first_step(search: SearchOptions) -> SearchOptions:
    """Returns the options of `search` that apply to the translation into the pivot language.

    All other options get their defaults. The source and the target language of `search` are kept.
    """
    kept = (*OF_BOTH_STEPS, "source_lang", "target_lang")
    return SearchOptions(**{name: getattr(search, name) for name in kept})


class PivotTranslator:
    """Translates in two steps. The best translation of `first` into the pivot language is the source of `second`.

    Scores, n-best lists, samples, constraints, logits processors and quality belong to the second step. Both steps
    apply the options `text`, so that tags, protected text and capitals pass through the pivot language.

    Raises ValueError if the pivot language is also the source or the target language, if a model does not have the
    pivot language or translates in another direction, and for options that refer to the source, such as alignments.
    """

    def __init__(
        self, first: Translator, second: Translator, pivot: str, search: SearchOptions, text: TextOptions | None = None
    ) -> None:
        text = text or TextOptions()
        check(pivot, search, text)
        check_directions(pivot, first=first, second=second)
        from_pivot, _ = codes_for(second.tokenizer, pivot, search.target_lang)
        for translator, names_pivot in ((first, True), (second, from_pivot is not None)):
            languages = translator.tokenizer.languages
            if names_pivot and languages and pivot not in languages:
                known = suggestion(pivot, sorted(languages))
                raise ValueError(f"--pivot {pivot}: {translator.name} does not have this language; {known}")
        into_pivot = pivot if first.tokenizer.languages else None
        searches = (
            dataclasses.replace(of_first_step(search), target_lang=into_pivot),
            dataclasses.replace(search, source_lang=from_pivot),
        )
        later = text if text.split_sentences is None else dataclasses.replace(text, split_sentences=subtags(pivot)[0])
        self.pipelines = first.pipeline(searches[0], text), second.pipeline(searches[1], later)
        self.steps = list(zip((first, second), self.pipelines, strict=True))

    def stream(self, lines: Iterable[str | Request]) -> Iterator[Translation]:
        """Yields the translations of `lines` in order, like `Translator.stream`."""
        requests = (Request(line) if isinstance(line, str) else line for line in lines)
        return self.run(iter(lambda: list(islice(requests, WINDOW)), []))

    def run(
        self,
        windows: Iterable[Sequence[Request]],
        decoders: Sequence[BatchDecoder | None] = (None, None),
        processes: int = 1,
    ) -> Iterator[Translation]:
        """Yields the translations of windows of requests, like `Translator.run`. Step i uses `decoders[i]`."""
        sources: deque[tuple[str, Translation]] = deque()  # source of each line, and its translation by the first step
        (first, into_pivot), (second, from_pivot) = self.steps

        def in_pivot_language() -> Iterator[list[Request]]:
            line = 0
            for window in windows:
                lines = [Request(request.source, request.ids) for request in window]  # drops the constraints
                pairs = [*zip(window, first.run([lines], into_pivot, decoders[0], processes, line), strict=True)]
                line += len(window)
                sources.extend((request.source, found) for request, found in pairs)
                yield [dataclasses.replace(request, source=found.text, ids=None) for request, found in pairs]

        # without background threads, because two threads must not record CUDA graphs at the same time
        for translation in second.run(in_pivot_language(), from_pivot, decoders[1], processes, background=False):
            source, found = sources.popleft()
            again = found.hypotheses[0].no_repeat_ngram
            hypotheses = [
                dataclasses.replace(each, no_repeat_ngram=each.no_repeat_ngram or again)
                for each in translation.hypotheses
            ]
            yield dataclasses.replace(
                translation, source=source, untagged=found.untagged, pivot=found.text, hypotheses=hypotheses
            )


def check(pivot: str, search: SearchOptions, text: TextOptions) -> None:
    """Raises ValueError if the pivot language is the source or target language, or an option refers to the source."""
    for flag, code in (("--source-lang", search.source_lang), ("--target-lang", search.target_lang)):
        if code == pivot:
            raise ValueError(
                f"--pivot {pivot} equals {flag}: the pivot is a third language; leave out --pivot to translate directly"
            )
    check_flags((PIVOT_RULE,), changed_flags(search) | changed_flags(text), {PIVOT_RULE.flag})


def check_directions(pivot: str, *, first: Translator, second: Translator) -> None:
    """Raises ValueError if `first` cannot translate into the pivot language, or `second` cannot translate out of it.

    Only models of one direction are checked. Codes without a name in NAMES are not compared, because such codes may
    stand for groups of languages, such as gem in OPUS-MT.
    """
    if first is second and not first.tokenizer.languages:
        raise ValueError(
            f"--pivot {pivot}: {first.name} is a model of one direction, which cannot do both steps; give the "
            "checkpoint of the first step with --pivot-path"
        )
    for translator, side, flag, step in ((first, 1, "--pivot-path", "into"), (second, 0, "--path", "out of")):
        known = translator.paths and not translator.tokenizer.languages
        pair = languages_of(translator.paths[0]) if known else None
        code = subtags(pivot if pair is None else pair[side])[0]
        if pair is not None and code in NAMES and not same_language(code, pivot):
            raise ValueError(
                f"--pivot {pivot}: {translator.name} translates from {pair[0]} into {pair[1]}, but {flag} must "
                f"translate {step} {pivot}"
            )
