"""Parts of the JSON document of a benchmark run: machine, model, kernels, speculation, several machines, notes.

`run.py` joins them with the figures of `result.py`; `app.bench.quality.quality_run` uses those of machine and
model, too.

Guards: tests/app/bench/measure/test_result.py, tests/app/bench/test_speculation.py and test_views.py.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from headrace.app.bench.measure.memory_speed import MemorySpeed
from headrace.app.bench.measure.records import (
    Device,
    ExpectedIdentity,
    HostsAccount,
    Identity,
    ModelEntry,
    RememberedPeak,
    Result,
)
from headrace.app.predict.step_cost_fit import Point
from headrace.app.verify.expectation import Expectation
from headrace.runtime import ops
from headrace.runtime.machine.hardware import Machine, PowerState, power_state
from headrace.runtime.machine.peaks import cached_peak
from headrace.runtime.metrics.telemetry import RankTimes
from headrace.runtime.metrics.units import format_link, percent

if TYPE_CHECKING:
    from headrace.app.hosts.start import Ranks
    from headrace.models.loading.load import LoadedModel


def points_of(results: Sequence[Result]) -> list[Point]:
    """Return headrace's decode tests by their median step, which is robust to stalls.

    Batches are left out, since arithmetic may bound their steps.
    """
    return [
        Point(f"{entry.model} {entry.test} @ d{entry.depth}", entry.step_bytes, entry.itl_ms.p50 / 1e3)
        for entry in results
        if entry.engine == "headrace" and entry.is_single_decode
        if entry.step_bytes is not None and entry.itl_ms.p50 is not None
    ]


def nominal_gb_s(host: Machine) -> float | None:
    """Return the nominal memory bandwidth; None if unknown."""
    if host.nominal_bandwidth:
        return host.nominal_bandwidth / 1e9
    return None


def device_facts(host: Machine, memory: MemorySpeed | None) -> Device:
    """Describe the machine, its peaks, its kernels and its power state."""
    remembered = None
    if best := cached_peak(host):  # other commands use it: this run's or a higher recent one
        remembered = RememberedPeak(best.gb_s, best.measured_at, best.source)
    return Device(
        name=host.device_name,
        backend=host.backend,
        architecture=host.architecture,
        os=host.os,
        memory_bytes=host.memory_bytes,
        device_memory_bytes=host.device_memory_bytes,
        cores=host.usable_cores,
        gpu_cores=host.gpu_cores,
        measured_peak_gb_s=memory.peak_gb_s if memory else None,
        nominal_peak_gb_s=nominal_gb_s(host),
        measured_peak=memory.spread() if memory else None,
        remembered_peak=remembered,
        kernels=ops.describe(),
        power=power_state(),
    )


def identity(results: Sequence[Result], expected: Mapping[str, Expectation]) -> Identity | None:
    """Report whether speculation changed tokens; None if no test measured that.

    expected: by model. Tests with other tokens are in `differs`, those of exact models in `broken`, too.
    """
    tests = sum(entry.speculation is not None for entry in results)
    if not tests:
        return None
    differs = [entry for entry in results if entry.speculation is not None and not entry.speculation.same_tokens]
    return Identity(
        expected={model: ExpectedIdentity(each.exact, each.reason) for model, each in expected.items()},
        tests=tests,
        same=tests - len(differs),
        differs=[f"{entry.model} {entry.test}" for entry in differs],
        broken=[f"{entry.model} {entry.test}" for entry in differs if expected[entry.model].exact],
    )


def power_notes(power: PowerState) -> list[str]:
    """Return notes on causes of slowness that the system reports."""
    causes = (
        (power.on_battery, "this machine runs on battery"),
        (power.low_power_mode, "low power mode is on"),
        (power.throttled, "the system is throttled for heat"),
        (power.thermal_pressure == "moderate" and not power.throttled, "the system is warm and may be slowed down"),
    )
    return [text for is_cause, text in causes if is_cause]


def model_facts(loaded: "LoadedModel") -> ModelEntry:
    """Describe a model: origin, size, costs and hashes."""
    from headrace.app.model_info.model_report import quantization_document

    checkpoint = loaded.checkpoint
    cost = loaded.network.cost
    origin = checkpoint.origin or {}
    return ModelEntry(
        name=loaded.name,
        architecture=_text(checkpoint.config.get("model_type")),
        decoder=loaded.kind,
        quantization=quantization_document(checkpoint)["formats"],
        sha256=_text(origin.get("sha256")),
        headers_sha256=_headers_hash(loaded),
        origin=_text(origin.get("source")),
        bytes=checkpoint.nbytes,
        weight_bytes_per_step=cost.weight_bytes,
        kv_format=loaded.kv.name if loaded.kv else None,
        activations=loaded.activations,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        context=loaded.context_limit,
    )


def hosts_account(
    ranks: "Ranks", model: "LoadedModel", results: Sequence[Result], times: Sequence[Sequence[RankTimes]]
) -> HostsAccount:
    """Return ranks, split and link of a run on several machines.

    The link was measured over TCP before the model was loaded; its share of a step is computed.

    ranks: the processes that share the model.
    times: of each timed decode step, those of all ranks.
    """
    from headrace.app.hosts.split_choice import link_between
    from headrace.app.predict.hosts import link_seconds
    from headrace.models.cost.costs import shape_to_run

    assert ranks.split is not None
    measured = list(ranks.links.values())
    link = link_between(ranks.hosts, measured)
    link_s = link_seconds(shape_to_run(model.checkpoint), link, len(ranks.split.shares), ranks.split.kind)
    # The step of the first decode test: one number for the run.
    median_ms = next((entry.itl_ms.p50 for entry in results if not entry.prompt_tokens), None)
    by_rank = list(zip(*times, strict=True))
    return HostsAccount(
        backend=ranks.hosts.backend,
        split=ranks.split.kind,
        shares=ranks.split.fractions,
        ranks=ranks.hosts.names,
        latency_us=max(each.latency_s for each in measured) * 1e6,
        bandwidth_gb_s=min(each.bytes_per_second for each in measured) / 1e9,
        rank_times=[_mean_times(of_rank) for of_rank in by_rank],
        link_s_per_step=link_s,
        link_share=min(1.0, link_s * 1e3 / median_ms) if median_ms else None,
    )


def hosts_notes(account: HostsAccount | None) -> list[str]:
    """Return the account in one or two lines; nothing on one machine."""
    if account is None:
        return []
    ranks = zip(account.ranks, account.shares, strict=True)
    shares = ", ".join(f"{name} {percent(share)}" for name, share in ranks)
    link = f"link {format_link(account.latency_us, account.bandwidth_gb_s)} over TCP"
    if account.link_share is not None:
        link += f"; about {percent(account.link_share)} of a step on it, computed"
    lines = [f"{account.split} parallel ({account.backend}): {shares}; {link}"]
    by_rank = [
        f"{name} {each.compute_s * 1e3:.1f} ms computing, {each.wait_s * 1e3:.1f} waiting for ranks, "
        f"{each.collective_s * 1e3:.1f} the rest"
        for name, each in zip(account.ranks, account.rank_times, strict=False)  # no times: no step was timed
    ]
    if by_rank:
        lines.append(f"of a timed step: {'; '.join(by_rank)}")
    return lines


def _mean_times(times: Sequence[RankTimes]) -> RankTimes:
    return RankTimes(
        compute_s=mean(each.compute_s for each in times),
        wait_s=mean(each.wait_s for each in times),
        collective_s=mean(each.collective_s for each in times),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _headers_hash(loaded: "LoadedModel") -> str:
    """Hash configuration and tensor table, no weights; the hash differs between models and quantizations."""
    tensors = loaded.checkpoint.tensors
    table = {name: [info.dtype, info.shape, info.nbytes] for name, info in sorted(tensors.items())}
    return hashlib.sha256(json.dumps([loaded.checkpoint.config, table], sort_keys=True).encode()).hexdigest()
