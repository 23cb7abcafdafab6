"""`headrace run`: one prompt, one answer, streamed to standard output.

Standard output has the sanitised answer alone, or with --json one document; everything else goes to standard error.

Guard: tests/app/cli/test_run.py.
"""

from pathlib import Path

import click

from headrace.app.cli.answer_options import answer_options
from headrace.app.cli.completion import files, prompt_files, session_ids
from headrace.app.cli.decorators import as_object
from headrace.app.cli.model_options import model_option, model_options
from headrace.app.cli.run.arguments import RunArguments


@click.command()
@click.argument("words", metavar="[PROMPT]", nargs=-1, shell_complete=prompt_files)
@model_option
@click.option("-s", "--system", metavar="TEXT", help="System message.")
@click.option(
    *("-f", "--file", "files"),
    multiple=True,
    metavar="FILE",
    shell_complete=files,
    help="Text file sent with the prompt. Repeatable.",
)
@click.option("-c", "--continue", "go_on", is_flag=True, help="Continue the last conversation: --resume last.")
@click.option(
    "--resume",
    metavar="ID",
    shell_complete=session_ids,
    help="Conversation to continue: its id, the beginning of it, or `last`.",
)
@click.option("--save/--no-save", default=None, help="Store this conversation or not [the settings'].")
@answer_options
@click.option("--samples", type=click.IntRange(1, 256), metavar="N", help="N answers, decoded side by side.")
@model_options
@click.option("--raw", is_flag=True, help="No chat template: the prompt is continued as it is.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of the text.")
@click.option("--steps", "with_steps", is_flag=True, help="With --json: one record per decode step.")
@click.option("--logprobs", type=click.IntRange(0, 100), metavar="N", help="With --json: the N best of every token.")
@click.option("--stats", is_flag=True, help="All figures of the answer, on standard error.")
@click.option("--explain", is_flag=True, help="Bytes of a token, the machine's limit and the speed, in words.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Trace-event file of prefill and steps (Perfetto).",
)
@click.option("--show-prompt", is_flag=True, help="The prompt as the model gets it, and no answer.")
@click.option("-q", "--quiet", is_flag=True, help="Answer and errors only: no progress, no closing line.")
@as_object(RunArguments)
def run(arguments: RunArguments) -> int:
    """Answer PROMPT. Piped text goes before it, after a blank line; `-` stands for piped text alone.
    Without a prompt, opens the chat on a terminal.

    @FILE in PROMPT, as -f FILE, sends a text file along. Defaults come from the environment (HEADRACE_MODEL), then from
    the settings file (model, system prompt, context, sampling, --save; `headrace paths` finds it), then from the model.
    """
    arguments.check()
    from headrace.runtime.machine.garbage import importing

    with importing():
        from headrace.app.cli.run.answer import run_answer  # late: `headrace run --help` needs none of it

    return run_answer(arguments)
