"""Converts text to ids and back with SentencePiece.

Encoding first prepares a line. It normalises the line to NFC, removes invisible characters that are not in the
vocabulary, replaces white space that is not in the vocabulary by U+0020, merges runs of U+0020, and removes U+0020 at
both ends. A space symbol of SentencePiece in the text is escaped. With byte fallback, no character is unknown, and
decoding returns the prepared line. Every vocabulary that nmtkit trains has byte fallback, except a vocabulary of words.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from nmtkit.config import suggestion
from nmtkit.data.tokenizers.spm_model import (
    FOREIGN,
    NEWEST_PREPARATION,
    SubwordFacts,
    model_facts,
    preparation_of,
    user_defined_symbols,
)
from nmtkit.text.encoded import Encoded
from nmtkit.text.languages import example_codes
from nmtkit.text.normalization import INVISIBLE_CHARACTERS, WHITE_SPACE, normalized

UNK, BOS, EOS = 0, 1, 2
FEW_LINES = 32  # fewer lines are encoded one by one, because a batch starts a thread, which has a fixed cost
SPECIALS = frozenset((UNK, BOS, EOS))
SPACE_SYMBOL = "▁"  # U+2581, which SentencePiece writes for a space; a literal U+2581 in text is escaped
# White space that rule 1 of `SubwordModel.prepared` can replace: tab, and the Unicode category Zs except U+0020.
SPACES = "\t\u00a0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u202f\u205f\u3000"
ESCAPE = "\ufdd0"  # a noncharacter: valid UTF-8, but never used in text
JOINT_FILE, SOURCE_FILE, TARGET_FILE = "joint.model", "source.model", "target.model"

logger = logging.getLogger("nmtkit")


def normalize(text: str, spaces: str = "") -> str:
    """Prepares one or more lines for SentencePiece.

    The result is in NFC, literal space symbols are escaped, and each character of `spaces` is replaced by U+0020.
    """
    for space in spaces:
        if space in text:
            text = text.replace(space, " ")
    return escaped(normalized(text))


def escaped(text: str) -> str:
    """Returns the text with an escape for each literal space symbol."""
    if SPACE_SYMBOL in text or ESCAPE in text:
        text = text.replace(ESCAPE, ESCAPE + ESCAPE).replace(SPACE_SYMBOL, ESCAPE + "_")
    return text


def unescape(text: str) -> str:
    """Removes the escapes of `normalize` from a line. The result is one line, because newlines become spaces."""
    if ESCAPE in text:
        text = re.sub(f"{ESCAPE}([_{ESCAPE}])", lambda match: SPACE_SYMBOL if match[1] == "_" else ESCAPE, text)
    return text.replace("\n", " ")


class SubwordModel:
    """A SentencePiece model: prepares text, and converts text to ids and ids to text.

    Raises ValueError for a damaged model, for a model whose unk, bos and eos ids are not 0, 1 and 2, and for a model
    that needs a newer nmtkit. The message names `side`.
    """

    def __init__(self, model: bytes, side: str = "source") -> None:
        self.model = model
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"the {side} tokenizer is not a SentencePiece model, or is damaged") from error
        special = (self.processor.unk_id(), self.processor.bos_id(), self.processor.eos_id())
        if special != (UNK, BOS, EOS):
            raise ValueError(f"the {side} tokenizer's unk, bos and eos ids are {special}; nmtkit needs (0, 1, 2)")
        self.preparation = preparation_of(model)
        if self.preparation > NEWEST_PREPARATION:
            raise ValueError(
                f"the {side} tokenizer prepares text by rule {self.preparation}, but this nmtkit knows the rules 1 to "
                f"{NEWEST_PREPARATION}; install a newer nmtkit"
            )

    def __len__(self) -> int:
        """The number of entries of the vocabulary."""
        return self.processor.get_piece_size()

    @cached_property
    def facts(self) -> SubwordFacts:
        return model_facts(self.model)

    @cached_property
    def piece(self) -> Callable[[int], str]:
        """A function that returns the piece of an id. The id must be a Python integer.

        Results are cached, because a call of the library takes 5 µs.
        """
        return cache(self.processor.id_to_piece)

    @cached_property
    def foreign_ids(self) -> dict[str, int]:
        """The pieces that only the model of the other side produces, and the ids of these pieces in the shared table.

        `spm_model.renumbered` makes this table. Text that is unknown to this model, such as a letter that occurs only
        in the training data of the other side, is looked up among these pieces. Marian and transformers produce the
        same ids, because both look up all pieces in one vocabulary.
        """
        unused = filter(self.processor.is_unused, range(len(self)))
        return {self.processor.id_to_piece(id).removeprefix(FOREIGN): id for id in unused}

    @cached_property
    def missing_spaces(self) -> str:
        """The characters of SPACES that are not pieces. Rule 1 replaces these characters by U+0020.

        The training data of the tokenizer did not contain these characters, or training replaced tabs by spaces.
        """
        known = self.foreign_ids
        return "".join(space for space in SPACES if self.processor.piece_to_id(space) == UNK and space not in known)

    @cached_property
    def missing(self) -> tuple[str, str]:
        """The invisible characters and the white space that the model encodes as <unk> or as bytes.

        Rule 2 removes these invisible characters and replaces this white space by U+0020. Other characters of
        both kinds are in the vocabulary, or the rules of the model change them.
        """

        def is_missing(char: str) -> bool:
            ids = self.encode_prepared([normalize(char)], add_eos=False).ids.tolist()
            return any(token == UNK or self.processor.is_byte(token) for token in ids)

        return "".join(filter(is_missing, INVISIBLE_CHARACTERS)), "".join(filter(is_missing, WHITE_SPACE))

    @cached_property
    def invisible(self) -> re.Pattern[str]:
        """A pattern for the invisible characters in `missing`."""
        return _any_of(self.missing[0])

    @cached_property
    def white_space(self) -> re.Pattern[str]:
        """A pattern for the white space in `missing`. U+0020 and the line feed are never in `missing`."""
        return _any_of(self.missing[1])

    @cached_property
    def replacements(self) -> dict[int, str | None]:
        """The table for `str.translate` of `prepared`: white space becomes U+0020, invisible characters vanish."""
        if self.preparation == 1:
            return dict.fromkeys(map(ord, self.missing_spaces), " ")
        removed, replaced = self.missing
        return dict.fromkeys(map(ord, removed)) | dict.fromkeys(map(ord, replaced), " ")

    @cached_property
    def _replaced(self) -> re.Pattern[str]:
        return _any_of("".join(map(chr, self.replacements)))

    def prepared(self, text: str) -> str:
        """Prepares one or more lines for SentencePiece. All text must pass through this method.

        Rule 1, of old tokenizers, keeps control characters and zero-width characters, which then become bytes. When
        raw text is translated, an earlier step removes these characters. Rule 2 removes them also from datasets.
        """
        if self.preparation == 1:
            return normalize(text, self.missing_spaces)
        if text.isascii():
            return text.translate(self.replacements)  # fast for ASCII text only; the pattern below is for other text
        text = normalized(text)
        replaced = self._replaced.sub(lambda char: char[0].translate(self.replacements), text)
        # neighbours of a removed character may combine
        return escaped(text if replaced == text else normalized(replaced))

    def prepared_line(self, line: str) -> str:
        """Returns `prepared` for one line. Line feeds become spaces, because lines of a dataset have no line feeds."""
        return self.prepared(line.replace("\n", " "))

    def encode(self, lines: Sequence[str]) -> Encoded:
        return self.encode_prepared([self.prepared_line(line) for line in lines], add_eos=True)

    def encode_prepared(self, lines: Sequence[str], add_eos: bool) -> Encoded:
        """Encodes lines that `prepared` has returned."""
        if len(lines) < FEW_LINES:
            rows = [self.processor.encode(line, return_type="numpy", add_eos=add_eos) for line in lines]
        else:
            rows = self.processor.encode(lines, return_type="numpy", add_eos=add_eos, num_threads=1)
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.concatenate(rows) if rows else np.empty(0, np.int32)
        positions = np.flatnonzero(ids == UNK)
        if len(positions) and self.foreign_ids:
            ends = np.cumsum(lengths)
            owners = np.searchsorted(ends, positions, side="right")
            surfaces = {
                owner: self.processor.encode(lines[owner], out_type=str) for owner in np.unique(owners).tolist()
            }
            indices = positions - (ends - lengths)[owners]
            chosen = [surfaces[owner][index] for owner, index in zip(owners.tolist(), indices.tolist(), strict=True)]
            ids[positions] = [self.foreign_ids.get(surface, UNK) for surface in chosen]
        return Encoded(ids, lengths)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of one sentence, on one line. Skips bos and eos."""
        text: str = self.processor.decode([int(token) for token in ids])
        if FOREIGN in text and self.foreign_ids:
            text = text.replace(FOREIGN, "")
        return unescape(text)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.piece(int(token)) for token in ids]


def _any_of(chars: str) -> re.Pattern[str]:
    """Returns a pattern that matches any of `chars`. Without characters, the pattern matches nothing."""
    return re.compile(f"[{re.escape(chars)}]" if chars else r"(?!)")


@cache  # one warning for each process
def _tell_of_rule_1() -> None:
    logger.warning(
        "an old version of nmtkit made this tokenizer: control characters and zero-width characters stay in its "
        "datasets, but are removed from raw text, so a test set of a dataset and the same text in a file can have "
        "different translations; to avoid this, train a model on a new dataset"
    )


class Tokenizer:
    """One SentencePiece model for both sides, or one for each side.

    The vocabulary is joint if there is one model, or two models that share one table of ids (`spm_model.renumbered`).
    `languages` has the ids of the language tokens of a multilingual model, such as __de__ or deu_Latn. These tokens are
    the control pieces at the end of the table.

    Raises the errors of `SubwordModel`.
    """

    def __init__(self, source_model: bytes, target_model: bytes | None = None) -> None:
        self.one_model = target_model is None
        self.source = SubwordModel(source_model, "source")
        self.target = self.source if target_model is None else SubwordModel(target_model, "target")
        self.source_model, self.target_model = self.source.model, self.target.model
        self.source_size, self.target_size = len(self.source), len(self.target)
        self.joint = self.one_model or _one_table(self.source, self.target)
        digest = hashlib.sha256(b"nmtkit tokenizer 1: NFC, escaped space sign\0")
        for model in (source_model,) if target_model is None else (source_model, target_model):
            digest.update(len(model).to_bytes(8, "little") + model)
        self.fingerprint = digest.hexdigest()

    # --- to and from files and checkpoints --------------------------------------------------------------------------

    @staticmethod
    def load(folder: Path) -> "Tokenizer":
        """Reads the files that `save` wrote. Raises FileNotFoundError, or ValueError if a model is damaged."""
        if (folder / JOINT_FILE).is_file():
            return Tokenizer((folder / JOINT_FILE).read_bytes())._with_notice()
        if (folder / SOURCE_FILE).is_file() and (folder / TARGET_FILE).is_file():
            return Tokenizer((folder / SOURCE_FILE).read_bytes(), (folder / TARGET_FILE).read_bytes())._with_notice()
        raise FileNotFoundError(f"{folder} holds no tokenizer ({JOINT_FILE}, or {SOURCE_FILE} and {TARGET_FILE})")

    def files(self) -> dict[str, bytes]:
        """Returns the contents of the files that `load` reads, by file name."""
        if self.one_model:
            return {JOINT_FILE: self.source_model}
        return {SOURCE_FILE: self.source_model, TARGET_FILE: self.target_model}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, contents in self.files().items():
            (folder / name).write_bytes(contents)

    def state(self) -> dict[str, Any]:
        """Returns the files as uint8 tensors by file name, for a checkpoint."""
        import torch

        return {
            name: torch.frombuffer(bytearray(contents), dtype=torch.uint8) for name, contents in self.files().items()
        }

    @staticmethod
    def from_state(state: dict[str, Any]) -> "Tokenizer":
        """Returns the tokenizer of a `state`. Raises ValueError if `state` does not have the files of a tokenizer."""
        models = {name: bytes(tensor.numpy()) for name, tensor in state.items()}
        if set(models) == {JOINT_FILE}:
            return Tokenizer(models[JOINT_FILE])._with_notice()
        if set(models) == {SOURCE_FILE, TARGET_FILE}:
            return Tokenizer(models[SOURCE_FILE], models[TARGET_FILE])._with_notice()
        raise ValueError(
            f"a tokenizer state holds {sorted(models)}, not {JOINT_FILE} or {SOURCE_FILE} and {TARGET_FILE}"
        )

    def _with_notice(self) -> "Tokenizer":
        """Returns this tokenizer. Logs a warning, once per process, if the tokenizer prepares text by rule 1."""
        if self.source.preparation < NEWEST_PREPARATION:
            _tell_of_rule_1()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.source_model, None if self.one_model else self.target_model)

    # --- text to ids ------------------------------------------------------------------------------------------------

    def encode_source(self, lines: Sequence[str]) -> Encoded:
        return self.source.encode(lines)

    def encode_target(self, lines: Sequence[str]) -> Encoded:
        return self.target.encode(lines)

    def check_lossless(self, setting: str) -> None:
        """Raises ValueError if encoding and decoding can lose characters. The message names `setting`."""
        for side, model in (("source", self.source), ("target", self.target)):
            if not model.facts.byte_fallback:
                raise ValueError(
                    f"{setting} decodes and re-encodes text, but the {side} tokenizer has no byte fallback and "
                    "would lose unknown characters; leave the setting out, or train the tokenizer with nmtkit"
                )

    # --- ids to text ------------------------------------------------------------------------------------------------

    def decode_source(self, ids: Sequence[int]) -> str:
        return self.source.decode(ids)

    def decode_target(self, ids: Sequence[int]) -> str:
        """Returns the text of one sentence, on one line. Skips bos and eos."""
        return self.target.decode(ids)

    def decode_target_batch(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode_target(ids) for ids in sentences]

    def source_pieces(self, ids: Sequence[int]) -> list[str]:
        return self.source.pieces(ids)

    def target_pieces(self, ids: Sequence[int]) -> list[str]:
        return self.target.pieces(ids)

    def knows(self, text: str) -> bool:
        """Returns whether the source side encodes `text` without <unk> and without byte fallback."""
        ids = self.encode_source([text]).ids.tolist()
        return all(token != UNK and not self.source.processor.is_byte(token) for token in ids)

    @cached_property
    def source_tags(self) -> frozenset[int]:
        """Ids of the tags. A tag is a symbol trained with --tag, which precedes a source line as a separate word."""
        symbols = user_defined_symbols(self.source_model)
        return frozenset(
            self.source.processor.piece_to_id(symbol) for symbol in symbols if symbol.startswith(SPACE_SYMBOL)
        )

    def has_tag(self, tag: str) -> bool:
        """Returns whether `tag` is a tag of the source vocabulary."""
        return self.source.processor.piece_to_id(SPACE_SYMBOL + tag) in self.source_tags

    def without_tags(self, line: str) -> str:
        """Returns a source line without the tags at its beginning. Metrics and counts of words need the text alone."""
        while self.source_tags and self.has_tag((words := line.partition(" "))[0]):
            line = words[2]
        return line

    @cached_property
    def languages(self) -> dict[str, int]:
        """Ids of the language tokens by code, such as "de" for __de__. Empty unless the model is multilingual."""
        ids = takewhile(self.source.processor.is_control, range(self.source_size - 1, EOS, -1))
        return {self.source.piece(token).strip("_<>"): token for token in reversed(list(ids))}

    @property
    def has_target_languages_only(self) -> bool:
        """Whether the language tokens name target languages only, as in multilingual models of Marian (>>deu<<)."""
        return any(self.source.piece(id).startswith(">>") for id in self.languages.values())

    def language_flags(self, source: str | None, target: str | None) -> list[str]:
        """Returns the flags of `nmtkit generate` that choose the languages. A code of None becomes an example code."""
        if self.has_target_languages_only:
            return ["--target-lang", target or example_codes(self.languages)[0]]
        pair = zip(("--source-lang", "--target-lang"), example_codes(self.languages, source, target), strict=True)
        return [word for words in pair for word in words] if self.languages else []

    def language_ids(
        self, source: str | None, target: str | None, flags: tuple[str, str] = ("--source-lang", "--target-lang")
    ) -> tuple[list[int], list[int]]:
        """Returns the ids of the language tokens at the beginning of a source sentence and of its translation.

        M2M-100, NLLB and mBART-50 begin each side with the token of the language of this side. Marian models with
        several target languages begin the source with the token of the target language, such as >>deu<<. Both lists are
        empty for a model without language tokens.

        Raises ValueError, with the known codes, if a code is unknown, missing or has no effect. Error messages use the
        names in `flags` for the two codes.
        """
        requested = {flag: code for flag, code in zip(flags, (source, target), strict=True) if code is not None}
        if not self.languages:
            if requested:
                flag = next(iter(requested))
                raise ValueError(f"{flag} is for multilingual models; this model has no language tokens")
            return [], []
        target_only = self.has_target_languages_only
        if target_only and source is not None:
            raise ValueError(
                f"{flags[0]} has no effect: this model has tokens of target languages only; leave {flags[0]} out"
            )
        known = ", ".join(sorted(self.languages))
        missing = [flag for flag in (flags[1:] if target_only else flags) if flag not in requested]
        if missing:
            raise ValueError(
                f"the model translates between several languages; give {' and '.join(missing)}, one of {known}"
            )
        for flag, code in requested.items():
            if code not in self.languages:
                raise ValueError(
                    f"{flag} {code}: the model does not have this language; {suggestion(code, sorted(self.languages))}"
                )
        ids = [self.languages[code] for code in requested.values()]
        return ids[:1], ids[1:]

    def check_tag(self, tag: str) -> None:
        """Raises ValueError if the source vocabulary does not have `tag` as one symbol.

        The symbol need not come from --tag, because tags may be part of the text that the tokenizer was trained on. But
        a word of letters alone, such as "de", must come from --tag: otherwise it is an ordinary word.
        """
        ids = self.source.processor.encode(tag)
        is_word = tag.isalpha() and not self.has_tag(tag) and tag not in user_defined_symbols(self.source_model)
        if len(ids) != 1 or ids[0] == UNK or is_word:  # a word model encodes any unknown word as one <unk>
            raise ValueError(f"the tokenizer has no tag {tag!r}; train it with --tag {tag}, or leave the tag out")


def _one_table(source: SubwordModel, target: SubwordModel) -> bool:
    return len(source) == len(target) and all(
        source.processor.id_to_piece(token).lstrip(FOREIGN) == target.processor.id_to_piece(token).lstrip(FOREIGN)
        for token in range(len(source))
    )
