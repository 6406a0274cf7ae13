"""Model cards: the README.md of an exported model, with metadata for the Hugging Face Hub."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmtkit.config.files import HUB_PREFIX, parse_json
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.tokenizers.tokenizer import SubwordModel, Tokenizer
from nmtkit.models.building import reads_source
from nmtkit.models.formats.reading import read_bytes

LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
TRANSFORMER_SIZES = ("encoder_layers", "decoder_layers", "d_model", "heads")
OWN_USAGE = """\
```sh
pip install 'nmtkit[hub]'
{command}
```
"""


def preparation_code(model: SubwordModel) -> str:
    """Returns a Markdown code block with a function that prepares a line of text like `SubwordModel.prepared`."""

    def pattern(chars: str) -> str:
        return "".join(f"\\u{ord(char):04x}" for char in chars)

    removed, replaced = model.missing
    code = ["import re, unicodedata", "", "def prepare(line):", '    line = unicodedata.normalize("NFC", line)']
    code += [f'    line = re.sub("[{pattern(removed)}]", "", line)'] if removed else []
    code += [f'    line = re.sub("[{pattern(chr(10) + replaced)}]", " ", line)']
    return "\n".join(["```python", *code, '    return unicodedata.normalize("NFC", line)', "```"])


def model_card(
    contents: Checkpoint, usage: str, program: str = "marian", library: str | None = None, *, prepared: bool = False
) -> str:
    """Returns the text of README.md for a checkpoint: usage, training and scores.

    `usage` is a Markdown code block that shows how to translate. `program` is a tag for the
    Hugging Face Hub, and `library` is the library that reads the model. With `prepared`, the card has no code that
    prepares the text, because the code of `usage` prepares the text.
    """
    run, config = contents.get("run", {}), contents["config"]
    scores = {name: value for name, value in contents.get("scores", {}).items() if isinstance(value, int | float)}
    shape = contents["architecture"]
    if all(name in config for name in TRANSFORMER_SIZES):
        shape = f"Transformer, {config['encoder_layers']} encoder and {config['decoder_layers']} decoder layers, "
        shape += f"{config['d_model']} wide, {config['heads']} heads"
    facts = {"Architecture": shape, "Updates": f"{contents['update']:,}"}
    facts |= {"Average of": ", ".join(contents["averaged"])} if contents.get("averaged") else {}
    if {"data", "dataset"} <= run.keys():
        facts["Data"] = f"`{Path(run['data']).name}`, dataset {run['dataset']}"
    facts |= {key.capitalize(): f"`{run[key]}`" for key in ("command", "nmtkit", "torch", "device") if key in run}
    metadata = [f"library_name: {library}"] if library else []
    kind, task = ("translation", "translation") if reads_source(contents) else ("language", "text-generation")
    lines = ["---", *metadata, f"pipeline_tag: {task}", f"tags: [{task}, {program}, nmtkit]", "---", ""]
    lines += [f"# A {kind} model", "", f"{'Trained' if contents['update'] else 'Imported'} with nmtkit."]
    if not prepared:
        lines[-1] += " Prepare every line of text with this function before its tokenization:"
        lines += ["", preparation_code(Tokenizer.from_state(contents["tokenizer"]).source)]
    lines += ["", usage, "## Training", "", *(f"- {name}: {value}" for name, value in facts.items())]
    if scores:
        lines += ["", "## Scores", "", "Validation at this update:", "", "| score | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in scores.items()]
        signatures = contents.get("signatures", {})
        lines += ["", *(f"- {name}: `{signature}`" for name, signature in signatures.items())] if signatures else []
    return "\n".join(lines) + "\n"


def published_card(
    contents: Checkpoint,
    card: str | None,
    command: str,
    format: str,
    *,
    license: str | None,
    scores: Sequence[Mapping[str, Any]],
) -> str:
    """Returns the README.md of a model of the Hub: a card with licence, languages, base model and scores.

    `card` is the README.md of the export, or None if the format has no such file. `command` is the shell
    command that uses the model in nmtkit. `scores` are the results of `read_scores`.
    """
    run, origin = contents.get("run", {}), contents.get("origin", {})
    base = origin if "repository" in origin else run.get("base_origin", {})
    license = license or {**run.get("base_origin", {}), **origin}.get("license")
    pairs = run.get("directions") or [run.get("languages") or origin.get("languages") or ()]
    languages = dict.fromkeys(code for pair in pairs for code in pair)
    metadata = {"license": license, "language": list(languages), "base_model": base.get("repository")}
    lines = [f"{name}: {json.dumps(value)}" for name, value in metadata.items() if value]
    own = format in ("checkpoint", "safetensors")
    usage = OWN_USAGE.format(command=command) if own else f"The files come from `nmtkit export --format {format}`.\n"
    text = card or model_card(contents, usage, format, "nmtkit" if own else None, prepared=True)
    text = text.replace("---\n", "\n".join(["---", *lines, ""]), 1)
    if "repository" in base:
        commit = f"@{base['commit']}" if "commit" in base else ""  # an average of models from two commits has no commit
        source = f"{HUB_PREFIX}{base['repository']}{commit}"
        named = f" (licence {base['license']})" if "license" in base else ""
        text += f"\n## Origin\n\nThe weights come from `{source}`{named}.\n"
    if scores:
        text += "\n## Scores of translations\n\n"
        for each in scores:
            where = f" on {each['test_set']}" if "test_set" in each else ""
            text += f"- {each['name']} {each['score']:.2f}{where}: `{each['signature']}`\n"
    if license:
        text += f"\n## Licence\n\n{license}\n"
    return text


def read_scores(path: Path) -> list[Mapping[str, Any]]:
    """Returns the scores in a file of `nmtkit score --format json`. Raises ValueError that names the file."""
    advice = f"{path} does not hold scores with signatures; write the file with: nmtkit score … --format json"
    try:
        scores = parse_json(read_bytes(path))
    except ValueError as error:
        raise ValueError(advice) from error
    scores = scores if isinstance(scores, list) else [scores]
    for score in scores:
        if not (
            isinstance(score, dict)
            and isinstance(score.get("score"), int | float)
            and all(isinstance(score.get(name), str) for name in ("name", "signature"))
        ):
            raise ValueError(advice)
    return scores


def check_license(license: str | None) -> None:
    """Raises ValueError if a licence is not an identifier of the Hub."""
    if license is not None and not LICENSE.fullmatch(license):
        raise ValueError(f"--license {license!r} is not an identifier such as mit, apache-2.0 or cc-by-4.0")
