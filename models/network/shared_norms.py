"""Norms over the heads of all ranks in tensor parallelism, by a sum of squares. A rank has the weights of its heads.

`TensorDecoder` takes these norms out of its layers, and runs its passes through `around`, which puts them back at the
places where the layers would have had them: after the projections into attention, and after mixers.

Dimensions: B sequences, T new tokens, H and Hkv heads of this rank, D head size.

tests/models/network/test_ranks.py compares divided networks with whole ones.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.network.projections import stacked
from headrace.models.network.tensor_part import TensorPart, head_ranges, kv_range
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import AttentionSpec, LayerWeights, MixerSpec, Projections
from headrace.runtime.ranks.group import Group


class SharedNorms:
    """Norms of queries, keys and Mamba heads that span ranks.

    layers: the given ones, without them.
    """

    def __init__(self, part: TensorPart, group: Group, layers: Sequence[LayerWeights]) -> None:
        self._part = part
        self._group = group
        self.layers = list(layers)
        self._heads: dict[int, list[mx.array]] = {}  # by layer: weights of queries (H * D,) and keys (Hkv * D,)
        self._inner: dict[int, mx.array] = {}  # by layer: (H * Dv,)
        for index, (layer, whole) in enumerate(zip(layers, part.whole.layers, strict=True)):
            spec = layer.attention
            mixer = layer.mixer
            if part.whole.family.qk_norm == "heads" and spec is not None:
                self._heads[index] = [norm for norm in (spec.q_norm, spec.k_norm) if norm is not None]
                layer = replace(layer, attention=replace(spec, q_norm=None, k_norm=None))
                self.layers[index] = layer
            joint = whole.mixer is not None and whole.mixer.sizes.kind == "ssm" and whole.mixer.norm_parts == 1
            if joint and mixer is not None and mixer.norm is not None:
                self._inner[index] = mixer.norm
                self.layers[index] = replace(layer, mixer=replace(mixer, norm=None))

    @property
    def arrays(self) -> list[mx.array]:
        """Weights of the norms; empty if none spans ranks."""
        return [*(norm for norms in self._heads.values() for norm in norms), *self._inner.values()]

    def around(self, kv: KVPass) -> KVPass:
        """Return a pass that normalizes what it attends to, and what it mixes."""
        if not self._heads and not self._inner:
            return kv
        return _NormedPass(kv, self)

    def of_heads(self, index: int, projected: Projections) -> Projections:
        """Normalize the queries and keys of projections (B, T, (H + 2 Hkv) * D), if they have such norms."""
        if index not in self._heads:
            return projected
        # The rank's queries and keys, the values after them.
        rows = stacked(projected)
        part = self._part
        layer = self._part.whole.layers[index]
        kv_heads, dim = part.whole.heads_of(layer)
        q_norm, k_norm = self._heads[index]
        q, k, v = mx.split(rows, [q_norm.size, q_norm.size + k_norm.size], axis=-1)

        # Squares of all ranks. K/V heads that several ranks have count once.
        sums = [_squares(q), _squares(k) / self._sharing(kv_heads)]
        both = self._group.all_sum(mx.concatenate(sums, axis=-1))  # (B, T, 2)
        means = both / mx.array([part.whole.heads * dim, kv_heads * dim], mx.float32)
        q_scale, k_scale = mx.split(mx.rsqrt(means + part.whole.norm_eps), 2, axis=-1)  # (B, T, 1)

        normed = [
            (x.astype(mx.float32) * scale).astype(rows.dtype) * norm
            for x, scale, norm in ((q, q_scale, q_norm), (k, k_scale, k_norm))
        ]
        return [mx.concatenate([*normed, v], axis=-1)]

    def of_mixer(self, index: int, x: mx.array, eps: float) -> mx.array:
        """Normalize a mixer's output (B, T, H * Dv), if all its heads have one norm."""
        if index not in self._inner:
            return x
        mixer = self._part.whole.layers[index].mixer
        assert mixer is not None
        mean = self._group.all_sum(_squares(x)) / mixer.sizes.inner
        return (x.astype(mx.float32) * mx.rsqrt(mean + eps)).astype(x.dtype) * self._inner[index]

    def _sharing(self, kv_heads: int) -> int:
        """Return the number of ranks that have this rank's K/V heads."""
        part = self._part
        own_heads = kv_range(part.heads, part.whole.heads, kv_heads)
        ranges = head_ranges(part.whole, part.split, part.unit)
        return sum(kv_range(heads, part.whole.heads, kv_heads) == own_heads for heads in ranges)


class _NormedPass:
    """A pass with norms after projections into attention, and after mixers."""

    def __init__(self, kv: KVPass, norms: SharedNorms) -> None:
        self._kv = kv
        self._norms = norms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    def attend(self, layer: int, projected: Projections, spec: AttentionSpec) -> mx.array:
        return self._kv.attend(layer, self._norms.of_heads(layer, projected), spec)

    def mix(self, layer: int, x: mx.array, spec: MixerSpec) -> mx.array:
        return self._norms.of_mixer(layer, self._kv.mix(layer, x, spec), spec.norm_eps)


def _squares(x: mx.array) -> mx.array:
    """Return the sum of squares of each row (B, T, N) -> (B, T, 1)."""
    return mx.square(x.astype(mx.float32)).sum(axis=-1, keepdims=True)
