"""Matrices of headrace's decoder with their bytes, from its table of tensors."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from headrace.models.cost.step_shape import Matrix
from headrace.models.network.config import DecoderConfig
from headrace.models.network.tensors import Tensor, latent_heads, layer_tensors

SizeOf = Callable[[str, int, int], int]
"""(module, rows, columns) -> stored bytes of that projection with bias; for stacked experts, of one expert."""


def layer_matrices(config: DecoderConfig, size_of: SizeOf) -> list[Matrix]:
    """Return all matrices but the tables and the output projection; equal ones count together."""
    last = config.appending - 1
    counts: dict[Matrix, list[int]] = {}  # with a count of 0 -> how many there are, and how many of them are late
    for index, layer in enumerate(config.layers):
        tensors = layer_tensors(config, layer)
        for tensor in tensors:
            size = _size_of(tensor, f"model.layers.{index}", tensors, size_of)
            share = Fraction(tensor.active, tensor.count)
            is_late = index > last or (index == last and not tensor.before_append)
            matrix = Matrix(tensor.shown_name, 0, tensor.rows, tensor.columns, size, share)
            found = counts.setdefault(matrix, [0, 0])
            found[0] += tensor.count
            found[1] += tensor.count * is_late
    matrices = [replace(matrix, count=count, late=late) for matrix, (count, late) in counts.items()]
    if config.input_size:
        name, rows, width = "per_layer_model_projection", len(config.layers) * config.input_size, config.hidden_size
        matrices.append(Matrix(name, 1, rows, width, size_of(f"model.{name}", rows, width)))
    return matrices


def _size_of(tensor: Tensor, prefix: str, tensors: Sequence[Tensor], size_of: SizeOf) -> int:
    """Return the bytes of a layer's tensor, also of one that is stored with others as `Tensor.whole`."""
    size = size_of(f"{prefix}.{tensor.name}", tensor.rows, tensor.columns)
    if size or not tensor.whole:
        return size
    rows = sum(other.rows for other in tensors if other.whole == tensor.whole)
    return size_of(f"{prefix}.{tensor.whole}", rows, tensor.columns) * tensor.rows // rows


def input_table_bytes(config: DecoderConfig, size_of: SizeOf) -> int:
    """Return the bytes of the table of single layers' inputs, of which a step looks up rows."""
    wide = len(config.layers) * config.input_size
    return size_of("model.embed_tokens_per_layer", config.input_vocab, wide) if wide else 0


def split_latents(sizes: Counter[str], config: DecoderConfig) -> int:
    """Divide the bytes of K/V projections that are stored as one; return the bytes by which the first half grows.

    It is transposed while loading, in half precision (`Parameters.halves_of_heads`).
    """
    latent = config.latent
    if latent is None:
        return 0
    joined, growth = latent_heads(config, latent), 0
    for at in (f"model.layers.{i}" for i in range(len(config.layers))):
        whole = sizes.pop(f"{at}.{joined.name}", 0)
        if whole:
            share = whole * latent.other // (latent.other + latent.value)
            sizes[f"{at}.self_attn.embed_q"] = max(share, 2 * config.heads * latent.other * latent.size)
            sizes[f"{at}.self_attn.unembed_out"] = whole - share
            growth += sizes[f"{at}.self_attn.embed_q"] - share
    return growth


def norm_weights(config: DecoderConfig) -> int:
    """Return the number of weights in norms and other vectors."""
    names, width = config.family.norms, config.hidden_size
    places = len({names.attention, names.after_attention, names.mlp, names.after_mlp} - {None})
    total = width + config.input_size
    for layer in config.layers:
        kv_heads, head_dim = config.heads_of(layer)
        heads = {None: 0, "unit": 0, "head": 1 + ("k" in layer.projects), "heads": config.heads + kv_heads}[
            config.family.qk_norm
        ]
        total += places * width + heads * head_dim + (config.heads if config.sinks else 0)
        total += (width if config.input_size else 0) + config.family.scaled
        total += config.latent.queries + config.latent.size if config.latent is not None else 0
        if layer.experts is not None and layer.experts.branch:
            total += 4 * width + layer.experts.count
    return total
