"""A random model of a newer family as an MLX checkpoint (4 bits, group 64) and as a GGUF (Q4_0) of the same shapes.

    python -m tests.bench.make_family lfm2-1.2b FOLDER      writes FOLDER/lfm2-1.2b-mlx/ and FOLDER/lfm2-1.2b.gguf
    headrace bench -m FOLDER/lfm2-1.2b-mlx --vs llama.cpp --llama-python PYTHON --llama-model FOLDER/lfm2-1.2b.gguf

Shapes come from mlx-lm's class, names from `gguf`. The values of the two files differ: only their speeds compare. Both
have 4.5 bits per weight. Convolutions, norms and other vectors are plain.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from headrace.models.gguf.safetensors_writer import SafetensorsWriter
from tests.bench.family_shapes import FAMILIES, FamilyShape
from tests.bench.make_model import _add_vocabulary, _tokenizer

_GROUP = 64
_BLOCK = 32
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Tensor:
    """One parameter of mlx-lm's class. quantized: stored in 4 bits."""

    name: str
    shape: tuple[int, ...]
    quantized: bool

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def tensors(family: FamilyShape) -> Iterator[Tensor]:
    """Return the parameters of the family's class. Nothing is evaluated."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(family.config)
    model = model_class(arguments.from_dict(dict(family.config)))
    modules = dict(model.named_modules())
    for name, array in tree_flatten(model.parameters()):
        module = name.removesuffix(".weight")
        packs = name.endswith(".weight") and hasattr(modules.get(module), "to_quantized")
        router = module.rpartition(".")[2] in _ROUTERS
        yield Tensor(name, tuple(array.shape), packs and not router and array.shape[-1] % _GROUP == 0)


def values(tensor: Tensor) -> npt.NDArray[np.float32]:
    """Return values of a plain parameter that keep activations bounded."""
    last = tensor.name.rpartition(".")[2]
    if last == "A_log":
        return np.log(np.linspace(1, 16, math.prod(tensor.shape), dtype=np.float32)).reshape(tensor.shape)
    if last in ("beta", "eps"):  # of xIELU
        return np.full(tensor.shape, 0.5 if last == "beta" else -1e-6, np.float32)
    if "norm" in tensor.name or last in ("D", "layer_scalar"):
        return np.ones(tensor.shape, np.float32)
    draw = np.random.default_rng(len(tensor.name))
    return (draw.standard_normal(tensor.shape) / math.sqrt(tensor.shape[-1] if len(tensor.shape) > 1 else 100)).astype(
        np.float32
    )


def scale_of(tensor: Tensor) -> np.float16:
    return np.float16(1 / (4.6 * math.sqrt(tensor.shape[-1])))


def write_checkpoint(directory: Path, family: FamilyShape) -> None:
    """Write an MLX model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    every = list(tensors(family))
    plain = {t.module: False for t in every if not t.quantized and t.name.endswith(".weight") and len(t.shape) > 1}
    config = {**family.config, "eos_token_id": 0, "quantization": {"group_size": _GROUP, "bits": 4, **plain}}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    _tokenizer(family.config["vocab_size"]).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "model_max_length": 8192})
    )
    names = []
    for t in every:
        names += [f"{t.module}.{part}" for part in ("weight", "scales", "biases")] if t.quantized else [t.name]
    draw = np.random.default_rng(0)
    with SafetensorsWriter(directory / "model.safetensors", names) as file:
        for t in every:
            if not t.quantized:
                file.add(t.name, values(t).astype(np.float16), "F16")
                continue
            packed = np.frombuffer(draw.bytes(math.prod(t.shape) // 2), "<u4").reshape(*t.shape[:-1], -1)
            scales = np.full((*t.shape[:-1], t.shape[-1] // _GROUP), scale_of(t), np.float16)
            file.add(f"{t.module}.weight", packed, "U32")
            file.add(f"{t.module}.scales", scales, "F16")
            file.add(f"{t.module}.biases", -8 * scales, "F16")


def write_gguf(path: Path, family: FamilyShape) -> None:
    """Write a file of the same shapes for llama.cpp."""
    config = family.config
    writer = gguf.GGUFWriter(path, family.architecture)
    for key, value in family.keys.items():
        name = key if key.startswith("xielu.") else f"{family.architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _add_vocabulary(writer, config["vocab_size"])
    draw = np.random.default_rng(0)
    for t in tensors(family):
        if ".act_fn." in t.name:  # metadata in a GGUF
            continue
        if ".attn.x_" in t.name:  # six of a layer, together in a GGUF
            if t.name.endswith("x_r"):
                fused = np.full((6, 1, 1, config["hidden_size"]), 0.5, np.float32)
                writer.add_tensor(f"blk.{t.name.split('.')[2]}.time_mix_lerp_fused.weight", fused)
            continue
        if t.name.endswith("kv_b_proj.weight"):  # apart, as the converter has it
            _add_latents(writer, t, config)
            continue
        name = gguf_name(t.name, family)
        if t.quantized:
            writer.add_tensor(name, _blocks(draw, t), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        else:
            writer.add_tensor(name, _as_llama(t, name, family))
    for name, numbers in family.vectors.items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(draw: np.random.Generator, tensor: Tensor) -> npt.NDArray[np.uint8]:
    blocks = np.frombuffer(draw.bytes(math.prod(tensor.shape) // _BLOCK * 18), np.uint8).reshape(-1, 18).copy()
    blocks[:, :2] = np.frombuffer(scale_of(tensor).tobytes(), np.uint8)
    return blocks.reshape(*tensor.shape[:-1], -1)


def _add_latents(writer: gguf.GGUFWriter, tensor: Tensor, config: dict[str, Any]) -> None:
    """Add both halves of a layer's K/V projection, that of keys transposed."""
    heads = config["num_attention_heads"]
    size = config["kv_lora_rank"]
    draw = np.random.default_rng(1)
    layer = tensor.name.split(".")[2]
    for name, shape in (
        ("attn_k_b", (heads, size, config["qk_nope_head_dim"])),
        ("attn_v_b", (heads, config["v_head_dim"], size)),
    ):
        blocks = _blocks(draw, Tensor(name, shape, True))
        writer.add_tensor(f"blk.{layer}.{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)


def gguf_name(name: str, family: FamilyShape) -> str:
    """Return llama.cpp's name of a tensor of mlx-lm's class."""
    for theirs, new in family.names.items():
        name = name.replace(theirs, new)
    kinds = {kind: arch for arch, kind in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[family.architecture], family.config["num_hidden_layers"])
    name = name.replace("dt_bias", "dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
    found: str | None = table.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise KeyError(f"{family.architecture} has no name for {name}")
    return found


def _as_llama(tensor: Tensor, name: str, family: FamilyShape) -> npt.NDArray[np.float32]:
    """Return a plain parameter in llama.cpp's form."""
    array = values(tensor)
    if name.endswith(("ssm_a", "ssm_d")):
        array = -np.exp(array) if name.endswith("ssm_a") else array
        whole = family.architecture.startswith("qwen35") or family.architecture == "mamba" or array.ndim > 1
        return array if whole else array[:, None]
    if "time_mix" in name and tensor.shape[-1] == family.keys.get("wkv.head_size"):  # vectors by heads
        return array.flatten()
    if "lerp" in name:
        return array.reshape(1, 1, -1)
    if name.endswith("gate_inp_shexp.weight"):
        return array[0]
    if family.architecture == "kimi-linear" and array.ndim == 3:
        return np.ascontiguousarray(array.swapaxes(1, 2)[None])
    if "conv" in name and array.ndim == 3:
        return np.ascontiguousarray(array[..., 0])
    if name.endswith("ssm_norm.weight") and not family.architecture.startswith(("qwen35", "kimi")):
        return array.reshape(family.keys["ssm.group_count"], -1)
    return array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    family: FamilyShape = FAMILIES[options.family]
    write_checkpoint(options.folder / f"{options.family}-mlx", family)
    write_gguf(options.folder / f"{options.family}.gguf", family)


if __name__ == "__main__":
    main()
