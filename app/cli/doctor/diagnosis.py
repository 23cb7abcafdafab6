"""Facts and findings of `headrace doctor`, on this machine and on the user's files.

`gather` never raises: a failing part (MLX does not load, say) becomes a finding. `findings` is a pure function of the
report. A new fact is a field of `DoctorReport`, set in `gather`; a new problem is a `Finding` of one of the functions
below `findings`. `command.py` prints both.

Guard: tests/app/cli/test_doctor.py.
"""

import os
import platform
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from operator import ne
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, field
from msgspec.structs import astuple

from headrace.app.versions import own_source, shadowed, versions
from headrace.runtime.config import environment, paths
from headrace.runtime.errors import CheckpointError, HeadraceError
from headrace.runtime.machine import address_space, hardware, memory
from headrace.runtime.machine.chips import Chip
from headrace.runtime.machine.hardware import Machine, PowerState
from headrace.runtime.machine.memory import MemoryBudget
from headrace.runtime.machine.peaks import Peak
from headrace.runtime.machine.sensors import sensors
from headrace.runtime.metrics.units import format_bytes, format_rate

if TYPE_CHECKING:
    from headrace.models.registry.store import StoredModel


PACKAGES = ("headrace", "mlx", "mlx-lm", "tokenizers", "gguf", "huggingface_hub", "msgspec", "textual")
_LITTLE_MEMORY = 1 << 30  # bytes: less than a 1 B model at 4 bits with its cache
_LITTLE_DISK = 1 << 30  # bytes: less than most models take
_MUCH_SWAP = 1 << 30  # bytes, which weights may be among


class Finding(Struct, frozen=True):
    """A problem and its remedy.

    severity: `broken` keeps headrace from working, `advice` costs speed.
    what: the problem.
    do: what the user can do about it.
    """

    severity: Literal["broken", "advice"]
    what: str
    do: str


class Folder(Struct, frozen=True):
    """A folder of headrace's, which may not exist yet. free_bytes: of its disk; None if unknown."""

    name: str
    path: Path
    writable: bool
    free_bytes: int | None


class DefaultModel(Struct, frozen=True):
    """The model of a bare `headrace run`. path: None until it is installed."""

    name: str
    path: Path | None


class DoctorReport(Struct, frozen=True):
    """All facts; None means unknown or not applicable.

    machine: None if MLX does not work.
    budget: memory for a model.
    peak: measured memory bandwidth.
    power: mains or battery, heat.
    swap_used: bytes.
    system: macOS sysctl facts, empty elsewhere.
    kernels: names of the operations in use, and the reason for them.
    versions: of Python and packages; None for missing ones.
    folders: those of headrace.
    default_model: the model of a bare `headrace run`.
    compiler: name of a C++ compiler on the path.
    nvidia_driver: True if there is one.
    failures: problems met while gathering.
    energy_parts: parts of the machine whose energy can be read; None if no counter can.
    user_files: a line each about settings, sessions, models and adapters, if there are any.
    """

    machine: Machine | None
    budget: MemoryBudget | None
    peak: Peak | None
    power: PowerState
    swap_used: int | None
    system: dict[str, str]
    kernels: dict[str, str]
    versions: dict[str, str | None]
    folders: list[Folder]
    default_model: DefaultModel
    compiler: str | None
    nvidia_driver: bool
    failures: list[Finding] = field(default_factory=list)
    energy_parts: str | None = None
    user_files: dict[str, str] = field(default_factory=dict)

    @property
    def chip(self) -> Chip | None:
        """The machine's row of the chip table."""
        return self.machine.chip if self.machine else None

    @property
    def os_name(self) -> str:
        kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
        if self.machine:
            kernel = self.machine.os
        if version := self.system.get("kern.osproductversion"):
            return f"macOS {version} {kernel.split()[-1]}"
        return kernel


def gather(calibrate: bool = False, progress: Callable[[float], None] | None = None) -> DoctorReport:
    """Gather all facts. Measures the memory bandwidth on request, or if it is unknown (about a second)."""
    installed = versions(PACKAGES)
    states = {"settings": settings_state(), "sessions": sessions_state(), "models": models_state()}
    if (adapters := adapters_state()) is not None:
        states["adapters"] = adapters
    failures: list[Finding] = []
    host: Machine | None = None
    peak: Peak | None = None
    kernels: dict[str, str] = {}
    try:
        from headrace.runtime import ops  # here: these import MLX, which may be missing
        from headrace.runtime.machine import bandwidth

        host = hardware.machine()
        if calibrate:
            bandwidth.measure_peak(progress, host)
        peak = bandwidth.known_peak(host, progress)
        kernels = ops.describe()
    except (ImportError, OSError, RuntimeError) as error:
        reinstall = f"{sys.executable} -m pip install --force-reinstall {own_source()}"
        failures.append(Finding("broken", f"MLX does not work here: {_first_line(error)}", reinstall))
    return DoctorReport(
        machine=host,
        budget=memory.budget(host) if host else None,
        peak=peak,
        power=hardware.power_state(),
        swap_used=hardware.swap_used(),
        system=hardware.sysctl_facts(),
        kernels=kernels,
        versions={name: installed.get(name) for name in ("python", *PACKAGES)},
        folders=_folders(),
        default_model=_default_model(),
        compiler=next((tool for tool in ("c++", "g++", "clang++") if shutil.which(tool)), None),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        failures=[*failures, *(finding for state in states.values() for finding in state.findings)],
        energy_parts=_energy_parts(host) if host else None,
        user_files={name: state.text for name, state in states.items()},
    )


# -- findings ----------------------------------------------------------------------------------------------------------


def findings(report: DoctorReport) -> list[Finding]:
    """Return all problems, broken things first.

    On a Mac for which MLX has no wheels, that is the only one about software: all others follow from it.
    """
    problems = [*_intel(report)]
    if not problems:
        problems = [*report.failures, *_software(report)]
    problems += _folder_findings(report)
    if report.machine:
        problems += [*_backend(report, report.machine), *_kernels(report, report.machine), *_speed(report)]
    problems += [*_memory(report)]
    return sorted(problems, key=lambda finding: finding.severity == "advice")


def _software(report: DoctorReport) -> list[Finding]:
    problems = []
    missing = [name for name, version in report.versions.items() if version is None and name != "headrace"]
    if missing:
        problems.append(Finding("broken", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}"))
    return problems


def _intel(report: DoctorReport) -> list[Finding]:
    """Return a finding for a Python of a Mac that MLX has no wheels for."""
    if report.system.get("sysctl.proc_translated") == "1":
        what = "this Python runs under Rosetta as an Intel program, and MLX has no GPU there"
        do = (
            "turn off `Open using Rosetta` of the terminal (Finder: Get Info), then install headrace again with Python "
            "of python.org or of Homebrew in /opt/homebrew"
        )
        return [Finding("broken", what, do)]
    if report.system.get("machdep.cpu.brand_string", "").startswith("Intel"):
        return [
            Finding("broken", "this Mac has an Intel processor, and MLX needs Apple silicon", "use another machine")
        ]
    return []


def _folder_findings(report: DoctorReport) -> list[Finding]:
    problems = []
    for folder in report.folders:
        if not folder.writable:
            do = "make it writable, or set HEADRACE_HOME to a writable folder"
            problems.append(Finding("broken", f"{folder.path} cannot be written", do))
        elif folder.name == "models" and folder.free_bytes is not None and folder.free_bytes < _LITTLE_DISK:
            what = f"only {format_bytes(folder.free_bytes)} of disk left for models"
            problems.append(
                Finding("advice", what, "free some space, or set HEADRACE_HOME to a folder on a larger disk")
            )
    return problems


def _backend(report: DoctorReport, host: Machine) -> list[Finding]:
    if host.backend != "cpu":
        return []
    if report.nvidia_driver:
        do = f"pip install '{own_source()}[cuda]'"
        return [Finding("advice", "an NVIDIA GPU is present, but MLX runs on the CPU", do)]
    if report.system.get("machdep.cpu.brand_string", "").startswith("Apple"):
        what = "MLX runs on the CPU although this Mac has a GPU"
        return [Finding("advice", what, "run outside a virtual machine, with mlx from PyPI")]
    return []


def _kernels(report: DoctorReport, host: Machine) -> list[Finding]:
    if report.kernels.get("kernels") != "reference":
        return []
    if host.backend == "metal" and not environment.reference_kernels():
        what = f"the Metal kernels are not active: {report.kernels.get('reason', 'no reason given')}"
        return [Finding("advice", what, "report this line; stock MLX operations give the same answers")]
    if host.backend != "cpu":
        return []
    what = f"the fast CPU kernels are not active: {report.kernels.get('reason', 'no reason given')}"
    if environment.reference_kernels():
        do = "unset HEADRACE_KERNELS"
    elif (installed := shadowed()) is not None:
        do = f"run headrace from another folder: the clone in this one hides the installed {installed}"
    elif report.compiler is None:
        do = "install a C++ compiler (g++ or clang++), then reinstall headrace"
    else:
        do = f"reinstall headrace: pip install --force-reinstall --no-deps {own_source()}"
    return [Finding("advice", what, do)]


def _speed(report: DoctorReport) -> list[Finding]:
    problems = []
    if report.power.on_battery:
        problems.append(Finding("advice", "running on battery: macOS may slow the GPU down", "plug the charger in"))
    if report.power.low_power_mode:
        do = "turn it off in System Settings > Battery"
        problems.append(Finding("advice", "low power mode is on: decoding is slowed down", do))
    if report.power.throttled or report.power.thermal_pressure == "moderate":
        what = "warm and may be slowed down"
        if report.power.throttled:
            what = "hot and throttled"
        problems.append(Finding("advice", f"the machine is {what}: measurements now are too low", "let it cool down"))
    if peak := report.peak:
        nominal = report.machine and report.machine.nominal_bandwidth
        doubt = ""
        if nominal and peak.bytes_per_second < nominal / 2:
            doubt = "under half of nominal"
        elif peak.busy:
            doubt = "while other programs used the CPU"
        if doubt:
            what = f"memory bandwidth: {format_rate(peak.bytes_per_second)} measured, {doubt}"
            problems.append(Finding("advice", what, "close other programs, then run `headrace doctor --calibrate`"))
    return problems


def _memory(report: DoctorReport) -> list[Finding]:
    problems = []
    if report.budget and report.budget.usable < _LITTLE_MEMORY:
        what = f"little memory: {format_bytes(report.budget.usable)} free for weights and KV cache"
        do = "close other programs, or raise the container's memory limit"
        if report.budget.is_address_space:
            do = address_space.HINT
        problems.append(Finding("advice", what, do))
    if (report.swap_used or 0) > _MUCH_SWAP:
        what = f"{format_bytes(report.swap_used or 0)} of swap in use: weights may be swapped to disk"
        problems.append(Finding("advice", what, "close other programs"))
    return problems


# -- facts -------------------------------------------------------------------------------------------------------------


def _folders() -> list[Folder]:
    folders = {"models": paths.data_dir() / "models", "cache": paths.cache_dir(), "config": paths.config_dir()}
    return [_folder(name, path) for name, path in folders.items()]


def _folder(name: str, path: Path) -> Folder:
    """Judge a folder by its nearest existing parent, where it would be created."""
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    try:
        free: int | None = shutil.disk_usage(existing).free
    except OSError:
        free = None
    return Folder(name, path, writable, free)


def _energy_parts(host: Machine) -> str | None:
    reading = sensors(host.backend)()
    if reading.joules is None:
        return None
    return reading.energy_parts


def _default_model() -> DefaultModel:
    from headrace.models.registry.resolve import DEFAULT_MODEL
    from headrace.models.registry.store import Store

    try:
        model = Store().get(DEFAULT_MODEL)
    except HeadraceError:  # reported by `models_state`
        model = None
    return DefaultModel(DEFAULT_MODEL, model.path if model else None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# -- the user's files --------------------------------------------------------------------------------------------------


class FilesReport(Struct, frozen=True):
    """A line about some files, and problems with them."""

    text: str
    findings: list[Finding] = field(default_factory=list)


def settings_state() -> FilesReport:
    """Check the settings file and count its changes from the defaults."""
    from headrace.app.config.settings import Settings, load_settings, settings_path

    path = settings_path()
    try:
        settings = load_settings(path)
    except HeadraceError as error:
        return FilesReport("invalid", [Finding("broken", str(error), error.hint or f"correct or delete {path}")])
    if not path.exists():
        return FilesReport("no file: defaults apply")
    num_changed = 0
    for values, defaults in zip(astuple(settings), astuple(Settings()), strict=True):
        num_changed += sum(map(ne, astuple(values), astuple(defaults)))
    return FilesReport(f"{num_changed} changed from the defaults")


def sessions_state() -> FilesReport:
    """Check that the conversations are readable and their file is intact."""
    from headrace.app.sessions.database import Database
    from headrace.app.sessions.store import database_path

    path = database_path()
    if not path.exists():
        return FilesReport("none yet")
    try:
        with closing(Database(path)) as database:
            report = [str(line) for (line,) in database.rows("PRAGMA quick_check")]
            (count,) = database.rows("SELECT count(*) FROM sessions")[0]
    except (HeadraceError, sqlite3.Error) as error:
        hint = getattr(error, "hint", None) or f"move {path} away to start with an empty one"
        return FilesReport("unreadable", [Finding("broken", str(error), hint)])
    if report != ["ok"]:
        what = f"the conversations in {path} are damaged: {report[0]}"
        hint = "`headrace sessions doctor --export FILE` saves everything readable"
        return FilesReport("damaged", [Finding("broken", what, hint)])
    return FilesReport(f"{count} stored")


def models_state() -> FilesReport:
    """Check every installed model's headers and file sizes."""
    from headrace.models.registry.store import INCOMPLETE, Store

    store = Store()
    try:
        names = store.names()
    except HeadraceError as error:
        return FilesReport("unreadable", [Finding("broken", str(error), error.hint or "")])

    problems = []
    installed = 0
    unrecorded = 0  # models without checksums
    for name in names:
        try:
            model = store.get(name)
            if model is None:
                what = f"{name} in the store: {INCOMPLETE}"
                problems.append(Finding("advice", what, f"`headrace models rm {name}` removes it"))
                continue
            installed += 1
            unrecorded += not _check_model(model)
        except HeadraceError as error:
            problems.append(Finding("broken", str(error), error.hint or "pull it again"))
    if not names:
        return FilesReport("none yet")
    count = f"{installed} installed"
    if unrecorded:
        count += f", {unrecorded} without checksums"
    return FilesReport(f"{count}; `headrace models verify` checks their contents", problems)


def adapters_state() -> FilesReport | None:
    """Check the headers of every adapter in the hub's cache; return None if there is none."""
    try:
        from headrace.models.registry.hub_cache import cached_models
    except ImportError:  # huggingface_hub is missing, which is a finding of its own
        return None
    problems = []
    adapters = [cached for cached in cached_models() if cached.is_adapter]
    for adapter in adapters:
        try:
            adapter.base()
        except HeadraceError as error:
            problems.append(Finding("advice", f"{adapter.name}: {error}", f"`headrace rm {adapter.name}` removes it"))
    if not adapters:
        return None
    return FilesReport(f"{len(adapters)} in the hub's cache; `headrace list` shows their bases", problems)


def _check_model(model: "StoredModel") -> bool:
    """Return whether the model has checksums. Raises CheckpointError with the problem and a hint."""
    from headrace.models.checkpoint.validation import check_sound, damaged
    from headrace.models.registry.checksums import recorded_files, size_problems

    files = recorded_files(model.origin)
    try:
        check_sound(model.path)
        if problems := size_problems(model.path, files or {}):
            raise CheckpointError("; ".join(problems))
    except CheckpointError as error:
        raise damaged(model.name, error) from error
    return files is not None
