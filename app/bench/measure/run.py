"""One benchmark run: load models, measure with live progress, build the document.

After Ctrl-C the results so far become the document.
"""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from msgspec.structs import replace

from headrace.app.bench.measure.document import device_facts, identity, model_facts, points_of, power_notes
from headrace.app.bench.measure.hosts import hosts_account, hosts_notes
from headrace.app.bench.measure.kv_formats import check_memory, in_formats, kv_ratios
from headrace.app.bench.measure.memory_speed import MemorySpeed
from headrace.app.bench.measure.own import OwnEngine
from headrace.app.bench.measure.pair import questions
from headrace.app.bench.measure.peers import Peer, open_peers
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.profile import profile
from headrace.app.bench.measure.ratios import agreement, ratios, scaling
from headrace.app.bench.measure.records import HostsAccount, Result, RunDocument
from headrace.app.bench.measure.result import Work, result
from headrace.app.bench.measure.run_cost import run_costs
from headrace.app.bench.measure.sample import Backend
from headrace.app.bench.measure.session import Key, Session, Show
from headrace.app.bench.measure.setup import Setup, check_threads
from headrace.app.config.load_options import PACKED, HostsChoice, activations_choice, kv_choice
from headrace.app.hosts.load import load_on_hosts
from headrace.app.hosts.start import Ranks
from headrace.app.output.progress import drawn_progress
from headrace.app.predict.fit_store import remember
from headrace.app.predict.step_cost_fit import fit_step_cost
from headrace.app.verify.expectation import expectation
from headrace.app.versions import versions
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.cost.step_shape import total
from headrace.models.loading.draft import load_draft
from headrace.models.loading.load import LoadedModel, LoadOptions, load_resolved
from headrace.models.registry.background_check import BackgroundCheck
from headrace.models.registry.resolve import ResolvedModel, resolve
from headrace.runtime import ops
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.machine.bandwidth import streaming_reader
from headrace.runtime.machine.compute import measure_compute
from headrace.runtime.machine.energy import idle_watts
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.machine.peaks import store as remember_peak
from headrace.runtime.machine.sensors import sensors
from headrace.runtime.network import Network
from headrace.runtime.ops import native

_CHECK_S = 5.0  # for the checksums of a model's files, after all measurements


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run. rounds: None continues until the figures are precise (see `app.bench.measure.session`)."""

    models: Sequence[str | None]
    tests: Sequence[Test]
    rounds: int | None = None
    threads: int | None = None
    peer_threads: int | None = None
    """Threads of the peers, if different from headrace's."""
    measure_memory: bool = True
    force: bool = False
    profile: bool = False
    peers: Sequence[Peer] = field(default_factory=list)
    kv: Sequence[str] = ("f16",)
    """K/V formats as in --kv; several are compared side by side."""
    activations: str = "16"
    """Bits of prompts' activations, as in --activations."""
    draft: str | None = None
    """Draft model for the first model, on workloads."""
    hosts: HostsChoice | None = None
    """Machines that share the model."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """Loaded models and backends. families: each model in its K/V formats."""

    families: list[list[LoadedModel]]
    checks: list[BackgroundCheck]
    own: Sequence[Backend]
    peers: list[Backend]
    peer_notes: list[str]
    memory: MemorySpeed | None
    idle: float | None
    """Power of the idle machine in watts; None if unknown."""
    ranks: Ranks | None = None

    @property
    def models(self) -> list[LoadedModel]:
        return [model for family in self.families for model in family]

    @property
    def setups(self) -> list[Setup]:
        return [backend.setup for backend in (*self.own, *self.peers)]


def run(options: Options, show: Show) -> RunDocument:
    """Run the benchmark. Raises HeadraceError if a model cannot be loaded; KeyboardInterrupt before any result."""
    if options.threads is not None:
        use_threads(options.threads)
    host = machine()
    busy = _busy(host)
    with ExitStack() as stack:
        opened = _open(options, host, stack)
        measured = _measure(options, host, opened, show)
    slowed = power_notes(measured.device.power)
    measured.notes.extend([*busy, *_damage(opened.checks), *hosts_notes(measured.hosts), *slowed])
    refused = _remember_fit(host, measured, quiet=not (busy or slowed))
    if refused is not None:
        measured.notes.append(f"step-cost fit not kept for predictions: {refused}")
    return measured


def _remember_fit(host: Machine, found: RunDocument, *, quiet: bool) -> str | None:
    """Keep the run's step-cost fit for predictions, or return the reason for refusal."""
    if found.step_cost is None:
        return None
    spreads = [
        (speed.high - speed.low) / 2 / speed.mean
        for entry in found.results
        if entry.engine == "headrace" and entry.is_single_decode
        if (speed := entry.tokens_per_second).low is not None and speed.high is not None
    ]
    unsure = max(spreads, default=None)
    return remember(host, found.step_cost, unsure=unsure, created=found.created, command=found.command, quiet=quiet)


def _open(options: Options, host: Machine, stack: ExitStack) -> _Opened:
    """Load the models and open the peers; `stack` closes them."""
    loaded, ranks = _load_all(options, stack)
    families = [in_formats(model, options.kv) for model, _ in loaded]
    limit = max(test.tokens for test in options.tests)
    for family in families if not options.force else ():
        check_memory(family, limit)
    models = [model for family in families for model in family]
    reader = stack.enter_context(streaming_reader(host)) if options.measure_memory else None
    held = reader.pass_bytes if reader and host.backend != "cpu" else 0
    draft = None if options.draft is None else load_draft(_resolved(options.draft), models[0]).network
    own_engines = _own(models, options.tests, limit, held, draft)
    look = sensors(host.backend)
    for backend in own_engines:
        backend.sensors = look
        stack.callback(backend.close)
    threads = options.peer_threads or own_engines[0].setup.threads or host.usable_cores
    with drawn_progress() as progress:
        peers, notes = open_peers(options.peers, models, options.tests, threads, stack, progress)
    memory = MemorySpeed(reader) if reader else None
    checks = [check for _, check in loaded]
    opened = _Opened(families, checks, own_engines, peers, notes, memory, idle_watts(look), ranks)
    check_threads(opened.setups, options.peer_threads)
    return opened


def _measure(options: Options, host: Machine, opened: _Opened, show: Show) -> RunDocument:
    """Measure everything, with progress; after Ctrl-C return the results so far.

    Raises KeyboardInterrupt before any result.
    """
    memory = opened.memory
    models = opened.models
    backends = [*opened.own, *opened.peers]
    session = Session(backends, options.tests, rounds=options.rounds, memory=memory.read if memory else None)
    account = _Account(session, host, opened)
    interrupted = False
    rounds = 0
    try:
        for progress in session.run():
            rounds = progress.round
            show(progress, account.so_far)
    except KeyboardInterrupt:
        interrupted = True
    results = account.final()
    if not results:
        raise KeyboardInterrupt
    if memory and (peak := memory.measurement()) is not None:
        remember_peak(peak, host)
    workloads = any(test.workload for test in options.tests)
    deepest = max(test.depth for test in options.tests)
    facts = [model_facts(model) for model in models]
    engines = sorted({entry.engine for entry in results} - {"headrace"})
    # Packed K/V take more arithmetic per byte, so no step cost is fitted to them.
    packed = {setup.model for setup in opened.setups if setup.settings.get("kv_type") in PACKED}
    ceiling = _compute_ceiling(results) if options.measure_memory and not interrupted else None
    return RunDocument(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=shlex.join(["headrace", *sys.argv[1:]]),
        interrupted=interrupted,
        rounds=rounds,
        device=replace(device_facts(host, memory), measured_compute_gflop_s=ceiling),
        model=facts[0],
        models=facts,
        engines=opened.setups,
        versions=versions(),
        results=results,
        step_cost=fit_step_cost(points_of([entry for entry in results if entry.model not in packed])),
        ratios=[ratio for engine in engines for ratio in ratios(results, engine)],
        scaling=scaling(results),
        kv_ratios=[ratio for family in opened.families for ratio in kv_ratios(results, family)],
        peer_agreement=[entry for engine in engines for entry in agreement(results, engine)],
        profile=profile(models[0].network, deepest) if options.profile and not interrupted else None,
        run_costs=run_costs(models[0].network) if workloads and not interrupted else None,
        identity=identity(results, {model.name: expectation(model) for model in models} if workloads else {}),
        hosts=_hosts_account(opened, results),
        notes=[*opened.peer_notes, *session.notes],
    )


def _hosts_account(opened: _Opened, results: Sequence[Result]) -> HostsAccount | None:
    if opened.ranks is None:
        return None
    times = [step for backend in opened.own if isinstance(backend, OwnEngine) for step in backend.rank_times]
    return hosts_account(opened.ranks, opened.models[0], results, times)


def _compute_ceiling(results: Sequence[Result]) -> float:
    """Return GFLOP/s: the larger of a measurement now and the best test."""
    return max(measure_compute() / 1e9, *(entry.achieved_gflop_s or 0.0 for entry in results))


def prefill_work(model: LoadedModel) -> Work | None:
    """Return bytes and FLOPs of a prefill test. None where the model's matrices are unknown."""
    try:
        shape = shape_of_checkpoint(model.checkpoint)
    except UnsupportedModelError:
        return None
    if model.kv is not None:
        shape = shape.with_kv(model.kv)
    return lambda test: total([*shape.prefill(test.prompt - 1, test.depth), *shape.step(test.depth + test.prompt - 1)])


class _Account:
    """Result entries; during a run only changed ones are computed again."""

    def __init__(self, session: Session, host: Machine, opened: _Opened) -> None:
        self._session = session
        self._host = host
        self._memory = opened.memory
        self._idle = opened.idle
        self._works = {model.name: prefill_work(model) for model in opened.models}
        self._setups = {(setup.engine, setup.model): setup for setup in opened.setups}
        self._known: dict[Key, tuple[int, Result]] = {}

    def so_far(self) -> list[Result]:
        """Return the entries now; an entry's peak is the one after its last repetition."""
        for key, repetitions in self._session.repetitions.items():
            if repetitions and self._known.get(key, (0, None))[0] != len(repetitions):
                self._known[key] = len(repetitions), self._result(key)
        return [self._known[key][1] for key in self._session.repetitions if key in self._known]

    def final(self) -> list[Result]:
        """Return all entries against the peak of the whole run."""
        return [self._result(key) for key, repetitions in self._session.repetitions.items() if repetitions]

    def _result(self, key: Key) -> Result:
        engine, model, test = key
        nominal = self._host.nominal_bandwidth
        return result(
            test,
            self._session.repetitions[key],
            setup=self._setups[engine, model],
            peak_gb_s=self._memory.peak_gb_s if self._memory else None,
            nominal_gb_s=nominal / 1e9 if nominal else None,
            prefill_work=self._works.get(model) if engine == "headrace" else None,
            idle=self._idle,
        )


def _busy(host: Machine) -> list[str]:
    """Return a warning if other programs keep the CPU busy."""
    load = os.getloadavg()[0]
    if load < max(1.0, host.usable_cores / 2):
        return []
    return [f"CPU busy before the run: load average {load:.1f} on {host.usable_cores} cores"]


def _damage(checks: Sequence[BackgroundCheck]) -> list[str]:
    """Return problems found by a short check of the models' files, after all measurements."""
    for check in checks:
        check.start()
        check.wait(_CHECK_S)
    return [str(check.damage) for check in checks if check.damage is not None]


def _load_all(options: Options, stack: ExitStack) -> tuple[list[tuple[LoadedModel, BackgroundCheck]], Ranks | None]:
    """Return the models, and the ranks of the one on several machines; `stack` ends them."""
    if options.hosts is None:
        return [_load(name, options) for name in options.models], None
    resolved = _resolved(options.models[0])
    loaded, ranks = load_on_hosts(options.hosts, resolved, **_load_options(options, options.kv[0]))
    stack.callback(ranks.close)
    return [(loaded, BackgroundCheck(resolved))], ranks


def _load(name: str | None, options: Options) -> tuple[LoadedModel, BackgroundCheck]:
    resolved = _resolved(name)
    load_options = _load_options(options, options.kv[0] if len(options.kv) == 1 else "f16")
    with drawn_progress() as progress:
        load_options["progress"] = progress
        loaded = load_resolved(resolved, **load_options)
    return loaded, BackgroundCheck(resolved)


def _resolved(name: str | None) -> ResolvedModel:
    with drawn_progress() as progress:
        return resolve(name, progress=progress)


def _load_options(options: Options, kv: str) -> LoadOptions:
    return {
        "context": max(test.tokens for test in options.tests),
        "kv": kv_choice(kv),
        "activations": activations_choice(options.activations),
        "force": options.force,
    }


def _own(
    loaded: Sequence[LoadedModel], tests: Sequence[Test], limit: int, held: int, draft: Network | None
) -> list[OwnEngine]:
    arrays = [{id(array): array.nbytes for array in model.network.arrays} for model in loaded]
    held += sum({key: size for each in arrays for key, size in each.items()}.values())  # K/V formats share weights
    if len({model.name for model in loaded}) < len(loaded):
        raise UsageError("-m names a model twice")
    return [
        OwnEngine(
            model.name,
            model.network,
            limit=limit,
            setup=_own_setup(model),
            held=held - sum(each.values()),
            questions=questions(model, tests),
            draft=draft if model is loaded[0] else None,
        )
        for model, each in zip(loaded, arrays, strict=True)
    ]


def _own_setup(model: LoadedModel) -> Setup:
    """Describe the engine's threads and kernels for this model."""
    kernels = ops.describe()["kernels"]
    threads = native.status().threads if model.kind == "headrace" and kernels == native.name else None
    settings = {"kernels": kernels if model.kind == "headrace" else "mlx-lm's classes"}
    if model.kv is not None:
        settings["kv_type"] = model.kv.name
    return Setup("headrace", model.name, versions().get("headrace"), threads, threads, settings, threads)


def use_threads(threads: int) -> None:
    """Set the CPU threads of headrace's kernels; stock MLX operations are not affected."""
    if not native.status().available:
        raise UsageError(
            "--threads needs headrace's own CPU kernels, which are not active here",
            "`headrace doctor` shows the reason",
        )
    native.set_threads(threads)
