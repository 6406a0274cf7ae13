"""The steps that turn text into ids for the model, and turn the tokens of a hypothesis into text."""

import logging
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from nmtkit.data.tokenizers.tokenizer import EOS, SPACE_SYMBOL, UNK, Tokenizer
from nmtkit.text.alignment import Link, piece_spans, word_links
from nmtkit.text.glossary import Occurrence, without
from nmtkit.translation.search.constraints import Constraints, RequiredPhrase
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis, Request, Segment
from nmtkit.translation.steps import Step, TextSegment, joined
from nmtkit.translation.terms import term_phrases

SENTENCE_ENDS = (".", "!", "?", ";", "。", "！", "？", "؟", "।", "…")
WHITE_SPACE = "\t\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)

logger = logging.getLogger("nmtkit")


# --- text to ids ------------------------------------------------------------------------------------------------------


def encode(segments: Sequence[TextSegment], tokenizer: Tokenizer) -> None:
    """Sets the ids of all segments with one call of the tokenizer. Segments from a dataset keep their ids.

    White space that the vocabulary does not contain, such as tabs or no-break spaces, is replaced by spaces.
    """
    new = [segment for segment in segments if segment.ids is None]
    unknown = unknown_white_space(tokenizer)
    for segment in new:
        segment.text = unknown.sub(" ", segment.text)
    encoded = tokenizer.encode_source([segment.text for segment in new])
    for segment, ids in zip(new, encoded.split(), strict=True):
        segment.ids = ids[:-1].tolist()


@lru_cache(maxsize=8)
def unknown_white_space(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Returns a pattern for the white space, except spaces, that the vocabulary of a tokenizer does not contain."""
    unknown = [char for char in WHITE_SPACE if not tokenizer.knows(char)]
    return re.compile(f"[{''.join(unknown)}]" if unknown else r"(?!)")


def constraints_of(request: Request, tokenizer: Tokenizer) -> Constraints:
    """Returns the constraints of a request, with texts encoded as ids."""

    def target_ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode_target([text]).ids[:-1].tolist())

    return Constraints(
        prefix=target_ids(request.prefix) if request.prefix else (),
        required=tuple(RequiredPhrase((target_ids(phrase),)) for phrase in request.required),
        avoided=tuple(map(target_ids, request.avoided)),
    )


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

    def before(self, segment: TextSegment) -> list[TextSegment]:
        ids = segment.ids or []
        if len(ids) <= self.limit:
            return [segment.part(segment.text)] if ids else []
        pieces = self.tokenizer.source_encoding(segment.text)
        if len(pieces) != len(ids):  # the ids come from a dataset and do not match the text
            pieces = self.tokenizer.source_pieces(ids)
        tags = self.tags(ids)
        ends = [tags + end for end in part_ends(pieces[tags:], max(1, self.limit - tags))]
        if self.long_lines == "cut":
            logger.warning(
                "line %d has %d pieces; all pieces after the first %d are cut off", segment.id + 1, len(ids), ends[0]
            )
            ends = ends[:1]
        else:
            logger.warning("line %d has %d pieces; it is translated in %d parts", segment.id + 1, len(ids), len(ends))
        spans = piece_spans(pieces, segment.text)
        segment.spans = [(spans[start][0], spans[end - 1][1]) for start, end in pairwise([0, *ends])]
        parts = []
        for (start, end), span in zip(pairwise([0, *ends]), segment.spans, strict=True):
            part = segment.part(segment.text[slice(*span)])
            part.ids, part.pieces = ids[start:end], pieces[start:end]
            if start:  # only the first part keeps the prefix and the required phrases
                part.ids, part.leading = ids[:tags] + part.ids, tags
                part.constraints = replace(part.constraints, prefix=(), required=())
            parts.append(part)
        for part, terms in zip(parts, terms_of_parts(segment.terms, [end for _, end in spans], ends), strict=True):
            part.terms = terms
        return parts

    def tags(self, ids: Sequence[int]) -> int:
        """Returns the number of tags at the beginning of a line."""
        return next((index for index, id in enumerate(ids) if id not in self.tokenizer.source_tags), 0)

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        if len(hypotheses) == 1:
            return hypotheses[0]
        hypothesis = joined(hypotheses, [None] * len(hypotheses), [start for start, _ in segment.spans])
        if self.alignment not in ("hard", "soft"):
            return hypothesis
        shared = self.reserved + segment.parts[1].leading
        lengths = [
            len(part.ids or ()) + self.reserved - (shared if index else 0) for index, part in enumerate(segment.parts)
        ]
        return replace(hypothesis, alignment=joined_alignment(hypotheses, lengths, shared, self.alignment == "soft"))


def part_ends(pieces: Sequence[str], limit: int) -> list[int]:
    """Divides `pieces` into parts of at most `limit` pieces, and returns the index of the end of each part.

    A part ends after the last complete sentence within the limit. If no sentence is complete, the part ends after the
    last complete word, or else at the limit.
    """
    ends: list[int] = []
    start = 0
    while len(pieces) - start > limit:
        positions = range(start + limit, start, -1)
        words = [i for i in positions if pieces[i].startswith(SPACE_SYMBOL)]
        end = next((i for i in words if pieces[i - 1].endswith(SENTENCE_ENDS)), None)
        start = end or next(iter(words), start + limit)
        ends.append(start)
    return [*ends, len(pieces)]


def terms_of_parts(
    terms: Sequence[Occurrence], piece_ends: Sequence[int], part_ends: Sequence[int]
) -> list[list[Occurrence]]:
    """Returns the terms of a glossary that begin in each part of a line. Terms beyond the last part are left out."""
    terms_by_part: list[list[Occurrence]] = [[] for _ in part_ends]
    for term in terms:
        part = bisect_right(part_ends, sum(end <= term.start for end in piece_ends))
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


# --- ids to text ------------------------------------------------------------------------------------------------------


class ModelInput(Step):
    """Makes the input of the model: adds language tokens, a tag and constraints to the ids. Decodes the hypotheses.

    Raises ValueError for languages and tags that the model does not have.
    """

    def __init__(self, tokenizer: Tokenizer, options: SearchOptions, source_tag: str | None) -> None:
        self.tokenizer, self.options = tokenizer, options
        languages, self.target_language = tokenizer.language_ids(options.source_lang, options.target_lang)
        if source_tag is not None:
            tokenizer.check_tag(source_tag)
            languages = [*languages, *tokenizer.encode_source([source_tag]).ids[:-1].tolist()]
        self.first = languages  # ids at the beginning of every source
        self.phrases = term_phrases(tokenizer)

    def before(self, segment: TextSegment) -> list[TextSegment]:
        part = segment.part(segment.text)
        ids = segment.ids or []
        part.leading = len(self.first) + segment.leading
        strings = segment.protected.strings if segment.protected is not None else ()
        # leave out targets that contain a protected text, because the translation would repeat this text
        phrases = [self.phrases.phrase(without(each.term.targets, strings)) for each in segment.terms]
        constraints = segment.constraints
        if self.target_language or phrases:
            constraints = replace(
                constraints,
                prefix=(*self.target_language, *constraints.prefix),
                language_tokens=len(self.target_language),
                required=(*constraints.required, *(phrase for phrase in phrases if phrase is not None)),
            )
        reference = None if segment.reference is None else [*self.target_language, *segment.reference]
        constraints.check(self.options)
        part.model_input = Segment([*(self.first if ids else ()), *ids, EOS], constraints, segment.id, reference)
        return [part]

    def after(self, segment: TextSegment, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        """Returns a hypothesis with its text, pieces, and alignment or links."""
        (part,) = segment.parts
        hypothesis = without_first(hypotheses[0], len(self.target_language))
        tokens, weights = hypothesis.tokens, hypothesis.attention
        text = self.tokenizer.decode_target(tokens)
        alignment: list[list[int]] | list[list[float]] | None = None
        links: list[Link] = []
        if weights is not None:
            best = [max(range(len(row) - 1), key=row.__getitem__, default=0) for row in weights]  # leaves out eos
            if self.options.replace_unknown and UNK in tokens:
                text = self.with_source_pieces(part, tokens, best)
            if self.options.alignment == "soft":
                alignment = [[round(weight, 5) for weight in row] for row in weights]
            elif self.options.alignment == "hard":
                alignment = [[source, target] for target, source in enumerate(best)]
            elif self.options.alignment == "words":
                links = self.links(part, tokens, text, weights)
        return replace(
            hypothesis,
            text=text,
            pieces=self.tokenizer.target_pieces(tokens),
            alignment=alignment,
            links=links,
            attention=None,
            token_log_probabilities=hypothesis.token_log_probabilities if self.options.quality else None,
        )

    def source_pieces(self, part: TextSegment) -> list[str]:
        """Returns the pieces of the text of a part. An unknown piece is shown as its characters."""
        return part.pieces or self.tokenizer.source_encoding(part.text)

    def links(
        self, part: TextSegment, tokens: Sequence[int], text: str, weights: Sequence[Sequence[float]]
    ) -> list[Link]:
        """Returns the links between the words of a part and the words of its translation."""
        rows = [row[part.leading : -1] for row in weights]
        source_spans = piece_spans(self.source_pieces(part), part.text)[: len(rows[0]) if rows else 0]
        return word_links(part.text, text, source_spans, piece_spans(self.tokenizer.target_pieces(tokens), text), rows)

    def with_source_pieces(self, part: TextSegment, tokens: Sequence[int], best: Sequence[int]) -> str:
        """Returns the text with each <unk> replaced by the source piece with the highest attention weight."""
        surfaces = [""] * part.leading + [piece.replace(SPACE_SYMBOL, "") for piece in self.source_pieces(part)]
        words: list[str] = []
        known: list[int] = []
        for token, source in zip(tokens, best, strict=True):
            if token != UNK:
                known.append(token)
                continue
            words += [self.tokenizer.decode_target(known), surfaces[min(source, len(surfaces) - 1)]]
            known = []
        words.append(self.tokenizer.decode_target(known))
        return " ".join(word for word in words if word)


def without_first(hypothesis: Hypothesis, count: int) -> Hypothesis:
    """Returns a hypothesis without its first `count` tokens, such as language tokens."""
    if not count:
        return hypothesis
    attention, each = hypothesis.attention, hypothesis.token_log_probabilities
    return replace(
        hypothesis,
        tokens=hypothesis.tokens[count:],
        attention=None if attention is None else attention[count:],
        token_log_probabilities=None if each is None else each[count:],
    )
