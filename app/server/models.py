"""`/v1/models`: the model that is served, in the fields that clients of OpenAI, Anthropic, vLLM and llama.cpp read."""

from datetime import UTC, datetime
from typing import Any

from headrace.app.engine.model_card import ModelCard

_STARTED = datetime.now(UTC).replace(microsecond=0)
_OWN_NAMES = ("default", "headrace")


def is_served(name: str | None, card: ModelCard, aliases: frozenset[str]) -> bool:
    """Return whether a request for this name is one for the model; None and "" are any model."""
    return not name or "*" in aliases or name in (card.name, *_OWN_NAMES, *aliases)


def model_list(card: ModelCard) -> dict[str, Any]:
    """Return the list of models."""
    return {
        "object": "list",
        "data": [model_object(card)],
        "has_more": False,
        "first_id": card.name,
        "last_id": card.name,
        "models": [],  # of Codex's own list: a model in it would need Codex's system prompt
    }


def model_object(card: ModelCard) -> dict[str, Any]:
    """Return one model. context_length: tokens of prompt and answer together."""
    return {
        "id": card.name,
        "object": "model",
        "type": "model",
        "display_name": card.name,
        "created": int(_STARTED.timestamp()),
        "created_at": _STARTED.isoformat().replace("+00:00", "Z"),
        "owned_by": "headrace",
        "context_length": card.context_limit,
        "max_model_len": card.context_limit,
        "meta": {"n_ctx": card.context_limit, "size": card.weight_bytes, "kv": card.kv},
    }
