"""Speculation workloads from assets/workloads: a file for each, named after it; a new file is a new workload.

The gain depends on predictability, so there are three kinds: *copy* repeats the prompt, *structure* repeats patterns,
*free* is free text.

Guard: tests/app/bench/measure/test_workloads.py.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, cast, get_args

from msgspec import Struct

from headrace.runtime.config.paths import ASSETS
from headrace.runtime.config.typed import typed
from headrace.runtime.errors import UsageError

WorkloadKind = Literal["copy", "structure", "free"]
KINDS = cast(tuple[WorkloadKind, ...], get_args(WorkloadKind))
_TEMPLATE = 128  # tokens, more than a chat template adds to a few messages


class Workload(Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation to be answered."""

    name: str
    about: str  # a one-line description
    kind: WorkloadKind
    max_tokens: int  # of the answer
    messages: Sequence[Mapping[str, str]]  # role and content

    @property
    def max_prompt_tokens(self) -> int:
        """Upper bound of prompt tokens without a tokenizer: one token per byte."""
        return sum(len(message["content"].encode()) for message in self.messages) + _TEMPLATE


@cache
def load_workloads() -> Mapping[str, Workload]:
    """Return all workloads by name: copies first, free text last."""
    workloads = [_read(path) for path in sorted((ASSETS / "workloads").glob("*.toml"))]
    return {workload.name: workload for workload in sorted(workloads, key=lambda each: KINDS.index(each.kind))}


def chosen_workloads(names: Sequence[str]) -> list[Workload]:
    """Return the named workloads, each once; all for no names. Raises UsageError."""
    known = load_workloads()
    for name in names:
        if name not in known:
            raise UsageError(f"no workload called {name!r:.60}", f"use one of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def _read(path: Path) -> Workload:
    row = tomllib.loads(path.read_text(encoding="utf-8"))
    messages = [{**message, "content": message["content"].strip()} for message in row["messages"]]
    return typed(Workload, {**row, "name": path.stem, "messages": messages})
