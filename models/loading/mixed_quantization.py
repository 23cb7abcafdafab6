"""Quantization of a plain checkpoint with a format for each projection: parts, trials of one part, and writing.

A part is what headrace multiplies at once: queries, keys and values, or gate and up. Its projections have one format,
so that they stay one matrix. The written directory is an ordinary MLX checkpoint: config.json has a `quantization`
entry for each module. Dense models of headrace's own decoder are supported.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.models.checkpoint.arrays import save_arrays
from headrace.models.checkpoint.quantization import BITS, GROUP_SIZES, Groups
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.tensor_info import FLOATS, TensorInfo
from headrace.models.checkpoint.text_part import text_part
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.loading.fitted_rounding import dequantized, rounded, squared_error, stored_bytes
from headrace.models.loading.keep_quantized import matrix_tensors, write_side_files
from headrace.models.network.decoder import Decoder
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensors import layer_tensors
from headrace.models.network.weight_arrays import loaded, shard_arrays, weight_arrays
from headrace.models.registry.progress import Progress
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.metrics.cost import FLOAT_MODES

FORMATS = (
    *(Groups(bits, group_size) for bits in BITS for group_size in GROUP_SIZES),
    Groups(*FLOAT_MODES["mxfp4"], "mxfp4"),
    Groups(*FLOAT_MODES["nvfp4"], "nvfp4"),
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")  # begins a module's name: the layer


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Projections with one format.

    name: of the matrix that they are in the network.
    shapes: rows and columns by module.
    layer: None: outside of layers, as embedding table and head.
    """

    name: str
    shapes: Mapping[str, tuple[int, int]]
    layer: int | None

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(prod(shape) for shape in self.shapes.values())

    def nbytes(self, groups: Groups) -> int:
        """Return the bytes of the part in a format."""
        return sum(stored_bytes(prod(shape), groups) for shape in self.shapes.values())

    @property
    def formats(self) -> list[Groups]:
        """The formats whose groups divide all rows."""
        widths = [columns for _, columns in self.shapes.values()]
        return [groups for groups in FORMATS if all(width % groups.group_size == 0 for width in widths)]

    @property
    def probe(self) -> Groups:
        """The format in which the part's effect on the logits is measured."""
        large_groups = Groups(3, 64)
        if large_groups in self.formats:
            return large_groups
        return Groups(3, 32)


def quantizable_parts(checkpoint: Checkpoint, name: str) -> list[WeightGroup]:
    """Return the parts in order of the checkpoint's layers.

    Raises UsageError for a quantized checkpoint, UnsupportedModelError if its parts cannot be told.
    """
    if checkpoint.quantization is not None:
        raise UsageError(
            f"{name} is quantized already; rounding its weights again would add to the error of the first time",
            "give the original checkpoint, in float16 or bfloat16",
        )
    uniform_hint = f"`headrace pull {name} --quantize 4` quantizes all matrices alike"
    config = own_decoder(checkpoint)
    if config is None:
        raise UnsupportedModelError(
            f"{name}: headrace does not choose bits for its architecture",
            "mlx_lm.convert -q does it for mlx-lm's models",
        )
    if any(layer.experts is not None for layer in config.layers):
        raise UnsupportedModelError(f"{name}: headrace does not choose bits for mixtures of experts", uniform_hint)

    text = text_part(checkpoint)
    shapes: dict[str, tuple[int, int]] = {}
    for tensor, info in text.tensors.items():
        module, _, leaf = tensor.rpartition(".")
        if leaf != "weight" or not _is_quantizable(info):
            continue
        if text.stored[tensor] != tensor:
            raise UnsupportedModelError(
                f"{name}: its tensors have other names in MLX, such as {tensor} for {text.stored[tensor]}",
                uniform_hint,
            )
        rows, columns = info.shape
        shapes[module] = (rows, columns)
    return _group_by_product(shapes, config)


def _is_quantizable(info: TensorInfo) -> bool:
    """Return whether a tensor is a matrix of floats whose rows have whole groups."""
    return len(info.shape) == 2 and info.dtype in FLOATS and info.shape[1] % min(GROUP_SIZES) == 0


def _group_by_product(shapes: Mapping[str, tuple[int, int]], config: DecoderConfig) -> list[WeightGroup]:
    """Return the matrices in parts: together those that are multiplied at once. shapes: of all matrices, by module."""
    # Parts in the network, and the matrices of each. A matrix that is in none is a part by itself.
    products: dict[str, str] = {}  # module -> name of its part
    for index, layer in enumerate(config.stored):
        for tensor in layer_tensors(config, layer):
            for module in (tensor.name, tensor.whole):
                products[f"model.layers.{index}.{module}"] = f"model.layers.{index}.{tensor.product}"
    shapes_by_part: dict[str, dict[str, tuple[int, int]]] = {}
    for module, shape in shapes.items():
        part_name = products.get(module, module)
        shapes_by_part.setdefault(part_name, {})[module] = shape
    parts = [WeightGroup(name, modules, _layer_of(name)) for name, modules in shapes_by_part.items()]
    return sorted(parts, key=lambda part: (-1 if part.layer is None else part.layer, part.name))


def _layer_of(name: str) -> int | None:
    """Return the layer of a module; None for one outside of layers."""
    match = _LAYER.match(name)
    if match is None:
        return None
    return int(match[1])


def trial(checkpoint: Checkpoint, decoder: Decoder, part: WeightGroup, importance: mx.array | None) -> Decoder:
    """Return the decoder with one part rounded to its probe format. Only that layer's weights are in memory twice.

    importance: of the part's columns; None: all are alike.
    """

    def round_part(arrays: dict[str, object]) -> dict[str, object]:
        rounded_arrays = dict(arrays)
        for module in part.shapes:
            name = f"{module}.weight"
            matrix = loaded(arrays[name])
            rounded_arrays[name] = dequantized(rounded(matrix, part.probe, importance), matrix.dtype)
        return rounded_arrays

    parameters = Parameters(checkpoint, decoder.ops, decoder.dtype, take=round_part)
    return decoder.with_part(parameters, part.layer)


def squared_errors(checkpoint: Checkpoint, part: WeightGroup, importance: mx.array | None) -> list[float]:
    """Return the squared error of the part's weights in each of its formats, by the importance of columns."""
    arrays = weight_arrays(checkpoint)
    matrices = [loaded(arrays[f"{module}.weight"]) for module in part.shapes]
    return [sum(squared_error(matrix, groups, importance) for matrix in matrices) for groups in part.formats]


def write_mixed(
    checkpoint: Checkpoint,
    parts: Sequence[tuple[WeightGroup, Groups]],
    importances: Mapping[str, mx.array],
    target: Path,
    progress: Progress,
) -> None:
    """Write the checkpoint with each part in its format. Memory: the output of one shard.

    parts: with the format of each.
    importances: of columns, by part; columns of other parts are alike.
    target: an existing folder.
    progress: gets the bytes of the checkpoint that are done.
    """
    formats: dict[str, Groups] = {}
    importance_by_module: dict[str, mx.array | None] = {}
    for part, groups in parts:
        for module in part.shapes:
            formats[module] = groups
            importance_by_module[module] = importances.get(part.name)

    # Shard after shard.
    text = text_part(checkpoint)
    stored = set(text.stored.values())  # of the text part: others, such as a vision part's, are left out
    total = sum(info.nbytes for info in text.tensors.values())
    done = 0
    for number, arrays in enumerate(shard_arrays(checkpoint)):
        written: dict[str, mx.array] = {}
        for name in sorted(stored & arrays.keys()):
            module = name.removesuffix(".weight")
            array = arrays.pop(name)  # not kept, so that its memory is free after rounding
            if module in formats:
                written |= matrix_tensors(module, rounded(array, formats[module], importance_by_module[module]))
            else:
                written[name] = array
            done += checkpoint.tensors[name].nbytes
            progress("quantizing", done, total)
        save_arrays(target / f"model-{number:05d}.safetensors", written)
    write_side_files(checkpoint, _section(formats), target)


def _section(formats: Mapping[str, Groups]) -> dict[str, object]:
    """Return config.json's `quantization`: an entry for each module, and general settings that none of them needs."""
    entries = {module: groups._asdict() for module, groups in formats.items()}
    return {"bits": 4, "group_size": 64, "mode": "affine", **entries}
