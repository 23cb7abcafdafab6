"""The compute dtype of a network, by device and stored dtype.

CPU: float32, since x86 lacks fast half-precision arithmetic and MLX emulates it. The operations may keep scales and K/V
in half precision (`Ops.prepare`, `Ops.kv_format`). The native kernels also round activations to 16-bit integers with a
scale per group in products with 2-, 4-, 5-, 6- and 8-bit weights. HEADRACE_EXACT=1 keeps K/V and activations
in float32.

Metal and CUDA: the half precision in config.json, else the checkpoint's own; float32 checkpoints run in bfloat16, for
its range. Gemma never runs in float16, which its residual stream overflows.

Guard: tests/models/loading/test_load.py.
"""

from collections.abc import Mapping

import mlx.core as mx

from headrace.models.architectures.gemma import overflows_float16

_HALF = {"F16": mx.float16, "BF16": mx.bfloat16, "float16": mx.float16, "bfloat16": mx.bfloat16}


def compute_dtype(device: mx.DeviceType, stored: str, config: Mapping[str, object] | None = None) -> mx.Dtype:
    """Return the compute dtype. stored: safetensors name of the checkpoint's float type: F32, F16 or BF16."""
    if device == mx.DeviceType.cpu:
        return mx.float32
    sections = [part for part in (config, (config or {}).get("text_config")) if isinstance(part, Mapping)]
    if any(overflows_float16(part.get("model_type")) for part in sections):
        return mx.bfloat16
    declared = (str(part.get(key)) for part in sections for key in ("torch_dtype", "dtype"))
    return next((_HALF[name] for name in declared if name in _HALF), _HALF.get(stored, mx.bfloat16))
