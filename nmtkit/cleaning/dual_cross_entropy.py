"""Scores pairs by the cross-entropies of two translation models, for `nmtkit clean`.

Junczys-Dowmunt 2018, "Dual Conditional Cross-Entropy Filtering of Noisy Parallel Corpora", section 3.1.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.probability import MODEL_UNIT
from nmtkit.config.files import write_atomically
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.preprocess import preprocess
from nmtkit.data.tokenizers.spm_training import VocabularySizeError
from nmtkit.jobs import progress
from nmtkit.jobs.distributed import rank_device
from nmtkit.models import checkpoint
from nmtkit.models.building import check_not_reversed, language_model_error, reads_source, tokenizer_of
from nmtkit.training.config import JobConfig
from nmtkit.training.run import train_job
from nmtkit.translation.languages import Codes, codes_for
from nmtkit.translation.likelihood import likelihoods_of_readable
from nmtkit.translation.translator import Translator

COMPONENTS = {"architecture": "transformer_tiny", "lr-scheduler": "polynomial"}
SETTINGS = {  # pre-norm, because models with post-norm need twice as many updates for the same loss
    "encoder_layers": 2, "decoder_layers": 2, "d_ff": 512, "dropout": 0.1, "pre_norm": True,
    "lr": 0.004, "warmup_updates": 100, "batch_tokens": 1500, "keep_last": 1, "save_interval": None,
}  # fmt: skip

VOCABULARY = 8000  # entries of the joint vocabulary


class DualCrossEntropy:
    """Scores each pair with exp(-(|A - B| + (A + B) / 2)).

    A is the cross-entropy of the target given the source under the model `forward`. B is the cross-entropy of the
    source given the target under the model `backward`. Both are in nats per piece. A and B are small for a good
    translation. A large difference shows that one side says more than the other side.
    """

    unit = MODEL_UNIT
    passes = 2

    def __init__(self, forward: Path, backward: Path, languages: tuple[str, str]) -> None:
        """`languages` are the source and the target language of the pairs. `codes_of` checks that the models fit them.

        Raises ValueError for a language model, a model of the opposite direction, or a model without these languages.
        """
        self._paths = forward, backward
        self._codes = codes_of("--forward", forward, languages), codes_of("--backward", backward, languages[::-1])
        self._models: list[Translator] = []

    def fit(self, sources: list[str], targets: list[str]) -> None:
        """Loads the models. The pairs are not used, because the models are already trained."""
        self._models = [loaded(path) for path in self._paths]

    def score(self, sources: list[str], targets: list[str]) -> npt.NDArray[np.float32]:
        forward, backward = self._models
        a = cross_entropies(forward, sources, targets, codes=self._codes[0])
        b = cross_entropies(backward, targets, sources, codes=self._codes[1])
        return np.exp(-(np.abs(a - b) + (a + b) / 2)).astype(np.float32)


def codes_of(flag: str, path: Path, languages: tuple[str, str]) -> Codes:
    """Returns the language codes with which the model in `path` translates from `languages[0]` to `languages[1]`.

    `flag` is the flag that named `path`, for messages. Both codes are None for a model without language tokens. Raises
    ValueError for a language model, for a model that lacks one of the languages, and for a model of the opposite
    direction.
    """
    contents = checkpoint.load(path, mmap=True)
    if not reads_source(contents):
        raise language_model_error(path)
    tokenizer = tokenizer_of(contents, path)
    if not tokenizer.languages:
        check_not_reversed(flag, path, languages)
    codes = codes_for(tokenizer, *languages)
    unknown = [code for code in codes if code is not None and code not in tokenizer.languages]
    if unknown:
        raise ValueError(
            f"{path} is a model of several languages and does not know {' and '.join(unknown)}; give --source-lang "
            f"and --target-lang as codes of this model: {', '.join(sorted(tokenizer.languages))}"
        )
    return codes


def cross_entropies(
    model: Translator, sources: Sequence[str], targets: Sequence[str], *, codes: Codes
) -> npt.NDArray[np.float64]:
    """Returns the mean negative log probability of the pieces and eos of each target, in nats.

    `codes` are the languages of both sides, for a model of several languages. Values above 30 become 30, and a pair
    that is too long for the positions of the model gets 30.
    """
    if codes[0] and codes[1]:
        model.notice_untrained([(codes[0], codes[1])])
    scored = likelihoods_of_readable(model, sources, targets, languages=codes)
    return np.minimum([30 if each is None else -each.log_probability / each.pieces for each in scored], 30)


def loaded(path: Path) -> Translator:
    """Loads a model for the device that `nmtkit generate` chooses by default."""
    # scoring does not search, and the other engines only make a search faster
    return Translator.load(path, rank_device("auto", workers=1), engine="torch")


class SelfTrained(DualCrossEntropy):
    """Scores pairs with two small translation models, one for each direction, which this class trains.

    The method `fit` trains both models on pairs of the corpus, and writes the models to a subfolder of `folder`. The
    name of the subfolder is a hash of these pairs and the settings. So a second call with the same pairs and settings
    resumes an interrupted training, or reads the finished models.
    """

    def __init__(self, folder: Path, languages: tuple[str, str], updates: int) -> None:
        """Raises ValueError for equal languages, because both directions would have the same model."""
        if languages[0] == languages[1]:
            raise ValueError(f"--self-train trains a model in each direction, but both languages are {languages[0]}")
        self._folder, self._languages, self._updates = folder, languages, updates
        self._codes: tuple[Codes, Codes] = ((None, None), (None, None))
        self._models: list[Translator] = []

    def fit(self, sources: list[str], targets: list[str]) -> None:
        texts = ["".join(f"{line}\n" for line in side).encode() for side in (sources, targets)]
        facts = repr((self._languages, self._updates, sorted({**COMPONENTS, **SETTINGS}.items()))).encode()
        folder = self._folder / hashlib.sha256(b"\0".join([facts, *texts])).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        for language, text in zip(self._languages, texts, strict=True):
            write_atomically(folder / f"train.{language}", text)
        source, target = self._languages
        self._models = [self._train(folder, source, target), self._train(folder, target, source)]

    def _train(self, folder: Path, source: str, target: str) -> Translator:
        data, run = folder / f"data-{source}-{target}", folder / f"{source}-{target}"
        if not data.exists():
            config = PreprocessConfig(
                source_lang=source, target_lang=target, train=(str(folder / "train"),), destdir=data,
                vocab_size=VOCABULARY, workers=1,
            )  # fmt: skip
            try:
                preprocess(config)
            except VocabularySizeError as error:  # `possible` is the nearest size that the text allows
                preprocess(replace(config, vocab_size=error.possible))
        progress.begin(f"Training a model {source}-{target}")
        warmup = min(100, max(1, self._updates // 10))
        changes = {"max_update": self._updates, "warmup_updates": warmup, "save_dir": run}
        result = train_job(JobConfig.read(names=COMPONENTS, settings=SETTINGS | changes, data=data))
        if not result.finished:
            raise KeyboardInterrupt
        return loaded(result.last)
