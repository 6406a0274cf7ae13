"""Settings of a search: their limits, and pairs of options, which both take effect or are refused."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from builders import WORDS, tiny_tokenizer, tiny_transformer

from nmtkit.config import check_flags, flag_of
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import EOS, UNK
from nmtkit.translation.options import GENERATE_RULES, TranslatorOptions
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, LogitsProcessorState
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.shortlist import Shortlist
from nmtkit.translation.translator import Request, Translator

LINES = [("a dog runs", "two men sleeps"), ("the cat in the park", "a street .")]
# A value of every option that differs from its default enough to change translations of LINES.
VALUES: dict[str, Any] = {
    "beam": 2,
    "nbest": 2,
    "lenpen": -1.0,
    "max_len_a": 5.0,
    "max_len_b": 60,
    "min_len": 58,
    "no_repeat_ngram": 3,
    "keep_loops": True,
    "diverse_groups": 2,
    "diversity": 3.0,
    "sampling": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "seed": 7,
    "ordered_constraints": True,
    "shortlist": True,
    "logits_processors": ("even_tokens",),
    "mbr": "chrf",
    "alignment": "soft",
    "score_reference": True,
    "unkpen": 0.5,
    "replace_unknown": True,
    "quality": True,
}
REQUEST_VALUES: dict[str, Any] = {
    "prefix": "the dog",
    "required": ["two", "park", "men"],
    "avoided": [*WORDS, *"abcdefghijklmnopqrstuvwxyz"],
}
REQUEST_FLAGS = {"prefix": "--prefix", "required": "--constraints", "avoided": "--avoid"}
ALL = [*VALUES, *REQUEST_VALUES]


@pytest.fixture(scope="module", autouse=True)
def even_tokens() -> Iterator[None]:
    """A registered processor that allows eos and tokens of even ids only."""
    LOGITS_PROCESSORS.register("even_tokens", EmptyConfig())(lambda config, tokenizer: EvenTokens())
    yield
    del LOGITS_PROCESSORS.entries["even_tokens"]


@dataclasses.dataclass(frozen=True)
class EmptyConfig:
    pass


class EvenTokens(LogitsProcessor):
    def start(self, source: Packed, max_length: torch.Tensor, beams: int) -> "EvenState":
        return EvenState(beams)


class EvenState(LogitsProcessorState):
    def step(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        log_probs[:, 3::2] = -math.inf
        return log_probs

    def reorder(self, beam_index: torch.Tensor) -> None: ...


@cache
def translators() -> list[Translator]:
    """Returns several random models, because an option need not change the translations of each model."""
    tokenizer, result = tiny_tokenizer(), []
    for seed, end in ((1, 1.6), (2, 1.6), (3, 1.6)):
        model = tiny_transformer(tokenizer.target_size, decoder_layers=1, sharpness=2.0, seed=seed)
        with torch.no_grad():
            model.output_projection.weight[EOS] *= end  # some lines end early, others never
            model.output_projection.weight[UNK] *= 3.0  # so that --replace-unknown and --unkpen have something to do
        size, none = tokenizer.target_size, np.empty(0)
        model.shortlist = Shortlist.from_entries(none, none, np.arange(0, size, 2), size, size).state()
        result.append(Translator([model], tokenizer))
    return result


@cache
def translations(names: frozenset[str]) -> list[Any] | None:
    """Returns the output of `nmtkit generate --format jsonl` with these options; None where it refuses them."""
    flags = {flag_of(field): field.name for field in dataclasses.fields(SearchOptions)}
    given = {flag for flag, name in flags.items() if name in names} | {"--format jsonl"}
    given |= {flag for name, flag in REQUEST_FLAGS.items() if name in names}
    requests = [
        Request(line, reference=reference, **{name: REQUEST_VALUES[name] for name in REQUEST_VALUES if name in names})
        for line, reference in LINES
    ]
    try:
        check_flags(GENERATE_RULES, given, given)
        settings = {name: VALUES[name] for name in VALUES if name in names}
        found = [translation for each in translators() for translation in each.translate(requests, **settings)]
    except ValueError as error:
        assert "--" in str(error) or "required phrases" in str(error)
        return None
    return [dataclasses.asdict(translation) for translation in found]


def test_every_option_is_tried():
    languages = {"source_lang", "target_lang"}  # refused by a model of two languages
    assert {field.name for field in dataclasses.fields(SearchOptions) if "help" in field.metadata} - languages == set(
        VALUES
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_an_option_acts_beside_any_other_or_is_refused(name):
    accepted = 0
    for other in ALL:
        both = translations(frozenset({name, other}))
        if both is None:
            continue
        accepted += 1
        assert both != translations(frozenset({other}) - {name}), f"{name} does nothing beside {other}"
    assert accepted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--beam", "--sampling"), "--sampling and --beam cannot"),
        (("--diversity",), "--diversity does nothing"),
        (("--ordered-constraints",), "--ordered-constraints does nothing"),
        (("--score-reference", "--prefix"), "--score-reference and --prefix"),
    ],
)
def test_messages_name_both_flags(given, message):
    with pytest.raises(ValueError, match=message):
        check_flags(GENERATE_RULES, given, given)


def test_every_rule_is_about_flags_that_there_are():
    from nmtkit.cli.generate import command

    flags = {flag for parameter in command.params for flag in parameter.opts}
    flags |= {"DATA", "--format jsonl", "--engine ctranslate2"}
    flags |= {
        "a document",
        "several --input",
        "a catalogue (PO or XLIFF)",
        "--alignment hard with typed text",
    }  # facts of the input
    for rule in GENERATE_RULES:
        assert {rule.flag, *rule.needs, *rule.excludes} <= flags


NUMBERS = [
    (config, field)
    for config in (SearchOptions, TranslatorOptions)
    for field in dataclasses.fields(config)
    if field.type in (int, float) or field.name == "max_tokens"
]


@pytest.mark.parametrize(("config", "field"), NUMBERS, ids=[field.name for _, field in NUMBERS])
def test_no_number_that_is_absurd_passes(config, field):
    for value in (math.nan, math.inf, -math.inf, 10**30, -(10**9)):
        with pytest.raises(ValueError, match=f"{flag_of(field)} is "):
            config(**{field.name: value})


@pytest.mark.slow
def test_the_largest_numbers_neither_hang_nor_end_in_a_traceback():
    """Greedy search without eos stops at its limit, and a beam may be larger than the vocabulary."""
    short = {"max_len_a": 0.0, "max_len_b": 3}
    for settings in itertools.chain(
        ({"beam": 1000, **short}, {"sampling": True, "temperature": 100.0, **short}),
        ({"sampling": True, "temperature": 0.01, **short}, {"lenpen": 10.0, **short}, {"lenpen": -10.0, **short}),
        ({"sampling": True, "nbest": 500, "seed": 2**63 - 1, **short}, {"beam": 1, "min_len": 400}),
    ):
        assert all(translation.hypotheses for translation in translators()[0].translate(["a dog"], **settings))
