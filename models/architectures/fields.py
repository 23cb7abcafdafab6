"""Typed access to the values of an untrusted config.json.

All families read their configs through it, so that a wrong value is refused by name before it becomes a shape.

Guard: tests/models/architectures/test_config.py.
"""

from collections.abc import Mapping
from typing import Any

from headrace.runtime.errors import CheckpointError


class Fields:
    """Typed access to untrusted JSON; a wrong type or value raises CheckpointError naming the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer: a size or a number of things. None and null take the default, if there is one."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise CheckpointError(f"config.json: {key} must be a positive integer, not {value!r:.60}")
        return value

    def count_or_zero(self, key: str, default: int | None = None) -> int:
        """Return a positive integer, or 0 where the config, or without a value the default, is 0."""
        if self._get(key, default) == 0:
            return 0
        return self.count(key, default)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a positive number, whole or not."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise CheckpointError(f"config.json: {key} must be a positive number, not {value!r:.60}")
        return float(value)

    def optional(self, key: str, default: float) -> float | None:
        """Return a positive number, `default` if the key is missing, None if it is null."""
        if key in self.values and self.values[key] is None:
            return None
        return self.positive(key, default)

    def listed(self, key: str, layers: int) -> list[Any] | None:
        """Return a value for each layer; None if the config states none."""
        values = self.values.get(key)
        if values is not None and (not isinstance(values, list) or len(values) != layers):
            raise CheckpointError(f"config.json: {key} does not list {layers} layers")
        return values

    def required_list(self, key: str, layers: int) -> list[Any]:
        """Return a value for each layer. Raises CheckpointError if the config states none."""
        values = self.listed(key, layers)
        if values is None:
            raise CheckpointError(f"config.json: {key} does not list {layers} layers")
        return values

    def per_layer(self, key: str, layers: int) -> "list[Fields]":
        """Return the values of a required list with one for each layer, each under the list's key, to be checked."""
        return [Fields({key: value}) for value in self.required_list(key, layers)]

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a nested object; an empty one if the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {key} must be an object, not {value!r:.60}")
        return value

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json: {key} is missing")
        return value


def text_section(config: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the values of a checked config's language model: its section, or the config of a text-only model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config
