"""The process in which chat templates are compiled and rendered, one job at a time, within limits of the kernel.

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
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from headrace.models.text.worker import jobs, send_answer
from headrace.runtime.errors import CheckpointError
from headrace.runtime.machine.garbage import importing

OUT_OF_MEMORY = 3  # exit status
MAX_MEMORY = 640_000_000  # bytes that jobs may add to those of the started process

# For a template that breaks out of its sandbox; SECURITY.md says what is left to it.
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

    source: of the template
    variables: of the prompt; None to compile the template, and to name the variables that it reads
    compile_seconds: of processor time, if the template is not compiled yet
    seconds: of processor time, for the rest
    max_text: characters of the prompt
    """

    source: str
    variables: Mapping[str, Any] | None
    compile_seconds: float
    seconds: float
    max_text: int


def main() -> None:
    """Do jobs until the input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever the parent does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with importing():
        _answer(Job(_LOADS_ALL, {}, 0, 0, 99))
    give_up_rights()
    for data in jobs():
        try:
            answer = _answer(pickle.loads(data))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # at once: an orderly exit may need memory
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_answer(answer)
    os._exit(0)


def give_up_rights() -> None:
    """Give up more memory, all files that are not open, and the start of processes, for good."""
    os.chdir("/")
    limits = dict.fromkeys(_GIVEN_UP, 0)
    with suppress(OSError):  # Linux alone has this file, and limits the address space
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  # no `pathlib`: importing it takes longer
            pages = int(file.read().split()[0])
        limits[resource.RLIMIT_AS] = pages * os.sysconf("SC_PAGE_SIZE") + MAX_MEMORY
    for name, limit in limits.items():
        with suppress(OSError, ValueError):  # not on every system
            resource.setrlimit(name, (limit, limit))


def _answer(job: Job) -> bytes:
    """Return the answer to a job as JSON: an object with `names`, with `text` and `origin`, or with `error`."""
    from headrace.models.text import template_sandbox  # imports jinja2

    answer: dict[str, object]
    try:
        signal.setitimer(signal.ITIMER_PROF, job.compile_seconds)
        template = template_sandbox.compile_template(job.source)
        signal.setitimer(signal.ITIMER_PROF, job.seconds)
        if job.variables is None:
            answer = {"names": sorted(template_sandbox.variables_of(job.source))}
        else:
            prompt = template_sandbox.render_template(template, job.variables, job.max_text)
            answer = {"text": prompt, "origin": prompt.origin}
    except CheckpointError as error:
        answer = {"error": str(error)}
    # Texts may have lone surrogates. Written as escapes, two of them would be read as one character.
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
