"""All registered engines keep the contract of engines: the hypotheses of PyTorch's search, option by option."""

import dataclasses
import logging

import pytest
from builders import fragments, save_ending_transformer, save_transformer

from nmtkit.contracts import check_engine
from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.translation.engines import ENGINES
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Segment
from nmtkit.translation.translator import Translator


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "numba" else ()) for name in ENGINES.names()]
)
def test_an_engine_keeps_the_contract(name: str) -> None:
    if name in ("numba", "ctranslate2"):
        pytest.importorskip(name)
    check_engine(name)


def test_the_log_says_once_which_option_pytorch_searches(tmp_path, caplog) -> None:
    translator = Translator.load(save_ending_transformer(tmp_path / "model.pt"), engine="slots")
    expected = Translator.load(tmp_path / "model.pt").translate(fragments()[:4], no_repeat_ngram=2, max_len_b=5)
    with caplog.at_level(logging.INFO, "nmtkit"):
        for _ in range(2):
            found = translator.translate(fragments()[:4], no_repeat_ngram=2, max_len_b=5)
    assert [each.text for each in found] == [each.text for each in expected]
    (message,) = [record.getMessage() for record in caplog.records if "slots" in record.getMessage()]
    assert "--no-repeat-ngram" in message


def test_the_engine_of_a_target_language_is_the_engine_that_searches(tmp_path, caplog) -> None:
    translator = Translator.load(save_transformer(tmp_path / "many.pt", languages=("en", "it")), engine="slots")
    options = SearchOptions(source_lang="en", target_lang="it", max_len_b=5)
    with caplog.at_level(logging.INFO, "nmtkit"):
        translator.translate(fragments()[:2], **dataclasses.asdict(options))
    assert [record.getMessage()[:14] for record in caplog.records] == ["engine: torch,"]
    assert translator.decoder.choice(options).startswith("torch (slots ")
    assert translator.decoder.choice(SearchOptions()) == "slots"


def test_pytorch_is_named_if_it_searches_because_other_calls_may_use_the_slots(tmp_path, caplog) -> None:
    translator = Translator.load(save_transformer(tmp_path / "model.pt"), engine="slots")
    with caplog.at_level(logging.INFO, "nmtkit"):
        translator.decode([Segment([EOS])], SearchOptions(max_len_b=2))
    assert [record.getMessage()[:14] for record in caplog.records] == ["engine: torch,"]


def test_an_unknown_engine_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"unknown engine 'nmba'.*numba"):
        Translator.load(save_ending_transformer(tmp_path / "model.pt"), engine="nmba")
