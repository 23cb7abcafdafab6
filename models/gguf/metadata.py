"""Typed access to GGUF metadata; a missing key, wrong type or range raises CheckpointError.

It notes each key that is read: `config.refuse_unread` refuses those that change logits and were not.

Guards: tests/models/gguf/test_config.py and tests/faults/test_gguf.py.
"""

import math
from collections.abc import Mapping
from typing import Any

from headrace.models.gguf.header import StringList, Value
from headrace.runtime.errors import CheckpointError


class Metadata:
    """The metadata of one file. `{arch}` in a key stands for the file's architecture."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values
        self._read: set[str] = set()
        self.architecture = ""
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text. Without a default, here and below, the key must be there."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def optional_text(self, key: str) -> str | None:
        """Return a text; None if the key is missing."""
        return self.text(key) if self.has(key) else None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        """Return an integer in `[minimum, maximum]`. A list of equal numbers (per-layer settings) counts as one."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._wrong(key, f"a whole number from {minimum} to {maximum}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number of at least zero."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self._wrong(key, "a finite number that is not negative", value)
        return _shortest(float(value))

    def negative(self, key: str) -> float:
        """Return a finite number below zero."""
        value = self._get(key, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < 0:
            raise self._wrong(key, "a finite number below zero", value)
        return _shortest(float(value))

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero."""
        value = self.number(key, default)
        if value == 0:
            raise self._wrong(key, "above zero", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, which are decoded now."""
        value = self._list_of_texts(key)
        if isinstance(value, list):
            return value
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise self._wrong(key, "UTF-8 text", value) from None

    def num_texts(self, key: str) -> int:
        """Return the length of a list of texts, which are not decoded."""
        return len(self._list_of_texts(key))

    def _list_of_texts(self, key: str) -> list[str] | StringList:
        value = self._get(key, None)
        if isinstance(value, StringList):
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts", value)
        return value

    def integers(self, key: str, length: int) -> list[int]:
        """Return a list of so many integers."""
        value = self._get(key, None)
        if not isinstance(value, list) or not set(map(type, value)) <= {int} or len(value) != length:
            raise self._wrong(key, f"a list of {length} whole numbers", value)
        return value

    def per_layer(
        self, key: str, length: int, default: int | None = None, *, minimum: int = 0, maximum: int = 2**31 - 1
    ) -> list[int]:
        """Return one integer for each layer; a single number stands for all of them."""
        value = self._get(key, default)
        values: list[Any] = value if isinstance(value, list) else [value] * length
        if len(values) != length or not all(type(item) is int and minimum <= item <= maximum for item in values):
            raise self._wrong(key, f"whole numbers from {minimum} to {maximum}, one or {length}", value)
        return values

    def flags(self, key: str, length: int) -> list[bool]:
        """Return a list of flags. Some files state them as 0 and 1."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != length or not all(item in (False, True) for item in value):
            raise self._wrong(key, f"a list of {length} times true or false", value)
        return [bool(item) for item in value]

    def numbers(self, key: str, length: int, *, infinite: bool = False) -> list[float]:
        """Return a list of numbers. infinite: they may be infinite."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != length:
            raise self._wrong(key, f"a list of {length} numbers", value)
        fits = (lambda item: not math.isnan(item)) if infinite else math.isfinite
        # A vocabulary has some 260,000 scores: the check runs no Python code for each finite one.
        if not (set(map(type, value)) <= {int, float, bool} and all(map(fits, value))):
            raise self._wrong(key, "a list of finite numbers", value)
        return [float(item) for item in value]

    def has(self, key: str) -> bool:
        """Return whether the file has a key. This does not count as reading it."""
        return self._name(key) in self._values

    def keys_below(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix."""
        return sorted(key for key in self._values if key.startswith(prefix))

    def is_list(self, key: str) -> bool:
        """Return whether a key has a list of numbers or flags, not one value."""
        return isinstance(self._values.get(self._name(key)), list)

    def ignore(self, *keys: str) -> None:
        """Count these keys as read: the architecture does not use them."""
        self._read.update(self._name(key) for key in keys)

    def unread(self, key: str) -> Value | None:
        """Return the value of a key that nothing has read; None for a missing one."""
        name = self._name(key)
        return None if name in self._read else self._values.get(name)

    def _name(self, key: str) -> str:
        return key.replace("{arch}", self.architecture)

    def _get(self, key: str, default: Value | None) -> Value:
        self._read.add(self._name(key))
        value = self._values.get(self._name(key), default)
        if value is None:
            raise CheckpointError(f"the GGUF metadata lacks {self._name(key)}")
        return value

    def _wrong(self, key: str, expected: str, value: Value) -> CheckpointError:
        shown = f"a list of {len(value)} items" if isinstance(value, list | StringList) else repr(value)[:40]
        return CheckpointError(f"the GGUF metadata's {self._name(key)} should be {expected}, not {shown}")


def _shortest(value: float) -> float:
    """Return the shortest decimal with the same float32: GGUF stores 1e-5 as 9.999999747378752e-06."""
    import numpy as np

    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value
