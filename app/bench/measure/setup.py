"""What an engine was given for its measurements, as it says itself, and whether that makes a comparison.

A comparison is only one on equal terms. llama-cpp-python, for one, decodes on half of the cores unless it is told a
number, so every engine is told one and asked afterwards what it uses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine with one model. Thread counts are None where an engine decides by itself and does not say."""

    engine: str
    model: str
    version: str | None = None
    threads: int | None = None
    """CPU threads of a decode step."""
    threads_batch: int | None = None
    """CPU threads of a prefill."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else its speed depends on, by name."""
    threads_told: int | None = None
    """The number it was told to use, for both: what is known of an engine that does not say."""

    def document(self) -> dict[str, Any]:
        """As an entry of `engines` in the JSON document."""
        return asdict(self)


def check_threads(setups: Sequence[Setup], asked: int | None) -> None:
    """Refuse a comparison of unequal numbers of threads; numbers nobody knows (a GPU, MLX's own choice) pass.

    asked: what the user wants peers to have where that is another number on purpose. Raises UsageError.
    """
    ours = next((setup.threads for setup in setups if setup.engine == "headrace"), None)
    expected = asked or ours
    for setup in setups:
        for use, threads in (("decodes", setup.threads), ("prefills", setup.threads_batch)):
            if setup.engine == "headrace" or None in (threads, expected) or threads == expected:
                continue
            hint = None if asked else "--threads N sets it for all; --peer-threads N allows peers another number"
            wanted = f"{asked} were asked for" if asked else f"headrace has {ours}"
            raise UsageError(f"{setup.engine} {use} on {_counted(threads)} where {wanted}: no equal terms", hint)


def setup_line(setup: Mapping[str, Any]) -> str:
    """An entry of `engines` as people read it: `llama.cpp 0.3.36: 2 threads, flash_attention on, ...`."""
    decode, batch = setup["threads"], setup["threads_batch"]
    told = setup.get("threads_told")
    unsaid = f"told to use {_counted(told)}, and does not say what it uses" if told else "threads as it chooses"
    threads = _counted(decode) if decode else unsaid
    if batch != decode and batch:
        threads += f" ({batch} for prompts)"
    settings = [f"{name.replace('_', ' ')} {_text(value)}" for name, value in setup["settings"].items()]
    name = " ".join(filter(None, (setup["engine"], setup["version"])))
    return f"{name}: {', '.join([threads, *settings])}"


def _counted(threads: int | None) -> str:
    return f"{threads} thread{'' if threads == 1 else 's'}"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unknown" if value is None else str(value)
