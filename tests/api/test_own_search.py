"""The search of docs/plugins.md, written with public handles, against an enumeration of all outputs in float64."""

import math
import re
import runpy
from collections import Counter
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_transformer

import nmtkit
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples/python/stochastic_beam_search.py"
ALLOWED = [EOS, 5, 8, 9]  # all other tokens get a probability of 0, so that the outputs can be enumerated
LENGTH = 3
IMPOSSIBLE = -1000.0  # log probabilities of outputs with other tokens are below this number
PAIR = {"source_lang": "it", "target_lang": "pl"}

search: Any = runpy.run_path(str(FILE))["stochastic_beam_search"]


def limited(path: Path, **changes: object) -> Path:
    """Writes a checkpoint whose model predicts only tokens of `ALLOWED`."""
    save_transformer(path, output_bias=True, **changes)
    contents = checkpoint.load(path)
    bias = contents["model"]["output_projection.bias"]
    contents["model"]["output_projection.bias"] = torch.full_like(bias, -1e4).index_fill(0, torch.tensor(ALLOWED), 0.0)
    checkpoint_file.save(path, contents)
    return path


def outputs_of(path: Path, source: list[int], start: list[int]) -> dict[tuple[int, ...], float]:
    """Returns the log probability of each output of at most `LENGTH` tokens, from full passes in float64."""
    module = from_checkpoint(path)[0].double().eval()
    words = [token for token in ALLOWED if token != EOS]
    found = [(*output, EOS) for length in range(LENGTH) for output in product(words, repeat=length)]
    found += product(words, repeat=LENGTH)
    log_probabilities = {}
    for output in found:
        with torch.no_grad():
            features = module(Packed.from_lists([source]), Packed.from_lists([[*start, *output[:-1]]]))
            rows = module.output_projection(features[len(start) - 1 :]).log_softmax(-1)
        log_probabilities[output] = float(rows[range(len(output)), list(output)].sum())
    return log_probabilities


def cut(ids: torch.Tensor) -> tuple[int, ...]:
    output = ids.tolist()
    return tuple(output[: output.index(EOS) + 1] if EOS in output else output)


@pytest.mark.slow
@pytest.mark.parametrize("languages", [(), ("en", "pl", "it")], ids=["bilingual", "multilingual"])
def test_more_samples_than_outputs_give_every_output_once_with_its_probability(
    languages: tuple[str, ...], tmp_path: Path
) -> None:
    path = limited(tmp_path / "model.pt", languages=languages)
    model, pair, texts = nmtkit.load(path, device="cpu"), PAIR if languages else {}, ["All are equal .", "No one !"]
    ids, log_prob = search(model, texts, 45, LENGTH, **pair)
    tokens = model.tokenizer.languages
    for index, text in enumerate(texts):
        plain = model.tokenizer.encode_source([text]).ids.tolist()
        source, start = ([tokens["it"], *plain], [BOS, tokens["pl"]]) if languages else (plain, [BOS])
        expected = outputs_of(path, source, start)
        samples = zip(ids[index], log_prob[index].tolist(), strict=True)
        found = {cut(row): value for row, value in samples if value > IMPOSSIBLE}
        assert len(expected) == (log_prob[index] > IMPOSSIBLE).sum() == 1 + 3 + 9 + 27
        assert found == pytest.approx(expected, abs=1e-4)


def test_samples_that_do_not_exist_have_the_log_probability_minus_infinity(tmp_path: Path) -> None:
    model = nmtkit.load(save_transformer(tmp_path / "model.pt"), device="cpu")
    size = model.tokenizer.target_size
    ids, log_prob = search(model, ["All are equal ."], size + 5, 1)
    assert sorted(ids[0, :size, 0].tolist()) == list(range(size))
    assert float(log_prob[0, :size].exp().sum()) == pytest.approx(1)
    assert (log_prob[0, size:] == -math.inf).all()


@pytest.mark.slow
def test_pairs_of_samples_have_the_frequencies_of_a_draw_without_replacement(tmp_path: Path) -> None:
    path = limited(tmp_path / "model.pt")
    model, text, draws = nmtkit.load(path, device="cpu"), "All are equal .", 3000
    torch.manual_seed(1)
    ids, log_prob = search(model, [text] * draws, 2, LENGTH)
    expected = outputs_of(path, model.tokenizer.encode_source([text]).ids.tolist(), [BOS])
    assert sum(map(math.exp, expected.values())) == pytest.approx(1)
    found = Counter((cut(first), cut(second)) for first, second in ids)
    for (one, first), (other, second) in permutations(expected.items(), 2):
        p = math.exp(first) * math.exp(second) / (1 - math.exp(first))
        assert abs(found[one, other] - draws * p) < 4.5 * math.sqrt(draws * p * (1 - p)) + 1
    assert all(one != other for one, other in found)
    values = [expected[cut(row)] for pair in ids for row in pair]
    torch.testing.assert_close(log_prob.flatten(), torch.tensor(values).double(), rtol=1e-4, atol=1e-4)


def test_the_page_shows_the_file_and_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    section = page.split("\n## A search of your own\n")[1].split("\n## ")[0]
    code, use = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert code == FILE.read_text(encoding="utf-8") and code.count("\n") <= 50
    save_transformer(tmp_path / "averaged.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FILE.parent)
    scope: dict[str, Any] = {}
    exec(use, scope)
    assert len(scope["samples"]) == 5 == len(set(scope["samples"]))
