"""The commands work with the packages that pyproject.toml declares for them, and with no others.

`sitecustomize.py` hides the other packages from the processes of a test.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer, write_corpus
from neural_models import write_comet, write_metricx

HERE = Path(__file__).parent
SIZES = "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 16 --heads 2"


def environment(extras: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]), "NMTKIT_EXTRAS": extras}


def python(folder: Path, extras: str, code: str) -> str:
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, cwd=folder, env=environment(extras), text=True, capture_output=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


def commands(folder: Path, extras: str, *lines: str) -> str:
    """Runs commands of nmtkit one after another in a process with the packages of `extras`."""
    words = [shlex.split(line) for line in lines]
    code = f"""
from nmtkit.cli import main
for words in {words!r}:
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, words
"""
    return python(folder, extras, code)


@pytest.mark.slow
def test_a_package_that_is_not_declared_is_hidden(tmp_path: Path) -> None:
    code = """
try:
    import pytest
except ModuleNotFoundError as error:
    print(error.name, __import__("torch").__name__)
"""
    assert python(tmp_path, "", code).split() == ["pytest", "torch"]


@pytest.mark.slow
def test_the_commands_without_extras(tmp_path: Path) -> None:
    for seed, (name, pairs) in enumerate((("train", 300), ("valid", 10), ("test", 5))):
        write_corpus(tmp_path / name, pairs, seed)
    (tmp_path / "tags.txt").write_text("See <b>http://a.b/c</b> for 20 cats.\n")
    (tmp_path / "page.html").write_text("<p>See <b>http://a.b/c</b> for 20 cats.</p>\n")
    (tmp_path / "terms.tsv").write_text("cats\tKatzen\n")
    generate = "generate --path averaged.pt --max-len-b 5"
    commands(
        tmp_path,
        "",
        "preprocess -s xx -t yy --trainpref train --validpref valid --testpref test --destdir bin --vocab-size 300",
        f"train bin --arch transformer_tiny {SIZES} --save-dir run --batch-tokens 300 --max-update 2",
        "average-checkpoints run --last 1 --output averaged.pt",
        f"{generate} bin --output test.out",
        f"{generate} --input tags.txt --protect-spans --markup html --glossary terms.tsv --output 1",
        f"{generate} --input tags.txt --replace-unknown --alignment words --quality --format jsonl --output 2",
        f"{generate} --input page.html --output page.out.html",
        f"{generate} --input tags.txt --precision int8 --nbest 2 --mbr chrf --output 3",
        "score --data bin --sys test.out",
        "compare --sys test.out --sys test.yy --data bin --report compare.html",
        "inspect averaged.pt",
        "shortlist bin --path averaged.pt --output shortlisted.pt",
        "distill bin --path averaged.pt --top-k 4",
        "attention --path averaged.pt 'A dog.' --output attention.html",
    )
    assert len((tmp_path / "1").read_text().splitlines()) == 1


@pytest.mark.slow
def test_clean_with_its_extra(tmp_path: Path) -> None:
    write_corpus(tmp_path / "train", 300, seed=1)
    commands(tmp_path, "data", "clean -s xx -t yy train --output cleaned")


@pytest.mark.slow
def test_the_service_with_its_extra(tmp_path: Path) -> None:
    path = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())
    words = [sys.executable, "-m", "nmtkit", "serve", "--path", f"en-de={path}", "--port", "0", "--workers", "1"]
    with subprocess.Popen(words, env=environment("serve"), stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            address, said = None, []
            while address is None:
                said.append(line := server.stderr.readline())
                assert line, "".join(said)
                address = re.search(r"http://[\d.]+:\d+", line)
            query = {"q": "A <b>dog</b>.", "source": "en", "target": "de", "format": "html"}
            body = json.dumps(query).encode()
            request = urllib.request.Request(f"{address[0]}/translate", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as response:
                assert json.load(response)["translatedText"]
        finally:
            server.terminate()
        assert server.wait(600) == 0


@pytest.mark.slow
def test_neural_metrics_with_their_extra(tmp_path: Path) -> None:
    write_comet(tmp_path / "comet")
    write_metricx(tmp_path / "metricx")
    (tmp_path / "text").write_text("a dog\nthe cat\n")
    score = "score --sys text --ref text --src text --metric"
    commands(tmp_path, "neural", f"{score} comet=comet", f"{score} metricx=metricx")
