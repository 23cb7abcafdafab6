"""Tables of docs/hosts.md: speeds on several machines, computed from published.toml beside this script.

    python docs/hosts/render.py

A table stands between `<!-- table ID -->` and `<!-- end -->`; its text is replaced.

Guard: tests/app/predict/test_hosts.py.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headrace.app.predict.chip_names import chip_targets, machine_targets
from headrace.app.predict.hosts import SPLITS, HostsPrediction, best, predict_hosts
from headrace.app.predict.links import NetworkLink, links
from headrace.models.cost.shape_sources import shape_of_config
from headrace.models.cost.step_shape import StepShape
from headrace.models.registry.catalog import find
from headrace.runtime.metrics.units import percent

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "hosts.md"
# Of the simulated tables: model, chip and memory of each machine in GB
MODELS = (
    ("Qwen3-30B-A3B", "M4 Pro", 64),
    ("GPT-OSS-120B", "M4 Max", 128),
    ("GLM-4.6", "M3 Ultra", 256),
    ("DeepSeek V3.2", "M3 Ultra", 512),
)
COUNTS = (1, 2, 3, 4, 6, 8)  # machines
CONTEXT = 4096  # tokens in the cache
# "<!-- table simulated -->", the table's text, "<!-- end -->"
_MARK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str) -> str:
    """Return the page with every marked table replaced."""
    made = {"simulated": simulated, "published": published}
    return _MARK.sub(lambda mark: mark[1] + "\n".join(made[mark[2]]()) + "\n" + mark[3], page)


def shape(model: str, bits: int) -> StepShape:
    """Return a model's shape at so many bits in groups of 64; GPT-OSS's experts as published, in MXFP4."""
    known = _file()["models"].get(model)
    if known is None:
        return find(model).step_shape
    mxfp4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    stored = mxfp4 if model.startswith("GPT-OSS") else {"group_size": 64, "bits": bits}
    return shape_of_config({**known["config"], "quantization": stored})


def simulated() -> Iterator[str]:
    """Yield a table per model: tok/s by number of machines and link."""
    for model, chip, memory in MODELS:
        read = shape(model, 4)
        yield f"\n**{model}**, 4 bits, on so many {chip} of {memory} GB:\n"
        yield "| link | " + " | ".join(map(str, COUNTS)) + " |"
        yield "|---|" + "---:|" * len(COUNTS)
        for link in links().values():
            cells = [_cell(_fastest(read, chip, memory, count, link)) for count in COUNTS]
            yield f"| {link.title} | " + " | ".join(cells) + " |"


def published() -> Iterator[str]:
    """Yield a row per published figure: computed from the shape, and from the speed alone where that is published."""
    yield "| published | model | machines, link, split | alone | tok/s | computed | error | from alone | error |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|"
    for row in _file()["published"]:
        whole, scaled = computed(row)
        note = f"; {row['note']}" if row["note"] else ""
        where = f"{row['machines']}, {row['link']}, {row['way']}{note}"
        figures = [f"{row['alone']:g}" if "alone" in row else "", f"{row['speed']:g}", f"{whole:.1f}"]
        figures += [_error(whole, row), "" if scaled is None else f"{scaled:.1f}", _error(scaled, row)]
        source = row["source"].removeprefix("https://github.com/").removeprefix("https://www.")
        name = source.split("/p/")[0]
        yield f"| {row['engine']}, [{name}]({row['source']}) | {row['model']} | {where} | {' | '.join(figures)} |"


def computed(row: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return a published setup's speed in tok/s from the shape alone, and scaled to its speed on one machine.

    The second is None where the source has no speed on one machine.
    """
    targets = machine_targets(row["machines"])
    read = shape(row["model"], row["bits"])
    link = replace(links()[row["link"]], gathers=False)  # as those engines sum
    found = predict_hosts(read, targets, link, row["depth"], way=row["way"])
    if "alone" not in row:
        return found.speed, None
    # Seconds of a token: on the link, which stay, and computing, which is as slow as the source's one machine shows.
    on_link = found.link_share / found.speed
    computing = 1 / found.speed - on_link
    predicted_alone = max(predict_hosts(read, [target], link, row["depth"], way="alone").speed for target in targets)
    return found.speed, 1 / (computing * predicted_alone / row["alone"] + on_link)


def _error(speed: float | None, row: Mapping[str, Any]) -> str:
    """Return how far a computed speed is above the published one: "+4 %", or "" without one."""
    return "" if speed is None else percent(speed / row["speed"] - 1, is_signed=True)


def _fastest(read: StepShape, chip: str, memory: int, count: int, link: NetworkLink) -> HostsPrediction:
    """Return the fastest division of a model over so many machines with one chip."""
    fastest_variant = chip_targets(chip, memory)[-1]  # they are sorted by bandwidth
    targets = [fastest_variant] * count
    ways: Sequence[Any] = SPLITS if count > 1 else ("alone",)
    return best([predict_hosts(read, targets, link, CONTEXT, way=way) for way in ways])


def _cell(found: HostsPrediction) -> str:
    """Return the speed, with a p for a pipeline; a dash where the model does not fit."""
    if found.fits is False:
        return "–"
    if found.way == "pipeline":
        return f"{found.speed:.1f} p"
    return f"{found.speed:.1f}"


def _file() -> dict[str, Any]:
    return tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
