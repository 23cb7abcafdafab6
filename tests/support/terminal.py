"""headrace on a pseudo-terminal, driven by pexpect, forked as the processes of `tests.support.commands` are."""

import fcntl
import os
import struct
import termios
from typing import Any

import pexpect
from ptyprocess import PtyProcess

from tests.support.commands import HEADRACE, fork_headrace
from tests.support.patience import PATIENCE_S


def spawn_headrace(
    *arguments: str, folder: str | None = None, dimensions: tuple[int, int] = (24, 80)
) -> "pexpect.spawn[str]":
    """Start headrace on a terminal with these lines and columns."""
    program, *words = (*HEADRACE, *arguments)
    return _Spawn(
        program, words, encoding="utf-8", codec_errors="replace", timeout=PATIENCE_S, cwd=folder, dimensions=dimensions
    )


class _Spawn(pexpect.spawn):  # type: ignore[type-arg]
    """A child of pexpect that is forked, where it can be, instead of started in a new interpreter."""

    def _spawnpty(self, args: list[bytes], **options: Any) -> PtyProcess:
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *options["dimensions"], 0, 0))
        command = [argument.decode() for argument in args]
        pid = fork_headrace(
            command, os.environ, options["cwd"], new_session=True, descriptors=dict.fromkeys(range(3), theirs)
        )
        os.close(theirs)
        if pid is None:
            os.close(ours)
            return super()._spawnpty(args, **options)
        return PtyProcess(pid, ours)
