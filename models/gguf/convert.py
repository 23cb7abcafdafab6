"""Conversion of a GGUF file to an MLX-format model directory, tensor by tensor.

headrace, mlx-lm and transformers' tokenizer classes load the directory: Hugging Face names and layout, unfused, in MLX
affine quantization for quantized tensors. `headrace.json` records the source and the inexact tensors.

`plan_of` decides all from the header; `convert_gguf` writes a copy, `link_gguf` a list of what each tensor becomes, and
`parts` converts tensors of a linked file one by one. `Layout.described` and `converted` must agree on every form: a
linked file is read by its description, and `parts` refuses arrays of other types.

Guards: tests/models/gguf/test_convert.py, test_link.py and test_k_quants.py.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from headrace.models.architectures.fields import text_section
from headrace.models.checkpoint.gguf_link import LINK_FILE, file_facts
from headrace.models.checkpoint.quantization import Groups
from headrace.models.checkpoint.shard_header import DTYPE_BYTES
from headrace.models.gguf.architecture import Contents, Entries, Vector
from headrace.models.gguf.architectures import ARCHITECTURES, architecture_of
from headrace.models.gguf.config import generation_config, model_config
from headrace.models.gguf.container import Container, RawTensor, open_container
from headrace.models.gguf.kinds import check_kind
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.names import targets
from headrace.models.gguf.numpy_blocks import Array
from headrace.models.gguf.rope import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT, LongFactors
from headrace.models.gguf.safetensors_writer import SafetensorsWriter
from headrace.models.gguf.target import Target
from headrace.models.gguf.tensors import (
    Affine,
    dequantized,
    is_quantized,
    is_requantized,
    plain_type,
    scale_type,
    stored_groups,
    to_affine,
    to_mxfp4,
    to_plain,
)
from headrace.models.gguf.tokenizer import build_tokenizer, tokenizer_config
from headrace.models.gguf.vocabulary import SpecialIds, read_vocabulary
from headrace.models.text.vocabulary import Vocabulary
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_LICENCE_KEYS = ("general.license", "general.license.name", "general.license.link")


class _ConversionLog(Struct):
    """Properties of the written tensors: settings per module, dtypes, and inexact ones."""

    settings: dict[str, Groups] = field(default_factory=dict)
    types: set[str] = field(default_factory=set)  # as `_source` has them: Q8_0 for two types joined
    inexact: list[dict[str, object]] = field(default_factory=list)  # rows of headrace.json

    def note(self, tensor: "ConvertedTensor", module: str) -> None:
        """Add a tensor of a module."""
        source = tensor.source
        self.types.add(source.type)
        if tensor.settings is not None:
            self.settings[module] = tensor.settings
        if tensor.max_error > 0:
            facts = {"became": tensor.became, "max_abs_error": tensor.max_error}
            self.inexact.append({"name": source.name, "type": source.type, **facts})


Form = tuple[str, tuple[int, ...]]
"""Safetensors type and shape of an array."""


class Description(NamedTuple):
    """Form of a converted tensor, from headers."""

    arrays: dict[str, Form]  # by name
    settings: Groups | None  # as in `ConvertedTensor`


class Forms(NamedTuple):
    """Forms of all arrays of a network, from headers."""

    arrays: dict[str, Form]  # by name
    settings: dict[str, Groups]  # of quantized modules

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays. A copy has fewer where the scales of a file fit half precision, but not its type's."""
        return sum(prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in self.arrays.values())


class Layout(Struct, frozen=True):
    """Tensors of a GGUF and of the network they become."""

    container: Container
    metadata: Metadata
    config: Entries  # config.json, without its quantization section
    targets: list[Target]  # in model order

    def forms(self, *, groups_of_16: bool = True) -> Forms:
        """Return the forms of all converted tensors, and of the vectors that the file lacks.

        groups_of_16: see `convert_gguf`.
        """
        arrays: dict[str, Form] = {name: ("F32", np.shape(values)) for name, values in made_vectors(self).items()}
        settings: dict[str, Groups] = {}
        for target in self.targets:
            form = self.described(target, groups_of_16=groups_of_16)
            arrays |= form.arrays
            if form.settings is not None:
                settings[target.module] = form.settings
        return Forms(arrays, settings)

    def described(self, target: Target, *, groups_of_16: bool = True) -> Description:
        """Return the form of one converted tensor."""
        source = _source(self.container, target)
        shape = list(source.shape)
        if target.rows is not None:
            shape[target.axis] = len(target.rows)
        if not _is_packed(source, target):
            dtype = "F32" if target.values != "same" else plain_type(source.type)
            return Description({target.name: (dtype, target.stored or tuple(shape))}, None)
        settings = stored_groups(source, groups_of_16=groups_of_16)
        _check_columns(source, target, settings.group_size)
        columns = shape[-1]
        groups = (*shape[:-1], columns // settings.group_size)
        arrays = {"weight": ("U32", (*shape[:-1], columns * settings.bits // 32))}
        if settings.mode == "affine":
            arrays |= {leaf: (scale_type(source.type, settings), groups) for leaf in ("scales", "biases")}
        else:
            arrays["scales"] = ("U8", groups)
        described = {f"{target.module}.{leaf}": form for leaf, form in arrays.items()}
        return Description(described, settings)

    @property
    def is_exact(self) -> bool:
        """True if no matrix is requantized."""
        for target in self.targets:
            types = {self.container.tensors[name].type for name in target.sources}
            packed = _is_packed(_source(self.container, target), target)
            if packed and (len(types) > 1 or any(map(is_requantized, types))):
                return False
        return True


class ConversionPlan(Layout, frozen=True):
    """Contents of a GGUF's header in Hugging Face terms."""

    vocabulary: Vocabulary
    tokenizer: bytes  # tokenizer.json
    special: SpecialIds


def convert_gguf(
    source: Path | ConversionPlan,
    target: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    sha256: str | None = None,
    groups_of_16: Callable[[Entries], bool] = lambda _: True,
) -> None:
    """Convert the GGUF file `source`, or that of a plan, into the empty directory `target`.

    progress(done, total): bytes of tensor data. sha256: the file's digest, computed if None. groups_of_16(config):
    whether the decoder for that config supports groups of 16, which represent Q6_K exactly; otherwise Q6_K is
    requantized. Raises CheckpointError for a broken or contradictory file, UnsupportedModelError for an unsupported
    architecture, tensor type or tokenizer. On an error, delete `target`.
    """
    plan = read_plan(source) if isinstance(source, Path) else source
    sixteen = groups_of_16(plan.config)
    written = _write_weights(plan, target / "model.safetensors", sixteen, progress)
    _write_side_files(plan, written, target, sha256)


def link_gguf(source: Path | ConversionPlan, target: Path, *, sha256: str | None = None) -> None:
    """Make the empty directory `target` a checkpoint that reads its weights from `source`. Its layout `is_exact`.

    sha256, errors: as for `convert_gguf`.
    """
    plan = read_plan(source) if isinstance(source, Path) else source

    # The form of each tensor, as its conversion would write it
    forms = plan.forms()
    tensors = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in forms.arrays.items()}
    types = {_source(plan.container, wanted).type for wanted in plan.targets}
    described = _ConversionLog(forms.settings, types)

    paths = plan.container.paths
    for path in paths:
        (target / path.name).symlink_to(path.absolute())
    _write_side_files(plan, described, target, sha256, links={path.name: file_facts(path) for path in paths})
    _write_json(target / LINK_FILE, {"tensors": tensors})


def _write_side_files(
    plan: ConversionPlan,
    written: _ConversionLog,
    target: Path,
    sha256: str | None,
    links: Mapping[str, Mapping[str, int]] | None = None,
) -> None:
    """Write all files but the weights. written: the tensors' properties. links: facts of the files linked to."""
    container = plan.container
    metadata = plan.metadata
    special = plan.special
    config = plan.config | quantization_entries(written.settings)  # a copy: a plan may be written more than once
    # Half precision to compute in on a GPU
    config["torch_dtype"] = "bfloat16" if "BF16" in written.types else architecture_of(metadata).half
    config |= {"bos_token_id": special.bos, "eos_token_id": special.ends}

    (target / "tokenizer.json").write_bytes(plan.tokenizer)
    longest = text_section(config)["max_position_embeddings"]
    tokenizer_facts = tokenizer_config(plan.vocabulary, special, longest)
    _write_json(target / "tokenizer_config.json", tokenizer_facts)
    _write_templates(metadata, target)
    _write_json(target / "generation_config.json", generation_config(metadata, special))
    linked = {} if links is None else {"gguf": links}
    _write_json(target / "headrace.json", _origin(container.paths, metadata, written, sha256) | linked)
    _write_json(target / "config.json", config)


# Templates of llama.cpp that some files have by their names alone
_BUILT_IN = {
    "rwkv-world": (
        "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] | trim + '\n\n' }}"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    )
}


def _write_templates(metadata: Metadata, target: Path) -> None:
    """Write the chat template, and those with a name, such as `tool_use`, into the folder that transformers reads."""
    if (template := metadata.optional_text("tokenizer.chat_template")) is not None:
        template = _BUILT_IN.get(template, template)
        (target / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    for key in metadata.keys_below("tokenizer.chat_template."):
        name = key.rpartition(".")[2]
        if re.fullmatch(r"\w{1,64}", name, re.ASCII):  # as gguf-py writes them
            folder = target / "additional_chat_templates"
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.jinja").write_text(metadata.text(key), encoding="utf-8", newline="")


def config_tensors(architecture: object) -> tuple[str, ...]:
    """Return the names of tensors that become part of the config."""
    row = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    return (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT, *(() if row is None else row.config_tensors))


def read_plan(source: Path) -> ConversionPlan:
    """Return all that the header of a GGUF file decides. Raises as `convert_gguf`."""
    return plan_of(open_container(source))


def plan_of(container: Container) -> ConversionPlan:
    """Return all that the headers of a container decide. Raises as `convert_gguf`."""
    check_kind(container)
    metadata = Metadata(container.metadata)
    vocabulary = read_vocabulary(metadata)
    layout = _layout(container, metadata, len(vocabulary.tokens))
    tokenizer, special = build_tokenizer(metadata, vocabulary)
    return ConversionPlan(container, metadata, layout.config, layout.targets, vocabulary, tokenizer, special)


def layout_of(container: Container) -> Layout:
    """Return the part of `plan_of` that needs no tokenizer. Raises as `convert_gguf`."""
    check_kind(container)
    metadata = Metadata(container.metadata)
    return _layout(container, metadata, metadata.num_texts("tokenizer.ggml.tokens"))


def _layout(container: Container, metadata: Metadata, vocab_size: int) -> Layout:
    """Return the config and the targets. Raises CheckpointError for a tensor of another shape than the config's."""
    shapes = {name: tensor.shape for name, tensor in container.tensors.items()}
    config = _header_config(container, metadata, vocab_size)
    wanted = targets(architecture_of(metadata), config, shapes)
    for each in wanted:
        for name in each.sources:
            _check_shape(container.tensors[name], each)
    return Layout(container, metadata, config, wanted)


def _header_config(container: Container, metadata: Metadata, vocab_size: int) -> Entries:
    """Return `config.json` without its quantization section."""
    shapes = {name: tensor.shape for name, tensor in container.tensors.items()}
    return model_config(
        metadata,
        Contents(
            shapes,
            vocab_size,
            _vector(container, ROPE_FACTORS),
            _long_factors(container),
            partial(_vector, container),
        ),
    )


def _long_factors(container: Container) -> LongFactors | None:
    """Return LongRoPE's factors, if the file has both."""
    long = _vector(container, ROPE_LONG)
    short = _vector(container, ROPE_SHORT)
    if long is None or short is None:
        return None
    return LongFactors(long, short)


def _vector(container: Container, name: str) -> list[float] | None:
    """Return the content of a vector of float32; None if it is missing. Raises CheckpointError for another tensor."""
    tensor = container.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"tensor {name} is not a vector of F32")
    return [float(value) for value in to_plain(tensor)[0].view("<f4")]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without axes of one in front, which llama.cpp's quantized files lack."""
    last = len(shape) - 1
    first = next((axis for axis, size in enumerate(shape) if size != 1), last)
    return shape[first:]


def _check_shape(tensor: RawTensor, target: Target) -> None:
    """Raise CheckpointError for another shape than the target's."""
    if _without_ones(tensor.shape) != _without_ones(target.shape):
        raise CheckpointError(f"tensor {tensor.name} has shape {tensor.shape}, the metadata asks for {target.shape}")


class StoredArray(Struct, frozen=True):
    """An array with its safetensors type: numpy has none for BF16, which is held in 16-bit words."""

    array: Array
    dtype: str


class ConvertedTensor(Struct, frozen=True):
    """A tensor in the network's layout: an array, or words, scales and biases of a quantized matrix."""

    source: RawTensor
    arrays: Mapping[str, StoredArray]  # by name
    became: str  # its form in words
    max_error: float  # against the file's exact values
    settings: Groups | None = None  # of a quantized one


def converted(
    container: Container, target: Target, *, groups_of_16: bool, rows: slice | None = None
) -> ConvertedTensor:
    """Convert the tensor of one target, or some of its rows. Raises as `convert_gguf`."""
    tensor = container.tensors[target.source]
    joined_error = 0.0

    # Some rows, one matrix of a stack, or the rows of two tensors
    if rows is not None:
        part = tensor.data[rows]
        tensor = RawTensor(tensor.name, tensor.type, (len(part), *tensor.shape[1:]), part)
    if target.index is not None:
        tensor = _matrix_of(tensor, target.index)
    if target.below:
        tensor, joined_error = _joined(tensor, container.tensors[target.below])

    if not _is_packed(tensor, target):
        return _plain(tensor, target)
    is_mxfp4 = stored_groups(tensor, groups_of_16=groups_of_16).mode == "mxfp4"
    packed = to_mxfp4(tensor) if is_mxfp4 else to_affine(tensor, groups_of_16=groups_of_16)
    return _packed(tensor, packed, target, max(packed.max_error, joined_error))


def _write_weights(
    plan: ConversionPlan, path: Path, groups_of_16: bool, progress: Callable[[int, int], None] | None
) -> _ConversionLog:
    """Write all tensors into one safetensors file, one after the other. Arguments: see `convert_gguf`."""
    written = _ConversionLog()
    container = plan.container
    made = made_vectors(plan)
    names = [f"{target.module}.{leaf}" for target in plan.targets for leaf in _leaves(container, target)]
    done = 0
    total = sum(container.tensors[source].data.nbytes for target in plan.targets for source in target.sources)
    with SafetensorsWriter(path, [*names, *made]) as writer:
        for name, values in made.items():
            writer.add(name, np.asarray(values), "F32")
        for target in plan.targets:
            tensor = converted(container, target, groups_of_16=groups_of_16)
            for name, stored in tensor.arrays.items():
                writer.add(name, stored.array, stored.dtype)
            written.note(tensor, target.module)
            done += sum(container.tensors[source].data.nbytes for source in target.sources)
            if progress is not None:
                progress(done, total)
    return written


def made_vectors(layout: Layout) -> Mapping[str, Vector]:
    """Return the vectors that the network has and the file lacks."""
    row = architecture_of(layout.metadata)
    return row.made(layout.metadata, text_section(layout.config))


def _source(container: Container, target: Target) -> RawTensor:
    """Return the file's tensor of a target; of two that are joined, without the data of the second."""
    tensor = container.tensors[target.source]
    if target.index is not None:
        tensor = _matrix_of(tensor, target.index)
    if not target.below:
        return tensor
    below = container.tensors[target.below]
    shape = (tensor.shape[0] + below.shape[0], *tensor.shape[1:])
    return RawTensor(tensor.name, tensor.type if tensor.type == below.type else "Q8_0", shape, tensor.data)


def _matrix_of(stack: RawTensor, index: int) -> RawTensor:
    """Return one matrix of a stack."""
    rows = stack.data.shape[0] // stack.shape[0]
    return RawTensor(stack.name, stack.type, stack.shape[1:], stack.data[index * rows : (index + 1) * rows])


def _joined(above: RawTensor, below: RawTensor) -> tuple[RawTensor, float]:
    """Return (one matrix of the rows of two, the error of that). Two types become 8-bit blocks."""
    shape = (above.shape[0] + below.shape[0], *above.shape[1:])
    if above.type == below.type:
        return RawTensor(above.name, above.type, shape, np.concatenate([above.data, below.data])), 0.0
    from gguf import GGMLQuantizationType  # late, as in `dequantized`
    from gguf.quants import quantize

    values = np.concatenate([dequantized(part.data, part.type) for part in (above, below)])
    blocks = quantize(values, GGMLQuantizationType.Q8_0)
    error = float(np.abs(dequantized(blocks, "Q8_0") - values).max())
    return RawTensor(above.name, "Q8_0", shape, blocks), error


def _is_packed(tensor: RawTensor, target: Target) -> bool:
    """Return whether a tensor stays quantized."""
    return is_quantized(tensor) and not target.plain


def _leaves(container: Container, target: Target) -> tuple[str, ...]:
    """Return the parameters that a target may become, for the space of the header."""
    packed = any(_is_packed(container.tensors[source], target) for source in target.sources)
    return ("weight", "scales", "biases") if packed else (target.leaf,)


def _packed(tensor: RawTensor, affine: Affine, target: Target, max_error: float) -> ConvertedTensor:
    """Return a quantized matrix in the network's order of rows and columns."""
    scale_type = {"float16": "F16", "float32": "F32", "uint8": "U8"}[affine.scales.dtype.name]
    parts = [("weight", affine.weight, "U32"), ("scales", affine.scales, scale_type)]
    parts += [] if affine.biases is None else [("biases", affine.biases, scale_type)]
    groups = affine.groups
    _check_columns(tensor, target, groups.group_size)
    return ConvertedTensor(
        tensor,
        {f"{target.module}.{leaf}": StoredArray(in_order(array, target), dtype) for leaf, array, dtype in parts},
        f"{groups.mode} {groups.bits}-bit, group size {groups.group_size}",
        max_error,
        groups,
    )


def _check_columns(tensor: RawTensor, target: Target, group_size: int) -> None:
    """Raise UnsupportedModelError if blocks of columns that move would cut groups."""
    if target.columns is not None and tensor.shape[-1] // len(target.columns) % group_size:
        raise UnsupportedModelError(
            f"tensor {tensor.name} ({tensor.type}) is quantized across heads: their size is no multiple of a group"
        )


def _plain(tensor: RawTensor, target: Target) -> ConvertedTensor:
    """Return an unquantized tensor, with its values changed if the target says so."""
    words, dtype = to_plain(tensor)
    max_error = 0.0
    if target.values != "same":
        words, dtype, max_error = _changed(tensor, words, dtype, target)
    words = in_order(words, target)
    shaped = words if target.stored is None else words.reshape(target.stored)
    return ConvertedTensor(tensor, {target.name: StoredArray(shaped, dtype)}, dtype, max_error)


def _changed(tensor: RawTensor, words: Array, dtype: str, target: Target) -> tuple[Array, str, float]:
    """Return (changed values as float32, dtype, error of the change back)."""
    if dtype == "BF16":
        stored = (words.astype("<u4") << 16).view("<f4")
    else:
        stored = words.view("<f4" if dtype == "F32" else "<f2").astype("<f4")
    if target.values == "minus_one":  # llama.cpp's converter adds the 1 to norms
        values = stored - np.float32(1)
        return values, "F32", float(np.abs(values + np.float32(1) - stored).max())
    decays = stored if target.values == "log" else -stored
    if (decays <= 0).any():
        sign = "positive" if target.values == "log" else "negative"
        raise CheckpointError(f"tensor {tensor.name} has a decay that is not {sign}")
    values = np.log(decays)
    return values, "F32", float(np.abs(np.exp(values) - decays).max())


def in_order(array: Array, target: Target) -> Array:
    """Return the array with its rows, and its blocks of columns, in the network's order."""
    if target.rows is not None:
        array = np.take(array, target.rows, axis=target.axis)
    if target.columns is None:
        return array
    blocks = array.reshape(*array.shape[:-1], len(target.columns), -1)
    return np.take(blocks, target.columns, axis=-2).reshape(array.shape)


def quantization_entries(settings: Mapping[str, Groups]) -> dict[str, object]:
    """Return the config section mlx-lm reads: the most common settings, and all modules that differ."""
    if not settings:
        return {}

    def entry(groups: Groups) -> dict[str, object]:
        return {"group_size": groups.group_size, "bits": groups.bits, "mode": groups.mode}

    [(common, _)] = Counter(settings.values()).most_common(1)
    section = entry(common) | {module: entry(stored) for module, stored in settings.items() if stored != common}
    return {"quantization": section, "quantization_config": section}


def _origin(paths: list[Path], metadata: Metadata, written: _ConversionLog, sha256: str | None) -> dict[str, object]:
    """Return headrace.json. sha256: of the files one after the other, computed if None."""
    if sha256 is None:
        digest = hashlib.sha256()
        for part in paths:
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        sha256 = digest.hexdigest()
    return {
        "format": "gguf",
        "source": paths[0].name,
        "size": sum(path.stat().st_size for path in paths),
        "sha256": sha256,
        "licence": stated_licence(metadata),
        "architecture": metadata.architecture,
        "name": metadata.optional_text("general.name"),
        "tensor_types": sorted(written.types),
        "inexact_tensors": written.inexact,
    }


def stated_licence(metadata: Metadata) -> str | None:
    """Return the licence that the file names, if any."""
    return next((metadata.text(key) for key in _LICENCE_KEYS if metadata.has(key)), None)


def _write_json(path: Path, content: dict[str, object]) -> None:
    """Write a JSON object with a line for each entry."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
