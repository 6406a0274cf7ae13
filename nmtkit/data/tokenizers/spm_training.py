"""Trains SentencePiece models (BPE, unigram, characters, words) on lines, and extends tokenizers with new pieces."""

import io
import logging
import re
from collections.abc import Iterable, Sequence

import sentencepiece

from nmtkit.data.tokenizers.spm_model import (
    CONTROL,
    FOREIGN,
    NORMAL,
    ModelPiece,
    pieces_of,
    with_control_pieces,
    with_pieces,
    with_preparation,
)
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, SPACE_SYMBOL, SPECIALS, UNK, Tokenizer, normalize

# Sums in unigram training depend on the number of threads. A fixed number gives the same model on every machine.
TRAINING_THREADS = 8
# The trainer of SentencePiece uses these characters internally, and skips every line that contains one of them.
TRAINER_RESERVED = str.maketrans({"\t": " ", "▅": " ", "\0": " "})

BYTES = 256  # number of byte pieces in a vocabulary with byte fallback
# The vocabulary of the new text is SURPLUS times as large as the number of new pieces, because the old tokenizer
# already has some pieces of this vocabulary.
SURPLUS = 3

log = logging.getLogger("nmtkit")


def train_model(
    lines: Iterable[str],
    vocab_size: int,
    model_type: str = "bpe",
    tags: Sequence[str] = (),
    control: Sequence[str] = (),
) -> bytes:
    """Trains a SentencePiece model on raw `lines`. Returns the contents of the model file.

    `tags` become symbols that can precede a line. `control` are the last pieces of the model, such as language tokens.
    Encoding never produces these pieces.

    Raises ValueError if the text is too small or has too many characters for `vocab_size`. The message names a possible
    size if SentencePiece reports a size.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=(normalize(line.translate(TRAINER_RESERVED)) for line in lines),
            model_writer=model,
            vocab_size=vocab_size - len(control),
            model_type=model_type,
            byte_fallback=model_type != "word",  # a word vocabulary maps unknown words to <unk>
            normalization_rule_name="identity",
            user_defined_symbols=[SPACE_SYMBOL + tag for tag in tags],
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            num_threads=TRAINING_THREADS,
            max_sentence_length=1 << 20,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(str(error), vocab_size, model_type, len(control)) from error
    return with_control_pieces(with_preparation(model.getvalue()), control)


class VocabularySizeError(ValueError):
    """The text does not allow a vocabulary of this size. `possible` is the nearest size that the text allows."""

    def __init__(self, message: str, possible: int) -> None:
        super().__init__(f"{message} possible size is {possible}")
        self.possible = possible


def _training_error(message: str, vocab_size: int, model_type: str, control: int) -> ValueError:
    if largest := re.search(r"value <= (\d+)", message):
        start = f"the text is too small for --vocab-size {vocab_size}; the largest"
        return VocabularySizeError(start, int(largest[1]) + control)
    if smallest := re.search(r"required_chars\. \d+ vs (\d+)", message):
        start = f"--vocab-size {vocab_size} is too small for all characters; the smallest"
        return VocabularySizeError(start, int(smallest[1]) + control)
    if "char_model_trainer" in message:
        reason = "bytes and special symbols leave no room for characters"
        return ValueError(f"--vocab-size {vocab_size} is too small: {reason}")
    if "sentences_.empty()" in message:
        return ValueError("there is no text to train a tokenizer on: every line is empty")
    return ValueError(f"SentencePiece could not train a {model_type} model of {vocab_size} entries: {message}")


# --- new languages ----------------------------------------------------------------------------------------------------


def extended(tokenizer: Tokenizer, lines: Sequence[str], count: int, languages: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with up to `count` new pieces from `lines`, and with new tokens for the codes `languages`.

    Missing characters are added first, then the most frequent missing pieces. Old pieces keep their ids, except
    language tokens, which stay at the end of the table.

    New pieces rank below all old pieces. Text of the old languages is therefore segmented as before, unless a longer
    new piece matches. A BPE model applies the merges of new pieces last. In a unigram model, the score of a new
    piece is its log probability in `lines` plus the lowest log probability of an old piece.

    Raises ValueError for a tokenizer with two separate models, and for models of words or characters.
    """
    model, facts = tokenizer.source.model, tokenizer.source.facts
    if not tokenizer.one_model:
        raise ValueError("--extend-tokenizer needs one tokenizer for both sides, but --tokenizer-from has two")
    if facts.model_type not in ("bpe", "unigram"):
        raise ValueError(f"--extend-tokenizer works with bpe and unigram models, not {facts.model_type} models")
    table = pieces_of(model)
    end = len(table) - len(tokenizer.languages)
    lowest = min((piece.score for piece in table if piece.type == NORMAL), default=0.0)
    chosen = new_pieces(tokenizer, lines, count, facts.model_type, {piece.text for piece in table})
    added = [
        ModelPiece(piece.text, lowest + (piece.score if facts.model_type == "unigram" else -1.0 - rank))
        for rank, piece in enumerate(chosen)
    ]
    if added or languages:
        tokens_of = f" and the tokens of {', '.join(languages)}" if languages else ""
        log.info("the tokenizer gets %d new pieces%s", len(added), tokens_of)
    else:
        log.warning("--extend-tokenizer adds nothing: the tokenizer already has all languages and pieces of the text")
    tokens = [ModelPiece(token_like(tokenizer, code), 0.0, CONTROL) for code in languages]
    return Tokenizer(with_pieces(model, [*table[:end], *added, *table[end:], *tokens]))


def new_pieces(
    tokenizer: Tokenizer, lines: Sequence[str], count: int, model_type: str, known: set[str]
) -> list[ModelPiece]:
    """Trains a model on `lines` and returns up to `count` of its pieces that are not in `known`, best piece first."""
    if tokenizer.source.facts.rewrites:
        lines = [tokenizer.source.processor.normalize(line).replace(SPACE_SYMBOL, " ").strip() for line in lines]
    known = known | {text.removeprefix(FOREIGN) for text in known}
    size = len(SPECIALS) + BYTES + SURPLUS * count
    try:
        trained = train_model(lines, size, model_type)
    except VocabularySizeError as error:
        trained = train_model(lines, error.possible, model_type)
    missing = [piece for piece in pieces_of(trained) if piece.type == NORMAL and piece.text not in known]
    missing.sort(key=lambda piece: len(piece.text.removeprefix(SPACE_SYMBOL)) > 1)  # characters first; a stable sort
    return sorted(missing[:count], key=lambda piece: -piece.score)


def token_like(tokenizer: Tokenizer, code: str) -> str:
    """Returns the token of the language `code`, in the form of the tokenizer's language tokens, such as >>pl<<.

    If the tokenizer has no language tokens, the form is __pl__.
    """
    if not tokenizer.languages:
        return f"__{code}__"
    other, token = next(iter(tokenizer.languages.items()))
    return tokenizer.source_pieces([token])[0].replace(other, code)
