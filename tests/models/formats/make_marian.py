"""Makes the folders in marian/: small models that Marian trains on the demo's corpus, and their translations.

    python tests/models/formats/make_marian.py PYMARIAN [KIND …]    (PYMARIAN: a program of the package pymarian)

The folder exported/ has a model that nmtkit trains and Marian only reads. Each folder has an expected.json with
sources, and the translations and scores of greedy and beam search by Marian.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from builders import fragments, save_ending_transformer

from nmtkit.demo.run import read_corpus
from nmtkit.models.formats import marian_export

FOLDER = Path(__file__).parent / "marian"
EXPORTED = FOLDER / "exported"
SEARCHES = {"greedy": 1, "beam": 4}
SIZES = "--transformer-dim-ffn 64 --transformer-heads 2"
# one SentencePiece model as the vocabulary of both sides; or lists of pieces, like OPUS-MT, with normalised embeddings
KINDS = {
    "spm": "--dim-emb 32 --enc-depth 2 --dec-depth 2 --tied-embeddings-all --transformer-ffn-activation relu "
    "--sentencepiece-options --normalization_rule_name=identity",
    "yml": "--dim-emb 16 --enc-depth 1 --dec-depth 2 --tied-embeddings --transformer-ffn-activation gelu "
    "--transformer-postprocess-emb nd",
    "ssru": "--dim-emb 32 --enc-depth 1 --dec-depth 2 --tied-embeddings-all --transformer-ffn-activation relu "
    "--transformer-decoder-autoreg rnn --dec-cell ssru --sentencepiece-options --normalization_rule_name=identity",
    "average": "--dim-emb 32 --enc-depth 1 --dec-depth 2 --tied-embeddings-all --transformer-ffn-activation relu "
    "--transformer-decoder-autoreg average-attention --transformer-dim-aan 64 --transformer-aan-activation relu "
    "--sentencepiece-options --normalization_rule_name=identity",
}
TRAINING = "--mini-batch 64 --maxi-batch 20 --learn-rate 0.01 --lr-warmup 50 --clip-norm 1 --seed 1"
UPDATES = {"average": 800}  # 250 for the other kinds; average attention learns more slowly here


def marian(program: str, command: str, *arguments: str | Path, folder: Path) -> str:
    """Returns the standard output of Marian, started in `folder`."""
    parts = [program, command, *map(str, arguments), "--cpu-threads", "1", "-w", "1000", "--quiet"]
    return subprocess.run(parts, cwd=folder, check=True, capture_output=True, text=True).stdout


def train(program: str, kind: str, folder: Path, pairs: list[tuple[str, str]]) -> None:
    """Trains the model of a kind in `folder`, and leaves the files for decoding there."""
    files = [folder / "train.source", folder / "train.target"]
    for side, file in enumerate(files):
        lines = [pair[side] for pair in pairs]
        if kind == "yml":
            model = folder / f"{file.suffix[1:]}.spm"
            with model.open("wb") as writer:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=iter(lines), model_writer=writer, vocab_size=300 + 50 * side,
                    normalization_rule_name="identity", minloglevel=2,
                )  # fmt: skip
            lines = pieces(model, lines)
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    vocabularies = ["vocab.spm", "vocab.spm"] if kind != "yml" else ["source.yml", "target.yml"]
    size = "400" if kind != "yml" else "0"
    arguments = ["-m", "model.npz", "-t", *(file.name for file in files), "-v", *vocabularies]
    options = f"--type transformer --dim-vocabs {size} {size} {SIZES} {KINDS[kind]} {TRAINING}".split()
    options += ["--after-batches", str(UPDATES.get(kind, 250))]
    marian(program, "train", *arguments, *options, folder=folder)


def pieces(model: Path, lines: list[str]) -> list[str]:
    """Returns lines as pieces with spaces between them, the input for a vocabulary in YAML."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return [" ".join(processor.encode(line, out_type=str)) for line in lines]


def translations(program: str, folder: Path, lines: list[str]) -> list[dict[str, object]]:
    """Returns Marian's translations of lines, with log probabilities, by the name of the search."""
    (decoder,) = folder.glob("*decoder.yml")
    spm = folder / "source.spm"
    found: list[dict[str, object]] = [{"source": line} for line in lines]
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "lines"
        text = pieces(spm, lines) if spm.is_file() else lines
        file.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
        for name, beam in SEARCHES.items():
            options: list[str | Path] = ["-c", decoder.name, "-i", file, "-b", str(beam)]
            options += ["--normalize", "0", "--n-best"]
            for row in reversed(marian(program, "decode", *options, folder=folder).splitlines()):
                number, translation, _, score = row.split(" ||| ")
                if spm.is_file():
                    translation = translation.replace(" ", "").replace("▁", " ").strip()
                found[int(number)][name] = {"text": translation, "score": float(score)}
    return found


def write_expected(target: Path, expected: list[dict[str, object]]) -> None:
    text = json.dumps(expected, ensure_ascii=False, indent=1)
    (target / "expected.json").write_text(text + "\n", encoding="utf-8")


def export(program: str) -> None:
    """Writes a checkpoint of nmtkit, and the translations of its export by Marian."""
    shutil.rmtree(EXPORTED, ignore_errors=True)
    EXPORTED.mkdir(parents=True)
    path = save_ending_transformer(EXPORTED / "model.pt", positions="sinusoidal_fairseq")
    with tempfile.TemporaryDirectory() as temporary:
        marian_export.save(path, Path(temporary) / "folder")
        write_expected(EXPORTED, translations(program, Path(temporary) / "folder", fragments()))


def main(program: str, *kinds: str) -> None:
    """Makes the models of these kinds, or all models."""
    if not kinds:
        export(program)
    corpus = read_corpus()
    for kind in kinds or KINDS:
        target = FOLDER / kind
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            train(program, kind, folder, corpus["train"])
            kept = [*folder.glob("*.spm"), folder / "model.npz", folder / "model.npz.decoder.yml"]
            kept += [] if kind != "yml" else [folder / "source.yml", folder / "target.yml"]
            for file in kept:
                shutil.copyfile(file, target / file.name)
        write_expected(target, translations(program, target, [english for english, _ in corpus["test"][:200]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
