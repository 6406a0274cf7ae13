"""`nmtkit preprocess`: trains a tokenizer, encodes valid and test sets, and cleans, encodes and mixes training sets."""

import logging
from collections.abc import Callable
from pathlib import Path

from nmtkit.config.files import atomic_write, check_outputs
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import MANIFEST, SCRATCH_FOLDER, TOKENIZER_FOLDER, AtomicFolder, shard_name
from nmtkit.data.dataset.dataset_writer import DatasetWriter
from nmtkit.data.dataset.parallel_corpora import DatasetCorpora, open_corpora
from nmtkit.data.dataset.report import Report, page
from nmtkit.data.dataset.spm_training import load_tokenizer, train_multilingual_tokenizer, train_tokenizer
from nmtkit.data.dataset.tokenizer_extension import extended_by_corpora
from nmtkit.data.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("nmtkit")


def preprocess(config: PreprocessConfig, on_progress: Callable[[int], None] = lambda pairs: None) -> Report:
    """Writes the dataset to `config.destdir`, completely or not at all, and the report page to `config.report`.

    `on_progress` is called with the number of training pairs read so far. Raises ValueError or OSError for errors in
    the settings or in the text.
    """
    with AtomicFolder(_final_folder(config), config.overwrite) as destination:
        scratch = destination.folder / SCRATCH_FOLDER
        scratch.mkdir()
        corpora = open_corpora(config, scratch)
        files = [path for corpus in corpora.all() for path in corpus.inputs]
        files += [path for path in (*config.tokenizer_from, config.corpora) if path is not None]
        check_outputs({"--report": config.report}, files)
        for flag in config.untagged():
            log.warning("training corpora have tags, but %s sets have none; %s adds tags", flag[2:-4], flag)
        tokenizer = _tokenizer(config, corpora)
        tokenizer.save(destination.folder / TOKENIZER_FOLDER)
        writer = DatasetWriter(config, tokenizer, destination.folder, corpora.directions, on_progress)
        for split, held_out in corpora.held_out.items():
            writer.add_held_out(split, held_out)
        if corpora.train:
            writer.add_train(corpora.train)
        writer.finish()
        destination.finish()
    for warning in writer.warnings():
        log.warning("%s", warning)
    if config.report is not None:
        with atomic_write(config.report) as file:
            file.write(page(writer.report).encode())
    return writer.report


def _tokenizer(config: PreprocessConfig, corpora: DatasetCorpora) -> Tokenizer:
    """Loads, extends or trains the tokenizer of the dataset. Raises ValueError if the tokenizer lacks a tag."""
    tags = sorted({corpus.tag for corpus in corpora.all() if corpus.tag is not None})
    if config.tokenizer_from:
        tokenizer = load_tokenizer(config.tokenizer_from)
        if config.extend_tokenizer is not None:
            tokenizer = extended_by_corpora(tokenizer, config, corpora)
    elif config.corpora is None:
        tokenizer = train_tokenizer(config, corpora.train, tags)
    else:
        tokenizer = train_multilingual_tokenizer(config, corpora.train_texts())
    for tag in tags:
        tokenizer.check_tag(tag)
    return tokenizer


def _final_folder(config: PreprocessConfig) -> Path:
    shard = config.shard_of()
    if shard is None:
        return config.destdir
    if (config.destdir / MANIFEST).exists():
        raise ValueError(f"{config.destdir} holds a dataset that was made without --shard; give a different --destdir")
    return config.destdir / shard_name(*shard)
