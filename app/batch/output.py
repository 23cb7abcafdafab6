"""Outputs of a batch: a file that can be resumed, or a stream.

A result is one line, written in one call where the system takes it whole, so that at most the last line is torn by a
crash. Resuming keeps the results of answered requests, and drops a torn line and failed lines: those requests are tried
again. Results of lines that changed are moved to `NAME.replaced`. A file with anything else in it is never changed.

Guard: tests/app/batch/test_output.py.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from headrace.app.batch.parse import BadLine, BatchLine
from headrace.app.batch.result import digest_of, may_begin
from headrace.runtime.config.files import sync_file, sync_folder
from headrace.runtime.errors import HeadraceError, UsageError

_COPY = 1 << 20  # bytes at a time
_LONGEST = 256 << 20  # bytes of a line: more than any answer has
# Errors of a path that was given wrongly; a full disk and the like are not of the usage.
_BAD_PATH = frozenset([errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG])


class _Slice(NamedTuple):
    """Bytes of a file: a line with its end."""

    start: int
    length: int


class ResultFile:
    """A file of results, written by one process at a time.

    answered: digests of its answered requests.
    replaced_path: the file of results of changed lines.
    replaced: number of results that `begin` moved there.

    Order: constructor (reads and locks it), `begin`, `write` for each result, `close`.
    Raises UsageError for a file of anything else, HeadraceError if it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._given = path
        self._path = Path(os.path.realpath(path))
        # Not by `with_name`, which raises ValueError for /.
        self.replaced_path = self._path.parent / f"{self._path.name}.replaced"
        self.replaced = 0
        with self._errors():
            self._file = self._claim(self._path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)  # a FIFO must not block
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.close()
                raise UsageError(f"{path} is no regular file", "without -o, results go to standard output")
        with contextlib.suppress(OSError):
            self._remove_leftovers()
        try:
            # Each answer's line by digest; whether the file has nothing else.
            self._kept, self._whole = self._read()
        except BaseException:  # Ctrl-C, too: the lock ends with the file
            self._file.close()
            raise
        self._in_order: Mapping[str, int] | None = None  # lines by digest, if `close` sorts

    @property
    def answered(self) -> frozenset[str]:
        return frozenset(self._kept)

    def begin(self, numbers: Mapping[str, int], *, in_order: bool) -> None:
        """Prepare the file for results. numbers: the line of each request of the input, by digest.

        in_order: `close` puts the results in the order of the input. Results of requests that are not in the input are
        moved to `replaced_path`. Raises UsageError, and changes nothing, if all are: it is another batch's file.
        """
        foreign = [digest for digest in self._kept if digest not in numbers]
        if foreign and len(foreign) == len(self._kept):
            raise UsageError(
                f"{self._path.name}: all {len(foreign)} results are of other requests than these",
                "the input, the model, its files or the options changed: give another -o, or delete it",
            )
        if foreign:
            self._set_aside(foreign)
        if in_order:
            self._in_order = numbers
        if not self._whole:
            self._rewrite(self._kept.values())
            start = 0
            for digest, line in self._kept.items():
                self._kept[digest] = _Slice(start, line.length)
                start += line.length

    def write(self, line: BatchLine | BadLine, document: dict[str, object]) -> None:
        """Append the result of a line of the input. Raises HeadraceError."""
        data = line_of(document)
        with self._errors():
            start = self._file.seek(0, os.SEEK_END)
            _write_all(self._file, data)
        if self._in_order is not None:
            self._kept[line.digest] = _Slice(start, len(data))

    def close(self) -> None:
        """Close the file, with the results in order if `in_order` was given."""
        try:
            if self._in_order is not None:
                slices = [self._kept[digest] for digest in sorted(self._kept, key=self._in_order.__getitem__)]
                if slices != sorted(slices):
                    self._rewrite(slices)
        finally:
            self._file.close()

    def _read(self) -> tuple[dict[str, _Slice], bool]:
        """Return each answer's line by digest, and True if the file has nothing else."""
        lines: dict[str, _Slice] = {}
        start = 0
        whole = True
        with self._errors():
            file = io.BufferedReader(self._borrowed())
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
                if line.endswith(b"\n"):
                    digest, answered = self._digest(line, number)
                    whole = whole and answered and digest not in lines
                    if answered:
                        lines[digest] = _Slice(start, len(line))
                elif len(line) == _LONGEST or not may_begin(line):
                    raise self._foreign(number)
                else:
                    whole = False
                start += len(line)
        return lines, whole

    def _borrowed(self) -> io.FileIO:
        """Return the file for reading from its start: closing what this returns does not end the lock."""
        self._file.seek(0)
        return io.FileIO(self._file.fileno(), closefd=False)

    def _digest(self, line: bytes, number: int) -> tuple[str, bool]:
        try:
            return digest_of(json.loads(line))
        except (ValueError, RecursionError):
            raise self._foreign(number) from None

    def _foreign(self, number: int) -> UsageError:
        return UsageError(f"{self._path.name} exists, and its line {number} is no result of a batch", "give another -o")

    def _rewrite(self, slices: Iterable[_Slice]) -> None:
        """Replace the file by these lines in this order, whole or not at all."""
        partial = self._path.with_name(f".{self._path.name}.headrace-{os.getpid()}")
        with self._errors():
            new = self._claim(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                for data in _pieces(self._file.fileno(), slices):
                    _write_all(new, data)
                os.fchmod(new.fileno(), os.fstat(self._file.fileno()).st_mode & 0o777)
                sync_file(new.fileno())
                partial.replace(self._path)
                with contextlib.suppress(OSError):
                    sync_folder(self._path.parent)
            except BaseException:  # Ctrl-C, too: the results so far stay in the file as it was
                new.close()
                with contextlib.suppress(OSError):
                    partial.unlink()
                raise
        self._file.close()
        self._file = new

    def _set_aside(self, digests: Sequence[str]) -> None:
        """Move these results to `replaced_path`, after those that are there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        mode = os.fstat(self._file.fileno()).st_mode & 0o777
        with self._errors(self.replaced_path), io.FileIO(os.open(self.replaced_path, flags, mode), "a") as file:
            for data in _pieces(self._file.fileno(), [self._kept[digest] for digest in digests]):
                _write_all(file, data)
            sync_file(file.fileno())
        for digest in digests:
            del self._kept[digest]
        self.replaced = len(digests)
        self._whole = False

    def _remove_leftovers(self) -> None:
        """Delete partial rewrites of killed processes. The caller holds the file's lock."""
        # `.out.jsonl.headrace-4711`: the name that `_rewrite` gives, with a process id
        ours = re.compile(re.escape(f".{self._path.name}.headrace-") + "[1-9][0-9]{0,9}")
        for other in self._path.parent.iterdir():
            if ours.fullmatch(other.name):
                other.unlink()

    def _claim(self, path: Path, flags: int) -> io.FileIO:
        """Open a file with the flags of `os.open`, and lock it for this process. Raises UsageError if it is locked."""
        file = io.FileIO(path, "r+", opener=lambda name, _mode: os.open(name, flags | os.O_CLOEXEC, 0o666))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UsageError(f"another headrace batch is writing to {path.name}") from None
        return file

    @contextlib.contextmanager
    def _errors(self, path: Path | None = None) -> Iterator[None]:
        """Raise OSErrors of the block as errors about `path`, by default the file as it was given."""
        try:
            yield
        except OSError as error:
            kind = UsageError if error.errno in _BAD_PATH else HeadraceError
            raise kind(f"{path or self._given} cannot be written: {error.strerror}") from error


class ResultStream:
    """A stream of results, as they finish or in the order of the input."""

    def __init__(
        self, stream: TextIO, expected: Sequence[int] | None = None, before: Callable[[], None] = lambda: None
    ) -> None:
        """Write results to a stream.

        stream: an open file, or standard output.
        expected: numbers of all lines that will have a result, for output in order; None: as results come.
        before: called before each write.
        """
        self._stream = stream
        self._before = before
        self._expected: Iterator[int] | None = None
        self._next: int | None = None
        if expected is not None:
            self._expected = iter(sorted(expected))
            self._next = next(self._expected, None)
        self._held: dict[int, bytes] = {}

    def write(self, line: BatchLine | BadLine, document: dict[str, object]) -> None:
        """Write the result of a line of the input, or hold it back until it is its turn."""
        if self._expected is None:
            self._print(line_of(document))
            return
        self._held[line.number] = line_of(document)
        while self._next in self._held:
            self._print(self._held.pop(self._next))
            self._next = next(self._expected, None)

    def close(self) -> None:
        """Write the results that are held back, in order."""
        for number in sorted(self._held):
            self._print(self._held.pop(number))

    def _print(self, data: bytes) -> None:
        self._before()
        self._stream.write(data.decode("ascii"))
        self._stream.flush()


Output = ResultFile | ResultStream


def line_of(document: dict[str, object]) -> bytes:
    """Return a result as a line of ASCII, in which model text cannot drive a terminal."""
    return json.dumps(document).encode("ascii") + b"\n"


def _write_all(file: io.FileIO, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def _pieces(descriptor: int, slices: Iterable[_Slice]) -> Iterator[bytes]:
    """Yield the bytes of these slices, at most _COPY at a time."""
    for start, length in slices:
        for at in range(start, start + length, _COPY):
            yield os.pread(descriptor, min(_COPY, start + length - at), at)
