"""Download progress of the model that is being loaded, with the facts that the catalog has of it."""

import time
from collections.abc import Sequence
from contextlib import suppress

from textual.screen import Screen

from headrace.app.engine.events import Event, LoadProgress
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.transcript.download import DownloadProgress
from headrace.runtime.errors import HeadraceError


class ModelLoading:
    """Follows one load after another; `download` is the current one's progress."""

    def __init__(self, screen: Screen[None], state: ChatState) -> None:
        self.download = DownloadProgress()
        self._screen = screen
        self._state = state
        self._looked_up = False

    def update(self, events: Sequence[Event]) -> bool:
        """Take in load progress; return whether what is shown of it changed."""
        now = time.monotonic()
        loading = self._state.engine.state == "loading"
        progress = [event for event in events if isinstance(event, LoadProgress)]
        for event in progress:
            self.download.add(event, now)
        if progress and self.download.active and not self._looked_up:
            self._looked_up = True
            self._screen.run_worker(self._look_up, thread=True)
        if not loading and self._looked_up:
            self.download = DownloadProgress()
            self._looked_up = False
        return loading and (self.download.tick(now) or bool(progress))

    def _look_up(self) -> None:
        """Read the download plan from the catalog; runs in a thread, because it reads files."""
        from headrace.app.chat.download_plan import download_plan

        download = self.download
        with suppress(HeadraceError, OSError):  # the load itself reports them
            download.facts = download_plan(self._state.conversation.session.model)
