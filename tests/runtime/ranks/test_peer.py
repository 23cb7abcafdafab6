"""Collectives of two ranks over a connection of their own: both ends in one process, on two streams."""

import socket
from typing import Any

import mlx.core as mx
import pytest

from headrace.runtime.ops import native
from headrace.runtime.ops.native_plans import kernels

pytestmark = pytest.mark.skipif(not native.status().available, reason="peers need the native kernels")


@pytest.fixture
def ends() -> list[Any]:
    return [kernels.Peer(end.detach(), rank) for rank, end in enumerate(socket.socketpair())]


def both(ends: list[Any], call: str, *given: mx.array) -> list[mx.array]:
    """Return what a collective gives on each rank."""
    found = []
    for end, array in zip(ends, given, strict=True):
        with mx.stream(mx.new_stream(mx.cpu)):
            found.append(getattr(end, call)(array))
    mx.eval(found)
    return found


@pytest.mark.parametrize("size", [1, 2048, 1 << 21])  # the last is longer than the buffers of a socket
def test_sums_have_the_same_bits_on_both_ranks(ends: list[Any], size: int) -> None:
    own = mx.random.normal((1, size))
    others = mx.random.normal((1, size))
    first, second = both(ends, "all_sum", own, others)
    assert mx.array_equal(first, second)
    assert mx.array_equal(first, own + others)


def test_integers_and_strided_arrays_are_summed(ends: list[Any]) -> None:
    numbers = mx.array([[1, 2**31], [3, 4]], mx.uint32)
    assert both(ends, "all_sum", numbers.T, mx.broadcast_to(mx.array([5, 0], mx.uint32), (2, 2)))[0].tolist() == [
        [6, 3],
        [2**31 + 5, 4],
    ]
    with pytest.raises(ValueError, match="float32"):
        ends[0].all_sum(mx.zeros(2, mx.float16))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_arrays_without_rows_of_numbers_are_summed(ends: list[Any], shape: tuple[int, ...]) -> None:
    for found in both(ends, "all_sum", mx.ones(shape), mx.ones(shape)):
        assert mx.array_equal(found, 2 * mx.ones(shape))


def test_arrays_are_gathered_in_the_order_of_ranks(ends: list[Any]) -> None:
    for found in both(ends, "all_gather", mx.array([[1, 2]], mx.int8), mx.array([[3, 4]], mx.int8)):
        assert found.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("rows", [1, 3])
def test_columns_are_gathered_on_rank_0(ends: list[Any], rows: int) -> None:
    own = mx.random.normal((rows, 1, 5))
    others = mx.random.normal((rows, 1, 1 << 18))
    with mx.stream(mx.new_stream(mx.cpu)):
        first = ends[0].gather_columns(own, others.shape[-1])
    with mx.stream(mx.new_stream(mx.cpu)):
        second = ends[1].gather_columns(others, own.shape[-1])
    mx.eval(first, second)
    assert mx.array_equal(first, mx.concatenate([own, others], axis=-1))
    assert mx.array_equal(second, others)


def test_one_rank_sends_and_the_other_receives(ends: list[Any]) -> None:
    sent = mx.random.normal((3, 1 << 19))
    received = ends[1].receive(sent.shape, mx.float32, mx.new_stream(mx.cpu))
    mx.async_eval(received)  # before anything is sent: it waits on a stream of its own
    mx.eval(ends[0].send(sent))
    assert mx.array_equal(received, sent)


def test_a_lost_rank_is_an_error(ends: list[Any]) -> None:
    del ends[1]
    with pytest.raises(RuntimeError, match="other rank"):
        mx.eval(ends[0].all_sum(mx.zeros(4)))
