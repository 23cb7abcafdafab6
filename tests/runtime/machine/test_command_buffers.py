"""MLX's limit of kernels in a command buffer: chosen by the model, on a Mac, unless it is set."""

import os
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from headrace.models.loading.load import load_model
from headrace.runtime.machine import hardware, memory
from headrace.runtime.machine.hardware import COMMAND_BUFFER_VARIABLE, kernels_per_buffer, limit_command_buffers
from tests.support.tiny_chat import write_chat_model


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_BUFFER_VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(COMMAND_BUFFER_VARIABLE)


@pytest.fixture
def _mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "sys", SimpleNamespace(platform="darwin"))


def test_ten_buffers_hold_less_than_a_step_of_few_layers() -> None:
    for layers in (16, 28, 36, 64):
        assert 10 * kernels_per_buffer(layers) < 11 * layers
    assert kernels_per_buffer(1) == 8
    assert kernels_per_buffer(80) == 40


@pytest.mark.usefixtures("_mac")
def test_a_command_buffer_limit_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_command_buffers(16)
    assert os.environ[COMMAND_BUFFER_VARIABLE] == "14"
    monkeypatch.setenv(COMMAND_BUFFER_VARIABLE, "99")
    limit_command_buffers(16)
    assert os.environ[COMMAND_BUFFER_VARIABLE] == "99"


def test_command_buffers_are_limited_on_macs_only() -> None:
    limit_command_buffers(16)
    assert COMMAND_BUFFER_VARIABLE not in os.environ


@pytest.mark.usefixtures("_mac")
def test_the_command_buffer_limit_is_set_before_memory_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check asks MLX for its device, which reads the variable once."""
    seen = list[str | None]()
    budget = memory.budget
    monkeypatch.setattr(memory, "budget", lambda: seen.append(os.environ.get(COMMAND_BUFFER_VARIABLE)) or budget())
    load_model(write_chat_model(tmp_path / "model"), name="tiny", context=64)
    assert seen
    assert None not in seen


@pytest.mark.usefixtures("_mac")
def test_device_info_sets_the_command_buffer_limit_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` asks for the machine before a model is known."""
    seen = list[str | None]()
    info = mx.device_info
    monkeypatch.setattr(
        mx, "device_info", lambda *device: seen.append(os.environ.get(COMMAND_BUFFER_VARIABLE)) or info(*device)
    )
    hardware.machine.__wrapped__()
    assert seen == [str(kernels_per_buffer(16))]
