"""Exceptions of headrace.

    HeadraceError                     exit code 1
    ├── UsageError                    exit code 2: an invalid option, value or argument
    ├── ModelNotFoundError            exit code 2: no catalog name, path or hub id
    ├── CheckpointError               broken, truncated, hostile or inconsistent files
    │   └── UnsupportedModelError     sound files of a model that headrace cannot run
    ├── FetchError                    a download failed
    ├── NotEnoughMemoryError          weights and KV cache do not fit this machine
    │   └── PoolFullError             running sequences use all K/V blocks
    ├── ContextLimitError             the prompt is longer than the context
    ├── EngineError                   wrong use or death of the engine
    └── SessionError                  stored conversations cannot be read or written
        ├── DeletedError              a session or message that is gone
        │   └── UnknownSessionError   exit code 2: a session was asked for that is not stored
        └── FullDiskError             the database's disk is full, or fails

Each has a one-line message (`str(error)`) and an optional one-line `hint`. A class without an exit code here has that
of the class above it. Tracebacks are shown with HEADRACE_DEBUG=1. This module imports nothing.
Exit code INTERRUPTED, after Ctrl-C, has no exception here: KeyboardInterrupt is Python's.

A few modules derive a class of their own, such as `RankLostError` (`runtime/ranks/peer_connection.py`).
tests/runtime/test_errors.py compares this tree with the classes, tests/app/cli/test_commands.py has exit codes.
"""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of SIGINT, as shells have it."""


class HeadraceError(Exception):
    """Base of all expected errors: a one-line message, an optional one-line hint, an exit code."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(HeadraceError):
    """An invalid option value or file argument."""

    exit_code = 2


class ModelNotFoundError(HeadraceError):
    """A name that is no catalog entry, local path or reachable hub id."""

    exit_code = 2


class CheckpointError(HeadraceError):
    """Broken, truncated, hostile or inconsistent files of a checkpoint.

    Names from such files may be long or have line breaks: messages become one line, cut in the middle.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        message = " ".join(message.splitlines())
        if len(message) > 600:  # only a hostile name is that long
            message = f"{message[:400]} … {message[-150:]}"
        super().__init__(message, hint)


class UnsupportedModelError(CheckpointError):
    """An architecture, tensor type or tokenizer that headrace cannot run."""


class FetchError(HeadraceError):
    """A failed download, or one that differs from its pin."""


class NotEnoughMemoryError(HeadraceError):
    """Weights and KV cache that do not fit this machine's memory."""


class PoolFullError(NotEnoughMemoryError):
    """No free K/V blocks: running sequences use all of them."""


class ContextLimitError(HeadraceError):
    """A prompt longer than the context limit."""


class EngineError(HeadraceError):
    """A call that the engine's state does not allow, or the death of its process."""


class SessionError(HeadraceError):
    """Stored conversations that cannot be read or written."""


class DeletedError(SessionError):
    """A session or message that does not exist, maybe deleted by another process. Retrying does not help."""


class UnknownSessionError(DeletedError):
    """A session was asked for that is not stored."""

    exit_code = 2


class FullDiskError(SessionError):
    """A database whose disk is full, or fails."""


def expected(error: BaseException) -> HeadraceError:
    """Return the error itself if it is a HeadraceError, else an EngineError caused by it."""
    if isinstance(error, HeadraceError):
        return error
    named = EngineError(f"the answer failed: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
