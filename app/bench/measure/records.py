"""Structs of the JSON document of a benchmark run; docs/bench-json.md explains the keys.

Fields are keys, in the same order. Unknown values are None. A new field has a default, since documents of older
versions lack it, and a row in docs/bench-json.md. One that a table shows has a row in `app/bench/show/columns.py`, too.

`result.py` sets the fields of a test (`Result`), `run.py` those of a run (`RunDocument`). Their parts come from
`document.py` (machine, model, identity, hosts), `memory_speed.py`, `ratios.py`, `kv_formats.py`, `profile.py` and
`run_cost.py`.

Guards: tests/app/bench/test_views.py, which compares the keys with docs/bench-json.md.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

from msgspec import UNSET, Meta, Struct, UnsetType, field

from headrace.app.bench.measure.setup import EngineSetup
from headrace.app.predict.step_cost_fit import StepCostFit
from headrace.runtime.machine.energy import TokenEnergy
from headrace.runtime.machine.hardware import PowerState
from headrace.runtime.metrics.telemetry import RankTimes

SCHEMA = "headrace-bench/1"
Rate = Annotated[float, Meta(gt=1e-12, lt=1e15)]  # so that products and ratios of two are finite


class Interval(Protocol):
    """A figure with a 95 % interval; None after a single round."""

    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


class Named(Protocol):
    """A test's name and its depth."""

    @property
    def test(self) -> str: ...
    @property
    def depth(self) -> int: ...


class Mean(Struct, frozen=True):
    mean: float
    low: float | None
    high: float | None


class Median(Struct, frozen=True):
    median: float
    low: float | None
    high: float | None


class Speed(Struct, frozen=True):
    """Tokens per second over repetitions."""

    mean: Rate
    sd: float
    median: float
    low: float | None
    high: float | None


class TimeToFirstToken(Struct, frozen=True):
    mean: float
    median: float
    low: float | None
    high: float | None


class Latencies(Struct, frozen=True):
    """Percentiles in milliseconds, where `telemetry.Percentiles` are in seconds; each None without steps."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class ArrivalEffect(Struct, frozen=True):
    """Effect of a joining prompt on the others and on itself."""

    itl_p95_before_ms: float
    itl_p95_ms: float
    itl_p95_ratio: Mean
    ttft_alone_ms: float
    of_speed_alone: Mean


class SpeculationGain(Struct, frozen=True, kw_only=True):
    """A workload with speculation against one without.

    workload, kind: its name, and copy, structure or free.
    plain_tokens_per_second: without speculation.
    ratio: of the speeds, with over without.
    proposed, accepted: draft tokens of all repetitions.
    acceptance: accepted over proposed.
    chance: accepted over those after an accepted one, or first in their step.
    sources: proposers that were used.
    same_tokens: both gave the same tokens.
    """

    workload: str
    kind: str
    temperature: float
    plain_tokens_per_second: Median
    ratio: Median
    proposed: int
    accepted: int
    acceptance: float | None
    chance: float | None
    proposed_per_step: float
    accepted_per_step: float
    tokens_per_step: float
    sources: list[str]
    same_tokens: bool


class RepetitionFigures(Struct, frozen=True, kw_only=True):
    """An entry of `repetitions`.

    began_s: seconds into the run.
    typical_tokens_per_second: of the median step, which stalls do not change.
    memory_gb_s: memory bandwidth around it.
    other_cpus: cores that other programs used meanwhile.
    own_tokens_per_second: a peer's own figure.
    plain_tokens_per_second: of a workload, without speculation.
    itl_before_ms, ttft_alone_s: of an arrival: the others before it, and the prompt alone.
    """

    began_s: float
    tokens_per_second: float
    typical_tokens_per_second: Rate
    memory_gb_s: Rate | None
    other_cpus: float | None = None
    prefill_s: float
    ttft_s: float | None
    itl_ms: list[float]
    own_tokens_per_second: float | None
    plain_tokens_per_second: float | None = None
    itl_before_ms: list[float] = []
    ttft_alone_s: float | None = None


class Result(Struct, frozen=True, kw_only=True):
    """An entry of `results`: all figures of one test.

    test, depth: name it; see `app.bench.measure.plan`.
    threads, threads_batch: of a decode step and of a prefill, as the engine reports them.
    threads_told: that the engine was told to use.
    generated_tokens: of each sequence.
    tokens_per_second: of all sequences.
    weight_bytes_per_step: read by the average step.
    kv_bytes_per_step: read and written by it, for all sequences.
    mbu: share of the measured bandwidth; mbu_paired: its mean and interval over the repetitions.
    mbu_nominal: share of the vendor's bandwidth.
    busy: other programs slowed down half of the repetitions.
    drift: relative change in speed from the first third of the repetitions to the last.
    samples: tokens per second of each repetition.
    """

    test: str
    depth: Annotated[int, Meta(ge=0, lt=2**53)]
    model: str
    engine: str
    threads: int | None = None
    threads_batch: int | None = None
    threads_told: int | None = None
    prompt_tokens: int
    generated_tokens: int
    batch: int = 1
    tokens_per_second: Speed
    tokens_per_second_each: float | None = None
    itl_ms: Latencies
    ttft_ms: TimeToFirstToken | None
    arrival: ArrivalEffect | None = None
    speculation: SpeculationGain | None = None
    weight_bytes_per_step: float | None
    kv_bytes_per_step: float | None
    achieved_bandwidth_gb_s: float | None
    mbu: float | None
    mbu_nominal: float | None
    mbu_paired: Mean | None = None
    roofline_tokens_per_second: float | None
    busy: bool = False
    arithmetic_intensity: float | None
    achieved_gflop_s: float | None
    energy_per_token: TokenEnergy | None = None
    peak_memory_bytes: int | None
    drift: float | None
    samples: list[float]
    repetitions: list[RepetitionFigures]
    notes: list[str]

    @property
    def is_decode(self) -> bool:
        """Return whether sequences decode without a prompt."""
        return bool(self.generated_tokens) and not self.prompt_tokens

    @property
    def is_single_decode(self) -> bool:
        """Return whether one sequence decodes without a prompt."""
        return self.is_decode and self.batch == 1

    @property
    def step_bytes(self) -> float | None:
        """Bytes of weights and K/V per step."""
        if self.weight_bytes_per_step is None or self.kv_bytes_per_step is None:
            return None
        return self.weight_bytes_per_step + self.kv_bytes_per_step


class Ratio(Struct, frozen=True):
    """headrace's speed over that of a peer, paired by round.

    model: in headrace.
    base: the peer; its key is `peer`.
    low, high: 95 % interval; None after a single round.
    pairs: number of rounds.
    """

    test: str
    depth: int
    model: str
    base: str = field(name="peer")
    ratio: float
    low: float | None
    high: float | None
    pairs: int


class KVRatio(Ratio, frozen=True):
    """The speed of a K/V format over that of the first. base: the model with the first; its key is `over`."""

    base: str = field(name="over")


class Scaling(Struct, frozen=True, kw_only=True):
    """A batch over one sequence, paired by round.

    speedup: ratio of the total speeds.
    step_time: ratio of the times of a step.
    """

    test: str
    depth: int
    model: str
    engine: str
    batch: int
    speedup: Mean
    step_time: Mean
    pairs: int


class Agreement(Struct, frozen=True, kw_only=True):
    """Our measurement of a peer over its own report. low, high: 95 % interval of `measured_over_own`."""

    test: str
    depth: int
    model: str
    peer: str
    own_tokens_per_second: float
    measured_over_own: float
    low: float | None
    high: float | None


class MeasuredPeak(Struct, frozen=True, kw_only=True):
    """Spread of the streaming reads of a run, in GB/s."""

    upper_quartile: float
    median: float
    p5: float
    p95: float
    passes: int
    method: str


class RememberedPeak(Struct, frozen=True):
    """The peak that other commands use. source: see `runtime.machine.peaks.Peak`."""

    gb_s: float
    measured_at: str
    source: str


class Device(Struct, frozen=True, kw_only=True):
    """The machine, its peaks, its kernels and its power state."""

    name: str
    backend: str
    architecture: str | None = None
    os: str
    memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    cores: int | None = None
    gpu_cores: int | None = None
    measured_peak_gb_s: Rate | None
    nominal_peak_gb_s: float | None
    measured_peak: MeasuredPeak | None
    remembered_peak: RememberedPeak | None = None
    kernels: dict[str, str]
    power: PowerState
    measured_compute_gflop_s: float | UnsetType | None = UNSET  # absent in quality documents

    @property
    def compute_gflop_s(self) -> float | None:
        """The compute ceiling, see `runtime.machine.compute`; None if unknown."""
        if self.measured_compute_gflop_s is UNSET:
            return None
        return self.measured_compute_gflop_s

    @property
    def kernels_name(self) -> str:
        return self.kernels.get("kernels", "?")


class ModelEntry(Struct, frozen=True, kw_only=True):
    """An entry of `models`."""

    name: str
    architecture: str | None = None
    decoder: str | None = None
    quantization: dict[str, int] | None
    sha256: str | None
    headers_sha256: str | None
    origin: str | None = None
    bytes: int | None = None
    weight_bytes_per_step: int
    kv_format: str | None = None
    activations: int | None = None
    kv_bytes_per_token: int
    context: int | None = None


class Profile(Struct, frozen=True, kw_only=True):
    """Time of one step by part.

    step_ms: in the real loop, which overlaps building and computing.
    synchronous_step_ms: built, run and read without overlap.
    parts_ms: each part alone.
    closure: sum of the parts over the synchronous step, less 1.
    overlap_ms: time saved by the real loop.
    """

    depth: int
    step_ms: float
    synchronous_step_ms: float
    parts_ms: dict[str, float]
    closure: float
    overlap_ms: float
    rounds: int


class DraftCost(Struct, frozen=True):
    """Cost of a step that verifies `guesses` draft tokens.

    cost: its time over that of a plain step.
    break_even: acceptance rate from which it pays; None: never.
    """

    guesses: int
    step_ms: float
    cost: float
    break_even: float | None


class RunCosts(Struct, frozen=True):
    """Costs of steps by the number of draft tokens."""

    depth: int
    rounds: int
    step_ms: float
    guesses: list[DraftCost]


class ExpectedIdentity(Struct, frozen=True):
    """Equality that speculation must keep, and the reason."""

    same: bool
    reason: str


class Identity(Struct, frozen=True):
    """Equality of answers with and without speculation."""

    expected: dict[str, ExpectedIdentity]
    tests: int
    same: int
    differs: list[str]
    broken: list[str]


class HostsAccount(Struct, frozen=True, kw_only=True):
    """Ranks, split and link of several machines.

    backend: of MLX's collectives.
    shares: part of the model by rank.
    ranks: names of the machines.
    latency_us, bandwidth_gb_s: the highest and the lowest of all links, measured.
    rank_times: mean times of timed steps, by rank.
    link_s_per_step, link_share: time on the link, and its part of a step; computed.
    """

    backend: str
    split: str
    shares: Sequence[float]
    ranks: Sequence[str]
    latency_us: float
    bandwidth_gb_s: float
    rank_times: list[RankTimes]
    link_s_per_step: float
    link_share: float | None


class RunDocument(Struct, frozen=True, kw_only=True):
    """The document of `headrace bench`. Table, Markdown, report and comparison are made from it.

    rounds: those begun.
    run_costs: times of passes by draft length, for workloads only; see `run_cost`.
    identity: equality of answers with and without speculation, for workloads only.
    hosts: ranks, split and link of several machines; None on one.
    notes: remarks for the reader.
    """

    schema: str = SCHEMA
    created: str
    command: str
    interrupted: bool
    rounds: int
    device: Device
    model: ModelEntry
    models: list[ModelEntry] = []
    engines: list[EngineSetup] = []
    versions: Mapping[str, str]
    results: list[Result]
    step_cost: StepCostFit | None
    ratios: list[Ratio]
    scaling: list[Scaling] = []
    kv_ratios: list[KVRatio] = []
    peer_agreement: list[Agreement]
    profile: Profile | None
    run_costs: RunCosts | None = None
    identity: Identity | None = None
    hosts: HostsAccount | None = None
    notes: list[str]

    @property
    def all_models(self) -> list[ModelEntry]:
        return self.models or [self.model]
