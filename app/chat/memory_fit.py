"""Memory check for a second model beside the loaded one, from file headers."""

from headrace.app.engine.model_card import ModelCard
from headrace.runtime.errors import HeadraceError


def fits_beside(card: ModelCard, name: str | None) -> bool:
    """Return whether a model fits beside `card`'s, both with MEMORY_CONTEXT tokens of K/V.

    False for a model that is not installed and a machine of unknown memory.
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
