"""A rank's part of a decoder in tensor parallelism: its configuration, and its rows and columns of every tensor.

Attention is divided by query heads with the K/V heads that they read, feed-forwards and each expert by inner size,
recurrent mixers by heads or channels, embedding and head by vocabulary. Routers, norms and the other small tensors
are whole on every rank.

The tables of `network.tensors` say of each tensor by which unit its rows or columns are divided (`Tensor.rows_by`,
`columns_by`, `row_segments`): a new tensor there is divided here without further code. `TensorDecoder` runs the part.
tests/models/network/test_ranks.py compares divided networks of every family with whole ones.
"""

import re
from itertools import chain
from typing import Any

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig, LayerConfig, MixerConfig
from headrace.models.network.tensors import (
    Segments,
    Tensor,
    Unit,
    ends,
    joined_convolution,
    latent_heads,
    layer_tensors,
    layer_vectors,
)
from headrace.runtime.errors import UnsupportedModelError, UsageError
from headrace.runtime.ranks.split import Split

_HINT = "--split pipeline divides it by layers"
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<path>.+)\.\w+")  # "model.layers.3.self_attn.q_proj.scales"
_NUMBER = re.compile(r"\.\d+\.")  # of a single stored expert: "mlp.experts.5.up_proj"


class TensorPart(Struct, frozen=True):
    """The part of one rank."""

    whole: DecoderConfig  # of the model
    config: DecoderConfig  # of this part
    split: Split  # division of the model
    rank: int
    unit: int  # columns of a quantized group, which no rank may cut
    heads: range  # query heads of this rank

    def range_of(self, size: int) -> range:
        """Return this rank's range of an inner size or the vocabulary, in whole groups of quantized columns."""
        return _in_units(size, self.split, self.unit)[self.rank]

    @property
    def split_vocabulary(self) -> list[range]:
        """Every rank's range of the vocabulary."""
        return _in_units(self.whole.vocab_size, self.split, self.unit)

    def take(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of all tensors, lazily. Raises UnsupportedModelError for groups cut in two.

        arrays: of MLX, or parts of files (`models.checkpoint.file_parts`).
        """
        modules = [_modules(self.whole, layer) for layer in self.whole.layers]
        vectors = [
            {
                vector.name: vector.segments
                for vector in (*layer_vectors(self.whole, layer), *joined_convolution(layer.mixer))
            }
            for layer in self.whole.layers
        ]
        taken: dict[str, Any] = {}
        for name, array in arrays.items():
            part = self._taken(name, array, modules, vectors)
            if part is None:
                continue
            if isinstance(part, mx.array) and part is not array:  # else a view keeps the whole array in memory
                part = mx.contiguous(part)
            taken[name] = part
        return taken

    def _taken(
        self, name: str, array: Any, modules: list[dict[str, list[Tensor]]], vectors: list[dict[str, Segments]]
    ) -> Any:
        """Return the part of one tensor, as the rows of the table divide it.

        modules: each layer's stored modules, with the matrices in them.
        vectors: each layer's other tensors.
        """
        module, _, kind = name.rpartition(".")

        # Tensors outside of layers: the vocabulary is divided, all others are whole.
        if any(tensor.name == module and tensor.rows_by == "vocabulary" for tensor in ends(self.whole)):
            return _rows(array, kind, [self.range_of(array.shape[0])])
        match = _LAYER.fullmatch(name)
        if match is None:
            return array

        # Vectors, and tensors of a layer that no table lists
        index = int(match["layer"])
        path = match["path"]
        layer = self.whole.layers[index]
        tensors = modules[index].get(_NUMBER.sub(".{}.", path))
        if tensors is None:
            segments = vectors[index].get(f"{path}.{kind}", ())
            if not segments:
                return array
            return _numbers(array, self._ranges(segments, layer))

        # Matrices
        tensor = tensors[0]  # of several, which share their inputs
        if tensor.columns_by is not None:
            columns = self._range(tensor.columns_by, tensor.columns, layer)
            return self._columns(array, kind, columns, tensor.columns, name)
        if tensor.rows_by == "head_stack":
            return array[self.heads.start : self.heads.stop]
        segments = tuple(chain.from_iterable(part.row_segments for part in tensors))  # one below the other
        if not segments:
            return array
        return _rows(array, kind, self._ranges(segments, layer))

    def _ranges(self, segments: Segments, layer: LayerConfig) -> list[range]:
        """Return this rank's rows of a tensor."""
        ranges = list[range]()
        start = 0
        for unit, size in segments:
            ranges.append(_moved(self._range(unit, size, layer), start))
            start += size
        return ranges

    def _range(self, unit: Unit, size: int, layer: LayerConfig) -> range:
        """Return this rank's part of `size` rows or columns."""
        total = self.whole.query_heads(layer)  # of this layer, which may be others than `heads` of the model
        kv_heads, _ = self.whole.heads_of(layer)
        heads = query_range(self.heads, self.whole.heads, total)
        if unit == "inner":
            return self.range_of(size)
        if unit == "kv_heads":
            return _scaled(kv_range(heads, total, kv_heads), size // kv_heads)
        if unit not in ("mixer_heads", "mixer_keys"):
            return _scaled(heads, size // total)
        assert layer.mixer is not None
        sizes = layer.mixer.sizes
        own_heads = mixer_ranges(layer.mixer, self.split, self.unit)[self.rank]  # heads, or channels
        if unit == "mixer_keys":
            return _scaled(kv_range(own_heads, sizes.heads, sizes.key_heads), size // sizes.key_heads)
        if sizes.kind == "conv":
            return _scaled(own_heads, size // sizes.inner)
        return _scaled(own_heads, size // sizes.heads)

    def _columns(self, array: Any, kind: str, part: range, total: int, name: str) -> Any:
        """Return columns `part` of `total`. A bias is added by rank 0 alone.

        array: weights, several to a word, or a scale for each group: its columns are fewer than `total`.
        kind: end of the tensor's name.
        name: of the tensor, for errors.
        """
        if kind == "bias":
            return None if self.rank else array
        # The bounds in the array's own columns, times `total`.
        first = part.start * array.shape[-1]
        last = part.stop * array.shape[-1]
        if first % total or last % total:
            raise UnsupportedModelError(f"{name}: a quantized group would be cut between two ranks", _HINT)
        return array[..., first // total : last // total]


def tensor_part(config: DecoderConfig, split: Split, rank: int, unit: int) -> TensorPart:
    """Return a rank's part. Raises UsageError for models that cannot be divided.

    config: of the whole model.
    split: shares of all ranks.
    rank: the one whose part it is.
    unit: columns of a quantized group.
    """
    heads = head_ranges(config, split, unit)[rank]
    layers = tuple(_layer(config, layer, split, rank, unit, heads) for layer in config.layers)
    kv_heads = 1  # of latents
    if config.latent is None:
        kv_heads = len(kv_range(heads, config.heads, config.kv_heads))
    inner = config.intermediate_size
    if inner > 1:  # 1: no layer has a dense feed-forward
        inner = _part_size(inner, split, rank, unit)
    part = replace(
        config,
        heads=len(heads),
        kv_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=_part_size(config.vocab_size, split, rank, unit),
        layers=layers,
    )
    return TensorPart(config, part, split, rank, unit, heads)


def head_ranges(config: DecoderConfig, split: Split, unit: int) -> list[range]:
    """Return each rank's query heads: whole groups of a K/V head, or parts of one group that share its K/V head."""
    if config.latent is not None:
        value = config.latent.value
        counts = {(config.heads, 1)}  # all queries share one K/V head
    else:
        value = config.head_dim
        counts = set()  # (query heads, K/V heads) of a layer
        for layer in config.layers:
            kv_heads, _ = config.heads_of(layer)
            counts.add((config.query_heads(layer), kv_heads))
    ranges = _grouped(config.heads, max(kv_heads for _, kv_heads in counts), value, split, unit)
    # Every layer has to be divisible at these heads: else the functions raise.
    for total, kv_heads in counts:
        for heads in ranges:
            kv_range(query_range(heads, config.heads, total), total, kv_heads)
    return ranges


def _grouped(total: int, kv_heads: int, dim: int, split: Split, unit: int) -> list[range]:
    """Return each rank's heads of `total`, which read `kv_heads`.

    dim: columns of a head.
    split, unit: see `tensor_part`.
    """
    step = 1  # heads that stay together
    if kv_heads >= len(split.shares):
        step = total // kv_heads
    # A rank's heads are columns of the projection out of attention, which are quantized in groups.
    while step * dim % unit and total % (step * 2) == 0:
        step *= 2
    if total % step or total // step < len(split.shares):
        raise UsageError(
            f"tensor parallel: {len(split.shares)} ranks cannot share {total} heads with {kv_heads} K/V heads", _HINT
        )
    return [_scaled(units, step) for units in split.ranges(total // step)]


def query_range(heads: range, total: int, count: int) -> range:
    """Return the query heads of a layer with `count` of them, for a rank's `heads` of a `total` in other layers."""
    start = heads.start * count
    stop = heads.stop * count
    if start % total or stop % total:
        raise UsageError(f"tensor parallel: layers with {total} and {count} heads cannot be divided so", _HINT)
    return range(start // total, stop // total)


def kv_range(heads: range, total: int, kv_heads: int) -> range:
    """Return the K/V heads that query heads read. Raises UsageError if they are not all heads of those."""
    group = total // kv_heads  # query heads of a K/V head
    read = range(heads.start // group, -(-heads.stop // group))  # the end rounded up
    if len(read) > 1 and (heads.start % group or heads.stop % group):
        raise UsageError(f"tensor parallel: {total} heads with {kv_heads} K/V heads cannot be divided so", _HINT)
    return read


def mixer_ranges(mixer: MixerConfig, split: Split, unit: int) -> list[range]:
    """Return each rank's heads of a mixer, or its channels of a short convolution. Raises UsageError."""
    sizes = mixer.sizes
    if sizes.kind == "conv":
        return _in_units(sizes.inner, split, unit)
    ranges = _grouped(sizes.heads, sizes.key_heads, sizes.value_dim, split, unit)
    groups = sizes.key_heads
    # No rank cuts the rows that are stored for each key head, nor the heads that one norm spans.
    apart = mixer.by_key_head or (sizes.kind == "ssm" and mixer.norm_parts == groups > 1)
    if apart and any(part.start * groups % sizes.heads or part.stop * groups % sizes.heads for part in ranges):
        raise UsageError(f"tensor parallel: {len(split.shares)} ranks cannot share {groups} groups of heads", _HINT)
    return ranges


def _layer(config: DecoderConfig, layer: LayerConfig, split: Split, rank: int, unit: int, heads: range) -> LayerConfig:
    """Return a layer's configuration on a rank.

    config, split, rank, unit: see `tensor_part`.
    layer: of the whole model.
    heads: query heads of the rank, in layers of the usual size.
    """
    experts = layer.experts
    mixer = layer.mixer
    if experts is not None:
        experts = replace(
            experts,
            size=_part_size(experts.size, split, rank, unit),
            shared=_part_size(experts.shared, split, rank, unit),
        )
    if mixer is not None:
        mixer = _mixer(mixer, mixer_ranges(mixer, split, unit)[rank])
    total = config.query_heads(layer)
    queries = query_range(heads, config.heads, total)
    query_heads = 0  # as in the other layers
    if layer.heads:
        query_heads = len(queries)
    kv_heads = 0
    if layer.kv_heads:
        kv_heads = len(kv_range(queries, total, layer.kv_heads))
    indexer = layer.indexer
    if indexer is not None and config.latent is None:  # it has a head for each K/V head
        indexer = replace(indexer, heads=len(kv_range(queries, total, indexer.heads)))
    return replace(
        layer,
        experts=experts,
        mixer=mixer,
        heads=query_heads,
        kv_heads=kv_heads,
        inner=_part_size(layer.inner, split, rank, unit),
        indexer=indexer,
    )


def _mixer(mixer: MixerConfig, heads: range) -> MixerConfig:
    """Return a mixer with these heads, or channels of a short convolution."""
    sizes = mixer.sizes
    if sizes.kind == "conv":
        return replace(mixer, sizes=replace(sizes, value_dim=len(heads)))
    groups = len(kv_range(heads, sizes.heads, sizes.key_heads))
    part = replace(mixer, sizes=replace(sizes, heads=len(heads), key_heads=groups))
    if mixer.norm_parts > 1:
        part = replace(part, norm_parts=groups)
    return part


def _modules(config: DecoderConfig, layer: LayerConfig) -> dict[str, list[Tensor]]:
    """Return the modules that may be stored of a layer, with the tensors in each; {} for an expert's number."""
    modules: dict[str, list[Tensor]] = {}
    for tensor in layer_tensors(config, layer):
        modules[tensor.name] = [tensor]
        if tensor.single:
            modules[tensor.single] = [tensor]
        if tensor.whole and tensor.whole != tensor.name:
            modules.setdefault(tensor.whole, []).append(tensor)
    if config.latent is not None:
        joined = latent_heads(config, config.latent)
        modules[joined.name] = [joined]
    return modules


def _part_size(size: int, split: Split, rank: int, unit: int) -> int:
    """Return a rank's part of `size`; 0 of 0, which stands for none."""
    if not size:
        return 0
    return len(_in_units(size, split, unit)[rank])


def _in_units(size: int, split: Split, unit: int) -> list[range]:
    """Return each rank's range of `size`, in multiples of `unit`; the last one has the rest."""
    ranges = [_scaled(units, unit) for units in split.ranges(max(1, size // unit))]
    return [*ranges[:-1], range(ranges[-1].start, size)]


def _numbers(array: Any, ranges: list[range]) -> Any:
    """Return some of a vector, or channels of a convolution (C, ...). Vectors may be stored with axes of one."""
    if array.shape[0] == 1:
        array = array.reshape(-1)
    return _joined([array[part.start : part.stop] for part in ranges], 0)


def _rows(array: Any, kind: str, ranges: list[range]) -> Any:
    """Return rows of a matrix or of a stack of them, or numbers of a bias."""
    if kind == "bias":
        return _joined([array[..., part.start : part.stop] for part in ranges], -1)
    return _joined([array[..., part.start : part.stop, :] for part in ranges], -2)


def _joined(parts: list[Any], axis: int) -> Any:
    """Concatenate arrays, or parts of files."""
    first, *others = parts
    if not others:
        return first
    if isinstance(first, mx.array):
        return mx.concatenate(parts, axis=axis)
    return first.joined(others, axis)


def _scaled(heads: range, by: int) -> range:
    """Return the range of rows or columns of some heads. by: rows or columns of one."""
    return range(heads.start * by, heads.stop * by)


def _moved(heads: range, by: int) -> range:
    """Return a range further on."""
    return range(heads.start + by, heads.stop + by)
