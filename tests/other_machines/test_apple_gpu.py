"""Commands on a fake Apple GPU, which computes on the CPU and has no fp64, and their refusals without such a GPU."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import save_transformer, write_corpus
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.training.precision import resolve

HERE = Path(__file__).parent
SIZES = ["--encoder-layers", "1", "--decoder-layers", "1", "--d-model", "16", "--d-ff", "16", "--heads", "2"]
REFUSED = ["TypeError", "RuntimeError", "TypeError"]  # fp64, two devices, fp64


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the compiled device guard of fake_mps.cpp."""
    compiler, library = shutil.which("c++"), tmp_path_factory.mktemp("guard") / "libmps.so"
    if compiler is None or sys.platform != "linux":
        pytest.skip("a device guard for the fake device needs Linux and a C++ compiler")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    flags = ["-shared", "-fPIC", "-O0", "-std=c++20", f"-I{folder / 'include'}", f"-L{folder / 'lib'}"]
    subprocess.run(
        [compiler, *flags, str(HERE / "fake_mps.cpp"), "-ltorch_cpu", "-lc10", "-o", str(library)], check=True
    )
    return library


@pytest.mark.slow
def test_the_commands_compute_without_fp64_what_they_compute_on_a_cpu(library: Path, tmp_path: Path) -> None:
    def on_apple(*arguments: str, stdin: str = "") -> str:
        words = [sys.executable, str(HERE / "fake_mps.py"), str(library), *arguments]
        done = subprocess.run(words, cwd=tmp_path, input=stdin, text=True, capture_output=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert on_apple("probe").split() == REFUSED
    for seed, (name, pairs) in enumerate((("train", 100), ("valid", 4))):
        write_corpus(tmp_path / name, pairs, seed)
    dataset = ["--trainpref", tmp_path / "train", "--validpref", tmp_path / "valid", "--destdir", tmp_path / "bin"]
    made = CliRunner().invoke(main, ["preprocess", "-s", "xx", "-t", "yy", *map(str, dataset), "--vocab-size", "300"])
    assert made.exit_code == 0, made.output
    train = ["train", "bin", "--arch", "transformer_tiny", *SIZES, "--batch-tokens", "300", "--metrics", "bleu"]
    train += ["--dropout", "0", "--lr", "0.01", "--warmup-updates", "1", "--precision", "fp32"]
    on_apple(*train, "--device", "mps", "--save-dir", "run", "--max-update", "2")
    on_apple(*train, "--device", "mps", "--save-dir", "run", "--max-update", "4")  # resumes
    on_cpu = [sys.executable, "-m", "nmtkit", *train, "--device", "cpu", "--save-dir", "cpu", "--max-update", "4"]
    subprocess.run(on_cpu, cwd=tmp_path, check=True, capture_output=True)
    scores = [
        [record for record in map(json.loads, (tmp_path / name / "log.jsonl").read_text().splitlines())]
        for name in ("run", "cpu")
    ]
    ours, theirs = ([each["loss"] for each in records if "loss" in each] for records in scores)
    assert ours[-1] == pytest.approx(theirs[-1], rel=1e-4)

    path = save_transformer(tmp_path / "model.pt")
    lines, prefix, avoided = tmp_path / "lines", tmp_path / "prefix", tmp_path / "avoided"
    lines.write_text("All human beings\nborn free\n"), prefix.write_text("born \n\n"), avoided.write_text("e\nal\n")
    for flags in (
        ["--beam", "3", "--nbest", "2", "--quality", "--alignment", "soft"],
        ["--beam", "1", "--prefix", str(prefix), "--avoid", str(avoided)],
        ["--sampling", "--top-p", "0.8", "--nbest", "2"],
        ["--beam", "4", "--diverse-groups", "2"],
        ["--constraints", str(lines)],
        ["--score-reference", "--reference", str(lines)],
    ):
        lengths = [] if "--score-reference" in flags else ["--max-len-a", "0", "--max-len-b", "6"]
        command = ["generate", "--path", str(path), "--input", str(lines), "--format", "jsonl", *lengths, *flags]
        found = [json.loads(line) for line in on_apple(*command, "--device", "mps").splitlines()]
        result = CliRunner().invoke(main, [*command, "--engine", "torch", "--device", "cpu"])
        expected = [json.loads(line) for line in result.stdout.splitlines()]
        assert len(found) == len(expected) == 2, result.stderr
        for one, other in zip(found, expected, strict=True):
            assert [each["text"] for each in one["hypotheses"]] == [each["text"] for each in other["hypotheses"]]
            of_one, of_other = ([each["score"] for each in line["hypotheses"]] for line in (one, other))
            assert of_one == pytest.approx(of_other, rel=1e-4)


def test_what_an_apple_gpu_lacks_is_refused(tmp_path: Path) -> None:
    assert resolve("auto", torch.device("mps")) == resolve("fp32", torch.device("mps")) == "fp32"
    for precision in ("bf16", "fp16"):
        with pytest.raises(ValueError, match=f"--precision {precision}"):
            resolve(precision, torch.device("mps"))
    path = save_transformer(tmp_path / "model.pt")
    for flags, named in (
        (["--precision", "bf16"], "--precision bf16"),
        (["--precision", "int8"], "--precision int8"),
        (["--engine", "slots"], "--engine slots"),
        ([], "--device mps"),
    ):
        command = ["generate", "--path", str(path), "--device", "mps", *flags]
        result = CliRunner().invoke(main, command, input="free\n")
        assert result.exit_code == 2 and named in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_a_training_without_an_apple_gpu_ends_with_one_line(tmp_path: Path) -> None:
    write_corpus(tmp_path / "train", 20, 1), write_corpus(tmp_path / "valid", 4, 2)
    dataset = ["--trainpref", tmp_path / "train", "--validpref", tmp_path / "valid", "--destdir", tmp_path / "bin"]
    made = CliRunner().invoke(main, ["preprocess", "-s", "xx", "-t", "yy", *map(str, dataset), "--vocab-size", "300"])
    assert made.exit_code == 0, made.output
    command = ["train", str(tmp_path / "bin"), "--arch", "transformer_tiny", "--save-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(main, [*command, "--device", "mps"])
    assert result.exit_code == 2 and "--device mps" in result.stderr and not (tmp_path / "run").exists()
