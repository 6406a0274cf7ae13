"""The settings of `nmtkit preprocess`, each declared once: its field, flag, default, limits and help."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmtkit.config import Config, FlagRule, option, to_dict

MAX_SHARDS = 100_000
MAX_ALIGNED = 65_000  # positions of aligned tokens are stored as 16 bits
NOT_RECORDED = ("destdir", "overwrite", "workers", "report")  # settings that the dataset does not depend on

PREPROCESS_RULES = (
    FlagRule(
        "--tokenizer-from",
        excludes=("--vocab-size", "--model-type", "--separate-vocab", "--spm-sample"),
        reason="they are of a new tokenizer, and it names an existing one",
    ),
    FlagRule("--source-language-token", needs=("--tokenizer-from",), excludes=("--alignments",)),
    FlagRule("--target-language-token", needs=("--tokenizer-from",), excludes=("--alignments",)),
)


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Config):
    """A prefix stands for the two files prefix.source_lang and prefix.target_lang, perhaps compressed."""

    source_lang: str = option(
        ..., "source language: files end in .LANG", flag="-s/--source-lang", metavar="LANG", section="Files"
    )
    target_lang: str = option(..., "target language", flag="-t/--target-lang", metavar="LANG")
    train: tuple[str, ...] = option(
        (), "training corpora: PREFIX.LANG, or PREFIX.LANG.gz, .bz2, .xz, .zst", flag="--trainpref", metavar="PREFIX,…"
    )
    valid: tuple[str, ...] = option(
        (), "valid sets, called valid, valid1, … in the dataset; never filtered", flag="--validpref", metavar="PREFIX,…"
    )
    test: tuple[str, ...] = option(
        (), "test sets, called test, test1, …; never filtered", flag="--testpref", metavar="PREFIX,…"
    )
    alignments: tuple[Path | None, ...] = option(
        (),
        "for each training corpus a file of word alignments, for --criterion guided_alignment: lines of pairs i-j of "
        "source and target words, from 0, as fast_align writes; empty for none",
        metavar="FILE,…",
    )
    destdir: Path = option(..., "folder to make")
    overwrite: bool = option(False, "replace --destdir if it is a dataset")

    vocab_size: int = option(
        37_000, "entries of the vocabulary, or of each of the two", min=1, max=1_000_000, section="Vocabulary"
    )
    model_type: Literal["bpe", "unigram", "word", "char"] = option(
        "bpe",
        "kind of SentencePiece model; a word vocabulary has unknown words, and one of characters at most N entries",
    )
    separate_vocab: bool = option(False, "train a vocabulary for each side")
    tokenizer_from: tuple[Path, ...] = option(
        (),
        "train no tokenizer but use that of a checkpoint or a dataset, a .model file, or two for source and target",
        metavar="FILE|FOLDER",
    )
    spm_sample: int = option(
        1_000_000, "lines of each side, at most, that the tokenizer is trained on", min=1, max=1_000_000_000
    )

    min_len: int = option(1, "drop pairs with fewer pieces on a side", min=0, max=1_000_000, section="Cleaning")
    max_len: int = option(256, "drop pairs with more pieces on a side", min=1, max=1_000_000)
    max_ratio: float = option(
        9.0, "drop pairs with one side more than X times the pieces of the other", min=1, max=1_000_000
    )
    max_line_bytes: int = option(16_384, "drop pairs with a line of more bytes", min=1, max=1 << 30)
    drop_duplicates: bool = option(False, "drop pairs that came before (in the same shard); otherwise they are counted")
    drop_overlap: bool = option(
        False, "drop training pairs that are also in a valid or test set; otherwise they are counted"
    )
    drop_equal: bool = option(False, "drop pairs whose sides are equal; otherwise they are counted")
    drop_control: bool = option(
        False, "drop pairs with control characters (other than tab and carriage return); otherwise they are counted"
    )
    strict: bool = option(False, "stop at the first pair that would be dropped, naming it")
    report: Path | None = option(
        None, "write a page of counts, lengths, pieces, and examples of dropped pairs", metavar="FILE.html"
    )

    weights: tuple[float, ...] = option(
        (),
        "how many times an epoch sees the pairs of each training corpus; 0.5 keeps half of the pairs",
        above=0,
        max=1_000,
        section="Several corpora",
    )
    temperature: float | None = option(
        None,
        "weights from sizes: shares in proportion to size^(1/X); 1 keeps them, 5 is usual for many languages",
        min=0.1,
        max=1_000,
    )
    tags: tuple[str | None, ...] = option(
        (),
        "for each training corpus a token before its source lines, such as <2de>; empty for none",
        flag="--tag",
        metavar="TAG,…",
    )
    source_language_token: str | None = option(
        None, "for a tokenizer of several languages: that of the source, whose token begins its lines", metavar="CODE"
    )
    target_language_token: str | None = option(None, "that of the target, in the same way", metavar="CODE")
    valid_tags: tuple[str | None, ...] = option((), "the same for each valid set", flag="--valid-tag", metavar="TAG,…")
    test_tags: tuple[str | None, ...] = option((), "the same for each test set", flag="--test-tag", metavar="TAG,…")

    workers: int | None = option(
        None, "processes that encode; none means one for each core", min=1, max=1_024, section="Running"
    )
    shard: str | None = option(
        None,
        "write shard I of N into --destdir, for a job array (needs --tokenizer-from); train on the folder of all",
        metavar="I/N",
    )
    seed: int = option(1, "seed of the tokenizer's sample and of mixing", min=0, max=(1 << 63) - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.train and not self.valid and not self.test:
            raise ValueError("there is nothing to do: give --trainpref, --validpref or --testpref")
        if not self.train and not self.tokenizer_from:
            raise ValueError("without --trainpref there is no text to train a tokenizer on; give --tokenizer-from")
        if self.min_len > self.max_len:
            raise ValueError(f"--min-len {self.min_len} and --max-len {self.max_len} leave no pair")
        if self.weights and self.temperature is not None:
            raise ValueError("--weights and --temperature both set how often corpora are seen; give one of them")
        if self.weights and len(self.weights) != len(self.train):
            raise ValueError(
                f"--weights has {len(self.weights)} numbers for {len(self.train)} training corpora; give one for each"
            )
        if self.strict and self.drop_duplicates:
            raise ValueError("--strict allows no pair to be dropped; leave out --drop-duplicates")
        if self.tags and all(self.tags):
            for flag, tags, prefixes in self._tags_of_held_out():
                if prefixes and not tags:
                    raise ValueError(
                        f"every training corpus has a --tag, and {len(prefixes)} {flag[2:-4]} sets have none; give "
                        f"{flag} with one item for each set, '' for none"
                    )
        for flag, items, prefixes in (
            ("--alignments", self.alignments, self.train),
            ("--tag", self.tags, self.train),
            *self._tags_of_held_out(),
        ):
            if items and len(items) != len(prefixes):
                raise ValueError(f"{flag} has {len(items)} items for {len(prefixes)} corpora; give one for each")
            for item in items:
                if isinstance(item, str) and any(character.isspace() for character in item):
                    raise ValueError(f"{flag} {item!r} has white space in it")
        if any(self.alignments) and self.max_len > MAX_ALIGNED:
            raise ValueError(f"--alignments needs a --max-len of at most {MAX_ALIGNED:,}")
        self.shard_of()
        if self.shard is not None and not self.tokenizer_from:
            raise ValueError(
                "--shard needs --tokenizer-from, so that all shards have one tokenizer; preprocess a sample first"
            )

    def shard_of(self) -> tuple[int, int] | None:
        """Returns `shard` as numbers (i, n), i counted from 1. Raises ValueError when it is not such a pair."""
        if self.shard is None:
            return None
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", self.shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MAX_SHARDS:
            raise ValueError(f"--shard {self.shard!r} is not I/N with I from 1 to N, such as 3/8")
        return int(match[1]), int(match[2])

    def _tags_of_held_out(self) -> Sequence[tuple[str, tuple[str | None, ...], tuple[str, ...]]]:
        return ("--valid-tag", self.valid_tags, self.valid), ("--test-tag", self.test_tags, self.test)

    def untagged(self) -> list[str]:
        """Returns the flags for tags of valid and test sets that are missing although training corpora have tags."""
        return [flag for flag, tags, prefixes in self._tags_of_held_out() if any(self.tags) and prefixes and not tags]

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """Codes of the language tokens of source and target; None for a model without such tokens."""
        return self.source_language_token, self.target_language_token

    def worker_count(self) -> int:
        """Returns `workers`, or by default the number of cores that this process may use."""
        if self.workers is not None:
            return self.workers
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that the dataset depends on, in plain types, for its manifest."""
        return {name: value for name, value in to_dict(self).items() if name not in NOT_RECORDED}
