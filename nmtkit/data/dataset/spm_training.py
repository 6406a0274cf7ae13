"""The tokenizer of a dataset: trained with SentencePiece on a random sample of limited size, loaded, or extended."""

import io
import logging
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import sentencepiece

from nmtkit.config.files import checkpoint_of
from nmtkit.data.corpora.lines import count_lines, lists_of_lines
from nmtkit.data.corpora.sampling import Sample
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import MANIFEST, TOKENIZER_FOLDER, read_manifest
from nmtkit.data.dataset.parallel_corpora import DatasetCorpora, ParallelCorpus
from nmtkit.data.directions import token_of
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
from nmtkit.jobs import progress

# Sums in unigram training depend on the number of threads. A fixed number gives the same model on every machine.
TRAINING_THREADS = 8
# The trainer of SentencePiece uses these characters internally, and skips every line that contains one of them.
TRAINER_RESERVED = str.maketrans({"\t": " ", "▅": " ", "\0": " "})

BYTES = 256  # number of byte pieces in a vocabulary with byte fallback
# The vocabulary of the new text is SURPLUS times as large as the number of new pieces, because the old tokenizer
# already has some pieces of this vocabulary.
SURPLUS = 3

log = logging.getLogger("nmtkit")


def load_tokenizer(paths: Sequence[Path]) -> Tokenizer:
    """Loads a tokenizer from a checkpoint, a dataset, a tokenizer folder, or one or two .model files.

    One .model file is for both sides; two files are for source and target. Raises FileNotFoundError if a file is
    missing, and ValueError if nmtkit cannot use a model. Logs a warning for a .model file that changes text or cannot
    encode all characters.
    """
    paths = [checkpoint_of(path) for path in paths]
    if len(paths) == 1 and paths[0].is_dir():
        inside = paths[0] / TOKENIZER_FOLDER
        return Tokenizer.load(inside if inside.is_dir() else paths[0])
    if len(paths) > 2:
        raise ValueError(f"--tokenizer-from names {len(paths)} files; give one file for both sides, or one per side")
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"--tokenizer-from {path}: no such file")
    if len(paths) == 1 and zipfile.is_zipfile(paths[0]):
        return _tokenizer_in_checkpoint(paths[0])
    tokenizer = Tokenizer(*(with_preparation(path.read_bytes()) for path in paths))
    for path, model in zip(paths, (tokenizer.source, tokenizer.target), strict=False):
        if model.facts.rewrites:
            log.warning("%s has its own rules to normalise text: decoded text may differ from the original", path)
        if not model.facts.byte_fallback:
            log.warning("%s has no byte fallback: characters that are not in its vocabulary become <unk>", path)
    return tokenizer


def _tokenizer_in_checkpoint(path: Path) -> Tokenizer:
    from nmtkit.data import checkpoint_file  # imported here, because the import loads torch

    try:
        return Tokenizer.from_state(checkpoint_file.read(path, mmap=True)["tokenizer"])
    except RuntimeError as error:
        raise ValueError(f"{path} does not contain a tokenizer of nmtkit: {error}") from error


def expected_pieces_per_word(paths: Sequence[Path]) -> dict[str, float]:
    """Returns the mean number of pieces per word of each side of the dataset in `paths`.

    Returns {} if `paths` is not a dataset, or if the manifest lacks these numbers.
    """
    if len(paths) != 1 or not (paths[0] / MANIFEST).is_file():
        return {}
    figures = read_manifest(paths[0])["report"].get("pieces_per_word")
    return figures if isinstance(figures, dict) and all(type(value) is float for value in figures.values()) else {}


def dataset_tokenizer(config: PreprocessConfig, corpora: DatasetCorpora) -> Tokenizer:
    """Loads, extends or trains the tokenizer of a dataset. Raises ValueError if the tokenizer lacks a tag."""
    tags = sorted({corpus.tag for corpus in corpora.all() if corpus.tag is not None})
    if config.tokenizer_from:
        tokenizer = load_tokenizer(config.tokenizer_from)
        if config.extend_tokenizer is not None:
            tokenizer = extended_by_corpora(tokenizer, config, corpora)
    else:
        tokenizer = train_tokenizer(config, corpora, tags)
    for tag in tags:
        tokenizer.check_tag(tag)
    return tokenizer


def train_tokenizer(config: PreprocessConfig, corpora: DatasetCorpora, tags: Sequence[str]) -> Tokenizer:
    """Trains a tokenizer on a sample of the training text. Raises ValueError if the sample is too small.

    A tokenizer of many languages is one model. Its last pieces are the language tokens, which count towards
    `config.vocab_size`.
    """
    kind, size = config.model_type, config.vocab_size
    if config.corpora is not None:
        texts = corpora.train_texts()
        tokens = [token_of(language, config.language_tokens or "both") for language in texts]
        if len(tokens) >= size:
            raise ValueError(f"--vocab-size {size} is too small for text and {len(tokens)} language tokens")
        lines = sample_languages(texts, config.spm_sample, config.spm_temperature, config.seed, config.max_line_bytes)
        log.info("training %s tokenizer on %s lines in %d languages", kind, f"{len(lines):,}", len(texts))
        progress.begin("Training the tokenizer")
        return Tokenizer(train_model(lines, size, kind, control=tokens))
    source, target = sample_pairs(corpora.train, config.spm_sample, config.seed, config.max_line_bytes)
    plural = "s" if config.separate_vocab else ""
    log.info("training %s tokenizer%s on %s lines", kind, plural, f"{len(source) + len(target):,}")
    progress.begin("Training the tokenizer")
    if config.separate_vocab:
        return Tokenizer(train_model(source, size, kind, tags), train_model(target, size, kind))
    return Tokenizer(train_model(source + target, size, kind, tags))


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


def extended_by_corpora(tokenizer: Tokenizer, config: PreprocessConfig, corpora: DatasetCorpora) -> Tokenizer:
    """Extends the tokenizer with pieces of the training text, and with the languages that the tokenizer does not have.

    The pieces come from the text of these languages. If there is no such text, the pieces come from all text.
    """
    if config.corpora is not None:
        texts = corpora.train_texts()
        codes = [code for code in corpora.languages if code not in tokenizer.languages]
        new = {code: texts[code] for code in codes if code in texts} or texts
        lines = sample_languages(new, config.spm_sample, config.spm_temperature, config.seed, config.max_line_bytes)
    else:
        codes = list(dict.fromkeys(code for code in config.languages if code and code not in tokenizer.languages))
        samples = sample_pairs(corpora.train, config.spm_sample, config.seed, config.max_line_bytes)
        of_codes = [sample for sample, code in zip(samples, config.languages, strict=True) if code in codes]
        lines = list(chain.from_iterable(of_codes or samples))
    return extended(tokenizer, lines, config.extend_tokenizer or 0, codes)


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
    """Returns the token of the language `code`, in the form of the existing tokens: __pl__, >>pl<< or pl_PL."""
    if not tokenizer.languages:
        return f"__{code}__"
    other, token = next(iter(tokenizer.languages.items()))
    return tokenizer.source_pieces([token])[0].replace(other, code)


# --- the sample -----------------------------------------------------------------------------------------------------


def sample_pairs(
    corpora: Sequence[ParallelCorpus], limit: int, seed: int, max_bytes: int
) -> tuple[list[str], list[str]]:
    """Samples up to `limit` lines of each side from all corpora. The samples of the sides are independent.

    Reads the corpora once, with bounded memory. Raises ValueError, with the file and the line, for bytes that are not
    UTF-8. Also raises ValueError if the two files of a corpus have different numbers of lines.
    """
    samples = Sample[str](limit, seed), Sample[str](limit, seed + 1)
    files = [] if any(corpus.container for corpus in corpora) else [path for each in corpora for path in each.paths]
    progress.begin("Reading text", "lines", lambda: count_lines(files) or None)
    for corpus in corpora:
        for side, lines in corpus.line_lists(max_bytes):
            samples[side].add(lines, partial(_is_sampled, max_bytes=max_bytes))
            progress.advance(len(lines))
    return samples[0].items(), samples[1].items()


def _is_sampled(line: str, max_bytes: int) -> bool:
    return bool(line.strip()) and len(line.encode()) <= max_bytes


def sample_languages(
    texts: Mapping[str, Sequence[Path]], limit: int, temperature: float, seed: int, max_bytes: int
) -> list[str]:
    """Samples about `limit` lines, or fewer lines if all files together have fewer. `texts` has files by language.

    The share of a language with n lines is proportional to n^(1 / temperature). Lines of a language with fewer lines
    than its share are repeated. Reads all files twice, with bounded memory.
    """

    def read(paths: Sequence[Path]) -> Iterator[list[str]]:
        for lines in chain.from_iterable(lists_of_lines(path, max_bytes) for path in paths):
            progress.advance(len(lines))
            yield lines

    progress.begin("Reading text", "lines", lambda: count_lines(list(chain.from_iterable(texts.values()))), passes=2)
    counts = [sum(sum(map(bool, map(str.strip, lines))) for lines in read(paths)) for paths in texts.values()]
    total = sum(count ** (1 / temperature) for count in counts) or 1.0
    size = min(limit, sum(counts))
    result = []
    for number, (count, paths) in enumerate(zip(counts, texts.values(), strict=True)):
        share = round(size * count ** (1 / temperature) / total)
        if not share:
            continue
        sample = Sample[str](share, seed + number)
        for lines in read(paths):
            sample.add(lines, partial(_is_sampled, max_bytes=max_bytes))
        drawn = sample.items()
        result += (drawn * -(-share // max(1, len(drawn))))[:share]
    return result
