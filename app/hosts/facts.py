"""Facts about this machine that other ranks need: versions, memory, bandwidth, the model's copy, RDMA.

`rank.py` reports them to rank 0 as JSON, and `start.py` compares them with its own (`start.refusal`). Every rank has
the same version of headrace, so keys may change.

Guard: tests/app/hosts/test_start.py.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headrace.app.versions import NOT_INSTALLED, versions
from headrace.runtime.errors import HeadraceError

Facts = dict[str, Any]
"""A report, or a part of one, in JSON types."""
_TOOL_S = 5.0  # seconds until a tool of the system is given up
# Files whose digest tells whether two copies of a model are the same.
_COMPARED = (".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja")
_NOT_COMPARED = ("headrace.json",)  # the store's own notes
_WHOLE = 1 << 20  # bytes; larger files are sampled
_SAMPLES = 32  # of a larger file
_SAMPLE = 4 << 10  # bytes of each


def own_versions() -> dict[str, str]:
    """Return the versions that all ranks must share."""
    packages = versions(("headrace", "mlx"))
    return {"headrace": packages.get("headrace") or NOT_INSTALLED, "mlx": packages.get("mlx") or "missing"}


def model_facts(model: Facts) -> Facts:
    """Return {path, digest} of a model's copy here, or {error, hint}. model: name, stored_as and path on rank 0."""
    from headrace.models.registry.store import Store

    missing = f"the model {model['name']} is not there"
    try:
        if model["stored_as"]:
            stored = Store().get(model["stored_as"])
            if stored is None:
                return {"error": missing, "hint": f"`headrace models pull {model['name']}` there"}
            path = stored.path
        else:
            path = Path(model["path"])
            if not (path / "config.json").is_file():
                return {"error": missing, "hint": f"copy it to {path} there"}
        return {"path": str(path), "digest": model_digest(path)}
    except (OSError, HeadraceError) as error:
        return {"error": f"the model {model['name']} cannot be read there: {error}", "hint": "`headrace doctor` there"}


def model_digest(directory: Path) -> str:
    """Return a digest in hex of a model's folder, to compare copies before weights are read. Raises OSError.

    It covers names and sizes of all compared files, small files whole, and of each larger file samples at even
    distances, from its first bytes to its last. So it takes milliseconds for any model, and tells apart models, formats
    and fine-tuned weights.
    """
    key = blake2b(digest_size=16)
    files = sorted(file for file in directory.iterdir() if file.suffix in _COMPARED and file.name not in _NOT_COMPARED)
    for file in files:
        size = file.stat().st_size
        key.update(f"{file.name}\n{size}\n".encode())
        with file.open("rb") as content:
            if size <= _WHOLE:
                key.update(content.read())
                continue
            for sample in range(_SAMPLES):
                # The last sample ends with the file: there are `_SAMPLES - 1` distances between the first and it.
                content.seek((size - _SAMPLE) * sample // (_SAMPLES - 1))
                key.update(content.read(_SAMPLE))
    return key.hexdigest()


def machine_facts() -> Facts:
    """Return the machine's name, bandwidth in bytes per second, memory in bytes and cores; imports MLX."""
    from headrace.runtime.machine.hardware import machine
    from headrace.runtime.machine.memory import budget
    from headrace.runtime.machine.peaks import cached_peak

    host = machine()
    room = budget(host)
    bandwidth = host.nominal_bandwidth
    peak = cached_peak(host)
    if host.backend != "metal" and peak is not None:
        bandwidth = peak.bytes_per_second
    return {
        "device": host.device_name,
        "backend": host.backend,
        "bandwidth": bandwidth,
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
    # A table: a line of headings, a line of dashes, then a line for each device, which begins with its name.
    devices = [line.split()[0] for line in _output("ibv_devices").splitlines()[2:] if line.split()]
    return ", ".join([state, *devices])


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
