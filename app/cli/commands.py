"""The `headrace` command: names of subcommands, exit codes, and how errors look. Imports nothing heavy.

A subcommand's module is imported when it is run, so `headrace --help` needs neither mlx nor textual. Exit codes:
0 done, 1 failed, 2 usage error, 130 interrupted (129 and 143, for signals that end it, are `app.cli.main`'s).
"""

import contextlib
import importlib
import os
import sys
import traceback

import click

from headrace.app.cli.standard_streams import OutputError, ReaderGoneError, silence_stdout
from headrace.runtime.errors import HeadraceError

PROGRAM = "headrace"
DEBUG = "HEADRACE_DEBUG"

# name -> (module, attribute, one line for --help)
_COMMANDS = {
    "chat": ("headrace.app.cli.chat", "chat", "Chat in the terminal, with the decode loop in view (the default)."),
    "run": ("headrace.app.cli.run", "run", "Answer one prompt, streamed to standard output."),
    "bench": ("headrace.app.cli.bench", "bench", "Measure how fast this machine decodes, and how close to its limit."),
    "predict": (
        "headrace.app.cli.predict",
        "predict",
        "Say how fast a model would decode on a chip, before fetching it.",
    ),
    "fit": ("headrace.app.cli.predict", "fit", "Say which models fit this machine, and how fast each would be."),
    "models": ("headrace.app.cli.models", "models", "List, fetch, inspect and remove models."),
    "sessions": (
        "headrace.app.cli.sessions",
        "sessions",
        "List, show, search, export and delete stored conversations.",
    ),
    "paths": ("headrace.app.cli.paths", "paths", "Show where headrace keeps its files."),
    "doctor": ("headrace.app.cli.doctor", "doctor", "Show what headrace knows about this machine, and what is wrong."),
}


class _LazyGroup(click.Group):
    """A group that imports a subcommand only to run it or to show its own help."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # not standard output's; click would exit without a word
            raise HeadraceError("a connection to another process broke") from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in _COMMANDS.items()])


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from headrace.app.versions import NOT_INSTALLED, versions

        click.echo(f"headrace {versions(('headrace',)).get('headrace') or f'({NOT_INSTALLED})'}")
        ctx.exit()


@click.group(cls=_LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
@click.pass_context
def cli(ctx: click.Context) -> int | None:
    """Run a quantized language model on this machine and see how its decode loop behaves."""
    if ctx.invoked_subcommand is not None:
        return None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.exceptions.NoArgsIsHelpError(ctx)
    from headrace.app.cli.chat import chat

    return chat.main([], standalone_mode=False)  # type: ignore[no-any-return]


def run_command_line() -> int:
    """Do what the arguments say; the exit code. Every error but an interrupt ends here, in one line and a hint."""
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
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else PROGRAM
        _complain(_one_line(error.format_message()), f"`{command} --help` shows the options")
        return error.exit_code
    except click.ClickException as error:
        _complain(_one_line(error.format_message()), None)
        return error.exit_code
    except HeadraceError as error:
        _debug_traceback()
        _complain(str(error), error.hint)
        return error.exit_code
    except Exception as error:
        _debug_traceback()
        _complain(f"internal error: {error!r}", f"{DEBUG}=1 shows where; please report it")
        return 1
    return code if isinstance(code, int) else 0


def _one_line(message: str) -> str:
    return " ".join(message.split()).removesuffix(".")


def _complain(message: str, hint: str | None) -> None:
    with contextlib.suppress(OSError):  # nobody may be listening there either
        click.echo(f"headrace: {message}", err=True)
        if hint:
            click.echo(f"  hint: {hint}", err=True)


def _debug_traceback() -> None:
    if os.environ.get(DEBUG) == "1":
        traceback.print_exc()
