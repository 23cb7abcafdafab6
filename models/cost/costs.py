"""What one decode step of a model costs, and what memory it needs, from shapes alone.

Two doors to the same arithmetic: `network_cost` for arrays in memory (exact, whatever dtype they were prepared in) and
`checkpoint_cost` for a checkpoint's headers (before anything is loaded). Formulas: see `runtime.cost`.
"""

from itertools import groupby

from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.network.config import DecoderConfig, decoder_config
from headrace.runtime.cost import LayerKV, StepCost

WORKING_MEMORY = 150 << 20  # besides weights and KV cache: activations of a prefill chunk, the program itself


def network_cost(config: DecoderConfig, *, weight_bytes: int, weight_count: int, kv_bytes: int) -> StepCost:
    """The cost of a decoder whose step reads `weight_bytes` holding `weight_count` weights.

    `kv_bytes`: bytes of one stored K or V element.
    """
    return StepCost(
        weight_bytes=weight_bytes,
        weight_flops=2 * weight_count,
        kv=kv_layers(config, kv_bytes),
        attention_flops_per_entry=4 * config.heads * config.head_dim,
    )


def kv_layers(config: DecoderConfig, kv_bytes: int) -> list[LayerKV]:
    """K/V traffic, layers grouped by window. `kv_bytes`: bytes of one stored K or V element."""
    row = 2 * config.kv_heads * config.head_dim * kv_bytes
    windows = sorted((layer.window or 0) for layer in config.layers)
    return [LayerKV(len(list(group)), row, window or None) for window, group in groupby(windows)]


def kv_bytes_per_token(config: DecoderConfig, kv_bytes: int) -> int:
    """Bytes one more token adds to the cache, all layers. `kv_bytes`: bytes of one stored K or V element."""
    return sum(layer.count * layer.bytes_per_token for layer in kv_layers(config, kv_bytes))


def checkpoint_cost(checkpoint: Checkpoint, kv_bytes: int = 2) -> StepCost | None:
    """The cost of a step from headers alone, K/V in half precision. None where headrace has no decoder for it."""
    config = decoder_config(checkpoint.config)
    if config is None:
        return None
    tied = config.tied_embeddings or "lm_head.weight" not in checkpoint.tensors
    unread = "lm_head." if tied else "model.embed_tokens."  # an untied table is looked up, not read
    read = {name: info for name, info in checkpoint.tensors.items() if not name.startswith(unread)}
    return network_cost(
        config,
        weight_bytes=sum(info.nbytes for info in read.values()),
        weight_count=_weight_count(config),
        kv_bytes=kv_bytes,
    )


def _weight_count(config: DecoderConfig) -> int:
    """Weights of all projections of one step, the output projection included."""
    width, inner = config.hidden_size, config.intermediate_size
    attention = width * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    return len(config.layers) * (attention + 3 * width * inner) + config.vocab_size * width
