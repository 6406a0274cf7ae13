"""Lines on their way through a translator: encoded, cut into sentences that a model can read, and joined again."""

import logging
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from nmtkit.data.tokenizer import EOS, SPACE_SYMBOL, UNK, Tokenizer
from nmtkit.search.constraints import Constraints, RequiredPhrase
from nmtkit.search.options import SearchOptions
from nmtkit.search.segments import Hypothesis, Segment
from nmtkit.text.alignment import piece_spans, word_links
from nmtkit.text.glossary import TermResult
from nmtkit.text.quality import Quality

SENTENCE_ENDS = (".", "!", "?", ";", "。", "！", "？", "؟", "।", "…")

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class Request:
    """A line to translate, with its constraints as text. `ids` (eos last) are given if the line is encoded already."""

    source: str
    ids: list[int] | None = None
    prefix: str = ""
    required: Sequence[str] = ()
    avoided: Sequence[str] = ()
    reference: str | None = None  # for SearchOptions.score_reference
    # of a glossary: phrases that are required too, and the character of the source at which the term of each begins
    terms: Sequence[tuple[int, RequiredPhrase]] = ()


@dataclass(frozen=True)
class Output:
    """One translation of a line.

    `score` is the length-penalised log probability, by which hypotheses are sorted (but see `utility`); both are summed
    over the parts of a line that was split. `pieces` are the target vocabulary's, without eos.
    """

    text: str
    pieces: list[str]
    score: float
    log_probability: float  # natural logarithm, eos included
    # hard: pairs of a source and a target piece; soft: for each target piece the weights of all source pieces and eos;
    # words: first and last + 1 character of a source word, then those of the target word that attends to it most. The
    # text is in Unicode's normal form NFC.
    alignment: list[list[int]] | list[list[float]] | None = None
    utility: float | None = None  # with SearchOptions.mbr, which sorts by it: 0 to 100
    # with SearchOptions.quality: natural logarithms, of each piece and of eos (of each part), and what they add up to
    token_log_probabilities: list[float] | None = None
    quality: Quality | None = None
    terms: list[TermResult] | None = None  # with a glossary: what became of each of its terms in the source, in order


@dataclass(frozen=True)
class Translation:
    """A line and its translations, best first; `id` counts lines from 0."""

    id: int
    source: str
    hypotheses: list[Output]

    @property
    def text(self) -> str:
        return self.hypotheses[0].text


@dataclass(eq=False)
class Line:
    """A request on its way: the parts it was cut into, and the hypotheses of each. An empty line has no part."""

    id: int
    source: str
    parts: list[Segment]
    tags: int = 0  # pieces at the beginning of the line that begin every part
    hypotheses: list[list[Hypothesis] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.hypotheses = [None] * len(self.parts)

    @property
    def complete(self) -> bool:
        return None not in self.hypotheses


@dataclass(frozen=True)
class Preprocessor:
    """Turns requests into lines. `max_source_len` is the most pieces, without eos, of a part of a line."""

    tokenizer: Tokenizer
    options: SearchOptions
    max_source_len: int
    long_lines: Literal["split", "cut"]

    @cached_property
    def language_ids(self) -> tuple[list[int], list[int]]:
        return self.tokenizer.language_ids(self.options.source_lang, self.options.target_lang)

    def lines(self, requests: Sequence[Request], first_id: int) -> list[Line]:
        """Raises ValueError for constraints that cannot be met, naming the line."""
        encoded = self.tokenizer.encode_source([request.source for request in requests if request.ids is None])
        new = iter(encoded.split())
        before, _ = self.language_ids
        lines = []
        for id, request in enumerate(requests, first_id):
            ids = next(new).tolist() if request.ids is None else request.ids
            if before and len(ids) > 1:
                ids = [*before, *(ids[1:] if ids[0] in self.tokenizer.languages.values() else ids)]
            try:
                lines.append(Line(id, request.source, self.parts(request, ids[:-1], id), self.tags(ids)))
            except ValueError as error:
                raise ValueError(f"line {id + 1}: {error}") from error
        return lines

    def parts(self, request: Request, ids: list[int], id: int) -> list[Segment]:
        _, begin = self.language_ids
        if self.options.score_reference:
            if request.reference is None:
                raise ValueError("--score-reference needs a reference for it")
            constraints = Constraints(given=len(begin))
            return [Segment([*ids, EOS], constraints, reference=[*begin, *self.target_ids(request.reference)])]
        if not ids:
            return []
        constraints = Constraints(
            prefix=(*begin, *self.target_ids(request.prefix)),
            given=len(begin),
            required=tuple(RequiredPhrase((tuple(self.target_ids(phrase)),)) for phrase in request.required),
            avoided=tuple(tuple(self.target_ids(phrase)) for phrase in request.avoided),
        )
        # of a line in parts, the first part begins it and holds the phrases, and each the terms that stand in it
        later = replace(constraints, prefix=tuple(begin), required=())
        parts = self.cut(ids, id)
        terms = self.terms_of_parts(request, parts)
        sentences = []
        for index, (part, phrases) in enumerate(zip(parts, terms, strict=True)):
            of_part = later if index else constraints
            if phrases:
                of_part = replace(of_part, required=(*of_part.required, *phrases))
            of_part.check(self.options)
            sentences.append(Segment([*part, EOS], of_part, seed=id + (index << 40)))
        return sentences

    def terms_of_parts(self, request: Request, parts: Sequence[list[int]]) -> list[list[RequiredPhrase]]:
        """Returns the phrases of the glossary's terms in each part of a line; a term that is cut off has none."""
        if len(parts) == 1 or not request.terms:
            return [[phrase for _, phrase in request.terms], *([] for _ in parts[1:])]
        source = unicodedata.normalize("NFC", request.source)
        pieces = [end for _, end in piece_spans(self.tokenizer.source_encoding(source), source)]
        first, tags = len(self.language_ids[0]), self.tags([*parts[0], EOS])
        ends = list(accumulate(len(part) - (tags if index else first) for index, part in enumerate(parts)))
        phrases: list[list[RequiredPhrase]] = [[] for _ in parts]
        for start, phrase in request.terms:
            part = bisect_right(ends, sum(end <= start for end in pieces))
            if part < len(parts):
                phrases[part].append(phrase)
        return phrases

    def tags(self, ids: list[int]) -> int:
        begin = self.tokenizer.source_tags.union(self.tokenizer.languages.values())
        return next(count for count, id in enumerate(ids) if id not in begin)

    def target_ids(self, text: str) -> list[int]:
        return [] if not text else self.tokenizer.encode_target([text]).ids[:-1].tolist()

    def cut(self, ids: list[int], id: int) -> list[list[int]]:
        """Returns the parts of a line that a model can read; each begins with the line's tags."""
        if len(ids) <= self.max_source_len:
            return [ids]
        pieces, count = len(ids), self.tags([*ids, EOS])
        tags, ids = ids[:count], ids[count:]
        ends = part_ends(self.tokenizer.source_pieces(ids), max(1, self.max_source_len - count))
        if self.long_lines == "cut":
            logger.warning("line %d has %d pieces; all after the first %d are cut off", id + 1, pieces, ends[0] + count)
            ends = ends[:1]
        else:
            logger.warning("line %d has %d pieces; it is translated in %d parts", id + 1, pieces, len(ends))
        return [tags + ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def part_ends(pieces: list[str], limit: int) -> list[int]:
    """Returns the end of each part of a line of `pieces`, that of the last included, so that no part exceeds `limit`.

    It cuts after the last sentence end within the limit, else before the last word, else anywhere.
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


@dataclass(frozen=True)
class Postprocessor:
    """Turns complete lines into translations."""

    tokenizer: Tokenizer
    options: SearchOptions

    def translation(self, line: Line) -> Translation:
        if not line.parts:
            nothing: list[float] | None = [] if self.options.quality else None
            return Translation(line.id, line.source, [Output("", [], 0.0, 0.0, token_log_probabilities=nothing)])
        parts = [hypotheses for hypotheses in line.hypotheses if hypotheses is not None]
        ranks = range(max(map(len, parts)))
        outputs = [self.output(line, [part[min(rank, len(part) - 1)] for part in parts]) for rank in ranks]
        if self.options.mbr is not None:
            values = utilities([output.text for output in outputs], self.options.mbr)
            outputs = [replace(output, utility=value) for output, value in zip(outputs, values, strict=True)]
            outputs.sort(key=lambda output: -(output.utility or 0.0))
        return Translation(line.id, line.source, outputs)

    def output(self, line: Line, hypotheses: list[Hypothesis]) -> Output:
        """Returns the translation that consists of one hypothesis for each part of the line."""
        hypotheses = [
            without_given(hypothesis, part.constraints.given)
            for hypothesis, part in zip(hypotheses, line.parts, strict=True)
        ]
        tokens = [token for hypothesis in hypotheses for token in hypothesis.tokens]
        weights = joined_alignment([hypothesis.attention for hypothesis in hypotheses], line)
        if self.options.replace_unknown and UNK in tokens:
            assert weights is not None
            text = self.with_source_pieces(line, tokens, weights)
        else:
            text = " ".join(self.tokenizer.decode_target(hypothesis.tokens) for hypothesis in hypotheses)
        alignment: list[list[int]] | list[list[float]] | None = None
        if weights is not None and self.options.alignment == "soft":
            alignment = [[round(weight, 5) for weight in row] for row in weights]
        elif weights is not None and self.options.alignment == "hard":
            alignment = [[aligned_source(row, line), target] for target, row in enumerate(weights)]
        elif weights is not None and self.options.alignment == "words":
            alignment = self.word_alignment(line, tokens, text, weights)
        return Output(
            text=text,
            pieces=self.tokenizer.target_pieces(tokens),
            score=sum(hypothesis.score for hypothesis in hypotheses),
            log_probability=sum(hypothesis.log_probability for hypothesis in hypotheses),
            alignment=alignment,
            token_log_probabilities=[
                value for hypothesis in hypotheses for value in hypothesis.token_log_probabilities or []
            ]
            if self.options.quality
            else None,
        )

    def word_alignment(self, line: Line, tokens: list[int], text: str, weights: list[list[float]]) -> list[list[int]]:
        source = unicodedata.normalize("NFC", line.source)
        others = {end - 1 for end in accumulate(part_widths(line))} | set(range(self.language_tokens(line)))
        rows = [[weight for index, weight in enumerate(row) if index not in others] for row in weights]
        source_pieces = piece_spans(self.tokenizer.source_encoding(source), source)[: len(rows[0]) if rows else 0]
        target_pieces = piece_spans(self.tokenizer.target_pieces(tokens), text)
        links = word_links(source, text, source_pieces, target_pieces, rows)
        return [[link.source_start, link.source_end, link.target_start, link.target_end] for link in links]

    def language_tokens(self, line: Line) -> int:
        """Returns how many tokens without text begin the source: one, of a language, in a model of several."""
        return int(line.parts[0].ids[0] in self.tokenizer.languages.values())

    def with_source_pieces(self, line: Line, tokens: list[int], weights: list[list[float]]) -> str:
        """Returns the text with each <unk> replaced by the source piece that it attends to most."""
        surfaces = [""] * self.language_tokens(line) + self.tokenizer.source_surfaces(line.source)
        words: list[str] = []
        known: list[int] = []
        for token, row in zip(tokens, weights, strict=True):
            if token != UNK:
                known.append(token)
                continue
            source = min(aligned_source(row, line), len(surfaces) - 1)
            words += [self.tokenizer.decode_target(known), surfaces[source]]
            known = []
        words.append(self.tokenizer.decode_target(known))
        return " ".join(word for word in words if word)


def without_given(hypothesis: Hypothesis, given: int) -> Hypothesis:
    """Returns the hypothesis without its first tokens, those that were given: they are no part of the text."""
    if not given:
        return hypothesis
    alignment, each = hypothesis.attention, hypothesis.token_log_probabilities
    return replace(
        hypothesis,
        tokens=hypothesis.tokens[given:],
        attention=None if alignment is None else alignment[given:],
        token_log_probabilities=None if each is None else each[given:],
    )


def joined_alignment(alignments: list[list[list[float]] | None], line: Line) -> list[list[float]] | None:
    """Returns the alignments of a line's parts as one; its source is the parts end to end, eos of each included.

    The tags of a part are those of the first, and so are their weights.
    """
    widths = part_widths(line)
    rows: list[list[float]] = []
    for index, alignment in enumerate(alignments):
        if alignment is None:
            return None
        before, after = sum(widths[:index]), sum(widths[index + 1 :])
        tags = line.tags if index else 0
        rows += [row[:tags] + [0.0] * (before - tags) + row[tags:] + [0.0] * after for row in alignment]
    return rows


def part_widths(line: Line) -> list[int]:
    """Returns the tokens of each part, eos included, without the tags that a later part repeats."""
    return [len(part.ids) - (line.tags if index else 0) for index, part in enumerate(line.parts)]


def aligned_source(weights: list[float], line: Line) -> int:
    """Returns the source piece that weighs most, eos aside, counted over the whole line."""
    ends = {end - 1 for end in accumulate(part_widths(line))}
    best = max((index for index in range(len(weights)) if index not in ends), key=weights.__getitem__, default=0)
    return best - sum(end < best for end in ends)


def utilities(texts: Sequence[str], metric: Literal["chrf", "bleu"]) -> list[float]:
    """Returns the mean sentence score, 0 to 100, of each text against all others; 0 if there is no other.

    The text of largest utility is the translation of minimum Bayes risk (Eikema and Aziz 2020, "Is MAP Decoding All You
    Need?"). A text that occurs n times counts n times as a reference.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    scorer = CHRF() if metric == "chrf" else BLEU(effective_order=True)
    counts = Counter(texts)
    total = {
        text: sum(
            number * scorer.sentence_score(text, [other]).score for other, number in counts.items() if other != text
        )
        + (counts[text] - 1) * 100.0
        for text in counts
    }
    return [total[text] / max(1, len(texts) - 1) for text in texts]
