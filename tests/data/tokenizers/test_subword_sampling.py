"""Random segmentation equals SentencePiece without noise, and has the distribution of the papers with noise."""

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from parallel_text import parallel_lines

from nmtkit.data.dataset.transforms import BPEDropout, BPEDropoutConfig
from nmtkit.data.tokenizers.spm_model import pieces_of, renumbered
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.subword_sampling import SubwordSampler
from nmtkit.data.tokenizers.tokenizer import SubwordModel, Tokenizer

SOURCE, TARGET = parallel_lines(400)
LINES = [*SOURCE[:100], *TARGET[:100], "a wörd with ☃ and ▁ in it", "  "]


def test_bpe_that_leaves_no_merge_out_is_sentencepieces(joint_tokenizer: Tokenizer) -> None:
    sampler = SubwordSampler(joint_tokenizer.source, 0.0, "source")
    for line in [*LINES, "<2de> a man"]:
        ids = joint_tokenizer.encode_source([line]).ids[:-1]
        assert sampler(ids, np.random.default_rng(1)) == ids.tolist()


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_text_stays_and_its_pieces_change(model_type: str) -> None:
    tokenizer = Tokenizer(train_model(SOURCE + TARGET, 320, model_type))
    sampler = SubwordSampler(tokenizer.source, 0.3, "source")
    generator = np.random.default_rng(1)
    for line in LINES:
        ids = tokenizer.encode_source([line]).ids[:-1]
        made = [sampler(ids, generator) for _ in range(10)]
        assert {tokenizer.decode_source(it) for it in made} == {tokenizer.decode_source(ids.tolist())}
    assert len({tuple(sampler(tokenizer.encode_source(LINES[:1]).ids[:-1], generator)) for _ in range(30)}) > 5


def test_two_models_with_one_table_segment_their_own_side() -> None:
    models = train_model(SOURCE, 300), train_model(TARGET, 300)
    table = list(dict.fromkeys(piece.text for model in models for piece in pieces_of(model)))
    tokenizer = Tokenizer(*(renumbered(model, table) for model in models))
    assert tokenizer.joint and not tokenizer.one_model
    transform, generator = BPEDropout(BPEDropoutConfig(bpe_dropout=1e-9), tokenizer), np.random.default_rng(1)
    for source, target in zip(SOURCE[:20], TARGET[:20], strict=True):
        sides = tokenizer.encode_source([source]).ids[:-1], tokenizer.encode_target([target]).ids[:-1]
        assert [ids.tolist() for ids in transform.transform(*sides, generator)] == [ids.tolist() for ids in sides]


@pytest.mark.parametrize("alpha", [0.1, 0.4])
def test_bpe_dropout_makes_pieces_as_often_as_sentencepiece(joint_tokenizer: Tokenizer, alpha: float) -> None:
    lines, generator = LINES[:100], np.random.default_rng(1)
    sampler = SubwordSampler(joint_tokenizer.source, alpha, "source")
    original = sentencepiece.SentencePieceProcessor(model_proto=joint_tokenizer.source_model)
    counts: list[Counter[int]] = [Counter(), Counter()]
    for line in lines:
        ids = joint_tokenizer.encode_source([line]).ids[:-1]
        for _ in range(20):
            counts[0].update(sampler(ids, generator))
            counts[1].update(original.encode(line, enable_sampling=True, alpha=alpha, nbest_size=-1))
    assert counts[0].total() == pytest.approx(counts[1].total(), rel=0.01)
    for token in counts[0] | counts[1]:
        one, other = counts[0][token], counts[1][token]
        assert abs(one - other) < 5 * (one + other) ** 0.5 + 3


def test_segmentations_of_a_unigram_model_come_with_their_probabilities() -> None:
    tokenizer = Tokenizer(train_model(SOURCE + TARGET, 320, "unigram"))
    sampler = SubwordSampler(tokenizer.source, 0.2, "source")

    def segmentations(rest: str) -> list[list[str]]:
        if not rest:
            return [[]]
        ends = [end for end in range(1, len(rest) + 1) if rest[:end] in sampler.scores]
        return [[rest[:end], *others] for end in ends for others in segmentations(rest[end:])]

    words = sorted({"▁" + word for line in SOURCE + TARGET for word in line.split()})
    text = max(words, key=lambda word: len(segmentations(word)))
    weights = {tuple(it): math.exp(0.2 * sum(sampler.scores[piece] for piece in it)) for it in segmentations(text)}
    assert len(weights) == 3
    generator = np.random.default_rng(1)
    ids = np.array([sampler.ids[character] for character in text])
    counts = Counter(tuple(sampler.names[token] for token in sampler(ids, generator)) for _ in range(5000))
    for segmentation, weight in weights.items():
        probability = weight / sum(weights.values())
        deviation = (probability * (1 - probability) / 5000) ** 0.5
        assert abs(counts[segmentation] / 5000 - probability) < 4 * deviation + 1e-3


@pytest.mark.parametrize("model_type", ["word", "char"])
def test_models_of_one_segmentation_are_refused(model_type: str) -> None:
    model = train_model(SOURCE + TARGET, 30 if model_type == "word" else 310, model_type)
    with pytest.raises(ValueError, match=f"the {model_type} vocabulary .*target side"):
        SubwordSampler(SubwordModel(model), 0.1, "target")


def test_another_process_makes_the_same_segmentations(joint_tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(joint_tokenizer.source_model)
    program = (
        "import sys; from pathlib import Path; import numpy as np\n"
        "from nmtkit.data.tokenizers.tokenizer import SubwordModel, Tokenizer\n"
        "from nmtkit.data.tokenizers.subword_sampling import SubwordSampler\n"
        "model = Path(sys.argv[1]).read_bytes(); ids = Tokenizer(model).encode_source([sys.argv[2]]).ids[:-1]\n"
        "print(SubwordSampler(SubwordModel(model), 0.4, 'source')(ids, np.random.default_rng(7)))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model"), SOURCE[0]]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    ids = joint_tokenizer.encode_source(SOURCE[:1]).ids[:-1]
    sampler = SubwordSampler(joint_tokenizer.source, 0.4, "source")
    assert printed == str(sampler(ids, np.random.default_rng(7)))
