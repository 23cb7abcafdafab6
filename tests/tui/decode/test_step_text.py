"""The text of an answer below its latency chart: colours, cursor and record, in any window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from textual.content import Content

from headrace.app.answer.answer_steps import StepText
from headrace.app.tui.decode.latency import LatencySection
from headrace.app.tui.decode.step_text import TokenLines
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.runtime.metrics.telemetry import StepRecord
from tests.support.deltas import delta_of
from tests.support.scripted_engine import Script, ScriptedEngine, record
from tests.tui.conftest import Driver

STEPS = (
    (StepText(("The",)), 0.010),
    (StepText((" quick",)), 0.010),
    (StepText((" brown", " fox"), 1, (" dog",)), 0.020),
    (StepText((" jumps\n",)), 0.050),
    (StepText(("",)), 0.010),
    (StepText((" over",)), 0.014),
)


def metrics_of(steps: tuple[tuple[StepText, float], ...]) -> LiveMetrics:
    metrics = LiveMetrics()
    metrics.submitted()
    records = [step_record(n, text, latency) for n, (text, latency) in enumerate(steps)]
    metrics.texts += [text for text, _ in steps]
    metrics.take([delta_of(records)])
    return metrics


def step_record(number: int, text: StepText, latency: float) -> StepRecord:
    drafts = {"proposed": text.accepted + len(text.rejected), "accepted": text.accepted, "source": "ngram"}
    return replace(record(number, 20 + number), latency_s=latency, **(drafts if text.accepted else {}))


def styled(line: Content, style: str) -> str:
    return "".join(line.plain[span.start : span.end] for span in line.spans if style in str(span.style))


def drawn(section: LatencySection, width: int, height: int) -> tuple[list[Content], Content, Content]:
    """Return the chart, the line of text and the last line."""
    *chart, text, last = section.lines(section.metrics, width, height)
    return chart, text, last


def test_bars_and_text_have_the_same_colours() -> None:
    section = LatencySection(metrics_of(STEPS), with_text=True)
    _, text, last = drawn(section, 100, 8)
    assert text.plain == "The quick brown dog fox jumps⏎ over"
    assert styled(text, "underline") == " brown"
    assert styled(text, "strike") == " dog"
    assert styled(text, "$text-error") == " dog jumps⏎"
    assert styled(text, "$text-warning") == " fox"
    assert styled(text, "reverse") == ""
    assert last.plain == "■ draft taken  ■ over 1.25 p50  ■ over 2 p50"


@pytest.mark.parametrize(
    ("back", "word", "said"),
    [(0, " over", "step 5 “ over”"), (1, "·", "step 4 no text"), (2, " jumps⏎", "step 3 “ jumps⏎”"),
     (3, " brown fox", "step 2 “ brown fox”")],
)  # fmt: skip
def test_the_cursor_marks_the_word_and_shows_its_record(back: int, word: str, said: str) -> None:
    section = LatencySection(metrics_of(STEPS), with_text=True)
    section.cursor = back
    chart, text, last = drawn(section, 100, 8)
    assert styled(text, "bold reverse") == word
    assert "▼" in chart[0].plain
    assert last.plain.startswith(said)
    assert ("1 of 2 drafts taken" in last.plain) == (back == 3)
    assert section.border_subtitle == "steps 1 to 5"


def test_stall_marks_and_text_colours_share_one_legend_line() -> None:
    """As at 80x24, where the chart has one line for both."""
    metrics = metrics_of(tuple((StepText((" so",)), 0.010) for _ in range(20)))
    slow = [replace(record(n, 50), latency_s=0.2, gc_s=gc_s) for n, gc_s in ((20, 0), (21, 0.19), (22, 0.19))]
    metrics.take([delta_of(slow)])
    section = LatencySection(metrics, with_text=True)
    marks, *_, last = (line.plain for line in section.lines(metrics, 70, 7))
    assert last.startswith("C 2x garbage collection + 1x more")
    assert last.endswith("■ over 2 p50")
    assert marks.split() == ["+C"]


@given(
    st.lists(st.tuples(st.text(max_size=7), st.integers(0, 2), st.floats(0, 0.1)), min_size=1, max_size=60),
    st.none() | st.integers(0, 70),
    st.integers(4, 60),
    st.integers(1, 16),
)
def test_step_text_fits_any_window(
    answer: list[tuple[str, int, float]], cursor: int | None, width: int, height: int
) -> None:
    texts = [StepText((*text[:n], text[n:]), min(n, len(text)), ("x",) * n) for text, n, _ in answer]
    steps = tuple((text, latency) for text, (_, _, latency) in zip(texts, answer, strict=True))
    section = LatencySection(metrics_of(steps), with_text=True)
    section.cursor = cursor if cursor is None or cursor < len(steps) - 1 else None
    lines = section.lines(section.metrics, width, height)
    assert len(lines) <= height
    assert all(line.cell_length <= width for line in lines)


WORDS = st.lists(st.lists(st.text("ab \n", max_size=5), min_size=1, max_size=3), max_size=40)


@given(WORDS, st.integers(4, 12), st.data())
def test_lines_are_laid_out_once_and_have_every_step(words: list[list[str]], width: int, data: st.DataObject) -> None:
    texts = [StepText(tuple(pieces)) for pieces in words]
    growing = list[StepText]()
    layout = TokenLines()
    whole = TokenLines()
    for text in texts:
        growing.append(text)
        if data.draw(st.booleans()):
            layout.update(growing, width)
    layout.update(growing, width)
    whole.update(texts, width)
    assert layout.starts == whole.starts
    if texts:
        shown = whole.around(data.draw(st.integers(0, len(texts) - 1)), len(texts) + 1)
        assert [step for line in shown for step in line] == list(range(len(texts)))


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 55)], ids=str)
def test_arrow_keys_move_the_cursor_through_the_steps(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("go")
        await it.press("f2")
        section = it.app.screen.query_one(LatencySection)

        def word() -> str:
            return "".join(styled(line, "bold reverse") for line in section.lines(section.metrics, 60, 8))

        assert "one two three four" in it.text()
        await it.press("left", "left")
        assert word() == "three "
        assert "step 2 “three ”" in it.text()
        await it.press("right")
        assert word() == "four "
        await it.press("f7", "left")
        assert word() == "three "
        await it.press("ctrl+end")
        assert word() == ""
        await it.press("f7", "1")
        assert "step latency" not in it.text()

    play(scenario, ScriptedEngine().script(Script(["one ", "two ", "three ", "four "])), size=size)
