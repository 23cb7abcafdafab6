"""Seconds of a first pass that takes long, while it runs.

On a GPU, MLX compiles a kernel when a pass first uses it, which may take a minute. `Engine` watches its steps until a
token is chosen. On a CPU nothing is compiled: the progress of the prompt is all there is to tell. The reports have no
words: `app/answer/first_pass.py` shows them.

Guards: tests/runtime/engine/test_first_pass.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from headrace.runtime.machine.background import report_if_slow
from headrace.runtime.machine.hardware import machine

SLOW_S = 2.0  # that a pass takes before its first report
_EVERY_S = 0.5  # between two reports


class FirstPass:
    """The passes of a model before its first token.

    report: called from another thread with the seconds that a pass has taken, never after the pass; None: not at all.
    compiles: passes may compile kernels; others are not reported.
    is_over: a token was chosen.
    """

    def __init__(self) -> None:
        self.report: Callable[[float], None] | None = None
        self.compiles = machine().backend != "cpu"
        self.is_over = False

    def watched(self) -> AbstractContextManager[None]:
        """Return a context for a pass, in which `report` is called if the pass takes long."""
        if self.report is None or self.is_over or not self.compiles:
            return nullcontext()
        return report_if_slow(self.report, slow_s=SLOW_S, every_s=_EVERY_S)
