"""Driving the real application over a scripted engine: no process, no model, no clock, no picture unless looked at."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import textual.app
import textual.pilot
from textual import _callback
from textual._compositor import Compositor
from textual.app import App, ScreenStackError
from textual.await_complete import AwaitComplete
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.message_pump import MessagePump
from textual.pilot import Pilot, WaitForScreenTimeout

from headrace.app.chat.conversation import Conversation
from headrace.app.config.settings import Settings
from headrace.app.sessions.store import SessionStore
from headrace.app.tui import poller
from headrace.app.tui.app import HeadraceApp
from headrace.app.tui.input.completion import CompletionMenu
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.screens import chat_screen, chat_state, dialogs
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.transcript.transcript import Transcript
from tests.support.scripted_engine import ScriptedEngine
from tests.support.virtual_time import run_in_virtual_time

Scenario = Callable[["Driver"], Awaitable[None]]


@pytest.fixture(scope="session", autouse=True)
def _style_sheets_are_parsed_once() -> Iterator[None]:
    """Share parsed style sheets between apps, by their text and variables: textual parses them for each app."""
    parsed: dict[Any, list[RuleSet]] = {}
    parse = Stylesheet._parse_rules

    def parse_once(sheet: Stylesheet, *arguments: Any, **options: Any) -> list[RuleSet]:
        key = arguments, *options.items(), *sheet._variables.items()
        if key not in parsed:
            parsed[key] = parse(sheet, *arguments, **options)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        # By identity, as textual's own does, but not in Python: each widget looks through all rules.
        patch.setattr(RuleSet, "__hash__", object.__hash__)
        yield


@pytest.fixture(scope="session", autouse=True)
def _parameters_of_callbacks_are_counted_once() -> Iterator[None]:
    """Count the parameters of a function once: textual inspects those of each lambda, for each call."""
    counts: dict[CodeType, int] = {}
    count = _callback._count_parameters

    def count_once(function: Callable[..., Any]) -> int:
        code = getattr(function, "__code__", None)
        if code is None or hasattr(function, "__wrapped__") or hasattr(function, "__self__"):
            return count(function)
        if code not in counts:
            counts[code] = count(function)
        return counts[code]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_callback, "_count_parameters", count_once)
        yield


_REAL_SLEEPS = 250  # looks of `Driver.until`, after which it also waits in real time: for a file or a process


class Driver:
    """An app under test and the few things every scenario does with it."""

    def __init__(self, app: HeadraceApp, pilot: Pilot[None], engine: ScriptedEngine) -> None:
        self.app = app
        self.pilot = pilot
        self.engine = engine

    async def until(self, condition: Callable[[], Any], what: str = "") -> None:
        """Wait for a condition: for a minute, since other work may keep the machine busy."""
        for look in range(3000):
            if condition():
                await self.pilot.pause()
                return
            await asyncio.sleep(0.02)  # `pause` would have every widget answer, fifty times a second
            if look > _REAL_SLEEPS:
                time.sleep(0.02)
        raise AssertionError(f"never happened: {what or condition}\n{self.text()}")

    async def idle(self) -> None:
        await self.until(lambda: self.state.engine.state == "ready" and self.state.conversation.phase == "idle", "idle")
        self.app.poller.tick()
        await self.pilot.pause()

    async def write(self, text: str) -> None:
        """Put text into the input and press Enter, the completion menu out of the way."""
        self.prompt.put(text)
        await self.pilot.pause()
        if self.app.screen.query_one(CompletionMenu).is_open:
            await self.pilot.press("escape")
        await self.pilot.press("enter")
        await self.pilot.pause()

    async def ask(self, text: str) -> None:
        """A question and its whole answer."""
        await self.write(text)
        await self.idle()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    @property
    def state(self) -> ChatState:
        return self.app.state

    @property
    def prompt(self) -> Prompt:
        return self.app.poller.chat.query_one(Prompt)  # type: ignore[union-attr]

    @property
    def transcript(self) -> Transcript:
        return self.app.poller.chat.query_one(Transcript)  # type: ignore[union-attr]

    @property
    def said(self) -> list[str]:
        """The messages of the branch that shows."""
        return [message.content for message in self.state.conversation.messages]

    def text(self) -> str:
        """The screen as plain text, without trailing spaces."""
        _width, height = self.app.size
        lines = []
        for strip in self.app.screen._compositor.render_strips():
            lines.append("".join(segment.text for segment in strip).rstrip())
        return "\n".join(lines[:height])


async def handled(*_limits: float) -> None:
    """Wait until everything has been handled that is to be. In the place of textual's, which waits for an idle process:
    for a second after every key, wherever the app polls as often as here.
    """
    await asyncio.sleep(0.02)  # a frame: what waits for one is next
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    for _ in range(10_000):
        await asyncio.sleep(0)
        if not ready:
            return


def _waits_for_a_message(pump: MessagePump) -> bool:
    """Return whether a widget has handled all its messages, and what it does after the last one."""
    queue = pump._message_queue
    return queue.empty() and bool(queue.ready_event._waiters)  # type: ignore[attr-defined]


async def _wait_for_busy_widgets(pilot: Pilot[Any], timeout: float = 30.0) -> bool:
    """Wait until the screen's widgets have handled their messages; False if the app failed or has no screen.

    Replaces textual's, which also asks the widgets that wait for a message: two thirds of all messages of a test.
    """
    app = pilot.app
    try:
        screen = app.screen
    except ScreenStackError:  # after the app's end
        return False
    busy = [widget for widget in screen.walk_children() if not _waits_for_a_message(widget)]
    answers = []
    for pump in (app, screen, *busy):
        answer = asyncio.Event()
        if pump.call_later(answer.set):
            answers.append(answer.wait())
    failed = asyncio.create_task(app._exception_event.wait())
    answered = asyncio.gather(*answers)
    done, pending = await asyncio.wait([failed, answered], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if not done:
        raise WaitForScreenTimeout("widgets did not handle their messages")
    return answered in done


def _paint_all(app: App[Any]) -> None:
    """Paint the app's screens, those below a dialog as well."""
    for screen in app.screen_stack:
        screen._compositor.render_full_update()


def _paint_last_frames(patch: pytest.MonkeyPatch) -> None:
    """Paint the frame in which a screen or the app is left, and pictures that a test asks for.

    Nobody looks at the other frames, which take a third of a test's time.
    """
    render = Compositor.render_update
    pop = App.pop_screen
    leave = App.exit

    def render_update(self: Compositor, full: bool = False, **options: Any) -> Any:
        if full:
            return render(self, full, **options)
        self._dirty_regions.clear()
        return None

    def pop_screen(self: App[Any]) -> AwaitComplete:
        self.screen._compositor.render_full_update()
        return pop(self)

    def exit_app(self: App[Any], *arguments: Any, **options: Any) -> None:
        _paint_all(self)
        leave(self, *arguments, **options)

    patch.setattr(App, "exit", exit_app)
    patch.setattr(Compositor, "render_update", render_update)
    patch.setattr(App, "pop_screen", pop_screen)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and fast polling. What is there for seconds is there for a test, however busy the machine."""
    monkeypatch.setattr(textual.app, "wait_for_idle", handled)
    monkeypatch.setattr(textual.pilot, "wait_for_idle", handled)
    monkeypatch.setattr(Pilot, "_wait_for_screen", _wait_for_busy_widgets)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLORFGBG", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(poller, "SHORTEST_S", 0.04)
    monkeypatch.setattr(chat_state, "NOTIFICATION_S", 120.0)
    monkeypatch.setattr(chat_screen, "TWICE_S", 120.0)
    monkeypatch.setattr(dialogs, "_QUIET_S", 0.001)
    monkeypatch.setattr(dialogs, "_BURST_S", 0.001)
    return tmp_path


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a store without sessions; a copy is made sooner than a store."""
    path = tmp_path_factory.mktemp("store") / "sessions.db"
    SessionStore(path).close()
    return path


@pytest.fixture
def play(home: Path, empty_store: Path) -> Callable[..., None]:
    """Run a scenario in the app: `play(scenario, engine, size=(120, 40), settings=...)`.

    painted: every change is painted, as on a terminal; else each screen's last frame, and `Driver.text`.
    real_time: for a test with a clock of its own.
    """

    def run(
        scenario: Scenario,
        engine: ScriptedEngine | None = None,
        *,
        size: tuple[int, int] = (120, 40),
        settings: Settings | None = None,
        ready: bool = True,
        painted: bool = False,
        real_time: bool = False,
    ) -> None:
        async def main() -> None:
            used = engine if engine is not None else ScriptedEngine()
            path = home / "sessions.db"
            if not path.exists():
                shutil.copy(empty_store, path)
            store = SessionStore(path)
            app = HeadraceApp(Conversation(used, store), settings=settings)
            async with app.run_test(size=size, notifications=True) as pilot:
                driver = Driver(app, pilot, used)
                try:
                    if ready:
                        await driver.idle()
                    await scenario(driver)
                    await pilot.pause()
                    if app.is_running:
                        _paint_all(app)
                finally:  # nothing looks at widgets while they are taken away, or that is what a failure would say
                    app.state.close()
            store.close()

        with pytest.MonkeyPatch.context() as patch:
            if not painted:
                _paint_last_frames(patch)
            run_to_end = asyncio.run if real_time else run_in_virtual_time
            run_to_end(main())

    return run
