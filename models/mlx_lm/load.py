"""Construction of mlx-lm models from a checkpoint, without reading weights.

`MlxLmNetwork` calls `load`, costs and ranks call `of_config`, and quantization calls `converted_arrays`. Classes are
adapted to the tensor names that transformers 5 writes, and corrected by the rows of `fixes`.

mlx-lm's own loader reads plain and MLX-quantized checkpoints. Foreign matrices are dequantized to float32 first, since
a class's `sanitize` may split, join and transpose them, and quantized to 8 bits afterwards. Matrices that affine groups
represent exactly stay packed, except experts, which classes stack. Groups of 16 become 8 bits too.

Guards: tests/models/gguf/test_layered.py and tests/models/mlx_lm/test_network.py.
"""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from msgspec.structs import replace

from headrace.models.checkpoint.arrays import read_arrays
from headrace.models.checkpoint.foreign.matrices import REQUANTIZED_BITS, REQUANTIZED_GROUPS
from headrace.models.checkpoint.quantization import (
    GROUPS_OF_16,
    has_groups_of_16,
    layer_quantization,
    stated_quantization,
)
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.shard_header import stored_dtype
from headrace.models.checkpoint.text_part import BODIES, text_config, text_name
from headrace.models.mlx_lm.adapter import apply_adapter
from headrace.models.mlx_lm.fixes import (
    apply_ignored_windows,
    class_name,
    correct,
    fix_of,
    refuse_what_classes_ignore,
)
from headrace.models.mlx_lm.kernels import Stored, stored_arrays
from headrace.models.mlx_lm.mtp import Head
from headrace.models.network.dtypes import compute_dtype
from headrace.models.network.mtp import without_head
from headrace.models.network.weight_arrays import loaded, weight_arrays
from headrace.runtime.config.typed import as_mapping
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.ops import groups_of_16

if TYPE_CHECKING:
    from mlx_lm.models.base import BaseModelArgs

# A single stored expert: "model.layers.0.mlp.experts.5.up_proj.weight"
_EXPERT = re.compile(r"(.+)\.experts\.(\d{1,9})\.((?:gate|up|down)_proj\.(?:weight|scales|biases))")
_TABLE = "embed_tokens.weight"  # the end of its name, by which the prefix of the text part is found
_FLOAT32 = ("A_log", "correction", "e_score_correction_bias")  # small numbers that decide much


def load(
    checkpoint: Checkpoint,
    device: mx.DeviceType,
    head: Head | None = None,
    divide: Callable[[nn.Module], None] | None = None,
) -> tuple[nn.Module, Stored]:
    """Return the model in the compute dtype of `device`, and its layers' arrays as they are stored.

    device: that runs it.
    head: make the model of one layer of this multi-token prediction head; None: the whole model.
    divide: leaves a model a rank's part; None: all of it.

    Raises UnsupportedModelError if mlx-lm has no class for it, CheckpointError if its class refuses it.

    The order of steps:
    1. Refuse settings that the class would ignore, before weights are read.
    2. Make the model with its weights; they stay lazy, unless they are a GGUF's.
    3. Correct the class where its answers differ from the model's, and where it ignores windows.
    4. Apply an adapter. Its factors belong to whole matrices, so this comes before `divide`.
    5. Note the layers' arrays, for kernels that read the types of the file. The dtypes change after that.
    6. Convert to the compute dtype.
    """
    refuse_what_classes_ignore(checkpoint.config)
    try:
        checkpoint = replace(checkpoint, config=known_config(checkpoint.config))
        model = _with_weights(checkpoint, device, head)
        correct(model, checkpoint)
        apply_ignored_windows(model, checkpoint.config)
        if checkpoint.adapter is not None and head is None:  # an adapter does not change a head
            apply_adapter(model, checkpoint, checkpoint.adapter)
        if divide is not None:
            divide(model)
        stored = stored_arrays(model)
        _convert(model, device, checkpoint)
        return model, stored
    except (Exception, SystemExit) as error:  # classes raise anything, and exit, on unexpected input
        raise refused(checkpoint.config, checkpoint.path.name, error) from error


def _with_weights(checkpoint: Checkpoint, device: mx.DeviceType, head: Head | None) -> nn.Module:
    """Return the model with its weights: read by mlx-lm, unless the format or the class is none that it knows."""
    is_converted = checkpoint.foreign is not None or checkpoint.gguf or has_groups_of_16(checkpoint.quantization)
    if head is None and not is_converted and not fix_of(checkpoint.config).own:
        return _from_files(checkpoint)
    return _from_arrays(checkpoint, device, head)


def _convert(model: nn.Module, device: mx.DeviceType, checkpoint: Checkpoint) -> None:
    """Convert a model's parameters to the compute dtype of `device` (`models.network.dtypes`)."""
    if device == mx.DeviceType.cpu:
        # MLX would run a C++ compiler for each function that classes compile: seconds each, and no faster steps.
        mx.disable_compile()
        model.set_dtype(mx.float32)
        return
    half = compute_dtype(device, stored_dtype(checkpoint.tensors), checkpoint.config)
    model.update(tree_map(lambda array: _in_half(array, half), model.parameters()))
    _drop_float32(model, half, checkpoint)


def of_config(config: Mapping[str, object]) -> nn.Module:
    """Return the model of a config.json, with parameters of the right shapes and types that are never evaluated.

    Raises UnsupportedModelError if mlx-lm has no class for it, CheckpointError if its class refuses it.
    """
    refuse_what_classes_ignore(config)
    section = stated_quantization(config)
    dtype = mx.bfloat16
    if (config.get("torch_dtype") or config.get("dtype")) == "float32":
        dtype = mx.float32
    try:
        config = known_config(config)
        model_class, arguments = classes(config)
        model = model_class(arguments.from_dict(dict(config)))
        apply_ignored_windows(model, config)
        model.set_dtype(dtype)
        if section is not None:
            _quantize_as_stated(model, section)
        elif as_mapping(config.get("quantization_config")).get("quant_method") == "fp8" and fix_of(config).own:
            nn.quantize(model, class_predicate=model.published_format)
        return model
    except (Exception, SystemExit) as error:
        raise refused(config, "it", error) from error


def _quantize_as_stated(model: nn.Module, section: Mapping[str, object]) -> None:
    """Quantize a model's layers by a config's section: general settings, or a module's own. False: it stays plain."""
    general = {key: section[key] for key in ("group_size", "bits", "mode") if key in section}

    def wanted(path: str, module: nn.Module) -> bool | dict[str, object]:
        stated = section.get(path, general)
        if not isinstance(stated, Mapping):
            return False
        settings = {**general, **stated}
        if not _fits(module, settings.get("group_size", 64)):
            return False
        return settings

    nn.quantize(model, class_predicate=wanted)


def refused(config: Mapping[str, object], name: str, error: BaseException) -> CheckpointError:
    """Return the error for the exception of an mlx-lm class on the checkpoint `name`."""
    if isinstance(error, CheckpointError):
        return error
    message = " ".join(str(error).split())
    if isinstance(error, ValueError) and message.startswith("Model type"):
        kind = config.get("model_type")
        return UnsupportedModelError(
            f"neither headrace nor mlx-lm has a network for model_type {kind!r:.60}",
            "docs/models.md lists the architectures that run",
        )
    if "No Metal back-end" in message:
        return UnsupportedModelError(
            f"mlx-lm's class of {config.get('model_type')} needs the GPU of a Mac", "run it on Apple Silicon"
        )
    if not isinstance(error, ValueError):
        message = f"{type(error).__name__}: {message}"
    return CheckpointError(f"{class_name(config)} cannot load {name}: {message[:200]}")


def _from_files(checkpoint: Checkpoint) -> nn.Module:
    """Return the model as mlx-lm's own loader reads it, in our adapted class."""
    from mlx_lm.utils import load_model

    model, _ = load_model(
        checkpoint.path,
        lazy=True,
        strict=True,
        model_config=checkpoint.config,
        get_model_classes=classes,
        trust_remote_code=False,
    )
    return model


class ConvertedArrays(NamedTuple):
    """A plain checkpoint as `mlx_lm.convert` writes it, before it quantizes."""

    arrays: dict[str, mx.array]  # by MLX's names, in MLX's layouts; not read yet
    quantizable: frozenset[str]  # modules that MLX can quantize


def converted_arrays(checkpoint: Checkpoint) -> ConvertedArrays:
    """Return the arrays of a plain safetensors checkpoint under the names of mlx-lm's class: experts are stacks.

    An array that is evaluated stays in memory as long as it is referenced, so take each out of the result. Raises
    UnsupportedModelError if mlx-lm has no class for it, CheckpointError if its class refuses it.
    """
    try:
        model = _from_files(replace(checkpoint, config=known_config(checkpoint.config)))
    except (Exception, SystemExit) as error:  # classes raise anything, and exit, on unexpected input
        raise refused(checkpoint.config, checkpoint.path.name, error) from error
    quantizable = {path for path, module in model.named_modules() if hasattr(module, "to_quantized")}
    return ConvertedArrays(dict(tree_flatten(model.parameters())), frozenset(quantizable))


def _from_arrays(checkpoint: Checkpoint, device: mx.DeviceType, head: Head | None) -> nn.Module:
    """Return a model with arrays that headrace reads, where mlx-lm cannot read the files or the head is part of it.

    The class's `sanitize` stands in the middle. It takes the checkpoint's names, and returns those of its parameters.
    1. Make the model with plain layers, and a head's input in it: `sanitize` and the strict loading look at its names.
    2. Read the arrays. Requantize groups of 16 while modules still have the names that config.json lists.
    3. Call `sanitize`.
    4. Quantize the layers with arrays that came out packed, so that they have scales to load; then load all.
    5. Quantize the layers with arrays that were dequantized for `sanitize`. This computes from the loaded weights.
    """
    model = _unquantized_model(checkpoint.config)
    if head is not None:
        head.adapt(model)
    stored = _read_for_class(checkpoint)
    dequantized = _Dequantized(checkpoint, stored)
    arrays = {**stored, **_regrouped(checkpoint, stored)}
    if head is not None:
        arrays = head.arrays(arrays)
    weights = arrays
    if hasattr(model, "sanitize"):
        weights = model.sanitize(dict(arrays))  # a copy: classes take entries out
    if head is not None:
        weights = head.shifted(weights, arrays)  # needs both, to see which norms the class left as they were

    def was_dequantized(path: str) -> bool:
        """Return whether a module's weight has been dequantized."""
        return dequantized.has(weights.get(f"{path}.weight"))

    _quantize_packed(model, weights)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    _requantize(model, was_dequantized)
    if device != mx.DeviceType.cpu:  # float32 scales would promote all activations
        dtype = compute_dtype(device, stored_dtype(checkpoint.tensors), checkpoint.config)
        for path, module in model.named_modules():
            if f"{path}.scales" in weights or was_dequantized(path):
                module.set_dtype(dtype)
    return model


class _Dequantized:
    """The float32 arrays that headrace or a class has computed: they become 8 bits. Those of the file stay plain.

    `sanitize` gives arrays other names, so they are recognized by `id()`. No id is used again meanwhile, since `stored`
    has all arrays. An array that `sanitize` computes has a new id.
    """

    def __init__(self, checkpoint: Checkpoint, stored: Mapping[str, mx.array]) -> None:
        """stored: arrays as they are read, by their names in `checkpoint.tensors`."""
        self._stored = stored
        self._of_file = {id(array) for name, array in stored.items() if checkpoint.tensors[name].dtype == "F32"}
        if checkpoint.foreign is not None:
            # `checkpoint.tensors` lists foreign matrices as they become, some of them in float32.
            self._of_file -= {id(stored[name]) for name in checkpoint.foreign.matrices}
        # If none was dequantized, the stacks that the class makes of float32 experts stay plain, too.
        self._are_there = any(self._is_computed(array) for array in stored.values())

    def has(self, array: mx.array | None) -> bool:
        """Return whether this is such an array."""
        return array is not None and self._are_there and self._is_computed(array)

    def _is_computed(self, array: mx.array) -> bool:
        return array.dtype == mx.float32 and id(array) not in self._of_file


def _unquantized_model(config: Mapping[str, object]) -> nn.Module:
    """Return the model of a config, which would quantize itself by sections that the arrays decide."""
    stated = {key: value for key, value in config.items() if not key.startswith("quantization")}
    text = stated.get("text_config")
    if isinstance(text, Mapping):
        stated["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    model_class, arguments = classes(stated)
    model: nn.Module = model_class(arguments.from_dict(stated))
    return model


def _read_for_class(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Return the arrays in a form for mlx-lm's classes: in float32 where they have no such quantization."""
    if checkpoint.gguf:
        return {name: loaded(part) for name, part in weight_arrays(checkpoint).items()}
    return read_arrays(checkpoint, as_float=lambda name, matrix: not matrix.exact or ".experts." in name)


def _regrouped(checkpoint: Checkpoint, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the arrays of modules in groups of 16, which MLX does not have, in groups that it has."""
    changed: dict[str, mx.array] = {}
    for name in arrays:
        module = name.removesuffix(".scales")
        biases = f"{module}.biases"
        if module == name or biases not in arrays:
            continue
        if layer_quantization(checkpoint.quantization, module) == GROUPS_OF_16:
            parts = [f"{module}.weight", name, biases]
            requantized = groups_of_16.requantized(*(arrays[part] for part in parts))
            changed |= zip(parts, requantized, strict=True)
    return changed


def _quantize_packed(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Quantize the modules whose weights are packed, as the shapes of these say."""
    from mlx_lm.utils import infer_quant_config

    def settings(path: str, module: nn.Module) -> bool | dict[str, object]:
        if not (hasattr(module, "to_quantized") and f"{path}.scales" in weights):
            return False
        inferred: dict[str, object] = infer_quant_config(path, module, weights)
        return inferred

    nn.quantize(model, class_predicate=settings)


def _requantize(model: nn.Module, was_dequantized: Callable[[str], bool]) -> None:
    """Quantize modules whose weights were dequantized, in the largest group that divides their rows."""

    def settings(path: str, module: nn.Module) -> bool | dict[str, object]:
        if not was_dequantized(path):
            return False
        for group in REQUANTIZED_GROUPS:
            if _fits(module, group):
                return {"group_size": group, "bits": REQUANTIZED_BITS}
        return False

    nn.quantize(model, class_predicate=settings)


def _in_half(array: mx.array, half: mx.Dtype) -> mx.array:
    """Convert the other half precision to this one; float32 arrays stay."""
    if array.dtype not in (mx.float16, mx.bfloat16):
        return array
    return array.astype(half)


def _drop_float32(model: nn.Module, half: mx.Dtype, checkpoint: Checkpoint) -> None:
    """Convert float32 arrays that would promote all activations: a GGUF's vectors, and scales of K-quants.

    Classes name the arrays that they want in float32; mlx-lm's own conversion asks them, too.
    """
    # headrace.json is in folders that headrace made: conversions of a GGUF, links to one, and its own quantized copies.
    # It quantizes only models of its own decoder, so a model that mlx-lm's class runs, with this file, was a GGUF,
    # where norms and biases are float32 for any model. There is one exception: quantized copies with recurrent
    # state come here if the native kernels are missing. Safetensors of the hub have no such file, and are in the types
    # that their publisher chose.
    converted = (checkpoint.path / "headrace.json").exists()
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def narrowed(path: str, array: mx.array) -> mx.array:
        if not converted or array.dtype != mx.float32 or not wanted(path) or path.endswith(_FLOAT32):
            return array
        return array.astype(half)

    model.update(tree_map_with_path(narrowed, model.parameters()))
    for _, module in model.named_modules():
        if "scales" in module and module.scales.dtype == mx.float32:
            module.set_dtype(half)


def _fits(module: nn.Module, group_size: int) -> bool:
    """Return whether a layer can be quantized in groups of this size."""
    return hasattr(module, "to_quantized") and int(module.weight.shape[-1]) % group_size == 0


def known_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the config of the part that mlx-lm has a class for: the text part, if it lacks the whole model's."""
    try:
        classes(config)
        return dict(config)
    except ValueError:
        return text_config(dict(config))


def has_class(config: Mapping[str, object]) -> bool:
    """Return whether mlx-lm has a class for a config, or for its text part."""
    try:
        classes(known_config(config))
    except ValueError:
        return False
    return True


def classes(config: Mapping[str, object]) -> "tuple[type[nn.Module], type[BaseModelArgs]]":
    """Return (model class, argument class). Raises ValueError if mlx-lm has none for this `model_type`."""
    from mlx_lm.utils import _get_classes

    fix = fix_of(config)
    stated = dict(config)
    if fix.stock:
        stated["model_type"] = fix.stock
    if fix.own:
        module = import_module(fix.own)
        stock, arguments = module.Model, module.ModelArgs
    else:
        stock, arguments = _get_classes(stated)

    # Quantization and loading look at a class's parameters and `sanitize`, so the changes are a subclass.
    class Adapted(stock):  # type: ignore[misc, valid-type]
        def __init__(self, args: "BaseModelArgs") -> None:
            super().__init__(args)
            if fix.change is not None:
                fix.change(self, args)

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Return the arrays under the names of this class's parameters."""
            names = dict(tree_flatten(self.parameters()))
            weights = _moved(without_head(weights, config), names)
            if fix.rename is not None:
                weights = fix.rename(weights, config)
            if hasattr(stock, "sanitize"):
                weights = super().sanitize(weights)
            return _stacked(weights, names)

    # mlx-lm's `load_processor` knows a model by the module of its class, and MLX prints the name of the class.
    Adapted.__module__ = stock.__module__
    Adapted.__name__ = stock.__name__
    Adapted.__qualname__ = stock.__qualname__
    return Adapted, arguments


def _moved(weights: dict[str, mx.array], names: Mapping[str, object]) -> dict[str, mx.array]:
    """Rename a text-only checkpoint for a multimodal class, or the text part of a multimodal one for a text class."""
    # Prefixes of the layers, in the checkpoint and in the class
    stored = next((body for body in BODIES if f"{body}{_TABLE}" in weights), None)
    wanted = next((name.removesuffix(_TABLE) for name in names if name.endswith(_TABLE)), None)
    if stored is None or wanted is None or (stored == "model.") == (wanted == "model."):
        return weights
    head = "language_model.lm_head." if wanted.startswith("language_model.") else "lm_head."
    moved: dict[str, mx.array] = {}
    for name, array in weights.items():
        text = text_name(name, stored)
        if text is None:
            continue
        if text.startswith("model."):
            moved[wanted + text.removeprefix("model.")] = array
        else:
            moved[head + text.removeprefix("lm_head.")] = array
    return moved


def _stacked(weights: dict[str, mx.array], names: Mapping[str, object]) -> dict[str, mx.array]:
    """Stack experts that are still stored one by one, under the names of `SwitchGLU`."""
    experts: dict[str, dict[int, mx.array]] = {}
    result: dict[str, mx.array] = {}
    for name, array in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None or name in names:
            result[name] = array
        else:
            owner, number, part = match.groups()
            experts.setdefault(f"{owner}.switch_mlp.{part}", {})[int(number)] = array
    for name, by_number in experts.items():
        result[name] = mx.stack([by_number[number] for number in sorted(by_number)])
    return result
