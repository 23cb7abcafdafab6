"""Hostile chat templates: each ends in one clear line, soon, without running code or filling the memory."""

import itertools
import sys
import tracemalloc

import pytest

from headrace.models.text import template_limits
from headrace.models.text.chat_template import ChatTemplate
from headrace.runtime.errors import CheckpointError

USER = [{"role": "user", "content": "hi"}]


def doubling(step: str, start: str = "'ab'", last: str = "{{ s }}") -> str:
    """Forty doublings of `s`: a terabyte, if anything lets it happen."""
    return "{% set s = " + start + " %}" + step * 40 + last


CODE = {
    "class": "{{ ''.__class__ }}",
    "mro": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "item": "{{ ''['__class__'] }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "map attribute": "{{ ['']|map(attribute='__class__')|list }}",
    "format": "{{ '{0.__class__}'.format('') }}",
    "format_map": "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "namespace init": "{{ namespace.__init__.__globals__ }}",
    "namespace attribute": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "namespace argument": "{{ namespace(__class__=1) }}",
    "self": "{{ self.__init__.__globals__ }}",
    "generator frame": "{{ (messages|map('string')).gi_frame }}",
    "subclasses": "{{ dict.__subclasses__() }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update({'role': 'system'}) }}",
}
LOOPS = {
    "range": "{% for i in range(10**12) %}x{% endfor %}",
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "in a filter": "{% for i in range(99999) %}{{ range(99999) | map('abs') | list | length }}{% endfor %}",
    "over text": "{% set s = 'x' * 99999 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in range(3) recursive %}{{ loop(range(3)) }}{% endfor %}",
}
BOMBS = {
    "times": "{{ 'a' * 10**9 }}",
    "times, left": "{{ 10**9 * 'a' }}",
    "list times": "{{ ([0] * 10**9) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "multiplied numbers": doubling("{% set s = s * s %}", "3", "{{ s % 7 }}"),
    "plus": doubling("{% set s = s + s %}"),
    "tilde": doubling("{% set s = s ~ s %}"),
    "set block": doubling("{% set s %}{{ s }}{{ s }}{% endset %}"),
    "replace": doubling("{% set s = s | replace('a', s) %}"),
    "replace method": doubling("{% set s = s.replace('a', s) %}"),
    "join": doubling("{% set s = [s, s] | join %}"),
    "join method": "{{ ('x' * 9999).join(['y'] * 9999) }}",
    "percent": doubling("{% set s = '%s%s' % (s, s) %}"),
    "format": doubling("{% set s = '{0}{0}'.format(s) %}"),
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "nested format width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "printf filter": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'a'.center(10**9) }}",
    "center filter": "{{ 'a' | center(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "indent": "{{ 'a\\nb' | indent(10**9) }}",
    "shared list": doubling("{% set s = [s, s] %}"),
    "shared list as JSON": doubling("{% set s = [s, s] %}", last="{{ s | tojson }}"),
    "shared list as text": doubling("{% set s = [s, s] %}", last="{{ (s | string) | length }}"),
    "shared mapping": doubling("{% set s = {'a': s, 'b': s}.items() %}"),
    "shared namespace": doubling("{% set s = namespace(a=s, b=s) %}"),
    "JSON indent": "{{ [[[[1]]]] | tojson(indent=10**9) }}",
    "output": "{% set s = 'x' * 999999 %}{% for i in range(99) %}{{ s }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "round": "{{ 5 | round(-10**9) }}",
}
LARGE = "{% set x = 'a' * 7000000 %}{% set y = ('a' * 6999999) ~ 'b' %}"
MANY = [f"x{i}" for i in range(400)]
WITHOUT_A_LOOP = {
    "comparisons": LARGE + "{{ " + " or ".join(["x == y"] * 900) + " }}",
    "containment": LARGE + "{{ " + " or ".join(["'ab' * 9 in x"] * 900) + " }}",
    "kept slices": LARGE + "".join("{% set " + name + " = x[1:] %}" for name in MANY),
    "kept concatenations": LARGE + "".join("{% set " + name + " = x ~ 1 %}" for name in MANY),
    "kept sums": LARGE + "".join("{% set " + name + " = x + 'b' %}" for name in MANY),
    "kept capitals": LARGE + "".join("{% set " + name + " = x.upper() %}" for name in MANY),
    "kept lists": LARGE + "".join("{% set " + name + " = x | list %}" for name in MANY),
    "kept parts": LARGE + "".join("{% set " + name + " = x.split('a') %}" for name in MANY),
    "kept ranges": "".join("{% set " + name + " = range(99999) | list %}" for name in MANY),
    "kept literals": "{% set ns = namespace(a=[]) %}{% for i in range(500) %}{% set ns.a = ns.a + [["
    + "[]," * 5000
    + "]] %}{% endfor %}",
    "macros": LARGE + "{% macro f() %}{{ x }}{% endmacro %}" + "".join("{% set " + n + " = f() %}" for n in MANY),
    "shared lists, compared": doubling("{% set s = [s, s] %}", last="").replace(
        "{% set s =", "{% set t = s %}{% set s ="
    )
    + "{{ [s] == [t] }}",
    "searches": LARGE + "{{ " + " + ".join(["x.find('b')"] * 40) + " }}",
}
MALFORMED = {
    "unclosed": "{{ foo",
    "unknown tag": "{% frobnicate %}",
    "unknown filter": "{{ 1 | frobnicate }}",
    "deep expression": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "deep blocks": "{% if x %}" * 300 + "{% endif %}" * 300,
    "long": "x" * 2_000_000,
    "division": "{{ 1 / 0 }}",
    "undefined": "{{ foo.bar }}",
    "types": "{{ 'a' + 1 }}",
}


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name)
        for group in (CODE, LOOPS, BOMBS, WITHOUT_A_LOOP, MALFORMED)
        for name, source in group.items()
    ],
)
def test_a_hostile_template_ends_in_one_line(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            ChatTemplate({"default": source}).render(USER)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith("the chat template ")
    assert message.isprintable()
    assert len(message) < 300
    assert peak < 200e6
    assert sys.gettrace() is None


def test_what_a_template_says_cannot_reach_the_terminal() -> None:
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate({"default": "{{ raise_exception('\\x1b[2J\\nred\\r\\u202e') }}"}).render(USER)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("block", "said"), [("last", ""), ("length", "2"), ("list", "['a', 'b']")])
def test_a_filter_block_may_give_what_is_no_text(block: str, said: str) -> None:
    body = "" if block == "last" else "ab"
    source = "{% filter " + block + " %}" + body + "{% endfilter %}"
    assert ChatTemplate({"default": source}).render(USER) == said


def test_a_long_chat_is_within_the_limits() -> None:
    chat = [{"role": role, "content": "word " * 40} for _ in range(5000) for role in ("user", "assistant")]
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    assert len(ChatTemplate({"default": source}).render(chat)) > 2_000_000


def test_a_long_chat_has_time_for_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(template_limits.time, "thread_time", lambda: next(clock) * 0.001)
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    template = ChatTemplate({"default": source})
    long = template.render([{"role": "user", "content": "word"} for _ in range(14_000)])
    assert len(long) == 14_000 * len("user: word\n")
    assert next(clock) * 0.001 > template_limits.MAX_SECONDS
    monkeypatch.setattr(template_limits.time, "thread_time", lambda: next(clock) * 0.02)
    with pytest.raises(CheckpointError, match="2 seconds"):
        ChatTemplate({"default": LOOPS["nested"]}).render(USER)


def test_the_tracer_that_was_there_comes_back() -> None:
    def tracer(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        ChatTemplate({"default": "x"}).render(USER)
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is tracer
