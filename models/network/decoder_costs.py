"""Step cost of headrace's own decoder, from its config and array sizes.

Formulas: see `runtime.metrics.cost`. `models.cost` computes the same from headers and catalogs.
"""

from collections.abc import Sequence
from itertools import groupby

from headrace.models.network.config import DecoderConfig
from headrace.runtime.metrics.cost import LayerKV, StepCost, attention_flops_per_entry
from headrace.runtime.ops import LayerWeights, Weight
from headrace.runtime.ops.kv_format import KVFormat


def network_cost(
    config: DecoderConfig, layers: Sequence[LayerWeights], beside: Sequence[Weight], nbytes: int, kv: KVFormat
) -> StepCost:
    """Return the cost of a step.

    beside: matrices beside the layers, the output projection last. nbytes: of all arrays that a step reads, all experts
    included.
    """
    head, last = beside[-1], config.appending - 1
    count, late_bytes, late_count = sum(_count([weight]) for weight in beside), head.nbytes, _count([head])
    parts = {"attention": 0, "MLP": 0, "experts used": 0, "head": head.nbytes}
    for index, layer in enumerate(layers):
        latent = [] if layer.latent is None else [layer.latent.q, layer.latent.embed, layer.latent.unembed]
        before = {
            id(weight)
            for weight in (*layer.qkv, layer.gate, *latent, *(layer.mixer_gates or ()), *(layer.mixer_ends or ())[:1])
        }
        late = [weight for weight in layer.matrices if index > last or (index == last and id(weight) not in before)]
        late_bytes += sum(weight.nbytes for weight in late)
        late_count += _count(late)
        count += _count(layer.matrices)
        parts["attention"] += sum(weight.nbytes for weight in (*layer.qkv, layer.output))
        if (mixture := layer.mixture) is None:
            parts["MLP"] += sum(weight.nbytes for weight in layer.matrices[len(layer.qkv) + 1 :])
            continue
        for stack in mixture.stacks:  # only the active experts are read
            read, weights = (size * mixture.active // mixture.count for size in (stack.nbytes, _count([stack])))
            nbytes -= stack.nbytes - read
            parts["experts used"] += read
            count += weights
            late_bytes += read if index >= last else 0
            late_count += weights if index >= last else 0
    return StepCost(
        weight_bytes=nbytes,
        weight_flops=2 * count,
        kv=kv_layers(config, kv),
        attention_flops_per_entry=attention_flops_per_entry(config.heads, config.head_dim),
        weight_parts=[(name, size) for name, size in parts.items() if size],
        state_bytes=state_bytes(config),
        late_bytes=late_bytes,
        late_flops=2 * late_count,
    )


def _count(weights: Sequence[Weight]) -> int:
    return sum(weight.rows * weight.columns for weight in weights)


def state_bytes(config: DecoderConfig) -> int:
    """Return the bytes of a sequence's recurrent state, all layers."""
    return 4 * sum(layer.mixer.sizes.state for layer in config.layers if layer.mixer is not None)


def kv_layers(config: DecoderConfig, kv: KVFormat) -> list[LayerKV]:
    """Return K/V traffic, grouped by window and shape; layers that read another's K/V do not count again."""
    kept = [(i, layer) for i, layer in enumerate(config.layers) if layer.attends and layer.source is None]
    last = config.appending - 1
    kinds = sorted(
        (layer.window or 0, kv.row_bytes(*config.heads_of(layer)), layer.chunked, i == last) for i, layer in kept
    )
    groups = [(kind, [late for *_, late in group]) for kind, group in groupby(kinds, lambda kind: kind[:3])]
    return [LayerKV(len(late), row, window or None, sum(late), chunked) for (window, row, chunked), late in groups]
