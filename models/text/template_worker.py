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

OUT_OF_MEMORY = 3  # exit status
_PAGE = os.sysconf("SC_PAGE_SIZE")

# These limits are for a template that breaks out of its sandbox. It can still delete, empty, rename and create files
# with calls that open none, and end other processes of the account.
_GIVEN_UP = (
    resource.RLIMIT_CORE,  # a template may crash Python; nobody needs its memory on disk
    resource.RLIMIT_FSIZE,  # no bytes into files; a pipe is none
    resource.RLIMIT_NOFILE,  # opens no file or folder, to read or to write, and no pipe or socket
    resource.RLIMIT_NPROC,  # starts no process; root may start some nevertheless
)

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
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        address_space.limit(0)
        send_answer(answer)
    os._exit(0)


def give_up_rights() -> None:
    """Give up the opening of files, the start of processes and the working folder, for good."""
    os.chdir("/")
    for limit in _GIVEN_UP:
        with suppress(OSError, ValueError):  # not on every system
            resource.setrlimit(limit, (0, 0))


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
