"""A random model of a newer family as an MLX checkpoint (4 bits, group 64) and as a GGUF (Q4_0) of the same shapes.

    python -m tests.bench.make_family lfm2-1.2b FOLDER      writes FOLDER/lfm2-1.2b-mlx/ and FOLDER/lfm2-1.2b.gguf
    headrace bench -m FOLDER/lfm2-1.2b-mlx --vs llama.cpp --llama-python PYTHON --llama-model FOLDER/lfm2-1.2b.gguf

Shapes come from mlx-lm's class, names from the row that reads such a GGUF. The values of the two files differ: only
their speeds compare. Both have 4.5 bits per weight. Convolutions, norms and other vectors are plain.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from headrace.models.architectures.fields import text_section
from headrace.models.gguf.architecture import TensorRule, TensorRules
from headrace.models.gguf.architectures import ARCHITECTURES
from headrace.models.gguf.names import named, shape_of, sizes_of
from headrace.models.gguf.safetensors_writer import SafetensorsWriter
from tests.bench import family_shapes
from tests.bench.family_shapes import FamilyShape
from tests.bench.make_model import _add_vocabulary, _tokenizer
from tests.bench.published_shapes import PUBLISHED

FAMILIES = family_shapes.FAMILIES | PUBLISHED
_GROUP = 64
_BLOCK = 32
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")  # plain in both files


class Destination(NamedTuple):
    """Tensor of a GGUF that a parameter of mlx-lm's class becomes."""

    name: str
    rule: TensorRule


@dataclass(frozen=True)
class Tensor:
    """One parameter of mlx-lm's class."""

    name: str
    shape: tuple[int, ...]
    quantized: bool  # stored in 4 bits
    destination: Destination | None  # None: metadata in a GGUF

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def tensors(family: FamilyShape) -> Iterator[Tensor]:
    """Return the parameters of the family's class. Nothing is evaluated."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(family.config)
    model = model_class(arguments.from_dict(dict(family.config)))
    modules = dict(model.named_modules())
    places = destinations(family)
    for name, array in tree_flatten(model.parameters()):
        packs = name.endswith(".weight") and hasattr(modules.get(name.removesuffix(".weight")), "to_quantized")
        place = None if ".act_fn." in name else places[name]
        is_router = place is not None and place.name.split(".")[-2] in _ROUTERS
        quantized = packs and not is_router and array.shape[-1] % _GROUP == 0
        yield Tensor(name, tuple(array.shape), quantized, place)


def destinations(family: FamilyShape) -> dict[str, Destination]:
    """Return the tensors of a GGUF by their names in mlx-lm's class."""
    row = ARCHITECTURES[family.architecture]
    prefix = "language_model." if row.wrapped else ""
    found = list(_in_both(row.tables, "", prefix))
    config = text_section(family.config)
    kinds: list[tuple[str, ...]] = [()] * config["num_hidden_layers"]
    if row.kinds is not None:
        kinds = row.kinds(config)
    for layer, groups in enumerate(kinds):
        # Groups of other layers may name the same module: the layer's own come last.
        for group in (*row.groups, *groups):
            found += _in_both(row.groups[group], f"blk.{layer}.", f"{prefix}{row.layer.format(layer)}.")
    weights = {name: place for name, place in found if place.rule.leaf != "bias"}
    return dict(found) | weights


def _in_both(parts: TensorRules, block: str, at: str) -> Iterator[tuple[str, Destination]]:
    """Yield name and destination of every parameter, and of a bias that a weight may have. at: prefix of modules."""
    for key, rule in parts.items():
        module = f"{at}{rule.module}".removesuffix(".")
        name = block + named(rule.source or key)
        if rule.leaf == "weight":
            yield f"{module}.bias", Destination(f"{name.removesuffix('.weight')}.bias", rule.bias)
        yield f"{module}.{rule.leaf}", Destination(name, rule)


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


def scale_of(columns: int) -> np.float16:
    return np.float16(1 / (4.6 * math.sqrt(columns)))


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
            scales = np.full((*t.shape[:-1], t.shape[-1] // _GROUP), scale_of(t.shape[-1]), np.float16)
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
    written = set()
    for t in tensors(family):
        if t.destination is None:
            continue
        name, rule = t.destination
        if name.endswith("attn_kv_b.weight"):  # apart, as the converter has it
            _add_latents(writer, name, config)
        elif t.quantized:
            writer.add_tensor(name, _blocks(draw, t.shape), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        elif name not in written:  # several parameters may be rows of one tensor
            array = _as_stored(values(t), rule)
            writer.add_tensor(name, np.resize(array, _plain_shape(family, t.shape, rule)))
        written.add(name)
    for name, numbers in family.vectors.items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_stored(array: npt.NDArray[np.float32], rule: TensorRule) -> npt.NDArray[np.float32]:
    """Return the numbers of a parameter as a GGUF has them."""
    if rule.values == "log":
        return np.exp(array)
    if rule.values == "log_negative":
        return -np.exp(array)
    return array


def _plain_shape(family: FamilyShape, shape: tuple[int, ...], rule: TensorRule) -> tuple[int, ...]:
    """Return the shape in llama.cpp of a tensor that is not quantized. shape: in mlx-lm's class."""
    text = text_section(family.config)
    text = {"head_dim": text["hidden_size"] // text["num_attention_heads"], **text}
    stored = shape_of(rule.shape, {**sizes_of(text), **ARCHITECTURES[family.architecture].sizes(text)})
    # The rule may be that of another kind of layer, with larger heads, which has the same names.
    return stored if rule.index is not None or math.prod(stored) == math.prod(shape) else shape


def _blocks(draw: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    blocks = np.frombuffer(draw.bytes(math.prod(shape) // _BLOCK * 18), np.uint8).reshape(-1, 18).copy()
    blocks[:, :2] = np.frombuffer(scale_of(shape[-1]).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _add_latents(writer: gguf.GGUFWriter, name: str, config: dict[str, Any]) -> None:
    """Add both halves of a layer's K/V projection, that of keys transposed. name: of the projection."""
    heads = config["num_attention_heads"]
    size = config["kv_lora_rank"]
    draw = np.random.default_rng(1)
    for half, shape in (
        ("attn_k_b", (heads, size, config["qk_nope_head_dim"])),
        ("attn_v_b", (heads, config["v_head_dim"], size)),
    ):
        place = name.replace("attn_kv_b", half)
        writer.add_tensor(place, _blocks(draw, shape), raw_dtype=gguf.GGMLQuantizationType.Q4_0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    family = FAMILIES[options.family]
    write_checkpoint(options.folder / f"{options.family}-mlx", family)
    write_gguf(options.folder / f"{options.family}.gguf", family)


if __name__ == "__main__":
    main()
