"""The text pipeline: a list of steps that turn requests into model input, and hypotheses into translations."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Literal

from nmtkit.config import changed_flags, check_flags
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.text import glossary
from nmtkit.translation.model_input import LengthLimit, ModelInput, constraints_of, encode
from nmtkit.translation.options import GLOSSARY_RULE, TextOptions
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis, Request, Translation
from nmtkit.translation.steps import (
    Casing,
    GlossaryTerms,
    InvisibleCharacters,
    Markup,
    Normalization,
    Protection,
    QualityEstimation,
    Sentences,
    Step,
    TextSegment,
)


class Pipeline:
    """Prepares lines for a search with the options `search`, and turns the hypotheses into translations.

    >>> pipeline = translator.pipeline(SearchOptions(), TextOptions(protect_spans=True))
    >>> for translation in translator.run(windows, pipeline): ...

    `source_tag` is a symbol of the vocabulary that begins every line. With `links` or the option alignment="words",
    translations have word alignments, unless the translations contain markup.

    Raises ValueError for a pattern that is not a regular expression, for a glossary line that is not a term, and for a
    search that cannot require glossary terms. Raises OSError for a glossary that cannot be read, and ImportError if a
    package is missing.
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
    ) -> None:
        text = text or TextOptions()
        self.tokenizer, self.text = tokenizer, text
        self.links = (links or search.alignment == "words") and text.markup is None
        # the steps need links between words to put markup and protected text back
        self.search = replace(search, alignment="words") if links or text.rewriting else search
        terms = None if text.glossary is None else glossary.load(text.glossary)
        if terms is not None:
            check_flags((GLOSSARY_RULE,), changed_flags(search), {GLOSSARY_RULE.flag})
        model_input = ModelInput(tokenizer, self.search, source_tag)
        steps: list[Step | None] = [
            Normalization(),
            Markup() if text.markup else None,
            QualityEstimation() if search.quality else None,
            Sentences(text.split_sentences) if text.split_sentences is not None else None,
            InvisibleCharacters(tokenizer),
            Protection(tokenizer, text.protect, text.protect_spans, text.truecase_caps)
            if text.protect or text.protect_spans or text.truecase_caps
            else None,
            GlossaryTerms(terms) if terms is not None else None,
            Casing() if text.truecase_caps else None,
        ]
        self.text_steps = [step for step in steps if step is not None]
        limit = LengthLimit(tokenizer, max_source_len, len(model_input.first), long_lines, self.search.alignment)
        self.steps = [*self.text_steps, *([] if search.score_reference else [limit]), model_input]

    # --- before the model ---------------------------------------------------------------------------------------------

    def segments(self, requests: Sequence[Request], first_id: int = 0) -> list[TextSegment]:
        """Returns a segment for each request. The leaves of these segments are the input of the model.

        Raises ValueError, with the number of the line, for constraints that cannot be met.
        """
        lines = []
        encoded: list[TextSegment] = []  # segments that the tokenizer encodes
        for id, request in enumerate(requests, first_id):
            segment = TextSegment(id, request.source)
            try:
                self.constrain(segment, request)
            except ValueError as error:
                raise ValueError(f"line {id + 1}: {error}") from error
            lines.append(segment)
            encoded += self.applied(self.text_steps, [segment])
        encode(encoded, self.tokenizer)
        for segment in encoded:
            try:
                self.applied(self.steps[len(self.text_steps) :], [segment])
            except ValueError as error:
                raise ValueError(f"line {segment.id + 1}: {error}") from error
        if self.search.sampling:
            for segment in lines:
                for index, leaf in enumerate(segment.leaves()):
                    leaf.model_input = replace(leaf.input, seed=segment.id + (index << 40))
        return lines

    def source_pieces(self, segment: TextSegment) -> list[str]:
        """Returns the pieces of a line that the model reads. Hard alignments refer to these pieces by index."""
        return [piece for leaf in segment.leaves() for piece in self.tokenizer.source_pieces(leaf.input.ids[:-1])]

    def constrain(self, segment: TextSegment, request: Request) -> None:
        """Gives a segment the constraints and ids of its request. Raises ValueError for impossible constraints."""
        if self.text.split_sentences is not None and (request.prefix or request.required or request.avoided):
            raise ValueError(
                "split_sentences cannot be combined with a prefix, or with required or avoided phrases: constraints "
                "apply to whole lines, but each sentence is translated alone"
            )
        if self.search.score_reference:
            if request.reference is None:
                raise ValueError("with --score-reference, every line needs a reference")
            segment.reference = self.tokenizer.encode_target([request.reference]).ids[:-1].tolist()
        elif request.prefix or request.required or request.avoided:
            segment.constraints = constraints_of(request, self.tokenizer)
        if request.ids is not None and not self.text.active:
            languages = self.tokenizer.languages.values()
            segment.ids = request.ids[1:-1] if request.ids[0] in languages else request.ids[:-1]

    def applied(self, steps: Sequence[Step], segments: list[TextSegment]) -> list[TextSegment]:
        """Applies all steps in order, and returns the segments that the last step makes."""
        for step in steps:
            for segment in segments:
                segment.parts = step.before(segment)
            segments = [part for segment in segments for part in segment.parts]
        return segments

    # --- after the model ----------------------------------------------------------------------------------------------

    def translation(self, segment: TextSegment) -> Translation:
        """Returns the translation of a line. The search must have finished all leaves of the line."""
        hypotheses = self.hypotheses(segment, 0)
        if self.links:
            hypotheses = [
                replace(each, alignment=[[*astuple(link)] for link in each.links], links=[]) for each in hypotheses
            ]
        return Translation(segment.id, segment.text, hypotheses)

    def hypotheses(self, segment: TextSegment, depth: int) -> list[Hypothesis]:
        """Returns the translations of a segment. The segment is a result of the first `depth` steps.

        Translation i joins hypothesis i of each part, or the last hypothesis of a part with fewer hypotheses.
        """
        if segment.model_input is not None:
            assert segment.hypotheses is not None
            return segment.hypotheses
        if not segment.parts:  # the segment has nothing to translate
            return [Hypothesis([], 0.0, 0.0, token_log_probabilities=[] if self.search.quality else None)]
        columns = [self.hypotheses(part, depth + 1) for part in segment.parts]
        step = self.steps[depth]
        hypotheses = [
            step.after(segment, [column[min(rank, len(column) - 1)] for column in columns])
            for rank in range(max(map(len, columns)))
        ]
        if self.search.mbr is not None and depth == len(self.text_steps):
            return by_utility(hypotheses, self.search.mbr)
        return hypotheses


def by_utility(hypotheses: Sequence[Hypothesis], metric: Literal["chrf", "bleu"]) -> list[Hypothesis]:
    """Returns the hypotheses with their utilities, best first."""
    values = utilities([hypothesis.text for hypothesis in hypotheses], metric)
    rated = [replace(hypothesis, utility=value) for hypothesis, value in zip(hypotheses, values, strict=True)]
    return sorted(rated, key=lambda hypothesis: -(hypothesis.utility or 0.0))


def utilities(texts: Sequence[str], metric: Literal["chrf", "bleu"]) -> list[float]:
    """Returns the mean sentence score, 0 to 100, of each text against all other texts, or 0 if there is only one text.

    The text with the largest utility is the translation with the minimum Bayes risk (Eikema and Aziz 2020, "Is MAP
    Decoding All You Need?"). A text that occurs n times counts n times as a reference.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    from nmtkit.scoring.tokenizers import characters_apart

    scorer = CHRF() if metric == "chrf" else BLEU(effective_order=True)
    counts = Counter(texts)
    total = {
        text: sum(
            number * scorer.sentence_score(characters_apart(text, other), [characters_apart(other, other)]).score
            for other, number in counts.items()
            if other != text
        )
        + (counts[text] - 1) * 100.0
        for text in counts
    }
    return [total[text] / max(1, len(texts) - 1) for text in texts]
