"""`--hosts` and `--split`: a model that several machines share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from headrace.app.cli.completion import files
from headrace.app.hosts.choice import SPLITS, HostsChoice
from headrace.runtime.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def hosts_options(command: F) -> F:
    """Add --hosts and --split to a click command."""
    split = click.option(
        "--split",
        type=click.Choice(SPLITS),
        metavar="|".join(SPLITS),
        help="Way to divide the model among --hosts [auto, by prediction].",
    )
    hosts = click.option(
        "--hosts",
        metavar="FILE|NAME,...",
        shell_complete=files,
        help="Machines that share the model: a hostfile of mlx.launch, or names for ssh: localhost,mac2.",
    )
    return hosts(split(command))


def chosen_hosts(hosts: str | None, split: str | None) -> HostsChoice | None:
    """Return the choice; None for this machine alone. Raises UsageError."""
    if hosts is None:
        if split is not None:
            raise UsageError("--split needs --hosts")
        return None
    return HostsChoice(hosts, split or "auto")
