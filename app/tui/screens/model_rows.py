"""Rows of the model picker: size, fit in memory, and speed limit by the roofline.

The speed is computed: measured bandwidth / weight bytes of a step, without the KV cache.
"""

from dataclasses import dataclass

from headrace.app.engine.model_card import ModelCard


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model; sizes in bytes. fits: None and context_fits: empty if the machine's memory is unknown."""

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


def model_rows(card: ModelCard | None, measured_gb_s: float | None) -> list[ModelRow]:
    """Return installed models, then the rest of the catalog. Reads files: call it in a thread.

    card: the loaded model's. measured_gb_s: this machine's bandwidth, measured after the first load.
    """
    from headrace.app.model_info.kv_fits import fits_text
    from headrace.app.model_info.report import overview
    from headrace.models.registry.catalog import load_catalog
    from headrace.models.registry.store import Store

    rows = []
    usable = card.budget.usable + card.active_memory_bytes if card and card.budget else None
    peak = measured_gb_s * 1e9 if measured_gb_s else None
    # A mixture reads its active experts only.
    mixtures = {
        entry.name: entry.step_shape.cost.weight_bytes for entry in load_catalog().values() if entry.shape.experts > 1
    }
    for document in overview(Store(), usable):
        size = document["disk_bytes"] if document["installed"] else document["download_bytes"]
        memory = document["memory_bytes"]
        loaded = card is not None and card.name == document["name"]
        weights = card.cost.weight_bytes if card is not None and loaded else mixtures.get(document["name"], size)
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
                fits=memory <= usable if memory is not None and usable is not None else None,
                tokens_per_second=peak / weights if peak and weights else None,
                problem=document.get("problem"),
            )
        )
    return rows
