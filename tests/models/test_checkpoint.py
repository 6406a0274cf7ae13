"""A checkpoint file appears completely or not at all, and reading it runs no code."""

import itertools
import os
import pickle
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nmtkit.config import files
from nmtkit.data import checkpoint_file
from nmtkit.models import checkpoint

CONTENTS: dict[str, Any] = {
    "architecture": "a",
    "config": {"width": 3},
    "tokenizer": {"joint.model": torch.arange(9, dtype=torch.uint8)},
    "plugins": [],
    "model": {"weight": torch.arange(6.0).view(2, 3)},
    "update": 7,
}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoint_file.save(tmp_path / "c.pt", CONTENTS)
    for mmap in (False, True):
        loaded = checkpoint.load(tmp_path / "c.pt", mmap=mmap)
        assert loaded["update"] == 7 and loaded["config"] == {"width": 3}
        assert torch.equal(loaded["model"]["weight"], CONTENTS["model"]["weight"])
    assert os.listdir(tmp_path) == ["c.pt"]


def adapted(base: Path, contents: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint with adapters of `contents`, the checkpoint in the file `base`."""
    facts = {"base": str(base), "fingerprint": checkpoint_file.fingerprint(contents), "rank": 2}
    small = {"layer.adapter_a": torch.full((2, 64), 7.0), "layer.adapter_b": torch.full((64, 2), 7.0)}
    return CONTENTS | {"model": small, "adapters": facts | {"alpha": 2.0, "layers": ["*"]}}


def test_adapters_find_their_base_beside_them_if_another_model_took_its_path(tmp_path: Path) -> None:
    base = CONTENTS | {"model": {"layer.weight": torch.ones(64, 64)}}
    (tmp_path / "run").mkdir()
    path, moved = tmp_path / "update_7.pt", tmp_path / "run/update_7.pt"
    checkpoint_file.save(tmp_path / "run/adapters.pt", adapted(path, base))
    checkpoint_file.save(path, base | {"model": {"layer.weight": torch.zeros(64, 64)}})
    checkpoint_file.save(moved, base)
    weight = checkpoint.load(tmp_path / "run/adapters.pt")["model"]["layer.weight"]
    assert torch.equal(weight, torch.full((64, 64), 1.0 + 2 * 49))
    # a checkpoint of the run itself can have the name of the base; nobody is asked to replace this checkpoint
    checkpoint_file.save(moved, adapted(path, base))
    with pytest.raises(ValueError, match=r"run/update_7\.pt.* new folder"):
        checkpoint.load(moved)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kind", ["adapters", "8 bits"])
def test_damage_of_a_model_that_is_not_stored_as_a_whole_is_found(tmp_path: Path, kind: str, mmap: bool) -> None:
    base = CONTENTS | {"model": {"layer.weight": torch.ones(64, 64)}}
    checkpoint_file.save(tmp_path / "base.pt", base)
    contents = adapted(tmp_path / "base.pt", base) if kind == "adapters" else checkpoint.quantized(base)
    checkpoint_file.save(tmp_path / "c.pt", contents)
    assert checkpoint.load(tmp_path / "c.pt", mmap)["model"]["layer.weight"].shape == (64, 64)
    data = bytearray((tmp_path / "c.pt").read_bytes())
    data[data.index(next(iter(contents["model"].values())).numpy().tobytes()) + 40] ^= 1
    (tmp_path / "c.pt").write_bytes(data)
    with pytest.raises(ValueError, match=r"c\.pt is damaged"):
        checkpoint.load(tmp_path / "c.pt", mmap)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.bool, torch.bfloat16])
def test_an_empty_part_of_a_tensor_has_a_checksum(dtype: torch.dtype) -> None:
    """A part that begins within a word of 64 bits was a RuntimeError."""
    data = torch.zeros(10, dtype=torch.uint8).view(torch.bool) if dtype == torch.bool else torch.zeros(10, dtype=dtype)
    parts = [checkpoint_file.checksum({"a": data[start:start]}) for start in range(10)]
    assert len(set(parts)) == 1 and parts[0] != checkpoint_file.checksum({"a": data[:1]})


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "c.pt"
    checkpoint_file.save(path, CONTENTS)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"c\.pt"):
        checkpoint.load(path)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["NMTKIT_TEST_BOMB"],)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_with_code_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    path, trace = tmp_path / "c.pt", tmp_path / "trace"
    monkeypatch.setenv("NMTKIT_TEST_BOMB", str(trace))
    if writer == "torch":
        torch.save({**CONTENTS, "nmtkit": checkpoint_file.FORMAT, "extra": Bomb()}, path)
    else:
        path.write_bytes(pickle.dumps({**CONTENTS, "nmtkit": checkpoint_file.FORMAT, "extra": Bomb()}))
    with pytest.raises(ValueError, match=r"c\.pt"):
        checkpoint.load(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([1, 2], "not an nmtkit checkpoint"),
        ({"model": {}}, "not an nmtkit checkpoint"),
        ({**CONTENTS, "nmtkit": 99}, "format 99"),
        (
            {**CONTENTS, "nmtkit": 1},
            "format 1, .*format 2",
        ),
        ({"nmtkit": checkpoint_file.FORMAT, "model": {}}, "lacks architecture, config"),
    ],
)
def test_another_kind_of_file_says_what_it_is_not(tmp_path: Path, contents: Any, message: str) -> None:
    torch.save(contents, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path / "c.pt")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.pt"):
        checkpoint.load(tmp_path / "gone.pt")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.pt"
    checkpoint_file.save(path, CONTENTS)

    def interrupted(contents: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_file.save(path, {**CONTENTS, "update": 8})
    monkeypatch.undo()
    assert checkpoint.load(path)["update"] == 7
    assert os.listdir(tmp_path) == ["c.pt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullFile(files._RecordingFile):
        def __init__(self, path: Path, mode: str) -> None:
            super().__init__("/dev/full", "wb")

    monkeypatch.setattr(files, "_RecordingFile", FullFile)
    with pytest.raises(OSError, match=r"c\.pt: .*No space"):
        checkpoint_file.save(tmp_path / "c.pt", CONTENTS)
    assert os.listdir(tmp_path) == []


def test_the_users_umask_is_respected(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        checkpoint_file.save(tmp_path / "c.pt", CONTENTS)
    finally:
        os.umask(before)
    assert (tmp_path / "c.pt").stat().st_mode & 0o777 == 0o600


def test_a_flipped_byte_anywhere_in_tensors_or_settings_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    weight = torch.arange(1000.0)
    checkpoint_file.save(path, {**CONTENTS, "model": {"weight": weight, "odd": torch.arange(3, dtype=torch.int8)}})
    data = path.read_bytes()
    start = data.index(weight.numpy().tobytes())
    model = data.index(CONTENTS["tokenizer"]["joint.model"].numpy().tobytes())
    for position in (start, start + 777, start + 3999, model + 3, data.index(b"width")):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(ValueError, match=r"c\.pt"):
            checkpoint.load(path)
    path.write_bytes(data)
    checkpoint.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": None}, "config is a NoneType"),
        ({"config": [1]}, "config is a list"),
        ({"architecture": 3}, "architecture is a int"),
        ({"tokenizer": "joint.model"}, "tokenizer is a str"),
        ({"tokenizer": {"joint.model": "abc"}}, "tokenizer holds 'joint.model'"),
        ({"model": [torch.zeros(2)]}, "model is a list"),
        ({"model": {"weight": 3.0}}, "model holds 'weight'"),
        ({"plugins": "mine.py"}, "plugins is a str"),
        ({"update": True}, "update is a bool"),
        ({"model": {"weight": torch.tensor([1.0, float("nan")])}}, "weight .*not finite"),
        ({"model": {"weight": torch.tensor([1.0, float("inf")])}}, "weight .*not finite"),
    ],
)
def test_a_file_whose_entries_lie_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    checkpoint_file.save(tmp_path / "c.pt", {**CONTENTS, **changes})
    with pytest.raises(ValueError, match=f"c.pt.*{message}"):
        checkpoint.load(tmp_path / "c.pt")


def test_tied_weights_have_one_owner() -> None:
    shared = torch.zeros(2, 3)
    model = {
        "a": shared,
        "b": torch.zeros(2, 3),
        "c": shared,
        "d": shared[:1],
        "e": torch.zeros(0),
        "f": torch.zeros(0),
        "square": (square := torch.zeros(3, 3)),
        "transposed": square.T,
    }
    assert checkpoint.tied_to(model) == {name: "a" if name == "c" else name for name in model}


def test_every_flipped_bit_of_a_weight_changes_the_checksum() -> None:
    weight = torch.tensor([1.0, -2.0, 3.0])
    checksum = checkpoint_file.checksum({"model": {"w": weight}})
    for byte, bit in itertools.product(range(12), range(8)):
        damaged = weight.clone()
        damaged.view(torch.uint8)[byte] ^= 1 << bit
        assert checkpoint_file.checksum({"model": {"w": damaged}}) != checksum, (byte, bit)


def test_a_file_with_a_checksum_modulo_2_to_the_63_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    checkpoint_file.save(path, CONTENTS)
    contents = torch.load(path, weights_only=True)
    for checksum, message in ((contents["checksum"] % 2**63, None), (contents["checksum"] % 2**63 + 1, "is damaged")):
        torch.save(contents | {"checksum": checksum}, path)
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            checkpoint_file.read(path)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_damage_anywhere_is_told_or_does_no_harm(tmp_path: Path, seed: int) -> None:
    """Damages the file at random places. It is refused in one line, or its contents are unchanged."""
    path = tmp_path / "c.pt"
    checkpoint_file.save(path, {**CONTENTS, "training": {"lr": 0.5, "names": ["a", "b"]}, "plugins": ["mine.py"]})
    data, whole = path.read_bytes(), checkpoint_file.checksum(checkpoint.load(path))
    rng = random.Random(seed)
    refused = 0
    for _ in range(3_000 if seed else 600):
        damaged = bytearray(data)
        start = rng.randrange(len(data))
        kind = rng.choice(["flip", "fill", "cut", "drop"])
        if kind == "flip":
            damaged[start] ^= 1 << rng.randrange(8)
        elif kind == "fill":
            damaged[start : start + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(1, 9))
        elif kind == "cut":
            del damaged[start:]
        else:
            del damaged[start : start + rng.randrange(1, 9)]
        path.write_bytes(damaged)
        try:
            assert checkpoint_file.checksum(checkpoint.load(path)) == whole, (kind, start)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused > 300


FORMATS = Path(__file__).parent / "formats"
MODELS = ["marian/spm/model.npz", "marian/spm", "huggingface/m2m_100", "fairseq/shared/checkpoint_best.pt"]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_another_toolkit_needs_an_import(model: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match="nmtkit import"):
        checkpoint_file.read(FORMATS / model)
