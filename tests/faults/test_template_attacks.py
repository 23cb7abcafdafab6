"""Hostile chat templates: each gives one error line within the limits of time and memory, without running code."""

import resource

import pytest

from headrace.models.text import template_process
from headrace.models.text.chat_template import ChatTemplate
from headrace.models.text.template_process import MAX_SOURCE, render_template
from headrace.runtime.errors import CheckpointError

USER = [{"role": "user", "content": "hi"}]
SMALL = 0.1  # seconds


def doubling(step: str, start: str = "'ab'", last: str = "{{ s }}") -> str:
    """Forty doublings of `s`: a terabyte, if anything lets it happen."""
    return "{% set s = " + start + " %}" + step * 40 + last


# Two equal values without a common part.
TWINS = "{% set t = 'ab' %}" + doubling("{% set s = (s, s) %}{% set t = (t, t) %}", last="")
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
    "namespace attribute, a block": "{% set ns = namespace() %}{% set ns.__self__ %}x{% endset %}",
    "namespace attribute, of two targets": "{% set ns = namespace() %}{% set ns.__name__, b = 1, 2 %}",
    "namespace as a method of a text": "{% set ns = namespace() %}{% set ns.__self__ %}{0.__globals__}{% endset %}"
    "{% set ns.__name__ %}format{% endset %}{{ ns(raise_exception) }}",
    "namespace argument": "{{ namespace(__class__=1) }}",
    "namespace arguments in a mapping": "{{ namespace(**{'__class__': 1}) }}",
    "self": "{{ self.__init__.__globals__ }}",
    "generator frame": "{{ (messages|map('string')).gi_frame }}",
    "subclasses": "{{ dict.__subclasses__() }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "field of a text": "{% set s = 'x' %}{% set s.upper = 1 %}",
    "field of a list": "{% set messages.role = 1 %}",
    "field of a loop": "{% for m in messages %}{% set loop.index = 1 %}{% endfor %}",
    "text as arguments": "{{ namespace(*'ab') }}",
    "list cleared": "{{ messages.clear() }}",
    "mutation of a message": "{{ messages[0].update({'role': 'system'}) }}",
}
LARGE = "{% set x = 'a' * 900000 %}{% set y = ('a' * 899999) ~ 'b' %}"  # close to the limit of one text
LOOPS = {
    "range": "{% for i in range(10**12) %}x{% endfor %}",
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "in a filter": "{% for i in range(99999) %}{{ range(99999) | map('abs') | list | length }}{% endfor %}",
    "over text": "{% set s = 'x' * 99999 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "conditions": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "comparisons": LARGE + "{% for i in range(99999) %}{{ " + " or ".join(["x == y"] * 90) + " }}{% endfor %}",
    "containment": LARGE + "{% for i in range(99999) %}{{ " + " or ".join(["'ab' * 9 in x"] * 90) + " }}{% endfor %}",
    "searches": LARGE + "{% for i in range(99999) %}{{ " + " + ".join(["x.find('b')"] * 40) + " }}{% endfor %}",
    "tests": LARGE + "{% for i in range(99999) %}{{ " + " or ".join(["('ab' * 9) is in(x)"] * 40) + " }}{% endfor %}",
    "growing list": "{% set l = [1] %}{% for i in l %}{% set _ = l.append(i) %}{% endfor %}",
    "fields within a loop over them": "{% set m = messages[0] %}{% for k in m %}{% set m.a = k %}{% endfor %}",
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
    "field of itself": "{% set m = messages[0] %}{% set m.a = m %}{{ m | tojson }}",
    "compared field of itself": "{% set m = messages[0] %}{% set m.a = m %}{% set n = dict(m) %}{% set n.a = n %}"
    "{{ m == n }}",
    "grown after it is shared": "{% set a = [] %}{% set s = a %}"
    + "{% set s = [s, s] %}" * 17
    + "{% for i in range(99) %}{% set _ = a.append('x' * 99) %}{% endfor %}{{ s }}",
    "shared fields": doubling("{% set m = dict(a=s, b=s) %}{% set m.c = s %}{% set s = m %}"),
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
MANY = [f"x{i}" for i in range(400)]
WITHOUT_A_LOOP = {
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
    "shared lists, compared": TWINS + "{{ s == t }}",
}
# One call of a method, a filter or a test does it all, inside C.
IN_ONE_CALL = {
    "many widths": "{{ ('%(a)9999d' * 90000) % {'a': 1} }}",
    "many precisions": "{{ ('%(a).9999f' * 90000) % {'a': 1} }}",
    "many fields of a list": "{% set l = ['a' * 500000] %}{{ ('{0}' * 99999).format(l) | length }}",
    "digits of an integer": "{% set x = ('f' * 200000) | int(base=16) %}{{ ('{0:b}' * 999).format(x) | length }}",
    "long division": "{% set x = 0x" + "f" * 30000 + " %}{% set y = 0x" + "f" * 15000 + " %}" + "{{ x // y }}" * 300,
    "bytes of an integer": "{{ (5).to_bytes(2 * 10**9, 'big') | length }}",
    "bytes, by a filter": "{{ (5 | attr('to_bytes'))(2 * 10**9, 'big') | length }}",
    "dictionaries from keys": "".join("{% set " + name + " = {}.fromkeys(range(99999)) %}" for name in MANY),
    "sorting copies": "{% set x = 'a' * 900000 %}{{ ([x] * 1000) | sort | length }}",
    "sorting by a part": "{% set x = 'a' * 900000 %}{{ ([{'a': x}] * 1000) | sort(attribute='a') | length }}",
    "largest of long texts": LARGE + "{{ ([x, y] * 1000) | max | length }}",
    "stripping": "{% set x = 'a' * 900000 %}{{ x.strip('c' * 900000 ~ 'a') }}",
    "trimming": "{% set x = 'a' * 400000 %}{{ x | trim('c' * 400000 ~ 'a') }}",
    "search from the right": "{% set x = 'a' * 900000 %}{{ x.rfind('ab' ~ 'a' * 450000) }}",
    "part from the right": "{% set x = 'a' * 900000 %}{{ x.rpartition('ab' ~ 'a' * 450000) }}",
    "title": "{% set x = 'Ω-' * 450000 %}" + "".join("{% set " + name + " = x | title %}" for name in MANY),
    "capitals of three characters": "{% set x = 'ΐ' * 900000 ~ '😀' %}"
    + "".join("{% set " + name + " = x.upper() %}" for name in MANY),
    "escapes": "{% set x = '&' * 190000 ~ '😀' %}" + "".join("{% set " + name + " = x | e %}" for name in MANY),
    "spelled out": "{% set x = '\U000e0001' * 90000 %}"
    + "".join("{% set " + name + " = '%r' % x %}" for name in MANY * 3),
    "times": "{{ strftime_now('%999d' * 150000) | length }}",
    "lists of equals": LARGE + "{% set l = [x] * 900 %}{{ " + " + ".join(["l.count(y)"] * 60) + " }}",
    "spread": "{{ range(*('Ω' * 900000)) }}",
    "an error's text": doubling("{% set s = [s, s] %}", last="{{ raise_exception(s) }}"),
    "joined": "{{ range(1000) | map('string') | join('x' * 500000) | length }}",
    "hashed key": doubling("{% set s = (s, s) %}", last="{{ {s: 1} }}"),
    "hashed index": doubling("{% set s = (s, s) %}", last="{{ {}[s] }}"),
    "hashed argument": doubling("{% set s = (s, s) %}", last="{{ {}.get(s) }}"),
    "hashed pair": doubling("{% set s = (s, s) %}", last="{{ dict([(s, 1)]) }}"),
    "hashed name": doubling("{% set s = (s, s) %}", last="{{ namespace([(s, 1)]) }}"),
    "hashed test": doubling("{% set s = (s, s) %}", last="{{ 1 is test(s) }}"),
    "hashed, unique": doubling("{% set s = (s, s) %}", last="{{ [s] | unique | list }}"),
    "compared by a test": TWINS + "{{ s is eq(t) }}",
    "compared by a loop": TWINS + "{% for i in (0, 1) %}{{ loop.changed(s if i else t) }}{% endfor %}",
    "an attribute's name": doubling("{% set s = (s, s) %}", last="{{ 1 | attr(s) }}"),
}
# Texts, integers and parts that an account of values in Python would miss.
UNCOUNTED = {
    "hashed arguments of a macro": "{% set ns = namespace(t=1) %}{% macro f() %}{% set ns.t = varargs %}{% endmacro %}"
    + "{{ f(ns.t, ns.t) }}" * 40
    + "{{ {}.get(ns.t) }}",
    "deep key": "{% set ns = namespace(t=1) %}{% for i in range(99999) %}{% set ns.t = (ns.t,) %}{% endfor %}"
    "{{ {}.get(ns.t) }}",
    "set block of many texts": "{% set x = 'a' * 900000 %}{% set b %}" + "{{ x }}" * 900 + "{% endset %}",
    "join of one text": "{% set x = 'a' * 9000000 %}" + "".join("{% set " + name + " = [x] | join %}" for name in MANY),
    "replaced nothing": "{{ ('a' * 99999) | replace('', 'b' * 99999) | length }}",
    "separators of JSON": "{{ range(9999) | list | tojson(separators=['x' * 99999, 'y']) | length }}",
    "lines cut elsewhere": "{{ ('\\x0b' * 99999) | indent('x' * 9999, blank=true) | length }}",
    "width in an index": "{{ '{:>{a[}]}}'.format(1, a={'}': 999999999}) }}",
    "width beside a noncharacter": "{{ '\\uffff{:>{}}'.format(1, 999999999) | length }}",
    "large integers": "{% set l = [] %}{% for i in range(99999) %}{% set _ = l.append(2 ** 99999) %}{% endfor %}",
    "operands of a tilde": doubling("{% set s = [s, s] %}", last="{{ (s ~ '') | length }}"),
    "long path of attributes": "{% set p = 'a' ~ '.a' * 400000 %}"
    "{% for i in range(99999) %}{{ messages | map(attribute=p) | list | length }}{% endfor %}",
    "recursive loop": "{% for a in range(9) recursive %}"
    "{% if loop.depth < 9 %}{{ loop(range(100000)) }}{% endif %}{% endfor %}",
    "spread in a call": "{{ range(*('Ω' * 90000000)) }}",
    "spread in a filter": "{% set x = 'a' * 9000000 %}{{ 1 | default(*x) }}",
    "spread in a test": "{% set x = 'a' * 9000000 %}{{ 1 is eq(*x) }}",
    "check of a field as a filter": "{{ messages | map('-set_field', 'role', 'system') | list }}",
}
MALFORMED = {
    "unclosed": "{{ foo",
    "unknown tag": "{% frobnicate %}",
    "unknown filter": "{{ 1 | frobnicate }}",
    "deep expression": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "deep blocks": "{% if x %}" * 300 + "{% endif %}" * 300,
    "long": "x" * 2_000_000,
    "one character too long": "x" * (MAX_SOURCE + 1),
    "division": "{{ 1 / 0 }}",
    "undefined": "{{ foo.bar }}",
    "types": "{{ 'a' + 1 }}",
}


BEYOND = (LOOPS, BOMBS, WITHOUT_A_LOOP, IN_ONE_CALL, UNCOUNTED)


@pytest.mark.sampled(16, always=["one character too long"])
@pytest.mark.parametrize(
    "source",
    [pytest.param(source, id=name) for group in (CODE, *BEYOND, MALFORMED) for name, source in group.items()],
)
def test_a_hostile_template_ends_in_one_line(source: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        render_template(source, {"messages": USER}, SMALL)
    message = str(caught.value)
    assert message.startswith("the chat template ")
    assert message.isprintable()
    assert len(message) < 300
    if source in CODE.values():  # the sandbox refuses these; no limit has to end them
        assert "process" not in message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LOOPS["nested"], "it runs for more than 0.1 seconds"),
        (UNCOUNTED["hashed arguments of a macro"], "it runs for more than 0.1 seconds"),  # one operation in C
        (BOMBS["times"], "it takes more than 640 MB"),
        (UNCOUNTED["width beside a noncharacter"], "it takes more than 640 MB"),
        ("{{ 'x' * 8000001 }}", "it writes a prompt of more than 8000000 characters"),
    ],
)
def test_the_error_names_the_limit(source: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        render_template(source, {}, SMALL)


def test_a_single_endless_operation_of_a_template_is_ended() -> None:
    """The processor time of the process, with its start, is close to the limit; the operation would take hours."""
    template_process._process.end()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(CheckpointError, match="seconds"):
        render_template(UNCOUNTED["hashed arguments of a macro"], {}, SMALL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 0.1 < after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5


def test_an_underscored_field_of_an_object_is_an_entry() -> None:
    """No more than a key: attributes are looked up first, and those of Python are refused."""
    source = "{% set m = messages[0] %}{% set m.__class__ = 1 %}{{ m['__class__'] }}"
    assert render_template(source, {"messages": USER}, SMALL) == "1"
    with pytest.raises(CheckpointError, match="__class__"):
        render_template(source + "{{ m.__class__ }}", {"messages": USER}, SMALL)


def test_a_list_that_contains_itself_is_rendered() -> None:
    source = "{% set l = [] %}{% set _ = l.append([l]) %}{{ l }}"
    assert render_template(source, {}, SMALL) == "[[[...]]]"


def test_template_errors_are_sanitised() -> None:
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate({"default": "{{ raise_exception('\\x1b[2J\\nred\\r\\u202e') }}"}).render(USER)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("block", "said"), [("last", ""), ("length", "2"), ("list", "['a', 'b']")])
def test_a_filter_block_may_return_other_types(block: str, said: str) -> None:
    body = "" if block == "last" else "ab"
    source = "{% filter " + block + " %}" + body + "{% endfilter %}"
    assert ChatTemplate({"default": source}).render(USER) == said


def test_a_long_chat_is_within_the_limits() -> None:
    chat = [{"role": role, "content": "word " * 40} for _ in range(5000) for role in ("user", "assistant")]
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    assert len(ChatTemplate({"default": source}).render(chat)) > 2_000_000


def test_the_time_limit_grows_with_messages_and_tools() -> None:
    """Each message and each tool has processor time of its own."""
    source = "{% for i in range(30) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"  # some 0.1 seconds
    template = ChatTemplate({"default": source}, seconds=0.01)
    with pytest.raises(CheckpointError, match="seconds"):
        template.render(USER)
    assert template.render(USER * 100) == "x"
    assert template.render(USER, tools=[{"name": "f"}] * 100) == "x"
