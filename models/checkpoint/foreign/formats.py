"""Recognition of quantization formats other than MLX's, from headers and config.json.

`recognise` returns None for plain and MLX-quantized checkpoints. Unknown methods and unexplained quantized tensors
are refused by name, since read as plain numbers they would give a broken model.

Methods, by their names in config.json's `quantization_config`:

    fp8, fbgemm_fp8, modelopt (FP8)       W (..., N, K) in E4M3; `W_scale_inv` or `W_scale` multiplies it
    compressed-tensors                    float- and int-quantized: the same; pack-quantized: `W_packed`, `W_scale`
    gptq, awq                             `qweight`, `qzeros`, `scales`, and for GPTQ `g_idx`
    bitsandbytes (4 bits)                 see `nf4`
    bitnet                                W in 2 bits, `W_scale`

A new method is a case of `_read`, and a layout in `matrices` and `checkpoint.arrays`, if its values are stored in
another way.

Guards: tests/models/checkpoint/test_foreign.py and tests/models/mlx_lm/test_deepseek_v41.py.
"""

from collections.abc import Mapping
from math import prod

from msgspec.structs import replace

from headrace.models.checkpoint.foreign import nf4
from headrace.models.checkpoint.foreign.matrices import (
    Foreign,
    ForeignMatrix,
    Layout,
    requantized,
)
from headrace.models.checkpoint.shard_header import FLOATS, TensorInfo
from headrace.runtime.config.typed import as_mapping
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

AFFINE_GROUPS = (128, 64, 32)  # MLX's group sizes, largest first

# mlx-lm's classes read these formats for a few architectures, and refuse other shapes.
_LEFT_TO_MLX_LM = ("mxfp4", "mxfp8")
# Families whose classes read FP8 with power-of-two scales, and the rows and columns that share one: see `_is_mxfp8`.
_READ_MXFP8 = {"deepseek_v41": 32, "deepseek_v41_text": 32, "deepseek_v4": 128}
# Tensors next to a quantized matrix that its weights do not need: quantization of activations and K/V.
_IGNORED = (
    "input_scale", "activation_scale", "input_scale_ub", "input_zero_point", "output_scale", "k_scale", "v_scale",
    "q_scale", "input_global_scale", "weight_shape",
)  # fmt: skip
_MASKS = ("bias", "masked_bias", "position_ids", "causal_mask")  # buffers in older checkpoints
_WEIGHTS = ("weight", "proj", "expert")  # parts of the names of weight matrices
_HINT = "look for the original in bf16, or for an MLX or GGUF conversion of it"


def recognise(config: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Foreign | None:
    """Return the foreign quantization of a checkpoint, or None.

    Raises UnsupportedModelError for an unknown method, CheckpointError for tensors that contradict it.
    """
    section = config.get("quantization_config", config.get("compression_config"))
    if isinstance(config.get("quantization"), Mapping) or section is None:
        _refuse_unexplained(tensors, mlx=isinstance(config.get("quantization"), Mapping))
        return None
    if not isinstance(section, Mapping):
        raise CheckpointError("config.json: quantization_config is not an object")
    method = section.get("quant_method")
    block = _READ_MXFP8.get(str(config.get("model_type")))
    if block is not None and _is_mxfp8(section, tensors, block):
        weights = {name for name in tensors if _has_own_scale(name, tensors)}
        scales = {f"{name.removesuffix('weight')}scale" for name in weights}
        others = [name for name in tensors.keys() - weights - scales if _is_read_by_class(name)]
        _refuse_unexplained({name: tensors[name] for name in others}, mlx=False)
        return None
    if method in _LEFT_TO_MLX_LM or _is_nvfp4(section):
        if any(info.dtype in ("F8_E4M3", "I8") and name.endswith("weight") for name, info in tensors.items()):
            raise _unsupported(f"{method} with 8-bit weights")
        return None
    recognised = _read(str(method), section, tensors)
    _refuse_unexplained(recognised.tensors(tensors), mlx=True)
    return recognised


def _is_mxfp8(section: Mapping[str, object], tensors: Mapping[str, TensorInfo], block: int) -> bool:
    """Return whether FP8 has power-of-two scales (E8M0) of square blocks, as DeepSeek V4 and V4.1 store them.

    Their classes repeat them for each row and 32 columns, and keep the weights packed, experts in 4 bits included.
    """
    blocks = section.get("scale_fmt") == "ue8m0" and section.get("weight_block_size") == [block, block]
    scales = {tensors[f"{name.removesuffix('weight')}scale"].dtype for name in tensors if _has_own_scale(name, tensors)}
    return section.get("quant_method") == "fp8" and blocks and scales == {"F8_E8M0"}


def _is_read_by_class(name: str) -> bool:
    """Return whether the class of DeepSeek V4 or V4.1 reads a tensor: none of images, prediction heads and engrams."""
    return not name.startswith(("vision.", "aligner.", "image_", "mtp.")) and ".engram." not in name


def _has_own_scale(name: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether the scale of a weight is a tensor `scale` of the same module."""
    module, _, part = name.rpartition(".")
    return part == "weight" and f"{module}.scale" in tensors


def _is_nvfp4(section: Mapping[str, object]) -> bool:
    """Return whether ModelOpt's 4-bit floats are stated, which mlx-lm reads."""
    return section.get("quant_method") == "modelopt" and _modelopt_algorithm(section) == "NVFP4"


def _modelopt_algorithm(section: Mapping[str, object]) -> object:
    """Return the algorithm that ModelOpt states, in a section of its own or in this one."""
    inner = section.get("quantization")
    if isinstance(inner, Mapping):
        return inner.get("quant_algo")
    return section.get("quant_algo")


def _read(method: str, section: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Foreign:
    """Return the matrices of a checkpoint, by the method that config.json names. Raises UnsupportedModelError."""
    if method in ("gptq", "awq"):
        return _gptq_awq(method, section, tensors)
    if method == "compressed-tensors":
        return _compressed(section, tensors)
    if method == "bitsandbytes" and section.get("load_in_4bit"):
        return _four_bit(tensors)
    if method == "bitnet":
        return _ternary(section, tensors)
    if method in ("fp8", "fbgemm_fp8", "modelopt"):
        algorithm = _modelopt_algorithm(section)
        if method == "modelopt" and algorithm != "FP8":
            raise _unsupported(f"modelopt {algorithm}")
        blocks = section.get("weight_block_size")
        return _scaled("FP8", tensors, _block_size(blocks))
    raise _unsupported(method)


def _compressed(section: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Foreign:
    """Recognise compressed-tensors (https://github.com/vllm-project/compressed-tensors) from its `config_groups`."""
    kind = section.get("format")
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise _unsupported(f"compressed-tensors with {sparsity['format']} sparsity")
    if section.get("transform_config"):
        raise _unsupported("compressed-tensors with transforms")

    # Each group of modules states its weights' type; all have to be of one.
    groups = as_mapping(section.get("config_groups")).values()
    stated = [as_mapping(group).get("weights") for group in groups]
    weights = [entry for entry in stated if isinstance(entry, Mapping)]

    # 8 bits, a tensor or a block of it with a scale
    if kind in ("float-quantized", "int-quantized", "naive-quantized"):
        if any(entry.get("num_bits") != 8 for entry in weights):
            raise _unsupported(f"compressed-tensors {kind} with other than 8 bits")
        blocks = {_block_size(entry.get("block_structure")) for entry in weights}
        if kind == "float-quantized":
            name = "FP8"
        elif kind == "int-quantized":
            name = "INT8"
        else:
            name = "8-bit"
        block: tuple[int, ...] = ()
        if len(blocks) == 1:
            [block] = blocks
        return _scaled(f"{name} (compressed-tensors)", tensors, block)

    # Integers of several to a word
    if kind == "pack-quantized":
        kinds = {(entry.get("num_bits"), entry.get("type", "int")) for entry in weights}
        if len(kinds) != 1:
            raise _unsupported("compressed-tensors pack-quantized with several widths")
        bits, type_ = kinds.pop()
        if bits not in (2, 4, 8) or type_ != "int":
            raise _unsupported(f"compressed-tensors pack-quantized to {bits}-bit {type_}")
        return _packed(bits, tensors)
    raise _unsupported(f"compressed-tensors {kind}")


def _scaled(method: str, tensors: Mapping[str, TensorInfo], block: tuple[int, ...]) -> Foreign:
    """Pair every E4M3 or int8 tensor with its scale."""
    matrices: dict[str, ForeignMatrix] = {}
    for name, info in tensors.items():
        if info.dtype not in ("F8_E4M3", "I8") or name.endswith("_zero_point"):
            continue
        scale = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in tensors), None)
        if scale is None and _has_own_scale(name, tensors):
            raise _unsupported(f"{method} with a scale named {name.removesuffix('weight')}scale")
        if scale is None or len(info.shape) < 2:
            raise CheckpointError(f"tensor {name} is {info.dtype} and has no scale")
        parts = {"data": name, "scales": scale}
        if f"{name}_zero_point" in tensors:
            parts["zeros"] = f"{name}_zero_point"
            zeros = tensors[parts["zeros"]]
            if zeros.dtype != "I8" or zeros.shape != tensors[scale].shape:
                raise CheckpointError(f"tensor {name}_zero_point is {zeros.dtype} {zeros.shape}, unlike its scales")
        blocks = _blocks(name, info.shape, tensors[scale], block)
        bits, group = requantized(info.shape)
        matrices[name] = ForeignMatrix(
            "scaled", info.shape, parts, stored_bits=8, stored_group=0, blocks=blocks, bits=bits, group_size=group
        )
    return Foreign(method, matrices, _dropped(tensors))


def _blocks(name: str, shape: tuple[int, ...], scale: TensorInfo, block: tuple[int, ...]) -> tuple[int, ...]:
    """Return the elements of each axis that share a scale. block: needed if the last block is cut short."""
    if scale.dtype not in FLOATS:
        raise _unsupported(f"{name}: scales of type {scale.dtype}")
    counts = scale.shape
    if prod(counts) == 1:  # one scale for the tensor
        return shape
    if counts == shape[-2:-1] and len(shape) == 2:  # one for each row
        counts = (*counts, 1)
    sizes: tuple[int, ...] = ()
    if len(block) == 2:
        sizes = (*(1 for _ in shape[:-2]), *block)
    blocks: list[int] = []
    for axis, (size, count) in enumerate(zip(shape, counts, strict=False)):
        if count == 1 or count == size:
            blocks.append(size // count)
        elif sizes and count == -(-size // sizes[axis]):
            blocks.append(sizes[axis])
        elif not sizes and axis == len(shape) - 1 and size % count == 0:
            blocks.append(size // count)  # groups along a row
        else:
            break
    if len(counts) != len(shape) or len(blocks) != len(shape):
        raise CheckpointError(f"tensor {name} of shape {shape} has scales of shape {scale.shape}: no blocks fit both")
    return tuple(blocks)


def _gptq_awq(method: str, section: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Foreign:
    """Recognise GPTQ and AWQ: W transposed, `32 / bits` values per word, zero points packed the same way."""
    bits = section.get("bits", section.get("w_bit", 4))
    kind = str(section.get("checkpoint_format") or section.get("format") or section.get("version") or "").lower()
    known_bits, known_kinds = _PACKINGS[method]
    if not isinstance(bits, int) or bits not in known_bits or kind not in known_kinds:
        form = f"{method} with {bits} bits"
        if kind:
            form += f" in the format {kind!r}"
        raise _unsupported(form)
    if section.get("dynamic") or section.get("is_marlin_format"):
        raise _unsupported(f"{method} with settings per module or in Marlin's layout")

    matrices: dict[str, ForeignMatrix] = {}
    per_word = 32 // bits  # values in a word
    for name, info in tensors.items():
        if not name.endswith(".qweight"):
            continue
        module = name.removesuffix(".qweight")
        parts = {"data": name, "scales": f"{module}.scales", "zeros": f"{module}.qzeros"}
        if method == "gptq" and f"{module}.g_idx" in tensors:
            parts["order"] = f"{module}.g_idx"
        _need(parts, tensors)
        inner, outer = _matrix_shape(info)
        shape = (outer * per_word, inner)
        if method == "gptq":  # words along the inputs, of AWQ along the outputs
            shape = (outer, inner * per_word)
        groups = tensors[parts["scales"]].shape[0]
        wanted = {"scales": (groups, shape[0]), "zeros": (groups, shape[0] // per_word), "order": (shape[1],)}
        _check(parts, tensors, wanted, shape[1], groups)
        affine = None  # with columns ordered by activation, groups are no neighbours
        if not section.get("desc_act"):
            affine = _affine_group(shape[1] // groups)
        matrices[f"{module}.weight"] = _matrix(_LAYOUTS[method], shape, parts, bits, shape[1] // groups, affine)
    less_one = method == "gptq" and kind != "gptq_v2"
    return Foreign(method.upper(), matrices, _dropped(tensors), less_one)


_LAYOUTS: dict[str, Layout] = {"gptq": "gptq", "awq": "awq"}
# Method -> (bits, formats) that are read; "" where config.json states none
_PACKINGS = {"gptq": ((2, 4, 8), ("", "gptq", "gptq_v2")), "awq": ((4,), ("", "gemm"))}


def _matrix_shape(info: TensorInfo) -> tuple[int, int]:
    """Return the shape of a matrix; (0, 0), which fits nothing, of other tensors."""
    if len(info.shape) != 2:
        return 0, 0
    rows, columns = info.shape
    return rows, columns


def _packed(bits: int, tensors: Mapping[str, TensorInfo]) -> Foreign:
    """Recognise compressed-tensors' packed integers: W (N, K) in words along its rows, offset to be unsigned."""
    matrices: dict[str, ForeignMatrix] = {}
    for name, info in tensors.items():
        if not name.endswith(".weight_packed"):
            continue
        weight = name.removesuffix("_packed")
        parts = {"data": name, "scales": f"{weight}_scale"}
        for role, end in (("zeros", "_zero_point"), ("order", "_g_idx")):
            if f"{weight}{end}" in tensors:
                parts[role] = f"{weight}{end}"
        _need(parts, tensors)
        rows, words = _matrix_shape(info)
        columns = words * 32 // bits
        _, groups = _matrix_shape(tensors[parts["scales"]])
        wanted = {"scales": (rows, groups), "zeros": (-(-rows * bits // 32), groups), "order": (columns,)}
        _check(parts, tensors, wanted, columns, groups)
        affine = None
        if "order" not in parts:
            affine = _affine_group(columns // groups)
        matrices[weight] = _matrix("packed", (rows, columns), parts, bits, columns // groups, affine)
    return Foreign(f"{bits}-bit integers (compressed-tensors)", matrices, _dropped(tensors))


def _ternary(section: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Foreign:
    """Recognise BitNet's ternary weights, which have one scale a matrix. Raises CheckpointError for other shapes."""
    if section.get("use_rms_norm") or any(name.endswith(".rms_norm.weight") for name in tensors):
        raise _unsupported("bitnet that normalizes the input of each projection")
    # transformers' default class divides by the scale
    layout: Layout = "ternary" if section.get("linear_class") == "autobitlinear" else "ternary_over"
    matrices: dict[str, ForeignMatrix] = {}
    for name, info in tensors.items():
        if not name.endswith(".weight_scale"):
            continue
        weight = name.removesuffix("_scale")
        parts = {"data": weight, "scales": name}
        _need(parts, tensors)
        rows, columns = _matrix_shape(tensors[weight])
        if not rows or tensors[weight].dtype != "U8" or info.dtype not in FLOATS or prod(info.shape) != 1:
            raise CheckpointError(f"{weight} and its scale are not stored as ternary weights are")
        matrices[weight] = _matrix(layout, (4 * rows, columns), parts, 2, columns, _affine_group(columns))
    if not matrices:
        raise _unsupported("bitnet with weights that every product rounds, as they are trained")
    return Foreign("ternary weights (BitNet)", matrices, _dropped(tensors))


def _four_bit(tensors: Mapping[str, TensorInfo]) -> Foreign:
    """Recognise bitsandbytes' 4-bit matrices by their states."""
    matrices: dict[str, ForeignMatrix] = {}
    states = [(name.removesuffix(end), name) for name in tensors for end in nf4.STATES if name.endswith(end)]
    for weight, state in states:
        coded = nf4.read_matrix(weight, state, tensors)
        bits, group = requantized(coded.shape)
        matrices[weight] = ForeignMatrix(
            "nf4",
            coded.shape,
            coded.parts,
            stored_bits=4,
            stored_group=coded.codes,
            blocks=(coded.scales,),
            bits=bits,
            group_size=group,
            offset=coded.offset,
        )
    if not matrices:
        raise _unsupported("bitsandbytes without 4-bit weights in the checkpoint")
    return Foreign("4-bit codes (bitsandbytes)", matrices, _dropped(tensors) | {state for _, state in states})


def _matrix(
    layout: Layout, shape: tuple[int, int], parts: dict[str, str], stored: int, group: int, affine: int | None
) -> ForeignMatrix:
    """Return a matrix of packed integers.

    layout: of the words.
    shape: of the matrix, as the network has it.
    parts: tensors by role.
    stored, group: bits and columns that share a scale, in the file.
    affine: columns that share a scale in MLX's groups, which then represent it exactly; None: it is requantized.
    """
    matrix = ForeignMatrix(layout, shape, parts, stored_bits=stored, stored_group=group)
    if affine is not None:
        return replace(matrix, bits=stored, group_size=affine, exact=True)
    bits, becomes = requantized(shape)
    return replace(matrix, bits=bits, group_size=becomes)


def _affine_group(group: int) -> int | None:
    """Return MLX's largest group size that divides a group of `group` columns; None if there is none."""
    return next((size for size in AFFINE_GROUPS if group % size == 0), None)


def _need(parts: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError for a part that is missing."""
    for name in parts.values():
        if name not in tensors:
            raise CheckpointError(f"the checkpoint has {parts['data']} but no tensor {name}")


def _check(
    parts: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    wanted: Mapping[str, tuple[int, ...]],
    columns: int,
    groups: int,
) -> None:
    """Raise CheckpointError for parts of the wrong type or shape, and columns that do not divide into the groups.

    parts: tensors by role.
    tensors: all headers.
    wanted: shapes by role.
    columns, groups: of the matrix, and of each row's columns that share a scale.
    """
    for role, name in parts.items():
        info = tensors[name]
        types: tuple[str, ...]
        if role == "scales":
            types = FLOATS
        elif role == "order":
            types = ("I32", "I64")
        else:
            types = ("I32",)
        if info.dtype not in types or info.shape != wanted.get(role, info.shape):
            raise CheckpointError(f"tensor {name} is {info.dtype} {info.shape}, which does not fit {parts['data']}")
    if not groups or columns % groups:
        raise CheckpointError(f"{parts['data']}: {columns} columns cannot be in {groups} groups")


def _block_size(value: object) -> tuple[int, ...]:
    """Return the rows and columns of a block, as stated; () for none. Raises CheckpointError."""
    if value is None:
        return ()
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
        raise CheckpointError(f"config.json: a quantization block must be two sizes, not {value!r:.60}")
    return tuple(value)


def _dropped(tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Return the tensors that weights do not need."""
    return frozenset(name for name in tensors if name.rpartition(".")[2] in _IGNORED)


def _refuse_unexplained(tensors: Mapping[str, TensorInfo], *, mlx: bool) -> None:
    """Refuse tensors that are neither floats nor words with scales: their format is unknown.

    mlx: words with scales are expected: the config states MLX's quantization, or another one has been converted to it.
    """
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if info.dtype in FLOATS or part in _MASKS or not info.shape:
            continue
        # MLX's packed weights, and the one-byte scales of its float modes
        words = mlx and (
            (part == "weight" and info.dtype == "U32" and f"{module}.scales" in tensors)
            or (part == "scales" and info.dtype == "U8" and f"{module}.weight" in tensors)
        )
        if not words and (info.dtype.startswith("F8") or any(word in name for word in _WEIGHTS)):
            raise UnsupportedModelError(f"tensor {name} is {info.dtype}, which config.json does not explain", _HINT)


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the quantization of the weights is not supported: {what}", _HINT)
