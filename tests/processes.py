"""Search for processes that a test started indirectly. Linux only."""

from pathlib import Path


def engines(home: Path) -> list[int]:
    """Return the engine processes with this HEADRACE_HOME."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"app/engine/start.py" in (entry / "cmdline").read_bytes():
                environment = (entry / "environ").read_bytes().split(b"\0")
                if f"HEADRACE_HOME={home}".encode() in environment:
                    found.append(int(entry.name))
        except OSError:
            continue
    return found
