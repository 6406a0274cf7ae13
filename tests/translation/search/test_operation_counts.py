"""A step of a search dispatches few operations, because their number determines the time on small tensors."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from builders import tiny_transformer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nmtkit.data.packed import Packed
from nmtkit.translation.search.beam_search import Search
from nmtkit.translation.search.constraints import NO_CONSTRAINTS
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.scorer import Scorer

# Upper bounds. A layer with attention has six products, three sums, three norms, a ReLU, one copy into the cache, and
# twice two products and a softmax. Beams and batches add copies that bring the heads of a row together. In a layer with
# SSRU, two products, a gate, an interpolation and a ReLU replace the self-attention.
LAYER = {"attention": 24, "ssru": 21}
# In addition to the layers, a search has the embedding, the output projection, the log-softmax, a test for NaN,
# forbidden tokens, the best in two stages, the candidates and the stop test.
BESIDE = 37


class Counter(TorchDispatchMode):
    """Counts operations that compute or copy; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))

        def memory(values: Any) -> set[int]:
            return {x.untyped_storage().data_ptr() for x in tree_leaves(values) if isinstance(x, Tensor) and x.numel()}

        if function._schema.is_mutable or not memory(result) <= memory((args, kwargs)) or not memory(result):
            self.names.append(str(function))
        return result


def record(patch: pytest.MonkeyPatch, owner: Any, name: str, counter: Counter) -> list[tuple[int, int]]:
    """Returns a list that gets the count before and after each call of a method."""
    calls: list[tuple[int, int]] = []
    original = getattr(owner, name)

    def method(*arguments: Any) -> Any:
        before = len(counter.names)
        result = original(*arguments)
        calls.append((before, len(counter.names)))
        return result

    patch.setattr(owner, name, method)
    return calls


@pytest.mark.parametrize(("beam", "sentences"), [(1, 1), (4, 1), (1, 3), (4, 3)])
@pytest.mark.parametrize("kind", ["attention", "ssru"])
def test_a_step_dispatches_no_more_operations_than_its_budget(kind, beam, sentences, monkeypatch):
    model = tiny_transformer(3000, decoder_layers=2, decoder_self_attention=kind)
    source = Packed.from_lists([[5, 6, 7, 8, 2]] * sentences)
    options = SearchOptions(beam=beam, min_len=12, max_len_a=0, max_len_b=13)
    counter = Counter()
    layers = record(monkeypatch, type(model.decoder[0]), "forward", counter)
    steps = record(monkeypatch, Scorer, "step", counter)
    with torch.inference_mode():
        search = Search([model], source, options, [NO_CONSTRAINTS] * sentences)
        with counter:
            search.run()
    in_layers = [after - before for before, after in layers[4:]]
    assert max(in_layers) <= LAYER[kind], counter.names
    whole = sorted(later - earlier for (earlier, _), (later, _) in pairwise(steps[2:]))  # with the search behind them
    assert whole[len(whole) // 2] - 2 * in_layers[0] <= BESIDE  # the median, because some steps enlarge the cache
