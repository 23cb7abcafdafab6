"""Draft tokens as the screen shows them: figures of a turn, acceptance over time, accepted text underlined."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from textual.content import Content

from headrace.app.sessions.records import Message
from headrace.app.tui.decode.step import StepSection
from headrace.app.tui.metrics.facts import facts
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.rates import totals_of
from headrace.app.tui.screens.parallel_screen import FigureLines
from headrace.app.tui.transcript.draft_marks import DraftMarks, mark_drafts, sanitised
from headrace.app.tui.transcript.entry import Entry, LayoutOptions, MessageState
from headrace.app.tui.transcript.markdown_lines import render
from headrace.models.text.thinking import read_tags
from headrace.runtime.metrics.telemetry import StepRecord
from tests.support.deltas import delta_of
from tests.support.scripted_engine import CARD, Script, ScriptedEngine, record
from tests.tui.conftest import Driver


def step(index: int, proposed: int = 0, accepted: int = 0, source: str | None = None) -> StepRecord:
    return replace(record(index, 100 + index), latency_s=0.01, proposed=proposed, accepted=accepted, source=source)


STEPS = [step(0), step(1), step(2, 4, 4, "ngram"), step(3, 4, 1, "ngram"), step(4, 2, 0, "draft")]


def test_the_figures_of_a_turn_are_those_of_its_steps() -> None:
    found = totals_of(STEPS)
    assert (found.steps, found.tokens, found.proposed, found.accepted) == (4, 9, 10, 5)
    assert found.tokens_per_second is not None
    assert abs(found.tokens_per_second - 225) < 1e-6
    assert found.nbytes == sum(one.step_bytes for one in STEPS[1:])
    assert totals_of([step(0, 4, 4, "ngram"), step(1), step(2)]).proposed == 0


def test_the_step_section_shows_the_gain_of_draft_tokens() -> None:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.take([delta_of(STEPS)])
    assert metrics.answer.totals.proposed
    section = StepSection(metrics)
    assert section.lines(metrics, 40, 6)[0].plain.startswith("mean step 10.0 ms, 2.25 tokens")
    metrics.submitted()
    assert not metrics.answer.totals.proposed
    assert "tokens" not in "".join(line.plain for line in section.lines(metrics, 40, 6))


def test_the_step_section_names_the_steps_of_its_mean() -> None:
    metrics = LiveMetrics()
    metrics.ready(*facts(CARD))
    metrics.take([delta_of(STEPS)])
    section = StepSection(metrics)
    assert metrics.phase == "decode"
    assert "of the last second" in section.lines(metrics, 60, 6)[0].plain
    metrics.phase = "idle"
    assert "of all steps" in section.lines(metrics, 60, 6)[0].plain


def test_a_compared_answer_shows_tokens_per_step() -> None:
    metrics = LiveMetrics()
    lines = FigureLines(metrics)
    lines._figures = replace(metrics.so_far, completion_tokens=10)
    assert lines.lines(metrics, 60, 3)[2].plain.startswith("10 tokens ")
    metrics.take([delta_of(STEPS)])
    assert lines.lines(metrics, 60, 3)[2].plain.startswith("10 tokens 2.25/step")


def underlined(lines: list[Content]) -> list[str]:
    return [
        line.plain[span.start : span.end] for line in lines for span in line.spans if "underline" in str(span.style)
    ]


def struck(lines: list[Content]) -> list[str]:
    return [line.plain[span.start : span.end] for line in lines for span in line.spans if "strike" in str(span.style)]


def accepted(*spans: tuple[int, int]) -> DraftMarks:
    return DraftMarks(spans)


def test_marking_accepted_drafts_changes_no_text() -> None:
    text = "\x1b[31mOne **two** three\n\n- a `wo_rd` and [x]\n\n```py\nfor two in three:\n```\ntwo"
    spans = accepted((text.index("two"), text.index(" three")), (text.index("rd`"), text.index("[x]")))
    source, marks = sanitised(text, spans)
    plain = render(source, 40)
    lines = mark_drafts(plain, source, marks, 40)
    assert [line.plain for line in lines] == [line.plain for line in plain]
    assert "".join(underlined(lines)).replace(" ", "") == "twordand"
    styles = {str(span.style) for line in lines for span in line.spans if "underline" in str(span.style)}
    assert styles == {"underline $text-success"}


MARKDOWN = """Some **bold** text

- an item of a list that is long
- another

| a | b |
|---|---|
| one | two |

```py
code = 1
```
"""


@pytest.mark.parametrize(
    ("before", "line"),
    [
        (" text", "Some bold NO text"),
        ("d** text", "Some bolNOd text"),
        (" list that", "• an item of a NO list that"),
        ("an item", "• NOan item of a list that"),
        (" | two", "one NO │ two"),
        (" = 1", "▏ code NO = 1"),
        ("Some", "NOSome bold text"),
    ],
)
def test_rejected_drafts_stand_where_they_were_drafted(before: str, line: str) -> None:
    marks = DraftMarks((), ((MARKDOWN.index(before), " NO" if before[0] == " " else "NO"),))
    lines = mark_drafts(render(MARKDOWN, 28), MARKDOWN, marks, 28)
    shown = [line.plain.rstrip() for line in lines]
    assert line in shown, shown
    assert "".join(struck(lines)).strip() == "NO"
    assert all(line.cell_length <= 28 for line in lines)
    without = "".join(text.replace(" NO", "").replace("NO", "") for text in shown)
    assert without.replace(" ", "") == "".join(line.plain for line in render(MARKDOWN, 28)).replace(" ", "")


def test_rejected_drafts_after_the_end_and_with_line_breaks() -> None:
    lines = mark_drafts(render("One two", 20), "One two", DraftMarks((), ((7, "\nand\x1b more"),)), 20)
    assert [line.plain for line in lines] == ["One two⏎and␛ more"]
    lines = mark_drafts(render("One two", 10), "One two", DraftMarks((), ((3, " and three"),)), 10)
    assert " ".join(line.plain for line in lines).split() == ["One", "and", "three", "two"]
    assert all(line.cell_length <= 10 for line in lines)


@given(st.lists(st.sampled_from(["one", " two", ".", "\n", "**", "- ", "`x`", "three "]), max_size=30), st.data())
def test_draft_marks_cover_exactly_the_drafted_words(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = tuple(zip(ends[::2], ends[1::2], strict=False))
    lines = render(text, 40)
    assert [line.plain for line in mark_drafts(lines, text, DraftMarks(spans), 40)] == [line.plain for line in lines]
    assert underlined(mark_drafts(lines, text, DraftMarks(), 40)) == []
    said = re.findall(r"\w+", " ".join(line.plain for line in lines))
    every = " ".join(underlined(mark_drafts(lines, text, accepted((0, len(text))), 40)))
    assert re.findall(r"\w+", every) == said
    rejected = tuple((place, " NO") for place in ends)
    marked = mark_drafts(lines, text, DraftMarks(spans, rejected), 40)
    assert sum(part.count("NO") for part in struck(marked)) == len(rejected)
    assert all(line.cell_length <= 40 for line in marked)


def test_an_answer_shows_its_draft_tokens_on_request() -> None:
    message = Message(7, "s", None, "assistant", "One **two** three", 0.0, finish_reason="stop")
    entry = Entry(message, MessageState())
    assert entry.rows(LayoutOptions(40))[0][0].plain.rstrip() == "One two three"
    marks = DraftMarks(((4, 11),), ((11, " four"),))
    assert entry.update(message, MessageState(drafts=marks))
    (row, kind) = entry.rows(LayoutOptions(40))[0]
    assert (row.plain.rstrip(), kind) == ("One two four three", "body")
    assert underlined([row]) == ["two"]
    assert struck([row]) == [" four"]
    thought = read_tags("<think>two</think>One two")
    thinking = replace(message, content=thought.text, kinds=thought.kinds)
    assert entry.update(thinking, MessageState(drafts=accepted((22, 25))))
    assert underlined([row for row, _ in entry.rows(LayoutOptions(40))]) == ["two"]
    entry.update(message, MessageState(drafts=marks))
    assert entry.update(message, MessageState())
    assert entry.rows(LayoutOptions(40))[0][0].plain.rstrip() == "One two three"


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 55)], ids=str)
def test_the_decode_view_shows_the_gain_of_draft_tokens(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("Copy this")
        if size[0] > 80:
            assert "2.33 tokens" in it.text()
        await it.press("f2")
        it.app.poller.draw_metrics(force=True)
        await it.pilot.pause()
        assert " ms, 2.33 tokens" in it.text()
        assert "67 % of draft tokens were accepted" in it.app.screen.why  # type: ignore[attr-defined]

    play(scenario, ScriptedEngine().script(Script(["one ", "two ", "three ", "four "], guessed=2)), size=size)


def marked(it: Driver) -> list[str]:
    """Return the underlined text of the answers."""
    return underlined([row for row, kind in it.transcript._rows if kind == "body"])


def test_a_key_marks_drafts_and_a_reopened_chat_has_them(play) -> None:
    async def scenario(it: Driver) -> None:
        await it.press("f12")
        assert marked(it) == []
        await it.ask("Copy this")
        assert marked(it) == ["tw", "fo"]
        assert struck([row for row, _ in it.transcript._rows]) == [" wrong", " wrong"]
        first = it.state.conversation.session
        await it.press("f12")
        assert marked(it) == []
        await it.write("/guesses")
        assert marked(it) == ["tw", "fo"]
        assert it.said == ["Copy this", "*one* two three four "]
        await it.ask("And this")
        assert marked(it) == ["tw", "fo"], "the second answer had no drafts"
        await it.write("/new")
        assert marked(it) == []
        it.state.open_session(it.state.store.session(first.id))
        it.app.poller.tick()
        await it.until(lambda: marked(it) == ["tw", "fo"])

    pieces = ["*one* ", "two ", "three ", "four "]
    engine = ScriptedEngine().script(Script(pieces, guessed=2), Script(["Done."]))
    play(scenario, engine)
