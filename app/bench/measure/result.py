"""Figures of one test from its repetitions: an entry of `results` (docs/bench-json.md).

Bandwidth, MBU and roofline cover decode steps only; a prefill is bound by arithmetic. All are computed from shapes,
not read from a counter. `result` sets each field of `records.Result`, through one function below for each group.

Guards: tests/app/bench/measure/test_result.py; tests/app/bench/test_speculation.py and test_views.py.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.records import (
    ArrivalEffect,
    Latencies,
    Mean,
    Median,
    RepetitionFigures,
    Result,
    SpeculationGain,
    Speed,
    TimeToFirstToken,
)
from headrace.app.bench.measure.sample import Repetition, Sample, typical_speed
from headrace.app.bench.measure.setup import EngineSetup
from headrace.app.bench.measure.workloads import load_workloads
from headrace.app.bench.stats import bootstrap, geometric_ratio, sd
from headrace.runtime.machine.energy import TokenEnergy, per_token
from headrace.runtime.metrics.telemetry import Percentiles, in_milliseconds, mbu, quantile

DRIFT = 0.05  # as a fraction; larger drift is reported
Work = Callable[[Test], tuple[int, int]]
"""(bytes, FLOPs) that a test's prefill moves and computes."""


def result(
    test: Test,
    repetitions: Sequence[Repetition],
    *,
    setup: EngineSetup,
    peak_gb_s: float | None,
    nominal_gb_s: float | None,
    prefill_work: Work | None = None,
    idle: float | None = None,
) -> Result:
    """Return all figures of one test; None for absent ones (steps of a prefill, a peer's bytes).

    test: the test.
    repetitions: at least one.
    setup: of the engine that ran it.
    peak_gb_s: bandwidth of memory, measured during the run; None if unknown.
    nominal_gb_s: the vendor's; None if unknown.
    prefill_work: of a prefill; None if unknown.
    idle: power of the idle machine in watts; None if unknown.
    """
    samples = [repetition.sample for repetition in repetitions]
    speeds = [sample.tokens_per_second(test) for sample in samples]
    memory = _memory(test, repetitions, peak_gb_s, nominal_gb_s)
    intensity, gflop_s = _arithmetic(test, samples, prefill_work)
    prompt_tokens = samples[0].prompt_tokens
    if prompt_tokens is None:
        prompt_tokens = test.prompt
    return Result(
        test=test.name,
        depth=test.depth,
        model=setup.model,
        engine=setup.engine,
        threads=setup.threads,
        threads_batch=setup.threads_batch,
        threads_told=setup.threads_told,
        prompt_tokens=prompt_tokens,
        generated_tokens=test.generate,
        batch=test.batch,
        tokens_per_second=Speed(fmean(speeds), sd(speeds), median(speeds), *bootstrap(speeds, median)),
        tokens_per_second_each=fmean(speeds) / test.batch if test.kind == "decode" else None,
        itl_ms=_itl(test, repetitions),
        ttft_ms=_ttft(test, repetitions),
        arrival=_arrival(repetitions),
        speculation=_speculation(test, repetitions),
        weight_bytes_per_step=samples[0].weight_bytes,
        kv_bytes_per_step=memory.kv_bytes,
        achieved_bandwidth_gb_s=memory.achieved_gb_s,
        mbu=memory.mbu,
        mbu_nominal=memory.mbu_nominal,
        mbu_paired=memory.mbu_paired,
        roofline_tokens_per_second=memory.roofline,
        busy=busy(repetitions),
        arithmetic_intensity=intensity,
        achieved_gflop_s=gflop_s,
        energy_per_token=_energy(test, samples, idle),
        peak_memory_bytes=max((s.peak_memory_bytes for s in samples if s.peak_memory_bytes), default=None),
        drift=drift(speeds),
        samples=speeds,
        repetitions=[_repetition(test, repetition) for repetition in repetitions],
        notes=_notes(memory.mbu),
    )


def busy(repetitions: Sequence[Repetition]) -> bool:
    """Return whether other programs slowed down half of the repetitions: their MBU would be the neighbours'."""
    return 2 * sum(rep.cpu_use is not None and rep.cpu_use.contended for rep in repetitions) >= len(repetitions)


def drift(speeds: Sequence[float]) -> float | None:
    """Return the relative change in speed from the first third to the last. None for fewer than three."""
    third = len(speeds) // 3
    if not third:
        return None
    return fmean(speeds[-third:]) / fmean(speeds[:third]) - 1


def _itl(test: Test, repetitions: Sequence[Repetition]) -> Latencies:
    """Return percentiles over all steps of all repetitions."""
    if not test.generate:
        return Latencies()
    pooled = [latency for repetition in repetitions for latency in repetition.sample.latencies_s]
    return Latencies(**in_milliseconds(Percentiles.of(pooled)))


def _ttft(test: Test, repetitions: Sequence[Repetition]) -> TimeToFirstToken | None:
    values = [ttft * 1e3 for repetition in repetitions if (ttft := repetition.sample.ttft_s) is not None]
    if not test.prompt or not values:
        return None
    return TimeToFirstToken(fmean(values), median(values), *bootstrap(values, median))


def _arrival(repetitions: Sequence[Repetition]) -> ArrivalEffect | None:
    """Return the effect of a joining prompt on the others and on itself; ratios are paired by repetition."""
    arrivals = [(rep.sample, rep.sample.arrival) for rep in repetitions if rep.sample.arrival is not None]
    before = [_p95(arrival.before_s) for _, arrival in arrivals]
    meanwhile = [_p95(sample.latencies_s) for sample, _ in arrivals]
    if not arrivals:
        return None
    stretch, stretch_interval = geometric_ratio(meanwhile, before)
    share, share_interval = geometric_ratio(
        [arrival.alone_s for _, arrival in arrivals], [sample.ttft_s or sample.prefill_s for sample, _ in arrivals]
    )
    return ArrivalEffect(
        itl_p95_before_ms=fmean(before) * 1e3,
        itl_p95_ms=fmean(meanwhile) * 1e3,
        itl_p95_ratio=Mean(stretch, *stretch_interval),
        ttft_alone_ms=fmean([arrival.alone_s for _, arrival in arrivals]) * 1e3,
        of_speed_alone=Mean(share, *share_interval),
    )


def _speculation(test: Test, repetitions: Sequence[Repetition]) -> SpeculationGain | None:
    """Return one workload's figures, the ratio paired by repetition. None for other tests and for peers."""
    pairs = [repetition.sample.pair for repetition in repetitions if repetition.sample.pair is not None]
    if not pairs:
        return None
    workload = load_workloads()[test.workload]
    ratios = [pair.on.tokens_per_second / pair.off.tokens_per_second for pair in pairs]
    steps = sum(pair.on.steps for pair in pairs)
    tokens = sum(pair.on.tokens for pair in pairs)
    proposed = sum(pair.on.proposed for pair in pairs)
    accepted = sum(pair.on.accepted for pair in pairs)
    tried = sum(pair.on.tried for pair in pairs)
    return SpeculationGain(
        workload=workload.name,
        kind=workload.kind,
        temperature=test.temperature,
        plain_tokens_per_second=_spread([pair.off.tokens_per_second for pair in pairs]),
        ratio=_spread(ratios),
        proposed=proposed,
        accepted=accepted,
        acceptance=accepted / proposed if proposed else None,
        chance=accepted / tried if tried else None,
        proposed_per_step=proposed / steps,
        accepted_per_step=accepted / steps,
        tokens_per_step=tokens / steps,
        sources=sorted({source for pair in pairs for source in pair.sources}),
        same_tokens=all(pair.same for pair in pairs),
    )


def _spread(values: Sequence[float]) -> Median:
    return Median(median(values), *bootstrap(values, median))


def _p95(latencies: Sequence[float]) -> float:
    return quantile(sorted(latencies), 0.95)


class _MemoryUse(Struct, frozen=True):
    """Memory traffic of decode steps; all None for a prefill.

    kv_bytes: per step.
    achieved_gb_s: bytes of all steps over their time.
    mbu: mean of `mbu_paired`; without readings, the share of the measured peak; None if others used the CPU.
    mbu_nominal: share of the vendor's.
    mbu_paired: share of the bandwidth read around each repetition, or of the peak for one that exceeds its reading.
    roofline: tokens per second at the measured peak.
    """

    kv_bytes: float | None = None
    achieved_gb_s: float | None = None
    mbu: float | None = None
    mbu_nominal: float | None = None
    mbu_paired: Mean | None = None
    roofline: float | None = None


def _memory(test: Test, repetitions: Sequence[Repetition], peak: float | None, nominal: float | None) -> _MemoryUse:
    samples = [repetition.sample for repetition in repetitions]
    first = samples[0]  # its bytes stand for all: steps of one test read the same, those of a workload nearly so
    if not test.generate or first.weight_bytes is None or first.kv_bytes is None:
        return _MemoryUse()
    per_step = first.weight_bytes + first.kv_bytes
    steps = sum(len(sample.latencies_s) for sample in samples)
    seconds = sum(sample.decode_s for sample in samples)
    achieved = per_step * steps / seconds / 1e9
    achieved_each = [per_step * len(sample.latencies_s) / sample.decode_s / 1e9 for sample in samples]
    shares = [
        mbu(each, repetition.memory_gb_s, peak).share
        for each, repetition in zip(achieved_each, repetitions, strict=True)
        if repetition.memory_gb_s
    ]
    paired = [share for share in shares if share is not None]
    slowed = busy(repetitions)
    share = mbu(achieved, None, peak, busy=slowed).share
    mbu_paired: Mean | None = None
    if paired and not slowed:
        share = fmean(paired)
        mbu_paired = Mean(share, *bootstrap(paired, fmean))
    roofline = None
    if peak:
        roofline = _tokens_per_step(samples) * test.batch * peak * 1e9 / per_step
    return _MemoryUse(first.kv_bytes, achieved, share, mbu(achieved, None, nominal).share, mbu_paired, roofline)


def _energy(test: Test, samples: Sequence[Sample], idle: float | None) -> TokenEnergy | None:
    """Return the energy per token over the repetitions that were long enough to measure it."""
    measured = [sample for sample in samples if sample.energy is not None]
    uses = [sample.energy for sample in measured if sample.energy is not None]
    return per_token(uses, sum(sample.tokens(test) for sample in measured), idle)


def _tokens_per_step(samples: Sequence[Sample]) -> float:
    """Return tokens per step of a sequence; more than one if draft tokens were accepted."""
    speculated = [sample.pair.on for sample in samples if sample.pair is not None]
    if not speculated:
        return 1.0
    return sum(answered.tokens for answered in speculated) / sum(answered.steps for answered in speculated)


def _arithmetic(test: Test, samples: Sequence[Sample], work: Work | None) -> tuple[float | None, float | None]:
    """Return FLOP per byte and GFLOP/s, of the prefill for a prefill test and of the steps otherwise."""
    nbytes: float
    flops: float | None
    if test.kind == "prefill" and work is not None:
        nbytes, flops = work(test)
        seconds = fmean([sample.ttft_s or sample.prefill_s for sample in samples])
    elif test.generate and samples[0].flops is not None:
        nbytes = (samples[0].weight_bytes or 0) + (samples[0].kv_bytes or 0)
        flops = samples[0].flops
        seconds = sum(sample.decode_s for sample in samples) / sum(len(sample.latencies_s) for sample in samples)
    else:
        return None, None
    intensity = flops / nbytes if nbytes else None
    return intensity, flops / seconds / 1e9 if seconds else None


def _repetition(test: Test, repetition: Repetition) -> RepetitionFigures:
    sample = repetition.sample
    figures = RepetitionFigures(
        began_s=round(repetition.began_s, 3),
        tokens_per_second=sample.tokens_per_second(test),
        typical_tokens_per_second=typical_speed(test, sample),
        memory_gb_s=repetition.memory_gb_s,
        other_cpus=repetition.cpu_use.other_cpus if repetition.cpu_use else None,
        prefill_s=sample.prefill_s,
        ttft_s=sample.ttft_s,
        itl_ms=_rounded_ms(sample.latencies_s) if test.generate else [],
        own_tokens_per_second=sample.own_tokens_per_second,
    )
    if sample.pair is not None:
        return replace(figures, plain_tokens_per_second=sample.pair.off.tokens_per_second)
    if (arrival := sample.arrival) is not None:
        return replace(figures, itl_before_ms=_rounded_ms(arrival.before_s), ttft_alone_s=arrival.alone_s)
    return figures


def _rounded_ms(seconds: Sequence[float]) -> list[float]:
    return [round(value * 1e3, 4) for value in seconds]


def _notes(share: float | None) -> list[str]:
    notes = []
    if share is not None and share > 1:
        notes.append(
            "MBU above 1: part of the bytes came from a CPU cache, or memory was slower while the peak was measured"
        )
    return notes
