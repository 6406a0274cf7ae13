"""Every example of docs/plugins.md is a file of examples/plugin and keeps its contract."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import fragments, save_ending_transformer, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.config import derive
from nmtkit.config.plugins import load_plugin
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.architectures import ARCHITECTURES, Vocabulary
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples/plugin").glob("*.py"))
PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
SHOWN = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if ".register(" in block]


def test_the_page_shows_the_files() -> None:
    files = {path.read_text(encoding="utf-8") for path in FILES if "optuna" not in path.name}
    assert set(SHOWN) == files and len(SHOWN) == 10
    assert all(20 <= block.count("\n") <= 40 for block in SHOWN if "RotaryTransformer" not in block)


@pytest.fixture(autouse=True)
def loaded() -> None:
    for path in FILES:
        if "optuna" not in path.name:
            load_plugin(str(path))


@pytest.mark.slow
def test_the_examples_keep_to_their_contracts() -> None:
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "check_architecture" in block]
    namespace: dict[str, object] = {}
    exec(block, namespace)
    namespace["test_my_components"]()  # type: ignore[operator]


ROTARY = [
    "transformer_half_rotary",
    "--encoder-layers",
    "1",
    "--decoder-layers",
    "2",
    "--d-model",
    "16",
    "--d-ff",
    "24",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [["--heads", "2"], ["--heads", "2", "--pre-norm", "--encoder-layers", "0"]], ids=str
)
def test_the_variant_of_the_transformer_keeps_its_contract(changes: list[str]) -> None:
    plugin = ["--plugin", str(ROOT / "examples/plugin/half_rotary.py")]
    result = CliRunner().invoke(main, ["check", *plugin, *ROTARY, *changes])
    assert result.exit_code == 0 and "18 of 18 checks passed" in result.stdout, result.output


def test_a_repeated_token_loses_the_penalty_in_its_own_hypothesis() -> None:
    processor = LOGITS_PROCESSORS["repetition"].factory(
        derive(LOGITS_PROCESSORS["repetition"].preset, {"repetition_penalty": 2.0}, "test"), tiny_tokenizer()
    )
    size = tiny_tokenizer().target_size
    state = processor.start(Packed.from_lists([[5, EOS]]), torch.tensor([9]), 2)
    state.step(torch.tensor([BOS, BOS]), torch.zeros(2, size))
    state.step(torch.tensor([7, 8]), torch.zeros(2, size))
    state.reorder(torch.tensor([1, 1]))
    found = state.step(torch.tensor([9, 8]), torch.full((2, size), -1.0))
    expected = torch.full((2, size), -1.0)
    expected[0, [BOS, 8, 9]] = expected[1, [BOS, 8]] = -3.0
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_the_engine_keeps_its_contract_and_searches_a_repeated_line_once(tmp_path: Path) -> None:
    plugin = str(ROOT / "examples/plugin/memory.py")
    result = CliRunner().invoke(main, ["check", "--plugin", plugin, "memory"])
    assert result.exit_code == 0 and "4 of 4 checks passed" in result.stdout, result.output
    path = save_ending_transformer(tmp_path / "model.pt")
    model = nmtkit.load(path, engine="memory", plugins=[plugin])
    lines = fragments()[:3] * 4
    assert model.translate(lines, beam=2) == nmtkit.load(path).translate(lines, beam=2)
    assert len(model._translator.decoder.engine.known) == 3


def test_the_variant_turns_queries_by_the_position_and_divides_by_the_temperature() -> None:
    name, settings = "transformer_half_rotary", {"d_model": 16, "heads": 2, "encoder_layers": 1}
    config = derive(ARCHITECTURES[name].preset, settings, "test")
    torch.manual_seed(1)
    model: Any = ARCHITECTURES[name].factory(config, Vocabulary(source=9, target=9, joint=True)).eval()
    attention, x, position = model.encoder[0].self_attention, torch.randn(3, 2, 8), torch.tensor([0, 5, 2])
    numbers = x.double().numpy()
    angles = position.numpy()[:, None, None] * 10_000.0 ** (-np.arange(0, 4, 2) / 4)
    turned = (numbers[..., :2] + 1j * numbers[..., 2:4]) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag, numbers[..., 4:]], -1)
    np.testing.assert_allclose(attention.turned(x, position).detach().numpy(), expected, rtol=1e-5, atol=1e-5)
    source = Packed.from_lists([[3, 4, 5, 2]])
    with torch.no_grad():
        before = model.attention_weights(source, source)["encoder"][0].double()
        model.encoder[0].self_attention.temperature.fill_(math.log(2.0))
        after = model.attention_weights(source, source)["encoder"][0].double()
    halved = before.sqrt() / before.sqrt().sum(-1, keepdim=True)  # softmax(scores / 2)
    torch.testing.assert_close(after, halved, rtol=1e-4, atol=1e-5)
    assert not [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]


@pytest.mark.slow
def test_check_has_the_settings_of_the_named_components() -> None:
    plugin = ["check", "--plugin", str(ROOT / "examples/plugin/gru.py")]
    page = CliRunner().invoke(main, [*plugin, "gru", "--help"])
    assert "Architecture gru" in page.stdout and "--width" in page.stdout
    checked = CliRunner().invoke(main, [*plugin, "gru", "--width", "8"])
    assert checked.exit_code == 0 and "engine: " not in checked.stderr, checked.stderr
    wrong = CliRunner().invoke(main, ["check", "label_smoothed_cross_entropy", "--label-smoothing", "2"])
    assert wrong.exit_code == 2 and "--label-smoothing" in wrong.stderr
    unknown = CliRunner().invoke(main, [*plugin, "gru", "--depth", "2"])
    assert unknown.exit_code == 2 and "--depth" in unknown.stderr


def test_the_example_architecture_trains_and_translates(mirror_data: Path, tmp_path: Path) -> None:
    plugin = ["--plugin", str(ROOT / "examples/plugin/gru.py")]
    flags = "--arch gru --width 16 --lr 0.01 --max-update 3 --batch-tokens 200 --metrics none --threads 1"
    trained = CliRunner().invoke(
        main, ["train", str(mirror_data), *plugin, *flags.split(), "--save-dir", str(tmp_path / "run")]
    )
    assert trained.exit_code == 0, trained.output
    checkpoint = str(tmp_path / "run" / "last.pt")
    search = ["--path", checkpoint, "--max-len-a", "0", "--max-len-b", "4", "--beam", "2", "--threads", "1"]
    translated = CliRunner().invoke(main, ["generate", str(mirror_data), *search, *plugin])
    assert translated.exit_code == 0, translated.output
    assert translated.stdout.count("\n") == 20
