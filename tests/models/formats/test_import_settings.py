"""Settings and files that change an imported model are compared with transformers, or named in a message."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from click.testing import CliRunner
from make_huggingface import FOLDER, LINES, Original, make_marian
from torch.nn import functional as F

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS
from nmtkit.models.building import from_checkpoint
from nmtkit.models.formats import detect, huggingface, marian

pytest.importorskip("safetensors")
LANGUAGES = {"m2m_100": ("en", "de"), "mbart_50": ("en_XX", "de_DE")}


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(FOLDER / name, folder / name)
    return folder / name


def change_settings(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value != "left out"}))


def check_log_probabilities(folder: Path) -> None:
    """Compares the log probabilities of every target piece after every beginning of a translation."""
    pytest.importorskip("transformers")
    original = Original(folder)
    languages = LANGUAGES.get(folder.name, (None, None))
    path = folder.parent / "imported.pt"
    checkpoint_file.save(path, huggingface.load(folder))
    model, tokenizer = from_checkpoint(path)
    before, begin = tokenizer.language_ids(*languages)
    ours_of = {piece: id for id, piece in enumerate(tokenizer.target_pieces(range(tokenizer.target_size)))}
    theirs_of = original.target_ids()
    shared = [piece for piece in theirs_of if ours_of.get(piece, BOS) != BOS]
    assert len(shared) >= len(theirs_of) - 5
    pieces = [piece for piece in shared if piece.startswith("▁")][:12]
    start = [original.model.config.decoder_start_token_id]
    start += [] if languages[0] is None else [original.language_id(str(languages[1]))]
    for line in LINES[:3]:
        theirs = original.log_probabilities(line, *languages, [*start, *(theirs_of[piece] for piece in pieces)])
        source = [*before, *tokenizer.encode_source([line]).ids.tolist()]
        target = [BOS, *begin, *(ours_of[piece] for piece in pieces)]
        with torch.inference_mode():
            features = model(Packed.from_lists([source], "cpu"), Packed.from_lists([target], "cpu"))
            ours = model.output_projection(features).log_softmax(-1)
        columns = [ours_of[piece] for piece in shared], [theirs_of[piece] for piece in shared]
        assert torch.allclose(ours[:, columns[0]], theirs[:, columns[1]], atol=1e-4)


@pytest.mark.parametrize("name", ["m2m_100", "marian", "mbart_50"])
def test_settings_that_config_json_lacks_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    change_settings(folder, activation_function="left out", scale_embedding="left out")
    check_log_probabilities(folder)


def test_positions_are_counted_from_the_id_of_padding(tmp_path: Path) -> None:
    folder = copied("m2m_100", tmp_path)
    processor = sentencepiece.SentencePieceProcessor(str(folder / "sentencepiece.bpe.model"))
    used = {piece for line in processor.encode(LINES[:3], out_type=str) for piece in line}
    table = json.loads((folder / "vocab.json").read_text())
    free = [id for piece, id in table.items() if piece not in used and piece[0].isalpha() and 10 < id < 100]
    change_settings(folder, pad_token_id=free[0])
    check_log_probabilities(folder)


@pytest.mark.parametrize("name", ["m2m_100", "marian"])
def test_an_odd_width_has_the_positions_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = copied(name, tmp_path)
    change_settings(folder, d_model=33, encoder_attention_heads=3, decoder_attention_heads=3)
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    check_log_probabilities(folder)


def test_the_first_token_of_the_decoder_is_an_entry_of_the_target_table(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "marian_separate"
    make_marian(folder, seed=3, separate=True)
    table = json.loads((folder / "vocab.json").read_text())
    piece = next(piece for piece in table if piece.startswith("▁") and len(piece) > 2)
    pad, other = table["<pad>"], table[piece]  # two entries of the source table change places
    (folder / "vocab.json").write_text(json.dumps(table | {"<pad>": other, piece: pad}))
    weights = load_file(folder / "model.safetensors")
    rows = torch.arange(len(table))
    rows[[pad, other]] = rows[[other, pad]]
    embeddings = "model.encoder.embed_tokens.weight"
    save_file(weights | {embeddings: weights[embeddings][rows]}, folder / "model.safetensors", {"format": "pt"})
    check_log_probabilities(folder)


def test_added_tokens_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    folder = copied("marian", tmp_path)
    huggingface.load(folder)
    assert "added tokens" not in caplog.text
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "added_tokens.json").write_text(json.dumps({"<name>": size}))
    change_settings(folder, vocab_size=size + 1, decoder_vocab_size=size + 1)
    weights = load_file(folder / "model.safetensors")
    rows = weights["model.shared.weight"]
    weights |= {"model.shared.weight": torch.cat([rows, rows[:1]])}
    weights |= {"final_logits_bias": torch.cat([weights["final_logits_bias"], torch.zeros(1, 1).half()], 1)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    huggingface.load(folder)
    assert "<name> are not imported" in caplog.text


def test_settings_of_the_search_are_told(tmp_path: Path) -> None:
    folder = copied("marian", tmp_path)
    command = ["import", str(folder), str(tmp_path / "model.pt"), "--try", ""]
    assert "search settings" not in CliRunner().invoke(main, command).stderr
    (tmp_path / "model.pt").unlink()
    change_settings(folder, "generation_config.json", num_beams=6, length_penalty=0.8, do_sample=False)
    said = CliRunner().invoke(main, command).stderr
    assert "num_beams 6, length_penalty 0.8" in said


def test_weights_may_lie_in_parts_of_a_pickle(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = copied("marian", tmp_path)
    weights = load_file(folder / "model.safetensors")
    expected = huggingface.load(folder)["model"]
    (folder / "model.safetensors").unlink()
    parts = {f"pytorch_model-0000{number}-of-00002.bin": sorted(weights)[number - 1 :: 2] for number in (1, 2)}
    for part, names in parts.items():
        torch.save({name: weights[name] for name in names}, folder / part)
    index = {"weight_map": {name: part for part, names in parts.items() for name in names}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = huggingface.load(folder)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_folder_of_the_trainer_of_transformers_is_one_of_transformers(tmp_path: Path) -> None:
    folder = copied("marian", tmp_path)
    torch.save({"state": {}}, folder / "optimizer.pt")
    assert detect.load(folder)["architecture"] == "transformer_base"


# --- Marian -----------------------------------------------------------------------------------------------------------


def change_marian(folder: Path, old: str, new: str, **changes: Any) -> Path:
    shutil.copytree(FOLDER.parent / "marian/spm", folder)
    with np.load(folder / "model.npz") as arrays:
        weights = {name: arrays[name] for name in arrays.files}
    text = weights[marian.SETTINGS].tobytes().rstrip(b"\0").decode()
    assert old in text
    weights[marian.SETTINGS] = np.frombuffer(text.replace(old, new).encode() + b"\0", np.int8)
    weights |= {name: change(weights) for name, change in changes.items()}
    np.savez(folder / "model.npz", **weights)
    return folder


@pytest.mark.parametrize(
    ("name", "output"),
    [("decoder_ff_logit_out_Wt", lambda table: table), ("decoder_ff_logit_out_W", lambda table: table.T)],
)
def test_an_output_projection_of_its_own_is_read_under_both_names(name: str, output: Any, tmp_path: Path) -> None:
    tied = detect.load(FOLDER.parent / "marian/spm")["model"]
    folder = change_marian(
        tmp_path / "untied", "tied-embeddings-all: true", "tied-embeddings-all: false\ntied-embeddings-src: true",
        **{name: lambda weights: output(2 * weights["Wemb"])},
    )  # fmt: skip
    untied = detect.load(folder)["model"]
    rows = slice(2, None)  # the first ids of nmtkit, <unk> and <s>, have no rows
    assert torch.equal(untied["output_projection.weight"][rows], 2 * tied["output_projection.weight"][rows])
    assert torch.equal(untied["target_embedding.tokens.weight"], tied["target_embedding.tokens.weight"])


def test_surplus_rows_of_the_output_are_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copied("marian", tmp_path)
    change_settings(folder, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.shared.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    expected = detect.load(folder)["model"]
    weights["lm_head.weight"] = F.pad(weights["lm_head.weight"], (0, 0, 0, 3), value=7.0)
    weights["final_logits_bias"] = F.pad(weights["final_logits_bias"], (0, 3), value=7.0)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    padded = detect.load(folder)["model"]
    assert padded.keys() == expected.keys()
    assert all(torch.equal(padded[name], tensor) for name, tensor in expected.items())


def test_embeddings_of_marian_have_a_row_for_each_piece(tmp_path: Path) -> None:
    more = {"Wemb": lambda weights: np.concatenate([weights["Wemb"], weights["Wemb"][:1]])}
    with pytest.raises(ValueError, match=r"embeddings for \d+ entries"):
        detect.load(change_marian(tmp_path / "more", "type: transformer", "type: transformer", **more))


def test_a_second_output_projection_of_marian_is_refused(tmp_path: Path) -> None:
    second = {"decoder_ff_logit_out_Wt": lambda weights: 2 * weights["Wemb"]}
    with pytest.raises(ValueError, match="weights: Wemb and decoder_ff_logit_out_Wt"):
        detect.load(change_marian(tmp_path / "tied", "type: transformer", "type: transformer", **second))
    second["decoder_ff_logit_out_W"] = lambda weights: weights["Wemb"].T
    untied = ("tied-embeddings-all: true", "tied-embeddings-all: false\ntied-embeddings-src: true")
    with pytest.raises(ValueError, match="decoder_ff_logit_out_W, which do"):
        detect.load(change_marian(tmp_path / "both", *untied, **second))


def test_a_fault_of_nmtkit_does_not_look_like_a_damaged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(_: Path) -> None:
        raise TypeError("a fault")

    monkeypatch.setattr(huggingface, "load", fault)
    with pytest.raises(TypeError, match="a fault"):
        detect.load(copied("marian", tmp_path))


def test_weights_that_the_settings_do_not_describe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"encoder_l2_.*more"):
        detect.load(change_marian(tmp_path / "half", "enc-depth: 2", "enc-depth: 1"))


def test_int8_weights_are_refused(tmp_path: Path) -> None:
    changes = {"encoder_l1_self_Wq": lambda weights: weights["encoder_l1_self_Wq"].astype(np.int8)}
    with pytest.raises(ValueError, match=r"encoder_l1_self_Wq .*torch\.int8"):
        detect.load(change_marian(tmp_path / "int8", "type: transformer", "type: transformer", **changes))
