"""The compiled search: the same hypotheses and scores as PyTorch's search, for every setting that it supports."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import fragments, save_ending_transformer, tiny_model, tiny_tokenizer, tiny_transformer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.contracts.engine import avoided_tokens
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.jobs import machine_code
from nmtkit.models import checkpoint
from nmtkit.models.architectures.interface import Vocabulary
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.layers import int8
from nmtkit.translation.search import decoding
from nmtkit.translation.search.constraints import AvoidedText, Constraints, PieceTexts, text_bytes
from nmtkit.translation.search.decoding import annotated, beam_search
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.shortlist import Shortlist
from nmtkit.translation.search.types import Hypothesis, Segment
from nmtkit.translation.translator import Translator

pytest.importorskip("numba")
from nmtkit.translation.engines import Decoder, EngineConfig, LoadedModels, TorchEngine, lockstep
from nmtkit.translation.engines.numba_engine import NumbaEngine
from nmtkit.translation.engines.search_memory import MemorySizes

pytestmark = pytest.mark.slow  # the first search compiles for ten seconds

SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [20, 2], [3, 21, 8, 2], [2], [*range(3, 29), *range(3, 29), 2]]
MODELS: dict[str, dict[str, Any]] = {
    "post_norm": {},
    "pre_norm": {"pre_norm": True},
    "biases": {"attention_bias": True, "output_bias": True, "norm_eps": 1e-3},
    "embeddings": {"embedding_norm": True, "scale_embeddings": False, "zero_bos": True, "positions": "learned"},
    "tied": {"decoder_tied_layers": (1, 1), "decoder_ffn": "none", "positions": "sinusoidal_halves"},
    "ssru": {"decoder_self_attention": "ssru", "zero_bos": True, "position_offset": 3},
    "rotary": {"positions": "rotary", "rotary_base": 50.0, "pre_norm": True},
    "rotary_of_heads_of_6": {"positions": "rotary", "d_model": 96, "heads": 16},
    "rotary_of_heads_of_32": {"positions": "rotary", "d_model": 96, "heads": 3, "zero_bos": True},
    "no_positions": {"positions": "none", "embedding_norm": True},
    "ssru_norm": {"decoder_self_attention": "ssru", "ssru_norm": True, "pre_norm": True},
    "gelu": {"activation": "gelu"},
    "swiglu": {"activation": "swiglu", "pre_norm": True},
    "untied_output": {"share_embeddings": False, "tie_output": False},
    "average": {"decoder_self_attention": "average"},
    "average_of_marian": {"decoder_self_attention": "average", "average_separate_gates": True, "attention_bias": True},
    "plain_average": {
        "decoder_self_attention": "average",
        "average_gate": False,
        "average_ffn": False,
        "pre_norm": True,
    },
    "heads_of_32": {"d_model": 96, "heads": 3},
    "heads_of_64": {"d_model": 128, "heads": 2, "activation": "swish"},
}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam": {"beam": 4},
    "nbest": {"beam": 5, "nbest": 3, "lenpen": 1.0},
    "short": {"beam": 3, "max_len_a": 0.0, "max_len_b": 2},
    "no_repeat": {"beam": 3, "no_repeat_ngram": 2, "nbest": 2},
    "unknown": {"beam": 3, "unkpen": 0.5},
    "long": {"beam": 2, "min_len": 70, "max_len_b": 90, "lenpen": -1.0},
    "hundred": {"beam": 100, "nbest": 100, "max_len_b": 8},
    "samples": {"sampling": True, "nbest": 3},
    "cold_samples": {"sampling": True, "nbest": 2, "temperature": 0.5, "top_k": 5, "seed": 3},
    "nucleus": {"sampling": True, "nbest": 2, "temperature": 1.5, "top_p": 0.8, "unkpen": 0.0, "min_len": 3},
    "both": {"sampling": True, "nbest": 4, "top_p": 0.7, "top_k": 4, "no_repeat_ngram": 2},
}


def ending(vocabulary: int | Vocabulary = 30, **config: Any) -> Transformer:
    """Returns a random model whose biases and norms count, and whose translations end after different lengths."""
    model = tiny_transformer(vocabulary, sharpness=3.0, **config)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(len(parameter)))
        model.output_projection.weight[EOS] *= 1.5
    return model


def engine_of(model: Any, precision: Any = "fp32", shortlist: Shortlist | None = None) -> NumbaEngine:
    """Returns the engine of a model or an ensemble, without a tokenizer."""
    models = model if isinstance(model, list) else [model]
    loaded = LoadedModels(models, None, "cpu", 2048, [Path("model.pt")], precision)  # type: ignore[arg-type]
    loaded.__dict__["shortlist"] = shortlist
    return NumbaEngine(EngineConfig(), loaded)


def compare(found: Sequence[Sequence[Hypothesis]], expected: Sequence[Sequence[Hypothesis]], error: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [hypothesis.tokens for hypothesis in ours] == [hypothesis.tokens for hypothesis in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a.score == pytest.approx(b.score, rel=error)
            assert a.log_probability == pytest.approx(b.log_probability, rel=error)


def segments(sources: Sequence[Sequence[int]]) -> list[Segment]:
    return [Segment(list(ids), seed=index) for index, ids in enumerate(sources)]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("config", MODELS)
def test_hypotheses_and_scores_are_those_of_pytorch(config: str, search: str) -> None:
    model, options = ending(**MODELS[config]), SearchOptions(**SEARCHES[search])
    expected = beam_search([model], Packed.from_lists(SOURCES), options)
    found = engine_of(model, "fp32").search(segments(SOURCES), options)
    compare(found, expected, 1e-4)
    assert len({len(hypotheses[0].tokens) for hypotheses in found}) > (1 if search not in ("short", "hundred") else 0)


class Rounded(torch.nn.Module):
    """A linear layer whose weights and inputs are integers of 8 bits, with a scale for each output and each row."""

    def __init__(self, linear: torch.nn.Linear, outputs: slice = slice(None)) -> None:
        super().__init__()
        self.integers, self.scale = int8.quantize(linear.weight)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        inputs = (x * (127 / largest)).round()
        sums = inputs.double() @ self.integers.double().t()  # exact
        y = sums.float() * (largest / 127 * self.scale)
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("search", ["greedy", "nbest"])
@pytest.mark.parametrize("config", ["post_norm", "biases", "ssru_norm", "swiglu", "average"])
def test_8_bits_give_the_hypotheses_of_a_plain_integer_computation(config: str, search: str) -> None:
    model, options = ending(**MODELS[config]), SearchOptions(**SEARCHES[search])
    found = engine_of(model, "int8").search(segments(SOURCES), options)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Rounded(child))
    # the last bits of a sum can decide how an input is rounded
    compare(found, beam_search([model], Packed.from_lists(SOURCES), options), 1e-2)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_shortlist_gives_the_hypotheses_of_pytorch(search: str, precision: Any) -> None:
    model, options = ending(40), SearchOptions(**SEARCHES[search], shortlist=True)
    sources, targets = np.arange(3, 30).repeat(2), (np.arange(54) * 7 + 5) % 37 + 3
    shortlist = Shortlist.from_entries(sources, targets, np.array([4, 17]), 40, 40)
    expected = beam_search([model], Packed.from_lists(SOURCES), options, shortlist=shortlist)
    found = engine_of(model, precision, shortlist).search(segments(SOURCES), options)
    if precision == "fp32":
        compare(found, expected, 1e-4)
    for ids, hypotheses in zip(SOURCES, found, strict=True):
        allowed = {UNK, BOS, EOS, 4, 17} | set(targets[np.isin(sources, ids)].tolist())
        assert all(set(hypothesis.tokens) <= allowed for hypothesis in hypotheses)


@pytest.mark.parametrize("search", ["greedy", "nbest", "short"])
@pytest.mark.parametrize("shortlist", [False, True])
@pytest.mark.parametrize("language_tokens", [0, 1])
def test_prefixes_give_the_hypotheses_of_pytorch(search: str, shortlist: bool, language_tokens: int) -> None:
    model, options = ending(), SearchOptions(**SEARCHES[search], shortlist=shortlist)
    lists = Shortlist.from_entries(np.arange(3, 30), np.arange(29, 2, -1), np.array([5]), 30, 30)
    prefixes = [(4, 9, 11), (4,), (7, 8), (6, 6, 6, 6), (3,), (10, 12)]
    constraints = [Constraints(prefix, language_tokens) for prefix in prefixes]
    expected = beam_search([model], Packed.from_lists(SOURCES), options, constraints, shortlist=lists)
    batch = [Segment(ids, sentence) for ids, sentence in zip(SOURCES, constraints, strict=True)]
    found = engine_of(model, "fp32", lists).search(batch, options)
    compare(found, expected, 1e-4)
    for prefix, hypotheses in zip(prefixes, found, strict=True):
        assert all(tuple(hypothesis.tokens[: len(prefix)]) == prefix for hypothesis in hypotheses)


def test_a_forked_process_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = engine_of(ending(), "fp32"), SearchOptions(beam=1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = engine.search(segments(SOURCES), options)
    fork = multiprocessing.get_context("fork").Process
    process = fork(target=lambda: sys.exit(engine.search(segments(SOURCES), options) != expected))
    process.start(), process.join(600), process.kill()
    assert process.exitcode == 0


def test_forked_workers_share_the_machine_code_that_their_parent_has_loaded(trained: Path) -> None:
    code = f"""
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import Translator
Translator.load({str(trained)!r}, engine="numba").batch_decoder(SearchOptions(beam=3))
from nmtkit.translation.engines import compiled_search
print(len(compiled_search.encode_sentences.overloads), len(compiled_search.search.overloads))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "1"]


AVOIDED = [[(4, 9), (7,)], [], [(19,), (27, 27)], [(3, EOS)], [(29, 29, 29), (8,)], [(5, EOS)]]


@pytest.mark.parametrize("search", ["greedy", "nbest", "short", "samples"])
@pytest.mark.parametrize("shortlist", [False, True])
def test_avoided_texts_and_limits_after_a_prefix_give_the_hypotheses_of_pytorch(search: str, shortlist: bool) -> None:
    model, options = ending(), SearchOptions(**SEARCHES[search], shortlist=shortlist)
    lists = Shortlist.from_entries(np.arange(3, 30).repeat(2), np.arange(54) % 27 + 3, np.array([5, 8, 19]), 30, 30)
    constraints = [
        Constraints((), avoided=avoided_tokens(30, *phrases), after_prefix=allowed)
        for phrases, allowed in zip(AVOIDED, [(), (8, 12, 5), (), (19, 3, 4), (), (7,)], strict=True)
    ]
    expected = beam_search([model], Packed.from_lists(SOURCES), options, constraints, shortlist=lists)
    batch = [Segment(ids, each, seed) for seed, (ids, each) in enumerate(zip(SOURCES, constraints, strict=True))]
    compare(engine_of(model, "fp32", lists).search(batch, options), expected, 1e-4)
    free = beam_search([model], Packed.from_lists(SOURCES), options, shortlist=lists)
    assert [hypotheses[0].tokens for hypotheses in free] != [hypotheses[0].tokens for hypotheses in expected]


@pytest.mark.parametrize("texts", [["ab"], ["a b", "c"], [" a "], ["abc ", " b"], ["ca", "\n c"]])
def test_texts_are_avoided_in_pieces_of_several_bytes(texts: list[str]) -> None:
    """The vocabulary has pieces such as "a", "ab", " a" and " ", so that a text has many spellings."""
    spelled = ["", "", " ", "a", "b", "c", " a", " b", " c", "ab", "bc", "a b", " ", "é", "ca", "  c"]
    pieces = PieceTexts(map(text_bytes, [*spelled, *["x"] * (30 - len(spelled))]))
    model, options = ending(), SearchOptions(beam=4, nbest=2, max_len_b=15)
    with torch.no_grad():
        model.output_projection.weight[len(spelled) :] *= 0.1
    constraints = [Constraints(avoided=tuple(AvoidedText(text_bytes(text), pieces) for text in texts)) for _ in SOURCES]
    expected = beam_search([model], Packed.from_lists(SOURCES), options, constraints)
    batch = [Segment(ids, each) for ids, each in zip(SOURCES, constraints, strict=True)]
    compare(engine_of(model).search(batch, options), expected, 1e-4)


def test_samples_have_the_probabilities_of_the_model() -> None:
    """The first token of 20,000 samples of a sentence, against the exact distribution of a temperature."""
    model, options = ending(12), SearchOptions(sampling=True, nbest=2, temperature=2.0, max_len_b=2, unkpen=0.0)
    batch = [Segment([5, 6, EOS], seed=seed) for seed in range(10_000)]
    found = engine_of(model).search(batch, options)
    tokens = [(*sample.tokens, EOS)[0] for samples in found for sample in samples]
    with torch.no_grad():
        features = model(Packed.from_lists([[5, 6, EOS]]), Packed.from_lists([[BOS]]))
        scaled = model.output_projection(features)[0].double() / 2
    scaled[BOS] = -np.inf
    expected = scaled.softmax(0).numpy() * len(tokens)
    counts = np.bincount(tokens, minlength=12)
    assert counts[BOS] == 0
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert statistic < 31.3  # 99.9 % of a chi-squared distribution with 11 degrees of freedom


@pytest.mark.parametrize("search", ["greedy", "nbest", "samples", "no_repeat"])
@pytest.mark.parametrize("shortlist", [False, True])
def test_an_ensemble_gives_the_hypotheses_of_pytorch(search: str, shortlist: bool) -> None:
    models = [ending(), tiny_transformer(30, seed=5, sharpness=3.0, d_model=32, decoder_self_attention="ssru")]
    lists = Shortlist.from_entries(np.arange(3, 30), np.arange(29, 2, -1), np.array([5, 8, 19]), 30, 30)
    options = SearchOptions(**SEARCHES[search], shortlist=shortlist)
    expected = beam_search(models, Packed.from_lists(SOURCES), options, shortlist=lists)
    compare(engine_of(models, "fp32", lists).search(segments(SOURCES), options), expected, 1e-4)


@pytest.mark.parametrize("search", ["greedy", "nbest", "long"])
def test_attention_weights_are_those_of_pytorch(search: str) -> None:
    options = SearchOptions(**SEARCHES[search], alignment="soft")
    ensemble = [ending(), tiny_transformer(30, seed=5, sharpness=3.0, decoder_layers=3)]
    for models in ([ending(decoder_layers=4)], ensemble):
        found = engine_of(models).search(segments(SOURCES), options)
        bare = [[replace(hypothesis, attention=None) for hypothesis in hypotheses] for hypotheses in found]
        for ours, theirs in zip(found, annotated(models, Packed.from_lists(SOURCES), options, bare), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert np.shape(a.attention) == np.shape(b.attention)
                np.testing.assert_allclose(np.array(a.attention), np.array(b.attention), atol=1e-5)


@pytest.mark.parametrize("search", ["nbest", "unknown", "samples", "long"])
def test_log_probabilities_of_tokens_are_those_of_pytorch(search: str) -> None:
    models, options = [ending(output_bias=True)], SearchOptions(**SEARCHES[search], quality=True)
    with torch.no_grad():
        models[0].output_projection.bias[UNK] += 4
    found = engine_of(models).search(segments(SOURCES), options)
    if search == "unknown":
        assert any(UNK in hypotheses[0].tokens for hypotheses in found)
    bare = [[replace(each, token_log_probabilities=None) for each in hypotheses] for hypotheses in found]
    expected = annotated(models, Packed.from_lists(SOURCES), options, bare)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a.token_log_probabilities, b.token_log_probabilities, atol=1e-4)


def test_log_probabilities_of_tokens_are_over_the_whole_vocabulary_with_a_shortlist() -> None:
    model, options = ending(40), SearchOptions(nbest=2, shortlist=True, quality=True)
    shortlist = Shortlist.from_entries(np.arange(3, 30), np.arange(5, 32), np.array([4, 17]), 40, 40)
    found = engine_of(model, "fp32", shortlist).search(segments(SOURCES), options)
    annotations = annotated([model], Packed.from_lists(SOURCES), options, found)
    bare = [[replace(each, token_log_probabilities=None) for each in hypotheses] for hypotheses in found]
    expected = annotated([model], Packed.from_lists(SOURCES), options, bare)
    for ours, theirs in zip(annotations, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a.token_log_probabilities, b.token_log_probabilities, atol=1e-4)
            assert sum(b.token_log_probabilities) < b.log_probability - 0.1  # the search is over the list alone


def test_several_threads_give_the_same_hypotheses(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = engine_of(ending(), "fp32"), SearchOptions()
    alone = engine.search(segments(SOURCES * 5), options)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert engine.search(segments(SOURCES * 5), options) == alone
    options = SearchOptions(sampling=True, nbest=2, alignment="soft")
    batch = [Segment(ids, seed=index) for index, ids in enumerate(SOURCES * 5)]
    several = engine.search(batch, options)
    monkeypatch.undo()
    assert engine.search(batch, options) == several


def test_a_search_uses_the_larger_memory_of_an_earlier_search() -> None:
    sizes = MemorySizes(slots=4, beam=2, rows=128, positions=128, vocabulary=512, shortlists=True, recorded=0)
    assert sizes.suffice(replace(sizes, slots=2, rows=64, vocabulary=256))
    assert not replace(sizes, rows=64).suffice(sizes) and not replace(sizes, slots=2).suffice(sizes)
    for changes in ({"beam": 1}, {"shortlists": False}, {"recorded": 128}):
        assert not sizes.suffice(replace(sizes, **changes)) and not replace(sizes, **changes).suffice(sizes)
    engine, options = engine_of(ending(), "fp32"), SearchOptions(beam=2)
    long = [[5] * 150 + [EOS], [6] * 140 + [EOS]]
    expected = engine_of(ending(), "fp32").search(segments(SOURCES[:2]), options)
    engine.search(segments(long), options)
    (memory,) = engine.prepared().free
    assert engine.search(segments(SOURCES[:2]), options) == expected
    assert engine.prepared().free == [memory]


def test_the_memory_of_long_translations_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = engine_of(ending(), "fp32"), SearchOptions(beam=2)
    short = engine.search(segments(SOURCES), options)
    search = engine.prepared()
    (memory,) = search.free
    monkeypatch.setattr(lockstep, "KEPT_BYTES", memory.cache_bytes)
    assert engine.search(segments(SOURCES), options) == short
    assert search.free == [memory]
    engine.search(segments(SOURCES), SearchOptions(beam=2, min_len=70, max_len_b=90))
    assert search.free == []
    assert engine.search(segments(SOURCES), options) == short


def test_an_overflow_gives_an_empty_translation(caplog: pytest.LogCaptureFixture) -> None:
    model = ending()
    with torch.no_grad():
        model.output_projection.weight[9] = torch.nan
    assert engine_of(model).search(segments([[5, 2]]), SearchOptions()) == [[]]
    decoder = Decoder(LoadedModels([model], tiny_tokenizer(), "cpu", 2048), "numba")
    ((_, (result,)),) = decoder.decoder(SearchOptions())([segments([[5, 2]])])
    assert result[0].tokens == [] and result[0].score == -np.inf
    assert "finite score" in caplog.text


def test_models_that_are_not_supported_are_refused() -> None:
    for model, reason in (
        (tiny_model("gnmt_small"), "is a GNMT, which --engine numba does not support: use a Transformer, or give"),
        (tiny_transformer(window=4), "has window 4"),
        (tiny_transformer(encoder_layers=0, pre_norm=True), "is a language model"),
    ):
        with pytest.raises(ValueError, match=reason):
            engine_of(model, "fp32")
    hooked = tiny_transformer()
    hooked.decoder[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="--engine numba"):
        engine_of(hooked)


# --- the engine of a translator ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ending_transformer(tmp_path_factory.mktemp("trained") / "model.pt")


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 2, "alignment": "words"},
        {"beam": 3, "nbest": 2, "quality": True},
        {"sampling": True, "nbest": 2},
        {"beam": 2, "no_repeat_ngram": 2},
        {"beam": 2, "unkpen": 1.0},
    ],
    ids=lambda options: "_".join(options),
)
def test_translations_are_those_of_pytorch_with_all_options(trained: Path, options: dict[str, Any]) -> None:
    lines = [*fragments()[:30], ""]
    expected = Translator.load(trained).translate(lines, max_len_b=10, **options)
    found = Translator.load(trained, engine="numba").translate(lines, max_len_b=10, **options)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours.hypotheses, theirs.hypotheses, strict=True):
            assert (a.text, a.pieces, a.alignment, a.links) == (b.text, b.pieces, b.alignment, b.links)
            assert a.score == pytest.approx(b.score, rel=1e-4)


def test_required_phrases_are_searched_by_pytorch_and_other_lines_are_not(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, output = tmp_path / "lines", {engine: tmp_path / engine for engine in ("torch", "numba")}
    lines.write_text("\n".join(fragments()[:6]) + "\n")
    (tmp_path / "phrases").write_text("dog\n\nthe\n\n\ncat\n")
    (tmp_path / "prefixes").write_text("\nthe dog\n\n\na\n\n")
    searched: list[int] = []
    search, again = TorchEngine.search, decoding.RequiredTextSelector

    def counted(self: TorchEngine, batch: Any, *rest: Any) -> Any:
        searched.append(len(batch))
        return search(self, batch, *rest)

    def selected(options: Any, constraints: Any) -> Any:
        searched.append(len(constraints))
        return again(options, constraints)

    monkeypatch.setattr(TorchEngine, "search", counted)
    monkeypatch.setattr(decoding, "RequiredTextSelector", selected)
    for engine, file in output.items():
        files = ["--constraints", str(tmp_path / "phrases"), "--prefix", str(tmp_path / "prefixes")]
        flags = ["--input", str(lines), *files, "--output", str(file), "--device", "cpu", "--keep-loops"]
        arguments = ["generate", "--path", str(trained), "--engine", engine, *flags]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert output["numba"].read_text() == output["torch"].read_text()
    assert searched == [6, 3, 3]  # PyTorch: all, and the lines that lack a phrase; with numba: these lines only


@pytest.mark.parametrize("flags", [["--workers", "2"], ["--threads", "2"], ["--precision", "int8", "--beam", "1"]])
def test_the_command_translates_like_pytorch(trained: Path, tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "lines").write_text("\n".join(fragments()) + "\n")
    outputs = []
    for engine in ("torch", "numba"):
        output = tmp_path / engine
        arguments = ["generate", "--path", str(trained), "--engine", engine, "--input", str(tmp_path / "lines"), *flags]
        result = CliRunner().invoke(main, [*arguments, "--output", str(output)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        outputs.append(output.read_text().splitlines())
    same = sum(a == b for a, b in zip(*outputs, strict=True))
    assert same == len(outputs[0]) if "int8" not in flags else same > 0.8 * len(outputs[0])


def test_an_8_bit_checkpoint_can_be_searched(trained: Path, tmp_path: Path) -> None:
    checkpoint.export(checkpoint.load(trained), tmp_path / "int8.pt", True)
    lines = fragments()[:20]
    expected = Translator.load(tmp_path / "int8.pt").translate(lines, beam=1, max_len_b=5)
    found = Translator.load(tmp_path / "int8.pt", engine="numba", precision="int8").translate(
        lines, beam=1, max_len_b=5
    )
    same = [a.hypotheses[0].text == b.hypotheses[0].text for a, b in zip(found, expected, strict=True)]
    assert sum(same) > 0.9 * len(same)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--device", "cuda"], "only on a CPU"),
        (["--precision", "bf16"], "--precision fp32 and int8"),
    ],
)
def test_flags_that_do_not_fit_are_refused(trained: Path, flags: list[str], reason: str) -> None:
    arguments = ["generate", "--path", str(trained), "--engine", "numba", *flags]
    result = CliRunner().invoke(main, arguments, input="a\n")
    assert result.exit_code != 0 and reason in result.output


def test_a_missing_package_is_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "installed", lambda: False)
    with pytest.raises(ImportError, match=r"pip install 'nmtkit\[numba\]'"):
        Translator.load(trained, engine="numba")


def test_a_sentence_has_the_same_hypotheses_alone_and_beside_others() -> None:
    sources = [[*range(3 + i, 5 + 2 * i), EOS] for i in range(12)] * 8
    for precision in ("fp32", "int8"):
        engine = engine_of(ending(40), precision)
        for options in (SearchOptions(beam=1), SearchOptions(beam=5, nbest=2), SearchOptions(beam=70, nbest=70)):
            together = engine.search(segments(sources), options)
            assert [engine.search(segments([ids]), options)[0] for ids in sources[:12]] == together[:12]


@pytest.mark.parametrize("name", ["compiled_kernels.py", "compiled_model.py", "compiled_vectors.py"])
def test_machine_code_is_made_again_after_a_change_in_another_file(name: str, tmp_path: Path) -> None:
    """Numba alone would keep the machine code of a function after a change in a file with a called function."""
    package = tmp_path / "nmtkit"
    shutil.copytree(Path(nmtkit.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from nmtkit.jobs import machine_code; print(machine_code.folder_name())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def fingerprint() -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True).stdout

    before = fingerprint()
    assert fingerprint() == before
    file = package / "translation" / "engines" / name
    file.write_text(file.read_text() + "\n")
    assert fingerprint() != before
