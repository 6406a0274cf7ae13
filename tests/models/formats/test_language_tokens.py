"""Datasets of imported models with several languages: every subset and every transform keeps the language tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from make_huggingface import FOLDER

from nmtkit.cli import main
from nmtkit.config import derive
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.dataset.transform_pipeline import TransformPipeline
from nmtkit.data.dataset.transforms import TRANSFORMS

pytest.importorskip("safetensors")

# The tokens that begin a source sentence and its translation, and the codes that preprocess is given for them.
LANGUAGE_TOKENS = {
    "m2m_100": (("en", "de"), ["__en__"], ["__de__"]),
    "nllb": (("eng_Latn", "deu_Latn"), ["eng_Latn"], ["deu_Latn"]),
    "mbart_50": (("en_XX", "de_DE"), ["en_XX"], ["de_DE"]),
    "marian_languages": ((None, "deu"), [">>deu<<"], []),
    "marian": ((None, None), [], []),
}


def preprocessed(name: str, folder: Path, *flags: str) -> Dataset:
    """Makes a dataset with train, valid, valid1 and test of the tokenizer of a fixture, by commands."""
    model = folder / "model.pt"
    CliRunner().invoke(main, ["import", str(FOLDER / name), str(model), "--try", ""], catch_exceptions=False)
    (folder / "text.en").write_text("All are equal.\nright\n")
    (folder / "text.de").write_text("All are right.\nequal\n")
    text = str(folder / "text")
    base = ["preprocess", "-s", "en", "-t", "de", "--trainpref", text, "--validpref", f"{text},{text}"]
    base += ["--testpref", text, "--tokenizer-from", str(model), "--workers", "1", "--destdir", str(folder / "data")]
    (source, target), _, _ = LANGUAGE_TOKENS[name]
    base += [] if source is None else ["--source-language-token", source]
    base += [] if target is None else ["--target-language-token", target]
    result = CliRunner().invoke(main, [*base, *flags])
    assert result.exit_code == 0, result.output
    return Dataset.open(folder / "data")


@pytest.mark.parametrize("name", LANGUAGE_TOKENS)
def test_every_subset_of_a_dataset_has_the_tokens_of_its_languages(name: str, tmp_path: Path) -> None:
    dataset = preprocessed(name, tmp_path)
    codes, source_tokens, target_tokens = LANGUAGE_TOKENS[name]
    assert (dataset.source_language, dataset.target_language) == codes
    tokenizer = dataset.tokenizer
    plain_source = tokenizer.encode_source(["All are equal.", "right"]).split()
    plain_target = tokenizer.encode_target(["All are right.", "equal"]).split()
    assert list(dataset.splits) == ["valid", "valid1", "test", "train"]
    for subset, split in dataset.splits.items():
        for row in range(2):
            source, target = split.source.sentence(row), split.target.sentence(row)
            given, begun = source[: len(source_tokens)], target[: len(target_tokens)]
            assert tokenizer.source_pieces(given) == source_tokens, subset
            assert tokenizer.target_pieces(begun) == target_tokens, subset
            assert source[len(given) :] == plain_source[row].tolist(), subset
            assert target[len(begun) :] == plain_target[row].tolist(), subset
        if subset != "train":
            assert split.source_lines() == ["All are equal.", "right"]


@pytest.mark.parametrize("name", LANGUAGE_TOKENS)
def test_noise_leaves_the_tokens_of_languages_alone(name: str, tmp_path: Path) -> None:
    dataset = preprocessed(name, tmp_path)
    _, source_tokens, target_tokens = LANGUAGE_TOKENS[name]
    tokenizer, split = dataset.tokenizer, dataset["train"]
    noise = [("word_dropout", {"word_dropout": 0.99}), ("word_blank", {"word_blank": 1.0}), ("word_shuffle", {})]
    chosen = [(it, TRANSFORMS[it].factory(derive(TRANSFORMS[it].preset, own, ""), tokenizer)) for it, own in noise]
    pairs = np.array([0, 1])
    for transforms in [[transform] for transform in chosen] + [chosen]:
        pipeline = TransformPipeline(transforms, tokenizer, seed=1)
        for epoch in range(8):
            source, target = pipeline(
                epoch,
                pairs,
                split.source.gather(pairs),
                split.target.gather(pairs),
                monolingual=split.monolingual(pairs),
            )
            for ids in source.split():
                assert tokenizer.source_pieces(ids[: len(source_tokens)]) == source_tokens
                assert not set(ids[len(source_tokens) :].tolist()) & set(tokenizer.languages.values())
            assert target.ids.tolist() == split.target.gather(pairs).ids.tolist()
            assert tokenizer.target_pieces(target.ids[: len(target_tokens)]) == target_tokens


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--source-language-token and --target-language-token"),
        (["--source-language-token", "en"], "af, am, ar"),
        (["--source-language-token", "xx", "--target-language-token", "de"], "--source-language-token xx: the model"),
    ],
)
def test_a_dataset_of_a_multilingual_model_needs_known_languages(
    flags: list[str], message: str, tmp_path: Path
) -> None:
    preprocessed("m2m_100", tmp_path)
    base = ["preprocess", "-s", "en", "-t", "de", "--workers", "2"]
    base += ["--tokenizer-from", str(tmp_path / "model.pt"), "--destdir", str(tmp_path / "new")]
    for corpus in ("--validpref", "--trainpref"):
        result = CliRunner().invoke(main, [*base, corpus, str(tmp_path / "text"), *flags])
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr


def test_a_dataset_whose_valid_set_lacks_language_tokens_is_refused(tmp_path: Path) -> None:
    preprocessed("m2m_100", tmp_path)
    path = tmp_path / "data" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["languages"]  # the format of nmtkit before the languages were in every subset
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="lack the language tokens"):
        Dataset.open(tmp_path / "data")
