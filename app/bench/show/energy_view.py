"""Energy per token of a benchmark as text."""

from headrace.app.output.document import Document
from headrace.runtime.metrics.units import format_joules


def energy_line(document: Document) -> str:
    """Return the parts of the machine that the energy per token is of; "" if it is unknown."""
    known = [entry["energy_per_token"] for entry in document["results"] if entry.get("energy_per_token")]
    if not known:
        return ""
    idle = known[0]["idle_watts"]
    net = f"net of {idle:.1f} W idle" if idle is not None else "absent, since idle power is unknown"
    return f"energy per token of {known[0]['parts']}, {net}; up to {max(one['watts'] for one in known):.1f} W"


def energy_cell(entry: Document) -> str:
    """Format the energy per token net of idle power; "" if it is unknown."""
    joules = (entry.get("energy_per_token") or {}).get("joules")
    return "" if joules is None else format_joules(joules)
