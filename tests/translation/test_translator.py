"""Translations have the order of the lines, for all kinds of lines."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch
from builders import WORDS, save_tiny_transformer, tiny_tokenizer, tiny_transformer

from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint, vocabulary_of
from nmtkit.models.layers import multiplies_in_bf16
from nmtkit.models.layers.prepack import InferenceLinear
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.translation.engines import TorchEngine
from nmtkit.translation.options import TranslatorOptions
from nmtkit.translation.parallel import worker_processes
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis, Request
from nmtkit.translation.translator import STEP_COST, WINDOW, Translator, batch_ends

ODD_LINES = [
    "",
    "   ",
    "A dog runs.",
    "🙂👍🏽 emoji",
    "كلب يجري في الحديقة",
    "tab\there\rand there",
    "▁",
    "x" * 300,
    "A dog runs.",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def checkpoint_path(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.pt"
    return save_tiny_transformer(path, tokenizer, sharpness=2.0, decoder_layers=1)


SHORT = {"max_len_a": 0.0, "max_len_b": 8}


def test_every_line_gets_one_translation_in_order(checkpoint_path):
    translations = Translator.load(checkpoint_path).translate(ODD_LINES, **SHORT)
    assert [translation.id for translation in translations] == list(range(len(ODD_LINES)))
    assert [translation.source for translation in translations] == ODD_LINES
    assert translations[0].text == translations[1].text == ""
    assert translations[2].text == translations[8].text


@pytest.mark.parametrize("max_tokens", [1, 100, 100_000])
def test_batches_do_not_change_translations(checkpoint_path, max_tokens):
    lines = ["a dog " * n + "runs ." for n in range(30)] + ODD_LINES
    expected = Translator.load(checkpoint_path).translate(lines, **SHORT)
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(1)).tolist()
    found = Translator.load(checkpoint_path, max_tokens=max_tokens).translate([lines[i] for i in order], **SHORT)
    for index, translation in zip(order, found, strict=True):
        assert translation.text == expected[index].text
        assert translation.hypotheses[0].score == pytest.approx(expected[index].hypotheses[0].score, abs=1e-5)


def two_workers(translator, options, path):
    return worker_processes(translator, options, 2, partial(Translator.load, path))


@pytest.mark.slow
def test_two_workers_equal_one_process(checkpoint_path):
    lines = ["a dog " * (n % 7) + "runs ." for n in range(60)] + ODD_LINES
    translator = Translator.load(checkpoint_path, max_tokens=40)
    options = SearchOptions(nbest=2, **SHORT)
    pipeline = translator.pipeline(options)
    windows = [[Request(line) for line in lines[start : start + 20]] for start in range(0, len(lines), 20)]
    with two_workers(translator, options, checkpoint_path) as decode:
        found = list(translator.run([[], *windows, []], pipeline, decode))
    for translation, other in zip(found, translator.stream(lines, pipeline), strict=True):
        assert (translation.id, translation.source, translation.text) == (other.id, other.source, other.text)
        assert [x.pieces for x in translation.hypotheses] == [x.pieces for x in other.hypotheses]
        assert [x.score for x in translation.hypotheses] == pytest.approx([x.score for x in other.hypotheses], abs=1e-5)


def test_a_killed_worker_ends_the_run_with_an_error(checkpoint_path):
    translator, options = Translator.load(checkpoint_path, max_tokens=40), SearchOptions(**SHORT)
    others = set(multiprocessing.active_children())
    with (
        two_workers(translator, options, checkpoint_path) as decode,
        pytest.raises(ChildProcessError, match="SIGKILL"),
    ):
        worker, _ = set(multiprocessing.active_children()) - others
        os.kill(worker.pid, signal.SIGKILL)
        list(translator.run([[Request("a dog runs .")] * 200], translator.pipeline(options), decode))


def test_what_a_worker_raises_reaches_the_caller(checkpoint_path):
    translator, options = Translator.load(checkpoint_path), SearchOptions(**SHORT)
    with (
        two_workers(translator, options, checkpoint_path) as decode,
        pytest.raises(IndexError),
    ):
        list(translator.run([[Request("?", [10_000, 2])]], translator.pipeline(options), decode))


def test_a_long_line_is_split_or_cut_with_a_warning(checkpoint_path, caplog):
    long = "a dog runs . " * 10 + "the cat sleeps ! " * 10
    parts = Translator.load(checkpoint_path, max_source_len=20).translate([long, "a cat"], **SHORT)
    assert "line 1 has" in caplog.text and "is translated in" in caplog.text
    whole = parts[0].text
    cut = Translator.load(checkpoint_path, max_source_len=20, long_lines="cut").translate([long, "a cat"], **SHORT)
    assert "are cut off" in caplog.text
    assert whole.startswith(cut[0].text) and len(whole) > len(cut[0].text)
    assert parts[1].text == cut[1].text


@pytest.mark.slow
def test_a_line_of_1200_words_is_translated(checkpoint_path):
    translations = Translator.load(checkpoint_path).translate(["dog " * 1200, "cat"], beam=1, **SHORT)
    assert len(translations) == 2 and len(translations[0].text) > len(translations[1].text)


@pytest.mark.slow
def test_windows_do_not_change_translations(checkpoint_path):
    lines = ["a dog " * (n % 5) + "runs ." for n in range(20)]
    translator = Translator.load(checkpoint_path)
    windows = [[Request(line)] for line in lines]
    one_by_one = translator.run(windows, translator.pipeline(SearchOptions(**SHORT)))
    assert [translation.text for translation in one_by_one] == [
        translation.text for translation in translator.translate(lines, **SHORT)
    ]


@pytest.mark.slow
def test_threads_that_encode_and_decode_text_change_nothing(checkpoint_path, monkeypatch):
    """Behaves like a GPU: the calling thread launches kernels, and another thread encodes text.

    A check for loops would decode some outputs in the calling thread.
    """
    translator, lines, threads = Translator.load(checkpoint_path, engine="torch"), ODD_LINES * 20, {}
    expected = [translation.text for translation in translator.translate(lines, beam=2, max_len_b=3, keep_loops=True)]
    monkeypatch.setattr("nmtkit.translation.translator.WINDOW", 50)

    def recorded(name, function):
        def call(*arguments, **options):
            threads.setdefault(name, set()).add(threading.current_thread())
            return function(*arguments, **options)

        return call

    for owner, name in ((Tokenizer, "encode_source"), (Tokenizer, "decode_target"), (TorchEngine, "search")):
        monkeypatch.setattr(owner, name, recorded(name, getattr(owner, name)))
    translator.background, interval = True, sys.getswitchinterval()
    translations = translator.translate(lines, beam=2, max_len_b=3, keep_loops=True)
    assert [translation.text for translation in translations] == expected
    assert [translation.id for translation in translations] == list(range(len(lines)))
    assert threads["search"] == {threading.current_thread()}
    assert all(len(found) == 1 for found in threads.values()) and len(set.union(*threads.values())) == 3
    assert sys.getswitchinterval() == interval


def test_with_threads_all_that_came_goes_out_before_the_next_window_is_waited_for(checkpoint_path):
    translator, asked = Translator.load(checkpoint_path), threading.Event()
    translator.background = True

    def windows():
        yield [Request("A dog runs."), Request("")]
        yield []
        assert asked.wait(300)
        yield [Request("A dog.")]

    translations = translator.run(windows(), translator.pipeline(SearchOptions(beam=1, max_len_b=3)))
    assert [next(translations).id, next(translations).id] == [0, 1]
    asked.set()
    assert [translation.id for translation in translations] == [2]


def test_an_error_on_a_thread_reaches_the_caller_and_a_run_given_up_ends_its_threads(checkpoint_path):
    translator, given = Translator.load(checkpoint_path), []
    pipeline = translator.pipeline(SearchOptions(beam=1, max_len_b=3))
    translator.background = True

    def windows(end):
        for number in range(end):
            given.append(number)
            yield [Request("A dog runs.")]
        raise ValueError("line 3 is not UTF-8")

    with pytest.raises(ValueError, match="line 3 is not UTF-8"):
        list(translator.run(windows(2), pipeline))
    run = translator.run(windows(10**9), pipeline)
    next(run)
    run.close()
    deadline = time.monotonic() + 300
    while any(thread.name.startswith(("prefetch", "postprocess")) for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(given) < 10


def test_an_ensemble_of_other_tokenizers_is_refused(checkpoint_path, tokenizer, tmp_path):
    contents = checkpoint.load(checkpoint_path)
    del contents["nmtkit"]
    contents["tokenizer"] = Tokenizer(train_model(["other text altogether , you see"] * 5, 290)).state()
    contents["model"] = {
        name: value[:290] if len(value) == tokenizer.target_size else value for name, value in contents["model"].items()
    }
    checkpoint_file.save(tmp_path / "other.pt", contents)
    with pytest.raises(ValueError, match=r"other.pt and .*tiny.pt .*tokenizers"):
        Translator.load([checkpoint_path, tmp_path / "other.pt"])


LARGE_BF16 = torch.bfloat16 if multiplies_in_bf16() else torch.float32


@pytest.fixture(scope="module")
def wide_checkpoint_path(tokenizer, tmp_path_factory):
    """Returns a model of 512 dimensions. Every precision has a separate kernel for its layers."""
    path = tmp_path_factory.mktemp("model") / "wide.pt"
    sizes = {"d_model": 512, "d_ff": 640, "heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    return save_tiny_transformer(path, tokenizer, tie_output=False, share_embeddings=False, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "precision", "kernels"),
    [
        ("checkpoint_path", "fp32", {("PrepackedLinear", torch.float32)}),
        ("checkpoint_path", "bf16", {("PrepackedLinear", torch.float32)}),
        ("checkpoint_path", "int8", {("PrepackedLinear", torch.float32)}),
        ("wide_checkpoint_path", "fp32", {("PrepackedLinear", torch.float32)}),
        (
            "wide_checkpoint_path",
            "bf16",
            {("PrepackedLinear", LARGE_BF16)},
        ),
        ("wide_checkpoint_path", "int8", {("Int8Linear", torch.int8)}),
    ],
)
def test_every_precision_translates_alike_in_any_batch(request, file, precision, kernels):
    generator = random.Random(3)
    lines = [" ".join(generator.choices(WORDS, k=generator.randint(1, 9))) for _ in range(20)]
    path = request.getfixturevalue(file)
    translator = Translator.load(path, precision=precision)
    layers = [module for module in translator.models[0].modules() if isinstance(module, InferenceLinear)]
    assert {(type(layer).__name__, layer.dtype) for layer in layers} == kernels
    together = translator.translate(lines, **SHORT)
    alone = Translator.load(path, precision=precision, max_tokens=1).translate(lines, **SHORT)
    for one, other in zip(together, alone, strict=True):
        difference = abs(one.hypotheses[0].score - other.hypotheses[0].score)
        assert difference < {"fp32": 1e-4, "bf16": 0.02, "int8": 0.01}[precision]
        assert one.text == other.text or 0 < difference < 1e-3  # two candidates that are equal to rounding
    assert len({translation.text for translation in together}) > 3


def test_int8_off_the_cpu_is_refused(checkpoint_path):
    with pytest.raises(ValueError, match="--precision int8"):
        Translator.load(checkpoint_path, device="cuda", precision="int8")


def log_probability_of(model, source: list[int], output: list[int]) -> float:
    with torch.no_grad():
        features = model(Packed.from_lists([source]), Packed.from_lists([[1, *output]]))
        table = model.output_projection(features).double().log_softmax(-1)
    return sum(table[place, token].item() for place, token in enumerate([*output, 2]))


def test_a_scored_reference_has_its_teacher_forced_log_probability(checkpoint_path, tokenizer):
    pairs = [("a dog runs .", "two men"), ("the cat", ""), ("", "a street in the park"), ("a", "a " * 60)]
    requests = [Request(source, reference=reference) for source, reference in pairs]
    model, _ = from_checkpoint(checkpoint_path)
    for (source, reference), translation in zip(
        pairs, Translator.load(checkpoint_path).translate(requests, score_reference=True), strict=True
    ):
        ids = [tokenizer.encode_source([source]).ids.tolist(), tokenizer.encode_target([reference]).ids.tolist()]
        expected = log_probability_of(model, ids[0], ids[1][:-1])
        assert translation.hypotheses[0].log_probability == pytest.approx(expected, abs=1e-4)
        assert translation.hypotheses[0].score == pytest.approx(expected / ((5 + len(ids[1])) / 6) ** 0.6, abs=1e-4)
        assert translation.text == reference.strip()


def test_a_soft_alignment_is_the_cross_attention_and_a_hard_one_its_peaks(checkpoint_path, tokenizer):
    translator = Translator.load(checkpoint_path)
    lines = ["a dog runs .", "", "two men sleeps in the park !"]
    soft = translator.translate(lines, alignment="soft", nbest=2, **SHORT)
    hard = translator.translate(lines, alignment="hard", nbest=2, **SHORT)
    model, _ = from_checkpoint(checkpoint_path)
    for line, translation, other in zip(lines, soft, hard, strict=True):
        if not line:
            continue
        ids = tokenizer.encode_source([line]).ids.tolist()
        for output, peaks in zip(translation.hypotheses, other.hypotheses, strict=True):
            tokens = [tokenizer.target.processor.piece_to_id(piece) for piece in output.pieces]
            maps = model.attention_weights(Packed.from_lists([ids]), Packed.from_lists([[1, *tokens]]))
            expected = maps["cross"][0][0].mean(0)[:-1]
            torch.testing.assert_close(torch.tensor(output.alignment), expected.detach(), rtol=0, atol=1e-4)
            best = expected[:, :-1].argmax(1).tolist()
            assert peaks.alignment == [[source, target] for target, source in enumerate(best)]


def test_the_alignment_of_a_split_line_counts_pieces_of_the_whole_line(checkpoint_path):
    translator = Translator.load(checkpoint_path, max_source_len=6)
    translation = translator.translate(["a dog runs . " * 4], alignment="hard", **SHORT)[0].hypotheses[0]
    assert len(translation.alignment) == len(translation.pieces)
    sources = [source for source, _ in translation.alignment]
    assert sources[-1] >= 6 and max(sources) < len(translator.tokenizer.encode_source(["a dog runs . " * 4]).ids)


def test_unknown_words_are_replaced_by_what_they_attend_to():
    text = ["aa bb cc dd ee"] * 3
    tokenizer = Tokenizer(train_model(text, 8, "word"))
    model = tiny_transformer(vocabulary_of(tokenizer), decoder_layers=1, d_model=8, d_ff=8, heads=1)
    translator = Translator([model], tokenizer)
    request = [Request("aa Zebra cc", prefix="")]
    with torch.no_grad():  # a model that says <unk>, then ends
        model.output_projection = torch.nn.Linear(8, tokenizer.target_size)
        model.output_projection.weight.zero_()
        model.output_projection.bias.copy_(torch.tensor([2.0] + [-9.0] * (tokenizer.target_size - 1)))
    translation = translator.translate(
        request, beam=1, max_len_a=0, max_len_b=1, replace_unknown=True, alignment="hard"
    )[0]
    assert translation.hypotheses[0].pieces == ["<unk>"]
    assert translation.text == ["aa", "Zebra", "cc"][translation.hypotheses[0].alignment[0][0]]


def test_the_least_risk_is_the_candidate_most_like_the_others(checkpoint_path):
    texts = ["a dog runs in the park", "a dog runs in a park", "nothing alike", "a dog runs in the park"]
    for metric in ("chrf", "bleu"):
        values = segment_metric(metric).utilities(texts, "")
        assert max(values) == values[0] == values[3] and min(values) == values[2]
    translations = Translator.load(checkpoint_path).translate(
        ["a dog runs .", "", "the cat"], sampling=True, nbest=6, mbr="chrf", **SHORT
    )
    for translation in translations:
        values = [output.utility for output in translation.hypotheses]
        assert values == sorted(values, reverse=True)


def test_constraints_given_as_text_are_met(checkpoint_path):
    requests = [
        Request("a dog runs .", required=["the park", "two men"]),
        Request("a dog runs .", prefix="the street"),
        Request("", required=["the park"]),
    ]
    long = {"max_len_a": 0.0, "max_len_b": 20}
    found = Translator.load(checkpoint_path).translate(requests, **long)
    assert "the park" in found[0].text and "two men" in found[0].text
    assert found[1].text.startswith("the street")
    assert found[2].text == ""
    with pytest.raises(ValueError, match="line 2: --constraints and --sampling"):
        Translator.load(checkpoint_path).translate(["a", *requests], sampling=True)


@pytest.mark.slow
def test_a_stream_of_100_000_lines_is_never_held_as_a_whole(checkpoint_path):
    class Instant(Translator):
        def decode(self, batch, options):
            return [[Hypothesis([5], -1.0, -1.0)] for _ in batch]

    taken = 0

    def lines():
        nonlocal taken
        for number in range(100_000):
            taken += 1
            yield "" if number % 3 == 0 else "a dog"

    loaded = Translator.load(checkpoint_path)
    translator = Instant(loaded.models, loaded.tokenizer)
    for given, translation in enumerate(translator.stream(lines(), translator.pipeline(SearchOptions()))):
        assert translation.id == given and taken - given <= WINDOW
    assert given == 99_999


def test_every_part_of_a_split_line_begins_with_its_language_tag():
    text = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]
    tokenizer = Tokenizer(train_model(text, 340, tags=["<2de>", "<2fr>"]))
    options = SearchOptions(alignment="hard", max_len_a=0, max_len_b=8)
    pipeline = Pipeline(tokenizer, options, max_source_len=6)
    tag = tokenizer.encode_source(["<2fr>"]).ids[0]
    lines = pipeline.segments([Request("<2fr> " + "a dog runs . " * 4), Request("a dog runs . " * 4)])
    parts = [[leaf.input.ids for leaf in line.leaves()] for line in lines]
    for ids, first in zip(parts, (tag, None), strict=True):
        assert len(ids) > 2 and all(len(part) <= 7 for part in ids)
        assert [part[0] == tag for part in ids] == [first == tag] * len(ids)
    pieces = [[id for part in ids for id in part[:-1] if id != tag] for ids in parts]
    assert pieces[0] == pieces[1] == tokenizer.encode_source(["a dog runs . " * 4]).ids[:-1].tolist()

    model = tiny_transformer(vocabulary_of(tokenizer))
    translator = Translator([model], tokenizer, TranslatorOptions(max_source_len=6))
    for line, ids in zip(lines, parts, strict=True):
        for settings in ({"alignment": "soft"}, {"alignment": "hard"}):
            output = translator.translate([line.segment.text], max_len_a=0, max_len_b=8, **settings)[0].hypotheses[0]
            source = len(tokenizer.encode_source([line.segment.text]).ids) - 1
            if settings["alignment"] == "soft":
                assert {len(row) for row in output.alignment} == {source + len(ids)}
                assert all(sum(row) == pytest.approx(1, abs=1e-3) for row in output.alignment)
            else:
                assert max(index for index, _ in output.alignment) < source
                assert max(index for index, _ in output.alignment) >= 5


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("number", [0, 1, 2, 5, 64, 1000])
def test_work_is_split_evenly_between_processes(number, processes):
    draw = random.Random(number)
    lengths = sorted((min(200, 1 + int(draw.lognormvariate(3.0, 0.6))) for _ in range(number)), reverse=True)
    ends = batch_ends(lengths, 2048, processes)
    batches = [lengths[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert [length for batch in batches for length in batch] == lengths and all(batches)
    assert all(len(batch) * batch[0] <= 2048 or len(batch) == 1 for batch in batches)
    if processes == 1:
        return
    assert len(batches) >= min(number, processes)  # no process is idle
    costs = [(len(batch) + STEP_COST) * batch[0] for batch in batches]
    load = [0] * processes
    for cost in costs:  # in the order in which the processes take the batches
        load[load.index(min(load))] += cost
    if number >= 64:
        alone = (1 + STEP_COST) * lengths[0]  # no batch costs less than its longest sentence
        assert max(load) <= max(1.25 * sum(load) / processes, alone)
    single = batch_ends(lengths, 2048, 1)
    assert len(batches) <= -(-len(single) // processes) * processes  # and batches are as large as these limits allow
