"""LoRA adapters in GGUF files, as llama.cpp's converter and Ollama write them, for a base that is a GGUF file, too.

`blk.0.attn_q.weight.lora_a` (r, K) and `.lora_b` (N, r) change that tensor of the base by alpha / r * B A. Rows and
columns are in the order of the base's file; its table of targets has the modules and the orders. The result is an
adapter in mlx-lm's format, which `models.checkpoint.adapter` reads (`models.registry.adapters` asks for it).

Guard: tests/models/gguf/test_adapter.py.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from headrace.models.checkpoint.arrays import save_arrays
from headrace.models.gguf.container import RawTensor, open_container
from headrace.models.gguf.convert import in_order, layout_of
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.target import Target
from headrace.models.gguf.tensors import dequantized
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_PARTS = (".lora_a", ".lora_b")
_Matrix = npt.NDArray[np.float32]


def convert_adapter(file: Path, base: Path, directory: Path) -> None:
    """Write the adapter `file` into `directory`, in mlx-lm's format. base: the file of the model it changes.

    Raises CheckpointError for a broken adapter or one of another model, UnsupportedModelError for one that does more
    than add low-rank products to matrices, and OSError.
    """
    container = open_container(file)
    metadata = Metadata(container.metadata)
    base_container = open_container(base)
    layout = layout_of(base_container)
    _check(file, metadata, layout.metadata.architecture)

    # A tensor of the file may become several of the network: Q, K and V are stored as one, or not.
    targets: dict[str, list[Target]] = {}
    for each in layout.targets:
        targets.setdefault(each.source, []).append(each)

    # Both factors of each tensor, in the network's order of rows and columns
    arrays = {}
    for name in _changed_tensors(container.tensors):
        a, b = (container.tensors.get(name + part) for part in _PARTS)
        if a is None or b is None:
            raise CheckpointError(f"{file.name}: one factor of {name} is missing")
        if name not in targets:
            raise UnsupportedModelError(f"{file.name} changes {name}, which {base.name} does not have")
        if not all(map(_takes_adapter, targets[name])):
            raise UnsupportedModelError(f"{file.name} changes {name}, which headrace applies no adapter to")
        _check_shapes(name, a, b, base_container.tensors[name].shape)
        scaled = _matrix(b) * np.float32(_scale(metadata, rank=b.shape[-1]))
        for each in targets[name]:
            of_columns = in_order(_matrix(a), replace(each, rows=None))
            of_rows = in_order(scaled, replace(each, columns=None))
            # mlx-lm stores both factors transposed: (K, r) and (r, N).
            arrays[f"{each.module}.lora_a"] = mx.array(of_columns.T)
            arrays[f"{each.module}.lora_b"] = mx.array(of_rows.T)
    save_arrays(directory / "adapters.safetensors", arrays)
    # alpha / r is a factor of B already, since tensors may have different ranks: mlx-lm's scale of all is 1.
    config = {"fine_tune_type": "lora", "lora_parameters": {"scale": 1.0}}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def base_of_file(file: Path) -> str | None:
    """Return the model that the adapter in `file` was made for; None if it does not say so. Raises CheckpointError."""
    metadata = Metadata(open_container(file).metadata)
    stated = metadata.optional_text("general.base_model.0.repo_url")
    if stated is None:
        return metadata.optional_text("general.base_model.0.name")
    return stated.removeprefix("https://huggingface.co/")


def _check(file: Path, metadata: Metadata, architecture: str) -> None:
    """Raise an error for a file that is no LoRA adapter, or one for another architecture than the base's."""
    if metadata.text("general.type", "model") != "adapter":
        raise CheckpointError(f"{file.name} is a model, not an adapter")
    if (kind := metadata.text("adapter.type")) != "lora":
        raise UnsupportedModelError(f"{file.name} is an adapter of type {kind!r:.40}; headrace applies lora")
    if metadata.has("adapter.alora.invocation_tokens"):
        raise UnsupportedModelError(f"{file.name} is an adapter that certain tokens invoke; headrace applies it always")
    if metadata.architecture != architecture:
        raise CheckpointError(
            f"{file.name} is an adapter for {metadata.architecture!r:.40}, the base is {architecture!r}"
        )


def _takes_adapter(target: Target) -> bool:
    """Return whether headrace applies an adapter to this tensor: to whole matrices, not to the embedding table."""
    is_whole_matrix = len(target.shape) == 2 and target.index is None and not target.below
    return is_whole_matrix and target.source != "token_embd.weight"


def _check_shapes(name: str, a: RawTensor, b: RawTensor, shape: Sequence[int]) -> None:
    """Raise CheckpointError unless B A has the shape of the base's tensor. Reordering would drop surplus rows."""
    for factor in (a, b):
        if len(factor.shape) != 2:
            raise UnsupportedModelError(f"the adapter's {factor.name} is no matrix; headrace applies none to experts")
    if a.shape[0] != b.shape[1]:
        raise CheckpointError(f"the adapter's factors of {name} have ranks {a.shape[0]} and {b.shape[1]}")
    if (b.shape[0], a.shape[1]) != tuple(shape):
        changed = f"{b.shape[0]} x {a.shape[1]}"
        stored = " x ".join(map(str, shape))
        raise CheckpointError(f"the adapter changes {name} as a matrix of {changed}, the base has {stored}")


def _changed_tensors(names: Mapping[str, RawTensor]) -> list[str]:
    """Return the base's tensors that an adapter changes, once each."""
    changed = dict[str, None]()
    for name in names:
        tensor, dot, part = name.rpartition(".")
        if dot + part not in _PARTS:
            raise UnsupportedModelError(f"the adapter has the tensor {name}, which is no low-rank factor")
        changed[tensor] = None
    if not changed:
        raise CheckpointError("the adapter has no tensors")
    return list(changed)


def _scale(metadata: Metadata, rank: int) -> float:
    """Return the factor of B A; as in llama.cpp, an alpha of 0 stands for none."""
    alpha = metadata.number("adapter.lora.alpha", 0.0)
    return alpha / rank if alpha else 1.0


def _matrix(tensor: RawTensor) -> _Matrix:
    """Return a factor in float32."""
    values: _Matrix = dequantized(tensor.data, tensor.type).astype(np.float32)
    return values.reshape(tensor.shape)
