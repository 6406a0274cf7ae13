"""`nmtkit attention`: writes a page with the attention weights of every head over one sentence."""

from pathlib import Path

import click

from nmtkit.cli.command import Command, stderr
from nmtkit.cli.flags import CHECKPOINT, PATH, plugin_option


@click.command(cls=Command)
@click.argument("sentence")
@click.option("--path", required=True, type=CHECKPOINT, metavar="FILE", help="Checkpoint.")
@click.option("--target", metavar="TEXT", help="Translation to show.  [default: the model's translation]")
@click.option(
    "--beam",
    type=click.IntRange(1, 1000),
    default=4,
    metavar="N",
    help="Beam size of the search for the model's translation.  [default: 4]",
)
@click.option(
    "--output",
    type=PATH,
    default=Path("attention.html"),
    metavar="FILE",
    help="Page to write.  [default: attention.html]",
)
@click.option("--source-lang", metavar="CODE", help="Language of SENTENCE, for a multilingual model.")
@click.option("--target-lang", metavar="CODE", help="Language of the translation, for a multilingual model.")
@plugin_option
def command(
    sentence: str,
    path: Path,
    target: str | None,
    beam: int,
    output: Path,
    source_lang: str | None,
    target_lang: str | None,
    plugins: tuple[str, ...],
) -> None:
    """Write an HTML page that shows the attention weights of every layer and head of a model over SENTENCE.

    \b
    nmtkit attention --path averaged.pt "A dog runs across the meadow."
    nmtkit attention --path averaged.pt "A dog." --target "Ein Hund."
    """
    from nmtkit.config.files import atomic_write, check_outputs, checkpoint_of
    from nmtkit.config.plugins import load_plugins
    from nmtkit.models.building import check_translation_models, from_checkpoint
    from nmtkit.pages.attention import page
    from nmtkit.translation.attention import attend

    path = checkpoint_of(path)
    check_outputs({"--output": output}, [path, *map(Path, plugins)])
    load_plugins(plugins)
    model, tokenizer = from_checkpoint(path)
    check_translation_models([path], [model])
    attention = attend(model, tokenizer, sentence, target, beam, languages=(source_lang, target_lang))
    with atomic_write(output) as file:
        file.write(page(attention, f"Attention in {path.name}").encode(errors="backslashreplace"))
    heads = sum(len(layer) for layers in attention.weights.values() for layer in layers)
    stderr.print(f"wrote {output}: {heads} heads", markup=False, soft_wrap=True)
