"""Runs all steps from corpora to a served model, as one TOML file describes them. Run it again to resume.

    python pipeline.py demo.toml            # clean, preprocess, train, average-checkpoints, generate, score, export
    python pipeline.py demo.toml --serve    # afterwards, serves the model over HTTP
    python pipeline.py demo.toml --list     # shows the commands, and which of them are done

Each table of the file has the flags of an nmtkit command. A finished step is skipped. `page.html` in the folder `work`
shows the pairs that each step kept and dropped, and the scores of the model.
"""

import argparse
import html
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit.pages.document import asset

NMTKIT = [sys.executable, "-m", "nmtkit"]
TABLES = ("corpora", "clean", "preprocess", "train", "average-checkpoints", "generate", "score", "export", "serve")


@dataclass(frozen=True)
class Step:
    """A command of nmtkit, which makes the files `outputs`. `stdout` is the file that receives standard output."""

    name: str
    words: list[str]
    outputs: list[Path]
    stdout: Path | None = None


class Pipeline:
    def __init__(self, file: Path) -> None:
        self.settings: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        unknown = set(self.settings) - {"source", "target", "work", *TABLES}
        missing = {"source", "target", "work", "corpora"} - set(self.settings)
        if unknown or missing:
            raise SystemExit(f"{file}: unknown: {sorted(unknown)}, missing: {sorted(missing)}; tables: {TABLES}")
        self.folder = file.parent
        self.work = file.parent / self.settings["work"]
        self.record_file = self.work / "steps.json"

    def steps(self) -> list[Step]:
        """Returns all steps in order."""
        work, pair = self.work, ["-s", self.settings["source"], "-t", self.settings["target"]]
        train, valid, test = (self.corpora(name) for name in ("train", "valid", "test"))
        exclude = ",".join([*valid, *test])
        kept, model = str(work / "clean"), str(work / "averaged.pt")
        bin_folder, run, output = str(work / "data-bin"), str(work / "run"), str(work / "test.txt")
        sides = [work / f"clean.{self.settings[side]}" for side in ("source", "target")]
        texts = ["--validpref", ",".join(valid), "--testpref", ",".join(test), "--destdir", bin_folder, "--overwrite"]
        return [
            Step("clean", [*pair, *train, "--output", kept, "--dropped", str(work / "dropped.tsv"), "--exclude",
                           exclude, "--report", str(work / "clean.html"), *self.flags("clean")], sides),
            Step("preprocess", [*pair, "--trainpref", kept, *texts, "--report", str(work / "data.html"),
                                *self.flags("preprocess")], [work / "data-bin/manifest.json"]),
            Step("train", [bin_folder, "--save-dir", run, *self.flags("train")], [work / "run/last.pt"]),
            Step("average-checkpoints", [run, "--output", model, *self.flags("average-checkpoints")], [Path(model)]),
            Step("generate", [bin_folder, "--path", model, "--output", output, *self.flags("generate")],
                 [Path(output)]),
            Step("score", ["--data", bin_folder, "--sys", output, "--format", "json", *self.flags("score")],
                 [work / "scores.json"], work / "scores.json"),
            Step("export", [model, str(work / "exported"), *self.flags("export")], [work / "exported"]),
        ]  # fmt: skip

    def flags(self, name: str) -> list[str]:
        """Returns the settings of a table as flags of its command."""
        words = []
        for key, value in self.settings.get(name, {}).items():
            if isinstance(value, bool):
                words.append(f"--{key}" if value else f"--no-{key}")
            else:
                words += [f"--{key}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
        return words

    def corpora(self, name: str) -> list[str]:
        """Returns the paths of the corpora of a split. The TOML file gives paths relative to its folder, or URLs."""
        return [
            str(self.downloaded(corpus) if "://" in corpus else self.folder / corpus) for corpus in self.given(name)
        ]

    def given(self, name: str) -> list[str]:
        names = self.settings["corpora"][name]
        return [names] if isinstance(names, str) else names

    def downloaded(self, url: str) -> Path:
        return self.work / "corpora" / url.rpartition("/")[2]

    def download(self) -> None:
        """Downloads the corpora that the TOML file gives as URLs, unless their files exist."""
        for url in [url for name in ("train", "valid", "test") for url in self.given(name) if "://" in url]:
            path = self.downloaded(url)
            if not path.exists():
                print(f"download {url}", flush=True)
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(path.name + ".part")
                with urllib.request.urlopen(url) as answer, part.open("wb") as file:
                    shutil.copyfileobj(answer, file)
                part.replace(path)

    def records(self) -> dict[str, dict[str, Any]]:
        """Returns the command-line words and the seconds of each finished step."""
        return json.loads(self.record_file.read_text()) if self.record_file.exists() else {}

    def run(self) -> None:
        """Runs the steps that are not finished. Stops if a finished step had other settings."""
        self.work.mkdir(parents=True, exist_ok=True)
        self.download()
        steps = self.steps()
        for index, step in enumerate(steps):
            records = self.records()
            record = records.get(step.name)
            if record is not None and all(path.exists() for path in step.outputs):
                if record["words"] != step.words:
                    later = [str(path) for other in steps[index:] for path in self.made(other) if path.exists()]
                    raise SystemExit(
                        f"the settings of {step.name} have changed since this step was run; give another `work`, or "
                        f"remove the results from this step on:\n  rm -r {shlex.join([*later, str(self.record_file)])}"
                    )
                print(f"{step.name}: done before", flush=True)
                continue
            print(shlex.join(["nmtkit", step.name, *step.words]), flush=True)
            if step.name == "export":  # the command does not replace a folder
                shutil.rmtree(step.outputs[0], ignore_errors=True)
            began = time.monotonic()
            execute(step)
            seconds = time.monotonic() - began
            # later steps must run again, because their results belong to an earlier result of this step
            records = {other.name: records[other.name] for other in steps[:index] if other.name in records}
            write(
                self.record_file, json.dumps(records | {step.name: {"words": step.words, "seconds": seconds}}, indent=1)
            )
        write(self.work / "page.html", self.page())
        print(f"the model: {self.work / 'averaged.pt'}; its page: {self.work / 'page.html'}")

    def made(self, step: Step) -> list[Path]:
        return [path.parent if path.parent != self.work else path for path in step.outputs]

    def page(self) -> str:
        """Returns a page with the pairs that each step kept and dropped, the scores, and the time of each step."""
        records = self.records()
        cleaned = count_lines(self.work / f"clean.{self.settings['source']}")
        lines = (self.work / "dropped.tsv").read_text(encoding="utf-8").split("\n")[1:-1]
        reasons = Counter(line.rpartition("\t")[2] for line in lines)
        manifest = json.loads((self.work / "data-bin/manifest.json").read_text(encoding="utf-8"))
        (corpus,) = manifest["report"]["corpora"]
        words = [*NMTKIT, "compare", str(self.work / "run"), "--format", "json"]
        (run,) = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        flow = [("clean", cleaned + len(lines), len(lines), cleaned),
                ("preprocess", corpus["read"], corpus["read"] - corpus["written"], corpus["written"])]  # fmt: skip
        dropped = [("clean", name, count) for name, count in reasons.most_common()]
        dropped += [("preprocess", name, count) for name, count in corpus["dropped"].items() if count]
        training = [(name, value) for name, value in run.items() if isinstance(value, str | int | float)]
        scores = [(item["name"], item["score"], item["signature"]) for item in self.scores()]
        size = sum(path.stat().st_size for path in (self.work / "exported").rglob("*") if path.is_file())
        return "".join([
            "<!doctype html><html lang=en><meta charset=utf-8><title>Pipeline</title>",
            f"<style>{asset('style.css')}</style><main><h1>{self.settings['source']} → {self.settings['target']}</h1>",
            table("Pairs", ("step", "read", "dropped", "kept"), flow),
            table("Dropped pairs", ("step", "reason", "pairs"), dropped),
            table("Training", ("", ""), training),
            table("Scores on the test set", ("metric", "score", "signature"), scores),
            table("Time", ("step", "seconds"), [(name, round(item["seconds"])) for name, item in records.items()]),
            f"<p>The exported model has {size:,} bytes. See also <a href=clean.html>the cleaning</a>, "
            "<a href=data.html>the dataset</a> and <a href=run/report.html>the training</a>.</p></main></html>\n",
        ])  # fmt: skip

    def scores(self) -> list[dict[str, Any]]:
        result = json.loads((self.work / "scores.json").read_text(encoding="utf-8"))
        return result if isinstance(result, list) else [result]


def execute(step: Step) -> None:
    """Runs a step. A step that fails ends the pipeline with its exit code."""
    part = None if step.stdout is None else step.stdout.with_name(step.stdout.name + ".part")
    with open(part or os.devnull, "wb") as file:
        code = subprocess.run([*NMTKIT, step.name, *step.words], stdout=file if part else None, check=False).returncode
    if code:
        print(f"{step.name} failed; run the pipeline again to resume", file=sys.stderr)
        raise SystemExit(code)
    if part is not None and step.stdout is not None:
        part.replace(step.stdout)


def write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def table(title: str, head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Returns a heading and a table as HTML, or an empty text if there are no rows."""

    def cells(tag: str, values: tuple[Any, ...]) -> str:
        return "".join(f"<{tag}>{html.escape(shown(value))}</{tag}>" for value in values)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<h2>{title}</h2><table><tr>{cells('th', head)}</tr>{body}</table>" if rows else ""


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="TOML file of the pipeline")
    parser.add_argument("--list", action="store_true", help="only show the commands")
    parser.add_argument("--serve", action="store_true", help="serve the model at the end")
    arguments = parser.parse_args()
    pipeline = Pipeline(arguments.file)
    if arguments.list:
        done = pipeline.records()
        for step in pipeline.steps():
            print("done " if step.name in done else "to do", shlex.join(["nmtkit", step.name, *step.words]))
        return
    pipeline.run()
    if arguments.serve:
        os.execv(
            sys.executable, [*NMTKIT, "serve", "--path", str(pipeline.work / "averaged.pt"), *pipeline.flags("serve")]
        )


if __name__ == "__main__":
    main()
