"""headrace commands in forks of one process that has imported all they need: a run costs what it does, not its start.

Contract: a run is a process of its own, in a session of its own, with the environment that the first one had; what it
has imported but not used is that of the forking process. Linux and macOS.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# What commands import when they run, and what `tests.fuzz.kills` does.
_IMPORTED = (
    "huggingface_hub.file_download", "huggingface_hub.hf_api", "jinja2.sandbox", "mlx.core", "numpy", "tokenizers",
    "headrace.app.api", "headrace.app.batch.output", "headrace.app.batch.run", "headrace.app.cli.batch",
    "headrace.app.cli.models", "headrace.models.load", "headrace.models.registry.fetch_hub", "headrace.runtime.engine",
    "tests.faults.test_kills", "tests.faults.test_ui_kills", "tests.hub_server", "tests.tiny_chat",
)  # fmt: skip
_FORKS = multiprocessing.get_context("forkserver")
# The main module is run again in every fork, as in any child of a fork server: what it imports is there, too.
_FORKS.set_forkserver_preload([__name__, *_IMPORTED])


def run(arguments: Sequence[str], errors: Path, seconds: float | None = None) -> bool:
    """Run headrace; whether it was killed after so many seconds. Raises AssertionError where it fails by itself."""
    process = _FORKS.Process(target=_headrace, args=(list(arguments), errors))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        assert process.pid is not None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no session yet
            process.kill()
        process.join()
        return True
    assert process.exitcode == 0, errors.read_text("utf-8", "replace")[-2000:]
    return False


def _headrace(arguments: list[str], errors: Path) -> None:
    from headrace.app.cli.main import main

    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    told = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream, here in ((0, nothing), (1, nothing), (2, told)):
        os.dup2(here, stream)
    sys.argv = ["headrace", *arguments]
    main()
