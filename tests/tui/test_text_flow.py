"""Text of the growing line is on the screen within a tenth of a second, figures change at most twice in one.

Time is the test's: the app sleeps as long as it says it will, and every look costs what it costs here on an idle core.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from textual.geometry import Region

from headrace.app.sessions.records import Message
from headrace.app.tui import poller
from headrace.app.tui.textual_overrides import partial_repaint
from headrace.app.tui.transcript.entry import Entry, LayoutOptions, MessageState
from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.widgets.lines import Lines
from tests.support.scripted_engine import CARD, Script, ScriptedEngine
from tests.tui.conftest import Driver

WORDS = [f"word{n} " for n in range(400)]


class Clock:
    """Seconds that pass only while the app sleeps between two looks."""

    def __init__(self) -> None:
        self.now = max(time.monotonic(), time.perf_counter())  # what was due by them is due

    async def sleep(self, seconds: float) -> None:
        for _ in range(20):  # what the look changed is drawn by tasks of its own: in its time, on a busy machine too
            await asyncio.sleep(0)
        self.now += seconds


def answered(driver: Driver) -> bool:
    """Return True if nothing more comes of the watched text."""
    beside = driver.app.state.comparison
    return (beside.answers[-1] if beside is not None else driver.app.state.conversation).phase == "idle"


@pytest.mark.sampled
@pytest.mark.parametrize(("spare", "command"), [(0, ""), (2, ""), (0, "/again 2"), (0, "/compare temperature=1.2")])
def test_text_comes_ten_times_a_second_and_figures_at_most_twice(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, spare: int, command: str
) -> None:
    engine = ScriptedEngine(card_to_load=replace(CARD, spare_cpus=spare, context_limit=4096))
    if command:
        engine.script(Script(("the first",)))
    engine.script(*(Script(pieces=WORDS, hold=395) for _ in range(2)))
    clock = Clock()
    texts = list[float]()
    figures = list[float]()

    async def scenario(driver: Driver) -> None:
        await driver.write("go")
        if command:
            await driver.idle()
            await driver.write(command)
            await driver.until(lambda: driver.app.state.comparison is not None)
        await driver.until(lambda: "word3" in driver.text())
        watched = driver.app.screen.query(Transcript).last()  # in a comparison B answers first: A has
        real = Transcript.render_lines, Lines.render_lines

        def text_drawn(self: Transcript, crop: Region) -> object:
            if self is watched:
                texts.append(clock.now)
            return real[0](self, crop)

        def figure_drawn(self: Lines, crop: Region) -> object:
            if self.id != "status":
                figures.append(clock.now)
            return real[1](self, crop)

        def process_time() -> float:
            return 0.00095 * len(texts)  # of each look

        monkeypatch.setattr(poller, "SHORTEST_S", 0.095)
        times = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now, process_time=process_time)
        monkeypatch.setattr(poller, "time", times)
        monkeypatch.setattr(Transcript, "render_lines", text_drawn)
        monkeypatch.setattr(Lines, "render_lines", figure_drawn)
        monkeypatch.setattr(poller, "asyncio", SimpleNamespace(sleep=clock.sleep))
        engine.release()
        await driver.until(lambda: len(texts) > 70 or answered(driver))

    play(scenario, engine, painted=True, real_time=True)
    gaps = [late - early for early, late in pairwise(texts[20:])]  # what the looks before cost is forgotten
    assert len(gaps) > 30
    # The screen draws by a timer of its own, which a busy machine may delay beyond this clock's next step.
    assert sum(gap > 0.1 for gap in gaps) <= 0.1 * len(gaps)
    times = sorted(set(figures))
    assert len(times) > 4
    assert len(times) - 1 <= 2 * (times[-1] - times[0]) + 1


@pytest.mark.sampled
@pytest.mark.parametrize("size", [(60, 20), (120, 40)])
def test_a_line_that_grows_is_drawn_alone(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    engine = ScriptedEngine().script(Script(pieces=WORDS[:90], hold=85))
    drawn = list[Region]()
    all_drawn = list[object]()

    async def scenario(driver: Driver) -> None:
        render = Transcript.render_lines
        slow = partial_repaint.Compositor.render_partial_update

        def text_drawn(self: Transcript, crop: Region) -> object:
            drawn.append(crop)
            return render(self, crop)

        await driver.write("go")
        await driver.until(lambda: "word3" in driver.text())
        monkeypatch.setattr(Transcript, "render_lines", text_drawn)
        monkeypatch.setattr(
            partial_repaint.Compositor, "render_partial_update", lambda self: all_drawn.append(self) or slow(self)
        )
        engine.release()
        await driver.until(lambda: driver.app.state.conversation.phase == "idle")

    play(scenario, engine, size=size, painted=True, real_time=True)
    assert sum(region.height <= 2 for region in drawn) > 0.6 * len(drawn)
    assert not all_drawn, "textual asked every widget"


ADDED = [
    "and on ",
    "a word",
    "\n\n",
    "\nline",
    " which is long enough to need a second line of its own",
    "**b**",
    "- item",
    ".",
]


@example(["\n\n", "\nline"], "Words")
@given(st.lists(st.sampled_from(ADDED), min_size=1, max_size=8), st.sampled_from(["Words", "- an item", "1. first"]))
def test_fast_text_is_drawn_where_the_layout_places_it(pieces: list[str], begin: str) -> None:
    message = Message(1, "s", None, "assistant", begin, 0.0, partial=True)
    growing = MessageState(growing=True)
    look = LayoutOptions(40)
    entry = Entry(message, growing)
    rows = list(entry.rows(look))
    for piece in pieces:
        message = replace(message, content=message.content + piece)
        if (typed := entry.extend_last_line(message)) is None:
            entry.update(message, growing)
            rows = list(entry.rows(look))
        else:
            rows[typed[0] :] = typed[1]
        laid_out = Entry(replace(message, content=message.content.rstrip("\n")), growing).rows(look)
        assert [line.plain.rstrip() for line, _ in rows] == [line.plain.rstrip() for line, _ in laid_out]
