"""Integrity check of a loaded model's files on a thread, as a rule of idle priority.

The files are read again and their checksums compared with those of the installation, since a flipped bit on disk
raises no error. The thread pauses during decoding and measurements. Results are cached (`checksums.note_checked`).

Guard: tests/models/registry/test_background_check.py.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from headrace.models.registry.checksums import Files, content_problems, note_checked, recall_checked, recorded_files
from headrace.models.registry.resolve import ResolvedModel
from headrace.runtime.errors import CheckpointError

# Arguments of macOS's setpriority(2): PRIO_DARWIN_THREAD, and PRIO_DARWIN_BG
_DARWIN_THREAD = 3
_DARWIN_BACKGROUND = 0x1000


class BackgroundCheck:
    """The integrity check of one model. `problems` starts with the cached results and grows as files are read."""

    def __init__(self, model: ResolvedModel) -> None:
        self._model = model
        recorded: Files = recorded_files(model.facts) or {}
        known = {name: recall_checked(model.path / name, entry) for name, entry in recorded.items()}
        self._unread = {name: entry for name, entry in recorded.items() if known[name] is None}
        self.problems = [problem for problem in known.values() if problem]
        self._clear = threading.Event()  # not set during a pause
        self._clear.set()
        self._thread: threading.Thread | None = None

    @property
    def unread_bytes(self) -> int:
        """Bytes of the files without a cached result."""
        return sum(entry["bytes"] for entry in self._unread.values())

    @property
    def damage(self) -> CheckpointError | None:
        """Return the problems found so far as one error; None if there are none."""
        if not self.problems:
            return None
        name = self._model.stored_as or self._model.name
        return CheckpointError(
            f"{self._model.name} is damaged, its answers cannot be trusted: {'; '.join(self.problems)}",
            f"`headrace models rm {name}` removes it; fetching it then installs it anew",
        )

    def start(self, on_damage: Callable[[CheckpointError], None] = lambda _: None, *, idle: bool = True) -> None:
        """Start the thread.

        on_damage: called from the thread if there is damage, cached or new.
        idle: leave the processor to everything else. False where the caller does nothing but wait.
        """
        self._thread = threading.Thread(target=self._run, args=(on_damage, idle), name="checksums", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stop reading until `resume`, after at most one more chunk."""
        self._clear.clear()

    def resume(self) -> None:
        self._clear.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause reading during the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def wait(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def _wait_its_turn(self, _stage: str, _done: int, _total: int | None) -> None:
        """Wait during a pause. It is the hashing's progress report, which comes after each chunk."""
        self._clear.wait()

    def _run(self, on_damage: Callable[[CheckpointError], None], idle: bool) -> None:
        if idle:
            _lower_priority()
        self.read()
        if (damage := self.damage) is not None:
            on_damage(damage)

    def read(self) -> None:
        """Check all files without a cached result, on the calling thread."""
        for name, entry in self._unread.items():
            problems = content_problems(self._model.path, {name: entry}, self._wait_its_turn)
            note_checked(self._model.path / name, entry, problems)
            self.problems += problems


def _lower_priority() -> None:
    """Give this thread idle CPU and I/O priority, if the system allows it."""
    with suppress(OSError, AttributeError):  # a system that allows neither: the check runs all the same
        if hasattr(os, "sched_setscheduler"):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(_DARWIN_THREAD, 0, _DARWIN_BACKGROUND)
