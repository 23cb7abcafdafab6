"""The HTML export: everything is escaped, nothing is loaded or run, charts and strips are those of the steps."""

import re
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.app.answer.answer_steps import AnswerSteps, StepText
from headrace.app.sessions.export import export_path, write_export
from headrace.app.sessions.html_page import step_chart, strip
from headrace.app.sessions.records import Attachment
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import UsageError
from tests.support.scripted_engine import summary

HOSTILE = '<script>alert(1)</script> <img src=x onerror="alert(2)"> </p></body> {{ 7*7 }} "quoted" & \x1b[31m'
_VOID = {"meta", "br", "hr", "rect", "line", "img", "link"}


class Page(HTMLParser):
    """Elements with their attributes, visible text, and unclosed elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID or tag in ("rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def page_of(
    tmp_path: Path, answer: str, steps: AnswerSteps | None = None, *, question: str = "Why?", system: str = ""
) -> str:
    with closing(SessionStore(tmp_path / "sessions.db")) as store:
        session = store.create(model="m<b>", system=system)
        asked = store.add(session.id, None, "user", question, attachments=[Attachment("a<b>.txt", "text")])
        said = store.begin_answer(session.id, asked.id, "m<b>", sampling={"temperature": 0.5})
        store.grow(said.id, answer)
        store.finish(said.id, "stop", summary(20, 3, 4), steps=steps)
        path = tmp_path / f"{session.id}.html"
        write_export(store, session.id, str(path))
        return path.read_text()


def require_inert(page: Page) -> None:
    """Fail if the page runs or loads anything."""
    assert page.open == []
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "video", "audio", "form", "input", "base"}
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "style")]
        if "href" in attributes:
            assert tag == "a"
            assert re.match("https?://", attributes["href"] or "")
    policy = [attributes for tag, attributes in page.elements if attributes.get("http-equiv")]
    assert [each["content"] for each in policy] == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_hostile_text_in_a_page_runs_nothing(tmp_path: Path) -> None:
    steps = AnswerSteps(0, [StepText((HOSTILE,), 0, (HOSTILE,))] * 2, [0.01, 0.02])
    text = page_of(tmp_path, HOSTILE * 2, steps, question=HOSTILE, system=HOSTILE)
    page = Page(text)
    require_inert(page)
    assert "url(" not in text
    assert "@import" not in text
    assert page.text.count("<script>alert(1)</script>") >= 5  # as text: title, system, question, answer, strip
    assert "{{ 7*7 }}" in page.text
    assert "\x1b" not in text


def test_markdown_is_rendered_and_links_are_of_the_web_only(tmp_path: Path) -> None:
    links = "[x](https://a.example/?a=1&b) [y](javascript:alert(1)) ![z](https://b.example/i.png)"
    answer = f"**bold** {links}\n\n| a |\n|---|\n| 1 |\n\n```py\n<b>\n```"
    page = Page(page_of(tmp_path, f"<think>Hm <i>.</think>{answer}"))
    require_inert(page)
    assert {"strong", "table", "pre", "code", "details"} <= {tag for tag, _ in page.elements}
    assert [attributes["href"] for tag, attributes in page.elements if tag == "a"] == ["https://a.example/?a=1&b"]
    assert "▨ z ⟨https://b.example/i.png⟩" in page.text
    assert "Hm <i>." in page.text


def test_charts_and_strips_are_those_of_the_steps(tmp_path: Path) -> None:
    texts = [StepText(("One",)), StepText((" two", " three"), 1, (" no",)), StepText((" four",))]
    page = Page(page_of(tmp_path, "One two three four", AnswerSteps(0, texts, [0.5, 0.010, 0.030])))
    bars = [attributes for tag, attributes in page.elements if tag == "rect"]
    assert [each["class"] for each in bars] == ["usual accepted", "slow"]
    heights = [float(each["height"] or 0) for each in bars]
    assert heights[1] / heights[0] == pytest.approx(3, rel=0.01)
    assert "step 1: 10.0 ms, 1 of 2 draft tokens accepted, “ two three”" in page.text
    tokens = {tag: attributes["title"] for tag, attributes in page.elements if tag in ("ins", "del")}
    assert tokens == {"ins": "step 1, 10.0 ms, accepted draft token", "del": "step 1, 10.0 ms, rejected draft token"}
    assert "One two no three four" in page.text
    assert "<rect" not in page_of(tmp_path, "An answer of an earlier version"), "no steps, no chart"


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 2)), min_size=1, max_size=900))
def test_a_chart_has_all_its_bars_inside(drawn: list[tuple[float, int]]) -> None:
    texts = [StepText(("a", "b", "c"), accepted, ("x",)) for _, accepted in drawn]
    steps = AnswerSteps(0, texts, [latency for latency, _ in drawn])
    chart = step_chart(steps)
    assert len(chart.bars) == min(max(1, len(drawn) - 1), 360)
    for bar in chart.bars:
        assert 0 <= bar.x < bar.x + bar.width <= chart.width + 1e-6
        assert 0 <= bar.y < bar.y + bar.height <= chart.height + 1e-6
    assert all(0 <= y <= chart.height for _, y, _ in chart.lines)
    assert "".join(mark.text for mark in strip(steps) if mark.style != "rejected") == steps.text


def test_an_export_format_without_a_path_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for form in ("html", "json", "md"):
        own = Path(f"headrace-ab.{form}")
        own.touch()
        assert export_path("ab", form) == export_path("ab", str(own)) == own
    Path("other.html").touch()
    with pytest.raises(UsageError, match="exists already"):
        export_path("ab", "other.html")
