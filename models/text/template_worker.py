"""The process in which chat templates are compiled and rendered: one `Job` at a time, within limits of the kernel.

`template_process` starts it and sends jobs (see `worker`), as pickles. Answers are JSON, so that a template that
breaks out of its sandbox can send nothing but data. A job beyond its limits ends the process: SIGPROF at the end of its
processor time, in the middle of any operation, or OUT_OF_MEMORY. The process ends with its parent, too: its input does.

Importing this module imports no jinja2, since `template_process` imports it.

Guards: tests/models/text/test_template_process.py and tests/faults/test_template_attacks.py.
"""

import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from headrace.models.text.worker import jobs, send_answer
from headrace.runtime.errors import CheckpointError
from headrace.runtime.machine.garbage import importing

OUT_OF_MEMORY = 3  # exit status
LANDLOCK_FAILED = "Landlock: "  # in the message of a process that ends since a call of Landlock fails
_PAGE = os.sysconf("SC_PAGE_SIZE")

# These limits, and Landlock below, are for a template that breaks out of its sandbox. It can still change permissions
# and times of files, and limits of other processes. With versions 1 to 5 of Landlock it can also send signals to other
# processes, and with 1 and 2 empty files. Without Landlock it can do what SECURITY.md lists. Where a kernel has it
# and a call of it fails, the process ends, and no template is rendered.
_GIVEN_UP = (
    resource.RLIMIT_CORE,  # a template may crash Python; nobody needs its memory on disk
    resource.RLIMIT_FSIZE,  # no bytes into files; a pipe is none
    resource.RLIMIT_NOFILE,  # opens no file or folder, to read or to write, and no pipe or socket
    resource.RLIMIT_NPROC,  # starts no process; root may start some nevertheless
)

# Landlock, by which a process of Linux gives up rights for good: https://docs.kernel.org/userspace-api/landlock.html.
# C libraries have no functions for its system calls. Their numbers are the same on all processors that MLX runs on.
_CREATE_RULESET = 444
_RESTRICT_SELF = 446
_ASK_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS, without which only root may restrict itself
# Masks of linux/landlock.h, by the first version of Landlock that knows them: rights to files, rights to the network,
# and scopes.
_MASKS = {
    1: (0x1FFF, 0, 0),  # read, write, run, delete and create files and folders
    2: (0x3FFF, 0, 0),  # move and link files between folders, which version 1 always refuses
    3: (0x7FFF, 0, 0),  # truncate files
    4: (0x7FFF, 3, 0),  # listen and connect by TCP
    5: (0xFFFF, 3, 0),  # control devices
    6: (0xFFFF, 3, 3),  # reach abstract sockets of other processes, and send them signals
}

# Python and Jinja load modules and tables when these are first needed. Later no file can be opened.
_LOADS_ALL = "{{ '\\N{BULLET}' ~ strftime_now('%c %Z') }}{{ missing.field }}"


class Job(NamedTuple):
    """A template, and what to do with it.

    action: compile, names (of the variables that it reads) or render
    source: of the template
    variables: for `render`, as a pickle of a mapping
    compile_seconds: of processor time, if the template is not compiled yet
    seconds: of processor time, for the action after that
    memory: bytes on top of those in use; 0: no limit here, as the parent watches
    max_text: characters of the prompt
    """

    action: str
    source: str
    variables: bytes
    compile_seconds: float
    seconds: float
    memory: int
    max_text: int


def main() -> None:
    """Do jobs until the input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever the parent does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with importing():
        _answer(Job("render", _LOADS_ALL, pickle.dumps({}), 0, 0, 0, 99), {})
    address_space = _AddressSpace()
    give_up_rights()
    for data in jobs():
        job: Job = pickle.loads(data)
        variables = pickle.loads(job.variables)  # before the limits, which do not count the conversation
        try:
            address_space.limit(job.memory)
            answer = _answer(job, variables)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # at once: an orderly exit may need memory
        signal.setitimer(signal.ITIMER_PROF, 0)
        address_space.limit(0)
        send_answer(answer)
    os._exit(0)


def give_up_rights() -> None:
    """Give up all files that are not open, the start of processes and the working folder, for good."""
    os.chdir("/")
    _restrict_by_landlock()  # needs a file descriptor, which the limits below forbid
    for limit in _GIVEN_UP:
        with suppress(OSError, ValueError):  # not on every system
            resource.setrlimit(limit, (0, 0))


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none, or if a container forbids its use."""
    if sys.platform != "linux":
        return 0
    import ctypes

    version: int = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return max(0, version)  # -1: an error, such as before Linux 5.13


def _restrict_by_landlock() -> None:
    """Give up all rights that this kernel's Landlock knows, if it has one. Raises OSError if that fails."""
    version = landlock_version()
    if version == 0:
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> int:
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, LANDLOCK_FAILED + os.strerror(error))
        return result

    # A ruleset without rules allows nothing of what it handles. Older kernels accept zeros in fields they do not know.
    handled = (ctypes.c_uint64 * 3)(*_MASKS[min(version, max(_MASKS))])
    ruleset = checked(libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(ctypes.sizeof(handled)), 0))
    checked(libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0))))
    checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


class _AddressSpace:
    """The address space of this process, which Linux limits. macOS has such a limit and ignores it."""

    def __init__(self) -> None:
        self._statistics = -1
        if sys.platform == "linux":
            self._statistics = os.open("/proc/self/statm", os.O_RDONLY)

    def limit(self, more: int) -> None:
        """Limit the process to so many bytes on top of those it has. 0: no limit."""
        if self._statistics < 0:
            return
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = hard
        if more:
            pages = int(os.pread(self._statistics, 99, 0).split()[0])
            size = pages * _PAGE + more
            if hard != resource.RLIM_INFINITY:
                size = min(size, hard)
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def _answer(job: Job, variables: Mapping[str, Any]) -> bytes:
    """Return the answer to a job as JSON: an object with the fields of the action, or with `error`."""
    from headrace.models.text import template_sandbox  # imports jinja2

    answer: dict[str, object] = {}
    try:
        signal.setitimer(signal.ITIMER_PROF, job.compile_seconds)
        template = template_sandbox.compile_template(job.source)
        signal.setitimer(signal.ITIMER_PROF, job.seconds)
        if job.action == "names":
            answer = {"names": sorted(template_sandbox.variables_of(job.source))}
        elif job.action == "render":
            prompt = template_sandbox.render_template(template, variables, job.max_text)
            answer = {"text": prompt, "origin": prompt.origin}
    except CheckpointError as error:
        answer = {"error": str(error)}
    # Texts may have lone surrogates. Written as escapes, two of them would be read as one character.
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
