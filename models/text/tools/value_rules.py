"""Grammar rules of values by their schemas, for forms that write objects and lists with markup of their own."""

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Any

from headrace.models.text.tools.call import choices_of, kind_of, kinds_of, referenced
from headrace.models.text.tools.form import ordered_rules, schema_json
from headrace.runtime.config.typed import as_list, as_mapping

MAX_DEPTH = 6  # of nested objects and lists; references from schema to schema
Schema = Mapping[str, object]  # JSON schema, or the schemas of an object's properties by name
SCALARS = frozenset(["string", "number", "boolean", "null"])


class ValueRules(ABC):
    """Rules in Lark. Objects and lists whose schema tells no more may have any values.

    end: Lark after each value; "" for none.
    separator: text between two pairs of an object, and two items of a list.
    of_kind: Lark of any value of a type, without `end`.
    """

    end = ""
    separator = ""
    of_kind: Mapping[str, str]

    def __init__(self, document: Schema) -> None:
        """document: the schema that references point into."""
        self.rules: list[str] = []
        self._document = document
        self._definitions = {key: document[key] for key in ("$defs", "definitions") if key in document}

    @abstractmethod
    def pair(self, key: str, value: str) -> str:
        """Return Lark of an object's pair. value: the rule of its value."""

    @abstractmethod
    def object(self, pairs: str) -> str:
        """Return Lark of an object with these pairs."""

    @abstractmethod
    def item(self, value: str) -> str:
        """Return Lark of a list's item. value: the rule of its value."""

    @abstractmethod
    def list(self, items: str) -> str:
        """Return Lark of a list with these items."""

    @abstractmethod
    def text(self, rule: str, schema: Schema) -> Sequence[str]:
        """Return the rules of a text, with `end`."""

    @abstractmethod
    def scalar(self, value: str | float | None) -> str:
        """Return Lark of one text, number or constant."""

    def order(self, properties: Schema) -> Schema:
        """Return properties in the order in which the form writes them."""
        return properties

    def pairs(self, name: str, properties: Schema, required: Container[str], depth: int) -> str:
        """Add the rules of an object's pairs; return the first of them."""
        written: dict[str, str] = {}
        for index, (key, schema) in enumerate(self.order(properties).items()):
            value = f"value{name}x{index}"
            self._add(value, schema, depth)
            written[key] = self.pair(key, value)
        self.rules += ordered_rules(name, written, required, self.separator)
        return f"first{name}x0"

    def _add(self, rule: str, schema: Any, depth: int) -> None:
        """Add the rules of a value."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = referenced(schema["$ref"], self._document)
        about = as_mapping(schema)
        kinds = kinds_of(about, self._document)
        choices = choices_of(about)
        union = about.get("anyOf") or about.get("oneOf")
        if choices and all(kind_of(each) in SCALARS for each in choices):
            self._end(rule, " | ".join(map(self.scalar, choices)))
        elif isinstance(union, list) and "type" not in about and depth < MAX_DEPTH:
            for number, each in enumerate(union):
                self._add(f"{rule}u{number}", each, depth + 1)
            self.rules.append(f"{rule}: {' | '.join(f'{rule}u{number}' for number in range(len(union)))}")
        elif kinds == {"string"}:
            self.rules += self.text(rule, about)
        elif kinds <= SCALARS - {"string"}:
            self._end(rule, f"json{rule}")
            self.rules.append(f"json{rule}: %json {schema_json({**about, **self._definitions})}")
        elif kinds == {"object"} and about.get("properties") and depth < MAX_DEPTH:
            pairs = self.pairs(f"{rule}o", about["properties"], as_list(about.get("required")), depth + 1)
            self._end(rule, self.object(pairs))
        elif kinds == {"array"} and isinstance(about.get("items"), Mapping) and depth < MAX_DEPTH:
            self._add_items(rule, about, depth)
        else:
            self._add_any(rule, kinds)

    def _end(self, rule: str, value: str) -> None:
        if self.end:
            value = f"({value}) {self.end}"
        self.rules.append(f"{rule}: {value}")

    def _add_any(self, rule: str, kinds: Container[str]) -> None:
        """Add the rule of any value of some types."""
        self._end(rule, " | ".join(lark for kind, lark in sorted(self.of_kind.items()) if kind in kinds))

    def _add_items(self, rule: str, about: Mapping[str, Any], depth: int) -> None:
        """Add the rules of a list."""
        self._add(f"{rule}i", about["items"], depth + 1)
        least = about.get("minItems", 0)
        max_items = about.get("maxItems")
        item = self.item(f"{rule}i")
        bounds = f"{max(0, least - 1)},"
        if max_items is not None:
            bounds += str(max(0, max_items - 1))
        next_item = item
        if self.separator:
            next_item = f'"{self.separator}" {item}'
        items = f"{item} ({next_item}){{{bounds}}}"
        if max_items == 0:
            items = ""
        elif not least:
            items = f"({items})?"
        self._end(rule, self.list(items))
