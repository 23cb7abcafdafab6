"""Bytes and FLOPs of a step, its limit, and the longest context in a given number of bytes."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.runtime.metrics.cost import LayerKV, StepCost, step_limit

POSITIVE = st.floats(1.0, 1e15)
COST = StepCost(weight_bytes=1000, weight_flops=50, kv=[LayerKV(2, 10), LayerKV(1, 10, 4)], attention_flops_per_entry=3)


def test_a_batch_reads_the_weights_once() -> None:
    """Five entries are past: six are read in two layers, four in the windowed one; each layer writes one."""
    kv = 10 * (2 * 6 + 4) + 10 * 3
    assert (COST.step_bytes(5), COST.step_bytes(5, batch=4)) == (1000 + kv, 1000 + 4 * kv)
    assert COST.step_flops(5) == 50 + 3 * (2 * 6 + 4)


def test_the_longest_context_fills_the_memory_given() -> None:
    room = COST.kv_bytes(300)
    assert [COST.longest_context(room + more, 1000) for more in (-1, 0, 1)] == [299, 300, 300]
    assert (COST.longest_context(room, 200), COST.longest_context(29, 200), COST.longest_context(30, 200)) == (
        200,
        0,
        1,
    )


def test_recurrent_state_counts_twice_per_step_and_once_per_sequence() -> None:
    hybrid = replace(COST, state_bytes=7)
    assert hybrid.kv_bytes_read(5) == COST.kv_bytes_read(5) + 7
    assert hybrid.kv_bytes_written(3) == 3 * 30 + 7
    assert hybrid.step_bytes(5, batch=4) == COST.step_bytes(5, batch=4) + 4 * 14
    assert (hybrid.kv_bytes(0), hybrid.kv_bytes(9)) == (0, COST.kv_bytes(9) + 7)
    room = hybrid.kv_bytes(300)
    assert [hybrid.longest_context(room + more, 1000) for more in (-1, 0)] == [299, 300]


def test_an_indexed_layer_stores_all_positions_and_reads_the_chosen_ones() -> None:
    layer = LayerKV(2, 10, chosen=4)
    assert (layer.nbytes(3), layer.nbytes(9), layer.held_bytes(9)) == (60, 80, 180)
    assert (layer.visible_by_all(9, 1), layer.read_by_all(9, 1)) == (4, 4)
    assert (layer.visible_by_all(9, 3), layer.read_by_all(9, 3)) == (3 * 4, 11)  # a chunk reads all


def test_index_keys_are_read_where_positions_are_left_out() -> None:
    layer = LayerKV(2, 10, unread=4)
    assert (layer.nbytes(4), layer.nbytes(5), layer.held_bytes(4)) == (0, 100, 80)
    assert (layer.visible_by_all(3, 2), layer.read_by_all(3, 2)) == (0, 0)
    assert (layer.visible_by_all(3, 4), layer.read_by_all(3, 4)) == (5 + 6, 6)
    assert (layer.visible_by_all(9, 3), layer.read_by_all(9, 3)) == (9 + 10 + 11, 11)


def test_the_newest_chosen_block_counts_its_entries_only() -> None:
    layer = LayerKV(1, 10, chosen=8, block=4)
    assert [layer.visible(entries) for entries in (7, 8, 9, 11, 12, 13)] == [7, 8, 5, 7, 8, 5]


@given(POSITIVE, POSITIVE, POSITIVE, POSITIVE)
def test_a_step_takes_the_longer_of_reading_and_computing(
    nbytes: float, flops: float, bytes_per_second: float, flops_per_second: float
) -> None:
    limit = step_limit(nbytes, flops, bytes_per_second, flops_per_second)
    reading_s = nbytes / bytes_per_second
    computing_s = flops / flops_per_second
    assert limit.seconds == max(reading_s, computing_s)
    assert limit.roof == ("arithmetic" if computing_s > reading_s else "memory")


@given(POSITIVE, POSITIVE, POSITIVE)
def test_unknown_flops_do_not_limit_a_step(nbytes: float, flops: float, bytes_per_second: float) -> None:
    limit = step_limit(nbytes, flops, bytes_per_second)
    assert (limit.seconds, limit.roof) == (nbytes / bytes_per_second, "memory")
