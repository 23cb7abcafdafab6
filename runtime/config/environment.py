"""HEADRACE_* environment variables, read and validated.

Empty values count as unset; invalid ones raise UsageError when read, and all at once in `check`. Variables are read
anew each time.

A new variable is a name in `_KNOWN` (a name nearly like one of these is reported as misspelt), a function, a name in
`check` if a value can be invalid, and a row of the table in docs/cli.md, which a test compares.
tests/runtime/config/test_environment.py has invalid values.
"""

import os

from headrace.runtime.errors import UsageError

HOME = "HEADRACE_HOME"
MODEL = "HEADRACE_MODEL"
THREADS = "HEADRACE_THREADS"
KERNELS = "HEADRACE_KERNELS"
EXACT = "HEADRACE_EXACT"
WIRED = "HEADRACE_WIRED"
SENSORS = "HEADRACE_SENSORS"
DEBUG = "HEADRACE_DEBUG"
API_KEY = "HEADRACE_API_KEY"
_KNOWN = (HOME, MODEL, THREADS, KERNELS, EXACT, WIRED, SENSORS, DEBUG, API_KEY)

INSTRUCTION_SETS = ("avx512", "avx2", "neon", "portable", "amx")
"""Names of compiled CPU kernels, those of `kernels.use_instruction_set`. amx: Intel's tiles for prompts, AVX-512
for the rest."""
_KERNEL_NAMES = ("reference", *INSTRUCTION_SETS)

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_MAX_THREADS = 1024  # more than any machine has cores: a larger number is a mistake
_ALIKE = 0.75  # similarity from which a name counts as a misspelling of a known one


def home() -> str | None:
    """Return the folder for all files of headrace, as given (see `runtime.config.paths`)."""
    return os.environ.get(HOME) or None


def model() -> str | None:
    """Return the default model."""
    return os.environ.get(MODEL) or None


def api_key() -> str | None:
    """Return the key that requests to a server must have."""
    return os.environ.get(API_KEY) or None


def threads() -> int:
    """Return the number of threads of the CPU kernels; 0 is one per physical core."""
    text = os.environ.get(THREADS, "").strip()
    if not text:
        return 0
    is_whole = text.isascii() and text.isdigit()
    digits = text.lstrip("0") or "0"
    # Counted first, since `int` raises its own error for thousands of digits.
    if not is_whole or len(digits) > len(str(_MAX_THREADS)) or int(digits) > _MAX_THREADS:
        raise _invalid(THREADS, f"set a whole number up to {_MAX_THREADS}; 0 is one per physical core")
    return int(digits)


def kernels() -> str:
    """Return the kernels that were asked for: "reference", an instruction set, or "" for the usual ones."""
    text = os.environ.get(KERNELS, "").strip()
    if text and text not in _KERNEL_NAMES:
        names = ", ".join(INSTRUCTION_SETS)
        raise _invalid(KERNELS, f"set `reference` for stock MLX operations or one of {names}, or unset it")
    return text


def reference_kernels() -> bool:
    """Return whether stock MLX operations replace the native kernels."""
    return kernels() == "reference"


def exact() -> bool:
    """Return whether to compute in float32 throughout."""
    return _switch(EXACT)


def wired() -> bool:
    """Return whether large weights may be wired to a Mac's memory during decode."""
    return _switch(WIRED, otherwise=True)


def sensors() -> bool:
    """Return whether energy, temperature and GPU load may be read."""
    return _switch(SENSORS, otherwise=True)


def debug() -> bool:
    """Return whether to show tracebacks and the output of child processes."""
    return _switch(DEBUG)


def check() -> list[str]:
    """Validate all variables; return a line for each name that looks misspelt. Raises UsageError."""
    for read in (threads, kernels, exact, wired, sensors, debug):
        read()
    return [line for name in sorted(os.environ) if (line := _near_miss(name)) is not None]


def _switch(name: str, *, otherwise: bool = False) -> bool:
    """Return a variable that is on or off. otherwise: its value if it is not set."""
    text = os.environ.get(name, "").strip().lower()
    if text and text not in _SWITCH:
        raise _invalid(name, "set 1 or 0 (or true, yes, on; false, no, off)")
    return _SWITCH.get(text, otherwise)


def _invalid(name: str, hint: str) -> UsageError:
    return UsageError(f"{name}: {os.environ[name]!a:.80} is not a valid value", hint)


def _near_miss(name: str) -> str | None:
    """Return a line for a name that nothing reads and that is nearly a known one; else None."""
    if not name.startswith("HEADRACE") or name in _KNOWN:
        return None
    from difflib import get_close_matches  # rarely needed

    short_names = {known.removeprefix("HEADRACE_"): known for known in _KNOWN}
    near = get_close_matches(name.removeprefix("HEADRACE").removeprefix("_"), short_names, n=1, cutoff=_ALIKE)
    if not near:
        return None
    return f"{name} is not read by headrace; did you mean {short_names[near[0]]}?"
