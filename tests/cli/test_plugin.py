"""A plug-in of a few lines adds an architecture that trains and translates. Without the plug-in it is refused."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.config.plugins import load_plugin, source_digests
from nmtkit.models.architectures import ARCHITECTURES

PLUGIN = '''
from dataclasses import dataclass
from torch import nn
from nmtkit.models.architectures import ARCHITECTURES, Architecture
from nmtkit.data.packed import Packed
from nmtkit.config import option

@dataclass(frozen=True, kw_only=True)
class BagConfig:
    width: int = option(8, "Width of the embeddings.")

@ARCHITECTURES.register("bag", BagConfig())
class Bag(Architecture):
    """The mean of the source's embeddings, plus the embedding of the token before."""
    def __init__(self, config, vocabulary):
        super().__init__()
        self.source = nn.EmbeddingBag(vocabulary.source, config.width)
        self.target = nn.Embedding(vocabulary.target, config.width)
        self.output_projection = nn.Linear(config.width, vocabulary.target)
    def encode(self, source):
        ones = source.layout.lengths * 0 + 1
        return Packed(self.source(source.values, source.layout.cu_seqlens[:-1].long()), source.layout.of(ones))
    def decode(self, memory, target_input):
        return self.target(target_input.values) + memory.values[target_input.layout.segment_ids]
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "bag.py"
    path.write_text(PLUGIN)
    return path


@pytest.mark.slow
def test_a_plugin_of_twenty_lines_trains_and_translates(mirror_data: Path, tmp_path: Path, plugin: Path) -> None:
    assert len([line for line in PLUGIN.splitlines() if line]) <= 25
    runner = CliRunner()
    run = tmp_path / "run"
    flags = ["--arch", "bag", "--plugin", str(plugin), "--width", "4", "--lr-scheduler", "fixed", "--lr", "0.05"]
    rest = ["--max-tokens", "200", "--max-epoch", "3", "--device", "cpu", "--log-interval", "1", "--save-dir", str(run)]
    trained = runner.invoke(main, ["train", str(mirror_data), *flags, *rest])
    assert trained.exit_code == 0, trained.stderr
    losses = [float(part.split()[0]) for part in trained.stderr.split(" loss ")[1:]]
    assert losses[-1] < losses[0] - 0.5

    last = str(run / "last.pt")
    translated = runner.invoke(main, ["generate", "--path", last, "--plugin", str(plugin)], input="bado kelu\n")
    assert translated.exit_code == 0, translated.stderr
    assert translated.stdout.count("\n") == 1

    del ARCHITECTURES.entries["bag"]
    refused = runner.invoke(main, ["generate", "--path", last], input="bado\n")
    assert refused.exit_code == 2
    assert f"--plugin {plugin}" in refused.stderr.replace("\n", "")


def test_a_plugin_file_is_imported_once_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import nmtkit.config.registry as r\nr.loaded = getattr(r, 'loaded', 0) + 1\n")
    load_plugin(str(path))
    load_plugin(str(path))
    from nmtkit.config import registry

    assert registry.loaded == 1  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError, match=r"gone\.py"):
        load_plugin(str(tmp_path / "gone.py"))


def test_a_change_of_one_of_two_plugins_with_one_name_is_noticed(tmp_path: Path) -> None:
    """The digest of the last file of a name replaced the digests of the others."""
    for number, text in enumerate(["a = 1", "a = 2", "a = 1", "a = 3"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "same.py").write_text(text)
    first, second, equal, changed = (str(tmp_path / str(number) / "same.py") for number in range(4))
    for name in (first, second, equal, changed):
        load_plugin(name)
    assert source_digests([first, second]) == source_digests([second, equal])
    assert source_digests([first, second]) != source_digests([changed, second])
