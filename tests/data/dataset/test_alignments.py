import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_text import parallel_lines, write_pair

from nmtkit.cli import main
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.preprocess import preprocess
from nmtkit.data.tokenizers.batch_encoder import BatchEncoder
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import SubwordModel, Tokenizer, normalize

Links = list[tuple[int, int]]


def random_links(source: list[str], target: list[str], seed: int = 3) -> list[Links]:
    """Draws links of words, some of them twice, for most of the pairs."""
    rng = random.Random(seed)
    return [
        [(rng.randrange(len(s.split())), rng.randrange(len(t.split()))) for _ in range(rng.randrange(6))]
        for s, t in zip(source, target, strict=True)
    ]


def write_links(path: Path, links: list[Links]) -> Path:
    path.write_text("".join(" ".join(f"{i}-{j}" for i, j in line) + "\n" for line in links))
    return path


def plain_links(tokenizer: Tokenizer, source: str, target: str, links: Links, tag: bool) -> set[tuple[int, int]]:
    """Maps links of words to links of pieces: each piece of a source word to each piece of its target word."""
    pieces = []
    for side, (text, encode) in enumerate(((source, tokenizer.encode_source), (target, tokenizer.encode_target))):
        counts = [len(encode([word]).ids) - 1 for word in text.split()]
        starts = np.cumsum([1 if tag and side == 0 else 0, *counts]).tolist()
        pieces.append([range(start, start + count) for start, count in zip(starts, counts, strict=False)])
    return {(s, t) for i, j in links for s in pieces[0][i] for t in pieces[1][j]}


def make(folder: Path, train: list[str], alignments: tuple[Path | None, ...], **changes: Any) -> Dataset:
    defaults = {"source_lang": "en", "target_lang": "de", "vocab_size": 320, "workers": 1, "destdir": folder / "data"}
    preprocess(PreprocessConfig(**defaults | {"train": tuple(train), "alignments": alignments} | changes))
    return Dataset.open(folder / "data")


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "char"])
@pytest.mark.parametrize("tag", ["<2de>", None])
def test_links_of_words_become_links_of_their_pieces(model_type: str, tag: str | None, tmp_path: Path) -> None:
    source, target = parallel_lines(80)
    source[5], target[5] = "a  man ", " ein   Mann"  # several spaces separate words like a single space
    links = random_links(source, target)
    sizes = {"bpe": 320, "unigram": 310, "char": 400}
    flags = {"model_type": model_type, "vocab_size": sizes[model_type], "tags": (tag,)}
    alignments = write_links(tmp_path / "train.align", links)
    dataset = make(tmp_path, [write_pair(tmp_path, "train", source, target)], (alignments,), **flags)
    batch = dataset["train"].batch(np.arange(80))
    assert batch.alignments is not None
    expected = [
        (row, s, t)
        for row in range(80)
        for s, t in plain_links(dataset.tokenizer, source[row], target[row], links[row], tag is not None)
    ]
    assert sorted(map(tuple, batch.alignments.tolist())) == sorted(expected)
    some = dataset["train"].batch(np.array([7, 3]))
    assert some.alignments is not None
    moved = [(1 if row == 3 else 0, s, t) for row, s, t in expected if row in (3, 7)]
    assert sorted(map(tuple, some.alignments.tolist())) == sorted(moved)
    unchanged = dataset["train"].batch(np.array([3]), lambda pairs, source, target, monolingual: (source, target))
    assert unchanged.alignments is None  # a transform changes the words, so their links are unknown


def test_links_stay_with_their_pairs_when_pairs_are_dropped_repeated_and_mixed(tmp_path: Path) -> None:
    source, target = parallel_lines(60)
    target[4] = ""  # dropped as empty
    source[9], target[9] = source[2], target[2]  # dropped as a duplicate
    links = [[] if row == 4 else line for row, line in enumerate(random_links(source, ["x y"] * 60))]
    links = [[(i, min(j, len(t.split()) - 1)) for i, j in line] for line, t in zip(links, target, strict=True)]
    train = write_pair(tmp_path, "train", source, target)
    more = write_pair(tmp_path, "more", *parallel_lines(30, 8))
    alignments = write_links(tmp_path / "train.align", links)
    for workers in (1, 2):
        dataset = make(
            tmp_path, [train, more], (alignments, None), weights=(2.0, 1.0), drop_duplicates=True, workers=workers,
            overwrite=True,
        )  # fmt: skip
        split = dataset["train"]
        of_pair = {
            (s, t): plain_links(dataset.tokenizer, s, t, line, False)
            for s, t, line in reversed(list(zip(source, target, links, strict=True)))
        }
        batch = split.batch(np.arange(len(split)))
        assert batch.alignments is not None
        rows = batch.alignments.tolist()
        for row in range(len(split)):
            pair = (
                dataset.tokenizer.decode_source(split.source.sentence(row)),
                dataset.tokenizer.decode_target(split.target.sentence(row)),
            )
            assert {(s, t) for sentence, s, t in rows if sentence == row} == of_pair.get(pair, set())
        assert sum(bool(of_pair.get(pair)) for pair in of_pair) > 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-0\n1:0\n", r"train\.align:2: '1:0' .*0-0 1-2 2-1"),
        ("0-0\n-1-0\n", r"train\.align:2: '-1-0'"),
        ("0-0\n0-0 5-1\n", r"train\.align:2 .*word 5 .*source .*2 words"),
        ("0-0\n0-2\n", r"train\.align:2 .*word 2 .*target .*2 words"),
        ("0-0\n", r"has 2 .*train\.align has 1"),
    ],
)
def test_an_alignment_file_that_does_not_fit_is_named(text: str, message: str, tmp_path: Path) -> None:
    train = write_pair(tmp_path, "train", ["a man", "the man"], ["ein Mann", "der Mann"])
    (tmp_path / "train.align").write_text(text)
    (tmp_path / "joint.model").write_bytes(train_model(["a man the der ein Mann"] * 9, 275))
    with pytest.raises(ValueError, match=message):
        make(tmp_path, [train], (tmp_path / "train.align",), tokenizer_from=(tmp_path / "joint.model",))
    assert not (tmp_path / "data").exists()


def test_settings_that_do_not_go_with_alignments_are_refused(tmp_path: Path) -> None:
    train = write_pair(tmp_path, "train", *parallel_lines(60))
    alignments = write_links(tmp_path / "train.align", [[(0, 0)]] * 60)
    unknown = write_pair(tmp_path, "unknown", [*["a b"] * 30, "x y"], [*["c d"] * 30, "c d"])
    links = write_links(tmp_path / "unknown.align", [[(0, 0)]] * 31)
    with pytest.raises(ValueError, match="word model"):
        make(tmp_path, [unknown], (links,), model_type="word", vocab_size=7)
    with pytest.raises(ValueError, match=r"item for each corpus \(1\)"):
        make(tmp_path, [train], (alignments, None))
    with pytest.raises(FileNotFoundError, match="--alignments"):
        make(tmp_path, [train], (tmp_path / "absent",))


@pytest.mark.slow
def test_a_model_is_trained_with_the_alignments(tmp_path: Path) -> None:
    train = write_pair(tmp_path, "train", *parallel_lines(60))
    alignments = write_links(tmp_path / "train.align", random_links(*parallel_lines(60)))
    valid = write_pair(tmp_path, "valid", *parallel_lines(5, 8))
    make(tmp_path, [train], (alignments,), valid=(valid,))
    flags = ["train", str(tmp_path / "data"), "--arch", "transformer_tiny", "--criterion", "guided_alignment"]
    flags += ["--device", "cpu", "--save-dir", str(tmp_path / "run"), "--max-update", "2", "--max-tokens", "200"]
    result = CliRunner().invoke(main, flags)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab ½¨\xa0\u200b日\t"), max_size=12), min_size=1, max_size=5))
def test_the_pieces_of_every_word_are_found_whatever_the_normaliser(lines: list[str]) -> None:
    encoder = BatchEncoder(SubwordModel(_model_with_normaliser()), "uint16")
    text = "".join(line + "\n" for line in lines)
    encoded = encoder.encode(text)
    words = encoder.words(text, encoded)
    expected = [
        [len(encoder.encode(word + "\n").ids) - 1 for word in normalize(line).split(" ") if word] for line in lines
    ]
    assert words.per_line.tolist() == list(map(len, expected))
    assert words.pieces.tolist() == [count for line in expected for count in line]
    first = [sum(line[:index]) for line in expected for index in range(len(line))]
    assert [f for f, count in zip(words.first_piece, words.pieces, strict=True) if count] == [
        f for f, count in zip(first, words.pieces, strict=True) if count
    ]


def _model_with_normaliser() -> bytes:
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["ab ba abba", "b a ½"] * 20),
        model_writer=model,
        hard_vocab_limit=False,
        vocab_size=20,
        minloglevel=2,
    )
    return model.getvalue()
