"""The language model `transformer_lm`: a Transformer without encoder, trained, scored and saved like other models."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from builders import tiny_transformer, write_corpus
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES, Vocabulary
from nmtkit.models.architectures.interface import parameter_count
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.building import from_checkpoint
from nmtkit.translation.search.decoding import token_log_probabilities

Array = npt.NDArray[np.float64]
SIZES = {"--decoder-layers": "2", "--d-model": "16", "--d-ff": "24", "--heads": "2", "--dropout": "0"}


def norm(x: Array, module: Any) -> Array:
    weight, bias = (parameter.detach().double().numpy() for parameter in (module.weight, module.bias))
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return np.asarray((x - mean) / np.sqrt(variance + module.eps) * weight + bias)


def matrix(module: Any) -> Array:
    return np.asarray(module.weight.detach().double().numpy().T)


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def log_probabilities(model: Transformer, ids: list[int]) -> list[float]:
    """Returns the log probabilities of `ids` and of eos in float64 with numpy, for one sentence and head at a time.

    The equations come from Vaswani et al. 2017, with norms before the sub-layers and without attention to a source.
    """
    config, table = model.config, model.target_embedding.tokens.weight.detach().double().numpy()
    inputs, width = [BOS, *ids], model.config.d_model
    position = np.arange(len(inputs))[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    encoding = np.stack([np.sin(position), np.cos(position)], -1).reshape(len(inputs), width)
    x = table[inputs] * math.sqrt(width) + encoding
    for layer in model.decoder:
        y = norm(x, layer.self_attention_norm)
        queries, keys, values = np.split(y @ matrix(layer.self_attention.qkv_proj), 3, -1)
        heads = []
        for head in range(config.heads):
            columns = slice(head * width // config.heads, (head + 1) * width // config.heads)
            scores = queries[:, columns] @ keys[:, columns].T / math.sqrt(width // config.heads)
            scores[np.triu_indices(len(inputs), 1)] = -np.inf
            heads.append(softmax(scores) @ values[:, columns])
        x = x + np.concatenate(heads, -1) @ matrix(layer.self_attention.out_proj)
        feed_forward: Any = layer.feed_forward
        inner, outer = [module for module in feed_forward.modules() if isinstance(module, torch.nn.Linear)]
        y = norm(x, layer.feed_forward_norm) @ matrix(inner) + inner.bias.detach().double().numpy()
        x = x + np.maximum(y, 0) @ matrix(outer) + outer.bias.detach().double().numpy()
    logits = norm(x, model.decoder_norm) @ table.T
    probabilities = softmax(logits)
    return [math.log(probabilities[row, token]) for row, token in enumerate([*ids, EOS])]


def test_log_probabilities_equal_an_independent_computation() -> None:
    model = tiny_transformer(30, encoder_layers=0, pre_norm=True, sharpness=2.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    sentences = [[5, 9, 5, 28], [7], [], list(range(3, 20))]
    with torch.inference_mode():
        found = token_log_probabilities([model], Packed.from_lists([[EOS]] * 4), sentences)
    for ids, each in zip(sentences, found, strict=True):
        assert each == pytest.approx(log_probabilities(model, ids), abs=1e-4)


def test_the_source_changes_nothing_and_has_no_parameters() -> None:
    model = tiny_transformer(30, encoder_layers=0)
    target = Packed.from_lists([[BOS, 5, 6], [BOS, 7]])
    one, other = (model(Packed.from_lists(source), target) for source in ([[3, 4, EOS], [EOS]], [[EOS], [9, EOS]]))
    assert torch.equal(one, other)
    assert not [name for name in model.state_dict() if "encoder" in name or "cross" in name or "source" in name]
    with pytest.raises(ValueError, match="no cross-attention"):
        model.forward_with_attention(Packed.from_lists([[EOS]] * 2), target, None)


@pytest.mark.parametrize(
    ("name", "layers", "width", "inner"),
    [("transformer_lm", 6, 512, 2048), ("transformer_lm_big", 12, 1024, 4096), ("transformer_lm_tiny", 4, 128, 256)],
)
def test_parameters_are_counted_by_hand(name: str, layers: int, width: int, inner: int) -> None:
    entry = ARCHITECTURES[name]
    with torch.device("meta"):
        model = entry.factory(entry.preset, Vocabulary(source=999, target=1000, joint=False))
    layer = 4 * width * width + 2 * width * inner + inner + width + 2 * 2 * width
    assert parameter_count(model) == layers * layer + 1000 * width + 2 * width


def invoke(*arguments: str, input: str | None = None) -> Any:
    result = CliRunner().invoke(main, list(arguments), input=input, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a language model. Both sides of the corpus have the same lines."""
    folder = tmp_path_factory.mktemp("lm")
    write_corpus(folder / "train", 120, 1)
    write_corpus(folder / "valid", 10, 2)
    prefixes = ["--trainpref", str(folder / "train"), "--validpref", str(folder / "valid")]
    data = str(folder / "data-bin")
    report = invoke("preprocess", "-s", "yy", "-t", "yy", *prefixes, "--destdir", data, "--vocab-size", "320")
    assert "source equals target" not in report.stderr and "equal sides" not in report.stderr
    flags = [word for pair in SIZES.items() for word in pair]
    settings = ["--lr", "0.01", "--warmup-updates", "4", "--batch-tokens", "300", "--max-update", "6", "--threads", "1"]
    settings += ["--validate-interval-updates", "3", "--label-smoothing", "0", "--save-interval-updates", "3"]
    arch = ["--arch", "transformer_lm", "--device", "cpu", "--save-dir", str(folder / "run")]
    invoke("train", data, *arch, *flags, *settings)
    return folder / "run"


@pytest.mark.slow
def test_training_reports_the_perplexity_of_the_valid_set(run: Path) -> None:
    model, tokenizer = from_checkpoint(run / "last.pt")
    assert isinstance(model, Transformer)
    lines = (run.parent / "valid.yy").read_text().splitlines()
    sentences = [ids[:-1].tolist() for ids in tokenizer.encode_target(lines).split()]
    each = [log_probabilities(model, ids) for ids in sentences]
    nll = -sum(map(sum, each)) / sum(map(len, each))
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "valid"][-1]
    assert last["ppl"] == pytest.approx(math.exp(nll), rel=1e-3)
    assert "bleu" not in last


@pytest.mark.slow
def test_score_prints_the_perplexity_and_log_probabilities_of_a_text(run: Path) -> None:
    model, tokenizer = from_checkpoint(run / "last.pt")
    assert isinstance(model, Transformer)
    text = "BADO KELU\n\nZULO\n"
    each = [
        log_probabilities(model, ids[:-1].tolist())
        for ids in tokenizer.encode_target(["BADO KELU", "", "ZULO"]).split()
    ]
    lines = invoke("score", "--path", str(run / "best.pt"), "--sentence-level", input=text).stdout.splitlines()
    assert [float(line.split("\t")[0]) for line in lines] == pytest.approx([sum(row) for row in each], abs=1e-3)
    assert [int(line.split("\t")[1]) for line in lines] == [len(row) for row in each]
    (total,) = json.loads(invoke("score", "--path", str(run / "best.pt"), "--format", "json", input=text).stdout)
    tokens = sum(map(len, each))
    assert (total["pieces"], total["lines"]) == (tokens, 3)
    assert total["perplexity"] == pytest.approx(math.exp(-sum(map(sum, each)) / tokens), rel=1e-3)
    printed = invoke("score", "--path", str(run / "best.pt"), input=text).stdout
    assert printed.startswith(f"perplexity {total['perplexity']:.2f}  {tokens} pieces")


@pytest.mark.slow
def test_average_and_inspect_know_a_language_model(run: Path, tmp_path: Path) -> None:
    invoke("average-checkpoints", str(run), "--last", "2", "--output", str(tmp_path / "averaged.pt"))
    assert checkpoint.load(tmp_path / "averaged.pt")["architecture"] == "transformer_lm"
    shown = invoke("inspect", str(tmp_path / "averaged.pt")).stdout
    assert "transformer_lm" in shown and "nmtkit score --path" in shown and "nmtkit generate" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "--path", "{lm}", "--src", "{text}"], "leave out --src"),
        (["score", "--path", "{lm}", "--metric", "bleu"], "--path"),
        (["export", "--format", "huggingface", "{lm}", "{folder}/out"], "is a language model"),
        (["train", "{data}", "--arch", "transformer_lm", "--metrics", "chrf"], "--metrics chrf scores translations"),
        (["train", "{data}", "--arch", "transformer_lm", "--metrics", "bleu"], "--metrics bleu scores translations"),
        (
            ["train", "{data}", "--arch", "transformer_lm", "--encoder-layerdrop", "0.1"],
            "--encoder-layerdrop does nothing",
        ),
        (
            ["train", "{data}", "--arch", "transformer_lm", "--encoder-self-attention", "lightconv"],
            "--encoder-self-attention does nothing",
        ),
    ],
    ids=["source", "metric", "export", "metrics", "default-metric", "layerdrop", "self-attention"],
)
def test_what_a_language_model_cannot_do_is_said(run: Path, arguments: list[str], message: str) -> None:
    places = {"lm": run / "last.pt", "text": run.parent / "valid.yy", "folder": run.parent}
    places["data"] = run.parent / "data-bin"
    result = CliRunner().invoke(main, [argument.format(**places) for argument in arguments])
    assert result.exit_code != 0 and message in result.output.replace("\n", " ")
