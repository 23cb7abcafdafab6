"""Step cost of headrace's own decoder: the bytes of the matrices in its table of tensors.

Sizes come from loaded arrays here, and from headers, configs and catalogs in `models.cost`. Formulas: see
`runtime.metrics.cost`.

Guard: tests/models/cost/test_costs.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig, LayerConfig
from headrace.models.network.tensors import Tensor, ends, layer_tensors
from headrace.runtime.metrics.cost import LayerKV, Matrix, attention_flops_per_entry
from headrace.runtime.ops.kv_format import KVFormat

SizeOf = Callable[[str, Tensor], int]
"""(module, its row of the table) -> stored bytes of that projection with bias; for stacked experts, of one expert."""


def layer_matrices(config: DecoderConfig, size_of: SizeOf, *, alike: bool = False) -> list[Matrix]:
    """Return all matrices but the tables and the output projection; equal ones count together.

    alike: sizes do not depend on a layer's number.
    """
    last = config.appending - 1
    tables = {layer: layer_tensors(config, layer) for layer in set(config.layers)}  # most layers are equal
    layers = Counter[Matrix]()  # that have this matrix, or a stack of it
    late_layers = Counter[Matrix]()  # those of them whose matrices prefill skips
    earlier = len(config.layers) - len(config.stored)  # layers of all loops before the last

    # Layers with equal matrices: their configuration, their place before (-1), at or after (1) the last that appends,
    # and the bytes of each matrix.
    groups = Counter[tuple[LayerConfig, int, tuple[int, ...]]]()
    sizes_of: dict[LayerConfig, tuple[int, ...]] = {}  # of the newest layer with this configuration
    for index, layer in enumerate(config.stored):
        if not alike or layer not in sizes_of:
            tensors = tables[layer]
            sizes_of[layer] = tuple(_size_of(tensor, f"model.layers.{index}", tensors, size_of) for tensor in tensors)
        number = earlier + index
        groups[layer, (number > last) - (number < last), sizes_of[layer]] += 1

    # Count equal matrices. A prefill needs no more than the K/V of the last layer that appends, and none after it.
    for (layer, place, sizes), equal in groups.items():
        for tensor, size in zip(tables[layer], sizes, strict=True):
            is_late = place > 0 or (place == 0 and not tensor.before_append)
            matrix = _matrix(tensor, size, reads=config.loops)
            layers[matrix] += equal
            late_layers[matrix] += equal * is_late

    matrices = [
        replace(matrix, count=matrix.count * count, late=matrix.count * late_layers[matrix])
        for matrix, count in layers.items()
    ]
    outside = [tensor for tensor in ends(config) if not (tensor.looked_up or tensor.output)]
    return matrices + [_matrix(tensor, size_of(tensor.name, tensor)) for tensor in outside]


def output_matrix(config: DecoderConfig, size_of: SizeOf) -> Matrix:
    """Return the output projection."""
    [tensor] = (tensor for tensor in ends(config) if tensor.output)
    return _matrix(tensor, size_of(tensor.name, tensor))


def looked_up_bytes(config: DecoderConfig, size_of: SizeOf) -> int:
    """Return the bytes of tables of which a step reads single rows."""
    return sum(size_of(tensor.name, tensor) for tensor in ends(config) if tensor.looked_up)


def _matrix(tensor: Tensor, nbytes: int, reads: int = 1) -> Matrix:
    """Return a tensor as a projection of one layer, or a stack. reads: in a step."""
    return Matrix(
        name=tensor.shown_name,
        count=tensor.count,
        rows=tensor.rows,
        columns=tensor.columns,
        nbytes=nbytes,
        share=Fraction(tensor.active, tensor.count),
        reads=Fraction(reads),
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
    """Return the bytes of a sequence's recurrent state, all layers. It is float32."""
    mixers = [layer.mixer for layer in config.layers if layer.mixer is not None]
    return 4 * sum(sizes.state for mixer in mixers for sizes in mixer.states)


def kv_layers(config: DecoderConfig, kv: KVFormat) -> list[LayerKV]:
    """Return K/V traffic, grouped by window and shape; layers that read another's K/V do not count again."""
    last = config.appending - 1
    counts = Counter[LayerKV]()
    late = Counter[LayerKV]()  # the last layer, in which a prompt's tokens append only
    for index, layer in enumerate(config.layers):
        if not layer.attends or layer.source is not None:
            continue
        kind = LayerKV(
            count=1,
            bytes_per_token=kv.row_bytes(*config.stored_heads(layer)),
            window=layer.window or None,
            chunked=layer.chunked,
            chosen=None if layer.indexer is None else layer.indexer.chosen,
            block=1 if layer.indexer is None else layer.indexer.block,
            reads=2 if config.loop_gates and index < len(config.stored) else 1,
        )
        counts[kind] += 1
        late[kind] += index == last
    layers = [replace(kind, count=counts[kind], late=late[kind]) for kind in sorted(counts, key=_order)]
    return layers + _index_keys(config, kv)


def _order(kv: LayerKV) -> tuple[int, ...]:
    """Return the place of K/V among others: the same for equal costs, which are compared."""
    return kv.window or 0, kv.bytes_per_token, kv.chunked, kv.chosen or 0, kv.block, kv.reads


def _index_keys(config: DecoderConfig, kv: KVFormat) -> list[LayerKV]:
    """Return the traffic of indexers' keys: a step reads all, once there are more than may be chosen."""
    indexers = [layer.own_indexer for layer in config.layers if layer.own_indexer is not None]
    if not indexers:
        return []
    sizes = indexers[0]  # all are alike
    flops = attention_flops_per_entry(sizes.heads, sizes.head_dim) // 2  # no values
    return [LayerKV(len(indexers), kv.row_bytes(1, sizes.head_dim // 2), unread=sizes.chosen, flops=flops)]
