"""The strip of an answer's tokens: cells, text, cursor and record, in any window."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.content import Content

from headrace.app.answer.answer_steps import StepText
from headrace.app.tui.decode.strip import StripSection, TokenLines
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.runtime.metrics.telemetry import StepRecord
from tests.app.scripted_engine import Script, ScriptedEngine, record
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
    metrics.stepped(records)
    return metrics


def step_record(number: int, text: StepText, latency: float) -> StepRecord:
    drafts = {"proposed": text.accepted + len(text.rejected), "accepted": text.accepted, "source": "ngram"}
    return replace(record(number, 20 + number), latency_s=latency, **(drafts if text.accepted else {}))


def styled(line: Content, style: str) -> str:
    return "".join(line.plain[span.start : span.end] for span in line.spans if style in str(span.style))


def test_a_cell_a_token_and_the_words_of_the_answer() -> None:
    section = StripSection(metrics_of(STEPS))
    cells, text, record_line = section.lines(section.metrics, 60, 3)
    assert cells.plain == " " * 53 + "▄▄▄▄█▄▆"
    assert styled(cells, "$success") == "▄"
    assert styled(cells, "$error") == "█"
    assert styled(cells, "$warning") == "▆"
    assert text.plain == "The quick brown dog fox jumps⏎ over"
    assert styled(text, "underline") == " brown"
    assert styled(text, "strike") == " dog"
    assert styled(text, "$text-error").endswith(" jumps⏎")
    assert record_line.plain.startswith("step 5 “ over”  14.0 ms")
    assert styled(text, "reverse") == ""


@pytest.mark.parametrize(
    ("back", "word", "cell", "said"),
    [(0, " over", "▆", "step 5 “ over”"), (1, "·", "▄", "step 4 no text"), (2, " jumps⏎", "█", "step 3 “ jumps⏎”"),
     (3, " brown fox", "▄▄", "step 2 “ brown fox”"), (99, "The", "▄", "step 0 “The”")],
)  # fmt: skip
def test_the_cursor_marks_the_word_and_shows_its_record(back: int, word: str, cell: str, said: str) -> None:
    section = StripSection(metrics_of(STEPS))
    section.cursor = back
    cells, text, record_line = section.lines(section.metrics, 70, 3)
    assert styled(text, "bold reverse") == word
    assert styled(cells, "reverse") == cell
    assert record_line.plain.startswith(said)
    assert ("drafts 1 of 2 accepted" in record_line.plain) == (back == 3)


@given(
    st.lists(st.tuples(st.text(max_size=7), st.integers(0, 2), st.floats(0, 0.1)), min_size=1, max_size=60),
    st.none() | st.integers(0, 70),
    st.integers(4, 40),
    st.integers(1, 7),
)
def test_any_answer_fits_any_window(
    drawn: list[tuple[str, int, float]], cursor: int | None, width: int, height: int
) -> None:
    texts = [StepText((*text[:n], text[n:]), min(n, len(text)), ("x",) * n) for text, n, _ in drawn]
    steps = tuple((text, latency) for text, (_, _, latency) in zip(texts, drawn, strict=True))
    section = StripSection(metrics_of(steps))
    section.cursor = cursor
    lines = section.lines(section.metrics, width, height)
    assert len(lines) <= height
    assert all(line.cell_length <= width for line in lines)
    assert lines[0].cell_length == width
    if cursor is not None:
        assert styled(lines[0], "reverse")


WORDS = st.lists(st.lists(st.text("ab \n", max_size=5), min_size=1, max_size=3), max_size=40)


@given(WORDS, st.integers(4, 12), st.data())
def test_lines_are_laid_out_once_and_have_every_step(drawn: list[list[str]], width: int, data: st.DataObject) -> None:
    texts = [StepText(tuple(pieces)) for pieces in drawn]
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
def test_keys_walk_through_the_words(play, size: tuple[int, int]) -> None:
    async def scenario(it: Driver) -> None:
        await it.ask("go")
        await it.press("f2")
        section = it.app.screen.query_one(StripSection)
        assert "one two three four" in it.text()
        await it.press("left", "left")
        lines = section.lines(section.metrics, 60, 3)
        assert styled(lines[1], "reverse") == "three "
        assert "step 2 “three ”" in it.text()
        await it.press("right")
        assert styled(section.lines(section.metrics, 60, 3)[1], "reverse") == "four "
        await it.press("f7", "left")
        assert styled(section.lines(section.metrics, 60, 3)[1], "reverse") == "three "
        await it.press("ctrl+end")
        assert styled(section.lines(section.metrics, 60, 3)[1], "reverse") == ""

    play(scenario, ScriptedEngine().script(Script(["one ", "two ", "three ", "four "])), size=size)
