"""Whether a second model fits into memory beside the one that is loaded. Reads headers; asks no network."""

from headrace.app.engine.model_card import ModelCard
from headrace.runtime.errors import HeadraceError


def fits_beside(card: ModelCard, name: str | None) -> bool:
    """By the room there was when `card`'s model was loaded, both with MEMORY_CONTEXT tokens in their caches.

    False where it is not known: what is not installed, a machine that does not say how much memory it has.
    """
    from headrace.app.model_info.report import MEMORY_CONTEXT, memory_needed

    if card.budget is None:
        return False
    try:
        needed = memory_needed(name)
    except HeadraceError:
        return False
    grows = card.cost.kv_bytes(min(MEMORY_CONTEXT, card.context_limit))
    return needed is not None and needed + grows <= card.budget.usable
