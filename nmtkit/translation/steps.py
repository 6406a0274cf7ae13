"""Steps of the text pipeline. Each step changes a segment before the model, and its translation after the model.

Before the model, a step turns one segment into one or more parts, which the next step reads. After the model, the step
turns the translations of these parts into the translation of the segment.
"""

import re
import unicodedata
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.text.alignment import UNSPACED, Link, Span, is_letter, words
from nmtkit.text.casing import capitals, in_capitals, sentence_case
from nmtkit.text.glossary import Glossary, Occurrence, term_results
from nmtkit.text.markup import Marked, marked
from nmtkit.text.normalization import INVISIBLE, normalized
from nmtkit.text.protection import PATTERNS, Protected, compiled, protect, protected_spans
from nmtkit.text.quality import assess
from nmtkit.text.sentences import sentences, splitter
from nmtkit.translation.search.constraints import NO_CONSTRAINTS, Constraints
from nmtkit.translation.search.types import Hypothesis, Segment

# No space follows a sentence that ends with one of these: characters of scripts without spaces, and full-width forms.
UNSPACED_SIGN = re.compile(f"{UNSPACED.pattern}|[\uff01-\uff65]")


@dataclass(eq=False, slots=True)
class TextSegment:
    """A line, or a part of a line, on its way to the model. The steps store facts that `Step.after` needs."""

    id: int  # number of the line, counted from 0
    text: str
    capitals: bool = False  # whether the text is in capitals, not counting protected text
    marked: Marked | None = None  # the markup of the text
    spans: Sequence[Span] = ()  # positions of the parts in the text: sentences, or parts of a long line
    protected: Protected | None = None  # spans that the translation must contain
    terms: Sequence[Occurrence] = ()  # terms of the glossary in the text that the model reads
    # set by the tokenizer and later steps
    ids: list[int] | None = None  # ids of the text, without eos
    pieces: list[str] = field(default_factory=list)  # pieces of the text; an unknown piece is shown as its characters
    leading: int = 0  # number of tokens before the text: language token and tags
    constraints: Constraints = NO_CONSTRAINTS
    reference: list[int] | None = None
    # results of the steps and of the search
    parts: list["TextSegment"] = field(default_factory=list)  # segments that a step made from this segment
    model_input: Segment | None = None  # set only for a segment that the model reads
    hypotheses: list[Hypothesis] | None = None  # translations of `model_input`, best first

    def part(self, text: str) -> "TextSegment":
        """Returns a segment for the next step, with the state that later steps read."""
        part = TextSegment(self.id, text, self.capitals)
        part.protected, part.terms = self.protected, self.terms
        part.ids, part.pieces, part.leading = self.ids, self.pieces, self.leading
        part.constraints, part.reference = self.constraints, self.reference
        return part

    def leaves(self) -> Iterator["TextSegment"]:
        """Yields the segments that the model reads, in the order of the text."""
        if self.model_input is not None:
            yield self
        for part in self.parts:
            yield from part.leaves()

    @property
    def input(self) -> Segment:
        """The segment that the model reads. Only a leaf has this segment."""
        assert self.model_input is not None
        return self.model_input

    @property
    def complete(self) -> bool:
        """Whether all leaves have their hypotheses."""
        return all(leaf.hypotheses is not None for leaf in self.leaves())


class Step(ABC):
    """A change of the text before the model, and of the translation after the model."""

    @abstractmethod
    def before(self, segment: TextSegment) -> list[TextSegment]:
        """Returns the parts of `segment`. The next step reads these parts."""

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        """Returns a translation of `segment`, from one translation of each of its parts."""
        return hypotheses[0]


class Normalization(Step):
    """Converts a line to Unicode form NFC. Alignment links refer to the converted text."""

    def before(self, segment: TextSegment) -> list[TextSegment]:
        return [segment.part(normalized(segment.text))]


class InvisibleCharacters(Step):
    """Removes invisible characters that the vocabulary does not contain, such as soft hyphens and zero-width spaces.

    Alignment links refer to the words of the original line, which still has these characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def before(self, segment: TextSegment) -> list[TextSegment]:
        if segment.ids is not None:  # the sentence comes from a dataset
            return [segment.part(segment.text)]
        return [
            segment.part(INVISIBLE.sub(lambda char: char[0] if self.tokenizer.knows(char[0]) else "", segment.text))
        ]

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        if not hypothesis.links or segment.parts[0].text == segment.text:
            return hypothesis
        positions = self._positions(segment)
        shown = [word for word in words(segment.text) if positions[word[0]] < positions[word[1]]]
        starts, ends = ([positions[word[side]] for word in shown] for side in (0, 1))
        links = []
        for link in hypothesis.links:
            first, last = bisect_right(ends, link.source_start), bisect_left(starts, link.source_end)
            links += [Link(*word, link.target_start, link.target_end) for word in shown[first:last]]
        return replace(hypothesis, links=links)

    @staticmethod
    def _positions(segment: TextSegment) -> list[int]:
        """Returns, for each position in the text of the segment and for its end, the position in the part."""
        (part,) = segment.parts
        positions = [0]
        for char in segment.text:
            last = positions[-1]
            positions.append(last + (last < len(part.text) and part.text[last] == char))
        return positions


class Markup(Step):
    """Removes HTML tags from a line. Puts the tags around the translations of the words that the tags enclosed."""

    def before(self, segment: TextSegment) -> list[TextSegment]:
        segment.marked = marked(segment.text)
        return [segment.part(segment.marked.text.replace("\n", " "))]

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        assert segment.marked is not None
        return replace(hypothesis, text=segment.marked.restore(hypothesis.text, hypothesis.links), links=[])


class QualityEstimation(Step):
    """Estimates the quality of the translation of a line, without its markup."""

    def before(self, segment: TextSegment) -> list[TextSegment]:
        return [segment.part(segment.text)]

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        copied = [term.found for term in hypothesis.terms or [] if term.found is not None]
        for part in descendants(segment):
            copied += [] if part.protected is None else part.protected.strings
        read = sum(len(leaf.input.ids) - 1 - leaf.leading for leaf in segment.leaves())
        each = hypothesis.token_log_probabilities or []
        return replace(
            hypothesis, quality=assess(segment.text, hypothesis.text, each, (read, len(hypothesis.pieces)), copied)
        )


def descendants(segment: TextSegment) -> Iterator[TextSegment]:
    for part in segment.parts:
        yield part
        yield from descendants(part)


class Sentences(Step):
    """Splits a line into sentences by the rules of a language, and joins their translations with the white space that
    was between the sentences.

    Raises ImportError if the package for splitting sentences is missing.
    """

    def __init__(self, language: str) -> None:
        self.language, self.split = language, splitter()

    def before(self, segment: TextSegment) -> list[TextSegment]:
        segment.spans = sentences(segment.text, self.language, self.split) or [(0, len(segment.text))]
        return [segment.part(segment.text[start:end]) for start, end in segment.spans]

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        if len(hypotheses) == 1 and segment.spans[0] == (0, len(segment.text)):
            return hypotheses[0]
        ends = [0, *(end for _, end in segment.spans)]
        gaps: list[str | None] = []
        for end, (start, _) in zip(ends, segment.spans, strict=False):
            unspaced = start == end and UNSPACED_SIGN.match(segment.text[end - 1 : end])
            gaps.append(None if unspaced else segment.text[end:start])
        hypothesis = joined(hypotheses, gaps, [start for start, _ in segment.spans])
        return replace(hypothesis, text=hypothesis.text + segment.text[ends[-1] :])


def joined(hypotheses: Sequence[Hypothesis], gaps: Sequence[str | None], starts: Sequence[int]) -> Hypothesis:
    """Joins the translations of the parts of a text.

    `starts` has the position of each part in the source. `gaps` has the white space before each part. If a gap is None,
    the script of the translations decides between a space and nothing.
    """
    text, links = "", []
    for hypothesis, gap, start in zip(hypotheses, gaps, starts, strict=True):
        text += separator(text, hypothesis.text) if gap is None else gap
        links += [link.moved(start, len(text)) for link in hypothesis.links]
        text += hypothesis.text
    log_probabilities = [hypothesis.token_log_probabilities for hypothesis in hypotheses]
    with_terms = any(hypothesis.terms is not None for hypothesis in hypotheses)
    return Hypothesis(
        tokens=[token for hypothesis in hypotheses for token in hypothesis.tokens],
        score=sum(hypothesis.score for hypothesis in hypotheses),
        log_probability=sum(hypothesis.log_probability for hypothesis in hypotheses),
        token_log_probabilities=None
        if None in log_probabilities
        else [value for each in log_probabilities for value in each or []],
        text=text,
        pieces=[piece for hypothesis in hypotheses for piece in hypothesis.pieces],
        links=links,
        utility=hypotheses[0].utility if len(hypotheses) == 1 else None,
        terms=[term for hypothesis in hypotheses for term in hypothesis.terms or []] if with_terms else None,
    )


def separator(left: str, right: str) -> str:
    """Returns the text between two translations: a space, or nothing in a script without spaces."""
    if not left or not right or left[-1].isspace() or right[0].isspace():
        return ""
    letters = next(filter(is_letter, reversed(left)), ""), next(filter(is_letter, right), "")
    return "" if any(map(UNSPACED.match, letters)) else " "


class Protection(Step):
    """Keeps parts of the source text unchanged in the translation, such as addresses, placeholders and numbers.

    Such a part is a protected span. Before the model, the step removes the spans that the vocabulary cannot write.
    After the model, the step puts every span into the translation. `patterns` are regular expressions for spans. With
    `unknown_words`, there are two more kinds of spans: matches of PATTERNS, and words or emoji outside the vocabulary.
    With `casing`, the step determines whether the text outside the spans is in capitals.

    Raises ValueError for a pattern that is not a regular expression.
    """

    def __init__(self, tokenizer: Tokenizer, patterns: Sequence[str], unknown_words: bool, casing: bool) -> None:
        self.tokenizer, self.unknown_words, self.casing = tokenizer, unknown_words, casing
        self.patterns = compiled([*(PATTERNS if unknown_words else ()), *patterns])

    def before(self, segment: TextSegment) -> list[TextSegment]:
        text = segment.text
        spans = protected_spans(text, self.patterns)
        segment.capitals = self.casing and in_capitals(protect(text, spans, lambda span: False).text)
        if self.unknown_words:
            unknown = self.unknown(sentence_case(text) if segment.capitals else text)
            spans = protected_spans(text, self.patterns, unknown)
        segment.protected = protect(text, spans, self.tokenizer.knows)
        return [segment.part(segment.protected.text if segment.protected.plain else "")]

    def unknown(self, text: str) -> list[Span]:
        """Returns the words and emoji that the model's vocabulary does not know. Punctuation is not included."""
        return [
            (start, end)
            for start, end in words(text)
            if unicodedata.category(text[start])[0] in "LNS" and not self.tokenizer.knows(text[start:end])
        ]

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,), (part,) = hypotheses, segment.parts
        assert segment.protected is not None
        terms = [match.term for match in part.terms]
        kept = term_results(hypothesis.text, terms, segment.capitals)[1]
        text, links = segment.protected.restore(hypothesis.text, hypothesis.links, kept)
        results = None if hypothesis.terms is None else term_results(text, terms, segment.capitals)[0]
        return replace(hypothesis, text=text, links=links, terms=results)


class GlossaryTerms(Step):
    """Finds the source terms of a glossary in a segment, and reports which target terms the translation has.

    Between `before` and `after`, the search requires the target term of each source term in the translation.
    """

    def __init__(self, glossary: Glossary) -> None:
        self.glossary = glossary

    def before(self, segment: TextSegment) -> list[TextSegment]:
        protected = segment.protected
        segment.terms = [
            match
            for match in self.glossary.find(segment.text, segment.capitals)
            if protected is None or protected.is_whole(match.start, match.end)
        ]
        return [segment.part(segment.text)]

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        terms = [match.term for match in segment.terms]
        return replace(hypothesis, terms=term_results(hypothesis.text, terms, segment.capitals)[0])


class Casing(Step):
    """Converts a segment in capitals to sentence case for the model, and converts its translation to capitals."""

    def before(self, segment: TextSegment) -> list[TextSegment]:
        return [segment.part(sentence_case(segment.text) if segment.capitals else segment.text)]

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        if not segment.capitals:
            return hypothesis
        text, links = capitals(hypothesis.text, hypothesis.links)
        return replace(hypothesis, text=text, links=links)
