"""mlx-lm's classes for a config.json, adapted to the tensor names that transformers 5 writes."""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from headrace.models.checkpoint.text_part import BODIES, text_config, text_name
from headrace.models.mlx_lm.fixes import fix_of
from headrace.models.network.mtp import without_head

_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.((?:gate|up|down)_proj\.(?:weight|scales|biases))")
_TABLE = "embed_tokens.weight"


def known_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the part that mlx-lm has a class for: the text part, if it lacks the whole model's."""
    try:
        classes(config)
        return dict(config)
    except ValueError:
        return text_config(dict(config))


def classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return (model class, argument class). Raises ValueError if mlx-lm has none for this `model_type`."""
    from mlx_lm.utils import _get_classes

    fix = fix_of(config)
    stock, arguments = _get_classes({**config, "model_type": fix.stock} if fix.stock else dict(config))

    class Adapted(stock):  # type: ignore[misc, valid-type]
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            if fix.change is not None:
                fix.change(self, args)

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Return the arrays under the names of this class's parameters."""
            names = dict(tree_flatten(self.parameters()))
            weights = _moved(without_head(weights, config), names)
            weights = weights if fix.rename is None else fix.rename(weights, config)
            weights = super().sanitize(weights) if hasattr(stock, "sanitize") else weights
            return _stacked(weights, names)

    Adapted.__module__, Adapted.__name__, Adapted.__qualname__ = stock.__module__, stock.__name__, stock.__qualname__
    return Adapted, arguments


def _moved(weights: dict[str, mx.array], names: Mapping[str, Any]) -> dict[str, mx.array]:
    """Rename a text-only checkpoint for a multimodal class, or the text part of a multimodal one for a text class."""
    stored = next((body for body in BODIES if f"{body}{_TABLE}" in weights), None)
    wanted = next((name.removesuffix(_TABLE) for name in names if name.endswith(_TABLE)), None)
    if stored is None or wanted is None or (stored == "model.") == (wanted == "model."):
        return weights
    texts = {name: text_name(name, stored) for name in weights}
    head = "language_model.lm_head." if wanted.startswith("language_model.") else "lm_head."
    return {
        wanted + text.removeprefix("model.")
        if text.startswith("model.")
        else head + text.removeprefix("lm_head."): weights[name]
        for name, text in texts.items()
        if text is not None
    }


def _stacked(weights: dict[str, mx.array], names: Mapping[str, Any]) -> dict[str, mx.array]:
    """Stack experts that are still stored one by one, under the names of `SwitchGLU`."""
    experts: dict[str, dict[int, mx.array]] = {}
    result: dict[str, mx.array] = {}
    for name, array in weights.items():
        match = None if name in names else _EXPERT.fullmatch(name)
        if match is None:
            result[name] = array
        else:
            owner, number, part = match.groups()
            experts.setdefault(f"{owner}.switch_mlp.{part}", {})[int(number)] = array
    return result | {name: mx.stack([each[number] for number in sorted(each)]) for name, each in experts.items()}
