"""`headrace completion`: shell completion of commands, options, model names, files and other values.

The shell runs headrace at every Tab, so no completion imports mlx. Unreadable entries are left out; a Tab never shows
an error.

The functions below are `shell_complete` of options and arguments in the commands' files.

Bash, zsh and fish differ from click's completion: words with `=`, `@` and `:`, zsh without compinit. Importing this
module registers their classes with click. See docs/workarounds.md.

Guard: tests/app/cli/test_commands.py.
"""

from contextlib import closing
from typing import ClassVar

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
)

from headrace.runtime.errors import HeadraceError

COMPLETE = "_HEADRACE_COMPLETE"  # environment variable, set by a shell's completion script
_SHELLS = ("bash", "zsh", "fish")
_PATH_MARKS = ("/", ".", "~")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print SHELL's completion script for commands, options and their values (bash, zsh or fish).

    \b
    bash, in ~/.bashrc:  eval "$(headrace completion bash)"
    zsh, in ~/.zshrc:    eval "$(headrace completion zsh)"
    fish, once:          headrace completion fish > ~/.config/fish/completions/headrace.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root()
    click.echo(kind(root.command, {}, str(root.info_name), COMPLETE).source())


def model_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete `-m`: names on this disk and of the catalog; files if the text looks like a path or matches no name."""
    from headrace.models.registry.catalog import load_catalog
    from headrace.models.registry.other_programs import foreign_models

    catalog = load_catalog()
    helps = {model.name: f"in {model.program}" for model in foreign_models()}
    helps |= dict.fromkeys(_installed(), "installed")
    helps |= {name: entry.title for name, entry in catalog.items() if name not in helps}
    matching = [CompletionItem(name, help=text) for name, text in helps.items() if name.startswith(incomplete)]
    if matching and not incomplete.startswith(_PATH_MARKS):
        return matching
    return [CompletionItem(incomplete, type="file")]


def installed_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete installed models."""
    return [name for name in _installed() if name.startswith(incomplete)]


def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete file names, as the shell does."""
    return [CompletionItem(incomplete, type="file")]


def prompt_files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a prompt: files, also after `@`."""
    if not incomplete.startswith("@"):
        return [CompletionItem(incomplete, type="file")]
    from pathlib import Path

    folder, slash, start = incomplete[1:].rpartition("/")
    try:
        matching = sorted(path for path in Path(folder + slash or ".").iterdir() if path.name.startswith(start))
    except OSError:
        return []
    names = [f"{path.name}/" if path.is_dir() else path.name for path in matching]
    return [CompletionItem(f"@{folder}{slash}{name}") for name in names]


def session_ids(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete stored conversations: `last` and their ids, the last used first."""
    from headrace.app.output.sanitise import safe_line
    from headrace.app.sessions.store import SessionStore, database_path

    if not database_path().exists():
        return []
    try:
        with closing(SessionStore()) as store:
            titles = {entry.session.id: entry.session.title for entry in store.sessions()}
    except (HeadraceError, OSError):
        return []
    helps = {"last": "the last used one"} | {name: safe_line(title) for name, title in titles.items()}
    return [CompletionItem(name, help=text or None) for name, text in helps.items() if name.startswith(incomplete)]


def kv_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete K/V formats with commas between them."""
    from headrace.app.config.load_options import KV_NAMES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in KV_NAMES if name.startswith(last) and name not in before.split(",")]


def chip_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete chips without spaces: `m4max`."""
    from headrace.runtime.machine.chips import table, without_vendor

    names = {without_vendor(chip.name).replace(" ", "").lower(): chip.name for chip in table()}
    typed = incomplete.replace(" ", "").lower()
    return [CompletionItem(short, help=name) for short, name in names.items() if short.startswith(typed)]


def workload_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete workloads of `bench --speculate`."""
    from headrace.app.bench.measure.workloads import load_workloads

    workloads = load_workloads().values()
    return [
        CompletionItem(workload.name, help=workload.about)
        for workload in workloads
        if workload.name.startswith(incomplete)
    ]


def _installed() -> list[str]:
    """Return names as `-m` takes them; the store calls a hub repository org--name, and quotes what follows."""
    from urllib.parse import unquote

    from headrace.models.registry.store import Store

    try:
        return [unquote(name).replace("--", "/", 1) for name in Store().names()]
    except (HeadraceError, OSError):
        return []


# `compdef` is part of compinit, which a plain ~/.zshrc does not load. -i: without a question about unsafe folders.
_ZSH_SETUP = """
if [[ $zsh_eval_context[-1] != loadautofunc ]] && (( ! $+functions[compdef] )); then
    autoload -Uz compinit && compinit -i
fi
"""
_PLAIN = "plain"


class _WholeWords(ShellComplete):
    """A shell that replaces the whole word, `--kv=` included."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        items = super().get_completions(args, incomplete)
        name, equals, _ = incomplete.partition("=")
        if equals and name.startswith("-"):
            for item in items:
                if item.type == _PLAIN:
                    item.value = f"{name}={item.value}"
        return items


class Zsh(_WholeWords, ZshComplete):
    """zsh, with or without compinit in ~/.zshrc."""

    # `#compdef` has to stay the first line of the script: the setup goes below it.
    first, _, _rest = ZshComplete.source_template.partition("\n")
    source_template: ClassVar[str] = f"{first}\n{_ZSH_SETUP}{_rest}"


class Fish(_WholeWords, FishComplete):
    """fish."""


class Bash(BashComplete):
    """bash, which makes `=`, `@` and `:` words of their own; it replaces what follows `=` and `:`, and `@` too."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        # "tuned", ":", "3" are the model tuned:3b
        before_colon = ""
        if incomplete == ":":
            args = [*args, ":"]
            incomplete = ""
        while args[-1:] == [":"] and len(args) > 1:
            before_colon = f"{args[-2]}:{before_colon}"
            args = args[:-2]
        incomplete = before_colon + incomplete

        if args[-1:] == ["="]:
            args = args[:-1]
        elif args[-1:] == ["@"]:
            args = args[:-1]
            incomplete = f"@{incomplete}"
        items = super().get_completions(args, incomplete)
        for item in items:
            item.value = item.value.removeprefix(before_colon)
        return items


for _kind in (Bash, Zsh, Fish):
    add_completion_class(_kind)
