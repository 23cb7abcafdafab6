"""Expected precision of a model on this machine: equal bits, or close numbers.

The native kernels give a row the same bits in any batch where activations are rounded (docs/kernels.md). Elsewhere the
kernel, and the order of its sums, depends on the number of rows.

Guard: tests/app/verify/test_verify.py.
"""

from collections.abc import Iterator

import mlx.core as mx
from msgspec import Struct

from headrace.models.checkpoint.quantization import layer_quantization
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.checkpoint.text_part import text_part
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.loading.load import LoadedModel
from headrace.models.network.tensors import scoring_modules
from headrace.runtime import ops
from headrace.runtime.ops import native
from headrace.runtime.ops.kv_format import BFLOAT16, FLOAT16, FLOAT32

# Widths with kernels that round activations; those of 3 bits multiply them in float32.
_ROUNDED_BITS = (2, 4, 5, 6, 8)
# Tolerance of log probabilities computed in another order, by the type of most roundings.
_TOLERANCE = {FLOAT32.name: 0.01, FLOAT16.name: 0.1, BFLOAT16.name: 0.5}


class Expectation(Struct, frozen=True):
    """Equality that answers must keep, however they are served.

    exact: equal bits are expected.
    tolerance: else, largest difference of a log probability; tokens may flip at near-ties only.
    reason: in words, for the report.
    """

    exact: bool
    tolerance: float
    reason: str


def expectation(loaded: LoadedModel) -> Expectation:
    """Return the expectation for this model here, with a reason."""
    chosen = ops.select()
    reason = _inexact(loaded, chosen.name)
    if reason is None:
        bits = "16 bits"
        if loaded.activations != 16:
            bits = f"{loaded.activations} bits in prompts, else 16"
        return Expectation(True, 0.0, f"native kernels, activations in {bits}: equal bits expected")
    rounded = BFLOAT16
    if loaded.kind == "headrace" and mx.default_device().type == mx.DeviceType.cpu:
        rounded = chosen.kv_format(mx.float32)
    return Expectation(False, _TOLERANCE[rounded.name], f"{reason}: near-ties may flip")


def _inexact(loaded: LoadedModel, kernels: str) -> str | None:
    """Return the reason why bits may depend on the number of rows; None if they may not."""
    if loaded.kind != "headrace":
        from headrace.models.mlx_lm.fixes import class_name  # late: other models need none of it

        return class_name(loaded.checkpoint.config)
    if kernels != native.name:
        return "stock MLX operations"
    if native.exact():
        return "float32 throughout (HEADRACE_EXACT)"
    if native.status().fallbacks:
        return "some operations fall back to stock MLX"
    division = loaded.network.division
    if division is not None and not division.staged:
        return "sums over ranks"
    plain = next(_float32_modules(loaded.checkpoint), None)
    return None if plain is None else f"{plain} is multiplied in float32"


def _float32_modules(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield projections with unrounded activations: plain weights, 3 bits, mxfp8. Those that score do not count."""
    config = own_decoder(checkpoint)
    assert config is not None
    text = text_part(checkpoint)
    scoring = scoring_modules(config)
    tied = "lm_head.weight" not in text.tensors
    for name, info in text.tensors.items():
        module, _, part = name.rpartition(".")
        if part != "weight" or len(info.shape) < 2 or module in scoring:
            continue
        if (module.endswith("embed_tokens") and not tied) or "conv" in module.rpartition(".")[2]:
            continue  # an untied embedding is only looked up; a convolution takes one row at a time
        if f"{module}.scales" in text.tensors:
            groups = layer_quantization(text.quantization, module)
            if groups.bits in _ROUNDED_BITS and groups.mode != "mxfp8":
                continue
        yield module
