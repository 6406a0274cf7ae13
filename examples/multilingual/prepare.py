"""Writes Debian's package descriptions as text files: pairs with English, Italian-Danish pairs, single languages.

    python prepare.py DEBIAN data [--lines LINES] [--words WORDS]

DEBIAN has the files en-XX.SPLIT.tsv.gz with the columns document, paragraph, seen, English and translation. Rows that
were seen before are left out. --words also leaves out rows with more words on one side. --lines limits the rows of each
file, for a trial.
"""

import argparse
import gzip
from pathlib import Path

LANGUAGES = ("it", "da", "de", "pl")


def rows(path: Path, words: int | None) -> list[list[str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        fields = [line.rstrip("\n").split("\t") for line in file]
    longest = float("inf") if words is None else words
    return [row for row in fields if row[2] == "0" and max(len(row[3].split()), len(row[4].split())) <= longest]


def write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main(source: Path, folder: Path, lines: int | None, words: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mono: dict[str, dict[str, None]] = {"en": {}}  # unique lines in the order of the files
    tests: dict[str, dict[tuple[str, ...], str]] = {}  # language -> (document, paragraph, English) -> translation
    for language in LANGUAGES:
        mono[language] = {}
        for split in ("train", "valid", "test"):
            found = rows(source / f"en-{language}.{split}.tsv.gz", words)[:lines]
            write(folder / f"en-{language}.{split}.en", [row[3] for row in found])
            write(folder / f"en-{language}.{split}.{language}", [row[4] for row in found])
            if split == "train":
                mono["en"] |= dict.fromkeys(row[3] for row in found)
                mono[language] |= dict.fromkeys(row[4] for row in found)
            elif split == "test":
                tests[language] = {(row[0], row[1], row[3]): row[4] for row in found}
    for language, lines in mono.items():
        write(folder / f"mono.{language}", list(lines))
    both = [key for key in tests["it"] if key in tests["da"]]
    for language in ("it", "da"):
        write(folder / f"it-da.test.{language}", [tests[language][key] for key in both])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("debian", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lines", type=int)
    parser.add_argument("--words", type=int)
    options = parser.parse_args()
    main(options.debian, options.folder, options.lines, options.words)
