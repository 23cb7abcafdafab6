"""Chunk budget without a clock, and memory bandwidth measured in an instant, whatever the machine."""

from headrace.runtime.engine.chunk_budget import ChunkBudget
from headrace.runtime.machine import bandwidth


def measure_bandwidth_briefly() -> None:
    """Read 8 MiB in the fewest passes: each command that answers measures the bandwidth, longer than it runs."""
    bandwidth._CPU_SIZE = (8 << 20, 8 << 20)
    bandwidth._SECONDS = 1e-9
    bandwidth._SHORT_S = 1e-9


class SteadyPace(ChunkBudget):
    """Constant numbers of prompt tokens per pass, with decoding sequences and alone."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.alone.size = tokens

    def budget(self, with_decoding: bool) -> int:  # noqa: ARG002
        return self.alone.size

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None: ...
