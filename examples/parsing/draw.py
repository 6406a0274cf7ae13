"""Draws trees: one HTML page with a drawing of each tree of a file, or of gold and parsed trees side by side.

    python draw.py parsed.mrg trees.html
    python draw.py parsed.mrg trees.html --gold gold.mrg

With gold trees, constituents that the gold tree lacks are red, and a line below counts the matched brackets.
"""

import argparse
import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brackets import score_tree
from trees import ROOT, Tree, read_files

CHARACTER, GAP, LEVEL, MARGIN = 8.2, 14, 44, 16  # pixels: a character, the gap of words, a level, the outer margin

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --line: #9aa3af; --wrong: #c02626; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --line: #6b7280; --wrong: #ff8a80; --paper: #16181c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 90rem; padding: 0 1rem; }
figure { margin: 0 0 2.5rem; overflow-x: auto; }
figcaption { position: sticky; left: 0; color: var(--ink); opacity: .75; }
svg text { font: 14px system-ui, sans-serif; fill: var(--ink); text-anchor: middle; }
svg .word { font-style: italic; }
svg line { stroke: var(--line); }
svg .wrong { fill: var(--wrong); font-weight: 600; }
"""


@dataclass
class Drawn:
    """A node with its position in pixels: the middle `x` and the baseline `y` of its label."""

    label: str
    x: float
    y: float
    children: list["Drawn"]
    word: str | None
    span: tuple[int, int]


def placed(tree: Tree) -> tuple[Drawn, float, float]:
    """Returns the nodes of a tree with their positions, and the width and height of the drawing.

    A node stands one level below its parent. A parent stands above the middle of its children, so that no two lines
    cross.
    """
    words = list(tree.preterminals())
    x, middles = float(MARGIN), []
    for node in words:
        width = CHARACTER * max(len(node.word or ""), len(node.label), 2)
        middles.append(x + width / 2)
        x += width + GAP

    def height(node: Tree) -> int:
        return 0 if node.word is not None else 1 + max(map(height, node.children))

    levels = height(tree)
    position = 0

    def place(node: Tree, depth: int) -> Drawn:
        nonlocal position
        start = position
        if node.word is not None:
            position += 1
            return Drawn(node.label, middles[start], MARGIN + depth * LEVEL, [], node.word, (start, position))
        children = [place(child, depth + 1) for child in node.children]
        middle = (children[0].x + children[-1].x) / 2
        return Drawn(node.label, middle, MARGIN + depth * LEVEL, children, None, (start, position))

    return place(tree, 0), x, 2 * MARGIN + (levels + 1) * LEVEL


def drawing(tree: Tree, gold: Tree | None = None) -> str:
    """Returns an SVG element; constituents that are not in `gold` have the class `wrong`."""
    root, width, height = placed(tree)
    known = None if gold is None else Counter((node.label, node.span) for node in constituents(placed(gold)[0]))
    lines, texts = [], []
    stack = [root]
    while stack:
        node = stack.pop()
        wrong = False
        if known is not None and node.word is None:
            wrong = known[node.label, node.span] == 0
            known[node.label, node.span] -= not wrong
        for child in node.children:
            lines.append(f'<line x1="{node.x:.1f}" y1="{node.y + 6:.1f}" x2="{child.x:.1f}" y2="{child.y - 14:.1f}"/>')
        kind = ' class="wrong"' if wrong else ""
        texts.append(f'<text x="{node.x:.1f}" y="{node.y:.1f}"{kind}>{html.escape(node.label)}</text>')
        if node.word is not None:
            texts.append(f'<text x="{node.x:.1f}" y="{node.y + 20:.1f}" class="word">{html.escape(node.word)}</text>')
        stack.extend(reversed(node.children))
    title = html.escape(" ".join(tree.words()))
    return (
        f'<svg role="img" aria-label="{title}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(lines)}{"".join(texts)}</svg>'
    )


def constituents(root: Drawn) -> list[Drawn]:
    nodes, stack = [], [root]
    while stack:
        node = stack.pop()
        if node.word is None:
            nodes.append(node)
            stack.extend(node.children)
    return nodes


def page(trees: Sequence[Tree], gold: Sequence[Tree] | None) -> str:
    figures = []
    for number, tree in enumerate(trees):
        shown = tree.children[0] if tree.label == ROOT and len(tree.children) == 1 else tree
        reference = None if gold is None else gold[number]
        caption = f"Sentence {number + 1}"
        if reference is not None:
            counts = score_tree(reference, tree)
            caption += f": {counts.matched} of {counts.parsed} brackets are in the gold tree, which has {counts.gold}"
        figures.append(f"<figure>{drawing(shown, reference)}<figcaption>{caption}</figcaption></figure>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Trees</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>Trees</h1>{''.join(figures)}</body></html>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--gold", type=Path)
    arguments = parser.parse_args()
    trees = list(read_files([arguments.trees]))
    gold = None if arguments.gold is None else list(read_files([arguments.gold]))
    if gold is not None and len(gold) != len(trees):
        raise SystemExit(f"{arguments.gold} has {len(gold)} trees, and {arguments.trees} has {len(trees)}")
    arguments.page.write_text(page(trees, gold), encoding="utf-8")


if __name__ == "__main__":
    main()
