"""Lines on their way through a translator: requested, cut into sentences a model can read, and put together again."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from nmtkit.data.tokenizer import EOS, UNK, Tokenizer
from nmtkit.generation.beam_search import Hypothesis
from nmtkit.generation.constraints import NO_CONSTRAINTS, Constraints
from nmtkit.generation.long_lines import pieces_of
from nmtkit.generation.mbr import utilities
from nmtkit.generation.options import SearchOptions

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class Request:
    """A line to translate; `ids` (eos last) where it is encoded already, and what is required for, as text."""

    source: str
    ids: list[int] | None = None
    prefix: str = ""
    required: Sequence[str] = ()
    avoided: Sequence[str] = ()
    reference: str | None = None  # for SearchOptions.score_reference


@dataclass(frozen=True)
class Sentence:
    """What a batch is made of."""

    ids: list[int]  # eos last
    constraints: Constraints = NO_CONSTRAINTS
    seed: int = 0
    reference: list[int] | None = None  # without eos


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
    # hard: pairs of a source and a target piece; soft: for each target piece the weights of all source pieces and eos
    alignment: list[list[int]] | list[list[float]] | None = None
    utility: float | None = None  # with SearchOptions.mbr, which sorts by it: 0 to 100


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
    """A request on its way: the parts it was cut into, and what was found for each. An empty line has no part."""

    id: int
    source: str
    parts: list[Sentence]
    found: list[list[Hypothesis] | None] = field(default_factory=list)

    def complete(self) -> bool:
        return None not in self.found


@dataclass(frozen=True)
class Desk:
    """Makes lines of requests and translations of lines. `limit` is the most pieces, without eos, of a part."""

    tokenizer: Tokenizer
    options: SearchOptions
    limit: int
    long_lines: Literal["split", "cut"]

    def lines(self, requests: Sequence[Request], first: int) -> list[Line]:
        """Raises ValueError for constraints that cannot be granted, naming the line."""
        encoded = self.tokenizer.encode_source([one.source for one in requests if one.ids is None])
        fresh = iter(encoded.split())
        result = []
        for id, request in enumerate(requests, first):
            ids = next(fresh).tolist() if request.ids is None else request.ids
            try:
                parts = self.parts(request, ids[:-1], id)
            except ValueError as error:
                raise ValueError(f"line {id + 1}: {error}") from error
            result.append(Line(id, request.source, parts, [None] * len(parts)))
        return result

    def parts(self, request: Request, ids: list[int], id: int) -> list[Sentence]:
        if self.options.score_reference:
            if request.reference is None:
                raise ValueError("--score-reference needs a reference for it")
            return [Sentence([*ids, EOS], reference=self.target(request.reference))]
        if not ids:
            return []
        constraints = Constraints(
            prefix=tuple(self.target(request.prefix)),
            required=tuple(tuple(self.target(phrase)) for phrase in request.required),
            avoided=tuple(tuple(self.target(phrase)) for phrase in request.avoided),
        )
        constraints.check(self.options)
        cut = self.cut(ids, id)
        later = replace(
            constraints, prefix=(), required=()
        )  # of a line in parts, the first begins it and holds the phrases
        return [
            Sentence([*part, EOS], later if index else constraints, seed=id + (index << 40))
            for index, part in enumerate(cut)
        ]

    def target(self, text: str) -> list[int]:
        return [] if not text else self.tokenizer.encode_target([text]).ids[:-1].tolist()

    def cut(self, ids: list[int], id: int) -> list[list[int]]:
        if len(ids) <= self.limit:
            return [ids]
        ends = pieces_of(self.tokenizer.source_pieces(ids), self.limit)
        if self.long_lines == "cut":
            logger.warning("line %d has %d pieces; all after the first %d are cut off", id + 1, len(ids), ends[0])
            ends = ends[:1]
        else:
            logger.warning("line %d has %d pieces; it is translated in %d parts", id + 1, len(ids), len(ends))
        return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    # --- hypotheses to text -----------------------------------------------------------------------------------------

    def translation(self, line: Line) -> Translation:
        if not line.parts:
            return Translation(line.id, line.source, [Output("", [], 0.0, 0.0)])
        found = [hypotheses for hypotheses in line.found if hypotheses is not None]
        number = max(map(len, found))
        ranked = [[part[min(rank, len(part) - 1)] for part in found] for rank in range(number)]
        outputs = [self.output(line, parts) for parts in ranked]
        if self.options.mbr is not None:
            values = utilities([one.text for one in outputs], self.options.mbr)
            outputs = [replace(one, utility=value) for one, value in zip(outputs, values, strict=True)]
            outputs.sort(key=lambda one: -(one.utility or 0.0))
        return Translation(line.id, line.source, outputs)

    def output(self, line: Line, found: list[Hypothesis]) -> Output:
        tokens = [token for one in found for token in one.tokens]
        pieces = self.tokenizer.target_pieces(tokens)
        weights = combined([one.alignment for one in found], [len(part.ids) for part in line.parts])
        if self.options.replace_unknown and UNK in tokens:
            assert weights is not None
            text = self.with_source_pieces(line, tokens, weights)
        else:
            text = " ".join(self.tokenizer.decode_target(one.tokens) for one in found)
        return Output(
            text=text,
            pieces=pieces,
            score=sum(one.score for one in found),
            log_probability=sum(one.log_probability for one in found),
            alignment=self.alignment(line, weights),
        )

    def alignment(self, line: Line, weights: list[list[float]] | None) -> list[list[int]] | list[list[float]] | None:
        if weights is None or self.options.alignment is None:
            return None
        if self.options.alignment == "soft":
            return [[round(weight, 5) for weight in row] for row in weights]
        return [[source_of(row, line.parts), target] for target, row in enumerate(weights)]

    def with_source_pieces(self, line: Line, tokens: list[int], weights: list[list[float]]) -> str:
        """The text with each <unk> replaced by what stands in the source where it attends most."""
        surfaces = self.tokenizer.source_surfaces(line.source)
        words: list[str] = []
        known: list[int] = []
        for token, row in zip(tokens, weights, strict=True):
            if token != UNK:
                known.append(token)
                continue
            place = min(source_of(row, line.parts), len(surfaces) - 1)
            words += [self.tokenizer.decode_target(known), surfaces[place]]
            known = []
        words.append(self.tokenizer.decode_target(known))
        return " ".join(word for word in words if word)


def combined(parts: list[list[list[float]] | None], widths: list[int]) -> list[list[float]] | None:
    """The alignments of a line's parts as one; the source of all is its parts end to end, eos of each included."""
    rows: list[list[float]] = []
    for index, part in enumerate(parts):
        if part is None:
            return None
        before, after = sum(widths[:index]), sum(widths[index + 1 :])
        rows += [[0.0] * before + row + [0.0] * after for row in part]
    return rows


def source_of(row: list[float], parts: list[Sentence]) -> int:
    """The source piece that weighs most, eos aside, counted over the parts without their eos."""
    ends = {sum(len(part.ids) for part in parts[: index + 1]) - 1 for index in range(len(parts))}
    best = max((place for place in range(len(row)) if place not in ends), key=row.__getitem__, default=0)
    return best - sum(end < best for end in ends)
