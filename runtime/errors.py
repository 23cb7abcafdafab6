"""Every error headrace raises on purpose, as one tree.

    HeadraceError                     exit code 1
    ├── UsageError                    exit code 2: the caller asked for something malformed
    ├── ModelNotFoundError            no such catalog name, path or hub id
    ├── CheckpointError               the files are broken, truncated, hostile or inconsistent
    │   └── UnsupportedModelError     the files are fine, but we cannot run what they describe
    ├── FetchError                    a download failed
    ├── NotEnoughMemoryError          weights + KV cache do not fit this machine
    │   └── PoolFullError             running sequences hold all K/V blocks there may be
    ├── ContextLimitError             the prompt alone is longer than the context
    ├── EngineError                   the engine was used wrongly or died
    └── SessionError                  stored conversations cannot be found, read or written
        └── DeletedError              what was to be read or changed is not there (any more)

Each carries one line for the user (`str(error)`) and, where there is something to do, a one-line `hint`.
A traceback is shown only under HEADRACE_DEBUG=1. This module imports nothing.
"""


class HeadraceError(Exception):
    """Base of all expected errors: a one-line message, an optional one-line hint, an exit code."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(HeadraceError):
    """The caller asked for something malformed (an option value, an unreadable file argument)."""

    exit_code = 2


class ModelNotFoundError(HeadraceError):
    """The name is no catalog entry, no local path and no reachable hub id."""


class CheckpointError(HeadraceError):
    """A checkpoint's files are broken, truncated, hostile or contradict each other.

    A name in such a file may be of any length and lines: of a long message both ends are kept.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        message = " ".join(message.splitlines())
        super().__init__(message if len(message) <= 600 else f"{message[:400]} … {message[-150:]}", hint)


class UnsupportedModelError(CheckpointError):
    """A sound checkpoint of an architecture, tensor type or tokenizer that headrace cannot run."""


class FetchError(HeadraceError):
    """A download failed or brought something other than what was pinned."""


class NotEnoughMemoryError(HeadraceError):
    """Weights plus KV cache for the asked context do not fit this machine's memory."""


class PoolFullError(NotEnoughMemoryError):
    """All the K/V blocks there may be are in use by sequences that run."""


class ContextLimitError(HeadraceError):
    """The prompt does not fit into the context limit."""


class EngineError(HeadraceError):
    """The engine was asked for something in a state that cannot give it, or its process died."""


class SessionError(HeadraceError):
    """A stored conversation does not exist, or the database cannot be read or written."""


class DeletedError(SessionError):
    """A session or a message is not there: never, or no longer, since another process deleted it. Trying again is
    in vain."""


def expected(error: Exception) -> HeadraceError:
    """The error itself, or, where nobody expected it, an EngineError that names it."""
    if isinstance(error, HeadraceError):
        return error
    named = EngineError(f"the answer failed: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
