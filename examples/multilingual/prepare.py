"""Writes Debian's package descriptions as text files: pairs with English, Italian-Danish pairs, single languages.

    python prepare.py DEBIAN data [LINES]

DEBIAN has the files en-XX.SPLIT.tsv.gz with the columns document, paragraph, seen, English and translation. Rows that
were seen before are left out. LINES limits the rows of each file, for a trial.
"""

import gzip
import sys
from itertools import islice
from pathlib import Path

LANGUAGES = ("it", "da", "de", "pl")


def rows(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        fields = [line.rstrip("\n").split("\t") for line in file]
    return [row for row in fields if row[2] == "0"]


def write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main(source: Path, folder: Path, limit: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mono: dict[str, dict[str, None]] = {"en": {}}  # unique lines in the order of the files
    tests: dict[str, dict[tuple[str, ...], str]] = {}  # language -> (document, paragraph, English) -> translation
    for language in LANGUAGES:
        mono[language] = {}
        for split in ("train", "valid", "test"):
            found = list(islice(rows(source / f"en-{language}.{split}.tsv.gz"), limit))
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
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
