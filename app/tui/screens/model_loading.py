"""Progress of the model that is being fetched and loaded: size, speed, time left, with the facts of the catalog.

`ChatView.sync` calls `ModelLoading.update` with every poll but those of text alone. It feeds `DownloadProgress` with
events and the clock. `welcome_lines` draws `lines` in the place of an empty conversation, and the notice above the
prompt has `summary`.

Guard: tests/tui/test_first_download.py.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace
from textual.content import Content
from textual.screen import Screen

from headrace.app.engine.events import Event, LoadProgress, PullProgress
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.screens.chat_state import ChatState
from headrace.models.registry.progress import DOWNLOADING
from headrace.runtime.errors import HeadraceError
from headrace.runtime.metrics.units import format_bytes, format_roughly, percent

if TYPE_CHECKING:
    # Not at the start: it brings the catalog's reader.
    from headrace.app.chat.download_plan import DownloadPlan

_SPAN_S = 5.0  # the speed is that of the last so many seconds
_LEAST_S = 0.5  # over less time no speed is shown
_SILENT_S = 8.0  # without a byte for so long, the stall is shown in the speed's place
_BAR = 24  # cells


class DownloadProgress:
    """`add` load events, `tick` with the clock. facts: the catalog's download plan, once it was looked up."""

    def __init__(self) -> None:
        self.facts: DownloadPlan | None = None
        self._latest: LoadProgress | None = None
        self._samples: deque[tuple[float, int]] = deque()  # monotonic seconds and bytes, once for each number of bytes
        self._first_bytes = 0  # bytes that were here when this stage began
        self._clock_s = 0.0  # monotonic seconds of the latest `tick`

    def add(self, event: LoadProgress, now: float) -> None:
        """Take in progress; `now`: monotonic seconds."""
        if self._latest is None or event.stage != self._latest.stage:
            self._samples.clear()
            self._first_bytes = event.done
        self._latest = event
        last_bytes = None
        if self._samples:
            _, last_bytes = self._samples[-1]
        if event.done != last_bytes:
            self._samples.append((now, event.done))
        while len(self._samples) > 2:  # a speed needs two, however slowly bytes come
            second_s, _ = self._samples[1]
            if now - second_s < _SPAN_S:
                break
            self._samples.popleft()
        self.tick(now)

    def tick(self, now: float) -> bool:
        """Set the clock; return whether the shown stall time changed, in whole seconds."""
        before = self._shown_silence
        self._clock_s = now
        return self._shown_silence != before

    @property
    def _shown_silence(self) -> int | None:
        """Seconds without a byte as they are shown, in whole ones; None without a stall."""
        silent_s = self.silent_s
        if silent_s is None:
            return None
        return int(silent_s)

    @property
    def silent_s(self) -> float | None:
        """Seconds without a byte; None while bytes arrive or nothing is downloaded."""
        if self._latest is None or self._latest.stage != DOWNLOADING:
            return None
        last_s, _ = self._samples[-1]
        silent_s = self._clock_s - last_s
        if silent_s < _SILENT_S:
            return None
        return silent_s

    @property
    def active(self) -> bool:
        """True while the model is downloaded or converted, before it is loaded."""
        return self._latest is not None and self._latest.is_download

    @property
    def bytes_per_second(self) -> float | None:
        """Download speed; None while unknown or stalled."""
        if self._latest is None or self._latest.stage != DOWNLOADING or self.silent_s is not None:
            return None
        first_s, first_bytes = self._samples[0]
        last_s, last_bytes = self._samples[-1]
        if last_s - first_s < _LEAST_S:
            return None
        return (last_bytes - first_bytes) / (last_s - first_s)

    @property
    def size(self) -> str:
        """Bytes that are done, and all of them if that is known; nothing before the first."""
        if self._latest is None:
            return ""
        if self._latest.total:
            return f"{format_bytes(self._latest.done)} of {format_bytes(self._latest.total)}"
        return format_bytes(self._latest.done) if self._latest.done else ""

    def summary(self) -> str:
        """Return one line: stage, size, speed, time left."""
        if self._latest is None:
            return ""
        parts = [self._latest.stage]
        if self.size:
            parts.append(self.size)
        if self.silent_s is not None:
            parts.append(f"no data for {format_roughly(self.silent_s)}")
        elif speed := self.bytes_per_second:
            parts.append(f"{format_bytes(round(speed))}/s")
            if self._latest.total:
                parts.append(f"about {format_roughly((self._latest.total - self._latest.done) / speed)} left")
        return " · ".join(parts)

    def lines(self, name: str) -> list[Content]:
        """Return the lines shown in place of an empty conversation."""
        facts = self.facts
        verb = "downloading"
        if facts is not None:
            name = facts.name
            if facts.copy:
                verb = "copying"
        lines = [Content.assemble(f"{verb} ", (sanitise(name), "bold"), ", once")]
        if facts is not None:
            if facts.bytes is None and self._latest is not None and self._latest.total:  # only the hub knew
                facts = replace(facts, bytes=self._latest.total - self._first_bytes)
            lines.append(Content.styled(facts.download, "$quiet"))
            lines.append(Content.styled(facts.room, "$quiet"))
        lines.append(Content(""))
        if self._latest is not None and self._latest.total:
            cells = round(min(1.0, self._latest.done / self._latest.total) * _BAR)
            lines.append(
                Content.assemble(
                    ("━" * cells, "$accent"),
                    ("─" * (_BAR - cells), "$faint"),
                    f" {percent(self._latest.done / self._latest.total)}",
                )
            )
        lines += [
            Content(self.summary()),
            Content(""),
            Content.styled("you can type: it is sent once the model is loaded", "$quiet"),
            Content.styled("F5 picks another model, Ctrl+Q leaves", "$quiet"),
        ]
        return lines


class ModelLoading:
    """Follows one load after another, and the fetch before; `download` is the current one's progress."""

    def __init__(self, screen: Screen[None], state: ChatState) -> None:
        self.download = DownloadProgress()
        self._screen = screen
        self._state = state
        self._looked_up = False
        self._name: str | None = None  # of the model whose progress it is

    def update(self, events: Sequence[Event]) -> bool:
        """Take in load progress; return whether what is shown of it changed."""
        now = time.monotonic()
        loading = self._state.engine.state == "loading"
        awaited = self._state.awaited
        name = awaited or self._state.conversation.session.model
        if name != self._name:
            self._name = name
            self.download = DownloadProgress()
            self._looked_up = False
        progress = [event for event in events if isinstance(event, LoadProgress)]
        if awaited is not None:
            pulls = [event for event in events if isinstance(event, PullProgress) and event.name == awaited]
            progress = [LoadProgress(event.stage, event.done, event.total, is_download=True) for event in pulls]
        for event in progress:
            self.download.add(event, now)
        if loading and progress and self.download.active and not self._looked_up:
            self._looked_up = True
            self._screen.run_worker(self._look_up, thread=True)
        following = loading or awaited is not None
        if not following and self.download.active:
            self.download = DownloadProgress()
            self._looked_up = False
        return following and (self.download.tick(now) or bool(progress))

    def _look_up(self) -> None:
        """Read the download plan from the catalog; runs in a thread, because it reads files."""
        from headrace.app.chat.download_plan import download_plan

        download = self.download
        name = self._name
        with suppress(HeadraceError, OSError):  # the load itself reports them
            download.facts = download_plan(name)
