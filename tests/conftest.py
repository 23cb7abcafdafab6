"""Fixtures for the whole suite: the real default model, fetched once and kept outside the repository."""

import os
from pathlib import Path

import platformdirs
import pytest
from hypothesis import HealthCheck, settings

# No test depends on how fast the machine is.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's directory, installed as a user would get it.

    It stays in the user's cache folder (HEADRACE_TEST_HOME names another), so only the first run of the suite fetches.
    """
    from models.resolve import resolve
    from models.store import Store

    home = os.environ.get("HEADRACE_TEST_HOME") or platformdirs.user_cache_dir("headrace-tests", appauthor=False)
    return resolve(None, store=Store(Path(home) / "data" / "models")).path
