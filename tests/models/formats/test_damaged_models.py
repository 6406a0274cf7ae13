"""An import of a damaged folder works, or raises a ValueError or OSError that names the folder."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nmtkit.models.formats import detect, fairseq, marian

FORMATS = Path(__file__).parent
FOLDERS = {
    "marian of transformers": "huggingface/marian",
    "two tables": "huggingface/marian_separate",
    "m2m_100": "huggingface/m2m_100",
    "nllb": "huggingface/nllb",
    "mbart_50": "huggingface/mbart_50",
    "marian with .spm": "marian/spm",
    "marian with .yml": "marian/yml",
    "fairseq": "fairseq/shared",
    "fairseq with languages": "fairseq/languages",
}
VALUES: list[Any] = [None, [1], {"a": [{}]}, -1, 10**9, "x"]


class Hangs(BaseException):
    """The error of a timeout. `except Exception` does not catch it."""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Ends an import that waits for a named pipe."""

    def end(*arguments: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, end)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def copied(name: str, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FORMATS / FOLDERS[name], folder)
    return folder


def import_or_error(folder: Path) -> str:
    """Returns the message of the error of an import, which names the folder; "" if the import works."""
    signal.alarm(300)
    try:
        detect.load(folder)
    except (ValueError, OSError) as error:
        assert type(error).__name__ != "UnicodeDecodeError" and str(folder) in str(error), repr(error)
        return str(error)
    return ""


def broken_files(path: Path) -> dict[str, Callable[[], Any]]:
    contents = path.read_bytes()
    middle = len(contents) // 2

    def replaced(make: Callable[[Path], Any]) -> Callable[[], Any]:
        return lambda: (path.unlink(), make(path))

    return {
        "missing": path.unlink,
        "empty": lambda: path.write_bytes(b""),
        "zeros": lambda: path.write_bytes(bytes(1000)),
        "truncated": lambda: path.write_bytes(contents[:middle]),
        "one byte changed": lambda: path.write_bytes(contents[:middle] + b"\xff" + contents[middle + 1 :]),
        "nested lists": lambda: path.write_bytes(b"[" * 200_000),
        "a list": lambda: path.write_bytes(b"[1, 2]"),
        "an object": lambda: path.write_bytes(b'{"a": {"b": [null]}}'),
        "a folder": replaced(Path.mkdir),
        "a named pipe": replaced(os.mkfifo),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_every_file_may_be_broken_in_every_way(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    files = [path.name for path in copied(name, folder).iterdir() if path.name != "expected.json"]
    works = {"generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    for file in files:
        for damage in broken_files(folder / file):
            broken_files(copied(name, folder) / file)[damage]()
            message = import_or_error(folder)
            expected = damage in ("empty", "zeros", "truncated", "nested lists", "a list", "a folder", "a named pipe")
            if expected and file not in works and not (name == "nllb" and file == "tokenizer.json"):
                assert message, f"{file}: {damage}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["marian of transformers", "m2m_100"])
def test_every_value_of_every_json_file_may_be_of_another_kind(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path / "model")
    for path in sorted(folder.glob("*.json")):
        original = path.read_text()
        contents = json.loads(original)
        if path.name == "expected.json":
            continue
        for key in list(contents)[: 60 if path.name == "config.json" else 8]:
            for value in VALUES:
                path.write_text(json.dumps(contents | {key: value}))
                import_or_error(folder)
        path.write_text(original)


NUMBERS = ("encoder_layers", "decoder_layers", "d_model", "encoder_ffn_dim", "decoder_attention_heads", "vocab_size")
NUMBERS += ("max_position_embeddings", "decoder_start_token_id", "dropout", "scale_embedding", "tie_word_embeddings")
NUMBERS += ("pad_token_id", "model_type", "activation_function", "share_encoder_decoder_embeddings")


@pytest.mark.parametrize("value", [[], {"a": 1}, -1, "x"], ids=str)
@pytest.mark.parametrize("key", NUMBERS)
def test_a_setting_of_transformers_of_another_kind_is_named(key: str, value: Any, tmp_path: Path) -> None:
    folder = copied("marian of transformers", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {key: value}))
    message = import_or_error(folder)
    assert "config.json" in message and key in message, message


MARIAN_NUMBERS = ("enc-depth", "dec-depth", "dim-emb", "transformer-dim-ffn", "transformer-heads")
MARIAN_TEXTS = ("transformer-ffn-activation", "tied-embeddings-all", "transformer-postprocess", "type")


def change_marian(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with np.load(folder / "model.npz") as arrays:
        weights = {name: arrays[name] for name in arrays.files}
    change(weights)
    np.savez(folder / "model.npz", **weights)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["\n  - 1\n  - 2", "\n  []", " -1", " x", " 1.5", "", f" {10**30}"], ids=repr)
@pytest.mark.parametrize("key", MARIAN_NUMBERS + MARIAN_TEXTS)
def test_a_setting_of_marian_of_another_kind_is_named(key: str, value: str, tmp_path: Path) -> None:
    def change(weights: dict[str, Any]) -> None:
        lines = weights[marian.SETTINGS].tobytes().rstrip(b"\0").decode().split("\n")
        changed = [f"{key}:{value}" if line.startswith(f"{key}:") else line for line in lines]
        assert changed != lines
        weights[marian.SETTINGS] = np.frombuffer("\n".join(changed).encode(), np.int8)

    folder = copied("marian with .spm", tmp_path / "model")
    change_marian(folder, change)
    message = import_or_error(folder)
    if not (key == "type" and value in ("", "\n  []")):
        assert "model.npz" in message and key in message, message


def change_fairseq(folder: Path, **changes: Any) -> None:
    from nmtkit.models.formats import pickles

    state = pickles.load(folder / "checkpoint_best.pt")
    settings = pickles.to_plain(state.get("args")) or {
        **pickles.to_plain(state["cfg"])["task"], **pickles.to_plain(state["cfg"])["model"],
        "arch": pickles.to_plain(state["cfg"])["model"]["arch"],
    }  # fmt: skip
    torch.save({"args": settings | changes, "model": state["model"]}, folder / "checkpoint_best.pt")


FAIRSEQ = ("encoder_layers", "decoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads")
FAIRSEQ += ("activation_fn", "dropout", "encoder_normalize_before", "max_source_positions", "share_all_embeddings")


def test_the_changed_model_of_fairseq_is_sound_without_changes(tmp_path: Path) -> None:
    folder = copied("fairseq", tmp_path / "model")
    change_fairseq(folder)
    assert import_or_error(folder) == ""


@pytest.mark.slow
@pytest.mark.parametrize("value", [[1], {}, -1, "x"], ids=str)
@pytest.mark.parametrize("key", (*FAIRSEQ, "arch", "source_lang", "langs", "lang_pairs", "langtoks", "data", "task"))
def test_a_setting_of_fairseq_of_another_kind_is_named(key: str, value: Any, tmp_path: Path) -> None:
    folder = copied("fairseq", tmp_path / "model")
    change_fairseq(folder, **{key: value})
    message = import_or_error(folder)
    if key in FAIRSEQ:
        assert "checkpoint_best.pt" in message and key in message, message


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda tensor: torch.tensor(1.0),
    "short": lambda tensor: tensor[..., :3].contiguous(),
    "three dimensions": lambda tensor: tensor[None, None].contiguous(),
    "whole numbers": lambda tensor: tensor.to(torch.int8),
    "empty": lambda tensor: torch.empty(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", TENSORS)
@pytest.mark.parametrize("name", ["marian of transformers", "m2m_100", "mbart_50", "fairseq"])
@pytest.mark.parametrize("step", [11, pytest.param(3, marks=pytest.mark.slow)])
def test_every_tensor_may_have_another_shape_or_type(name: str, damage: str, step: int, tmp_path: Path) -> None:
    folder = copied(name, tmp_path / "model")
    if name == "fairseq":
        path = folder / "checkpoint_best.pt"
        from nmtkit.models.formats import pickles

        change_fairseq(folder)
        state = pickles.load(path)
        weights = state["model"]
    else:
        from safetensors.torch import load_file

        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        path, state = folder / "pytorch_model.bin", None
    for key in sorted(weights)[list(TENSORS).index(damage) :: step]:
        if fairseq.IGNORED.fullmatch(key):
            continue
        changed = weights | {key: TENSORS[damage](weights[key])}
        torch.save(changed if state is None else state | {"model": changed}, path)
        assert import_or_error(folder), key


@pytest.mark.slow
@pytest.mark.parametrize("damage", TENSORS)
def test_every_array_of_marian_may_have_another_shape_or_type(damage: str, tmp_path: Path) -> None:
    with np.load(FORMATS / "marian/spm/model.npz") as arrays:
        names = arrays.files
    for name in sorted(names)[::3]:
        folder = copied("marian with .spm", tmp_path / "model")
        change = lambda it, name=name: it.update({name: TENSORS[damage](torch.from_numpy(it[name])).numpy()})  # noqa: E731
        change_marian(folder, change)
        if name != marian.SETTINGS:
            assert import_or_error(folder), name


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": ["a"]}, "weight_map is not"),
        ({"weight_map": {"a": 1}}, "weight_map is not"),
        ({"weight_map": {}}, "weight_map is not"),
        ({}, "weight_map is not"),
        ({"weight_map": {"a": "../model.safetensors"}}, "a file of this"),
        ({"weight_map": {"a": "/etc/passwd"}}, "a file of this"),
        ({"weight_map": {"a": "absent.safetensors"}}, "absent.safetensors: no such file"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_of_parts_is_checked(name: str, index: Any, said: str, tmp_path: Path) -> None:
    folder = copied("marian of transformers", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / f"{name}.index.json").write_text(json.dumps(index))
    assert said in import_or_error(folder)


@pytest.mark.parametrize("ids", [[-1, 0], [0, 0], ["0", []], [0, 10**9], [0.5, 1], [True, False]], ids=str)
def test_ids_of_a_table_of_pieces_are_checked(ids: list[Any], tmp_path: Path) -> None:
    folder = copied("marian of transformers", tmp_path / "model")
    path = folder / "vocab.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(zip(("</s>", "<unk>"), ids, strict=True))))
    assert "vocab.json" in import_or_error(folder)
