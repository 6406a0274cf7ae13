"""Contrastive decoding: against exhaustive search, in every search, and by the command."""

import functools
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    save_ending_transformer,
    save_tiny_transformer,
    save_transformer,
    tiny_tokenizer,
    tiny_transformer,
)
from click.testing import CliRunner
from torch import Tensor

from nmtkit.cli import main
from nmtkit.contracts import check_logits_processor
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.building import from_checkpoint
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.logits_processors.second_model import Contrastive
from nmtkit.translation.search.options import SearchOptions

SOURCES = [[3, 5, 4, EOS], [6, EOS], [5, 5, 3, 6, EOS]]
LENGTH, WORDS = 2, range(3, 7)


class NoLanguages:
    """A tokenizer without tags and language tokens."""

    source_tags: frozenset[int] = frozenset()
    has_target_languages_only = False


def contrastive(weight: float, threshold: float, empty: bool) -> Contrastive:
    """A processor with a tiny contrasted model of seven tokens, without a checkpoint."""
    result: Any = Contrastive.__new__(Contrastive)
    result.path, result.flag, result.device, result.tokenizer = Path("small.pt"), "--contrast", None, NoLanguages()
    result.weight, result.empty, result.languages, result.language = weight, empty, {}, None
    result.log_threshold = math.log(threshold) if threshold else -math.inf
    result.model = tiny_transformer(7, sharpness=4.0, seed=5).requires_grad_(False)
    processor: Contrastive = result
    return processor


@functools.cache
def translation_and_contrasted_model() -> tuple[Transformer, Transformer]:
    return tiny_transformer(7, sharpness=6.0, seed=3), tiny_transformer(7, sharpness=4.0, seed=5)


def next_log_probs(model: Any, source: list[int], words: tuple[int, ...]) -> Tensor:
    """Returns the log probabilities [words + 1, V] after each of the words, in float64."""
    features = model(Packed.from_lists([source]), Packed.from_lists([[BOS, *words]]))
    logits: Tensor = model.output_projection(features).double()
    return logits.log_softmax(1)


def score(source: list[int], words: tuple[int, ...], weight: float, threshold: float, empty: bool) -> float:
    """Returns the sum of the scores of an output, token by token in plain Python."""
    translator, contrasted = translation_and_contrasted_model()
    total = 0.0
    with torch.no_grad():
        rows = next_log_probs(translator, source, words), next_log_probs(contrasted, [EOS] if empty else source, words)
        for token, p, q in zip((*words, EOS), *(row.tolist() for row in rows), strict=True):
            highest = max(math.exp(x) for x in p)
            raw = [
                (1 + weight) * a - weight * b if math.exp(a) >= threshold * highest else a - 100
                for a, b in zip(p, q, strict=True)
            ]
            total += raw[token] - math.log(sum(math.exp(x) for x in raw))
    return total


def search(sources: list[list[int]], processor: Contrastive, **settings: Any) -> list[list[Any]]:
    options = SearchOptions(lenpen=0, max_len_a=0, max_len_b=LENGTH, **settings)
    model = tiny_transformer(7, sharpness=6.0, seed=3)
    return beam_search([model], Packed.from_lists(sources), options, processors=[processor])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "threshold", "empty"), [(0.5, 0.1, False), (1.5, 0.0, False), (0.8, 0.3, True)], ids=str
)
def test_a_wide_beam_finds_the_best_outputs_of_the_contrasted_scores(
    weight: float, threshold: float, empty: bool
) -> None:
    found = search(SOURCES, contrastive(weight, threshold, empty), beam=32, nbest=2)
    outputs = [words for length in range(LENGTH + 1) for words in itertools.product(WORDS, repeat=length)]
    for source, hypotheses in zip(SOURCES, found, strict=True):
        scores = {words: score(source, words, weight, threshold, empty) for words in outputs}
        best = sorted(scores, key=lambda words: -scores[words])[:2]
        assert [tuple(hypothesis.tokens) for hypothesis in hypotheses] == best
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([scores[ids] for ids in best], abs=1e-4)


@pytest.mark.parametrize("settings", [{"beam": 2}, {"beam": 1}, {"sampling": True, "nbest": 3}], ids=str)
def test_a_sentence_has_the_same_scores_alone_and_in_a_batch(settings: dict[str, Any]) -> None:
    for source, hypotheses in zip(SOURCES, search(SOURCES, contrastive(0.5, 0.1, True), **settings), strict=True):
        for each in hypotheses:
            assert each.score == pytest.approx(score(source, tuple(each.tokens), 0.5, 0.1, True), abs=1e-4)


def test_without_a_weight_nothing_changes_and_a_required_token_stays_possible() -> None:
    log_probs = torch.tensor([[0.7, 0.2, 0.1, 0.0]]).log()
    second = torch.tensor([[0.1, 0.1, 0.1, 0.7]]).log()
    unchanged = contrastive(0.0, 0.0, False).combine(log_probs.clone(), second.clone())
    assert torch.allclose(unchanged, log_probs)
    strict = contrastive(0.5, 1.0, False).combine(log_probs, second)
    assert strict[0, 0] == 0 and -110 < strict[0, 2] < -90 and strict[0, 3] == -math.inf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contrastive")
    save_ending_transformer(folder / "model.pt")
    save_transformer(folder / "small.pt", seed=9)
    save_tiny_transformer(folder / "other.pt", tiny_tokenizer())
    (folder / "link.pt").symlink_to("model.pt")
    return folder


def generate(folder: Path, *arguments: str) -> Any:
    base = ["generate", "--path", str(folder / "model.pt"), "--beam", "2", "--max-len-a", "0", "--max-len-b", "8"]
    words = [argument.format(folder=folder) for argument in arguments]
    return CliRunner().invoke(main, [*base, *words], input="all human beings are born free\n")


def test_the_command_contrasts_with_the_model(folder: Path) -> None:
    chosen = ["--logits-processors", "contrastive", "--contrast", "{folder}/small.pt", "--contrast-weight"]
    plain, strong = generate(folder, "--format", "jsonl"), generate(folder, *chosen, "3", "--format", "jsonl")
    assert strong.exit_code == 0, strong.output
    assert strong.stdout != plain.stdout
    none = generate(folder, *chosen, "0", "--contrast-threshold", "0")
    assert none.stdout == generate(folder).stdout


@pytest.mark.slow
def test_a_language_to_avoid_replaces_the_target_language_of_the_contrasted_model(tmp_path: Path) -> None:
    model = str(save_ending_transformer(tmp_path / "many.pt", languages=("en", "it", "de")))
    copy = shutil.copy(model, tmp_path / "copy.pt")  # the model itself is refused where both read the same input

    def translated(*arguments: str) -> str:
        base = [
            "generate",
            "--path",
            model,
            "--source-lang",
            "en",
            "--target-lang",
            "de",
            "--max-len-a",
            "0",
            "--max-len-b",
            "8",
        ]
        chosen = ["--logits-processors", "contrastive", "--contrast", str(copy), "--contrast-weight", "4"]
        words = [*base, *chosen, "--format", "jsonl", *arguments]
        result = CliRunner().invoke(main, words, input="all human beings are born free\n")
        assert result.exit_code == 0, result.output
        return result.stdout

    assert translated("--contrast-lang", "de") == translated()
    assert translated("--contrast-lang", "it") != translated()
    assert '"text": "' in translated("--contrast-lang", "it", "--contrast-source", "empty")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "contrastive needs --contrast FILE"),
        (["--contrast", "{folder}/other.pt"], "other target pieces than"),
        (["--contrast", "{folder}/small.pt", "--contrast-weight", "-1"], "--contrast-weight is -1.0"),
        (["--contrast", "{folder}/small.pt", "--contrast-lang", "it"], "no language tokens"),
        (["--contrast", "{folder}/model.pt"], "model.pt is the translation"),
        (["--contrast", "{folder}/link.pt"], "link.pt is the translation"),
    ],
    ids=["missing", "vocabulary", "weight", "language", "equal", "link"],
)
def test_a_wrong_contrast_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    result = generate(folder, "--logits-processors", "contrastive", *arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_the_model_itself_may_read_a_source_without_words(folder: Path) -> None:
    chosen = ["--logits-processors", "contrastive", "--contrast", "{folder}/model.pt", "--contrast-source", "empty"]
    assert generate(folder, *chosen).exit_code == 0


@pytest.mark.slow
def test_the_contract_of_processors_holds(folder: Path) -> None:
    _, tokenizer = from_checkpoint(folder / "small.pt")
    check_logits_processor("contrastive", tokenizer, contrast=str(folder / "small.pt"), contrast_source="empty")
