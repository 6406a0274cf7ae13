"""From an empty folder to a score: the commands of README.md in a shell, with servers of this machine."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, cut, file_server, moses_zip, status
from hub_server import HubServer
from sacrebleu.dataset import DATASETS

from nmtkit.demo.run import read_corpus

FOLDER = Path(__file__).parents[2] / "models/formats/huggingface"
README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
# the commands of the README with small names and sizes: text of the README -> text of the test
SMALLER = {
    "hf:Helsinki-NLP/opus-mt-en-de": "hf:org/opus --max-len-b 5 --beam 1",
    "opus:Books": "opus:Captions",
    "Books.en-de": "Captions.en-de",
    "--output data/train": "--output data/train --exclude data/wmt13.en-de --workers 1",
    "--vocab-size 10000": "--vocab-size 600 --workers 1",
    "--batch-tokens 4096 --max-epoch 20": "--batch-tokens 800 --max-update 8 --encoder-layers 1 --decoder-layers 1 "
    "--d-model 32 --d-ff 64 --lr 0.01 --warmup-updates 10 --metrics none --threads 1",
    "| nmtkit score": "--max-len-b 5 --beam 1 | tee test.de | nmtkit score --format json --quiet",
}


def commands() -> list[str]:
    """Returns the three commands of the README, each in one line, with small names and sizes."""
    block = README.partition("## From names alone")[2].partition("```sh\n")[2].partition("```")[0]
    text = re.sub(r" +#.*", "", block).replace("&&\n", "&&")
    for large, small in SMALLER.items():
        assert large in text, large
        text = text.replace(large, small)
    return text.splitlines()


# Python runs this file at its start: the test set comes from the local server.
REDIRECT = """from sacrebleu.dataset import DATASETS
for name in ("wmt13", "wmt14/full"):
    DATASETS[name].data = [{url!r}]
    DATASETS[name].md5 = [{md5!r}]
"""


def archive_of(sides: dict[str, list[str]]) -> bytes:
    """Returns an archive of WMT with SGM files of one document each, by path."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for path, lines in sides.items():
            segments = "".join(f'<seg id="{number}">{line}</seg>\n' for number, line in enumerate(lines))
            data = f'<srcset>\n<doc docid="d" genre="news" origlang="en">\n{segments}</doc>\n</srcset>\n'.encode()
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    corpus = read_corpus()
    with file_server() as state:
        part = corpus["train"][:400]
        texts = {f"Captions.de-en.{code}": "".join(line + "\n" for line in side)
                 for code, side in zip(("en", "de"), zip(*part, strict=True), strict=True)}  # fmt: skip
        path = state.add_corpus("Captions", "v1", ("en", "de"), moses_zip({**texts, "LICENSE": "CC0"}), pairs=len(part))
        state.faults[path] = [status(503), cut(1000)]  # the command goes on
        sides = {}
        for name, pairs in (("wmt13", corpus["valid"][:20]), ("wmt14/full", corpus["test"][:30])):
            sides |= dict(zip(DATASETS[name].langpairs["en-de"], zip(*pairs, strict=True), strict=True))
        state.files["/wmt.tgz"] = archive_of({path: list(lines) for path, lines in sides.items()})
        (tmp_path / "python").mkdir()
        md5 = hashlib.md5(state.files["/wmt.tgz"]).hexdigest()
        (tmp_path / "python" / "sitecustomize.py").write_text(REDIRECT.format(url=f"{state.url}/wmt.tgz", md5=md5))
        yield state


@pytest.mark.slow
def test_names_alone_make_a_model_and_a_score(server: FileServer, hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/opus", {path.name: path.read_bytes() for path in (FOLDER / "marian").iterdir()}, license="mit")
    home = tmp_path / "home"
    home.mkdir()
    (home / "raw.en").write_text("The dog runs.\nA house.\n", encoding="utf-8")
    paths = [str(tmp_path / "python"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "NMTKIT_OPUS_API": f"{server.url}/opusapi/", "NO_COLOR": "1",
        "SACREBLEU": str(tmp_path / "sacrebleu"), "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }  # fmt: skip
    program = f'nmtkit() {{ "{sys.executable}" -m nmtkit "$@"; }}; set -o pipefail; '

    def shell(line: str) -> str:
        result = subprocess.run(
            ["bash", "-c", program + line], cwd=home, env=environment, text=True, capture_output=True, encoding="utf-8"
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    *_, scores = [shell(line) for line in commands()]
    assert len((home / "translated.de").read_text(encoding="utf-8").splitlines()) == 2
    assert len((home / "test.de").read_text(encoding="utf-8").splitlines()) == 30
    theirs = shell(f'"{sys.executable}" -m sacrebleu -t wmt14/full -l en-de -i test.de -m bleu chrf ter -w 6')
    ours = [(each["name"], round(each["score"], 6), each["signature"]) for each in json.loads(scores)]
    assert ours == [(each["name"], each["score"], each["signature"]) for each in json.loads(theirs)]
    provenance = json.loads((home / "data-bin" / "manifest.json").read_text(encoding="utf-8"))["provenance"]
    assert list(provenance) == ["data/train", "data/wmt13.en-de"]
    assert provenance["data/train"]["corpora"]["data/Captions.en-de"]["license"] == "CC0"
    assert "OPUS Captions v1" in shell("nmtkit inspect data-bin --all")
    hidden = [path for path in (home / "data").iterdir() if path.name.startswith(".")]
    assert not hidden
    assert [path for path, _ in server.requests].count(
        "/wmt.tgz"
    ) == 2  # one for each set: two commands need a set at the same time
