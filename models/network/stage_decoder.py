"""A rank of the decoder in a pipeline: consecutive layers, between ranks that have those before and after.

Rank 0 has the embedding, the first layers and the head: the last rank sends its output back. Activations go from rank
to rank, which a ring connects. Dimensions: N tokens of a pass, E hidden size, P size of a layer's own input.

Guard: tests/models/network/test_ranks.py.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig
from headrace.models.network.decoder import Decoder
from headrace.models.network.parameters import Parameters
from headrace.runtime.errors import UsageError
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVPass, PassRow
from headrace.runtime.ops import Weight
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ranks.group import Group
from headrace.runtime.ranks.split import Split

_LAYERS = "model.layers."


class Stage(Struct, frozen=True):
    """The layers of one rank.

    whole, config: of the model, and of these layers alone.
    layers: their indices in the model.
    rank: 0 has the embedding and the head, too.
    """

    whole: DecoderConfig
    config: DecoderConfig
    layers: range
    rank: int

    def take(self, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return this rank's tensors, its layers numbered from 0."""
        taken: dict[str, mx.array] = {}
        for name, array in arrays.items():
            if not name.startswith(_LAYERS):
                if self.rank == 0:
                    taken[name] = array
                continue
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            if int(number) in self.layers:
                taken[f"{_LAYERS}{int(number) - self.layers.start}.{rest}"] = array
        return taken


def stage(config: DecoderConfig, split: Split, rank: int) -> Stage:
    """Return a rank's layers. Raises UsageError for fewer layers than ranks.

    Layers that read the K/V of an earlier one, or share its choice of entries, are on its rank.
    """
    own_layers = stage_ranges(config, split)[rank]
    layers = list(config.layers[own_layers.start : own_layers.stop])
    for index, layer in enumerate(layers):
        if layer.source is not None:
            layers[index] = replace(layer, source=layer.source - own_layers.start)
    return Stage(config, replace(config, layers=tuple(layers)), own_layers, rank)


def stage_ranges(config: DecoderConfig, split: Split) -> list[range]:
    """Return the layers of each rank, in proportion to the shares."""
    ranges = split.ranges(len(config.layers))
    edges = [layers.start for layers in ranges]
    # An edge moves back to the first layer that later ones read: its K/V, or its choice of entries.
    for rank, edge in enumerate(edges):
        sources = [layer.source for layer in config.layers[edge:] if layer.source is not None]
        edges[rank] = min([edge, *sources])
        while (indexer := config.layers[edges[rank]].indexer) is not None and indexer.shared:
            edges[rank] -= 1
    if sorted(set(edges)) != edges:  # an edge has met the one before
        raise UsageError(f"pipeline: the last layers of {config.architecture} share K/V, which leaves a rank without")
    ranges = [range(first, last) for first, last in zip(edges, [*edges[1:], len(config.layers)], strict=True)]
    if not all(any(config.layers[i].appends for i in layers) for layers in ranges):
        raise UsageError(f"pipeline: a rank would have layers of {config.architecture} without attention alone")
    return ranges


class StageDecoder(Decoder):
    """One rank's layers; on rank 0 also embedding and head."""

    def __init__(self, part: Stage, parameters: Parameters, kv: KVFormat | None, group: Group) -> None:
        self._group = group
        self._stage = part
        super().__init__(part.config, parameters, kv)

    def follow(self, kv: KVPass) -> list[mx.array]:
        """Run rank 0's pass; return what to evaluate."""
        # Rows have the hidden state, and the inputs of the layers from here on.
        width = self.config.hidden_size + self.config.input_size * (len(self._stage.whole.layers) - self._first)
        x = self._group.receive((1, sum(row.count for row in kv.rows), width), self.dtype, self._group.rank - 1)
        sent = self._run(x, kv)
        kv.advance()
        if sent is None:
            return kv.arrays
        return [sent]

    def layers(self, x: mx.array, kv: KVPass) -> mx.array:
        """Run the layers of all ranks; see `Decoder`."""
        sent = self._run(self._placed(x, kv), kv)
        assert sent is not None
        mx.async_eval(sent)  # also if no row is wanted: the other ranks append
        wanted = _wanted(kv.rows)
        if not wanted:
            return x[:, :0, : self.config.hidden_size]  # (1, 0, E)
        received = self._group.receive((1, wanted, self.config.hidden_size), self.dtype, self._group.size - 1)
        mx.async_eval(received)  # in the order of passes, whichever is chosen from first
        if self.draft_head is not None:
            received = self._ops.rms_norm(received, self._norm, self.config.norm_eps)
        return received

    def kv_backend(self, options: KVOptions) -> KVBackend:
        """See `Decoder`. All but the last rank want the output of every row."""
        backend = super().kv_backend(options)
        if self._last:
            return backend
        return _AllOutput(backend)

    @property
    def _first(self) -> int:
        return self._stage.layers.start

    @property
    def _last(self) -> bool:
        return self._stage.layers.stop == len(self._stage.whole.layers)

    def _run(self, x: mx.array, kv: KVPass) -> mx.array | None:
        """Run this rank's layers and send their output on; None if none is wanted. x (1, N, E + P of layers left)."""
        group = self._group
        own_width = self.config.hidden_size + self.config.input_size * len(self._layers)
        out = self._run_layers(x[..., :own_width], kv)
        if self._last:
            wanted = _wanted(kv.rows)
            if not wanted:
                return None
            return group.send(out[:, :wanted], 0)
        if x.shape[-1] > own_width:  # inputs of the layers on later ranks
            out = mx.concatenate([out, x[..., own_width:]], axis=-1)
        return group.send(out, group.rank + 1)

    def _read_ends(self, config: DecoderConfig, parameters: Parameters) -> None:
        if self._stage.rank == 0:
            super()._read_ends(replace(config, layers=self._stage.whole.layers), parameters)
            return
        # In place of weights that rank 0 alone has, for `arrays` and `cost`.
        self._table = self._head = Weight(mx.zeros((1, 1), self.dtype))
        self._norm = mx.zeros((1,), self.dtype)
        self._inputs = None
        self.vocab_size = config.vocab_size


class _AllOutput:
    """A K/V backend whose passes return the output of all rows."""

    def __init__(self, backend: KVBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        return self._backend.make_passes([replace(row, output=True) for row in rows])


def _wanted(rows: Sequence[PassRow]) -> int:
    """Return the tokens up to the last one with logits, or whose hidden states rank 0 drafts from."""
    ends = accumulate(row.count for row in rows)
    return max((end for end, row in zip(ends, rows, strict=True) if row.logits or row.hidden), default=0)
