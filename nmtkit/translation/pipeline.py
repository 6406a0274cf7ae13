"""The text pipeline: a list of steps that turn requests into model input, and hypotheses into translations."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from functools import cache, lru_cache
from itertools import takewhile
from typing import Literal

from nmtkit.config import changed_flags, check_flags
from nmtkit.data.tokenizers.piece_spans import copied_piece, decoded_pieces, source_spans
from nmtkit.data.tokenizers.tokenizer import EOS, SPACE_SYMBOL, SPECIALS, UNK, Tokenizer
from nmtkit.jobs.threads import without_messages
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.interface import TooLongError
from nmtkit.scoring.segments import SegmentMetric
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.text import glossary
from nmtkit.text.alignment import Link, Span, word_links
from nmtkit.text.glossary import Glossary, forms, without
from nmtkit.text.normalization import check_characters
from nmtkit.translation.languages import in_language
from nmtkit.translation.options import GLOSSARY_RULE, TextOptions
from nmtkit.translation.rewriting import Casing, GlossaryTerms, Markup, Protection, QualityEstimation, WhiteSpace
from nmtkit.translation.search.constraints import NO_CONSTRAINTS, AvoidedText, Constraints, RequiredText, piece_texts
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis, Request, Segment, Translation
from nmtkit.translation.steps import (
    InvisibleCharacters,
    LengthLimit,
    Normalization,
    SegmentNode,
    Sentences,
    Spaces,
    Step,
    Tags,
    TextSegment,
)

logger = logging.getLogger("nmtkit")


class Pipeline:
    """Prepares lines for a search with the options `search`, and turns the hypotheses into translations.

    >>> pipeline = translator.pipeline(SearchOptions(), TextOptions(protect_spans=True))
    >>> for translation in translator.run(windows, pipeline): ...

    `source_tag` is a symbol of the vocabulary that begins every line. With `links` or the option alignment="words",
    translations have word alignments, except with `text.markup`. `models` are all models that read the segments or the
    outputs. The positions of these models limit the lengths of segments and outputs. `device` is the device of the
    metric of --mbr. `terms` is the glossary of `text`, if it has been read already.

    Raises ValueError for a language or tag that the model does not have, for a --min-len above the positions of the
    models, for a pattern that is not a regular expression, for a glossary line that is not a term, and for a search
    that cannot require glossary terms. Raises OSError for a glossary that cannot be read, ImportError if a package is
    missing, and the errors of loading the metric of --mbr.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        search: SearchOptions,
        text: TextOptions | None = None,
        source_tag: str | None = None,
        links: bool = False,
        max_source_len: int = 1024,
        long_lines: Literal["split", "cut"] = "split",
        models: Sequence[Architecture] = (),
        device: str = "cpu",
        terms: Glossary | None = None,
    ) -> None:
        text = text or TextOptions()
        self.metric = None if search.mbr is None else segment_metric(search.mbr, device)
        self.tokenizer, self.text = tokenizer, text
        self.links = (links or search.alignment == "words") and text.markup is None
        # the steps need links between words to put markup and protected text back
        self.search = replace(search, alignment="words") if links or text.rewriting else search
        if text.glossary is not None:
            terms = terms or glossary.load(text.glossary)
            check_flags((GLOSSARY_RULE,), changed_flags(search), {GLOSSARY_RULE.flag})
        self.model_input = model_input = ModelInput(tokenizer, self.search, source_tag, models)
        steps: list[Step | None] = [
            Normalization(),
            Tags(tokenizer) if text.active else None,
            Markup() if text.markup else None,
            WhiteSpace(tokenizer) if text.rewriting else None,
            QualityEstimation() if search.quality else None,
            Sentences(text.split_sentences) if text.split_sentences is not None else None,
            InvisibleCharacters(tokenizer),
            Protection(tokenizer, text.protect, text.protect_spans, text.truecase_caps)
            if text.protect or text.protect_spans or text.truecase_caps
            else None,
            GlossaryTerms(terms) if terms is not None else None,
            Casing() if text.truecase_caps else None,
            Spaces(tokenizer),
        ]
        self.text_steps = [step for step in steps if step is not None]  # steps before the tokenizer; see `id_steps`
        limit = LengthLimit(tokenizer, max_source_len, len(model_input.first), long_lines, self.search.alignment)
        self.id_steps: list[Step] = [*([] if search.score_reference else [limit]), model_input]

    # --- before the model ---------------------------------------------------------------------------------------------

    def segments(self, requests: Sequence[Request], first_id: int = 0) -> list[SegmentNode]:
        """Returns the tree of segments of each request. Its leaves are the input of the model.

        Raises ValueError, with the number of the line, for a request that cannot be translated, such as constraints
        that cannot be met or a missing reference.
        """
        lines = []
        encoded: list[SegmentNode] = []  # nodes whose segments the tokenizer encodes
        for id, request in enumerate(requests, first_id):
            with ErrorsOfLine(id):
                lines.append(SegmentNode(self.first_segment(id, request)))
            encoded += self.applied(self.text_steps, lines[-1:])
        encode(encoded, self.tokenizer)
        for node in encoded:
            with ErrorsOfLine(node.segment.id):
                self.applied(self.id_steps, [node])
        if self.search.sampling:
            for line in lines:
                for index, leaf in enumerate(line.leaves()):
                    leaf.model_input = replace(leaf.input, seed=line.segment.id + (index << 40))
        return lines

    def check(self, requests: Sequence[Request], first_id: int = 0) -> None:
        """Raises the errors of `segments` about constraints and references, except errors about glossary terms."""
        if self.search.score_reference:
            self.segments(requests, first_id)
            return
        for id, request in enumerate(requests, first_id):
            if request.source.strip():  # a line without text becomes an empty line
                with ErrorsOfLine(id):
                    self.model_input.before(SegmentNode(replace(self.first_segment(id, request), ids=[])))

    def check_all(self, windows: Iterable[Sequence[Request]]) -> None:
        """Checks all lines with `check` before the first batch is translated.

        Drops the warnings about lines, because `segments` logs the same warnings later.
        """
        checked = 0
        with without_messages(logger):
            for window in windows:
                self.check(window, checked)
                checked += len(window)

    def first_segment(self, id: int, request: Request) -> TextSegment:
        """Returns the segment of a whole line, with its constraints. Raises ValueError for impossible constraints."""
        check_characters(request.source, "the source")
        check_characters(request.prefix or "", "the prefix")
        check_characters(request.reference or "", "the reference")
        for phrase in (*request.required, *request.avoided):
            check_characters(phrase, "a required or avoided phrase")
        if self.text.split_sentences is not None and (request.prefix or request.required or request.avoided):
            raise ValueError(
                "split_sentences cannot be combined with a prefix, or with required or avoided phrases: constraints "
                "apply to whole lines, but each sentence is translated alone"
            )
        ids, constraints, reference = None, NO_CONSTRAINTS, None
        if self.search.score_reference:
            if request.reference is None:
                raise ValueError("with --score-reference, every line needs a reference")
            reference = self.tokenizer.encode_target([request.reference]).ids[:-1].tolist()
        elif request.prefix or request.required or request.avoided:
            constraints = constraints_of(request, self.tokenizer)
        if request.ids is not None and not self.text.active:
            languages = self.tokenizer.languages.values()
            ids = request.ids[1:-1] if request.ids[0] in languages else request.ids[:-1]
        return TextSegment(id, request.source, ids, constraints, reference)

    def applied(self, steps: Sequence[Step], nodes: list[SegmentNode]) -> list[SegmentNode]:
        """Calls the method `before` of each step on the nodes, in the order of the steps. Returns the resulting nodes.

        A node is its own result if no step changes its segment.
        """
        for step in steps:
            following = list[SegmentNode]()
            for node in nodes:
                parts = step.before(node)
                if parts is None:
                    following.append(node)
                else:
                    node.step, node.parts = step, [SegmentNode(part) for part in parts]
                    following += node.parts
            nodes = following
        return nodes

    # --- after the model ----------------------------------------------------------------------------------------------

    def translation(self, line: SegmentNode) -> Translation:
        """Returns the translation of a line. The search must have finished all leaves of the line."""
        hypotheses = self.hypotheses(line)
        for avoided in line.segment.constraints.avoided:  # a step may have copied such a text from the source
            if any(avoided.is_in_line(each.text) for each in hypotheses):
                logger.warning(
                    "line %d: the translation contains %r, although --avoid forbids this text: the text was copied "
                    "from the source", line.segment.id + 1, avoided.text.decode(),
                )  # fmt: skip
        if self.links:
            hypotheses = [
                replace(each, alignment=[[*astuple(link)] for link in each.links], links=[]) for each in hypotheses
            ]
        source, untagged = line.segment.text, self.tokenizer.without_tags(line.segment.text)
        return Translation(line.segment.id, source, hypotheses, untagged=None if untagged == source else untagged)

    @property
    def empty(self) -> Hypothesis:
        """The translation of a text without words, with the same fields as other translations.

        All candidates would be this translation, so its utility is 100.
        """
        return Hypothesis(
            [], 0.0, 0.0, token_log_probabilities=[] if self.search.quality else None,
            alignment=[] if self.search.alignment in ("hard", "soft") else None,
            utility=None if self.search.mbr is None else 100.0,
        )  # fmt: skip

    def hypotheses(self, node: SegmentNode, part_of_ids: bool = False) -> list[Hypothesis]:
        """Returns the translations of the segment of `node`, best first.

        Translation i joins hypothesis i of each part, or the last hypothesis of a part with fewer hypotheses. With
        `part_of_ids`, the segment is a part of an encoded segment, and the caller computes the utilities of the encoded
        segment.
        """
        step, of_ids = node.step, node.step in self.id_steps
        assert step is not None
        if node.model_input is not None:
            assert node.hypotheses is not None
            columns = [node.hypotheses]
        elif not node.parts:  # the segment has nothing to translate
            return [self.empty]
        else:
            columns = [self.hypotheses(part, of_ids) for part in node.parts]
        hypotheses = [
            step.after(node, [column[min(rank, len(column) - 1)] for column in columns])
            for rank in range(max(map(len, columns)))
        ]
        if self.metric is not None and of_ids and not part_of_ids:
            return by_utility(hypotheses, self.metric, self.tokenizer.without_tags(node.segment.text))
        return hypotheses


class ErrorsOfLine:
    """A context manager that adds the line number to the message of a ValueError: "line 1: …" for `id` 0.

    Each line enters two contexts of this class. A generator with `contextmanager` would take three times as long.
    """

    def __init__(self, id: int) -> None:
        self.id = id

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raised = TooLongError if isinstance(error, TooLongError) else ValueError
            raise raised(f"line {self.id + 1}: {error}") from error


def by_utility(hypotheses: Sequence[Hypothesis], metric: SegmentMetric, source: str) -> list[Hypothesis]:
    """Returns the hypotheses of a source with their utilities, best first."""
    values = metric.utilities([hypothesis.text for hypothesis in hypotheses], source)
    rated = [replace(hypothesis, utility=value) for hypothesis, value in zip(hypotheses, values, strict=True)]
    return sorted(rated, key=lambda hypothesis: -(hypothesis.utility or 0.0))


# --- text to ids, and ids to text ------------------------------------------------------------------------------------


def encode(nodes: Sequence[SegmentNode], tokenizer: Tokenizer) -> None:
    """Sets the ids of all segments with one call of the tokenizer. Segments from a dataset keep their ids."""
    new = [node for node in nodes if node.segment.ids is None]
    encoded = tokenizer.encode_source([node.segment.text for node in new])
    for node, ids in zip(new, encoded.lists(), strict=True):
        node.segment.ids = ids[:-1]


def constraints_of(request: Request, tokenizer: Tokenizer) -> Constraints:
    """Returns the constraints of a request, with texts encoded as ids."""

    def target_ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode_target([text]).ids[:-1].tolist())

    return Constraints(
        prefix=target_ids(request.prefix) if request.prefix else (),
        after_prefix=begins_with_space(tokenizer) if request.prefix[-1:].isspace() else (),
        required=tuple(RequiredText.of([phrase], tokenizer) for phrase in request.required),
        avoided=tuple(AvoidedText.of(phrase, tokenizer) for phrase in request.avoided),
    )


@lru_cache(maxsize=8)
def begins_with_space(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the target pieces that begin with a space. Only these pieces can follow a prefix that ends in a space."""
    texts = piece_texts(tokenizer)
    return tuple(id for id, text in enumerate(texts) if text.startswith(" ") and id not in SPECIALS)


class ModelInput(Step):
    """Makes the input of the model: adds language tokens, a tag and constraints to the ids. Decodes the hypotheses.

    `models` are all models that read the source or the output. Raises ValueError for languages and tags that the model
    does not have, and for an `options.min_len` for which a model has too few positions.
    """

    def __init__(
        self, tokenizer: Tokenizer, options: SearchOptions, source_tag: str | None, models: Sequence[Architecture]
    ) -> None:
        self.tokenizer, self.options, self.models = tokenizer, options, models
        options = in_language(options, tokenizer, models)
        languages, self.target_language = tokenizer.language_ids(options.source_lang, options.target_lang)
        if source_tag is not None:
            tokenizer.check_tag(source_tag)
            languages = [*languages, *tokenizer.encode_source([source_tag]).ids[:-1].tolist()]
        self.first = languages  # ids at the beginning of every source
        self.check_output(f"an output of --min-len {options.min_len}", len(self.target_language) + options.min_len)
        self.tags, self.required_term = tokenizer.source_tags, required_terms(tokenizer)

    def before(self, node: SegmentNode) -> list[TextSegment]:
        segment, ids = node.segment, node.segment.ids or []
        strings = segment.protected.strings if segment.protected is not None else ()
        constraints = segment.constraints
        tags = takewhile(self.tags.__contains__, ids)  # tags that are still at the start of the ids
        first = [*self.first, *segment.tags] if ids else []
        source_tokens = len(first) + len(list(tags))
        # `without` leaves out targets that contain a protected text, because the translation would repeat this text
        terms = [self.required_term(without(each.term.targets, strings)) for each in segment.terms]
        if self.target_language or terms or source_tokens:
            constraints = replace(
                constraints,
                prefix=(*self.target_language, *constraints.prefix),
                language_tokens=len(self.target_language),
                source_tokens=source_tokens,
                required=(*constraints.required, *(term for term in terms if term.alternatives)),
            )
        if segment.capitals and (constraints.required or constraints.avoided):
            constraints = constraints.in_capitals(self.tokenizer)
        reference = None if segment.reference is None else [*self.target_language, *segment.reference]
        self.check(constraints, reference)
        node.model_input = Segment([*first, *ids, EOS], constraints, segment.id, reference)
        for model in self.models:
            model.check_length("the source", len(node.model_input.ids), "source")
        return []

    def check(self, constraints: Constraints, reference: Sequence[int] | None) -> None:
        """Raises ValueError for constraints that cannot be met, and for a reference that is too long for a model."""
        if constraints is not NO_CONSTRAINTS:
            constraints.check(self.options)
            self.check_output("a translation with the prefix and all required phrases", constraints.needed_tokens)
        if reference is not None:
            self.check_output("the reference", len(reference))

    def check_output(self, title: str, tokens: int) -> None:
        """Raises ValueError if one of the models has too few target positions for `tokens` tokens and eos.

        `title` names the output in the message, such as "the reference".
        """
        for model in self.models:
            model.check_length(title, tokens + 1, "target")

    def after(self, node: SegmentNode, hypotheses: Sequence[Hypothesis]) -> Hypothesis:
        """Returns a hypothesis with its text, pieces, and alignment or links."""
        segment = node.segment
        hypothesis = hypotheses[0]
        if self.target_language:
            hypothesis = hypothesis.without_first(len(self.target_language))
        tokens, weights = hypothesis.tokens, hypothesis.attention
        pieces = self.tokenizer.target_pieces(tokens)
        alignment: list[list[int]] | list[list[float]] | None = None
        links: list[Link] = []
        if weights is None:
            text = self.tokenizer.decode_target(tokens)
        else:
            best = [max(range(len(row) - 1), key=row.__getitem__, default=0) for row in weights]  # leaves out eos
            copied = self.with_copies(segment, tokens, best) if self.options.replace_unknown else pieces
            text, spans = decoded_pieces(self.tokenizer.target, copied)
            if self.options.alignment == "soft":
                alignment = [[round(weight, 5) for weight in row] for row in weights]
            elif self.options.alignment == "hard":
                has_pieces = len(segment.ids or ()) + len(self.first) > 0
                alignment = [[source, target] for target, source in enumerate(best) if has_pieces]
            elif self.options.alignment == "words":
                links = self.links(segment, text, spans, weights)
        # a new object instead of `replace`, which would take twice as long
        return Hypothesis(
            tokens,
            hypothesis.score,
            hypothesis.log_probability,
            token_log_probabilities=hypothesis.token_log_probabilities if self.options.quality else None,
            text=text,
            pieces=pieces,
            links=links,
            alignment=alignment,
            no_repeat_ngram=hypothesis.no_repeat_ngram,
        )

    def source_spans(self, segment: TextSegment) -> Sequence[Span]:
        """Returns the span of each piece of a segment in its text."""
        return segment.spans or source_spans(self.tokenizer.source, segment.ids or (), segment.text)

    def leading(self, segment: TextSegment) -> int:
        """Returns the number of tokens that the model reads before the pieces of `source_spans`."""
        return len(self.first) + len(segment.tags) + segment.repeated

    def links(
        self, segment: TextSegment, text: str, spans: Sequence[Span], weights: Sequence[Sequence[float]]
    ) -> list[Link]:
        """Returns the links between the words of a segment and the words of its translation `text`.

        `spans` are the spans of the target pieces in `text`. `weights` has a row of attention weights for each piece.
        """
        rows = [row[self.leading(segment) : -1] for row in weights]
        return word_links(segment.text, text, self.source_spans(segment), spans, rows)

    def with_copies(self, segment: TextSegment, tokens: Sequence[int], best: Sequence[int]) -> list[str]:
        """Returns the pieces of an output. The source piece with the highest attention weight replaces each <unk>.

        A copied piece begins a word of the output if it begins a word of the source. If the target vocabulary has no
        piece for a single space, each <unk> begins a word.
        """
        leading = self.leading(segment)
        spans = self.source_spans(segment)
        begins_word = self.tokenizer.target.processor.piece_to_id(SPACE_SYMBOL) == UNK
        pieces = [""]
        for piece, token, source in zip(self.tokenizer.target_pieces(tokens), tokens, best, strict=True):
            if token != UNK:
                pieces.append(piece)
                continue
            start, end = spans[source - leading] if source >= leading else (0, 0)
            copied = segment.text[start:end]
            if copied and not copied[0].isspace() and (begins_word or not start):
                copied = " " + copied
            pieces.append(copied_piece(copied, after_space=pieces[-1].endswith(SPACE_SYMBOL) or len(pieces) == 1))
        return pieces[1:]


@lru_cache(maxsize=8)
def required_terms(tokenizer: Tokenizer) -> Callable[[tuple[str, ...]], RequiredText]:
    """Returns a function, with a cache, that makes a required text from the target terms of a source term.

    The result has no alternatives if the vocabulary can spell none of the terms. Pipelines with the same tokenizer
    share the cache.
    """

    @cache
    def required(targets: tuple[str, ...]) -> RequiredText:
        return RequiredText.of([form for target in targets for form in forms(target)], tokenizer, whole_words=True)

    return required
