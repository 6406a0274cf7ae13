"""Imported models with several languages are fine-tuned by commands: import, preprocess, train, generate."""

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from make_huggingface import FOLDER
from test_language_tokens import LANGUAGE_TOKENS, preprocessed

from nmtkit.cli import main
from nmtkit.data import checkpoint_file

pytest.importorskip("safetensors")


def nmtkit(*arguments: object) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (codes, _, _) in LANGUAGE_TOKENS.items() if codes[1]])
def test_a_model_of_several_languages_is_fine_tuned_and_translates(name: str, tmp_path: Path) -> None:
    dataset = preprocessed(name, tmp_path)
    run = tmp_path / "run"
    flags = ["--finetune-from", tmp_path / "model.pt", "--max-update", 2, "--lr", 1e-9, "--device", "cpu"]
    flags += ["--precision", "fp32", "--metrics", "bleu,accuracy", "--save-dir", run]
    result = nmtkit("train", dataset.folder, *flags)
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().split("\n") if line]
    valid = [record for record in records if record["kind"] == "valid"][-1]
    # at this learning rate the model is still the imported model, whose translations are known
    expected = json.loads((FOLDER / name / "expected.json").read_text())
    assert {"bleu", "accuracy", "loss"} <= valid.keys() and expected
    (source, target), _, _ = LANGUAGE_TOKENS[name]
    languages = ([] if source is None else ["--source-lang", source]) + ["--target-lang", str(target)]
    lines = [line for line in result.stderr.split("\n") if line.startswith(("next: ", "then: "))]
    average, generate = (shlex.split(line)[2:] for line in lines)
    assert generate[-len(languages) :] == languages
    nmtkit(*average)
    assert checkpoint_file.read(run / "last.pt")["run"]["languages"] == [source or "en", target]
    generate.append("--keep-loops")  # like a validation
    hypotheses = nmtkit(*generate).stdout.split("\n")[:-1]
    before = nmtkit("generate", dataset.folder, *generate[-1:], "--path", tmp_path / "model.pt", *languages)
    assert hypotheses == before.stdout.split("\n")[:-1]
    followed = {record["source"]: record["translation"] for record in valid["followed"]}
    assert followed == dict(zip(["All are equal.", "right"], hypotheses, strict=True))
