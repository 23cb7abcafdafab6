"""The `headrace` command: its subcommands, and the exit code and the message of an error.

A subcommand's module is imported when it runs, so `headrace --help` needs neither mlx nor textual. Exit codes: 0 done,
1 failed, 2 wrong command line, 130 interrupted; `app.cli.process` adds 129 and 143 for signals.

A new command is a row of `_COMMANDS`, and one of `tests/app/cli/test_processes.py`.

Guard: tests/app/cli/test_commands.py.
"""

import contextlib
import importlib
import os
import sys

import click
from click.shell_completion import CompletionItem

from headrace.app.cli import completion  # noqa: F401 - registers the shells' completion with click
from headrace.app.cli.aliases import canonical_option, suggested_command
from headrace.app.cli.say import say
from headrace.app.cli.standard_streams import OutputError, ReaderGoneError, silence_stdout
from headrace.app.cli.usage_errors import click_text, usage_error
from headrace.runtime.config import environment
from headrace.runtime.errors import INTERRUPTED, HeadraceError, UsageError
from headrace.runtime.machine.address_space import check_imports
from headrace.runtime.machine.garbage import importing

PROGRAM = "headrace"

# name -> (module, attribute, one line for --help)
_COMMANDS = {
    "chat": ("headrace.app.cli.chat", "chat", "Chat in the terminal and watch the decode loop (the default)."),
    "run": ("headrace.app.cli.run.command", "run", "Answer one prompt, streamed to standard output."),
    "batch": ("headrace.app.cli.batch", "batch", "Answer a file of requests, many at a time."),
    "serve": ("headrace.app.cli.serve", "serve", "Serve models to clients of OpenAI's and Anthropic's APIs."),
    "launch": ("headrace.app.cli.launch.command", "launch", "Run a coding agent on a local model."),
    "top": ("headrace.app.cli.top", "top", "Watch the decode loop of a running server."),
    "bench": (
        "headrace.app.cli.bench.command",
        "bench",
        "Measure prefill and decode speed, and the share of memory bandwidth used.",
    ),
    "verify": ("headrace.app.cli.verify", "verify", "Check that an answer is the same alone and in a batch."),
    "predict": (
        "headrace.app.cli.predict",
        "predict",
        "Predict a model's decode speed on this machine or other chips.",
    ),
    "fit": ("headrace.app.cli.predict", "fit", "List the catalog models that fit this machine."),
    "models": ("headrace.app.cli.models", "models", "List, fetch, inspect and remove models."),
    "quantize": (
        "headrace.app.cli.quantize",
        "quantize",
        "Quantize a model, with bits chosen for each projection.",
    ),
    "tokenize": ("headrace.app.cli.tokenize", "tokenize", "Print the tokens of a text."),
    "sessions": (
        "headrace.app.cli.sessions",
        "sessions",
        "List, show, search, export and delete stored conversations.",
    ),
    "pull": ("headrace.app.cli.models", "pull", "Short for `models pull`."),
    "list": ("headrace.app.cli.models", "list_models", "Short for `models list`."),
    "show": ("headrace.app.cli.models", "show", "Short for `models show`."),
    "rm": ("headrace.app.cli.models", "rm", "Short for `models rm`."),
    "explain": ("headrace.app.cli.explain", "explain", "Explain a figure, such as MBU, TTFT or roofline."),
    "paths": ("headrace.app.cli.paths", "paths", "Show the locations of headrace's files."),
    "doctor": ("headrace.app.cli.doctor.command", "doctor", "Show this machine's hardware, software and any problems."),
    "completion": ("headrace.app.cli.completion", "completion", "Print a completion script for bash, zsh or fish."),
}

_NUMBERS = {"integer": "N", "integer range": "N", "float": "X", "float range": "X"}  # metavars by click's types


class _LazyGroup(click.Group):
    """A group that imports a subcommand only to run it or to show its help.

    Without a command it is `chat` on a terminal and `run` otherwise; options of both may follow. A first argument with
    a space in it is the prompt of `run`. `run` without a prompt is `chat` on a terminal. `help` and `version` stand for
    the options.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args == ["version"]:
            args = ["--version"]
        if self._is_run_without_prompt(ctx, args):
            args = ["chat", *args[1:]]
        command = self._implied_command(ctx, args)
        if command is not None:
            args = [command, *args]
        return super().parse_args(ctx, args)

    def _is_run_without_prompt(self, ctx: click.Context, args: list[str]) -> bool:
        """Return whether `run` is called on a terminal with nothing but options of the chat."""
        if args[:1] != ["run"] or ctx.resilient_parsing or not _on_a_terminal():
            return False
        return not {"-h", "--help"} & {*args} and self._is_valid_for_chat(ctx, args[1:])

    def _is_valid_for_chat(self, ctx: click.Context, args: list[str]) -> bool:
        """Return whether `chat` would accept the arguments."""
        chat = self.get_command(ctx, "chat")
        assert chat is not None
        try:
            chat.make_context("chat", list(args), parent=ctx).close()
        except click.UsageError:
            return False
        return True

    def _implied_command(self, ctx: click.Context, args: list[str]) -> str | None:
        """Return the command omitted in `args`; None if one is named or none fits.

        Nothing at all, a quoted prompt, or options of `run` or `chat`: a terminal decides between the two.
        """
        if not args:
            if ctx.resilient_parsing:  # shell completion
                return None
            if _on_a_terminal():
                return "chat"
            if sys.stdin.isatty():  # no text comes, and there is no screen: click shows the help
                return None
            return "run"
        if _is_prompt(args[0]):
            return "run"

        # An option of `run` or `chat` that comes first; what has no dash is the name of a command.
        name = args[0].partition("=")[0]
        if not name.startswith("-") or name in ("--", *self._group_options(ctx)):
            return None
        chat = self.get_command(ctx, "chat")
        run = self.get_command(ctx, "run")
        assert chat is not None
        assert run is not None
        is_for_run = name == "-" or _has_option(run, name)
        if not is_for_run and not _has_option(chat, name):
            return None
        if not _on_a_terminal() or (is_for_run and not self._is_valid_for_chat(ctx, args)):
            return "run"
        return "chat"

    def _group_options(self, ctx: click.Context) -> list[str]:
        """Return the options of `headrace` itself, such as --help."""
        return [name for param in self.get_params(ctx) for name in param.opts]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not ctx.resilient_parsing and not args[0].startswith("-") and args[0] not in _COMMANDS:
            hint = "`headrace run PROMPT` answers a prompt"
            if near := suggested_command(args[0], _COMMANDS):
                hint = f"did you mean {near}?"
            raise UsageError(f"no such command {args[0]!r:.80}", f"`headrace --help` lists the commands; {hint}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        items = [CompletionItem(name, help=line) for name, (*_, line) in _COMMANDS.items()]
        return [item for item in items if item.value.startswith(incomplete)] + click.Command.shell_complete(
            self, ctx, incomplete
        )

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # on another pipe than standard output; click would exit silently
            raise HeadraceError("the connection to another process broke") from error
        except KeyboardInterrupt:
            if sys.stderr.isatty():
                raise  # click ends the line with `^C`
            raise click.exceptions.Exit(INTERRUPTED) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        with importing():
            command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        _name_numbers(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in _COMMANDS.items()])


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from headrace.app.versions import NOT_INSTALLED, versions

        click.echo(f"headrace {versions(('headrace',)).get('headrace') or f'({NOT_INSTALLED})'}")
        ctx.exit()


@click.group(
    cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": canonical_option}
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="The version."
)
def cli() -> None:
    """Run a quantized language model on this machine and watch its decode loop.

    Without a command, opens the chat on a terminal and otherwise answers piped text; options of both work. A quoted
    prompt is answered: headrace "Why is the sky blue?"
    """
    for line in environment.check():
        _complain(line, None)
    on_intel = sys.platform == "darwin" and os.uname().machine == "x86_64"
    if on_intel and click.get_current_context().invoked_subcommand != "doctor":
        raise HeadraceError(
            "this Python is built for Intel, and MLX has no GPU there",
            "headrace needs an arm64 Python on a Mac with Apple silicon; `headrace doctor` shows the way",
        )
    check_imports()


def _is_prompt(argument: str) -> bool:
    """Return whether a first argument is a quoted prompt: commands and their misspellings have no space."""
    return not argument.startswith("-") and len(argument.split()) > 1


def _on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _name_numbers(command: click.Command) -> None:
    """Call whole numbers N and others X in the help of a command and its subcommands."""
    for param in command.params:
        if param.metavar is None and isinstance(param, click.Option) and not param.is_flag:
            param.metavar = _NUMBERS.get(param.type.name)
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            _name_numbers(subcommand)


def _has_option(command: click.Command, option: str) -> bool:
    """Return whether the command has the option; a short one may carry its value."""
    names = {name for param in command.params if isinstance(param, click.Option) for name in param.opts}
    if option.startswith("--"):
        return f"--{canonical_option(option[2:])}" in names
    return option[:2] in names


def run_command_line() -> int:
    """Run the command line and return its exit code. Every error but an interrupt becomes one line and a hint."""
    try:
        code = cli.main(prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except ReaderGoneError:
        silence_stdout()
        return 0
    except OutputError as error:
        _debug_traceback()
        silence_stdout()
        _complain(str(error), error.hint)
        return error.exit_code
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.UsageError as error:
        _complain(*usage_error(error))
        return error.exit_code
    except click.ClickException as error:
        _complain(click_text(error), None)
        return error.exit_code
    except HeadraceError as error:
        _debug_traceback()
        _complain(str(error), error.hint)
        return error.exit_code
    except ModuleNotFoundError as error:
        _debug_traceback()
        _complain(f"not installed: {error.name}", _hint_to_install(error))
        return 1
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 makes it a RuntimeError within __set_name__
            return INTERRUPTED
        _debug_traceback()
        if str(error) == "can't start new thread":  # Python has no class for it
            _complain(
                "the system starts no more threads", "raise the limit of processes: `ulimit -u`, or a container's"
            )
            return 1
        _complain(f"internal error: {error!r}", f"{environment.DEBUG}=1 shows where; please report it")
        return 1
    return code if isinstance(code, int) else 0


def _hint_to_install(error: ModuleNotFoundError) -> str:
    """Return what to do about a missing module.

    `headrace doctor` explains most: MLX, for instance, has no wheels for a Mac's Intel Python. It needs msgspec itself.
    """
    if (error.name or "").partition(".")[0] != "msgspec":
        return "`headrace doctor` says why, and what to do"
    from headrace.app.versions import own_source  # here: few errors need it

    return f"reinstall headrace: {sys.executable} -m pip install --force-reinstall {own_source()}"


def _one_line(message: str) -> str:
    return " ".join(message.splitlines())


def _complain(message: str, hint: str | None) -> None:
    with contextlib.suppress(OSError):  # standard error may be closed, too
        say(f"headrace: {_one_line(message)}", err=True)
        if hint:
            say(f"  hint: {_one_line(hint)}", err=True)


def _debug_traceback() -> None:
    with contextlib.suppress(UsageError):  # the error to report may be about HEADRACE_DEBUG itself
        if environment.debug():
            import traceback

            traceback.print_exc()
