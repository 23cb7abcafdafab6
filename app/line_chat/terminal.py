"""Lines from and to a terminal that only appends text: prompts, pasted lines, Ctrl-C.

The terminal itself edits the line that is typed. `LineChat` prints and asks through it alone.

Guard: tests/app/line_chat/test_line_chat.py.
"""

import select
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from headrace.app.chat.continued_lines import begins_line, unquoted_lines, with_new_line
from headrace.app.config.bounded_input import decoded
from headrace.app.output.plain_output import append_to_stdout
from headrace.app.output.sanitise import sanitise
from headrace.runtime.errors import UsageError

PROMPT = "> "
_MORE = ". "  # prompt of a message's further lines
_TOGETHER_S = 0.03  # between the lines of one paste
_LOCAL_MODES = 3  # index of the local modes in termios's list
_LONGEST = 4095  # bytes of a line; Linux drops the rest without an error


class LineTerminal:
    """Standard input and output. Ctrl-C raises KeyboardInterrupt in `read` alone, within `interrupts_noted`."""

    def __init__(self, *, hides_typing: bool = False) -> None:
        """hides_typing: text typed outside of `read` is not echoed, since it would stand in redrawn lines."""
        self._reading = False  # in `read`: Ctrl-C raises
        self._interrupted = False  # Ctrl-C came outside of `read`, since the last call of `interrupted`
        self._hides_typing = hides_typing

    @contextmanager
    def interrupts_noted(self) -> Iterator[None]:
        """Handle SIGINT within this block, and restore the previous handler then."""
        previous = signal.signal(signal.SIGINT, self._handle)
        self._echo(False)
        try:
            yield
        finally:
            self._echo(True)
            signal.signal(signal.SIGINT, previous)

    # -- output ----------------------------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """Append text, which has to be safe to print."""
        append_to_stdout(text)

    def say(self, text: str) -> None:
        """Append sanitised text and a newline."""
        self.write(f"{sanitise(text)}\n")

    # -- input -----------------------------------------------------------------------------------------------------

    def read(self, prompt: str) -> str:
        """Return the next line, or the lines pasted at once. Raises EOFError, KeyboardInterrupt, UsageError."""
        source = sys.stdin.buffer
        self._reading = True  # from here on, or an interrupt at the prompt could be lost
        try:
            self._echo(True)
            self.write(prompt)
            data = line = source.readline()
            while line.endswith(b"\n") and select.select([source], [], [], _TOGETHER_S)[0]:
                line = source.readline()
                data += line
        finally:
            self._reading = False
            self._echo(False)
        if not data:
            raise EOFError
        if any(len(line) >= _LONGEST for line in data.splitlines()):
            raise UsageError(f"a line of {_LONGEST:,} bytes is the most a terminal takes", "/file PATH sends a file")
        return decoded(data, "the line").rstrip("\n")

    def read_message(self) -> str:
        """Return the next message or command, of several lines after a backslash and within triple quotes."""
        text = self.read(PROMPT)
        while begins_line(text):
            text = with_new_line(text) + self.read(_MORE)
        return unquoted_lines(text)

    def read_or_leave(self, prompt: str) -> str | None:
        """Return the next line; None after Ctrl-C or Ctrl-D. Raises UsageError."""
        try:
            return self.read(prompt)
        except (KeyboardInterrupt, EOFError):
            self.say("")
            return None

    def choose(self, question: str, answers: Sequence[tuple[str, str, str]]) -> str | None:
        """Ask until the key of one of `answers` (name, key, description) is typed. Return its name; None for Ctrl-C."""
        self.say(question)
        for _, key, description in answers:
            self.say(f"{key}: {description}")
        names = {key: name for name, key, _ in answers}
        while True:
            try:
                typed = self.read_or_leave(f"{' or '.join(names)}? ")
            except UsageError:
                continue
            if typed is None:
                return None
            key = typed.strip().lower()
            if key in names:
                return names[key]

    def agreed(self, question: str) -> bool:
        """Ask a question that is answered by yes or no."""
        return self.choose(question, [("yes", "y", "yes"), ("no", "n", "no")]) == "yes"

    # -- Ctrl-C ----------------------------------------------------------------------------------------------------

    def interrupted(self) -> bool:
        """Return whether Ctrl-C came since the last call, outside of `read`."""
        was = self._interrupted
        self._interrupted = False
        return was

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._reading:
            raise KeyboardInterrupt
        self._interrupted = True

    def _echo(self, shown: bool) -> None:
        """Let the terminal echo typed text, or not, where typing is to be hidden."""
        if not self._hides_typing:
            return
        modes = termios.tcgetattr(sys.stdin)
        if shown:
            modes[_LOCAL_MODES] |= termios.ECHO
        else:
            modes[_LOCAL_MODES] &= ~termios.ECHO
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, modes)
