"""Makes trees from the output of a model: python restore.py data/test.mrg output.trees > parsed.mrg

The words and the tags come from the gold trees, as in the published scores; of the tags, only punctuation affects the
scores. An output that is not a well-formed tree over the words becomes one flat constituent and is counted on stderr.
"""

import sys
from pathlib import Path

from trees import ROOT, Tree, read_files, tree_of


def restored(gold: Tree, sequence: str) -> tuple[Tree, bool]:
    """Returns the tree of a token sequence over the words of the gold tree, and whether it is well-formed."""
    preterminals = list(gold.preterminals())
    words, tags = [node.word or "" for node in preterminals], [node.label for node in preterminals]
    try:
        return tree_of(sequence.split(), words, tags), True
    except ValueError:
        return Tree(ROOT, [Tree("S", [Tree(tag, word=word) for tag, word in zip(tags, words, strict=True)])]), False


def main(gold_path: str, output_path: str) -> None:
    gold = list(read_files([Path(gold_path)]))
    lines = Path(output_path).read_bytes().decode().split("\n")[:-1]
    if len(gold) != len(lines):
        raise SystemExit(f"{gold_path} has {len(gold)} trees, and {output_path} has {len(lines)} lines")
    results = [restored(tree, line) for tree, line in zip(gold, lines, strict=True)]
    sys.stdout.writelines(f"{tree}\n" for tree, _ in results)
    good = sum(well_formed for _, well_formed in results)
    print(f"{good} of {len(results)} outputs are well-formed ({good / max(1, len(results)):.1%})", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
