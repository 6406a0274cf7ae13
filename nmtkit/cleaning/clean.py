"""`nmtkit clean`: mends and scores the pairs of corpora, and drops bad pairs. Each dropped pair gets a reason.

Cleaning has four steps:

1. The corpora are read once, in blocks. A random sample of the pairs is kept in memory.
2. The filters learn their statistics from the sample.
3. Worker processes mend and score the blocks, and write the mended text and the scores to scratch files. If the
   settings need scores of models, or probabilities that pairs are good, `LateScorer` adds these scores.
4. `Decision` drops pairs. The reason of a dropped pair is the first filter that drops the pair. Then `Decision` drops
   duplicates of kept pairs, and writes the outputs.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nmtkit.cleaning.blocks import BlockScorer, Scored, ScratchTable, StoredBlock, checked_scores, score_block
from nmtkit.cleaning.config import CleanConfig
from nmtkit.cleaning.decision import CleanReport, Decision
from nmtkit.cleaning.filters import FILTERS, Filter, FilterContext, TextBlock
from nmtkit.cleaning.filters.interface import Limits
from nmtkit.cleaning.mending import Mender, mended_pairs
from nmtkit.cleaning.probability import LateScorer, PairScorer, late_limits
from nmtkit.cleaning.scores import ScoreWriter, check_columns, columns_of, read_scores
from nmtkit.cleaning.similarity import rensa
from nmtkit.config.files import check_outputs
from nmtkit.data.corpora.corpus import Corpus, Pairs, as_columns, locate
from nmtkit.data.corpora.lines import count_lines
from nmtkit.data.corpora.pairs import pairs
from nmtkit.data.corpora.provenance import provenance_of_all, provenance_path, write_provenance
from nmtkit.data.corpora.sampling import Sample
from nmtkit.data.corpora.writer import CorpusWriter, output_paths
from nmtkit.jobs import progress
from nmtkit.jobs.threads import usable_cores
from nmtkit.jobs.workers import Workers

BLOCK = 4096  # pairs


def clean(config: CleanConfig, names: Sequence[str], configs: dict[str, Any], scorer: PairScorer | None) -> CleanReport:
    """Writes the kept pairs of the corpora `names` to `config.output`, and the other files that `config` names.

    `configs` has the config of each filter, in the order in which the filters are applied. `scorer` scores the pairs
    that all filters keep, with translation models or with a neural metric. Raises ValueError or OSError for errors in
    the settings or the text, and then writes no file.
    """
    corpora, context = inputs_of(config, names)
    check_files(config, [*corpora, *context.exclude, *context.domain])
    filters = make_filters(configs, context)
    score = partial(score_corpora, config, corpora, filters)
    return write_outputs(config, corpora, filters, score, scorer)


def inputs_of(config: CleanConfig, names: Sequence[str]) -> tuple[list[Corpus], FilterContext]:
    """Returns the corpora with these names, and the context of the filters: languages, other corpora, corrections."""
    languages = config.source_lang, config.target_lang
    corpora = [locate(name, *languages, as_columns(config.columns)) for name in names]
    excluded, domain = (tuple(locate(name, *languages) for name in each) for each in (config.exclude, config.domain))
    mend = mended_pairs if config.mend else None
    return corpora, FilterContext(*languages, excluded, domain, config.lid_model, mend)


def make_filters(configs: dict[str, Any], context: FilterContext) -> dict[str, Filter]:
    """Returns a filter for each config in `configs`. The filters are not fitted yet."""
    return {name: FILTERS[name].factory(each, context) for name, each in configs.items()}


def scorer_of(config: CleanConfig) -> PairScorer | None:
    """Returns the scorer that `config` needs, or None if `config` needs no models.

    The method `fit` of the scorer loads or trains the models. Raises FileNotFoundError if a checkpoint is missing.
    """
    if not config.uses_models:
        return None
    if config.quality is not None:
        from nmtkit.cleaning.quality import EstimatedQuality

        return EstimatedQuality(config.quality)
    from nmtkit.cleaning.dual_cross_entropy import DualCrossEntropy, SelfTrained

    languages = config.source_lang, config.target_lang
    if config.forward is not None and config.backward is not None:
        return DualCrossEntropy(config.forward.absolute(), config.backward.absolute(), languages)
    assert config.output is not None
    return SelfTrained(Path(f"{config.output}.models"), languages, config.self_train_updates)


def check_files(config: CleanConfig, corpora: Sequence[Corpus]) -> None:
    """Raises ValueError if an output would overwrite a file of `corpora`, another input, or another output."""
    inputs = [path for corpus in corpora for path in corpus.paths()]
    outputs: dict[str, Path | None] = {"--scores": config.scores, "--report": config.report}
    for flag, name in (("--output", config.output), ("--dropped", config.dropped)):
        paths = [] if name is None else output_paths(name, (config.source_lang, config.target_lang))
        outputs |= {f"{flag} ({path.name})": path for path in paths}
    check_outputs(outputs, [*inputs, config.from_scores, config.lid_model, config.forward, config.backward])


def write_outputs(
    config: CleanConfig,
    corpora: Sequence[Corpus],
    filters: dict[str, Filter],
    score: Callable[[Path, Sequence[str]], Scored],
    scorer: PairScorer | None,
) -> CleanReport:
    """Decides which pairs to keep, and writes the outputs that `config` names.

    `score` returns the scores of all pairs. Its arguments are a folder for scratch files and the names of all scores.
    If the scores are not read from a file, `LateScorer` then adds the model scores and the probabilities.
    """
    assert config.output is not None
    languages = config.source_lang, config.target_lang
    sources = provenance_of_all(corpus.paths() for corpus in corpora)
    if config.duplicate_similarity is not None:
        rensa()  # a missing package is noticed before the pairs are scored
    with ExitStack() as stack:
        writer = stack.enter_context(CorpusWriter(config.output, languages))
        dropped = stack.enter_context(CorpusWriter(config.dropped, languages)) if config.dropped else None
        scratch = Path(tempfile.mkdtemp(prefix=".clean.", dir=writer.paths[0].parent))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        read = None if config.from_scores is None else columns_of(config.from_scores)
        late = late_limits(scorer, read, config.min_model, config.probability_limit())
        limits: dict[str, Limits] = {**filters, **late}
        if config.from_scores is not None:
            check_columns(config.from_scores, columns_of(config.from_scores), list(limits))
        scores = ScoreWriter(config.scores, list(limits), stack) if config.scores else None
        scored = score(scratch, list(limits))
        if late and config.from_scores is None:
            each = list(filters.values())
            late_scorer = LateScorer(each, partial(score_block, each), scorer, late, config.seed)
            scored.scores = late_scorer.add(scored.blocks, scored.scores, scratch / "late")
        progress.begin("Writing", "pairs", len(scored.keys))
        report = Decision(config, limits, corpora, scored, scratch).write(writer, dropped, scores)
    provenance_path(writer.paths).unlink(missing_ok=True)  # the provenance of older files with the same names
    if sources:
        facts = {"source": "nmtkit clean", "filters": list(filters), "read": report.read, "pairs": report.kept}
        write_provenance(writer.paths, {**facts, "languages": list(languages), "corpora": sources})
    return report


PairSample = Sample[tuple[str, str]]


def read_blocks(corpora: Sequence[Corpus], sample: PairSample) -> Iterator[tuple[int, Pairs]]:
    """Yields each block of pairs, after the index of its corpus. Adds the pairs of each block to the sample."""
    for index, corpus in enumerate(corpora):
        for part in pairs(corpus, BLOCK):
            sample.add(list(zip(part.sources, part.targets, strict=True)))
            progress.advance(len(part))
            yield index, part


def count_pairs(corpora: Sequence[Corpus]) -> int | None:
    """Returns the number of pairs if all corpora are text files. Otherwise returns None, because counting is slow."""
    return None if any(corpus.format for corpus in corpora) else count_lines([corpus.source for corpus in corpora])


def fit(filters: dict[str, Filter], sample: PairSample, mends: bool) -> None:
    """Fits each filter on the pairs of the sample that all earlier filters keep. If `mends`, mends the pairs first."""
    sides = [list(side) for side in zip(*sample.items(), strict=True)]
    texts = TextBlock(*(map(Mender(), sides) if mends else sides))
    for name, each in filters.items():
        progress.begin(f"Fitting filter {name}")
        each.fit(texts)
        keep = ~each.drops(checked_scores(each, texts))
        if not keep.all():
            texts = texts.select(keep)


def score_corpora(
    config: CleanConfig, corpora: Sequence[Corpus], filters: dict[str, Filter], scratch: Path, columns: Sequence[str]
) -> Scored:
    """Mends all pairs. Computes their scores, or reads the scores `columns` from the file `config.from_scores`."""
    sample = PairSample(config.sample, config.seed)
    blocks = []
    progress.begin("Reading", "pairs", lambda: count_pairs(corpora))
    for number, (index, part) in enumerate(read_blocks(corpora, sample)):
        blocks.append(StoredBlock(index, scratch / str(number)))
        blocks[-1].write(part)
    active = list(filters.values()) if config.from_scores is None else []
    if config.from_scores is None:
        fit(filters, sample, config.mend)
    table, mended = ScratchTable(scratch), Counter[str]()
    checksums = [np.empty(0, np.uint32)]
    progress.begin("Scoring", "pairs", sample.count)
    with Workers(config.workers or usable_cores(), partial(BlockScorer, active, config.mend)) as workers:
        for _, (scores, keys, sums) in workers.imap((BlockScorer.score, block) for block in blocks):
            table.append(scores, keys)
            if config.from_scores is not None:
                checksums.append(sums)
            progress.advance(len(keys))
        for counts in workers.broadcast((BlockScorer.mended,)):
            mended.update(counts)
    scored = table.scored(blocks, dict(mended))
    if config.from_scores is not None:
        scored.scores = read_scores(config.from_scores, columns, np.concatenate(checksums), scratch / "earlier")
    return scored
