"""Counts of the source tree: words, docstring openings, lengths of functions and files, cache classes.

`python -m tests.style` prints them; `test_counts.py` holds each to its bound.
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
LONG_FUNCTION = 60  # lines
MANY_PARAMETERS = 8
LONG_FILE = 300  # lines

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Counts:
    """Totals over the three layers; the lists name places as `path:line name`."""

    lines: int = 0
    words: int = 0  # in docstrings and comments
    odd_words: int = 0
    docstrings: int = 0
    odd_openings: list[str] = field(default_factory=list)
    long_functions: list[str] = field(default_factory=list)
    many_parameters: list[str] = field(default_factory=list)
    long_files: list[str] = field(default_factory=list)
    cache_classes: list[str] = field(default_factory=list)

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
        lines = source.count("\n")
        counts.lines += lines
        if lines > LONG_FILE:
            counts.long_files.append(f"{name} {lines}")
        tree = ast.parse(source)
        texts = [*_docstrings(tree, name, counts), *_comments(source)]
        for text in texts:
            words = re.findall(r"[a-z']+", text.lower())
            counts.words += len(words)
            counts.odd_words += sum(word in ODD_WORDS for word in words)
        _definitions(tree, name, counts)
    return counts


def _docstrings(tree: ast.Module, path: str, counts: Counts) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            counts.docstrings += 1
            if ODD_OPENING.match(text):
                counts.odd_openings.append(f"{path}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")
            yield text


def _comments(source: str) -> Iterator[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return (token.string for token in tokens if token.type == tokenize.COMMENT)


def _definitions(tree: ast.Module, path: str, counts: Counts) -> None:
    of_cache = "/kv/" in path or "cache" in Path(path).name
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and of_cache:
            counts.cache_classes.append(f"{path}:{node.lineno} {node.name}")
        if isinstance(node, Function):
            place = f"{path}:{node.lineno} {node.name}"
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            parameters = len([name for name in names if name not in ("self", "cls")])
            if lines > LONG_FUNCTION:
                counts.long_functions.append(f"{place} {lines}")
            if parameters > MANY_PARAMETERS:
                counts.many_parameters.append(f"{place} {parameters}")
