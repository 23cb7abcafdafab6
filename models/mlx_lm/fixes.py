"""Corrections of mlx-lm's classes: those that answer otherwise than the model they are named for, or that need Metal.

Each function names the class of mlx-lm 0.32 (`mlx_lm/models/NAME.py`) by its row in `FIXES`, and what that class does
otherwise. A row goes when its class does so no more; docs/workarounds.md lists them all.

A loaded model is corrected in place: its modules get a subclass of their class (`__class__`), and keep their weights.

Guard: tests/models/mlx_lm/test_fixes.py.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from msgspec import Struct

from headrace.models.architectures.fields import text_section
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.network.weight_arrays import loaded, weight_arrays
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from mlx_lm.models.base import BaseModelArgs

    from headrace.models.mlx_lm.cache import CachePart

_BIAS = ".e_score_correction_bias"  # end of a router's correction
Config = Mapping[str, object]
Weights = dict[str, mx.array]


class Fix(Struct, frozen=True):
    """Differences of one class from its model."""

    stock: str = ""  # model_type of the class to change, if mlx-lm has none of this name
    own: str = ""  # module of headrace with the class, if no class of mlx-lm can be changed into it
    change: "Callable[[nn.Module, BaseModelArgs], None] | None" = None  # of a new model, by its arguments
    rename: Callable[[Weights, Config], Weights] | None = None  # to the names that the class reads
    correct: Callable[[nn.Module, Checkpoint], None] | None = None  # of a loaded model
    refuse: Callable[[Config], None] | None = None  # raises UnsupportedModelError
    scalings: tuple[str, ...] = ()  # kinds of rope scaling that the class applies, if it ignores others; empty: all
    masked_by_caches: bool = False  # the class takes its masks from the caches, which may have a window


def fix_of(config: Config) -> Fix:
    """Return the row of a config's model_type, or one without differences."""
    return FIXES.get(str(config.get("model_type")), _NOTHING)


def class_name(config: Config) -> str:
    """Return the words for the class that runs a config, in messages."""
    owner = "headrace" if fix_of(config).own else "mlx-lm"
    return f"{owner}'s class of {config.get('model_type')}"


def correct(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Correct a loaded model. Raises UnsupportedModelError if the checkpoint lacks what that takes."""
    fix = fix_of(checkpoint.config)
    if fix.correct is not None:
        fix.correct(model, checkpoint)


def refuse_what_classes_ignore(config: Config) -> None:
    """Raise UnsupportedModelError for settings that a class would ignore silently."""
    kind = config.get("model_type")
    fix = fix_of(config)
    scaling = config.get("rope_scaling")
    if fix.scalings and isinstance(scaling, Mapping):
        stated = scaling.get("rope_type") or scaling.get("type") or "default"
        if stated not in fix.scalings:
            raise UnsupportedModelError(f"config.json: {kind} with {stated!r} rope scaling is not supported")
    if isinstance(scaling, Mapping) and "yarn" in (scaling.get("rope_type"), scaling.get("type")):
        factor = scaling.get("factor")
        amplitude = scaling.get("attention_factor")
        usual = 1.0
        if isinstance(factor, int | float) and factor > 1:
            usual = 0.1 * math.log(factor) + 1
        if isinstance(amplitude, int | float) and abs(amplitude - usual) > 1e-3:
            raise UnsupportedModelError(f"config.json: {kind} with a YaRN attention_factor of {amplitude:g}")
    if fix.refuse is not None:
        fix.refuse(config)


def apply_ignored_windows(model: nn.Module, config: Config) -> None:
    """Apply a window that all layers attend through, if the class keeps every entry for all.

    Raises UnsupportedModelError where the class makes its masks itself.
    """
    from mlx_lm.models.cache import KVCache

    text = text_section(config)
    window = text.get("sliding_window")
    longest = text.get("max_position_embeddings")
    kinds = text.get("layer_types")
    slides = text.get("use_sliding_window") is not False and (kinds is None or "sliding_attention" in kinds)
    if not slides or not isinstance(window, int) or window >= (longest or window + 1):
        return
    if hasattr(model, "make_cache") and not all(type(part) is KVCache for part in model.make_cache()):
        return
    if not fix_of(config).masked_by_caches or (kinds is not None and set(kinds) != {"sliding_attention"}):
        raise UnsupportedModelError(
            f"config.json: {config.get('model_type')} with a sliding window of {window} tokens is not supported"
        )
    _attend_in_window(model, window)


# Features that classes lack


def _square_activations(model: nn.Module, args: "BaseModelArgs") -> None:
    """Give Llama's class the feed-forward of Arcee: two matrices, and a squared ReLU."""
    for layer in model.model.layers:
        layer.mlp = _SquaredMLP(args.hidden_size, args.intermediate_size, args.mlp_bias)


class _SquaredMLP(nn.Module):  # type: ignore[misc]
    """down(relu(up(x)) squared). x: (batch, length, width)."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        result: mx.array = self.down_proj(nn.relu2(self.up_proj(x)))
        return result


# Names and orientations that transformers 5 writes, and the classes do not read


def _without_prefix(weights: Weights, _config: Config) -> Weights:
    """Remove the module that transformers puts GPT-2's layers in."""
    return {name.removeprefix("transformer."): array for name, array in weights.items()}


def _older_norms(weights: Weights, _config: Config) -> Weights:
    """Give the norms of OLMo hybrid's recurrent layers the names of all others."""
    older = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    pattern = re.compile("|".join(older))
    return {pattern.sub(lambda match: older[match[0]], name): array for name, array in weights.items()}


def _turned_experts(weights: Weights, config: Config) -> Weights:
    """Transpose stacks of experts whose `down_proj` is (X, E, F), as transformers 5 writes them."""
    inner = text_section(config)["moe_intermediate_size"]
    result = dict(weights)
    for name, array in weights.items():
        if ".experts.down_proj" in name and array.shape[-1] == inner:
            for part in (name, name.replace(".down_proj", ".gate_up_proj")):
                result[part] = weights[part].swapaxes(-2, -1)
    return result


# Settings that classes ignore


def _refuse_olmo(_config: Config) -> None:
    """Refuse OLMo 1 without a package that its class imports."""
    if find_spec("hf_olmo") is None:  # its class prints to stdout and exits
        raise UnsupportedModelError("mlx-lm's class of OLMo 1 needs the ai2-olmo package", "take OLMo 2 or 3")


def _refuse_norms_by_groups(config: Config) -> None:
    """Refuse a Falcon-H1 whose class normalizes over all heads. On a CPU headrace's decoder runs it."""
    if config.get("mamba_rms_norm") and config.get("mamba_n_groups", 1) != 1:
        raise UnsupportedModelError("config.json: falcon_h1 with a norm by groups runs on a CPU only")


def _refuse_capped_logits(config: Config) -> None:
    """Refuse a cap that Gemma 3's class leaves out."""
    if text_section(config).get("final_logit_softcapping") is not None:
        raise UnsupportedModelError("config.json: gemma3 with capped logits is not supported")


# Results of classes


def _rotate_share(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Apply GLM-4's partial rotation, which its class ignores."""
    for module in (module for _, module in model.named_modules() if isinstance(module, nn.RoPE)):
        module.dims = int(module.dims * checkpoint.config.get("partial_rotary_factor", 0.5))


def _weigh_jamba(model: nn.Module, _checkpoint: Checkpoint) -> None:
    """Weigh Jamba's experts by the softmax over all of them."""
    _weigh_experts(model, lambda layer: layer.feed_forward, normalized=False)


def _weigh_hunyuan(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Divide the weights of the chosen experts by their sum, in Hunyuan's models without shared K/V."""
    if "use_cla" in checkpoint.config and not checkpoint.config["use_cla"]:
        _weigh_experts(model, lambda layer: layer.mlp, normalized=True)


def _scale_tied_logits(model: nn.Module, _checkpoint: Checkpoint) -> None:
    """Divide the scores of MiniCPM3's tied table, too: its class divides those of a head of its own alone."""
    if model.args.tie_word_embeddings:
        norm = model.model.norm
        norm.weight = norm.weight * (model.args.dim_model_base / model.args.hidden_size)


def _weigh_experts(model: nn.Module, mixture: Callable[[nn.Module], nn.Module], *, normalized: bool) -> None:
    """Weigh experts by the softmax over all of them, normalized over the chosen or not: their classes do otherwise."""
    for layer in model.layers:
        block = mixture(layer)
        if hasattr(block, "switch_mlp"):
            block.__class__ = _weighing_class(type(block), normalized)  # type: ignore[arg-type]


@cache
def _weighing_class(stock: type[nn.Module], normalized: bool) -> type[nn.Module]:
    """Return a mixture's class with the weights of `_weigh_experts`."""

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


def _mask_future(model: nn.Module, _checkpoint: Checkpoint) -> None:
    """Mask later tokens in Phi-3 small's sparse layers: its class adds the mask's truth values to the scores.

    Raises CheckpointError for a vocabulary without the tokens that its class excludes: it writes past the logits.
    """
    least = int(model._dummy_tokenizer_ids.max().item()) + 1
    if model.args.vocab_size < least:
        raise CheckpointError(f"config.json: phi3small with a vocab_size below {least} is not supported")
    for layer in model.layers:
        layer.self_attn.__class__ = _masking_class(type(layer.self_attn))  # type: ignore[arg-type]


@cache
def _masking_class(stock: type[nn.Module]) -> type[nn.Module]:
    """Return an attention's class that adds minus infinity for masked entries."""

    class Masking(stock):  # type: ignore[misc]
        def _block_sparse_attention(self, *args: Any, mask: mx.array | None, **options: Any) -> mx.array:
            if mask is not None and mask.dtype == mx.bool_:
                mask = mx.where(mask, 0.0, -mx.inf)
            result: mx.array = super()._block_sparse_attention(*args, mask=mask, **options)
            return result

    return Masking


def _keep_whole_windows(model: nn.Module, _checkpoint: Checkpoint) -> None:
    """Keep all entries that PLaMo 3's masks show: its class keeps one fewer, so answers depend on chunks of prompts."""
    from mlx_lm.models.cache import RotatingKVCache

    class Whole(type(model)):  # type: ignore[misc]
        def make_cache(self) -> "list[CachePart]":
            """Return empty caches."""
            parts = list(super().make_cache())
            for index, part in enumerate(parts):
                if hasattr(part, "max_size"):
                    parts[index] = RotatingKVCache(part.max_size + 1)
            return parts

    model.__class__ = Whole


def _attend_in_window(model: nn.Module, window: int) -> None:
    """Let all layers attend to the last `window` entries, where a class attends to every entry of its caches."""
    from mlx_lm.models.cache import RotatingKVCache

    class Windowed(type(model)):  # type: ignore[misc]
        def make_cache(self) -> "list[CachePart]":
            """Return empty caches. Their masks, which the class asks for, are those of the window."""
            return [RotatingKVCache(window) for _ in self.layers]

    model.__class__ = Windowed


def _scale_keys(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Apply Falcon-H1's multipliers of keys and values, which its class omits when it folds the others in."""
    config = text_section(checkpoint.config)
    inputs = float(config.get("attention_in_multiplier") or 1.0)
    keys = float(config.get("key_multiplier") or 1.0)
    for layer in model.layers:
        _scale(layer.self_attn.k_proj, keys, with_bias=True)
        _scale(layer.self_attn.v_proj, inputs, with_bias=False)


def _state_epsilon(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give the norms of Mamba and Mamba-2 the epsilon of the config: their classes take 1e-5."""
    epsilon = checkpoint.config.get("layer_norm_epsilon")
    if isinstance(epsilon, int | float):
        for norm in (model.backbone.norm_f, *(layer.norm for layer in model.layers)):
            norm.eps = float(epsilon)


def _correct_mamba2(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give Mamba-2 norms with the epsilon of the config, and those of its heads over each group, not over all."""
    _state_epsilon(model, checkpoint)
    groups = checkpoint.config.get("n_groups")
    if isinstance(groups, int) and groups > 1:
        for layer in model.layers:
            layer.mixer.norm.groups = groups
            layer.mixer.norm.__class__ = _grouped_class()


@cache
def _grouped_class() -> type[nn.Module]:
    """Return Mamba-2's norm over groups."""
    from mlx_lm.models.activations import swiglu
    from mlx_lm.models.mamba2 import MambaRMSNormGated

    class Grouped(MambaRMSNormGated):  # type: ignore[misc]
        groups: int

        def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
            """Return the gated x, normalized. x, gate: (batch, length, width)."""
            parts = mx.unflatten(swiglu(gate, x), -1, (self.groups, -1))
            result: mx.array = mx.fast.rms_norm(parts, None, self.eps).flatten(-2) * self.weight
            return result

    return Grouped


def _scale(projection: nn.Module, factor: float, *, with_bias: bool) -> None:
    """Multiply a projection's weight, plain or quantized, by a factor."""
    if factor == 1.0:
        return
    parts = ["weight"]
    if "scales" in projection:
        parts = ["scales", "biases"]
    if with_bias:
        parts.append("bias")
    for part in parts:
        if part in projection:
            projection[part] = projection[part] * factor


def _correct_experts(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Choose the experts of ERNIE 4.5 by corrected scores: its class drops the corrections.

    Conversions with mlx-lm have none, and choose as mlx-lm does.
    """
    stored = {name for name in checkpoint.tensors if name.endswith(_BIAS)}
    if not stored:
        return
    arrays = weight_arrays(checkpoint)
    for number, layer in enumerate(model.layers):
        if not hasattr(layer.mlp, "switch_mlp"):
            continue
        name = next((name for name in stored if name.startswith(f"model.layers.{number}.mlp.")), None)
        if name is None:
            raise CheckpointError(f"{checkpoint.path.name} lacks the router corrections of layer {number} alone")
        layer.mlp.correction = loaded(arrays[name]).reshape(-1).astype(mx.float32)
        layer.mlp.__class__ = _corrected_class()


@cache
def _corrected_class() -> type[nn.Module]:
    """Return ERNIE's mixture with corrected scores."""
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


_UNSCALED = ("default",)  # for `Fix.scalings`: the class ignores every scaling
_NOTHING = Fix()
FIXES = {
    "arcee": Fix(stock="llama", change=_square_activations),
    "cohere2": Fix(scalings=_UNSCALED),
    "deepseek_v2": Fix(scalings=("yarn",)),
    "deepseek_v4": Fix(own="headrace.models.mlx_lm.deepseek_v4"),
    "ernie4_5": Fix(scalings=_UNSCALED),
    "ernie4_5_moe": Fix(correct=_correct_experts),
    "falcon_h1": Fix(correct=_scale_keys, refuse=_refuse_norms_by_groups),
    "gemma3": Fix(refuse=_refuse_capped_logits),
    "glm": Fix(correct=_rotate_share, scalings=_UNSCALED),
    "glm4": Fix(scalings=_UNSCALED),
    "glm4_moe": Fix(scalings=_UNSCALED),
    "gpt2": Fix(rename=_without_prefix),
    "granitemoehybrid": Fix(scalings=_UNSCALED),
    "hunyuan": Fix(correct=_weigh_hunyuan),
    "jamba": Fix(correct=_weigh_jamba),
    "lfm2": Fix(scalings=_UNSCALED),
    "lfm2_moe": Fix(scalings=_UNSCALED),
    "llama4_text": Fix(scalings=_UNSCALED),
    "mamba": Fix(correct=_state_epsilon),
    "mamba2": Fix(correct=_correct_mamba2),
    "minicpm3": Fix(correct=_scale_tied_logits),
    "minimax": Fix(scalings=_UNSCALED),
    "mixtral": Fix(scalings=_UNSCALED, masked_by_caches=True),
    "olmo": Fix(refuse=_refuse_olmo),
    "olmo_hybrid": Fix(scalings=_UNSCALED, rename=_older_norms),
    "phi3": Fix(scalings=("longrope", "su", "linear", "default")),
    "phi3small": Fix(correct=_mask_future),
    "plamo3": Fix(correct=_keep_whole_windows),
    "qwen2_moe": Fix(scalings=_UNSCALED),
    "qwen3_moe": Fix(scalings=_UNSCALED),
    "qwen3_vl_moe": Fix(rename=_turned_experts),
    "solar_open": Fix(scalings=_UNSCALED),
    "starcoder2": Fix(masked_by_caches=True),
}
"""Rows by mlx-lm's model_type."""
