"""The contract of every registered architecture with trainers and searches, at tiny sizes."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from builders import TINY_CONFIGS, WITHOUT_ATTENTION, tiny_model
from torch import Tensor

from nmtkit.config import derive
from nmtkit.contracts import check_architecture
from nmtkit.contracts.checks import Check, title
from nmtkit.data.packed import Packed
from nmtkit.models.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.models.architectures.interface import PrefixState
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.options import SearchOptions

SIZE = 13
TINY_NAMES = list(TINY_CONFIGS)
TRAINS = "resume is exact and checkpoints average"  # the title of a check that takes seconds
TRAINED = ("transformer_tiny", "gnmt_small", "moe_small")  # the fast tests train these


def tiny(name: str, size: int = SIZE, **changes: Any) -> Architecture:
    """Returns a small model of the architecture. Gates that start as zeros get random weights."""
    model = tiny_model(name, size, seed=3, **changes)
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() > 1:
            torch.nn.init.normal_(parameter)
    return model


def sentences(*lengths: int, seed: int = 5) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    return Packed.from_lists([torch.randint(3, SIZE, (length,), generator=generator).tolist() for length in lengths])


def test_every_factory_is_tried() -> None:
    ours = {entry.factory for entry in ARCHITECTURES.entries.values() if entry.factory.__module__.startswith("nmtkit.")}
    assert ours == {ARCHITECTURES[name].factory for name in TINY_CONFIGS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(
            name,
            check,
            id=f"{name}-{title(check)}",
            marks=[pytest.mark.slow] if title(check) == TRAINS and name not in TRAINED else [],
        )
        for name in TINY_NAMES
        for check in check_architecture.checks
    ],
)
def test_the_contract_holds(name: str, check: Check) -> None:
    check(check_architecture.subject(name, **TINY_CONFIGS[name]))


DECODERS: dict[str, dict[str, Any]] = {
    "average attention": {"decoder_self_attention": "average"},
    "average attention with Marian's gates": {"decoder_self_attention": "average", "average_separate_gates": True},
    "average without network and gate": {
        "decoder_self_attention": "average",
        "average_ffn": False,
        "average_gate": False,
        "pre_norm": True,
    },
    "SSRU with norms": {"decoder_self_attention": "ssru", "ssru_norm": True, "pre_norm": True},
    "few weights": {"decoder_self_attention": "ssru", "decoder_ffn": "none", "decoder_tied_layers": (1, 1)},
    "tied attention": {"decoder_layers": 3, "decoder_tied_layers": (1, 2, 1)},
    "language model": {"encoder_layers": 0, "pre_norm": True},
    "recurrent language model": {"encoder_layers": 0, "decoder_self_attention": "ssru"},
}


CHECKS = [
    pytest.param(check, id=title(check), marks=[pytest.mark.slow] if title(check) == TRAINS else [])
    for check in check_architecture.checks
]


def test_the_check_that_trains_has_its_title() -> None:
    assert TRAINS in map(title, check_architecture.checks)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("changes", DECODERS.values(), ids=DECODERS)
def test_the_contract_holds_for_every_decoder_of_the_transformer(changes: dict[str, Any], check: Check) -> None:
    check(check_architecture.subject("transformer_tiny", **TINY_CONFIGS["transformer_tiny"] | changes))


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_step_keeps_a_cache(name: str) -> None:
    model = tiny(name)
    assert not isinstance(model.start(model.encode(sentences(4, 7)), 2), PrefixState)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_beam_search_equals_exhaustive_search(name: str) -> None:
    """With two words and outputs of at most four words, there are 31 translations. A forward pass scores each."""
    model = tiny(name, size=5).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5  # less uniform
        sources = [[3, 4, 3, 2], [4, 2]]
        options = SearchOptions(beam=32, nbest=5, lenpen=0.6, max_len_a=0.0, max_len_b=4)
        found = beam_search([model], Packed.from_lists(sources), options)
        for source, hypotheses in zip(sources, found, strict=True):
            scores = {}
            for length in range(5):
                for words in itertools.product([3, 4], repeat=length):
                    logits = model.output_projection(
                        model(Packed.from_lists([source]), Packed.from_lists([[1, *words]]))
                    )
                    tokens = torch.tensor([*words, 2])
                    total = logits.double().log_softmax(-1)[torch.arange(length + 1), tokens].sum()
                    scores[words] = float(total) / ((5 + length + 1) / 6) ** 0.6
            best = sorted(scores, key=lambda words: -scores[words])[:5]
            assert [tuple(hypothesis.tokens) for hypothesis in hypotheses] == best
            assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(
                [scores[words] for words in best], abs=1e-4
            )


@pytest.mark.parametrize(
    "name", [name for name in TINY_NAMES if "moe" not in name]
)  # noise is larger in these architectures
def test_features_under_bf16_autocast_are_close(name: str) -> None:
    model = tiny(name, dropout=0.0).train()
    source, target = sentences(5, 8, 3), sentences(7, 4, 9, seed=6)
    exact = model(source, target).detach()
    with torch.autocast("cpu", torch.bfloat16):
        features = model(source, target)
    assert (features.float() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("name", TINY_NAMES)
def test_dropout_is_drawn_from_the_global_generator(name: str) -> None:
    model = tiny(name, dropout=0.3).train()
    source, target = sentences(5, 8, 3), sentences(7, 4, 9, seed=6)

    def features() -> Tensor:
        torch.manual_seed(11)
        return model(source, target)

    first = features()
    assert torch.equal(first, features())
    assert not torch.equal(first, model(source, target))


@pytest.mark.parametrize("name", ARCHITECTURES.names())
def test_bad_sizes_are_refused_by_name(name: str) -> None:
    preset = ARCHITECTURES[name].preset
    assert any(field.name == "dropout" for field in dataclasses.fields(preset))
    with pytest.raises(ValueError, match="dropout is"):
        derive(preset, {"dropout": 1.5}, "test")


@pytest.mark.parametrize("name", TINY_NAMES)
def test_attention_weights_are_there(name: str) -> None:
    model, source, target = tiny(name), sentences(5, 8), sentences(7, 4, seed=6)
    if name in WITHOUT_ATTENTION:
        with pytest.raises(ValueError, match="no attention"):
            model.attention_weights(source, target)
    else:
        assert "cross" in model.attention_weights(source, target)


SMALL = [name for name in ARCHITECTURES.names() if name.endswith(("_small", "_tiny")) and "_lm_" not in name]


@pytest.mark.parametrize("name", SMALL)
def test_a_fresh_small_model_depends_on_its_source(name: str) -> None:
    """Another source changes the logits by at least 5 % of their deviation. Otherwise the model would learn slowly."""
    torch.manual_seed(3)
    entry = ARCHITECTURES[name]
    model = entry.factory(entry.preset, Vocabulary(source=200, target=200, joint=True)).eval()
    with torch.no_grad():
        target = sentences(9, 12, 10, seed=6)
        logits, others = (model.output_projection(model(sentences(9, 12, 10, seed=seed), target)) for seed in (5, 7))
    assert (logits - others).std() > 0.05 * logits.std()
    assert logits.std() < 3  # and no saturated softmax
