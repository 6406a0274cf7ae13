"""Initial weights of a model: all weights from the checkpoint of another run, or embeddings from a text file."""

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nmtkit.config import derive, flag_of, setting_text, suggestion
from nmtkit.data.dataset.binarized import Split
from nmtkit.data.tokenizers.spm_model import FOREIGN
from nmtkit.data.tokenizers.tokenizer import SPACE_SYMBOL, SPECIALS, UNK, Tokenizer
from nmtkit.models import building, checkpoint
from nmtkit.models.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.models.formats.vocabulary import HIDDEN

SideName = Literal["source", "target"]
PieceWeights = tuple[Tensor, Tensor, int, SideName, SideName]  # old and new tensor, axis of pieces, new and old side
Spelling = tuple[int, ...]  # ids of old pieces that spell a new piece; empty: the old pieces cannot spell the new piece

log = logging.getLogger("nmtkit")

BYTE = "<0x"  # beginning of the names of byte pieces, such as <0x0A>; this name is not the text of the piece
IMPROBABLE = 20.0  # `hidden_pieces` that no target contains get the mean output bias minus this number of nats


def start_from(
    model: Architecture,
    architecture: str,
    config: Any,
    tokenizer: Tokenizer,
    path: Path,
    relative: str | None = None,
    partial: bool = False,
) -> dict[SideName, int]:
    """Copies the weights of a checkpoint into the model. The vocabularies may differ.

    For the weights of pieces, see `copy_rows`. If `relative` is given, tokens of new languages start from the
    token of this language. The model also gets the shortlist of the checkpoint, unless the vocabularies differ.

    If `partial` is true, parameters that the checkpoint does not have, or has with another shape, keep their initial
    values. So a smaller model can start with a part of a larger model ("shrink and fine-tune", Shleifer and Rush 2020).

    Returns, for each side, the number of pieces that are also in the checkpoint. Raises ValueError for a checkpoint of
    another architecture, without the language `relative`, or without a parameter that fits. Unless `partial` is true,
    also raises ValueError if the model differs too much from the checkpoint to start from it (see `_difference`).
    """
    contents = checkpoint.load(path)
    name, weights = contents["architecture"], contents["model"]
    if name not in ARCHITECTURES or ARCHITECTURES[name].factory is not ARCHITECTURES[architecture].factory:
        raise ValueError(f"{path} is a {name}, not a {architecture}; give the same --arch")
    old_tokenizer = building.tokenizer_of(contents, path)
    old_config = derive(ARCHITECTURES[name].preset, contents["config"], f"{path}: {name}")
    old_axes = vocabulary_axes(name, old_config, building.vocabulary_of(old_tokenizer))
    axes = vocabulary_axes(architecture, config, building.vocabulary_of(tokenizer))
    if relative is not None:
        check_relative(tokenizer, old_tokenizer, relative)
    if tokenizer.fingerprint == old_tokenizer.fingerprint:
        model.shortlist = contents.get("shortlist")
    elif "shortlist" in contents:
        log.warning("the shortlist of %s is left out: the vocabularies differ; add one with nmtkit shortlist", path)
    state = model.state_dict()
    fitting = {
        key: tensor for key, tensor in state.items() if key in weights and _fits(tensor, weights[key], axes[key])
    }
    new, left_out = [key for key in state if key not in fitting], [key for key in weights if key not in state]
    merged = [f"{key} and {first}" for key, first in _merged(old_axes, state=state, old=weights)]
    refused, adapts = (changed_settings(config, old_config, kind) for kind in ("refused", "adapts"))
    effect = ""
    if not partial:
        if difference := _difference(state, weights, new, merged, refused=refused, adapts=adapts):
            raise ValueError(f"{path} {difference}; --finetune-partial takes only the parameters that fit")
        effect = ". The loss starts higher, until training has adapted the model."
        effect += f" The model does not have {', '.join(left_out)} of the checkpoint." if left_out else ""
    if changed := refused + adapts:
        log.warning("%s was trained with other settings: %s%s", path, "; ".join(changed), effect)
    if partial:
        _log_partial(path, fitting, new, left_out, merged)
    with_pieces = [
        (weights[key], tensor, axis, side, old_axes[key][axis])
        for key, tensor in fitting.items()
        for axis, side in axes[key].items()
    ]
    with torch.no_grad():
        for key, tensor in fitting.items():
            if not axes[key]:
                tensor.copy_(weights[key])
        copy_rows(with_pieces, tokenizer, old_tokenizer, relative)
    old_pieces = pieces_of(old_tokenizer)
    return {side: len(same_pieces(pieces, old_pieces[side])[0]) for side, pieces in pieces_of(tokenizer).items()}


def copy_rows(
    weights: Sequence[PieceWeights], tokenizer: Tokenizer, old_tokenizer: Tokenizer, relative: str | None
) -> None:
    """Copies weights with a row for each piece from a model with one vocabulary into a model with another vocabulary.

    Pieces that both vocabularies have keep their rows. If the old model has separate embeddings and the new model has
    one matrix, the matrix gets rows of both sides. If both old sides have a piece, the piece gets the row of the target
    side. The rows of new pieces are computed from the target side, too.

    The row of a new piece is the mean of the rows of the old pieces that spell the new piece (Gee et al. 2022, "Fast
    Vocabulary Transfer"). If the old tokenizer spells the new piece with <unk> or bytes, the row is the mean of the
    rows of all old pieces except special tokens. With the mean of all rows in the output projection, a new piece gets
    less probability than the average piece, so the predictions of the old model hardly change (Hewitt 2021,
    "Initializing New Word Embeddings for Pretrained Language Models"). Noise is not needed: the first update makes
    equal rows different, because their pieces occur in different sentences.
    """
    pieces, old_pieces = pieces_of(tokenizer), pieces_of(old_tokenizer)
    # called with a side of the new model and a side of the old model
    spelled = cache(partial(spellings, tokenizer, old_tokenizer, relative=relative))
    for old, tensor, axis, side, old_side in weights:
        known = set(old_pieces[old_side])
        new = [row for row, piece in enumerate(pieces[side]) if piece not in known]
        if new:
            # A new piece must not be hidden, even if hidden pieces (`hidden_pieces`) spell this new piece. So the mean
            # uses a copy of the bias in which hidden pieces have the mean bias of the visible pieces.
            visible = old if old.dim() > 1 else lifted(old, hidden_pieces(old))
            initial = means(visible, axis, [spelled(side, old_side)[row] for row in new])
            tensor.index_copy_(axis, torch.tensor(new, device=tensor.device), initial.to(tensor))
    # A second loop, because `weights` lists a shared matrix once for each old side. If a piece is new to one old side
    # and known to the other old side, the known row must overwrite the mean.
    for old, tensor, axis, side, old_side in weights:
        rows, old_rows = same_pieces(pieces[side], old_pieces[old_side])
        tensor.index_copy_(axis, rows.to(tensor.device), old.index_select(axis, old_rows).to(tensor))


def _fits(tensor: Tensor, old: Tensor, axes: Collection[int]) -> bool:
    """Returns whether both tensors have the same shape, except the lengths of `axes`, which are vocabulary sizes."""
    same = (tensor.shape[axis] == old.shape[axis] for axis in range(tensor.dim()) if axis not in axes)
    return tensor.dim() == old.dim() and all(same)


def changed_settings(config: Any, old: Any, finetuning: str) -> list[str]:
    """Returns the settings of an architecture that differ from the checkpoint, such as "--heads 8, here 4".

    Only the settings that declare this kind of `finetuning` are returned; `config.option` describes the kinds.
    """
    return [
        f"{flag_of(field)} {setting_text(before)}, here {setting_text(now)}"
        for field in dataclasses.fields(config)
        if (now := getattr(config, field.name)) != (before := getattr(old, field.name))
        and field.metadata.get("finetuning", "refused") == finetuning
    ]


def _difference(
    state: Mapping[str, Tensor],
    old: Mapping[str, Tensor],
    new: Sequence[str],
    merged: Sequence[str],
    *,
    refused: Sequence[str],
    adapts: Sequence[str],
) -> str | None:
    """Returns the reason why the model cannot compute the function of the checkpoint, or None if the model can.

    The reason is the end of a sentence that begins with the name of the checkpoint. `new` are the parameters of the
    model that the checkpoint does not have, or has with another shape. `merged` are pairs of parameters that are one
    matrix in the model and two matrices in the checkpoint. `refused` and `adapts` are changed settings
    (`changed_settings`).
    """
    if refused:
        return (
            "was trained with other settings, so its weights have another meaning in this model: "
            f"{'; '.join(refused)}. Leave out --arch and the flags that change settings of the checkpoint"
        )
    if missing := [key for key in new if key not in old]:
        return f"has no parameter {missing[0]}; its config differs from the config of this model"
    # training soon compensates for a missing vector, but not for a missing matrix
    if lost := [key for key in old if key not in state and (old[key].dim() > 1 or not adapts)]:
        return f"has {len(lost)} parameters that this model does not have, such as {lost[0]}"
    if merged:
        return f"has two matrices for {merged[0]}, which are one matrix in this model"
    shapes = [f"shape {tuple(old[key].shape)} for {key}, but this model has {tuple(state[key].shape)}" for key in new]
    return f"has {shapes[0]}" if shapes else None


def _log_partial(
    path: Path, fitting: Collection[str], new: Sequence[str], left_out: Sequence[str], merged: Sequence[str]
) -> None:
    """Logs the parameters that a partial start takes and leaves out. Raises ValueError if no parameter fits."""
    if merged:
        log.warning(
            f"{path} has two matrices where this model has one matrix; the model gets the first matrix of each pair"
            f"{_listed('pairs', merged)}"
        )
    if not fitting:
        raise ValueError(f"--finetune-partial: {path} has no parameter with a name and a shape of this model")
    log.info(
        f"{len(fitting)} of {len(fitting) + len(new)} parameters start with the values of {path}"
        f"{_listed('these do not', new)}{_listed('these parameters of the checkpoint are left out', left_out)}"
    )


def _merged(
    old_axes: Mapping[str, Mapping[int, SideName]], *, state: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> Iterator[tuple[str, str]]:
    """Yields pairs of names that are one matrix in the model and two different matrices in the checkpoint.

    Pairs of embeddings of two different vocabularies are left out, because the model may merge such embeddings.
    `old_axes` has the side of each embedding.
    """
    members: dict[tuple[str, ...], str] = {}
    for key, owner in checkpoint.tied_to(state).items():
        if key in old:
            first = members.setdefault((owner, *old_axes[key].values()), key)
            if not torch.equal(old[key], old[first]):
                yield key, first


def _listed(title: str, names: Sequence[str]) -> str:
    """Returns "; TITLE: a, b, c, …" with at most three names, or an empty text for no names."""
    return f"; {title}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else ""


def vocabulary_axes(architecture: str, config: Any, vocabulary: Vocabulary) -> dict[str, dict[int, SideName]]:
    """Returns, for each tensor of a model's state, the axes whose length is a vocabulary size, as {axis: side}.

    The function compares the shapes of models with different vocabulary sizes, without allocating their tensors. The
    side of a joint vocabulary is "source".
    """

    def shapes(source: int, target: int) -> dict[str, torch.Size]:
        with building.without_memory():
            changed = Vocabulary(source=source, target=target, joint=vocabulary.joint)
            model = building.build(architecture, config, changed)
        return {name: tensor.shape for name, tensor in model.state_dict().items()}

    source, target = vocabulary.source, vocabulary.target
    larger: dict[SideName, dict[str, torch.Size]] = {"source": shapes(source + 1, target + vocabulary.joint)}
    if not vocabulary.joint:
        larger["target"] = shapes(source, target + 1)
    axes: dict[str, dict[int, SideName]] = {}
    for name, shape in shapes(source, target).items():
        axes[name] = {
            axis: side
            for side, others in larger.items()
            for axis, size in enumerate(shape)
            if others[name][axis] != size
        }
        assert len(axes[name]) < 2, f"{name} has two axes whose length is a vocabulary size"
    return axes


def pieces_of(tokenizer: Tokenizer) -> dict[SideName, list[str]]:
    """Returns the pieces of each side by id.

    If two BPE models share one table of pieces, the tokenizer of each side puts FOREIGN before the pieces of the other
    side. The result has these pieces without FOREIGN.
    """
    pieces: dict[SideName, list[str]] = {
        "source": tokenizer.source_pieces(range(tokenizer.source_size)),
        "target": tokenizer.target_pieces(range(tokenizer.target_size)),
    }
    return {side: [piece.removeprefix(FOREIGN) for piece in of_side] for side, of_side in pieces.items()}


def same_pieces(new: Sequence[str], old: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Returns the rows of the pieces that both vocabularies have: the rows in `new`, and the rows in `old`."""
    old_row = {piece: row for row, piece in enumerate(old)}
    pairs = [(row, old_row[piece]) for row, piece in enumerate(new) if piece in old_row]
    rows = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return rows[:, 0], rows[:, 1]


# --- new pieces -------------------------------------------------------------------------------------------------------


def spellings(
    tokenizer: Tokenizer, old: Tokenizer, side: SideName, old_side: SideName, relative: str | None
) -> list[Spelling]:
    """Returns the spelling of each piece of `side` by old pieces of `old_side`. A side is "source" or "target".

    If the old model has a language, the token of this language starts from the old token, even if the two tokens have
    different names. The token of a new language starts from the token of the language `relative`, or from the mean of
    all old language tokens if `relative` is None. If source and target have separate vocabularies, the target
    vocabulary has no language tokens.
    """
    pieces, names = pieces_of(tokenizer)[side], pieces_of(old)[old_side]
    texts = [piece.replace(SPACE_SYMBOL, " ") for piece in pieces]
    spelled: list[Spelling] = []
    for piece, encoded in zip(pieces, getattr(old, f"encode_{old_side}")(texts).split(), strict=True):
        ids = encoded[:-1].tolist()
        if len(ids) > 1 and names[ids[0]] == SPACE_SYMBOL and not piece.startswith(SPACE_SYMBOL):
            ids = ids[1:]  # the tokenizer puts a space before every text
        unusable = piece.startswith(BYTE) or any(token == UNK or names[token].startswith(BYTE) for token in ids)
        spelled.append(() if unusable else tuple(ids))
    old_tokens = old.languages if old.joint or old_side == "source" else {}
    like = old_tokens.get(relative) if relative is not None else None
    every = tuple(old_tokens.values())
    for code, token in (tokenizer.languages if tokenizer.joint or side == "source" else {}).items():
        spelled[token] = (old_tokens[code],) if code in old_tokens else every if like is None else (like,)
    return spelled


def means(old: Tensor, axis: int, spelled: Sequence[Spelling]) -> Tensor:
    """Returns the initial weights of pieces: for each spelling, the mean of the weights of its old pieces.

    `old` is a weight of the old model with one row for each old piece along `axis`, for example an embedding matrix
    [old pieces, D] with axis 0. The result has one row for each spelling along the same axis. An empty spelling gets
    the mean of all old pieces other than special tokens.
    """
    rows = old.movedim(axis, 0).float()
    ordinary = rows[len(SPECIALS) :].mean(0)
    return torch.stack([rows[list(ids)].mean(0) if ids else ordinary for ids in spelled]).movedim(0, axis)


def check_relative(tokenizer: Tokenizer, old: Tokenizer, relative: str) -> None:
    """Raises ValueError if the old model does not have the language `relative`, or if no language is new."""
    if relative not in old.languages:
        known = suggestion(relative, sorted(old.languages))
        raise ValueError(f"--new-language-from {relative}: --finetune-from does not have this language; {known}")
    if tokenizer.languages.keys() <= old.languages.keys():
        raise ValueError("--new-language-from has no effect: --finetune-from has all languages of the dataset")


# --- hidden pieces ----------------------------------------------------------------------------------------------------


def hidden_pieces(bias: Tensor) -> list[int]:
    """Returns the ids of hidden pieces. Some imported models give them an output bias of -10,000, which hides them."""
    ids: list[int] = (bias <= HIDDEN / 2).nonzero().flatten().tolist()
    return ids


def lifted(bias: Tensor, ids: Sequence[int], below: float = 0.0) -> Tensor:
    """Returns an output bias in which the pieces `ids` have the mean bias of all visible pieces, minus `below`."""
    raised = bias.clone()
    raised[list(ids)] = bias[bias > HIDDEN / 2].mean() - below
    return raised


def show_hidden_pieces(model: Architecture, splits: Sequence[Split], path: Path, fixed: bool) -> None:
    """Increases the output bias of hidden pieces that the targets of `splits` contain, so that training can learn them.

    Without this change, each token of such a piece would have a loss of 10,000. Hidden pieces that no target contains
    become improbable instead of impossible, because label smoothing adds a part of their losses to the loss of every
    token. Logs the hidden pieces that the targets contain. If the bias is `fixed`, the bias does not change. `path` is
    the checkpoint with which the model starts.
    """
    bias = getattr(model.output_projection, "bias", None)
    if not isinstance(bias, Tensor) or not (hidden := hidden_pieces(bias.detach())):
        return
    counts = sum((target_counts(split)[hidden] for split in splits), np.zeros(len(hidden), np.int64))
    used = {piece: int(count) for piece, count in zip(hidden, counts, strict=True) if count}
    if used:
        names = splits[0].tokenizer.target_pieces(list(used))
        listed = [f"{name} ({count:,})" for name, count in zip(names, used.values(), strict=True)]
        log.warning(
            "%s cannot produce %d pieces, which occur %s times in the targets of %s: %s. %s",
            *(path, len(used), f"{sum(used.values()):,}", " and ".join(split.name for split in splits)),
            ", ".join(listed[:20]) + (", …" if len(listed) > 20 else ""),
            "Adapters do not change the output bias, so each of these tokens has a loss of 10,000; train without "
            "--adapter-rank, or remove the sentences"
            if fixed
            else "Their output bias is raised, and training learns the pieces",
        )
    if not fixed:
        with torch.no_grad():
            raised = lifted(bias, list(used))
            bias.copy_(lifted(raised, hidden_pieces(raised), IMPROBABLE))


def target_counts(split: Split) -> npt.NDArray[np.int64]:
    """Returns the number of target tokens of each piece. Reads the split in parts, which fit into memory."""
    counts, step = np.zeros(split.tokenizer.target_size, np.int64), 100_000
    for start in range(0, len(split), step):
        ids = split.target.gather(np.arange(start, min(start + step, len(split)))).ids
        counts += np.bincount(ids, minlength=len(counts))
    return counts


# --- vectors from a text file -----------------------------------------------------------------------------------------


def load_embeddings(model: Architecture, tokenizer: Tokenizer, side: SideName, path: Path) -> int:
    """Copies vectors of pieces from a text file into an embedding. Returns the number of known pieces in the file.

    The file has the format of word2vec, GloVe and fastText: each line has a piece and its numbers, separated by spaces.
    The first line may hold the number of lines and the width. Values are copied without scaling (the Transformer
    multiplies embeddings by sqrt(d_model)). Raises OSError, or ValueError for vectors of a different width, fields that
    are not numbers, and a file without a known piece.
    """
    pieces = pieces_of(tokenizer)[side]
    embedding, rows = embedding_of(model, side, len(pieces)), {piece: row for row, piece in enumerate(pieces)}
    width = embedding.embedding_dim
    known: dict[int, Tensor] = {}
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                piece, *fields = line.rstrip().split(" ")
                if number == 1 and len(fields) == 1 and width != 1:
                    continue
                if len(fields) != width:
                    raise ValueError(f"line {number} has {len(fields)} numbers, but the embedding has width {width}")
                if piece in rows:
                    vector = torch.tensor([float(field) for field in fields])
                    if not vector.isfinite().all():
                        raise ValueError(f"line {number} has a number that is not finite")
                    known[rows[piece]] = vector
        except ValueError as error:  # includes UnicodeDecodeError
            raise ValueError(f"{path}: {error}") from error
    if not known:
        raise ValueError(f"{path} has no vector for any {side} piece, such as {pieces[-1]!r}; train vectors on pieces")
    with torch.no_grad():
        embedding.weight[list(known)] = torch.stack(list(known.values()))
    return len(known)


def embedding_of(model: Architecture, side: SideName, pieces: int) -> nn.Embedding:
    """Returns the `nn.Embedding` of the source or target pieces of a model, into which vectors are loaded.

    The embedding is the first one with `pieces` rows inside `model.source_embedding` or `model.target_embedding`.
    Raises ValueError if there is no such embedding.
    """
    part = getattr(model, f"{side}_embedding", None)
    for module in part.modules() if isinstance(part, nn.Module) else ():
        if isinstance(module, nn.Embedding) and module.num_embeddings == pieces:
            return module
    raise ValueError(f"{type(model).__name__} has no {side}_embedding to load vectors into")
