"""One benchmark run: load models, measure with live progress, build the document.

`run` reads as open, measure, annotate. `session.py` decides the order of measurements, `own.py` and `peers.py` measure,
`result.py` computes the figures. After Ctrl-C the results so far become the document.

Guards: tests/app/cli/test_bench.py and tests/app/bench/test_speculation.py.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.app.answer.first_pass import first_pass_text
from headrace.app.bench.measure.document import (
    device_facts,
    hosts_account,
    hosts_notes,
    identity,
    model_facts,
    nominal_gb_s,
    points_of,
    power_notes,
)
from headrace.app.bench.measure.kv_formats import check_memory, in_formats, kv_ratios
from headrace.app.bench.measure.memory_speed import MemorySpeed
from headrace.app.bench.measure.own import OwnEngine
from headrace.app.bench.measure.pair import questions
from headrace.app.bench.measure.peers import Peer, open_peers
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.profile import profile, profiled_decoder
from headrace.app.bench.measure.ratios import agreement, ratios, scaling
from headrace.app.bench.measure.records import HostsAccount, Profile, Result, RunCosts, RunDocument
from headrace.app.bench.measure.result import Work, result
from headrace.app.bench.measure.run_cost import run_costs
from headrace.app.bench.measure.sample import Backend
from headrace.app.bench.measure.session import BenchProgress, BenchSession, Key, Results, Show
from headrace.app.bench.measure.setup import EngineSetup, check_threads
from headrace.app.config.load_options import PACKED, HostsChoice, ModelSpec
from headrace.app.hosts.load import load_on_hosts, load_options
from headrace.app.hosts.start import Ranks
from headrace.app.output.document import typed_command
from headrace.app.output.progress import drawn_progress
from headrace.app.predict.fit_store import store_fit
from headrace.app.predict.step_cost_fit import fit_step_cost
from headrace.app.verify.expectation import expectation
from headrace.app.versions import versions
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.cost.step_shape import total
from headrace.models.loading.draft import load_draft
from headrace.models.loading.load import LoadedModel, load_resolved
from headrace.models.registry.background_check import BackgroundCheck
from headrace.models.registry.resolve import resolve
from headrace.runtime import ops
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.machine.bandwidth import streaming_reader
from headrace.runtime.machine.compute import measure_compute
from headrace.runtime.machine.energy import idle_watts
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.machine.peaks import store as remember_peak
from headrace.runtime.machine.sensors import Sensors, sensors
from headrace.runtime.network import Network
from headrace.runtime.ops import native

_CHECK_S = 5.0  # for the checksums of a model's files, after all measurements


class MeasureOptions(Struct, frozen=True):
    """Options of a run.

    models: names; None is the default model.
    tests: to measure with each model and peer.
    rounds: None continues until the figures are precise (see `app.bench.measure.session`).
    threads: of headrace's kernels; None is headrace's choice.
    peer_threads: of the peers, if different from headrace's.
    measure_memory: read memory between tests, for MBU and roofline.
    force: load a model that does not fit into memory.
    profile: time the parts of a step.
    peers: other programs to measure in the same rounds.
    kv: K/V formats as in --kv; several are compared side by side.
    activations: bits of prompts' activations, as in --activations.
    draft: draft model for the first model, on workloads.
    hosts: machines that share the model; None: this one alone.
    """

    models: Sequence[str | None]
    tests: Sequence[Test]
    rounds: int | None = None
    threads: int | None = None
    peer_threads: int | None = None
    measure_memory: bool = True
    force: bool = False
    profile: bool = False
    peers: Sequence[Peer] = field(default_factory=list)
    kv: Sequence[str] = ("f16",)
    activations: str = "16"
    draft: str | None = None
    hosts: HostsChoice | None = None

    @property
    def has_workloads(self) -> bool:
        """True if a test measures the gain of speculative decoding on a text."""
        return any(test.workload for test in self.tests)


class _Opened(Struct, frozen=True):
    """Loaded models and backends.

    families: each model in its K/V formats.
    checks: of the models' files, not started yet.
    own_engines: headrace, a backend for each model.
    peers: other programs.
    peer_notes: reasons for peers that were left out.
    memory: reads memory between tests; None: it is not measured.
    idle: power of the idle machine in watts; None if unknown.
    ranks: processes on the machines that share a model; None on one machine.
    """

    families: list[list[LoadedModel]]
    checks: list[BackgroundCheck]
    own_engines: list[OwnEngine]
    peers: list[Backend]
    peer_notes: list[str]
    memory: MemorySpeed | None
    idle: float | None
    ranks: Ranks | None = None

    @property
    def models(self) -> list[LoadedModel]:
        return [model for family in self.families for model in family]

    @property
    def backends(self) -> list[Backend]:
        return [*self.own_engines, *self.peers]

    @property
    def setups(self) -> list[EngineSetup]:
        return [backend.setup for backend in self.backends]


class _AfterRounds(Struct, frozen=True):
    """Measurements after the rounds, each None if it was not asked for, or the run was interrupted.

    compute_gflop_s: the machine's arithmetic at its best.
    profile: time of a step by part.
    run_costs: of passes with draft tokens.
    """

    compute_gflop_s: float | None = None
    profile: Profile | None = None
    run_costs: RunCosts | None = None


def run(options: MeasureOptions, show: Show) -> RunDocument:
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


def _show_first_pass(show: Show, progress: BenchProgress, so_far: Callable[[], Results], seconds: float) -> None:
    """Show that the first pass of a measurement takes long."""
    doing = f"{progress.doing}: {first_pass_text(seconds)}"
    show(replace(progress, doing=doing), so_far)


def _remember_fit(host: Machine, document: RunDocument, *, quiet: bool) -> str | None:
    """Keep the run's step-cost fit for predictions, or return the reason for refusal."""
    if document.step_cost is None:
        return None
    spreads = []  # half the width of each interval, as a part of the speed
    for entry in document.results:
        speed = entry.tokens_per_second
        if entry.engine != "headrace" or not entry.is_single_decode or speed.low is None or speed.high is None:
            continue
        spreads.append((speed.high - speed.low) / 2 / speed.mean)
    return store_fit(
        host,
        document.step_cost,
        max_half_width=max(spreads, default=None),
        created=document.created,
        command=document.command,
        quiet=quiet,
    )


def _open(options: MeasureOptions, host: Machine, stack: ExitStack) -> _Opened:
    """Load the models and open the peers; `stack` closes them."""
    # The models, in each K/V format
    loaded, ranks = _load_all(options, stack)
    families = [in_formats(model, options.kv) for model, _ in loaded]
    limit = max(test.tokens for test in options.tests)
    if not options.force:
        for family in families:
            check_memory(family, limit)
    models = [model for family in families for model in family]
    if options.profile:
        profiled_decoder(models[0].network)  # refused before anything is measured

    # The reader of memory bandwidth between measurements, and our engines
    memory = None
    reader_bytes = 0  # that MLX holds for the reader
    if options.measure_memory:
        reader = stack.enter_context(streaming_reader(host))
        memory = MemorySpeed(reader)
        if host.backend != "cpu":
            reader_bytes = reader.pass_bytes
    draft = None
    if options.draft is not None:
        with drawn_progress() as progress:
            draft = load_draft(resolve(options.draft, progress=progress), models[0], progress).network
    read_sensors = sensors(host.backend)
    own_engines = _own_engines(models, options.tests, limit, reader_bytes, draft, read_sensors)
    for engine in own_engines:
        stack.callback(engine.close)

    # Peers get as many threads as our engines, unless others were asked for.
    threads = options.peer_threads or own_engines[0].setup.threads or host.usable_cores
    with drawn_progress() as progress:
        peers, notes = open_peers(options.peers, models, options.tests, threads, stack, progress)
    checks = [check for _, check in loaded]
    opened = _Opened(
        families=families,
        checks=checks,
        own_engines=own_engines,
        peers=peers,
        peer_notes=notes,
        memory=memory,
        idle=idle_watts(read_sensors),
        ranks=ranks,
    )
    check_threads(opened.setups, options.peer_threads)
    return opened


def _measure(options: MeasureOptions, host: Machine, opened: _Opened, show: Show) -> RunDocument:
    """Measure everything, with progress; after Ctrl-C return the results so far.

    host: this machine.
    show: draws the progress.

    Raises KeyboardInterrupt before any result.
    """
    memory = opened.memory
    models = opened.models
    read_memory = memory.read if memory else None
    session = BenchSession(opened.backends, options.tests, rounds=options.rounds, memory=read_memory)
    account = _Account(session, host, opened)
    rounds, interrupted = _run_rounds(session, account, opened, show)
    results = account.final()
    if not results:
        raise KeyboardInterrupt

    peak = memory.measurement() if memory else None
    if peak is not None:
        remember_peak(peak, host)  # before `device_facts`, which reads the remembered peak
    facts = [model_facts(model) for model in models]
    peer_names = sorted({entry.engine for entry in results} - {"headrace"})
    # Packed K/V take more arithmetic per byte, so no step cost is fitted to them.
    packed = {setup.model for setup in opened.setups if setup.settings.get("kv_type") in PACKED}
    fitted = [entry for entry in results if entry.model not in packed]
    expected = {}
    if options.has_workloads:
        expected = {model.name: expectation(model) for model in models}

    after = _AfterRounds()
    if not interrupted:
        after = _measure_after_rounds(options, models[0].network, results)
    return RunDocument(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=typed_command(),
        interrupted=interrupted,
        rounds=rounds,
        device=replace(device_facts(host, memory), measured_compute_gflop_s=after.compute_gflop_s),
        model=facts[0],
        models=facts,
        engines=opened.setups,
        versions=versions(),
        results=results,
        step_cost=fit_step_cost(points_of(fitted)),
        ratios=[ratio for peer in peer_names for ratio in ratios(results, peer)],
        scaling=scaling(results),
        kv_ratios=[ratio for family in opened.families for ratio in kv_ratios(results, family)],
        peer_agreement=[entry for peer in peer_names for entry in agreement(results, peer)],
        profile=after.profile,
        run_costs=after.run_costs,
        identity=identity(results, expected),
        hosts=_hosts_account(opened, results),
        notes=[*opened.peer_notes, *session.notes],
    )


def _run_rounds(session: BenchSession, account: "_Account", opened: _Opened, show: Show) -> tuple[int, bool]:
    """Measure until the session ends or Ctrl-C; return the number of rounds, and True for Ctrl-C."""
    rounds = 0
    try:
        for progress in session.run():
            rounds = progress.round
            show(progress, account.so_far)
            for engine in opened.own_engines:
                engine.first_pass_report = partial(_show_first_pass, show, progress, account.so_far)
    except KeyboardInterrupt:
        return rounds, True
    return rounds, False


def _measure_after_rounds(options: MeasureOptions, network: Network, results: Sequence[Result]) -> _AfterRounds:
    """Measure what is asked for beside the tests, of the first model's network."""
    ceiling = None
    profiled = None
    costs = None
    if options.measure_memory:
        ceiling = _compute_ceiling(results)
    if options.profile:
        profiled = profile(network, max(test.depth for test in options.tests))
    if options.has_workloads:
        costs = run_costs(network)
    return _AfterRounds(ceiling, profiled, costs)


def _hosts_account(opened: _Opened, results: Sequence[Result]) -> HostsAccount | None:
    if opened.ranks is None:
        return None
    times = [step for engine in opened.own_engines for step in engine.rank_times]
    return hosts_account(opened.ranks, opened.models[0], results, times)


def _compute_ceiling(results: Sequence[Result]) -> float:
    """Return GFLOP/s: the larger of a measurement now and the best test."""
    return max(measure_compute() / 1e9, *(entry.achieved_gflop_s or 0.0 for entry in results))


def prefill_work(model: LoadedModel) -> Work | None:
    """Return a function for bytes and FLOPs of a prefill test. None where the model's matrices are unknown."""
    try:
        shape = shape_of_checkpoint(model.checkpoint)
    except UnsupportedModelError:
        return None
    if model.kv is not None:
        shape = shape.with_kv(model.kv)

    def work(test: Test) -> tuple[int, int]:
        num_prefilled = test.prompt - 1  # a decode step feeds the last token
        return total([*shape.prefill(num_prefilled, test.depth), *shape.step(test.depth + num_prefilled)])

    return work


class _Account:
    """Result entries; during a run only changed ones are computed again."""

    def __init__(self, session: BenchSession, host: Machine, opened: _Opened) -> None:
        self._session = session
        self._host = host
        self._memory = opened.memory
        self._idle = opened.idle
        self._works = {model.name: prefill_work(model) for model in opened.models}
        self._setups = {(setup.engine, setup.model): setup for setup in opened.setups}
        self._entries: dict[Key, Result] = {}  # as of the last `so_far`
        self._counts: dict[Key, int] = {}  # repetitions in each of them

    def so_far(self) -> list[Result]:
        """Return the entries now; an entry's peak is the one after its last repetition."""
        for key, repetitions in self._session.repetitions.items():
            count = len(repetitions)
            if count != self._counts.get(key, 0):
                self._counts[key] = count
                self._entries[key] = self._result(key)
        return [self._entries[key] for key in self._session.repetitions if key in self._entries]

    def final(self) -> list[Result]:
        """Return all entries against the peak of the whole run."""
        return [self._result(key) for key, repetitions in self._session.repetitions.items() if repetitions]

    def _result(self, key: Key) -> Result:
        engine, model, test = key
        work = None
        if engine == "headrace":
            work = self._works.get(model)
        return result(
            test,
            self._session.repetitions[key],
            setup=self._setups[engine, model],
            peak_gb_s=self._memory.peak_gb_s if self._memory else None,
            nominal_gb_s=nominal_gb_s(self._host),
            prefill_work=work,
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
        check.start(idle=False)
        check.wait(_CHECK_S)
    return [str(check.damage) for check in checks if check.damage is not None]


def _load_all(
    options: MeasureOptions, stack: ExitStack
) -> tuple[list[tuple[LoadedModel, BackgroundCheck]], Ranks | None]:
    """Return the models, and the ranks of the one on several machines; `stack` ends them."""
    spec = load_spec(options)
    models = []
    ranks = None
    for name in options.models:
        with drawn_progress() as progress:
            resolved = resolve(name, progress=progress)
        with drawn_progress() as progress:
            if options.hosts is None:
                loaded = load_resolved(resolved, **load_options(spec, progress))
            else:  # `bench` refuses several models then
                loaded, ranks = load_on_hosts(options.hosts, resolved, **load_options(spec, progress))
                stack.callback(ranks.close)
        models.append((loaded, BackgroundCheck(resolved)))
    return models, ranks


def load_spec(options: MeasureOptions) -> ModelSpec:
    """Return the way to load each model."""
    kv = "f16"  # if there are several formats: `in_formats` makes them of the loaded model
    if len(options.kv) == 1:
        kv = options.kv[0]
    context = max(test.tokens for test in options.tests)
    return ModelSpec(context=context, kv=kv, force=options.force, activations=options.activations)


def _own_engines(
    models: Sequence[LoadedModel],
    tests: Sequence[Test],
    limit: int,
    reader_bytes: int,
    draft: Network | None,
    read_sensors: Sensors,
) -> list[OwnEngine]:
    """Return a backend for each model.

    limit: largest number of tokens in any test.
    reader_bytes: bytes that MLX holds for reading memory.
    draft: draft model of the first model.
    read_sensors: of the machine, for energy.
    """
    if len({model.name for model in models}) < len(models):
        raise UsageError("-m names a model twice")
    # Bytes by array: K/V formats of a model share its weights, which count once.
    arrays = [{id(array): array.nbytes for array in model.network.arrays} for model in models]
    all_arrays: dict[int, int] = {}
    for model_arrays in arrays:
        all_arrays.update(model_arrays)
    allocated = reader_bytes + sum(all_arrays.values())
    return [
        OwnEngine(
            model.name,
            model.network,
            limit=limit,
            setup=_own_setup(model),
            other_bytes=allocated - sum(model_arrays.values()),
            questions=questions(model, tests),
            draft=draft if model is models[0] else None,
            sensors=read_sensors,
        )
        for model, model_arrays in zip(models, arrays, strict=True)
    ]


def _own_setup(model: LoadedModel) -> EngineSetup:
    """Describe the engine's threads and kernels for this model."""
    kernels = "mlx-lm's classes"
    threads = None
    if model.kind == "headrace":
        kernels = ops.describe()["kernels"]
        if kernels == native.name:
            threads = native.status().threads
    settings = {"kernels": kernels}
    if model.kv is not None:
        settings["kv_type"] = model.kv.name
    return EngineSetup(
        engine="headrace",
        model=model.name,
        version=versions().get("headrace"),
        threads=threads,
        threads_batch=threads,
        settings=settings,
        threads_told=threads,
    )


def use_threads(threads: int) -> None:
    """Set the CPU threads of headrace's kernels; stock MLX operations are not affected."""
    if not native.status().available:
        raise UsageError(
            "--threads needs headrace's own CPU kernels, which are not active here",
            "`headrace doctor` shows the reason",
        )
    native.set_threads(threads)
