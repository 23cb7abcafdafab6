"""Memory besides weights and K/V: sums by hand, and a process with the default model."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import loaded_weight_bytes, shape_to_run, working_memory
from headrace.models.cost.shape_sources import shape_of_config
from headrace.runtime import ops
from headrace.runtime.engine.prompt_chunks import LARGEST
from headrace.runtime.machine import memory
from headrace.runtime.ops import attention, native, reference
from tests.conftest import TEST_HOME
from tests.support.tiny import config_of, load_decoder, quantize_model, write_model

_E = 2048
_F = 8192
_H = 32
_D = 64
_V = 128256
_LLAMA = {
    **config_of("llama"), "hidden_size": _E, "intermediate_size": _F, "num_attention_heads": _H, "head_dim": _D,
    "num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": _V,
    "quantization": {"group_size": 64, "bits": 4},
}  # fmt: skip
_SCRIPT = """
import json
from headrace.runtime.engine import prompt_chunks
from headrace.runtime.ops.kv_format import kv_format
from tests.soak.memory import predicted_memory
prompt_chunks.FIRST, prompt_chunks.TARGET_S = 512, 1e6  # as on a machine that is fast enough
print(json.dumps(predicted_memory(None, {context}, kv_format({kv!r}))))
"""
natively = pytest.mark.skipif(not native.status().available, reason="the kernels were not built")


@natively
def test_working_memory_equals_the_sum_by_hand() -> None:
    program = 42_000_000 + 300 * _V
    row = 4 * (4 * _E + 3 * _F + 3 * _H * _D)
    assert working_memory(shape_of_config(_LLAMA), on_gpu=False) == program + 512 * row
    on_gpu = working_memory(shape_of_config(_LLAMA), on_gpu=True)
    assert on_gpu == program + 58_000_000 + 2048 * row + memory.CACHE_LIMIT


def test_heads_without_a_fused_kernel_keep_scores_on_a_gpu() -> None:
    shape = shape_of_config(_LLAMA)
    scores = 2 * attention.SCORES[mx.DeviceType.gpu]
    for size in (64, 128, 192, 256, 48):
        ours, wider = (
            working_memory(replace(shape, head_dim=_D, heads=_H * wide), on_gpu=True) for wide in (1, size / _D)
        )
        more = working_memory(replace(shape, head_dim=size), on_gpu=True) - ours
        assert more - (wider - ours) == (0 if size in attention.FUSED else scores)


@natively
def test_experts_count_by_active_and_read_ones() -> None:
    count = 64
    active = 8
    size = 512
    mixture = {
        "model_type": "qwen3_moe", "num_experts": count, "num_experts_per_tok": active, "moe_intermediate_size": size,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    }  # fmt: skip
    program = 42_000_000 + 300 * _V
    row = 4 * (4 * _E + 3 * _H * _D + active * (2 * size + _E * 5 // 4))
    shape = shape_of_config({**_LLAMA, **mixture})
    assert working_memory(shape, on_gpu=False) == program + 512 * row
    stack = count * 4 * size * _E * 9 // 16  # of four times as many, a layer's are more than a chunk's rows
    many = shape_of_config({**_LLAMA, **mixture, "num_experts": 4 * count})
    assert working_memory(many, on_gpu=False) == program + memory.LOADING_CACHE_LIMIT + stack + 100 * _V


def test_rows_are_those_of_the_largest_chunk() -> None:
    shape = shape_of_config({**_LLAMA, "intermediate_size": 40_000})
    wider = shape_of_config({**_LLAMA, "intermediate_size": 50_000})
    for device, rows in LARGEST.items():
        on_gpu = device.name == "gpu"
        more = working_memory(wider, on_gpu=on_gpu) - working_memory(shape, on_gpu=on_gpu)
        assert more == rows * 4 * 3 * 10_000


def test_stock_operations_on_a_cpu_keep_scores_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_to_run(open_checkpoint(write_model(tmp_path, "llama")))
    stock = working_memory(replace(shape, stock=True), on_gpu=False)
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    assert working_memory(shape, on_gpu=False) == stock
    if native.status().available:
        monkeypatch.setattr(ops, "select", lambda: native)
        assert working_memory(shape, on_gpu=False) < stock


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_stock_operations_on_a_cpu_hold_floats_as_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype
) -> None:
    plain = write_model(tmp_path / "plain", "llama", dtype=dtype)
    for directory in (plain, quantize_model(plain, tmp_path / "quantized")):
        monkeypatch.setenv("HEADRACE_KERNELS", "reference")
        checkpoint = open_checkpoint(directory)
        arrays = load_decoder(directory, reference, mx.float32).arrays
        shape = shape_to_run(checkpoint)
        assert loaded_weight_bytes(checkpoint, shape) == sum(array.nbytes for array in arrays)
        if native.status().available:
            monkeypatch.setattr(ops, "select", lambda: native)
            assert loaded_weight_bytes(checkpoint, shape) == checkpoint.nbytes
            monkeypatch.undo()


@pytest.mark.real
@natively
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are of Linux processes")
@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize(("context", "kv"), [(640, "f16"), pytest.param(4096, "q8", marks=pytest.mark.nightly)])
def test_memory_use_is_as_predicted(context: int, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(TEST_HOME))
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    script = _SCRIPT.format(context=context, kv=kv)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    predicted, peak = json.loads(said.stdout)
    assert predicted == pytest.approx(peak, rel=0.08)  # in half of the runs 11 MB of buffers more are alive at once
