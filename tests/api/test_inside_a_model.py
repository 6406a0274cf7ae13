"""Logits, states and scores of single pieces from the Python interface, against passes of plain modules in float64."""

from pathlib import Path

import pytest
import torch
from builders import TINY_CONFIGS, save_tiny_transformer, save_transformer, tiny_model, tiny_tokenizer

import nmtkit
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.architectures.hidden_states import decoder_states, encoder_states
from nmtkit.models.building import from_checkpoint

SOURCES = ["the dog runs .", "two men sleep in the park .", "a cat !"]
TARGETS = ["the dog", "two men in the park", "a dog runs ."]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_transformer(tmp_path_factory.mktemp("model") / "model.pt", tiny_tokenizer(), sharpness=6)


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "trainable"])
def model(path: Path, request: pytest.FixtureRequest) -> nmtkit.Model:
    return nmtkit.load(path, device="cpu", trainable=request.param)


def ids_of(model: nmtkit.Model, source: str, target: str) -> tuple[list[int], list[int]]:
    return (
        model.tokenizer.encode_source([source]).split()[0].tolist(),
        model.tokenizer.encode_target([target]).split()[0].tolist(),
    )


def plain_logits(path: Path, source: list[int], target: list[int]) -> torch.Tensor:
    """Returns logits T V in float64 for one sentence: target ids end with eos."""
    module = from_checkpoint(path)[0].double().eval()
    with torch.no_grad():
        features = module(Packed.from_lists([source]), Packed.from_lists([[BOS, *target[:-1]]]))
        return module.output_projection(features)


def test_logits_are_those_of_a_pass_over_each_sentence(path: Path, model: nmtkit.Model) -> None:
    together = model.logits(SOURCES, TARGETS)
    padded = model.logits(SOURCES, TARGETS, padded=True)
    assert padded.shape == (3, max(map(len, together)), model.tokenizer.target_size)
    for index, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        source_ids, target_ids = ids_of(model, source, target)
        assert target_ids[-1] == EOS
        expected = plain_logits(path, source_ids, target_ids).float()
        torch.testing.assert_close(model.logits(source, target).detach(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together[index].detach(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(padded[index, : len(expected)].detach(), expected, rtol=1e-4, atol=1e-4)
        assert not padded[index, len(expected) :].any()


def test_scores_of_pieces_are_log_probabilities_and_sum_to_the_score(path: Path, model: nmtkit.Model) -> None:
    each = model.score(SOURCES, TARGETS, per_piece=True)
    for source, target, pieces in zip(SOURCES, TARGETS, each, strict=True):
        source_ids, target_ids = ids_of(model, source, target)
        expected = plain_logits(path, source_ids, target_ids).log_softmax(-1)[range(len(target_ids)), target_ids]
        assert pieces == pytest.approx(expected.tolist(), abs=1e-3)
        assert model.score(source, target, per_piece=True) == pytest.approx(pieces, abs=1e-3)
        assert model.score(source, target) == pytest.approx(sum(pieces), abs=1e-3)


def test_states_are_the_inputs_and_outputs_of_the_layers(model: nmtkit.Model) -> None:
    states = model.encode(SOURCES, layers="all")
    config = model.architectures[0].config
    assert len(states) == config.encoder_layers + 1
    for index, source in enumerate(SOURCES):
        alone = model.encode(source, layers="all")
        for layer, each in zip(alone, states, strict=True):
            torch.testing.assert_close(each[index], layer, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[-1][index], model.encode(source), rtol=1e-4, atol=1e-4)
    means = model.encode(SOURCES, layers="all", pooling="mean")
    torch.testing.assert_close(means[1][2], states[1][2].mean(0))

    decoder = model.decoder_states(SOURCES[0], TARGETS[0])
    assert len(decoder) == config.decoder_layers + 1
    module = model.architectures[0]
    torch.testing.assert_close(module.output_projection(decoder[-1]), model.logits(SOURCES[0], TARGETS[0]))
    batch = model.batch(SOURCES[0], TARGETS[0])
    embedded = module.target_embedding(batch.target_input.values, torch.arange(len(decoder[0])), len(decoder[0]))
    torch.testing.assert_close(decoder[0].detach(), embedded.detach())


def test_a_trainable_model_has_gradients_of_single_logits(path: Path) -> None:
    model = nmtkit.load(path, device="cpu", trainable=True)
    states = model.decoder_states(SOURCES[0], TARGETS[0])
    states[0].retain_grad()
    logits = model.architectures[0].output_projection(states[-1])
    logits[1, 7].backward()
    gradient = states[0].grad
    assert gradient is not None
    assert gradient[:2].abs().sum() > 0 and not gradient[2:].any()  # row 1 reads rows 0 and 1 only
    assert model.logits(SOURCES[0], TARGETS[0]).requires_grad
    assert not nmtkit.load(path, device="cpu").logits(SOURCES[0], TARGETS[0]).requires_grad


def test_a_state_can_be_patched_by_a_hook(path: Path) -> None:
    """With the last encoder layer's output for another sentence, the decoder gives the logits of the other sentence."""
    model = nmtkit.load(path, device="cpu", trainable=True)
    source, other = "the dog runs .", "two dog runs ."
    states = model.encode(other, layers="all")
    assert len(states[0]) == len(model.encode(source))
    layer = model.architectures[0].encoder[-1]
    layer.register_forward_hook(lambda module, inputs, output: states[-1])
    patched = model.logits(source, TARGETS[0])
    plain = nmtkit.load(path, device="cpu", trainable=True)
    torch.testing.assert_close(patched, plain.logits(other, TARGETS[0]), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_shown_is_said(path: Path, tmp_path: Path) -> None:
    positions = tmp_path / "positions.pt"
    save_tiny_transformer(positions, tiny_tokenizer(), positions="learned", max_positions=12)
    model = nmtkit.load(path, device="cpu")
    with pytest.raises(ValueError, match="list of 2"):
        model.batch(["a", "b"], ["a"])
    learned = nmtkit.load(positions, device="cpu")
    with pytest.raises(ValueError, match=r"line 2: the source has 36 pieces.*12"):
        learned.logits(["the dog", "the dog runs . " * 9], ["a", "a"])
    with pytest.raises(ValueError, match="layers: 'some' is not"):
        model.encode("a", layers="some")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="single model"):
        nmtkit.load([path, path], device="cpu").logits("a", "a")


def test_the_encoder_of_a_multilingual_model_reads_the_language_token(tmp_path: Path) -> None:
    model = nmtkit.load(save_transformer(tmp_path / "model.pt", languages=("en", "pl", "it")), trainable=True)
    module, text = model.architectures[0], "the dog runs ."
    plain = model.tokenizer.encode_source([text]).ids.tolist()
    for code in ("en", "it"):
        with torch.no_grad():
            expected = module.encode(Packed.from_lists([[model.tokenizer.languages[code], *plain]])).values
        torch.testing.assert_close(model.encode(text, source_lang=code), expected)
        torch.testing.assert_close(model.encode([text], source_lang=code, layers="all")[-1][0], expected)
        batch = model.batch(text, text, source_lang=code, target_lang="pl")
        torch.testing.assert_close(module.encode(batch.source).values, expected)
    with pytest.raises(ValueError, match=r"source_lang, .*en, it, pl"):
        model.encode(text)
    with pytest.raises(ValueError, match=r"source_lang xx.*en, it, pl"):
        model.encode(text, source_lang="xx")
    assert len(model.encode("", source_lang="en")) == 1


def test_lists_that_are_empty_or_not_allowed_are_refused(model: nmtkit.Model) -> None:
    with pytest.raises(ValueError, match="lists are empty"):
        model.logits([], [])
    with pytest.raises(ValueError, match="attention takes one text"):
        model.attention(["a cat !"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decoder_states takes one text"):
        model.decoder_states(SOURCES, TARGETS)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_states_of_every_architecture_have_a_row_for_each_token_or_are_refused(name: str) -> None:
    architecture, source = tiny_model(name), Packed.from_lists([[5, 6, EOS], [7, 8, 9, EOS]])
    try:
        states = encoder_states(architecture, source)
    except ValueError as error:
        assert name.startswith(("gnmt", "deep_att", "convs2s", "bytenet", "extended_neural_gpu"))
        assert "forward hooks" in str(error)
    else:
        assert len(states) == len(architecture.encoder) + 1
        assert all(state.shape[0] == 7 and state.dim() == 2 for state in states)
        torch.testing.assert_close(states[-1], architecture.encode(source).values)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in architecture.modules())


def test_states_of_tied_layers_are_recorded_once_for_each_call() -> None:
    architecture, source = tiny_model("transformer_tiny", decoder_tied_layers=(1, 1)), Packed.from_lists([[5, 6, EOS]])
    start, first, last = decoder_states(architecture, source, source)
    assert not torch.allclose(start, first) and not torch.allclose(first, last)
    position = source.layout.position_ids
    torch.testing.assert_close(start, architecture.target_embedding(source.values, position, 3))
