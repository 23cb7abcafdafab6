"""Benchmark plans: prompt, generation and combined tests over lengths, depths and batches.

Names follow llama-bench. `pp512` prefills 512 tokens, `tg128` decodes 128, `pp512+tg128` does both. `@ d2048`: 2048
tokens are in the KV cache before the clock starts. `tg128 x8`: eight sequences decode 128 tokens each, all at that
depth with separate tokens. `pp2048 into tg64 x4`: a prompt of 2048 tokens joins four sequences that have decoded 64
tokens each. `edit`: a workload answered greedily with and without speculation; `edit t1` at temperature 1; `edit t1
x4` by four sequences.

Documents are compared by these names (`Test.name` and the depth), so a name may not change.

Guards: tests/app/bench/measure/test_plan.py, and test_own.py there for the room of a batch.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.bench.measure.workloads import Workload
from headrace.runtime.engine.prompt_chunks import SMALLEST
from headrace.runtime.errors import UsageError

MAX_BATCH = 256  # as of --parallel elsewhere
TEMPERATURES = (0.0, 1.0)  # of workloads
TestKind = Literal["prefill", "decode", "both", "arrival", "workload"]
RUNNING = 4  # sequences that an arrival joins without --batch
BEFORE = 64  # tokens that each of them has decoded
_WARM_UP_TOKENS = 16
_MAX_COUNT = 1 << 24  # tokens: far beyond any model's context, so a slip of the keys


class Test(Struct, frozen=True):
    """One test: `prompt` tokens fed, then `generate` tokens decoded, with `depth` tokens in the cache.

    The other fields tell its kind:

        kind      prompt   generate  batch  workload
        prefill   n        0         1      ""
        decode    0        n         any    ""
        both      n        n         1      ""
        arrival   n        n         > 1    ""
        workload  at most  at most   any    name

    prompt: tokens; of a workload an upper bound, as `generate` is.
    generate: tokens of each sequence.
    depth: tokens of each sequence.
    batch: sequences that decode together, or that an arriving prompt joins.
    workload: its name; "" for other tests.
    temperature: at which a workload is answered.
    """

    __test__ = False  # pytest would collect a class of this name

    prompt: int
    generate: int
    depth: int = 0
    batch: int = 1
    workload: str = ""
    temperature: float = 0.0

    @property
    def kind(self) -> TestKind:
        if self.workload:
            return "workload"
        if not self.prompt:
            return "decode"
        if not self.generate:
            return "prefill"
        return "both" if self.batch == 1 else "arrival"

    @property
    def name(self) -> str:
        """The test without its depth, as in the JSON document."""
        if self.kind == "workload":
            name = self.workload
            if self.temperature:
                name += f" t{self.temperature:g}"
        else:
            joint = " into " if self.kind == "arrival" else "+"
            lengths = {f"pp{self.prompt}": self.prompt, f"tg{self.generate}": self.generate}
            name = joint.join(text for text, tokens in lengths.items() if tokens)
        return f"{name} x{self.batch}" if self.batch > 1 else name

    @property
    def label(self) -> str:
        if self.depth:
            return f"{self.name} @ d{self.depth}"
        return self.name

    @property
    def short(self) -> "Test":
        """The test with few tokens, which compiles the kernels before the first repetition."""
        prompt = min(self.prompt, _WARM_UP_TOKENS)
        generate = min(self.generate, _WARM_UP_TOKENS)
        return replace(self, prompt=prompt, generate=generate)

    @property
    def tokens(self) -> int:
        """Cache entries at the end, and one more for the last step of a prefill test.

        In a batch the first sequences decode while the last ones prefill; the bound includes that. A pass has SMALLEST
        prompt tokens or more, so a prompt takes depth / SMALLEST passes, rounded up, in each of which the first
        sequence decodes a token. The second SMALLEST is room beyond that, for rounding and passes in between.
        """
        tokens = self.depth + self.prompt + self.generate + 1
        if self.batch > 1:
            tokens += self.batch * (self.depth // SMALLEST + SMALLEST)
        return tokens


def plan(
    prompts: Sequence[int],
    generates: Sequence[int],
    depths: Sequence[int],
    *,
    combined: bool,
    batches: Sequence[int] = (1,),
    arrivals: Sequence[int] = (),
) -> list[Test]:
    """Return all tests in display order: by depth, then prefill, decode, both, arrivals.

    prompts, generates, depths: numbers of tokens; 0 leaves a test out.
    combined: also decode after each prompt.
    batches: numbers of sequences that decode together.
    arrivals: lengths of joining prompts.
    Raises UsageError if no test is left, or a decode is too short for an inter-token latency.
    """
    if 1 in generates:
        raise UsageError("-n: a decode test needs at least 2 tokens, since speed is measured between tokens")
    _check_batches(batches)
    tests: list[Test] = []
    for depth in depths:
        tests += [Test(prompt, 0, depth) for prompt in prompts if prompt]
        tests += [Test(0, generate, depth, batch) for generate in generates if generate for batch in batches]
        if combined:
            pairs = [(prompt, generate) for prompt in prompts for generate in generates]
            tests += [Test(*pair, depth) for pair in pairs if all(pair)]
        several = [batch for batch in batches if batch > 1] or [RUNNING]
        tests += [Test(prompt, BEFORE, depth, batch) for prompt in arrivals if prompt for batch in several]
    if not tests:
        raise UsageError("nothing to measure", "-p 512 -n 128 measures prefill and decode")
    return list(dict.fromkeys(tests))


def plan_speculation(workloads: Sequence[Workload], batches: Sequence[int]) -> list[Test]:
    """Return every workload at both temperatures and all batch sizes. Raises UsageError for too large a batch."""
    _check_batches(batches)
    return [
        Test(
            workload.max_prompt_tokens,
            workload.max_tokens,
            batch=batch,
            workload=workload.name,
            temperature=temperature,
        )
        for batch in batches
        for temperature in TEMPERATURES
        for workload in workloads
    ]


def _check_batches(batches: Sequence[int]) -> None:
    if not all(1 <= batch <= MAX_BATCH for batch in batches):
        raise UsageError(f"--batch must be numbers of sequences, from 1 to {MAX_BATCH}")


def parse_counts(text: str, option: str) -> list[int]:
    """Parse distinct comma-separated counts such as `0,512,2048`. Raises UsageError naming the option."""
    if not text.strip():
        raise UsageError(f"{option} is empty", "give numbers such as 128 or 0,512,2048; 0 means none")
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
        raise UsageError(f"{option} must be counts such as 128 or 0,512,2048, not {text[:60]!r}")
    counts = [int(part) for part in parts]
    if any(count > _MAX_COUNT for count in counts):
        raise UsageError(f"{option}: numbers must be at most {_MAX_COUNT:,}")
    return list(dict.fromkeys(counts))
