"""`--draft`: the smaller model that guesses tokens ahead for another."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.app.cli.completion import model_names
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from headrace.models.loading.load import LoadedModel
    from headrace.runtime.network import Network

F = TypeVar("F", bound=Callable[..., Any])


def draft_option(command: F) -> F:
    """Add --draft to a click command."""
    option = click.option(
        "--draft",
        metavar="MODEL",
        shell_complete=model_names,
        help="A smaller model of the same vocabulary that guesses tokens ahead.",
    )
    return option(command)


def chosen_draft(given: str | None, usual: str, sampling: Mapping[str, Any]) -> str | None:
    """The draft model to use: what the command line gives, else the settings' `usual`; None for none.

    sampling: options of the command line. Raises UsageError where they contradict each other.
    """
    choice = sampling.get("speculate")
    if given is not None and choice is not None:
        raise UsageError(f"--draft and --speculate {choice} exclude each other")
    return None if choice is not None else given if given is not None else usual or None


def load_draft(name: str | None, model: "LoadedModel", *, quiet: bool) -> "Network[Any] | None":
    """The network of a draft model, fetched first if it has to be; None for no name.

    Raises UsageError for one of another vocabulary, and what loading any model raises.
    """
    if name is None:
        return None
    from headrace.app.cli.load_for_answers import resolved_model
    from headrace.models.loading import draft

    return draft.load_draft(resolved_model(name, quiet=quiet), model).network
