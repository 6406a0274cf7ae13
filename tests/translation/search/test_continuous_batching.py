"""The search over slots against the plain search: the same translations and scores, whenever sentences are inserted."""

from dataclasses import replace

import pytest
import torch
from builders import tiny_model, tiny_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from nmtkit.contracts.engine import avoided_tokens, required_tokens
from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers.static_kv_cache import CacheLengths
from nmtkit.translation.engines import Decoder, LoadedModels, continuous_batching
from nmtkit.translation.engines.continuous_batching import STEPS_PER_SYNC, ContinuousBatching, refusal, rounded
from nmtkit.translation.search import beam_search as search_module
from nmtkit.translation.search import gpu_beam_search
from nmtkit.translation.search.beam_search import Search
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.gpu_beam_search import Eager, GraphBeamSearch, StepRunner
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Segment
from nmtkit.translation.translator import Translator

EOS = 2
CPU = torch.device("cpu")


def tiny(vocabulary: int, seed: int = 1, name: str = "transformer_tiny", **changes: object) -> Architecture:
    model = tiny_model(name, vocabulary, seed=seed, sharpness=2.0, **changes)
    with torch.no_grad():
        model.output_projection.weight[EOS] *= 1.5  # outputs of many lengths
    return model


def sources(number: int, vocabulary: int, longest: int, seed: int = 5) -> list[Segment]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (number,), generator=generator).tolist()
    return [Segment([*torch.randint(3, vocabulary, (n,), generator=generator).tolist(), EOS]) for n in lengths]


def batches_of(sentences: list[Segment], size: int) -> list[list[Segment]]:
    return [sentences[start : start + size] for start in range(0, len(sentences), size)]


def continuous(
    models: list[Architecture], options: SearchOptions, slots: int, **settings: object
) -> ContinuousBatching:
    return ContinuousBatching(models, options, slots, CPU, **settings)


def in_slots(model: Architecture) -> Translator:
    """Returns a translator with the slots on the CPU as its engine."""
    tokenizer = tiny_tokenizer()
    return Translator([model], tokenizer, decoder=Decoder(LoadedModels([model], tokenizer, "cpu", 320), "slots"))


def assert_same(found, expected) -> None:
    """Hypotheses whose scores are equal except for rounding may have exchanged their order."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert [hypothesis.score for hypothesis in ours] == pytest.approx(
            [hypothesis.score for hypothesis in theirs], abs=1e-5, rel=2e-6
        )
        for value in ("score", "log_probability"):
            table = {tuple(hypothesis.tokens): getattr(hypothesis, value) for hypothesis in theirs}
            assert {tuple(hypothesis.tokens): getattr(hypothesis, value) for hypothesis in ours} == pytest.approx(
                table, abs=1e-5, rel=2e-6
            )


@pytest.mark.parametrize(
    ("slots", "changes"),
    [
        (5, {}),
        (64, {"nbest": 4}),
        (6, {"beam": 1}),
        (8, {"beam": 7, "nbest": 3, "lenpen": 1.4}),
        (6, {"lenpen": -0.5, "nbest": 2}),
        (7, {"lenpen": 0.0, "min_len": 4, "max_len_a": 0.5, "max_len_b": 6}),
        (2, {"max_len_a": 0.0, "max_len_b": 3, "nbest": 4}),
        (2, {"max_len_a": 0.0, "max_len_b": 0}),
    ],
)
def test_slots_find_what_the_plain_search_finds(slots, changes):
    options = SearchOptions(**{"max_len_b": 12, **changes})
    model, sentences = tiny(60, seed=4), sources(24, 60, 14)
    expected = beam_search([model], Packed.from_lists([sentence.ids for sentence in sentences]), options)
    lengths = {len(hypothesis.tokens) for found in expected for hypothesis in found}
    assert len(lengths) > 3 or options.max_len_a == 0
    assert refusal([model], options) is None
    found = dict(continuous([model], options, slots).decode(batches_of(sentences, 7)))
    assert_same([hypotheses for number in range(len(found)) for hypotheses in found[number]], expected)


@pytest.mark.slow
def test_under_autocast_it_finds_nearly_what_fp32_does():
    """Like at validation, caches have the dtype of the projections, which differs from the dtype of the weights."""
    options = SearchOptions(max_len_b=12)
    model, sentences = tiny(60, seed=4), sources(24, 60, 14)
    best = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = dict(continuous([model], options, 5).decode(batches_of(sentences, 7)))
        best.append([hypotheses[0] for number in range(len(found)) for hypotheses in found[number]])
    same = [ours.tokens == theirs.tokens for ours, theirs in zip(*best, strict=True)]
    assert sum(same) > 0.8 * len(same)
    assert [hypothesis.score for hypothesis in best[1]] == pytest.approx([h.score for h in best[0]], abs=0.2)
    assert best[0] != best[1]


def test_an_ensemble_a_small_vocabulary_and_learned_positions_are_searched_alike():
    models = [tiny(9, 1, positions="learned", max_positions=14), tiny(9, 2, window=3)]
    options, sentences = SearchOptions(beam=8, nbest=8, lenpen=0.3), sources(8, 9, 12)
    expected = beam_search(models, Packed.from_lists([sentence.ids for sentence in sentences]), options)
    assert max(len(hypothesis.tokens) for found in expected for hypothesis in found) == 13
    found = dict(continuous(models, options, 3).decode([sentences]))
    assert_same(found[0], expected)


@pytest.mark.parametrize("beam", [1, 2])
def test_maxima_of_blocks_that_come_with_the_log_sum_exp_change_nothing(monkeypatch, beam):
    """Computes like a GPU. Special tokens have the largest logits of the first block, and must not be chosen."""

    def logsumexp(logits, block):
        whole = logits.shape[1] // block
        calls.append(whole)
        return logits.logsumexp(1), logits[:, : whole * block].unflatten(1, (whole, block)).amax(2)

    calls = []
    model, sentences = tiny(1700, seed=4), sources(12, 1700, 9)
    with torch.no_grad():
        model.output_projection.weight[:2].mul_(3)  # unk and bos
    options = SearchOptions(beam=beam, max_len_b=6, min_len=2)
    expected = beam_search([model], Packed.from_lists([sentence.ids for sentence in sentences]), options)
    monkeypatch.setattr(gpu_beam_search, "logsumexp", logsumexp)
    assert_same(dict(continuous([model], options, 5).decode([sentences]))[0], expected)
    assert set(calls) == {13}


def test_a_mixture_of_experts_is_searched_alike():
    model, options, sentences = tiny(60, name="transformer_moe_tiny"), SearchOptions(max_len_b=8), sources(12, 60, 9)
    assert refusal([model], options) is None
    expected = beam_search([model], Packed.from_lists([sentence.ids for sentence in sentences]), options)
    assert_same(dict(continuous([model], options, 5).decode([sentences]))[0], expected)


def test_the_state_grows_when_a_longer_sentence_or_many_come():
    model, options = tiny(60), SearchOptions(max_len_b=5)
    few, many, long = sources(3, 60, 6), sources(40, 60, 6, seed=6), sources(2, 60, 90, seed=7)
    runner = continuous([model], options, 32)
    stream = [few, [], *batches_of(many, 9), long]  # an empty batch: the other lines have not arrived yet
    shapes, found = [], {}
    for number, hypotheses in runner.decode(stream):
        found[number] = hypotheses
        if hypotheses:
            shapes.append((runner.search.slots, runner.search.capacity, runner.search.source_capacity))
    assert shapes[0] == (16, 16, 16)
    assert shapes[-1][0] == 32 and shapes[-1][1] > 32 and shapes[-1][2] > 16
    for number, batch in enumerate(stream):
        if batch:
            assert_same(
                found[number], beam_search([model], Packed.from_lists([sentence.ids for sentence in batch]), options)
            )


def test_an_idle_stream_has_all_that_came_finished_before_it_is_asked_again():
    model, options = tiny(60), SearchOptions(max_len_b=5)
    sentences, asked = sources(30, 60, 6), []

    def stream():
        for index, batch in enumerate(batches_of(sentences, 5)):
            yield batch
            yield []
            asked.append(index)

    runner = continuous([model], options, 4).decode(stream())
    found = []
    for number, _ in runner:
        found.append(number)
        if number % 2 == 0:
            assert len(asked) == number // 2  # the batch is complete, but the stream has not been read further
    assert sorted(found) == list(range(12))


@pytest.mark.slow
def test_a_run_given_up_leaves_nothing_behind_and_another_call_gets_its_own_slots():
    model, options = tiny(tiny_tokenizer().target_size), SearchOptions(max_len_b=10, keep_loops=True)
    sentences = sources(24, 60, 8)
    expected = beam_search([model], Packed.from_lists([sentence.ids for sentence in sentences]), options)
    translator = in_slots(model)
    given_up = translator.batch_decoder(options)(batches_of(sentences, 2))
    next(given_up)  # with sentences in slots
    assert_same(dict(translator.batch_decoder(options)([sentences]))[0], expected)
    given_up.close()
    assert_same(dict(translator.batch_decoder(options)([sentences]))[0], expected)
    first, second = translator.decoder.engine.kept
    assert not first.in_use and not second.in_use


def test_prefixes_avoided_and_required_phrases_are_searched_by_pytorch_where_they_must_be(monkeypatch):
    """All other segments stay in the slots, also segments whose translations have the required phrase by chance."""
    model, options = tiny(tiny_tokenizer().target_size), SearchOptions(max_len_b=10, keep_loops=True)
    free = sources(12, 60, 8)
    expected = beam_search([model], Packed.from_lists([sentence.ids for sentence in free]), options)
    avoided = avoided_tokens(tiny_tokenizer().target_size, expected[1][0].tokens[:1])
    common = required_tokens(tiny_tokenizer().target_size, expected[2][0].tokens[:1], (300, 301))
    constraints = [Constraints(prefix=(7, 8)), Constraints(avoided=avoided)]
    constraints += [Constraints(required=(common,))] * 6
    batch = [replace(sentence, constraints=each) for sentence, each in zip(free, constraints, strict=False)] + free[8:]
    searched = []

    class Counted(Search):
        def __init__(self, models, source, options, constraints, *rest):
            searched.extend(constraints)
            super().__init__(models, source, options, constraints, *rest)

    wanted = beam_search([model], Packed.from_lists([sentence.ids for sentence in batch]), options,
                         [sentence.constraints for sentence in batch])  # fmt: skip
    monkeypatch.setattr(search_module, "Search", Counted)
    assert_same(in_slots(model).decoder.decoder(options)([batch]).__next__()[1], wanted)
    assert searched[:2] == constraints[:2] and 2 < len(searched) < 2 + 6


def test_modes_and_models_it_does_not_know_are_refused():
    model = tiny(20)
    assert not refusal([model], SearchOptions(beam=2, nbest=2, lenpen=1.0, min_len=3, mbr="chrf"))
    for changes in (
        {"sampling": True},
        {"diverse_groups": 2},
        {"no_repeat_ngram": 3},
        {"replace_unknown": True},
        {"score_reference": True},
    ):
        assert refusal([model], SearchOptions(**changes))
    assert "ConvS2S" in refusal([model, tiny(20, name="convs2s_small")], SearchOptions())


@torch.inference_mode()
def test_a_model_that_overflows_gives_an_empty_translation_and_spoils_no_other(caplog):
    model, options = tiny(tiny_tokenizer().target_size), SearchOptions(max_len_b=8, keep_loops=True)
    good = sources(12, 60, 6)
    expected = beam_search([model], Packed.from_lists([sentence.ids for sentence in good]), options)
    encode = model.encode

    def overflowing(source: Packed) -> Packed:
        memory = encode(source)
        bad = (source.values == 59).nonzero().flatten()
        sentences = source.layout.segment_ids[bad]
        spoilt = (source.layout.segment_ids[:, None] == sentences).any(1)
        return memory.with_values(memory.values.masked_fill(spoilt[:, None], torch.inf))

    model.encode = overflowing
    good = [Segment([58 if id == 59 else id for id in sentence.ids]) for sentence in good]
    model.encode = encode
    expected = beam_search([model], Packed.from_lists([sentence.ids for sentence in good]), options)
    model.encode = overflowing
    mixed = [sentence for pair in zip(good, [Segment([5, 59, EOS])] * 12, strict=True) for sentence in pair]
    found = dict(in_slots(model).batch_decoder(options)([mixed]))[0]
    assert_same(found[::2], expected)
    assert [hypotheses[0].tokens for hypotheses in found[1::2]] == [[]] * 12
    assert "has a finite score" in caplog.text


class NoWaiting(TorchDispatchMode):
    """Fails on operations that make the host wait for the device, or whose shape depends on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        assert not name.startswith(self.FORBIDDEN), f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            for index in arguments[1]:
                assert index is None or index.dtype != torch.bool, "a boolean index waits for the device"
        return function(*arguments, **(keywords or {}))


@torch.inference_mode()
def test_a_step_never_waits_for_the_device_and_keeps_every_tensor_in_its_place():
    models = [tiny(700, 1, window=4), tiny(700, 2)]  # the vocabulary is so large that top-k has two stages
    search = GraphBeamSearch(models, SearchOptions(beam=3, nbest=2, min_len=2), 4, 16, 16, CPU)
    source = Packed.from_lists([sentence.ids for sentence in sources(4, 700, 9)])
    memories = [model.encode(source) for model in models]
    parts = [value for owner in (search, *search.states) for value in vars(owner).values() if torch.is_tensor(value)]
    addresses = [(tensor.data_ptr(), tensor.shape) for tensor in parts]
    with NoWaiting():
        search.insert(torch.arange(4), memories, torch.full((4,), 12))
        for length in range(1, 9):
            search.step(CacheLengths(length, 12))
    assert [(tensor.data_ptr(), tensor.shape) for tensor in parts] == addresses
    with NoWaiting(), pytest.raises(AssertionError, match="waits"):
        bool(search.done.any())


@torch.inference_mode()
def test_a_step_in_16_bits_mixes_no_types_or_devices():
    """Runs on tensors without contents."""
    model, meta = tiny(700).to("meta", torch.bfloat16), torch.device("meta")
    search = GraphBeamSearch([model], SearchOptions(beam=3, nbest=2, min_len=1), 4, 16, 16, meta)
    before = {
        name: (tensor.dtype, tensor.device, tensor.shape)
        for name, tensor in vars(search).items()
        if torch.is_tensor(tensor)
    }
    search.step(CacheLengths(8, 8))
    after = {
        name: (tensor.dtype, tensor.device, tensor.shape)
        for name, tensor in vars(search).items()
        if torch.is_tensor(tensor)
    }
    assert before == after


class Counting(Eager):
    """Stands in for CUDA graphs: recorded operations run only when the graph is replayed."""

    def __init__(self) -> None:
        self.warm = self.records = self.replays = 0

    def warm_up(self, work):
        self.warm += 1
        work()

    def record(self, work):
        self.records += 1

        def replay():
            self.replays += 1
            work()

        return replay


def test_each_shape_is_run_once_recorded_once_and_then_replayed():
    counts, seen = Counting(), []
    steps = StepRunner(seen.append, counts)
    for shape in ("a", "a", "b", "a", "b", "b"):
        steps(shape)
    assert seen == ["a", "a", "b", "a", "b", "b"]
    assert (counts.warm, counts.records, counts.replays) == (2, 2, 4)


def test_recorded_steps_find_the_same_in_few_shapes():
    model, options, backends = tiny(60), SearchOptions(max_len_b=12), []

    def backend():
        backends.append(Counting())
        return backends[-1]

    sentences = sources(24, 60, 14)
    expected = beam_search([model], Packed.from_lists([sentence.ids for sentence in sentences]), options)
    runner = continuous([model], options, 6, backend=backend)
    for _ in range(2):
        assert_same(dict(runner.decode([sentences]))[0], expected)
    (backend,) = backends
    assert backend.replays > 4 * backend.warm and backend.records <= backend.warm <= 12
    assert (backend.warm + backend.replays) % STEPS_PER_SYNC == 0


def test_shapes_are_few_and_never_too_small():
    sizes = [rounded(number) for number in range(1, 2000)]
    assert all(size >= number for number, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]


def test_the_host_reads_nothing_before_the_next_steps_are_launched(monkeypatch):
    """Otherwise the device would be idle while the host reads the results of a step and launches the next step."""
    launched, read = [0], []

    class Recorded(continuous_batching.AsyncCopy):
        def __init__(self, *tensors):
            super().__init__(*tensors)
            self.launched = launched[0]

        def read(self):
            read.append((self.launched, launched[0], bool(runner.in_slots)))
            return super().read()

    def counted(search, lengths):
        launched[0] += 1
        step(search, lengths)

    step = GraphBeamSearch.step
    monkeypatch.setattr(continuous_batching, "AsyncCopy", Recorded)
    monkeypatch.setattr(GraphBeamSearch, "step", counted)
    model, options, sentences = tiny(60), SearchOptions(max_len_b=12), sources(40, 60, 14)
    runner = continuous([model], options, 6)
    found = dict(runner.decode(batches_of(sentences, 10)))
    expected = beam_search([model], Packed.from_lists([sentence.ids for sentence in sentences]), options)
    assert_same([hypotheses for number in range(4) for hypotheses in found[number]], expected)
    assert sum(busy for *_, busy in read) > 20
    assert all(now >= copied + STEPS_PER_SYNC for copied, now, busy in read if busy)
