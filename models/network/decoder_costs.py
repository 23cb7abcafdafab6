"""Step cost of headrace's own decoder: the bytes of the matrices in its table of tensors.

Sizes come from loaded arrays here, and from headers, configs and catalogs in `models.cost`. Formulas: see
`runtime.metrics.cost`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby

from headrace.models.architectures.config import DecoderConfig
from headrace.models.network.tensors import Tensor, ends, layer_tensors
from headrace.runtime.metrics.cost import LayerKV, Matrix, attention_flops_per_entry
from headrace.runtime.ops.kv_format import KVFormat

SizeOf = Callable[[str, Tensor], int]
"""(module, its row of the table) -> stored bytes of that projection with bias; for stacked experts, of one expert."""


_MatrixKey = tuple[str, int, int, int, int, int, str, bool]
"""Name, rows, columns, bytes, active and all matrices of the stack, part, divided: equal ones count together."""


def layer_matrices(config: DecoderConfig, size_of: SizeOf) -> list[Matrix]:
    """Return all matrices but the tables and the output projection; equal ones count together."""
    last = config.appending - 1
    tables = {layer: layer_tensors(config, layer) for layer in set(config.layers)}  # most layers are equal
    counts = Counter[_MatrixKey]()
    late = Counter[_MatrixKey]()  # those of them that prefill skips in the last layer
    for index, layer in enumerate(config.layers):
        tensors = tables[layer]
        for tensor in tensors:
            size = _size_of(tensor, f"model.layers.{index}", tensors, size_of)
            is_late = index > last or (index == last and not tensor.before_append)
            stack = (tensor.active, tensor.count)
            key = (tensor.shown_name, tensor.rows, tensor.columns, size, *stack, tensor.part, tensor.is_divided)
            counts[key] += tensor.count
            late[key] += tensor.count * is_late
    matrices = []
    for key, count in counts.items():
        name, rows, columns, size, active, total, part, is_divided = key
        matrices.append(
            Matrix(
                name=name,
                count=count,
                rows=rows,
                columns=columns,
                nbytes=size,
                share=Fraction(active, total),
                late=late[key],
                part=part,
                divided=is_divided,
            )
        )
    return matrices + [_end(tensor, size_of) for tensor in ends(config) if not (tensor.looked_up or tensor.output)]


def output_matrix(config: DecoderConfig, size_of: SizeOf) -> Matrix:
    """Return the output projection."""
    [tensor] = (tensor for tensor in ends(config) if tensor.output)
    return _end(tensor, size_of)


def looked_up_bytes(config: DecoderConfig, size_of: SizeOf) -> int:
    """Return the bytes of tables of which a step reads single rows."""
    return sum(size_of(tensor.name, tensor) for tensor in ends(config) if tensor.looked_up)


def _end(tensor: Tensor, size_of: SizeOf) -> Matrix:
    return Matrix(
        name=tensor.shown_name,
        count=1,
        rows=tensor.rows,
        columns=tensor.columns,
        nbytes=size_of(tensor.name, tensor),
        output=tensor.output,
        part=tensor.part,
        divided=tensor.is_divided,
    )


def _size_of(tensor: Tensor, prefix: str, tensors: Sequence[Tensor], size_of: SizeOf) -> int:
    """Return the bytes of a layer's tensor, also of one that is stored with others as `Tensor.whole`."""
    size = size_of(f"{prefix}.{tensor.name}", tensor)
    if size or not tensor.whole:
        return size
    rows = sum(other.rows for other in tensors if other.whole == tensor.whole)
    return size_of(f"{prefix}.{tensor.whole}", replace(tensor, rows=rows)) * tensor.rows // rows


def state_bytes(config: DecoderConfig) -> int:
    """Return the bytes of a sequence's recurrent state, all layers."""
    return 4 * sum(layer.mixer.sizes.state for layer in config.layers if layer.mixer is not None)


def kv_layers(config: DecoderConfig, kv: KVFormat) -> list[LayerKV]:
    """Return K/V traffic, grouped by window and shape; layers that read another's K/V do not count again."""
    attending = [(i, layer) for i, layer in enumerate(config.layers) if layer.attends and layer.source is None]
    last = config.appending - 1
    kinds = sorted(
        (
            layer.window or 0,
            kv.row_bytes(*config.stored_heads(layer)),
            layer.chunked,
            *((layer.indexer.chosen, layer.indexer.block) if layer.indexer is not None else (0, 1)),
            i == last,
        )
        for i, layer in attending
    )
    groups = [(kind, [late for *_, late in group]) for kind, group in groupby(kinds, lambda kind: kind[:-1])]
    return [
        *(
            LayerKV(len(late), row, window or None, sum(late), chunked, chosen or None, block)
            for (window, row, chunked, chosen, block), late in groups
        ),
        *_index_keys(config, kv),
    ]


def _index_keys(config: DecoderConfig, kv: KVFormat) -> list[LayerKV]:
    """Return the traffic of indexers' keys: a step reads all, once there are more than may be chosen."""
    indexers = [layer.own_indexer for layer in config.layers if layer.own_indexer is not None]
    if not indexers:
        return []
    sizes = indexers[0]  # all are alike
    flops = attention_flops_per_entry(sizes.heads, sizes.head_dim) // 2  # no values
    return [LayerKV(len(indexers), kv.row_bytes(1, sizes.head_dim // 2), unread=sizes.chosen, flops=flops)]
