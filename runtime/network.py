"""The model as the engine sees it, for every architecture. `models/` implements it.

Implementations: `Decoder` (models/network/decoder.py), mlx-lm's classes (models/mlx_lm/network.py), and `LeaderNetwork`
(runtime/ranks/leader.py), which wraps one of them for several machines. A new member needs a line in each.

Guard: tests/models/loading/test_load.py.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import mlx.core as mx

from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.telemetry import RankTimes, StepParts
from headrace.runtime.ops.kv_format import KVFormat


class Network(Protocol):
    """Stages 1 to 4 of a decode step, as `runtime.engine.decode.decode_step` numbers them.

    B = sequences, T = new tokens, V = vocabulary.
    """

    @property
    def cost(self) -> StepCost:
        """Bytes and FLOPs of one step, from shapes."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, the logits of a position."""
        ...

    @property
    def kv_format(self) -> KVFormat | None:
        """Storage format of K/V; None if the model class decides."""
        ...

    @property
    def activations(self) -> int:
        """Bits to which the native kernels round the activations of a prompt's rows: 16 or 8."""
        ...

    @property
    def arrays(self) -> list[mx.array]:
        """All weights, to load before the first step and to count."""
        ...

    @property
    def draft_head(self) -> "DraftHead | None":
        """The checkpoint's multi-token prediction head, if it has one."""
        ...

    @property
    def wide_chunks(self) -> bool:
        """True if short chunks of prompts waste reads or kernels: each reads all experts, or attention is not fused."""
        ...

    @property
    def pages(self) -> bool:
        """True if its K/V are blocks of one pool."""
        ...

    @property
    def division(self) -> "Division | None":
        """The division among ranks; None on one machine."""
        ...

    def kv_backend(self, options: KVOptions, /) -> KVBackend:
        """Return a new K/V backend for one engine: the kind that this network's layers attend with."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids (B, T) -> the input of `layers`."""
        ...

    def layers(self, x: mx.array, kv: KVPass, /) -> mx.array:
        """Run all layers; each appends K/V through `kv`, and attends over all entries.

        With a `draft_head` the result is the hidden states (B, T, E) that it takes.
        """
        ...

    def logits(self, x: mx.array) -> mx.array:
        """Logits of the last position: output of `layers` -> (B, V)."""
        ...


class Division(Protocol):
    """Facts about a model that is divided among ranks."""

    @property
    def kv_memory(self) -> int:
        """Bytes of this rank's K/V for which every rank has memory."""
        ...

    @property
    def staged(self) -> bool:
        """True if the ranks are stages of a pipeline; else each has a part of every layer, and sums are exchanged."""
        ...

    @property
    def takes_turns(self) -> bool:
        """True if the stages compute the passes of a step in turn, which needs a network that `pages`."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a wait for the ranks, such as a step. A rank that hangs ends all ranks."""
        ...

    def rank_times(self, parts: StepParts, step_s: float, /) -> tuple[RankTimes, ...]:
        """Return the times of a step of all ranks, as far as they measure any. parts: of this rank."""
        ...


def waiting_for_ranks(network: Network) -> AbstractContextManager[None]:
    """Return `Division.waiting` of a network that is divided among ranks; an empty context on one machine."""
    division = network.division
    return nullcontext() if division is None else division.waiting()


class DraftHead(Protocol):
    """A multi-token prediction head: one layer with K/V of its own. E = model width."""

    @property
    def arrays(self) -> list[mx.array]:
        """Its weights."""
        ...

    @property
    def cost(self) -> StepCost:
        """Bytes and FLOPs of one draft token, without the output projection."""
        ...

    def kv_backend(self, options: KVOptions, /) -> KVBackend:
        """Return new caches for the layer's K/V."""
        ...

    def hidden(self, tokens: mx.array, hidden: mx.array, kv: KVPass, /) -> mx.array:
        """Append T entries and return their hidden states (1, T, E).

        hidden (1, T, E): of successive positions, from the network or this head. tokens (1, T): those after them.
        """
        ...

    def logits(self, hidden: mx.array, /) -> mx.array:
        """Logits of the token after `tokens`, at the last position: (1, T, E) -> (1, V)."""
        ...
