import sys
from types import SimpleNamespace

import pytest
import torch

from nmtkit.scoring.metrics import MetricSettings, score, sentence_scores
from nmtkit.scoring.significance import compare


class StandIn(torch.nn.Module):
    """Has the interface of COMET without a model. The score is the ratio of the lengths of both texts."""

    def predict(self, data, batch_size, gpus, progress_bar):
        assert all(set(row) == {"src", "mt", "ref"} for row in data)
        for _ in range(0, len(data), batch_size):
            self()
        return SimpleNamespace(scores=[len(row["mt"]) / len(row["ref"]) for row in data])

    def forward(self):
        pass


@pytest.fixture
def comet(monkeypatch):
    module = SimpleNamespace(download_model=lambda name: f"/{name}", load_from_checkpoint=lambda path: StandIn())
    monkeypatch.setitem(sys.modules, "comet", module)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.2.7")


SETTINGS = MetricSettings(sources=("one", "two", "three"))


def test_the_corpus_scores_the_mean_of_its_sentences(comet):
    [result] = score(["ab", "abcd", "a"], [["abcd"] * 3], ["comet"], SETTINGS, bootstrap=100)
    assert result.value == pytest.approx(100 * (0.5 + 1 + 0.25) / 3)
    assert result.interval > 0
    assert result.signature == "nrefs:1|bs:100|seed:12345|model:wmt22-comet-da|scale:100|version:2.2.7"
    [column] = sentence_scores(["ab", "abcd", "a"], [["abcd"] * 3], ["comet"], SETTINGS)
    assert [cell.value for cell in column] == pytest.approx([50, 100, 25])


@pytest.mark.parametrize("test", ["bootstrap", "randomization"])
def test_systems_are_compared_with_it(comet, test):
    systems = {"worse": ["a", "a", "a"], "better": ["abc", "abc", "abc"]}
    worse, better = compare(systems, [["abcd"] * 3], ["comet"], SETTINGS, test=test, samples=50)
    assert (worse.score.value, better.score.value) == pytest.approx((25, 75))
    assert worse.p_value is None and 0 < better.p_value < 1


def test_it_asks_for_sources_and_one_reference(comet):
    with pytest.raises(ValueError, match="--src FILE"):
        score(["a"], [["a"]], ["comet"])
    with pytest.raises(ValueError, match="one reference, not 2"):
        score(["a"], [["a"], ["b"]], ["comet"], MetricSettings(sources=("a",)))


def test_without_the_extra_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(ImportError, match=r"pip install 'nmtkit\[comet\]'"):
        score(["a"], [["a"]], ["comet"])
