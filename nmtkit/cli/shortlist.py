"""`nmtkit shortlist`: adds a lexical shortlist to a checkpoint: the likely target pieces of each source piece."""

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from nmtkit.cli import imports
from nmtkit.cli.command import Command, show_next, tell
from nmtkit.cli.flags import INPUT, flags, from_flags, given_flags
from nmtkit.config import Config, FlagRule, check_flags, option
from nmtkit.config.files import check_outputs

DEFAULT = 100
BINARY = ".bin"
SHORTLIST_RULES = (FlagRule("--subset", needs=("DATA",)),)


@dataclass(frozen=True, kw_only=True)
class ShortlistConfig(Config):
    """Settings of `nmtkit shortlist`."""

    path: Path = option(..., "checkpoint that gets the shortlist", metavar="FILE", checkpoint=True)
    output: Path | None = option(None, "checkpoint to write; default: replace --path", metavar="FILE", access="write")
    entries: int | None = option(
        None, f"most probable target pieces to store for each source piece; default: {DEFAULT}", min=1, max=100_000
    )
    frequent: int | None = option(
        None,
        f"number of most frequent target pieces, which are in the list of every sentence; default: {DEFAULT}",
        min=0, max=10_000_000,
    )  # fmt: skip
    subset: str = option("valid", "subset of DATA; its references measure the coverage of the lists", metavar="NAME")
    lexicon: Path | None = option(
        None,
        "read Marian's or Bergamot's lexical shortlist (lex.s2t or .bin) instead of learning one",
        metavar="FILE",
        access="read",
    )
    vocab: tuple[Path, ...] = option(
        (),
        "SentencePiece model that defines the ids in a .bin file of --lexicon: one model, or one for each side; "
        "default: the ids of the checkpoint",
        metavar="FILE",
        repeatable=True,
        access="read",
    )
    write_lexicon: Path | None = option(
        None,
        "also write the entries for Marian: a file named ….bin is binary, others are text (lex.s2t)",
        metavar="FILE",
        access="write",
    )


@click.command(cls=Command)
@click.argument("data", required=False, type=INPUT)
def command(data: Path | None, **settings: Any) -> None:
    """Learn a list of likely target pieces for each source piece from the training pairs of DATA, and add the lists to
    a checkpoint. With --shortlist, `nmtkit generate` and `nmtkit serve` search only the pieces in the lists, which is
    faster on a CPU.

    \b
    nmtkit shortlist data-bin --path averaged.pt
    nmtkit generate data-bin --path averaged.pt --shortlist --precision int8
    nmtkit shortlist --lexicon lex.s2t --path averaged.pt --output small.pt
    nmtkit shortlist data-bin --path averaged.pt --write-lexicon lex.bin
    """
    config: ShortlistConfig = from_flags(ShortlistConfig, settings)
    check_flags(SHORTLIST_RULES, given_flags(), given_flags())
    path, lexicon, output = config.path, config.lexicon, config.output
    if data is None and lexicon is None:
        raise ValueError("give DATA to learn the shortlist from, or --lexicon FILE")
    if len(config.vocab) > 2 or (config.vocab and lexicon is None):
        raise ValueError("--vocab needs --lexicon; give one vocabulary, or one for each side")
    if path != settings["path"] and output is None:
        raise ValueError(
            f"give --output FILE: {settings['path']} is a run or a model of the Hub, whose checkpoint is not replaced"
        )
    check_outputs({"--write-lexicon": config.write_lexicon}, [path, lexicon, output])
    check_outputs({"--output": output}, [lexicon, *config.vocab])
    with imports():
        import numpy as np

        from nmtkit.data import checkpoint_file
        from nmtkit.data.dataset.binarized import Dataset
        from nmtkit.models.building import language_model_error, reads_source, tokenizer_of
        from nmtkit.models.formats import lexical_shortlist
        from nmtkit.translation.search import shortlist

    contents = checkpoint_file.read(path)
    if not reads_source(contents):
        raise language_model_error(path)
    tokenizer = tokenizer_of(contents, path)
    dataset = None if data is None else Dataset.open(data)
    if dataset is not None and dataset.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ValueError(f"{data} and {path} have different tokenizers; give the dataset that the model was trained on")
    lacks_valid = dataset is not None and config.subset == "valid" and "valid" not in dataset.splits
    measured = None if dataset is None or lacks_valid else dataset[config.subset]
    train = None if dataset is None else dataset["train"]
    rows = np.arange(0 if train is None else len(train))
    number = DEFAULT if config.entries is None else config.entries
    if lexicon is not None:
        lexical = lexical_shortlist.read(lexicon, tokenizer, config.vocab).best(number)
        if lexical.unknown:
            tell(f"{lexicon}: left out {lexical.unknown:,} entries with unknown pieces")
    else:
        assert train is not None
        lexical = shortlist.learned_entries(train.source.gather(rows), train.target.gather(rows), tokenizer, number)
    if lexical.frequent is None:
        number = DEFAULT if config.frequent is None else config.frequent
        first = len(shortlist.SPECIAL)  # a vocabulary has its pieces in order of frequency
        frequent = np.arange(first, min(first + number, tokenizer.target_size))
        if train is not None:
            frequent = shortlist.most_frequent(train.target.gather(rows), number)
        lexical = dataclasses.replace(lexical, frequent=frequent)
    elif config.entries is not None or config.frequent is not None:
        raise ValueError(f"{lexicon} is a binary file, whose lists are complete: leave out --entries and --frequent")
    if config.write_lexicon is not None:
        binary = config.write_lexicon.suffix == BINARY
        write = lexical_shortlist.write_binary if binary else lexical_shortlist.write_text
        write(config.write_lexicon, lexical, tokenizer)
    lists = shortlist.shortlist_of(lexical, tokenizer)
    checkpoint_file.save(output or path, contents | {"shortlist": lists.state()})
    tell(
        f"{output or path}: {len(lists.targets):,} entries for {lists.source_size:,} source pieces, and "
        f"{len(lists.frequent):,} target pieces for all sentences"
    )
    if measured is not None:
        rows = np.arange(len(measured))
        coverage = lists.coverage(measured.source.gather(rows), measured.target.gather(rows))
        tell(
            f"{measured.name}: the lists have {coverage.pieces:.2%} of the pieces of the references, and all pieces of "
            f"{coverage.sentences:.1%} of the references; the list of a sentence has {coverage.size:,.0f} of "
            f"{lists.target_size:,} pieces on average"
        )
    plugins = [word for plugin in contents["plugins"] for word in ("--plugin", plugin)]
    generate = ["nmtkit", "generate", "--path", str(output or path), *tokenizer.language_flags(None, None), *plugins]
    show_next(f"{shlex.join(generate)} --shortlist < source.txt")


command.params += flags(ShortlistConfig)
