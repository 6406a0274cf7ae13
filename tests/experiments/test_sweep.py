"""Sweep files: their runs, the names of the runs, resuming, comparison, and mistakes."""

import contextlib
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import save_tiny_transformer, tiny_tokenizer, write_corpus
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.config import plugins, to_dict
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.experiments import sweep as sweeps
from nmtkit.experiments.estimate import dry_run
from nmtkit.experiments.sweep_runner import Runner
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.training.config import JobConfig
from nmtkit.training.run_facts import input_fingerprints

BASE = """
[run]
data = "{data}"
max_update = 4
validate_interval_updates = 2
metrics = []
max_tokens = 200
log_interval = 1
device = "cpu"
precision = "fp32"
[architecture]
name = "transformer_tiny"
d_model = 16
d_ff = 32
heads = 2
encoder_layers = 1
decoder_layers = 1
"""


def sweep(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["sweep", *map(str, arguments)])


def file_of(folder: Path, varied: str, data: object = "data-bin") -> Path:
    path = folder / "mine.sweep.toml"
    path.write_text(BASE.format(data=data) + varied)
    return path


def names(folder: Path, varied: str) -> list[str]:
    return [run.name for run in sweeps.read(file_of(folder, varied)).runs()]


def test_a_run_that_varies_the_checkpoint_has_the_architecture_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    path = save_tiny_transformer(tmp_path / "bases" / "one.pt", tiny_tokenizer())
    file = tmp_path / "mine.sweep.toml"
    file.write_text('[run]\ndata = "data-bin"\n[sweep.grid]\nfinetune_from = ["bases/one.pt"]\n')
    read = sweeps.read(file)
    (run,) = read.runs()
    config = checkpoint.load(path)["config"]
    assert to_dict(read.job(run).components["architecture"].config) == config
    assert config != to_dict(ARCHITECTURES["transformer_base"].preset)


def test_a_grid_has_every_combination_and_each_seed(tmp_path: Path) -> None:
    varied = "[sweep]\nseeds = [1, 2]\n[sweep.grid]\nlr = [0.1, 0.01]\ndropout = [0.0, 0.3]\n"
    found = names(tmp_path, varied)
    assert len(found) == 8 and found[0] == "lr=0.1,dropout=0,seed=1" and found[-1] == "lr=0.01,dropout=0.3,seed=2"


@pytest.mark.slow
def test_runs_of_equal_cost_differ_in_their_updates(mirror_data: Path, tmp_path: Path) -> None:
    varied = """
    [sweep]
    flop = 3e9
    seeds = [1, 2]
    [sweep.runs]
    base = {}
    wide = { d_ff = 320 }
    simcut = { criterion = "simcut" }
    """
    file = file_of(tmp_path, varied, mirror_data)
    file.write_text(file.read_text().replace("max_update = 4\n", ""))
    sweep = sweeps.read(file)
    runs = {run.name: run.settings["max_update"] for run in sweep.runs()}
    assert runs["base,seed=1"] == runs["base,seed=2"]
    assert runs["simcut,seed=1"] == pytest.approx(runs["base,seed=1"] / 2, abs=1)
    expected = {}
    for name in ("base", "wide"):
        job = sweep.job(next(run for run in sweep.runs() if run.name == f"{name},seed=1"))
        (line,) = [line for line in dry_run(job, mirror_data, None, 0) if line.startswith("FLOP of the run")]
        expected[name] = float(line.split()[-1])
    assert expected["base"] == pytest.approx(3e9, rel=0.02) and expected["wide"] == pytest.approx(3e9, rel=0.02)
    assert runs["wide,seed=1"] < 0.8 * runs["base,seed=1"]
    command = sweep.command(sweep.runs()[0])
    assert command[command.index("--max-update") + 1] == str(runs["base,seed=1"])
    assert next(iter(runs)) == "base,seed=1"  # the names are as without a budget


@pytest.mark.parametrize("varied", ["[sweep]\nflop = 1e9\nseeds = [1]", "[sweep]\nflop = -1\nseeds = [1]"])
def test_a_budget_beside_a_number_of_updates_is_refused(tmp_path: Path, varied: str) -> None:
    with pytest.raises(ValueError, match="flop of \\[sweep\\]"):
        sweeps.read(file_of(tmp_path, varied))


@pytest.mark.slow
def test_the_costs_of_table_3_are_those_of_the_formula_and_of_its_page() -> None:
    example = Path(__file__).parents[2] / "examples" / "wmt14"
    chosen = ("--only", "base*,C_layers_2*", "--vocab-size", 37_000)
    arguments = (example / "table3.sweep.toml", "--costs", *chosen)
    rows = {row["row"]: row for row in json.loads(sweep(*arguments, "--format", "json").stdout)}
    assert {name: row["runs"] for name, row in rows.items()} == {"base": 3, "C_layers_2": 3}
    d, sentence = 512, 32
    layer = 2 * (4 * d * d + 2 * d * 2048 + 2 * sentence * d) + 4 * d * d + 2 * sentence * d  # encoder and decoder
    for name, layers in {"base": 6, "C_layers_2": 2}.items():
        flop = 100_000 * 25_000 * 3 * 2 * (layers * layer + d * 37_000)
        assert rows[name]["flop"] == pytest.approx(flop)
        assert rows[name]["gpu_hours"] == pytest.approx(3 * flop / (312e12 / 3) / 3600)
    text = sweep(*arguments).stdout
    total = sum(row["gpu_hours"] for row in rows.values())
    assert text.splitlines()[3].split() == ["all", "rows", "6", f"{total:.1f}", f"{total / 8:.1f}"]
    page = (example / "README.md").read_text()
    for name in ("base", "C_layers_2"):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        shown = f"| {rows[name]['parameters'] / 1e6:.1f} | {rows[name]['gpu_hours']:.1f} |"
        assert line.endswith(shown)


def test_the_costs_of_a_dataset_count_its_vocabulary(mirror_data: Path, tmp_path: Path) -> None:
    file = file_of(tmp_path, "[sweep]\nseeds = [1, 2]\n[sweep.runs]\nbase = {}\nwide = { d_ff = 64 }\n", mirror_data)
    base, wide = json.loads(sweep(file, "--costs", "--format", "json").stdout)
    assert wide["parameters"] - base["parameters"] == 2 * 2 * 16 * 32 + 2 * 32  # two layers, with biases
    assert (base["updates"], base["runs"]) == (4, 2)
    assert sweep(file, "--costs", "--dry-run").exit_code == 2 and sweep(file, "--vocab-size", 9).exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_several_settings_vary_together(tmp_path: Path) -> None:
    varied = "[sweep.zip]\nencoder_layers = [1, 2]\ndecoder-layers = [1, 4]\n[sweep.grid]\n"
    varied += "shape = [{ d_model = 16, d_ff = 32 }, { d_model = 32, d_ff = 64 }]\n"
    assert names(tmp_path, varied) == [
        "encoder_layers=1,decoder_layers=1,d_model=16,d_ff=32",
        "encoder_layers=1,decoder_layers=1,d_model=32,d_ff=64",
        "encoder_layers=2,decoder_layers=4,d_model=16,d_ff=32",
        "encoder_layers=2,decoder_layers=4,d_model=32,d_ff=64",
    ]


@pytest.mark.slow
def test_named_runs_have_their_names_and_commands_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    varied = "[sweep]\nsave_dir = 'there'\nseeds = [1]\n[sweep.runs]\nbase = {}\n"
    varied += (
        "other = { arch = 'gnmt_small', metrics = ['bleu', 'chrf'], patience = 'none', adam_betas = [0.9, 0.98] }\n"
    )
    file = file_of(tmp_path, varied)
    said = sweep(file, "--dry-run", "--", "--threads", "1")
    assert said.exit_code == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[0] == "# base,seed=1" and lines[2] == "# other,seed=1"
    flags = "--arch gnmt_small --metrics bleu,chrf --patience none --adam-betas 0.9,0.98 --seed 1 --save-dir"
    assert lines[3] == f"nmtkit train --config {file} {flags} {tmp_path}/there/other,seed=1 --threads 1"
    monkeypatch.setattr("nmtkit.experiments.estimate.product_ceiling", lambda *_, **__: 1e11)  # measured for 0.2 s
    for line in lines[1::2]:  # each is a command that train takes
        assert CliRunner().invoke(main, [*shlex.split(line)[1:], "--dry-run", "--vocab-size", "99"]).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name]


def test_random_draws_are_within_their_ranges_and_more_draws_keep_the_first(tmp_path: Path) -> None:
    varied = "[sweep.random]\ndraws = {}\nseed = 3\nlr = {{ min = 1e-4, max = 1e-2, log = true }}\n"
    varied += "heads = [1, 2, 4]\nd_ff = {{ min = 16, max = 64 }}\n"
    few, many = (sweeps.read(file_of(tmp_path, varied.format(count))).runs() for count in (5, 200))
    assert many[:5] == few
    rates = [run.settings["lr"] for run in many]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert sum(rate < 1e-3 for rate in rates) == pytest.approx(100, abs=5 * math.sqrt(50))  # half of the logarithms
    assert {type(run.settings["d_ff"]) for run in many} == {int}
    assert {run.settings["heads"] for run in many} == {1, 2, 4}


def test_random_draws_that_coincide_are_drawn_again(tmp_path: Path) -> None:
    varied = "[sweep.random]\ndraws = {}\nheads = [1, 2]\nd_ff = {{ min = 16, max = 18 }}\n"
    few, all_six = (names(tmp_path, varied.format(count)) for count in (4, 6))
    assert sorted(all_six) == [f"heads={heads},d_ff={d_ff}" for heads in (1, 2) for d_ff in (16, 17, 18)]
    assert all_six[:4] == few


def test_shards_share_the_runs_out(tmp_path: Path) -> None:
    file = file_of(tmp_path, "[sweep]\nseeds = [1, 2, 3, 4, 5]\n")
    parts = [sweep(file, "--dry-run", "--shard", f"{part}/2").stdout.splitlines()[::2] for part in (1, 2)]
    assert sorted(parts[0] + parts[1]) == [f"# seed={seed}" for seed in (1, 2, 3, 4, 5)]
    assert re.search("--shard .*3/2", sweep(file, "--shard", "3/2").stderr)


@pytest.mark.parametrize(
    ("only", "made"),
    [
        ("a*", ["a,seed=1", "a,seed=2"]),
        ("b,seed=2", ["b,seed=2"]),
        ("a,seed=1,b*", ["a,seed=1", "b,seed=1", "b,seed=2"]),
    ],
)
def test_some_runs_alone_are_made_by_name(tmp_path: Path, only: str, made: list[str]) -> None:
    file = file_of(tmp_path, "[sweep]\nseeds = [1, 2]\n[sweep.runs]\na = {}\nb = { lr = 0.1 }\n")
    assert sweep(file, "--dry-run", "--only", only).stdout.splitlines()[::2] == [f"# {name}" for name in made]
    assert "--only c matches no" in sweep(file, "--only", "c").stderr


@pytest.mark.parametrize(
    ("varied", "said"),
    [
        ("", "has no table [sweep]"),
        ("[sweep]\n", "nothing varies; give seeds"),
        ("[sweep]\nseed = [1]\n", "mean 'seeds'"),
        ("[sweep]\nseeds = []\n", "seeds of [sweep] is"),
        ("[sweep]\nseeds = [1, 1]\n", "two runs have the"),
        ("[sweep.grid]\nlr = []\n", "lr of [sweep.grid] is"),
        ("[sweep.grid]\nlr = 0.1\n", "lr of [sweep.grid] is 0.1"),
        ("[sweep.grid]\ndroput = [0.1]\n", "mean 'dropout'"),
        ("[sweep.grid]\narch = ['transformer_tin']\n", "unknown architecture 'transformer_tin'"),
        ("[sweep.grid]\nheads = ['two']\n", "heads: 'two' is not"),
        ("[sweep.grid]\ndropout = [0.1, 1.5]\n", "run dropout=1.5: --dropout is"),
        ("[sweep.grid]\nsave_dir = ['a', 'b']\n", "save_dir cannot vary"),
        ("[sweep.zip]\nlr = [1, 2]\nheads = [1]\n", "lr has 2, heads has"),
        ("[sweep]\nseeds = [1]\n[sweep.grid]\nseed = [1, 2]\n", "[sweep.grid] and seeds both"),
        ("[sweep.grid]\nlr = [1]\n[sweep.zip]\nlr = [1]\n", "[sweep.zip] and [sweep.grid] both"),
        ("[sweep.random]\nlr = [1, 2]\n", "[sweep.random] needs draws"),
        ("[sweep.random]\ndraws = 2\nlr = { min = 2, max = 1 }\n", "lr of [sweep.random]: min"),
        ("[sweep.random]\ndraws = 2\nlr = { min = 0.1, max = inf }\n", "lr of [sweep.random]: min"),
        ("[sweep.random]\ndraws = 2\nlr = { min = -inf, max = 0.1 }\n", "lr of [sweep.random]: min"),
        ("[sweep.random]\ndraws = 5\nheads = [1, 2]\nd_ff = { min = 16, max = 17 }\n", "only 4 different combinations"),
        ("[sweep.random]\ndraws = 2\nlr = { low = 1 }\n", "{ min = X, max"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_before_anything_runs(tmp_path: Path, varied: str, said: str) -> None:
    result = sweep(file_of(tmp_path, varied))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr
    assert said in result.stderr and "mine.sweep.toml" in result.stderr
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_finished_runs_stay_interrupted_ones_resume_and_failed_ones_are_reported(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    varied = "[sweep]\nseeds = [1, 2]\n[sweep.runs]\nbase = {}\nbroken = { freeze = ['nothing.*'] }\n"
    file = file_of(tmp_path, varied, mirror_data)
    folder = tmp_path / "runs" / "mine"
    stopped = f"train --config {file} --seed 2 --max-update 3 --save-dir {folder}/base,seed=2"
    assert CliRunner().invoke(main, stopped.split()).exit_code == 0
    result = sweep(file)
    assert result.exit_code == 1, result.stderr
    assert len(within_this_process) == 4
    assert "broken,seed=1: --freeze nothing.*" in result.stderr
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("base")]
    assert "±" in row and "finished" in row
    assert checkpoint.load(folder / "base,seed=2" / "last.pt")["update"] == 4
    log = [json.loads(line) for line in (folder / "base,seed=2" / "log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in log if line["kind"] == "train"] == [1, 2, 3, 4]
    within_this_process.clear()
    assert "already finished" in sweep(file).stderr
    assert [Path(words[-1]).name for words in within_this_process] == ["broken,seed=1", "broken,seed=2"]
    file.write_text(file.read_text().replace("max_update = 4", "max_update = 5"))
    within_this_process.clear()
    sweep(file)
    assert len(within_this_process) == 4
    assert checkpoint.load(folder / "base,seed=1" / "last.pt")["update"] == 5


@pytest.mark.slow
def test_a_finished_run_of_another_dataset_is_not_taken_for_this_one(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    shutil.copytree(mirror_data, tmp_path / "data-bin")
    file = file_of(tmp_path, "[sweep]\nseeds = [1]\n")
    assert sweep(file).exit_code == 0
    assert "already finished" in sweep(file).stderr
    write_corpus(tmp_path / "other", 100, seed=9)
    shutil.rmtree(tmp_path / "data-bin")
    make = ["preprocess", "-s", "xx", "-t", "yy", "--trainpref", tmp_path / "other", "--validpref", tmp_path / "other"]
    make += ["--destdir", tmp_path / "data-bin", "--tokenizer-from", mirror_data]
    assert CliRunner().invoke(main, [*map(str, make)]).exit_code == 0
    again = sweep(file)
    assert again.exit_code == 1 and "already finished" not in again.stderr
    assert "failed: seed=1:" in again.stderr and "dataset" in again.stderr


@pytest.mark.slow
def test_a_finished_run_without_a_valid_set_is_finished(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    write_corpus(tmp_path / "other", 100, seed=9)
    make = ["preprocess", "-s", "xx", "-t", "yy", "--trainpref", tmp_path / "other", "--workers", 1]
    make += ["--destdir", tmp_path / "data-bin", "--tokenizer-from", mirror_data]
    assert CliRunner().invoke(main, [*map(str, make)]).exit_code == 0
    file = file_of(tmp_path, "[sweep]\nseeds = [1]\n")
    file.write_text(file.read_text().replace("validate_interval_updates = 2\nmetrics = []\n", ""))
    assert sweep(file).exit_code == 0
    assert "already finished" in sweep(file).stderr and len(within_this_process) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("clip_norm = 1.0", "clip_norm = 2.0", "clip_norm"),
        ("patience = 9", "patience = 8", "patience"),
        ("max_update = 4", "max_update = 3", "max_update"),
        ("max_update = 4", "max_update = 5\nmax_epoch = 9", None),
        ("valid_sentences = 5", 'valid_sentences = "none"', "valid_sentences"),
        ("max_tokens = 200", "max_tokens = 200\nupdate_freq = 2", "batch_tokens"),
        ("log_interval = 1", "log_interval = 2", None),
    ],
)
def test_a_finished_run_with_other_settings_is_not_taken_for_this_one(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]], old: str, new: str, said: str | None
) -> None:
    file = file_of(tmp_path, "[sweep]\nseeds = [1]\n", mirror_data)
    more = "[run]\nclip_norm = 1.0\npatience = 9\nvalid_sentences = 5\n"
    file.write_text(file.read_text().replace("[run]\n", more))
    assert sweep(file).exit_code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "runs/mine/seed=1").iterdir() if path.is_file()}
    assert "already finished" in sweep(file).stderr
    file.write_text(file.read_text().replace(old, new))
    again = sweep(file)
    if said is None:
        assert again.exit_code == 0, again.stderr
    else:
        assert again.exit_code == 1 and "already finished" not in again.stderr
        assert said in again.stderr and "save_dir" in again.stderr, again.stderr
        assert files == {path: path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_finished_run_of_other_plug_in_code_is_not_taken_for_this_one(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    (tmp_path / "mine.py").write_text("LOSS = 1\n")
    file = file_of(tmp_path, "[sweep]\nseeds = [1]\n", mirror_data)
    file.write_text(file.read_text().replace("[run]", '[run]\nplugin = ["mine.py"]'))
    assert sweep(file).exit_code == 0
    assert "already finished" in sweep(file).stderr
    (tmp_path / "mine.py").write_text("LOSS = 2\n")
    for loaded in (sys.modules, plugins._digests):  # like a new process
        loaded.pop(plugins.plugin_module(str(tmp_path / "mine.py")))
    within_this_process.clear()
    assert "already finished" not in sweep(file).stderr
    assert len(within_this_process) == 1  # training warns of the change


def test_a_setting_with_many_digits_stays_the_same(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    file = file_of(tmp_path, "[lr_scheduler]\nlr = 0.00070710678\n[sweep]\nseeds = [1]\n", mirror_data)
    assert sweep(file).exit_code == 0
    assert "already finished" in sweep(file).stderr
    file.write_text(file.read_text().replace("0678", "0679"))
    assert re.search(r"lr +0\.00070710678 +0\.00070710679\n", sweep(file).stderr)


@pytest.mark.slow
def test_a_finished_run_of_another_base_is_not_taken_for_this_one(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    tokenizer = Dataset.open(mirror_data).tokenizer
    save_tiny_transformer(tmp_path / "base.pt", tokenizer, seed=1)
    file = tmp_path / "mine.sweep.toml"
    run = BASE[: BASE.index("[architecture]")].format(data=mirror_data)
    file.write_text(f'{run}finetune_from = "base.pt"\n[sweep]\nseeds = [1]\n')
    assert sweep(file).exit_code == 0
    assert "already finished" in sweep(file).stderr
    save_tiny_transformer(tmp_path / "base.pt", tokenizer, seed=2)
    again = sweep(file)
    assert again.exit_code == 1 and "already finished" not in again.stderr
    assert "finetune_from" in again.stderr and "save_dir" in again.stderr


@pytest.mark.slow
def test_a_finished_run_of_another_teacher_is_not_taken_for_this_one(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    tokenizer = Dataset.open(mirror_data).tokenizer
    save_tiny_transformer(tmp_path / "teacher.pt", tokenizer, seed=1)
    criterion = '[criterion]\nname = "kd_cross_entropy"\nteacher = ["teacher.pt"]\n'
    file = file_of(tmp_path, criterion + "[sweep]\nseeds = [1]\n", mirror_data)
    assert sweep(file).exit_code == 0
    assert "already finished" in sweep(file).stderr
    save_tiny_transformer(tmp_path / "teacher.pt", tokenizer, seed=2)
    again = sweep(file)
    assert again.exit_code == 1 and "already finished" not in again.stderr
    assert re.search(r"teacher +\S*teacher\.pt \(\w{12}\) +\S*teacher\.pt \(\w{12}\)", again.stderr)


def test_the_contents_of_all_inputs_of_a_run_are_identified(tmp_path: Path) -> None:
    folder, vectors = tmp_path / "teacher", tmp_path / "vectors.txt"
    settings = {"teacher_probabilities": folder, "encoder_embed_path": vectors}
    job = JobConfig.read(names={"criterion": "kd_cross_entropy"}, settings=settings)
    assert input_fingerprints(job) == {}  # the run names the missing files
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    vectors.write_text("a 1 2\n")
    before = input_fingerprints(job)
    assert set(before) == set(settings) and set(input_fingerprints(job, ("read",))) == {"teacher_probabilities"}
    (folder / "manifest.json").write_text('{"teachers": [1]}')
    vectors.write_text("a 1 3\n")
    now = input_fingerprints(job)
    assert all(now[name] != before[name] for name in settings)


def test_a_run_that_the_system_killed_has_failed(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "run", lambda self, command, watch=None: 128 + signal.SIGKILL)
    result = sweep(file_of(tmp_path, "[sweep]\nseeds = [1]\n", mirror_data))
    assert result.exit_code == 1
    assert "seed=1: ended by SIGKILL" in result.stderr


def test_the_exit_code_of_a_killed_process_is_that_of_a_shell(tmp_path: Path) -> None:
    (tmp_path / "kills_itself.py").write_text("import os; os.kill(os.getpid(), 9)")
    with contextlib.chdir(tmp_path):
        assert Runner().run(["kills_itself"]) == 128 + signal.SIGKILL


def test_a_signal_between_two_runs_ends_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").touch()
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))  # of the sweep's process
    try:
        with contextlib.chdir(tmp_path):
            assert Runner().run(["nothing"]) == 0
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_a_signal_at_the_start_of_a_run_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    popen = subprocess.Popen

    def signalled(*arguments: Any, **keywords: Any) -> Any:
        process = popen(*arguments, **keywords)
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", signalled)
    with contextlib.chdir(tmp_path):
        runner = Runner()
        assert runner.run(["sleeps"]) == 128 + signal.SIGTERM
    assert runner.received == signal.SIGTERM


@pytest.mark.slow
def test_a_run_ends_if_the_study_fails_that_watches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: started.append(popen(*words, **more)) or started[0])

    def fail() -> bool:
        raise OSError("the disk is full")

    with contextlib.chdir(tmp_path), pytest.raises(OSError, match="full"):
        Runner().run(["sleeps"], fail)
    assert started[0].wait(30) == -signal.SIGTERM


def test_the_report_does_not_replace_the_sweep_file(mirror_data: Path, tmp_path: Path) -> None:
    file = file_of(tmp_path, "[sweep]\nseeds = [1]\n", mirror_data)
    before = file.read_text()
    result = sweep(file, "--report", file)
    assert result.exit_code == 2 and "overwrite a file which" in result.stderr
    assert file.read_text() == before


def test_a_figure_that_cannot_be_written_is_refused_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path, "[sweep]\nseeds = [1, 2]\nbase = 'base'\n")
    monkeypatch.setattr(sweeps, "read", lambda file: pytest.fail("the sweep was read"))
    refused = sweep(file, "--plot", tmp_path / "plot.txt")
    assert refused.exit_code == 2 and ".svg" in refused.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    missing = sweep(file, "--plot", tmp_path / "plot.svg")
    assert missing.exit_code == 2 and "nmtkit[plots]" in missing.stderr


def test_a_byte_order_mark_and_line_ends_of_windows_change_no_sweep(tmp_path: Path) -> None:
    file = file_of(tmp_path, "[sweep]\nseeds = [1, 2]\n")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert [run.name for run in sweeps.read(file).runs()] == ["seed=1", "seed=2"]


@pytest.mark.slow
def test_data_and_components_vary_too(mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]) -> None:
    (tmp_path / "one").symlink_to(mirror_data)
    (tmp_path / "two").symlink_to(mirror_data)
    varied = "[sweep.grid]\ndata = ['one', 'two']\nlr-scheduler = ['fixed', 'cosine']\n"
    result = sweep(file_of(tmp_path, varied), "--", "--warmup-updates", "1", "--max-update", "2", "-q")
    assert result.exit_code == 0, result.stderr
    configs = [path.read_text() for path in sorted(tmp_path.glob("runs/mine/*/config.toml"))]
    assert len(configs) == 4 and ['data = "../../../two"' in text for text in configs] == [False, False, True, True]
    assert ['name = "cosine"' in text for text in configs] == [True, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_a_signal_stops_the_sweep_and_the_same_command_goes_on(
    mirror_data: Path, tmp_path: Path, number: signal.Signals, processes: int
) -> None:
    file = file_of(tmp_path, "[sweep]\nseeds = [1, 2]\n", mirror_data)
    command = [sys.executable, "-m", "nmtkit", "sweep", str(file)]
    more = ["--threads", "1", "--nproc-per-node", str(processes)]
    stop_at = ["--", *more, "--max-update", "100000"]
    process = subprocess.Popen([*command, *stop_at], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "update 20/" in line:
            break
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(600) == 128 + number
    assert re.search(rf"{number.name}\. To continue: \S*{Path(sys.executable).name} -m nmtkit sweep", rest)
    assert [path.name for path in (tmp_path / "runs" / "mine").iterdir()] == ["seed=1"]
    assert subprocess.run([*command, "--", *more, "--max-update", "60"], check=False).returncode == 0
    logs = [path.read_text() for path in sorted((tmp_path / "runs" / "mine").glob("*/log.jsonl"))]
    assert len(logs) == 2 and '"kind": "resume"' in logs[0]


@pytest.mark.slow
def test_optuna_searches_prunes_and_goes_on(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    pytest.importorskip("optuna")
    varied = "[sweep]\nseeds = [7]\n[sweep.random]\ndraws = {}\n"
    varied += "lr = {{ min = 1e-4, max = 1e-2, log = true }}\nheads = [1, 2]\n"
    result = sweep(file_of(tmp_path, varied.format(3), mirror_data), "--optuna")
    assert result.exit_code == 0, result.stderr
    assert len(within_this_process) == 3
    result = sweep(file_of(tmp_path, varied.format(5), mirror_data), "--optuna", "--format", "json")
    assert result.exit_code == 0, result.stderr
    assert len(within_this_process) == 5
    rows = json.loads(result.stdout)
    assert len(rows) == 5 and rows[0]["best"]["loss"]["value"] == min(row["best"]["loss"]["value"] for row in rows)
    assert all(1e-4 <= row["settings"]["lr"] <= 1e-2 for row in rows)


@pytest.mark.slow
def test_optuna_follows_a_score_of_another_subset(
    mirror_data: Path, tmp_path: Path, within_this_process: list[list[str]]
) -> None:
    pytest.importorskip("optuna")
    varied = "[sweep.random]\ndraws = 2\nlr = { min = 1e-4, max = 1e-2, log = true }\n"
    file = file_of(tmp_path, varied, mirror_data)
    more = 'valid_subset = ["valid", "test"]\nbest_checkpoint_metric = "loss@test"\n[architecture]'
    file.write_text(file.read_text().replace("[architecture]", more))
    result = sweep(file, "--optuna", "--format", "json")
    assert result.exit_code == 0, result.stderr
    losses = [row["best"]["loss@test"]["value"] for row in json.loads(result.stdout)]
    assert len(losses) == 2 and losses == sorted(losses)


@pytest.mark.parametrize(("score", "refused"), [("loss", True), ("nll", False)])
def test_optuna_compares_no_losses_of_different_label_smoothing(tmp_path: Path, score: str, refused: bool) -> None:
    pytest.importorskip("optuna")
    file = file_of(tmp_path, "[sweep.random]\ndraws = 2\nlabel_smoothing = { min = 0.0, max = 0.3 }\n")
    file.write_text(file.read_text().replace("[architecture]", f'best_checkpoint_metric = "{score}"\n[architecture]'))
    result = sweep(file, "--optuna", "--dry-run")
    assert result.exit_code == (2 if refused else 0) and ("--label-smoothing" in result.stderr) == refused


def test_what_falls_behind_is_ended_and_what_was_interrupted_comes_first(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    from nmtkit.experiments.optuna_study import OptunaStudy

    varied = "[sweep.random]\ndraws = 12\nlr = { min = 1e-4, max = 1.0, log = true }\n"
    sweep = sweeps.read(file_of(tmp_path, varied))
    updates: dict[str, int] = {}

    def attempt(run: sweeps.SweepRun, go_on: Callable[[], bool]) -> str | None:
        """A run whose loss is the distance of its learning rate from 0.01, in decades."""
        log = sweep.folder / run.name / "log.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        loss = abs(math.log10(run.settings["lr"]) + 2)
        for update in (1, 2, 3):
            with log.open("a") as file:
                file.write(json.dumps({"kind": "valid", "update": update, "loss": loss / update}) + "\n")
            updates[run.name] = update
            if not go_on():
                break
        return None

    def interrupted(run: sweeps.SweepRun, go_on: Callable[[], bool]) -> str | None:
        attempt(run, go_on)
        if len(updates) == 7:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        OptunaStudy(sweep).run(interrupted)
    last = list(updates)[-1]
    updates.pop(last)
    assert OptunaStudy(sweep).run(attempt) == {}
    assert len(updates) == 12 and list(updates)[6] == last
    assert set(list(updates.values())[:5]) == {3} and 1 in updates.values()  # the first five set the median
    best = OptunaStudy(sweep).runs()[0]
    assert updates[best.name] == 3


def test_the_sweep_of_the_page_makes_the_runs_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "lr.toml").write_text(block)
    said = sweep(tmp_path / "lr.toml", "--dry-run").stdout
    assert said.count("nmtkit train") == 12
    assert f"--save-dir {tmp_path}/runs/lr/lr=0.001,dropout=0.1,seed=1\n" in said


def test_a_run_that_is_trained_to_its_end_is_not_pruned() -> None:
    pytest.importorskip("optuna")
    from nmtkit.experiments.optuna_study import TrialMonitor

    class Trial:
        def report(self, score: float, update: int) -> None:
            pass

        def should_prune(self) -> bool:
            return len(scores) > 1

    scores = [(1, 3.0)]
    monitor = TrialMonitor(Trial(), lambda: scores)
    assert monitor.should_continue()
    scores.append((2, 2.0))
    monitor.report()
    assert monitor.scores == [3.0, 2.0] and not monitor.pruned


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    varied = "[sweep.random]\ndraws = 2\nlr = { min = 1e-4, max = 1e-2 }\n"
    assert "pip install 'nmtkit[optuna]'" in sweep(file_of(tmp_path, varied), "--optuna").stderr


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("freeze", [[], ["encoder.*", "decoder.*"]]),
        ("sampling_weights", [[], ["en-de=2"]]),
        ("weight_decay_for", [[], ["encoder.*=0.1"]]),
        ("decoder_tied_layers", [[], [1]]),
        ("metrics", [[], ["bleu"]]),
        ("transforms", [[], ["bpe_dropout"]]),
        ("patience", ["none", 3]),
        ("pre_norm", [False, True]),
        ("teacher", [["a.pt", "b,c.pt"], ["a.pt"]]),
    ],
)
def test_the_command_of_a_run_is_read_as_the_job_of_the_run(
    name: str, values: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[JobConfig] = []
    monkeypatch.setattr("nmtkit.cli.train._train", lambda job, arguments: jobs.append(job) or 0)
    varied = "[criterion]\nname = 'kd_cross_entropy'\nteacher = ['t.pt']\n" if name == "teacher" else ""
    for teacher in ("t.pt", "a.pt", "b,c.pt"):
        (tmp_path / teacher).touch()
    file = file_of(tmp_path, f"{varied}[sweep.grid]\n{name} = [{', '.join(map(json.dumps, values))}]\n")
    read = sweeps.read(file)
    runs = read.runs()
    assert len({run.name for run in runs}) == len(values) and not any(run.name.endswith("=") for run in runs)
    for run in runs:
        result = CliRunner().invoke(main, read.command(run)[1:])
        assert result.exit_code == 0, result.output
        assert jobs[-1] == read.job(run)
