"""`nmtkit shortlist`: adds to a checkpoint the target pieces that each source piece may become."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nmtkit.cli import imports
from nmtkit.cli.command import Command, stderr
from nmtkit.cli.flags import CHECKPOINT, PATH
from nmtkit.config.files import check_outputs, checkpoint_of

if TYPE_CHECKING:
    from nmtkit.data.dataset.binarized import Split
    from nmtkit.data.tokenizers.tokenizer import Tokenizer
    from nmtkit.models.formats.lexical_shortlist import NumpyArray
    from nmtkit.translation.search.shortlist import Shortlist

DEFAULT = 100
BINARY = ".bin"


@click.command(cls=Command)
@click.argument("data", required=False, type=PATH)
@click.option("--path", type=CHECKPOINT, required=True, metavar="FILE", help="Checkpoint that gets the shortlist.")
@click.option("--output", type=PATH, metavar="FILE", help="Checkpoint to write.  [default: replace --path]")
@click.option(
    "--entries",
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="Number of most probable target pieces to store for each source piece.  [default: 100]",
)
@click.option(
    "--frequent",
    type=click.IntRange(0, 10_000_000),
    metavar="N",
    help="Number of most frequent target pieces, which are in the list of every sentence.  [default: 100]",
)
@click.option(
    "--subset",
    default="valid",
    metavar="NAME",
    help="Subset of DATA whose references show the coverage.  [default: valid]",
)
@click.option(
    "--lexicon",
    type=PATH,
    metavar="FILE",
    help="Read Marian's or Bergamot's lexical shortlist (lex.s2t or .bin) instead of learning one.",
)
@click.option(
    "--vocab",
    "vocabularies",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="SentencePiece model that defines the ids in a .bin file of --lexicon: one model, or one for each side.  "
    "[default: the ids of the checkpoint]",
)
@click.option(
    "--write-lexicon",
    type=PATH,
    metavar="FILE",
    help="Also write the entries for Marian: a file named ….bin is binary, others are text (lex.s2t).",
)
def command(
    data: Path | None,
    path: Path,
    output: Path | None,
    entries: int | None,
    frequent: int | None,
    subset: str,
    lexicon: Path | None,
    vocabularies: tuple[Path, ...],
    write_lexicon: Path | None,
) -> None:
    """Learn from the training pairs of DATA which target pieces each source piece may become, and add them to a
    checkpoint. With --shortlist, generate and serve search only these pieces, which is faster on a CPU.

    \b
    nmtkit shortlist data-bin --path averaged.pt
    nmtkit generate data-bin --path averaged.pt --shortlist --precision int8
    nmtkit shortlist --lexicon lex.s2t --path averaged.pt --output small.pt
    nmtkit shortlist data-bin --path averaged.pt --write-lexicon lex.bin
    """
    if data is None and lexicon is None:
        raise ValueError("give DATA to learn the shortlist from, or --lexicon FILE")
    if len(vocabularies) > 2 or (vocabularies and lexicon is None):
        raise ValueError("--vocab needs --lexicon; give one vocabulary, or one for each side")
    found = checkpoint_of(path)
    if found != path and output is None:
        raise ValueError(
            f"give --output FILE, because {path} is a run or a model of the Hub, which keeps its checkpoint"
        )
    path = found
    check_outputs({"--write-lexicon": write_lexicon}, [path, lexicon, output])
    check_outputs({"--output": output}, [lexicon, *vocabularies])
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
    measured = None if dataset is None or (subset == "valid" and "valid" not in dataset.splits) else dataset[subset]
    train = None if dataset is None else dataset["train"]
    rows = np.arange(0 if train is None else len(train))
    number = DEFAULT if entries is None else entries
    if lexicon is not None:
        lexical = lexical_shortlist.read(lexicon, tokenizer, vocabularies).best(number)
        if lexical.unknown:
            stderr.print(f"{lexicon}: left out {lexical.unknown:,} entries with unknown pieces", markup=False)
    else:
        assert train is not None
        lexical = shortlist.learned_entries(train.source.gather(rows), train.target.gather(rows), tokenizer, number)
    if lexical.frequent is None:
        number = DEFAULT if frequent is None else frequent
        lexical = dataclasses.replace(lexical, frequent=frequent_pieces(train, tokenizer, number))
    elif entries is not None or frequent is not None:
        raise ValueError(f"{lexicon} is a binary file, whose lists are complete: leave out --entries and --frequent")
    if write_lexicon is not None:
        binary = write_lexicon.suffix == BINARY
        write = lexical_shortlist.write_binary if binary else lexical_shortlist.write_text
        write(write_lexicon, lexical, tokenizer)
    lists = shortlist.shortlist_of(lexical, tokenizer)
    checkpoint_file.save(output or path, contents | {"shortlist": lists.state()})
    stderr.print(
        f"{output or path}: {len(lists.targets):,} entries for {lists.source_size:,} source pieces, and "
        f"{len(lists.frequent):,} target pieces for all sentences", markup=False,
    )  # fmt: skip
    if measured is not None:
        show_coverage(lists, measured)


def frequent_pieces(train: "Split | None", tokenizer: "Tokenizer", number: int) -> "NumpyArray":
    """Returns the ids of the most frequent target pieces of the training pairs, or else of the vocabulary."""
    import numpy as np

    from nmtkit.translation.search import shortlist

    if train is not None:
        return shortlist.most_frequent(train.target.gather(np.arange(len(train))), number)
    first = len(shortlist.SPECIAL)  # a vocabulary has its pieces in order of frequency
    return np.arange(first, min(first + number, tokenizer.target_size))


def show_coverage(lists: "Shortlist", measured: "Split") -> None:
    """Prints the share of the pieces of references that the lists have."""
    import numpy as np

    rows = np.arange(len(measured))
    coverage = lists.coverage(measured.source.gather(rows), measured.target.gather(rows))
    stderr.print(
        f"{measured.name}: the lists have {coverage.pieces:.2%} of the pieces of the references, and all pieces of "
        f"{coverage.sentences:.1%} of the references; the list of a sentence has {coverage.size:,.0f} of "
        f"{lists.target_size:,} pieces on average", markup=False,
    )  # fmt: skip
