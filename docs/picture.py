"""Makes docs/demo.svg, the picture of the demo in README.md, from the folder of a finished demo.

    nmtkit demo --dir nmtkit-demo
    python docs/picture.py nmtkit-demo > docs/demo.svg

The picture shows the commands of the demo, three translations and the scores, as they look in a terminal.
"""

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nmtkit.demo.run import finished, show_scores, show_step, show_translations, steps

WIDTH = 110


def commands(out: Console) -> None:
    """Prints the call of the demo, and the commands that it shows."""
    out.print(Text("$ nmtkit demo", style="green"))
    for number, step in enumerate(steps(Path("nmtkit-demo")), start=1):
        show_step(number, step, ["nmtkit"], out)


def picture(folder: Path) -> str:
    """Returns the picture as SVG. Raises ValueError if the folder has no finished demo."""
    if finished(folder) is None:
        raise ValueError(f"{folder} has no finished demo; run nmtkit demo --dir {folder}")
    out = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    commands(out)
    show_translations(folder, out, count=3)
    show_scores(folder, out)
    return out.export_svg(title="nmtkit demo", unique_id="demo")


if __name__ == "__main__":
    print(picture(Path(sys.argv[1])))
