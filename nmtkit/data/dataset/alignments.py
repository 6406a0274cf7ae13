"""Converts word alignments of training pairs to links between pieces, for guided alignment.

Each line of an alignment file has the links i-j of one pair in the Pharaoh format (the output of fast_align, eflomal
and the scripts of GIZA++). i is the index of a source word, and j is the index of a target word. Both count from 0.
Words are separated by spaces. A link between two words becomes links between all pieces of the source word and all
pieces of the target word. A link is stored in 32 bits, as source position * 2^16 + target position. A position is the
index of a piece in its sentence. A tag before the source sentence counts as a piece.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nmtkit.data.dataset.dataset_files import SIDES
from nmtkit.data.tokenizers.batch_encoder import Words
from nmtkit.data.tokenizers.tokenizer import Encoded

_LINE = re.compile(r"\s*(?:[0-9]{1,6}-[0-9]{1,6}(?:\s+|$))*")

Links = npt.NDArray[np.int64]


def parse(text: str, path: Path, first_line: int) -> tuple[Links, npt.NDArray[np.int64]]:
    """Returns the links [links, 2] of all lines, and for each link the index of its line in `text`, from 0.

    `first_line` is the number of the first line of `text` in the file. Raises ValueError with file and line if a line
    is not in Pharaoh format.
    """
    lines = text.split("\n")[:-1]
    for row, line in enumerate(lines):
        if not _LINE.fullmatch(line):
            raise ValueError(
                f"{path}:{first_line + row}: {line[:60]!r} is not an alignment; lines look like 0-0 1-2 2-1"
            )
    links = np.array(text.replace("-", " ").split(), np.int64).reshape(-1, 2)
    return links, np.repeat(np.arange(len(lines)), [line.count("-") for line in lines])


def links_of_pieces(
    links: Links,
    rows: npt.NDArray[np.int64],
    keep: npt.NDArray[np.bool_],
    sides: Sequence[Words],
    location: Callable[[int], str],
) -> Encoded:
    """Converts links between words to links between pieces. Only the lines where `keep` [lines] is true are converted.

    `links` [links, 2] has word indices, and `rows` [links] has the line index of each link. `sides` has the source and
    target words. `location` converts a line index to the file and line number in error messages. Raises ValueError for
    a link to a word index beyond the end of the line.
    """
    distinct = np.unique(np.column_stack((rows, links))[keep[rows]], axis=0)
    rows, links = distinct[:, 0], distinct[:, 1:]
    first, count = [], []
    for side, words in enumerate(sides):
        outside = np.flatnonzero(links[:, side] >= words.per_line[rows])
        if len(outside):
            row, word = int(rows[outside[0]]), int(links[outside[0], side])
            raise ValueError(
                f"{location(row)} links word {word} of the {SIDES[side]} line, which has {words.per_line[row]} words "
                "(counted from 0, separated by spaces)"
            )
        index = (np.cumsum(words.per_line) - words.per_line)[rows] + links[:, side]
        first.append(words.first_piece[index])
        count.append(words.pieces[index])
    products = count[0] * count[1]  # number of links between pieces for each link between words
    within = np.arange(products.sum()) - np.repeat(np.cumsum(products) - products, products)
    source = np.repeat(first[0], products) + within // np.repeat(count[1], products)
    target = np.repeat(first[1], products) + within % np.repeat(count[1], products)
    per_line = np.bincount(np.repeat(rows, products), minlength=len(keep))[keep]
    return Encoded(((source << 16) | target).astype(np.uint32), per_line)
