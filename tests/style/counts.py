"""Counts of the words in docstrings and comments, and docstrings that open with an odd word.

`python -m tests.style` prints them; `test_counts.py` has a bound for each.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LAYERS = ("app", "models", "runtime")
ODD_WORDS = {"what", "who", "whose", "whoever", "whatever", "whom"}
_ODD_OPENINGS = "(?:What|How|Where|Whether|Who|Whose|Of|Which|That)\\b"
ODD_OPENING = re.compile(_ODD_OPENINGS)
_QUOTED_OPENING = re.compile(rf"""["'][\\\s]*{_ODD_OPENINGS}""")  # as in '"What '
# Comments, and strings, which may have a # in them. `tokenize` would take most of the time of a count.
_STRING_OR_COMMENT = re.compile(
    r'''
      """ (?: \\. | [^\\] )*? """
    | \'\'\' (?: \\. | [^\\] )*? \'\'\'
    | " (?: \\. | [^"\\] )* "
    | ' (?: \\. | [^'\\] )* '
    | (?P<comment> \# [^\n]* )
    ''',
    re.DOTALL | re.VERBOSE,
)

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
        source = path.read_text(encoding="utf-8")
        if _QUOTED_OPENING.search(source):  # parsing takes longer
            list(_docstrings(ast.parse(source), path.relative_to(folder).as_posix(), counts))
    return counts.odd_openings


def count(root: Path) -> Counts:
    """Count every Python file of the layers below `root`."""
    counts = Counts()
    for path in sorted(file for layer in LAYERS for file in (root / layer).rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        counts.lines += source.count("\n")
        texts = [*_docstrings(ast.parse(source), name, counts), *comments(source)]
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


def comments(source: str) -> list[str]:
    """Return the comments of a Python file, each with its #."""
    return [match["comment"] for match in _STRING_OR_COMMENT.finditer(source) if match["comment"]]
