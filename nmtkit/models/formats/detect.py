"""Detects the toolkit of a model on disk."""

from pathlib import Path

from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.models.formats import fairseq, huggingface, marian, safetensors


def load(source: Path) -> Checkpoint:
    """Imports the model `source` of another toolkit as a checkpoint. Raises FileNotFoundError or ValueError."""
    try:
        if not source.exists():
            raise FileNotFoundError(f"{source}: no such file or folder")
        if (source / safetensors.CONFIG_FILE).exists():
            raise ValueError(
                f"{source} is an export of nmtkit; make a checkpoint of it: nmtkit export --format checkpoint {source} "
                "FILE"
            )
        # tested before fairseq, because the Trainer of Hugging Face also writes .pt files
        if (source / huggingface.CONFIG_FILE).exists():
            return huggingface.load(source)
        if source.suffix == ".npz" or any(marian.decoder_files(source)):
            return marian.load(source)
        if fairseq.is_model(source):
            return fairseq.load(source)
        if source.is_dir():
            return huggingface.load(source)
        raise ValueError(
            f"{source} is not a model that can be imported: give a folder of Hugging Face transformers, an .npz of "
            "Marian, or a .pt of fairseq with its dictionaries"
        )
    except ValueError as error:
        if str(source) in str(error):
            raise
        raise ValueError(f"{source}: {error}") from error
