"""The Python interface returns the results of the commands, and prints nothing."""

import copy
import json
import logging
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import TINY_CONFIGS, save_tiny_transformer, tiny_model, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit import api
from nmtkit.cli import main
from nmtkit.config import derive
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.experiments.comparison import summarize
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.building import from_checkpoint, to_checkpoint, vocabulary_of

LINES = ["the dog runs .", "two men sleep in the park .", "", "a cat !"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_tiny_transformer(folder / "model.pt", tiny_tokenizer(), sharpness=6)


@pytest.fixture(scope="module")
def model(path: Path) -> nmtkit.Model:
    return nmtkit.load(path, device="cpu")


def generated(path: Path, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """Returns the records that `nmtkit generate --format jsonl` writes for LINES."""
    (folder / "in").write_text("".join(line + "\n" for line in LINES))
    flags = ("--path", str(path), "--input", str(folder / "in"), "--format", "jsonl", "--device", "cpu", *flags)
    result = CliRunner().invoke(main, ["generate", *flags])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_importing_nmtkit_loads_no_torch_and_no_command_line() -> None:
    code = "import sys, nmtkit; dir(nmtkit); sys.exit(bool({'torch', 'click', 'nmtkit.api'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_the_package_exports_is_what_api_exports() -> None:
    assert set(nmtkit.__all__) == {*api.__all__, "__version__"}
    assert all(getattr(nmtkit, name) is getattr(api, name) for name in api.__all__)
    assert set(nmtkit.__all__) <= set(dir(nmtkit))
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        nmtkit.lode  # type: ignore[attr-defined]  # noqa: B018


# --- translate --------------------------------------------------------------------------------------------------------


def test_translations_are_those_of_the_command(model: nmtkit.Model, path: Path, tmp_path: Path) -> None:
    rows = generated(path, tmp_path, "--beam", "5", "--nbest", "3", "--lenpen", "1", "--alignment", "hard")
    texts = [row["hypotheses"][0]["text"] for row in rows]
    assert model.translate(LINES, beam=5, lenpen=1) == texts
    assert [model.translate(line, beam=5, lenpen=1.0) for line in LINES] == texts
    objects = model.translate(tuple(LINES), beam=5, nbest=3, lenpen=1, alignment="hard")
    assert [[output.text for output in item.hypotheses] for item in objects] == [
        [output["text"] for output in row["hypotheses"]] for row in rows
    ]
    assert objects[0].hypotheses[0].alignment == rows[0]["hypotheses"][0]["alignment"]


@pytest.mark.slow
def test_a_text_gives_a_text_a_list_a_list_and_an_iterable_an_iterator(model: nmtkit.Model) -> None:
    one = model.translate(LINES[0])
    assert isinstance(one, str) and one
    assert model.translate([LINES[0]]) == [one]
    assert model.translate([]) == []
    stream = model.translate(line for line in LINES)
    assert isinstance(stream, Iterator)
    assert next(stream) == one
    assert model.translate([line + "\n" for line in LINES]) == model.translate(LINES)
    assert isinstance(model.translate(LINES[0], nbest=1), nmtkit.Translation)


def test_an_iterator_reads_ahead_no_more_than_a_window(model: nmtkit.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmtkit.translation.translator.WINDOW", 2)
    read: list[str] = []

    def lines() -> Iterator[str]:
        for line in ["a dog", "a cat", "two men", "two women"]:
            read.append(line)
            yield line

    stream = model.translate(lines())
    next(stream)
    assert read == ["a dog", "a cat"]


@pytest.mark.slow
def test_requests_carry_prefixes_and_phrases(model: nmtkit.Model) -> None:
    request = nmtkit.Request("the dog runs .", prefix="the cat", avoided=["dog"])
    assert model.translate(request).startswith("the cat")
    assert "women" in model.translate(nmtkit.Request("the dog runs .", required=["women"]), beam=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beem": 5}, r"'beem'.*'beam'"),
        ({"precision": "int8"}, r"precision .*nmtkit\.load"),
        ({"beam": "5"}, "beam: '5' is not"),
        ({"beam": True}, "beam: True is not"),
        ({"beam": 0}, "--beam is 0"),
        ({"nbest": 9}, "--nbest 9 needs --beam"),
        ({"alignment": "hard"}, "alignment needs nbest"),
        ({"quality": True}, "quality needs nbest"),
        ({"mbr": "chrf", "nbest": 2, "temperature": 0.5}, "--temperature .*--sampling"),
        ({"mbr": "chrf"}, "mbr"),
        ({"score_reference": True}, "score_reference is not"),
        ({"source_tag": "<2xx>"}, "no tag '<2xx>'"),
    ],
)
def test_a_wrong_option_is_named(model: nmtkit.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.translate("the dog", **options)


@pytest.mark.parametrize("source", [[1, 2], ["a dog", None], b"a dog", [["a dog"]]])
def test_what_is_no_text_is_named_with_its_type(model: nmtkit.Model, source: Any) -> None:
    with pytest.raises(ValueError, match=r"item \d is of type (int|NoneType|list);"):
        model.translate(source)


@pytest.mark.parametrize("given", [None, 5])
def test_what_is_neither_a_text_nor_a_list_is_named_with_its_type(model: nmtkit.Model, given: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: model.translate(given), lambda: model.score(given, "a"), lambda: model.score("a", given),
        lambda: model.score(given, given), lambda: model.logits(given, "a"),
        lambda: model.encode(given), lambda: model.batch(given), lambda: nmtkit.score(given, ["a"]),
        lambda: nmtkit.score(["a"], given), lambda: nmtkit.score(["a"], [["a"], given]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=type(given).__name__):
            call()


@pytest.mark.parametrize("field", ["required", "avoided"])
def test_a_text_instead_of_a_list_of_phrases_is_refused(model: nmtkit.Model, field: str) -> None:
    """Each letter of the text was required."""
    phrases: dict[str, Any] = {field: "women"}
    with pytest.raises(ValueError, match=f"item 1: .*{field}"):
        model.translate(["a dog", nmtkit.Request("a dog", **phrases)])


def test_a_reference_which_translate_does_not_read_is_refused(model: nmtkit.Model) -> None:
    with pytest.raises(ValueError, match=r"item 1: .*reference"):
        model.translate(["a dog", nmtkit.Request("a dog", reference="the cat")])


# --- load -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_ensemble_is_that_of_the_command(path: Path, tmp_path: Path) -> None:
    other = save_tiny_transformer(tmp_path / "other.pt", tiny_tokenizer(), sharpness=6, seed=2)
    rows = generated(path, tmp_path, "--path", str(other))
    ensemble = nmtkit.load([path, other], device="cpu")
    assert ensemble.translate(LINES) == [row["hypotheses"][0]["text"] for row in rows]
    assert len(ensemble.architectures) == 2
    for method in (ensemble.encode, ensemble.attention):
        with pytest.raises(ValueError, match="ensemble of 2"):
            method("a dog")


@pytest.mark.slow
def test_int8_is_that_of_the_command(path: Path, tmp_path: Path) -> None:
    rows = generated(path, tmp_path, "--precision", "int8", "--nbest", "1")
    found = nmtkit.load(str(path), device="cpu", precision="int8").translate(LINES, nbest=1)
    assert [item.hypotheses[0].score for item in found] == [row["hypotheses"][0]["score"] for row in rows]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precison": "int8"}, r"'precison'.*'precision'"),
        ({"precision": "int4"}, "'int4' .*auto, fp32, bf16, int8"),
        ({"device": "nowhere"}, "--device nowhere"),
        ({"beam": 5}, "no setting 'beam'"),
        ({"plugins": ["missing.py"]}, r"plug-in missing\.py"),
        ({"plugins": "missing.py"}, r"plug-in missing\.py"),
    ],
)
def test_a_wrong_setting_of_load_is_named(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        nmtkit.load(path, **options)


@pytest.mark.slow
def test_a_trainable_model_has_all_parameters_gradients_and_hooks(path: Path, model: nmtkit.Model) -> None:
    trainable = nmtkit.load(path, device="cpu", trainable=True)
    architecture, calls = trainable.architectures[0], []
    source = Packed.from_lists([[5, 6, 2]])
    for module in architecture.modules():
        module.register_forward_hook(lambda module, inputs, output: calls.append(module))
    architecture.output_projection(architecture(source, source)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in architecture.parameters())
    state = checkpoint.load(path)["model"]
    assert {name: tensor.shape for name, tensor in architecture.state_dict().items()} == {
        name: tensor.shape for name, tensor in state.items()
    }
    assert {type(module).__name__ for module in calls} >= {"Linear", "LayerNorm", "EncoderLayer", "Transformer"}
    assert trainable.translate(LINES) == model.translate(LINES)
    with pytest.raises(ValueError, match="torch in fp32"):
        nmtkit.load(path, device="cpu", precision="int8", trainable=True)


def test_a_model_says_what_it_is(model: nmtkit.Model) -> None:
    assert repr(model) == "<nmtkit.Model: Transformer, 330 source and 330 target pieces, on cpu>"


# --- score, encode, attention -----------------------------------------------------------------------------------------


def test_scores_are_sums_of_log_probabilities(model: nmtkit.Model, path: Path) -> None:
    source, target = "the dog runs .", "two men"
    network, tokenizer = from_checkpoint(path)
    ids = tokenizer.encode_target([target]).ids.tolist()
    with torch.no_grad():
        features = network(
            Packed.from_lists([tokenizer.encode_source([source]).ids.tolist()]), Packed.from_lists([[1, *ids[:-1]]])
        )
        log_probabilities = network.output_projection(features).log_softmax(-1)
    expected = sum(float(row[token]) for row, token in zip(log_probabilities, ids, strict=True))
    assert model.score(source, target) == pytest.approx(expected, abs=1e-4)
    assert model.score([source, "a cat !"], [target, "a"])[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("target", [["a", "b"], ["a"]])
def test_scores_need_a_translation_for_each_source(model: nmtkit.Model, target: Any) -> None:
    with pytest.raises(ValueError, match=r"list of \d"):
        model.score("a dog" if len(target) == 1 else ["a dog"], target)


def test_encode_returns_the_memory_of_each_text_alone(model: nmtkit.Model, path: Path) -> None:
    network, tokenizer = from_checkpoint(path)
    found = model.encode(LINES)
    for line, memory in zip(LINES, found, strict=True):
        ids = tokenizer.encode_source([line]).ids.tolist()
        with torch.no_grad():
            expected = network.encode(Packed.from_lists([ids])).values
        assert memory.shape == (len(ids), 16)
        torch.testing.assert_close(memory, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.encode(LINES[1]), found[1], atol=1e-5, rtol=1e-4)


def test_sentence_vectors_are_means_of_the_memory(model: nmtkit.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.stack([memory.mean(0) for memory in model.encode(LINES)])
    torch.testing.assert_close(model.encode(LINES, pooling="mean"), expected)
    torch.testing.assert_close(model.encode(LINES[0], pooling="mean"), expected[0], atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(model._translator, "max_tokens", 4)  # batches of one
    torch.testing.assert_close(model.encode(LINES, pooling="mean"), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"'max'.*none, mean"):
        model.encode(LINES, pooling="max")  # type: ignore[call-overload]


@pytest.mark.parametrize("architecture", ["gnmt_small", "convs2s_small", "bytenet_small", "deep_att_small"])
def test_every_architecture_encodes(architecture: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    network = tiny_model(architecture, vocabulary_of(tokenizer))
    config = derive(ARCHITECTURES[architecture].preset, TINY_CONFIGS[architecture], "test")
    checkpoint_file.save(tmp_path / "m.pt", to_checkpoint(network, architecture, config, tokenizer, [], 1))
    loaded = nmtkit.load(tmp_path / "m.pt", device="cpu")
    vectors = loaded.encode(["the dog runs .", "a cat"], pooling="mean")
    assert vectors.shape[0] == 2 and vectors.isfinite().all()


def test_attention_has_the_shapes_and_the_alignment_of_the_command(model: nmtkit.Model) -> None:
    found = model.translate("two men sleep .", nbest=1, alignment="hard", beam=3)
    best = found.hypotheses[0]
    attention = model.attention("two men sleep .", beam=3)
    assert attention.target[:-1] == best.pieces
    assert [list(pair) for pair in attention.alignment] == best.alignment
    given = model.attention("two men sleep .", "the cat")
    layers = given.weights["cross"]
    assert [layer.shape for layer in layers] == [(2, len(given.target), len(given.source))] * 2
    np.testing.assert_allclose(layers[0].sum(-1), 1, atol=1e-5)


# --- before and after -------------------------------------------------------------------------------------------------


def test_preprocess_makes_the_dataset_of_the_command(mirror_data: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {f"{name}pref": mirror_data.parent / name for name in ("train", "valid", "test")}
    settings = {name: str(value) for name, value in settings.items()}
    report = nmtkit.preprocess(
        source_lang="xx", target_lang="yy", destdir=tmp_path / "data", vocab_size=320, workers=1,
        report=tmp_path / "report.html", **settings,
    )  # fmt: skip
    assert report.splits["train"].pairs == 200
    assert (tmp_path / "report.html").is_file()
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (mirror_data, tmp_path / "data")]
    assert manifests[0]["files"] == manifests[1]["files"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "x"}, r"'train'.*'trainpref'"),
        ({"vocab_size": 1.5}, "vocab_size: 1.5 is not"),
        ({"source_lang": None}, "source_lang: None is not"),
        ({"tokenizer_from": "x", "vocab_size": 9}, "--tokenizer-from and --vocab-size"),
    ],
)
def test_a_wrong_setting_of_preprocess_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = {"source_lang": "xx", "target_lang": "yy", "trainpref": "x", "destdir": tmp_path / "data"} | changes
    with pytest.raises(ValueError, match=message):
        nmtkit.preprocess(**settings)


def test_settings_of_preprocess_that_are_off_need_and_exclude_nothing(tmp_path: Path) -> None:
    """A setting with the value of its default was refused beside another setting, although its flag would be off."""
    off = {"separate_vocab": False, "drop_overlap": False, "corpora": None, "source_language_token": None, "tag": ()}
    with pytest.raises(OSError, match=r"x\.xx"):
        nmtkit.preprocess(
            source_lang="xx", target_lang="yy", trainpref="x", destdir=tmp_path, tokenizer_from="nowhere", **off
        )


def test_a_setting_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="--source-lang and --target-lang, or --corpora"):
        nmtkit.preprocess(source_lang="xx", trainpref="x", destdir="data")


def test_average_writes_the_mean_of_the_weights(path: Path, tmp_path: Path) -> None:
    other = save_tiny_transformer(tmp_path / "other.pt", tiny_tokenizer(), seed=2)
    written = nmtkit.average([path, other], tmp_path / "mean.pt")
    first, second, mean = (checkpoint.load(file)["model"] for file in (path, other, written))
    for name, value in mean.items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2)
    with pytest.raises(ValueError, match="is a folder"):
        nmtkit.average(tmp_path, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="best_checkpoint_metric does nothing"):
        nmtkit.average([path, other], tmp_path / "x.pt", best_checkpoint_metric="bleu")


def test_corpus_scores_are_those_of_sacrebleu() -> None:
    from sacrebleu import corpus_bleu

    hypotheses, reference = ["the dog runs in the park ."], ["the dog runs on the street ."]
    expected = corpus_bleu(hypotheses, [reference]).score
    found = nmtkit.score(hypotheses, reference, ["bleu", "chrf"])
    assert list(found) == ["bleu", "chrf"]
    assert found["bleu"].value == pytest.approx(expected)
    assert nmtkit.score(hypotheses, [reference, hypotheses], "bleu")["bleu"].value == pytest.approx(100)
    assert "case:lc" in nmtkit.score(hypotheses, reference, "bleu", lowercase=True)["bleu"].signature
    with pytest.raises(ValueError, match=r"did you mean 'lowercase'\?"):
        nmtkit.score(hypotheses, reference, "bleu", lower_case=True)
    for setting in ({"tokenize": "char"}, {"languages": ["en", "de"]}, {"device": "cpu"}):
        with pytest.raises(ValueError, match=f"--{next(iter(setting))} does nothing without --metric"):
            nmtkit.score(hypotheses, reference, ["chrf", "ter"], **setting)
    assert nmtkit.score(hypotheses, reference, ["ter"], lowercase=False, languages=[], device="auto")["ter"].value > 0
    with pytest.raises(ValueError, match="1 translations and 2 references"):
        nmtkit.score(hypotheses, [*reference, "x"])


def test_nothing_is_printed(
    path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("nmtkit")
    logger.propagate, logger.handlers = True, []  # as in a process in which no command has run
    with caplog.at_level(logging.INFO):
        nmtkit.average([path], tmp_path / "mean.pt")
    nmtkit.load(path, device="cpu").translate(LINES)
    assert capfd.readouterr() == ("", "")
    assert any("averaged into" in record.getMessage() for record in caplog.records)


# --- train ------------------------------------------------------------------------------------------------------------

TINY = {"arch": "transformer_tiny", "encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "d_ff": 24, "heads": 2}
SHORT = TINY | {"max_update": 4, "batch_tokens": 200, "log_interval": 2, "device": "cpu"}


def weights(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(path)["model"]


def test_training_makes_the_checkpoints_of_the_command(mirror_data: Path, tmp_path: Path) -> None:
    result = nmtkit.train(SHORT | {"save_dir": tmp_path / "here", "lr-scheduler": "fixed", "lr": 0.01}, mirror_data)
    assert (result.finished, result.updates, result.reason) == (True, 4, "--max-update 4 is reached")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHORT.items()]
    flags += ["--lr-scheduler=fixed", "--lr=0.01", f"--save-dir={tmp_path / 'there'}"]
    assert CliRunner().invoke(main, ["train", str(mirror_data), *flags]).exit_code == 0
    ours, theirs = weights(result.last), weights(tmp_path / "there" / "last.pt")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [record["update"] for record in result.log if record["kind"] == "train"] == [2, 4]
    (valid,) = [record for record in result.log if record["kind"] == "valid"]
    assert result.best is not None and result.scores["loss"] == pytest.approx(valid["loss"], rel=1e-5)
    assert isinstance(nmtkit.load(result.best, device="cpu").translate("bado kelu"), str)


@pytest.mark.slow
def test_a_run_logs_validation_sentences_with_separators_of_lines(mirror_data: Path, tmp_path: Path) -> None:
    """Only a newline ends a line. U+2028, U+2029 and U+0085 end a line for `str.splitlines`."""
    odd = "bado\u2028kelu\u2029bado\x85kelu"
    for side in ("xx", "yy"):
        (tmp_path / f"valid.{side}").write_text(f"{odd}\n" * 3, encoding="utf-8")
    flags = ["-s", "xx", "-t", "yy", "--trainpref", str(mirror_data.parent / "train"), "--workers", "1"]
    flags += ["--validpref", str(tmp_path / "valid"), "--destdir", str(tmp_path / "data-bin"), "--vocab-size", "320"]
    main(["preprocess", *flags], standalone_mode=False)
    settings = SHORT | {"save_dir": tmp_path / "run", "metrics": "bleu"}
    for updates in (4, 6):  # the second call resumes the run, which reads the log
        result = nmtkit.train(settings | {"max_update": updates}, tmp_path / "data-bin")
    valid = [record for record in result.log if record["kind"] == "valid"]
    assert [record["update"] for record in valid] == [4, 6]
    assert {pair["source"] for record in valid for pair in record["followed"]} == {odd}
    assert summarize(tmp_path / "run").update == 6
    translations = (tmp_path / "run" / "validation" / "update_00000006.txt").read_bytes()
    assert translations.count(b"\n") == 3


@pytest.mark.slow
def test_the_same_call_resumes_and_a_config_file_is_a_setting(mirror_data: Path, tmp_path: Path) -> None:
    settings = SHORT | {"save_dir": str(tmp_path / "run"), "max_update": 2, "validate_interval": None}
    first = nmtkit.train(settings, mirror_data)
    assert (first.updates, first.best, first.scores) == (2, None, {})
    second = nmtkit.train({"config": first.save_dir / "config.toml", "max_update": 3}, str(mirror_data))
    assert second.updates == 3
    assert [record["kind"] for record in second.log].count("resume") == 1
    assert nmtkit.train(first.save_dir / "config.toml").reason == "--max-update 3 is reached"


def test_training_goes_on_in_a_thread_where_no_signal_can_be_handled(mirror_data: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        future = pool.submit(nmtkit.train, SHORT | {"save_dir": tmp_path, "validate_interval": None}, mirror_data)
    assert future.result().finished


def test_a_component_of_a_notebook_trains_and_is_loaded(mirror_data: Path, tmp_path: Path) -> None:
    preset = ARCHITECTURES["transformer_tiny"].preset
    cell = "@ARCHITECTURES.register('mine', preset)\nclass Mine(Transformer): pass\n"
    notebook = {"ARCHITECTURES": ARCHITECTURES, "Transformer": Transformer, "preset": preset, "__name__": "__main__"}
    try:
        for _ in range(2):
            exec(cell, notebook)
        settings = SHORT | {"arch": "mine", "save_dir": tmp_path, "validate_interval": None}
        result = nmtkit.train(settings, mirror_data)
        assert type(nmtkit.load(result.last, device="cpu").architectures[0]) is notebook["Mine"]
    finally:
        del ARCHITECTURES.entries["mine"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smothing": 0.1}, r"'label_smothing'.*'label_smoothing'"),
        ({"max_update": "4"}, "max_update: '4' is not"),
        ({"max_update": 4.0}, "max_update: 4.0 is not"),
        ({"dropout": 2.0}, "--dropout is 2.0"),
        ({"arch": "transformer_tny"}, "unknown architecture 'transformer_tny'"),
        ({"optimizer": 3}, "optimizer: 3 is not"),
        ({"config": "nowhere.toml"}, r"config nowhere\.toml"),
        ({"plugin": "nowhere.py"}, r"plug-in nowhere\.py"),
        ({"nproc_per_node": 2}, "torchrun --nproc-per-node 2"),
        ({"batch_tokens": 9, "update_freq": 2}, "--batch-tokens and --update-freq"),
    ],
)
def test_a_wrong_setting_of_train_is_named(
    settings: dict[str, Any], message: str, mirror_data: Path, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        nmtkit.train({"save_dir": tmp_path / "run"} | settings, mirror_data)
    assert not (tmp_path / "run").exists()


def test_a_call_of_translate_does_not_read_the_types_of_settings_again(
    model: nmtkit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the annotations of all config classes takes 2 ms, longer than the search of a small model."""
    model.translate("the dog runs", beam=1)
    read: list[type] = []
    annotations = typing.get_type_hints
    monkeypatch.setattr(typing, "get_type_hints", lambda cls: read.append(cls) or annotations(cls))
    model.translate("the dog runs", beam=1)
    assert read == []


def test_a_setting_of_the_search_does_not_change_a_score(model: nmtkit.Model) -> None:
    with pytest.raises(ValueError, match="beam"):
        model.score("the dog runs", "der hund rennt", beam=2)  # type: ignore[call-overload]


@pytest.mark.parametrize("function", [pickle.dumps, copy.deepcopy])
def test_a_model_that_is_copied_names_load(function: Any, model: nmtkit.Model) -> None:
    with pytest.raises(TypeError, match=r"nmtkit\.load"):
        function(model)
