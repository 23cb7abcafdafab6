"""A server process on a tiny chat model, and clients of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server_process import ServerProcess
from tests.support.tiny_chat import write_chat_model

Starter = Callable[..., ServerProcess]


@pytest.fixture(scope="session", autouse=True)
def _clients_share_a_tls_context() -> Iterator[None]:
    """Make one TLS context for all clients: it takes longer than a request, and no address here needs it."""
    context = httpx.create_ssl_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx2._transports.default.create_ssl_context", lambda **_: context)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("tiny") / "tiny", context=200_000)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for the tests of a module."""
    with ServerProcess(tmp_path_factory.mktemp("home"), "-m", str(model)) as running:
        yield running


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Starter]:
    """Start servers of a test's own."""
    with ExitStack() as stack:

        def started(*arguments: str, **more: Any) -> ServerProcess:
            home = tmp_path / "home"
            return stack.enter_context(ServerProcess(home, "-m", str(model), *arguments, **more))

        yield started


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.root, timeout=60) as client:
        yield client
