"""Progress of a model's download: size, speed, time left.

`ModelLoading` feeds it with load events and the clock. `welcome_lines` draws `lines` in the place of an empty
conversation, and the notice above the prompt has `summary`.

Guard: tests/tui/test_first_download.py.
"""

from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import replace
from textual.content import Content

from headrace.app.engine.events import LoadProgress
from headrace.app.output.sanitise import sanitise
from headrace.models.registry.progress import DOWNLOADING
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


def failure_lines(name: str, why: str, *, is_remote: bool = False) -> list[Content]:
    """Return the lines for a model that could not be loaded; is_remote: a server's, which stays."""
    lines = [
        Content.assemble(("✗ ", "$text-error"), (f"{sanitise(name)} could not be loaded", "bold $text-error")),
        Content(sanitise(why)),
        Content(""),
    ]
    ways = [("F8", "tries again")]
    if is_remote:
        ways.append(("Ctrl+Q", "quits"))
    else:
        ways.append(("F5", "picks another; installed ones need no network"))
        ways.append(("Ctrl+Q", "quits; `headrace -m FILE.gguf` needs no hub"))
    return lines + [Content.assemble((f"{key:>6}", "bold $text-accent"), (f" {text}", "$quiet")) for key, text in ways]
