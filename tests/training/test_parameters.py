"""The weights a run starts from: each piece keeps its own row, whichever vocabulary it was in."""

from pathlib import Path

import pytest
import torch

from nmtkit import checkpoint
from nmtkit.architectures import ARCHITECTURES
from nmtkit.data.spm_training import train_model
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.models import build, to_checkpoint, vocabulary_of
from nmtkit.registry import derive
from nmtkit.training.parameters import decay_rule, same_pieces, start_from

NAME = "transformer_tiny"
CONFIG = derive(
    ARCHITECTURES[NAME].preset,
    {"d_model": 8, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1},
    "test",
)
SOURCE = ["der Hund sieht die Katze", "die Katze sieht das Haus", "das Haus ist hier"]
TARGET = ["the dog sees the cat", "the cat sees the house", "the house is here"]


def tokenizer(joint: bool, more: str) -> Tokenizer:
    """A vocabulary of the lines and of `more`, so that no two are in the same order."""
    if joint:
        return Tokenizer(train_model([more, *SOURCE, *TARGET], 300))
    return Tokenizer(train_model([more, *SOURCE], 285), train_model([more, *TARGET], 283))


def rows(tokenizer: Tokenizer, side: str) -> dict[str, int]:
    size = getattr(tokenizer, f"{side}_size")
    return {piece: row for row, piece in enumerate(getattr(tokenizer, f"{side}_pieces")(range(size)))}


@pytest.mark.parametrize("new_joint", [True, False])
@pytest.mark.parametrize("old_joint", [True, False])
def test_every_piece_keeps_its_row_from_any_vocabulary_to_any(tmp_path: Path, old_joint: bool, new_joint: bool) -> None:
    before, after = tokenizer(old_joint, "Haus here"), tokenizer(new_joint, "and other Worte too")
    torch.manual_seed(1)
    old = build(NAME, CONFIG, vocabulary_of(before))
    new = build(NAME, CONFIG, vocabulary_of(after))
    fresh = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    checkpoint.save(tmp_path / "old.pt", to_checkpoint(old, NAME, CONFIG, before, [], 1))
    known = start_from(new, NAME, CONFIG, after, tmp_path / "old.pt")
    kept = 0
    for part, side in (("source_embedding.tokens", "source"), ("output_projection", "target")):
        new_rows, sides = rows(after, side), [side]
        if new_joint:  # one matrix, whose rows may come from either of the old vocabularies; the target's is the last
            sides = ["target", "source"]
        for piece, row in new_rows.items():
            sources = [(other, rows(before, other)[piece]) for other in sides if piece in rows(before, other)]
            name = {"source": "source_embedding.tokens", "target": "output_projection"}
            expected = (
                old.state_dict()[f"{name[sources[0][0]]}.weight"][sources[0][1]]
                if sources
                else fresh[f"{part}.weight"][row]
            )
            assert torch.equal(new.state_dict()[f"{part}.weight"][row], expected), (part, piece)
            kept += bool(sources)
        assert known[side] == len(new_rows.keys() & rows(before, side).keys())
    assert 500 < kept < 600


def test_a_vocabulary_without_a_common_piece_is_no_error() -> None:
    assert [len(part) for part in same_pieces(["a"], ["b"])] == [0, 0]


@pytest.mark.parametrize("rule", ["encoder.*", "=0.1", "encoder.*=many", "encoder.*=nan", "encoder.*=-1", "a=inf"])
def test_a_weight_decay_that_is_none_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="is not PATTERN=NUMBER"):
        decay_rule(rule)
