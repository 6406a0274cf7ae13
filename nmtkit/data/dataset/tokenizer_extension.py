"""Adds pieces and language tokens for new languages to a SentencePiece model. Old pieces keep their ids."""

import logging
import re
from collections.abc import Sequence

import sentencepiece

from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.parallel_corpora import DatasetCorpora
from nmtkit.data.dataset.spm_training import sample_languages, sample_pairs, train_model
from nmtkit.data.tokenizers.spm_model import CONTROL, FOREIGN, NORMAL, Piece, model_facts, pieces_of, with_pieces
from nmtkit.data.tokenizers.tokenizer import SPACE_SYMBOL, SPECIALS, Tokenizer

log = logging.getLogger("nmtkit")

BYTES = 256  # number of byte pieces in a vocabulary with byte fallback
# The vocabulary of the new text is SURPLUS times as large as the number of new pieces, because the old table already
# has some pieces of this vocabulary.
SURPLUS = 3


def extended(tokenizer: Tokenizer, lines: Sequence[str], count: int, languages: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with up to `count` new pieces from `lines`, and with new tokens for the codes `languages`.

    Missing characters are added first, then the most frequent missing pieces. Old pieces keep their ids, except
    language tokens, which stay at the end of the table.

    New pieces rank below all old pieces. Text of the old languages is therefore segmented as before, unless a longer
    new piece matches. A BPE model applies the merges of new pieces last. In a unigram model, the score of a new
    piece is its log probability in `lines` plus the lowest log probability of an old piece.

    Raises ValueError for a tokenizer with two separate models, and for models of words or characters.
    """
    model = tokenizer.source_model
    facts = model_facts(model)
    if not tokenizer.one_model:
        raise ValueError("--extend-tokenizer needs one tokenizer for both sides, but --tokenizer-from has two")
    if facts.model_type not in ("bpe", "unigram"):
        raise ValueError(f"--extend-tokenizer works with bpe and unigram models, not {facts.model_type} models")
    table = pieces_of(model)
    end = len(table) - len(tokenizer.languages)
    lowest = min((piece.score for piece in table if piece.type == NORMAL), default=0.0)
    chosen = new_pieces(tokenizer, lines, count, facts.model_type, {piece.text for piece in table})
    added = [
        Piece(piece.text, lowest + (piece.score if facts.model_type == "unigram" else -1.0 - rank))
        for rank, piece in enumerate(chosen)
    ]
    if added or languages:
        tokens_of = f" and the tokens of {', '.join(languages)}" if languages else ""
        log.info("the tokenizer gets %d new pieces%s", len(added), tokens_of)
    else:
        log.warning(
            "--extend-tokenizer adds nothing, because the tokenizer has all languages and pieces of the training text"
        )
    tokens = [Piece(token_like(tokenizer, code), 0.0, CONTROL) for code in languages]
    return Tokenizer(with_pieces(model, [*table[:end], *added, *table[end:], *tokens]))


def extended_by_corpora(tokenizer: Tokenizer, config: PreprocessConfig, corpora: DatasetCorpora) -> Tokenizer:
    """Extends the tokenizer with pieces of the training text, and with the languages that the tokenizer does not have.

    The pieces come from the text of these languages. If there is no such text, the pieces come from all text.
    """
    if config.corpora is not None:
        texts = corpora.train_texts()
        codes = [code for code in corpora.languages if code not in tokenizer.languages]
        new = {code: texts[code] for code in codes if code in texts} or texts
        settings = config.spm_sample, config.spm_temperature, config.seed, config.max_line_bytes
        lines = sample_languages(new, *settings)
    else:
        is_new = [code is not None and code not in tokenizer.languages for code in config.languages]
        samples = sample_pairs(corpora.train, config.spm_sample, config.seed, config.max_line_bytes)
        lines = [
            line for sample, chosen in zip(samples, is_new, strict=True) if chosen or not any(is_new) for line in sample
        ]
        codes = list(dict.fromkeys(code for code in config.languages if code and code not in tokenizer.languages))
    return extended(tokenizer, lines, config.extend_tokenizer or 0, codes)


def new_pieces(tokenizer: Tokenizer, lines: Sequence[str], count: int, model_type: str, known: set[str]) -> list[Piece]:
    """Trains a model on `lines` and returns up to `count` of its pieces that are not in `known`, best piece first."""
    if model_facts(tokenizer.source_model).rewrites:
        processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.source_model)
        lines = [processor.normalize(line).replace(SPACE_SYMBOL, " ").strip() for line in lines]
    known = known | {text.removeprefix(FOREIGN) for text in known}
    size = len(SPECIALS) + BYTES + SURPLUS * count
    try:
        trained = train_model(lines, size, model_type)
    except ValueError as error:
        possible = re.search(r"(?:largest|smallest) possible size is (\d+)", str(error))
        if possible is None:
            raise
        trained = train_model(lines, int(possible[1]), model_type)
    missing = [piece for piece in pieces_of(trained) if piece.type == NORMAL and piece.text not in known]
    missing.sort(
        key=lambda piece: len(piece.text.removeprefix(SPACE_SYMBOL)) > 1
    )  # characters first; the sort is stable
    return sorted(missing[:count], key=lambda piece: -piece.score)


def token_like(tokenizer: Tokenizer, code: str) -> str:
    """Returns the token of the language `code`, in the form of the existing tokens: __pl__, >>pl<< or pl_PL."""
    if not tokenizer.languages:
        return f"__{code}__"
    other, token = next(iter(tokenizer.languages.items()))
    return tokenizer.source_pieces([token])[0].replace(other, code)
