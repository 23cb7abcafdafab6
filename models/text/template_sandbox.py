"""Sandbox for untrusted Jinja chat templates.

Templates come with checkpoints and are treated as hostile. They run in Jinja's sandbox with a short list of filters,
methods and globals, no loader and no name that starts with `_`. They get copies of the data, which they may change in
two ways that real ones do: fields of objects, and lists. Texts of the template itself are `TemplateText`, so that the
prompt tells them from text of messages and tools. Nothing here limits time or memory: `template_worker`, whose process
runs this module, does.

Guard: tests/faults/test_template_attacks.py.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, filters, meta, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headrace.models.text.template_text import OUTSIDE, TemplateText, as_template_text, concatenate
from headrace.runtime.errors import CheckpointError

_MAX_COMPILED = 16  # templates that stay compiled
_MAX_MESSAGE = 1000  # characters of an error's message

_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr",
    "sort", "string", "unique", "upper",
)  # fmt: skip
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
# Errors of Python's own types, where a template takes a value for another kind.
_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)


class TemplateRefusedError(jinja2.TemplateError):
    """A template used a refused feature, or writes too much."""


def render_template(template: jinja2.Template, variables: Mapping[str, Any], max_text: int) -> TemplateText:
    """Render a prompt of at most `max_text` characters. Raises CheckpointError if the template fails or is refused.

    variables: plain texts are from outside; a `TemplateText` keeps its origins.
    """
    parts: list[str] = []
    size = 0
    try:
        for part in template.generate(variables):
            text = str(part)  # a filter block may give another type
            size += len(text)
            if size > max_text:
                raise TemplateRefusedError(f"it writes a prompt of more than {max_text} characters")
            parts.append(text)
    except (jinja2.TemplateError, RuntimeError, *_DATA_ERRORS) as error:
        # RuntimeError: too deep a recursion, or fields that a loop over them adds.
        raise CheckpointError(f"the chat template failed: {_message(error)}") from error
    return as_template_text(concatenate(parts))


def variables_of(source: str) -> set[str]:
    """Return the names of the variables that a valid template reads."""
    environment = _Environment()
    return meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()


@lru_cache(_MAX_COMPILED)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template for `render_template`. Raises CheckpointError for an invalid template."""
    try:
        return _Environment().from_string(source)
    except (jinja2.TemplateError, RecursionError, SyntaxError, *_DATA_ERRORS) as error:
        raise CheckpointError(f"the chat template cannot be read: {_message(error)}") from error


def _message(error: BaseException) -> str:
    """Return an error's message, which may be of a template and have any characters."""
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    return str(error)[:_MAX_MESSAGE] or type(error).__name__


class _Namespace(Namespace):
    """Jinja's namespace without underscored names, so that none can replace a Python internal."""

    def __init__(*args: object, **kwargs: object) -> None:
        self = args[0]  # no parameter has a name: a template may call a field `self`
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        # `_TemplateRewriter` leads all fields through `_set_field`; this is for what Jinja may add.
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    """Refuse the name of a field that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateRefusedError(f"it stores an underscored name {name!r}")


def _set_field(value: Any, name: str, field: object) -> None:
    """Set a field of a namespace or of an object: messages and tools are copies for the template."""
    if type(value) not in (dict, _Namespace):
        raise TemplateRefusedError(f"it sets a field of a {type(value).__name__}")
    _check_name(name)
    value[name] = field


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of one template."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would join constants to plain text, and lose their origins
            extensions=[ext.loopcontrols, _GenerationBlock],
        )
        self.filters = {name: self.filters[name] for name in _FILTERS} | _OWN_FILTERS
        self.globals = {
            "range": self.globals["range"],  # the sandbox's: at most 100,000 items
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # the type itself would offer its methods
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_TemplateRewriter(self).visit(source), *args, **kwargs)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: object) -> Any:  # noqa: N805
        # Positional names as in jinja2: a template may pass keyword arguments called `self` or `obj`.
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name not in _TEXT_METHODS:
                raise TemplateRefusedError(f"it calls {name!r} of a text")
            # A method of a plain text would forget which of its arguments are the template's.
            __obj = getattr(as_template_text(owner), name)
        return super().call(__context, __obj, *args, **kwargs)

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
        return lambda *args, **kwargs: _TemplateFormatter(self).insert(pattern, args, kwargs)

    # Collects the output of `{% set x %}...{% endset %}`, macros and call blocks, and the operands of `~`.
    concat = staticmethod(concatenate)

    # `_TemplateRewriter` leads all assignments to fields through it.
    set_field = staticmethod(_set_field)


class _TemplateRewriter(NodeTransformer):
    """Rewrites a parsed template where Jinja has no hook: its own texts, `~`, and fields that it sets.

    They become attributes of the environment and calls of its methods, which no template can name.
    """

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment
        self._names: dict[str, str] = {}

    def _own_text(self, text: str, lineno: int) -> nodes.Expr:
        """Return an expression for a text of the template itself: an attribute of its environment."""
        if text not in self._names:
            self._names[text] = f"own_text_{len(self._names)}"
            setattr(self._environment, self._names[text], TemplateText(text))
        return nodes.EnvironmentAttribute(self._names[text], lineno=lineno)

    def _called(self, method: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
        """Return an expression for the result of a method of the environment."""
        function = nodes.EnvironmentAttribute(method, lineno=lineno)
        return nodes.Call(function, arguments, [], None, None, lineno=lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802 (jinja2's names)
        if not isinstance(node.value, str):
            return node
        return self._own_text(node.value, node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return self._own_text(node.data, node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._called("concat", [nodes.List(node.nodes, lineno=node.lineno)], node.lineno)

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
        name = self._own_text(field.attr, field.lineno)
        value = nodes.Name(f"_field{number}", "load", lineno=field.lineno)
        return nodes.ExprStmt(self._called("set_field", [owner, name, value], field.lineno), lineno=field.lineno)


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, items: Iterable[object], d: Any = "", attribute: str | int | None = None
) -> str:
    """Return the written forms of all items, or of an attribute of each, with the separator `d` between them."""
    if attribute is not None:
        items = map(filters.make_attrgetter(environment, attribute), items)
    return as_template_text(d).join(map(str, items))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers writes it for templates: no HTML escapes, no ASCII escapes by default."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent all lines but the first, as Jinja's filter does. first, blank: the first line, empty lines, too."""
    prefix = width if isinstance(width, str) else TemplateText(" ") * width
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
