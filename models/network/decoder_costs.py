"""Step cost of headrace's own decoder, from its config and array sizes.

Formulas: see `runtime.metrics.cost`. `models.cost` computes the same from headers and catalogs.
"""

from itertools import groupby

from headrace.models.network.config import DecoderConfig
from headrace.runtime.metrics.cost import LayerKV, StepCost, attention_flops_per_entry
from headrace.runtime.ops.kv_format import KVFormat


def network_cost(config: DecoderConfig, *, weight_bytes: int, weight_count: int, kv: KVFormat) -> StepCost:
    """Return the cost of a step that reads `weight_bytes` with `weight_count` weights."""
    return StepCost(
        weight_bytes=weight_bytes,
        weight_flops=2 * weight_count,
        kv=kv_layers(config, kv),
        attention_flops_per_entry=attention_flops_per_entry(config.heads, config.head_dim),
        state_bytes=state_bytes(config),
    )


def state_bytes(config: DecoderConfig) -> int:
    """Return the bytes of a sequence's recurrent state, all layers."""
    return 4 * sum(layer.mixer.sizes.state for layer in config.layers if layer.mixer is not None)


def kv_layers(config: DecoderConfig, kv: KVFormat) -> list[LayerKV]:
    """Return K/V traffic, grouped by window and shape; layers that read another's K/V do not count again."""
    kept = [layer for layer in config.layers if layer.attends and layer.source is None]
    kinds = sorted((layer.window or 0, kv.row_bytes(*config.heads_of(layer))) for layer in kept)
    return [LayerKV(len(list(group)), row, window or None) for (window, row), group in groupby(kinds)]
