"""Loads the models to serve. Each language pair has a model, search settings and text settings."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from nmtkit.config import changed_flags, derive
from nmtkit.config.plugins import load_plugins
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer
from nmtkit.jobs.distributed import rank_device
from nmtkit.models import building, checkpoint
from nmtkit.serving.config import CPU_MAX_TOKENS, FORMALITY_TAGS, ModelPath, ServeJob
from nmtkit.serving.fair_queue import Pair
from nmtkit.serving.languages import described
from nmtkit.text import glossary
from nmtkit.text.glossary import Glossary
from nmtkit.text.languages import is_code
from nmtkit.translation.languages import codes_for
from nmtkit.translation.options import GLOSSARY_RULE, TextOptions
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.pivot import of_first_step
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import Translator

# The server only estimates the tokens of a batch. A worker therefore accepts GUESS times the limit before it splits a
# batch.
GUESS = 2

logger = logging.getLogger("nmtkit")


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model of a language pair, with the settings of the search and of the text.

    `terms` has the terms of the file `text.glossary`. Changes of the file take effect when the models are loaded again.

    If the pair is translated through a pivot language, `first` translates into the pivot language, and this model
    translates the result.
    """

    translator: Translator
    search: SearchOptions
    text: TextOptions
    terms: Glossary | None = None
    first: "ServedModel | None" = None

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """The text pipeline of requests with default settings."""
        return self.translator.pipeline(self.search, self.text, terms=self.terms)

    @functools.cached_property
    def aligns(self) -> bool:
        """Whether all models of the translator have cross-attention, which aligns words."""
        source, begin = (Packed.from_lists([[id]], self.translator.device) for id in (EOS, BOS))
        try:
            return all(model.attention_weights(source, begin).get("cross") for model in self.translator.models)
        except ValueError:
            return False

    @property
    def engine(self) -> str:
        """The engine, or the engines of two steps if they differ, with the reasons if PyTorch replaces an engine."""
        steps = [self] if self.first is None else [self.first, self]
        return ", then ".join(dict.fromkeys(step.translator.decoder.choice(step.search) for step in steps))

    @property
    def has_formality(self) -> bool:
        """Whether the model was trained with the tags of formality."""
        return all(map(self.translator.tokenizer.has_tag, FORMALITY_TAGS.values()))

    @property
    def takes_glossary(self) -> bool:
        """Whether the search can require terms of a glossary. Models with a pivot cannot: they read the pivot text."""
        return self.first is None and not changed_flags(self.search).intersection(GLOSSARY_RULE.excludes)

    def check(self) -> None:
        """Raises ValueError or ImportError for text settings that do not work with this model or installation."""
        _ = self.pipeline  # loads the files that the options name
        self.translator.batch_decoder(self.search)
        if self.text.rewriting and not self.aligns:
            flags = ", ".join(sorted(changed_flags(self.text) - {"--glossary"}))
            raise ValueError(f"{flags}: the model has no cross-attention, so it cannot align words; leave out {flags}")


ServedModels = dict[Pair, ServedModel]


def translators_of(models: ServedModels) -> Collection[Translator]:
    """Returns each translator once. A translator of several language pairs belongs to several models."""
    return {id(model.translator): model.translator for model in models.values()}.values()


def grouped(paths: Sequence[ModelPath]) -> dict[Pair, tuple[Path, ...]]:
    """Returns the checkpoints of each language pair. Several checkpoints of one pair form an ensemble."""
    result: dict[Pair, tuple[Path, ...]] = {}
    for model in paths:
        for pair in [model.pair] if model.pair else pairs_of(model.path):
            result[pair] = tuple(dict.fromkeys((*result.get(pair, ()), model.path)))
    return result


def pairs_of(path: Path) -> list[Pair]:
    """Returns the language pairs of a checkpoint. A multilingual model has all pairs of different languages.

    If the checkpoint records the pairs of its training (directions), the result combines only their source and target
    languages, and the trained pairs come first. Raises ValueError for a checkpoint that does not name its languages.
    """
    contents = checkpoint.load(path, mmap=True)
    trained = building.directions_of(contents)
    tokenizer = building.tokenizer_of(contents, path)
    if trained:
        sources, targets = (sorted({pair[side] for pair in trained}) for side in (0, 1))
    elif (pair := building.languages_of(path)) is not None:
        return [pair]
    elif tokenizer.languages and not tokenizer.has_target_languages_only:
        sources = targets = sorted(tokenizer.languages)
    else:
        raise ValueError(f"{path} does not name its languages; name them with --path en-de={path}")
    every = [(source, target) for source in sources for target in targets if source != target]
    return sorted(every, key=lambda pair: pair not in trained)


def load_models(job: ServeJob) -> ServedModels:
    """Returns the models of all language pairs. A file that serves several pairs is loaded once.

    Raises OSError, ValueError or ImportError if a model cannot be loaded, or cannot translate with the options.
    """
    load_plugins(job.plugins)
    device = rank_device(job.devices.named_device, workers=job.config.workers or 1)
    options = dataclasses.asdict(job.translator)
    if device == "cpu":
        options["max_tokens"] = GUESS * (options["max_tokens"] or CPU_MAX_TOKENS)
    groups = grouped(job.all_paths)
    configs = [derive(LOGITS_PROCESSORS[name].preset, settings, "serve") for name, settings in job.processors.items()]
    base_search = dataclasses.replace(job.search, processor_configs=tuple(configs))
    terms = None if job.text.glossary is None else glossary.load(job.text.glossary)
    loaded: dict[tuple[Path, ...], Translator] = {}
    models: ServedModels = {}
    for pair, paths in groups.items():
        new = paths not in loaded
        if new:
            try:
                loaded[paths] = Translator.load(paths, device, job.devices.precision, job.devices.engine, **options)
            except ValueError as error:
                if len(paths) == 1:
                    raise
                raise ValueError(
                    f"{'-'.join(pair)} has {len(paths)} models, which form an ensemble: {error}. To leave out a model "
                    "for this pair, name only its other pairs: --path SOURCE-TARGET=FILE"
                ) from error
            building.check_translation_models(paths, loaded[paths].originals)
        for path in () if loaded[paths].tokenizer.languages else paths:
            building.check_not_reversed(f"--path {'-'.join(pair)}=FILE:", path, pair)
        search = with_languages(base_search, loaded[paths].tokenizer, pair)
        models[pair] = ServedModel(loaded[paths], search, text_options(job, pair), terms)
        if new:
            models[pair].check()
    if job.config.pivot is not None:
        models |= through_pivot(models, job.config.pivot)
    log_untrained(models)
    for translator in loaded.values():
        translator.decoder.keep_choice()  # the server loads the models again when the search is compiled
    return models


def through_pivot(models: ServedModels, pivot: str) -> ServedModels:
    """Returns models that translate through a pivot language, for the pairs without a trained model.

    `is_trained` decides whether a model is trained on a pair. Raises ValueError if no pair can be translated through
    the pivot language.
    """
    result: ServedModels = {}
    into = [pair[0] for pair in models if pair[1] == pivot]
    out_of = [pair[1] for pair in models if pair[0] == pivot]
    for source, target in itertools.product(into, out_of):
        direct = models.get((source, target))
        if source != target and (direct is None or not is_trained(direct, (source, target))):
            second = models[pivot, target]
            first = models[source, pivot]
            first = dataclasses.replace(first, search=of_first_step(first.search))
            result[source, target] = dataclasses.replace(second, first=first)
    if not result:
        raise ValueError(
            f"--pivot {pivot} has no effect: no pair without a trained model has models into and out of {pivot}"
        )
    return result


def is_trained(model: ServedModel, pair: Pair) -> bool:
    """Returns whether a model is known to be trained on a pair.

    A bilingual model is trained on its pair. A multilingual model is trained on the directions that its checkpoint
    records. If its checkpoint records no directions, for example after an import, no pair is known to be trained.
    """
    translator = model.translator
    return pair in translator.directions if translator.directions else not translator.tokenizer.languages


def log_untrained(models: ServedModels) -> None:
    """Logs the pairs that a model was not trained on (zero-shot). Later translations of these pairs log no warning."""
    pairs = [
        pair
        for pair, model in models.items()
        if model.first is None and model.translator.directions and pair not in model.translator.directions
    ]
    for pair in pairs:
        models[pair].translator.noticed.add(pair)
    if pairs:
        logger.warning(
            "%d of %d pairs were not in the training data (zero-shot): %s. Check the translations, or use --pivot to "
            "translate through a language that the model knows well", len(pairs), len(models), described(pairs),
        )  # fmt: skip


def with_languages(search: SearchOptions, tokenizer: Tokenizer, pair: Pair) -> SearchOptions:
    """Returns the search options for a pair. For a multilingual model, the options contain the languages.

    Raises ValueError, with the known codes, if the model does not have a language of the pair.
    """
    if not tokenizer.languages:
        return search
    if pair[1] not in tokenizer.languages:
        known = ", ".join(sorted(tokenizer.languages))
        raise ValueError(f"--path {'-'.join(pair)}=FILE: the model has no language {pair[1]!r}; it has {known}")
    source, target = codes_for(tokenizer, *pair)
    tokenizer.language_ids(source, target)
    return dataclasses.replace(search, source_lang=source, target_lang=target)


def text_options(job: ServeJob, pair: Pair) -> TextOptions:
    """Returns the text options of a pair.

    Raises ValueError if --split-sentences is given, but the source language is not a language code.
    """
    if not job.config.split_sentences:
        return job.text
    if not is_code(pair[0]):
        raise ValueError(
            f"--split-sentences needs the code of the source language, such as en or zh-Hant, but {pair[0]!r} is not a "
            "code; give the languages: --path en-de=FILE"
        )
    return dataclasses.replace(job.text, split_sentences=pair[0])
