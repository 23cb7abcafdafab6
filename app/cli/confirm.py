"""Asking before something is destroyed. Yes goes on, no is an answer (exit code 1), Ctrl-C is an interrupt (130)."""

import click

from headrace.runtime.errors import HeadraceError


def confirm(question: str) -> None:
    """Ask on standard error. Raises HeadraceError for no: what was asked for is not done, and a script has to know."""
    if not click.confirm(question, err=True):
        raise HeadraceError("nothing was removed")
