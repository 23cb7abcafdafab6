"""`/v1/models`: documents of models, in the fields that clients of OpenAI, Anthropic, vLLM and llama.cpp read.

A chat with --connect and `headrace launch` read `owned_by`, `status` and `context_length`.

Guard: tests/app/server/test_several_models.py.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from headrace.app.engine.model_card import ModelCard
from headrace.app.server.installed import InstalledModel

_STARTED = datetime.now(UTC).replace(microsecond=0)
"""The time that all models are said to have been made at."""


def model_list(models: Sequence[dict[str, object]]) -> dict[str, object]:
    """Return the list of models."""
    return {
        "object": "list",
        "data": list(models),
        "has_more": False,
        "first_id": models[0]["id"],
        "last_id": models[-1]["id"],
        "models": [],  # of Codex's own list: a model in it would need Codex's system prompt
    }


def model_object(card: ModelCard, state: str) -> dict[str, object]:
    """Return a model that has been loaded. state: of its engine."""
    return _object(card.name, card.context_limit, state, {"size": card.weight_bytes, "kv": card.kv})


def installed_object(model: InstalledModel, state: str) -> dict[str, object]:
    """Return a model that has not been loaded yet; its context may be limited by the memory."""
    return _object(model.name, model.context, state, {"size": model.weight_bytes})


def _object(name: str, context: int | None, state: str, meta: dict[str, object]) -> dict[str, object]:
    """Return one model. context: tokens of prompt and answer together; None: unknown."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": int(_STARTED.timestamp()),
        "created_at": _STARTED.isoformat().replace("+00:00", "Z"),
        "owned_by": "headrace",
        "context_length": context,
        "max_model_len": context,
        "status": {"value": "loaded" if state == "ready" else state},  # as llama.cpp's server has it
        "meta": {"n_ctx": context, **meta},
    }
