"""CPUs that the kernels leave to the chat's own process."""

import os

from headrace.runtime import ops
from headrace.runtime.machine.hardware import Machine


def spare_cpus(host: Machine) -> int:
    """Return the CPUs, hyper-threads included, that the kernels' threads do not use."""
    native = ops.native.status() if ops.select() is ops.native else None
    scheduled = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limited = host.usable_cores < min(host.physical_cores, scheduled)  # by the container's share of time
    busy = native.threads if native is not None and native.threads else 1
    return max(0, (host.usable_cores if limited else scheduled) - busy)
