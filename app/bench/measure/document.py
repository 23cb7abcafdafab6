"""The JSON document of a benchmark run; its schema is docs/bench-json.md.

Table, Markdown, CSV, report, comparison and history are all made from this document. Unknown values are null.
"""

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headrace.app.bench.measure.hosts import hosts_notes
from headrace.app.bench.measure.memory_speed import MemorySpeed
from headrace.app.bench.measure.ratios import agreement, ratios, scaling
from headrace.app.bench.measure.records import (
    Device,
    ExpectedIdentity,
    HostsAccount,
    Identity,
    KVRatio,
    Model,
    Profile,
    RememberedPeak,
    Result,
    RunCosts,
    RunDocument,
)
from headrace.app.bench.measure.setup import Setup
from headrace.app.config.load_options import PACKED
from headrace.app.predict.step_cost_fit import Point, fit_step_cost
from headrace.app.versions import versions
from headrace.runtime import ops
from headrace.runtime.machine.hardware import Machine, PowerState, power_state
from headrace.runtime.machine.peaks import cached_peak

if TYPE_CHECKING:
    from headrace.models.loading.load import LoadedModel

SCHEMA = "headrace-bench/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished or interrupted run. rounds: rounds begun. notes: remarks for the reader."""

    host: Machine
    memory: MemorySpeed | None
    compute_gflop_s: float | None
    """The compute ceiling, see `runtime.machine.compute`."""
    models: Sequence[Model]
    setups: Sequence[Setup]
    notes: Sequence[str]
    results: Sequence[Result]
    rounds: int
    interrupted: bool
    profile: Profile | None
    kv_ratios: Sequence[KVRatio]
    run_costs: RunCosts | None
    """Pass times by draft length, for workloads only; see `run_cost`."""
    hosts: HostsAccount | None
    """Ranks, split and link, see `hosts`; None on one machine."""
    identity: Identity | None
    """Equality of answers with and without speculation, for workloads only; see `identity`."""


def document(run: Run) -> RunDocument:
    """Return the document of a run."""
    results = run.results
    engines = sorted({entry.engine for entry in results} - {"headrace"})
    # Packed K/V take more arithmetic per byte, so no step cost is fitted to them.
    packed = {setup.model for setup in run.setups if setup.settings.get("kv_type") in PACKED}
    step_cost = fit_step_cost(points_of([entry for entry in results if entry.model not in packed]))
    device = replace(device_facts(run.host, run.memory), measured_compute_gflop_s=run.compute_gflop_s)
    return RunDocument(
        schema=SCHEMA,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=shlex.join(["headrace", *sys.argv[1:]]),
        interrupted=run.interrupted,
        rounds=run.rounds,
        device=device,
        model=run.models[0],
        models=list(run.models),
        engines=list(run.setups),
        versions=versions(),
        results=list(results),
        step_cost=step_cost,
        ratios=[ratio for engine in engines for ratio in ratios(results, engine)],
        scaling=scaling(results),
        kv_ratios=list(run.kv_ratios),
        peer_agreement=[entry for engine in engines for entry in agreement(results, engine)],
        profile=run.profile,
        run_costs=run.run_costs,
        identity=run.identity,
        hosts=run.hosts,
        notes=[*run.notes, *hosts_notes(run.hosts), *power_notes(device.power)],
    )


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


def device_facts(host: Machine, memory: MemorySpeed | None) -> Device:
    """Describe the machine, its peaks, its kernels and its power state."""
    nominal = host.nominal_bandwidth
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
        nominal_peak_gb_s=nominal / 1e9 if nominal else None,
        measured_peak=memory.spread() if memory else None,
        remembered_peak=_remembered(host),
        kernels=ops.describe(),
        power=power_state(),
    )


def _remembered(host: Machine) -> RememberedPeak | None:
    """Return the peak that other commands use: this run's or a higher recent one."""
    peak = cached_peak(host)
    return RememberedPeak(peak.gb_s, peak.measured_at, peak.source) if peak else None


def identity(results: Sequence[Result], expected: Mapping[str, tuple[bool, str]]) -> Identity | None:
    """Report whether speculation changed tokens, if measured. expected: by model, (must be equal, reason).

    broken: a must-be-equal answer differed.
    """
    tests = sum(entry.speculation is not None for entry in results)
    if not tests:
        return None
    differs = [entry for entry in results if entry.speculation is not None and not entry.speculation.same_tokens]
    return Identity(
        expected={model: ExpectedIdentity(same, reason) for model, (same, reason) in expected.items()},
        tests=tests,
        same=tests - len(differs),
        differs=[f"{entry.model} {entry.test}" for entry in differs],
        broken=[f"{entry.model} {entry.test}" for entry in differs if expected[entry.model][0]],
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


def model_facts(loaded: "LoadedModel") -> Model:
    """Describe a model: origin, size, costs and hashes."""
    from headrace.app.model_info.report import quantization_document

    checkpoint = loaded.checkpoint
    cost = loaded.network.cost
    origin = checkpoint.origin or {}
    return Model(
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


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _headers_hash(loaded: "LoadedModel") -> str:
    """Hash configuration and tensor table; the hash differs between models and quantizations."""
    tensors = loaded.checkpoint.tensors
    table = {name: [info.dtype, info.shape, info.nbytes] for name, info in sorted(tensors.items())}
    return hashlib.sha256(json.dumps([loaded.checkpoint.config, table], sort_keys=True).encode()).hexdigest()
