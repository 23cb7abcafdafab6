"""`--draft`: a draft model, a smaller one of the same vocabulary."""

from collections.abc import Callable
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
    help = "Draft model: a smaller model of the same vocabulary; the answer is the same."
    return click.option("--draft", metavar="MODEL", shell_complete=model_names, help=help)(command)


def chosen_draft(given: str | None, usual: str, speculate: str | None) -> str | None:
    """Return the draft model's name: that of the command line, else the settings' `usual`; None for none.

    speculate: as given on the command line. Raises UsageError where both are given.
    """
    if given is not None and speculate is not None:
        raise UsageError(f"--draft and --speculate {speculate} exclude each other")
    if speculate is not None:
        return None
    if given is not None:
        return given
    return usual or None


def load_draft(name: str | None, model: "LoadedModel", *, quiet: bool) -> "Network | None":
    """Load the network of a draft model, fetched if need be; None for no name.

    Raises UsageError for another vocabulary, and the errors of loading a model.
    """
    if name is None:
        return None
    from headrace.app.cli.load_for_answers import resolved_model
    from headrace.models.loading import draft

    return draft.load_draft(resolved_model(name, quiet=quiet), model).network
