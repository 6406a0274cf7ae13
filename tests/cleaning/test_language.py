"""Identification of whole blocks equals py3langid line by line."""

import math
from pathlib import Path

import numpy as np
import pytest

from nmtkit.cleaning.filters import FilterContext, TextBlock
from nmtkit.cleaning.filters.alignment import Alignment, AlignmentConfig, line_features
from nmtkit.cleaning.filters.calibration import logistic_regression
from nmtkit.cleaning.filters.languages import Swapped
from nmtkit.config import Config
from nmtkit.demo.run import read_corpus
from nmtkit.text import language_identification
from nmtkit.text.language_identification import BatchIdentifier, columns_of

LINES = ["", "...", "SCHÖN IST ES HIER", "héllo wörld", "🙂", "これは日本語の文です。", "Добрый день, мир", "x" * 150,
         *(line for pair in read_corpus()["train"][:40] for line in pair)]  # fmt: skip


@pytest.mark.slow
def test_probabilities_equal_py3langid() -> None:
    langid = pytest.importorskip("py3langid.langid")
    plain = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    identifier = BatchIdentifier()
    probabilities = identifier.probabilities(LINES)
    for line, row in zip(LINES, probabilities, strict=True):
        expected = dict(plain.rank(line))
        np.testing.assert_allclose(row, [expected[name] for name in identifier.languages], atol=2e-5)


@pytest.mark.slow
def test_the_model_in_the_cache_is_the_model_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMTKIT_CACHE", str(tmp_path))
    read = language_identification._model.__wrapped__
    expected, (folder,) = read(), tmp_path.iterdir()  # the first use writes the copy
    for size in (None, 1000, 0):  # bytes of the damaged file; the first copy is not damaged
        if size is not None:
            (folder / "weights.npy").write_bytes((folder / "weights.npy").read_bytes()[:size])
            monkeypatch.setattr(language_identification, "_unpacked", lambda: expected)
            assert read() is expected  # writes the copy again
        monkeypatch.setattr(language_identification, "_unpacked", lambda: pytest.fail("the copy was not read"))
        cached = read()
        assert cached.keys() == expected.keys() and all((cached[name] == expected[name]).all() for name in expected)


@pytest.mark.slow
def test_a_restricted_identifier_equals_py3langid_with_these_languages() -> None:
    langid = pytest.importorskip("py3langid.langid")
    plain = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    plain.set_languages(["en", "de", "ru"])
    identifier = BatchIdentifier().restricted({"en", "de", "ru"})
    for line, row in zip(LINES, identifier.probabilities(LINES), strict=True):
        expected = dict(plain.rank(line))
        np.testing.assert_allclose(row, [expected[name] for name in identifier.languages], atol=2e-5)
    assert columns_of(identifier.languages, "deu_Latn") == [identifier.languages.index("de")]


def test_the_size_of_the_buffer_does_not_change_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    identifier = BatchIdentifier().restricted({"en", "de", "fr"})
    whole = identifier.probabilities(LINES)
    monkeypatch.setattr(language_identification, "BUFFER", 7)  # the features of a line are in several buffers
    np.testing.assert_allclose(identifier.probabilities(LINES), whole, atol=1e-5)


def test_many_lines_have_the_probabilities_of_few_lines() -> None:
    identifier = BatchIdentifier().restricted({"en", "de"})
    lines = ["Guten Tag", "hello", "", "naïve"]
    many = identifier.probabilities(lines * 9000)  # line and feature do not fit into 32 bits
    np.testing.assert_allclose(many, np.tile(identifier.probabilities(lines), (9000, 1)), atol=1e-6)


@pytest.mark.parametrize(("codes", "dropped"), [(("en", "en"), 0), (("en-GB", "eng_Latn"), 0), (("de", "en"), 100)])
def test_languages_that_the_identifier_does_not_tell_apart_are_never_swapped(
    codes: tuple[str, str], dropped: int
) -> None:
    pairs = read_corpus()["train"][:100]
    swapped = Swapped(Config(), FilterContext(*codes))
    lines = [[pair[0] for pair in pairs], [pair[codes[0] == "de"] for pair in pairs]]
    assert swapped.drops(swapped.score(TextBlock(*lines))).sum() == pytest.approx(dropped, abs=10 * (dropped > 0))


@pytest.mark.slow
def test_word_tables_find_pairs_that_are_not_translations() -> None:
    pairs = read_corpus()["train"][:3000]
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    alignment = Alignment(AlignmentConfig(), FilterContext("en", "de"))
    alignment.fit(TextBlock(sources, targets))
    right = alignment.drops(alignment.score(TextBlock(sources, targets)))
    wrong = alignment.drops(alignment.score(TextBlock(sources, [*targets[1000:], *targets[:1000]])))
    assert right.mean() < 0.02
    assert wrong.mean() > 0.6


@pytest.mark.slow
def test_word_tables_find_half_of_a_line_without_source() -> None:
    pairs = read_corpus()["train"][:4000]
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    alignment = Alignment(AlignmentConfig(), FilterContext("en", "de"))
    alignment.fit(TextBlock(sources, targets))
    overlong = [f"{target} {other}" for target, other in zip(targets, [*targets[900:], *targets[:900]], strict=True)]
    assert alignment.drops(alignment.score(TextBlock(sources, overlong))).mean() > 0.9
    assert alignment.drops(alignment.score(TextBlock(sources, targets))).mean() < 0.01


def test_features_of_a_line_equal_the_formulas_word_by_word() -> None:
    generator = np.random.default_rng(1)
    lengths, source_lengths = np.array([4, 0, 1, 5, 0]), np.array([3, 2, 0, 7, 0])
    nulls = 10 ** generator.uniform(-9, -1, 10)
    means = nulls / 4 * 10 ** generator.uniform(0, 6, 10)
    means[0], nulls[1] = 1e-9, 0.0
    features = line_features(np.array([means, nulls]), source_lengths, lengths)
    start = 0
    for row, (length, sources) in enumerate(zip(lengths.tolist(), source_lengths.tolist(), strict=True)):
        logs, evidence = [], []
        for mean, null in zip(means[start : start + length], nulls[start : start + length], strict=True):
            mean, null = max(mean, 1e-7), max(null, 1e-7)
            logs.append(math.log(mean))
            evidence.append(min(max(-math.log(null / (mean * (sources + 1))), 0), 12))
        parts = [part for part in (evidence[: length // 2], evidence[length // 2 :]) if part]
        expected = [
            sum(logs) / max(length, 1),
            sum(min(each, 3) for each in evidence) / max(length, 1),
            min((sum(part) / len(part) for part in parts), default=0),
        ]
        np.testing.assert_allclose(features[:, row], expected)
        start += length


def test_logistic_regression_finds_the_weights_of_its_data() -> None:
    generator = np.random.default_rng(1)
    features = generator.normal(size=(20_000, 2))
    labels = generator.random(20_000) < 1 / (1 + np.exp(-(0.5 + features @ [2.0, -1.0])))
    np.testing.assert_allclose(logistic_regression(features, labels.astype(float)), [0.5, 2, -1], atol=0.08)
