"""A student is exported for Bergamot and slimt: the file, which is read here byte by byte, has the model's weights.

Where SLIMT names the Python of an environment with slimt, slimt translates with an export. slimt 0.1.0 gives every
target token the encoding of position 0, so only the first pieces of translations are compared.
"""

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import REAL_LINES, save_transformer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint
from nmtkit.models.formats import bergamot, lexical_shortlist
from nmtkit.translation.search.shortlist import Shortlist

STUDENT: dict[str, Any] = {
    "d_model": 64,
    "d_ff": 128,
    "heads": 4,
    "decoder_self_attention": "ssru",
    "zero_bos": True,
    "positions": "sinusoidal_fairseq",
}
PAIRS = [(REAL_LINES[0], REAL_LINES[1]), (REAL_LINES[1], REAL_LINES[2]), (REAL_LINES[2], REAL_LINES[3])]


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return save_transformer(tmp_path / "student.pt", **STUDENT)


def items_of(data: bytes) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Returns type, shape and data of each tensor in a file of Marian (version 1), by name."""
    version, count = struct.unpack_from("<2Q", data)
    assert version == 1
    headers = [struct.unpack_from("<4Q", data, 16 + 32 * index) for index in range(count)]
    place = 16 + 32 * count
    names, shapes = [], []
    for length, _, _, _ in headers:
        names.append(data[place : place + length - 1].decode())
        assert data[place + length - 1] == 0
        place += length
    for _, _, dimensions, _ in headers:
        shapes.append(struct.unpack_from(f"<{dimensions}i", data, place))
        place += 4 * dimensions
    place += 8 + struct.unpack_from("<Q", data, place)[0]
    assert place % 256 == 0
    items = {}
    for name, shape, (_, type, _, size) in zip(names, shapes, headers, strict=True):
        items[name] = type, shape, data[place : place + size]
        assert size % 256 == 0
        place += size
    assert place == len(data)
    return items


def matrix_of(item: tuple[int, tuple[int, ...], bytes], transposed: bool) -> tuple[np.ndarray, float]:
    """Returns the matrix that an int8 tensor stands for, and the largest error of rounding."""
    type, shape, data = item
    assert type == 0x4101
    size = shape[0] * shape[1]
    (scale,) = struct.unpack_from("<f", data, size)
    values = np.frombuffer(data[:size], np.int8).astype(np.float64) / scale
    return values.reshape(shape[::-1] if transposed else shape), 0.5 / scale


def test_the_file_has_the_weights_in_8_bits(student: Path, tmp_path: Path) -> None:
    bergamot.save(student, tmp_path / "folder", PAIRS)
    items = items_of((tmp_path / "folder" / bergamot.MODEL).read_bytes())
    model, tokenizer = from_checkpoint(student)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    cell = state["decoder.0.self_attention.forget_proj.weight"]
    query = state["encoder.1.self_attention.qkv_proj.weight"][:64]
    value = state["decoder.1.cross_attention.kv_proj.weight"][64:]
    stored = {"decoder_l1_rnn_Wf": cell, "encoder_l2_self_Wq": query, "decoder_l2_context_Wv": value}
    for name, weight in stored.items():
        found, error = matrix_of(items[name], transposed=True)
        np.testing.assert_allclose(found, weight, atol=1.001 * error)
        assert np.abs(found).max() == pytest.approx(np.abs(weight).max(), rel=1e-6)
    embeddings, error = matrix_of(items["Wemb"], transposed=False)
    np.testing.assert_allclose(embeddings, state["target_embedding.tokens.weight"], atol=1.001 * error)
    type, shape, data = items["decoder_l1_rnn_bf"]
    assert (type, shape) == (0x0404, (1, 64))
    bias = np.frombuffer(data[: 4 * 64], "<f4")
    np.testing.assert_array_equal(bias, state["decoder.0.self_attention.forget_proj.bias"])
    assert b"dec-cell: ssru" in items["special:model.yml"][2]
    assert (tmp_path / "folder" / bergamot.VOCABULARY).read_bytes() == tokenizer.source_model


def test_the_scales_of_inputs_come_from_the_activations_of_the_sentences(student: Path, tmp_path: Path) -> None:
    bergamot.save(student, tmp_path / "folder", PAIRS)
    items = items_of((tmp_path / "folder" / bergamot.MODEL).read_bytes())
    model, tokenizer = from_checkpoint(student)
    memories, features = [], []
    with torch.inference_mode():
        for source, target in PAIRS:
            ids, prefix = tokenizer.encode_source([source]).ids, tokenizer.encode_target([target]).ids[:-1]
            memory = model.encode(Packed.from_lists([ids.tolist()]))
            memories.append(float(memory.values.abs().max()))
            decoded = model.decode(memory, Packed.from_lists([[BOS, *prefix.tolist()]]))
            features.append(float(decoded.abs().max()))
    for name, largest in (("decoder_l1_context_Wk", memories), ("none", features)):
        mean = sum(largest) / 3
        deviation = (sum((value - mean) ** 2 for value in largest) / 3) ** 0.5
        expected = 127 / min(mean + 1.1 * deviation, max(largest))
        assert struct.unpack_from("<f", items[f"{name}_QuantMultA"][2])[0] == pytest.approx(expected, rel=1e-4)
    assert len([name for name in items if name.endswith("_QuantMultA")]) == 2 * 6 + 2 * 8 + 1


def test_the_command_translates_the_lines_of_a_file_for_the_scales(student: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in REAL_LINES[:2]), encoding="utf-8")
    arguments = ["export", "--format", "bergamot", str(student), str(tmp_path / "folder")]
    result = CliRunner().invoke(main, [*arguments, "--calibration", str(tmp_path / "lines")])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == [
        "config.yml", "lex.s2t.bin", "model.intgemm.alphas.bin", "vocab.spm",
    ]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0 and "--calibration FILE" in result.output


def test_the_folder_has_the_shortlist_of_the_checkpoint(student: Path, tmp_path: Path) -> None:
    contents = checkpoint.load(student)
    lists = Shortlist.from_entries(np.array([5, 5, 9]), np.array([7, 30, 8]), np.array([4, 6]), 400, 400)
    checkpoint_file.save(tmp_path / "listed.pt", contents | {"shortlist": lists.state()})
    bergamot.save(tmp_path / "listed.pt", tmp_path / "folder", PAIRS)
    tokenizer = from_checkpoint(student)[1]
    found = lexical_shortlist.read(tmp_path / "folder" / bergamot.SHORTLIST, tokenizer)
    pairs = set(zip(found.sources.tolist(), found.targets.tolist(), strict=True))
    assert {(5, 7), (5, 30), (9, 8), (EOS, 4), (EOS, 6), (EOS, EOS)} <= pairs and len(pairs) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_self_attention": "attention"}, "decoder_self_attention attention, .*Bergamot"),
        (
            {"activation": "swish"},
            "activation swish.*--activation relu",
        ),
        ({"tie_output": False}, "one vocabulary, and"),
        ({"d_model": 32}, "d_model 32, d_ff 128 and 400 .*64, .*8"),
    ],
)
def test_a_model_that_bergamot_lacks_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_transformer(tmp_path / "model.pt", **STUDENT | changes)
    with pytest.raises(ValueError, match=message):
        bergamot.save(path, tmp_path / "folder", PAIRS)
    assert not (tmp_path / "folder").exists()


@pytest.mark.slow
def test_slimt_begins_translations_as_nmtkit_does(student: Path, tmp_path: Path) -> None:
    python = os.environ.get("SLIMT") or pytest.skip("SLIMT names no Python of an environment with slimt")
    bergamot.save(student, tmp_path / "folder", PAIRS)
    model, tokenizer = from_checkpoint(student)
    script = Path(__file__).parents[3] / "benchmarks" / "other_engines.py"
    files = {"model": bergamot.MODEL, "vocabulary": bergamot.VOCABULARY, "shortlist": bergamot.SHORTLIST}
    settings: dict[str, Any] = {kind: str(tmp_path / "folder" / name) for kind, name in files.items()}
    config = model.config
    settings |= {"encoder_layers": config.encoder_layers, "decoder_layers": config.decoder_layers, "num_heads": 4}
    words = [python, str(script), "--child", json.dumps(["slimt", settings])]
    found = subprocess.run(words, input=json.dumps(REAL_LINES), capture_output=True, text=True, check=True).stdout
    same = 0
    for line, translation in zip(REAL_LINES, json.loads(found), strict=True):
        memory = model.encode(Packed.from_lists([tokenizer.encode_source([line]).ids.tolist()]))
        logits = model.output_projection(model.decode(memory, Packed.from_lists([[BOS]])))[0]
        same += translation.startswith(tokenizer.decode_target([int(logits.argmax())]).strip())
    assert same > 0.75 * len(REAL_LINES)
