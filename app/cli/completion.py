"""`headrace completion`: shell completion of commands, options and model names.

The shell runs headrace at every Tab, so this imports only the catalog and the store, no mlx. Unreadable entries are
left out; a Tab never shows an error.
"""

import click
from click.shell_completion import CompletionItem, get_completion_class

from headrace.runtime.errors import HeadraceError

_SHELLS = ("bash", "zsh", "fish")
_PATH_MARKS = ("/", ".", "~")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print SHELL's completion script for commands, options and model names (bash, zsh or fish).

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
    """Complete `-m`: installed and catalog names; files if the text looks like a path or matches no name."""
    from headrace.models.registry.catalog import load_catalog

    catalog = load_catalog()
    helps = dict.fromkeys(_installed(), "installed")
    helps |= {name: entry.title for name, entry in catalog.items() if name not in helps}
    found = [CompletionItem(name, help=text) for name, text in helps.items() if name.startswith(incomplete)]
    if found and not incomplete.startswith(_PATH_MARKS):
        return found
    return [CompletionItem(incomplete, type="file")]


def installed_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete installed models."""
    return [name for name in _installed() if name.startswith(incomplete)]


def _installed() -> list[str]:
    """Return names as `-m` takes them; the store calls a hub repository org--name."""
    from headrace.models.registry.store import Store

    try:
        return [name.replace("--", "/", 1) for name in Store().names()]
    except (HeadraceError, OSError):
        return []
