"""`clean --output-dir` and `merge`: the merged shards are the bytes of `clean` on the whole input."""

import os
import pickle
import random
import re
import shutil
import signal
import sys
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner, Result

from nmtkit.cleaning import blocks
from nmtkit.cleaning import clean as cleaning
from nmtkit.cleaning.clean import scorer_of
from nmtkit.cleaning.config import CleanConfig
from nmtkit.cleaning.shards import load_cleaner
from nmtkit.cli import main
from nmtkit.config.plugins import plugin_module
from nmtkit.data.corpora.corpus import Pairs
from nmtkit.data.corpora.writer import CorpusWriter
from nmtkit.demo.run import read_corpus
from nmtkit.jobs.shard_plan import read_plan
from nmtkit.jobs.shard_processes import ShardWriter

GOOD = list(dict.fromkeys(read_corpus()["train"]))[:1500]
FILES = ("out.tsv", "dropped.jsonl", "scores.parquet", "report.html")


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    with CorpusWriter(str(path), ("en", "de")) as writer:
        writer.write(Pairs([row[0] for row in rows], [row[1] for row in rows], [{"id": n} for n in range(len(rows))]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds two noisy corpora and a test set."""
    path = tmp_path_factory.mktemp("clean_shards")
    generator = random.Random(5)
    rows = [*GOOD, *((source, GOOD[-row][1]) for row, (source, _) in enumerate(GOOD[:150]))]
    rows += [(source.upper(), f"{target} !") for source, target in GOOD[:60]]  # near-duplicates in other shards
    rows += [(source, source) for source, _ in GOOD[:40]] + [("a", ""), ("SchÃ¶n &amp; gut", "Schön &amp; gut")]
    generator.shuffle(rows)
    write(path / "a.jsonl", rows[:1100])
    write(path / "b.jsonl", rows[1100:])
    write(path / "test.tsv", GOOD[7:9])
    return path


@pytest.fixture(autouse=True)
def small_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "BLOCK", 200)
    monkeypatch.chdir(folder)


def nmtkit(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def clean(*arguments: object) -> Result:
    workers = () if "--workers" in arguments else ("--workers", 1)
    return nmtkit("clean", "-s", "en", "-t", "de", "a.jsonl", "b.jsonl", *workers, *arguments)


def outputs(folder: Path) -> list[object]:
    folder.mkdir()
    names = ("--output", "--dropped", "--scores", "--report")
    return [part for flag, name in zip(names, FILES, strict=True) for part in (flag, folder / name)]


def succeeds(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stderr


def table(stderr: str) -> list[str]:
    """Returns the printed counts, without the times and without slow stages, which have separate lines."""
    return [line.rpartition(";")[0] or line for line in stderr.splitlines()
            if "shard" not in line and not re.search(r" left$|  [\d.:]+ s$", line)]  # fmt: skip


FEW_FILTERS = ("--filters", "empty,copy,length_ratio")  # quick filters
CASES: dict[str, tuple[object, ...]] = {
    "all filters, two processes": ("--exclude", "test.tsv", "--workers", 2),
    "a probability": (*FEW_FILTERS, "--min-probability", 0.3, "--duplicate-similarity", 0.7, "--preset", "crawl"),
    "a small sample, no mending": (*FEW_FILTERS, "--no-mend", "--sample", 300, "--seed", 4, "--duplicates", "target"),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_the_merged_shards_are_the_bytes_of_clean(flags: tuple[object, ...], tmp_path: Path) -> None:
    whole = succeeds(clean(*flags, *outputs(tmp_path / "whole")))
    assert "nmtkit merge" in succeeds(clean(*flags, "--output-dir", tmp_path / "job", "--shard-lines", 450))
    assert len(list((tmp_path / "job").glob("shard-*.done"))) == 5  # 400, 400, 300, 400 and 352 pairs
    merged = succeeds(nmtkit("merge", tmp_path / "job", *outputs(tmp_path / "merged")))
    for name in FILES:
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert table(merged) == table(whole) and "pairs read" in merged


def test_a_killed_worker_loses_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main_process, checked_scores = os.getpid(), blocks.checked_scores

    def killed(each: object, texts: blocks.TextBlock) -> object:
        if os.getpid() != main_process and len(texts) < 200:  # the last block of a.jsonl
            os.kill(os.getpid(), signal.SIGKILL)
        return checked_scores(each, texts)  # type: ignore[arg-type]

    succeeds(clean(*FEW_FILTERS, *outputs(tmp_path / "whole")))
    job = (*FEW_FILTERS, "--output-dir", tmp_path / "job", "--shard-lines", 200)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "checked_scores", killed)
        result = clean(*job, "--workers", 2)
    assert result.exit_code == 2 and "ended unexpectedly (SIGKILL)" in result.stderr, result.output
    missing = nmtkit("merge", tmp_path / "job", *outputs(tmp_path / "merged"))
    assert missing.exit_code == 2 and f"{tmp_path / 'job'} lacks shard" in missing.stderr
    assert "repeat the command: nmtkit" in " ".join(missing.stderr.split())
    assert list((tmp_path / "merged").iterdir()) == []
    assert "continuing, shard" in succeeds(clean(*job))
    succeeds(nmtkit("merge", tmp_path / "job", *outputs(tmp_path / "again")))
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert [name for name in os.listdir(tmp_path / "job") if ".tmp" in name] == []


def test_tasks_of_a_job_array_share_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    succeeds(clean(*FEW_FILTERS, "--output", tmp_path / "whole.tsv"))
    job = (*FEW_FILTERS, "--output-dir", tmp_path / "job", "--shard-lines", 200)
    fits: list[object] = []
    fit = cleaning.fit
    monkeypatch.setattr("nmtkit.cleaning.shards.fit", lambda *arguments: fits.append(fit(*arguments)))
    assert "shards 1, 3, 5, 7, 9 of 10 left" in succeeds(clean(*job, "--shard", "2/2"))
    missing = nmtkit("merge", tmp_path / "job", "--output", tmp_path / "out.tsv")
    assert missing.exit_code == 2 and "lacks shards 1, 3, 5, 7, 9 of 10" in missing.stderr
    succeeds(clean(*job, "--shard", "1/2"))
    succeeds(nmtkit("merge", tmp_path / "job", "--output", tmp_path / "out.tsv"))
    assert (tmp_path / "out.tsv").read_bytes() == (tmp_path / "whole.tsv").read_bytes()
    assert len(fits) == 1


def test_a_process_of_another_machine_needs_only_the_folder(tmp_path: Path) -> None:
    shutil.copy("a.jsonl", tmp_path / "a.jsonl")
    flags = ("-s", "en", "-t", "de", tmp_path / "a.jsonl", *FEW_FILTERS, "--workers", 1)
    succeeds(nmtkit("clean", *flags, "--output", tmp_path / "whole.tsv"))
    succeeds(nmtkit("clean", *flags, "--output-dir", tmp_path / "job", "--shard-lines", 200, "--shard", "6/6"))
    (tmp_path / "a.jsonl").unlink()
    plan = read_plan(tmp_path / "job")
    # an actor of Ray gets the function in this way
    load = pickle.loads(pickle.dumps(partial(load_cleaner, plan.folder, [])))
    writer = ShardWriter(load, plan, threads=1)
    assert [record["lines"] for _, record in map(writer.write, plan.unfinished())] == [200] * 5
    succeeds(nmtkit("merge", tmp_path / "job", "--output", tmp_path / "out.tsv"))
    assert (tmp_path / "out.tsv").read_bytes() == (tmp_path / "whole.tsv").read_bytes()


class LengthScorer:
    """Stands for two models: long targets are bad."""

    unit, passes = "quality", 1
    scored = 0

    def fit(self, sources: list[str], targets: list[str]) -> None:
        pass

    def score(self, sources: list[str], targets: list[str]) -> np.ndarray:
        LengthScorer.scored += len(targets)
        return np.array([1 / max(1, len(target)) for target in targets], np.float32)


def test_models_score_kept_pairs_in_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmtkit.cleaning.clean.scorer_of", lambda config: LengthScorer())
    for name in ("f.pt", "b.pt"):
        (tmp_path / name).touch()
    models = (*FEW_FILTERS, "--forward", tmp_path / "f.pt", "--backward", tmp_path / "b.pt", "--min-model", 0.02)
    succeeds(clean(*models, *outputs(tmp_path / "whole")))
    before = LengthScorer.scored
    succeeds(clean(*models, "--output-dir", tmp_path / "job", "--shard-lines", 450))
    in_shards = LengthScorer.scored - before
    succeeds(nmtkit("merge", tmp_path / "job", *outputs(tmp_path / "merged")))
    in_merge = LengthScorer.scored - before - in_shards
    assert in_shards > 1400 > in_merge > 100  # the merge scores only the examples of the logistic regression
    for name in FILES:
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_the_saved_models_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("f.pt", "b.pt")):
        save_tiny_transformer(Path(name), tiny_tokenizer(), seed=seed)
    config = CleanConfig(source_lang="en", target_lang="de", forward=Path("f.pt"), backward=Path("b.pt"))
    saved = pickle.dumps(scorer_of(config))
    monkeypatch.chdir("/")
    scorer = pickle.loads(saved)
    scorer.fit([], [])
    assert len(scorer.score(["the dog"], ["a cat"])) == 1


PLUGIN = """
from dataclasses import dataclass
import numpy as np
from nmtkit.config import Config, option
from nmtkit.cleaning.filters import FILTERS, Filter


@dataclass(frozen=True, kw_only=True)
class MarksConfig(Config):
    max_marks: int = option(0, "drop pairs with more question marks", min=0)


@FILTERS.register("marks", MarksConfig())
class Marks(Filter):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.highest = config.max_marks
        self.found = FOUND

    def score(self, block):
        return np.array([self.found(line) for line in block.sides[0].lines], np.float32)


def count(line):
    return line.count("?")
"""


def test_a_filter_of_a_plug_in_needs_the_plug_in_to_merge(tmp_path: Path) -> None:
    plugin = tmp_path / "marks.py"
    plugin.write_text(PLUGIN.replace("FOUND", "count"))
    flags = ("--plugin", plugin, "--filters", "empty,marks")
    succeeds(clean(*flags, "--output", tmp_path / "whole.tsv"))
    succeeds(clean(*flags, "--output-dir", tmp_path / "job"))
    del sys.modules[plugin_module(str(plugin))]
    without = nmtkit("merge", tmp_path / "job", "--output", tmp_path / "out.tsv")
    assert without.exit_code == 2 and "had --plugin" in " ".join(without.stderr.split())


def test_a_filter_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    plugin = tmp_path / "unsaved.py"
    plugin.write_text(PLUGIN.replace("FOUND", "lambda line: line.count('?')").replace('"marks"', '"unsaved"'))
    result = clean("--plugin", plugin, "--filters", "empty,unsaved", "--output-dir", tmp_path / "job")
    assert result.exit_code == 2 and "a fitted filter" in " ".join(result.stderr.split()), result.output


def test_a_fasttext_model_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        """Stands for the model of fasttext-predict, which cannot be pickled: a word says the language."""

        def __reduce__(self) -> str:
            raise TypeError("cannot pickle a model of fastText")

        def predict(self, line: str, k: int) -> tuple[list[str], list[float]]:
            code = "de" if set("äöüß") & set(line) or " der " in line or "Die" in line else "en"
            return [f"__label__{code}", "__label__nl"], [0.9, 0.1]

    module = types.ModuleType("fasttext")
    module.load_model = lambda path: Model()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fasttext", module)
    (tmp_path / "lid.ftz").write_bytes(b"model")
    flags = ("--filters", "swapped,language", "--lid-model", tmp_path / "lid.ftz")
    succeeds(clean(*flags, *outputs(tmp_path / "whole")))
    succeeds(clean(*flags, "--output-dir", tmp_path / "job", "--shard-lines", 200))
    succeeds(nmtkit("merge", tmp_path / "job", *outputs(tmp_path / "merged")))
    for name in FILES:
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_other_settings_and_files_are_refused(tmp_path: Path) -> None:
    shutil.copy("test.tsv", tmp_path / "test.tsv")
    domain = tmp_path / "domain.tsv"
    domain.write_text("en\tde\n" + "".join(f"a cat {number}\teine Katze {number}\n" for number in range(1000)))
    job = ("--filters", "empty,overlap,domain", "--output-dir", tmp_path / "job", "--exclude", tmp_path / "test.tsv",
           "--domain", domain)  # fmt: skip
    succeeds(clean(*job))
    succeeds(clean(*job, "--workers", 2))  # changes no result
    other = clean(*job, "--min-characters", 5)
    assert other.exit_code == 2 and "--min-characters  1              5" in other.stderr, other.output
    (tmp_path / "test.tsv").write_text("en\tde\nother\tandere\n")
    domain.write_text(domain.read_text().replace("cat 7", "dog 7"))
    other = clean(*job)
    assert other.exit_code == 2, other.output
    assert "  --exclude 1  " in other.stderr and "  --domain 1  " in other.stderr, other.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--output CORPUS, or --output-dir"),
        (["--output", "o.tsv", "--shard", "1/2"], "--shard does nothing"),
        (["--output-dir", "job", "--output", "o.tsv"], "--output-dir and --output"),
        (["--output-dir", "job", "--scores", "s.tsv"], "nmtkit merge"),
        (["--output-dir", "job", "--from-scores", "s.tsv"], "--output-dir and --from-scores"),
        (["--output-dir", "job", "--self-train"], "clean --self-train on"),
        (["--output-dir", "job", "--actor-cpus", "2"], "--actor-cpus does nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_without_effect_are_refused(flags: list[str], message: str, folder: Path) -> None:
    (folder / "s.tsv").touch()
    before = sorted(os.listdir(folder))
    result = clean(*flags)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output
    assert sorted(os.listdir(folder)) == before


def test_merge_does_not_replace_the_corpora_of_the_job(folder: Path, tmp_path: Path) -> None:
    succeeds(clean("--filters", "empty,overlap", "--exclude", "test.tsv", "--output-dir", tmp_path / "job"))
    before = {name: (folder / name).read_bytes() for name in ("a.jsonl", "test.tsv")}
    for flag, name in (("--output", "a.jsonl"), ("--output", "test.tsv"), ("--dropped", "a.jsonl")):
        flags = ("--output", tmp_path / "out.tsv") if flag == "--dropped" else ()
        result = nmtkit("merge", tmp_path / "job", *flags, flag, name)
        assert result.exit_code == 2 and "would overwrite a file" in result.stderr, result.output
        assert before == {name: (folder / name).read_bytes() for name in before}


def test_merge_refuses_flags_of_clean_for_translations_and_needs_an_output(tmp_path: Path) -> None:
    succeeds(clean("--filters", "empty", "--output-dir", tmp_path / "job"))
    result = nmtkit("merge", tmp_path / "job")
    assert result.exit_code == 2 and "give --output CORPUS" in result.stderr
    plan = (tmp_path / "job/plan.json").read_text()
    (tmp_path / "job/plan.json").write_text(plan.replace('"clean"', '"generate"'))
    result = nmtkit("merge", tmp_path / "job", "--report", tmp_path / "page.html")
    assert result.exit_code == 2 and "--report does nothing for" in result.stderr
    (tmp_path / "job/plan.json").write_text(plan.replace('"version of nmtkit": "', '"version of nmtkit": "0.0.'))
    result = nmtkit("merge", tmp_path / "job", "--output", tmp_path / "out.tsv")
    assert result.exit_code == 2 and "version that wrote the" in " ".join(result.stderr.split())
