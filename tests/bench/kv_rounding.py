"""Loss of K/V that are rounded in other ways, simulated in NumPy: `python -m tests.bench.kv_rounding`.

A text goes through a model as one prompt. Keys and values of every layer are rounded before attention, which is exact,
and the logits are compared with those of float32 keys and values. What a form needs to know about a model is measured
on the beginning of the text; its end is scored. Models whose layers all have keys and values of their own.

docs/kv.md has the figures. T = tokens, H and Hkv = query and key/value heads, D = head size, E = width.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from headrace.app.bench.quality.text import passages, read_text
from headrace.models.loading.divergence import divergence
from headrace.models.loading.load import load_resolved
from headrace.models.network.decoder import Decoder
from headrace.models.registry.resolve import resolve
from headrace.runtime.kv.cache import KVCache, PassRow
from headrace.runtime.ops import AttentionSpec, Projections
from headrace.runtime.ops.attention import attention, placed_heads
from tests.support.hadamard import hadamard

Array = NDArray[Any]
MEASURED = 640  # tokens of the text's beginning
# Tokens at the beginning, left out: they are unlike all others, since queries with no better choice attend to them.
SKIPPED = 8
FIRST_SHARE = 0.3  # weight of the very first one among the principal directions, relative to all others together
ROWS = 128  # of logits at a time


class Rounding(NamedTuple):
    """A way to store keys or values.

    bits, group: of codes, and numbers that share a scale.
    offset: groups have an offset, too.
    turn: the transform before rounding: none; Hadamard; Hadamard with the pair of channels that is largest in a head in
        the place of the first, which is in the groups' offsets alone; the same with a head's principal directions.
    centred: the mean of a head is subtracted, and added again.
    factors: channels are scaled so that keys and queries are alike, by pairs that turn together.
    feedback: numbers are rounded one after the other, and the later ones make up for the errors of the earlier ones in
        what reads them; the damping of that, None for independent rounding.
    """

    bits: int = 4
    group: int = 32
    offset: bool = True
    turn: Literal["none", "hadamard", "pair", "principal"] = "hadamard"
    centred: bool = False
    factors: bool = False
    feedback: float | None = None


Form = dict[str, Rounding]
"""The roundings of "keys" and "values"; without one they are exact."""
_EIGHT = Rounding(8, 32, offset=False)
_SIX = Rounding(6, 64, offset=False)
_FIVE = Rounding(5, 64, offset=False)
_FOUR = Rounding(4, 32, offset=False)
_PRINCIPAL = Rounding(turn="principal")
_BEST_KEYS = Rounding(turn="principal", feedback=0.3)
FORMS: dict[str, Form] = {
    "keys, no transform": {"keys": Rounding(turn="none")},
    "keys": {"keys": Rounding()},
    "keys, centred": {"keys": Rounding(centred=True)},
    "keys, factors": {"keys": Rounding(factors=True)},
    "keys, largest pair": {"keys": Rounding(turn="pair")},
    "keys, principal": {"keys": _PRINCIPAL},
    "keys, feedback": {"keys": Rounding(feedback=0.3)},
    "keys, centred, feedback": {"keys": Rounding(centred=True, feedback=0.3)},
    "keys, principal, feedback": {"keys": _BEST_KEYS},
    "keys, principal, feedback, groups of 64": {"keys": _BEST_KEYS._replace(group=64)},
    "values": {"values": Rounding()},
    "values, centred": {"values": Rounding(centred=True)},
    "values, principal": {"values": _PRINCIPAL},
    "values, feedback": {"values": Rounding(feedback=0.3)},
    "values, principal, feedback": {"values": _BEST_KEYS},
    "values, groups of 16": {"values": Rounding(group=16)},
    "keys, 6 bits": {"keys": _SIX},
    "keys, 5 bits": {"keys": _FIVE},
    "values, 5 bits": {"values": _FIVE},
    "values, no offset": {"values": _FOUR},
    "values, no offset, groups of 64": {"values": _FOUR._replace(group=64)},
    "k8v4": {"keys": _EIGHT, "values": _FIVE},
    "k8v4, 4 bits": {"keys": _EIGHT, "values": Rounding()},
    "k8v4, values principal, feedback": {"keys": _EIGHT, "values": _BEST_KEYS},
    "q4": {"keys": _SIX, "values": _FOUR},
    "q4, values in groups of 64": {"keys": _SIX, "values": _FOUR._replace(group=64)},
    "q4, 5 bits": {"keys": _FIVE, "values": _FIVE},
    "q4, 4 bits": {"keys": Rounding(), "values": Rounding()},
    "q4, keys principal": {"keys": _PRINCIPAL, "values": Rounding()},
    "q4, keys principal, feedback": {"keys": _BEST_KEYS, "values": Rounding()},
    "q4, both principal, feedback": {"keys": _BEST_KEYS, "values": _BEST_KEYS},
}


@dataclass(slots=True)
class Side:
    """The keys or the values of a layer, measured.

    heads: (Hkv, T, D), without the first tokens.
    first: (Hkv, D), of the first token.
    readers: (Hkv, D, D), second moments of what they are multiplied with: queries, or the output projection.
    """

    heads: Array
    first: Array
    readers: Array


Change = Callable[[int, str, Array], Array]
"""Returns the keys or values (Hkv, T, D) of a layer as attention reads them."""


class PlainPass:
    """One prompt from its beginning, with exact attention over keys and values that `change` returns."""

    runs_fused = False

    def __init__(self, tokens: int, change: Change, queries: dict[int, Array] | None = None) -> None:
        """queries: gets those of each layer (H, T, D)."""
        self.rows = [PassRow(KVCache(tokens), tokens, "prefill", logits=tokens)]
        self._change = change
        self._queries = queries

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        """Attend with the projections of (1, T) tokens -> (1, T, H * D)."""
        assert spec.appends, "layers with shared keys and values are not simulated"
        q, k, v = placed_heads(qkv, 0, spec)
        assert k is not None
        assert v is not None
        if self._queries is not None:
            self._queries[layer] = np.array(q[0]) * spec.scale
        keys = mx.array(self._change(layer, "keys", np.array(k[0])))
        values = mx.array(self._change(layer, "values", np.array(v[0])))
        out = attention(q, keys[None], values[None], spec)
        return out.transpose(0, 2, 1, 3).reshape(1, out.shape[2], -1)


def run(network: Decoder, tokens: list[int], change: Change, queries: dict[int, Array] | None = None) -> mx.array:
    """Return the output of the layers (T, E)."""
    kv: Any = PlainPass(len(tokens), change, queries)
    x = network.layers(network.embed(mx.array([tokens], mx.uint32)), kv)
    mx.eval(x)
    return x[0]


def measured(network: Decoder, tokens: list[int]) -> dict[tuple[int, str], Side]:
    """Return the keys and values of a text, by layer and side."""
    seen: dict[tuple[int, str], Array] = {}
    queries: dict[int, Array] = {}

    def keep(layer: int, side: str, heads: Array) -> Array:
        seen[layer, side] = heads
        return heads

    run(network, tokens, keep, queries)
    sides = {}
    for (layer, side), heads in seen.items():
        kv_heads, _, dim = heads.shape
        if side == "keys":
            readers = moments(queries[layer][:, SKIPPED:].reshape(kv_heads, -1, dim))
        else:
            output = network._layers[layer].output
            assert output is not None
            columns = np.array(network.ops.linear(mx.eye(output.columns)[None], output)[0])  # (H * D, E)
            by_head = columns.reshape(kv_heads, -1, dim, columns.shape[-1])
            readers = np.einsum("hgde,hgfe->hdf", by_head, by_head)
        sides[layer, side] = Side(heads[:, SKIPPED:], heads[:, 0], readers)
    return sides


def moments(x: Array) -> Array:
    """Return the second moments of rows (Hkv, T, D) -> (Hkv, D, D)."""
    return np.einsum("hnd,hne->hde", x, x) / x.shape[1]


def prepared(form: Form, sides: dict[tuple[int, str], Side]) -> Change:
    """Return the rounding of every layer's keys and values."""
    layers = {at: LayerRounding(side, form[at[1]]) for at, side in sides.items() if at[1] in form}

    def change(layer: int, side: str, heads: Array) -> Array:
        if (layer, side) not in layers:
            return heads
        return layers[layer, side].apply(heads)

    return change


class LayerRounding:
    """The rounding of one layer's keys or values."""

    def __init__(self, side: Side, rounding: Rounding) -> None:
        self._rounding = rounding
        dim = side.heads.shape[-1]
        self._centre = side.heads.mean(axis=1, keepdims=True) if rounding.centred else np.zeros(1)
        second = moments(side.heads - self._centre)
        second += FIRST_SHARE * side.first[:, :, None] * side.first[:, None]
        scaled = np.ones((len(second), dim))
        if rounding.factors:
            scaled = (by_pairs(side.readers) / by_pairs(second)) ** 0.25
        into = np.stack([basis(rounding, head) for head in second]) * scaled[:, None]  # (Hkv, D, D)
        self._into = into
        self._back = np.linalg.inv(into)
        self._readers = self._back.swapaxes(1, 2) @ side.readers @ self._back

    def apply(self, heads: Array) -> Array:
        """Return heads (Hkv, T, D) as they are read back."""
        turned = np.einsum("hde,hne->hnd", self._into, heads - self._centre).astype(np.float32)
        codes = [rounded(rows, self._rounding, readers) for rows, readers in zip(turned, self._readers, strict=True)]
        back = np.einsum("hde,hne->hnd", self._back, np.stack(codes)) + self._centre
        return back.astype(np.float32)


def by_pairs(second: Array) -> Array:
    """Return the diagonals of second moments (Hkv, D, D), summed over the two channels that turn together (Hkv, D)."""
    squares = np.diagonal(second, axis1=1, axis2=2)
    half = squares.shape[1] // 2
    return np.tile(squares[:, :half] + squares[:, half:], 2)


def basis(rounding: Rounding, second: Array) -> Array:
    """Return the transform (D, D) of a head with these second moments."""
    dim = len(second)
    if rounding.turn == "none":
        return np.eye(dim)
    transform = hadamard(dim)
    # A channel at a multiple of the group's size becomes a constant in each group, which is its offset.
    constant = list(range(0, dim, rounding.group))
    if rounding.turn == "pair":
        order = np.argsort(-by_pairs(second[None])[0, : dim // 2], kind="stable")
        channels = np.stack([order, order + dim // 2], axis=1).flatten()
        directions = np.eye(dim)[channels]
    elif rounding.turn == "principal":
        directions = np.linalg.eigh(second)[1].T[::-1]  # the largest first
    else:
        return transform
    placed = np.empty((dim, dim))
    placed[constant + [channel for channel in range(dim) if channel not in constant]] = directions
    return transform @ placed


def rounded(rows: Array, rounding: Rounding, readers: Array) -> Array:
    """Return rows (T, D) as they are read back from codes."""
    count, dim = rows.shape
    if rounding.feedback is None:
        groups = rows.reshape(count, -1, min(rounding.group, dim))
        return decoded(groups, *scale_of(groups, rounding), rounding.bits).reshape(count, dim)
    damped = readers + rounding.feedback * np.trace(readers) / dim * np.eye(dim)
    # As in GPTQ (arXiv:2210.17323): row i has the shares of an error of number i that the later numbers take over.
    shares = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    rest = rows.T.copy()  # (D, T)
    result = np.empty_like(rest)
    scale = offset = np.zeros((count, 1))
    for i in range(dim):
        if i % rounding.group == 0:
            scale, offset = scale_of(rest[i : i + rounding.group].T, rounding)
        result[i] = decoded(rest[i][:, None], scale, offset, rounding.bits)[:, 0]
        error = (rest[i] - result[i]) / shares[i, i]
        rest[i + 1 :] -= shares[i, i + 1 :, None] * error
    return result.T


def scale_of(groups: Array, rounding: Rounding) -> tuple[Array, Array]:
    """Return scale and offset (..., 1) of groups (..., numbers), in half precision."""
    if not rounding.offset:
        zero = 2 ** (rounding.bits - 1)  # the code of 0: one more stands for numbers below 0 than above
        above = groups.max(axis=-1, keepdims=True) / (zero - 1)
        below = groups.min(axis=-1, keepdims=True) / -zero
        scale = np.maximum(np.maximum(above, below).astype(np.float16).astype(np.float32), 1e-8)
        return scale, -zero * scale
    offset = groups.min(axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = (groups.max(axis=-1, keepdims=True) - offset) / (2**rounding.bits - 1)
    return np.maximum(scale.astype(np.float16).astype(np.float32), 1e-8), offset


def decoded(numbers: Array, scale: Array, offset: Array, bits: int) -> Array:
    """Return what the nearest codes stand for."""
    codes = np.clip(np.round((numbers - offset) / scale), 0, 2**bits - 1)
    return codes * scale + offset


def logits(network: Decoder, x: mx.array) -> Iterable[mx.array]:
    """Yield the logits (n, V) of rows (T, E)."""
    for at in range(0, len(x), ROWS):
        yield network.logits(x[at : at + ROWS, None])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model")
    parser.add_argument("-d", "--depth", type=int, default=0)
    parser.add_argument("-n", "--scored", type=int, default=512)
    parser.add_argument("forms", nargs="*", default=list(FORMS))
    options = parser.parse_args()
    loaded = load_resolved(resolve(options.model), force=True)
    network = loaded.network
    assert isinstance(network, Decoder)
    text = read_text(None)
    tokenizer = loaded.tokenizer
    room = loaded.context_limit
    passage = passages(text, tokenizer, [options.depth], options.scored, room, asked=True)[options.depth]
    tokens = [*passage.context, *passage.fed]
    sides = measured(network, tokenizer.encode_prompt(text[: 8 * MEASURED])[:MEASURED])
    exact = run(network, tokens, lambda _layer, _side, heads: heads)[-options.scored :]
    references = [np.array(rows) for rows in logits(network, exact)]
    print("| form | KL mean, nats | KL p99, nats | top-1 equal |\n|---|---:|---:|---:|", flush=True)
    for name in options.forms:
        x = run(network, tokens, prepared(FORMS[name], sides))[-options.scored :]
        kl: list[float] = []
        agrees: list[float] = []
        for reference, rows in zip(references, logits(network, x), strict=True):
            figures = divergence(mx.array(reference), rows, mx.zeros(len(reference), mx.uint32))
            kl += figures.kl
            agrees += figures.agrees
        tail = np.quantile(kl, 0.99)
        print(f"| {name} | {np.mean(kl):.5f} | {tail:.3f} | {100 * np.mean(agrees):.1f} % |", flush=True)


if __name__ == "__main__":
    main()
