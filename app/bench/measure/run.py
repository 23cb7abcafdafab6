"""One benchmark run: open engines, measure with live progress, build the document.

`run` reads as open, measure, annotate. `session.py` decides the order of measurements, `result.py` computes the
figures of a test, and `document.py` those of machine and models. After Ctrl-C the results so far become the document.

Guards: tests/app/cli/test_bench.py and tests/app/bench/test_speculation.py.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from msgspec import Struct
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
from headrace.app.bench.measure.kv_formats import kv_ratios
from headrace.app.bench.measure.open_engines import MeasureOptions, OpenedEngines, open_engines, use_threads
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.profile import profile
from headrace.app.bench.measure.ratios import agreement, ratios, scaling
from headrace.app.bench.measure.records import HostsAccount, Profile, Result, RunCosts, RunDocument
from headrace.app.bench.measure.result import Work, result
from headrace.app.bench.measure.run_cost import run_costs
from headrace.app.bench.measure.session import BenchProgress, BenchSession, Key, Results, Show
from headrace.app.config.load_options import PACKED
from headrace.app.output.document import typed_command
from headrace.app.predict.fit_store import store_fit
from headrace.app.predict.step_cost_fit import fit_step_cost
from headrace.app.verify.expectation import expectation
from headrace.app.versions import versions
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.cost.step_shape import total
from headrace.models.loading.load import LoadedModel
from headrace.models.registry.background_check import BackgroundCheck
from headrace.runtime.errors import UnsupportedModelError
from headrace.runtime.machine.compute import measure_compute
from headrace.runtime.machine.hardware import Machine, machine
from headrace.runtime.machine.peaks import store as remember_peak
from headrace.runtime.network import Network

_CHECK_S = 5.0  # for the checksums of a model's files, after all measurements


def run(options: MeasureOptions, show: Show) -> RunDocument:
    """Run the benchmark. Raises HeadraceError if a model cannot be loaded; KeyboardInterrupt before any result."""
    if options.threads is not None:
        use_threads(options.threads)
    host = machine()
    busy = _busy(host)
    with ExitStack() as stack:
        opened = open_engines(options, host, stack)
        measured = _measure(options, host, opened, show)
    slowed = power_notes(measured.device.power)
    measured.notes.extend([*busy, *_damage(opened.checks), *hosts_notes(measured.hosts), *slowed])
    refused = _remember_fit(host, measured, quiet=not (busy or slowed))
    if refused is not None:
        measured.notes.append(f"step-cost fit not kept for predictions: {refused}")
    return measured


def _measure(options: MeasureOptions, host: Machine, opened: OpenedEngines, show: Show) -> RunDocument:
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


def _run_rounds(session: BenchSession, account: "_Account", opened: OpenedEngines, show: Show) -> tuple[int, bool]:
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


def _show_first_pass(show: Show, progress: BenchProgress, so_far: Callable[[], Results], seconds: float) -> None:
    """Show that the first pass of a measurement takes long."""
    doing = f"{progress.doing}: {first_pass_text(seconds)}"
    show(replace(progress, doing=doing), so_far)


class _AfterRounds(Struct, frozen=True):
    """Measurements after the rounds, each None if it was not asked for, or the run was interrupted.

    compute_gflop_s: the machine's arithmetic at its best.
    profile: time of a step by part.
    run_costs: of passes with draft tokens.
    """

    compute_gflop_s: float | None = None
    profile: Profile | None = None
    run_costs: RunCosts | None = None


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


def _hosts_account(opened: OpenedEngines, results: Sequence[Result]) -> HostsAccount | None:
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

    def __init__(self, session: BenchSession, host: Machine, opened: OpenedEngines) -> None:
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
