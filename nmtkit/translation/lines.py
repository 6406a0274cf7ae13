"""Lines as people write them, around a translator that knows sentences: what `TextOptions` ask for."""

import unicodedata
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from nmtkit.config import changed_flags, check_flags
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.search.constraints import RequiredPhrase
from nmtkit.search.options import SearchOptions
from nmtkit.text.alignment import Link, Span, words
from nmtkit.text.casing import capitals, in_capitals, sentence_case
from nmtkit.text.glossary import Occurrence, Term, TermResult, load, term_results, without
from nmtkit.text.markup import Marked, marked
from nmtkit.text.protection import PATTERNS, Protected, compiled, protect, protected_spans
from nmtkit.text.quality import Quality, assess
from nmtkit.text.sentences import sentences, splitter
from nmtkit.translation.inputs import tagged_request
from nmtkit.translation.options import GLOSSARY_RULE, TextOptions
from nmtkit.translation.requests import Output, Request, Translation
from nmtkit.translation.terms import term_phrases


@dataclass(frozen=True)
class _Sentence:
    """A sentence of a line, as it was before the model read it."""

    start: int  # its place in the line, without markup
    end: int
    protected: Protected
    capitals: bool
    terms: list[Occurrence]  # of the glossary, in the text that the model reads
    tag: int = 0  # characters of the tag before that text

    def restored(self, output: Output) -> tuple[str, list[Link], list[TermResult]]:
        """Returns the translation of the sentence, with its links and what became of its terms."""
        links = [Link(*(int(place) for place in link)) for link in output.alignment or []]
        links = [link.moved(-self.tag, 0) for link in links if link.source_start >= self.tag]
        text = output.text
        if self.capitals:
            text, links = capitals(text, links)
        text, links = self.protected.restore(text, links, self.term_results(text)[1])
        return text, links, self.term_results(text)[0]

    def term_results(self, text: str) -> tuple[list[TermResult], list[Span]]:
        """Returns what became of the terms in a translation, and where those stand that it holds."""
        return term_results(text, [found.term for found in self.terms], self.capitals)


@dataclass(frozen=True)
class _Line:
    """A line whose translation is to come."""

    source: str
    text: str  # without markup
    markup: Marked | None
    sentences: list[_Sentence]
    tokenizer: Tokenizer
    links: bool  # wanted, of words
    glossary: bool
    rewritten: bool

    def translation(self, id: int, found: Sequence[Translation]) -> Translation:
        """Returns the translation of the line from those of its sentences; a rank has those of this rank."""
        ranks = range(max(len(translation.hypotheses) for translation in found))
        hypotheses = [
            self._joined([translation.hypotheses[min(rank, len(translation.hypotheses) - 1)] for translation in found])
            for rank in ranks
        ]
        return Translation(id, self.source, hypotheses)

    def _joined(self, outputs: Sequence[Output]) -> Output:
        """Returns the translations of the sentences with the white space that was between them."""
        if not self.rewritten:
            terms = self.sentences[0].term_results(outputs[0].text)[0]
            return replace(outputs[0], terms=terms, quality=self._quality(outputs, outputs[0].text, terms))
        text, end = "", 0
        links: list[Link] = []
        terms = []
        for sentence, output in zip(self.sentences, outputs, strict=True):
            text += self.text[end : sentence.start]
            translated, own, results = sentence.restored(output)
            links += [link.moved(sentence.start, len(text)) for link in own]
            text += translated
            terms += results
            end = sentence.end
        text += self.text[end:]
        quality = self._quality(outputs, text, terms)
        if self.markup is not None:
            text = self.markup.restore(text, links)
        return Output(
            text=text,
            pieces=[piece for output in outputs for piece in output.pieces],
            score=sum(output.score for output in outputs),
            log_probability=sum(output.log_probability for output in outputs),
            alignment=[[*astuple(link)] for link in links] if self.links and self.markup is None else None,
            utility=outputs[0].utility if len(outputs) == 1 else None,
            token_log_probabilities=token_log_probabilities(outputs),
            quality=quality,
            terms=terms if self.glossary else None,
        )

    def _quality(self, outputs: Sequence[Output], text: str, terms: Sequence[TermResult]) -> Quality | None:
        """Returns the quality of a translation without markup, if it is asked for."""
        protected = [string for sentence in self.sentences for string in sentence.protected.strings]
        protected += [term.found for term in terms if term.found is not None]
        read = [sentence.protected.text for sentence in self.sentences]
        return quality_of(self.tokenizer, self.text, read, text, outputs, protected)


def token_log_probabilities(outputs: Sequence[Output]) -> list[float] | None:
    """Returns those of several outputs, one after the other, or None if they are not known."""
    each = [output.token_log_probabilities for output in outputs]
    return None if None in each else [value for values in each for value in values or []]


def quality_of(
    tokenizer: Tokenizer,
    source: str,
    read: Sequence[str],
    text: str,
    outputs: Sequence[Output],
    protected: Collection[str] = (),
) -> Quality | None:
    """Returns the quality of a translation, if it is asked for; `read` are the texts of which the model made it."""
    each = token_log_probabilities(outputs)
    if each is None:
        return None
    pieces = len(tokenizer.encode_source(read).ids) - len(read), sum(len(output.pieces) for output in outputs)
    return assess(source, text, each, pieces, protected)


class LineProcessor:
    """Turns lines into requests, and the translations of these, in the same order, into translations of the lines.

    >>> processor = LineProcessor(translator.tokenizer, TextOptions(protect_spans=True))
    >>> search = processor.search_options(SearchOptions())
    >>> found = translator.run(processor.requests(windows), search, translator.batch_decoder(search))
    >>> for translation in processor.translations(found): ...

    One processor serves one stream of lines. With `links` the translations have the alignment "words", of the lines as
    they were in Unicode's normal form NFC, unless these hold markup. Raises ValueError for a pattern that is no regular
    expression and for a line of a glossary that is no term, OSError for a glossary that cannot be read, ImportError for
    an extra that is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, links: bool = False) -> None:
        self.tokenizer, self.options, self.links = tokenizer, options, links
        self.patterns = compiled([*(PATTERNS if options.protect_spans else ()), *options.protect])
        self.split = splitter() if options.split_sentences is not None else None
        self.glossary = None if options.glossary is None else load(options.glossary)
        self.phrases = term_phrases(tokenizer)
        self.waiting: deque[_Line] = deque()

    def search_options(self, search: SearchOptions) -> SearchOptions:
        """Returns the options of a search with the alignment that putting things back needs.

        Raises ValueError for a search that cannot require the terms of a glossary.
        """
        if self.glossary is not None:
            check_flags((GLOSSARY_RULE,), changed_flags(search), {GLOSSARY_RULE.flag})
        return replace(search, alignment="words") if self.options.rewriting or self.links else search

    def requests(self, windows: Iterable[Sequence[Request]], tag: str | None = None) -> Iterator[list[Request]]:
        """Yields a window of requests for each window of lines, with `tag` before those that are not empty."""
        for window in windows:
            yield [sentence for request in window for sentence in self._sentences(request, tag)]

    def _sentences(self, request: Request, tag: str | None) -> list[Request]:
        """Returns a request for each sentence of a line; for an empty line, an empty one."""
        if not self.options.active:
            return [request if tag is None else replace(request, source=tagged_request(request.source, tag).source)]
        source = unicodedata.normalize("NFC", request.source)
        markup = marked(source) if self.options.markup else None
        line = source if markup is None else markup.text.replace("\n", " ")
        spans = [(0, len(line))]
        if self.split is not None and self.options.split_sentences is not None:
            spans = sentences(line, self.options.split_sentences, self.split) or spans
        requests, waiting = [], []
        for start, end in spans:
            sentence, text = self._sentence(line, start, end)
            tagged = tagged_request(text, tag).source
            waiting.append(replace(sentence, tag=len(tagged) - len(text)))
            terms = [
                (len(tagged) - len(text) + found.start, phrase)
                for found in sentence.terms
                if (phrase := self._phrase(found.term, sentence.protected)) is not None
            ]
            requests.append(replace(request, source=tagged, ids=None, terms=terms))
        glossary, rewritten = self.glossary is not None, bool(self.options.rewriting)
        self.waiting.append(
            _Line(request.source, line, markup, waiting, self.tokenizer, self.links, glossary, rewritten)
        )
        return requests

    def _phrase(self, term: Term, protected: Protected) -> RequiredPhrase | None:
        """Returns what a term requires: a target that holds a protected text would be one too many of that."""
        return self.phrases.phrase(without(term.targets, protected.strings))

    def _sentence(self, line: str, start: int, end: int) -> tuple[_Sentence, str]:
        """Returns a sentence, and its text as the model is to read it."""
        text = line[start:end]
        spans = protected_spans(text, self.patterns)
        upper = self.options.truecase_caps and in_capitals(protect(text, spans, lambda span: False).text)
        if self.options.protect_spans:
            unknown = self._unknown_words(sentence_case(text) if upper else text)
            spans = protected_spans(text, self.patterns, unknown)
        protected = protect(text, spans, self.tokenizer.knows)
        text = protected.text if protected.plain else ""
        text = sentence_case(text) if upper else text
        terms = [] if self.glossary is None else self.glossary.find(text, upper)
        terms = [found for found in terms if protected.is_whole(found.start, found.end)]
        return _Sentence(start, end, protected, upper, terms), text

    def _unknown_words(self, text: str) -> list[Span]:
        """Returns the words and emoji that the model's vocabulary does not know; punctuation is left to the model."""
        return [
            (start, end)
            for start, end in words(text)
            if unicodedata.category(text[start])[0] in "LNS" and not self.tokenizer.knows(text[start:end])
        ]

    def translations(self, found: Iterable[Translation]) -> Iterator[Translation]:
        """Yields the translations of the lines. Their pieces are the model's."""
        if not self.options.active:
            yield from map(self._assessed, found)
            return
        ready: list[Translation] = []
        id = 0
        for translation in found:
            ready.append(translation)
            if len(ready) == len(self.waiting[0].sentences):
                yield self.waiting.popleft().translation(id, ready)
                ready = []
                id += 1

    def _assessed(self, translation: Translation) -> Translation:
        """Returns a translation with the quality of each hypothesis, if it is asked for."""
        if translation.hypotheses[0].token_log_probabilities is None:
            return translation
        source = unicodedata.normalize("NFC", translation.source)
        hypotheses = [
            replace(output, quality=quality_of(self.tokenizer, source, [source], output.text, [output]))
            for output in translation.hypotheses
        ]
        return replace(translation, hypotheses=hypotheses)
