"""Sandbox for untrusted Jinja chat templates.

Templates come with checkpoints and are treated as hostile. They run in Jinja's sandbox with a short list of filters,
methods and globals, no loader and no name that starts with `_`. They get copies of the data, which they may change in
two ways that real ones do: fields of objects, and lists. `template_limits` bounds size and time; the source length
bounds compilation. Texts of the template itself are `TemplateText`, so that the prompt tells them from text of messages
and tools. Importing this module imports jinja2, so `chat_template` does it on first use.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import ext, filters, meta, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headrace.models.text.encoding import MAX_TEXT
from headrace.models.text.template_limits import (
    PER_ITEM,
    PER_REFERENCE,
    TemplateRefusedError,
    before_reading,
    built,
    changed,
    charge,
    check_method,
    check_operator,
    check_size,
    count_round,
    render_budget,
    size_of,
)
from headrace.models.text.template_text import OUTSIDE, TemplateText, as_template_text, concatenate
from headrace.runtime.errors import CheckpointError

# Characters of template source. Templates in common use have up to 20,000; 50,000 compile in under 2 s and 256 MB.
MAX_SOURCE = 50_000

_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr",
    "sort", "string", "unique", "upper",
)  # fmt: skip
# Those that go through the items of their value: of a text, its characters.
_ITEM_FILTERS = frozenset(
    {"join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "title", "unique"}
)
_TEXT_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
    "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
    "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
_LOOP_FIELDS = frozenset({
    "changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem",
    "revindex", "revindex0",
})  # fmt: skip
# Changes of lists that a template has made, or of copies that it got: Kimi K2 Thinking, as llama.cpp has it.
_LIST_CHANGES = frozenset(["append", "pop"])
# The attributes that a template may read, by the type of the value. Other values have none, but for namespaces.
_ATTRIBUTES: Mapping[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
    list: frozenset(["copy", "count", "index"]) | _LIST_CHANGES,
    tuple: frozenset(["count", "index"]),
    LoopContext: _LOOP_FIELDS,
}
_MAX_ARGUMENTS = 64  # after `*` in a call: Jamba calls macros so
_LONGEST_TIME = 200  # characters of a form of the time
# Errors of Python's own types, where a template takes a value for another kind.
_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)


def render_template(
    template: jinja2.Template, variables: Mapping[str, Any], seconds: float | None = None
) -> TemplateText:
    """Render within the limits. Raises CheckpointError with one line if the template fails or is refused.

    variables: plain texts are from outside; a `TemplateText` keeps its origins.
    seconds: of processor time; None: `template_limits.MAX_SECONDS`, and more for each message and tool.
    """
    parts: list[str] = []
    size = 0
    try:
        with render_budget(variables, seconds):
            for part in template.generate(variables):
                text = str(part)  # a filter block may give another type
                size += len(text)
                check_size(size)
                parts.append(text)
    except (jinja2.TemplateError, RuntimeError, MemoryError, *_DATA_ERRORS) as error:
        # RuntimeError: too deep a recursion, or fields that a loop over them adds.
        raise CheckpointError(f"the chat template failed: {_one_line(error)}") from error
    return as_template_text(concatenate(parts))


def variables_of(source: str) -> set[str]:
    """Return the names of the variables that a template reads. Raises CheckpointError for an invalid template."""
    compile_template(source)
    environment = _Environment()
    return meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()


def compile_template(source: str) -> jinja2.Template:
    """Compile a template for `render_template`. Raises CheckpointError for an invalid template."""
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"the chat template is {len(source)} characters long (limit {MAX_SOURCE})")
    try:
        with render_budget({}):  # Jinja computes constants while it compiles
            return _Environment().from_string(source)
    except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, *_DATA_ERRORS) as error:
        raise CheckpointError(f"the chat template cannot be read: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """Return an error's message in one short line of printable characters."""
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= 200 else text[:199] + "…"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of one template."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would compute constants outside the limits
            extensions=[ext.loopcontrols, _GenerationBlock],
            finalize=before_reading,
        )
        allowed = {name: self.filters[name] for name in _FILTERS}
        self.filters = {name: _guarded(function, name) for name, function in (allowed | _OWN_FILTERS).items()} | _CHECKS
        self.tests = {name: _guarded(cast(Callable[..., Any], test)) for name, test in self.tests.items()}
        self.globals = {
            "range": self.globals["range"],  # the sandbox's: at most 100,000 items
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # the type itself would offer its methods
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_TemplateRewriter(self).visit(source), *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> Any:
        check_operator(operator, left, right)
        return built(super().call_binop(context, operator, left, right), PER_REFERENCE)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: object) -> Any:  # noqa: N805
        # Positional names as in jinja2: a template may pass keyword arguments called `self` or `obj`.
        count_round()
        owner = before_reading(getattr(__obj, "__self__", None))
        name = getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name not in _TEXT_METHODS:
                raise TemplateRefusedError(f"it calls {name!r} of a text")
            if name == "join":
                return built(_join(__self, args[0], owner))
            check_method(name, owner, *args, *kwargs.values())
            # A method of a plain text would forget which of its arguments are the template's.
            __obj = getattr(as_template_text(owner), name)
        if isinstance(owner, list) and name in _LIST_CHANGES:
            changed()
        return built(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if type(obj) is _Namespace:
            return not attr.startswith("_")
        kind = str if isinstance(obj, str) else type(obj)  # `TemplateText`, and Jinja's escaped text
        if attr not in _ATTRIBUTES.get(kind, ()):
            return False
        return attr in _LIST_CHANGES or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        # Jinja would return a value that fails on use and prints as nothing.
        raise TemplateRefusedError(f"it asks a {type(obj).__name__} for {attribute!r}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        # Jinja's would call all of the result the template's own, as it takes the type of the pattern.
        pattern = as_template_text(value.__self__)

        def checked(*args: object, **kwargs: object) -> str:
            check_method("format", pattern, *args, *kwargs.values())
            return _TemplateFormatter(self).insert(pattern, args, kwargs)

        return checked

    # Collects the output of `{% set x %}...{% endset %}`, macros and call blocks.
    concat = staticmethod(lambda parts: built(concatenate(parts)))


class _TemplateRewriter(NodeTransformer):
    """Rewrites a parsed template where Jinja has no hook: its own texts, and operations that are plain Python.

    Checks are filters whose names no template can write.
    """

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment
        self._names: dict[str, str] = {}

    def visit(self, node: nodes.Node, *args: object, **kwargs: object) -> Any:
        """Rewrite a node after its children, and check the value that it builds."""
        rewritten = super().visit(node, *args, **kwargs)
        match node:
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return self._filtered(rewritten, "-built")
            case nodes.Getitem(arg=nodes.Slice()):
                return self._filtered(rewritten, "-slice")
        return rewritten

    def _own_text(self, text: str, lineno: int) -> nodes.Expr:
        """Return an expression for a text of the template itself: an attribute of its environment."""
        if text not in self._names:
            self._names[text] = f"own_text_{len(self._names)}"
            setattr(self._environment, self._names[text], TemplateText(text))
        return nodes.EnvironmentAttribute(self._names[text], lineno=lineno)

    def _filtered(self, node: nodes.Node, name: str) -> nodes.Filter:
        assert isinstance(node, nodes.Expr)
        filtered = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        filtered.set_environment(self._environment)
        return filtered

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802 (jinja2's names)
        built(node.value)
        if not isinstance(node.value, str):
            return node
        return self._own_text(node.value, node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return self._own_text(node.data, node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filtered(nodes.List(node.nodes, lineno=node.lineno), "-concatenate")

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, "-rounds")
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node | list[nodes.Node]:  # noqa: N802
        return self._by_variables(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node | list[nodes.Node]:  # noqa: N802
        return self._by_variables(node)

    def _by_variables(self, node: nodes.Assign | nodes.AssignBlock) -> nodes.Node | list[nodes.Node]:
        """Rewrite `{% set ns.a, b = 1, 2 %}` and the like: each field gets its value by a variable, and is checked.

        Jinja stores fields in a tuple of targets, and of a block, into any value.
        """
        self.generic_visit(node)
        fields: list[nodes.NSRef] = []
        node.target = self._plain_target(node.target, fields)
        if not fields:
            return node
        return [node, *(self._field_set(field, number) for number, field in enumerate(fields))]

    def _plain_target(self, target: nodes.Expr, fields: list[nodes.NSRef]) -> nodes.Expr:
        """Return a target with a variable in place of each field, which is added to `fields`."""
        if isinstance(target, nodes.NSRef):
            fields.append(target)
            return nodes.Name(f"_field{len(fields) - 1}", "store", lineno=target.lineno)
        if isinstance(target, nodes.Tuple):
            target.items = [self._plain_target(item, fields) for item in target.items]
        return target

    def _field_set(self, field: nodes.NSRef, number: int) -> nodes.ExprStmt:
        """Return a statement that sets a field to the value of its variable."""
        owner = nodes.Name(field.name, "load", lineno=field.lineno)
        setting = self._filtered(owner, "-set_field")
        value = nodes.Name(f"_field{number}", "load", lineno=field.lineno)
        setting.args = [self._own_text(field.attr, field.lineno), value]
        return nodes.ExprStmt(setting, lineno=field.lineno)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.dyn_kwargs is not None:
            raise TemplateRefusedError("it spreads arguments with **")
        if node.dyn_args is not None:
            node.dyn_args = self._filtered(node.dyn_args, "-arguments")
        return node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.expr, (nodes.Const, nodes.EnvironmentAttribute)):
            node.expr = self._filtered(node.expr, "-compared")
        return node


def _rounds(items: Iterable[object]) -> Iterator[object]:
    """Yield the items of a loop, and look at the clock."""
    for item in items:
        count_round()
        yield item


def _set_field(value: Any, name: str, field: object) -> None:
    """Set a field of a namespace or of an object: messages and tools are copies for the template."""
    if type(value) not in (dict, _Namespace):
        raise TemplateRefusedError(f"it sets a field of a {type(value).__name__}")
    _check_name(name)
    value[name] = field
    if type(value) is dict:
        changed()


def _arguments(values: object) -> list[object] | tuple[object, ...]:
    """Return the values after `*` in a call: few, and no text, which Python would make a tuple of characters."""
    if not isinstance(values, (list, tuple)) or len(values) > _MAX_ARGUMENTS:
        raise TemplateRefusedError("it spreads no short list as arguments")
    return values


# Filters that `_TemplateRewriter` puts around operations.
_CHECKS: dict[str, Callable[..., Any]] = {
    "-arguments": _arguments,
    "-built": built,
    "-compared": before_reading,
    "-slice": lambda value: built(value, PER_REFERENCE),
    "-concatenate": lambda parts: built(concatenate(parts)),
    "-rounds": _rounds,
    "-set_field": _set_field,
}


def _guarded(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Return a filter, or a test, that checks its arguments and its result. name: of a filter."""

    @wraps(function)  # keeps the mark for the context that jinja2 passes first
    def guarded(*args: object, **kwargs: object) -> Any:
        count_round()
        for arg in args:
            before_reading(arg)
        check_method(name, *args, *kwargs.values())
        if name in _ITEM_FILTERS:
            text = next((arg for arg in args if isinstance(arg, str)), "")
            charge(PER_ITEM * len(text))  # each character becomes a value, which takes microseconds
        return built(function(*args, **kwargs))

    return guarded


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, items: Iterable[object], d: Any = "", attribute: str | int | None = None
) -> str:
    """Return the written forms of all items, or of an attribute of each, with the separator `d` between them."""
    parts = list(items)
    if attribute is not None:
        parts = list(map(filters.make_attrgetter(environment, attribute), parts))
    check_size(sum(map(size_of, parts)) + len(d) * len(parts))
    return as_template_text(d).join(map(str, parts))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers writes it for templates: no HTML escapes, no ASCII escapes by default."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    if isinstance(indent, int) and indent > 16:
        raise TemplateRefusedError("it indents JSON absurdly far")
    parts = []
    size = 0
    for part in encoder.iterencode(value):
        size += len(part)
        check_size(size)
        parts.append(part)
    return "".join(parts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent all lines but the first, as Jinja's filter does. first, blank: the first line, empty lines, too."""
    if isinstance(width, str):
        prefix = width
    else:
        prefix = TemplateText(" ") * min(width, MAX_TEXT)
    check_size(len(text) + (text.count("\n") + 2) * len(prefix))
    lines = (as_template_text(text) + "\n").splitlines()
    for index, line in enumerate(lines):
        is_indented = bool(line) or blank
        if index == 0:
            is_indented = first
        if is_indented:
            lines[index] = concatenate((prefix, line))
    return TemplateText("\n").join(lines)


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "format": filters.do_format,
    "indent": _indent,
    "join": _join,
    "replace": lambda text, *args: as_template_text(text).replace(*args),
    "safe": lambda text: str(text),
    "title": filters.do_title,
    "tojson": _tojson,
    "trim": lambda text, chars=None: as_template_text(text).strip(chars),
}


def _strftime_now(form: str) -> str:
    """Return the local time. form: as `strftime` has it."""
    if len(form) > _LONGEST_TIME:
        raise TemplateRefusedError("it asks for the time in an absurdly long form")
    return datetime.now().strftime(form)


def _raise_exception(message: object) -> NoReturn:
    """Refuse a conversation, as templates do."""
    raise jinja2.TemplateError(str(message))


class _TemplateFormatter(SandboxedFormatter):
    """Jinja's formatter, with the origins of a pattern and of the values that it inserts."""

    _FIELD = "\uffff"  # stands for a value until all are formatted; no character of a text

    def insert(self, pattern: TemplateText, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        """Return the pattern with values in its fields. All of it is from outside if any of the pattern is."""
        text = str.__str__(pattern)
        if OUTSIDE in pattern.origin or self._FIELD in text:
            return SandboxedFormatter(self._env).vformat(text, args, kwargs)
        self._values: list[str] = []
        literals = self.vformat(text, args, kwargs).split(self._FIELD)
        parts: list[str] = []
        for literal, value in zip(literals, [*self._values, ""], strict=True):
            parts += [TemplateText(literal), value]
        return concatenate(parts)

    def format_field(self, value: Any, format_spec: str) -> str:
        if not isinstance(value, TemplateText) or format_spec:
            value = super().format_field(value, format_spec)
        self._values.append(value)
        return self._FIELD


class _GenerationBlock(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without underscored names, so that none can replace a Python internal."""

    def __init__(*args: object, **kwargs: object) -> None:
        self = args[0]  # no parameter has a name: a template may call a field `self`
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        # `_TemplateRewriter` leads all fields through `_set_field`; this holds whatever Jinja adds.
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> NoReturn:
        # Namespaces can hold each other, so that one of them is written many times.
        raise TemplateRefusedError("it writes out a namespace")


def _check_name(name: object) -> None:
    """Refuse the name of a field that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateRefusedError(f"it stores an underscored name {name!r}")
