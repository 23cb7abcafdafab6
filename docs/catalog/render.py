"""Tables of docs/catalog.md: the models of the catalog, and the recommended ones of a few machines.

    python docs/catalog/render.py

A table stands between `<!-- table ID -->` and `<!-- end -->`; its text is replaced.

Guard: tests/models/registry/test_catalog.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from headrace.app.model_info.model_report import MEMORY_CONTEXT
from headrace.app.predict.chip_names import chip_targets
from headrace.app.predict.recommend import recommendations
from headrace.app.predict.uses import USES
from headrace.models.registry.catalog import load_catalog, ranked
from headrace.runtime.metrics.units import format_bytes, three_digits

PAGE = Path(__file__).resolve().parents[1] / "catalog.md"
# Chips and memory in GB
MACHINES = (("M4", 16), ("M4 Pro", 24), ("M4", 32), ("M4 Pro", 64), ("M4 Max", 128), ("M3 Ultra", 512))
# "<!-- table models -->", the table's text, "<!-- end -->"
_MARK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str) -> str:
    """Return the page with every marked table replaced."""
    made = {"models": models, "machines": machines}
    return _MARK.sub(lambda mark: mark[1] + "\n".join(made[mark[2]]()) + "\n" + mark[3], page)


def models() -> Iterator[str]:
    """Yield a row per model, the smallest first."""
    chat = [entry.name for entry in ranked("chat")]
    code = [entry.name for entry in ranked("code")]
    yield "| Model | Weights | A token | Download | Memory | Context | Released | Licence | Chat | Code |"
    yield "|---|---:|---:|---:|---:|---:|---|---|---:|---:|"
    for entry in load_catalog().values():
        cells = [
            f"`{entry.name}`",
            _billions(entry.parameters),
            _billions(entry.active_parameters),
            format_bytes(entry.download_bytes),
            format_bytes(entry.memory_bytes(MEMORY_CONTEXT)),
            f"{entry.context // 1024}k",
            entry.released,
            entry.licence,
            str(chat.index(entry.name) + 1) if entry.use == "general" else "",
            str(code.index(entry.name) + 1),
        ]
        yield f"| {' | '.join(cells)} |"


def machines() -> Iterator[str]:
    """Yield a row per machine with its recommended models and their predicted speeds."""
    yield f"| Machine | {' | '.join(label.capitalize() for label in USES.values())} |"
    yield "|---|---|---|---|"
    for chip, memory in MACHINES:
        target, *_ = chip_targets(chip, memory)
        chosen = recommendations(target)
        cells = [f"`{chosen[use].name}`, {three_digits(chosen[use].tokens_per_second)} tok/s" for use in USES]
        yield f"| {chip}, {memory} GB | {' | '.join(cells)} |"


def _billions(weights: int) -> str:
    return f"{three_digits(weights / 1e9)} B"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
