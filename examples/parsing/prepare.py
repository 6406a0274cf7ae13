"""Makes parallel text from a treebank: sentences (.words), linearised trees (.trees), and gold trees (.mrg).

    python prepare.py /path/to/treebank data [--pieces 4000] [--tags]

`treebank` is a folder of Penn Treebank files (.mrg), with subfolders of any depth. If it has the sections 00 to 24 of
the Wall Street Journal as folders, sections 2 to 21 are for training, 22 for validation and 23 for testing. In other
collections, the last tenth of the files is for testing, and the tenth before it is for validation. With `--tags`, the
trees have the part of speech of each word instead of XX. The files .align link each token of a tree to a word, for
guided alignment.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
from trees import alignment, linearized, normalized, read_files

SECTIONS = {"train": range(2, 22), "valid": range(22, 23), "test": range(23, 24)}


def split(files: Sequence[Path]) -> dict[str, list[Path]]:
    """Returns the files of each set: by section if all sections have folders, otherwise by the order of the files."""
    sections = [int(path.parent.name) if path.parent.name.isdecimal() else -1 for path in files]
    if set(sections) >= {*range(2, 24)}:
        return {
            name: [path for path, section in zip(files, sections, strict=True) if section in chosen]
            for name, chosen in SECTIONS.items()
        }
    tenth = len(files) // 10
    return {"train": [*files[: -2 * tenth]], "valid": [*files[-2 * tenth : -tenth]], "test": [*files[-tenth:]]}


def write(files: Sequence[Path], prefix: Path, tags: bool = False) -> int:
    """Writes the files of one set, such as valid.words and valid.trees. Returns the number of trees."""
    trees = [tree for tree in map(normalized, read_files(files)) if tree is not None]
    sequences = [linearized(tree, tags) for tree in trees]
    for suffix, lines in (
        ("words", [" ".join(tree.words()) for tree in trees]),
        ("trees", [" ".join(tokens) for tokens in sequences]),
        ("align", [" ".join(f"{word}-{token}" for word, token in alignment(tokens)) for tokens in sequences]),
        ("mrg", list(map(str, trees))),
    ):
        prefix.with_suffix(f".{suffix}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(trees)


def write_tokenizers(folder: Path, pieces: int) -> None:
    """Writes words.model (subwords of the sentences) and trees.model (each token of a tree is one piece)."""
    sequences = (folder / "train.trees").read_text(encoding="utf-8")
    words = {"model_type": "bpe", "vocab_size": pieces, "byte_fallback": True}
    trees = {"model_type": "word", "vocab_size": len(set(sequences.split())) + 3, "use_all_vocab": True}
    for name, settings in (("words", words), ("trees", trees)):
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / f"train.{name}"),
            model_prefix=str(folder / name),
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            character_coverage=1.0,
            normalization_rule_name="identity",
            num_threads=1,
            minloglevel=2,
            **settings,
        )


def main(treebank: str, output: str, pieces: int, tags: bool) -> None:
    files = sorted(Path(treebank).rglob("*.mrg"))
    if len(files) < 10:
        raise SystemExit(f"{treebank} has {len(files)} .mrg files; give a folder with ten or more")
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in split(files).items():
        print(f"{name}: {write(chosen, folder / name, tags):,} trees of {len(chosen):,} files", file=sys.stderr)
    write_tokenizers(folder, pieces)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("treebank")
    parser.add_argument("output")
    parser.add_argument("--pieces", type=int, default=4000, help="size of the vocabulary of words.model")
    parser.add_argument("--tags", action="store_true", help="parts of speech instead of XX")
    main(**vars(parser.parse_args()))
