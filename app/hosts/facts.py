"""Facts about this machine that other ranks need: versions, memory, bandwidth, the model's copy, RDMA, the clock."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.app.hosts.model_digest import model_digest
from headrace.app.versions import NOT_INSTALLED, versions
from headrace.runtime.errors import HeadraceError

Facts = dict[str, Any]
_TOOL_S = 5.0


def own_versions() -> dict[str, str]:
    """Return the versions that all ranks must share."""
    packages = versions(("headrace", "mlx"))
    return {"headrace": packages.get("headrace") or NOT_INSTALLED, "mlx": packages.get("mlx") or "missing"}


def model_facts(model: Facts) -> Facts:
    """Return {path, digest} of a model's copy here, or {error, hint}. model: name, stored_as and path on rank 0."""
    from headrace.models.registry.store import Store

    try:
        stored = Store().get(model["stored_as"]) if model["stored_as"] else None
        path = stored.path if stored else Path(model["path"])
        if not stored and (model["stored_as"] or not (path / "config.json").is_file()):
            where = (
                f"`headrace models pull {model['name']}` there" if model["stored_as"] else f"copy it to {path} there"
            )
            return {"error": f"the model {model['name']} is not there", "hint": where}
        return {"path": str(path), "digest": model_digest(path)}
    except (OSError, HeadraceError) as error:
        return {"error": f"the model {model['name']} cannot be read there: {error}", "hint": "`headrace doctor` there"}


def machine_facts() -> Facts:
    """Return the machine's name, bandwidth and memory in bytes; imports MLX."""
    from headrace.runtime.machine.hardware import machine
    from headrace.runtime.machine.memory import budget
    from headrace.runtime.machine.peaks import cached_peak

    host = machine()
    room = budget(host)
    peak = cached_peak(host)
    measured = peak.bytes_per_second if peak else None
    return {
        "device": host.device_name,
        "backend": host.backend,
        "bandwidth": host.nominal_bandwidth if host.backend == "metal" else measured or host.nominal_bandwidth,
        "usable_memory": room.usable if room else None,
        "memory": host.memory_bytes,
        "cores": host.physical_cores,
    }


def rdma_state() -> str | None:
    """Return macOS's word, `enabled` or `disabled`, and the devices; None elsewhere."""
    if sys.platform != "darwin":
        return None
    if shutil.which("rdma_ctl") is None:
        return "not in this macOS (26.2 has it)"
    state = _output("rdma_ctl", "status") or "unknown"
    devices = [line.split()[0] for line in _output("ibv_devices").splitlines()[2:] if line.split()]
    return f"{state}, {', '.join(devices)}" if devices else state


def give_files(files: dict[str, str]) -> None:
    """Set environment variables to paths of open files with these contents; they have no name, so none is left."""
    for name, content in files.items():
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            file.write(content)
            file.seek(0)  # on macOS, a path below /dev/fd shares the offset
            os.environ[name] = f"/dev/fd/{os.dup(file.fileno())}"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
