"""Opening of a safetensors model directory as untrusted input: headers and JSON only, no weights, no numpy.

`open_checkpoint(path)` checks config.json, the optional shard index and every shard's header, alone and against each
other. Loading code may rely on these checks. A config.json that names code to run is refused, and so is a directory
with pickles and no safetensors weights. All errors are CheckpointError or UnsupportedModelError, and nothing is
written. A directory that links to GGUF files has their tensors, listed as converted (`gguf_link`).

Quantization may be stated in config.json under `quantization` (MLX) or `quantization_config` (other tools and older MLX
conversions), in the latter's place in `text_config`, or in hf_quant_config.json (ModelOpt). `Checkpoint.quantization`
has it in MLX's form.

Guards: tests/models/checkpoint/test_safetensors.py and tests/faults/test_checkpoints.py.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct, field

from headrace.models.checkpoint.adapter import Adapter
from headrace.models.checkpoint.foreign.formats import recognise
from headrace.models.checkpoint.foreign.matrices import Foreign
from headrace.models.checkpoint.gguf_link import LINK_FILE, read_link
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.shard_header import TensorInfo, read_header, read_strict_object
from headrace.models.checkpoint.side_file import check_name, quote
from headrace.runtime.config.typed import as_list, as_mapping
from headrace.runtime.errors import CheckpointError

MAX_INDEX_BYTES = 32 << 20  # a line for each tensor: a hundred thousand need about 10 MB
INDEX_FILE = "model.safetensors.index.json"
ORIGIN_FILE = "headrace.json"

# Config keys whose value is code, or the name of code, that a loader would import and run. Two keys are allowed:
# `trust_remote_code`, which merge tools leave in standard configs and which means nothing without these keys, and
# `auto_map`, which names code for transformers that is never run here and which conversions keep.
_CODE_KEYS = ("model_file", "custom_pipelines")
# The same weights in another format, as transformers names them: model.fp16.safetensors.
_VARIANT = re.compile(r"model\.(b?fp?(16|32|8)|b?float(16|32)|int[48])(-\d+-of-\d+)?\.safetensors")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class Checkpoint(Struct, frozen=True):
    """A directory whose files passed the checks."""

    path: Path
    config: dict[str, object]  # config.json, normalized
    shards: list[Path]  # in name order
    tensors: dict[str, TensorInfo]  # foreign matrices are listed as converted
    origin: dict[str, object] | None = field(default=None)  # headrace.json: source and conversion
    foreign: Foreign | None = field(default=None)  # another tool's quantization
    gguf: list[Path] = field(default_factory=list)  # files whose tensors are converted when read; no shards then
    adapter: Adapter | None = None  # low-rank changes of the weights; `load_model` sets it

    @property
    def quantization(self) -> dict[str, object] | None:
        """Return MLX quantization settings (bits, group_size, per-layer entries); None for plain weights."""
        return quantization_section(self.config)

    @property
    def inexact(self) -> list[dict[str, object]]:
        """Return the tensors of a GGUF whose conversion was inexact, as recorded: type, became."""
        rows = as_list((self.origin or {}).get("inexact_tensors"))
        return [row for row in rows if isinstance(row, dict)]

    @property
    def files(self) -> list[Path]:
        """Return the files of the weights."""
        return self.gguf or self.shards

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())


def quantization_section(config: dict[str, object]) -> dict[str, object] | None:
    """Return the settings as `Checkpoint.quantization` does, of the config of an opened checkpoint.

    `open_checkpoint` has added `quantization` for the formats of other tools that it recognises. MXFP4 of transformers
    has none. For a config.json without its weights see `stated_quantization`.
    """
    section = config.get("quantization")
    theirs = config.get("quantization_config")
    if section is None and isinstance(theirs, dict) and theirs.get("quant_method") == "mxfp4":
        return {"mode": "mxfp4", "bits": 4, "group_size": 32}  # as transformers stores GPT-OSS
    if not isinstance(section, dict):
        return None
    return section


def open_checkpoint(path: Path) -> Checkpoint:
    """Check the directory `path` and return its description.

    Raises CheckpointError for files that are broken, hostile, inconsistent or that name code to run, and
    UnsupportedModelError for an unknown quantization.
    """
    root = Path(os.path.realpath(path))
    try:
        names = sorted(entry.name for entry in root.iterdir())
    except OSError as error:
        raise CheckpointError(f"the model directory {path} cannot be read: {error.strerror}") from error
    if "config.json" not in names:
        raise CheckpointError(f"{path} has no config.json")
    config = _with_quantization(read_strict_object(root, "config.json"), root, names)
    refuse_code(config)

    # A link to GGUF files: their tensors are listed as converted.
    origin = None
    if ORIGIN_FILE in names:
        origin = read_strict_object(root, ORIGIN_FILE)
    if LINK_FILE in names:
        gguf, tensors = read_link(root, origin)
        return Checkpoint(Path(path), normalized(config, tensors.keys()), [], tensors, origin, gguf=gguf)

    # Headers of all shards, and the index that lists them
    shards = _shard_names(root, names)
    for name in shards:
        check_name(root / name)
    tensors = dict[str, TensorInfo]()
    for name in shards:
        read_header(root, name, tensors)
    if INDEX_FILE in names:
        _check_index(root, tensors)

    # Keys of config.json that tensors imply, and another tool's quantization
    config = normalized(config, tensors.keys())
    foreign = recognise(config, tensors)
    if foreign is not None:
        config = {**config, "quantization": foreign.quantization()}
        tensors = foreign.tensors(tensors)
    return Checkpoint(Path(path), config, [root / name for name in shards], tensors, origin, foreign)


def _with_quantization(config: dict[str, object], root: Path, names: list[str]) -> dict[str, object]:
    """Return the config with a top-level `quantization_config`, also if the text part or ModelOpt's file has it."""
    stated = config.get("quantization_config")
    if isinstance(stated, dict) and "quant_method" not in stated and {"bits", "group_size"} <= stated.keys():
        return {"quantization": stated, **config}  # as older MLX conversions state it
    if stated is not None:
        return config
    section = as_mapping(config.get("text_config")).get("quantization_config")
    if section is None and "hf_quant_config.json" in names:
        section = {"quant_method": "modelopt", **read_strict_object(root, "hf_quant_config.json")}
    if section is None:
        return config
    return {**config, "quantization_config": section}


def refuse_code(config: dict[str, object]) -> None:
    """Raise CheckpointError if this config.json names code that a loader would run."""
    # Loaders also use the nested text configs of multimodal models.
    for section in (config, config.get("text_config")):
        if not isinstance(section, dict):
            continue
        for key in _CODE_KEYS:
            if section.get(key):
                raise CheckpointError(
                    f"config.json has {key!r}: checkpoints with their own code are refused",
                    "look for a conversion of the model that uses a standard architecture",
                )


def weight_files(names: Iterable[str]) -> list[str]:
    """Return the safetensors files of a model, without variants such as model.fp16.safetensors next to others."""
    files = [name for name in names if name.startswith("model") and name.endswith(".safetensors")]
    return [name for name in files if not _VARIANT.fullmatch(name)] or files


def _shard_names(root: Path, names: list[str]) -> list[str]:
    """Return the shards of a folder with the files `names`. Raises CheckpointError without any."""
    shards = weight_files(names)
    if shards:
        return shards
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise CheckpointError(
            f"the weights are pickles only ({pickles[0]}); opening them can run code, so they are refused",
            "look for a safetensors version of the model",
        )
    raise CheckpointError(f"{root} has no weights: no model*.safetensors in it")


def _check_index(root: Path, tensors: dict[str, TensorInfo]) -> None:
    """Raise CheckpointError unless the index lists exactly the tensors of the shards."""
    name = INDEX_FILE
    weight_map = read_strict_object(root, name, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{name}: weight_map is not an object")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CheckpointError(f"{name}: shard name {quote(shard)} leaves the model directory")
        info = tensors.get(tensor)
        if info is None:
            raise CheckpointError(f"{name} lists {quote(tensor)} in {quote(shard)}, which does not have it")
        if info.shard.name != shard:
            raise CheckpointError(f"{name} puts {quote(tensor)} in {quote(shard)}, it is in {info.shard.name}")
    for tensor in tensors:
        if tensor not in weight_map:
            raise CheckpointError(f"{name} does not list {quote(tensor)} of {tensors[tensor].shard.name}")


def _is_plain_name(name: str) -> bool:
    return bool(name) and not any(c in name for c in "/\\\0") and name not in {".", ".."}
