"""Recommended models of a machine: the best of the catalog for each use that fits and is fast enough there.

The ★ of `models list`, `fit` and the models screen, and the chat's advice to replace the sample model. The order is
that of `models.registry.catalog.ranked`.

Guard: tests/app/predict/test_recommend.py.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from headrace.app.predict import DEFAULT_CONTEXT
from headrace.app.predict.prediction import TargetMachine, predict
from headrace.app.predict.targets import known_target
from headrace.app.predict.uses import Recommendation
from headrace.models.registry.catalog import CatalogEntry, load_catalog, ranked
from headrace.models.registry.resolve import DEFAULT_MODEL
from headrace.runtime.machine.hardware import Machine

MIN_TOKENS_PER_SECOND = 10.0
"""Slowest predicted decode speed of a recommended model."""
MEMORY_SHARE = 2 / 3
"""Largest part of the memory for models that a recommended model takes: half of all memory on a Mac."""
FASTEST_SHARE = 1 / 5
"""Least part of the best model's score that the recommended fastest one has."""
_ASSUMED_BANDWIDTH = 25e9  # bytes per second before the first measurement: two channels of DDR4


def recommendations(target: TargetMachine) -> dict[str, Recommendation]:
    """Return the recommended model of each use; a use without one is left out."""
    good = {}
    for entry in load_catalog().values():
        model = _recommended(entry, target)
        if model is not None and entry.name != DEFAULT_MODEL:
            good[entry.name] = model

    chosen = {}
    for use in ("chat", "code"):
        best = next((good[entry.name] for entry in ranked(use) if entry.name in good), None)
        if best is not None:
            chosen[use] = best
    if "chat" in chosen:
        least = FASTEST_SHARE * load_catalog()[chosen["chat"].name].score
        able = [good[entry.name] for entry in ranked("chat") if entry.name in good and entry.score >= least]
        chosen["fastest"] = max(able, key=lambda model: model.tokens_per_second or 0)
    return chosen


def recommended_for_chat(host: Machine, usable: int | None) -> Recommendation | None:
    """Return the best model for chat on this machine, without a speed before the bandwidth was measured.

    usable: bytes available to a model; None if unknown.
    """
    target = known_target(host, usable)
    if target is not None:
        return recommendations(target).get("chat")
    assumed = TargetMachine("this machine", _ASSUMED_BANDWIDTH, usable, apple=False)
    model = recommendations(assumed).get("chat")
    if model is None:
        return None
    return replace(model, tokens_per_second=None)


def recommended_uses(host: Machine, usable: int | None) -> dict[str, list[str]]:
    """Return the uses of this machine's recommended models, by name; nothing before its bandwidth was measured.

    usable: bytes available to a model; None if unknown.
    """
    target = known_target(host, usable)
    return {} if target is None else uses_by_model(recommendations(target))


def uses_by_model(chosen: Mapping[str, Recommendation]) -> dict[str, list[str]]:
    """Return the uses of each recommended model, by its name."""
    uses: dict[str, list[str]] = {}
    for use, model in chosen.items():
        uses.setdefault(model.name, []).append(use)
    return uses


def _recommended(entry: CatalogEntry, target: TargetMachine) -> Recommendation | None:
    """Return the entry as a recommendation; None if it is too large or too slow."""
    prediction = predict(entry.step_shape, target, min(DEFAULT_CONTEXT, entry.context - 1))
    fits = target.memory is not None and prediction.memory <= MEMORY_SHARE * target.memory
    if not fits or prediction.speed < MIN_TOKENS_PER_SECOND:
        return None
    return Recommendation(entry.name, entry.download_bytes, prediction.speed, is_limit=prediction.expected is None)
