"""Recognition of out-of-memory messages of MLX and macOS."""

import pytest

from headrace.runtime.errors import NotEnoughMemoryError
from headrace.runtime.machine.out_of_memory import memory_errors, reports_out_of_memory

SAID = [
    "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU...ErrorOutOfMemory)",
    "[metal::malloc] Attempting to allocate 43486543872 bytes which is greater than the maximum allowed buffer size of "
    "28991029248 bytes.",
    "[malloc] Unable to allocate 5368709120 bytes.",
    "cudaMallocAsync(&data, size, stream) failed: out of memory",
]


@pytest.mark.parametrize("said", SAID)
def test_out_of_memory_is_an_error_with_figures(said: str) -> None:
    assert reports_out_of_memory(said)
    with pytest.raises(NotEnoughMemoryError, match=r"3\.00 GiB"), memory_errors(3 << 30):
        raise RuntimeError(said)


def test_the_size_of_the_refused_buffer_is_shown() -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"5\.00 GiB"), memory_errors(0):
        raise RuntimeError(SAID[2])


def test_pythons_own_error_counts_too() -> None:
    with pytest.raises(NotEnoughMemoryError), memory_errors(0):
        raise MemoryError


@pytest.mark.parametrize("said", ["Command buffer execution failed: Invalid Resource", "shapes differ"])
def test_other_errors_pass(said: str) -> None:
    assert not reports_out_of_memory(said)
    with pytest.raises(RuntimeError, match=said), memory_errors(0):
        raise RuntimeError(said)
