"""What speculation is measured on: the workloads of assets/workloads, each a file of its own, as typed entries.

How much speculation gives depends on how much of an answer can be guessed, so there are three kinds: of a *copy* most
stands in the prompt, of *structure* parts come again and again, what is *free* is the model's own words.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast, get_args

from headrace.runtime.config.paths import ASSETS
from headrace.runtime.errors import UsageError

Kind = Literal["copy", "structure", "free"]
KINDS = cast(tuple[Kind, ...], get_args(Kind))
_TEMPLATE = 128  # tokens, more than a chat template adds to so few messages


@dataclass(frozen=True, slots=True)
class Workload:
    """One conversation to be answered with at most `max_tokens`; `about` says in a line what is asked for."""

    name: str
    about: str
    kind: Kind
    max_tokens: int
    messages: Sequence[Mapping[str, str]]

    @property
    def most_prompt_tokens(self) -> int:
        """A bound on its prompt that needs no tokenizer: no token is shorter than a byte."""
        return sum(len(message["content"].encode()) for message in self.messages) + _TEMPLATE


@cache
def load_workloads() -> Mapping[str, Workload]:
    """All of them by name: copies first, what is free last."""
    found = [_read(path) for path in sorted((ASSETS / "workloads").glob("*.toml"))]
    return {workload.name: workload for workload in sorted(found, key=lambda one: KINDS.index(one.kind))}


def chosen_workloads(names: Sequence[str]) -> list[Workload]:
    """Those called so, each once; all of them for no names. Raises UsageError."""
    known = load_workloads()
    for name in names:
        if name not in known:
            raise UsageError(f"no workload called {name!r:.60}", f"there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def _read(path: Path) -> Workload:
    row = tomllib.loads(path.read_text(encoding="utf-8"))
    messages = [{**message, "content": message["content"].strip()} for message in row.pop("messages")]
    return Workload(name=path.stem, messages=messages, **row)
