"""`nmtkit score`: translations in, scores with their signatures out."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from nmtkit.cli.command import Command


@click.command(cls=Command)
@click.option("--ref", "references", type=Path, multiple=True, metavar="FILE", help="Reference text; repeatable.")
@click.option("--data", type=Path, metavar="FOLDER", help="Dataset whose kept references to use instead of --ref.")
@click.option("--gen-subset", default="test", metavar="NAME", help="Subset of --data.  [default: test]")
@click.option("--sys", "systems", type=Path, multiple=True, metavar="FILE", help="Translations.  [default: stdin]")
@click.option(
    "--metric", default="bleu,chrf,ter", metavar="NAME,…", help="Of bleu, chrf, chrf++, ter.  [default: bleu,chrf,ter]"
)
@click.option("--tokenize", default="13a", metavar="NAME", help="sacreBLEU's tokenizer for BLEU.  [default: 13a]")
@click.option("--lowercase", is_flag=True, help="Ignore case in BLEU and chrF (TER always does).")
@click.option("--width", default=1, metavar="N", help="Digits after the point in text.  [default: 1]")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", help="Output.  [default: text]")
def command(
    references: tuple[Path, ...],
    data: Path | None,
    gen_subset: str,
    systems: tuple[Path, ...],
    metric: str,
    tokenize: str,
    lowercase: bool,
    width: int,
    format: str,
) -> None:
    """Score translations with BLEU, chrF and TER, through sacreBLEU.

    \b
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin
    nmtkit score --sys output.de --ref reference-1.de --ref reference-2.de
    """
    from nmtkit.scoring.lines import check_equal_counts, lines_of, read_lines
    from nmtkit.scoring.metrics import Score, score

    if bool(references) == (data is not None):
        raise ValueError("give references either as --ref FILE or as --data FOLDER")
    texts = {str(path): read_lines(path) for path in references}
    if data is not None:
        from nmtkit.data.binarized import Dataset

        texts[f"{gen_subset} of {data}"] = Dataset.open(data)[gen_subset].references()
    output = str(systems[0]) if systems else "standard input"
    hypotheses = read_lines(systems[0]) if systems else lines_of(sys.stdin.buffer.read(), output)
    check_equal_counts({output: hypotheses, **texts})
    scores = score(hypotheses, list(texts.values()), metric.split(","), tokenize=tokenize, lowercase=lowercase)

    def plain(result: Score) -> dict[str, Any]:
        return {"name": result.name, "score": result.value, "signature": result.signature, "details": result.details}

    if format == "json":
        click.echo(json.dumps([plain(result) for result in scores], indent=2, ensure_ascii=False))
        return
    name_width = max(len(result.name) for result in scores)
    for result in scores:
        click.echo(f"{result.name:<{name_width}}  {result.value:.{width}f}  {result.details}".rstrip())
    for result in scores:
        click.echo(f"{result.name:<{name_width}}  {result.signature}")
