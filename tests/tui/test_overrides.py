"""Textual's insides are used in one folder only, and by the one version that was looked at."""

import ast
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import headrace.app.tui as tui
from headrace.app.tui import textual_overrides

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "app" / "tui"
PRIVATE = re.compile(r"_(?!_)\w+")


def test_the_installed_textual_is_the_one_the_overrides_were_written_for() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (pinned,) = (text.partition("==")[2] for text in dependencies if text.startswith("textual"))
    assert version("textual") == pinned, (
        f"textual {version('textual')} is installed, app/tui/textual_overrides was written for {pinned}. Install that "
        "one; or compare what each file there overrides with the new sources, run tests/tui and tests.bench.ui_tax, "
        "and change the pin in pyproject.toml."
    )


def test_every_override_is_listed_with_its_reason() -> None:
    listed = set(re.findall(r"`(\w+)`:", textual_overrides.__doc__ or ""))
    assert listed == {module.name for module in pkgutil.iter_modules(textual_overrides.__path__)}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(FOLDER.rglob("*.py")):
        if path.parent.name != "textual_overrides":
            yield path, ast.parse(path.read_text())


def test_no_private_module_or_attribute_of_textual_is_used_elsewhere() -> None:
    found = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("textual"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                found += [f"{path.name}: {node.module} {name}" for name in names if PRIVATE.fullmatch(name)]
            elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
                owner = node.value
                if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls", "os")):
                    found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not found, f"belongs into app/tui/textual_overrides: {found}"


@cache
def private_names(owner: type) -> frozenset[str]:
    """Those a class of textual has itself: its methods and what it sets on `self`."""
    of_instances = re.findall(r"\bself\.(_(?!_)\w+)", inspect.getsource(owner))
    return frozenset({name for name in vars(owner) if PRIVATE.fullmatch(name)} | set(of_instances))


def test_no_class_of_ours_has_a_private_name_of_the_textual_class_below_it() -> None:
    """By accident or not: such a name overrides what textual does."""
    found = []
    for path, tree in sources():
        parts = path.relative_to(FOLDER).with_suffix("").parts
        if parts[-1] == "__init__":
            continue
        module = importlib.import_module(".".join([tui.__name__, *parts]))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or not hasattr(module, node.name):
                continue
            bases = [base for base in getattr(module, node.name).__mro__ if base.__module__.startswith("textual.")]
            taken = frozenset[str]().union(*map(private_names, bases))
            methods = {part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
            attributes = {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
            }
            found += [f"{path.name}: {node.name}.{name}" for name in sorted((methods | attributes) & taken)]
    assert not found, f"belongs into app/tui/textual_overrides, or needs another name: {found}"
