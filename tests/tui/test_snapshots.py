"""The screens as pictures, compared with the SVG files beside: at three sizes, and at one of them in other colours.

HEADRACE_SNAPSHOTS=update writes them anew. A picture that differs is left in the temporary folder the failure names.
Only the class names that textual derives from the content are evened out; every character and colour counts.
"""

import os
import re
from pathlib import Path

import pytest

from headrace.app.config.settings import ScreenSettings, Settings
from headrace.app.tui.widgets.lines import Section
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.tui.conftest import Driver

FOLDER = Path(__file__).parent / "snapshots"
SMALL = (80, 24)
USUAL = (120, 40)
LARGE = (200, 55)
DARK = "headrace-dark"
LIGHT = "headrace-light"
# A layout does not depend on its theme: every size in one theme, and every theme at one size.
PICTURES = [
    *((screen, size, DARK) for screen in ("chat", "decode") for size in (SMALL, USUAL, LARGE)),
    ("chat", USUAL, LIGHT),
    ("decode", USUAL, LIGHT),
    ("decode", USUAL, "no-colour"),
]

ANSWER = """Decoding reads **every weight** once per token, so:

1. the bytes of a step are known,
2. the time of a step is measured,
3. their quotient is the `achieved` bandwidth.

```python
def mbu(achieved: float, peak: float) -> float:
    # a share of what the machine can do
    return achieved / peak
```

| phase | limited by |
|---|---|
| prefill | arithmetic |
| decode | memory |

> Water turns the wheel.
"""


def compare(svg: str, name: str, actual: Path) -> None:
    """Fail unless the picture is the one on file."""
    even = re.sub(r"terminal-\d+", "terminal", svg)
    expected = FOLDER / f"{name}.svg"
    if os.environ.get("HEADRACE_SNAPSHOTS") == "update":
        FOLDER.mkdir(exist_ok=True)
        expected.write_text(even)
        return
    assert expected.exists(), f"no snapshot {expected.name}; HEADRACE_SNAPSHOTS=update makes it"
    if even != expected.read_text():
        actual.write_text(even)
        pytest.fail(f"{expected.name} looks different: compare it with {actual}; HEADRACE_SNAPSHOTS=update accepts it")


def scripted() -> ScriptedEngine:
    pieces = [ANSWER[n : n + 6] for n in range(0, len(ANSWER), 6)]
    return ScriptedEngine(pieces_per_poll=200).script(Script(pieces, prompt_tokens=60, reused=20))


def picture_name(screen: str, size: tuple[int, int], theme: str) -> str:
    return f"{screen}-{size[0]}x{size[1]}-{theme.removeprefix('headrace-')}"


@pytest.mark.parametrize(("screen", "size", "theme"), PICTURES, ids=[picture_name(*picture) for picture in PICTURES])
def test_a_screen_matches_its_snapshot(
    play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, screen: str, size: tuple[int, int], theme: str
) -> None:
    if theme == "no-colour":
        monkeypatch.setenv("NO_COLOR", "1")
    name = picture_name(screen, size, theme)
    picture: list[str] = []

    async def scenario(it: Driver) -> None:
        await it.ask("Why is decoding limited by memory?")
        if screen == "decode":
            await it.press("f2", "left", "left")
        it.app.poller.draw_metrics(force=True)
        it.app.poller.chat.view.update_status()  # type: ignore[union-attr]
        await it.pilot.pause()
        await it.until(lambda: all(section._lines for section in it.app.screen.query(Section) if section.size))
        picture.append(it.app.export_screenshot(title="headrace"))

    play(
        scenario,
        scripted(),
        size=size,
        settings=Settings(screen=ScreenSettings(theme=theme.replace("no-colour", DARK))),
    )
    compare(picture[0], name, tmp_path / f"{name}.svg")
