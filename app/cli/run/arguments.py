"""Arguments of `headrace run`, and combinations of them that are refused.

A new option is a field here, with the parameter's name, and an option in `command.py`. The record is apart from it
because the other files here read it, and `command.py` imports those late.

Guard: tests/app/cli/test_run.py.
"""

from pathlib import Path

from msgspec import Struct

from headrace.app.answer.options import AnswerOptions
from headrace.app.cli.model_options import LoadArguments
from headrace.app.output.output_file import check_output
from headrace.runtime.errors import UsageError

_LAST = "last"


class RunArguments(Struct, frozen=True):
    """Arguments of `headrace run`, named as click names them (`command.py`).

    words: of the prompt.
    system: system message; None: the stored session's or the settings'.
    files: of -f.
    go_on, resume: -c, and --resume: the stored session to continue.
    save: store this conversation; None: as the settings say.
    options: answer options of the command line.
    samples: number of answers; None: one, streamed.
    load: options of loading.
    raw: no chat template.
    with_steps, logprobs: further parts of the JSON document.
    trace: file to write.
    """

    words: tuple[str, ...]
    model: str | None
    system: str | None
    files: tuple[str, ...]
    go_on: bool
    resume: str | None
    save: bool | None
    options: AnswerOptions
    samples: int | None
    load: LoadArguments
    raw: bool
    as_json: bool
    with_steps: bool
    logprobs: int | None
    stats: bool
    explain: bool
    trace: Path | None
    show_prompt: bool
    quiet: bool

    @property
    def session(self) -> str | None:
        """The stored session to continue, `last` for the newest; None for a new one."""
        if self.go_on:
            return _LAST
        return self.resume

    @property
    def prompt(self) -> str | None:
        """The words as one text; None without any."""
        return " ".join(self.words) if self.words else None

    @property
    def keep(self) -> bool | None:
        """True to store the answer as a conversation; None for the settings' choice."""
        return False if self.raw or self.samples is not None else self.save

    @property
    def reported(self) -> bool:
        """True if the command line asks for a report of any form."""
        return self.as_json or self.stats or self.explain or self.trace is not None

    def check(self) -> None:
        """Raise UsageError for arguments that exclude each other."""
        report = self.with_steps or self.logprobs is not None  # parts of the JSON document
        figures = self.stats or self.explain  # on standard error
        if self.trace is not None:
            check_output(self.trace, "--trace")
        # Each rule: whether it is broken, and the message.
        rules = (
            (report and not self.as_json, "--steps and --logprobs need --json"),
            (self.quiet and figures, "--quiet excludes --stats and --explain"),
            (
                self.show_prompt and (self.samples is not None or self.reported),
                "--show-prompt excludes --samples, --json, --stats, --explain and --trace",
            ),
            (self.go_on and self.resume is not None, "-c is --resume last: give one of them"),
            (
                self.samples is not None
                and (self.session is not None or self.save or report or figures or self.trace is not None),
                "--samples excludes -c, --resume, --save, --stats, --explain, --trace, --steps and --logprobs",
            ),
            (
                self.raw and (self.system or self.options.thinking is not None),
                "--raw excludes a system message and --thinking",
            ),
            (
                self.raw and (self.files or self.session is not None or self.save),
                "--raw excludes -f, -c, --resume and --save",
            ),
        )
        for broken, message in rules:
            if broken:
                raise UsageError(message)
