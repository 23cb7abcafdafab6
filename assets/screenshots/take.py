"""Takes the README's screenshots from the real app with the real default model, as SVG files next to this one.

    PYTHONPATH=. python assets/screenshots/take.py [--out DIR] [--size 120x40] [--theme NAME] [SCENE ...]

Every scene is a few keys pressed in the app, headless; what is on the picture is what the model said and what its
steps measured. Sessions go to a temporary folder, models come from the usual store.

A new scene is a function in `SCENES`. Its pauses are seconds for what timers draw, such as the decode view.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.pilot import Pilot

from headrace.app.chat.conversation import Conversation
from headrace.app.config.settings import ScreenSettings, Settings
from headrace.app.engine.client import EngineClient
from headrace.app.sessions.store import SessionStore
from headrace.app.tui.app import HeadraceApp
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.metrics.machine_watch import MachineWatch

HERE = Path(__file__).parent
QUESTION = "Write a short Python function that adds two numbers, and explain it in a list of three points."
_PATIENCE_S = 240.0

Scene = Callable[["HeadraceApp", Pilot[None]], Awaitable[None]]


async def _idle(app: HeadraceApp, pilot: Pilot[None]) -> None:
    """Wait until the model is loaded and nothing is being answered."""
    waited = 0.0
    while app.state.engine.state != "ready" or (app.state.comparison or app.state.conversation).phase != "idle":
        await pilot.pause(0.1)
        waited += 0.1
        if waited > _PATIENCE_S:
            raise TimeoutError("the engine did not become idle")
    await pilot.pause(0.6)


async def _ask(app: HeadraceApp, pilot: Pilot[None], text: str) -> None:
    app.screen.query_one(Prompt).put(text)
    await pilot.press("enter")
    await _idle(app, pilot)


async def chat(app: HeadraceApp, pilot: Pilot[None]) -> None:
    """An answer with a list and code, the decode panel beside it."""
    await _ask(app, pilot, QUESTION)


async def decode(app: HeadraceApp, pilot: Pilot[None]) -> None:
    """The decode view in full, after two turns."""
    await _ask(app, pilot, QUESTION)
    await _ask(app, pilot, "And in one sentence, why is decoding limited by memory bandwidth?")
    await pilot.press("f2")
    await pilot.pause(0.6)


async def again(app: HeadraceApp, pilot: Pilot[None]) -> None:
    """Four answers to one question, which grew at the same time."""
    await _ask(app, pilot, QUESTION)
    await _ask(app, pilot, "/again 4")


async def many(app: HeadraceApp, pilot: Pilot[None]) -> None:
    """The decode view of several sequences, while they grow."""
    await _ask(app, pilot, QUESTION)
    app.screen.query_one(Prompt).put("/again 6")
    await pilot.press("enter")
    await pilot.pause(3.0)
    await pilot.press("f2")
    await pilot.pause(1.0)


async def compare(app: HeadraceApp, pilot: Pilot[None]) -> None:
    """The same question at two temperatures, side by side."""
    app.screen.query_one(Prompt).put("/compare temperature=1.5")
    await pilot.press("enter")
    await pilot.pause(0.6)
    await _ask(app, pilot, QUESTION)


async def models(_: HeadraceApp, pilot: Pilot[None]) -> None:
    """The model picker."""
    await pilot.press("f5")
    await pilot.pause(1.5)


async def welcome(_: HeadraceApp, pilot: Pilot[None]) -> None:
    """Right after the start."""
    await pilot.press("slash")
    await pilot.pause(0.3)


SCENES: dict[str, Scene] = {scene.__name__: scene for scene in (chat, decode, again, many, compare, models, welcome)}


async def take(name: str, size: tuple[int, int], theme: str, out: Path) -> Path:
    """One scene at one size, written to `out`."""
    with tempfile.TemporaryDirectory() as folder:
        store = SessionStore(Path(folder) / "sessions.db")
        engine = EngineClient()
        watch = MachineWatch(lambda: [os.getpid(), *([engine.pid] if engine.pid else [])])
        settings = Settings(screen=ScreenSettings(theme=theme))
        app = HeadraceApp(Conversation(engine, store), settings=settings, watch=watch)
        app.state.conversation.branch.set_sampling({"max_tokens": 320})
        async with app.run_test(size=size, notifications=True) as pilot:
            await _idle(app, pilot)
            await SCENES[name](app, pilot)
            svg = app.export_screenshot(title="headrace")
            app.state.close()
        store.close()
    path = out / f"{name}-{size[0]}x{size[1]}-{theme.rpartition('-')[2]}.svg"
    path.write_text(svg)
    return path


def main() -> None:
    """Take the scenes asked for, all by default."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=HERE)
    options.add_argument("--size", default="120x40")
    options.add_argument("--theme", default="headrace-dark")
    options.add_argument("scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}; default: all")
    given = options.parse_args()
    os.environ.setdefault("COLORTERM", "truecolor")
    width, _, height = given.size.partition("x")
    for name in given.scenes or SCENES:
        print(asyncio.run(take(name, (int(width), int(height)), given.theme, given.out)))


if __name__ == "__main__":
    main()
