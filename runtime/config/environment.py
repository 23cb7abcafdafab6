"""The HEADRACE_* variables: what each may be, read and checked here and nowhere else.

An empty value is as good as none. One that is not understood is a UsageError wherever it is read, and for all of them
at once in `check`: none is ever ignored. They are read anew each time, so what a test or a parent process sets holds.
"""

import os

from headrace.runtime.errors import UsageError

HOME = "HEADRACE_HOME"
MODEL = "HEADRACE_MODEL"
THREADS = "HEADRACE_THREADS"
KERNELS = "HEADRACE_KERNELS"
EXACT = "HEADRACE_EXACT"
WIRED = "HEADRACE_WIRED"
DEBUG = "HEADRACE_DEBUG"
_KNOWN = (HOME, MODEL, THREADS, KERNELS, EXACT, WIRED, DEBUG)

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_MOST_THREADS = 1024
_ALIKE = 0.75  # how close to a known name one is taken for a misspelling; other programs' names are none of ours


def home() -> str | None:
    """The folder for everything headrace keeps, as given; `runtime.config.paths` makes folders of it."""
    return os.environ.get(HOME) or None


def model() -> str | None:
    """The model to use where the command line names none."""
    return os.environ.get(MODEL) or None


def threads() -> int:
    """Threads of the CPU kernels; 0 leaves it to them."""
    text = os.environ.get(THREADS, "").strip()
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or int(text[:9]) > _MOST_THREADS:
        raise _misspelt(THREADS, f"it takes a whole number up to {_MOST_THREADS}; 0 is one a physical core")
    return int(text)


def reference_kernels() -> bool:
    """Whether stock MLX operations are to run in the place of the native kernels."""
    text = os.environ.get(KERNELS, "").strip()
    if text not in ("", "reference"):
        raise _misspelt(KERNELS, "it takes `reference`, for stock MLX operations; unset, the fastest ones run")
    return bool(text)


def exact() -> bool:
    """Whether to compute in float32 throughout."""
    return _switch(EXACT)


def wired() -> bool:
    """Whether large weights may be pinned to a Mac's memory while they are decoded with."""
    return _switch(WIRED, otherwise=True)


def debug() -> bool:
    """Whether to show tracebacks, and what child processes say."""
    return _switch(DEBUG)


def check() -> list[str]:
    """Read them all; a line for every variable that looks like a misspelt one of ours. Raises UsageError."""
    threads(), reference_kernels(), exact(), wired(), debug()
    return [line for name in sorted(os.environ) if (line := _near_miss(name)) is not None]


def _switch(name: str, *, otherwise: bool = False) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text and text not in _SWITCH:
        raise _misspelt(name, "it takes 1 or 0 (also true, yes, on; false, no, off)")
    return _SWITCH.get(text, otherwise)


def _misspelt(name: str, hint: str) -> UsageError:
    return UsageError(f"{name} is {os.environ[name]!a:.80}, which means nothing", hint)


def _near_miss(name: str) -> str | None:
    if not name.startswith("HEADRACE") or name in _KNOWN:
        return None
    from difflib import get_close_matches  # only here: a start without such a name does not need it

    own = {known.removeprefix("HEADRACE_"): known for known in _KNOWN}
    near = get_close_matches(name.removeprefix("HEADRACE").removeprefix("_"), own, n=1, cutoff=_ALIKE)
    return f"{name} is not read by headrace; did you mean {own[near[0]]}?" if near else None
