"""The thread that owns a model: it loads the model, runs the steps of all its answers, and frees the model.

MLX's streams, compiled functions and random state belong to a thread, so all that computes runs here. Other threads
submit answers through a queue, and read the parts of an answer from its `OpenAnswer`.

Guard: tests/test_api_threads.py.
"""

import atexit
import ctypes
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from enum import Enum, auto
from queue import Empty, SimpleQueue
from threading import Event, RLock, Thread, get_ident
from types import FrameType
from weakref import WeakSet

from headrace.app.answer.answer import Answer
from headrace.app.answer.answerer import Answerer
from headrace.app.answer.open_answer import OpenAnswer, wait_for_item, wake
from headrace.models.text.events import Completed, TextChunk
from headrace.runtime.engine.request import PrefillProgress, SequenceFailed
from headrace.runtime.errors import EngineError, HeadraceError, expected
from headrace.runtime.machine import memory

_LOOK_S = 0.5  # between looks at cancel flags of answers that nobody reads, and at signals in `close`


class _ThreadState(Enum):
    """The state of an engine thread, from the first to the last; `SERVING` and `PAUSED` alternate."""

    WAITING = auto()  # to load: `stop` prevents it
    LOADING = auto()  # `stop` raises an error in the thread
    SERVING = auto()  # answers are generated; `stop` ends them after the step
    PAUSED = auto()  # all answers wait for their readers, who wake the thread
    OVER = auto()  # the model is freed: answers submitted now end at once


class EngineThread:
    """An answerer, and the thread that alone computes with it.

    answerer: for other threads only to encode prompts and prepare answers; None once it is closed.
    is_last: the interpreter ends.

    Methods above the line are for other threads, those below it run on the thread itself; `_end` alone serves both.
    Answers and their parts pass through queues. The thread alone changes `_state`, other threads read it; `_lock` makes
    the beginning and the end of a load exclude a `stop`.
    """

    def __init__(self, name: str, load: Callable[[], Answerer]) -> None:
        """Load, and wait until that is done. name: for errors. Raises the errors of `load`."""
        self.answerer: Answerer | None = None
        self.is_last = False
        self._name = name  # of the model
        self._process = os.getpid()
        self._inbox: SimpleQueue[OpenAnswer | None] = SimpleQueue()  # None only wakes the thread
        self._open: dict[Answer, OpenAnswer] = {}
        self._lock = RLock()  # finalizers may call `stop` at any time, also within `stop`
        self._state = _ThreadState.WAITING
        self._is_stopping = False  # `stop` was called, in any state
        self._error: BaseException | None = None  # that ended the thread
        loaded: SimpleQueue[BaseException | None] = SimpleQueue()
        _engines.add(self)
        self._worker = _idle_worker()
        try:
            self._ended = self._worker.start_job(lambda: self._run(load, loaded))
            error = wait_for_item(loaded)
        except BaseException:  # KeyboardInterrupt
            self.stop()
            raise
        if error is not None:
            self.close()  # the thread is idle again before the next load
            raise error

    @property
    def is_paused(self) -> bool:
        """True if all answers wait for their readers."""
        return self._state is _ThreadState.PAUSED

    @property
    def open_answers(self) -> int:
        """Number of answers that have not ended."""
        return len(self._open)

    def submit(self, opened: OpenAnswer) -> None:
        """Queue an answer. Raises EngineError in a process that was forked after the model was loaded."""
        self.check_process()
        self._inbox.put(opened)
        if self._state is _ThreadState.OVER:  # the thread may have looked at its inbox for the last time
            self._end(opened)

    def wake(self) -> None:
        """Have the thread look at closed and read answers, if it waits."""
        self._inbox.put(None)

    def stop(self) -> None:
        """End all answers and free the model, without waiting for either."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._is_stopping = True
            if self._state is _ThreadState.LOADING:
                # As Ctrl-C would on the main thread: nothing else ends a load, and the interpreter cannot end before.
                thread = ctypes.c_ulong(self._worker.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_LoadStoppedError))
        self.wake()

    def close(self) -> None:
        """Call `stop`, and wait until memory is free."""
        self.stop()
        if os.getpid() == self._process and get_ident() != self._worker.ident:
            while not self._ended.wait(_LOOK_S):
                pass

    def check_process(self) -> None:
        """Raise EngineError in another process than that of the thread, which a fork does not copy."""
        if os.getpid() != self._process:
            raise EngineError(f"{self._name} was loaded before this process was forked", "load it in this process")

    # --- on the thread -------------------------------------------------------------------------------------

    def _run(self, load: Callable[[], Answerer], loaded: "SimpleQueue[BaseException | None]") -> None:
        try:
            if self._load(load, loaded):
                self._serve()
        except BaseException as error:  # of this class itself
            self._error = _detached(error)
        finally:
            self._free()

    def _load(self, load: Callable[[], Answerer], loaded: "SimpleQueue[BaseException | None]") -> bool:
        """Load the model, and return whether that worked. loaded: gets the error, or None."""
        try:
            with self._lock:
                if self._is_stopping:
                    raise _LoadStoppedError
                self._state = _ThreadState.LOADING
            try:
                self.answerer = load()
            finally:
                with self._lock:
                    self._state = _ThreadState.SERVING
        except BaseException as error:
            loaded.put(_detached(error))
            return False
        loaded.put(None)
        return True

    @property
    def _loaded(self) -> Answerer:
        """The answerer. No local variable below has it: an error keeps the frames through which it went."""
        assert self.answerer is not None
        return self.answerer

    def _serve(self) -> None:
        """Run steps and take answers until `stop`."""
        while not self._is_stopping:
            self._state = _ThreadState.SERVING
            self._close_lost_answers()
            is_due = self._is_step_due()
            self._take_submitted(wait=not is_due)
            if is_due:
                self._step()

    def _close_lost_answers(self) -> None:
        for opened in self._open.values():
            if opened.is_lost and not opened.is_closed:
                opened.close()

    def _is_step_due(self) -> bool:
        """Return whether a step has something to do that somebody waits for. Sets PAUSED if nobody waits."""
        if not self._open or any(opened.is_wanted for opened in self._open.values()):
            return self._loaded.has_work
        # Every open answer waits for its reader. From here on, readers wake this thread; one that read just before did
        # not, so look again.
        self._state = _ThreadState.PAUSED
        return any(opened.is_wanted for opened in self._open.values())

    def _take_submitted(self, *, wait: bool) -> None:
        """Submit the answers in the inbox; wait: until there is a message."""
        with suppress(Empty):
            while wait or not self._inbox.empty():
                opened = self._inbox.get(timeout=_LOOK_S if self.is_paused else None)
                wait = False
                if opened is not None and not opened.is_closed:
                    self._submit(opened)

    def _submit(self, opened: OpenAnswer) -> None:
        try:
            self._loaded.submit(opened.answer)
            self._open[opened.answer] = opened
        except Exception as error:  # of one answer: its reader gets it, the thread goes on
            opened.put(_for_reader(_detached(error)))
            wake([opened])

    def _step(self) -> None:
        """Run a step, and deliver its parts. An error of the step ends all answers."""
        delivered = []
        try:
            events = self._loaded.step()
        except BaseException as error:  # panics of libraries are no Exceptions
            events = []
            delivered = list(self._open.values())
            self._open.clear()
            for opened in delivered:
                opened.put(_for_reader(_detached(error)))
        for answer, event in events:
            opened = self._open[answer]
            if isinstance(event, PrefillProgress) or (isinstance(event, TextChunk) and not opened.in_parts):
                continue
            if isinstance(event, Completed | SequenceFailed):
                del self._open[answer]
            opened.put(_for_reader(_detached(event.error)) if isinstance(event, SequenceFailed) else event)
            delivered.append(opened)
        wake(delivered)

    def _free(self) -> None:
        """Free the model, and end all answers that are left."""
        if self.answerer is not None:
            with suppress(Exception):  # of a device that is gone
                self.answerer.engine.close()
            self.answerer = None
        self._state = _ThreadState.OVER
        answers = list(self._open.values())
        self._open.clear()
        while not self._inbox.empty():
            if (opened := self._inbox.get()) is not None:
                answers.append(opened)
        # Readers that are left when the interpreter ends are daemon threads, which end with it.
        for opened in () if self.is_last else answers:
            self._end(opened)
        memory.release_unused()

    def _end(self, opened: OpenAnswer) -> None:
        """End an answer that nobody computes any more, on the thread or, once that is over, where it was submitted."""
        closed = EngineError(f"{self._name} was closed before the answer was whole", "close it after its answers")
        opened.put(closed if self._error is None else _for_reader(self._error))
        wake([opened])


class _LoadStoppedError(BaseException):
    """Raised in a thread that loads a model, when its caller waits no more."""


def _detached(error: BaseException) -> BaseException:
    """Return an error without the local variables of its frames: they would keep the model as long as the error.

    A frame keeps its callers, too, also after they returned.
    """
    cause: BaseException | None = error
    while cause is not None:
        for entry, _ in traceback.walk_tb(cause.__traceback__):
            frame: FrameType | None = entry
            while frame is not None:
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
                frame = frame.f_back
        cause = cause.__cause__ or cause.__context__
    return error


def _for_reader(error: BaseException) -> HeadraceError:
    """Return an error to raise in one reader, where its traceback grows."""
    known = expected(error)
    raised = copy(known).with_traceback(known.__traceback__)
    raised.__cause__ = known.__cause__
    return raised


class _ModelThread(Thread):
    """A thread that owns one model after the other.

    MLX (0.32) starts a thread for every thread that computes and never ends it, so ours are used again.
    """

    def __init__(self) -> None:
        super().__init__(name="headrace engine", daemon=True)
        self._jobs: SimpleQueue[tuple[Callable[[], None], Event]] = SimpleQueue()
        self.start()

    def start_job(self, job: Callable[[], None]) -> Event:
        """Run a job; the event is set once it is over and the worker idle."""
        ended = Event()
        self._jobs.put((job, ended))
        return ended

    def run(self) -> None:
        """Run jobs for ever."""
        while True:
            job, ended = self._jobs.get()
            try:
                job()
            except _LoadStoppedError:  # late, after the load
                pass
            except BaseException:
                traceback.print_exc()
            del job  # it keeps the model's last references
            _idle.append(self)
            ended.set()


_idle: list[_ModelThread] = []
_engines: "WeakSet[EngineThread]" = WeakSet()


def _idle_worker() -> _ModelThread:
    try:
        return _idle.pop()
    except IndexError:
        return _ModelThread()


def _close_all() -> None:
    """Close all models: threads must not compute while the interpreter ends."""
    for engine in list(_engines):
        engine.is_last = True
        engine.stop()
    for engine in list(_engines):
        engine.close()


atexit.register(_close_all)  # registered after MLX's own handler, so called before it
os.register_at_fork(after_in_child=_idle.clear)  # a fork does not copy threads
