"""A problem found by `headrace doctor`, and its display."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy. `broken` keeps headrace from working, `advice` costs speed."""

    severity: Literal["broken", "advice"]
    what: str
    do: str


def draw_finding(finding: Finding) -> None:
    """Print a problem and its remedy, in colour."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = "bold red" if finding.severity == "broken" else "bold yellow"
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("✗" if finding.severity == "broken" else "!", style=style), Text(finding.what))
    table.add_row("", Text(f"→ {finding.do}", style="dim"))
    Console(highlight=False).print(table)


def plain_finding(finding: Finding) -> str:
    """Return a problem and its remedy as two lines."""
    return f"{finding.severity}: {finding.what}\n  -> {finding.do}"
