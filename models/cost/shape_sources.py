"""Sources of a `StepShape` that need no weights.

    shape_of_config(config)         config.json alone: sizes follow from its quantization or dtype
    shape_of_checkpoint(checkpoint) safetensors headers: exact
    shape_of_gguf(container)        GGUF headers: as headrace links or converts the file, which test_link.py compares

All raise UnsupportedModelError for an architecture with unknown matrices, CheckpointError for contradictory values.

Guards: tests/models/cost/test_costs.py and test_step_shape.py.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig, joint_norms
from headrace.models.architectures.families import architecture_named, architecture_of
from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.quantization import stated_quantization
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.shard_header import DTYPE_BYTES, TensorInfo
from headrace.models.checkpoint.text_part import text_config, text_part
from headrace.models.cost.step_shape import StepShape
from headrace.models.network.decoder_costs import (
    SizeOf,
    kv_layers,
    layer_matrices,
    looked_up_bytes,
    output_matrix,
    state_bytes,
)
from headrace.models.network.mtp import head_tensors
from headrace.models.network.stacks import stacks_of
from headrace.models.network.tensors import Tensor, latent_heads, layer_vectors
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.metrics.cost import FLOAT_MODES, quantized_bytes
from headrace.runtime.ops.kv_format import FLOAT16

if TYPE_CHECKING:
    from headrace.models.gguf.container import Container

KV = FLOAT16  # format of K/V, which `StepShape.with_kv` changes
_HALF = 2  # bytes of a number in half precision
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")  # "mlp.experts.5.up_proj"
_STACK = re.compile(r"\.(switch_mlp|experts)\.")  # "mlp.switch_mlp.up_proj"


def has_shape(config: Mapping[str, object]) -> bool:
    """Return whether the architecture's matrices are known. Raises CheckpointError for broken values."""
    text = text_config(normalized(config))
    return decoder_config(text) is not None


def shape_of_config(config: Mapping[str, object], experts: Mapping[str, object] | None = None) -> StepShape:
    """Return the shape that a config.json implies, as an MLX conversion would store it.

    experts: quantization of the experts, if it is not that of the config.
    """
    config = text_config(normalized(config))
    section = stated_quantization(config)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    plain = 4 if dtype == "float32" else _HALF  # bytes of a number that is not quantized, as mlx-lm converts them
    architecture = architecture_of(config)

    def size_of(module: str, tensor: Tensor) -> int:
        weights = tensor.rows * tensor.columns
        bias = 0
        if tensor.has_bias:
            bias = tensor.rows * plain
        storage = _storage(experts if experts and _STACK.search(module) else section, module)
        if storage is None or module.endswith(architecture.plain):
            return bias + weights * plain
        if storage.is_float:  # a scale of one byte for each group
            return bias + weights * storage.bits // 8 + weights // storage.group_size
        return bias + quantized_bytes(weights, storage.bits, storage.group_size, scale_bytes=plain)

    by_module = section is not None and any(isinstance(entry, Mapping | bool) for entry in section.values())
    source = f"config.json, {_described(section, dtype)}"
    return _build(_decoder(config), size_of, source, plain, alike=not by_module)


def shape_of_checkpoint(checkpoint: Checkpoint, decoder: DecoderConfig | None = None) -> StepShape:
    """Return the exact shape of a checkpoint's text part from its headers.

    decoder: its decoder configuration, if already parsed.
    """
    part = text_part(checkpoint)
    config = decoder or _decoder(part.config)

    mixtures = [layer.experts for layer in config.layers if layer.experts is not None]  # with equal names and counts
    stacked = mixtures[0].stacked if mixtures else ""
    # Bytes of each module under the names of the table: of stacks, where experts are stored one by one or joined
    sizes: Counter[str] = Counter()
    for name, tensor in part.tensors.items():
        stacks = stacks_of(name) or [_ONE_EXPERT.sub(f".{stacked}.", name)]
        for stack in stacks:
            module, _, kind = stack.rpartition(".")
            if kind in ("weight", "scales", "biases", "bias"):
                sizes[module] += tensor.nbytes // len(stacks)
    growth = _split_latents(sizes, config)  # bytes that loading adds

    tied = config.tied_embeddings or not sizes["lm_head"]
    count = mixtures[0].count if mixtures else 1  # experts of a stack

    def size_of(module: str, _tensor: Tensor) -> int:
        if _STACK.search(module):
            return sizes[module] // count
        return sizes[module]

    # Bytes of vectors are those of the file that no matrix, table or activation has. So tensors that the network has no
    # name for count as read. `test_a_config_alone_gives_the_bytes_of_every_family` compares with `_vector_weights`.
    config = replace(config, tied_embeddings=tied)
    shape = _build(config, size_of, "safetensors headers")

    # Parameters of an activation (xIELU in Apertus) become numbers of the graph while loading.
    constant = sum(tensor.nbytes for name, tensor in part.tensors.items() if ".act_fn." in name)
    unread = looked_up_bytes(config, size_of)
    if tied:
        unread += sizes["lm_head"]  # a tied table may be stored twice
    read = part.nbytes + growth - constant - unread
    vectors = read - sum(matrix.count * matrix.nbytes for matrix in shape.matrices)

    head = head_tensors(checkpoint)
    head_bytes = 0
    if head is not None:
        head_bytes = head.nbytes
    resident = part.nbytes + growth + head_bytes
    return replace(shape, vector_bytes=vectors, resident_bytes=resident, head_bytes=head_bytes)


def shape_of_gguf(container: "Container") -> StepShape:
    """Return the shape from the headers of a GGUF, in the format that it is linked or converted to."""
    from headrace.models.gguf.convert import layout_of, quantization_entries

    layout = layout_of(container)
    forms = layout.forms(groups_of_16=has_shape(layout.config))  # which mlx-lm's classes lack
    file = container.paths[0]
    tensors = {
        name: TensorInfo(dtype, shape, file, prod(shape) * DTYPE_BYTES[dtype])
        for name, (dtype, shape) in forms.arrays.items()
    }
    kinds = sorted({tensor.type for tensor in container.tensors.values() if len(tensor.shape) == 2})
    config = normalized(layout.config | quantization_entries(forms.settings), tensors)
    try:
        step_shape = shape_of_checkpoint(Checkpoint(file, config, [], tensors))
    except UnsupportedModelError:
        from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_config

        step_shape = shape_of_mlx_lm_config(config)
    return replace(step_shape, source=f"GGUF headers, {', '.join(kinds)}")


def _build(
    config: DecoderConfig, size_of: SizeOf, source: str, plain: int = _HALF, *, alike: bool = False
) -> StepShape:
    """Return the shape of a decoder whose matrices have these sizes.

    config: of the decoder.
    size_of: returns a matrix's bytes.
    source: of the sizes, in words.
    plain: bytes of an element of a vector.
    alike: sizes do not depend on a layer's number.
    """
    matrices = [*layer_matrices(config, size_of, alike=alike), output_matrix(config, size_of)]
    tables = looked_up_bytes(config, size_of)
    vectors = _vector_weights(config) * plain
    return StepShape(
        source=source,
        layers=len(config.layers),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        context_length=config.context_length,
        matrices=matrices,
        vector_bytes=vectors,
        kv=kv_layers(config, KV),
        state_bytes=state_bytes(config),
        resident_bytes=sum(matrix.count * matrix.nbytes for matrix in matrices) + tables + vectors,
        splits=_splits(config),
        joint_norms=sum(map(partial(joint_norms, config.family), config.layers)),
        family=config.architecture,
    )


def _split_latents(sizes: Counter[str], config: DecoderConfig) -> int:
    """Divide K/V projections in `sizes` that are stored as one; return the bytes by which they grow in total.

    The part of keys is transposed while loading, which takes half precision (`Parameters.halves_of_heads`).
    """
    latent = config.latent
    if latent is None:
        return 0
    joined = latent_heads(config, latent)
    growth = 0
    for at in (f"model.layers.{i}" for i in range(len(config.stored))):
        whole = sizes.pop(f"{at}.{joined.name}", 0)
        if whole:
            # Rows of each head: `other` of its key's part without rotation, `value` of its value.
            share = whole * latent.other // (latent.other + latent.value)
            sizes[f"{at}.self_attn.embed_q"] = max(share, _HALF * config.heads * latent.other * latent.size)
            sizes[f"{at}.self_attn.unembed_out"] = whole - share
            growth += sizes[f"{at}.self_attn.embed_q"] - share
    return growth


def _vector_weights(config: DecoderConfig) -> int:
    """Return the number of weights that no matrix has: norms, convolutions and the like."""
    layers = Counter(config.stored)  # most are equal
    last_norm = config.hidden_size * config.family.norm_weights
    if config.family.norm_bias:
        last_norm *= 2
    if config.family.embedding_norm:
        last_norm += 2 * config.hidden_size
    last_mix = 2 * config.hidden_size if config.block_layers else 0
    of_layers = sum(
        count * vector.size * vector.width for layer, count in layers.items() for vector in layer_vectors(config, layer)
    )
    return last_norm + last_mix + config.input_size + of_layers


def _splits(config: DecoderConfig) -> tuple[Sequence[str], Sequence[str]]:
    """Return the ways in which ranks can divide it; on a GPU mlx-lm's classes run models with recurrent state."""
    sections: Sequence[str] = config.splits
    if any(layer.rope and layer.rope.changes for layer in config.layers):
        sections = ()
    if any(layer.mixer for layer in config.layers):
        return sections, architecture_named(config.architecture).class_splits
    return sections, sections


def _decoder(config: Mapping[str, object]) -> DecoderConfig:
    """Return the decoder's configuration. Raises UnsupportedModelError for what only mlx-lm's classes run."""
    decoder = decoder_config(config)
    if decoder is None:
        kind = config.get("model_type")
        raise UnsupportedModelError(
            f"the matrices of model_type {kind!r} are not known from its config alone",
            "`headrace bench` measures any model",
        )
    return decoder


class _Storage(Struct, frozen=True):
    """The quantization of a module."""

    bits: int  # of a weight
    group_size: int
    is_float: bool  # 4- or 8-bit floats with an exponent for each group, such as mxfp4


def _storage(section: Mapping[str, object] | None, module: str) -> _Storage | None:
    """Return the quantization of a module, None for a plain one. Raises CheckpointError."""
    if section is None:
        return None
    entry = section.get(module, section)
    if entry is False:  # mlx-lm's mark for a plain module
        return None
    if not isinstance(entry, Mapping):
        entry = section
    bits = entry.get("bits", section.get("bits"))
    group = entry.get("group_size", section.get("group_size", 64))
    if not (isinstance(bits, int) and 0 < bits <= 32 and isinstance(group, int) and group > 0):
        raise CheckpointError(f"config.json: {module} is quantized to {bits!r} bits in groups of {group!r}")
    return _Storage(bits, group, str(entry.get("mode", "affine")) in FLOAT_MODES)


def _described(section: Mapping[str, object] | None, dtype: str) -> str:
    """Return the stored format in words."""
    if not section:
        return dtype
    return f"{section.get('bits')}-bit, groups of {section.get('group_size')}"
