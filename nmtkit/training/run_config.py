"""The settings of a training run that belong to no component: batches, length, weights, devices, checkpoints."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from nmtkit.config import Config, FlagRule, changed_flags, check_flags, flag_of, option

VALIDATION = ("--validate-interval", "--validate-interval-updates")
# flags that need validations
OF_VALIDATIONS = (
    "--patience", "--best-checkpoint-metric", "--valid-subset", "--valid-beam", "--valid-sentences", "--validate-first",
)  # fmt: skip
VALIDATION_FLAGS = (*VALIDATION, *OF_VALIDATIONS)
# flags that need --finetune-from
OF_FINETUNING = ("--adapter-rank", "--new-language-from", "--finetune-partial")
RUN_RULES = (
    *(FlagRule(name, needs=VALIDATION) for name in OF_VALIDATIONS),
    *(FlagRule(name, needs=("--finetune-from",)) for name in OF_FINETUNING),
    FlagRule(
        "--adapter-rank",
        excludes=("--freeze", "--encoder-embed-path", "--decoder-embed-path"),
        reason="with adapters, all other weights are frozen",
    ),
    FlagRule(
        "--quantize-aware",
        excludes=("--adapter-rank",),
        reason="adapters are merged after training, and rounding the merged weights differs from rounding in training",
    ),
    FlagRule("--finetune-partial", excludes=("--adapter-rank",), reason="adapters need all weights of --finetune-from"),
    *(FlagRule(name, needs=("--adapter-rank",)) for name in ("--adapter-alpha", "--adapter-layers")),
)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """The settings that belong to no component. Each field is a flag of `nmtkit train`."""

    batch_tokens: int | None = option(
        None,
        "Size of an update in tokens of the larger side (source or target), over all processes; none: one micro-batch "
        "per process.",
        min=1,
        section="Batches",
    )
    max_tokens: int | None = option(
        None,
        "Largest micro-batch in tokens of the larger side; none: as many as fit into the memory of a GPU, 4096 "
        "on a CPU.",
        min=1,
    )
    max_sentences: int | None = option(
        None, "Largest micro-batch in sentence pairs; the size of an update stays the same.", min=1
    )
    update_freq: int | None = option(
        None, "Instead of --batch-tokens: an update has N micro-batches of --max-tokens (or 4096) per process.", min=1
    )
    sampling_temperature: float | None = option(
        None,
        "For a dataset of many directions: the share of a direction in an epoch is proportional to pairs^(1/X), for "
        "example with X = 5; none: an epoch has all pairs once.",
        min=0.1,
        max=1_000,
    )
    sampling_weights: tuple[str, ...] = option(
        (),
        "How often an epoch has each pair of a direction; with --sampling-temperature, a factor on the share of the "
        "direction.",
        metavar="en-de=X,…",
    )
    overfit_batches: int | None = option(
        None, "Train only on the first N batches, repeatedly, as a test: the loss should approach 0.", min=1
    )
    clip_norm: float = option(0.0, "Scale gradients with a larger norm down to this norm; 0: off.", min=0)
    seed: int = option(1, "Seed of initial weights, data order and dropout.", min=0)

    max_update: int | None = option(100_000, "Stop after this many updates.", min=1, section="Length of the run")
    max_epoch: int | None = option(None, "Stop after this many passes over the training set.", min=1)
    stop_time_hours: float | None = option(
        None, "Stop after this many hours of training, including hours before a resume.", above=0
    )
    patience: int | None = option(None, "Stop after N validations without a better score.", min=1)

    finetune_from: Path | None = option(
        None,
        "Checkpoint with the initial weights. If --arch is not given, its architecture is used too. A new piece starts "
        "from the mean of the old pieces that spell it. If no old pieces spell it, it starts from the mean of all old "
        "pieces.",
        section="Weights",
        metavar="RUN|FILE",
        checkpoint=True,
        access="start",
    )
    new_language_from: str | None = option(
        None,
        "The token of a new language starts from the token of this language; none: from the mean of all language "
        "tokens.",
        metavar="CODE",
    )
    finetune_partial: bool = option(
        False,
        "Take only the parameters of --finetune-from that have the same name and shape; the others start as in a "
        "fresh run. For a model with other settings, such as a student with fewer layers.",
    )
    encoder_embed_path: Path | None = option(
        None, "Text file with initial embeddings of source pieces, in the format of GloVe.", access="start"
    )
    decoder_embed_path: Path | None = option(
        None,
        "Text file with initial embeddings of target pieces, or of all pieces if the embeddings are shared.",
        access="start",
    )
    adapter_rank: int | None = option(
        None,
        "Train low-rank adapters of this rank (LoRA) and freeze the weights of --finetune-from.",
        min=1,
        max=65_536,
    )
    adapter_alpha: float | None = option(None, "Scale the output of adapters by alpha / rank; none: by 1.", above=0)
    adapter_layers: tuple[str, ...] = option(
        ("*",),
        "Linear layers with adapters, as name patterns such as decoder.*; the output projection never has an adapter.",
    )
    freeze: tuple[str, ...] = option((), "Parameters that are not trained, as name patterns such as encoder.*.")
    weight_decay_for: tuple[str, ...] = option(
        (), "Weight decay X for parameters that match PATTERN, as PATTERN=X. By default, vectors have no weight decay."
    )
    ema_decay: float | None = option(
        None, "Validate and save a moving average of the weights with this decay, such as 0.999.", above=0, below=1
    )

    quantize_aware: bool = option(
        False,
        "In the forward pass, round weights as in 8-bit checkpoints, and round inputs of linear layers as in generate "
        "--precision int8, so that the model adapts to the rounding. Use this flag for the last updates, with "
        "--finetune-from.",
    )

    reset_optimizer: bool = option(
        False, "Resume without the state of the optimizer; --optimizer and --freeze may then change."
    )
    reset_lr_scheduler: bool = option(
        False, "Resume with a new learning-rate schedule that begins at the resumed update."
    )

    precision: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto",
        "Number type of matrix products; auto: bf16 if the device supports it, else fp32.",
        section="Arithmetic and devices",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option(
        "auto", "Device; auto: cuda if there is a GPU, else cpu; mps: an Apple GPU, in fp32 and with one process."
    )
    threads: int | None = option(
        None, "CPU threads of each process; none: an equal share of the cores.", min=1, max=1024
    )
    nproc_per_node: int | None = option(
        None, "Processes on this machine; none: one per GPU, or one on a CPU.", min=1, max=1024
    )
    parallel: Literal["ddp", "fsdp"] = option(
        "ddp",
        "ddp: every process has the whole model; fsdp: every process has a part of the model, which saves memory.",
    )
    timeout_minutes: float = option(
        10.0, "End the run if a process does not respond for this many minutes.", above=0, max=1_000_000
    )
    deterministic: bool = option(
        False, "Make runs on a GPU exactly repeatable. Backward passes of attention and embeddings become slower."
    )
    compile: bool = option(False, "Compile the model with torch.compile. Not yet measured on a GPU.")

    save_dir: Path = option(
        Path("checkpoints"),
        "Folder for checkpoints, log, config and report.html. All machines must share this folder.",
        section="Checkpoints",
    )
    save_interval: int | None = option(1, "Epochs between checkpoints.", min=1)
    save_interval_updates: int | None = option(None, "Updates between checkpoints.", min=1)
    save_interval_minutes: float | None = option(10.0, "Minutes between checkpoints.", above=0)
    keep_last: int | None = option(5, "Keep the last N checkpoints; none: keep all.", min=1)
    keep_best: int = option(1, "Keep the N best checkpoints.", min=0)
    best_checkpoint_metric: str = option(
        "loss",
        "Validation score that selects the best checkpoint: loss, ppl, a metric, or a value that the criterion reports "
        "(such as alignment), as NAME:min or NAME:max.",
        metavar="NAME",
    )

    validate_interval: int | None = option(1, "Epochs between validations.", min=1, section="Validation")
    validate_interval_updates: int | None = option(None, "Updates between validations.", min=1)
    validate_first: bool = option(False, "Validate before the first update, to see the scores before fine-tuning.")
    valid_subset: tuple[str, ...] = option(
        ("valid",),
        "Subsets of the dataset for validation. Scores of the second and later subsets are called loss@SUBSET.",
    )
    valid_sentences: int | None = option(
        None, "Validate on at most the first N pairs of each direction; none: on all pairs.", min=1
    )
    valid_beam: int = option(4, "Beam size for the translations of a validation.", min=1, max=1000)

    log_interval: int = option(100, "Updates between log lines.", min=1, section="Logs")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_tokens is not None and self.update_freq is not None:
            raise ValueError("--batch-tokens and --update-freq both set the size of an update; give only one")
        if len(set(self.valid_subset)) < max(1, len(self.valid_subset)):
            raise ValueError(
                f"--valid-subset {','.join(self.valid_subset)} must name at least one subset, and each subset once"
            )
        on = {flag_of(field) for field in fields(self) if getattr(self, field.name) not in (None, False)}
        check_flags(RUN_RULES, changed_flags(self), on)

    @property
    def validates(self) -> bool:
        return self.validate_interval is not None or self.validate_interval_updates is not None
