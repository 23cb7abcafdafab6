"""Fields of a request's JSON body, typed: those of every client's form, and the answer options among them.

Server and batch read bodies with these functions, so that a wrong value has the same error everywhere: it names the
field. Unknown fields are ignored here.

Guard: tests/app/server/test_openai.py.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from headrace.app.answer.options import GRAMMARS, OPTIONS, AnswerOptions
from headrace.runtime.config.value_types import Flag, Text, ValueType, read_value, shown
from headrace.runtime.errors import UsageError

T = TypeVar("T")
Body = Mapping[str, object]
# Bounds on the work of one step: each text is looked for in the answer, each bias is added to the logits.
MAX_STOPS = 64
MAX_STOP_LENGTH = 1000  # characters; the search for the beginning of a text at the end of the answer is quadratic in it
MAX_BIASES = 4096
_SMALLEST_TOP_P = 1e-6  # keeps the best token alone


def read(body: Body, name: str, kind: ValueType[T]) -> T | None:
    """Return a field; None if it is missing or null. Raises UsageError."""
    value = body.get(name)
    return None if value is None else read_value(kind, name, value)


def flag(body: Body, name: str) -> bool:
    """Return a field that is true or false; false if it is missing."""
    return read(body, name, Flag()) or False


def mapping(body: Body, name: str) -> Body:
    """Return an object, empty if it is missing."""
    value = body.get(name)
    if value is None:
        return {}
    return object_named(name, value)


def object_named(name: str, value: object) -> dict[str, Any]:
    """Return an object of a document. name: for the error. Raises UsageError for anything else."""
    if not isinstance(value, dict):
        raise UsageError(f"{name} must be an object, not {shown(value)}")
    return value


def required_texts(body: Body, where: str, *names: str) -> list[str]:
    """Return fields that must be texts. where: path of the object, for errors. Raises UsageError."""
    return [read_value(Text(), f"{where}.{name}", body.get(name)) for name in names]


def items(body: Body, name: str, max_items: int) -> list[Any]:
    """Return a list, empty if it is missing."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UsageError(f"{name} must be a list, not {shown(value)}")
    if len(value) > max_items:
        raise UsageError(f"{name} has {len(value)} entries, at most {max_items} are allowed")
    return value


def refuse(body: Body, names: Collection[str], neutral: Mapping[str, float] | None = None) -> None:
    """Refuse fields that would change the answer and are not supported, unless they are empty, 0 or false.

    neutral: other values that change nothing, by field.
    """
    for name, value in body.items():
        is_neutral = neutral is not None and value == neutral.get(name)
        if name in names and value and not is_neutral:
            raise UsageError(f"{name} is not supported")


def answer_options(
    body: Body, aliases: Mapping[str, str] | None = None, more: Mapping[str, object] | None = None
) -> AnswerOptions:
    """Return the answer options among the fields.

    aliases: options by the other names that fields have for them.
    more: options from other fields; None drops the value of a field by that name.

    Special values of other servers mean the same here (`_translate`). Raises UsageError for a value out of range, and
    for an option or a grammar that both its own field and another ask for.
    """
    aliases = aliases or {}
    more = more or {}
    given = {name: _translate(aliases.get(name, name), body.get(name)) for name in (*OPTIONS, *aliases)}
    for name, value in more.items():
        if value is None:
            continue
        exclusive = GRAMMARS if name in GRAMMARS else (name,)
        for option in exclusive:
            if given.get(option) is not None:
                raise UsageError(f"{option} excludes the {name} of another field", "give one of them")
    options = AnswerOptions.read(given | dict(more), aliases=aliases)
    if len(options.stop or ()) > MAX_STOPS:
        raise UsageError(f"stop has {len(options.stop or ())} texts, at most {MAX_STOPS} are allowed")
    longest_stop = max(map(len, options.stop or ()), default=0)
    if longest_stop > MAX_STOP_LENGTH:
        raise UsageError(f"stop has a text of {longest_stop} characters, at most {MAX_STOP_LENGTH} are allowed")
    if len(options.logit_bias or ()) > MAX_BIASES:
        raise UsageError(f"logit_bias has more than {MAX_BIASES} tokens")
    return options


def _translate(option: str, value: object) -> object:
    """Return the value that headrace has for another server's special value; None: unset."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if option == "seed" and value < 0:  # llama.cpp: any seed
        return None
    if option == "max_tokens" and value == -1:  # llama.cpp: no limit
        return None
    if option == "top_k" and value == -1:  # vLLM: all tokens
        return 0
    if option == "top_p" and value == 0:  # the best token alone
        return _SMALLEST_TOP_P
    return value
