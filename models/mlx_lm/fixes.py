"""Corrections of mlx-lm classes that answer otherwise than the model they are named for, or that need Metal."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from headrace.models.checkpoint.arrays import read_arrays
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.runtime.errors import CheckpointError

_BIAS = ".e_score_correction_bias"
_GROUPS = (128, 64, 32)
_BITS = 2
_PER_WORD = 16
_PER_BYTE = 4


def fix(model: Any, checkpoint: Checkpoint) -> None:
    """Correct a loaded model. Raises UnsupportedModelError if the checkpoint lacks what that takes."""
    _fix_rotated_share(model, checkpoint.config)
    kind = checkpoint.config.get("model_type")
    if kind == "ernie4_5_moe":
        _correct_experts(model, checkpoint)
    if kind == "jamba":
        _weigh_experts(model, lambda layer: layer.feed_forward, normalized=False)
    if kind == "hunyuan" and "use_cla" in checkpoint.config and not checkpoint.config["use_cla"]:
        _weigh_experts(model, lambda layer: layer.mlp, normalized=True)
    if kind == "phi3small":
        _mask_future(model)
    if kind == "plamo3":
        _keep_whole_windows(model)
    if not mx.metal.is_available():
        ternary_to_affine(model)
    if kind == "falcon_h1":
        _scale_keys(model, checkpoint.config)
    if kind == "minicpm3" and model.args.tie_word_embeddings:  # its class divides only the scores of a head of its own
        norm = model.model.norm
        norm.weight = norm.weight * (model.args.dim_model_base / model.args.hidden_size)


def _fix_rotated_share(model: Any, config: Mapping[str, Any]) -> None:
    """Apply GLM-4's partial rotation, which its class ignores."""
    if config.get("model_type") == "glm":
        for module in (module for _, module in model.named_modules() if isinstance(module, nn.RoPE)):
            module.dims = int(module.dims * config.get("partial_rotary_factor", 0.5))


def _weigh_experts(model: Any, mixture: Callable[[Any], Any], *, normalized: bool) -> None:
    """Weigh experts by the softmax over all of them, normalized over the chosen or not: their classes do otherwise."""
    for layer in model.layers:
        if hasattr(block := mixture(layer), "switch_mlp"):
            block.__class__ = _weighing_class(type(block), normalized)  # type: ignore[arg-type]


@cache
def _weighing_class(stock: Any, normalized: bool) -> Any:
    class Weighing(stock):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            """Return the output of the chosen experts. x: (batch, length, width)."""
            logits = (self.router if "router" in self else self.gate)(x)
            count = self.num_experts_per_tok if hasattr(self, "num_experts_per_tok") else self.top_k
            shares = mx.softmax(logits, axis=-1, precise=True)
            chosen = mx.argpartition(-shares, kth=count - 1, axis=-1)[..., :count]
            shares = mx.take_along_axis(shares, chosen, axis=-1)
            if normalized:
                shares = shares / shares.sum(axis=-1, keepdims=True)
            result: mx.array = (self.switch_mlp(x, chosen) * shares[..., None].astype(x.dtype)).sum(axis=-2)
            return result + self.shared_mlp(x) if "shared_mlp" in self else result

    return Weighing


def _mask_future(model: Any) -> None:
    """Mask later tokens in Phi-3 small's sparse layers: its class adds the mask's truth values to the scores.

    Raises CheckpointError for a vocabulary without the tokens that its class excludes: it writes behind the logits.
    """
    least = int(model._dummy_tokenizer_ids.max().item()) + 1
    if model.args.vocab_size < least:
        raise CheckpointError(f"config.json: phi3small with a vocab_size below {least} is not supported")
    for layer in model.layers:
        layer.self_attn.__class__ = _masking_class(type(layer.self_attn))  # type: ignore[arg-type]


@cache
def _masking_class(stock: Any) -> Any:
    class Masking(stock):  # type: ignore[misc]
        def _block_sparse_attention(self, *args: Any, mask: mx.array | None, **options: Any) -> mx.array:
            if mask is not None and mask.dtype == mx.bool_:
                mask = mx.where(mask, 0.0, -mx.inf)
            result: mx.array = super()._block_sparse_attention(*args, mask=mask, **options)
            return result

    return Masking


def _keep_whole_windows(model: Any) -> None:
    """Keep all entries that PLaMo 3's masks show: its class keeps one fewer, so answers depend on chunks of prompts."""
    from mlx_lm.models.cache import RotatingKVCache

    class Whole(type(model)):  # type: ignore[misc]
        def make_cache(self) -> list[Any]:
            """Return empty caches."""
            parts = super().make_cache()
            return [RotatingKVCache(part.max_size + 1) if hasattr(part, "max_size") else part for part in parts]

    model.__class__ = Whole


def attend_in_window(model: Any, window: int) -> None:
    """Let all layers attend to the last `window` entries, where a class attends to every entry of its caches."""
    from mlx_lm.models.cache import RotatingKVCache

    class Windowed(type(model)):  # type: ignore[misc]
        def make_cache(self) -> list[Any]:
            """Return empty caches. Their masks, which the class asks for, are those of the window."""
            return [RotatingKVCache(window) for _ in self.layers]

    model.__class__ = Windowed


def _scale_keys(model: Any, config: Mapping[str, Any]) -> None:
    """Apply Falcon-H1's multipliers of keys and values, which its class omits when it folds the others in."""
    inputs = float(config.get("attention_in_multiplier") or 1.0)
    keys = float(config.get("key_multiplier") or 1.0)
    for layer in model.layers:
        for projection, factor in ((layer.self_attn.k_proj, keys), (layer.self_attn.v_proj, inputs)):
            scaled = ("scales", "biases") if "scales" in projection else ("weight",)
            for part in (*scaled, "bias") if projection is layer.self_attn.k_proj else scaled:
                if part in projection and factor != 1.0:
                    projection[part] = projection[part] * factor


def _correct_experts(model: Any, checkpoint: Checkpoint) -> None:
    """Choose the experts of ERNIE 4.5 by corrected scores: its class drops the corrections.

    Conversions with mlx-lm have none, and choose as mlx-lm does.
    """
    stored = {name for name in checkpoint.tensors if name.endswith(_BIAS)}
    if not stored:
        return
    arrays = read_arrays(checkpoint)
    for number, layer in enumerate(model.layers):
        if not hasattr(layer.mlp, "switch_mlp"):
            continue
        name = next((name for name in stored if name.startswith(f"model.layers.{number}.mlp.")), None)
        if name is None:
            raise CheckpointError(f"{checkpoint.path.name} lacks the router corrections of layer {number} alone")
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


def ternary_to_affine(model: Any) -> None:
    """Exchange all ternary layers (BitNet) whose rows divide into groups for affine ones of 2 bits.

    mlx-lm multiplies packed ternary weights in a Metal kernel only. Weights w in {-1, 0, 1} with one scale s are
    s (w + 1) - s: codes w + 1, scale s and offset -s, without rounding. Evaluates nothing.
    """
    from mlx_lm.models.bitlinear_layers import BitLinear

    found = [(path, module) for path, module in model.named_modules() if type(module) is BitLinear]
    layers = [(path, _affine(module)) for path, module in found if module.in_features % _GROUPS[-1] == 0]
    model.update_modules(tree_unflatten(layers))


def _affine(layer: Any) -> nn.QuantizedLinear:
    rows = layer.out_features
    columns = layer.in_features
    group = next(size for size in _GROUPS if columns % size == 0)
    # (N / 4, K): two bits at 2 i of row r are row r + i N / 4.
    codes = mx.concatenate([(layer.weight >> (2 * i)) & 3 for i in range(_PER_BYTE)])
    words = codes.reshape(rows, columns // _PER_WORD, _PER_WORD).astype(mx.uint32)
    scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
    affine = nn.QuantizedLinear(columns, rows, bias=layer.bias is not None, group_size=group, bits=_BITS)
    affine.weight = (words << (_BITS * mx.arange(_PER_WORD, dtype=mx.uint32))).sum(axis=-1)
    affine.scales = mx.broadcast_to(scale, (rows, columns // group))
    affine.biases = -affine.scales
    if layer.bias is not None:
        affine.bias = layer.bias
    return affine
