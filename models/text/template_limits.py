"""Limits on the size, memory and time of one template render.

Every value that a template builds is checked as it appears, and again before it is read: no value may have a written
form of more than `max_text` characters. Shared parts count as often as they would be written, so no comparison, hash or
filter can take longer than one pass over that many characters. The sum of all values is limited, too, as if a template
kept them all: 80 MB for a short chat and 640 MB for one of a million characters (a character takes at most 5 bytes, its
origin included). Time is limited in CPU seconds of this thread, so that a busy machine refuses no valid template.
"""

import re
import threading
import time
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from typing import Any, TypeVar

from jinja2 import TemplateError

from headrace.models.text.encoding import MAX_TEXT

BASE_TEXT = 1_000_000  # characters of a value for any chat
TEXT_PER_CHARACTER = 8  # plus per character of the chat
BASE_TOTAL = 16_000_000  # characters of all values for any chat
TOTAL_PER_CHARACTER = 128  # plus per character of the chat
MAX_TOTAL = 128_000_000  # characters of all values, however long the chat
PER_ITEM = 64  # characters charged per item of a list or dictionary
PER_REFERENCE = 2  # characters charged per item that a list shares with another
_BEGUN = -1  # stands for the size of a value whose items are being measured
MAX_SECONDS = 2.0  # CPU seconds for any chat
# Most templates take 0.1 ms per message; those that walk all messages for each one take 10 ms at 1,000 rounds.
SECONDS_PER_MESSAGE = 0.02
SECONDS_PER_TOOL = 0.03  # templates walk the schema of each
MAX_INT_BITS = 4096  # templates count things
MAX_COMPARED = 1_000_000_000  # pairs of characters that one search may compare, about a second
_ROUNDS_PER_LOOK = 64  # at the clock
_LARGE = 10_000  # characters of a value whose reading takes longer than a look at the clock

_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # a large padding width, or one taken from an argument
_WIDTH = re.compile(r"\d+")  # in a pattern: `%8s`, `{:>8}`
_SLOW_SEARCHES = frozenset(["lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"])
T = TypeVar("T")


class TemplateRefusedError(TemplateError):
    """A template exceeded a limit or used a refused feature."""


class _Budget(threading.local):
    """Limits and use of the current render on this thread."""

    def __init__(self) -> None:
        self.start({})

    def start(self, variables: Mapping[str, Any], seconds: float | None = None) -> None:
        """Begin a render.

        variables: the template's input, `messages`, `tools` and others.
        seconds: of processor time; None: `MAX_SECONDS`, and more for each message and tool.
        """
        self.total = 0
        self.rounds = 0
        # Sizes of lists and dictionaries by id; the value is kept, so that no other gets its id.
        self.sizes: dict[int, tuple[object, int]] = {}
        given = sum(map(size_of, variables.values()))
        self.max_text = min(BASE_TEXT + TEXT_PER_CHARACTER * given, MAX_TEXT)
        self.max_total = min(BASE_TOTAL + TOTAL_PER_CHARACTER * given, MAX_TOTAL)
        if seconds is None:
            for_messages = SECONDS_PER_MESSAGE * len(variables.get("messages") or ())
            for_tools = SECONDS_PER_TOOL * len(variables.get("tools") or ())
            seconds = MAX_SECONDS + for_messages + for_tools
        self.seconds = seconds
        self.deadline = time.thread_time() + self.seconds


@contextmanager
def render_budget(variables: Mapping[str, object], seconds: float | None = None) -> Iterator[None]:
    """Limit what this thread renders during the block. variables, seconds: see `_Budget.start`."""
    _budget.start(variables, seconds)
    try:
        yield
    finally:
        _budget.sizes.clear()


def size_of(value: object) -> int:
    """Return the approximate length of a value's written form.

    Raises TemplateRefusedError for a value that contains itself.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (dict, list, tuple)):
        known = _budget.sizes.get(id(value))
        if known is not None:
            _, size = known
            if size == _BEGUN:
                raise TemplateRefusedError("it puts a value into itself")
            return size
        _budget.sizes[id(value)] = (value, _BEGUN)
        size = 1 + len(value) + sum(map(size_of, value))
        if isinstance(value, dict):
            size += sum(map(size_of, value.values()))
        _budget.sizes[id(value)] = (value, size)
        return size
    if isinstance(value, ItemsView):
        return 1 + len(value) + sum(size_of(key) + size_of(item) for key, item in value)
    if isinstance(value, (KeysView, ValuesView)):
        return 1 + len(value) + sum(map(size_of, value))
    if isinstance(value, (bytes, range)):
        return len(value)
    return 1


def built(value: T, per_item: int = PER_ITEM) -> T:
    """Check and charge a value that the template has built, and return it."""
    if isinstance(value, str):
        check_size(len(value))
        charge(len(value))
    elif isinstance(value, (dict, list, tuple)):
        check_size(size_of(value))
        charge(per_item * len(value) + PER_ITEM)
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateRefusedError("it computes an integer of absurd size")
    return value


def charge(characters: int) -> None:
    """Add to the sum of all values. Refuse the template beyond its limit."""
    _budget.total += characters
    if _budget.total > _budget.max_total:
        raise TemplateRefusedError(f"it works through more than {_budget.max_total} characters")
    if characters > _LARGE:
        _check_time()


def check_size(size: int) -> None:
    """Refuse a value of `size` characters before it is built, where it is larger than what it is built of."""
    if size > _budget.max_text:
        raise TemplateRefusedError(f"it builds a value of more than {_budget.max_text} characters")


def count_round() -> None:
    """Look at the clock from time to time; called in each round of a loop and for each call."""
    _budget.rounds += 1
    if not _budget.rounds % _ROUNDS_PER_LOOK:
        _check_time()


def before_reading(value: T) -> T:
    """Check size and time before an operation that may read all of a value, and return the value."""
    size = size_of(value)
    if size > _LARGE:
        check_size(size)
        _check_time()
    return value


def changed() -> None:
    """Charge a list or dictionary for a new item, and forget all sizes: others may contain it."""
    charge(PER_ITEM)
    _budget.sizes.clear()


def _check_time() -> None:
    """Refuse a template that has run too long."""
    if time.thread_time() > _budget.deadline:
        raise TemplateRefusedError(f"it runs for more than {_budget.seconds:.0f} seconds")


def check_operator(operator: str, left: object, right: object) -> None:
    """Refuse an operator with a result far larger than its operands, or slow to compute.

    The operands have been checked, each as it was built, and `built` checks the result. So a sum, and a product of
    integers, may be computed first: they are at most as large as both operands together.
    """
    if operator == "*":
        if isinstance(left, int) and not isinstance(right, int):
            check_size(size_of(right) * left)
        elif isinstance(right, int) and not isinstance(left, int):
            check_size(size_of(left) * right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > MAX_INT_BITS:
            raise TemplateRefusedError("it computes an integer of absurd size")
    elif operator == "%" and isinstance(left, str):
        check_format(left, right)


def check_method(name: str, *arguments: object) -> None:
    """Refuse a method or a filter of a text with a result far larger than its arguments, or slow to compute.

    arguments: the text and those of the call.
    """
    if name == "format":
        check_format(*arguments)
    elif name == "replace":
        _check_replace(*arguments)
    elif name in _SLOW_SEARCHES:
        _check_search(*arguments)


def check_format(pattern: Any, *values: object) -> None:
    """Refuse a pattern whose fields may be filled to a large size; each of them can name all of the values."""
    if _WIDE_FORMAT.search(pattern):
        raise TemplateRefusedError("it formats with a computed or very large width")
    fields = pattern.count("{") + pattern.count("%")
    widths = sum(map(int, _WIDTH.findall(pattern)))
    check_size(len(pattern) + widths + fields * sum(map(size_of, values)))


def _check_replace(text: object, old: object = None, new: object = None, *_count: object) -> None:
    """Refuse a replacement of short texts by longer ones that gives a large text."""
    if isinstance(old, str) and isinstance(new, str):
        text = str(text)
        check_size(len(text) + text.count(old) * len(new))


def _check_search(text: object, *arguments: object) -> None:
    """Refuse a search from the right, or a strip, that may compare each character with all of a long argument."""
    longest = max((len(argument) for argument in arguments if isinstance(argument, str)), default=0)
    if size_of(text) * longest > MAX_COMPARED:
        raise TemplateRefusedError("it searches a long text for another long text")


_budget = _Budget()
