"""Splits captions into two parts: the domain (captions that name a man or a boy), and the general text (all others).

    python split.py FOLDER OUTPUT      # FOLDER has train.en.gz, train.de.gz, val.en.gz and val.de.gz of Multi30k

Writes OUTPUT/{domain,general}.{train,val}.{en,de}, and OUTPUT/some.train.{en,de}: every fourth pair of the general
training text, to mix with the domain.
"""

import gzip
import re
import sys
from pathlib import Path

DOMAIN = re.compile(r"\b(man|men|boys?|guys?|gentlem[ae]n|male|males)\b", re.IGNORECASE)


def main(folder: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        sides = [
            gzip.decompress((folder / f"{split}.{side}.gz").read_bytes()).decode().rstrip("\n").split("\n")
            for side in ("en", "de")
        ]
        pairs = list(zip(*sides, strict=True))
        parts = {
            "domain": [pair for pair in pairs if DOMAIN.search(pair[0])],
            "general": [pair for pair in pairs if not DOMAIN.search(pair[0])],
        }
        if split == "train":
            parts["some"] = parts["general"][::4]
        for part, chosen in parts.items():
            print(f"{part}.{split}: {len(chosen):,} pairs")
            for index, side in enumerate(("en", "de")):
                text = "".join(pair[index] + "\n" for pair in chosen)
                (output / f"{part}.{split}.{side}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
