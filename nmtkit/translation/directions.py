"""Translates a subset of a dataset whose rows have different directions (source and target language)."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from nmtkit.data.dataset.binarized import Split
from nmtkit.translation.languages import codes_for
from nmtkit.translation.lines import dataset_requests
from nmtkit.translation.options import TextOptions
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import BatchDecoder, Request, Translation
from nmtkit.translation.translator import Translator


class DirectionsTranslator:
    """Translates the rows of `split` in windows of at most `window` rows of one direction.

    Raises ValueError if `search` names languages, or if the rows are not sorted by direction. The rows of a training
    set are not sorted.
    """

    def __init__(
        self, translator: Translator, split: Split, search: SearchOptions, text: TextOptions, source_tag: str | None,
        window: int,
    ) -> None:  # fmt: skip
        for flag, code in (("--source-lang", search.source_lang), ("--target-lang", search.target_lang)):
            if code is not None:
                raise ValueError(
                    f"{flag} {code} has no effect: the rows of {split.folder} have several directions; to choose a "
                    "direction, give text with --input"
                )
        index = np.asarray(split.direction_index).astype(np.int64)
        if (np.diff(index) < 0).any():
            raise ValueError(f"the rows of {split.name} are not sorted by direction; choose a valid or test set")
        self.translator, self.window = translator, window
        numbers = np.unique(index).tolist()
        self.parts = [split.select(split.rows_of(number)) for number in numbers]
        self.directions = [split.directions[number] for number in numbers]
        pairs = [(direction.source, direction.target) for direction in self.directions]
        translator.notice_untrained(pairs)
        self.pipelines = []
        for pair in pairs:
            source, target = codes_for(translator.tokenizer, *pair)
            own = dataclasses.replace(search, source_lang=source, target_lang=target)
            self.pipelines.append(translator.pipeline(own, text, source_tag))

    def requests(self, with_references: bool) -> Iterator[list[Request]]:
        """Yields windows of requests for the rows, in order."""
        for part in self.parts:
            yield from dataset_requests(part, self.window, with_references)

    def run(
        self, windows: Iterable[Sequence[Request]], decoder: BatchDecoder | None = None, processes: int = 1
    ) -> Iterator[Translation]:
        """Yields the translations in order. `windows` are the results of `requests`, possibly with added fields."""
        remaining, first = iter(windows), 0
        for direction, part, pipeline in zip(self.directions, self.parts, self.pipelines, strict=True):
            of_part = islice(remaining, -(-len(part) // self.window))
            for translation in self.translator.run(of_part, pipeline, decoder, processes, first):
                yield dataclasses.replace(translation, direction=str(direction))
            first += len(part)
        deque(remaining, maxlen=0)  # reads to the end, where `with_fields` checks that its files have no further lines
