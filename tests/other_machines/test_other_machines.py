"""The commands on a system without fork, flock, /proc, symbolic links, CPU affinity and the signals of Unix.

`sitecustomize.py` hides all of them from the processes of a test, so the code for other systems runs on Linux.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer, write_corpus

HERE = Path(__file__).parent
TREE = HERE.parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(TREE)])}


def nmtkit(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "nmtkit", *arguments]
    result = subprocess.run(
        words, cwd=folder, env=ENVIRONMENT, input=stdin, text=True, capture_output=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result


def test_the_hidden_modules_are_hidden() -> None:
    code = """
import os, signal
try:
    exec("import fcntl", {"__name__": "nmtkit.jobs"})
except ImportError:
    print("hidden", hasattr(os, "fork"), hasattr(signal, "SIGUSR1"))
"""
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, text=True, capture_output=True, check=True)
    assert result.stdout.split() == ["hidden", "False", "False"]


@pytest.mark.slow
def test_the_five_commands_and_clean(tmp_path: Path) -> None:
    for seed, (name, pairs) in enumerate((("train", 300), ("valid", 10), ("test", 5))):
        write_corpus(tmp_path / name, pairs, seed)
    prefixes = ["--trainpref", "train", "--validpref", "valid", "--testpref", "test"]
    languages = ["-s", "xx", "-t", "yy"]
    nmtkit(tmp_path, "clean", *languages, "train", "--output", "cleaned", "--workers", "2")
    nmtkit(tmp_path, "preprocess", *languages, *prefixes, "--destdir", "bin", "--vocab-size", "300", "--workers", "2")
    sizes = ["--encoder-layers", "1", "--decoder-layers", "1", "--d-model", "16", "--d-ff", "16", "--heads", "2"]
    train = ["train", "bin", "--arch", "transformer_tiny", *sizes, "--save-dir", "run", "--batch-tokens", "300"]
    nmtkit(tmp_path, *train, "--max-update", "2", "--save-interval-updates", "1")
    nmtkit(tmp_path, *train, "--max-update", "4", "--save-interval-updates", "1")  # resumes
    newest = tmp_path / "run/update_00000004.pt"
    assert (tmp_path / "run/last.pt").samefile(newest) and not (tmp_path / "run/last.pt").is_symlink()
    nmtkit(tmp_path, "average-checkpoints", "run", "--last", "2", "--output", "averaged.pt")
    translated = nmtkit(tmp_path, "generate", "--path", "averaged.pt", "--workers", "2", stdin="a b\nc\n").stdout
    assert translated.count("\n") == 2
    (tmp_path / "out.yy").write_text((tmp_path / "test.yy").read_text())
    assert "BLEU" in nmtkit(tmp_path, "score", "--sys", "out.yy", "--ref", "test.yy").stdout


@pytest.mark.slow
def test_the_service_with_one_worker(tmp_path: Path) -> None:
    path = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer())
    words = [sys.executable, "-m", "nmtkit", "serve", "--path", f"en-de={path}", "--port", "0", "--workers", "1"]
    with subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address, said = None, []
        while address is None:
            said.append(line := server.stderr.readline())
            assert line, "".join(said)
            address = re.search(r"http://[\d.]+:\d+", line)
        body = json.dumps({"q": ["a dog", "two men"], "source": "en", "target": "de"}).encode()
        request = urllib.request.Request(f"{address[0]}/translate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            assert len(json.load(response)["translatedText"]) == 2
        server.terminate()
        assert server.wait(600) == 0
