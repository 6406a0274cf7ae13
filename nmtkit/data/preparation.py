"""What `nmtkit preprocess` does, step by step: a tokenizer, valid and test sets, the training set, the manifest."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmtkit.data import corpus
from nmtkit.data.binarized import TOKENIZER_FOLDER, part_name
from nmtkit.data.cleaning import Rules
from nmtkit.data.encoding import Files
from nmtkit.data.output_folder import AtomicFolder
from nmtkit.data.report import Report
from nmtkit.data.spm_model import model_facts
from nmtkit.data.spm_training import sample_pairs, train_model
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.data.writing import DatasetWriter, WritingOptions

log = logging.getLogger("nmtkit")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a preprocess. Prefixes stand for files prefix.source_lang and prefix.target_lang."""

    source_lang: str
    target_lang: str
    destdir: Path
    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    vocab_size: int = 37_000
    model_type: str = "bpe"
    separate_vocab: bool = False
    spm_model: tuple[Path, ...] = ()  # a .model file, a dataset folder, or two .model files for source and target
    spm_sample: int = 1_000_000  # lines of each side that a new tokenizer is trained on
    seed: int = 1
    rules: Rules = field(default_factory=Rules)
    strict: bool = False
    weights: tuple[float, ...] = ()  # per training corpus, at least 1
    temperature: float | None = None
    tags: tuple[str, ...] = ()  # per training corpus; "" for none
    valid_tags: tuple[str, ...] = ()
    test_tags: tuple[str, ...] = ()
    part: tuple[int, int] | None = None  # (i, n): write part i, from 1, of n
    count_pieces: bool = False
    workers: int = 1
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.train and not self.valid and not self.test:
            raise ValueError("there is nothing to do: give --trainpref, --validpref or --testpref")
        if not self.train and not self.spm_model:
            raise ValueError("without --trainpref there is no text to train a tokenizer on; give --spm-model")
        if self.workers < 1:
            raise ValueError(f"--workers {self.workers} is less than 1")
        if self.vocab_size < 1 or self.spm_sample < 1:
            raise ValueError("--vocab-size and --spm-sample must be at least 1")
        if self.weights and self.temperature is not None:
            raise ValueError("--weights and --temperature both set how often corpora are seen; give one of them")
        if self.weights and (len(self.weights) != len(self.train) or min(self.weights) < 1):
            raise ValueError(
                f"--weights needs a number of at least 1 for each of the {len(self.train)} training corpora: "
                "how often an epoch is to see its pairs"
            )
        if self.temperature is not None and self.temperature <= 0:
            raise ValueError(f"--temperature {self.temperature} is not positive")
        if self.strict and self.rules.drop_duplicates:
            raise ValueError("--strict allows no pair to be dropped; leave out --drop-duplicates")
        for flag, tags, prefixes in (
            ("--tag", self.tags, self.train),
            ("--valid-tag", self.valid_tags, self.valid),
            ("--test-tag", self.test_tags, self.test),
        ):
            if tags and len(tags) != len(prefixes):
                raise ValueError(f"{flag} names {len(tags)} tags for {len(prefixes)} corpora; give one for each")
            for tag in tags:
                if any(character.isspace() for character in tag):
                    raise ValueError(f"{flag} {tag!r} has white space in it")
        if self.part is not None and not self.spm_model:
            raise ValueError(
                "--shard needs --spm-model, so that all parts have one tokenizer; preprocess a sample first"
            )


def prepare(options: Options, on_progress: Callable[[int], None] = lambda pairs: None) -> Report:
    """Makes the dataset `options.destdir`, whole or not at all. `on_progress` is told the training pairs read so far.

    Raises ValueError and OSError for what a user can mend; see the parts.
    """
    train = _locate(options, options.train, options.tags)
    held_out = {
        f"{name}{index or ''}": files
        for name, prefixes, tags in (
            ("valid", options.valid, options.valid_tags),
            ("test", options.test, options.test_tags),
        )
        for index, files in enumerate(_locate(options, prefixes, tags))
    }
    final = options.destdir / part_name(*options.part) if options.part else options.destdir
    with AtomicFolder(final, options.overwrite) as destination:
        if options.spm_model:
            tokenizer = load_tokenizer(options.spm_model)
        else:
            tokenizer = train_tokenizer(options, train, held_out)
        for files in (*train, *held_out.values()):
            if files.tag is not None:
                tokenizer.check_tag(files.tag)
        tokenizer.save(destination.folder / TOKENIZER_FOLDER)
        writer = DatasetWriter(_writing_options(options), tokenizer, destination.folder, on_progress)
        for split, files in held_out.items():
            writer.add_held_out(split, files)
        if train:
            writer.add_train(train)
        writer.finish()
        destination.finish()
    return writer.report


def _writing_options(options: Options) -> WritingOptions:
    return WritingOptions(
        **{
            item.name: getattr(options, item.name)
            for item in dataclasses.fields(WritingOptions)
            if item.name != "recorded"
        },
        recorded=_recorded(options),
    )


def _recorded(options: Options) -> dict[str, Any]:
    """The options as the manifest keeps them: those that the output depends on, and nothing of this machine."""
    plain = dataclasses.asdict(options)
    for name in ("destdir", "overwrite", "workers", "count_pieces"):
        del plain[name]
    plain["spm_model"] = [str(path) for path in options.spm_model]
    return plain


def _locate(options: Options, prefixes: tuple[str, ...], tags: tuple[str, ...]) -> list[Files]:
    return [
        Files(
            corpus.locate(prefix, options.source_lang),
            corpus.locate(prefix, options.target_lang),
            tags[index] or None if tags else None,
        )
        for index, prefix in enumerate(prefixes)
    ]


# --- the tokenizer --------------------------------------------------------------------------------------------------


def load_tokenizer(paths: tuple[Path, ...]) -> Tokenizer:
    """A joint .model file, a dataset folder (or its tokenizer folder), or .model files of source and target.

    Raises FileNotFoundError, or ValueError for a file that is no model nmtkit can use.
    """
    if len(paths) == 1 and paths[0].is_dir():
        inside = paths[0] / TOKENIZER_FOLDER
        return Tokenizer.load(inside if inside.is_dir() else paths[0])
    if len(paths) > 2:
        raise ValueError(f"--spm-model names {len(paths)} files; give one for both sides, or one for each")
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"--spm-model {path}: no such file")
    tokenizer = Tokenizer(*(path.read_bytes() for path in paths))
    for path, model in zip(paths, (tokenizer.source_model, tokenizer.target_model), strict=False):
        facts = model_facts(model)
        if facts.rewrites:
            log.warning("%s rewrites text by rules of its own: what is decoded may differ from the original", path)
        if not facts.byte_fallback:
            log.warning("%s has no byte fallback: characters it does not know become unknown", path)
    return tokenizer


def train_tokenizer(options: Options, train: list[Files], held_out: dict[str, Files]) -> Tokenizer:
    """Trains on a sample of the training text. Raises ValueError when there is too little of it."""
    paths = [(files.source, files.target) for files in train]
    sample = sample_pairs(paths, options.spm_sample, options.seed, options.rules.max_line_bytes)
    tags = sorted({files.tag for files in (*train, *held_out.values()) if files.tag is not None})
    log.info(
        "training %s tokenizer%s on %s lines",
        options.model_type,
        "s" if options.separate_vocab else "",
        f"{len(sample[0]) + len(sample[1]):,}",
    )
    if options.separate_vocab:
        source = train_model(sample[0], options.vocab_size, options.model_type, tags)
        return Tokenizer(source, train_model(sample[1], options.vocab_size, options.model_type))
    return Tokenizer(train_model(sample[0] + sample[1], options.vocab_size, options.model_type, tags))
