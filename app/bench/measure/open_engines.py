"""Models, engines and peers of a benchmark run: loaded, opened, and refused where they cannot be compared.

`open_engines` makes everything that a run measures. An `ExitStack` of the caller closes it.

Guards: tests/app/cli/test_bench.py; tests/app/hosts/test_start.py for several machines.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from msgspec import Struct, field

from headrace.app.bench.measure.kv_formats import check_memory, in_formats
from headrace.app.bench.measure.memory_speed import MemorySpeed
from headrace.app.bench.measure.own import OwnEngine
from headrace.app.bench.measure.pair import questions
from headrace.app.bench.measure.peers import Peer, open_peers
from headrace.app.bench.measure.plan import Test
from headrace.app.bench.measure.profile import profiled_decoder
from headrace.app.bench.measure.sample import Backend
from headrace.app.bench.measure.setup import EngineSetup, check_threads
from headrace.app.config.load_options import HostsChoice, ModelSpec
from headrace.app.hosts.load import load_on_hosts, load_options
from headrace.app.hosts.start import Ranks
from headrace.app.output.progress import drawn_progress
from headrace.app.versions import versions
from headrace.models.loading.draft import load_draft
from headrace.models.loading.load import LoadedModel, load_resolved
from headrace.models.registry.background_check import BackgroundCheck
from headrace.models.registry.resolve import resolve
from headrace.runtime import ops
from headrace.runtime.errors import UsageError
from headrace.runtime.machine.bandwidth import streaming_reader
from headrace.runtime.machine.energy import idle_watts
from headrace.runtime.machine.hardware import Machine
from headrace.runtime.machine.sensors import Sensors, sensors
from headrace.runtime.network import Network
from headrace.runtime.ops import native


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


class OpenedEngines(Struct, frozen=True):
    """Loaded models and backends.

    families: each model in its K/V formats.
    checks: of the models' files, not started yet.
    own_engines: headrace, a backend for each model.
    peers: other programs.
    peer_notes: a line for each peer: its version and weights, or the reason why it is left out.
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


def open_engines(options: MeasureOptions, host: Machine, stack: ExitStack) -> OpenedEngines:
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
    opened = OpenedEngines(
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
