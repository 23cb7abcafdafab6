"""Explanations of figures, from `assets/explain.toml`: a sentence, the formula, good values, improvements.

`headrace explain`, the help of the decode view and docs/metrics.md show them; a test compares the page with the file.

Guard: tests/app/output/test_explanations.py.
"""

import tomllib
from difflib import get_close_matches
from functools import cache

from msgspec import Struct

from headrace.runtime.config.paths import ASSETS
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import UsageError

FIELDS = (("formula", "formula"), ("good", "good values"), ("improve", "to improve it"))
"""Fields of an explanation after its sentence, with their titles."""


class Explanation(Struct, frozen=True):
    """One figure."""

    name: str
    aliases: tuple[str, ...]  # other names
    sections: tuple[str, ...]  # ids of the decode view's sections that show it
    sentence: str
    formula: str
    good: str  # good values
    improve: str  # ways to better ones


@cache
def explanations() -> tuple[Explanation, ...]:
    """Return all of them, in the order of the file."""
    with (ASSETS / "explain.toml").open("rb") as file:
        return typed(tuple[Explanation, ...], tomllib.load(file)["figure"])


def explanation(name: str) -> Explanation:
    """Return a figure's explanation by name or alias, case and spaces aside. Raises UsageError with suggestions."""
    names = {_plain(other): each for each in explanations() for other in (each.name, *each.aliases)}
    if (heading := names.get(_plain(name))) is not None:
        return heading
    near = list(dict.fromkeys(names[match].name for match in get_close_matches(_plain(name), names, n=3)))
    hint = "`headrace explain` lists the figures"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    raise UsageError(f"no figure called {name!r:.80}", hint)


def of_section(section: str) -> list[Explanation]:
    """Return the figures that a section of the decode view shows."""
    return [each for each in explanations() if section in each.sections]


def _plain(name: str) -> str:
    return "".join(name.casefold().split())
