"""Sandbox for untrusted Jinja chat templates.

Templates come with checkpoints and are treated as hostile. They run in Jinja's immutable sandbox with a short list of
filters, methods and globals (`template_guards`), no loader and no name that starts with `_`. `template_limits` bounds
memory and time; the source length bounds compilation. Importing this module imports jinja2, so `chat_template` does it
on first use.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.models.text.template_guards import (
    count_call,
    global_functions,
    guarded_filters,
    guarded_tests,
    has_method,
    weighed,
)
from headrace.models.text.template_limits import (
    PER_ITEM,
    TemplateRefusedError,
    built,
    charge,
    check_format,
    check_operator,
    check_size,
    check_written,
    render_budget,
    weight,
)
from headrace.runtime.errors import CheckpointError

# Characters of template source. Templates in common use have up to 20,000; 50,000 compile in under 2 s and 256 MB.
MAX_SOURCE = 50_000


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render within the limits. Raises CheckpointError with one line if the template fails or is refused."""
    parts: list[str] = []
    size = 0
    try:
        with render_budget(variables):
            for part in template.generate(variables):
                if not isinstance(part, str):  # the result of a filter block
                    check_written(part)
                    part = str(part)
                size += len(part)
                check_size(size)
                parts.append(part)
    except (jinja2.TemplateError, RecursionError, MemoryError, *_DATA_ERRORS) as error:
        raise CheckpointError(f"the chat template failed: {_one_line(error)}") from error
    return "".join(parts)


def compile_template(source: str) -> jinja2.Template:
    """Compile a template for `render_template`. Raises CheckpointError for an invalid template."""
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"the chat template is {len(source)} characters long (limit {MAX_SOURCE})")
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, *_DATA_ERRORS) as error:
        raise CheckpointError(f"the chat template cannot be read: {_one_line(error)}") from error


def text_literals(source: str) -> Iterator[str]:
    """Yield the text literals in the expressions of a template that was compiled."""
    for constant in _environment().parse(source).find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


_OF_JINJA = ("_loop_vars", "_block_vars")  # keyword arguments of jinja2 itself, for calls in loops and blocks
_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)


def _one_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= 200 else text[:199] + "…"


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja2's name)
        # `a ~ b` compiles to a plain function without a sandbox hook; route it through a checked one.
        self.write("environment.join_checked((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    # Comparing, slicing and writing lists are Python operators without sandbox hooks, too.

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
        self.write("environment.counted({")
        for pair in node.items:
            self._weighed(pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("})")

    def signature(self, node: Any, frame: Frame, extra_kwargs: Mapping[str, Any] | None = None) -> None:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            # Python would make a tuple of a text's characters; no known chat template uses this.
            self.fail("arguments are spread with * or **", node.lineno)
        super().signature(node, frame, extra_kwargs)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        # The length of the result of `+` and `*` on plain texts has been checked.
        return result if type(result) is str and operator != "%" else built(result)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Positional names as in jinja2: a template may pass keyword arguments called `self` or `obj`.
        given = {name: value for name, value in kwargs.items() if name not in _OF_JINJA}
        args = count_call(__obj, args, given)
        return built(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, argument if isinstance(argument, str) else weighed(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return has_method(obj, attr) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja would return a value that fails on use and prints as nothing.
        raise TemplateRefusedError(f"it asks a {type(obj).__name__} for {attribute!r}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(pattern, *args, *kwargs.values())
            return str(built(wrapped(*args, **kwargs)))

        return checked

    weighed = staticmethod(weighed)

    def counted(self, value: Any) -> Any:
        """Charge a value that is created or copied, and return it."""
        charge(weight(value) + PER_ITEM)
        return value

    def join_checked(self, parts: Iterable[Any]) -> str:
        values = list(parts)
        check_written(*values)
        return "".join(map(str, values))

    # Output of `{% set x %}...{% endset %}`, macros and call blocks is collected with this.
    concat = join_checked


class _GenerationBlock(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without underscored names, so that none can replace a Python internal."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        check_written(*args[1:])  # keys are hashed
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
        optimized=False,  # the optimizer would compute constants outside the limits
        extensions=[ext.loopcontrols, _GenerationBlock],
        finalize=_finalize,
    )
    environment.filters = guarded_filters(environment.filters)
    environment.tests = guarded_tests(environment.tests)
    environment.globals = global_functions(environment.globals) | {"namespace": _Namespace}
    return environment


def _finalize(value: Any) -> Any:
    check_written(value)
    return value
