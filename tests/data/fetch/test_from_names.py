"""From an empty folder to a score, with names only, in a shell: the servers of OPUS and of the test set are local."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, cut, file_server, moses_zip, status
from sacrebleu.dataset import DATASETS

from nmtkit.demo.run import read_corpus

COMMANDS = [
    "nmtkit fetch opus:Captions opus:Holdout -s en -t de -o data",
    "nmtkit clean -s en -t de data/Captions.en-de --output data/train --exclude data/Holdout.en-de --workers 1",
    "nmtkit preprocess -s en -t de --trainpref data/train --validpref data/Holdout.en-de --destdir data-bin "
    "--vocab-size 600 --workers 1",
    "nmtkit train data-bin --arch transformer_tiny --encoder-layers 1 --decoder-layers 1 --d-model 32 --d-ff 64 "
    "--batch-tokens 800 --lr 0.01 --warmup-updates 10 --max-update 8 --metrics none --threads 1 --save-dir checkpoints",
    "nmtkit generate --path checkpoints --test-set wmt14/full --max-len-b 5 --beam 1 | tee test.de | "
    "nmtkit score --test-set wmt14/full -l en-de --format json --quiet",
]

# Python runs this file at its start: the test set comes from the local server.
REDIRECT = """from sacrebleu.dataset import DATASETS
DATASETS["wmt14/full"].data = [{url!r}]
DATASETS["wmt14/full"].md5 = [{md5!r}]
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
        for name, part in (("Captions", corpus["train"][:400]), ("Holdout", corpus["valid"][:20])):
            sides = zip(*part, strict=True)
            texts = {f"{name}.de-en.{code}": "".join(line + "\n" for line in side)
                     for code, side in zip(("en", "de"), sides, strict=True)}  # fmt: skip
            path = state.add_corpus(name, "v1", ("en", "de"), moses_zip({**texts, "LICENSE": "CC0"}), pairs=len(part))
            state.faults[path] = [status(503), cut(1000)]  # the command goes on
        sides = dict(
            zip(DATASETS["wmt14/full"].langpairs["en-de"], zip(*corpus["test"][:30], strict=True), strict=True)
        )
        state.files["/wmt.tgz"] = archive_of({path: list(lines) for path, lines in sides.items()})
        (tmp_path / "python").mkdir()
        md5 = hashlib.md5(state.files["/wmt.tgz"]).hexdigest()
        (tmp_path / "python" / "sitecustomize.py").write_text(REDIRECT.format(url=f"{state.url}/wmt.tgz", md5=md5))
        yield state


@pytest.mark.slow
def test_names_alone_make_a_model_and_a_score(server: FileServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
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

    *_, scores = [shell(line) for line in COMMANDS]
    assert len((home / "test.de").read_text(encoding="utf-8").splitlines()) == 30
    theirs = shell(f'"{sys.executable}" -m sacrebleu -t wmt14/full -l en-de -i test.de -m bleu chrf ter -w 6')
    ours = [(each["name"], round(each["score"], 6), each["signature"]) for each in json.loads(scores)]
    assert ours == [(each["name"], each["score"], each["signature"]) for each in json.loads(theirs)]
    provenance = json.loads((home / "data-bin" / "manifest.json").read_text(encoding="utf-8"))["provenance"]
    assert list(provenance) == ["data/train", "data/Holdout.en-de"]
    assert provenance["data/train"]["corpora"]["data/Captions.en-de"]["license"] == "CC0"
    assert "OPUS Captions v1" in shell("nmtkit inspect data-bin --all")
    hidden = [path for path in (home / "data").iterdir() if path.name.startswith(".")]
    assert not hidden
    assert [path for path, _ in server.requests].count("/wmt.tgz") == 1  # two commands need the set at the same time
