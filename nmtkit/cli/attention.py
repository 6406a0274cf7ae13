"""`nmtkit attention`: writes a page with the attention weights of every head over one sentence."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from nmtkit.cli.command import Command, tell
from nmtkit.cli.flags import flags, from_flags, given_flags, plugin_option
from nmtkit.config import Config, FlagRule, check_flags, option

ATTENTION_RULES = (FlagRule("--target", excludes=("--beam",), reason="the given translation needs no search"),)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Settings of `nmtkit attention`."""

    path: Path = option(..., "checkpoint of the model", metavar="FILE", checkpoint=True)
    target: str | None = option(None, "translation to show; default: the model's translation")
    beam: int = option(4, "beam size of the search for the model's translation", min=1, max=1000)
    output: Path = option(Path("attention.html"), "page to write", metavar="FILE", access="write")
    source_lang: str | None = option(None, "language of SENTENCE, for a multilingual model", metavar="CODE")
    target_lang: str | None = option(None, "language of the translation, for a multilingual model", metavar="CODE")


@click.command(cls=Command)
@click.argument("sentence")
@plugin_option
def command(sentence: str, plugins: tuple[str, ...], **settings: Any) -> None:
    """Write an HTML page that shows the attention weights of every layer and head of a model over SENTENCE.

    \b
    nmtkit attention --path averaged.pt "A dog runs across the meadow."
    nmtkit attention --path averaged.pt "A dog." --target "Ein Hund."
    """
    from nmtkit.config.files import atomic_write, check_outputs
    from nmtkit.config.plugins import load_plugins
    from nmtkit.models.building import check_translation_models, from_checkpoint
    from nmtkit.pages.attention import page
    from nmtkit.translation.attention import attend

    config: AttentionConfig = from_flags(AttentionConfig, settings)
    check_flags(ATTENTION_RULES, given_flags(), given_flags())
    check_outputs({"--output": config.output}, [config.path, *map(Path, plugins)])
    load_plugins(plugins)
    model, tokenizer = from_checkpoint(config.path)
    check_translation_models([config.path], [model])
    languages = config.source_lang, config.target_lang
    attention = attend(model, tokenizer, sentence, config.target, config.beam, languages=languages)
    with atomic_write(config.output) as file:
        title = f"Attention in {config.path.name}"
        text = page(attention.source, attention.target, attention.weights, title)
        file.write(text.encode(errors="backslashreplace"))
    heads = sum(len(layer) for layers in attention.weights.values() for layer in layers)
    tell(f"wrote {config.output}: {heads} heads")


command.params[:0] = flags(AttentionConfig)
