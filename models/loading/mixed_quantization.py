"""Quantization of a plain checkpoint with a format for each projection: parts, trials of one part, and writing.

A part is what headrace multiplies at once: queries, keys and values, or gate and up. Its projections have one format,
so that they stay one matrix. A stack of experts is one matrix, too: MLX has one format for all of them. Gates and ups
of experts are a part, and their projections back are another.

The written directory is an ordinary MLX checkpoint, with the names and layouts of `mlx_lm.convert`: config.json has a
`quantization` entry for each module. Models of headrace's own decoder are supported. Modules have headrace's names
here (`models.checkpoint.text_part`), and MLX's in the written files.

Guards: tests/models/loading/test_mixed_quantization.py and tests/parity/test_mixed_quantization.py.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig
from headrace.models.architectures.families import architecture_of
from headrace.models.checkpoint.arrays import save_arrays
from headrace.models.checkpoint.quantization import BITS, GROUP_SIZES, Groups
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.shard_header import FLOATS, TensorInfo
from headrace.models.checkpoint.text_part import TextCheckpoint, text_part
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.loading.fitted_rounding import rounded, squared_error, stored_bytes, through_rounding
from headrace.models.loading.keep_quantized import matrix_tensors, write_side_files
from headrace.models.network.decoder import Decoder
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensors import named_tensors
from headrace.models.network.weight_arrays import loaded, weight_arrays
from headrace.models.registry.progress import Progress
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.metrics.cost import FLOAT_MODES

FORMATS = (
    *(Groups(bits, group_size) for bits in BITS for group_size in GROUP_SIZES),
    Groups(*FLOAT_MODES["mxfp4"], "mxfp4"),
    Groups(*FLOAT_MODES["nvfp4"], "nvfp4"),
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")  # begins a module's name: the layer
_ANY_LAYER = re.compile(r"\.(\d{1,6})\.")  # "language_model.model.layers.3.mlp": the layer, under MLX's prefixes
_TYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}  # in headers of safetensors
_SHARD = 1 << 30  # bytes of the arrays that are written to one file


class WeightGroup(Struct, frozen=True):
    """Projections with one format.

    name: of the matrix that they are in the network.
    shapes: rows and columns by module; of a stack, experts (or heads), rows and columns.
    layer: None: outside of layers, as embedding table and head.
    share: of the weights, how many times a decode step reads them: the active share of experts, 0 of a table of rows.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    layer: int | None
    share: Fraction = Fraction(1)

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
        widths = [shape[-1] for shape in self.shapes.values()]
        return [groups for groups in FORMATS if all(width % groups.group_size == 0 for width in widths)]

    @property
    def probe(self) -> Groups:
        """The format in which the part's effect on the logits is measured."""
        large_groups = Groups(3, 64)
        if large_groups in self.formats:
            return large_groups
        return Groups(3, 32)


class PlainModel(Struct, frozen=True):
    """A plain checkpoint in MLX's names and layouts, and its parts.

    text: its text part; `stored` has MLX's names.
    parts: in order of the layers.
    as_stored: names and layouts are those of the files; False: mlx-lm's class converts them.
    """

    checkpoint: Checkpoint
    text: TextCheckpoint
    parts: Sequence[WeightGroup]
    as_stored: bool

    @property
    def weights(self) -> int:
        """Number of weights, those that stay plain included."""
        return sum(prod(info.shape) for info in self.text.tensors.values())

    @property
    def other_bytes(self) -> int:
        """Bytes of the tensors that stay as they are."""
        return self.text.nbytes - sum(self.plain_bytes(part) for part in self.parts)

    def plain_bytes(self, part: WeightGroup) -> int:
        """Return the bytes of a part in the given weights."""
        return sum(self.text.tensors[f"{module}.weight"].nbytes for module in part.shapes)

    def arrays(self) -> dict[str, Any]:
        """Return new arrays by MLX's names, or parts of a GGUF. They are not read yet, and `loaded` reads one."""
        if self.as_stored:
            arrays = weight_arrays(self.checkpoint)
            return {stored: arrays[stored] for stored in self.text.stored.values()}  # without a prediction head
        from headrace.models.mlx_lm.load import converted_arrays  # late: imports mlx-lm

        return dict(converted_arrays(self.checkpoint).arrays)


def quantized_already(name: str) -> UsageError:
    """Return the error for a model that is not plain."""
    return UsageError(
        f"{name} is quantized already; rounding its weights again would add to the error of the first time",
        "give the original checkpoint, in float16 or bfloat16",
    )


def plain_model(checkpoint: Checkpoint, name: str) -> PlainModel:
    """Return the model with its parts. Reads headers alone.

    Raises UsageError for a quantized checkpoint, UnsupportedModelError if its parts cannot be told.
    """
    if checkpoint.quantization is not None:
        raise quantized_already(name)
    config = own_decoder(checkpoint)
    if config is None:
        raise UnsupportedModelError(
            f"{name}: headrace does not choose bits for its architecture",
            "mlx_lm.convert -q does it for mlx-lm's models",
        )
    if architecture_of(checkpoint.config).loses_corrections:
        raise UnsupportedModelError(
            f"{name}: MLX's form of its architecture has no place for the corrections of its routers",
            f"`headrace pull {name} --quantize 4` quantizes all matrices alike, and keeps them",
        )
    tensors = dict(checkpoint.tensors)
    quantizable: frozenset[str] | None = None  # None: all
    as_stored = bool(checkpoint.gguf)  # a GGUF's tensors are listed by MLX's names
    if not as_stored:
        from headrace.models.mlx_lm.load import converted_arrays, has_class

        as_stored = not has_class(checkpoint.config)
        if as_stored and not _has_own_names(checkpoint, config):
            raise UnsupportedModelError(
                f"{name}: mlx-lm has no class of it, whose names a copy takes",
                f"`headrace pull {name} --quantize 4` quantizes all matrices alike, under their own names",
            )
    if not as_stored:
        converted = converted_arrays(checkpoint)
        quantizable = converted.quantizable
        tensors = {
            stored: TensorInfo(_TYPES.get(array.dtype, "U32"), tuple(array.shape), checkpoint.path, array.nbytes)
            for stored, array in converted.arrays.items()
        }
    text = text_part(replace(checkpoint, tensors=tensors))

    shapes: dict[str, tuple[int, ...]] = {}
    plain_ends = architecture_of(text.config).plain
    for tensor, info in text.tensors.items():
        module, _, leaf = tensor.rpartition(".")
        stored = text.stored[tensor].removesuffix(".weight")
        in_mlx = quantizable is None or stored in quantizable
        if leaf == "weight" and in_mlx and _is_quantizable(info) and not module.endswith(plain_ends):
            shapes[module] = info.shape
    return PlainModel(checkpoint, text, _group_by_product(shapes, config), as_stored)


def _has_own_names(checkpoint: Checkpoint, config: DecoderConfig) -> bool:
    """Return whether the files of a model without experts have headrace's names, which are MLX's of Llama."""
    is_mixture = any(layer.experts is not None for layer in config.layers)
    return not is_mixture and all(name == stored for name, stored in text_part(checkpoint).stored.items())


def _is_quantizable(info: TensorInfo) -> bool:
    """Return whether a tensor is a matrix of floats, or a stack of them, whose rows have whole groups."""
    return len(info.shape) in (2, 3) and info.dtype in FLOATS and info.shape[-1] % min(GROUP_SIZES) == 0


def _group_by_product(shapes: Mapping[str, tuple[int, ...]], config: DecoderConfig) -> list[WeightGroup]:
    """Return the matrices in parts: together those that are multiplied at once. shapes: of all matrices, by module."""
    # Parts in the network, and the matrices of each. Tensors that the table does not have are vectors for the network.
    # Routers and gates of shared experts stay as they are.
    products: dict[str, str] = {}  # module -> name of its part
    shares: dict[str, Fraction] = {}  # by the same
    for prefix, tensor in named_tensors(config):
        if tensor.scores:
            continue
        name = f"{prefix}{tensor.product}"
        for module in (tensor.name, tensor.whole):
            products[f"{prefix}{module}"] = name
        shares[name] = Fraction(0) if tensor.looked_up else Fraction(tensor.active, tensor.count)
        if prefix:
            shares[name] *= config.loops
    shapes_by_part: dict[str, dict[str, tuple[int, ...]]] = {}
    for module, shape in shapes.items():
        if module in products:
            shapes_by_part.setdefault(products[module], {})[module] = shape
    parts = [WeightGroup(name, modules, _layer_of(name), shares[name]) for name, modules in shapes_by_part.items()]
    return sorted(parts, key=lambda part: (-1 if part.layer is None else part.layer, part.name))


def _layer_of(name: str) -> int | None:
    """Return the layer of a module; None for one outside of layers."""
    match = _LAYER.match(name)
    if match is None:
        return None
    return int(match[1])


def trial(model: PlainModel, decoder: Decoder, part: WeightGroup, importance: mx.array | None) -> Decoder:
    """Return the decoder with one part rounded to its probe format. Only that layer's weights are in memory twice.

    importance: of the part's columns; None: all are alike.
    """

    def round_part(named: dict[str, object]) -> dict[str, object]:
        rounded_arrays = dict(named)
        for module in part.shapes:
            name = f"{module}.weight"
            rounded_arrays[name] = through_rounding(loaded(named[name]), part.probe, importance)
        return rounded_arrays

    parameters = Parameters(
        model.checkpoint,
        decoder.ops,
        decoder.dtype,
        take=round_part,
        read=lambda _checkpoint: model.arrays(),
        part=model.text,
    )
    return decoder.with_part(parameters, part.layer)


def squared_errors(model: PlainModel, part: WeightGroup, importance: mx.array | None) -> list[float]:
    """Return the squared error of the part's weights in each of its formats, by the importance of columns."""
    arrays = model.arrays()
    matrices = [loaded(arrays[model.text.stored[f"{module}.weight"]]) for module in part.shapes]
    return [sum(squared_error(matrix, groups, importance) for matrix in matrices) for groups in part.formats]


def write_mixed(
    model: PlainModel,
    parts: Sequence[tuple[WeightGroup, Groups]],
    importances: Mapping[str, mx.array],
    target: Path,
    progress: Progress,
) -> None:
    """Write the model with each part in its format. Memory: the arrays of one file, and a matrix or stack.

    parts: with the format of each.
    importances: of columns, by part; columns of other parts are alike.
    target: an existing folder.
    progress: gets the bytes of the model that are done.
    """
    formats: dict[str, Groups] = {}  # by MLX's module
    importance_by_module: dict[str, mx.array | None] = {}
    for part, groups in parts:
        for module in part.shapes:
            stored = model.text.stored[f"{module}.weight"].removesuffix(".weight")
            formats[stored] = groups
            importance_by_module[stored] = importances.get(part.name)

    arrays = model.arrays()
    total = sum(array.nbytes for array in arrays.values())
    done = 0
    files = 0
    written: dict[str, mx.array] = {}
    for name in sorted(arrays, key=_reading_order):
        module = name.removesuffix(".weight")
        array = loaded(arrays.pop(name))  # not kept, so that its memory is free after rounding
        if module in formats:
            written |= matrix_tensors(module, rounded(array, formats[module], importance_by_module[module]))
        else:
            mx.eval(array)
            written[name] = array
        done += array.nbytes
        progress("quantizing", done, total)
        if sum(array.nbytes for array in written.values()) > _SHARD:
            save_arrays(target / f"model-{files:05d}.safetensors", written)
            files += 1
            written = {}
    if written:
        save_arrays(target / f"model-{files:05d}.safetensors", written)
    write_side_files(model.checkpoint, _section(formats), target)


def _reading_order(name: str) -> tuple[int, str]:
    """Return a key that sorts tensors by layer, so that parts of a stored tensor follow each other."""
    match = _ANY_LAYER.search(name)
    return (-1 if match is None else int(match[1])), name


def _section(formats: Mapping[str, Groups]) -> dict[str, object]:
    """Return config.json's `quantization`: an entry for each module, and general settings that none of them needs."""
    entries = {module: groups._asdict() for module, groups in formats.items()}
    return {"bits": 4, "group_size": 64, "mode": "affine", **entries}
