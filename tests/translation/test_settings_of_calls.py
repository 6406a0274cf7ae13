"""The settings of a call travel with the call: no call reads the settings of another."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from builders import fragments, save_ending_transformer, tiny_transformer

import nmtkit
from nmtkit.data import checkpoint_file
from nmtkit.models.building import from_checkpoint, to_checkpoint, vocabulary_of

LINES = fragments()[:12]
SHORT = {"beam": 2, "max_len_a": 0.0, "max_len_b": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nmtkit.Model:
    """Returns a model next to a language model `lm.pt`."""
    folder = tmp_path_factory.mktemp("calls")
    path = save_ending_transformer(folder / "model.pt")
    _, tokenizer = from_checkpoint(path)
    lm = tiny_transformer(vocabulary_of(tokenizer), encoder_layers=0, sharpness=4.0)
    checkpoint_file.save(folder / "lm.pt", to_checkpoint(lm, "transformer_lm_tiny", lm.config, tokenizer, [], 1))
    return nmtkit.load(path, device="cpu", max_tokens=60)


def fusion(model: nmtkit.Model, weight: float) -> dict[str, object]:
    lm = model._translator.decoder.torch.loaded.paths[0].with_name("lm.pt")
    return {**SHORT, "logits_processors": ["lm_fusion"], "lm": Path(lm), "lm_weight": weight}


@pytest.mark.slow
def test_a_lazily_read_call_keeps_its_logits_processors(model: nmtkit.Model) -> None:
    weak, strong = fusion(model, 0.0), fusion(model, 5.0)
    expected = model.translate(LINES, **weak)
    assert model.translate(LINES, **strong) != expected
    lazy = model.translate((line for line in LINES), **weak)
    model.translate(LINES, **strong)
    assert list(lazy) == expected


@pytest.mark.slow
def test_threads_with_different_settings_do_not_disturb_each_other(model: nmtkit.Model) -> None:
    settings = [fusion(model, weight) for weight in (0.0, 1.0, 5.0)]
    expected = [model.translate(LINES, **each) for each in settings]
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(model.translate, LINES, **settings[number % 3]) for number in range(9)]
        assert [call.result() for call in calls] == [expected[number % 3] for number in range(9)]
