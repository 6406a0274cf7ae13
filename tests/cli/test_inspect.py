"""`nmtkit inspect` reports the contents of checkpoints and datasets."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import nmtkit
from nmtkit.cli import main
from nmtkit.cli.command import PROGRAM
from nmtkit.data import checkpoint_file
from nmtkit.models import checkpoint
from nmtkit.training.checkpoints import drop_training_state


def inspect(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["inspect", *arguments])


@pytest.fixture(scope="module")
def run_folder(mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    flags = (
        "--arch transformer_tiny --encoder-layers 2 --decoder-layers 1 --d-model 16 --d-ff 32 --heads 2 --max-update 2"
    )
    flags += " --batch-tokens 200 --metrics none --threads 1"
    trained = CliRunner().invoke(main, ["train", str(mirror_data), *flags.split(), "--save-dir", str(folder)])
    assert trained.exit_code == 0, trained.output
    return folder


@pytest.mark.slow
def test_parameters_are_counted_by_part_and_shared_ones_once(run_folder: Path) -> None:
    described = json.loads(inspect(str(run_folder / "last.pt"), "--format", "json").output)
    parameters = described["sections"]["Parameters"]
    # by hand: one attention has 4 d² weights, a feed-forward network 2 d f weights and d + f biases, a norm 2 d
    d, f, vocabulary = 16, 32, 320
    attention, feed_forward, norm = 4 * d * d, 2 * d * f + d + f, 2 * d
    assert parameters["source_embedding"] == d * vocabulary
    assert parameters["encoder (2 layers)"] == 2 * (attention + feed_forward + 2 * norm)
    assert parameters["decoder (1 layer)"] == 2 * attention + feed_forward + 3 * norm
    assert parameters["all"] == sum(
        count for name, count in parameters.items() if isinstance(count, int) and name != "all"
    )


@pytest.mark.slow
def test_a_checkpoint_says_how_it_was_made_and_how_to_go_on(run_folder: Path) -> None:
    described = json.loads(inspect(str(run_folder / "last.pt"), "--format", "json").output)
    assert described["sections"]["Checkpoint"]["updates"] == 2
    assert described["sections"]["Config"]["d_ff"] == 32
    assert described["sections"]["Optimizer"]["name"] == "adam"
    words = shlex.split(described["commands"]["resume"])
    assert words == ["nmtkit", "train", "--config", str(run_folder / "config.toml")]
    assert CliRunner().invoke(main, words[1:]).exit_code == 0  # parses, and finds its files


def test_the_commands_begin_as_the_user_started_nmtkit(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRAM, "python3 -m nmtkit")
    commands = json.loads(inspect(str(run_folder / "last.pt"), "--format", "json").output)["commands"]
    assert all(line.startswith("python3 -m nmtkit ") for line in commands.values())
    assert " && python3 -m nmtkit train " in commands["repeat the training"]
    assert "python3 -m nmtkit inspect" in inspect(str(run_folder)).stdout.splitlines()[-1]


def test_a_run_whose_folder_was_moved_resumes_in_its_new_folder(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, folder := tmp_path / "moved", symlinks=True)
    commands = json.loads(inspect(str(folder / "last.pt"), "--format", "json").output)["commands"]
    assert shlex.split(commands["resume"])[-1] == str(folder / "config.toml")


def test_the_folder_of_a_run_begins_with_its_state(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, folder := tmp_path / "run", symlinks=True)
    assert json.loads(inspect(str(folder), "--format", "json").output)["summary"]["run"].startswith(
        "finished: --max-up"
    )
    with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"kind": "end", "state": "failed", "reason": "update 9 diverges"}) + "\n")
    assert "failed: update 9 diverges" in inspect(str(folder)).stdout.split("languages")[0]
    assert "failed" not in inspect(str(folder / "last.pt")).stdout


def test_a_run_says_what_it_ran_on_wherever_its_weights_go(run_folder: Path, mirror_data: Path, tmp_path: Path) -> None:
    averaged, thinned = tmp_path / "averaged.pt", tmp_path / "thinned.pt"
    average = ["average-checkpoints", str(run_folder), "--last", "1", "--output", str(averaged)]
    assert CliRunner().invoke(main, average).exit_code == 0
    shutil.copy(run_folder / "last.pt", thinned)
    drop_training_state(thinned)
    for path in (run_folder / "last.pt", averaged, thinned):
        sections = json.loads(inspect(str(path), "--format", "json").output)["sections"]
        made_by = sections["Made by"]
        assert made_by["data"] == str(mirror_data.absolute()) and len(made_by["dataset"]) == 12
        assert made_by["torch"] == torch.__version__ and made_by["nmtkit"].startswith(nmtkit.__version__)
        assert {"command", "device", "processes", "precision"} <= made_by.keys()
        assert sections["Run (settings that differ from the defaults)"]["batch_tokens"] == 200
        assert sections["Optimizer"]["name"] == "adam"
    assert checkpoint.load(averaged)["run"]["settings"]["run"]["seed"] == 1
    started = json.loads((run_folder / "log.jsonl").read_text().splitlines()[0])
    assert started["dataset"] == made_by["dataset"] and started["config"]["run"]["seed"] == 1


def test_the_first_screen_has_the_facts_that_matter_and_the_rest_is_on_request(run_folder: Path) -> None:
    text = inspect(str(run_folder)).stdout
    described = json.loads(inspect(str(run_folder / "best.pt"), "--format", "json").stdout)
    lines = text.splitlines()
    assert len(lines) < 25
    size = (run_folder / "best.pt").stat().st_size
    summary = dict(line.split(maxsplit=1) for line in lines[1:10] if line)
    assert summary["languages"] == "xx-yy"
    assert summary["parameters"] == f"{described['sections']['Parameters']['all']:,} (transformer_tiny)"
    assert f"loss {described['sections']['Checkpoint']['validation loss']:.3f}" in summary["validation"]
    assert summary["size"].startswith(f"{size / 1e6:,.1f} MB")
    assert "nmtkit generate --path" in text and "label smoothing" not in text
    everything = inspect(str(run_folder), "--all").stdout
    assert everything.startswith(text.partition("\nAll facts")[0])
    assert "d ff" in everything  # this run has another value than the preset
    assert "scale embeddings" not in everything and "label smoothing" not in everything  # these are the defaults
    assert inspect(str(run_folder), "--all", "--format", "json").exit_code == 2


def test_a_checkpoint_of_an_unknown_architecture_is_described(run_folder: Path, tmp_path: Path) -> None:
    contents = checkpoint.load(run_folder / "last.pt")
    contents |= {"architecture": "mine", "plugins": ["mine.py"]}
    del contents["nmtkit"], contents["training"]
    checkpoint_file.save(tmp_path / "mine.pt", contents)
    text = inspect(str(tmp_path / "mine.pt")).output
    assert "mine.py" in text and "--plugin mine.py" in text and "To resume" not in text


def test_a_dataset_says_its_counts_and_options(mirror_data: Path) -> None:
    described = json.loads(inspect(str(mirror_data), "--format", "json").output)
    assert described["sections"]["Subset train"]["pairs"] == 200
    assert described["sections"]["Training files 1"]["pairs read"] == 200
    assert described["sections"]["Vocabulary"]["joint"] == 320
    assert described["sections"]["Made with"]["vocab_size"] == 320
    assert set(described["commands"]) == {"train", "translate test"}


def test_the_first_screen_of_a_dataset(mirror_data: Path) -> None:
    text = inspect(str(mirror_data)).stdout
    summary = dict(line.split(maxsplit=1) for line in text.splitlines()[1:8] if line)
    assert summary["train"] == "200 pairs" and summary["vocabulary"] == "320 pieces"
    assert "min len" not in inspect(str(mirror_data), "--all").stdout  # a default
    assert "vocab size" in inspect(str(mirror_data), "--all").stdout


def test_verify_reads_all_of_a_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    assert "checksum is correct" in inspect(str(run_folder / "last.pt"), "--verify").output
    weight = checkpoint.load(run_folder / "last.pt")["model"]["output_projection.weight"].numpy().tobytes()
    data = bytearray((run_folder / "last.pt").read_bytes())
    data[data.index(weight) + 100] ^= 4
    (tmp_path / "damaged.pt").write_bytes(data)
    result = inspect(str(tmp_path / "damaged.pt"), "--verify")
    assert result.exit_code == 2 and "damaged.pt is damaged" in result.stderr


def test_verify_decodes_a_whole_dataset_and_names_a_damaged_file(mirror_data: Path, tmp_path: Path) -> None:
    assert "checksums are correct" in inspect(str(mirror_data), "--verify").output
    damaged = tmp_path / "damaged"
    shutil.copytree(mirror_data, damaged)
    path = damaged / "train.source.ids.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    result = inspect(str(damaged), "--verify")
    assert result.exit_code == 2 and path.name in result.output


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    for path in (tmp_path, tmp_path / "text.txt", tmp_path / "nothing"):
        result = inspect(str(path))
        assert result.exit_code == 2 and "error" in result.output


def test_facts_about_the_base_do_not_replace_facts_about_the_model(run_folder: Path, tmp_path: Path) -> None:
    contents = checkpoint_file.read(run_folder / "last.pt")
    contents["run"] |= {"base_origin": {"languages": ["xx", "zz"], "repository": "org/base"}}
    checkpoint_file.save(tmp_path / "tuned.pt", contents)
    rows = [line.split() for line in inspect(str(tmp_path / "tuned.pt"), "--all").output.splitlines()]
    assert ["languages", "xx,", "yy"] in rows and ["base", "origin:", "languages", "xx,", "zz"] in rows
