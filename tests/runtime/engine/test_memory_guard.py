"""K/V of many sequences stay within the working set of a small Mac, by the accounts and by MLX's counter."""

import gc
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine import kv_budget
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.engine.sequence import Sequence
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.buffers import BufferBackend
from headrace.runtime.kv.cache import PassRow
from headrace.runtime.kv.paged_arrays import MAX_SLAB
from headrace.runtime.machine import hardware, memory
from headrace.runtime.ops import BLOCK, reference
from headrace.runtime.ops.kv_format import Q4, Q8
from headrace.runtime.speculation.proposer import Speculation
from tests.support.kernels import FAST
from tests.support.steady import SteadyPace
from tests.support.tiny import HEAD_DIM, load_decoder, write_model

LIMIT = 512
ROOM = 5 / 2  # sequences of LIMIT entries
PASSES = 2 << 20  # bytes of activations, and of a layer's K/V that is copied: the test's model is tiny
_RESERVE = 256 << 20  # the least that `memory.budget` leaves to others


class Arrival(NamedTuple):
    """One request. same: its prompt begins as those of others with the same number do."""

    step: int
    same: int
    length: int
    output: int
    ends: int | None  # cancelled so many steps later


AT_ONCE = [Arrival(0, same, 300, 12, None) for same in (0, 1, 0)]  # before the first has any K/V
_ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 12),
        st.integers(0, 1),
        st.sampled_from([3, BLOCK + 1, 2 * BLOCK, 440]),
        st.sampled_from([1, 12, 40]),
        st.none() | st.integers(0, 20),
    ),
    min_size=2,
    max_size=6,
)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    """Networks whose K/V outweigh a pass: 6 layers of 4 heads, 12 KiB a token in float32."""
    shape = {"num_hidden_layers": 6, "num_key_value_heads": 4, "max_position_embeddings": LIMIT}
    model = write_model(tmp_path_factory.mktemp("guard") / "model", "llama", changes=shape)
    stock = load_decoder(model, reference)
    q8, q4 = (stock.with_kv(reference.packed_format(kv, HEAD_DIM)) for kv in (Q8, Q4))
    return {"buffers": stock, "q8": q8, "q4": q4, "fast": load_decoder(model, FAST)}


@pytest.mark.sampled
@pytest.mark.parametrize("keep", [False, True], ids=["batch", "chat"])
@pytest.mark.parametrize("kind", ["buffers", "q8", "q4", "fast"])
def test_kv_memory_stays_within_the_working_set(networks: dict[str, Decoder], kind: str, keep: bool) -> None:
    network = networks[kind]
    mx.eval(network.arrays)

    @settings(max_examples=1, deadline=None)
    @given(arrivals=_ARRIVALS, speculate=st.sampled_from(["off", "ngram", "draft"]))
    @example(arrivals=AT_ONCE, speculate="off")
    @example(arrivals=AT_ONCE, speculate="draft")
    def check(arrivals: list[Arrival], speculate: Speculation) -> None:
        with pytest.MonkeyPatch.context() as patched:
            _serve_on_a_small_mac(network, arrivals, keep, speculate, patched)

    check()


def _serve_on_a_small_mac(
    network: Decoder, arrivals: list[Arrival], keep: bool, speculate: Speculation, patched: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what an example before left behind must not go while this one is weighed
    before = mx.get_active_memory()
    draft = None
    room = int(ROOM * network.cost.kv_bytes(LIMIT))
    if speculate == "draft":  # the network drafts for itself, with K/V of the same size
        draft = network
        room *= 2
    working_set = before + room + memory.CACHE_LIMIT + _RESERVE
    host = replace(hardware.machine(), backend="metal", device_memory_bytes=working_set)
    patched.setattr(kv_budget, "budget", lambda: memory.budget(host))
    engine = Engine(
        network, context_limit=LIMIT, keep_prefix=keep, max_running=6, chunk_budget=SteadyPace(64), draft=draft
    )
    waiting = sorted(arrivals, key=lambda arrival: arrival.step)
    running = list[tuple[int | None, Sequence]]()  # with the step in which each is cancelled
    for step in range(3000):
        while waiting and waiting[0].step <= step:
            arrival = waiting.pop(0)
            prompt = [(7 * i * i + 5 * arrival.same) % 96 for i in range(arrival.length)]
            request = Request(prompt, max_tokens=arrival.output, speculate=speculate)
            end = None
            if arrival.ends is not None:
                end = step + arrival.ends
            running.append((end, engine.submit(request)))
        for end, sequence in running:
            if end == step:
                engine.cancel(sequence)
        if not engine.has_work and not waiting:
            break
        engine.step()
        load = engine.load()
        assert load.kv_used_bytes <= load.kv_room_bytes <= room
        assert _allocated(engine.kv) <= room + _ahead(engine.kv)
        assert mx.get_active_memory() - before <= room + _ahead(engine.kv) + PASSES
    assert not engine.has_work


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_a_kept_packed_cache_is_freed_if_memory_is_short(networks: dict[str, Decoder], room: int) -> None:
    kv = networks["q8"].kv_backend(KVOptions(LIMIT, 2, keep_prefix=True, spare=lambda allocated: room - allocated))
    cache = kv.acquire(list(range(9)))
    [one] = kv.make_passes([PassRow(cache, 9, "prefill")])
    mx.eval(networks["q8"].layers(networks["q8"].embed(mx.array([list(range(9))])), one))
    one.advance()
    cache.commit(9)
    kv.release(cache, list(range(9)))
    del cache, one
    kv.evict()
    gc.collect()
    assert bool(_allocated(kv)) == bool(room)


def _allocated(kv: Any) -> int:
    """Return the bytes of K/V by the backend's accounts."""
    total = 0
    if isinstance(kv, BufferBackend):
        total = kv.allocated_bytes
    if kv.pool:
        total += kv.pool.storage.nbytes
    return total


def _ahead(kv: Any) -> int:
    """Return the bytes by which slabs of blocks, at most so many at once, may be ahead of what is reserved."""
    if isinstance(kv, BufferBackend):
        return 0
    return MAX_SLAB * int(kv.pool.storage.block_bytes(0))
