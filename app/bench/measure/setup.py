"""Threads and settings of an engine, as it reports them, and a check for fair comparison.

llama-cpp-python decodes on half of the cores by default, so every engine is told a number of threads and asked
afterwards. An `EngineSetup` is also an entry of `engines` in the document, so its fields are public
(docs/bench-json.md).

Guard: tests/app/cli/test_bench_threads.py.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.units import counted


class EngineSetup(Struct, frozen=True):
    """An engine with one model, an entry of `engines`.

    Thread counts are None where the engine chooses and does not report.
    """

    engine: str
    model: str
    version: str | None = None
    threads: int | None = None
    """CPU threads of a decode step."""
    threads_batch: int | None = None
    """CPU threads of a prefill."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Other settings that affect speed, by name."""
    threads_told: int | None = None
    """The number passed to the engine, used where it reports none."""


def check_threads(setups: Sequence[EngineSetup], asked: int | None) -> None:
    """Raise UsageError if thread counts differ; unknown ones (a GPU, MLX's choice) pass.

    asked: a different number that the user chose for the peers.
    """
    ours = next((setup.threads for setup in setups if setup.engine == "headrace"), None)
    expected = asked or ours
    for setup in setups:
        for use, threads in (("decodes", setup.threads), ("prefills", setup.threads_batch)):
            if setup.engine == "headrace" or None in (threads, expected) or threads == expected:
                continue
            uses = f"{setup.engine} {use} on {counted(threads or 0, 'thread')}"
            if asked:
                raise UsageError(f"{uses}, but --peer-threads is {asked}")
            raise UsageError(
                f"{uses}, but headrace uses {ours}",
                "--threads N sets all engines; --peer-threads N sets another number for the peers",
            )


def setup_line(setup: EngineSetup) -> str:
    """Format a setup: `llama.cpp 0.3.36: 2 threads, flash_attention on, ...`."""
    if setup.threads:
        threads = counted(setup.threads, "thread")
    elif setup.threads_told:
        threads = f"{counted(setup.threads_told, 'thread')} requested, actual number unknown"
    else:
        threads = "its own choice of threads"
    if setup.threads_batch != setup.threads and setup.threads_batch:
        threads += f" ({setup.threads_batch} for prompts)"
    settings = [f"{name.replace('_', ' ')} {_text(value)}" for name, value in setup.settings.items()]
    name = " ".join(filter(None, (setup.engine, setup.version)))
    return f"{name}: {', '.join([threads, *settings])}"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "unknown"
    return str(value)
