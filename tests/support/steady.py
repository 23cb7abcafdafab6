"""Chunk budget without a clock, and a machine measured in an instant."""

from headrace.runtime.engine.prompt_chunks import ChunkBudget
from headrace.runtime.machine import bandwidth, compute


def measure_machine_briefly() -> None:
    """Read 8 MiB in the fewest passes and multiply one small matrix.

    Each command that answers measures the bandwidth, and each benchmark the compute, for longer than either runs here.
    """
    bandwidth._LEAST_ON_CPU = 8 << 20
    bandwidth._MOST_ON_CPU = 8 << 20
    bandwidth._SECONDS = 1e-9
    bandwidth._SHORT_S = 1e-9
    compute._CPU_SIZE = 256
    compute._SECONDS = 1e-9


class SteadyPace(ChunkBudget):
    """Constant numbers of prompt tokens per pass, with decoding sequences and alone."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.alone.size = tokens

    def budget(self, with_decoding: bool) -> int:  # noqa: ARG002
        return self.alone.size

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None: ...
