"""Operations on `TemplateText` give the text that plain ones give, and each character keeps its origin."""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.text.chat_template import ChatTemplate
from headrace.models.text.template_process import render_template
from headrace.models.text.template_text import OUTSIDE, OWN, TemplateText, as_template_text, concatenate

# Letters show where they come from: small ones and [] are the template's, large ones and () are from outside. White
# space and separators are of either origin, so an oracle by letters leaves them out.
_OWN_CHARS = "abxyz[]"
_OUTSIDE_CHARS = "ABXYZ()ß"
_EITHER = " \n,\r"


def mixed() -> st.SearchStrategy[str]:
    own = st.text(_OWN_CHARS + _EITHER, max_size=6).map(TemplateText)
    outside = st.text(_OUTSIDE_CHARS + _EITHER, max_size=6)
    return st.lists(st.one_of(own, outside), max_size=6).map(concatenate)


def check(found: Any, expected: Any) -> None:
    """Compare with the result of plain texts; the origin of letters is known by their kind."""
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
        return
    assert found == expected
    assert hash(found) == hash(expected)
    if not isinstance(found, TemplateText):
        return
    assert len(found.origin) == len(found)
    for char, origin in zip(str.__str__(found), found.origin, strict=True):
        if char in _OWN_CHARS:
            assert origin == OWN
        elif char in _OUTSIDE_CHARS:
            assert origin == OUTSIDE


def plain(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(value)
    return [plain(item) for item in value] if isinstance(value, list) else value


CUTS: dict[str, Callable[[Any, str], Any]] = {
    "strip": lambda text, _: text.strip(),
    "strip of characters": lambda text, chars: text.strip(chars),
    "lstrip": lambda text, _: text.lstrip(),
    "rstrip": lambda text, chars: text.rstrip(chars),
    "split": lambda text, _: text.split(),
    "split once": lambda text, _: text.split(None, 1),
    "rsplit once": lambda text, _: text.rsplit(None, 1),
    "split by text": lambda text, sep: text.split(sep or ","),
    "rsplit by text": lambda text, sep: text.rsplit(sep or ",", 1),
    "characters": lambda text, _: list(text),
    "reversed": lambda text, _: text[::-1],
    "from the right": lambda text, _: list(reversed(text)),
    "every second": lambda text, _: text[1:-1:2],
    "times": lambda text, _: text * 3,
    "times, left": lambda text, _: 2 * text,
    "written": lambda text, _: str(text),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CUTS)
@given(text=mixed(), other=st.text(_OWN_CHARS + _OUTSIDE_CHARS + _EITHER, max_size=2))
def test_parts_keep_their_origin(name: str, text: str, other: str) -> None:
    check(CUTS[name](as_template_text(text), other), CUTS[name](plain(text), other))


@given(left=mixed(), right=mixed())
def test_sums_keep_their_origin(left: str, right: str) -> None:
    check(left + right, plain(left) + plain(right))
    check(concatenate((left, 1, right)), f"{plain(left)}1{plain(right)}")


@given(separator=mixed(), parts=st.lists(mixed(), max_size=4))
def test_joined_texts_keep_their_origin(separator: str, parts: list[str]) -> None:
    check(as_template_text(separator).join(parts), plain(separator).join(plain(parts)))


@given(text=mixed(), old=st.text(_OWN_CHARS + _OUTSIDE_CHARS, max_size=2), new=mixed(), count=st.integers(-1, 3))
def test_replaced_parts_keep_their_origin(text: str, old: str, new: str, count: int) -> None:
    check(as_template_text(text).replace(old, new, count), plain(text).replace(old, plain(new), count))


_UNMIXED = st.one_of(st.text(_OWN_CHARS, max_size=4).map(TemplateText), st.text(_OUTSIDE_CHARS, max_size=4))


@given(value=_UNMIXED, other=_UNMIXED)
def test_inserted_texts_keep_their_origin(value: str, other: str) -> None:
    text = TemplateText("[%s|%d%%|%s]") % (value, 3, other)
    check(text, f"[{plain(value)}|3%|{plain(other)}]")
    assert isinstance(text, TemplateText)


@given(value=mixed(), width=st.integers(0, 9), field=st.sampled_from(["%{}s", "%.{}s", "%-{}s", "%s", "%r"]))
def test_an_inserted_text_never_becomes_the_templates_own(value: str, width: int, field: str) -> None:
    text = TemplateText("[" + field.format(width) + "]") % value
    assert text == ("[" + field.format(width) + "]") % plain(value)
    for char, origin in zip(str.__str__(text), as_template_text(text).origin, strict=True):
        assert origin == OUTSIDE or char not in _OUTSIDE_CHARS


@pytest.mark.parametrize("field", ["{0}", "{0!r}", "{0:>9}", "{0:.2}", "{0[0]}", "{0[1]}", "{1[a]}", "{1}", "{2}"])
@pytest.mark.parametrize("content", ["(AA)", "(", "((", "\uffff(", "(\uffff", "\uffff\uffff((", "((\uffff"])
def test_a_formatted_text_never_becomes_the_templates_own(field: str, content: str) -> None:
    source = "{{ '<" + field + ">'.format(c, {'a': c}, [c]) }}"
    plain_text = ""
    with suppress(IndexError):
        plain_text = ("<" + field + ">").format(content, {"a": content}, [content])
    if not plain_text:
        return
    prompt = render_template(source, {"c": content})
    assert str.__str__(prompt) == plain_text
    for char, origin in zip(plain_text, prompt.origin, strict=True):
        assert origin == OUTSIDE or char in "<>"


@pytest.mark.parametrize("method", ["upper", "lower", "title", "capitalize"])
@given(own=st.text(_OWN_CHARS, max_size=4), outside=st.text(max_size=4))
def test_letters_in_another_case_keep_their_origin(method: str, own: str, outside: str) -> None:
    text = concatenate((TemplateText(own), outside))
    changed = getattr(as_template_text(text), method)()
    assert changed == getattr(own + outside, method)()
    if isinstance(changed, TemplateText) and len(changed) == len(text):
        assert changed.origin == as_template_text(text).origin


@pytest.mark.parametrize(
    ("source", "text", "origin"),
    [
        ("<{{ messages[0].content }}>", "<hi>", "toot"),
        ("{{ '<' ~ messages[0].content ~ '>' }}", "<hi>", "toot"),
        ("{{ '<{}>'.format(messages[0].content) }}", "<hi>", "toot"),
        ("{{ '<%s>' % messages[0].content }}", "<hi>", "toot"),
        ("{{ '<%s>' | format(messages[0].content) }}", "<hi>", "toot"),
        ("{{ messages[0].content.format('<') }}", "hi", "oo"),
        ("{{ messages[0].content.replace('h', '<x>') }}", "<x>i", "ttto"),
        ("{{ messages[0].content | replace('h', '<x>') }}", "<x>i", "ttto"),
        ("{{ [messages[0].content, '<'] | join('>') }}", "hi><", "oott"),
        ("{{ [messages[0].content, '<'] | join }}", "hi<", "oot"),
        ("{{ '>'.join(['<', messages[0].content]) }}", "<>hi", "ttoo"),
        ("{{ messages[0].content.join(['<', '>']) }}", "<hi>", "toot"),
        ("{{ ('<\n' ~ messages[0].content) | indent(2) }}", "<\n  hi", "oooooo"),  # Jinja's, which forgets origins
        ("{% set x %}<{{ messages[0].content }}{% endset %}{{ x | trim }}", "<hi", "too"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].content) }}", "<hi>", "toot"),
        ("{% for c in messages[0].content %}{{ c }}{% endfor %}", "hi", "oo"),
        ("{{ messages[0].role }}", "user", "tttt"),
        ("{{ messages[0].content | upper }}{{ '<' | upper }}", "HI<", "oot"),
        ("{{ ('<' ~ messages[0].content) | safe }}", "<hi", "too"),
        ("{{ messages[0] | tojson }}", '{"content": "hi", "role": "user"}', "o" * 33),
        ("{{ messages[0].keys() | sort | join(',') }}", "content,role", "ooooooo" + "t" + "oooo"),
    ],
)
def test_a_prompt_has_the_origin_of_each_character(source: str, text: str, origin: str) -> None:
    template = ChatTemplate({"default": source.replace("tojson", "tojson(sort_keys=true)")})
    prompt = template.render([{"role": "user", "content": "hi"}])
    assert (str.__str__(prompt), prompt.origin) == (text, origin)


def test_copies_keep_their_origin() -> None:
    text = concatenate((TemplateText("<"), "hi"))
    assert copy.copy(text).origin == copy.deepcopy([text])[0].origin == "too"  # type: ignore[attr-defined]
