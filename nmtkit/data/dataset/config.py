"""The settings of `nmtkit preprocess`. Each field declares the flag, default, limits and help text of a setting."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmtkit.config import Config, FlagRule, option, to_dict
from nmtkit.data.corpora.corpus import as_columns
from nmtkit.data.directions import LanguageTokens
from nmtkit.jobs.shard_options import part_of

MAX_SHARDS = 100_000
MAX_ALIGNED = 65_000  # largest --max-len with --alignments, in pieces: the positions of links are stored in 16 bits
NOT_RECORDED = ("destdir", "overwrite", "workers", "report")  # settings that do not affect the dataset

PREPROCESS_RULES = (
    FlagRule(
        "--tokenizer-from",
        excludes=("--vocab-size", "--model-type", "--separate-vocab", "--spm-sample"),
        reason="an existing tokenizer is not trained again",
    ),
    FlagRule(
        "--extend-tokenizer",
        needs=("--tokenizer-from",),
        excludes=("--shard",),
        reason="all shards need one tokenizer; extend the tokenizer without --shard, then give the new dataset as "
        "--tokenizer-from",
    ),
    FlagRule("--source-language-token", needs=("--tokenizer-from",), excludes=("--alignments",)),
    FlagRule("--target-language-token", needs=("--tokenizer-from",), excludes=("--alignments",)),
    FlagRule(
        "--corpora",
        excludes=(
            "--source-lang", "--target-lang", "--trainpref", "--validpref", "--testpref", "--columns", "--alignments",
            "--separate-vocab", "--weights", "--temperature", "--tag", "--valid-tag", "--test-tag",
            "--source-language-token", "--target-language-token",
        ),
        reason="the file of --corpora has the corpora, languages and weights",
    ),
    *(FlagRule(flag, needs=("--trainpref", "--corpora"))
      for flag in ("--min-len", "--max-len", "--max-ratio", "--drop-duplicates", "--drop-overlap", "--drop-equal",
                   "--drop-control", "--strict")),
    FlagRule("--language-tokens", needs=("--corpora",), excludes=("--tokenizer-from",)),
    FlagRule("--spm-temperature", needs=("--corpora",), excludes=("--tokenizer-from",)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Config):
    """The settings of `nmtkit preprocess`.

    A corpus is a single file, or the prefix of two files: prefix.source_lang and prefix.target_lang.
    """

    source_lang: str = option(
        "",
        "source language: LANG in file names PREFIX.LANG, or the name of a column; en also matches en-GB and eng_Latn",
        flag="-s/--source-lang",
        metavar="LANG",
        section="Files",
    )
    target_lang: str = option("", "target language, like --source-lang", flag="-t/--target-lang", metavar="LANG")
    train: tuple[str, ...] = option(
        (),
        "training corpora: prefixes of two files, or files .tsv, .tmx, .jsonl, .parquet, .zip, .xlf or .po; compressed "
        "files end in .gz, .bz2, .xz or .zst",
        flag="--trainpref",
        metavar="CORPUS,…",
    )
    valid: tuple[str, ...] = option(
        (), "valid sets, named valid, valid1, … in the dataset; never filtered", flag="--validpref", metavar="CORPUS,…"
    )
    test: tuple[str, ...] = option(
        (), "test sets, named test, test1, … in the dataset; never filtered", flag="--testpref", metavar="CORPUS,…"
    )
    columns: tuple[str, ...] = option(
        (),
        "source and target column of .tsv, .jsonl and .parquet files: names, or numbers from 1; none means the columns "
        "named after the languages, or the two columns of a .tsv",
        metavar="SOURCE,TARGET",
    )
    alignments: tuple[Path | None, ...] = option(
        (),
        "a file of word alignments for each training corpus, for --criterion guided_alignment; each line has the links "
        "of one pair, in the format of fast_align: i-j links source word i to target word j, counted from 0; an empty "
        "item means no alignments",
        metavar="FILE,…",
        access="read",
    )
    destdir: Path = option(..., "dataset folder to write")
    overwrite: bool = option(False, "replace the dataset in --destdir")

    vocab_size: int = option(
        37_000,
        "size of the vocabulary, or of each vocabulary with --separate-vocab",
        min=1,
        max=1_000_000,
        section="Vocabulary",
    )
    model_type: Literal["bpe", "unigram", "word", "char"] = option(
        "bpe",
        "type of SentencePiece model; with a word model, words can be unknown; a char model may have fewer than "
        "--vocab-size entries",
    )
    separate_vocab: bool = option(False, "train one vocabulary for each side")
    tokenizer_from: tuple[Path, ...] = option(
        (),
        "use the tokenizer of a checkpoint or dataset, a .model file, or two .model files (source, target), instead of "
        "training a tokenizer",
        metavar="FILE|FOLDER",
        checkpoint=True,
    )
    extend_tokenizer: int | None = option(
        None,
        "add new languages to the tokenizer of --tokenizer-from: language tokens, and up to N pieces from the text of "
        "these languages; then fine-tune with train --finetune-from",
        min=0,
        max=1_000_000,
    )
    spm_sample: int = option(1_000_000, "train the tokenizer on at most N lines of each side", min=1, max=1_000_000_000)

    min_len: int = option(1, "drop pairs with fewer than N pieces on a side", min=0, max=1_000_000, section="Cleaning")
    max_len: int = option(256, "drop pairs with more than N pieces on a side", min=1, max=1_000_000)
    max_ratio: float = option(
        9.0, "drop pairs if one side has more than X times as many pieces as the other side", min=1, max=1_000_000
    )
    max_line_bytes: int = option(16_384, "drop pairs with a line of more than N bytes", min=1, max=1 << 30)
    drop_duplicates: bool = option(
        False, "drop pairs that are equal to an earlier pair (in the same shard); otherwise only count them"
    )
    drop_overlap: bool = option(
        False, "drop training pairs that are also in a valid or test set; otherwise only count them"
    )
    drop_equal: bool = option(False, "drop pairs whose source and target are equal; otherwise only count them")
    drop_control: bool = option(
        False, "drop pairs with control characters (other than tab and carriage return); otherwise only count them"
    )
    strict: bool = option(False, "stop with an error at the first pair that would be dropped")
    report: Path | None = option(
        None,
        "write an HTML page about the dataset: counts, lengths, pieces, dropped pairs",
        metavar="FILE.html",
        access="write",
    )

    weights: tuple[float, ...] = option(
        (),
        "for each training corpus, how often an epoch contains each pair; 0.5 means half of the pairs",
        above=0,
        max=1_000,
        section="Several corpora",
    )
    temperature: float | None = option(
        None,
        "weight the corpora so that the share of each corpus in an epoch is proportional to size^(1/X); 1 keeps the "
        "original shares, 5 is usual for many languages",
        min=0.1,
        max=1_000,
    )
    tags: tuple[str | None, ...] = option(
        (),
        "for each training corpus, a token to put before every source line, such as <2de>; an empty item means no "
        "token",
        flag="--tag",
        metavar="TAG,…",
    )
    source_language_token: str | None = option(
        None,
        "code of the source language, for a tokenizer of several languages; every source line begins with the token of "
        "this language",
        metavar="CODE",
    )
    target_language_token: str | None = option(
        None,
        "code of the target language, for a tokenizer of several languages; every target line begins with the token of "
        "this language; a token of the form >>deu<< is put before every source line, and not before target lines",
        metavar="CODE",
    )
    valid_tags: tuple[str | None, ...] = option(
        (), "like --tag, for each valid set", flag="--valid-tag", metavar="TAG,…"
    )
    test_tags: tuple[str | None, ...] = option((), "like --tag, for each test set", flag="--test-tag", metavar="TAG,…")

    corpora: Path | None = option(
        None,
        "make a dataset of many languages from the corpora in this file, instead of --source-lang, --target-lang and "
        "--trainpref; see docs/multilingual.md",
        metavar="FILE.toml",
        section="Many languages",
        access="read",
    )
    language_tokens: LanguageTokens | None = option(
        None,
        "language tokens of a --corpora dataset; both (the default): each sentence begins with the token of its "
        "language, as in M2M-100; target-on-source: source sentences begin with the token of the target language",
    )
    language_token_loss: bool = option(
        True,
        "let the loss count the language token at the beginning of each target line, as in the training of M2M-100; "
        "otherwise loss, perplexity and accuracy leave the token out",
    )
    spm_temperature: float = option(
        5.0,
        "with --corpora: the share of each language in the training sample of the tokenizer is proportional to "
        "lines^(1/X)",
        min=0.1,
        max=1_000,
    )

    workers: int | None = option(
        None, "number of encoding processes; none means one per core", min=1, max=1_024, section="Running"
    )
    shard: str | None = option(
        None,
        "write shard I of N as a folder in --destdir, for a job array (needs --tokenizer-from); then train on "
        "--destdir",
        metavar="I/N",
    )
    seed: int = option(1, "seed for the tokenizer's training sample and for mixing corpora", min=0, max=(1 << 63) - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_len > self.max_len:
            raise ValueError(f"--min-len {self.min_len} and --max-len {self.max_len} leave no pair")
        if self.strict and self.drop_duplicates:
            raise ValueError("--strict does not allow pairs to be dropped; leave out --drop-duplicates")
        self.shard_of()
        if self.corpora is not None:
            return
        if not self.language_token_loss and self.target_language_token is None:
            raise ValueError("--no-language-token-loss does nothing without --corpora or --target-language-token")
        if not self.source_lang or not self.target_lang:
            raise ValueError("give --source-lang and --target-lang, or --corpora for many languages")
        if not self.train and not self.valid and not self.test:
            raise ValueError("no corpus is given; give --trainpref, --validpref or --testpref")
        if not self.train and not self.tokenizer_from:
            raise ValueError("without --trainpref there is no text to train a tokenizer on; give --tokenizer-from")
        as_columns(self.columns)
        if self.weights and self.temperature is not None:
            raise ValueError("--weights and --temperature both set the share of each corpus; give one of them")
        if self.temperature is not None and len(self.train) < 2:
            raise ValueError("--temperature does nothing without several corpora in --trainpref")
        if self.weights and len(self.weights) != len(self.train):
            raise ValueError(
                f"--weights needs a number for each corpus of --trainpref ({len(self.train)}), but has "
                f"{len(self.weights)}"
            )
        if all(self.tags) and (missing := self.untagged()):
            flag = missing[0]
            raise ValueError(
                f"every training corpus has a --tag, and the {flag[2:-4]} sets have none; give "
                f"{flag} with one item for each set; an empty item means no tag"
            )
        for flag, items, prefixes in (
            ("--alignments", self.alignments, self.train),
            ("--tag", self.tags, self.train),
            *self._tags_of_held_out(),
        ):
            if items and len(items) != len(prefixes):
                raise ValueError(f"{flag} needs an item for each corpus ({len(prefixes)}), but has {len(items)}")
            for item in items:
                if isinstance(item, str) and any(character.isspace() for character in item):
                    raise ValueError(f"{flag} {item!r} contains white space")
        if any(self.alignments) and self.max_len > MAX_ALIGNED:
            raise ValueError(f"--alignments needs a --max-len of at most {MAX_ALIGNED:,}")

    def shard_of(self) -> tuple[int, int] | None:
        """Returns `shard` as two numbers (i, n), with i from 1 to n, or None if `shard` is None.

        Raises ValueError if `shard` does not have the form I/N, or if --tokenizer-from is missing.
        """
        if self.shard is None:
            return None
        part = part_of(self.shard, MAX_SHARDS)
        if not self.tokenizer_from:
            raise ValueError(
                "--shard needs --tokenizer-from, so that all shards have the same tokenizer; preprocess a sample first"
            )
        return part

    def _tags_of_held_out(self) -> Sequence[tuple[str, tuple[str | None, ...], tuple[str, ...]]]:
        return ("--valid-tag", self.valid_tags, self.valid), ("--test-tag", self.test_tags, self.test)

    def untagged(self) -> list[str]:
        """Returns the flags that are missing among --valid-tag and --test-tag.

        If a training corpus has a tag, valid sets need --valid-tag, and test sets need --test-tag.
        """
        return [flag for flag, tags, prefixes in self._tags_of_held_out() if any(self.tags) and prefixes and not tags]

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """The codes of the source and target language tokens. The code is None for a side without a language token."""
        return self.source_language_token, self.target_language_token

    def recorded(self) -> dict[str, Any]:
        """Returns the settings that affect the dataset. The values have JSON types, for the manifest."""
        return {name: value for name, value in to_dict(self).items() if name not in NOT_RECORDED}
