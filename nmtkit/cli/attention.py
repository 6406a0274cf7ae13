"""`nmtkit attention`: a web page of the attention weights of every head in one sentence."""

from pathlib import Path

import click

from nmtkit.cli.command import Command, stderr


@click.command(cls=Command)
@click.argument("sentence")
@click.option("--path", required=True, type=Path, metavar="FILE", help="Checkpoint.")
@click.option("--target", metavar="TEXT", help="A translation to look at instead of the model's own.")
@click.option(
    "--beam", type=click.IntRange(1, 1000), default=4, metavar="N", help="Beam of that translation.  [default: 4]"
)
@click.option(
    "--output",
    type=Path,
    default=Path("attention.html"),
    metavar="FILE",
    help="The page to write.  [default: attention.html]",
)
@click.option("--source-lang", metavar="CODE", help="Language of SENTENCE, for a model of several.")
@click.option("--target-lang", metavar="CODE", help="Language of its translation, for a model of several.")
@click.option("--plugin", "plugins", multiple=True, metavar="FILE|MODULE", help="Import this first; repeatable.")
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
    """Show every layer and head of a model at work on SENTENCE, as one self-contained HTML page.

    \b
    nmtkit attention --path averaged.pt "A dog runs across the meadow."
    nmtkit attention --path averaged.pt "A dog." --target "Ein Hund."
    """
    from nmtkit.files import atomic_write
    from nmtkit.models import from_checkpoint
    from nmtkit.plugins import load_plugins
    from nmtkit.translation.attention import attend, page

    load_plugins(plugins)
    model, tokenizer = from_checkpoint(path)
    attention = attend(model, tokenizer, sentence, target, beam, source_lang, target_lang)
    with atomic_write(output) as file:
        file.write(page(attention, f"Attention in {path}").encode())
    heads = sum(len(layer) for layers in attention.weights.values() for layer in layers)
    stderr.print(f"wrote {output}: {heads} heads", markup=False, soft_wrap=True)
