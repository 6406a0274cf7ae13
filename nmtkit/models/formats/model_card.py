"""Writes the README.md of an exported model: usage, training and scores."""

from collections.abc import Sequence

from nmtkit.data import checkpoint_file
from nmtkit.models.architectures.transformer_config import TransformerConfig


def model_card(
    contents: checkpoint_file.Checkpoint,
    config: TransformerConfig,
    metadata: Sequence[str],
    usage: Sequence[str],
    program: str = "marian",
) -> str:
    """Returns the text of README.md for a checkpoint.

    `metadata` are lines of YAML for the Hugging Face Hub, and `program` is a tag there. `usage` are lines of Markdown
    that show how to translate.
    """
    run = contents.get("run", {})
    scores = {name: value for name, value in contents.get("scores", {}).items() if isinstance(value, int | float)}
    shape = f"{config.encoder_layers} encoder and {config.decoder_layers} decoder layers, "
    shape += f"{config.d_model} wide, {config.heads} heads"
    facts = {"Architecture": f"Transformer, {shape}", "Updates": f"{contents['update']:,}"}
    facts |= {"Average of": ", ".join(contents["averaged"])} if contents.get("averaged") else {}
    facts |= {key.capitalize(): f"`{run[key]}`" for key in ("command", "nmtkit", "torch", "device") if key in run}
    lines = ["---", *metadata, "pipeline_tag: translation", f"tags: [translation, {program}, nmtkit]", "---", ""]
    lines += ["# A translation model", "", "Trained with nmtkit. Normalise text to Unicode form NFC.", "", *usage, ""]
    lines += ["## Training", "", *(f"- {name}: {value}" for name, value in facts.items())]
    if scores:
        lines += ["", "## Scores", "", "Validation at this update:", "", "| score | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in scores.items()]
    return "\n".join(lines) + "\n"
