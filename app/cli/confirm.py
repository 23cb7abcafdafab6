"""Confirmation before something is destroyed. A "no" exits with code 1, Ctrl-C with 130."""

import click

from headrace.runtime.errors import HeadraceError


def confirm(question: str) -> None:
    """Ask on standard error. Raises HeadraceError for "no"."""
    if not click.confirm(question, err=True):
        raise HeadraceError("nothing was removed")
