"""A Transformer of several languages as an M2M-100 folder of transformers has the same logits there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from builders import REAL_LINES, save_transformer

import nmtkit
from nmtkit.data import checkpoint_file
from nmtkit.models.formats import huggingface
from nmtkit.models.formats.huggingface_export import save
from nmtkit.models.formats.safetensors import load_safetensors, save_safetensors

pytest.importorskip("safetensors")

ORIGINAL = Path(__file__).parent / "huggingface" / "m2m_100"
EXPRESSIBLE = {"pre_norm": True, "positions": "sinusoidal_fairseq", "position_offset": 2}
VARIANTS = {"plain": {}, "biases": {"attention_bias": True, "activation": "gelu", "scale_embeddings": False}}
PAIR = {"source_lang": "it", "target_lang": "pl"}
SHORT = {"max_len_a": 0.0, "max_len_b": 8, **PAIR}


def saved(folder: Path, **changes: object) -> Path:
    return save_transformer(folder / "model.pt", languages=("en", "pl", "it"), **(EXPRESSIBLE | changes))


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_transformers_computes_the_same_logits(changes: dict[str, object], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path, folder = saved(tmp_path, **changes), tmp_path / "folder"
    save(path, folder)
    ours = nmtkit.load(path, trainable=True)
    theirs = transformers.M2M100ForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = transformers.M2M100Tokenizer.from_pretrained(folder, src_lang="it")
    source, target = REAL_LINES[0], REAL_LINES[6]
    inputs = tokenizer(source, return_tensors="pt")
    pieces = ["__it__", *ours.tokenizer.source_pieces(ours.tokenizer.encode_source([source]).ids)]
    assert tokenizer.convert_ids_to_tokens(inputs.input_ids[0].tolist()) == pieces
    # ids of the export: <s>, <pad>, </s>, <unk>, the other pieces in the same order, languages in M2M-100's order
    codes = list(ours.tokenizer.languages)
    size = ours.tokenizer.source_size - len(codes)
    ids = torch.tensor([3, 0, 2, *range(4, size + 1), *(tokenizer.get_lang_id(code) for code in codes)])
    batch = ours.batch([source], [target], **PAIR)
    assert ids[batch.source.values].tolist() == inputs.input_ids[0].tolist()
    with torch.no_grad():
        found = theirs(**inputs, decoder_input_ids=ids[batch.target_input.values][None]).logits[0]
    expected = ours.logits(source, target, **PAIR).detach()
    torch.testing.assert_close(found[:, ids], expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.3


@pytest.mark.slow
def test_an_import_that_was_tuned_without_output_bias_is_exported(tmp_path: Path) -> None:
    """The tokenizer of an import has the piece <pad>, which is also a special token of M2M-100."""
    transformers = pytest.importorskip("transformers")
    contents = huggingface.load(ORIGINAL)
    contents["config"] |= {"output_bias": False}  # like a model after train --finetune-from m2m100.pt --no-output-bias
    del contents["model"]["output_projection.bias"]
    path, folder = tmp_path / "model.pt", tmp_path / "folder"
    checkpoint_file.save(path, contents)
    save(path, folder)
    theirs = transformers.M2M100ForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = transformers.M2M100Tokenizer.from_pretrained(folder, src_lang="it", tgt_lang="pl")
    given = tokenizer(REAL_LINES[0], text_target=REAL_LINES[6], return_tensors="pt")
    labels = given.pop("labels")
    read = torch.cat([torch.tensor([[0]]), labels[:, :-1]], 1)
    with torch.no_grad():
        logits = theirs(**given, decoder_input_ids=read).logits[0]
    ours = nmtkit.load(path)
    expected = ours.logits(REAL_LINES[0], REAL_LINES[6], **PAIR)
    target = ours.batch(REAL_LINES[0], REAL_LINES[6], **PAIR).target_output
    found = logits.gather(1, labels[0][:, None])
    torch.testing.assert_close(found, expected.gather(1, target[:, None]), rtol=1e-4, atol=1e-4)


@pytest.fixture
def with_bias(tmp_path: Path) -> Path:
    """Returns a copy of the original with an output bias, which M2M100ForConditionalGeneration never reads."""
    folder = shutil.copytree(ORIGINAL, tmp_path / "original")
    weights = load_safetensors(folder / "model.safetensors")
    bias = torch.randn(1, len(weights["model.shared.weight"]), generator=torch.Generator().manual_seed(1))
    save_safetensors(weights | {"final_logits_bias": 3 * bias}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_export_of_an_import_has_the_weights_and_the_ids_of_the_original(
    with_bias: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint_file.save(tmp_path / "model.pt", huggingface.load(with_bias))
    assert "final_logits_bias is not imported" in caplog.text
    save(tmp_path / "model.pt", tmp_path / "export")
    before, after = (load_safetensors(folder / "model.safetensors") for folder in (ORIGINAL, tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    for name in ("config.json", "vocab.json", "tokenizer_config.json"):
        one, other = (json.loads((folder / name).read_text()) for folder in (ORIGINAL, tmp_path / "export"))
        shared = one.keys() & other.keys() - {"dtype", "src_lang", "model_max_length"}
        assert {key: one[key] for key in shared} == {key: other[key] for key in shared}, name
        assert name != "vocab.json" or one.keys() == other.keys()
    search = json.loads((tmp_path / "export/generation_config.json").read_text())
    assert search["decoder_start_token_id"] == 2
    assert (search["num_beams"], search["length_penalty"], search["early_stopping"]) == (4, 0.45, "never")


@pytest.mark.slow
def test_transformers_computes_the_same_logits_before_the_import_and_after_the_export(
    with_bias: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint_file.save(tmp_path / "model.pt", huggingface.load(with_bias))
    save(tmp_path / "model.pt", tmp_path / "export")
    tokenizer = transformers.M2M100Tokenizer.from_pretrained(tmp_path / "export", src_lang="it", tgt_lang="pl")
    given = tokenizer(REAL_LINES[0], text_target=REAL_LINES[6], return_tensors="pt")
    labels = given.pop("labels")
    read = torch.cat([torch.tensor([[2]]), labels[:, :-1]], 1)
    logits = []
    for folder in (with_bias, tmp_path / "export"):
        model = transformers.M2M100ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        assert model.config.decoder_start_token_id == 2
        with torch.no_grad():
            logits.append(model(**given, decoder_input_ids=read).logits[0])
    assert torch.equal(*logits)
    ours = nmtkit.load(tmp_path / "model.pt").score(REAL_LINES[0], REAL_LINES[6], per_piece=True, **PAIR)
    expected = logits[0].log_softmax(-1).gather(1, labels[0][:, None])[:, 0]
    assert ours == pytest.approx(expected[1:].tolist(), abs=1e-4)  # without the language token


@pytest.mark.parametrize("id", [1, 5, 200], ids=["<s>", "<pad>", "piece"])
def test_a_trained_output_bias_is_refused_with_the_flag_that_avoids_the_bias(id: int, tmp_path: Path) -> None:
    contents = huggingface.load(ORIGINAL)
    contents["model"]["output_projection.bias"][id] = 0.25
    checkpoint_file.save(tmp_path / "model.pt", contents)
    with pytest.raises(ValueError, match=r"output bias, .*--no-output-bias"):
        save(tmp_path / "model.pt", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_the_import_of_an_export_translates_alike(tmp_path: Path) -> None:
    path, folder = saved(tmp_path), tmp_path / "folder"
    save(path, folder)
    checkpoint_file.save(tmp_path / "again.pt", huggingface.load(folder))
    before, after = (
        nmtkit.load(file).translate(REAL_LINES, nbest=1, **SHORT) for file in (path, tmp_path / "again.pt")
    )
    for one, other in zip(before, after, strict=True):
        assert one.hypotheses[0].pieces == other.hypotheses[0].pieces


@pytest.mark.parametrize(
    ("changes", "languages", "message"),
    [
        ({"positions": "sinusoidal"}, ("en", "pl"), "--positions sinusoidal_fairseq"),
        ({"pre_norm": False}, ("en", "pl"), "--pre-norm"),
        ({"position_offset": 0}, ("en", "pl"), "--position-offset 2"),
        ({}, ("en", "xx"), "does not have: xx"),
    ],
    ids=["positions", "norm", "offset", "language"],
)
def test_other_models_are_refused_by_name(
    changes: dict[str, object], languages: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = save_transformer(tmp_path / "model.pt", languages=languages, **(EXPRESSIBLE | changes))
    with pytest.raises(ValueError, match=message):
        save(path, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
