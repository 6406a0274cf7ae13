"""What `nmtkit preprocess` does: a tokenizer, then every split encoded and written, then the manifest."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from nmtkit.data import corpus
from nmtkit.data.binarized import FORMAT, MANIFEST, TOKENIZER_FOLDER, array_file, id_dtype, text_file
from nmtkit.data.tokenizer import Tokenizer, train_model


@dataclass(frozen=True, kw_only=True)
class Options:
    source_lang: str
    target_lang: str
    destdir: Path
    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    vocab_size: int = 32_000
    model_type: str = "bpe"
    separate_vocab: bool = False
    overwrite: bool = False


def prepare(options: Options) -> dict[str, Any]:
    """Writes the dataset and returns its manifest."""
    languages = (options.source_lang, options.target_lang)
    pairs = {
        "train": [tuple(corpus.locate(prefix, lang) for lang in languages) for prefix in options.train],
        "valid": [tuple(corpus.locate(prefix, lang) for lang in languages) for prefix in options.valid],
        "test": [tuple(corpus.locate(prefix, lang) for lang in languages) for prefix in options.test],
    }
    if options.destdir.exists():
        if not options.overwrite:
            raise ValueError(f"{options.destdir} already exists; give --overwrite, or another --destdir")
        if not (options.destdir / MANIFEST).is_file():
            raise ValueError(f"{options.destdir} is no nmtkit dataset; it is not overwritten")
    tokenizer = _tokenizer(options, pairs["train"])
    folder = options.destdir.with_name(options.destdir.name + ".tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save(folder / TOKENIZER_FOLDER)
    splits = {}
    for name, sets in pairs.items():
        for index, files in enumerate(sets):
            split = name if name == "train" or index == 0 else f"{name}{index}"
            splits[split] = _write_split(folder, split, tokenizer, files)
    manifest = {
        "nmtkit_dataset": FORMAT,
        "source_lang": options.source_lang,
        "target_lang": options.target_lang,
        "tokenizer": tokenizer.fingerprint,
        "splits": splits,
        "files": {
            str(path.relative_to(folder)): {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    shutil.rmtree(options.destdir, ignore_errors=True)
    os.rename(folder, options.destdir)
    return manifest


def _tokenizer(options: Options, train: list[Any]) -> Tokenizer:
    def lines(side: int) -> list[str]:
        return [corpus.decode(line, files[side], 1) for files in train for line in corpus.read_lines(files[side])]

    if options.separate_vocab:
        source, target = (train_model(lines(side), options.vocab_size, options.model_type) for side in (0, 1))
        return Tokenizer(source, target)
    return Tokenizer(train_model(lines(0) + lines(1), options.vocab_size, options.model_type))


def _write_split(folder: Path, split: str, tokenizer: Tokenizer, files: Any) -> dict[str, Any]:
    lines = [corpus.read_lines(path) for path in files]
    if len(lines[0]) != len(lines[1]):
        raise ValueError(f"{files[0]} has {len(lines[0])} lines, but {files[1]} has {len(lines[1])}")
    text = [[corpus.decode(line, path, n) for n, line in enumerate(side, 1)] for side, path in zip(lines, files)]
    if split == "train":
        kept = [pair for pair in zip_longest(*text) if pair[0].strip() and pair[1].strip()]
        text = [list(side) for side in zip(*kept)]
    facts: dict[str, Any] = {"pairs": len(text[0])}
    for side, raw, content, encode, size in (
        ("source", lines[0], text[0], tokenizer.encode_source, tokenizer.source_size),
        ("target", lines[1], text[1], tokenizer.encode_target, tokenizer.target_size),
    ):
        encoded = encode(content)
        encoded.ids.astype(id_dtype(size)).tofile(folder / array_file(split, side, "ids"))
        (np.cumsum(encoded.lengths) - encoded.lengths).tofile(folder / array_file(split, side, "offsets"))
        encoded.lengths.astype(np.int32).tofile(folder / array_file(split, side, "lengths"))
        facts[side] = {"tokens": len(encoded.ids), "dtype": id_dtype(size)}
        if split != "train":
            (folder / text_file(split, side)).write_bytes(b"".join(line + b"\n" for line in raw))
    return facts
