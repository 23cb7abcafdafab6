"""Grammar rules of values by their schemas, for forms that write objects and lists with markup of their own.

The name of a rule contains the name of the rule above it: `valuevalue4x0ox0` is the value of property 0 of the object
`value4x0o`, which is the value of property 0 of tool 4. The parts of names:

    value{name}x{index}   value of a property; name: of the object, at the top the tool's number; index: of the property
                          in the form's order. The `x` keeps the two numbers apart.
    first{name}x{index}   pairs of an object from this property on, none being written yet. `first{name}x0` has all.
    later{name}x{index}   the same after another pair, so a separator comes first
    {rule}o               `name` of the object that is the value of `rule`: a part of rule names, no rule
    {rule}i               item of the list that is the value of `rule`
    {rule}u{number}       choice of the union (`anyOf`, `oneOf`) that is the value of `rule`
    json{rule}            number, boolean or null of `rule` as JSON

`ordered_rules` in form.py makes the rules `first` and `later`: a change of these names is one of both files. Subclasses
have further names for texts.

The tool with number 4 and the parameters

    {"properties": {"at": {"properties": {"hour": {"anyOf": [{"enum": [8, 9]}, {"type": "null"}]}}},
                    "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}},
     "required": ["days"]}

has these rules in Gemma's form, in another order. `pairs` returns `first4x0`.

    first4x0: "at:" value4x0 later4x1 | first4x1
    later4x0: "," "at:" value4x0 later4x1 | later4x1
    first4x1: "days:" value4x1 later4x2
    later4x1: "," "days:" value4x1 later4x2
    first4x2:
    later4x2:
    value4x0: "{" firstvalue4x0ox0 "}"
    firstvalue4x0ox0: "hour:" valuevalue4x0ox0 latervalue4x0ox1 | firstvalue4x0ox1
    latervalue4x0ox0: "," "hour:" valuevalue4x0ox0 latervalue4x0ox1 | latervalue4x0ox1
    firstvalue4x0ox1:
    latervalue4x0ox1:
    valuevalue4x0ox0: valuevalue4x0ox0u0 | valuevalue4x0ox0u1
    valuevalue4x0ox0u0: "8" | "9"
    valuevalue4x0ox0u1: jsonvaluevalue4x0ox0u1
    jsonvaluevalue4x0ox0u1: %json {"type": "null", "x-guidance": ...}
    value4x1: "[" (value4x1i ("," value4x1i){0,2})? "]"
    value4x1i: "1" | "2"

Guards: tests/models/text/tools/test_value_rules.py, test_forms.py and test_round_trip.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Any

from headrace.models.text.tools.call import choices_of, kind_of, kinds_of, referenced
from headrace.models.text.tools.form import ordered_rules, schema_json
from headrace.runtime.config.typed import as_list, as_mapping

MAX_DEPTH = 6  # of nested objects, lists and unions: deeper ones may have any values; of references in a row
Schema = Mapping[str, object]  # JSON schema, or the schemas of an object's properties by name
SCALARS = frozenset(["string", "number", "boolean", "null"])


class ValueRules(ABC):
    """Rules in Lark, collected in `rules`. Objects and lists whose schema tells no more may have any values.

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
        """Add the rules of an object's pairs; return the name of the rule of all pairs.

        name: part of the names of these rules, see the module.
        properties: schemas by key.
        required: keys that every object has.
        depth: of the object's values.
        """
        written: dict[str, str] = {}
        for index, (key, schema) in enumerate(self.order(properties).items()):
            value = f"value{name}x{index}"
            self._add(value, schema, depth)
            written[key] = self.pair(key, value)
        self.rules += ordered_rules(name, written, required, self.separator)
        return f"first{name}x0"

    def _add(self, rule: str, schema: Any, depth: int) -> None:
        """Add the rule of a value, and the rules that it refers to. rule: its name."""
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
            # No `_end` here: each choice has one.
            for number, each in enumerate(union):
                self._add(f"{rule}u{number}", each, depth + 1)
            self.rules.append(f"{rule}: {' | '.join(f'{rule}u{number}' for number in range(len(union)))}")
        elif kinds == {"string"}:
            self.rules += self.text(rule, about)
        elif kinds <= SCALARS - {"string"}:
            # The schema may refer to definitions of the document, so `%json` gets them with it.
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
        """Add a rule: the value and, after it, `end`."""
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
        # The first item has no separator before it, so it stands apart, and the bounds count only the items after it:
        # 2 to 5 items are `item (separator item){1,4}`. Without an upper bound they are `{1,}`.
        bounds = f"{max(0, least - 1)},"
        if max_items is not None:
            bounds += str(max(0, max_items - 1))
        next_item = item
        if self.separator:
            next_item = f'"{self.separator}" {item}'
        items = f"{item} ({next_item}){{{bounds}}}"
        # Now there is at least one item. A list that has to be empty has none, one that may be empty has all or none.
        if max_items == 0:
            items = ""
        elif not least:
            items = f"({items})?"
        self._end(rule, self.list(items))
