"""The settings of a training run that belong to no component: batches, length, weights, devices, checkpoints."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from nmtkit.config import Config, FlagRule, changed_flags, check_flags, flag_of, option

VALIDATION = ("--validate-interval", "--validate-interval-updates")
OF_VALIDATIONS = ("--patience", "--best-checkpoint-metric", "--valid-subset", "--valid-beam")  # settings of validations
VALIDATION_FLAGS = (*VALIDATION, *OF_VALIDATIONS)
RUN_RULES = (
    *(FlagRule(name, needs=VALIDATION) for name in OF_VALIDATIONS),
    FlagRule(
        "--adapter-rank",
        needs=("--finetune-from",),
        excludes=("--freeze", "--encoder-embed-path", "--decoder-embed-path"),
        reason="with adapters all other weights stay as they are",
    ),
    *(FlagRule(name, needs=("--adapter-rank",)) for name in ("--adapter-alpha", "--adapter-layers")),
)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """The settings that belong to no component. Each field is a flag of `nmtkit train`."""

    batch_tokens: int | None = option(
        None, "Tokens of an update, of the larger side, over all processes.", min=1, section="Batches"
    )
    max_tokens: int | None = option(
        None, "Tokens a process takes at once, of the larger side; none: what fits on a GPU, 4096 on a CPU.", min=1
    )
    max_sentences: int | None = option(None, "Pairs a process takes at once; what makes up an update stays.", min=1)
    update_freq: int | None = option(
        None, "Instead of --batch-tokens: N x max-tokens (or 4096) x processes; else 1.", min=1
    )
    overfit_batches: int | None = option(
        None, "Train on the first N batches alone, over and over: their loss goes to 0 if all is well.", min=1
    )
    clip_norm: float = option(0.0, "Largest norm of an update's gradient; 0 is off.", min=0)
    seed: int = option(1, "Seed of parameters, data order and dropout.", min=0)

    max_update: int | None = option(100_000, "Updates to make.", min=1, section="Length of the run")
    max_epoch: int | None = option(None, "Passes over the training set to make.", min=1)
    stop_time_hours: float | None = option(
        None, "Stop after this many hours of training, those before a resume included.", above=0
    )
    patience: int | None = option(None, "Stop after N validations without a better score.", min=1)

    finetune_from: Path | None = option(
        None,
        "Checkpoint to take weights and, without --arch, the architecture from; pieces it does not know stay fresh.",
        section="Weights",
    )
    encoder_embed_path: Path | None = option(None, "Text file of vectors of source pieces, as GloVe's, to start from.")
    decoder_embed_path: Path | None = option(None, "The same of target pieces; with shared embeddings, of all.")
    adapter_rank: int | None = option(
        None, "Freeze those weights, and train low-rank adapters of this rank beside them (LoRA).", min=1, max=65_536
    )
    adapter_alpha: float | None = option(None, "Adapters count alpha / rank times; none: once.", above=0)
    adapter_layers: tuple[str, ...] = option(
        ("*",), "Linear layers that get adapters, as patterns of names: decoder.*; never the output projection."
    )
    freeze: tuple[str, ...] = option((), "Parameters not to train, as patterns of names: encoder.*")
    weight_decay_for: tuple[str, ...] = option((), "Other weight decays, as PATTERN=X of names; vectors have 0.")
    ema_decay: float | None = option(
        None, "Validate and save a running mean of the weights; 0.999, say.", above=0, below=1
    )

    reset_optimizer: bool = option(False, "Resume with a fresh optimizer, another one if given.")
    reset_lr_scheduler: bool = option(False, "Resume with the learning-rate schedule at its first update.")

    precision: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto",
        "Type of matrix products; auto is bf16 where the device has it, else fp32.",
        section="Arithmetic and devices",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto is cuda where there is one.")
    threads: int | None = option(None, "CPU threads of each process; none shares the cores out.", min=1, max=1024)
    nproc_per_node: int | None = option(
        None, "Processes on this machine; none is one per GPU, or one on CPU.", min=1, max=1024
    )
    parallel: Literal["ddp", "fsdp"] = option(
        "ddp", "ddp: every process has the whole model; fsdp: its share of it, for models that outgrow a device."
    )
    timeout_minutes: float = option(
        10.0, "Minutes after which a process that hangs ends the run.", above=0, max=1_000_000
    )
    deterministic: bool = option(
        False, "On a GPU, the very same weights from every run: slower backward passes of attention and embeddings."
    )
    compile: bool = option(False, "Compile the model, for batches of any shape; not yet measured on a GPU.")

    save_dir: Path = option(
        Path("checkpoints"),
        "Folder of checkpoints, log, config and report.html, the page of the run; one that all machines share.",
        section="Checkpoints",
    )
    save_interval: int | None = option(1, "Epochs between checkpoints.", min=1)
    save_interval_updates: int | None = option(None, "Updates between checkpoints.", min=1)
    save_interval_minutes: float | None = option(10.0, "Minutes between checkpoints.", above=0)
    keep_last: int | None = option(5, "Keep the last N checkpoints; none keeps all.", min=1)
    keep_best: int = option(1, "Keep the N best checkpoints.", min=0)
    best_checkpoint_metric: str = option(
        "loss",
        "Validation score that makes a checkpoint best: loss, ppl, a metric, or another count as NAME:min or NAME:max.",
        metavar="NAME",
    )

    validate_interval: int | None = option(1, "Epochs between validations.", min=1, section="Validation")
    validate_interval_updates: int | None = option(None, "Updates between validations.", min=1)
    valid_subset: tuple[str, ...] = option(
        ("valid",), "Subsets of the dataset to validate on; scores of all but the first are called loss@SUBSET."
    )
    valid_beam: int = option(4, "Beam of translations, where metrics read them.", min=1, max=1000)

    log_interval: int = option(100, "Updates between log lines, which stay on the terminal.", min=1, section="Logs")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_tokens is not None and self.update_freq is not None:
            raise ValueError("--batch-tokens and --update-freq both set the size of an update; give one")
        if len(set(self.valid_subset)) < max(1, len(self.valid_subset)):
            raise ValueError(f"--valid-subset {','.join(self.valid_subset)} must name subsets, each once")
        on = {flag_of(field) for field in fields(self) if getattr(self, field.name) not in (None, False)}
        check_flags(RUN_RULES, changed_flags(self), on)

    @property
    def validates(self) -> bool:
        return self.validate_interval is not None or self.validate_interval_updates is not None
