"""The recipes in examples/: the download survives interruptions, and every config has the settings of its paper."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.models.building import from_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
WMT14 = EXAMPLES / "wmt14"


# --- download.py ----------------------------------------------------------------------------------------------------


class Server:
    """Serves `files`. For each entry of `cut`, one answer ends after so many bytes."""

    def __init__(self, files):
        self.files, self.cuts, self.ranges, self.knows_ranges = files, [], [], True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *arguments):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, handler):
        content = self.files.get(handler.path.lstrip("/"))
        if content is None:
            handler.send_error(404)
            return
        asked = handler.headers.get("Range")
        self.ranges.append(asked)
        start = int(re.search(r"\d+", asked)[0]) if asked and self.knows_ranges else 0
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        rest = content[start:]
        handler.wfile.write(rest[: self.cuts.pop(0)] if self.cuts else rest)


def tar_of(members, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


NOISE = bytes(range(256)) * 40  # so that an archive is large enough to be cut
TRAIN = {"training/a.de-en.en": b"one\rstill one\ntwo\n", "training/a.de-en.de": b"eins\nzwei\n", "training/big": NOISE}
GIGA = {"b.en.gz": gzip.compress(b"x\ny\nz"), "b.de.gz": gzip.compress(b"u\nv\nw\n")}
SGM = {
    "test/t-src.en.sgm": b'<doc>\n<seg id="1"> A  cat &amp; dog. </seg>\n<seg id="2">Two</seg>\n</doc>\n',
    "test/t-ref.de.sgm": b'<doc>\n<seg id="1">Katze</seg>\n<seg id="2">Zwei</seg>\n</doc>\n',
}


@pytest.fixture
def site(tmp_path):
    files = {"train.tgz": tar_of(TRAIN), "giga.tar": tar_of(GIGA, "w"), "test.tgz": tar_of(SGM)}
    server = Server(files)
    rows = [
        ("a", "train", "training/a.de-en.en", "training/a.de-en.de", 2),
        ("b", "giga", "b.en.gz", "b.de.gz", 3),
        ("t", "test", "test/t-src.en.sgm", "test/t-ref.de.sgm", 2),
    ]
    md5 = hashlib.md5(files["test.tgz"]).hexdigest()
    toml = f'archives.train.url = "{server.url}/train.tgz"\narchives.giga.url = "{server.url}/giga.tar"\n'
    toml += f'archives.test = {{ url = "{server.url}/test.tgz", md5 = "{md5}" }}\n'
    for name, archive, en, de, lines in rows:
        toml += f'[[texts]]\npair = "en-de"\nname = "{name}"\narchive = "{archive}"\n'
        toml += f'members = {{ en = "{en}", de = "{de}" }}\nlines = {lines}\ncounted_by = "me"\n'
    (tmp_path / "corpora.toml").write_text(toml)
    yield server, tmp_path
    server.server.shutdown()
    server.server.server_close()


def download(folder, *arguments):
    command = [sys.executable, WMT14 / "download.py", "en-de", "--folder", folder / "data"]
    command += ["--corpora", folder / "corpora.toml", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_download_that_breaks_off_goes_on_where_it_stopped(site):
    server, folder = site
    server.cuts = [300, 200]
    assert download(folder).returncode == 0
    assert server.ranges[:3] == [None, "bytes=300-", "bytes=500-"]
    record = json.loads((folder / "data/archives/downloads.json").read_text())
    for name, content in server.files.items():
        assert (folder / "data/archives" / name).read_bytes() == content
        assert record[name]["sha256"] == hashlib.sha256(content).hexdigest()
        assert record[name]["bytes"] == len(content)


def test_a_server_without_ranges_is_asked_for_the_whole_again(site):
    server, folder = site
    server.knows_ranges, server.cuts = False, [300]
    assert download(folder).returncode == 0
    assert (folder / "data/archives/train.tgz").read_bytes() == server.files["train.tgz"]


def test_texts_are_unpacked_with_their_lines_intact_and_a_second_run_fetches_nothing(site):
    server, folder = site
    assert download(folder).returncode == 0
    texts = {path.name: path.read_bytes() for path in (folder / "data/en-de").iterdir()}
    assert texts == {
        "a.en": b"one\rstill one\ntwo\n",
        "a.de": b"eins\nzwei\n",
        "b.en.gz": GIGA["b.en.gz"],
        "b.de.gz": GIGA["b.de.gz"],
        "t.en": b"A cat &amp; dog.\nTwo\n",
        "t.de": b"Katze\nZwei\n",
    }
    asked = len(server.ranges)
    second = download(folder)
    assert second.returncode == 0 and len(server.ranges) == asked
    assert "a.en: 2 lines" in second.stdout


def test_an_unexpected_line_count_stops_unless_accepted(site):
    _, folder = site
    corpora = folder / "corpora.toml"
    corpora.write_text(corpora.read_text().replace("lines = 3", "lines = 4"))
    result = download(folder)
    assert result.returncode == 1 and "b.en.gz has 3 lines; 4" in result.stderr
    assert download(folder, "--accept-counts").returncode == 0


def test_an_archive_that_changed_or_is_not_the_published_one_is_refused(site):
    server, folder = site
    assert download(folder).returncode == 0
    (folder / "data/archives/train.tgz").unlink()
    server.files["train.tgz"] = tar_of({**TRAIN, "extra": b"1"})
    changed = download(folder)
    assert changed.returncode == 1 and "at the first download" in changed.stderr

    server.files["test.tgz"] = tar_of({**SGM, "extra": b"1"})
    (folder / "data/archives/train.tgz").unlink()
    (folder / "data/archives/test.tgz").unlink()
    (folder / "data/archives/downloads.json").unlink()
    assert "was published" in download(folder).stderr


def test_a_missing_archive_is_named(site):
    server, folder = site
    del server.files["giga.tar"]
    assert "404" in download(folder).stderr


def test_the_corpora_add_up_to_what_is_known_of_them():
    texts = tomllib.loads((WMT14 / "corpora.toml").read_text())["texts"]
    trained = {
        pair: sum(text["lines"] for text in texts if text["pair"] == pair and "newstest" not in text["name"])
        for pair in ("en-de", "en-fr")
    }
    assert trained == {"en-de": 4_520_620, "en-fr": 40_842_333}
    assert all(text["counted_by"] for text in texts)


# --- configs --------------------------------------------------------------------------------------------------------


def resolved(path):
    from nmtkit.training.config import JobConfig

    return JobConfig.read(path)


# Table 3 of the paper, as changes to its base model
ROWS = {
    "base": {},
    "A_heads_1": {"heads": 1},
    "A_heads_4": {"heads": 4},
    "A_heads_16": {"heads": 16},
    "A_heads_32": {"heads": 32},
    "B_key_16": {"d_key": 16, "d_value": 64},
    "B_key_32": {"d_key": 32, "d_value": 64},
    "C_layers_2": {"encoder_layers": 2, "decoder_layers": 2},
    "C_layers_4": {"encoder_layers": 4, "decoder_layers": 4},
    "C_layers_8": {"encoder_layers": 8, "decoder_layers": 8},
    "C_width_256": {"d_model": 256},
    "C_width_1024": {"d_model": 1024},
    "C_inner_1024": {"d_ff": 1024},
    "C_inner_4096": {"d_ff": 4096},
    "D_dropout_0.0": {"dropout": 0.0},
    "D_dropout_0.2": {"dropout": 0.2},
    "D_smoothing_0.0": {},
    "D_smoothing_0.2": {},
    "E_learned_positions": {"positions": "learned"},
    "big": {"d_model": 1024, "d_ff": 4096, "heads": 16, "dropout": 0.3},
}


def rows_of(path):
    """Returns the tables of each named run of a sweep."""
    from nmtkit.experiments.sweep import read

    sweep = read(path)
    assert sweep.seeds == (1, 2, 3)
    assert [run.name for run in sweep.runs()] == [f"{name},seed={seed}" for name in sweep.named for seed in sweep.seeds]
    return {name: sweep.job(sweep.run({}, name)).tables() for name in sweep.named}


def test_there_is_one_run_for_each_row_of_table_3_and_it_is_that_row():
    rows = rows_of(WMT14 / "table3.sweep.toml")
    assert rows.keys() == ROWS.keys()
    base = rows["base"]
    assert base["architecture"]["d_model"] == 512 and base["architecture"]["dropout"] == 0.1
    for row, changes in ROWS.items():
        tables = rows[row]
        architecture = {**base["architecture"], **changes}
        architecture["name"] = "transformer_big" if row == "big" else "transformer_base"
        smoothing = {"D_smoothing_0.0": 0.0, "D_smoothing_0.2": 0.2}.get(row, 0.1)
        assert tables["architecture"] == architecture
        assert tables["criterion"] == {"name": "label_smoothed_cross_entropy", "label_smoothing": smoothing}
        assert tables["run"]["max_update"] == (300_000 if row == "big" else 100_000)
        assert tables["optimizer"] == base["optimizer"] and tables["lr-scheduler"] == base["lr-scheduler"]


@pytest.mark.parametrize("pair", ["en-de", "en-fr"])
@pytest.mark.parametrize(
    ("size", "updates", "interval", "averaged"), [("base", 100_000, 1500, 5), ("big", 300_000, 600, 20)]
)
def test_the_configs_of_table_2_are_sections_5_and_6_of_the_paper(pair, size, updates, interval, averaged):
    tables = resolved(WMT14 / f"configs/{pair}-{size}.toml").tables()
    run = tables["run"]
    assert run["batch_tokens"] == 25_000 and run["max_update"] == updates
    assert run["save_interval_updates"] == interval and run["keep_last"] == averaged
    # nothing but the schedule writes checkpoints, so that the last ones are equally far apart
    assert run["save_interval"] is None and run["save_interval_minutes"] is None and run["keep_best"] == 0
    assert f"{size}) last={averaged}" in (WMT14 / "evaluate.sh").read_text()
    assert tables["architecture"]["dropout"] == {"base": 0.1, "big": 0.3 if pair == "en-de" else 0.1}[size]
    assert tables["optimizer"]["adam_betas"] == [0.9, 0.98] and tables["optimizer"]["adam_eps"] == 1e-9
    assert tables["lr-scheduler"]["warmup_updates"] == 4000 and tables["lr-scheduler"]["lr"] is None


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_sound_bash(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert script.stat().st_mode & 0o111


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.sh")), ids=lambda path: path.name)
def test_no_variable_of_a_script_is_a_variable_of_the_shell(script):
    """In a terminal, bash sets LINES to the height of the terminal: a script that reads LINES would keep 50 lines."""
    assert not re.search(r"\$\{?(LINES|COLUMNS|SECONDS|RANDOM|HOSTNAME|UID)\b", script.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_table_marks_what_differs_from_the_base_by_more_than_its_seeds_do(tmp_path):
    results = {"base": [5.0, 5.2, 5.1], "A_heads_1": [5.25], "C_layers_2": [5.9]}
    for row, values in results.items():
        for seed, ppl in enumerate(values):
            folder = tmp_path / f"{row},seed={seed}"
            folder.mkdir()
            log = [{"kind": "start", "update": 0}, {"kind": "valid", "update": 5, "ppl": 9.0, "bleu": 1.0}]
            log += [{"kind": "valid", "update": 10, "ppl": ppl, "bleu": 30.0}]
            log += [{"kind": "end", "update": 10, "state": "finished", "reason": "--max-update"}]
            (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    command = [sys.executable, WMT14 / "table3.py", tmp_path]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["base", "A_heads_1", "C_layers_2"]
    assert "5.10 ± 0.10" in lines[1] and "*" not in lines[1]
    assert "*" not in lines[2]  # 0.15 from the mean of the base, whose seeds are 0.2 apart
    assert "5.90 *" in lines[3] and lines[3].split()[5] == "6.11"  # the paper's


def test_the_small_table_changes_one_thing_a_row_and_has_every_letter():
    rows = rows_of(EXAMPLES / "multi30k/table3.sweep.toml")
    base = rows.pop("base")
    assert {name[0] for name in rows} == set("ABCDE")
    for name, tables in rows.items():
        tables["run"]["save_dir"] = base["run"]["save_dir"]
        assert tables["run"] == base["run"] and tables["lr-scheduler"] == base["lr-scheduler"]
        changed = [key for key, value in tables["architecture"].items() if value != base["architecture"][key]]
        if name.startswith("B"):  # d_value keeps its width, which it would else take from d_key's default
            assert changed == ["d_key", "d_value"] and tables["architecture"]["d_value"] == 128 // 4
        elif "layers" in name:
            assert changed == ["encoder_layers", "decoder_layers"]
        else:
            assert len(changed) == (0 if "smoothing" in name else 1)


def test_the_multi30k_baseline_is_the_published_one():
    tables = resolved(EXAMPLES / "multi30k/baseline.toml").tables()
    assert tables["architecture"]["name"] == "transformer_tiny" and tables["architecture"]["dropout"] == 0.3
    assert tables["run"]["batch_tokens"] == 4096 and tables["run"]["max_epoch"] == 40
    assert tables["run"]["save_interval"] == 1 and tables["run"]["keep_last"] == 10
    assert tables["lr-scheduler"]["lr"] == 0.005 and tables["lr-scheduler"]["warmup_updates"] == 2000
    assert tables["criterion"]["label_smoothing"] == 0.1


def test_the_second_multi30k_recipe_goes_on_from_the_baseline_on_more_data():
    recipes = {path.stem: resolved(path).tables() for path in (EXAMPLES / "multi30k").glob("*.toml")}
    recipes.pop("table3.sweep")
    base, more, best = recipes.pop("baseline"), recipes.pop("diversified"), recipes.pop("best")
    assert best["run"]["max_epoch"] is None and best["criterion"]["name"] == "label_smoothed_cross_entropy"
    assert best["architecture"]["pre_norm"] and best["run"]["keep_last"] == 20
    assert not recipes  # a new recipe needs its own lines here
    assert {table: more[table] for table in ("architecture", "criterion", "optimizer")} == {
        table: base[table] for table in ("architecture", "criterion", "optimizer")
    }
    assert Path(more["run"]["finetune_from"]) == EXAMPLES / "multi30k/runs/baseline/averaged.pt"
    assert more["run"]["max_epoch"] is None


# a stand-in for nmtkit that records its commands
RECORDED = """#!{python}
import json, sys
from pathlib import Path

command, *rest = sys.argv[1:]
with open("{log}", "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
named = dict(zip(rest, rest[1:]))
if command == "preprocess":
    Path(named["--destdir"]).mkdir()
    Path(named["--destdir"], "manifest.json").touch()
"""

STUB = (
    RECORDED
    + """\
elif command == "train":
    Path(named["--save-dir"]).mkdir(parents=True, exist_ok=True)
elif "--output" in named:
    Path(named["--output"]).touch()
else:
    print("translated")
"""
)


@pytest.mark.slow
def test_the_scripts_of_multi30k_make_the_commands_of_its_recipes_once(tmp_path, monkeypatch):
    """Runs the script with a stand-in for nmtkit that records its commands, and checks that nmtkit has the flags."""
    folder, text, log = tmp_path / "multi30k", tmp_path / "text", tmp_path / "log"
    shutil.copytree(EXAMPLES / "multi30k", folder, ignore=shutil.ignore_patterns("data*", "runs"))
    text.mkdir()
    for name, lines in {"train": 29_000, "val": 1_014, "test_2016_flickr": 1_000}.items():
        for side in ("en", "de"):
            (text / f"{name}.{side}.gz").write_bytes(gzip.compress(b"a\n" * lines))
    (tmp_path / "nmtkit").write_text(STUB.format(python=sys.executable, log=log))
    (tmp_path / "nmtkit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MULTI30K", str(text))
    monkeypatch.chdir(folder)

    def commands(*script, **env):
        log.write_text("")
        subprocess.run(script, check=True, capture_output=True, env={**os.environ, **env})
        made = [json.loads(line) for line in log.read_text().splitlines()]
        for one in made:
            assert CliRunner().invoke(main, [*one, "--help"]).exit_code == 0, one
        return made

    made = commands("./diversify.sh", "--workers", "2")
    trained = [(one[1], one[one.index("--save-dir") + 1]) for one in made if one[0] == "train"]
    assert trained == [("data-bin", "runs/baseline"), ("data-bin-de-en", "runs/baseline-de-en")]
    assert made[-1][0] == "preprocess" and "--drop-duplicates" in made[-1]
    for prefix in made[-1][made[-1].index("--trainpref") + 1].split(","):
        name = Path(prefix).name
        assert all(list(Path(prefix).parent.glob(f"{name}.{side}*")) for side in ("en", "de")), prefix
    assert not commands("./diversify.sh")

    made = commands("./run.sh", "diversified", "--test", "--threads", "1")
    assert [one[0] for one in made] == ["train", "average-checkpoints", *["generate", "score"] * 2]
    assert all("data-bin-diversified" in one for one in made if one[0] != "average-checkpoints")
    shutil.rmtree(folder / "runs/baseline")
    made = commands("./run.sh", "diversified", RUN="other", DATA="other-bin")  # variables of the last training alone
    assert [(one[1], one[3], one[5]) for one in made if one[0] == "train"] == [
        ("data-bin", "baseline.toml", "runs/baseline"),
        ("data-bin-diversified", "diversified.toml", "runs/other"),
    ]
    made = commands("./run.sh", "best")  # the TOML file has a comment behind the number of checkpoints
    assert [one[one.index("--last") + 1] for one in made if one[0] == "average-checkpoints"] == ["20"]


@pytest.mark.slow
def test_every_step_of_the_best_recipe_can_be_left_out_and_is_made_once(tmp_path, monkeypatch):
    """Runs the script with a stand-in for nmtkit that records its commands, and checks that nmtkit has the flags."""
    folder, text, log = tmp_path / "multi30k", tmp_path / "text", tmp_path / "log"
    shutil.copytree(EXAMPLES / "multi30k", folder, ignore=shutil.ignore_patterns("data*", "runs"))
    text.mkdir()
    for name, lines in {"train": 29_000, "val": 1_014, "test_2016_flickr": 1_000}.items():
        for side in ("en", "de"):
            (text / f"{name}.{side}.gz").write_bytes(gzip.compress(b"a\n" * lines))
    (tmp_path / "nmtkit").write_text(STUB.format(python=sys.executable, log=log))
    (tmp_path / "nmtkit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MULTI30K", str(text))
    monkeypatch.chdir(folder)

    def commands(*flags, **env):
        log.write_text("")
        done = subprocess.run(["./best.sh", *flags], check=True, capture_output=True, env=os.environ | env, text=True)
        assert "core-hours so far: 0." in done.stderr
        return [json.loads(line) for line in log.read_text().splitlines()]

    def value(command, flag):
        return command[command.index(flag) + 1]

    made = commands("--test", "--threads", "1", TEACHERS="2", LATE_UPDATES="100")
    for one in made:
        assert CliRunner().invoke(main, [*one, "--help"]).exit_code == 0, one
    trained = {value(one, "--save-dir").removeprefix("runs/best/"): one for one in made if one[0] == "train"}
    assert list(trained) == ["en-de-1", "de-en-1", "en-de-2", "de-en-2", "main-1", "late-1"]
    assert all(value(one, "--threads") == "1" for one in trained.values())
    assert [value(trained[name], "--seed") for name in ("de-en-1", "de-en-2")] == ["1", "2"]
    assert value(trained["main-1"], "--criterion") == "label_smoothed_cross_entropy"
    assert value(trained["main-1"], "--dropout") == value(trained["late-1"], "--dropout") == "0.2"
    assert value(trained["main-1"], "--finetune-from") == "runs/best/en-de-1/averaged.pt"
    assert trained["main-1"][1] == "data-bin-best"
    assert value(trained["late-1"], "--finetune-from") == "runs/best/main-1/averaged.pt"
    assert value(trained["late-1"], "--transforms") == "bpe_dropout"
    sources = [value(one, "--input") for one in made if one[0] == "generate" and "--input" in one]
    assert [Path(source).name for source in sources] == ["train.en.gz", "train.de.gz"] * 2
    (last,) = [one for one in made if one[0] == "preprocess" and "--drop-duplicates" in one]
    prefixes = [str(text / "train"), *(f"data/best/{name}" for name in list(trained)[:4])]
    assert value(last, "--trainpref").split(",") == prefixes
    scored = [value(one, "--gen-subset") for one in made if one[0] == "score"]
    assert scored == ["valid", "valid", "test", "test"]

    made = commands(TEACHERS="2", SEEDS="1 2", START="random", LATE_UPDATES="100")
    main_run, late_run = (one for one in made if one[0] == "train")
    assert [value(one, "--save-dir") for one in (main_run, late_run)] == ["runs/best/main-2", "runs/best/late-2"]
    assert "--finetune-from" not in main_run
    assert value(late_run, "--finetune-from") == "runs/best/main-2/averaged.pt"
    switches = {"TEACHERS": "0", "CRITERION": "r_drop", "RUN": "plain", "VOCAB": "4000"}
    made = commands(**switches)
    assert "--finetune-from" not in made[1]
    assert [one[0] for one in made] == ["preprocess", "train", "average-checkpoints", "generate", "score", "score"]
    assert value(made[1], "--criterion") == "r_drop" and made[1][1] == "data-bin-4000"
    made = commands(**switches | {"RUN": "both", "BOTH_UPDATES": "100"})
    assert value(made[0], "--destdir") == "data-bin-both-both"
    assert value(made[3], "--finetune-from") == "runs/both/both-1/averaged.pt"
    assert (folder / "data/both/both.en").read_bytes().count(b"\n") == 58_000


STEPS = (
    RECORDED
    + """\
elif command == "clean":
    for side in ("en", "de"):
        Path(named["--output"] + "." + side).write_text("a\\n")
elif command == "merge":
    Path(named["--output"]).write_text('{{"source": "a", "hypotheses": ["b"]}}\\n')
elif command == "export":
    Path(rest[-1]).touch()
elif "--output" in named:
    Path(named["--output"]).parent.mkdir(exist_ok=True)
    Path(named["--output"]).touch()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["student", "backtranslation"])
def test_a_training_keeps_as_many_checkpoints_as_the_recipe_averages(recipe, tmp_path, monkeypatch):
    """Runs the first command of the page with a stand-in for nmtkit, and checks that nmtkit has the flags."""
    log = tmp_path / "log"
    (tmp_path / "nmtkit").write_text(STEPS.format(python=sys.executable, log=log))
    (tmp_path / "nmtkit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    save_tiny_transformer(Path("teacher.pt"), tiny_tokenizer())
    for name in ("train.en", "train.de", "mono.de"):
        Path(name).write_text("a\n")
    settings = {"SOURCE": "en", "TARGET": "de", "VALID": "val", "TEST": "test", "TEACHER": "teacher.pt"}
    settings |= {"TRAIN": "train", "BITEXT": "train", "MONO": "mono.de"}
    subprocess.run([EXAMPLES / recipe / "run.sh"], check=True, capture_output=True, env=os.environ | settings)
    made = [json.loads(line) for line in log.read_text().splitlines()]
    for one in made:
        assert CliRunner().invoke(main, [*one, "--help"]).exit_code == 0, one
    kept = [one[one.index("--keep-last") + 1] for one in made if one[0] == "train"]
    averaged = [one[one.index("--last") + 1] for one in made if one[0] == "average-checkpoints"]
    assert kept == averaged == ["8"] * {"student": 1, "backtranslation": 3}[recipe]
    assert made[-1][0] == "score"


TRAINED = """#!{python}
import json, shutil, sys
from pathlib import Path

command, *rest = sys.argv[1:]
with open("{log}", "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
folder = Path(rest[rest.index("--destdir" if command == "preprocess" else "--save-dir") + 1])
folder.mkdir()
(folder / "manifest.json").touch()
if command == "train":
    shutil.copy("{model}", folder / "last.pt")
    bleu = {{"bleu": 10.0 + len(folder.name), "bleu@valid1": 20.0 - len(folder.name)}}
    scores = {{**bleu, "loss": 3.0, "loss@valid1": 2.5}}
    records = [{{"kind": "start", "time": 60}}, {{"kind": "valid", **scores}}, {{"kind": "end", "time": 150}}]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))
"""


@pytest.mark.slow
def test_the_recipe_of_fine_tuning_splits_the_text_and_tunes_in_four_ways(tmp_path, monkeypatch):
    folder, text, log = tmp_path / "finetune", tmp_path / "text", tmp_path / "log"
    shutil.copytree(EXAMPLES / "finetune", folder, ignore=shutil.ignore_patterns("data*", "runs"))
    text.mkdir()
    english = ["A man sits .", "A woman runs .", "Two Boys swim .", "A dog .", "Women and men .", "A womanly manner ."]
    for name in ("train", "val"):
        for side in ("en", "de"):
            lines = "".join(f"{side} {index} {line}\n" for index, line in enumerate(english * 2))
            (text / f"{name}.{side}.gz").write_bytes(gzip.compress(lines.encode()))
    model = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())
    (tmp_path / "nmtkit").write_text(TRAINED.format(python=sys.executable, log=log, model=model))
    (tmp_path / "nmtkit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("MULTI30K", str(text))
    monkeypatch.chdir(folder)
    said = subprocess.run(["./run.sh", "--threads", "1"], check=True, capture_output=True, text=True).stdout
    read = {path.name: path.read_text().splitlines() for path in (folder / "data").iterdir()}
    assert [line[3:] for line in read["domain.train.en"]] == [f"{i} {english[i % 6]}" for i in (0, 2, 4, 6, 8, 10)]
    assert [line.split()[1] for line in read["general.val.de"]] == ["1", "3", "5", "7", "9", "11"]
    assert [line.split()[1] for line in read["some.train.de"]] == ["1", "9"]
    made = [json.loads(line) for line in log.read_text().splitlines()]
    for one in made:
        assert CliRunner().invoke(main, [*one, "--help"]).exit_code == 0, one
    trained = [(one[1], one[one.index("--save-dir") + 1]) for one in made if one[0] == "train"]
    tuned = [("domain-bin", "full"), ("domain-bin", "frozen"), ("domain-bin", "adapters"), ("mixed-bin", "mixed")]
    assert trained == [(f"runs/{data}", f"runs/{name}") for data, name in [("general-bin", "general"), *tuned]]
    table = said[said.index("| |") :].splitlines()
    assert len(table) == 7 and table[3].startswith("| all weights | 14.0 (-3.0) | 3.00 (+0.00) | 16.0 (+3.0) |")
    assert table[2].endswith("| 1.5 |")
    numbers = sum(parameter.numel() for parameter in from_checkpoint(model)[0].parameters())
    assert f"| {numbers:,} |" in table[3] and f"| {numbers - 330 * 16:,} |" in table[4]


IMPORTED = """#!{python}
import json, sys
from pathlib import Path

command, *rest = sys.argv[1:]
with open("{log}", "a") as log:
    log.write(json.dumps([command, *rest]) + "\\n")
made = {{"import": lambda: rest[1], "preprocess": lambda: rest[rest.index("--destdir") + 1] + "/manifest.json"}}
made["average-checkpoints"] = lambda: rest[rest.index("--output") + 1]
if command in made:
    path = Path(made[command]())
    path.parent.mkdir(exist_ok=True)
    path.touch()
"""


@pytest.mark.slow
def test_the_recipe_for_a_model_of_transformers_tunes_and_scores_it_on_both_sets(tmp_path, monkeypatch):
    folder, log = tmp_path / "finetune", tmp_path / "log"
    shutil.copytree(EXAMPLES / "finetune", folder, ignore=shutil.ignore_patterns("data*", "runs"))
    (folder / "data").mkdir()
    (folder / "data/domain.val.en").touch()
    (tmp_path / "nmtkit").write_text(IMPORTED.format(python=sys.executable, log=log))
    (tmp_path / "nmtkit").chmod(0o755)
    model = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MODEL", str(tmp_path))
    monkeypatch.chdir(folder)
    for _ in range(2):  # the second run repeats only the cheap steps
        subprocess.run(["./imported.sh", "--threads", "1"], check=True, capture_output=True, text=True)
    made = [json.loads(line) for line in log.read_text().splitlines()]
    names = [one[0] for one in made]
    assert [names.count(name) for name in ("import", "preprocess", "train", "average-checkpoints")] == [1, 1, 2, 2]
    assert names.count("generate") == 12 and names.count("score") == 4
    assert made[0][1:3] == [str(tmp_path), "runs/imported.pt"]
    for one in made:
        arguments = [str(model) if word == "runs/imported.pt" and one[0] == "train" else word for word in one]
        assert CliRunner().invoke(main, [*arguments, "--help"]).exit_code == 0, one


# --- dry runs -------------------------------------------------------------------------------------------------------


def flop_of_an_update(tokens, vocabulary, layers, d, ff):
    """Returns the FLOP of products with weights, forward and backward, for sources and targets of `tokens` each."""
    encoder = layers * (4 * d * d + 2 * d * ff)
    decoder = layers * (8 * d * d + 2 * d * ff)
    return 6 * tokens * (encoder + decoder + d * vocabulary)


def test_the_candidate_closest_to_the_reference_is_kept_and_low_scores_are_dropped(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES / "student")
    import choose

    rows = [
        ("one", ["ein Hund", "eine Katze"], [-1.0, -3.0]),  # the reference is nearer to the second candidate
        ("two", ["zwei Hunde", "drei"], [-0.5, -0.6]),
        ("three", [" ", ""], [-0.1, -0.2]),  # no translation
        ("four", ["", "vier Hunde"], [-0.1, -2.0]),
    ]
    lines = [
        {"source": source, "hypotheses": [{"text": t, "score": s} for t, s in zip(texts, scores, strict=True)]}
        for source, texts, scores in rows
    ]
    (tmp_path / "candidates").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "references").write_text("die Katze\nzwei Hunde\ndrei Hunde\nvier Hunde\n")
    files = [str(tmp_path / name) for name in ("candidates", "train.en", "train.de")]
    files += ["--references", str(tmp_path / "references")]
    choose.main(files)
    assert (tmp_path / "train.en").read_text() == "one\ntwo\nfour\n"
    assert (tmp_path / "train.de").read_text() == "eine Katze\nzwei Hunde\nvier Hunde\n"
    choose.main([*files, "--keep", "0.6"])  # two of three pairs: the scores are -3, -0.5 and -2
    assert (tmp_path / "train.de").read_text() == "zwei Hunde\nvier Hunde\n"
    assert "2 pairs written; 1" in capsys.readouterr().out


def test_candidates_come_from_anywhere_and_another_model_can_score_them(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES / "student")
    import choose

    (tmp_path / "source").write_text("one\ntwo\nthree\n")
    (tmp_path / "references").write_text("die Katze\nzwei\ndrei\n")
    (tmp_path / "scores").write_text("-2.5\teins\n-0.5\tzwei\n-1.0\tdrei\n")
    (tmp_path / "plain").write_text("eine Katze\nzwei\ndrei\n")
    model = [["ein Hund", "die Katze"], ["zwei"], ["drei"]]  # a language model gives texts without scores
    (tmp_path / "model").write_text("".join(json.dumps({"hypotheses": texts}) + "\n" for texts in model))

    def chosen(name, *flags):
        outputs = [str(tmp_path / side) for side in ("out.en", "out.de")]
        choose.main([str(tmp_path / name), *outputs, "--source", str(tmp_path / "source"), *flags])
        return [Path(output).read_text().splitlines() for output in outputs]

    references, scores = (["--" + name, str(tmp_path / name)] for name in ("references", "scores"))
    assert chosen("plain") == [["one", "two", "three"], ["eine Katze", "zwei", "drei"]]
    assert chosen("model")[1] == ["ein Hund", "zwei", "drei"]
    assert chosen("model", *references)[1] == ["die Katze", "zwei", "drei"]
    assert chosen("plain", *scores, "--keep", "0.6") == [["two", "three"], ["zwei", "drei"]]
    with pytest.raises(SystemExit):
        chosen("model", "--keep", "0.6")
    assert "--keep needs scores" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        choose.main([str(tmp_path / name) for name in ("plain", "out.en", "out.de")])
    assert "plain text need --source" in capsys.readouterr().err


@pytest.mark.slow
def test_dry_runs_stand_beside_the_papers_figures():
    command = [sys.executable, WMT14 / "dry_run.py"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[2:]
    print(*lines, sep="\n")
    shown = {line.split()[0]: line.split()[1:] for line in lines}
    assert set(shown) == {f"table3/{row}" for row in ROWS} | {
        f"configs/{pair}-{size}" for pair in ("en-de", "en-fr") for size in ("base", "big")
    }
    published = {"base": 65, "B_key_16": 58, "B_key_32": 60, "C_layers_2": 36, "C_layers_4": 50, "C_layers_8": 80}
    published |= {"C_width_256": 28, "C_width_1024": 168, "C_inner_1024": 53, "C_inner_4096": 90, "big": 213}
    for row, millions in published.items():
        here, paper = shown[f"table3/{row}"][:2]
        assert float(paper) == millions
        assert abs(float(here) - millions) <= max(3, 0.03 * millions)
    base = flop_of_an_update(25_000, 37_000, 6, 512, 2048)
    big = flop_of_an_update(25_000, 37_000, 6, 1024, 4096)
    for name, flop, updates, paper in (("en-de-base", base, 1e5, 3.3e18), ("en-de-big", big, 3e5, 2.3e19)):
        columns = shown[f"configs/{name}"][2:]
        assert [float(column.replace(",", "")) for column in columns] == pytest.approx(
            [updates, 25_000, 25_000 * updates, flop, flop * updates, paper], rel=0.01
        )


OTHERS = ("corpora.toml", "denoising.toml", "it-da.toml", "demo.toml")  # not of train
CONFIGS = [path for path in sorted(EXAMPLES.rglob("*.toml")) if path.name not in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            path,
            id=str(path.relative_to(EXAMPLES).with_suffix("")),
            marks=[pytest.mark.slow] if "wmt14" in path.parts else [],  # models of up to 213 million weights
        )
        for path in CONFIGS
    ],
)
def test_every_config_passes_a_dry_run(config, tmp_path, monkeypatch):
    monkeypatch.setattr("nmtkit.experiments.estimate.product_ceiling", lambda *_, **__: 1e11)  # measured for 0.2 s
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["train", "--config", str(config), "--dry-run", "--vocab-size", "37000"])
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^parameters +[\d.]+ M$", result.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


# --- multilingual ---------------------------------------------------------------------------------------------------


def test_descriptions_become_pairs_single_languages_and_a_zero_shot_test_set(tmp_path):
    sys.path.insert(0, str(EXAMPLES / "multilingual"))
    try:
        import prepare
    finally:
        sys.path.pop(0)
    rows = {
        "it": ["a\t0\t0\tOne\tUno", "a\t1\t1\tOne\tUno", "b\t0\t0\tTwo\tDue", "c\t0\t0\tSix\tSei"],
        "da": ["b\t0\t0\tTwo\tTo", "a\t0\t0\tOne\tEn"],
        "de": ["a\t0\t0\tOne\tEins"],
        "pl": ["a\t0\t0\tOne\tJeden i trochę", "b\t0\t0\tTwo\tDwa"],
    }
    for language, lines in rows.items():
        for split in ("train", "valid", "test"):
            with gzip.open(tmp_path / f"en-{language}.{split}.tsv.gz", "wt", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
    prepare.main(tmp_path, tmp_path / "data", None, None)
    made = {path.name: path.read_text().split() for path in (tmp_path / "data").iterdir()}
    assert made["en-it.train.en"] == ["One", "Two", "Six"] and made["en-it.train.it"] == ["Uno", "Due", "Sei"]
    assert made["mono.en"] == ["One", "Two", "Six"] and made["mono.da"] == ["To", "En"]
    assert made["it-da.test.it"] == ["Uno", "Due"] and made["it-da.test.da"] == ["En", "To"]
    assert len(made) == 2 * 4 * 3 + 5 + 2
    prepare.main(tmp_path, tmp_path / "few", 1, None)
    assert (tmp_path / "few/en-pl.test.pl").read_text() == "Jeden i trochę\n"
    prepare.main(tmp_path, tmp_path / "short", 1, 2)
    assert (tmp_path / "short/en-pl.test.pl").read_text() == "Dwa\n"
    assert (tmp_path / "short/mono.pl").read_text() == "Dwa\n"
