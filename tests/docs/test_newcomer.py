"""A researcher's first day: plug-ins as docs/plugins.md shows them, ten mistakes in them, a sweep, a run rebuilt.

The plug-ins are the page's own code, and each mistake is an edit of it.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.config.plugins import is_own
from nmtkit.experiments.sweep_runner import Runner
from nmtkit.models import checkpoint
from nmtkit.training.config import REGISTRIES

PAGE = (Path(__file__).parents[2] / "docs/plugins.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SNIPPETS = {name[0]: block for block in BLOCKS if (name := re.findall(r'\.register\("(\w+)"', block))}
for other in ("transformer_half_rotary", "repetition", "memory"):  # a second architecture, and components of searches
    del SNIPPETS[other]  # test_plugin_examples.py has their tests
FLAGS = {
    "gru": "--arch gru --width 12",
    "focal_loss": "--criterion focal_loss",
    "signum": "--optimizer signum",
    "one_cycle": "--lr-scheduler one_cycle --lr 0.01 --rise-share 0.5",
    "stop_at": "--callbacks stop_at --stop-at-ppl 1",
    "length_ratio": "--valid-beam 1 --metrics length_ratio --best-checkpoint-metric length_ratio",
    "switchout": "--transforms switchout --switchout 0.2",
}
RUN = "--batch-tokens 200 --max-update 4 --validate-interval-updates 2 --save-interval-updates 2 --threads 1"
TINY = "--arch transformer_tiny --encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 16 --heads 2 --metrics none"


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    """Takes components of plug-ins out of the registries before a test and after it."""

    def clear() -> None:
        for registry in REGISTRIES.values():
            registry.entries = {name: entry for name, entry in registry.entries.items() if is_own(entry.factory)}

    before = {kind: registry.entries for kind, registry in REGISTRIES.items()}
    clear()
    yield
    for kind, registry in REGISTRIES.items():
        registry.entries = before[kind]


def written(folder: Path, name: str, *edit: str) -> list[str]:
    """Writes a snippet of the page after the change re.sub(*edit). Returns the flags that load the file."""
    text = SNIPPETS[name]
    if edit:
        changed = re.sub(*edit, text, flags=re.DOTALL)  # type: ignore[call-overload]
        assert changed != text, "the page's code has changed; the mistake must be made otherwise"
        text = changed
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return ["--plugin", str(path)]


def nmtkit(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_the_page_has_one_plugin_of_each_kind() -> None:
    assert set(SNIPPETS) == set(FLAGS)


def test_all_plugins_train_together_and_the_run_is_rebuilt_from_its_averaged_checkpoint(
    mirror_data: Path, tmp_path: Path
) -> None:
    plugins = [word for name in SNIPPETS for word in written(tmp_path, name)]
    flags = " ".join([RUN, *(FLAGS[name] for name in SNIPPETS)]).split()
    trained = nmtkit("train", mirror_data, *plugins, *flags, "--save-dir", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    contents = checkpoint.load(tmp_path / "run/last.pt")
    assert contents["update"] == 4 and contents["scores"]["length_ratio"] > 0
    averaged = tmp_path / "averaged.pt"
    assert nmtkit("average-checkpoints", tmp_path / "run", "--last", "2", "--output", averaged).exit_code == 0
    (tmp_path / "again.toml").write_text(nmtkit("inspect", averaged, "--format", "toml").stdout, encoding="utf-8")
    again = nmtkit("train", "--config", tmp_path / "again.toml", "--save-dir", tmp_path / "again")
    assert again.exit_code == 0, again.output
    rebuilt = checkpoint.load(tmp_path / "again/last.pt")["model"]
    assert all(torch.equal(tensor, rebuilt[name]) for name, tensor in contents["model"].items())
    lines = CliRunner().invoke(main, ["generate", "--path", str(averaged), *plugins], input="bado kelu\nmiro\n")
    assert lines.exit_code == 0 and lines.stdout.count("\n") == 2


PLACE = r'  File ".*{}", line \d+, in .*\n.*'  # the line of code follows
MISTAKES = {
    "a Tensor for a Loss": ("focal_loss", (r"Loss\((\(weight \* nll\)\.sum\(\)), \{.*?\}\)", r"\1"),
        r"criterion FocalLoss returned a Tensor of shape \[\]; it must return Loss\(sum, counts\)"),
    'no "nll"': ("focal_loss", ('"nll":', '"mine":'), r"criterion FocalLoss returned counts \['mine'\] without 'nll'"),
    "an unreduced loss": ("focal_loss", (r"\(weight \* nll\)\.sum\(\)", "weight * nll"),
        r"criterion FocalLoss returned a Tensor of shape \[\d+\] for 'sum'; it must be a tensor without"),
    "None from a schedule": ("one_cycle", ("return self.config.lr", "self.config.lr"),
        "scheduler OneCycle returned None for update 1; it must return a finite number of at least 0"),
    "NaN from a schedule": ("one_cycle", ("return self.config.lr", 'return float("nan")'),
        "scheduler OneCycle returned nan for update 1; it must return a finite number"),
    "a wrong shape in forward": ("gru", (r"Packed\.from_padded\(states, layout\)\.values", "states"),
        r"GRU.decode returned a Tensor of shape \[2, 8, 12\] for 14 target tokens; it must return features \[T, D\]"),
    "a missing import": ("gru", ("Architecture, Packed, Voc", "Architecture, Voc"),
        "in a plug-in: NameError: name 'Packed' is not defined.*\n" + PLACE.format("gru.py") + "Packed"),
    "an unregistered name": ("gru", (r'register\("gru"', 'register("gruu"'),
        "unknown architecture 'gru'; did you mean 'gruu'.*known: .*add --plugin FILE"),
    "a clash of flags": ("focal_loss", ("focal_gamma", "encoder_layers"),
        "architecture transformer_tiny and criterion focal_loss both declare --encoder-layers; rename one"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_plugin_is_told_as_it_is(mistake: str, mirror_data: Path, tmp_path: Path) -> None:
    name, edit, message = MISTAKES[mistake]
    tiny = "" if name == "gru" else TINY
    flags = f"{tiny} {FLAGS[name]} {RUN}".split()
    result = nmtkit("train", mirror_data, *written(tmp_path, name, *edit), *flags, "--save-dir", tmp_path / "run")
    assert result.exit_code == 2, result.output
    said = result.stderr[result.stderr.index("nmtkit: error: ") :]
    assert re.search(message, said), said
    assert "Traceback" not in said and (said.count("\n") == 1 or "add --debug" in said)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[architecture]\nname = "gru"\nwidth = "wide"\n', r"\[architecture\]: width: 'wide'"),
        ("[run]\nclip-norm = true\n", r"clip.norm: True"),
        ('[criterion]\nname = "focal_loss"\nfocal-gamma = 1\nfocal_gamma = 2\n', "'focal_gamma' occurs twice in"),
        (
            '[criterion]\nname = "focal_loss"\nfocal_gama = 1\n',
            r"'focal_gama'.*'focal_gamma'",
        ),
        ("[architectur]\n", r"'architectur' .*'architecture'"),
        ("[lr_scheduler]\nname = 3\n", r"\[lr-scheduler\]: 3 is not"),
    ],
)
def test_a_mistake_in_a_file_of_settings_is_told_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    plugins = [*written(tmp_path, "gru"), *written(tmp_path, "focal_loss")]
    result = nmtkit("train", "data-bin", "--config", tmp_path / "run.toml", *plugins)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "run.toml" in result.stderr and re.search(message, result.stderr), result.stderr


def test_dashes_and_underscores_are_alike_in_a_file_of_settings(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[run]\nbatch-tokens = 200\nmax_update = 1\n[lr_scheduler]\nname = "fixed"\nwarmup-updates = 3\n'
        '[criterion]\nname = "focal_loss"\nfocal-gamma = 1\n'
    )
    flags = [*TINY.split(), "--save-dir", tmp_path / "run", *written(tmp_path, "focal_loss")]
    result = nmtkit("train", mirror_data, "--config", tmp_path / "run.toml", *flags)
    assert result.exit_code == 0, result.output
    tables = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert tables["lr-scheduler"]["warmup_updates"] == 3 and tables["criterion"]["focal_gamma"] == 1.0


SWEEP = """
[run]
data = "{data}"
plugin = ["focal_loss.py"]
batch_tokens = 200
max_update = 2
validate_interval_updates = 2
threads = 1
metrics = []
[architecture]
name = "transformer_tiny"
encoder_layers = 1
decoder_layers = 1
d_model = 16
d_ff = 16
heads = 2
[criterion]
name = "focal_loss"
[sweep]
seeds = [1, 2]
[sweep.grid]
focal_gamma = [0.0, 2.0]
"""


def test_a_sweep_of_four_runs_is_compared(mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "focal_loss")
    (tmp_path / "gamma.toml").write_text(SWEEP.format(data=mirror_data))

    def run(self: Runner, command: Sequence[str], watch: Callable[[], bool] = lambda: True) -> int:
        return nmtkit(*command[1:]).exit_code  # without starting Python anew

    monkeypatch.setattr(Runner, "run", run)
    swept = nmtkit("sweep", tmp_path / "gamma.toml")
    assert swept.exit_code == 0, swept.output
    compared = nmtkit("compare", tmp_path / "runs/gamma")
    assert compared.exit_code == 0, compared.output
    rows = [line for line in compared.stdout.splitlines() if "finished" in line]
    assert len(rows) == 4 and "focal_gamma" in compared.stdout
