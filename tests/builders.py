"""Builders of tiny models, tokenizers and checkpoints. They take milliseconds, and download nothing.

Every builder is deterministic: the same arguments return the same weights.
"""

import fcntl
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import torch

from nmtkit.config import Config, derive, option
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.spm_model import renumbered
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import BOS, Tokenizer
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.building import from_checkpoint, to_checkpoint, vocabulary_of
from nmtkit.text.encoded import Encoded

HERE = Path("here")
WORDS = ["a", "the", "dog", "cat", "runs", "sleeps", "in", "on", "park", "street", ".", "!", "two", "men", "women"]

WITHOUT_ATTENTION = ("bytenet_small", "extended_neural_gpu_small")

# A config of a few thousand weights for each architecture.
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "transformer_tiny": {"encoder_layers": 1, "decoder_layers": 2, "d_model": 16, "d_ff": 24, "heads": 2},
    "student_tiny": {"encoder_layers": 1, "decoder_layers": 2, "d_model": 16, "d_ff": 24, "heads": 2},
    "transformer_moe_tiny": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "d_model": 16,
        "d_ff": 24,
        "heads": 2,
        "experts": 5,
        "active_experts": 2,
    },
    "gnmt_small": {"encoder_layers": 3, "decoder_layers": 3, "d_model": 12, "d_attention": 7, "initial_range": 0.5},
    "deep_att_small": {
        "encoder_layers": 3,
        "decoder_layers": 3,
        "d_embedding": 6,
        "d_model": 8,
        "d_memory": 10,
        "d_attention": 7,
        "initial_range": 0.4,
    },
    "convs2s_small": {
        "encoder_widths": (8, 12),
        "encoder_kernels": (3, 5),
        "decoder_widths": (8, 8, 12),
        "decoder_kernels": (3, 2, 1),
        "d_embedding": 10,
        "d_output": 9,
        "max_positions": 60,
    },
    "bytenet_small": {
        "encoder_blocks": 3,
        "decoder_blocks": 4,
        "d_model": 6,
        "dilations": (1, 2, 4),
        "unfold_extra": 1,
    },
    "extended_neural_gpu_small": {"d_model": 6, "layers": 2, "image_width": 3},
    "moe_small": {
        "encoder_layers": 3,
        "decoder_layers": 3,
        "d_model": 8,
        "d_hidden": 12,
        "d_expert": 16,
        "initial_range": 0.4,
        "experts": 9,
        "expert_groups": 3,
        "active_experts": 2,
    },
}


def tiny_model(
    architecture: str,
    vocabulary: int | Vocabulary = 30,
    *,
    seed: int = 1,
    sharpness: float = 1.0,
    **config: Any,
) -> Architecture:
    """Returns a random model in evaluation mode. `config` overrides the settings in `TINY_CONFIGS`.

    A whole number stands for a joint vocabulary of that size. `sharpness` scales the weights of the output projection,
    so that the distributions of its tokens are far from uniform.
    """
    if isinstance(vocabulary, int):
        vocabulary = Vocabulary(source=vocabulary, target=vocabulary, joint=True)
    entry = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model = entry.factory(derive(entry.preset, TINY_CONFIGS[architecture] | config, "test"), vocabulary).eval()
    with torch.no_grad():
        model.output_projection.weight.mul_(sharpness)
    return model


def tiny_transformer(
    vocabulary: int | Vocabulary = 30, *, seed: int = 1, sharpness: float = 1.0, **config: Any
) -> Transformer:
    """Returns `tiny_model("transformer_tiny", …)`: one encoder layer, two decoder layers, 16 wide."""
    model = tiny_model("transformer_tiny", vocabulary, seed=seed, sharpness=sharpness, **config)
    assert isinstance(model, Transformer)
    return model


def tiny_tokenizer(size: int = 330) -> Tokenizer:
    """Returns a joint BPE tokenizer of `WORDS`."""
    return Tokenizer(train_model([" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))], size))


def save_tiny_transformer(
    path: Path, tokenizer: Tokenizer, *, seed: int = 1, sharpness: float = 1.0, update: int = 1, **config: Any
) -> Path:
    """Writes a checkpoint of `tiny_transformer` with the tokenizer's vocabulary to `path` and returns `path`."""
    model = tiny_transformer(vocabulary_of(tokenizer), seed=seed, sharpness=sharpness, **config)
    checkpoint_file.save(path, to_checkpoint(model, "transformer_tiny", model.config, tokenizer, [], update))
    return path


# the beginning of the Universal Declaration of Human Rights: real sentences of several lengths, free to copy
REAL_LINES = [
    "All human beings are born free and equal in dignity and rights.",
    "They are endowed with reason and conscience and should act towards one another in a spirit of brotherhood.",
    "Everyone has the right to life, liberty and security of person.",
    "No one shall be held in slavery or servitude; slavery and the slave trade shall be prohibited in all their forms.",
    "No one shall be subjected to torture or to cruel, inhuman or degrading treatment or punishment.",
    "Everyone has the right to recognition everywhere as a person before the law.",
    "All are equal before the law.",
    "No one shall be subjected to arbitrary arrest, detention or exile.",
]


def save_transformer(path: Path, *, tags: Sequence[str] = (), languages: Sequence[str] = (), **changes: object) -> Path:
    """Writes the checkpoint of a Transformer of random, sharp weights. Its tokenizer knows `REAL_LINES` and `tags`.

    With `languages`, the tokenizer ends with their tokens, such as __de__, as in M2M-100.
    """
    tokenizer = Tokenizer(train_model(REAL_LINES, 400, tags=tags))
    if languages:
        tokens = [f"__{code}__" for code in languages]
        pieces = [*tokenizer.source_pieces(range(tokenizer.source_size)), *tokens]
        tokenizer = Tokenizer(renumbered(tokenizer.source_model, pieces, control=tokens))
    small = {"encoder_layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, **changes}
    model = tiny_transformer(vocabulary_of(tokenizer), sharpness=2.0, **small)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # so that no norm is still 1 and no bias 0
    checkpoint_file.save(path, to_checkpoint(model, "transformer_tiny", model.config, tokenizer, [], 7))
    return path


def fragments() -> list[str]:
    """Returns 48 lines: the ends of `REAL_LINES`, from each of the first six words on."""
    return [" ".join(line.split()[start:]) for line in REAL_LINES for start in range(6)]


def save_ending_transformer(path: Path, **changes: Any) -> Path:
    """Writes the model of `save_transformer` after training for 2 s: it copies the first words of `fragments` and ends.

    With `languages`, the model is trained on all pairs of different languages; for target language i it copies words
    from word i on. A run of pytest trains each model once.
    """
    name = hashlib.sha256(repr(sorted(changes.items())).encode()).hexdigest()
    shutil.copy(built_once(f"{name}.pt", lambda file: _teach_to_end(file, **changes)), path)
    return path


def _teach_to_end(path: Path, **changes: Any) -> None:
    model, tokenizer = from_checkpoint(save_transformer(path, **changes))
    pairs = list(permutations(range(len(tokenizer.languages)), 2)) or [(0, 0)]
    lines = fragments()
    chosen = [pairs[(number + number // 6) % len(pairs)] for number in range(len(lines))]
    starts = [target for _, target in chosen]
    copies = [
        " ".join(line.split()[start : start + 1 + number % 5])
        for number, (line, start) in enumerate(zip(lines, starts, strict=True))
    ]
    tokens = list(tokenizer.languages.values())
    begins = [[[token] for token in (tokens[i], tokens[j])] if tokens else [[], []] for i, j in chosen]
    targets = [[*it[1], *ids] for it, ids in zip(begins, ids_of(tokenizer.encode_target(copies)), strict=True)]
    sources = [[*it[0], *ids] for it, ids in zip(begins, ids_of(tokenizer.encode_source(lines)), strict=True)]
    # Documents need translations without double spaces, so a model with tags is trained longer, for 13 s.
    longer = "tags" in changes
    model.train(longer)
    torch.manual_seed(1)
    batches = []
    for part in [slice(None)] if longer else [slice(0, None, 2), slice(1, None, 2)]:
        inputs = Packed.from_lists([[BOS, *ids[:-1]] for ids in targets[part]], "cpu")
        wanted = torch.tensor([token for ids in targets[part] for token in ids])
        batches.append((Packed.from_lists(sources[part], "cpu"), inputs, wanted))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005 if longer else 0.01)  # dropout needs more updates
    for source, inputs, wanted in batches * (200 if longer else 30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model.output_projection(model(source, inputs)), wanted).backward()
        optimizer.step()
    contents = checkpoint.load(path)
    checkpoint_file.save(path, contents | {"model": model.state_dict()})


# conftest.py gives all workers of a run the same folder
shared_folder = Path(tempfile.gettempdir()) / f"nmtkit-tests-{os.getpid()}"


def built_once(name: str, build: Callable[[Path], object]) -> Path:
    """Returns the file `name` of a folder that all workers of pytest-xdist share. The first worker builds the file."""
    shared_folder.mkdir(exist_ok=True)
    file = shared_folder / name
    with file.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            build(partial := file.with_name(f"partial-{name}"))
            partial.rename(file)
    return file


def ids_of(encoded: Encoded) -> list[list[int]]:
    return [ids.tolist() for ids in encoded.split()]


MIRRORED_WORDS = ["bado", "kelu", "miro", "sate", "vonu", "pika", "zulo", "tera", "gano", "feli"]


def write_corpus(prefix: Path, pairs: int, seed: int) -> None:
    """Writes `prefix`.xx and `prefix`.yy. A target has the 1 to 9 words of its source, backwards and in capitals."""
    draw = random.Random(seed)
    sources = [[draw.choice(MIRRORED_WORDS) for _ in range(draw.randint(1, 9))] for _ in range(pairs)]
    prefix.with_suffix(".xx").write_text("".join(" ".join(words) + "\n" for words in sources))
    prefix.with_suffix(".yy").write_text("".join(" ".join(reversed(words)).upper() + "\n" for words in sources))


def log_records(save_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the records of this kind in the log of a run: "train", "valid", …"""
    lines = (save_dir / "log.jsonl").read_text(encoding="utf-8").split("\n")[:-1]  # the last line may be incomplete
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@dataclass(frozen=True, kw_only=True)
class ThingConfig(Config):
    """A config with a field of every type."""

    width: int = option(4, "width, in units", min=1)
    rate: float | None = option(None, "rate per update", above=0, below=1)
    kind: Literal["old", "new"] = option("old", "which kind")
    betas: tuple[float, ...] = option((0.9, 0.98), "decay rates")
    fast: bool = option(False, "be fast")
    folder: Path = option(HERE, "where")
    files: tuple[Path, ...] = option((), "which")
    tags: tuple[str | None, ...] = option((), "what")


@dataclass(frozen=True, kw_only=True)
class NeedyConfig(Config):
    """A config with a required field, a short flag and headings."""

    source_lang: str = option(..., "from which language", flag="-s/--source-lang", metavar="LANG", section="Files")
    workers: int | None = option(None, "processes", min=1, section="Running")
