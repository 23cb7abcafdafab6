"""The dtype policy, in one function: what a network computes in, given where it runs and how it was stored.

On a CPU, float32: x86 has no fast half-precision arithmetic and MLX emulates it (28 M weights take 750 ms in float16,
155 ms in bfloat16, 17 ms in float32). Scales may stay in half precision there, and the KV cache too: those are the
operations' choice (`Ops.prepare`, `Ops.kv_format`), since only they know what they can read. The native kernels
also round activations to 16 bits, a scale to a group, on their way into products with 2-, 4- and 8-bit weights:
integers are what the processor multiplies fastest. HEADRACE_EXACT=1 keeps both in float32.
On Metal and CUDA, the half precision that config.json declares, or else the checkpoint's own; a float32 checkpoint runs
in bfloat16, which keeps its range. Gemma never runs in float16: its residual stream grows beyond 65504.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

_HALF = {"F16": mx.float16, "BF16": mx.bfloat16, "float16": mx.float16, "bfloat16": mx.bfloat16}


def compute_dtype(device: mx.DeviceType, stored: str, config: Mapping[str, Any] | None = None) -> mx.Dtype:
    """`stored` is the safetensors name of the checkpoint's floating dtype: F32, F16 or BF16."""
    if device == mx.DeviceType.cpu:
        return mx.float32
    sections = [part for part in (config, (config or {}).get("text_config")) if isinstance(part, Mapping)]
    if any(str(part.get("model_type", "")).startswith("gemma") for part in sections):
        return mx.bfloat16
    declared = (str(part.get(key)) for part in sections for key in ("torch_dtype", "dtype"))
    return next((_HALF[name] for name in declared if name in _HALF), _HALF.get(stored, mx.bfloat16))
