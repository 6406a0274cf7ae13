"""At the start of a run, each piece keeps its embedding, also in another vocabulary."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_model
from torch import Tensor

from nmtkit.config import derive
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.tokenizers.spm_model import FOREIGN, ModelPiece, new_model, renumbered
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.building import build, to_checkpoint, vocabulary_of
from nmtkit.training.config import JobConfig
from nmtkit.training.initial_weights import (
    SideName,
    embedding_of,
    load_embeddings,
    same_pieces,
    spellings,
    start_from,
)
from nmtkit.training.parameters import decay_rule
from nmtkit.training.setup import build_trainer

NAME = "transformer_tiny"
CONFIG = derive(
    ARCHITECTURES[NAME].preset,
    {"d_model": 8, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1},
    "test",
)
SOURCE = ["der Hund sieht die Katze", "die Katze sieht das Haus", "das Haus ist hier"]
SIDES: tuple[SideName, SideName] = ("source", "target")
TARGET = ["the dog sees the cat", "the cat sees the house", "the house is here"]


def tokenizer(joint: bool, more: str) -> Tokenizer:
    """Returns a tokenizer of the lines and of `more`. Different texts give different orders of pieces."""
    if joint:
        return Tokenizer(train_model([more, *SOURCE, *TARGET], 300))
    return Tokenizer(train_model([more, *SOURCE], 285), train_model([more, *TARGET], 283))


def rows(tokenizer: Tokenizer, side: str) -> dict[str, int]:
    size = getattr(tokenizer, f"{side}_size")
    return {piece: row for row, piece in enumerate(getattr(tokenizer, f"{side}_pieces")(range(size)))}


@pytest.mark.slow
@pytest.mark.parametrize("new_joint", [True, False])
@pytest.mark.parametrize("old_joint", [True, False])
def test_every_piece_keeps_its_row_from_any_vocabulary_to_any(tmp_path: Path, old_joint: bool, new_joint: bool) -> None:
    before, after = tokenizer(old_joint, "Haus here"), tokenizer(new_joint, "and other Worte too")
    torch.manual_seed(1)
    old = build(NAME, CONFIG, vocabulary_of(before))
    new = build(NAME, CONFIG, vocabulary_of(after))
    checkpoint_file.save(tmp_path / "old.pt", to_checkpoint(old, NAME, CONFIG, before, [], 1))
    known = start_from(new, NAME, CONFIG, after, tmp_path / "old.pt")
    kept = 0
    for part, side in (("source_embedding.tokens", "source"), ("output_projection", "target")):
        new_rows, sides = rows(after, side), [side]
        if new_joint:  # one matrix, whose rows may come from either of the old vocabularies; the target's is the last
            sides = ["target", "source"]
        for piece, row in new_rows.items():
            sources = [(other, rows(before, other)[piece]) for other in sides if piece in rows(before, other)]
            name = {"source": "source_embedding.tokens", "target": "output_projection"}
            found = new.state_dict()[f"{part}.weight"][row]
            if sources:
                expected = old.state_dict()[f"{name[sources[0][0]]}.weight"][sources[0][1]]
                assert torch.equal(found, expected), (part, piece)
            else:  # a mean of old rows
                assert 0 < found.abs().max() <= old.state_dict()[f"{part}.weight"].abs().max()
            kept += bool(sources)
        assert known[side] == len(new_rows.keys() & rows(before, side).keys())
    assert 500 < kept < 600


def one_table(text: str) -> Tokenizer:
    """Returns a tokenizer of two BPE models with one table of ids, as in imported models."""
    both = tokenizer(False, text)
    pieces = {*rows(both, "source"), *rows(both, "target")} - {"<unk>", "<s>", "</s>"}
    table = ["<unk>", "<s>", "</s>", *sorted(pieces)]
    return Tokenizer(*(renumbered(model, table) for model in (both.source_model, both.target_model)))


@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_of_two_models_with_one_table_keep_their_rows(tmp_path: Path, reverse: bool) -> None:
    tokenizers = one_table("Haus here"), tokenizer(True, "and other Worte too")
    before, after = tokenizers[::-1] if reverse else tokenizers
    torch.manual_seed(1)
    old, new = build(NAME, CONFIG, vocabulary_of(before)), build(NAME, CONFIG, vocabulary_of(after))
    checkpoint_file.save(tmp_path / "old.pt", to_checkpoint(old, NAME, CONFIG, before, [], 1))
    known = start_from(new, NAME, CONFIG, after, tmp_path / "old.pt")
    ids, old_ids = (
        {piece.removeprefix(FOREIGN): row for piece, row in rows(each, "source").items()} for each in (after, before)
    )
    common = ids.keys() & old_ids.keys()
    assert known == {"source": len(common), "target": len(common)}
    table, old_table = (model.state_dict()["source_embedding.tokens.weight"] for model in (new, old))
    assert all(torch.equal(table[ids[piece]], old_table[old_ids[piece]]) for piece in common)


def test_pieces_of_the_other_side_are_new_to_a_matrix_of_one_side(tmp_path: Path) -> None:
    before, after = tokenizer(False, "Haus here"), tokenizer(True, "and other Worte too")
    config = replace(CONFIG, share_embeddings=False)
    torch.manual_seed(1)
    old, new = build(NAME, config, vocabulary_of(before)), build(NAME, config, vocabulary_of(after))
    checkpoint_file.save(tmp_path / "old.pt", to_checkpoint(old, NAME, config, before, [], 1))
    start_from(new, NAME, config, after, tmp_path / "old.pt")
    for part, side, other in (("source_embedding.tokens", *SIDES), ("output_projection", *SIDES[::-1])):
        table, old_table = (model.state_dict()[f"{part}.weight"] for model in (new, old))
        ids, old_ids = rows(after, side), rows(before, side)
        spelled = spellings(after, before, side, side, None)
        pieces = (ids.keys() & rows(before, other).keys()) - old_ids.keys()
        assert pieces
        for piece in pieces:
            spelling = list(spelled[ids[piece]])
            torch.testing.assert_close(table[ids[piece]], old_table[spelling or slice(3, None)].mean(0))


def multilingual(text: str, *tokens: str) -> Tokenizer:
    model = train_model([text, *SOURCE, *TARGET], 300)
    table = Tokenizer(model).source_pieces(range(300))
    return Tokenizer(renumbered(model, [*table, *tokens], control=tokens))


@pytest.mark.parametrize("relative", [None, "de"])
def test_new_pieces_start_from_the_old_pieces_that_spell_them(tmp_path: Path, relative: str | None) -> None:
    before = multilingual("Haus here", "__de__", "__en__")
    after = multilingual("Katzenhaus łódź dogs dogs dogs dogs", "__en__", "__de__", "__pl__")
    torch.manual_seed(1)
    old, new = build(NAME, CONFIG, vocabulary_of(before)), build(NAME, CONFIG, vocabulary_of(after))
    checkpoint_file.save(tmp_path / "old.pt", to_checkpoint(old, NAME, CONFIG, before, [], 1))
    start_from(new, NAME, CONFIG, after, tmp_path / "old.pt", relative)
    ids, old_ids = rows(after, "source"), rows(before, "source")
    for name in ("source_embedding.tokens.weight", "output_projection.weight"):
        table, old_table = new.state_dict()[name], old.state_dict()[name]
        assert torch.equal(table[ids["__en__"]], old_table[old_ids["__en__"]])
        tokens = old_table[[old_ids["__de__"]] if relative else [old_ids["__de__"], old_ids["__en__"]]]
        torch.testing.assert_close(table[ids["__pl__"]], tokens.mean(0))
        assert "▁dogs" in ids.keys() - old_ids.keys()
        spelling = before.source_pieces(before.encode_source(["dogs"]).ids[:-1])
        assert len(spelling) > 1 and "".join(spelling) == "▁" + "dogs"
        torch.testing.assert_close(table[ids["▁dogs"]], old_table[[old_ids[piece] for piece in spelling]].mean(0))
        unknown = [piece for piece in ids.keys() - old_ids.keys() if "ó" in piece or "ł" in piece]
        for piece in unknown:  # byte pieces, which an old model has never read
            torch.testing.assert_close(table[ids[piece]], old_table[3:].mean(0))
        assert unknown


def test_the_name_of_a_byte_is_not_its_spelling() -> None:
    characters = [ModelPiece(char, -float(rank)) for rank, char in enumerate("▁<0x123456789ABCDEF>")]
    before, after = Tokenizer(new_model(characters, "bpe", b"")), tokenizer(True, "Haus")
    spelled = spellings(after, before, "source", "source", None)
    of_bytes = [row for piece, row in rows(after, "source").items() if piece.startswith("<0x")]
    assert len(of_bytes) == 256 and not any(spelled[row] for row in of_bytes)


def separate_languages(text: str, *tokens: str) -> Tokenizer:
    """Returns a tokenizer of two vocabularies. Only the source has language tokens, as in Marian."""
    models = train_model([text, *SOURCE], 285), train_model([text, *TARGET], 280)
    table = Tokenizer(models[0]).source_pieces(range(285))
    return Tokenizer(renumbered(models[0], [*table, *tokens], control=tokens), models[1])


@pytest.mark.parametrize("joint", [False, True])
def test_language_tokens_of_the_source_are_no_target_pieces(tmp_path: Path, joint: bool) -> None:
    before = separate_languages("Haus here", ">>deu<<", ">>fra<<")
    tokens = ["__deu__", "__pol__"]
    after = multilingual("other Worte", *tokens) if joint else separate_languages("other Worte", *tokens)
    torch.manual_seed(1)
    old, new = build(NAME, CONFIG, vocabulary_of(before)), build(NAME, CONFIG, vocabulary_of(after))
    checkpoint_file.save(tmp_path / "old.pt", to_checkpoint(old, NAME, CONFIG, before, [], 1))
    start_from(new, NAME, CONFIG, after, tmp_path / "old.pt", "fra")
    if not joint:
        ids, old_ids = rows(after, "source"), rows(before, "source")
        table, old_table = (model.state_dict()["source_embedding.tokens.weight"] for model in (new, old))
        assert torch.equal(table[ids["__deu__"]], old_table[old_ids[">>deu<<"]])
        assert torch.equal(table[ids["__pol__"]], old_table[old_ids[">>fra<<"]])
    spelled = spellings(after, before, "target", "target", "fra")
    names = after.target_pieces(range(after.target_size))
    languages = [piece for piece in names if piece in tokens]
    assert len(spelled) == len(names) and languages == (tokens if joint else [])
    for piece, ids in zip(names, spelled, strict=True):
        spelling = "".join(before.target_pieces(list(ids))).strip("▁")
        assert not ids if piece in languages else spelling in ("", piece.strip("▁")), piece


@pytest.mark.parametrize(
    ("relative", "message"),
    [("fr", "--new-language-from fr: "), ("de", "has no effect")],
)
def test_a_relative_of_no_new_language_is_refused(tmp_path: Path, relative: str, message: str) -> None:
    before, after = multilingual("Haus", "__de__"), multilingual("Hund", "__de__", *["__fr__"] * (relative == "fr"))
    old, new = build(NAME, CONFIG, vocabulary_of(before)), build(NAME, CONFIG, vocabulary_of(after))
    checkpoint_file.save(tmp_path / "old.pt", to_checkpoint(old, NAME, CONFIG, before, [], 1))
    with pytest.raises(ValueError, match=message):
        start_from(new, NAME, CONFIG, after, tmp_path / "old.pt", relative)


def test_a_vocabulary_without_a_common_piece_is_no_error() -> None:
    assert [len(part) for part in same_pieces(["a"], ["b"])] == [0, 0]


@pytest.mark.parametrize("rule", ["encoder.*", "=0.1", "encoder.*=many", "encoder.*=nan", "encoder.*=-1", "a=inf"])
def test_a_weight_decay_that_is_none_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="is not PATTERN=NUMBER"):
        decay_rule(rule)


# --- vectors from a file ----------------------------------------------------------------------------------------------


def vectors(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("header", [[], ["3 8"]])
@pytest.mark.parametrize("architecture", ["transformer_tiny", "gnmt_small", "convs2s_small", "bytenet_small"])
def test_vectors_fill_the_rows_of_their_pieces(tmp_path: Path, header: list[str], architecture: str) -> None:
    vocabulary = tokenizer(False, "Haus")
    model = tiny_model(architecture, vocabulary_of(vocabulary))
    embedding = embedding_of(model, "target", vocabulary.target_size)
    width, before = embedding.embedding_dim, embedding.weight.detach().clone()
    first, second = rows(vocabulary, "target")["▁the"], rows(vocabulary, "target")["t"]
    lines = [
        f"▁the {' '.join(['0.5'] * width)}",
        f"unheard {' '.join(['1'] * width)}",
        f"t {' '.join(['-2e-3'] * width)} ",
    ]
    path = vectors(tmp_path / "v.txt", header + lines)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))  # editors on Windows write such files
    assert load_embeddings(model, vocabulary, "target", path) == 2
    expected = before.clone()
    expected[first], expected[second] = 0.5, -2e-3
    assert torch.equal(embedding.weight, expected)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["▁the 1 2 3"], "line 1 has 3 numbers"),
        ([" ".join(["▁the"] + ["x"] * 16)], "could not convert"),
        ([" ".join(["▁the"] + ["nan"] * 16)], "line 1 .*not finite"),
        ([" ".join(["word"] + ["1"] * 16)], "no vector"),
        ([], "no vector"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    vocabulary = tokenizer(True, "Haus")
    model = tiny_model("transformer_tiny", vocabulary_of(vocabulary))
    with pytest.raises(ValueError, match=f"v.txt.*{said}"):
        load_embeddings(model, vocabulary, "source", vectors(tmp_path / "v.txt", lines))


def test_a_run_starts_from_vectors(mirror_data: Path, tmp_path: Path) -> None:
    pieces = Dataset.open(mirror_data).tokenizer.source_pieces(range(320))
    path = vectors(tmp_path / "v.txt", [" ".join([piece] + ["0.25"] * 16) for piece in pieces[:100]])
    settings = {"encoder_embed_path": path, "device": "cpu", "d_model": 16, "heads": 2, "batch_tokens": 400}

    def trainer(resumed: bool, **more: object) -> Tensor:
        job = JobConfig.read(names={"architecture": NAME}, settings=settings | more)
        state: Any = {"update": 1, "training": {"schedule_start": 0}} if resumed else None
        model = build_trainer(job, Dataset.open(mirror_data).tokenizer, torch.device("cpu"), state).model
        return embedding_of(model, "source", 320).weight

    assert bool((trainer(False)[:100] == 0.25).all()) and not (trainer(False)[100:] == 0.25).any()
    assert not (trainer(True) == 0.25).any()
    with pytest.raises(ValueError, match="both set"):
        trainer(False, decoder_embed_path=path)
    trainer(False, decoder_embed_path=path, share_embeddings=False)
