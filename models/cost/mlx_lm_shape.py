"""`StepShape` of architectures that only mlx-lm's classes run: the class is made without reading weights.

From a config alone, parameters get the shapes and types implied by its quantization and dtype.

Guard: tests/models/cost/test_mlx_lm_shape.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from msgspec.structs import replace

from headrace.models.architectures.fields import text_section
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.cost.step_shape import StepShape
from headrace.models.mlx_lm.cache import quantized
from headrace.models.mlx_lm.costs import measure
from headrace.models.mlx_lm.fixes import class_name
from headrace.models.mlx_lm.load import load, of_config, refused
from headrace.models.mlx_lm.ranked import ways
from headrace.runtime.metrics.cost import LayerKV
from headrace.runtime.ops.kv_format import FLOAT16, FORMATS


def shape_of_mlx_lm_checkpoint(checkpoint: Checkpoint) -> StepShape:
    """Return the shape from the headers of a checkpoint. Raises what loading it raises."""
    model, _ = load(checkpoint, mx.DeviceType.gpu)
    return _shape(model, checkpoint.config, checkpoint.path.name, "safetensors headers")


def shape_of_mlx_lm_config(config: Mapping[str, object]) -> StepShape:
    """Return the shape from a config.json.

    Raises UnsupportedModelError if mlx-lm has no class for it, CheckpointError if the class refuses it.
    """
    config = normalized(config)
    return _shape(of_config(config), config, "it", "config.json")


def _shape(model: nn.Module, config: Mapping[str, object], name: str, source: str) -> StepShape:
    """Return the shape of a class without weights.

    model: the class, made from its config.
    config: of the model.
    name: of the model, for errors.
    source: of the figures, in words.
    """
    try:
        measured = measure(model, config)
    except Exception as error:  # classes raise anything on unexpected sizes
        raise refused(config, name, error) from error
    text = text_section(config)
    heads = text.get("num_attention_heads") or 0
    context = text.get("max_position_embeddings")
    # A head multiplies and adds once for keys and once for values: 4 FLOPs a dimension and entry.
    head_dim = measured.attention_flops // (4 * heads) if heads else 0
    # For a format that the class cannot store, `quantized` returns the reason as a text.
    kinds = [quantized(model, kind) for kind in FORMATS[1:]]
    return StepShape(
        source=f"{source}, {class_name(config)}",
        layers=int(text.get("num_hidden_layers") or len(measured.kv)),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        context_length=context if isinstance(context, int) and context > 0 else 2048,
        matrices=measured.matrices,
        vector_bytes=measured.vector_bytes,
        kv=_merged(measured.kv),
        resident_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        kv_formats=[FLOAT16, *(kind for kind in kinds if not isinstance(kind, str))],
        stock=True,
        splits=(ways(model, config),) * 2,  # equal for both devices of `StepShape.splits`
        family=str(config.get("model_type", "")),
    )


def _merged(kv: Sequence[LayerKV]) -> Sequence[LayerKV]:
    """Return equal entries as one with their number as its count. Each of `kv` has a count of 1."""
    return [replace(layer, count=count) for layer, count in Counter(kv).items()]
