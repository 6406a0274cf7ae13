"""`nmtkit clean`: mends and scores the pairs of corpora, and drops bad pairs. Each dropped pair gets a reason.

Cleaning has four steps:

1. The corpora are read once, in blocks. A random sample of the pairs is kept in memory.
2. The filters learn their statistics from the sample.
3. Worker processes mend and score the blocks, and write the mended text and the scores to scratch files. If the
   settings need scores of models, or probabilities that pairs are good, `LateScorer` adds these scores.
4. `Decision` drops pairs. The reason of a dropped pair is the first filter that drops the pair. Then `Decision` drops
   duplicates of kept pairs, and writes the outputs.
"""

import pickle
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from nmtkit.cleaning.blocks import BlockScorer, Scored, ScratchTable, StoredBlock, checked_scores, score_block
from nmtkit.cleaning.config import CleanConfig
from nmtkit.cleaning.decision import CleanReport, Decision
from nmtkit.cleaning.filters import FILTERS, Filter, FilterContext, TextBlock
from nmtkit.cleaning.filters.interface import Limits
from nmtkit.cleaning.mending import mended_pairs
from nmtkit.cleaning.probability import LateScorer, PairScorer, late_limits
from nmtkit.cleaning.scores import ScoreReader, ScoreWriter, columns_of
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


def clean(
    config: CleanConfig,
    names: Sequence[str],
    configs: dict[str, Any],
    scorer: PairScorer | None = None,
) -> CleanReport:
    """Writes the kept pairs of the corpora `names` to `config.output`, and the other files that `config` names.

    `configs` has the config of each filter, in the order in which the filters are applied. `scorer` scores the pairs
    that all filters keep, with translation models or with a neural metric. Raises ValueError or OSError for errors in
    the settings or the text, and then writes no file.
    """
    corpora = corpora_of(config, names)
    others = (corpora_of(config, each, columns=False) for each in (config.exclude, config.domain))
    check_files(config, [*corpora, *chain.from_iterable(others)])
    filters = make_filters(config, configs)
    score = partial(score_corpora, config, corpora, filters)
    return write_outputs(config, corpora, filters, score, scorer)


def corpora_of(config: CleanConfig, names: Sequence[str], columns: bool = True) -> list[Corpus]:
    """Returns the corpora `names` in the languages of `config`. If `columns` is false, ignores `config.columns`."""
    chosen = as_columns(config.columns) if columns else None
    return [locate(name, config.source_lang, config.target_lang, chosen) for name in names]


def make_filters(config: CleanConfig, configs: dict[str, Any]) -> dict[str, Filter]:
    """Returns the filters of `configs`, which are not fitted yet."""
    languages = config.source_lang, config.target_lang
    excluded, domain = (tuple(corpora_of(config, names, columns=False)) for names in (config.exclude, config.domain))
    context = FilterContext(*languages, excluded, domain, config.lid_model, mended_pairs if config.mend else None)
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
        for path in (config.forward, config.backward):
            if not path.is_file():
                raise FileNotFoundError(f"no such checkpoint: {path}")
        return DualCrossEntropy(config.forward.absolute(), config.backward.absolute(), languages)
    assert config.output is not None
    return SelfTrained(Path(f"{config.output}.models"), languages, config.self_train_updates)


def check_files(config: CleanConfig, corpora: Sequence[Corpus]) -> None:
    """Raises ValueError if an output would overwrite a file of `corpora`, another input, or another output."""
    languages = config.source_lang, config.target_lang
    inputs = [path for corpus in corpora for path in corpus.paths()]
    outputs: dict[str, Path | None] = {"--scores": config.scores, "--report": config.report}
    for flag, name in (("--output", config.output), ("--dropped", config.dropped)):
        for path in [] if name is None else output_paths(name, languages):
            outputs[f"{flag} ({path.name})"] = path
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
        scores = stack.enter_context(ScoreWriter(config.scores)) if config.scores else None
        scratch = Path(tempfile.mkdtemp(prefix=".clean.", dir=writer.paths[0].parent))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        read = None if config.from_scores is None else columns_of(config.from_scores)
        late = late_limits(scorer, read, config.min_model, config.probability_limit())
        limits: dict[str, Limits] = {**filters, **late}
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
    """Yields all blocks of pairs, with the index of their corpus. Adds the pairs to the sample."""
    for index, corpus in enumerate(corpora):
        for part in pairs(corpus, BLOCK):
            sample.add(list(zip(part.sources, part.targets, strict=True)))
            progress.advance(len(part))
            yield index, part


def count_pairs(corpora: Sequence[Corpus]) -> int | None:
    """Returns the number of pairs if all corpora are text files, or None if counting is not cheap."""
    return None if any(corpus.format for corpus in corpora) else count_lines([corpus.source for corpus in corpora])


def fit(filters: dict[str, Filter], sample: PairSample, mends: bool) -> None:
    """Fits each filter on the pairs of the sample that all earlier filters keep. If `mends`, mends the pairs first."""
    sources, targets = map(list, zip(*sample.items(), strict=True))
    part = Pairs(sources, targets, [{}] * len(sources))
    if mends:
        part = mended_pairs(part)
    texts = TextBlock(part.sources, part.targets)
    for name, each in filters.items():
        progress.begin(f"Fitting filter {name}")
        each.fit(texts)
        keep = ~each.drops(checked_scores(each, texts))
        if not keep.all():
            texts = texts.select(keep)


def score_corpora(
    config: CleanConfig,
    corpora: Sequence[Corpus],
    filters: dict[str, Filter],
    scratch: Path,
    columns: Sequence[str],
) -> Scored:
    """Mends and scores all pairs. If `config.from_scores` is given, reads the scores `columns` from this file."""
    earlier = None if config.from_scores is None else ScoreReader(config.from_scores, columns)
    sample = PairSample(config.sample, config.seed)
    blocks = []
    progress.begin("Reading", "pairs", lambda: count_pairs(corpora))
    for number, (index, part) in enumerate(read_blocks(corpora, sample)):
        blocks.append(StoredBlock(index, scratch / str(number)))
        with blocks[-1].path.open("wb") as file:
            pickle.dump(part, file, pickle.HIGHEST_PROTOCOL)
    active: list[Filter] = []
    if earlier is None:
        active = list(filters.values())
        fit(filters, sample, config.mend)
    table, mended = ScratchTable(scratch), Counter[str]()
    progress.begin("Scoring", "pairs", sample.count)
    with Workers(config.workers or usable_cores(), partial(BlockScorer, active, config.mend)) as workers:
        for _, (scores, keys, sums) in workers.imap((BlockScorer.score, block) for block in blocks):
            table.append(scores if earlier is None else earlier.next(sums), keys)
            progress.advance(len(keys))
        for counts in workers.broadcast((BlockScorer.mended,)):
            mended.update(counts)
    if earlier is not None:
        earlier.finish()
    return table.scored(blocks, dict(mended))
