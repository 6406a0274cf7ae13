"""Steps of the text pipeline that change words: markup, special spaces, protected text, glossaries and capitals.

The step of the option --quality is here, too, because the estimate needs the protected text and the terms.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.text.alignment import Span, words
from nmtkit.text.casing import capitals, in_capitals, sentence_case
from nmtkit.text.glossary import Glossary, term_results
from nmtkit.text.markup import Marked, marked
from nmtkit.text.protection import PATTERNS, compiled, protect, protected_spans
from nmtkit.text.quality import assess
from nmtkit.text.white_space import with_source_spaces
from nmtkit.translation.search.types import Hypothesis
from nmtkit.translation.steps import SegmentNode, Step, TextSegment


class Markup(Step):
    """Removes HTML tags from a line. Puts the tags around the translations of the words that the tags enclosed."""

    def before(self, node: SegmentNode) -> list[TextSegment]:
        node.memory = marked(node.segment.text)
        return [replace(node.segment, text=node.memory.text.replace("\n", " "))]

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        found: Marked = node.memory
        return replace(hypothesis, text=found.restore(hypothesis.text, hypothesis.links), links=[])


class WhiteSpace(Step):
    """Puts spaces that the vocabulary lacks, such as no-break spaces, back into the translation of a line."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        spaces = "".join(char for char in tokenizer.source.missing[1] if unicodedata.category(char) == "Zs")
        self.spaces = re.compile(f"[{spaces}]" if spaces else r"(?!)")

    def before(self, node: SegmentNode) -> list[TextSegment] | None:
        return [node.segment] if self.spaces.search(node.segment.text) else None

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        text, links = with_source_spaces(node.segment.text, hypothesis.text, hypothesis.links, self.spaces)
        return replace(hypothesis, text=text, links=links)


class QualityEstimation(Step):
    """Estimates the quality of the translation of a line. Markup does not count."""

    def before(self, node: SegmentNode) -> list[TextSegment]:
        return [node.segment]

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        copied = [term.found for term in hypothesis.terms or [] if term.found is not None]
        for part in node.descendants():
            copied += [] if part.segment.protected is None else part.segment.protected.strings
        inputs = [leaf.input for leaf in node.leaves()]
        read = sum(len(each.ids) - 1 - each.constraints.source_tokens for each in inputs)  # no eos, languages or tags
        pieces, each = (read, len(hypothesis.pieces)), hypothesis.token_log_probabilities or []
        return replace(hypothesis, quality=assess(node.segment.text, hypothesis.text, each, pieces, copied))


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

    def before(self, node: SegmentNode) -> list[TextSegment]:
        text = node.segment.text
        spans = protected_spans(text, self.patterns)
        upper = self.casing and in_capitals(protect(text, spans, lambda span: False).text)
        if self.unknown_words:
            unknown = self.unknown(sentence_case(text) if upper else text)
            spans = protected_spans(text, self.patterns, unknown)
        found = protect(text, spans, self.tokenizer.knows)
        for_model = found.text if found.plain or not found.spans else ""
        return [replace(node.segment, text=for_model, capitals=upper, protected=found)]

    def unknown(self, text: str) -> list[Span]:
        """Returns the words and emoji that the model's vocabulary does not know. Punctuation is not included."""
        return [
            (start, end)
            for start, end in words(text)
            if unicodedata.category(text[start])[0] in "LNS" and not self.tokenizer.knows(text[start:end])
        ]

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,), part = hypotheses, node.parts[0].segment
        assert part.protected is not None
        # the next step, `GlossaryTerms`, has found the terms, if there is a glossary
        terms = [match.term for child in node.parts[0].parts for match in child.segment.terms]
        kept = term_results(hypothesis.text, terms, part.capitals)[1]
        text, links = part.protected.restore(hypothesis.text, hypothesis.links, kept)
        results = None if hypothesis.terms is None else term_results(text, terms, part.capitals)[0]
        return replace(hypothesis, text=text, links=links, terms=results)


class GlossaryTerms(Step):
    """Finds the source terms of a glossary in a segment, and reports which target terms the translation contains.

    `ModelInput` makes the target terms required phrases of the search.
    """

    def __init__(self, glossary: Glossary) -> None:
        self.glossary = glossary

    def before(self, node: SegmentNode) -> list[TextSegment]:
        segment, protected = node.segment, node.segment.protected
        terms = [
            match
            for match in self.glossary.find(segment.text, segment.capitals)
            if protected is None or protected.is_whole(match.start, match.end)
        ]
        return [replace(segment, terms=terms)]

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        terms = [match.term for match in node.parts[0].segment.terms]
        return replace(hypothesis, terms=term_results(hypothesis.text, terms, node.segment.capitals)[0])


class Casing(Step):
    """Converts a segment in capitals to sentence case for the model, and converts its translation to capitals."""

    def before(self, node: SegmentNode) -> list[TextSegment] | None:
        segment = node.segment
        return [replace(segment, text=sentence_case(segment.text))] if segment.capitals else None

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        text, links = capitals(hypothesis.text, hypothesis.links)
        return replace(hypothesis, text=text, links=links)
