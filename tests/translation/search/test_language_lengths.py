"""Lengths of outputs count pieces: language tokens and tags change no limit and no score of any search."""

import math
from typing import Any

import pytest
import torch
from builders import tiny_tokenizer
from test_greedy_search import SOURCES, ending

from nmtkit.contracts.engine import required_tokens
from nmtkit.data.packed import Packed
from nmtkit.translation.engines import ENGINES, Decoder, LoadedModels
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Segment

LANGUAGE = 4
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam": {"beam": 4, "nbest": 4},
    "diverse": {"beam": 4, "nbest": 2, "diverse_groups": 2},
    "samples": {"sampling": True, "nbest": 3},
    "required": {"beam": 4},
}
ENGINE_NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "numba" else ()) for name in ENGINES.names()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "lenpen"), [((0, 50), 0.6), ((7, 50), -1.0), ((0, 1), -1.0), ((0, 3), 0.6)], ids=str
)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_limits_and_scores_count_pieces(engine: str, search: str, limits: tuple[int, int], lenpen: float) -> None:
    if engine == "ctranslate2":
        pytest.skip("refuses prefixes")
    if engine == "numba":
        pytest.importorskip("numba")
    shortest, longest = limits
    options = SearchOptions(**SEARCHES[search], lenpen=lenpen, min_len=shortest, max_len_a=0, max_len_b=longest)
    required = (required_tokens(tiny_tokenizer().target_size, [9]),) if search == "required" else ()
    constraints = Constraints((LANGUAGE,), 1, required=required)
    batch = [Segment(ids, constraints, seed) for seed, ids in enumerate(SOURCES)]
    decoder = Decoder(LoadedModels([ending()], tiny_tokenizer(), "cpu", 2048), engine)
    ((_, results),) = decoder.decoder(options)([batch])
    lengths = set()
    for hypothesis in (hypothesis for hypotheses in results for hypothesis in hypotheses):
        language, *pieces = hypothesis.tokens
        assert language == LANGUAGE and shortest <= len(pieces) <= longest
        penalty = ((5 + len(pieces) + 1) / 6) ** lenpen
        assert math.isclose(hypothesis.score, hypothesis.log_probability / penalty, rel_tol=1e-9)
        lengths.add(len(pieces))
    if search in ("greedy", "beam") and limits != (0, 50):
        assert lengths & set(limits)  # the limit has an effect


@pytest.mark.slow
@pytest.mark.parametrize("beam", [1, 30 * 30])
def test_a_wide_beam_finds_the_best_of_all_short_outputs(beam: int) -> None:
    """With one piece at most, the outputs are an empty line and each piece; all can be scored one by one."""
    model, lenpen = ending(), 1.5
    options = SearchOptions(beam=beam, lenpen=lenpen, max_len_a=0, max_len_b=1)
    constraints = Constraints((LANGUAGE,), 1)
    decoder = Decoder(LoadedModels([model], tiny_tokenizer(), "cpu", 2048))
    ((_, results),) = decoder.decoder(options)([[Segment(ids, constraints) for ids in SOURCES]])
    for ids, (found,) in zip(SOURCES, results, strict=True):
        source = Packed.from_lists([ids])
        scores = {}
        with torch.no_grad():
            for output in [[], *([piece] for piece in range(3, 30))]:
                features = model(source, Packed.from_lists([[1, LANGUAGE, *output]]))
                log_probs = model.output_projection(features).double().log_softmax(1)
                total = sum(log_probs[1 + index, piece].item() for index, piece in enumerate([*output, 2]))
                scores[tuple(output)] = total / ((6 + len(output)) / 6) ** lenpen
        assert scores[tuple(found.tokens[1:])] == pytest.approx(found.score, abs=1e-4)
        if beam > 1:
            assert found.score == pytest.approx(max(scores.values()), abs=1e-4)


@pytest.mark.parametrize("a", [0.5, 1.0])
def test_language_tokens_and_tags_of_the_source_do_not_lengthen_the_output(a: float) -> None:
    options = SearchOptions(beam=1, max_len_a=a, max_len_b=0)
    decoder = Decoder(LoadedModels([ending()], tiny_tokenizer(), "cpu", 2048))
    batch = [Segment([LANGUAGE, 9, *ids], Constraints(source_tokens=2)) for ids in SOURCES]
    ((_, results),) = decoder.decoder(options)([batch])
    for ids, (found,) in zip(SOURCES, results, strict=True):
        assert len(found.tokens) <= int(a * (len(ids) - 1))
