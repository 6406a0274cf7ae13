"""Subword tokenizers of XLM-R and mT5, which COMET and MetricX use."""

from pathlib import Path
from typing import Any, Literal

from nmtkit.data.tokenizers.spm_model import CONTROL, UNKNOWN, USER_DEFINED_PIECE, charsmap_of, pieces_of

TOKENIZER_FILES = ("tokenizer.json", "sentencepiece.bpe.model", "spiece.model")


def load_tokenizer(folder: Path, family: Literal["xlm-roberta", "mt5"], embeddings: int) -> Any:
    """Returns the `tokenizers.Tokenizer` of a folder: tokenizer.json, or else a SentencePiece model.

    `embeddings` is the number of embeddings of the network.

    Classes of transformers are not used, because their segmentation differs between versions. Raises FileNotFoundError
    if the folder has neither file, and ValueError for a damaged file, and for more pieces than embeddings.
    """
    from tokenizers import Tokenizer

    path = next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.suffix == ".json" else from_sentencepiece(path, family)
    except Exception as error:  # the package tokenizers raises the class Exception, not a subclass
        raise ValueError(f"{path} is damaged, or is not a tokenizer: {error}") from error
    if (size := tokenizer.get_vocab_size()) > embeddings:
        raise ValueError(
            f"{path} has {size} pieces, but the network has {embeddings} embeddings; the tokenizer is for another model"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def from_sentencepiece(path: Path, family: Literal["xlm-roberta", "mt5"]) -> Any:
    """Returns a tokenizer with the pieces and the normaliser of a SentencePiece unigram model.

    The steps are the same as in transformers 4, which COMET and MetricX were published with: bytes never replace
    unknown characters. XLM-R has its special pieces in a different order than the file, and adds <mask> at the end.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    model = path.read_bytes()
    pieces = pieces_of(model)
    table = [(piece.text, piece.score) for piece in pieces]
    special = [piece.text for piece in pieces if piece.type in (UNKNOWN, CONTROL, USER_DEFINED_PIECE)]
    unknown = next(index for index, (text, _) in enumerate(table) if text == "<unk>")
    if family == "xlm-roberta":
        first = ["<s>", "<pad>", "</s>", "<unk>"]
        table = [*((text, 0.0) for text in first), *table[3:], ("<mask>", 0.0)]
        special, unknown = [*first, "<mask>"], 3
    tokenizer: Any = Tokenizer(models.Unigram(table, unk_id=unknown, byte_fallback=False))
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    steps: list[Any] = [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    if charsmap := charsmap_of(model):
        steps.insert(0, normalizers.Precompiled(charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    return tokenizer
