"""Limits on the work, memory and time of one template render.

Operations that can make a large value from a small one are checked before they run, and all data read and built is
charged. The limits grow with the input, up to `MAX_WORK`: if all of it were kept, 80 MB for a short chat and 640 MB for
one of a million characters (a character takes at most 5 bytes, its origin included). Time is limited in CPU seconds of
this thread, so that a busy machine refuses no valid template; rounds of loops, and calls, look at the clock.
"""

import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

from headrace.models.text.encoding import MAX_TEXT

BASE_TEXT = 1_000_000  # characters of a value for any chat
TEXT_PER_CHARACTER = 8  # plus per character of the chat
MAX_SECONDS = 2.0  # CPU seconds for any chat
# Most templates take 0.1 ms per message; those that walk all messages for each one take 10 ms at 1,000 rounds.
SECONDS_PER_MESSAGE = 0.02
SECONDS_PER_TOOL = 0.03
MAX_WORK = 128_000_000  # characters read and built, in all
BASE_WORK = 16_000_000  # characters of work for any chat
WORK_PER_CHARACTER = 128  # plus per character of the chat
PER_ITEM = 64  # characters charged per item of a list or dictionary
PER_REFERENCE = 2  # characters charged per item that a slice shares with its list
MAX_INT_BITS = 4096
_ROUNDS_PER_LOOK = 64

_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # a large padding width, or one taken from an argument
_WIDTH = re.compile(r"\d+")


class TemplateRefusedError(TemplateError):
    """A template exceeded a limit or used a refused feature."""


@contextmanager
def render_budget(variables: Mapping[str, Any]) -> Iterator[None]:
    """Charge this thread's work and time during the block; raise TemplateRefusedError beyond the limits.

    variables: the template's input, `messages`, `tools` and others.
    """
    given = _written_size([*variables.values()], math.inf)
    for_messages = SECONDS_PER_MESSAGE * len(variables["messages"])
    for_tools = SECONDS_PER_TOOL * len(variables.get("tools") or ())
    _charges.work = 0
    _charges.rounds = 0
    _charges.most_work = min(BASE_WORK + WORK_PER_CHARACTER * given, MAX_WORK)
    _charges.most_text = min(BASE_TEXT + TEXT_PER_CHARACTER * given, MAX_TEXT)
    _charges.seconds = MAX_SECONDS + for_messages + for_tools
    _charges.deadline = time.thread_time() + _charges.seconds
    yield


class _Charges(threading.local):
    """Charges and limits of the current render on this thread."""

    work = 0
    rounds = 0  # of loops, and calls
    most_work = BASE_WORK
    most_text = BASE_TEXT
    seconds = MAX_SECONDS
    deadline = float("inf")


_charges = _Charges()


def charge(characters: int) -> None:
    """Charge the characters that an operation will read or build; raise TemplateRefusedError beyond the limit."""
    _charges.work += characters
    if _charges.work > _charges.most_work:
        raise TemplateRefusedError(f"it works through more than {_charges.most_work} characters")
    if characters > 10_000:
        _check_time()


def count_round() -> None:
    """Look at the clock from time to time; called in each round of a loop and for each call."""
    _charges.rounds += 1
    if not _charges.rounds % _ROUNDS_PER_LOOK:
        _check_time()


def _check_time() -> None:
    if time.thread_time() > _charges.deadline:
        raise TemplateRefusedError(f"it runs for more than {_charges.seconds:.0f} seconds")


def weight(value: Any) -> int:
    """Return the charge for one pass over a value, without its nested values."""
    if isinstance(value, str):
        return len(value)
    return PER_ITEM * len(value) if hasattr(value, "__len__") else 1


def check_size(size: int) -> None:
    if size > _charges.most_text:
        raise TemplateRefusedError(f"it builds a value of more than {_charges.most_text} characters")


def check_integer(value: Any) -> None:
    """Refuse an integer that is slow to compute with."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateRefusedError("it computes an integer of absurd size")


def built(value: Any) -> Any:
    """Charge a text that is longer than its source, such as an escaped one, and return it."""
    if isinstance(value, str):
        check_size(len(value))
        charge(len(value))
    return value


def check_written(*values: Any) -> int:
    """Refuse values with too long a written form; return its approximate length.

    Shared parts are charged as often as they are written, hashed or compared.
    """
    size = _written_size(list(values), _charges.most_text)
    charge(size)
    return size


def _written_size(stack: list[Any], most: float) -> int:
    size = 0
    while stack:
        value = stack.pop()
        if isinstance(value, str):  # most values; the checks of abstract types below are slow
            size += len(value)
            if size + len(stack) > most:
                check_size(size + len(stack))
            continue
        if isinstance(value, (dict, Mapping)):
            stack.extend(value.keys())
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)) or (
            isinstance(value, Iterable) and not isinstance(value, (bytes, range, Iterator))
        ):
            stack.extend(value)
        elif isinstance(value, Namespace):
            raise TemplateRefusedError("it writes out a namespace")
        size += 1
        if size + len(stack) > most:
            check_size(size + len(stack))
    return size


def check_replace(text: Any, old: Any, new: Any, *_count: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        size = len(text) + text.count(old) * len(new)
        check_size(size)
        charge(size)


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse an operator with a result far larger than its operands, or slow to compute."""
    check_integer(left)
    check_integer(right)
    sized_left = hasattr(left, "__len__")
    sized_right = hasattr(right, "__len__")
    if operator == "+" and sized_left and sized_right:
        check_size(len(left) + len(right))
        charge(weight(left) + weight(right))
    elif operator == "*" and sized_left and isinstance(right, int):
        check_size(len(left) * right)
        charge(weight(left) * max(right, 0))
    elif operator == "*" and sized_right and isinstance(left, int):
        check_size(len(right) * left)
        charge(weight(right) * max(left, 0))
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INT_BITS:
            raise TemplateRefusedError("it computes an integer of absurd size")
    elif operator == "%" and isinstance(left, str):
        check_format(left, right)


def check_format(pattern: str, *values: Any) -> None:
    if _WIDE_FORMAT.search(pattern):
        raise TemplateRefusedError("it formats with a computed or very large width")
    for value in values:
        check_integer(value)
    # Every field of the pattern can name all of one argument.
    fields = pattern.count("{") + pattern.count("%")
    size = len(pattern) + sum(map(int, _WIDTH.findall(pattern))) + fields * check_written(*values)
    check_size(size)
    charge(size)
