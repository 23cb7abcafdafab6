"""Chunk budget without a clock, so that batches are the same on every machine."""

from headrace.runtime.engine.chunk_budget import ChunkBudget


class SteadyPace(ChunkBudget):
    """Constant numbers of prompt tokens per pass, with decoding sequences and alone."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.alone.size = tokens

    def budget(self, beside: bool) -> int:  # noqa: ARG002
        return self.alone.size

    def took(self, rows: int, fed: int, seconds: float) -> None: ...
