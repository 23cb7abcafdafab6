"""Fuzz targets and their registry.

Contract: `make` turns a seeded random generator into an input without the code under test; `run` passes the input to
that code. Only a HeadraceError of one printable line may come out, within MAX_SECONDS of CPU time and MAX_BYTES of
memory. Target, seed and number determine an input, so an input that killed the process can be made again.
"""

import random
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

MAX_SECONDS = 2.0  # of processor time
MAX_BYTES = 256 << 20
MAX_MESSAGE = 1000  # characters of an error


class Target(Protocol):
    """One entry point for external input. Made once per process, with its own folder."""

    def __init__(self, folder: Path) -> None: ...

    def make(self, chance: random.Random) -> Any: ...

    def run(self, given: Any) -> None: ...


# Name -> (module below tests.fuzz.targets, class).
TARGETS: dict[str, tuple[str, str]] = {
    "safetensors": ("checkpoint", "Safetensors"),
    "index": ("checkpoint", "Index"),
    "config": ("checkpoint", "Config"),
    "generation-config": ("checkpoint", "GenerationConfig"),
    "gguf": ("gguf", "File"),
    "gguf-metadata": ("gguf", "MetadataValues"),
    "tokenizer": ("tokenizer", "TokenizerFile"),
    "tokenizer-sides": ("tokenizer", "SideFiles"),
    "other-tokenizers": ("tokenizer", "OtherFormats"),
    "smuggling": ("tokenizer", "Smuggling"),
    "template": ("template", "ChatTemplates"),
    "detokenizer": ("text", "Detokenizing"),
    "stop-strings": ("text", "StopStrings"),
    "terminal": ("text", "TerminalText"),
    "markdown": ("text", "Markdown"),
    "grammar": ("grammar", "Sources"),
    "tool-calls": ("grammar", "ToolText"),
    "settings": ("settings", "SettingsFile"),
    "batch-line": ("batch", "Lines"),
    "batch-output": ("batch", "OutputFile"),
    "sessions": ("sessions", "Database"),
    "hub": ("hub", "Answers"),
    "kv-disk": ("kv", "DiskFiles"),
    "block-tables": ("kv", "BlockTables"),
    "kernels": ("kernels", "Bindings"),
    "kernel-pass": ("kernels", "Passes"),
    "kernel-mixers": ("kernels", "Mixers"),
}


BROKEN = "broken"  # not one of them: it is there for the test of the driver


def make_target(name: str, folder: Path) -> Target:
    """Return the target, with `folder` to work in."""
    module, kind = TARGETS[name] if name != BROKEN else ("broken", "Everything")
    target: Target = getattr(import_module(f"tests.fuzz.targets.{module}"), kind)(folder)
    return target


def chance_of(name: str, seed: int, number: int) -> random.Random:
    """Return the random generator of the input with this number."""
    return random.Random(f"{name}/{seed}/{number}")
