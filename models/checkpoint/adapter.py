"""Low-rank adapters (LoRA; Hu et al., arXiv:2106.09685) in the folders of PEFT and of mlx-lm. Headers only.

An adapter changes projections of a base model: W becomes W + scale * B A, with A (r, K), B (N, r) and W (N, K).

PEFT     adapter_config.json, adapter_model.safetensors: base_model.model.MODULE.lora_A.weight (r, K), lora_B.weight
mlx-lm   adapter_config.json, adapters.safetensors: MODULE.lora_a (K, r), MODULE.lora_b (r, N)

Adapters that do more are refused by name: a plausible answer without a part of the adapter would be wrong.

`models.registry.adapters` finds an adapter and its base; `models.network.adapted` and `models.mlx_lm.adapter` apply it.

Guards: tests/models/network/test_adapters.py and tests/models/mlx_lm/test_adapter.py.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from sys import float_info

from msgspec import Struct

from headrace.models.checkpoint.shard_header import FLOATS, TensorInfo, read_header, read_strict_object
from headrace.models.checkpoint.side_file import quote
from headrace.runtime.config.typed import as_mapping
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

CONFIG_FILE = "adapter_config.json"
_PEFT_FILE = "adapter_model.safetensors"
_MLX_FILE = "adapters.safetensors"
WEIGHT_FILES = (_PEFT_FILE, _MLX_FILE)
# "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_MLX_NAME = re.compile(r"(.+)\.lora_([ab])")  # "model.layers.0.self_attn.q_proj.lora_a"
# Limits on the patterns of alphas, a second of work each. A pattern counts as _PER_PATTERN letters besides its own.
_PER_PATTERN = 128
_MOST_LETTERS = 1 << 20  # compiled
_MOST_STEPS = 1 << 29  # letters times the places in the names of modules where a match may begin; 560 of both fit
# PEFT's settings that change the product, with the values that leave it alone. `fan_in_fan_out` is not one: it says how
# the base stores its weights (GPT-2's), which are read as (N, K) before the product is added.
_PEFT_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA", None),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
}


class AdaptedModule(Struct, frozen=True):
    """A module of the base that the adapter changes: the tensors of its factors, as stored."""

    a: str  # tensor of A
    b: str  # tensor of B
    scale: float
    transposed: bool  # stored as (K, r) and (r, N)


class Adapter(Struct, frozen=True):
    """An adapter whose files passed the checks."""

    path: Path  # its folder
    file: Path  # its weights
    base: str | None  # the model it was trained on, as its config names it
    modules: Mapping[str, AdaptedModule]  # by the module's name in the base checkpoint
    nbytes: int  # of all factors

    @property
    def is_mlx_lms(self) -> bool:
        """True in mlx-lm's format, whose names are those of its classes."""
        return self.file.name == _MLX_FILE


def open_adapter(path: Path) -> Adapter:
    """Check the adapter in the directory `path` and return its description.

    Raises CheckpointError for files that are broken or inconsistent, and UnsupportedModelError for an adapter that does
    more than add low-rank products.
    """
    config = read_strict_object(path, CONFIG_FILE)

    # The format, by the name of the weights
    peft = path / _PEFT_FILE
    mlx = path / _MLX_FILE
    if peft.is_file():
        file = peft
        pattern = _PEFT_NAME
        scale_of = _peft_scale(config)
    elif mlx.is_file():
        file = mlx
        pattern = _MLX_NAME
        scale_of = _mlx_scale(config)
    else:
        raise CheckpointError(f"{path} has an {CONFIG_FILE}, but neither {_PEFT_FILE} nor {_MLX_FILE}")

    # Factors by module
    tensors = dict[str, TensorInfo]()
    read_header(path, file.name, tensors)
    factors: dict[str, dict[str, str]] = {}  # module -> "a" or "b" -> tensor
    for name in tensors:
        match = pattern.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(f"the adapter has the tensor {quote(name)}, which is no low-rank factor")
        factors.setdefault(match[1], {})[match[2].lower()] = name
    if not factors:
        raise CheckpointError(f"{file.name} has no tensors")
    num_parts = sum(module.count(".") + 1 for module in factors)
    _check_patterns(as_mapping(config.get("alpha_pattern")), _MOST_STEPS // num_parts)
    modules = {module: _adapted_module(module, names, tensors, scale_of) for module, names in factors.items()}
    base = config.get("base_model_name_or_path") or config.get("model")
    if not isinstance(base, str):
        base = None
    nbytes = sum(info.nbytes for info in tensors.values())
    return Adapter(path, file, base, modules, nbytes)


def _check_patterns(patterns: Iterable[str], max_letters: int) -> None:
    """Raise UnsupportedModelError for so many patterns, or so long ones, that they take seconds."""
    letters = sum(len(pattern) + _PER_PATTERN for pattern in patterns)
    if letters > max_letters:
        raise UnsupportedModelError(
            "the adapter has a longer alpha_pattern than headrace matches",
            "merge the adapter into its base, and load the result",
        )


_Scale = Callable[[str, int], float]
"""Scale of a module's change, from the module's name and the rank of its factors."""


def _peft_scale(config: Mapping[str, object]) -> _Scale:
    """Return alpha over the rank, or over its root; patterns of modules may have another alpha than the default."""
    for key, plain in _PEFT_PLAIN.items():
        if config.get(key) not in plain:
            raise UnsupportedModelError(f"the adapter has {key}: {quote(config[key])}, which headrace does not apply")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{CONFIG_FILE}: alpha_pattern is not an object")
    for pattern in patterns:
        # PEFT's patterns are regular expressions. Without repetitions, matching one cannot take forever.
        if not re.fullmatch(r"[\w.^$\\|]+", pattern):
            raise UnsupportedModelError(f"the adapter has the alpha_pattern {quote(pattern)}, which is no plain name")
    _check_patterns(patterns, _MOST_LETTERS)
    default = _number(config, "lora_alpha")
    alphas = [(_compiled(pattern), _number(patterns, pattern)) for pattern in patterns]
    by_root = config.get("use_rslora") is True

    def scale(module: str, rank: int) -> float:
        matching = (alpha for pattern, alpha in alphas if pattern.fullmatch(module))
        divisor = math.sqrt(rank) if by_root else rank
        return next(matching, default) / divisor

    return scale


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of modules whose names end in a pattern."""
    try:
        return re.compile(rf"(.*\.)?({pattern})")
    except re.error:
        raise CheckpointError(f"{CONFIG_FILE}: alpha_pattern has {quote(pattern)}, which is no pattern") from None


def _mlx_scale(config: Mapping[str, object]) -> _Scale:
    """Return the one scale that an mlx-lm config states."""
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise UnsupportedModelError(f"the adapter has fine_tune_type {quote(kind)}; headrace applies lora")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise CheckpointError(f"{CONFIG_FILE} has no lora_parameters")
    scale = _number(parameters, "scale")
    return lambda _module, _rank: scale


def _number(values: Mapping[str, object], key: str) -> float:
    """Return a finite number of the adapter's config. Raises CheckpointError."""
    value = values.get(key)
    # No `isfinite`, which fails at an integer beyond any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= float_info.max:
        raise CheckpointError(f"{CONFIG_FILE}: {quote(key)} is no number")
    return float(value)


def _adapted_module(
    module: str, names: Mapping[str, str], tensors: Mapping[str, TensorInfo], scale_of: _Scale
) -> AdaptedModule:
    """Return a module's factors, once their shapes are checked. names: tensors by "a" and "b"."""
    if names.keys() != {"a", "b"}:
        raise CheckpointError(f"the adapter has one factor of {quote(module)}, not both")
    a, b = (tensors[names[part]] for part in ("a", "b"))
    transposed = names["a"].endswith("lora_a")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.dtype not in FLOATS or b.dtype not in FLOATS:
        raise UnsupportedModelError(f"the adapter's factors of {quote(module)} are no matrices of floats")
    if transposed:  # a (K, r), b (r, N)
        _, rank = a.shape
        other_rank, _ = b.shape
    else:
        rank, _ = a.shape
        _, other_rank = b.shape
    if rank != other_rank or not rank:
        raise CheckpointError(f"the adapter's factors of {quote(module)} have ranks {rank} and {other_rank}")
    return AdaptedModule(names["a"], names["b"], scale_of(module, rank), transposed)
