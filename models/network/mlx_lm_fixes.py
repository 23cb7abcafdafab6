"""Corrections of mlx-lm classes that answer otherwise than the model they are named for."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.models.checkpoint.arrays import read_arrays
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.runtime.errors import UnsupportedModelError

_BIAS = ".e_score_correction_bias"


def fix(model: Any, checkpoint: Checkpoint) -> None:
    """Correct a loaded model. Raises UnsupportedModelError if the checkpoint lacks what that takes."""
    _fix_rotated_share(model, checkpoint.config)
    if checkpoint.config.get("model_type") == "ernie4_5_moe":
        _correct_experts(model, checkpoint)


def _fix_rotated_share(model: Any, config: Mapping[str, Any]) -> None:
    """Apply GLM-4's partial rotation, which its class ignores."""
    if config.get("model_type") == "glm":
        for module in (module for _, module in model.named_modules() if isinstance(module, nn.RoPE)):
            module.dims = int(module.dims * config.get("partial_rotary_factor", 0.5))


def _correct_experts(model: Any, checkpoint: Checkpoint) -> None:
    """Choose the experts of ERNIE 4.5 by corrected scores: its class drops the corrections."""
    stored = {name for name in checkpoint.tensors if name.endswith(_BIAS)}
    arrays = read_arrays(checkpoint) if stored else {}
    for number, layer in enumerate(model.layers):
        if not hasattr(layer.mlp, "switch_mlp"):
            continue
        name = next((name for name in stored if name.startswith(f"model.layers.{number}.mlp.")), None)
        if name is None:
            raise UnsupportedModelError(
                f"{checkpoint.path.name}: it lacks the router corrections of layer {number}, which conversions with"
                " mlx-lm drop",
                hint="take the checkpoint it was made from",
            )
        layer.mlp.correction = arrays[name].reshape(-1).astype(mx.float32)
        layer.mlp.__class__ = _corrected_class()


@cache
def _corrected_class() -> type[nn.Module]:
    from mlx_lm.models.ernie4_5_moe import Ernie4_5_MoeMLP

    class Corrected(Ernie4_5_MoeMLP):  # type: ignore[misc]
        correction: mx.array  # (experts,), added to the scores for the choice alone

        def __call__(self, x: mx.array) -> mx.array:
            """Return the output of the chosen experts. x: (batch, length, width)."""
            scores = self.gate_act(self.gate(x).astype(mx.float32))
            chosen = mx.argpartition(-(scores + self.correction), kth=self.k - 1, axis=-1)[..., : self.k]
            shares = mx.take_along_axis(scores, chosen, axis=-1)
            shares = shares / mx.maximum(shares.sum(axis=-1, keepdims=True), 1e-12)
            experts = self.switch_mlp(x, chosen)
            result: mx.array = (experts * shares[..., None]).sum(axis=-2).astype(experts.dtype)
            if self.shared_experts is not None:
                result = result + self.shared_experts(x)
            return result

    return Corrected
