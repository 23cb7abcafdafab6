"""A hub on the loopback interface, with an empty cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer, point_at


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        point_at(server.url, tmp_path / "cache", monkeypatch)
        yield server
