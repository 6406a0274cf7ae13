"""Plug-ins together with features of the package. Each test is a cell of a table, and trains a tiny model."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import log_records
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.jobs.distributed import launch
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint
from nmtkit.translation.translator import Translator

FLAGS = """
    --batch-tokens 400 --max-tokens 200 --precision fp32 --device cpu --threads 1 --lr 0.02 --warmup-updates 10
    --validate-interval none --validate-interval-updates 2 --save-interval none --max-update 4 --log-interval 1
"""
TINY = "--arch transformer_tiny --d-model 16 --d-ff 32 --heads 2 --encoder-layers 1 --decoder-layers 1"


def train_flags(data: Path, save_dir: Path, *more: object) -> list[str]:
    return ["train", str(data), *shlex.split(FLAGS), "--save-dir", str(save_dir), *map(str, more)]


def run(*arguments: object, text: str | None = None) -> str:
    result = CliRunner().invoke(main, list(map(str, arguments)), input=text)
    assert result.exit_code == 0, result.output
    return result.stdout


# --- callbacks and metrics, with several subsets, several ranks, a tracker and a sweep --------------------------------

WATCHERS = """
import json
import torch
from nmtkit.training.callbacks import CALLBACKS, Callback
from nmtkit.training.metrics import METRICS, AccuracyConfig, Metric

@CALLBACKS.register("pair_listener", AccuracyConfig())
class Listener(Callback):
    every_rank = True

    def __init__(self, config):
        self.seen = []

    def validation(self, run, scores):
        self.seen.append({"update": run.update} | dict(scores))

    def end(self, run, reason):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        (run.save_dir / f"seen{rank}.json").write_text(json.dumps(self.seen))

@METRICS.register("pair_words", AccuracyConfig())
class Words(Metric):
    translates = True

    def __init__(self, config):
        pass

    def score(self, outputs):
        return len(outputs.hypotheses) + sum(len(line.split()) for line in outputs.references) / 1000

@METRICS.register("pair_tokens", AccuracyConfig())
class Tokens(Metric):
    def __init__(self, config):
        pass

    def count(self, model, batch):
        return {"seen": batch.target_output.new_tensor(len(batch.target_output)).sum()}

    def score(self, outputs):
        return outputs.sums["seen"]
"""
SWEEP = """
[run]
data = "{data}"
plugin = ["{plugin}"]
metrics = ["pair_words", "pair_tokens"]
callbacks = ["pair_listener"]
{settings}
[architecture]
name = "transformer_tiny"
{sizes}
[sweep]
seeds = [1, 2]
"""


def toml(flags: str) -> str:
    words = shlex.split(flags)
    pairs = zip(words[::2], words[1::2], strict=True)
    quoted = ((name[2:].replace("-", "_"), value if value[0].isdigit() else f'"{value}"') for name, value in pairs)
    return "\n".join(f"{name} = {value}" for name, value in quoted if name != "arch")


@pytest.fixture(scope="module")
def watchers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the plug-in of the callback and the metrics. A process loads it once."""
    path = tmp_path_factory.mktemp("watchers") / "watchers.py"
    path.write_text(WATCHERS)
    return path


def watched(data: Path, watchers: Path, folder: Path, situation: str) -> list[Path]:
    """Trains with the callback and both metrics of the plug-in. Returns the folders of the runs."""
    more = [*TINY.split(), "--plugin", watchers, "--metrics", "pair_words,pair_tokens", "--callbacks"]
    flags = train_flags(data, folder / "run", *more, "pair_listener")
    if situation == "sweep":
        settings = toml(FLAGS.replace("--lr 0.02 --warmup-updates 10", ""))
        text = SWEEP.format(data=data, plugin=watchers, settings=settings, sizes=toml(TINY))
        (folder / "pairs.toml").write_text(text)
        table = json.loads(run("sweep", folder / "pairs.toml", "--format", "json"))
        assert table[0]["runs"] == 2 and table[0]["best"]["pair_words"]["deviation"] == 0
        return sorted((folder / "runs/pairs").glob("seed=*"))
    if situation == "two ranks":
        assert launch(flags, 2) == 0
    elif situation == "two subsets":
        run(*flags, "--valid-subset", "valid,test", "--best-checkpoint-metric", "pair_words@test")
    else:
        run(*flags[:-1], "pair_listener,tensorboard")
    return [folder / "run"]


SITUATIONS = ["two subsets", "two ranks", "tracker", "sweep"]


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_callback_and_metrics_of_a_plug_in(mirror_data: Path, watchers: Path, tmp_path: Path, situation: str) -> None:
    if situation == "tracker":
        pytest.importorskip("tensorboard")
    dataset = Dataset.open(mirror_data)
    expected = {}
    for suffix, subset in (("", "valid"), *([("@test", "test")] if situation == "two subsets" else [])):
        split = dataset[subset]
        words = sum(len(line.split()) for line in split.references())
        expected[f"pair_words{suffix}"] = pytest.approx(len(split) + words / 1000)
        expected[f"pair_tokens{suffix}"] = int(split.target.lengths.sum())
    for folder in watched(mirror_data, watchers, tmp_path, situation):
        logged = log_records(folder, "valid")
        assert [record["update"] for record in logged] == [2, 4]
        seen = [json.loads(path.read_text()) for path in sorted(folder.glob("seen*.json"))]
        assert len(seen) == (2 if situation == "two ranks" else 1)
        for scores in (*logged, *(scores for rank in seen for scores in rank)):
            assert {name: scores[name] for name in expected} == expected
        if situation == "two subsets":
            assert checkpoint.load(folder / "last.pt")["training"]["objective"] == ["pair_words@test", True]
        if situation == "tracker":
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

            events = EventAccumulator(str(folder / "tensorboard")).Reload()
            assert [it.value for it in events.Scalars("valid/pair_tokens")] == [expected["pair_tokens"]] * 2


# --- architectures, with prepacking, static decoding, FSDP, export and resume -----------------------------------------

HOOKED = """
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
import dataclasses

@ARCHITECTURES.register("pair_hooked", dataclasses.replace(
    ARCHITECTURES["transformer_tiny"].preset, d_model=16, d_ff=32, heads=2, encoder_layers=1, decoder_layers=1))
class Hooked(Transformer):
    \"\"\"A Transformer that doubles the features before the output projection by a forward hook.\"\"\"

    def __init__(self, config, vocabulary):
        super().__init__(config, vocabulary)
        self.output_projection.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
"""
GRU = Path(__file__).parents[2] / "examples/plugin/gru.py"
LINES = "bado kelu\nmiro sate vonu\n"


@pytest.fixture(scope="module")
def trained(mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """Returns a function that trains an architecture once, and returns the run's folder and the flags of its choice."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "hooked.py").write_text(HOOKED)
    runs: dict[str, tuple[Path, list[str]]] = {}

    def train(name: str) -> tuple[Path, list[str]]:
        if name not in runs:
            plugin = folder / "hooked.py" if name == "pair_hooked" else GRU
            chosen = ["--plugin", str(plugin), "--arch", name, *(["--width", "8"] if name == "gru" else [])]
            run(*train_flags(mirror_data, folder / name, *chosen, "--metrics", "bleu"))
            runs[name] = folder / name, chosen
        return runs[name]

    return train


NAMES = ["gru", "pair_hooked"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prepacking(trained: Any, name: str) -> None:
    """`generate` gives the log probabilities of the plain model."""
    folder, chosen = trained(name)
    path = folder / "last.pt"
    output = run(
        "generate", "--path", path, *chosen[:2], "--device", "cpu", "--format", "jsonl", "--nbest", 2, text=LINES
    )
    model, tokenizer = from_checkpoint(path)
    plain = Translator([model.eval()], tokenizer).translate(LINES.splitlines(), beam=4, nbest=2)
    for line, translation in zip(output.splitlines(), plain, strict=True):
        got = [hypothesis["log_probability"] for hypothesis in json.loads(line)["hypotheses"]]
        assert got == pytest.approx([it.log_probability for it in translation.hypotheses], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_static_decoding(trained: Any, name: str) -> None:
    """None of these architectures decodes statically: a static step would bypass the hook of pair_hooked."""
    from nmtkit.contracts import check_architecture
    from nmtkit.contracts.architecture import static_steps_equal_steps

    model, _ = from_checkpoint(trained(name)[0] / "last.pt")
    assert not model.supports_static_decoding
    static_steps_equal_steps(check_architecture.subject(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fsdp(mirror_data: Path, tmp_path: Path, trained: Any, name: str) -> None:
    """Two processes with shares of the parameters make the updates of one process."""
    folder, chosen = trained(name)
    sharded = train_flags(mirror_data, tmp_path / "run", *chosen, "--metrics", "bleu", "--parallel", "fsdp")
    assert launch(sharded, 2) == 0
    one, two = (checkpoint.load(path / "last.pt")["model"] for path in (folder, tmp_path / "run"))
    assert all(torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-4) for name in one)
    for single, several in zip(log_records(folder, "valid"), log_records(tmp_path / "run", "valid"), strict=True):
        assert several["loss"] == pytest.approx(single["loss"], rel=1e-4)


@pytest.mark.parametrize("format", ["ctranslate2", "huggingface", "marian"])
@pytest.mark.parametrize("name", NAMES)
def test_export(tmp_path: Path, trained: Any, name: str, format: str) -> None:
    """Other toolkits cannot run the code of a plug-in, so the export is refused."""
    if format == "ctranslate2":
        pytest.importorskip("ctranslate2")
    folder, chosen = trained(name)
    arguments = ["export", "--format", format, *chosen[:2], str(folder / "last.pt"), str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and name in result.stderr, result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_resume(mirror_data: Path, tmp_path: Path, trained: Any, name: str) -> None:
    folder, chosen = trained(name)
    for updates in (2, 4):
        run(*train_flags(mirror_data, tmp_path / "run", *chosen, "--metrics", "bleu", "--max-update", updates))
    one, two = (checkpoint.load(path / "last.pt")["model"] for path in (folder, tmp_path / "run"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert log_records(tmp_path / "run", "valid")[-1]["bleu"] == log_records(folder, "valid")[-1]["bleu"]
