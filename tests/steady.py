"""A pace that no clock has a say in: who decodes beside whom is then the same on every machine."""

from headrace.runtime.engine.chunk_budget import Pace


class SteadyPace(Pace):
    """So many prompt tokens a pass, beside decoding sequences and alone, whatever passes took."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.alone.size = tokens

    def budget(self, beside: bool) -> int:  # noqa: ARG002
        return self.alone.size

    def took(self, rows: int, fed: int, seconds: float) -> None: ...
