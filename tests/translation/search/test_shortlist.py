"""Searches with a shortlist, compared with searches whose output bias is -inf outside the list of the sentence."""

import copy
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from builders import tiny_model, tiny_tokenizer, tiny_transformer
from torch import nn

from nmtkit.contracts.engine import avoided_tokens, required_tokens
from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Architecture, Vocabulary
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.layers import output_columns
from nmtkit.models.layers.kv_cache import KVCache
from nmtkit.models.layers.output_columns import select_columns
from nmtkit.models.layers.prepack import Int8Linear, Precision, PrepackedLinear, prepack
from nmtkit.text.encoded import Encoded
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.limited_search import LimitedModel
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.shortlist import Shortlist, learned_entries, most_frequent, shortlist_of
from nmtkit.translation.search.types import Hypothesis

SIZE = 60
SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [20, 2], [30, 31, 8, 2], [5, 40, 2]]
CPU = torch.device("cpu")

# each source piece s may become s, s + 1, 2 s and 50 - s
LISTS = {piece: {piece, (piece + 1) % SIZE, 2 * piece % SIZE, abs(50 - piece)} for piece in range(3, SIZE)}
FREQUENT = {4, 17, 33}
SHORTLIST = Shortlist.from_entries(
    np.array([source for source, targets in LISTS.items() for _ in targets]),
    np.array([target for targets in LISTS.values() for target in targets]),
    np.array(sorted(FREQUENT)),
    SIZE,
    SIZE,
)


def whole_shortlist(size: int) -> Shortlist:
    """Returns a shortlist that allows all target pieces."""
    none = np.empty(0, np.int64)
    return Shortlist.from_entries(none, none, np.arange(size), size, size)


def allowed(source: Sequence[int], constraints: Constraints) -> set[int]:
    pieces = {0, 1, 2} | FREQUENT | {target for piece in source for target in LISTS.get(piece, set())}
    return pieces.union(constraints.prefix, *(text.tokens for text in constraints.required))


def masked(model: Architecture, pieces: set[int]) -> Architecture:
    """Returns the model with an output bias of -inf for all other pieces."""
    model = copy.copy(model)
    weight = model.output_projection.weight
    assert isinstance(weight, torch.Tensor)
    projection = nn.Linear(weight.shape[1], len(weight))
    projection.weight = nn.Parameter(weight.detach())
    own = model.output_projection.bias
    assert not isinstance(own, nn.Module)
    bias = torch.full((len(weight),), -math.inf)
    bias[sorted(pieces)] = 0.0 if own is None else own.detach()[sorted(pieces)]
    projection.bias = nn.Parameter(bias)
    model._modules = model._modules | {"output_projection": projection}
    return model


def assert_same(found: Sequence[list[Hypothesis]], expected: Sequence[list[Hypothesis]]) -> None:
    assert [[h.tokens for h in each] for each in found] == [[h.tokens for h in each] for each in expected]
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        assert (one.score, one.log_probability) == pytest.approx((other.score, other.log_probability), abs=1e-4)


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam": {"beam": 4, "nbest": 4},
    "diverse": {"beam": 4, "diverse_groups": 2, "nbest": 4},
    "ngram": {"beam": 3, "no_repeat_ngram": 1, "min_len": 4},
    "unk": {"beam": 3, "unkpen": 0.5},
    "sampling": {"sampling": True, "nbest": 3},
    "top_k": {"sampling": True, "nbest": 3, "top_k": 5},
}
CONSTRAINTS = {
    "none": Constraints(),
    "prefix": Constraints(prefix=(55, 56, 3)),
    "avoided": Constraints(avoided=avoided_tokens(SIZE, (4,), (33, 17), (59, 58))),
    "required": Constraints(required=(required_tokens(SIZE, (57, 58), (59,)),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("models", [1, 2], ids=["one_model", "ensemble"])
@pytest.mark.parametrize(
    ("search", "constraint"),
    [(search, "none") for search in SEARCHES] + [("beam", name) for name in CONSTRAINTS] + [("sampling", "prefix")],
)
def test_a_batch_equals_each_sentence_alone_with_all_other_pieces_masked(
    search: str, constraint: str, models: int
) -> None:
    ensemble: list[Architecture] = [tiny_transformer(SIZE, seed=seed, sharpness=4.0) for seed in range(models)]
    options = SearchOptions(max_len_b=6, **SEARCHES[search])
    constraints = [CONSTRAINTS[constraint]] * len(SOURCES)
    limited = SearchOptions(max_len_b=6, shortlist=True, **SEARCHES[search])
    found = beam_search(ensemble, Packed.from_lists(SOURCES, CPU), limited, constraints, shortlist=SHORTLIST)
    expected = []
    for index, source in enumerate(SOURCES):
        pieces = allowed(source, constraints[0])
        alone = Packed.from_lists([source], CPU)
        masks = [masked(model, pieces) for model in ensemble]
        expected += beam_search(masks, alone, options, [constraints[0]], [index])
        assert all(set(hypothesis.tokens) <= pieces for hypothesis in found[index])
    assert_same(found, expected)


def test_each_sentence_of_a_batch_has_its_constraints() -> None:
    model = tiny_transformer(SIZE, sharpness=4.0)
    constraints = [CONSTRAINTS[name] for name in ("none", "prefix", "avoided", "required", "required")]
    options = {"beam": 4, "max_len_b": 6, "nbest": 2}
    batch, limited = Packed.from_lists(SOURCES, CPU), SearchOptions(shortlist=True, **options)
    found = beam_search([model], batch, limited, constraints, shortlist=SHORTLIST)
    expected = [
        beam_search([masked(model, allowed(source, each))], Packed.from_lists([source], CPU), SearchOptions(**options),
                    [each], [index])[0]
        for index, (source, each) in enumerate(zip(SOURCES, constraints, strict=True))
    ]  # fmt: skip
    assert_same(found, expected)


def test_a_batch_with_few_allowed_continuations_and_avoided_texts_equals_each_sentence_alone() -> None:
    """Impossible hypotheses then contain columns that are not in the list of their sentence."""
    model, options = tiny_transformer(30, sharpness=4.0), SearchOptions(beam=5, shortlist=True, max_len_b=6)
    lists = Shortlist.from_entries(np.array([5, 6, 7, 8]), np.array([9, 10, 11, 12]), np.array([4]), 30, 30)
    sources = [[5, 2], [5, 6, 7, 8, 2]]
    constraints = [Constraints(avoided=avoided_tokens(30, (9, 4)), after_prefix=(9,)), Constraints()]
    together = beam_search([model], Packed.from_lists(sources), options, constraints, shortlist=lists)
    for ids, each, found in zip(sources, constraints, together, strict=True):
        alone = beam_search([model], Packed.from_lists([ids]), options, [each], shortlist=lists)[0]
        assert [hypothesis.tokens for hypothesis in found] == [hypothesis.tokens for hypothesis in alone]


def test_a_search_sees_as_many_columns_as_the_longest_list(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def step(self: LimitedModel, tokens: torch.Tensor, state: Any) -> torch.Tensor:
        logits = original(self, tokens, state)
        widths.append(logits.shape[1])
        return logits

    original = LimitedModel.step
    monkeypatch.setattr(LimitedModel, "step", step)
    options = SearchOptions(beam=1, max_len_b=6, shortlist=True)
    beam_search([tiny_transformer(SIZE)], Packed.from_lists(SOURCES, CPU), options, shortlist=SHORTLIST)
    lists = [allowed(source, Constraints()) for source in SOURCES]
    assert max(widths) == max(map(len, lists)) < len(set().union(*lists))


@pytest.mark.parametrize("architecture", ["gnmt_small", "convs2s_small", "transformer_moe_tiny"])
def test_every_architecture_searches_a_shortlist(architecture: str) -> None:
    model = tiny_model(architecture, SIZE, sharpness=4.0)
    constraints = [Constraints()] * len(SOURCES)
    options = SearchOptions(beam=3, max_len_b=6, shortlist=True)
    found = beam_search([model], Packed.from_lists(SOURCES, CPU), options, shortlist=SHORTLIST)
    plain = SearchOptions(beam=3, max_len_b=6)
    expected = [
        beam_search([masked(model, allowed(source, constraints[0]))], Packed.from_lists([source], CPU), plain)[0]
        for source in SOURCES
    ]
    assert_same(found, expected)


class OwnProjection(Transformer):
    """A model whose step computes all logits without the output projection."""

    def step(self, tokens: torch.Tensor, state: Any) -> torch.Tensor:
        assert isinstance(state, KVCache)
        tokens, position = state.advance(tokens)
        x = self.target_embedding(tokens, position, state.steps)
        for layer, context in zip(self.decoder, state.layers, strict=True):
            x = layer(x, context)
        logits = x @ self.target_embedding.tokens.weight.t()
        return logits if len(logits) == state.rows else logits.repeat_interleave(state.beams, 0)


def test_a_step_that_ignores_the_output_projection_is_masked_too() -> None:
    plain = tiny_transformer(SIZE, sharpness=4.0)
    own = OwnProjection(plain.config, Vocabulary(source=SIZE, target=SIZE, joint=True)).eval()
    own.load_state_dict(plain.state_dict())
    options, source = SearchOptions(beam=3, max_len_b=6, shortlist=True), Packed.from_lists(SOURCES, CPU)
    found, expected = (beam_search([model], source, options, shortlist=SHORTLIST) for model in (own, plain))
    assert_same(found, expected)


@pytest.mark.parametrize("precision", [None, "fp32", "bf16", "int8"])
@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 4, "nbest": 4}, {"sampling": True}], ids=str)
def test_a_shortlist_of_the_whole_vocabulary_changes_nothing(
    precision: Precision | None, options: dict[str, Any]
) -> None:
    size = 4200  # so that the output projection is in int8
    model = tiny_transformer(size, sharpness=4.0)
    if precision is not None:
        prepack(model, precision)
    if precision == "int8":
        assert isinstance(model.output_projection, Int8Linear)
    source, whole = Packed.from_lists(SOURCES, CPU), whole_shortlist(size)
    expected = beam_search([model], source, SearchOptions(max_len_b=4, **options))
    limited = SearchOptions(max_len_b=4, shortlist=True, **options)
    assert_same(beam_search([model], source, limited, shortlist=whole), expected)


def test_an_int8_product_of_some_columns_equals_these_columns_of_the_whole_product() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(48, 700)
    layer, columns = Int8Linear(linear), torch.tensor([0, 3, 5, 77, 500, 699])
    for rows in (1, 3, 40, 200):
        x = torch.randn(rows, 48)
        assert torch.equal(select_columns(layer, columns)(x), layer(x)[:, columns])


def test_packed_and_plain_products_of_some_columns_equal_the_whole_product() -> None:
    torch.manual_seed(1)
    linear, columns, x = nn.Linear(48, 700), torch.tensor([0, 3, 5, 77, 500, 699]), torch.randn(9, 48)
    with torch.inference_mode():
        for layer in (linear, PrepackedLinear(linear, "fp32")):
            torch.testing.assert_close(select_columns(layer, columns)(x), linear(x)[:, columns])
        product = output_columns.linear(linear.weight.bfloat16(), linear.bias, columns)(x)
        torch.testing.assert_close(product, linear(x)[:, columns], atol=0.05, rtol=0.05)


def test_hooks_on_the_output_projection_still_run() -> None:
    model = tiny_transformer(SIZE, sharpness=4.0)
    source, options = Packed.from_lists(SOURCES, CPU), SearchOptions(beam=2, max_len_b=6, shortlist=True)
    before = beam_search([model], source, options, shortlist=SHORTLIST)
    model.output_projection.register_forward_hook(lambda module, args, output: -output)
    after = beam_search([model], source, options, shortlist=SHORTLIST)
    assert [each[0].tokens for each in before] != [each[0].tokens for each in after]


def test_a_search_leaves_the_model_unchanged() -> None:
    model = tiny_transformer(SIZE)
    projection, state = model.output_projection, set(model.__dict__)
    options = SearchOptions(beam=2, max_len_b=3, shortlist=True)
    beam_search([model], Packed.from_lists(SOURCES, CPU), options, shortlist=SHORTLIST)
    assert model.output_projection is projection and set(model.__dict__) == state
    assert model.output_projection(torch.zeros(1, 16)).shape == (1, SIZE)


def test_lists_coverage_and_state() -> None:
    sentences = Encoded(np.array([5, 2, 20, 21, 2]), np.array([2, 3]))
    rows = SHORTLIST.allowed(sentences, [[59], []])
    expected = [allowed([5], Constraints()) | {59}, allowed([20, 21], Constraints())]
    assert [set(np.flatnonzero(row).tolist()) for row in rows] == expected
    # the first reference is covered: 6 is in the list of 5; the second is not: of 30, 57 and eos, 57 is missing
    coverage = SHORTLIST.coverage(sentences, Encoded(np.array([6, 2, 30, 57, 2]), np.array([2, 3])))
    sizes = len(allowed([5], Constraints())), len(allowed([20, 21], Constraints()))
    assert (coverage.pieces, coverage.sentences, coverage.size) == (4 / 5, 1 / 2, sum(sizes) / 2)
    again = Shortlist.from_state(SHORTLIST.state(), SIZE, SIZE)
    assert {part.dtype for part in SHORTLIST.state().values()} == {torch.uint8}  # 60 pieces
    assert (again.allowed(sentences) == SHORTLIST.allowed(sentences)).all()
    assert (SHORTLIST.union(whole_shortlist(SIZE)).allowed(sentences)).all()


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": torch.ones(3, dtype=torch.int32)},
        {"targets": torch.full((SIZE * 4,), SIZE)},
        {"frequent": torch.tensor([-1])},
        {"frequent": None},
    ],
    ids=["lengths", "targets", "negative", "missing"],
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="nmtkit shortlist"):
        Shortlist.from_state(SHORTLIST.state() | change, SIZE, SIZE)


def test_learned_lists_have_the_translations_of_a_word_and_the_word_itself() -> None:
    tokenizer = tiny_tokenizer()
    lines = ["the dog runs", "the cat runs", "the dog sleeps", "a cat sleeps"]
    copies = ["men in park", "men on park", "men in street", "two on street"]  # word by word
    source, target = tokenizer.encode_source(lines), tokenizer.encode_target(copies)
    shortlist = shortlist_of(learned_entries(source, target, tokenizer, 1), tokenizer)
    words = {word: tokenizer.encode_source([word]).ids[:-1].tolist() for word in ("dog", "cat", "in", "on")}
    for word, translation in (("dog", "in"), ("cat", "on")):
        listed = np.flatnonzero(shortlist.allowed(Encoded(np.array(words[word]), np.array([len(words[word])])))[0])
        assert set(words[translation]) | set(words[word]) <= set(listed.tolist())
    counted = most_frequent(Encoded(np.array([5, 6, 5, 2, 7, 5, 6, 2]), np.array([4, 4])), 2)
    assert counted.tolist() == [5, 6]
