"""Sandbox for untrusted Jinja chat templates: Jinja's own, with the origin of each character of a prompt.

Templates come with checkpoints and are treated as hostile. Filters, globals and options are those of transformers. All
texts are `TemplateText`, so that a prompt tells texts of the template from those of messages and tools. Nothing here
limits time or memory: `template_worker`, whose process runs this module, does.

Guard: tests/faults/test_template_attacks.py.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from string import Formatter
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, filters, meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headrace.models.text.template_text import TemplateText, as_template_text, concatenate, insert_values
from headrace.runtime.errors import CheckpointError

_MAX_COMPILED = 16  # templates that stay compiled
_MAX_MESSAGE = 1000  # characters of an error's message


def render_template(template: jinja2.Template, variables: Mapping[str, Any], max_text: int) -> TemplateText:
    """Render a prompt of at most `max_text` characters. Raises CheckpointError if the template fails or is refused.

    variables: plain texts are from outside; a `TemplateText` keeps its origins.
    """
    parts: list[str] = []
    size = 0
    try:
        for part in template.generate({name: _with_origins(value) for name, value in variables.items()}):
            text = str(part)  # a filter block may give another type
            size += len(text)
            if size > max_text:
                raise jinja2.TemplateError(f"it writes a prompt of more than {max_text} characters")
            parts.append(text)
    except MemoryError:
        raise
    except Exception as error:  # a template can raise any
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
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(f"the chat template cannot be read: {_message(error)}") from error


def _message(error: BaseException) -> str:
    """Return an error's message, which may be of a template and have any characters."""
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    return str(error)[:_MAX_MESSAGE] or type(error).__name__


class _Namespace(Namespace):
    """Jinja's namespace without underscored names, by which Jinja would take it for something else."""

    def __init__(*args: object, **kwargs: object) -> None:
        self = args[0]  # no parameter has a name: a template may call a field `self`
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    """Refuse the name of a field that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"it stores an underscored name {name!r}")


class _Fields(dict[Any, Any], Namespace):
    """An object of messages or tools. As a namespace of Jinja, its fields may be set: MiroThinker counts calls so."""


def _with_origins(value: object) -> object:
    """Return a copy of JSON data whose texts have their origins. Keys stay plain texts, which are from outside."""
    if isinstance(value, str):
        return as_template_text(value)
    if isinstance(value, dict):
        return _Fields({key: _with_origins(item) for key, item in value.items()})
    if isinstance(value, list):
        return [_with_origins(item) for item in value]
    return value


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of one template."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would join constants to plain text, and lose their origins
            extensions=[ext.loopcontrols, _GenerationBlock],
        )
        self.filters |= {"join": _join, "safe": str, "tojson": _tojson}  # Jinja's `safe` forgets origins
        self.globals |= {
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # the type itself would offer its methods
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_OriginRewriter(self).visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        # Kimi K2 has a queue of identifiers. All lists are the template's, or copies for it.
        return super().is_safe_attribute(obj, attr, value) or (isinstance(obj, list) and attr in ("append", "pop"))

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        # Jinja would return a value that fails on use and prints as nothing.
        raise jinja2.TemplateError(f"it asks a {type(obj).__name__} for {attribute!r}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        # Jinja's would call all of the result the template's own, as it takes the type of the pattern.
        if super().wrap_str_format(value) is None:
            return None
        if value.__name__ == "format_map":
            raise jinja2.TemplateError("it calls 'format_map' of a text")
        pattern = as_template_text(value.__self__)
        return lambda *args, **kwargs: _format(self, pattern, args, kwargs)

    # Collects the output of `{% set x %}...{% endset %}`, macros and call blocks, and the operands of `~`.
    concat = staticmethod(concatenate)


class _OriginRewriter(NodeTransformer):
    """Rewrites a parsed template where Jinja has no hook for origins: its own texts, and `~`.

    They become attributes of the environment, and calls of its `concat`, which no template can name.
    """

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment
        self._num_texts = 0

    def _own_text(self, text: str, lineno: int) -> nodes.Expr:
        name = f"own_text_{self._num_texts}"
        self._num_texts += 1
        setattr(self._environment, name, TemplateText(text))
        return nodes.EnvironmentAttribute(name, lineno=lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802 (jinja2's names)
        if not isinstance(node.value, str):
            return node
        return self._own_text(node.value, node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return self._own_text(node.data, node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        operands = nodes.List(node.nodes, lineno=node.lineno)
        function = nodes.EnvironmentAttribute("concat", lineno=node.lineno)
        return nodes.Call(function, [operands], [], None, None, lineno=node.lineno)


def _format(
    environment: _Environment, pattern: TemplateText, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str:
    """Return `pattern.format(*args, **kwargs)` with origins."""
    text = str.__str__(pattern)
    count = len(args)

    def write(values: tuple[object, ...]) -> str:
        named = dict(zip(kwargs, values[count:], strict=True))
        return SandboxedFormatter(environment).vformat(text, values[:count], named)

    values = (*args, *kwargs.values())
    if any("[" in (field or "") or "." in (field or "") for _, field, _, _ in Formatter().parse(text)):
        return write(values)  # a part of a value: no mark shows where it came from
    return insert_values(pattern, write, values)


@jinja2.pass_eval_context
def _join(
    context: nodes.EvalContext, items: Any, d: object = TemplateText(""), attribute: str | int | None = None
) -> str:
    """Return Jinja's `join`, whose default separator would forget origins."""
    return filters.sync_do_join(context, items, as_template_text(d), attribute)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers writes it for templates: no HTML escapes, no ASCII escapes by default."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    """Return the local time, which templates write into prompts."""
    return datetime.now().strftime(pattern)


def _raise_exception(message: object) -> NoReturn:
    """Refuse a conversation, as templates do."""
    raise jinja2.TemplateError(str(message))


class _GenerationBlock(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
