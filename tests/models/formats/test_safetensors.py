"""A checkpoint is the same after an export as safetensors and an import."""

import json
import re
import resource

import pytest
import torch
from builders import save_transformer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import checkpoint
from nmtkit.models.building import languages_of
from nmtkit.models.formats import detect, safetensors


def export(*arguments: object) -> None:
    result = CliRunner().invoke(main, ["export", *map(str, arguments)])
    assert result.exit_code == 0, result.output


def test_safetensors_and_back_is_the_same_checkpoint(tmp_path):
    pytest.importorskip("safetensors")
    model = save_transformer(tmp_path / "model.pt")
    export("--format", "safetensors", model, tmp_path / "folder")
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {
        "nmtkit.json",
        "model.safetensors",
        "joint.model",
    }
    assert json.loads((tmp_path / "folder/nmtkit.json").read_text())["config"]["d_model"] == 32
    export("--format", "checkpoint", tmp_path / "folder", tmp_path / "back.pt")
    before, after = checkpoint.load(model), checkpoint.load(tmp_path / "back.pt")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after["model"][name]) for name, value in before["model"].items())
    assert {key: before[key] for key in ("architecture", "config", "plugins", "update")} == {
        key: after[key] for key in ("architecture", "config", "plugins", "update")
    }
    assert Tokenizer.from_state(before["tokenizer"]).fingerprint == Tokenizer.from_state(after["tokenizer"]).fingerprint


def test_the_facts_and_the_fingerprint_of_a_model_are_the_same_after_an_import(tmp_path) -> None:
    pytest.importorskip("safetensors")
    model = save_transformer(tmp_path / "model.pt")
    facts = {"scores": {"bleu": 31.25}, "signatures": {"bleu": "nrefs:1"}, "maximized": ["bleu"], "scheduled": True}
    facts |= {"averaged": ["update_00000007.pt"], "run": {"languages": ["en", "ru"]}, "origin": {"license": "mit"}}
    checkpoint_file.save(model, checkpoint.load(model) | facts)
    export("--format", "safetensors", model, tmp_path / "folder")
    export("--format", "checkpoint", tmp_path / "folder", tmp_path / "back.pt")
    before, after = checkpoint.load(model), checkpoint.load(tmp_path / "back.pt")
    assert {name: after.get(name) for name in facts} == facts
    # adapters find their base by its fingerprint
    assert checkpoint_file.fingerprint(after) == checkpoint_file.fingerprint(before)


def test_a_model_keeps_its_languages_and_its_shortlist(tmp_path) -> None:
    pytest.importorskip("safetensors")
    model = save_transformer(tmp_path / "model.pt")
    run = {"languages": ["en", "ru"], "settings": {"run": {"save_dir": "run"}}, "machine": {"cores": 2}}
    checkpoint_file.save(model, checkpoint.load(model) | {"run": run})
    export("--format", "safetensors", model, tmp_path / "folder")
    assert not (tmp_path / "folder/shortlist.safetensors").exists()
    export("--format", "checkpoint", tmp_path / "folder", tmp_path / "back.pt")
    assert checkpoint.load(tmp_path / "back.pt")["run"] == run
    # languages choose plural forms and the tokenizer of BLEU
    assert languages_of(tmp_path / "back.pt") == ("en", "ru")
    lists = {"lengths": torch.tensor([1, 2]).to(torch.uint8), "targets": torch.tensor([5, 7, 400]).to(torch.uint16)}
    checkpoint_file.save(model, checkpoint.load(model) | {"shortlist": lists})
    export("--format", "safetensors", model, tmp_path / "other")
    export("--format", "checkpoint", tmp_path / "other", tmp_path / "again.pt")
    again = checkpoint.load(tmp_path / "again.pt")["shortlist"]
    assert {name: part.tolist() for name, part in again.items()} == {"lengths": [1, 2], "targets": [5, 7, 400]}


def test_a_damaged_folder_is_refused(tmp_path) -> None:
    pytest.importorskip("safetensors")
    model = save_transformer(tmp_path / "model.pt")
    export("--format", "safetensors", model, tmp_path / "folder")
    text = (tmp_path / "folder/nmtkit.json").read_text()
    facts = json.loads(text)
    for wrong in ([], 3, {}, facts | {"config": None}, facts | {"shared": []}, facts | {"update": "7"},
                  facts | {"nmtkit": 1}, facts | {"run": []}, facts | {"shared": {"a": "b"}}, facts | {"maximized": {}},
                  facts | {"parameters": ["a"]}):  # fmt: skip
        (tmp_path / "folder/nmtkit.json").write_text(json.dumps(wrong))
        result = CliRunner().invoke(
            main, ["export", "--format", "checkpoint", str(tmp_path / "folder"), str(tmp_path / "back.pt")]
        )
        assert result.exit_code == 2 and re.search(r"nmtkit\.json|is damaged", result.stderr), wrong
        assert not (tmp_path / "back.pt").exists()


@pytest.mark.parametrize("format", ["safetensors", "huggingface", "marian", "ctranslate2"])
def test_a_full_disk_ends_an_export_in_one_line(format, tmp_path):
    pytest.importorskip("ctranslate2" if format == "ctranslate2" else "safetensors")
    path = tmp_path / "model.pt"
    save_transformer(path, **({"positions": "sinusoidal_fairseq"} if format == "marian" else {}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (10_000, limits[1])
    )  # fails like a write to a full disk, for another reason
    try:
        result = CliRunner().invoke(main, ["export", "--format", format, str(path), str(tmp_path / "folder")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code != 0 and result.stderr.count("\n") == 1, result.stderr
    assert "File too large" in result.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_import_names_the_command_that_reads_the_folder(tmp_path) -> None:
    safetensors.save(save_transformer(tmp_path / "model.pt"), tmp_path / "folder")
    with pytest.raises(ValueError, match="export --format checkpoint"):
        detect.load(tmp_path / "folder")
