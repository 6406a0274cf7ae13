"""The tokenizer of a dataset: loaded, extended, or trained on a random sample of limited size."""

import logging
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from nmtkit.config.files import checkpoint_of
from nmtkit.data.corpora.lines import count_lines, lists_of_lines
from nmtkit.data.corpora.sampling import Sample
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import MANIFEST, TOKENIZER_FOLDER, read_manifest
from nmtkit.data.dataset.parallel_corpora import DatasetCorpora, ParallelCorpus
from nmtkit.data.directions import token_of
from nmtkit.data.tokenizers.spm_model import with_preparation
from nmtkit.data.tokenizers.spm_training import extended, train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.jobs import progress

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
    """Trains a tokenizer on a sample of the training text.

    Raises ValueError if `config.vocab_size` is too small for the characters or the language tokens, or if the sample
    has too little text for this size.

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
