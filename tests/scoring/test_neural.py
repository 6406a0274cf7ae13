"""COMET and MetricX. `benchmarks/neural_parity.py --goldens` computes the pinned scores with the original code."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hub_server import HubServer
from neural_models import ROWS, SPM, write_comet, write_metricx

import nmtkit
from nmtkit.cli import main
from nmtkit.data.tokenizers.spm_model import with_control_pieces
from nmtkit.models.formats.safetensors import load_safetensors
from nmtkit.scoring import segments, sentence_metrics
from nmtkit.scoring.metrics import MetricSettings, score, sentence_scores
from nmtkit.scoring.neural import network
from nmtkit.scoring.neural.comet import Comet, sparsemax
from nmtkit.scoring.neural.network import batches
from nmtkit.scoring.seeds import compare_seeds
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.scoring.significance import compare

# unbabel-comet 2.2.7, and google-research/metricx at fc4978e; both with transformers 4.57.6 and torch 2.13
ORIGINAL = {
    "comet=comet": [-25.1975, -21.6633, -32.6580, -24.3638, -14.0058],
    "comet=unite": [107.9609, 109.1269, 108.2041, 107.3992, 107.3060],
    "cometkiwi=kiwi": [110.8157, 107.3857, 108.4796, 108.6741, 106.5532],
    "cometkiwi=unite": [108.8705, 107.5784, 108.5900, 107.3723, 108.1194],
    "cometkiwi=referenceless": [97.9982, 108.6397, 91.9444, 103.6354, 120.6855],
    "cometkiwi=xl": [106.8628, 107.5414, 110.4734, 111.3209, 109.4251],
    "metricx=metricx": [5.8864, 5.6339, 5.6805, 6.8157, 4.8637],
    "metricx-qe=metricx": [4.7366, 5.8731, 6.4981, 7.3983, 4.9847],
}
TEXTS, SOURCES, REFERENCES = ([row[key] for row in ROWS] for key in ("mt", "src", "ref"))
SETTINGS = MetricSettings(sources=tuple(SOURCES), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("comet", "unite", "kiwi", "referenceless", "xl"):
        write_comet(folder / kind, kind)
    write_metricx(folder / "metricx")
    return folder


def named(text: str, folder: Path) -> str:
    name, _, model = text.partition("=")
    return f"{name}={folder / model}"


@pytest.mark.parametrize("text", ORIGINAL)
def test_scores_are_those_of_the_original_code(text: str, folder: Path) -> None:
    scores = segment_metric(named(text, folder)).scores(TEXTS, sources=SOURCES, references=REFERENCES)
    assert scores == pytest.approx(ORIGINAL[text], abs=1e-3)  # pinned with four digits


@pytest.mark.parametrize("text", ["comet=comet", "cometkiwi=kiwi", "metricx=metricx"])
def test_a_score_depends_neither_on_the_batch_nor_on_earlier_calls(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "BATCH_TOKENS", {"cpu": 1, "cuda": 1})
    alone = sentence_metrics.segment_metric.__wrapped__(named(text, folder), "cpu")
    for row in (4, 2, 0, 1, 3, 0):
        columns = {"sources": SOURCES[row : row + 1], "references": REFERENCES[row : row + 1]}
        assert alone.scores(TEXTS[row : row + 1], **columns) == pytest.approx([ORIGINAL[text][row]], abs=1e-3)


def test_inputs_of_similar_lengths_share_a_batch() -> None:
    lengths = [3, 50, 4, 3, 40]
    found = list(batches(lengths, 100))
    assert found == [[1, 4], [2, 0, 3]] and all(len(b) * max(lengths[i] for i in b) <= 100 for b in found)
    assert list(batches([7, 9], 1)) == [[1], [0]] and not list(batches([], 8))


def test_sparsemax_is_the_nearest_point_of_the_simplex() -> None:
    scores = torch.randn(9, generator=torch.Generator().manual_seed(3)) * 0.7
    low, high = float(scores.min()) - 1, float(scores.max())  # the threshold at which the rest sums to 1, by bisection
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (scores - middle).clamp(min=0).sum() > 1 else (low, middle)
    assert sparsemax(scores).tolist() == pytest.approx((scores - low).clamp(min=0).tolist(), abs=1e-6)
    assert 0 < int((sparsemax(scores) == 0).sum()) < 9


# --- uses -------------------------------------------------------------------------------------------------------------


def test_the_corpus_scores_the_mean_of_its_sentences_with_a_signature(folder: Path) -> None:
    name = named("comet=comet", folder)
    [result] = score(TEXTS, [REFERENCES], [name], SETTINGS, bootstrap=100)
    assert result.value == pytest.approx(np.mean(ORIGINAL["comet=comet"]), abs=1e-3)
    assert result.name == "COMET comet" and result.interval
    facts = dict(part.split(":") for part in result.signature.split("|"))
    assert facts.pop("revision").startswith("sha256-")
    assert facts == {
        "nrefs": "1", "bs": "100", "seed": "12345", "model": "comet", "precision": "fp32", "scale": "100",
        "version": f"nmtkit-{nmtkit.__version__}",
    }  # fmt: skip
    [column] = sentence_scores(TEXTS, [REFERENCES], [name], SETTINGS)
    assert [cell.value for cell in column] == pytest.approx(ORIGINAL["comet=comet"], abs=1e-3)


@pytest.mark.parametrize("test", ["bootstrap", "randomization"])
@pytest.mark.parametrize("text", ["comet=comet", "metricx-qe=metricx"])
def test_systems_are_compared_with_it(test: str, text: str, folder: Path) -> None:
    systems = {"one": TEXTS, "two": TEXTS[::-1]}
    references = [REFERENCES] if text.startswith("comet") else []
    first, second = compare(systems, references, [named(text, folder)], SETTINGS, test=test, samples=50)
    assert first.score.value == pytest.approx(np.mean(ORIGINAL[text]), abs=1e-3)
    assert first.p_value is None and 0 < second.p_value <= 1


def test_a_text_in_many_pairs_runs_through_the_encoder_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = sentence_metrics.segment_metric.__wrapped__(named("comet=comet", folder), "cpu")
    encoded: list[tuple[str, ...]] = []
    encode = Comet.encode
    monkeypatch.setattr("nmtkit.scoring.neural.network.MEMORY", 6)  # has room for all four texts
    monkeypatch.setattr(Comet, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts))
    candidates = ["der Hund", "die Katze", "der Hund", "ein Hund läuft"]
    utilities = metric.utilities(candidates, "the dog")
    assert sorted(encoded) == sorted((text,) for text in {*candidates, "the dog"})
    for index, text in enumerate(candidates):
        others = candidates[:index] + candidates[index + 1 :]
        scores = [metric.scores([text], sources=["the dog"], references=[other])[0] for other in others]
        assert utilities[index] == pytest.approx(np.mean(scores), abs=1e-4)
    assert len(encoded) == 4


def test_seeds_are_compared_without_references(folder: Path) -> None:
    systems = {"a": [TEXTS], "b": [TEXTS[::-1]]}
    scores = compare_seeds(systems, [], [named("cometkiwi=kiwi", folder)], SETTINGS, samples=5)
    assert scores["a"][0].mean == pytest.approx(np.mean(ORIGINAL["cometkiwi=kiwi"]), abs=1e-3)


@pytest.mark.parametrize("text", ["comet=comet", "comet=unite", "metricx=metricx"])
def test_a_single_candidate_has_no_utility(text: str, folder: Path) -> None:
    assert segment_metric(named(text, folder)).utilities(["a dog"], "the dog") == [0.0]


def test_lower_errors_are_higher_qualities(folder: Path) -> None:
    metric = segment_metric(named("metricx-qe=metricx", folder))
    expected = [100 * (1 - error / 25) for error in ORIGINAL["metricx-qe=metricx"]]
    assert metric.qualities(TEXTS, sources=SOURCES) == pytest.approx(expected, abs=1e-2)
    assert metric.utilities(TEXTS[:1], SOURCES[0]) == pytest.approx(expected[:1], abs=1e-2)


def test_equal_strings_have_the_best_score_of_each_string_metric() -> None:
    for name in segments.STRING_METRICS:
        metric = segment_metric(name)
        assert metric.qualities(["", "a b c"], references=["", "a b c"]) == [100, 100]
        assert metric.qualities(["a b c d"], references=["a b c e"])[0] < 100


def test_quality_is_estimated_without_references(folder: Path, tmp_path: Path) -> None:
    for name, lines in (("out", TEXTS), ("src", SOURCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    command = ["score", "--sys", str(tmp_path / "out"), "--src", str(tmp_path / "src"), "--format", "json"]
    names = [named(text, folder) for text in ("cometkiwi=kiwi", "metricx-qe=metricx")]
    result = CliRunner().invoke(main, [*command, "--metric", ",".join(names)])
    assert result.exit_code == 0, result.output
    kiwi, metricx = json.loads(result.stdout)
    assert kiwi["score"] == pytest.approx(np.mean(ORIGINAL["cometkiwi=kiwi"]), abs=1e-3)
    assert metricx["score"] == pytest.approx(np.mean(ORIGINAL["metricx-qe=metricx"]), abs=1e-3)
    refused = CliRunner().invoke(main, [*command, "--metric", f"bleu,{names[0]}"])
    assert refused.exit_code == 2 and "--ref FILE" in refused.stderr


def test_a_model_of_the_hub_is_named_with_its_commit(hub: HubServer, folder: Path) -> None:
    encoder = {path.name: path.read_bytes() for path in (folder / "kiwi" / "encoder").iterdir()}
    hub.add("org/encoder", encoder)
    hparams = json.loads((folder / "kiwi" / "hparams.yaml").read_text()) | {"pretrained_model": "org/encoder"}
    checkpoint = (folder / "kiwi" / "checkpoints" / "model.ckpt").read_bytes()
    contents = {"hparams.yaml": json.dumps(hparams).encode(), "checkpoints/model.ckpt": checkpoint}
    commit = hub.add("org/kiwi", contents, revision="v1")
    [result] = score(TEXTS, [], ["cometkiwi=hf:org/kiwi@v1"], SETTINGS)
    assert result.value == pytest.approx(np.mean(ORIGINAL["cometkiwi=kiwi"]), abs=1e-3)
    assert f"model:org/kiwi|revision:{commit[:12]}|" in result.signature


@pytest.mark.slow
def test_weights_of_the_hub_in_two_formats_are_downloaded_once(hub: HubServer, folder: Path) -> None:
    contents = {path.name: path.read_bytes() for path in (folder / "metricx").iterdir()}
    hub.add("org/both", contents | {"pytorch_model.bin": b"not read"})
    weights = load_safetensors(folder / "metricx" / "model.safetensors")
    torch.save(weights, folder / "weights.bin")
    del contents["model.safetensors"]
    hub.add("org/pickle", contents | {"pytorch_model.bin": (folder / "weights.bin").read_bytes()})
    for name in ("both", "pickle"):
        scores = segment_metric(f"metricx-qe=hf:org/{name}").scores(TEXTS, sources=SOURCES)
        assert scores == pytest.approx(ORIGINAL["metricx-qe=metricx"], abs=1e-3)
    assert hub.asked(r"org/both/resolve/[^ ]*safetensors") and not hub.asked(r"org/both/resolve/[^ ]*\.bin")


def test_a_checkpoint_in_bfloat16_runs_in_bfloat16(tmp_path: Path) -> None:
    metric = segment_metric(f"metricx={write_metricx(tmp_path / 'small', dtype=torch.bfloat16)}")
    scores = metric.scores(TEXTS, sources=SOURCES, references=REFERENCES)
    assert scores == pytest.approx(ORIGINAL["metricx=metricx"], abs=0.15)
    assert metric.signature()["precision"] == "bf16"


def test_objects_of_the_training_are_not_imported(tmp_path: Path) -> None:
    path = write_comet(tmp_path / "comet") / "checkpoints" / "model.ckpt"
    contents = torch.load(path, weights_only=True)
    module = ModuleType("pytorch_lightning")
    module.Fault = type("Fault", (), {"__module__": "pytorch_lightning"})  # type: ignore[attr-defined]
    sys.modules["pytorch_lightning"] = module
    try:
        callbacks = {"checkpoint": {"best": np.float64(0.3), "mode": module.Fault()}}
        torch.save(contents | {"callbacks": callbacks}, path)
    finally:
        del sys.modules["pytorch_lightning"]
    scores = segment_metric(f"comet={path}").scores(TEXTS, sources=SOURCES, references=REFERENCES)
    assert scores == pytest.approx(ORIGINAL["comet=comet"], abs=1e-3)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_missing_texts_are_named_with_their_flag(folder: Path) -> None:
    for text in ("comet=comet", "cometkiwi=kiwi", "metricx=metricx"):
        with pytest.raises(ValueError, match="--src FILE"):
            score(TEXTS, [REFERENCES], [named(text, folder)], MetricSettings(device="cpu"))
    with pytest.raises(ValueError, match="one reference, not 2"):
        score(TEXTS, [REFERENCES] * 2, [named("comet=comet", folder)], SETTINGS)
    with pytest.raises(ValueError, match=r"no references .* comet"):
        score(TEXTS, [], ["comet"], SETTINGS)
    with pytest.raises(ValueError, match="5 translations and 1 sources"):
        score(TEXTS, [REFERENCES], [named("comet=comet", folder)], MetricSettings(sources=("a",), device="cpu"))


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    for name in segments.NEURAL_METRICS:
        with pytest.raises(ImportError, match=rf"{name} needs transformers.*'nmtkit\[neural\]'"):
            segment_metric(name, "cpu")
    monkeypatch.undo()
    monkeypatch.setattr(segments.metadata, "version", lambda name: "4.57.6")
    with pytest.raises(ImportError, match=r"transformers 5 or later, but 4\.57\.6"):
        segment_metric("comet", "cpu")


def test_a_model_of_another_kind_names_the_metric_to_give(folder: Path) -> None:
    wrong = {"comet=kiwi": "cometkiwi=", "comet=referenceless": "cometkiwi=", "cometkiwi=comet": "comet="}
    for text, remedy in wrong.items():
        with pytest.raises(ValueError, match=f"give it as {remedy}"):
            segment_metric(named(text, folder))


def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="hf:Unbabel/wmt22-comet-da"):
        segment_metric("comet=Unbabel/wmt22-comet-da")
    with pytest.raises(FileNotFoundError, match=r"hparams\.yaml"):
        segment_metric(f"comet={tmp_path}")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        segment_metric(f"metricx={tmp_path}")
    for text, part in (("bleu=x", "bleu=x"), ("comet=", "comet="), ("commet", "comet")):
        with pytest.raises(ValueError, match=part):
            score(TEXTS, [REFERENCES], [text], SETTINGS)


@pytest.mark.parametrize("device", ["nonsense", "meta"])
def test_a_device_that_cannot_be_used_is_named(device: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=f"--device {device}"):
        score(TEXTS, [REFERENCES], [named("comet=comet", folder)], replace(SETTINGS, device=device))


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    model = write_comet(tmp_path / "comet")
    name, path = f"comet={model}", model / "checkpoints" / "model.ckpt"
    contents = torch.load(path, weights_only=True)

    def refused(*facts: str) -> None:
        with pytest.raises((ValueError, OSError)) as caught:
            sentence_metrics.segment_metric.__wrapped__(name, "cpu")
        assert all(fact in str(caught.value) for fact in facts) and "\n" not in str(caught.value)

    hparams = json.loads((model / "hparams.yaml").read_text())
    (model / "hparams.yaml").write_text(json.dumps(hparams | {"class_identifier": "xcomet_metric"}))
    refused("xcomet_metric", "regression_metric")
    (model / "hparams.yaml").write_text("a: [")
    refused("hparams.yaml", "YAML")
    (model / "hparams.yaml").write_text(json.dumps(hparams))
    config = json.loads((model / "encoder" / "config.json").read_text())
    for change, fact in (({"hidden_size": 8}, "weights"), ({"vocab_size": 50}, "weights")):
        (model / "encoder" / "config.json").write_text(json.dumps(config | change))
        refused("model.ckpt", fact)
    (model / "encoder" / "config.json").write_text(json.dumps(config))
    weights = contents["state_dict"] | {"estimator.ff.6.bias": torch.tensor([torch.nan])}
    torch.save(contents | {"state_dict": weights}, path)
    with pytest.raises(ValueError, match="not finite"):
        score(TEXTS, [REFERENCES], [name], SETTINGS)
    weights = dict(contents["state_dict"])
    del weights["encoder.model.encoder.layer.1.output.dense.bias"]
    torch.save(contents | {"state_dict": weights}, path)
    refused("model.ckpt", "encoder.layer.1.output.dense.bias")
    weights = {key: value for key, value in contents["state_dict"].items() if "estimator" not in key}
    torch.save(contents | {"state_dict": weights}, path)
    refused("model.ckpt", "estimator")
    (model / "encoder" / "sentencepiece.bpe.model").write_bytes(with_control_pieces(SPM, [f"<{n}>" for n in range(9)]))
    torch.save(contents, path)
    refused("sentencepiece.bpe.model", "pieces")
    path.write_bytes(path.read_bytes()[:5000])
    refused("model.ckpt", "damaged")
    (model / "encoder" / "sentencepiece.bpe.model").write_bytes(b"no model")
    torch.save(contents, path)
    refused("sentencepiece.bpe.model")
    (model / "encoder" / "sentencepiece.bpe.model").unlink()
    refused("tokenizer.json")
