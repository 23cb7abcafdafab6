"""A first pass that takes long, as on a GPU where MLX compiles kernels: it ends once its seconds were reported.

Processes of `tests.support.commands` have one with the variable SLOW_FIRST_PASS.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace

from headrace.runtime.engine import engine, first_pass
from headrace.runtime.machine.hardware import machine
from tests.support.patience import PATIENCE_S


def slow_first_pass() -> None:
    """Give this process a slow first pass."""
    here = machine()
    is_reported = threading.Event()
    start = engine.start
    report_if_slow = first_pass.report_if_slow

    def noted(report: Callable[[float], None], **times: float) -> AbstractContextManager[None]:
        def report_and_end(seconds: float) -> None:
            report(seconds)
            is_reported.set()

        return report_if_slow(report_and_end, **times)

    def start_slowly(*arguments: Any) -> Any:
        assert is_reported.wait(PATIENCE_S)
        return start(*arguments)

    first_pass.machine = lambda: replace(here, backend="cuda")  # type: ignore[attr-defined]
    first_pass.SLOW_S = 0.02
    first_pass.report_if_slow = noted  # type: ignore[attr-defined]
    engine.start = start_slowly  # type: ignore[attr-defined]
