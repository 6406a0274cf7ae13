"""`nmtkit preprocess`: trains a tokenizer, encodes valid and test sets, and cleans, encodes and mixes training sets."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from nmtkit.config.files import atomic_write, check_outputs
from nmtkit.data.corpora.corpus import Corpus, as_columns, locate
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.corpora_file import directions_of, languages_of, read_entries
from nmtkit.data.dataset.dataset_files import MANIFEST, SCRATCH_FOLDER, TOKENIZER_FOLDER, AtomicFolder, shard_name
from nmtkit.data.dataset.dataset_writer import DatasetWriter
from nmtkit.data.dataset.multilingual import MultilingualWriter
from nmtkit.data.dataset.parallel_sentences import open_corpora, texts_of
from nmtkit.data.dataset.report import Report, page
from nmtkit.data.dataset.spm_training import (
    load_tokenizer,
    sample_languages,
    train_multilingual_tokenizer,
    train_tokenizer,
)
from nmtkit.data.dataset.tokenizer_extension import extended, extended_by_pairs

log = logging.getLogger("nmtkit")


def preprocess(config: PreprocessConfig, on_progress: Callable[[int], None] = lambda pairs: None) -> Report:
    """Writes the dataset to `config.destdir`, completely or not at all, and the report page to `config.report`.

    `on_progress` is called with the number of training pairs read so far. Raises ValueError or OSError for errors in
    the settings or in the text.
    """
    with AtomicFolder(_final_folder(config), config.overwrite) as destination:
        write = _write_pairs if config.corpora is None else _write_directions
        writer = write(config, destination.folder, on_progress)
        writer.finish()
        destination.finish()
    for warning in writer.warnings():
        log.warning("%s", warning)
    if config.report is not None:
        with atomic_write(config.report) as file:
            file.write(page(writer.report).encode())
    return writer.report


def _write_pairs(config: PreprocessConfig, folder: Path, on_progress: Callable[[int], None]) -> DatasetWriter:
    """Writes the tokenizer and the subsets of a dataset of one direction."""
    train = _locate(config, config.train, config.tags, config.alignments)
    held_out = {
        f"{name}{index or ''}": files
        for name, prefixes, tags in (
            ("valid", config.valid, config.valid_tags),
            ("test", config.test, config.test_tags),
        )
        for index, files in enumerate(_locate(config, prefixes, tags))
    }
    inputs = [path for files in (*train, *held_out.values()) for path in files.paths()]
    check_outputs({"--report": config.report}, [*inputs, *config.tokenizer_from])
    for flag in config.untagged():
        log.warning("training corpora have tags, but %s sets have none; %s adds tags", flag[2:-4], flag)
    tags = sorted({files.tag for files in (*train, *held_out.values()) if files.tag is not None})
    tokenizer = load_tokenizer(config.tokenizer_from) if config.tokenizer_from else train_tokenizer(config, train, tags)
    if config.extend_tokenizer is not None:
        tokenizer = extended_by_pairs(tokenizer, config, train)
    for tag in tags:
        tokenizer.check_tag(tag)
    tokenizer.save(folder / TOKENIZER_FOLDER)
    writer = DatasetWriter(config, tokenizer, folder, on_progress)
    for split, files in held_out.items():
        writer.add_held_out(split, files)
    if train:
        writer.add_train(train)
    return writer


def _write_directions(config: PreprocessConfig, folder: Path, on_progress: Callable[[int], None]) -> DatasetWriter:
    """Writes the tokenizer and the subsets of a dataset of many directions, from the file `config.corpora`."""
    assert config.corpora is not None
    entries = read_entries(config.corpora)
    if not config.tokenizer_from and not any(entry.train for entry in entries):
        raise ValueError(f"{config.corpora} has no training text for a tokenizer; give train, or --tokenizer-from")
    corpora = open_corpora(entries, folder / SCRATCH_FOLDER)
    inputs = [name for files in chain(*corpora.values()) for name in files.names]
    check_outputs({"--report": config.report}, [*inputs, *config.tokenizer_from, config.corpora])
    if config.tokenizer_from:
        tokenizer = load_tokenizer(config.tokenizer_from)
        if config.extend_tokenizer is not None:
            texts = texts_of(corpora["train"])
            codes = [code for code in languages_of(entries) if code not in tokenizer.languages]
            new = {code: texts[code] for code in codes if code in texts} or texts
            settings = config.spm_sample, config.spm_temperature, config.seed, config.max_line_bytes
            tokenizer = extended(tokenizer, sample_languages(new, *settings), config.extend_tokenizer, codes)
    else:
        tokenizer = train_multilingual_tokenizer(config, texts_of(corpora["train"]))
    tokenizer.save(folder / TOKENIZER_FOLDER)
    writer = MultilingualWriter(config, tokenizer, folder, on_progress, directions_of(entries))
    for split in ("valid", "test"):
        if corpora[split]:
            writer.add_held_out_corpora(split, corpora[split])
    if corpora["train"]:
        writer.add_train(corpora["train"])
    return writer


def _locate(
    config: PreprocessConfig,
    prefixes: Sequence[str],
    tags: Sequence[str | None],
    alignments: Sequence[Path | None] = (),
) -> list[Corpus]:
    corpora = []
    for index, prefix in enumerate(prefixes):
        corpus = locate(prefix, config.source_lang, config.target_lang, as_columns(config.columns))
        path = alignments[index] if alignments else None
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"--alignments {path}: no such file")
        if path is not None and corpus.format is not None:
            raise ValueError(f"--alignments {path} needs a corpus of two files of lines; {prefix} is one file")
        corpora.append(dataclasses.replace(corpus, tag=tags[index] if tags else None, alignments=path))
    return corpora


def _final_folder(config: PreprocessConfig) -> Path:
    shard = config.shard_of()
    if shard is None:
        return config.destdir
    if (config.destdir / MANIFEST).exists():
        raise ValueError(f"{config.destdir} holds a dataset that was made without --shard; give a different --destdir")
    return config.destdir / shard_name(*shard)
