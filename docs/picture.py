"""Converts the coloured output of a terminal to SVG: python docs/picture.py TITLE 100 < screen.ansi > demo.svg

The picture in README.md is the output of `tmux capture-pane -e -p` after `nmtkit demo` in a terminal of 100 columns.
"""

import io
import sys

from rich.console import Console
from rich.text import Text

title, width = sys.argv[1], int(sys.argv[2])
console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
for line in sys.stdin.read().rstrip().splitlines():
    console.print(Text.from_ansi(line), no_wrap=True, crop=True)
print(console.export_svg(title=title))
