"""Recognition of out-of-memory messages of MLX and macOS."""

import pytest
from msgspec.structs import replace

from headrace.runtime.errors import EngineError, NotEnoughMemoryError
from headrace.runtime.machine import out_of_memory
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


def test_memory_error_of_python_counts_too() -> None:
    with pytest.raises(NotEnoughMemoryError), memory_errors(0):
        raise MemoryError


@pytest.mark.parametrize(
    "said",
    [
        "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
        "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
        "[METAL] Command buffer execution failed: Impacting Interactivity "
        "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
    ],
)
def test_a_gpu_timeout_has_a_hint(said: str) -> None:
    with pytest.raises(EngineError) as ended, memory_errors(0):
        raise RuntimeError(said)
    assert "GPU" in (ended.value.hint or "")


def test_on_a_mac_the_hint_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    host = replace(out_of_memory.machine(), backend="metal", device_memory_bytes=8 << 30)
    monkeypatch.setattr(out_of_memory, "machine", lambda: host)
    with pytest.raises(NotEnoughMemoryError) as ended, memory_errors(0):
        raise RuntimeError(SAID[0])
    assert "iogpu.wired_limit_mb" in (ended.value.hint or "")


@pytest.mark.parametrize("said", ["Command buffer execution failed: Invalid Resource", "shapes differ"])
def test_other_errors_are_not_reported_as_out_of_memory(said: str) -> None:
    assert not reports_out_of_memory(said)
    with pytest.raises(RuntimeError, match=said), memory_errors(0):
        raise RuntimeError(said)
