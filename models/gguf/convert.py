"""Conversion of a GGUF file to an MLX-format model directory, tensor by tensor.

headrace, mlx-lm and transformers' tokenizer classes load the directory: Hugging Face names and layout, unfused, in MLX
affine quantization for quantized tensors. `headrace.json` records the source and the inexact tensors.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.models.gguf.config import Config, generation_config, model_config
from headrace.models.gguf.container import Container, RawTensor, open_container
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.names import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT, Target, targets
from headrace.models.gguf.rope import LongFactors
from headrace.models.gguf.safetensors_writer import SafetensorsWriter
from headrace.models.gguf.tensors import Affine, is_quantized, to_affine, to_mxfp4, to_plain
from headrace.models.gguf.tokenizer import build_tokenizer, save_tokenizer, tokenizer_config
from headrace.models.gguf.vocabulary import SpecialIds, read_vocabulary
from headrace.models.text.vocabulary import Vocabulary
from headrace.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LICENCE_KEYS = ("general.license", "general.license.name", "general.license.link")


@dataclass
class _ConversionLog:
    """Properties of the written tensors: settings per module, dtypes, and inexact ones."""

    settings: dict[str, tuple[int, int, str]] = field(default_factory=dict)  # group size, bits, mode
    types: set[str] = field(default_factory=set)
    inexact: list[dict[str, Any]] = field(default_factory=list)

    def note(self, tensor: RawTensor, became: str, max_error: float) -> None:
        if max_error > 0:
            self.inexact.append(
                {"name": tensor.name, "type": tensor.type, "became": became, "max_abs_error": max_error}
            )


@dataclass(frozen=True)
class ConversionPlan:
    """Contents of a GGUF's header in Hugging Face terms."""

    container: Container
    metadata: Metadata
    vocabulary: Vocabulary
    config: Config
    targets: list[Target]
    tokenizer: "Tokenizer"
    special: SpecialIds


def convert_gguf(
    source: Path,
    target: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    sha256: str | None = None,
    groups_of_16: Callable[[Config], bool] = lambda _: True,
) -> None:
    """Convert the GGUF file `source` into the empty directory `target`.

    progress(done, total): bytes of tensor data. sha256: the file's digest, computed if None. groups_of_16(config):
    whether the decoder for that config supports groups of 16, which represent Q6_K exactly; otherwise Q6_K is
    requantized. Raises CheckpointError for a broken or contradictory file, UnsupportedModelError for an unsupported
    architecture, tensor type or tokenizer. On an error, delete `target`.
    """
    plan = read_plan(source)
    container, metadata, config, special = plan.container, plan.metadata, plan.config, plan.special
    sixteen = groups_of_16(config)
    written = _write_weights(container, plan.targets, target / "model.safetensors", sixteen, progress)
    config |= _quantization(written.settings)
    config["torch_dtype"] = _half_type(metadata.architecture, written.types)
    config |= {"bos_token_id": special.bos, "eos_token_id": special.ends}

    save_tokenizer(plan.tokenizer, target / "tokenizer.json")
    tokenizer_facts = tokenizer_config(plan.vocabulary, special, config["max_position_embeddings"])
    _write_json(target / "tokenizer_config.json", tokenizer_facts)
    if (template := metadata.optional_text("tokenizer.chat_template")) is not None:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    _write_json(target / "generation_config.json", generation_config(metadata, special))
    _write_json(target / "headrace.json", _origin(source, metadata, written, sha256))
    _write_json(target / "config.json", config)


def read_plan(source: Path) -> ConversionPlan:
    """Return all that the header of a GGUF file decides. Raises as `convert_gguf`."""
    container = open_container(source)
    metadata = Metadata(container.metadata)
    vocabulary = read_vocabulary(metadata)
    config = model_config(
        metadata,
        vocab_size=len(vocabulary.tokens),
        tensors=container.tensors.keys(),
        rope_factors=_factors(container, ROPE_FACTORS),
        long_factors=_long_factors(container),
    )
    wanted = targets(metadata.architecture, config, container.tensors)
    for each in wanted:
        _check_shape(container.tensors[each.source], each)
    tokenizer, special = build_tokenizer(metadata, vocabulary)
    return ConversionPlan(container, metadata, vocabulary, config, wanted, tokenizer, special)


def _long_factors(container: Container) -> LongFactors | None:
    long, short = (_factors(container, name) for name in (ROPE_LONG, ROPE_SHORT))
    return None if long is None or short is None else LongFactors(long, short)


def _factors(container: Container, name: str) -> list[float] | None:
    tensor = container.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"tensor {name} is not a vector of F32")
    return [float(factor) for factor in to_plain(tensor)[0].view("<f4")]


def _check_shape(tensor: RawTensor, target: Target) -> None:
    if tensor.shape != target.shape:
        raise CheckpointError(f"tensor {tensor.name} has shape {tensor.shape}, the metadata asks for {target.shape}")


def _write_weights(
    container: Container,
    wanted: list[Target],
    path: Path,
    groups_of_16: bool,
    progress: Callable[[int, int], None] | None,
) -> _ConversionLog:
    written = _ConversionLog()
    names = [f"{target.module}.{leaf}" for target in wanted for leaf in _leaves(container, target)]
    done, total = 0, sum(container.tensors[target.source].data.nbytes for target in wanted)
    with SafetensorsWriter(path, names) as writer:
        for target in wanted:
            tensor = container.tensors[target.source]
            if is_quantized(tensor):
                experts = tensor.type == "MXFP4" and len(tensor.shape) > 2
                packed = to_mxfp4(tensor) if experts else to_affine(tensor, groups_of_16=groups_of_16)
                _write_packed(writer, tensor, packed, target, written)
            else:
                _write_plain(writer, tensor, target, written)
            done += tensor.data.nbytes
            if progress is not None:
                progress(done, total)
    return written


def _leaves(container: Container, target: Target) -> tuple[str, ...]:
    return ("weight", "scales", "biases") if is_quantized(container.tensors[target.source]) else (target.leaf,)


def _write_packed(
    writer: SafetensorsWriter, tensor: RawTensor, affine: Affine, target: Target, written: _ConversionLog
) -> None:
    scale_type = {"float16": "F16", "float32": "F32", "uint8": "U8"}[affine.scales.dtype.name]
    rows = _row_order(target)
    writer.add(f"{target.module}.weight", affine.weight[rows], "U32")
    writer.add(f"{target.module}.scales", affine.scales[rows], scale_type)
    if affine.biases is not None:
        writer.add(f"{target.module}.biases", affine.biases[rows], scale_type)
    written.settings[target.module] = (affine.group_size, affine.bits, affine.mode)
    written.types.add(tensor.type)
    written.note(tensor, f"affine {affine.bits}-bit, group size {affine.group_size}", affine.max_error)


def _write_plain(writer: SafetensorsWriter, tensor: RawTensor, target: Target, written: _ConversionLog) -> None:
    words, dtype = to_plain(tensor)
    max_error = 0.0
    if target.plus_one:
        words, dtype, max_error = _minus_one(words, dtype)
    words = words[None] if target.as_row else words
    writer.add(f"{target.module}.{target.leaf}", words[_row_order(target)], dtype)
    written.types.add(tensor.type)
    written.note(tensor, dtype, max_error)


def _minus_one(words: npt.NDArray[Any], dtype: str) -> tuple[npt.NDArray[Any], str, float]:
    """Return (norm weight minus 1 as float32, dtype, error of adding it back); llama.cpp's converter adds the 1."""
    if dtype == "BF16":
        stored = (words.astype("<u4") << 16).view("<f4")
    else:
        stored = words.view("<f4" if dtype == "F32" else "<f2").astype("<f4")
    values = stored - np.float32(1)
    return values, "F32", float(np.abs(values + np.float32(1) - stored).max())


def _row_order(target: Target) -> npt.NDArray[Any] | slice:
    """Return the rows in Hugging Face order. GGUF interleaves the halves of a head: 0, D/2, 1, D/2 + 1, ..."""
    if not target.permuted_heads:
        return slice(None)
    rows = np.arange(target.shape[0]).reshape(target.permuted_heads, -1, 2)  # (H, D / 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _quantization(settings: dict[str, tuple[int, int, str]]) -> dict[str, Any]:
    """Return the config section mlx-lm reads: the most common settings, and all modules that differ."""
    if not settings:
        return {}

    def entry(of: tuple[int, int, str]) -> dict[str, Any]:
        return dict(zip(("group_size", "bits", "mode"), of, strict=True))

    common = Counter(settings.values()).most_common(1)[0][0]
    section = entry(common) | {module: entry(own) for module, own in settings.items() if own != common}
    return {"quantization": section, "quantization_config": section}


def _half_type(architecture: str, types: set[str]) -> str:
    """Return the half precision to compute in on a GPU. Gemma's activations overflow float16."""
    return "bfloat16" if "BF16" in types or architecture.startswith("gemma") else "float16"


def _origin(source: Path, metadata: Metadata, written: _ConversionLog, sha256: str | None) -> dict[str, Any]:
    if sha256 is None:
        with source.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "format": "gguf",
        "source": source.name,
        "size": source.stat().st_size,
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


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
