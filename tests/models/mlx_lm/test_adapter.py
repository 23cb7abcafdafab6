"""Adapters on mlx-lm's classes: the logits of merged weights, and those of mlx-lm's own loader for quantized ones."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from headrace.models.checkpoint.adapter import open_adapter
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime import ops
from headrace.runtime.errors import UnsupportedModelError
from tests.models.mlx_lm.test_network import CONFIGS, PROMPT, write
from tests.support.adapters import write_adapter, write_merged
from tests.support.tiny import quantize_model

pytestmark = pytest.mark.peer

needs_kernels = pytest.mark.skipif(not ops.native.status().available, reason="the native kernels are not built here")
ATTENTION = ("self_attn.q_proj", "self_attn.o_proj")


def network(directory: Path, adapter: Path | None = None, *, kernels: bool = False) -> MlxLmNetwork:
    checkpoint = open_checkpoint(directory)
    if adapter is not None:
        checkpoint = replace(checkpoint, adapter=open_adapter(adapter))
    made = MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu, kernels=ops.native if kernels else None)
    return made.use_kernels()


def logits(made: MlxLmNetwork) -> mx.array:
    return made.model(mx.array([PROMPT]))[0, -1]


def distance(ours: mx.array, theirs: mx.array) -> float:
    return float((mx.abs(ours - theirs).max() / mx.abs(theirs).max()).item())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["peft", "mlx-lm"])
@pytest.mark.parametrize("name", ["olmo2", "cohere2"])
def test_an_adapter_of_a_plain_class_is_merged(tmp_path: Path, name: str, kind: Any) -> None:
    (tmp_path / "base").mkdir()
    base = write(tmp_path / "base", CONFIGS[name])
    changes = write_adapter(tmp_path / "adapter", base, kind, ATTENTION)
    merged = write_merged(tmp_path / "merged", base, changes)
    with_adapter = logits(network(base, tmp_path / "adapter"))
    assert distance(with_adapter, logits(network(merged))) < 1e-5
    assert distance(with_adapter, logits(network(base))) > 0.01


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
def test_a_quantized_class_has_the_logits_of_mlx_lms_own_loader(tmp_path: Path, kernels: bool) -> None:
    from mlx_lm.tuner.utils import load_adapters

    (tmp_path / "base").mkdir()
    base = write(tmp_path / "base", CONFIGS["olmo2"])
    write_adapter(tmp_path / "adapter", base, "mlx-lm", ATTENTION)
    quantized = quantize_model(base, tmp_path / "quantized")
    plain = network(quantized)
    adapted = network(quantized, tmp_path / "adapter", kernels=kernels)
    ours = logits(adapted)
    assert adapted.cost.weight_bytes > network(quantized, kernels=kernels).cost.weight_bytes
    before = logits(plain)
    theirs = load_adapters(plain.model, str(tmp_path / "adapter"))
    assert distance(ours, theirs(mx.array([PROMPT]))[0, -1]) < (2e-3 if kernels else 1e-5)
    assert distance(ours, before) > 0.01


def test_changes_of_what_a_class_lacks_or_has_in_another_form_are_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base = write(tmp_path / "base", CONFIGS["olmo2"])
    write_adapter(tmp_path / "table", base, modules=("embed_tokens",))
    with pytest.raises(UnsupportedModelError, match="embed_tokens"):
        network(base, tmp_path / "table")
    write_adapter(tmp_path / "other", base, modules=ATTENTION, rename=lambda name: name.replace("q_proj", "query"))
    with pytest.raises(UnsupportedModelError, match="query, which the model does not have"):
        network(base, tmp_path / "other")


def test_changes_of_weights_that_a_class_scales_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models.olmo2 import Model

    def doubled(_: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {name: 2 * array if "q_proj" in name else array for name, array in weights.items()}

    (tmp_path / "base").mkdir()
    base = write(tmp_path / "base", CONFIGS["olmo2"])
    write_adapter(tmp_path / "peft", base, "peft", ATTENTION)
    write_adapter(tmp_path / "mlx-lm", base, "mlx-lm", ATTENTION)
    monkeypatch.setattr(Model, "sanitize", doubled, raising=False)
    with pytest.raises(UnsupportedModelError, match=r"q_proj, which mlx-lm's class of \w+ has in another form"):
        network(base, tmp_path / "peft")
    network(base, tmp_path / "mlx-lm")
