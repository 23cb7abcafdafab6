"""Counts of the words in docstrings and comments, and docstrings that open with an odd word.

`python -m tests.style` prints them; `test_counts.py` has a bound for each.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LAYERS = ("app", "models", "runtime")
ODD_WORDS = {"what", "who", "whose", "whoever", "whatever", "whom"}
ODD_OPENING = re.compile(r"(What|How|Where|Whether|Who|Whose|Of|Which|That)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Counts:
    """Totals over the three layers; the list names places as `path:line text`."""

    lines: int = 0
    words: int = 0  # in docstrings and comments
    odd_words: int = 0
    docstrings: int = 0
    odd_openings: list[str] = field(default_factory=list)

    @property
    def odd_per_1000(self) -> float:
        """Odd words in 1,000 words of docstrings and comments."""
        return 1000 * self.odd_words / max(1, self.words)


def odd_openings(folder: Path) -> list[str]:
    """Return the docstrings below a folder that open with an odd word, as `path:line text`."""
    counts = Counts()
    for path in sorted(folder.rglob("*.py")):
        list(_docstrings(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(folder).as_posix(), counts))
    return counts.odd_openings


def count(root: Path) -> Counts:
    """Count every Python file of the layers below `root`."""
    counts = Counts()
    for path in sorted(file for layer in LAYERS for file in (root / layer).rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        counts.lines += source.count("\n")
        texts = [*_docstrings(ast.parse(source), name, counts), *_comments(source)]
        for text in texts:
            words = re.findall(r"[a-z']+", text.lower())
            counts.words += len(words)
            counts.odd_words += sum(word in ODD_WORDS for word in words)
    return counts


def _docstrings(tree: ast.Module, path: str, counts: Counts) -> Iterator[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            counts.docstrings += 1
            if ODD_OPENING.match(text):
                counts.odd_openings.append(f"{path}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")
            yield text


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Return a node and the statements in it, in order: a fifth of what `ast.walk` goes through."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _statements(child)


def _comments(source: str) -> Iterator[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return (token.string for token in tokens if token.type == tokenize.COMMENT)
