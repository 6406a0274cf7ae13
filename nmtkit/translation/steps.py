"""Steps of the text pipeline. Each step changes a segment before the model, and its translation after the model.

Before the model, a step turns one segment into one or more parts, which the next step reads. After the model, the step
turns the translations of these parts into the translation of the segment.
"""

import logging
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from nmtkit.data.tokenizers.piece_spans import source_spans
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.text.alignment import UNSPACED, Link, Span, is_letter, words
from nmtkit.text.glossary import Occurrence
from nmtkit.text.normalization import normalized
from nmtkit.text.patterns import is_message
from nmtkit.text.protection import Protected
from nmtkit.text.sentences import part_ends, sentences, splitter
from nmtkit.translation.search.constraints import NO_CONSTRAINTS, Constraints
from nmtkit.translation.search.types import Hypothesis, Segment

# No space follows a sentence that ends with one of these: characters of scripts without spaces, and full-width forms.
UNSPACED_SIGN = re.compile(f"{UNSPACED.pattern}|[\uff01-\uff65]")

logger = logging.getLogger("nmtkit")


@dataclass(slots=True)
class TextSegment:
    """A line, or a part of a line, that a step hands to the next step. Comments name the steps that set a field.

    Only `pipeline.encode` changes a segment. Steps make new segments.
    """

    id: int  # number of the line, counted from 0
    text: str
    ids: list[int] | None = None  # `encode`, or the request for a line of a dataset: ids of the text without eos
    constraints: Constraints = NO_CONSTRAINTS  # the request; LengthLimit
    reference: list[int] | None = None  # the request
    tags: Sequence[int] = ()  # Tags: ids of the tags of the line, which the text lacks
    capitals: bool = False  # Protection: whether the text is in capitals, not counting protected text
    protected: Protected | None = None  # Protection: spans that the translation must contain
    terms: Sequence[Occurrence] = ()  # GlossaryTerms, LengthLimit: terms of the glossary in the text
    spans: Sequence[Span] = ()  # LengthLimit: spans of the pieces in the text, from `source_spans`
    repeated: int = 0  # LengthLimit: number of ids at the beginning that repeat the tags of the line


@dataclass(eq=False, slots=True)
class SegmentNode:
    """A segment and the parts that a step has made of it. A line is a tree of nodes; the model reads the leaves."""

    segment: TextSegment
    step: "Step | None" = None  # the step that has made `parts` or `model_input`
    parts: Sequence["SegmentNode"] = ()
    memory: Any = None  # facts that `step` needs again in `Step.after`
    model_input: Segment | None = None  # set only for a leaf
    hypotheses: list[Hypothesis] | None = None  # translations of `model_input`, best first

    def leaves(self) -> list["SegmentNode"]:
        """Returns the nodes whose segment the model reads, in the order of the text."""
        if self.model_input is not None:
            return [self]
        return [leaf for part in self.parts for leaf in part.leaves()]

    def descendants(self) -> Iterator["SegmentNode"]:
        for part in self.parts:
            yield part
            yield from part.descendants()

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
    def before(self, node: SegmentNode) -> list[TextSegment] | None:
        """Returns the parts of the segment of `node`. The next step reads these parts.

        None means that the step changes neither the segment nor its translation. The next step then reads `node`. An
        empty list means that no later step reads the segment.
        """

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        """Returns a translation of the segment of `node`, from one translation of each of its parts."""
        return hypotheses[0]


def with_text(segment: TextSegment, text: str) -> list[TextSegment] | None:
    """Returns the result of `Step.before` for a step that only replaces the text of a segment by `text`."""
    return None if text == segment.text else [replace(segment, text=text)]


class Normalization(Step):
    """Converts a line to Unicode form NFC. Alignment links refer to the converted text."""

    def before(self, node: SegmentNode) -> list[TextSegment] | None:
        return with_text(node.segment, normalized(node.segment.text))


class Tags(Step):
    """Removes the tags at the beginning of a line, so that no other step changes the tags.

    `ModelInput` puts the tags back: before the line, or before each part of a line that is split.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def before(self, node: SegmentNode) -> list[TextSegment] | None:
        text = node.segment.text
        rest = self.tokenizer.without_tags(text)
        node.memory = len(text) - len(rest)
        if not node.memory:
            return None
        tags = self.tokenizer.encode_source([text[: node.memory].rstrip()]).ids[:-1].tolist()
        return [replace(node.segment, text=rest, tags=tags)]

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        return replace(hypothesis, links=[link.moved(node.memory, 0) for link in hypothesis.links])


class InvisibleCharacters(Step):
    """Removes invisible characters that the vocabulary does not contain, such as soft hyphens and zero-width spaces.

    Alignment links refer to the words of the original line, which still has these characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def before(self, node: SegmentNode) -> list[TextSegment] | None:
        segment, source = node.segment, self.tokenizer.source
        if segment.ids is not None and source.preparation == 1:  # the ids of a dataset include these characters
            return None
        return with_text(segment, source.invisible.sub("", segment.text))

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        (hypothesis,) = hypotheses
        text, (part,) = node.segment.text, node.parts
        if not hypothesis.links:
            return hypothesis
        positions = self._positions(text, part.segment.text)
        shown = [word for word in words(text) if positions[word[0]] < positions[word[1]]]
        starts, ends = ([positions[word[side]] for word in shown] for side in (0, 1))
        links = []
        for link in hypothesis.links:
            first, last = bisect_right(ends, link.source_start), bisect_left(starts, link.source_end)
            links += [Link(*word, link.target_start, link.target_end) for word in shown[first:last]]
        return replace(hypothesis, links=links)

    @staticmethod
    def _positions(text: str, visible: str) -> list[int]:
        """Returns the position in `visible` for each position in `text`, the end of `text` included."""
        positions = [0]
        for char in text:
            last = positions[-1]
            positions.append(last + (visible[last : last + 1] == char))
        return positions


class Sentences(Step):
    """Splits a line into sentences by the rules of a language, and joins their translations with the white space that
    was between the sentences. A message of ICU MessageFormat with branches, such as plural forms, stays whole.

    Raises ImportError if the package for splitting sentences is missing.
    """

    def __init__(self, language: str) -> None:
        self.language, self.split = language, splitter()

    def before(self, node: SegmentNode) -> list[TextSegment] | None:
        text = node.segment.text
        found = [] if is_message(text) else sentences(text, self.language, self.split)
        if found in ([], [(0, len(text))]):
            return None
        node.memory = found
        return [replace(node.segment, text=text[start:end]) for start, end in found]

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        text, spans = node.segment.text, node.memory
        ends = [0, *(end for _, end in spans)]
        gaps: list[str | None] = []
        for end, (start, _) in zip(ends, spans, strict=False):
            unspaced = start == end and UNSPACED_SIGN.match(text[end - 1 : end])
            gaps.append(None if unspaced else text[end:start])
        hypothesis = joined(hypotheses, gaps, [start for start, _ in spans])
        return replace(hypothesis, text=hypothesis.text + text[ends[-1] :])


def joined(hypotheses: Sequence[Hypothesis], gaps: Sequence[str | None], starts: Sequence[int]) -> Hypothesis:
    """Joins the translations of the parts of a text.

    `starts` has the position of each part in the source. `gaps` has the white space before each part. For the gap None,
    the parts are joined with a space, or without a space if their script has no spaces. The utility is the mean over
    the parts.
    """
    text, links = "", []
    for hypothesis, gap, start in zip(hypotheses, gaps, starts, strict=True):
        text += separator(text, hypothesis.text) if gap is None else gap
        links += [link.moved(start, len(text)) for link in hypothesis.links]
        text += hypothesis.text
    utilities = [hypothesis.utility for hypothesis in hypotheses if hypothesis.utility is not None]
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
        utility=fmean(utilities) if utilities else None,
        no_repeat_ngram=next((each.no_repeat_ngram for each in hypotheses if each.no_repeat_ngram), None),
        terms=[term for hypothesis in hypotheses for term in hypothesis.terms or []] if with_terms else None,
    )


def separator(left: str, right: str) -> str:
    """Returns the text between two translations: a space, or nothing in a script without spaces."""
    if not left or not right or left[-1].isspace() or right[0].isspace():
        return ""
    letters = next(filter(is_letter, reversed(left[-100:])), ""), next(filter(is_letter, right[:100]), "")
    return "" if any(map(UNSPACED.match, letters)) else " "


class Spaces(Step):
    """Replaces white space that the vocabulary does not contain, such as tabs or no-break spaces, by spaces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.white_space = tokenizer.source.white_space

    def before(self, node: SegmentNode) -> list[TextSegment] | None:
        segment = node.segment
        if segment.ids is not None:  # a line of a dataset, whose text the tokenizer does not read
            return None
        return with_text(segment, self.white_space.sub(" ", segment.text.replace("\n", " ")))


class LengthLimit(Step):
    """Splits or truncates a segment that is too long for the model. Joins the translations of the parts.

    A part has at most `limit` tokens, not counting eos. This limit includes `reserved` tokens that later steps add.
    Each part begins with the tags of the segment.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limit: int,
        reserved: int,
        long_lines: Literal["split", "cut"],
        alignment: str | None,
    ) -> None:
        self.tokenizer, self.long_lines, self.alignment = tokenizer, long_lines, alignment
        self.limit, self.reserved = max(1, limit - reserved), reserved

    def before(self, node: SegmentNode) -> list[TextSegment] | None:
        segment, ids = node.segment, node.segment.ids or []
        limit = self.limit - len(segment.tags)
        if len(ids) <= limit:
            return None if ids else []
        spans, tags = source_spans(self.tokenizer.source, ids, segment.text), self.tags(ids)
        texts = [segment.text[start:end] for start, end in spans[tags:]]
        ends = [tags + end for end in part_ends(texts, max(1, limit - tags))]
        if self.long_lines == "cut":
            logger.warning(
                "line %d has %d pieces; all pieces after the first %d are cut off", segment.id + 1, len(ids), ends[0]
            )
            ends = ends[:1]
        else:
            logger.warning("line %d has %d pieces; it is translated in %d parts", segment.id + 1, len(ids), len(ends))
        node.memory = []
        for start, end in pairwise([0, *ends]):
            first, last = spans[start][0], spans[end - 1][1]
            node.memory.append((last - len(segment.text[first:last].lstrip()), last))
        parts = []
        terms = terms_of_parts(segment.terms, [end for _, end in spans], ends)
        for (start, end), (first, last), own_terms in zip(pairwise([0, *ends]), node.memory, terms, strict=True):
            own = [(max(0, start - first), max(0, end - first)) for start, end in spans[start:end]]
            part = replace(segment, text=segment.text[first:last], ids=ids[start:end], spans=own, terms=own_terms)
            if start:
                constraints = segment.constraints.after_a_part()
                part = replace(part, ids=ids[:tags] + ids[start:end], repeated=tags, constraints=constraints)
            parts.append(part)
        return parts

    def tags(self, ids: Sequence[int]) -> int:
        """Returns the number of tags at the beginning of a line."""
        return next((index for index, id in enumerate(ids) if id not in self.tokenizer.source_tags), 0)

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        if len(hypotheses) == 1:  # the line was cut off
            start, _ = node.memory[0]
            return replace(hypotheses[0], links=[link.moved(start, 0) for link in hypotheses[0].links])
        hypothesis = joined(hypotheses, [None] * len(hypotheses), [start for start, _ in node.memory])
        if self.alignment not in ("hard", "soft"):
            return hypothesis
        parts = [part.segment for part in node.parts]
        reserved = self.reserved + len(node.segment.tags)
        shared = reserved + parts[1].repeated
        lengths = [len(part.ids or ()) + reserved - (shared if index else 0) for index, part in enumerate(parts)]
        return replace(hypothesis, alignment=joined_alignment(hypotheses, lengths, shared, self.alignment == "soft"))


def terms_of_parts(
    terms: Sequence[Occurrence], piece_ends: Sequence[int], part_ends: Sequence[int]
) -> list[list[Occurrence]]:
    """Returns the terms of a glossary that begin in each part of a line. Terms beyond the last part are left out.

    `piece_ends` are the end positions of the pieces in the line. `part_ends` are the ends of the parts, in pieces.
    """
    terms_by_part: list[list[Occurrence]] = [[] for _ in part_ends]
    for term in terms:
        part = bisect_right(part_ends, bisect_right(piece_ends, term.start))
        if part < len(terms_by_part):
            terms_by_part[part].append(term)
    return terms_by_part


def joined_alignment(
    hypotheses: Sequence[Hypothesis], lengths: Sequence[int], shared: int, soft: bool
) -> list[list[int]] | list[list[float]]:
    """Returns the hard or soft alignment of a line from the alignments of its parts.

    `lengths` are the token counts of the source parts, without eos. Every part begins with the same `shared` tokens,
    which are counted only in the first part. The columns of a soft alignment are the columns of all parts in order,
    including the eos of each part.
    """
    weights: list[list[float]] = []
    pairs: list[list[int]] = []
    targets = 0
    for index, hypothesis in enumerate(hypotheses):
        again = shared if index else 0
        before, after = sum(lengths[:index]), sum(lengths[index + 1 :])
        for row in hypothesis.alignment or []:
            if soft:
                gap, rest = [0.0] * (before + index - again), [0.0] * (after + len(lengths) - index - 1)
                weights.append([*row[:again], *gap, *row[again:], *rest])
            else:
                source, target = map(int, row)
                pairs.append([source if source < again else source - again + before, target + targets])
        targets += len(hypothesis.pieces)
    return weights if soft else pairs
