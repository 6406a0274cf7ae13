"""Lines as people write them, around a translator that knows sentences: what `TextOptions` ask for."""

import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from nmtkit.data.tokenizer import Tokenizer
from nmtkit.generation.inputs import tagged_request
from nmtkit.generation.options import SearchOptions, TextOptions
from nmtkit.generation.requests import Output, Request, Translation
from nmtkit.text.alignment import Link, Span, words
from nmtkit.text.casing import capitals, in_capitals, sentence_case
from nmtkit.text.markup import Marked, marked
from nmtkit.text.protection import PATTERNS, Protected, compiled, protect, protected_spans


@dataclass(frozen=True)
class _Waiting:
    """A line whose translation is to come."""

    source: str
    markup: Marked | None
    protected: Protected
    capitals: bool
    shift: int  # characters of the tag before the text that the model reads


class LineProcessor:
    """Turns lines into requests, and the translations of these, in the same order, into translations of the lines.

    >>> processor = LineProcessor(translator.tokenizer, TextOptions(protect_spans=True))
    >>> search = processor.search_options(SearchOptions())
    >>> found = translator.run(processor.requests(windows), search, translator.batch_decoder(search))
    >>> for translation in processor.translations(found): ...

    One processor serves one stream of lines. Raises ValueError for a pattern that is no regular expression.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.patterns = compiled([*(PATTERNS if options.protect_spans else ()), *options.protect])
        self.waiting: deque[_Waiting] = deque()

    def search_options(self, search: SearchOptions) -> SearchOptions:
        """Returns the options of a search with the alignment that putting things back needs."""
        return replace(search, alignment="words") if self.options.active else search

    def requests(self, windows: Iterable[Sequence[Request]], tag: str | None = None) -> Iterator[list[Request]]:
        """Yields a window of requests for each window of lines, with `tag` before those that are not empty."""
        for window in windows:
            yield [self._request(request, tag) for request in window]

    def _request(self, request: Request, tag: str | None) -> Request:
        if not self.options.active:
            return request if tag is None else replace(request, source=tagged_request(request.source, tag).source)
        source = unicodedata.normalize("NFC", request.source)
        markup = marked(source) if self.options.markup else None
        source = source if markup is None else markup.text.replace("\n", " ")
        unknown = self._unknown_words(source) if self.options.protect_spans else []
        protected = protect(source, protected_spans(source, self.patterns, unknown), self.tokenizer.knows)
        text = protected.text if protected.plain else ""
        upper = self.options.truecase_caps and in_capitals(text)
        tagged = tagged_request(sentence_case(text) if upper else text, tag).source
        self.waiting.append(_Waiting(request.source, markup, protected, upper, len(tagged) - len(text)))
        return replace(request, source=tagged, ids=None)

    def _unknown_words(self, text: str) -> list[Span]:
        """Returns the words and emoji that the model's vocabulary does not know; punctuation is left to the model."""
        return [
            (start, end)
            for start, end in words(text)
            if unicodedata.category(text[start])[0] in "LNS" and not self.tokenizer.knows(text[start:end])
        ]

    def translations(self, found: Iterable[Translation]) -> Iterator[Translation]:
        """Yields the translations of the lines. Their pieces are the model's, and they have no alignment."""
        if not self.options.active:
            yield from found
            return
        for translation in found:
            line = self.waiting.popleft()
            hypotheses = [self._restored(line, output) for output in translation.hypotheses]
            yield Translation(translation.id, line.source, hypotheses)

    def _restored(self, line: _Waiting, output: Output) -> Output:
        links = [Link(*(int(place) for place in link)) for link in output.alignment or []]
        links = [link.moved(-line.shift, 0) for link in links if link.source_start >= line.shift]
        text = output.text
        if line.capitals:
            text, links = capitals(text, links)
        text, links = line.protected.restore(text, links)
        if line.markup is not None:
            text = line.markup.restore(text, links)
        return replace(output, text=text, alignment=None)
