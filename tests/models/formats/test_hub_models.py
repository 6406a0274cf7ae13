"""`hf:ORG/NAME@REVISION` is a checkpoint wherever a checkpoint is expected: downloaded once, imported, kept offline."""

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer, write_corpus
from click.testing import CliRunner, Result
from hub_server import Fault, HubServer
from make_huggingface import FOLDER

import nmtkit
from nmtkit.cli import main
from nmtkit.config.files import checkpoint_of, portable_name, user_cache
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.hub import HubUnreachableError
from nmtkit.models import checkpoint, model_cache
from nmtkit.models.building import languages_of
from nmtkit.models.formats import hub_models, huggingface, safetensors
from nmtkit.serving.config import ModelPath
from nmtkit.serving.loading import grouped
from nmtkit.training.config import JobConfig
from nmtkit.translation.translator import Translator

pytest.importorskip("safetensors")


def call(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)), prog_name="nmtkit")
    assert result.exit_code == 0, result.output
    return result


def opened(name: str) -> Path:
    """Returns the checkpoint of a name as a new process would open it."""
    hub_models._opened.clear()
    return checkpoint_of(Path(name))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


OPUS = files_of(FOLDER / "marian")


@pytest.mark.slow
def test_a_model_of_transformers_is_imported_once(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    hub.add(
        "org/opus", OPUS | {"pytorch_model.bin": b"x" * 99, "tf_model.h5": b"x", "sub/model.pt": b"x"}, license="mit"
    )
    commit = hub.repository("org/opus").refs["main"]
    with caplog.at_level(logging.INFO, "nmtkit"):
        path = opened("hf:org/opus")
    assert path == user_cache() / "models" / "org--opus" / f"{commit}-{model_cache.VERSION}" / "model.pt"
    assert all(fact in caplog.text for fact in ("hf:org/opus", commit[:12], str(path)))
    assert not hub.asked("pytorch_model|tf_model|sub/")
    contents, expected = checkpoint_file.read(path), huggingface.load(FOLDER / "marian")
    assert checkpoint_file.fingerprint(contents) == checkpoint_file.fingerprint(expected)
    origin = contents["origin"]
    assert (origin["repository"], origin["revision"], origin["commit"]) == ("org/opus", "main", commit)
    assert (origin["license"], origin["format"]) == ("mit", "transformers (marian)")
    hub.requests.clear()
    assert opened("hf:org/opus") == path
    assert len(hub.requests) == 1  # the commit of the branch
    assert opened(f"hf:org/opus@{commit}") == path
    assert len(hub.requests) == 1


@pytest.mark.parametrize("name", ["m2m_100", "mbart_50", "nllb", "marian_separate", "marian_languages"])
def test_other_models_of_transformers(hub: HubServer, name: str) -> None:
    hub.add("org/model", FOLDER / name)
    contents = checkpoint_file.read(opened("hf:org/model"))
    assert checkpoint_file.fingerprint(contents) == checkpoint_file.fingerprint(huggingface.load(FOLDER / name))


@pytest.mark.parametrize("folder", ["fairseq/tied", "fairseq/languages", "marian/spm", "marian/yml"])
def test_models_of_other_toolkits(hub: HubServer, folder: str) -> None:
    from nmtkit.models.formats.detect import load

    source = FOLDER.parent / folder
    hub.add("org/model", source)
    found = source if list(source.glob("*.pt")) or list(source.glob("*decoder.yml")) else next(source.glob("*.npz"))
    contents = checkpoint_file.read(opened("hf:org/model"))
    assert checkpoint_file.fingerprint(contents) == checkpoint_file.fingerprint(load(found))


def test_a_model_of_fairseq_may_be_called_model(hub: HubServer) -> None:
    """`model.pt` is also the name of a checkpoint of nmtkit; the dictionaries make the difference."""
    files = files_of(FOLDER.parent / "fairseq" / "tied")
    hub.add("org/model", files | {"model.pt": files.pop("checkpoint_best.pt")})
    assert checkpoint_file.read(opened("hf:org/model"))["origin"]["format"] == "fairseq"


@pytest.mark.parametrize("format", ["checkpoint", "safetensors", "own name"])
def test_checkpoints_of_nmtkit(hub: HubServer, tmp_path: Path, format: str) -> None:
    path = tmp_path / "ours.pt"
    save_tiny_transformer(path, tiny_tokenizer())
    if format == "safetensors":
        call("export", "--format", "safetensors", path, tmp_path / "folder")
        hub.add("org/ours", tmp_path / "folder")
    else:
        hub.add(
            "org/ours", {("model.pt" if format == "checkpoint" else "ours.pt"): path.read_bytes(), "README.md": b""}
        )
    contents = checkpoint_file.read(opened("hf:org/ours"))
    expected = safetensors.load(tmp_path / "folder") if format == "safetensors" else checkpoint_file.read(path)
    assert checkpoint_file.fingerprint(contents) == checkpoint_file.fingerprint(expected)
    assert contents["origin"]["repository"] == "org/ours"


@pytest.mark.slow
def test_a_branch_that_moves_is_followed_and_a_commit_stays(hub: HubServer) -> None:
    first = hub.add("org/opus", OPUS)
    old = opened("hf:org/opus")
    second = hub.add("org/opus", OPUS | {"config.json": OPUS["config.json"] + b"\n"})
    assert first[:12] in str(old) and second[:12] in str(opened("hf:org/opus"))
    assert opened(f"hf:org/opus@{first}") == old
    hub.add("org/opus", OPUS, revision="v1")
    assert checkpoint_file.read(opened("hf:org/opus@v1"))["origin"]["revision"] == "v1"


def test_offline_and_without_a_network_the_cached_commit_is_used(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("org/opus", OPUS)
    path = opened("hf:org/opus")
    shutil.rmtree(hub.cache)  # the files of the client are not needed any more
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert opened("hf:org/opus") == path
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE"):
        opened("hf:org/opus@v1")
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE"):
        opened("hf:org/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.stop()
    caplog.clear()
    assert opened("hf:org/opus") == path
    assert hub.url in caplog.text
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert opened("hf:org/opus") == path
    with pytest.raises(ImportError, match=r"nmtkit\[hub\]"):
        opened("hf:org/other")


@pytest.mark.slow
def test_every_failure_leaves_the_cache_as_it_was(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, *facts: str) -> None:
        with pytest.raises((ValueError, OSError)) as caught:
            opened(name)
        assert "\n" not in str(caught.value)
        for fact in (name.partition("@")[0].removeprefix("hf:"), *facts):
            assert fact in str(caught.value).replace("--", "/")
        assert not list((user_cache() / "models").rglob("*"))

    refused("hf:org/none", "no such")
    refused("hf:a/b/c", "ORG/NAME")
    refused("hf:", "ORG/NAME")
    refused("hf:org/opus@", "@")
    hub.add("org/opus", OPUS)
    refused("hf:org/opus@v9", "v9")
    hub.add("org/empty", {"README.md": b"x", "data.csv": b""})
    refused("hf:org/empty", "data.csv", "config.json")
    big = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"0" * 1000}
    hub.add("org/llama", big)
    refused("hf:org/llama", "llama", "marian")
    assert not hub.asked("model.safetensors")  # refused before gigabytes of weights
    hub.add("org/code", {"model.pt": b"not a checkpoint"})
    refused("hf:org/code", "checkpoint")
    hub.add("org/half", {name: content for name, content in OPUS.items() if name != "source.spm"})
    refused("hf:org/half", "source.spm")
    hub.faults = [Fault("GET .*safetensors", corrupt=True)]
    refused("hf:org/opus", "model.safetensors", "hash")
    hub.faults = []
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file.torch, "save", full_disk)
        refused("hf:org/opus", "No space left", "NMTKIT_CACHE")
    assert opened("hf:org/opus").is_file()


def full_disk(contents: object, file: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_two_processes_import_once(hub: HubServer) -> None:
    hub.add("org/opus", OPUS)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first, second = pool.map(checkpoint_of, [Path("hf:org/opus")] * 2, chunksize=1)
    assert first == second and first.is_file()
    assert len(hub.asked("GET /lfs/.*safetensors")) == 1
    assert [path.name for path in first.parents[1].iterdir() if path.is_dir()] == [first.parent.name]


def test_the_name_stays_in_configs_with_its_commit(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("org/opus", OPUS)
    (tmp_path / "run.toml").write_text('[run]\nfinetune_from = "hf:org/opus"\n')
    path = opened("hf:org/opus")
    assert portable_name(path) == f"hf:org/opus@{commit}"
    assert portable_name(tmp_path / "a.pt") == str(tmp_path / "a.pt")
    flags = {"finetune_from": Path("hf:org/opus")}
    for job in (JobConfig.read(tmp_path / "run.toml"), JobConfig.read(None, {}, (), flags)):
        assert job.run.finetune_from == path
        assert f'finetune_from = "hf:org/opus@{commit}"' in job.toml(tmp_path / "elsewhere")
        (tmp_path / "again.toml").write_text(job.toml(tmp_path))
        assert JobConfig.read(tmp_path / "again.toml").run.finetune_from == path


def test_a_file_with_such_a_name_is_a_file(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_transformer(Path("hf:mine.pt"), tiny_tokenizer())
    assert checkpoint_of(Path("hf:mine.pt")) == Path("hf:mine.pt")
    assert not hub.requests


def test_languages_of_a_model_come_from_its_tokenizer(hub: HubServer) -> None:
    about = json.loads(OPUS["tokenizer_config.json"]) | {"source_lang": "en", "target_lang": "de"}
    hub.add("org/opus", OPUS | {"tokenizer_config.json": json.dumps(about).encode()})
    assert languages_of(opened("hf:org/opus")) == ("en", "de")
    assert "en-de" in call("inspect", "hf:org/opus").stdout


def test_inspect_says_where_a_model_comes_from(hub: HubServer) -> None:
    commit = hub.add("org/opus", OPUS, license="cc-by-4.0")
    shown = call("inspect", "hf:org/opus").stdout
    assert f"hf:org/opus@main, commit {commit[:12]}" in shown
    assert f"nmtkit generate --path hf:org/opus@{commit} <" in shown and str(user_cache()) not in shown
    assert "cc-by-4.0" in call("inspect", "hf:org/opus", "--all").stdout


@pytest.mark.slow
def test_python_and_the_commands_take_the_name(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/opus", OPUS)
    (expected,) = json.loads(OPUS["expected.json"])
    line = expected["lines"][0]["source"]
    (tmp_path / "text").write_text(f"{line}\n", encoding="utf-8")
    path = opened("hf:org/opus")
    translated = Translator.load(path).translate([line])[0].text
    assert nmtkit.load("hf:org/opus").translate([line]) == [translated]
    name, text = "hf:org/opus", tmp_path / "text"
    assert call("generate", "--path", name, "--input", text).stdout == f"{translated}\n"
    assert "perplexity" in call("score", "--path", name, "--sys", text, "--src", text).stdout.lower()
    call("attention", "--path", name, line, "--output", tmp_path / "page.html")
    call("export", "--format", "checkpoint", name, tmp_path / "exported.pt")
    call("import", name, tmp_path / "imported.pt", "--try", "")
    shutil.copy(path, tmp_path / "copy.pt")
    call("export", "--format", "safetensors", name, tmp_path / "folder")
    assert safetensors.load(tmp_path / "folder")["origin"]["repository"] == "org/opus"
    call("average-checkpoints", name, tmp_path / "copy.pt", "--output", tmp_path / "average.pt")
    for file in ("exported.pt", "imported.pt", "average.pt"):
        found = checkpoint_file.fingerprint(checkpoint_file.read(tmp_path / file))
        assert found == checkpoint_file.fingerprint(checkpoint_file.read(path))
    assert checkpoint_file.read(tmp_path / "imported.pt")["origin"]["repository"] == "org/opus"
    (tmp_path / "lex").write_text("a b 0.5\n", encoding="utf-8")
    flags = ["shortlist", "--lexicon", str(tmp_path / "lex"), "--path", name]
    result = CliRunner().invoke(main, flags)
    assert result.exit_code != 0 and "--output" in result.stderr
    call(*flags, "--output", tmp_path / "short.pt")
    assert "shortlist" not in checkpoint_file.read(path)


@pytest.mark.slow
def test_the_service_knows_the_languages_and_takes_pairs(hub: HubServer, tmp_path: Path) -> None:
    about = json.loads(OPUS["tokenizer_config.json"]) | {"source_lang": "en", "target_lang": "de"}
    hub.add("org/opus", OPUS | {"tokenizer_config.json": json.dumps(about).encode()})
    path = opened("hf:org/opus")
    assert ModelPath.parse("fr-it=hf:org/opus") == ModelPath(path, ("fr", "it"))
    assert ModelPath.parse("fr-it=hf:org/opus", tmp_path).path == path  # in a file of --models
    assert grouped([ModelPath.parse("hf:org/opus")]) == {("en", "de"): (path,)}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ctranslate2", pytest.param("numba", marks=pytest.mark.slow)])
def test_every_engine_translates_with_a_model_of_the_hub(hub: HubServer, engine: str) -> None:
    pytest.importorskip(engine)
    hub.add("org/opus", OPUS)
    (expected,) = json.loads(OPUS["expected.json"])
    lines = [line["source"] for line in expected["lines"]]
    first, second = (Translator.load("hf:org/opus", engine=each).translate(lines, beam=1) for each in (engine, "torch"))
    assert [translation.text for translation in first] == [translation.text for translation in second]


@pytest.mark.slow
def test_fine_tuning_with_adapters_resumes_from_the_name(hub: HubServer, mirror_data: Path, tmp_path: Path) -> None:
    save_tiny_transformer(tmp_path / "base.pt", Dataset.open(mirror_data).tokenizer)
    commit = hub.add("org/base", {"model.pt": (tmp_path / "base.pt").read_bytes()}, license="mit")
    run = tmp_path / "run"
    flags = ["train", mirror_data, "--finetune-from", "hf:org/base", "--adapter-rank", "2", "--max-tokens", "500"]
    flags += ["--device", "cpu", "--precision", "fp32", "--metrics", "none", "--save-dir", run]
    call(*flags, "--max-update", "2")
    saved = checkpoint_file.read(run / "last.pt")
    assert saved["adapters"]["base"] == f"hf:org/base@{commit}"
    assert saved["run"]["base_origin"]["repository"] == "org/base"
    shutil.rmtree(user_cache())  # as on another machine
    hub_models._opened.clear()
    assert "adapters" not in checkpoint.load(run / "last.pt")
    call("train", "--config", run / "config.toml", "--max-update", "4")
    assert checkpoint_file.read(run / "last.pt")["update"] == 4


@pytest.mark.slow
def test_a_dataset_takes_the_vocabulary_of_a_model_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    save_tiny_transformer(tmp_path / "base.pt", tiny_tokenizer())
    hub.add("org/base", {"model.pt": (tmp_path / "base.pt").read_bytes()})
    write_corpus(tmp_path / "train", 20, seed=0)
    flags = ["-s", "xx", "-t", "yy", "--trainpref", tmp_path / "train", "--tokenizer-from", "hf:org/base"]
    call("preprocess", *flags, "--destdir", tmp_path / "data")
    assert Dataset.open(tmp_path / "data").tokenizer.fingerprint == tiny_tokenizer().fingerprint


@pytest.mark.slow
def test_a_model_of_transformers_translates_by_its_name(hub: HubServer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.MarianMTModel.from_pretrained(FOLDER / "marian")
    tokenizer = transformers.MarianTokenizer.from_pretrained(FOLDER / "marian")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    hub.add("org/opus", tmp_path / "saved")
    line = "All human beings are born free."
    (tmp_path / "text").write_text(f"{line}\n", encoding="utf-8")
    search = {"num_beams": 1, "max_new_tokens": 21, "do_sample": False}
    expected = tokenizer.batch_decode(model.generate(**tokenizer([line], return_tensors="pt"), **search))[0]
    expected = expected.replace("<pad>", "").replace("</s>", "").strip()
    command = [sys.executable, "-m", "nmtkit", "generate", "--path", "hf:org/opus", "--input", str(tmp_path / "text")]
    command += ["--beam", "1", "--max-len-a", "0", "--max-len-b", "20", "--unkpen", "0", "--keep-loops"]
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=900)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == expected
        assert "hf:org/opus is commit" in result.stderr
    hub.requests.clear()
    failed = subprocess.run([*command[:5], "hf:org/none"], capture_output=True, text=True, timeout=900)
    assert failed.returncode == 2 and failed.stdout == "" and len(failed.stderr.strip().split("\n")) == 1


def test_a_folder_that_another_process_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that had waited for the lock worked in a folder that no longer existed."""
    waits = []

    def lock(descriptor: int, wait: bool = False) -> bool:
        if wait:
            waits.append(descriptor)
            (tmp_path / "org--opus").rmdir()
        return bool(waits)

    monkeypatch.setattr(model_cache, "lock", lock)
    with model_cache.locked(tmp_path / "org--opus", "hf:org/opus"):
        assert (tmp_path / "org--opus").is_dir() and len(waits) == 1
    assert not (tmp_path / "org--opus").exists()
