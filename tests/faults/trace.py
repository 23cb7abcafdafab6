"""Traces of generated text, written by engine processes (see `traced/sitecustomize.py`)."""

import json
import os
from pathlib import Path

import pytest

from headrace.app.sessions.database import storable

_TRACED = Path(__file__).parent / "traced"


def trace_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engines that are started from now on keep a trace in their HEADRACE_HOME."""
    monkeypatch.setenv("PYTHONPATH", traced_path())


def traced_path() -> str:
    """The PYTHONPATH of a process whose engines are to keep a trace."""
    return os.pathsep.join([str(_TRACED), *filter(None, [os.environ.get("PYTHONPATH")])])


def generated(home: Path, pid: int | None = None) -> list[list[str]]:
    """The pieces of every answer, in order; those of one engine."""
    files = sorted((home / "trace").glob(f"*-{pid}-*" if pid is not None else "*"))
    return [_pieces(file) for file in files]


def _pieces(file: Path) -> list[str]:
    lines = file.read_text().splitlines(keepends=True)
    return [storable(json.loads(line)) for line in lines if line.endswith("\n")]
