"""Exports a Transformer as a package of Argos Translate (`.argosmodel`), which LibreTranslate also installs.

The package is a zip file of a folder with metadata.json, a SentencePiece model, a model of CTranslate2 and README.md.
Argos Translate 1.11 reads these files in `argostranslate/package.py`.
"""

import tempfile
import zipfile
from pathlib import Path
from typing import Literal

from nmtkit.config.files import atomic_write
from nmtkit.models import building, checkpoint
from nmtkit.models.formats import ctranslate2
from nmtkit.models.formats.model_card import model_card
from nmtkit.models.formats.writing import write_files
from nmtkit.text.languages import name_of

ARGOS_VERSION = "1.9"  # the first version that reads packages without a model of sentence boundaries
USAGE = """\
```sh
pip install argostranslate
argospm install FILE.argosmodel
argos-translate --from {source} --to {target} "A sentence."
```

Argos Translate splits text into sentences itself, searches with a beam of 4, divides log probabilities by n^0.2 for n
pieces, and writes a space for each underscore. A package cannot change this search; the nearest setting of nmtkit is
`--beam 4 --lenpen 0.28`.
"""


def save(source: Path, destination: Path, languages: tuple[str, str], quantization: Literal["float32", "int8"]) -> None:
    """Writes `source`, the checkpoint of a Transformer, as the package `destination` for a language pair.

    Raises ValueError for a multilingual model, for a tokenizer with two SentencePiece models, and for a model that
    CTranslate2 does not support. Raises ImportError if the package ctranslate2 is missing.
    """
    contents = checkpoint.load(source)
    tokenizer = building.tokenizer_of(contents, source)
    if tokenizer.languages:
        raise ValueError(
            f"{source} is multilingual, and an Argos package has one language pair; give --format safetensors"
        )
    if not tokenizer.one_model:
        raise ValueError(
            f"{source} has a SentencePiece model for each side, and an Argos package has one model; give --format "
            "ctranslate2, or train with a joint vocabulary"
        )
    metadata = {"package_version": "1.0", "argos_version": ARGOS_VERSION}
    for side, code in zip(("from", "to"), languages, strict=True):
        metadata |= {f"{side}_code": code, f"{side}_name": name_of(code)}
    card = model_card(contents, USAGE.format(source=languages[0], target=languages[1]), "argostranslate")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / f"translate-{'_'.join(languages)}"
        folder.mkdir()
        ctranslate2.save(source, folder / "model", quantization)
        for copy in (folder / "model").glob("*.model"):  # the package has this model at its top
            copy.unlink()
        write_files(
            folder, {"sentencepiece.model": tokenizer.source_model, "README.md": card, "metadata.json": metadata}
        )
        with atomic_write(destination) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    archive.write(path, path.relative_to(temporary))
