"""The limits of one template render: how much it may build, how long it may run.

Every operation that can make a large value from a small one is checked before it runs, and what operations read and
build is added up. A prompt is about as long as its chat, so what a render may build and work through grows with what
it was given; at most `MAX_WORK`, which is less than 256 MB if all of it were kept. Running time is counted in
executed lines of Python, by the interpreter's line trace, because only that sees every kind of loop: nested loops,
recursive macros, generators inside filters; and in seconds of this thread, so that a busy machine refuses no sound
template.
"""

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

MAX_TEXT = 8_000_000  # characters or items of any one value, and of the whole prompt
BASE_TEXT = 1_000_000  # of that, whatever the chat
TEXT_PER_CHARACTER = 8  # and for each character of the chat
BASE_LINES = 500_000  # executed lines of Python, whatever the chat
LINES_PER_MESSAGE = 2_000  # and for each message: templates in common use take 160 to 450
MAX_SECONDS = 2.0  # of processor time, whatever the chat
SECONDS_PER_MESSAGE = 0.001  # and for each message: counting lines, templates in common use take 0.15 ms
MAX_WORK = 64_000_000  # characters read and built, in all
BASE_WORK = 16_000_000  # of that, whatever the chat
WORK_PER_CHARACTER = 64  # and for each character of the chat
PER_ITEM = 64  # characters that an item of a list or a dictionary counts for
MAX_INT_BITS = 4096

_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # a width that pads, or one taken from an argument
_WIDTH = re.compile(r"\d+")


class TemplateRefusedError(TemplateError):
    """The template went over a limit or did what no chat template needs to."""


@contextmanager
def render_budget(variables: Mapping[str, Any]) -> Iterator[None]:
    """Count what this thread builds, and its executed Python lines; raise out of the traced code when they run out.

    `variables` are what the template is rendered with: its `messages` and everything else of any length.
    """
    messages = len(variables["messages"])
    given = _written_size([*variables.values()], math.inf)
    lines_left = BASE_LINES + LINES_PER_MESSAGE * messages
    _spent.work, _spent.seconds = 0, MAX_SECONDS + SECONDS_PER_MESSAGE * messages
    _spent.most_work = min(BASE_WORK + WORK_PER_CHARACTER * given, MAX_WORK)
    _spent.most_text = min(BASE_TEXT + TEXT_PER_CHARACTER * given, MAX_TEXT)
    _spent.deadline = time.thread_time() + _spent.seconds

    def trace(_frame: FrameType, _event: str, _arg: object) -> Callable[..., Any]:
        nonlocal lines_left
        lines_left -= 1
        if lines_left < 0:
            raise TemplateRefusedError("it runs without an end in sight")
        if not lines_left % 256:
            _check_time()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class _Spent(threading.local):
    """What the render of this thread has spent, and may."""

    work = 0
    most_work = BASE_WORK
    most_text = BASE_TEXT
    seconds = MAX_SECONDS
    deadline = float("inf")


_spent = _Spent()


def spend(characters: int) -> None:
    """Count what an operation reads or builds, before it does. Refuses what goes over all that a render may."""
    _spent.work += characters
    if _spent.work > _spent.most_work:
        raise TemplateRefusedError(f"it works through more than {_spent.most_work} characters")
    if characters > 10_000:
        _check_time()


def _check_time() -> None:
    if time.thread_time() > _spent.deadline:
        raise TemplateRefusedError(f"it runs for more than {_spent.seconds:.0f} seconds")


def weight(value: Any) -> int:
    """What going once over a value, not over what is in it, counts for."""
    if isinstance(value, str):
        return len(value)
    return PER_ITEM * len(value) if hasattr(value, "__len__") else 1


def check_size(size: int) -> None:
    if size > _spent.most_text:
        raise TemplateRefusedError(f"it builds a value of more than {_spent.most_text} characters")


def check_integer(value: Any) -> None:
    """Refuse an integer that takes long to compute with."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateRefusedError("it computes an integer of absurd size")


def built(value: Any) -> Any:
    """Count a text that is longer than what it was made from may have let expect: escaped, spelled out."""
    if isinstance(value, str):
        check_size(len(value))
        spend(len(value))
    return value


def check_written(*values: Any) -> int:
    """Refuse values whose written form would be too long; returns about how long it is.

    Shared parts count as often as they are written, or hashed, or compared.
    """
    size = _written_size(list(values), _spent.most_text)
    spend(size)
    return size


def _written_size(stack: list[Any], most: float) -> int:
    size = 0
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            stack.extend(value.keys())
            stack.extend(value.values())
        elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, range, Iterator)):
            stack.extend(value)
        elif isinstance(value, Namespace):
            raise TemplateRefusedError("it writes out a namespace")
        size += len(value) if isinstance(value, str) else 1
        if size + len(stack) > most:
            check_size(size + len(stack))
    return size


def check_replace(text: Any, old: Any, new: Any, *_count: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        size = len(text) + text.count(old) * len(new)
        check_size(size)
        spend(size)


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse an operator whose result would be far larger than its operands, or long in coming."""
    check_integer(left)
    check_integer(right)
    sized_left, sized_right = hasattr(left, "__len__"), hasattr(right, "__len__")
    if operator == "+" and sized_left and sized_right:
        check_size(len(left) + len(right))
        spend(weight(left) + weight(right))
    elif operator == "*" and sized_left and isinstance(right, int):
        check_size(len(left) * right)
        spend(weight(left) * max(right, 0))
    elif operator == "*" and sized_right and isinstance(left, int):
        check_size(len(right) * left)
        spend(weight(right) * max(left, 0))
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
    spend(size)
