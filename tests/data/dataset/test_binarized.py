import json
from pathlib import Path

import numpy as np
import pytest
from parallel_text import parallel_lines, write_pair

from nmtkit.data.dataset import binarized
from nmtkit.data.dataset.binarized import Dataset, verify
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.preprocess import preprocess
from nmtkit.data.dataset.stored_side import ConcatArrays
from nmtkit.data.tokenizers.tokenizer import BOS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a dataset of 300 training and 20 test pairs."""
    here = tmp_path_factory.mktemp("binarized")
    train, test = write_pair(here, "train", *parallel_lines(300)), write_pair(here, "test", *parallel_lines(20, 9))
    config = PreprocessConfig(
        source_lang="en",
        target_lang="de",
        train=(train,),
        test=(test,),
        destdir=here / "data",
        vocab_size=330,
        workers=1,
    )
    preprocess(config)
    return here / "data"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """Returns a copy of the dataset, which a test may damage."""
    import shutil

    shutil.copytree(folder, tmp_path / "data")
    return tmp_path / "data"


def test_rows_are_the_pairs(folder: Path) -> None:
    dataset = Dataset.open(folder)
    source, target = parallel_lines(300)
    split = dataset["train"]
    assert (len(split), dataset.source_lang, dataset.target_lang) == (300, "en", "de")
    for row in (0, 7, 299):
        assert dataset.tokenizer.decode_source(split.source.sentence(row)) == source[row]
        assert dataset.tokenizer.decode_target(split.target.sentence(row)) == target[row]
    assert dataset["test"].source_lines() == parallel_lines(20, 9)[0]
    assert dataset["test"].references() == parallel_lines(20, 9)[1]


def test_a_batch_is_the_plain_concatenation(folder: Path) -> None:
    split = Dataset.open(folder)["train"]
    pairs = np.array([5, 0, 299, 5])
    batch = split.batch(pairs)
    targets = [split.target.sentence(pair) for pair in pairs]
    assert batch.source.values.tolist() == [token for pair in pairs for token in split.source.sentence(pair)]
    assert batch.target_output.tolist() == [token for ids in targets for token in ids]
    assert batch.target_input.values.tolist() == [token for ids in targets for token in [BOS, *ids[:-1]]]
    assert batch.target_input.layout.lengths.tolist() == list(map(len, targets))
    assert batch.source.layout.max_length == max(len(split.source.sentence(pair)) for pair in pairs)
    assert batch.target_tokens == sum(map(len, targets))
    assert batch.pairs.tolist() == pairs.tolist()


def test_an_unknown_subset_names_those_there_are(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'valid'.*test, train"):
        Dataset.open(folder)["valid"]
    with pytest.raises(ValueError, match=r"no raw text .*'train'"):
        Dataset.open(folder)["train"].references()


def test_a_truncated_file_is_refused_at_open(copy: Path) -> None:
    path = copy / "train.target.ids.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train\.target\.ids\.bin has .* truncated"):
        Dataset.open(copy)
    path.unlink()
    with pytest.raises(ValueError, match=r"train\.target\.ids\.bin is missing"):
        Dataset.open(copy)


@pytest.mark.parametrize("name", ["train.source.ids.bin", "train.target.offsets.bin", "test.target.txt"])
def test_a_flipped_bit_is_found_at_open_in_a_small_file_and_by_verify_in_any(
    name: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "train: 300 pairs" in "\n".join(verify(copy))
    text = bytearray((copy / name).read_bytes())
    text[len(text) // 2] ^= 4
    (copy / name).write_bytes(text)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        Dataset.open(copy)
    monkeypatch.setattr(binarized, "SMALL_FILE", 0)
    with pytest.raises(ValueError, match=f"{name} is damaged|beyond the end|tokens, not"):
        verify(copy)


def test_verify_shows_text(folder: Path) -> None:
    lines = verify(folder)
    source, target = parallel_lines(300)
    assert f"  {source[0]} → {target[0]}" in lines


def test_another_tokenizer_is_refused(copy: Path, folder: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tokenizer"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="not the tokenizer"):
        Dataset.open(copy)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[]", "not the manifest"), ('{"nmtkit_dataset": 99}', "format 99")]
)
def test_a_manifest_that_cannot_be_read_is_named(text: str, message: str, copy: Path) -> None:
    (copy / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Dataset.open(copy)


def test_a_folder_that_is_no_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not an nmtkit dataset"):
        Dataset.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Dataset.open(tmp_path / "absent")


def test_concatenated_arrays_read_like_one() -> None:
    parts = [np.arange(4), np.arange(10, 10), np.arange(20, 27)]
    joined, plain = ConcatArrays(parts, [0, 4, 100]), np.concatenate((parts[0], parts[2] + 100))
    assert len(joined) == len(plain)
    assert np.asarray(joined).tolist() == plain.tolist()
    for start, end in ((0, 11), (2, 6), (5, 9), (3, 3), (4, 4), (0, 4)):
        assert joined[start:end].tolist() == plain[start:end].tolist()
    rows = np.array([10, 0, 4, 3, 4])
    assert joined[rows].tolist() == plain[rows].tolist()
    assert joined[5] == plain[5]
