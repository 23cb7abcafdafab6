"""Markup of tool calls: the texts around names, keys and values.

Forms with fixed markup state one (`tagged_forms.GLM`), `written.learn` finds one in a template. `write` is for
templates that show no calls; it has to write the texts that the form reads.

Guard: tests/models/text/tools/test_forms.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.models.text.template_text import TemplateText, concatenate
from headrace.models.text.tools.call import kind_of


class Markup(Struct, frozen=True):
    """Texts around the parts of calls.

    begin: before the first name.
    middle: between a name and its arguments.
    end: after the last arguments.
    separator: between the arguments of a call and the name of the next one; None: one call a message.
    key_begin, key_end, value_end: around a key and after a value of tagged arguments; None for a JSON object.
    typed_key_ends: those that are not `key_end`, by the type of the value.
    middle_if_empty: between a name and `end` in a call without arguments; None: `middle`.
    is_indented: the JSON object has lines.
    has_cdata: XML's marks of CDATA are around tagged values with special characters.
    """

    begin: str
    middle: str
    end: str
    separator: str | None
    key_begin: str | None = None
    key_end: str = ""
    value_end: str = ""
    typed_key_ends: Mapping[str, str] = field(default_factory=dict)
    middle_if_empty: str | None = None
    is_indented: bool = False
    has_cdata: bool = False

    @property
    def between_calls(self) -> str | None:
        """The text, spaces included, between the end of a call and the begin of the next one.

        None if they share one begin and end.
        """
        end = self.end.rstrip()
        if self.separator is None or not self.separator.startswith(end) or not self.separator.endswith(self.begin):
            return None
        return self.separator.removeprefix(end).removesuffix(self.begin)

    def key_end_of(self, kind: str) -> str:
        """Return the text between a key and a value of a type (of `KINDS`)."""
        return self.typed_key_ends.get(kind, self.key_end)

    @property
    def head_without_arguments(self) -> str:
        """The text between a name and `end` in a call without arguments."""
        if self.middle_if_empty is None:
            return self.middle
        return self.middle_if_empty

    def mapped(self, change: Callable[[str], str]) -> "Markup":
        """Return the markup with each of its texts changed."""

        def changed(text: str | None) -> str | None:
            return None if text is None else change(text)

        return replace(
            self,
            begin=change(self.begin),
            middle=change(self.middle),
            end=change(self.end),
            separator=changed(self.separator),
            key_begin=changed(self.key_begin),
            key_end=change(self.key_end),
            value_end=change(self.value_end),
            typed_key_ends={kind: change(text) for kind, text in self.typed_key_ends.items()},
            middle_if_empty=changed(self.middle_if_empty),
        )

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls {"name": ..., "arguments": {...}} as the model writes them.

        The markup is `TemplateText`, which may contain control tokens; names and values are not.
        """
        if self.separator is None and len(calls) > 1:
            return TemplateText("\n").join(self.write([call]) for call in calls)
        parts: list[str] = []
        before_name = self.begin
        for call in calls:
            parts += [TemplateText(before_name), call["name"], *self._written_arguments(call["arguments"])]
            before_name = self.separator or ""
        return concatenate([*parts, TemplateText(self.end)])

    def _written_arguments(self, arguments: Mapping[str, object]) -> list[str]:
        """Return the texts from a name to the end of its arguments."""
        if self.key_begin is None:
            return [TemplateText(self.middle), json.dumps(arguments, ensure_ascii=False)]
        if not arguments:
            return [TemplateText(self.head_without_arguments)]
        parts: list[str] = [TemplateText(self.middle)]
        for name, value in arguments.items():
            key_end = self.key_end_of(kind_of(value))
            text = value
            if not isinstance(text, str):
                text = json.dumps(value, ensure_ascii=False)
            parts += [TemplateText(self.key_begin), name, TemplateText(key_end), text, TemplateText(self.value_end)]
        return parts

    @property
    def texts(self) -> list[str]:
        """All texts."""
        parts = (self.begin, self.middle, self.end, self.separator, self.key_begin, self.key_end, self.value_end)
        return [part for part in (*parts, *self.typed_key_ends.values(), self.middle_if_empty) if part]
