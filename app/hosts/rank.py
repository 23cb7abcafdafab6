"""A rank from 1 on, as a process: `python -P -m headrace.app.hosts.rank`, started by `app.hosts.processes`.

Standard input has an order, whose keys `Ranks.start` (start.py) writes, then `go`; its end ends the process, however
rank 0 has ended. Standard output has one report, and heartbeats, which rank 0 answers. Both are lines of JSON.

Guards: tests/app/hosts/test_start.py and test_kills.py.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

# Imports that take long come after the first heartbeat.
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_TIMEOUT_S = 10.0  # for a connection to rank 0
_BEAT_S = 1.0  # between two heartbeats
_SILENCE_S = 10  # without a line from rank 0, before the control channel has heartbeats of its own
_telling = threading.Lock()


def main() -> int:
    """Report, answer the probe of the link, and follow rank 0 until it ends. Return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's
    _end_with_parent()
    signal.alarm(_SILENCE_S)  # ends the process
    threading.Thread(target=_beat, name="beat", daemon=True).start()
    order = json.loads(sys.stdin.readline() or "null")
    if not isinstance(order, dict):
        return 1
    go = threading.Event()
    threading.Thread(target=_watch_input, args=(go,), name="input", daemon=True).start()
    from headrace.runtime.errors import HeadraceError

    report = _report(order)
    _tell({**report, "clock": time.time()})
    try:
        if "error" in report or report["versions"] != order["versions"]:
            go.wait()  # rank 0 ends this process
            return 1
        return _run(order, report, go)
    except HeadraceError as error:
        _say(error)
        return error.exit_code


def _beat() -> None:
    """Tell rank 0 this process's id, then that it lives."""
    _tell({"pid": os.getpid()})
    while True:
        time.sleep(_BEAT_S)
        _tell({})


def _tell(record: dict[str, Any]) -> None:
    with _telling, suppress(OSError):  # rank 0 has ended
        print(json.dumps(record), flush=True)


def _report(order: dict[str, Any]) -> dict[str, Any]:
    from headrace.app.hosts.facts import give_files, machine_facts, model_facts, own_versions, rdma_state
    from headrace.runtime.errors import HeadraceError

    report: dict[str, Any] = {"versions": own_versions()}
    if report["versions"]["headrace"] != order["versions"]["headrace"]:
        return report  # the rest of the order is another version's
    model = order["model"]
    try:
        give_files(order["files"])
        report |= {"model": model_facts(model) if model else None, "machine": machine_facts(), "rdma": rdma_state()}
    except (OSError, RuntimeError, ImportError, HeadraceError) as error:
        report["error"] = f"MLX does not work there: {error}"
    return report


def _run(order: dict[str, Any], report: dict[str, Any], go: threading.Event) -> int:
    from headrace.app.hosts.probe import answer_probe
    from headrace.runtime.ranks.peer_connection import connect

    key = bytes.fromhex(order["key"])
    rank = order["rank"]
    host, port = order["probe"]
    try:
        with connect((host, port), rank, key, _TIMEOUT_S) as connection:
            answer_probe(connection)
    except OSError as error:
        _say(error)
        return 1
    go.wait()
    if order["address"] is None:  # doctor asks no more
        return 0
    from headrace.models.loading.ranked import serve_rank
    from headrace.runtime.ranks.follower import Follower

    host, port = order["address"]
    serve_rank(Follower((host, port), rank, key, on_lost=_say), lambda _model: Path(report["model"]["path"]))
    return 0


def _say(error: Exception) -> None:
    print(f"headrace: {error}", file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    """Have Linux kill this process with its parent, also while it is stopped; elsewhere the input's end does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_input(go: threading.Event) -> None:
    """Set `go` when it comes, and end the process at the end of the input, or in silence before."""
    for line in sys.stdin:
        if "go" in json.loads(line):
            go.set()
        signal.alarm(0 if go.is_set() else _SILENCE_S)
    os._exit(1)  # another thread may wait in a collective, which nothing interrupts


if __name__ == "__main__":
    sys.exit(main())
