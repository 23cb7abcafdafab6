"""Engines of all tests of the app are forked."""

import pytest

from tests.support.commands import fork_engines


@pytest.fixture(scope="session", autouse=True)
def _engines_are_forked() -> None:
    fork_engines()
