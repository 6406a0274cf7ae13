"""Finds the files of a neural metric, in a local folder or on the Hugging Face Hub, and loads the model."""

from pathlib import Path

from nmtkit.config.files import HUB_PREFIX, is_hub_name, sha256_of
from nmtkit.jobs import progress
from nmtkit.jobs.distributed import usable_device
from nmtkit.models.formats.reading import read_json
from nmtkit.scoring.neural.comet import CHECKPOINT, HPARAMS, Comet, read_hparams
from nmtkit.scoring.neural.metricx import MetricX
from nmtkit.scoring.neural.network import ModelFiles, NeuralMetric
from nmtkit.scoring.neural.tokenization import TOKENIZER_FILES

WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")  # the patterns also match the index of sharded weights
MT5_TOKENIZER = "google/mt5-xl"  # all mT5 models, and so all MetricX models, have the same tokenizer
DIGITS = 12  # digits of a hash in a signature


def load(name: str, model: str, device: str) -> NeuralMetric:
    """Loads a metric of `NEURAL_METRICS` with the model of a folder or of `hf:ORG/NAME[@REVISION]`.

    Raises OSError or ValueError for a model that cannot be found, downloaded or read, and for a device that cannot be
    used.
    """
    usable_device(device)  # raises an error for an unusable device before gigabytes are downloaded
    with progress.pause_for(f"Loading {model}"):
        reads_reference = not name.endswith(("kiwi", "-qe"))
        if name.startswith("comet"):
            folder, title, commit = located(model, (HPARAMS, CHECKPOINT, "config.json", *TOKENIZER_FILES))
            named = read_hparams(folder)
            encoder = companion(folder, named.text("pretrained_model", "xlm-roberta-large"), ("config.json",))
            files = ModelFiles(folder, title, commit or hash_of([folder / CHECKPOINT]))
            return Comet(files, encoder, device, reads_reference=reads_reference)
        for pattern in WEIGHTS:  # a repository may have the same weights in both formats
            folder, title, commit = located(model, ("config.json", pattern, *TOKENIZER_FILES))
            if weights := sorted(folder.glob(pattern)):
                break
        read_json(folder / "config.json", "a MetricX model has this file")
        files = ModelFiles(folder, title, commit or hash_of(weights))
        return MetricX(files, companion(folder, MT5_TOKENIZER), device, reads_reference=reads_reference)


def located(model: str, patterns: tuple[str, ...]) -> tuple[Path, str, str]:
    """Returns the folder of a model, its name for signatures, and its commit, which is "" for a local folder.

    Downloads the files of a Hub model that match `patterns`. Raises OSError or ValueError if the model is not found.
    """
    if is_hub_name(model):
        from nmtkit.data.hub import download

        repository, _, revision = model.removeprefix(HUB_PREFIX).partition("@")
        fetched = download(repository, kind="model", revision=revision or None, patterns=patterns)
        return fetched, repository, fetched.name[:DIGITS]
    folder = Path(model)
    if folder.suffix == ".ckpt" and folder.is_file():  # the command comet-score also takes the path of a checkpoint
        folder = folder.absolute().parents[1]
    if not folder.is_dir():
        raise FileNotFoundError(f"{model} is not a folder")
    return folder, folder.resolve().name, ""


def companion(folder: Path, pretrained: str, also: tuple[str, ...] = ()) -> Path:
    """Returns a folder with a tokenizer and the files `also`. Many checkpoints lack these files.

    If `folder` has the files, returns `folder`. Otherwise, returns the folder of the model `pretrained`, which is a
    local folder or a name on the Hub. Raises OSError or ValueError, with the missing files, if the download fails.
    """
    if any((folder / name).is_file() for name in TOKENIZER_FILES) and all((folder / name).is_file() for name in also):
        return folder
    if Path(pretrained).is_dir():
        return Path(pretrained)
    from nmtkit.data.hub import download

    try:
        return download(pretrained, kind="model", revision=None, patterns=(*also, *TOKENIZER_FILES))
    except (OSError, ValueError) as error:
        needed = " and ".join([*also, "tokenizer.json (or its SentencePiece model)"])
        raise type(error)(f"{error}; or copy {needed} of {pretrained} into {folder}") from error


def hash_of(paths: list[Path]) -> str:
    """Returns the first digits of the SHA-256 of files, for the signature of a local model."""
    return f"sha256-{sha256_of(*filter(Path.is_file, paths))[:DIGITS]}"
