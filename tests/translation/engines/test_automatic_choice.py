"""`--engine auto`: the engine of each call, and the reason for the choice in the log."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import fragments, save_ending_transformer, tiny_model, tiny_tokenizer
from click.testing import CliRunner
from serving_process import serving

import nmtkit
from nmtkit.cli import main
from nmtkit.config.registry import RegistryEntry
from nmtkit.contracts import engine as contract
from nmtkit.jobs import machine_code
from nmtkit.serving.config import ModelPath, ServeConfig, ServeJob
from nmtkit.serving.fair_queue import BatchKey, LineBatch
from nmtkit.serving.loading import load_models
from nmtkit.serving.workers import translate_or_fail
from nmtkit.training.config import JobConfig
from nmtkit.training.run import Run
from nmtkit.training.run_log import Lines
from nmtkit.translation.engines import ENGINES, Decoder, Engine, EngineConfig, LoadedModels, engine
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import BatchHypotheses, Hypothesis, Request, SegmentBatch
from nmtkit.translation.shards import engine_of
from nmtkit.translation.translator import Translator

LINES = fragments()[:3]
SHORT: dict[str, Any] = {"max_len_a": 0, "max_len_b": 4}


class Compiled(Engine):
    """Stands for the compiled search: every translation is its piece 5."""

    keeps_weights = True
    ready = False
    awaited = prepared = 0

    def __init__(self, config: Any, loaded: LoadedModels) -> None:
        super().__init__(config, loaded)
        self.same_hypotheses = loaded.precision_of("compiled") == "fp32"

    def is_ready(self) -> bool:
        return self.ready

    def is_awaited(self) -> None:
        self.awaited += 1

    def prepare(self) -> None:
        self.prepared += 1

    def refusal(self, options: SearchOptions) -> str | None:
        return "--sampling" if options.sampling else None

    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        for number, batch in enumerate(batches):
            yield number, [[Hypothesis([5], -1.0, -1.0)] for _ in batch]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES.entries, "compiled", RegistryEntry("compiled", Compiled, EngineConfig(), ""))
    monkeypatch.setattr(engine, "COMPILED", "compiled")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ending_transformer(tmp_path_factory.mktemp("automatic") / "model.pt")


def texts(translator: Translator, **options: Any) -> list[str]:
    return [each.text for each in translator.translate(LINES, **SHORT | options)]


def is_compiled(translator: Translator) -> bool:
    return [each.hypotheses[0].tokens for each in translator.translate(LINES, **SHORT)] == [[5]] * 3


@pytest.mark.usefixtures("compiled")
def test_pytorch_translates_until_the_search_is_compiled_and_a_call_keeps_its_engine(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = texts(Translator.load(path, engine="torch"))
    translator = Translator.load(path)
    search: Any = translator.decoder.engine
    with caplog.at_level(logging.INFO, "nmtkit"):
        assert texts(translator) == expected
        assert (search.awaited, search.prepared) == (1, 0)
        pipeline = translator.pipeline(SearchOptions(**SHORT))
        running = translator.run([[Request(line)] for line in LINES], pipeline)
        begun = [next(running).text]
        search.ready = True
        assert begun + [each.text for each in running] == expected
        assert is_compiled(translator)
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("engine: ")]
    assert len(told) == 2 and "torch" in told[0] and told[1] == "engine: compiled"


@pytest.mark.usefixtures("compiled")
def test_8_bits_wait_for_the_search_so_that_equal_commands_give_equal_translations(path: Path) -> None:
    translator = Translator.load(path, precision="int8")
    assert is_compiled(translator)


@pytest.mark.usefixtures("compiled")
def test_a_refused_option_is_named_once_and_nothing_is_compiled_for_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    translator = Translator.load(path, precision="int8")
    with caplog.at_level(logging.INFO, "nmtkit"):
        for _ in range(2):
            texts(translator, sampling=True)
    (message,) = [record.getMessage() for record in caplog.records if "engine" in record.getMessage()]
    assert "torch" in message and "--sampling" in message
    assert translator.decoder.engine.prepared == 0  # type: ignore[attr-defined]
    assert translator.decoder.choice(SearchOptions(sampling=True)).startswith("torch (")


def test_a_job_in_8_bits_belongs_to_machines_with_the_same_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {}
    for installed in (False, True):
        monkeypatch.setattr(machine_code, "installed", lambda installed=installed: installed)
        for precision in ("fp32", "int8"):
            names[precision, installed] = engine_of(DeviceOptions(precision=precision))
    assert names["fp32", False] == names["fp32", True]
    assert names["int8", False] != names["int8", True]


@pytest.mark.usefixtures("compiled")
def test_a_worker_keeps_the_choice_of_its_parent(path: Path) -> None:
    translator = Translator.load(path)
    search: Any = translator.decoder.engine
    options = SearchOptions(**SHORT)
    translator.batch_decoder(options)
    search.ready = True
    assert translator.decoder.engine_for(options, alone=False)[0] is translator.decoder.torch
    translator.decoder.keep_choice()
    assert translator.decoder.engine_for(options)[0] is translator.decoder.torch
    assert translator.decoder.choice(options).startswith("torch (")


@pytest.mark.usefixtures("compiled")
def test_a_search_that_cannot_be_compiled_is_told_and_pytorch_translates(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Engine) -> None:
        raise RuntimeError("LLVM ERROR 17")

    monkeypatch.setattr(Compiled, "prepare", fail)
    monkeypatch.setattr(Compiled, "ready", True)
    translator = Translator.load(path)
    assert texts(translator) == texts(Translator.load(path, engine="torch"))
    assert "LLVM ERROR 17" in caplog.text


@pytest.mark.usefixtures("compiled")
def test_scoring_creates_and_names_no_engine(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    translator = Translator.load(path, precision="int8")
    with caplog.at_level(logging.INFO, "nmtkit"):
        translator.decoder.engine_for(SearchOptions(score_reference=True))
    assert translator.decoder.engine.prepared == 0 and not caplog.records  # type: ignore[attr-defined]


@pytest.mark.usefixtures("compiled")
def test_pytorch_computes_with_copies_that_share_the_tensors(path: Path) -> None:
    translator = Translator.load(path)
    original, copied = translator.originals[0], translator.models[0]
    assert type(original.output_projection) is torch.nn.Linear
    assert copied is not original and copied is translator.models[0]
    assert any(a is b for a in original.parameters() for b in copied.parameters())
    plain = Translator.load(path, engine="torch")
    assert plain.models[0] is plain.originals[0]


@pytest.mark.parametrize(
    ("models", "precision", "reason"),
    [(["transformer_tiny"], "bf16", "bf16"), (["gnmt_small"], "fp32", "GNMT")],
)
def test_pytorch_translates_with_models_that_the_search_does_not_support(
    models: list[str], precision: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "COMPILED", "numba")
    monkeypatch.setattr(machine_code, "installed", lambda: True)
    loaded = LoadedModels([tiny_model(name) for name in models], tiny_tokenizer(), "cpu", 2048, precision=precision)
    decoder = Decoder(loaded)
    assert decoder.engine is decoder.torch and reason in decoder.choice(SearchOptions())


def test_without_numba_pytorch_translates_and_the_log_has_the_install_command(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "COMPILED", "numba")
    monkeypatch.setattr(machine_code, "installed", lambda: False)
    with caplog.at_level(logging.INFO, "nmtkit"):
        assert texts(Translator.load(path)) == texts(Translator.load(path, engine="torch"))
    assert "pip install" in caplog.text
    result = CliRunner().invoke(main, ["precompile"])
    assert result.exit_code == 2 and "pip install" in result.stderr


def generate(path: Path, folder: Path, *flags: str) -> None:
    (folder / "lines").write_text("\n".join(LINES) + "\n")
    arguments = ["generate", "--path", str(path), "--device", "cpu", "--input", str(folder / "lines"), *flags]
    assert CliRunner().invoke(main, arguments, catch_exceptions=False).exit_code == 0


def serve(path: Path, folder: Path) -> None:
    job = ServeJob(
        config=ServeConfig(workers=1), paths=[ModelPath(path, ("en", "de"))], plugins=[], processors={},
        search=SearchOptions(**SHORT), devices=DeviceOptions(device="cpu"), translator=TranslatorOptions(),
        text=TextOptions(),
    )  # fmt: skip
    models = load_models(job)
    assert len(translate_or_fail(models, LineBatch(BatchKey(("en", "de")), LINES))) == len(LINES)  # type: ignore[arg-type]


def validate(path: Path, folder: Path) -> None:
    names = {"architecture": "transformer_tiny", "metrics": "bleu"}
    settings = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "device": "cpu"}
    settings |= {"batch_tokens": 200, "max_update": 1, "validate_interval": 1, "warmup_updates": 1}
    Run(JobConfig.read(names=names, settings=settings | {"save_dir": folder / "run"}), path, Lines()).run()


USERS: dict[str, tuple[Callable[[Path, Path], Any], int]] = {  # a way to translate, and the number of its segments
    "generate": (generate, len(LINES)),
    "distillation and back-translation": (
        lambda path, folder: generate(path, folder, "--output-dir", str(folder / "shards")), len(LINES)
    ),
    "an n-best list": (lambda path, folder: generate(path, folder, "--nbest", "2", "--format", "jsonl"), len(LINES)),
    "Python": (lambda path, _: nmtkit.load(path, device="cpu").translate(LINES), len(LINES)),
    "serve": (serve, len(LINES)),
    "validation": (validate, 20),
}  # fmt: skip


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("user", USERS)
def test_all_searches_on_a_cpu_use_the_compiled_engine(
    user: str, path: Path, mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[tuple[str, int]] = []

    def decode(
        self: Compiled, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        for number, batch in enumerate(batches):
            searched.append((self.loaded.precision, len(batch)))
            yield number, [[Hypothesis([5], -1.0, -1.0)] for _ in batch]

    def search(*_: Any) -> None:
        raise AssertionError("PyTorch searches")

    monkeypatch.setattr(Compiled, "ready", True)
    monkeypatch.setattr(Compiled, "decode", decode)
    monkeypatch.setattr(engine.TorchEngine, "search", search)
    run, number = USERS[user]
    run(mirror_data if user == "validation" else path, tmp_path)
    assert sum(size for _, size in searched) == number
    assert {precision for precision, _ in searched} == {"fp32"}


# --- with the compiled search -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_auto_equals_pytorch_with_each_option() -> None:
    pytest.importorskip("numba")
    path = contract._checkpoint(None)
    machine_code.ensure(numba_engine().compile_search)
    automatic, plain = Translator.load(path), Translator.load(path, engine="torch")
    lines = fragments()[:20]
    engines = set()
    for settings in contract.OPTIONS:
        options = contract.SHORT | settings
        found, expected = (each.translate(lines, **options) for each in (automatic, plain))
        assert [each.text for each in found] == [each.text for each in expected], settings
        engines.add(automatic.decoder.choice(SearchOptions(**options)).partition(" ")[0])
    assert engines == {"numba", "torch"}


def numba_engine() -> Any:
    from nmtkit.translation.engines import numba_engine

    return numba_engine


@pytest.mark.slow
def test_precompile_makes_the_code_that_generate_uses(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "nmtkit"]
    made = subprocess.run([*command, "precompile"], env=environment, capture_output=True, text=True, check=True)
    folder = Path(made.stdout.strip())
    files = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert folder.parent == tmp_path / "nmtkit" and files
    for precision in ("fp32", "int8"):
        flags = ["--path", str(path), "--precision", precision, "--beam", "3"]
        run = subprocess.run(
            [*command, "generate", *flags], env=environment, input="\n".join(LINES), capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        assert "engine: numba" in run.stderr and "compil" not in run.stderr and run.stdout.count("\n") == 3
    assert files == {file: file.stat().st_mtime_ns for file in folder.iterdir()}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("ready", [False, True])
def test_inspect_names_the_engine_of_a_cpu(path: Path, ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "ready", ready)
    shown = CliRunner().invoke(main, ["inspect", str(path)]).stdout
    (line,) = [line for line in shown.splitlines() if "engine on a CPU" in line]
    assert "compiled" in line and ("precompile" in line) is not ready


@pytest.mark.slow
def test_the_service_switches_to_the_compiled_search_and_loses_no_request(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ["--path", f"en-de={path}", "--workers", "1", "--engine", "auto", "--beam", "2"]
    with serving(tmp_path, *flags) as server:
        first, answers = server.ask("/health")[1]["engines"], set()
        deadline = time.monotonic() + 1200  # the compilation has the lowest priority
        while server.ask("/health")[1]["engines"] != {"en-de": "numba"} and time.monotonic() < deadline:
            answers.add(server.translate(LINES[0]))
            time.sleep(0.1)
        answers.add(server.translate(LINES[0]))
        assert server.ask("/health")[1] == {"status": "ok", "engines": {"en-de": "numba"}}
    assert first["en-de"].startswith("torch (") and len(answers) == 1
    assert "engine: numba" in server.log.read_text()
