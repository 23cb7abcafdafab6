"""Tiny checkpoints in the formats of other quantizers, with the float32 weights that they stand for.

Numpy code written from the formats' definitions: the inverse of headrace's unpacking. `write` gives a directory in the
format; `dequantized` the same model in float32.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.models.gguf.safetensors_writer import SafetensorsWriter

Array = NDArray[Any]
Tensors = dict[str, tuple[Array, str]]  # name -> array and its safetensors type
GROUP = 32


def _e4m3() -> NDArray[np.float32]:
    """Return the 256 values of E4M3: sign, four bits of exponent (bias 7), three of mantissa; no infinity, one NaN."""
    code = np.arange(256)
    sign = np.where(code & 128, -1.0, 1.0)
    exponent = (code >> 3) & 15
    mantissa = code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where((exponent == 15) & (mantissa == 7), np.nan, value)
    return (sign * value).astype(np.float32)


E4M3 = _e4m3()


def as_bf16(values: Array) -> Array:
    """Truncate float32 to bfloat16 values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _bf16_bits(values: Array) -> Array:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _fp8_codes(values: Array) -> Array:
    order = np.argsort(E4M3[:127])
    nearest = order[np.abs(np.abs(values)[..., None] - E4M3[:127][order]).argmin(-1)]
    return np.where(values < 0, nearest | 128, nearest).astype(np.uint8)


def _spread(scales: Array, shape: tuple[int, ...], block: tuple[int, int]) -> Array:
    return np.repeat(np.repeat(scales, block[0], -2), block[1], -1)[..., : shape[-2], : shape[-1]]


def _block_max(w: Array, block: tuple[int, int]) -> Array:
    rows = -(-w.shape[-2] // block[0])
    columns = -(-w.shape[-1] // block[1])
    blocks = [
        [np.abs(w[..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]).max((-2, -1))
         for j in range(columns)] for i in range(rows)
    ]  # fmt: skip
    return np.moveaxis(np.array(blocks, np.float32), (0, 1), (-2, -1))


def fp8(
    end: str, block: tuple[int, int] | None, *, shape: str = "blocks"
) -> Callable[[str, Array], tuple[Tensors, Array]]:
    """Encode as E4M3 with `weight{end}`, one scale per block, per row ("rows") or for all ("one")."""

    def encode(module: str, w: Array) -> tuple[Tensors, Array]:
        size = block or ((1, w.shape[1]) if shape == "rows" else w.shape)
        scales = as_bf16(_block_max(w, size) / 448 * 1.3)
        spread = _spread(scales, w.shape, size)
        codes = _fp8_codes(w / spread)
        stored = scales.reshape(()) if shape == "one" else scales
        made: Tensors = {f"{module}.weight": (codes, "F8_E4M3"), f"{module}.weight{end}": (stored, "F32")}
        if shape == "one":
            made[f"{module}.input_scale"] = (np.float32(0.5).reshape(()), "F32")
        return made, E4M3[codes] * spread

    return encode


def int8(module: str, w: Array) -> tuple[Tensors, Array]:
    """Encode as compressed-tensors W8A8: int8 with a bfloat16 scale per row."""
    scales = as_bf16(np.abs(w).max(1, keepdims=True) / 120)
    q = np.clip(np.round(w / scales), -128, 127).astype(np.int8)
    made: Tensors = {f"{module}.weight": (q, "I8"), f"{module}.weight_scale": (_bf16_bits(scales), "BF16")}
    return made, q.astype(np.float32) * scales


def _grouped(w: Array, bits: int, group: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Return q (N, K), scales (N, G) in float16 precision, zeros (N, G): W = scale * (q - zero)."""
    rows, columns = w.shape
    g = w.reshape(rows, columns // group, group)
    top = (1 << bits) - 1
    if symmetric:
        scales = np.abs(g).max(-1) / (top // 2)
        zeros = np.full(scales.shape, 1 << (bits - 1))
    else:
        scales = (g.max(-1) - g.min(-1)) / top
        zeros = np.clip(np.round(-g.min(-1) / scales), 1, top).astype(int)
    scales = scales.astype(np.float16).astype(np.float32)
    q = np.clip(np.round(g / scales[..., None]) + zeros[..., None], 0, top)
    return q.reshape(rows, columns).astype(np.uint32), scales, zeros.astype(np.uint32)


def _pack(values: Array, bits: int, places: tuple[int, ...] | None = None) -> Array:
    """Pack (R, C) into (R, C * bits / 32) words; value i of a word is at `places[i]`, lowest first by default."""
    per_word = 32 // bits
    places = places or tuple(range(per_word))
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
    words = np.zeros((values.shape[0], padded.shape[1] // per_word), np.uint32)
    for i, place in enumerate(places):
        words |= padded[:, i::per_word].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def gptq(bits: int = 4, group: int = GROUP, *, v2: bool = False, shuffled: bool = False) -> Any:
    """Encode in AutoGPTQ's layout; `shuffled`: columns grouped by activation order."""

    def encode(module: str, w: Array) -> tuple[Tensors, Array]:
        columns = w.shape[1]
        order = np.random.default_rng(len(module)).permutation(columns) if shuffled else np.arange(columns)
        q, scales, zeros = _grouped(w[:, order], bits, group, symmetric=False)
        g_idx = np.empty(columns, np.int32)
        g_idx[order] = np.arange(columns) // group
        back = np.argsort(order)
        values = (q[:, back] - zeros[:, g_idx].astype(np.float32)) * scales[:, g_idx]
        stored = zeros.T if v2 else zeros.T - 1
        made: Tensors = {
            f"{module}.qweight": (_pack(q[:, back], bits).T, "I32"),  # along K, of W.T
            f"{module}.qzeros": (_pack(stored, bits), "I32"),
            f"{module}.scales": (scales.T.astype(np.float16), "F16"),
            f"{module}.g_idx": (g_idx, "I32"),
        }
        return made, values.astype(np.float32)

    return encode


def awq(module: str, w: Array) -> tuple[Tensors, Array]:
    """Encode in AutoAWQ's GEMM layout: eight neighbours along N in one word, in the order 0 2 4 6 1 3 5 7."""
    q, scales, zeros = _grouped(w, 4, GROUP, symmetric=False)
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    made: Tensors = {
        f"{module}.qweight": (_pack(q.T, 4, places), "I32"),
        f"{module}.qzeros": (_pack(zeros.T, 4, places), "I32"),
        f"{module}.scales": (scales.T.astype(np.float16), "F16"),
    }
    return made, ((q - zeros.repeat(GROUP, 1).astype(np.float32)) * scales.repeat(GROUP, 1)).astype(np.float32)


def ternary(*, divides: bool = False) -> Any:
    """Encode as BitNet: four quarters of the rows in the bits of a byte, one scale. divides: by it, as `bitlinear`."""

    def encode(module: str, w: Array) -> tuple[Tensors, Array]:
        scale = as_bf16(np.abs(w).mean(keepdims=True).reshape(1))
        codes = np.clip(np.round(w / scale), -1, 1) + 1
        quarters = np.split(codes.astype(np.uint8), 4)
        stored = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
        if divides:
            scale = as_bf16(1 / scale)
        made: Tensors = {f"{module}.weight": (stored, "U8"), f"{module}.weight_scale": (_bf16_bits(scale), "BF16")}
        factor = np.float32(1) / scale if divides else scale
        return made, (codes - 1).astype(np.float32) * factor

    return encode


def packed(bits: int = 4, group: int = GROUP, *, symmetric: bool = True) -> Any:
    """Encode as compressed-tensors' pack-quantized: signed integers stored unsigned, zero points packed along rows."""

    def encode(module: str, w: Array) -> tuple[Tensors, Array]:
        size = min(group, w.shape[1])
        q, scales, zeros = _grouped(w, bits, size, symmetric)
        made: Tensors = {
            f"{module}.weight_packed": (_pack(q, bits), "I32"),
            f"{module}.weight_scale": (scales.astype(np.float16), "F16"),
            f"{module}.weight_shape": (np.array(w.shape, np.int64), "I64"),
        }
        if not symmetric:
            made[f"{module}.weight_zero_point"] = (_pack(zeros.T, bits).T, "I32")
        spread = scales.repeat(size, 1)
        return made, ((q - zeros.repeat(size, 1).astype(np.float32)) * spread).astype(np.float32)

    return encode


NF4 = np.array([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
], np.float32)  # fmt: skip


def nf4(double: bool = False, block: int = 64) -> Callable[[str, Array], tuple[Tensors, Array]]:
    """Encode as bitsandbytes does: blocks over the flattened matrix; `double`: 8-bit scales in blocks of 16."""

    def encode(module: str, w: Array) -> tuple[Tensors, Array]:
        flat = w.reshape(-1).astype(np.float32)
        padded = np.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
        scales = np.abs(padded).max(1)
        name = f"{module}.weight"
        state = {"quant_type": "nf4", "blocksize": block, "shape": list(w.shape)}
        made: Tensors = {f"{name}.quant_map": (NF4, "F32")}
        if double:
            offset = np.float32(scales.mean())
            table = np.linspace(-1, 1, 256, dtype=np.float32)
            rest = np.pad(scales - offset, (0, -len(scales) % 16)).reshape(-1, 16)
            outer = np.abs(rest).max(1).astype(np.float32)
            codes = np.abs((rest / outer[:, None])[..., None] - table).argmin(-1).reshape(-1)[: len(scales)]
            scales = table[codes] * outer.repeat(16)[: len(scales)] + offset
            state |= {"nested_blocksize": 16, "nested_offset": float(offset)}
            made |= {
                f"{name}.absmax": (codes.astype(np.uint8), "U8"), f"{name}.nested_absmax": (outer, "F32"),
                f"{name}.nested_quant_map": (table, "F32"),
            }  # fmt: skip
        else:
            made[f"{name}.absmax"] = (scales, "F32")
        codes = np.abs((padded / scales[:, None])[..., None] - NF4).argmin(-1).reshape(-1)[: len(flat)]
        pairs = np.pad(codes, (0, len(codes) % 2)).astype(np.uint8).reshape(-1, 2)
        made[name] = ((pairs[:, :1] << 4) | pairs[:, 1:], "U8")
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        made[f"{name}.quant_state.bitsandbytes__nf4"] = (text, "U8")
        return made, (NF4[codes] * scales.repeat(block)[: len(codes)]).reshape(w.shape)

    return encode


def _compressed(format_: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": groups, "ignore": ["lm_head"]}


@dataclass(frozen=True)
class Format:
    """A matrix format: its config.json section and the encoder of a projection."""

    section: Mapping[str, Any]
    encode: Callable[[str, Array], tuple[Tensors, Array]]
    exact: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)  # hf_quant_config.json


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMATS: dict[str, Format] = {
    "fp8-blocks": Format({**_FP8, "weight_block_size": [48, 40]}, fp8("_scale_inv", (48, 40))),
    "fp8-tensor": Format({**_FP8, "activation_scheme": "static"}, fp8("_scale", None, shape="one")),
    "fbgemm-fp8": Format({"quant_method": "fbgemm_fp8"}, fp8("_scale", None, shape="rows")),
    "compressed-fp8": Format(_compressed("float-quantized", strategy="channel"), fp8("_scale", None, shape="rows")),
    "compressed-fp8-blocks": Format(
        _compressed("float-quantized", strategy="block", block_structure=[48, 40]), fp8("_scale", (48, 40))
    ),
    "modelopt-fp8": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8("_scale", None, shape="one")),
    "compressed-int8": Format(_compressed("int-quantized", strategy="channel"), int8),
    "compressed-int4": Format(_compressed("pack-quantized", num_bits=4, group_size=GROUP), packed(), exact=True),
    "compressed-int4-zeros": Format(
        _compressed("pack-quantized", num_bits=4, symmetric=False), packed(symmetric=False), exact=True
    ),
    "compressed-int8-packed": Format(_compressed("pack-quantized", num_bits=8), packed(8), exact=True),
    "compressed-int4-channel": Format(_compressed("pack-quantized", num_bits=4), packed(4, 1 << 20), exact=True),
    "compressed-int4-groups-of-16": Format(_compressed("pack-quantized", num_bits=4), packed(4, 16)),
    "gptq": Format(_GPTQ, gptq(), exact=True),
    "gptq-8bit": Format({**_GPTQ, "bits": 8}, gptq(8), exact=True),
    "gptq-v2": Format({**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(v2=True), exact=True),
    "gptq-by-activation": Format({**_GPTQ, "desc_act": True}, gptq(shuffled=True)),
    "bitnet": Format({"quant_method": "bitnet", "linear_class": "autobitlinear"}, ternary(), exact=True),
    "bitnet-divided": Format({"quant_method": "bitnet"}, ternary(divides=True), exact=True),
    "nf4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4()),
    "nf4-double": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(double=True)),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, exact=True),
}  # fmt: skip


def encode(tensors: Mapping[str, Array], how: Format) -> tuple[Tensors, dict[str, Array]]:
    """Encode every projection; norms, table and head in bfloat16. Also returns the float32 values."""
    stored: Tensors = {}
    values: dict[str, Array] = {}
    for name, array in tensors.items():
        if name.endswith("proj.weight") and array.ndim == 2:
            parts, meant = how.encode(name.removesuffix(".weight"), array)
            stored |= parts
            values[name] = meant
        else:
            values[name] = as_bf16(array)
            stored[name] = (_bf16_bits(array), "BF16")
    return stored, values


def write_tensors(directory: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    """Write a model directory with one shard."""
    directory.mkdir(parents=True, exist_ok=True)
    with SafetensorsWriter(directory / "model.safetensors", list(tensors)) as writer:
        for name, (array, dtype) in tensors.items():
            writer.add(name, np.ascontiguousarray(array).reshape(array.shape), dtype)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_pair(
    directory: Path, tensors: Mapping[str, Array], config: Mapping[str, Any], how: Format
) -> tuple[Path, Path]:
    """Write (the checkpoint in the format, the same weights in float32)."""
    stored, values = encode(tensors, how)
    section = {"quantization_config": dict(how.section)}
    plain: Tensors = {name: (array, "F32") for name, array in values.items()}
    return (
        write_tensors(directory / "foreign", stored, {**config, **section}),
        write_tensors(directory / "plain", plain, config),
    )
