"""Rows of the model picker: size, fit in memory, and speed limit by the roofline.

The speed is the limit of a step by measured bandwidth and arithmetic, with DEFAULT_CONTEXT tokens in the cache.
"""

from dataclasses import dataclass

from headrace.app.engine.model_card import ModelCard
from headrace.app.predict import DEFAULT_CONTEXT
from headrace.app.tui.metrics.facts import MachineFacts
from headrace.runtime.metrics.cost import StepCost, step_limit


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model.

    name: as `-m` takes it.
    title: its full name.
    bytes: on disk, or to download.
    memory_bytes: with its cache; None if unknown.
    context: limit in tokens; None if unknown.
    context_fits: contexts that fit into memory; empty if the machine's memory is unknown.
    fits: None if the machine's memory is unknown.
    tokens_per_second: at most; None if unknown.
    problem: reason for which it cannot be used.
    recommended_for: uses for which it is the catalog's best on this machine.
    """

    name: str
    title: str
    installed: bool
    is_default: bool
    bytes: int
    memory_bytes: int | None
    context: int | None
    context_fits: str
    quantization: str
    licence: str
    fits: bool | None
    tokens_per_second: float | None
    problem: str | None
    recommended_for: tuple[str, ...] = ()


def model_rows(card: ModelCard | None, machine: MachineFacts) -> list[ModelRow]:
    """Return installed models, then the rest of the catalog. Reads files: call it in a thread.

    card: the loaded model's. machine: its bandwidth and arithmetic are measured after the first load.
    """
    from headrace.app.model_info.kv_fits import fits_text
    from headrace.app.model_info.report import overview
    from headrace.models.registry.catalog import load_catalog
    from headrace.models.registry.store import Store

    rows = []
    uses = _recommended_uses(card)
    usable = card.budget.usable + card.active_memory_bytes if card and card.budget else None
    costs: dict[str, StepCost | None] = {}
    if card is not None:
        costs[card.name] = card.cost
    # Models of the catalog are compared by its facts, as in `headrace fit`, the loaded one included.
    costs |= {entry.name: entry.step_shape.cost for entry in load_catalog().values()}
    for document in overview(Store(), usable):
        size = document["disk_bytes"] if document["installed"] else document["download_bytes"]
        memory = document["memory_bytes"]
        rows.append(
            ModelRow(
                name=document["name"],
                title=str(document.get("title") or ""),
                installed=document["installed"],
                is_default=document["default"],
                bytes=size,
                memory_bytes=memory,
                context=document["context"],
                context_fits=fits_text(document["context_fits"], document["context"]),
                quantization=document["quantization"] or "",
                licence=str(document.get("licence") or ""),
                fits=None if memory is None or usable is None else memory <= usable,
                tokens_per_second=_most(costs.get(document["name"]), size, document["context"], machine),
                problem=document.get("problem"),
                recommended_for=tuple(uses.get(document["name"], ())),
            )
        )
    return rows


def _most(cost: StepCost | None, size: int, longest: int | None, machine: MachineFacts) -> float | None:
    """Return the most tokens per second; None if it is unknown.

    cost: None outside the catalog: all bytes are read.
    size: bytes on disk.
    longest: context of the model, in tokens; None if unknown.
    """
    nbytes = size
    flops = 0
    if cost is not None:
        context = min(DEFAULT_CONTEXT, longest - 1) if longest else DEFAULT_CONTEXT
        nbytes = cost.step_bytes(context)
        flops = cost.step_flops(context)
    if not machine.measured_gb_s or not nbytes:
        return None
    return 1 / step_limit(nbytes, flops, machine.measured_gb_s * 1e9, machine.flops_per_second).seconds


def _recommended_uses(card: ModelCard | None) -> dict[str, list[str]]:
    """Return the uses of this machine's recommended models, by name; nothing before its bandwidth was measured."""
    from headrace.app.predict.recommend import recommendations, uses_by_model
    from headrace.app.predict.targets import known_target

    if card is None or card.budget is None:
        return {}
    target = known_target(card.machine, card.budget.usable + card.active_memory_bytes)
    if target is None:
        return {}
    return uses_by_model(recommendations(target))
