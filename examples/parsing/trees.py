"""Constituency trees: reads Penn Treebank files, and turns trees into the token sequences that a model writes.

The sequence of a tree follows Vinyals et al. (2015, "Grammar as a Foreign Language", section 2.2): `(NP` opens a
constituent, `XX` stands for each preterminal, and `)NP` closes the constituent. Instead of `XX`, a sequence may have
the part of speech of each word: a model with few training trees learns from the tags which word it has reached.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PRETERMINAL = "XX"
TRACE = "-NONE-"
ROOT = "TOP"

_TOKEN = re.compile(r"[()]|[^\s()]+")


@dataclass
class Tree:
    """A node of a tree: a constituent with `children`, or a preterminal with a `word` and no child."""

    label: str
    children: list["Tree"] = field(default_factory=list)
    word: str | None = None

    def preterminals(self) -> Iterator["Tree"]:
        """Yields the preterminals from left to right. The depth of a tree is not limited."""
        stack = [self]
        while stack:
            node = stack.pop()
            if node.word is not None:
                yield node
            stack.extend(reversed(node.children))

    def words(self) -> list[str]:
        return [node.word for node in self.preterminals() if node.word is not None]

    def __str__(self) -> str:
        """Returns the tree on one line, as treebanks bracket it."""
        parts: list[str] = []
        stack: list[Tree | str] = [self]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                parts.append(item)
            elif item.word is not None:
                parts.append(f" ({item.label} {item.word})")
            else:
                parts.append(f" ({item.label}")
                stack.append(")")
                stack.extend(reversed(item.children))
        return "".join(parts).strip()


def read_trees(text: str, name: str) -> Iterator[Tree]:
    """Yields the trees of bracketed text, `( (S …) )` or `(S …)`; an outer bracket without a label is called TOP.

    Raises ValueError, naming the file `name` and the line, for brackets that do not match or a node without content.
    """
    stack: list[Tree] = []
    expects_label = False
    for match in _TOKEN.finditer(text):
        token = match[0]

        def error(problem: str, position: int = match.start()) -> ValueError:
            line = text.count("\n", 0, position) + 1
            return ValueError(f"{name}, line {line}: {problem}")

        if token == "(":
            if expects_label:
                stack[-1].label = ROOT
            if stack and stack[-1].word is not None:
                raise error(f"the word {stack[-1].word!r} is followed by a bracket")
            stack.append(Tree(""))
            expects_label = True
        elif token == ")":
            if not stack:
                raise error("a bracket closes, but no bracket is open")
            node = stack.pop()
            if expects_label or (node.word is None and not node.children):
                raise error("a constituent is empty")
            if stack:
                stack[-1].children.append(node)
            else:
                yield node
        elif not stack:
            raise error(f"{token!r} stands outside of brackets")
        elif expects_label:
            stack[-1].label, expects_label = token, False
            continue
        elif stack[-1].word is not None or stack[-1].children:
            raise error(f"{token!r} is a second word of one preterminal")
        else:
            stack[-1].word = token
        if token != "(":
            expects_label = False
    if stack:
        raise ValueError(f"{name}: {len(stack)} brackets are not closed at the end")


def read_files(paths: Sequence[Path]) -> Iterator[Tree]:
    """Yields the trees of treebank files. Raises OSError or ValueError, naming the file."""
    for path in paths:
        yield from read_trees(path.read_text(encoding="utf-8"), str(path))


def category(label: str) -> str:
    """Returns a label without function tags and indices: NP of NP-SBJ-1 and NP=2; -LRB- and -NONE- stay."""
    return label if label.startswith("-") else re.split(r"[-=|]", label, maxsplit=1)[0] or label


def normalized(tree: Tree) -> Tree | None:
    """Returns a tree without traces, empty constituents and function tags, with one root labelled TOP.

    These are the trees that parsers are trained and evaluated on (Collins 1997). Returns None for a tree of traces.
    """

    def below(node: Tree) -> Tree | None:
        if node.word is not None:
            return None if node.label == TRACE else Tree(category(node.label), word=node.word)
        children = [child for child in map(below, node.children) if child is not None]
        return Tree(category(node.label), children) if children else None

    result = below(tree)
    if result is None or result.label == ROOT:
        return result
    return Tree(ROOT, [result])


def linearized(tree: Tree, tags: bool = False) -> list[str]:
    """Returns the token sequence of a normalized tree; the root TOP, which all trees share, is left out.

    With `tags`, the token of a preterminal is its part of speech instead of XX.
    """
    tokens: list[str] = []
    stack: list[Tree | str] = list(reversed(tree.children)) if tree.label == ROOT else [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            tokens.append(item)
        elif item.word is not None:
            tokens.append(item.label if tags else PRETERMINAL)
        else:
            tokens.append(f"({item.label}")
            stack.append(f"){item.label}")
            stack.extend(reversed(item.children))
    return tokens


def alignment(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Returns pairs (word, token) of indices from 0, to guide the attention of a model.

    A preterminal belongs to its word, an opening bracket to the next word, and a closing bracket to the previous word.
    """
    pairs = []
    word = 0
    for index, token in enumerate(tokens):
        pairs.append((word - 1 if token.startswith(")") else word, index))
        word += not token.startswith(("(", ")"))
    return pairs


def tree_of(tokens: Sequence[str], words: Sequence[str], tags: Sequence[str] | None = None) -> Tree:
    """Returns the tree of a token sequence over `words`. `tags` replace the labels of the preterminals.

    Raises ValueError if the sequence is not well-formed, or if the numbers of preterminals and words differ.
    """
    root = Tree(ROOT)
    stack = [root]
    count = 0
    for number, token in enumerate(tokens, 1):
        if token in "()":
            raise ValueError(f"token {number}: {token!r} has no label")
        if token.startswith("("):
            stack.append(Tree(token[1:]))
        elif token.startswith(")"):
            node = stack.pop()
            if node is root or node.label != token[1:] or not node.children:
                raise ValueError(f"token {number}: {token!r} closes no open constituent with words")
            stack[-1].children.append(node)
        elif count == len(words):
            raise ValueError(f"token {number}: there are more preterminals than the {len(words)} words")
        else:
            stack[-1].children.append(Tree(token if tags is None else tags[count], word=words[count]))
            count += 1
    if len(stack) > 1 or count != len(words):
        left = len(stack) - 1
        raise ValueError(f"{left} constituents are open at the end, {count} of {len(words)} words are covered")
    return root
