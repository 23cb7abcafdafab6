"""Fixtures for the whole suite, among them the default model, fetched once outside the repository."""

import faulthandler
import gc
import importlib
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import platformdirs
import pytest
from hypothesis import HealthCheck, Phase, settings

# No test depends on how fast the machine is, and each run tries the same inputs: what fails is what was changed.
# `pytest --hypothesis-profile explore` tries others, and `--nightly` more of them.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", settings.get_profile("explore"), derandomize=True, max_examples=100)
settings.register_profile("headrace", settings.get_profile("nightly"), max_examples=25)
# For deliberate faults, where a failure is enough: shrinking its example takes minutes.
settings.register_profile("faults", settings.get_profile("headrace"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("headrace")


# Hundreds of programs are started here: they need not compile the same files again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# Programs ask the terminal for its size.
for name in ("LINES", "COLUMNS"):
    os.environ.pop(name, None)


# What a background job or nohup ignores would be ignored by every program that a test starts and then interrupts.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


NIGHTLY_SAMPLE = 8  # one nightly test in so many runs where --nightly is a number
# One case in so many, at least one, of a test marked as sampled runs with the whole suite. `sampled(24)` is for cases
# that take long or are hundreds. `sampled(always=["gemma2"])`: cases whose ids begin so run every time, since no others
# find a certain fault.
CASES_SAMPLE = 8
Case = TypeVar("Case")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", default="none", metavar="none|all|NUMBER",
        help="long campaigns to run: none, all, or one in eight, which ones by NUMBER (such as the count of commits)",
    )  # fmt: skip
    parser.addoption("--sampled", action="store_true", help="sample cases where files are named, too")


def pytest_xdist_auto_num_workers() -> int:
    """Return two processes more than there are cores: many tests wait, for a screen or for programs they started."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return min(cores + 2, 8)


def pytest_configure(config: pytest.Config) -> None:
    """Try more examples of property tests in long campaigns. The profile has to be chosen before files are imported.

    Keep standard error, too, which pytest replaces while it collects and runs tests.
    """
    config.stash[_STDERR] = os.dup(2)
    if config.getoption("--nightly") != "none" and not config.getoption("--hypothesis-profile"):
        settings.load_profile("nightly")


def _is_worker(config: pytest.Config) -> bool:
    """Return whether this is a process of xdist: a pytest that a test starts inherits the environment's variables."""
    return hasattr(config, "workerinput")


def pytest_collection(session: pytest.Session) -> None:
    """Import the test files of the whole suite, in each process in another order.

    In a new clone all files have to be compiled, which takes longer than importing them: one process reads what another
    has compiled. pytest then collects the imported modules, in the same order in each process.
    """
    config = session.config
    if not _is_worker(config) or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    folder = Path(__file__).parent
    files = sorted(folder.rglob("test_*.py"))
    first = len(files) * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    first //= int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in files[first:] + files[:first]:
        name = ".".join(file.relative_to(folder.parent).with_suffix("").parts)
        with suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and reports the error
            importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)  # before plugins sort and mark the tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out nightly tests but for those asked for."""
    wanted: str = config.getoption("--nightly")
    if wanted == "all":
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    left_out = set(nightly)
    if wanted.isdecimal():
        left_out -= set(nightly[int(wanted) % NIGHTLY_SAMPLE :: NIGHTLY_SAMPLE])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> Generator[None, Any, Any]:
    """Leave out most cases of sampled tests where no file is named, or with --sampled."""
    made = yield  # a list of cases for a function; a collector for a class; None for anything else
    if not isinstance(made, list) or not made:
        return made
    cases: list[pytest.Item] = made
    config = collector.config
    marker = cases[0].get_closest_marker("sampled")
    wanted: str = config.getoption("--nightly")
    samples = config.getoption("--sampled") or config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if marker is None or wanted == "all" or not samples:
        return cases
    share = marker.args[0] if marker.args else CASES_SAMPLE
    number = int(wanted) if wanted.isdecimal() else 0
    chosen = set(sample_cases(cases, share, number, f"{collector.nodeid}::{name}"))
    for beginning in marker.kwargs.get("always", ()):
        always = [case for case in cases if case.name.startswith(f"{name}[{beginning}")]
        assert always, f"{collector.nodeid}::{name}: no case begins with {beginning!r}"
        chosen |= set(always)
    return [case for case in cases if case in chosen]


def sample_cases(cases: Sequence[Case], share: int, number: int, name: str) -> list[Case]:
    """Return one case in `share` of a test, at least one: each case comes up once in so many numbers."""
    if not cases:
        return []
    # Shuffled, alike in all processes: every eighth case of a product of parameters may have one value of each.
    generator = random.Random(name)
    shuffled = generator.sample(range(len(cases)), len(cases))
    first = (number + generator.randrange(share)) % min(share, len(cases))
    return [cases[index] for index in sorted(shuffled[first::share])]


gc.disable()  # collecting tests only adds objects


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt modules and collected tests, a million objects, from all further garbage collections.

    Then measure the machine briefly. No fixture does: each test would look at it.
    """
    if session.items:
        from tests.support.steady import measure_machine_briefly

        measure_machine_briefly()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect the garbage of a file's tests, and exempt what stays: modules and caches, which only grow."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


_STDERR = pytest.StashKey[int]()
HANG_S = 900
"""Seconds after which a hanging test ends its process with a stack trace: it fails, the others go on in a new one."""
_REARM_S = 60
_armed_at = -math.inf  # on the monotonic clock


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Set the timer for hanging tests to its beginning, unless a test did so within the last minute.

    It also runs between tests. A process never waits long there: xdist ends those for which it has no test.
    pytest's `faulthandler_timeout` starts a thread for each test and waits for its end: half the time of a short test.

    In a process of xdist, also run the test.
    """
    global _armed_at
    now = time.monotonic()
    if now - _armed_at >= _REARM_S:
        faulthandler.dump_traceback_later(HANG_S + _REARM_S, exit=True, file=item.config.stash[_STDERR])
        _armed_at = now
    if not _is_worker(item.config) or item.config.getoption("durations") is not None:
        return None
    _run_with_few_reports(item, nextitem)
    return True


def _run_with_few_reports(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a test, and report its call and what failed or was skipped.

    xdist sends each report, and the start of each test, to the process that prints: as long as a short test takes.
    """
    is_set_up = _run_phase(item, "setup", partial(item.ihook.pytest_runtest_setup, item=item))
    if is_set_up:
        _run_phase(item, "call", partial(item.ihook.pytest_runtest_call, item=item))
    if item.session.shouldfail or item.session.shouldstop:  # with -x: fixtures of files and of the session end, too
        nextitem = None
    _run_phase(item, "teardown", partial(item.ihook.pytest_runtest_teardown, item=item, nextitem=nextitem))
    if isinstance(item, pytest.Function):
        item.funcargs.clear()  # the item stays until the end, and would keep models alive
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _run_phase(item: pytest.Item, when: Literal["setup", "call", "teardown"], run: Callable[[], None]) -> bool:
    """Run one phase of a test, report it as `_run_with_few_reports` says, and return whether it passed."""
    call = pytest.CallInfo.from_call(run, when=when, reraise=(pytest.exit.Exception, KeyboardInterrupt))
    report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
    if when == "call" or not report.passed:
        item.ihook.pytest_runtest_logreport(report=report)
    return report.passed


def pytest_exception_interact() -> None:
    """Let the next test set the timer: pytest cancels it at a failure."""
    global _armed_at
    _armed_at = -math.inf


def pytest_unconfigure(config: pytest.Config) -> None:
    """Cancel the timer before its file is closed."""
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_STDERR])


# What is fetched stays here, so that only the first run of the suite fetches.
TEST_HOME = Path(os.environ.get("HEADRACE_TEST_HOME") or platformdirs.user_cache_dir("headrace-tests", appauthor=False))


@pytest.fixture(autouse=True)
def _mlx_begins_anew() -> None:
    """Seed the generators of Python and MLX, whose own seed is the time, and keep MLX from compiling on a CPU.

    A C++ compiler would take seconds for each function. headrace compiles on GPUs only; tests of what compiling changes
    call `mx.enable_compile`. One fixture and not two: each takes a tenth of a short test. Imports nothing.
    """
    random.seed(1)
    if (mlx := sys.modules.get("mlx.core")) is not None:
        mlx.random.seed(1)
        if mlx.default_device().type == mlx.cpu:
            mlx.disable_compile()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Return the default model's directory, installed as by a user."""
    from headrace.models.registry.resolve import resolve
    from headrace.models.registry.store import Store

    return resolve(None, store=Store(TEST_HOME / "data" / "models")).path
