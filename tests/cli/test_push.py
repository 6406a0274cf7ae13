"""`nmtkit export --push` uploads a model with a model card in one commit, and nothing if anything is wrong."""

import json
from pathlib import Path

import pytest
from builders import save_tiny_transformer, save_transformer, tiny_tokenizer
from click.testing import CliRunner, Result
from hub_server import TOKEN, Fault, HubServer

from nmtkit.cli import main
from nmtkit.config.files import checkpoint_of
from nmtkit.data import checkpoint_file
from nmtkit.models.formats import hub_models

pytest.importorskip("safetensors")

SCORES = [{"name": "BLEU", "score": 34.256, "signature": "nrefs:1|case:mixed|tok:13a", "test_set": "wmt14/full en-de"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "ours.pt"
    save_tiny_transformer(path, tiny_tokenizer())
    contents = checkpoint_file.read(path)
    contents["run"] = {"command": "nmtkit train data-bin", "data": "/home/me/data-bin", "dataset": "0123456789ab"}
    contents["run"] |= {"languages": ["en", "no"]}
    checkpoint_file.save(path, contents | {"scores": {"bleu": 31.5}, "signatures": {"bleu": "nrefs:1|tok:zh"}})
    return path


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)], prog_name="nmtkit")


def files(hub: HubServer, name: str) -> dict[str, bytes]:
    repository = hub.repository(name)
    return repository.commits[repository.refs["main"]]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["checkpoint", "safetensors", "huggingface"])
def test_a_pushed_model_translates_by_its_name(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "scores.json").write_text(json.dumps(SCORES))
    flags = ["--push", "org/en-no", "--license", "mit", "--scores", tmp_path / "scores.json", "--private"]
    result = export("--format", format, model, *flags)
    assert result.exit_code == 0, result.stderr
    repository = hub.repository("org/en-no")
    assert repository.private and len(repository.messages) == 1
    assert f"{hub.url}/org/en-no/commit/{repository.refs['main']}" in result.stderr
    card = files(hub, "org/en-no")["README.md"].decode()
    head = card.split("---\n")[1]
    assert 'license: "mit"\n' in head and 'language: ["en", "no"]\n' in head  # "no" without quotes is false in YAML
    for fact in (
        "nmtkit train data-bin",
        "data-bin`, dataset 0123456789ab",
        "34.26",
        "wmt14/full",
        SCORES[0]["signature"],
        "31.5",
        "nrefs:1|tok:zh",
        "nrefs:1|tok:zh",
    ):
        assert fact in card
    assert "/home/me" not in card
    hub_models._opened.clear()
    words = ["a b c"]
    from nmtkit.translation.translator import Translator

    translations = [
        Translator.load(path).translate(words, beam=1, max_len_b=4)[0].text
        for path in (model, checkpoint_of(Path("hf:org/en-no")))
    ]
    assert translations[0] == translations[1]


def test_a_pushed_copy_is_also_kept(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert export("--format", "checkpoint", model, tmp_path / "kept.pt", "--push", "org/m").exit_code == 0
    assert files(hub, "org/m")["model.pt"] == (tmp_path / "kept.pt").read_bytes()
    assert not hub.repository("org/m").private


@pytest.mark.slow
def test_a_model_of_the_hub_keeps_its_origin_and_licence(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    commit = hub.add("org/base", {"model.pt": model.read_bytes()}, license="cc-by-4.0")
    hub_models._opened.clear()
    assert export("--format", "safetensors", "hf:org/base", "--push", "org/derived").exit_code == 0
    card = files(hub, "org/derived")["README.md"].decode()
    assert 'license: "cc-by-4.0"' in card and 'base_model: "org/base"' in card and f"hf:org/base@{commit}" in card


def test_the_command_of_a_pushed_model_has_the_flags_that_the_model_needs(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    path = save_transformer(tmp_path / "many.pt", languages=("de", "en"))
    checkpoint_file.save(path, checkpoint_file.read(path) | {"plugins": ["/home/me/mine.py"]})
    result = export("--format", "checkpoint", path, "--push", "org/many")
    command = "nmtkit generate --path hf:org/many --source-lang en --target-lang de --plugin mine.py < source.txt\n"
    assert result.exit_code == 0 and f"next: {command}" in result.stderr
    assert command in files(hub, "org/many")["README.md"].decode()


@pytest.mark.slow
def test_every_refusal_is_one_line_and_uploads_nothing(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, said: str) -> None:
        result = export("--format", "checkpoint", model, *arguments)
        assert result.exit_code == 2 and said in result.stderr and len(result.stderr.strip().splitlines()) == 1
        assert not hub.asked("^(POST|PUT)") or ("models", "org/m") not in hub.repositories

    refused("--push", "org/m", said="HF_TOKEN")
    refused("--push", "a/b/c", said="ORG/NAME")
    refused(said="--push")
    refused(tmp_path / "out.pt", "--license", "mit", said="--push")
    assert not (tmp_path / "out.pt").exists()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    refused("--push", "org/m", "--license", "my licence", said="--license")
    refused("--push", "org/m", "--scores", tmp_path / "none.json", said="none.json")
    (tmp_path / "scores.json").write_text('[{"name": "BLEU"}]')
    refused("--push", "org/m", "--scores", tmp_path / "scores.json", said="scores.json")
    refused("--push", "others/m", said="others/m")
    hub.add("org/public", {"README.md": b"x"})
    refused("--push", "org/public", "--private", said="public")
    hub.faults = [Fault("POST .*/commit/", status=500)]
    refused("--push", "org/m", said="500")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("--push", "org/m", said="HF_HUB_OFFLINE")
    assert sorted(hub.repositories) == [("models", "org/public")]
