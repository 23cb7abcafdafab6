"""Guarded filters, tests and methods for chat templates; each call is charged for the data it reads and builds.

A call into C can neither be traced nor interrupted, so its worst-case cost is charged before it runs: a search from the
right and a strip compare their argument at every character. Methods not listed here are refused.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext

from headrace.models.text.encoding import MAX_TEXT
from headrace.models.text.template_limits import (
    PER_ITEM,
    TemplateRefusedError,
    built,
    charge,
    check_format,
    check_integer,
    check_replace,
    check_size,
    check_written,
    count_round,
    weight,
)
from headrace.models.text.template_text import TemplateText, as_template_text, concatenate

_COLLECTION_FILTERS = (
    *("abs", "attr", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length", "list"),
    *("map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique"),
)
_CONSTANT_TIME_FILTERS = frozenset(["count", "d", "default", "first", "items", "length"])
_COMPARING_FILTERS = frozenset(["dictsort", "max", "min", "sort", "unique"])
_TEXT_FILTERS = ("capitalize", "e", "escape", "join", "lower", "replace", "safe", "string", "title", "trim", "upper")
_COMPARING_TESTS = (
    *("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le", "in"),
    *("divisibleby", "even", "odd", "lower", "upper", "filter", "test"),
)

_TEXT_METHODS = (
    *("capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii"),
    *("isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"),
    *("join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex"),
    *("rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
)
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, frozenset(_TEXT_METHODS)),
    (dict, frozenset(["copy", "get", "items", "keys", "values"])),
    ((list, tuple), frozenset(["copy", "count", "index"])),
    ((int, float, complex, bytes, range, GeneratorType), frozenset()),
    ((type({}.keys()), type({}.values()), type({}.items())), frozenset()),
)
_INSERTING_METHODS = frozenset(["join", "replace"])  # a plain text's would lose the origin of the arguments
_CHEAP_METHODS = frozenset(["get", "items", "keys", "values"])
_PER_PART = 16  # characters charged per part of a text, an object of its own
_LONGEST_TIME = 200


def has_method(value: Any, name: str) -> bool:
    """Return whether a template may use this attribute; values of Python's own types have a list of methods."""
    return next((name in names for kind, names in _METHODS if isinstance(value, kind)), True)


def count_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Charge a call of a method of text, list, dictionary or loop; return the function and positional arguments."""
    count_round()
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, (str, list, tuple, dict, LoopContext)):
        return function, args
    name = function.__name__
    if isinstance(owner, str) and name in _INSERTING_METHODS:
        function = getattr(as_template_text(owner), name)
    if isinstance(owner, str) and name == "join" and len(args) == 1:
        args = (_listed(args[0]),)
        check_size(len(owner) * len(args[0]))
    size = check_written(*args, *kwargs.values())
    if isinstance(owner, str):
        charge(len(owner) * _cost_per_character(name, args, size))
        if name == "replace":
            check_replace(owner, *args)
    elif isinstance(owner, (list, tuple)):
        check_written(owner)  # a comparison may read all of it
    elif isinstance(owner, dict) and name not in _CHEAP_METHODS:
        charge(weight(owner))
    return function, args


def _cost_per_character(name: str, args: tuple[Any, ...], argument_size: int) -> int:
    # These may compare their whole argument at every character.
    at_each = max(argument_size, 1) if args and ("strip" in name or name.startswith("r")) else 1
    return max(at_each, _PER_PART) if "split" in name or name == "title" else at_each


def guarded_filters(originals: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the allowed filters of jinja2, charged."""
    kept = {name: _guard_collection(name, originals[name]) for name in _COLLECTION_FILTERS}
    kept |= {name: _guard_text(name, originals[name]) for name in _TEXT_FILTERS}
    return kept | {"tojson": _tojson, "indent": _indent, "format": _format, "count_round": _count_round}


def guarded_tests(originals: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of jinja2's tests, with charges for comparisons."""
    return {**originals} | {name: _guard_test(originals[name]) for name in _COMPARING_TESTS}


def global_functions(originals: dict[str, Any]) -> dict[str, Any]:
    """Return the functions that a template may call, except `namespace`."""
    return {
        "range": originals["range"],  # the sandbox's: at most 100,000 items
        "dict": _dict,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }


def weighed(value: Any) -> Any:
    """Charge a value that is compared or hashed, possibly in full, and return it."""
    if isinstance(value, (str, bytes, range)):
        charge(len(value))
    elif hasattr(value, "__len__"):
        check_written(value)
    else:
        check_integer(value)
    return value


def _listed(value: Any) -> Any:
    """Return a collection with a length and the same items."""
    if isinstance(value, str):
        charge(PER_ITEM * len(value))
    return value if isinstance(value, (list, tuple)) else list(value)


def _values(args: tuple[Any, ...]) -> list[Any]:
    return [arg for arg in args if not isinstance(arg, (Context, nodes.EvalContext, jinja2.Environment))]


def _guard_collection(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the mark for the context that jinja2 passes first
    def guarded(*args: Any, **kwargs: Any) -> Any:
        value, *options = _values(args) or [None]
        if name in _COMPARING_FILTERS and isinstance(value, Iterable):
            if not hasattr(value, "__len__"):
                listed = list(value)
                args = tuple(listed if arg is value else arg for arg in args)
                value = listed
            charge(check_written(value) * len(value).bit_length())
        if name in _CONSTANT_TIME_FILTERS:
            pass
        elif isinstance(value, str):
            charge(PER_ITEM * len(value))  # as a list of its characters
        elif isinstance(value, (list, tuple, dict, range)):
            charge(weight(value))
        if name not in ("d", "default"):
            check_written(*options, *kwargs.values())
        result = function(*args, **kwargs)
        check_integer(result)
        return result

    return guarded


def _guard_text(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = _values(args)
        if name == "join" and given and not hasattr(given[0], "__len__"):
            listed = list(given[0])
            args = tuple(listed if arg is given[0] else arg for arg in args)
            given[0] = listed
        size = check_written(*given, *kwargs.values())
        if name == "safe" and given and isinstance(given[0], TemplateText):
            return given[0]
        if name == "replace" and given:
            check_replace(*(str(arg) for arg in given[:3]))
            args = tuple(as_template_text(arg) if arg is given[0] else arg for arg in args)
        elif name == "join" and given:
            args, kwargs = _with_separator(args, given, kwargs)
            check_size(len(given[0]) * max(len(str(option)) for option in (*given[1:], *kwargs.values(), "")))
        elif name == "title":
            charge(size * _PER_PART)
        elif name == "trim" and given:
            charge(size * sum(len(str(option)) for option in (*given[1:], *kwargs.values())))
        return built(function(*args, **kwargs))

    return guarded


def _with_separator(
    args: tuple[Any, ...], given: list[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `join` with a separator that keeps the origin of the joined texts."""
    if len(given) == 1:
        return args, {**kwargs, "d": as_template_text(kwargs.get("d", ""))}
    context = args[: len(args) - len(given)]
    value, separator, *others = given
    return (*context, value, as_template_text(separator), *others), kwargs


def _guard_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any) -> Any:
        for arg in args:
            weighed(arg)
        return function(*args)

    return guarded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers writes it for templates: no HTML escapes, no ASCII escapes by default."""
    check_written(value)
    if isinstance(indent, int) and indent > 16:
        raise TemplateRefusedError("it indents JSON absurdly far")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts = []
    size = 0
    for part in encoder.iterencode(value):
        size += len(part)
        check_size(size)
        parts.append(part)
    charge(size)
    return "".join(parts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent all lines but the first, as Jinja's filter does. first, blank: the first line, empty lines, too."""
    prefix = width if isinstance(width, str) else TemplateText(" " * min(width, MAX_TEXT))
    check_size(len(text) + (text.count("\n") + 2) * len(prefix))
    lines = (as_template_text(text) + "\n").splitlines()
    indented = [concatenate((prefix, line)) if line or blank else line for line in lines[1:]]
    start = concatenate((prefix, lines[0])) if first else lines[0]
    return str(built(TemplateText("\n").join([start, *indented])))


def _format(pattern: str, *args: Any, **kwargs: Any) -> str:
    check_format(pattern, *args, *kwargs.values())
    return str(built(jinja2.filters.do_format(pattern, *args, **kwargs)))


def _count_round(value: Any = None) -> Any:
    """Count a round of a loop and return the value; `template_sandbox` adds this filter to all loops."""
    count_round()
    return value


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dict; a function, since the type itself would offer its methods."""
    check_written(*args)
    charge(sum(map(weight, args)) + PER_ITEM)
    return dict(*args, **kwargs)


def _strftime_now(form: str) -> str:
    if len(form) > _LONGEST_TIME:
        raise TemplateRefusedError("it asks for the time in an absurdly long form")
    return datetime.now().strftime(form)


def _raise_exception(message: object) -> NoReturn:
    check_written(message)
    raise jinja2.TemplateError(str(message))
