"""Opening a safetensors model directory as untrusted input: headers and JSON only, no weights, no numpy.

`open_checkpoint(path)` reads config.json, the optional shard index and every shard's header, checks that they
are sound and agree with one another, and returns what they describe. Whatever loads weights afterwards may
rely on these checks. A directory that names code to run (model files, pickles) is refused.

Every problem is one CheckpointError line; nothing else escapes, and nothing is written.

File format: 8 bytes little-endian header length, the header as JSON, then the tensors' bytes, back to back
(https://github.com/huggingface/safetensors#format).
"""

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from headrace.models.checkpoint.foreign.formats import Foreign, recognise
from headrace.models.checkpoint.json_object import MAX_PARTS, check_unicode, repeated_key
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.side_file import check_parts
from headrace.models.checkpoint.tensor_info import DTYPE_BYTES, TensorInfo
from headrace.runtime.errors import CheckpointError

# Limits on JSON, generous for real files and small enough that parsing hostile ones stays bearable.
MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 32 << 20
MAX_HEADER_BYTES = 16 << 20  # a hundred thousand tensors in one shard need about 12 MB
MAX_RANK = 8
ORIGIN_FILE = "headrace.json"

# Config keys whose value is code, or the name of code, that a loader would import and run. A bare
# `trust_remote_code: true` is not among them: merge tools leave it in configs of standard architectures,
# and without one of these keys there is no code it could mean. Nor is `auto_map`: it names code for transformers, which
# nothing here runs, and conversions to standard architectures keep it.
_CODE_KEYS = ("model_file", "custom_pipelines")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory whose files were found sound."""

    path: Path
    config: dict[str, Any]
    shards: list[Path]  # in name order
    tensors: dict[str, TensorInfo]  # what another tool quantized is listed as what it becomes
    origin: dict[str, Any] | None = field(default=None)  # headrace.json: where it came from, what was changed
    foreign: Foreign | None = field(default=None)  # how another tool quantized it

    @property
    def quantization(self) -> dict[str, Any] | None:
        """MLX quantization settings: bits, group_size, and per-layer entries; None for plain weights."""
        return quantization_section(self.config)

    @property
    def inexact(self) -> list[dict[str, Any]]:
        """Tensors of a GGUF file that its conversion could not hold exactly, as it noted them: type, became."""
        noted = (self.origin or {}).get("inexact_tensors")
        return [row for row in noted if isinstance(row, dict)] if isinstance(noted, list) else []

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())


def quantization_section(config: dict[str, Any]) -> dict[str, Any] | None:
    """See `Checkpoint.quantization`."""
    section, theirs = config.get("quantization"), config.get("quantization_config")
    if section is None and isinstance(theirs, dict) and theirs.get("quant_method") == "mxfp4":
        return {"mode": "mxfp4", "bits": 4, "group_size": 32}  # as transformers stores GPT-OSS
    return section if isinstance(section, dict) else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Check the directory `path` and describe what is in it.

    Raises CheckpointError for files that are broken, hostile, inconsistent or that name code to run, and
    UnsupportedModelError for weights quantized in a way that nothing here reads.
    """
    root = Path(os.path.realpath(path))
    try:
        names = sorted(entry.name for entry in root.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot read the model directory {path}: {error.strerror}") from error
    if "config.json" not in names:
        raise CheckpointError(f"{path} has no config.json")
    config = _with_quantization(_read_json_object(root, "config.json"), root, names)
    refuse_code(config)
    shards = _shard_names(root, names)
    tensors: dict[str, TensorInfo] = {}
    for name in shards:
        _read_header(root, name, tensors)
    if "model.safetensors.index.json" in names:
        _check_index(root, tensors)
    origin = _read_json_object(root, ORIGIN_FILE) if ORIGIN_FILE in names else None
    config = normalized(config, tensors.keys())
    foreign = recognise(config, tensors)
    if foreign is not None:
        config, tensors = {**config, "quantization": foreign.quantization()}, foreign.tensors(tensors)
    return Checkpoint(Path(path), config, [root / name for name in shards], tensors, origin, foreign)


def _with_quantization(config: dict[str, Any], root: Path, names: list[str]) -> dict[str, Any]:
    """The config with its `quantization_config` in one place: it may be the text part's, or ModelOpt's own file."""
    own = config.get("quantization_config")
    if own is not None:
        legacy = isinstance(own, dict) and "quant_method" not in own and {"bits", "group_size"} <= own.keys()
        return {**config, "quantization": config.get("quantization", own)} if legacy else config
    text = config.get("text_config")
    section = text.get("quantization_config") if isinstance(text, dict) else None
    if section is None and "hf_quant_config.json" in names:
        section = {"quant_method": "modelopt", **_read_json_object(root, "hf_quant_config.json")}
    return config if section is None else {**config, "quantization_config": section}


def refuse_code(config: dict[str, Any]) -> None:
    """Raise CheckpointError if this config.json names code that a loader would run."""
    # Text configs of multimodal models sit one level down and are what a loader would hand on.
    for section in (config, config.get("text_config")):
        if not isinstance(section, dict):
            continue
        for key in _CODE_KEYS:
            if section.get(key):
                raise CheckpointError(
                    f"this checkpoint wants to run its own code (config.json has {key!r}), which is refused",
                    "look for a conversion of the model that uses a standard architecture",
                )


def _shard_names(root: Path, names: list[str]) -> list[str]:
    """The weight files, as plain names inside `root`."""
    shards = [name for name in names if name.startswith("model") and name.endswith(".safetensors")]
    if shards:
        return shards
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        raise CheckpointError(
            f"the weights are pickles only ({pickles[0]}); opening them can run code, so they are refused",
            "look for a safetensors version of the model",
        )
    raise CheckpointError(f"{root} has no weights: no model*.safetensors in it")


def _check_index(root: Path, tensors: dict[str, TensorInfo]) -> None:
    name = "model.safetensors.index.json"
    weight_map = _read_json_object(root, name, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{name}: weight_map is not an object")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CheckpointError(f"{name}: shard name {_quote(shard)} leaves the model directory")
        info = tensors.get(tensor)
        if info is None:
            raise CheckpointError(f"{name} lists {_quote(tensor)} in {_quote(shard)}, which does not have it")
        if info.shard.name != shard:
            raise CheckpointError(f"{name} puts {_quote(tensor)} in {_quote(shard)}, it is in {info.shard.name}")
    for tensor in tensors:
        if tensor not in weight_map:
            raise CheckpointError(f"{name} does not list {_quote(tensor)} of {tensors[tensor].shard.name}")


def _is_plain_name(name: str) -> bool:
    return bool(name) and not any(c in name for c in "/\\\0") and name not in {".", ".."}


def _open_inside(root: Path, name: str) -> int:
    """A descriptor of the regular file `name` in `root`, refusing links that leave the directory.

    The one exception is the hub cache, whose models--org--name/snapshots/<commit>/ holds links into that model's
    blobs/, and from there into the cache's own blobs/, which models share.
    """
    path = root / name
    try:
        if path.is_symlink():
            target = Path(os.path.realpath(path))
            allowed = [root]
            if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
                allowed += [root.parents[1] / "blobs", root.parents[2] / "blobs"]
            if not any(target.is_relative_to(place) for place in allowed):
                raise CheckpointError(f"{name} is a link out of the model directory")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"cannot open {name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{name} is not a regular file")
    return descriptor


def _read_json_object(root: Path, name: str, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    with open(_open_inside(root, name), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(f"{name} is larger than {limit >> 20} MiB")
        return _parse_object(file.read(limit), name)


def _parse_object(data: bytes, where: str) -> dict[str, Any]:
    """JSON as the format allows it: an object, valid Unicode, no repeated keys, no NaN, no abysmal nesting."""
    try:
        check_parts(data, MAX_PARTS)
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        check_unicode(data, value)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where} has a text that is no Unicode: a lone surrogate") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 text") from error
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, repeated keys, NaN, integers of thousands of digits
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (repeated := repeated_key(pairs)) is not None:
        raise ValueError(f"the key {_quote(repeated)} appears twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    # NaN and the infinities are no JSON. Published configs write Infinity where no limit is meant (Mamba's
    # time_step_limit), so that one passes; it cannot become a size or a shape, which are checked integers.
    if name == "Infinity":
        return float("inf")
    raise ValueError(f"{name} is not a number")


def _read_header(root: Path, name: str, tensors: dict[str, TensorInfo]) -> None:
    """Add the tensors of one shard to `tensors`."""
    with open(_open_inside(root, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{name} is truncated: {size} bytes are no safetensors file")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{name} claims a header of {length} bytes, over {MAX_HEADER_BYTES}")
        if length > size - 8:
            raise CheckpointError(f"{name} is truncated: header of {length} bytes, {size - 8} are there")
        header = _parse_object(file.read(length), f"the header of {name}")

    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise CheckpointError(f"{name}: __metadata__ is not a map of strings")
    shard = root / name
    spans: list[tuple[int, int, str]] = []
    for tensor, entry in header.items():
        if tensor in tensors:
            raise CheckpointError(f"{_quote(tensor)} is in {tensors[tensor].shard.name} and again in {name}")
        dtype, shape, begin, end = _tensor_entry(entry, tensor, name)
        tensors[tensor] = TensorInfo(dtype, shape, shard, end - begin)
        spans.append((begin, end, tensor))
    _check_spans(spans, size - 8 - length, name)


def _tensor_entry(entry: Any, tensor: str, shard: str) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one header entry; offsets count from the end of the header."""
    where = f"{shard}: tensor {_quote(tensor)}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    width = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if width is None:
        raise CheckpointError(f"{where} has the unknown type {_quote(dtype)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not _are_counts(shape):
        raise CheckpointError(f"{where} has the impossible shape {_quote(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_counts(offsets):
        raise CheckpointError(f"{where} has the impossible offsets {_quote(offsets)}")
    begin, end = offsets
    if end - begin != prod(shape) * width:
        raise CheckpointError(
            f"{where} is {dtype} {_quote(shape)}, {prod(shape) * width} bytes, but spans {end - begin}"
        )
    return str(dtype), tuple(shape), begin, end


def _are_counts(values: Iterable[Any]) -> bool:
    # `type`, not isinstance: True is an int to Python and not a size to anybody.
    return all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _check_spans(spans: list[tuple[int, int, str]], available: int, shard: str) -> None:
    """The tensors must cover the data exactly: no overlap, no hole, nothing past the end of the file."""
    spans.sort()
    reached = 0
    for begin, end, tensor in spans:
        if end > available:
            raise CheckpointError(
                f"{shard} is truncated: tensor {_quote(tensor)} ends at byte {end}, the data at {available}"
            )
        if begin != reached:
            problem = "overlaps the tensor before it" if begin < reached else "leaves a hole before it"
            raise CheckpointError(f"{shard}: tensor {_quote(tensor)} {problem}")
        reached = end
    if reached != available:
        raise CheckpointError(f"{shard} has {available - reached} bytes that belong to no tensor")


def _quote(value: Any) -> str:
    """`value` from a hostile file, short and printable."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
