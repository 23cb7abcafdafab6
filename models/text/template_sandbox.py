"""Runs one untrusted Jinja chat template: no code of its own, no endless loop, no text bomb.

A chat template arrives inside a checkpoint, so it is treated as hostile. It runs in Jinja's immutable sandbox, with a
short list of filters and globals, no loader and no name that starts with `_`; `template_limits` bounds what it builds
and how long it runs. Reading one is bounded by its length: Jinja takes time and memory in proportion to it.
Importing this module imports jinja2 (about 35 ms): `chat_template` does so on first use only.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.models.text.template_limits import (
    MAX_TEXT,
    PER_ITEM,
    TemplateRefusedError,
    check_format,
    check_operator,
    check_replace,
    check_size,
    check_written,
    line_budget,
    spend,
    weight,
)
from headrace.runtime.errors import CheckpointError

# Characters of template source: the longest in common use have about 20,000, and no 50,000 that we found take Jinja
# and Python 2 s or 256 MB to compile.
MAX_SOURCE = 50_000

# Linear in their input, or guarded below.
_COLLECTION_FILTERS = (
    *("abs", "attr", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length", "list"),
    *("map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique"),
)
_TEXT_FILTERS = ("capitalize", "e", "escape", "join", "lower", "replace", "safe", "string", "title", "trim", "upper")
_CHEAP_METHODS = frozenset(["get", "items", "keys", "values"])
_PER_PART = 8
_REFUSED_STR_METHODS = frozenset(
    ["center", "encode", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill"]
)


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render within the limits. Raises CheckpointError with one line if the template fails or is refused."""
    parts: list[str] = []
    size = 0
    try:
        with line_budget(len(variables["messages"])):
            for part in template.generate(variables):
                if not isinstance(part, str):  # what a filter block made of its text
                    check_written(part)
                    part = str(part)
                size += len(part)
                check_size(size)
                parts.append(part)
    except (jinja2.TemplateError, RecursionError, MemoryError, *_DATA_ERRORS) as error:
        raise CheckpointError(f"the chat template failed: {_one_line(error)}") from error
    return "".join(parts)


def compile_template(source: str) -> jinja2.Template:
    """Compile a template for `render_template`. Raises CheckpointError if it is not a sound template."""
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"the chat template is {len(source)} characters long (limit {MAX_SOURCE})")
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, *_DATA_ERRORS) as error:
        raise CheckpointError(f"the chat template cannot be read: {_one_line(error)}") from error


_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)


def _one_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= 200 else text[:199] + "…"


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja2's name)
        # `a ~ b` compiles to a plain function that no sandbox hook sees; send it through a checked one.
        self.write("environment.join_checked((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    # Comparing, slicing and writing out lists are Python's own operators, which no sandbox hook sees either.

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._weighed(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        self.write(f" {operators[node.op]} ")
        self._weighed(node.expr, frame)

    def _weighed(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("environment.weighed(")
        self.visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.counted(")
        self.visit(node.node, frame)
        self.write(")[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self.write("environment.counted(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.counted(")
        super().visit_Dict(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Positional names as in jinja2: a template may pass keyword arguments called `self` or `obj`.
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (list, tuple, dict)) and __obj.__name__ not in _CHEAP_METHODS:
            spend(weight(owner))
        if isinstance(owner, str):
            # Each part that a text is split into is an object of its own.
            spend(len(owner) * (_PER_PART if "split" in __obj.__name__ else 1))
            if __obj.__name__ == "replace":
                check_replace(owner, *args)
            elif __obj.__name__ == "join" and len(args) == 1:
                args = (list(args[0]),)
                check_written(*args)
                check_size(len(owner) * len(args[0]))
        return super().call(__context, __obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_STR_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja would hand out a value that fails on use, and prints as nothing.
        raise TemplateRefusedError(f"it asks a {type(obj).__name__} for {attribute!r}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(pattern, *args, *kwargs.values())
            return wrapped(*args, **kwargs)

        return checked

    def weighed(self, value: Any) -> Any:
        """A value that is compared, and so perhaps gone through to its last part."""
        if isinstance(value, (str, bytes)):
            spend(len(value))
        elif hasattr(value, "__len__") and not isinstance(value, range):
            check_written(value)
        return value

    def counted(self, value: Any) -> Any:
        """A value that is made, or copied."""
        spend(weight(value) + PER_ITEM)
        return value

    def join_checked(self, parts: Iterable[Any]) -> str:
        values = list(parts)
        check_written(*values)
        return "".join(map(str, values))

    # What `{% set x %}...{% endset %}`, macros and call blocks gather their output with.
    concat = join_checked


class _GenerationBlock(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without underscored names, so that none can stand in for a Python internal."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateRefusedError(f"it stores an underscored name {name!r}")


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # the optimizer would compute constants before any limit holds
        extensions=[ext.loopcontrols, _GenerationBlock],
        finalize=_finalize,
    )
    filters = environment.filters
    kept = {name: _guard_collection(filters[name]) for name in _COLLECTION_FILTERS}
    kept |= {name: _guard_text(name, filters[name]) for name in _TEXT_FILTERS}
    environment.filters = kept | {"tojson": _tojson, "indent": _indent, "format": _format}
    environment.globals = {
        "range": environment.globals["range"],  # the sandbox's: at most 100,000 items
        "namespace": _Namespace,
        "dict": _dict,
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


def _finalize(value: Any) -> Any:
    check_written(value)
    return value


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function, since the type itself would offer its methods."""
    spend(sum(map(weight, args)) + PER_ITEM)
    return dict(*args, **kwargs)


def _guard_collection(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if isinstance(arg, str):
                spend(PER_ITEM * len(arg))  # as a list of its characters
            elif isinstance(arg, (list, tuple, dict, range)):
                spend(weight(arg))
        return function(*args, **kwargs)

    return guarded


def _guard_text(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the mark that says which of jinja2's contexts it takes first
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = [arg for arg in args if not isinstance(arg, (Context, nodes.EvalContext, jinja2.Environment))]
        check_written(*given, *kwargs.values())
        if name == "replace":
            check_replace(*(str(arg) for arg in given[:3]))
        elif name == "join" and given[1:] and hasattr(given[0], "__len__"):
            check_size(len(given[0]) * len(str(given[1])))
        return function(*args, **kwargs)

    return guarded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: no HTML escapes, no ASCII escapes by default."""
    check_written(value)
    if isinstance(indent, int) and indent > 16:
        raise TemplateRefusedError("it indents JSON absurdly far")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts, size = [], 0
    for part in encoder.iterencode(value):
        size += len(part)
        check_size(size)
        parts.append(part)
    return "".join(parts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    prefix = width if isinstance(width, str) else " " * min(width, MAX_TEXT)
    check_size(len(text) + (text.count("\n") + 2) * len(prefix))
    return jinja2.filters.do_indent(text, prefix, first, blank)


def _format(pattern: str, *args: Any, **kwargs: Any) -> str:
    check_format(pattern, *args, *kwargs.values())
    return jinja2.filters.do_format(pattern, *args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
