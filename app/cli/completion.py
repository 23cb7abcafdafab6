"""`headrace completion`: the script that makes a shell complete headrace's commands, options and model names.

The shell asks the program itself at every Tab, so nothing here imports more than names need: the catalog and the
store's entries, no mlx, no network. What cannot be read is not offered; a Tab never shows an error.
"""

import click
from click.shell_completion import CompletionItem, get_completion_class

from headrace.runtime.errors import HeadraceError

_SHELLS = ("bash", "zsh", "fish")
_PATH_MARKS = ("/", ".", "~")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print what makes SHELL (bash, zsh or fish) complete commands, options and model names.

    \b
    bash, in ~/.bashrc:  eval "$(headrace completion bash)"
    zsh, in ~/.zshrc:    eval "$(headrace completion zsh)"
    fish, once:          headrace completion fish > ~/.config/fish/completions/headrace.fish
    """
    from headrace.app.cli.commands import PROGRAM, cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())


def model_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What `-m` may be: names from the store and the catalog; files where it looks like a path or like nothing else."""
    from headrace.models.registry.catalog import load_catalog

    catalog = load_catalog()
    helps = dict.fromkeys(_installed(), "installed")
    helps |= {name: entry.title for name, entry in catalog.items() if name not in helps}
    found = [CompletionItem(name, help=text) for name, text in helps.items() if name.startswith(incomplete)]
    if found and not incomplete.startswith(_PATH_MARKS):
        return found
    return [CompletionItem(incomplete, type="file")]


def installed_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The names of what the store has."""
    return [name for name in _installed() if name.startswith(incomplete)]


def _installed() -> list[str]:
    """As `-m` takes them: a hub repository's entry is called org--name."""
    from headrace.models.registry.store import Store

    try:
        return [name.replace("--", "/", 1) for name in Store().names()]
    except (HeadraceError, OSError):
        return []
