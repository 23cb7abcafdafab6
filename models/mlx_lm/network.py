"""Networks of mlx-lm's model classes, for every architecture without a decoder of our own, and their prediction heads.

mlx-lm has one call for a whole forward pass, so `layers` does stages 1 to 4 of `decode_step`; in prefill its logits are
never evaluated. Of all models, this folder alone imports mlx-lm, and others import it late, since that is slow.

`loading.load` and `loading.rank_part` add a head (`add_head`); `network.head_decoder` does the same for headrace's own
decoder.

Guard: tests/models/mlx_lm/test_network.py.
"""

from collections.abc import Callable, Mapping
from copy import copy

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from msgspec.structs import replace

from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.mlx_lm.backend import MlxLmBackend
from headrace.models.mlx_lm.cache import CachePart, MlxLmCache, make_parts, quantized
from headrace.models.mlx_lm.costs import layers_kv, measure
from headrace.models.mlx_lm.kernels import KernelFunctions, Stored, exchange
from headrace.models.mlx_lm.load import load, refused
from headrace.models.mlx_lm.long_rope import LongRope
from headrace.models.mlx_lm.mtp import Head, project, text_model
from headrace.models.network.long_rope_decoder import TokenHistory
from headrace.models.network.make_decoder import refused as refused_kv
from headrace.models.network.mtp import HeadTensors
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.network import DraftHead
from headrace.runtime.ops import Ops
from headrace.runtime.ops.kv_format import KVFormat


class MlxLmNetwork:
    """A `runtime.network.Network` around an mlx-lm model. No weight is read until `arrays` are evaluated.

    activations, pages, division: see `runtime.network.Network`. No activations are rounded, and K/V are no blocks.
    kv: storage format of K/V, None for the class's own; raises UsageError if the class does not support it.
    kernels: operations for `use_kernels`; None: the class stays stock MLX.
    head, divide: see `models.mlx_lm.load.load`.
    """

    activations = 16
    pages = False
    division = None  # `LeaderNetwork` has one
    _whole_shares: Mapping[str, float] | None = None  # read shares of parameters before the model was divided

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: mx.DeviceType,
        kv: KVFormat | None = None,
        kernels: Ops | None = None,
        head: Head | None = None,
        divide: Callable[[nn.Module], None] | None = None,
    ) -> None:
        # The model, and its layers as stored until they are exchanged
        self._model, stored = load(checkpoint, device, head, divide)
        self._kernels: tuple[Ops, Stored] | None = None  # until the layers are exchanged
        if kernels is not None:
            self._kernels = (kernels, stored)
        self._functions: KernelFunctions | None = None  # once they are

        # Arrays, and what a step reads of them
        self.draft_head: DraftHead | None = None
        self.arrays = list(self._parameters().values())
        self.kv_format: KVFormat | None = None  # None: the class's own
        try:
            measured = measure(self._model, checkpoint.config, self._whole_shares)
        except Exception as error:  # classes raise anything on unexpected sizes
            raise refused(checkpoint.config, checkpoint.path.name, error) from error
        self._long_rope = LongRope.of(self._model, checkpoint.config)
        original = 0
        if self._long_rope is not None:
            original = self._long_rope.original
        self._history = TokenHistory(original)
        self.vocab_size = measured.vocab_size
        self.cost = measured.cost
        self._shares = measured.shares
        if kv is not None and kv.packed:
            self._store(kv)
        self.rolls_back = self._long_rope is None and MlxLmCache(self._fresh_parts(), 1, ()).rolls_back

    @property
    def model(self) -> nn.Module:
        """mlx-lm's model."""
        return self._model

    def use_kernels(self) -> "MlxLmNetwork":
        """Run projections, tables and norms on the kernels, if there are any; return self.

        Reads the weights of projections and tables, in the types they are stored in.
        """
        if self._kernels is None:
            return self
        ops, stored = self._kernels
        self._kernels = None
        before = self._parameters()
        exchanged = exchange(self._model, stored, ops, self._fresh_parts)
        self.arrays = [*self._parameters().values(), *exchanged.arrays]
        self._functions = exchanged.functions
        saved = sum(self._shares[name] * (before[name].nbytes - new) for name, new in exchanged.nbytes.items())
        self.cost = replace(self.cost, weight_bytes=self.cost.weight_bytes - round(saved))
        return self

    def _parameters(self) -> dict[str, mx.array]:
        parameters = dict(tree_flatten(self._model.parameters()))
        return {name: array for name, array in parameters.items() if isinstance(array, mx.array)}

    def with_kv(self, kv: KVFormat) -> "MlxLmNetwork":
        """Return a network with the same weights and K/V stored as `kv`. Raises UsageError if not supported."""
        twin = copy(self)
        twin._store(kv)
        return twin

    def _store(self, kv: KVFormat) -> None:
        """Set the format of K/V, and its cost. Raises UsageError, with the reason, if the class does not support it."""
        stored = None
        if kv.packed:
            if self._long_rope is not None:
                raise refused_kv(kv, "LongRoPE rotates keys anew as a sequence grows")
            chosen = quantized(self._model, kv)
            if isinstance(chosen, str):
                raise refused_kv(kv, chosen)
            stored = chosen
        self.kv_format = stored
        self.cost = replace(self.cost, kv=layers_kv(self._model, self._fresh_parts))

    @property
    def wide_chunks(self) -> bool:
        """True for mixtures, of which a step reads less than half; an untied table is no larger than the head."""
        return sum(array.nbytes for array in self.arrays) > 2 * self.cost.weight_bytes

    def kv_backend(self, options: KVOptions) -> KVBackend:
        return MlxLmBackend(
            options, self._fresh_parts, self.cost, rolls_back=self.rolls_back, can_copy=self._long_rope is None
        )  # fmt: skip

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (B, T), unchanged: the model embeds them."""
        return tokens

    def layers(self, x: mx.array, kv: KVPass) -> mx.array:
        """x: tokens (B, T) -> logits (B, T, V), or with a head hidden states (B, T, E)."""
        [row] = kv.rows
        assert isinstance(row.cache, MlxLmCache)
        parts = row.cache.parts
        if self._functions is not None:
            self._functions.phase = row.phase
        model = self._model
        if self.draft_head is not None:
            model = text_model(self._model).model  # without the output projection
        if self._long_rope is not None:
            parts = self._rotated(self._long_rope, x, row.cache)
        out: mx.array = model(x, cache=parts)
        return out

    def _rotated(self, rope: LongRope, tokens: mx.array, cache: MlxLmCache) -> list[CachePart]:
        """Set the factors for the sequence's new length, and return its parts with all keys rotated by them."""
        long, again = self._history.append(cache, tokens)
        rope.use(long)
        if again:
            cache.restart(self._fresh_parts())
            for piece in again:
                self._model(piece, cache=cache.parts)
                mx.eval(cache.arrays)  # piece by piece, as a prefill is: its working memory is bounded
        return cache.parts

    def logits(self, x: mx.array) -> mx.array:
        """Return the logits (B, V) of the last position of the output of `layers`."""
        if self.draft_head is None:
            return x[:, -1]
        return project(self._model, x[:, -1:])[:, 0]

    def _fresh_parts(self) -> list[CachePart]:
        """Return empty caches of a sequence."""
        return make_parts(self._model, self.kv_format)


class MtpNetwork(MlxLmNetwork):
    """A `runtime.network.DraftHead`: the model of one layer, with the head's input in place of its table."""

    def hidden(self, tokens: mx.array, hidden: mx.array, kv: KVPass) -> mx.array:
        """tokens, hidden (1, T), (1, T, E) -> (1, T, E)."""
        [row] = kv.rows
        assert isinstance(row.cache, MlxLmCache)
        body = text_model(self._model).model
        if self._functions is not None:
            self._functions.phase = row.phase
        body.embed_tokens.use(hidden)
        out: mx.array = body(tokens, cache=row.cache.parts)
        return out

    def logits(self, x: mx.array) -> mx.array:
        """(1, T, E) -> (1, V)."""
        return project(self._model, x[:, -1:])[:, 0]


def add_head(network: MlxLmNetwork, tensors: HeadTensors, device: mx.DeviceType, kernels: Ops | None) -> MlxLmNetwork:
    """Give mlx-lm's network its checkpoint's head, and return it. The head's arrays become some of the network's.

    Draft tokens need a network that can drop the rejected ones; others get no head.
    """
    if not network.rolls_back:
        return network
    bound = Head(tensors, network.model)
    head = MtpNetwork(tensors.checkpoint, device=device, kernels=kernels, head=bound)
    head.use_kernels()
    network.arrays = [*network.arrays, *head.arrays]
    network.draft_head = head
    return network
