"""Sandbox for untrusted Jinja chat templates.

Templates come with checkpoints and are treated as hostile. They run in Jinja's immutable sandbox with a short list of
filters, methods and globals (`template_guards`), no loader and no name that starts with `_`. `template_limits` bounds
memory and time; the source length bounds compilation. Texts of the template itself are `TemplateText`, so that the
prompt tells them from text of messages and tools. Importing this module imports jinja2, so `chat_template` does it on
first use.
"""

from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import ext, meta, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
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
    PER_REFERENCE,
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
from headrace.models.text.template_text import OUTSIDE, TemplateText, as_template_text, concatenate
from headrace.runtime.errors import CheckpointError

# Characters of template source. Templates in common use have up to 20,000; 50,000 compile in under 2 s and 256 MB.
MAX_SOURCE = 50_000


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> TemplateText:
    """Render within the limits. Raises CheckpointError with one line if the template fails or is refused.

    Plain texts of the variables are from outside; a `TemplateText` keeps its origins.
    """
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
    return as_template_text(concatenate(parts))


def variables_of(source: str) -> set[str]:
    """Return the names of the variables that a template reads. Raises CheckpointError for an invalid template."""
    compile_template(source)
    environment = _environment()
    return meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()


def compile_template(source: str) -> jinja2.Template:
    """Compile a template for `render_template`. Raises CheckpointError for an invalid template."""
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"the chat template is {len(source)} characters long (limit {MAX_SOURCE})")
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, *_DATA_ERRORS) as error:
        raise CheckpointError(f"the chat template cannot be read: {_one_line(error)}") from error


_OF_JINJA = ("_loop_vars", "_block_vars")  # keyword arguments of jinja2 itself, for calls in loops and blocks
_DICTIONARY_METHODS = frozenset(dir(dict))
_LOOP_FIELDS = frozenset(
    ["first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"]
)
_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)


def _one_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= 200 else text[:199] + "…"


class _Generator(CodeGenerator):
    # Literals of the template are its own text.

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802 (jinja2's name)
        if isinstance(node.value, str):
            self.write(_own(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: ARG002, N802
        self.write(_own(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _own("".join(group))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
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
        self._weighed(node.expr, frame, "searched" if node.op in ("in", "notin") else "weighed")

    def _weighed(self, node: nodes.Expr, frame: Frame, charge: str = "weighed") -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write(f"environment.{charge}(")
        self.visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
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


def _own(literal: str) -> str:
    """Return the source code of a text of the template."""
    return f"environment.own({literal!r})"


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._literals: dict[str, TemplateText] = {}

    def own(self, literal: str) -> TemplateText:
        """Return a text of the template itself."""
        if literal not in self._literals:
            self._literals[literal] = TemplateText(literal)
        return self._literals[literal]

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            _count_rounds(loop, self)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        # The length of the result of `+` and `*` on plain texts has been checked.
        return result if type(result) in (str, TemplateText) and operator != "%" else built(result)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Positional names as in jinja2: a template may pass keyword arguments called `self` or `obj`.
        given = {name: value for name, value in kwargs.items() if name not in _OF_JINJA}
        function, args = count_call(__obj, args, given)
        return built(super().call(__context, function, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, argument if isinstance(argument, str) else weighed(argument))

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The fields that templates read most, without the several checks of Jinja.
        kind = type(obj)
        if kind is dict and attribute not in _DICTIONARY_METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_FIELDS:
            return getattr(obj, attribute)
        if kind is _Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

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
        # Jinja's would call all of the result the template's own, as it takes the type of the pattern.
        insert = _TemplateFormatter(self).insert if isinstance(pattern, TemplateText) else None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(pattern, *args, *kwargs.values())
            text = wrapped(*args, **kwargs) if insert is None else insert(pattern, args, kwargs)
            return str(built(text))

        return checked

    weighed = staticmethod(weighed)

    def searched(self, container: Any) -> Any:
        """Charge a value in which another is looked up, and return it."""
        return container if type(container) is dict else weighed(container)

    def counted(self, value: Any) -> Any:
        """Charge a value that is created or copied, and return it."""
        charge(weight(value) + PER_ITEM)
        return value

    def sliced(self, value: Any) -> Any:
        """Charge a value of which a part is copied, and return it."""
        charge(PER_REFERENCE * len(value) if isinstance(value, (list, tuple)) else weight(value))
        return value

    def join_checked(self, parts: Iterable[Any]) -> str:
        values = list(parts)
        check_written(*values)
        return concatenate(values)

    # Output of `{% set x %}...{% endset %}`, macros and call blocks is collected with this.
    concat = join_checked


class _TemplateFormatter(SandboxedFormatter):
    """Jinja's formatter, with the origins of a pattern and of the values that it inserts."""

    _FIELD = "\uffff"  # stands for a value until all are formatted; no character of a text

    def __init__(self, environment: _Environment) -> None:
        super().__init__(environment)
        self._values: list[str] = []

    def insert(self, pattern: TemplateText, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if OUTSIDE in pattern.origin or self._FIELD in pattern:
            return Formatter.vformat(SandboxedFormatter(self._env), pattern, args, kwargs)
        self._values.clear()
        literals = self.vformat(str.__str__(pattern), args, kwargs).split(self._FIELD)
        parts = [
            part for literal, value in zip(literals, [*self._values, ""], strict=True) for part in (literal, value)
        ]
        return concatenate(TemplateText(part) if index % 2 == 0 else part for index, part in enumerate(parts))

    def format_field(self, value: Any, format_spec: str) -> Any:
        is_own = isinstance(value, TemplateText) and not format_spec
        self._values.append(value if is_own else super().format_field(value, format_spec))
        return self._FIELD


def _count_rounds(loop: nodes.For, environment: _Environment) -> None:
    """Count each round of a loop, and each item that its condition leaves out."""

    def counted(value: nodes.Node) -> nodes.Filter:
        return nodes.Filter(cast(nodes.Expr, value), "count_round", [], [], None, None)

    loop.body.insert(0, nodes.ExprStmt(counted(nodes.Const(None))))
    if loop.test is not None:
        loop.test = counted(loop.test)
    loop.set_environment(environment)
    for node in loop.find_all((nodes.ExprStmt, nodes.Filter, nodes.Const)):
        if node.lineno is None:
            node.set_lineno(loop.lineno)


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
        self = args[0]
        values = dict(*args[1:], **kwargs)
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
