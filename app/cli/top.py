"""`headrace top`: the decode view of a running server.

The view is `app/tui/top.py`; `app/engine/telemetry_reader.py` reads the server's events for it.

Guard: tests/app/cli/test_commands.py.
"""

import click

from headrace.app.cli.serve import PORT
from headrace.app.output.terminal import has_screen
from headrace.runtime.errors import EngineError, HeadraceError, UsageError

_WAIT_S = 5.0  # for the first event of the server, before the screen opens


@click.command()
@click.argument("url", metavar="[URL]", default=f"http://127.0.0.1:{PORT}")
@click.option("-m", "--model", metavar="MODEL", help="Model of the server [the one of its start].")
@click.option("--api-key", metavar="KEY", help="Key of the server [HEADRACE_API_KEY].")
def top(url: str, model: str | None, api_key: str | None) -> int:
    """Watch a running `headrace serve`: sequences, queue, K/V, latency, bandwidth. URL is its address
    [http://127.0.0.1:8080].
    """
    if not has_screen():
        raise UsageError("top needs a terminal that can redraw", f"`curl {url}/metrics` works in pipes and scripts")
    from headrace.app.config.settings import load_settings
    from headrace.app.engine.http_address import HTTPAddress
    from headrace.app.engine.telemetry_reader import TelemetryReader, wait_for_model
    from headrace.runtime.config import environment

    reader = TelemetryReader(HTTPAddress(url, api_key or environment.api_key()), model)
    events = wait_for_model(reader, _WAIT_S)
    if not events and reader.problem:
        raise EngineError(f"{url}: {reader.problem}", "is `headrace serve` running there?")
    from headrace.app.tui.top import TopApp

    app = TopApp(reader, url, load_settings())
    app.take(events)
    app.run()
    if app.crash is not None:
        raise HeadraceError(app.crash)
    return app.return_code or 0
