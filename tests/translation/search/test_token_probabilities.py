"""The token probabilities of a translation, from every search, equal arithmetic in double precision."""

import copy
import json
import math

import pytest
import torch
from builders import REAL_LINES, save_tiny_transformer, save_transformer, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.building import from_checkpoint
from nmtkit.translation.engines import Decoder, LoadedModels
from nmtkit.translation.engines.continuous_batching import TOKENS_PER_SLOT
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request, Segment
from nmtkit.translation.translator import Translator

SHORT = {"max_len_a": 0.0, "max_len_b": 8}
LINES = ["the dog runs in the park .", "two men", "a cat sleeps !", "women on the street . the dog"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [save_tiny_transformer(folder / f"{seed}.pt", tiny_tokenizer(), seed=seed, sharpness=2.0) for seed in (1, 2)]


def in_double_precision(models, source, tokens):
    """Returns the logarithms of the mean probabilities of several models, token by token."""
    each = []
    with torch.no_grad():
        for model in models:
            sources, inputs = Packed.from_lists([source]), Packed.from_lists([[BOS, *tokens]])
            logits = model.output_projection(model(sources, inputs))
            each.append(logits.softmax(-1)[torch.arange(len(tokens) + 1), [*tokens, EOS]])
    return torch.stack(each).mean(0).log().tolist()


@pytest.mark.parametrize("ensemble", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"beam": 3, "nbest": 3},
        {"beam": 1},
        {"sampling": True, "nbest": 2},
        {"diverse_groups": 2},
        {"no_repeat_ngram": 2},
    ],
)
def test_probabilities_are_the_models_own_whatever_found_the_translation(paths, options, ensemble):
    models = [copy.deepcopy(from_checkpoint(path)[0]).double() for path in paths[:ensemble]]
    translator = Translator.load(paths[:ensemble])
    encoded = translator.tokenizer.encode_source(LINES).split()
    search = SearchOptions(quality=True, **options, **SHORT)
    batch = [Segment(ids.tolist(), seed=row) for row, ids in enumerate(encoded)]
    for sentence, hypotheses in zip(batch, translator.decode(batch, search), strict=True):
        for hypothesis in hypotheses:
            expected = in_double_precision(models, sentence.ids, hypothesis.tokens)
            assert hypothesis.token_log_probabilities == pytest.approx(expected, abs=1e-5)


def test_a_line_is_judged_alike_alone_and_in_any_batch(paths):
    model = nmtkit.load(paths[0])
    together = [found.hypotheses[0] for found in model.translate(LINES, nbest=1, quality=True, **SHORT)]
    for line, beside in zip(LINES, together, strict=True):
        (alone,) = model.translate(line, nbest=1, quality=True, **SHORT).hypotheses
        assert alone.token_log_probabilities == pytest.approx(beside.token_log_probabilities, abs=1e-5)
        assert sum(alone.token_log_probabilities) == pytest.approx(alone.log_probability, abs=1e-4)
        assert alone.quality.score == pytest.approx(beside.quality.score, abs=1e-5)
        ratio = len(alone.pieces) / (len(model.tokenizer.encode_source([line]).ids) - 1)
        assert alone.quality.length_ratio == pytest.approx(ratio)


@pytest.mark.parametrize("longest", [1024, 6])
def test_a_tag_is_no_piece_of_the_source(tmp_path, longest):
    model = nmtkit.load(save_transformer(tmp_path / "model.pt", tags=["<2de>"]), max_source_len=longest)
    (written,) = model.translate(f"<2de> {REAL_LINES[6]}", nbest=1, quality=True, **SHORT).hypotheses
    (given,) = model.translate(REAL_LINES[6], nbest=1, quality=True, source_tag="<2de>", **SHORT).hypotheses
    pieces = len(model.tokenizer.encode_source([REAL_LINES[6]]).ids) - 1
    assert written.text == given.text
    assert written.quality.length_ratio == given.quality.length_ratio == len(given.pieces) / pieces


def test_slots_of_a_gpu_and_given_translations_are_judged_too(paths):
    model, tokenizer = from_checkpoint(paths[0])
    translator = Translator([model], tokenizer)
    options = SearchOptions(**SHORT)
    wanted = SearchOptions(quality=True, **SHORT)
    lines = translator.pipeline(options).segments([Request(line) for line in LINES])
    batch = [leaf.input for line in lines for leaf in line.leaves()]
    slots = Decoder(LoadedModels([model], tokenizer, "cpu", 3 * TOKENS_PER_SLOT), "slots")
    ((_, found),) = slots.decoder(wanted)([batch])
    for ours, theirs in zip(found, translator.decode(batch, wanted), strict=True):
        assert ours[0].token_log_probabilities == pytest.approx(theirs[0].token_log_probabilities, abs=1e-5)
    texts = [found.text for found in translator.translate(LINES, **SHORT)]
    requests = [Request(line, reference=text) for line, text in zip(LINES, texts, strict=True)]
    for judged in translator.translate(requests, score_reference=True, quality=True):
        output = judged.hypotheses[0]
        assert sum(output.token_log_probabilities) == pytest.approx(output.log_probability, abs=1e-4)


def test_parts_and_sentences_of_a_line_are_judged_together(paths, monkeypatch):
    monkeypatch.setattr("nmtkit.translation.steps.splitter", lambda: lambda language, text: [text[:16], text[16:]])
    model = nmtkit.load(paths[0], max_source_len=4)
    line = "the dog runs .  two men {x} sleep ."
    (output,) = model.translate(line, nbest=1, quality=True, split_sentences="en", protect=r"\{x\}", **SHORT).hypotheses
    each = output.token_log_probabilities
    assert output.quality.mean_probability == pytest.approx(math.exp(sum(each) / len(each)))
    assert sum(each) == pytest.approx(output.log_probability, abs=1e-4)


def test_generate_writes_a_table_and_fields(paths, tmp_path):
    text, report = tmp_path / "text", tmp_path / "quality.tsv"
    text.write_text("\n".join([*LINES, ""]) + "\n")
    command = ["generate", "--path", str(paths[0]), "--input", str(text), "--max-len-a", "0", "--max-len-b", "8"]
    result = CliRunner().invoke(main, [*command, "--quality-report", str(report)])
    assert result.exit_code == 0, result.output
    assert result.stdout == CliRunner().invoke(main, command).stdout
    names, *rows = [line.split("\t") for line in report.read_text().splitlines()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"] and rows[4][1:] == [
        "1.0000", "", "1.0000", "1.0000", "1.0000", "0.0000"]  # fmt: skip
    result = CliRunner().invoke(main, [*command, "--quality", "--format", "jsonl"])
    for row, line in zip(rows, result.stdout.splitlines(), strict=True):
        (found,) = json.loads(line)["hypotheses"]
        quality = found["quality"]
        flags = ",".join(quality.pop("flags"))
        assert row[2] == flags and len(found["token_log_probabilities"]) == (len(found["pieces"]) + 1) * bool(
            found["text"]
        )
        assert {name: float(value) for name, value in zip(names[1:], row[1:], strict=True) if name != "flags"} == (
            pytest.approx(quality, abs=1e-4)
        )
    result = CliRunner().invoke(main, [*command, "--quality"])
    assert "--quality does nothing" in result.stderr
