"""Download progress of the model that is being loaded, with the facts that the catalog has of it.

`ChatView.sync` calls `update`, with every poll but those of text alone; `DownloadProgress`
(`app/tui/transcript/download.py`) draws.

Guards: tests/tui/test_first_download.py.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

from textual.screen import Screen

from headrace.app.engine.events import Event, LoadProgress, PullProgress
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.transcript.download import DownloadProgress
from headrace.runtime.errors import HeadraceError


class ModelLoading:
    """Follows one load after another, and the fetch before; `download` is the current one's progress."""

    def __init__(self, screen: Screen[None], state: ChatState) -> None:
        self.download = DownloadProgress()
        self._screen = screen
        self._state = state
        self._looked_up = False

    def update(self, events: Sequence[Event]) -> bool:
        """Take in load progress; return whether what is shown of it changed."""
        now = time.monotonic()
        loading = self._state.engine.state == "loading"
        awaited = self._state.awaited
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
        with suppress(HeadraceError, OSError):  # the load itself reports them
            download.facts = download_plan(self._state.conversation.session.model)
