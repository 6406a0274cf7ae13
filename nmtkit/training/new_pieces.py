"""Computes initial embedding rows of pieces that a checkpoint does not have, from the rows of the checkpoint.

The row of a new piece is the mean of the rows of the old pieces that spell the new piece (Gee et al. 2022, "Fast
Vocabulary Transfer"). If the old tokenizer spells the new piece with <unk> or bytes, the row is the mean of all old
rows. With such a row in the output projection, a new piece gets less probability than the average piece, so the
predictions of the old model hardly change (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language
Models"). Noise is not needed: the first update makes equal rows different, because their pieces occur in different
sentences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.data.tokenizers.tokenizer import SPACE_SYMBOL, SPECIALS, UNK, Tokenizer

Group = tuple[int, ...]  # old rows whose mean is the initial row of a piece; empty: the rows of all pieces


def groups_of(tokenizer: Tokenizer, old: Tokenizer, side: str, old_side: str, relative: str | None) -> list[Group]:
    """Returns the group of each piece of `side`. `side` and `old_side` are "source" or "target".

    If the old model has a language, the token of the language starts from its old token, even if the two tokens have
    different names. The token of a new language starts from the token of the language `relative`. If `relative` is
    None, it starts from the mean of all old language tokens.
    """
    pieces = getattr(tokenizer, f"{side}_pieces")(range(getattr(tokenizer, f"{side}_size")))
    names = getattr(old, f"{old_side}_pieces")(range(getattr(old, f"{old_side}_size")))
    texts = [piece.replace(SPACE_SYMBOL, " ") for piece in pieces]
    groups = []
    for piece, encoded in zip(pieces, getattr(old, f"encode_{old_side}")(texts).split(), strict=True):
        ids = encoded[:-1].tolist()
        if len(ids) > 1 and names[ids[0]] == SPACE_SYMBOL and not piece.startswith(SPACE_SYMBOL):
            ids = ids[1:]  # the tokenizer puts a space before every text
        unusable = any(token == UNK or names[token].startswith("<0x") for token in ids)
        groups.append(() if unusable else tuple(ids))
    like = None if relative is None else old.languages[relative]
    every = tuple(old.languages.values())
    for code, token in tokenizer.languages.items():
        groups[token] = (old.languages[code],) if code in old.languages else every if like is None else (like,)
    return groups


def means(old: Tensor, axis: int, groups: Sequence[Group]) -> Tensor:
    """Returns the initial weights of pieces: for each group of old pieces, the mean of the weights of the group.

    `old` is a weight of the old model with one row for each old piece along `axis`, for example an embedding matrix
    [old pieces, D] with axis 0. The result has one row for each group along the same axis. An empty group gets the mean
    of all old pieces other than special tokens.
    """
    rows = old.movedim(axis, 0).float()
    ordinary = rows[len(SPECIALS) :].mean(0)
    return torch.stack([rows[list(group)].mean(0) if group else ordinary for group in groups]).movedim(0, axis)


def check_relative(tokenizer: Tokenizer, old: Tokenizer, relative: str) -> None:
    """Raises ValueError if the old model does not have the language `relative`, or if no language is new."""
    if relative not in old.languages:
        known = ", ".join(sorted(old.languages)) or "none"
        raise ValueError(f"--new-language-from {relative}: --finetune-from does not have this language; known: {known}")
    if tokenizer.languages.keys() <= old.languages.keys():
        raise ValueError("--new-language-from has no effect: --finetune-from has all languages of the dataset")
