"""What to measure: prompt, generation and prompt + generation tests over all combinations of lengths and depths.

Names follow llama-bench: `pp512` prefills 512 tokens, `tg128` decodes 128, `pp512+tg128` does both; `@ d2048` means
that 2048 tokens are in the KV cache before the clock starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.runtime.errors import UsageError

Kind = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True)
class Test:
    """One thing to measure: `prompt` tokens in, then `generate` tokens out, with `depth` tokens in the cache."""

    __test__ = False  # its name makes pytest look twice

    prompt: int
    generate: int
    depth: int = 0

    @property
    def kind(self) -> Kind:
        if self.prompt and self.generate:
            return "both"
        return "prefill" if self.prompt else "decode"

    @property
    def name(self) -> str:
        """The test without its depth, as in the JSON document."""
        parts = [f"pp{self.prompt}"] if self.prompt else []
        return "+".join([*parts, f"tg{self.generate}"] if self.generate else parts)

    @property
    def label(self) -> str:
        return f"{self.name} @ d{self.depth}" if self.depth else self.name

    @property
    def tokens(self) -> int:
        """Entries in the cache when it is over, and one to spare for the step that a prefill test ends with."""
        return self.depth + self.prompt + self.generate + 1


def plan(prompts: Sequence[int], generates: Sequence[int], depths: Sequence[int], *, combined: bool) -> list[Test]:
    """All tests in the order they are shown: by depth, then prefill, decode, and (if `combined`) both together.

    Raises UsageError if nothing is left to measure, or a decode is too short to have an inter-token latency.
    """
    if any(1 <= generate < 2 for generate in generates):
        raise UsageError("a decode test needs at least 2 tokens: speed is measured between tokens")
    tests: list[Test] = []
    for depth in depths:
        tests += [Test(prompt, 0, depth) for prompt in prompts if prompt]
        tests += [Test(0, generate, depth) for generate in generates if generate]
        if combined:
            pairs = [(prompt, generate) for prompt in prompts for generate in generates]
            tests += [Test(*pair, depth) for pair in pairs if all(pair)]
    if not tests:
        raise UsageError("nothing to measure", "-p 512 -n 128 measures prefill and decode")
    return list(dict.fromkeys(tests))


def parse_counts(text: str, option: str) -> list[int]:
    """Comma-separated token counts, at least one, each once: `0,512,2048`. Raises UsageError naming the option."""
    if not text.strip():
        raise UsageError(f"{option} is empty", "it takes token counts such as 128 or 0,512,2048; 0 stands for none")
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
        raise UsageError(f"{option} takes token counts such as 128 or 0,512,2048, not {text[:60]!r}")
    counts = [int(part) for part in parts]
    if any(count > 1 << 24 for count in counts):
        raise UsageError(f"{option}: a token count is at most {1 << 24:,}")
    return list(dict.fromkeys(counts))
