"""Quantized copies of plain checkpoints in the store."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as load_mlx_lm
from mlx_lm.utils import quantize_model

from headrace.models.checkpoint.quantization import Quantization
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.keep_quantized import keep_quantized
from headrace.models.loading.load import load_model
from headrace.models.registry.resolve import resolve
from headrace.runtime.errors import UsageError
from tests.support import mtp_models
from tests.support.alone import new_cache
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny_chat import write_chat_model


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return write_chat_model(tmp_path / "tiny")


def logits(directory: Path) -> mx.array:
    network = load_model(directory, name="tiny").network
    cache = new_cache(network, 64)
    cache.reserve(3)
    return network.logits(network.layers(network.embed(mx.array([[1, 2, 3]])), cache))


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64), (3, 32)])
def test_the_copy_has_the_weights_of_mlx_lms_converter(plain: Path, bits: int, group_size: int) -> None:
    kept = keep_quantized(resolve(str(plain)), Quantization(bits, group_size))
    assert kept.name == f"tiny-{bits}bit"
    assert resolve(kept.name, fetch=False).path == kept.path
    assert json.loads((kept.path / "config.json").read_text())["quantization"]["bits"] == bits
    wanted, config = load_mlx_lm(plain)
    wanted, _ = quantize_model(wanted, config, group_size, bits)
    assert mx.allclose(logits(kept.path), wanted(mx.array([[1, 2, 3]]))[:, -1], atol=1e-2)


def test_routers_of_experts_and_streams_stay_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    routers = {  # as each family stores them
        "glm4-moe": "mlp.gate",
        "gemma3n": "altup.modality_router",
        "gemma4-mixture": "router.proj",
        "ling": "mlp.gate.gate_proj",
        "laguna": "mlp.gate.proj",
    }
    for variant, router in routers.items():
        model = write_mlx_lm_model(tmp_path / variant, config_of(variant))
        kept = open_checkpoint(keep_quantized(resolve(str(model)), Quantization(4, 32)).path).tensors
        modules = {name.rpartition(".")[0] for name in kept if name.endswith(".scales")}
        assert modules
        assert any(name.endswith(f".{router}.weight") for name in kept)
        assert not any(module.endswith(f".{router}") for module in modules)


def test_the_router_of_a_prediction_head_stays_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    mtp_models.write_model(tmp_path / "headed", "deepseek_v3")
    kept = open_checkpoint(keep_quantized(resolve(str(tmp_path / "headed")), Quantization(4, 32)).path).tensors
    head = "model.layers.2.mlp"
    assert f"{head}.gate.weight" in kept
    assert f"{head}.gate.scales" not in kept
    assert f"{head}.shared_experts.up_proj.scales" in kept


def test_a_quantized_checkpoint_is_refused(plain: Path) -> None:
    kept = keep_quantized(resolve(str(plain)), Quantization(4, 32), name="once")
    with pytest.raises(UsageError, match="quantized already"):
        keep_quantized(resolve(kept.name, fetch=False), Quantization(4, 32))


def test_progress_counts_every_byte(plain: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    keep_quantized(
        resolve(str(plain)), Quantization(4, 32), progress=lambda stage, done, total: seen.append((stage, done, total))
    )
    last = [entry for entry in seen if entry[0] == "quantizing"][-1]
    assert last[1] == last[2]
