"""Adapters with random weights, in the folders of PEFT and of mlx-lm; logits of a network."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.prefill import prefill
from headrace.runtime.kv.backend import KVOptions, one_pass

RANK = 4
SCALE = 2.0
EVERY = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def write_adapter(
    directory: Path,
    base: Path,
    kind: Literal["peft", "mlx-lm"] = "peft",
    modules: Sequence[str] = EVERY,
    settings: Mapping[str, Any] | None = None,
    size: float = 0.05,
    rename: Callable[[str], str] = lambda module: module,
    rank: int = RANK,
) -> dict[str, mx.array]:
    """Write an adapter of the plain model in `base`; return the changes scale * B A by the name of the weight.

    modules: of each layer. settings: further ones of its config. rename: a module's name in the adapter.
    """
    weights = mx.load(str(base / "model.safetensors"))
    assert isinstance(weights, dict)
    names = sorted(name for name in weights if any(name.endswith(f".{module}.weight") for module in modules))
    key = mx.random.key(7)
    tensors = {}
    changes = {}
    for name in names:
        rows, columns = weights[name].shape
        key, of_a, of_b = mx.random.split(key, 3)
        a = size * mx.random.normal((rank, columns), key=of_a)
        b = mx.random.normal((rows, rank), key=of_b)
        module = rename(name.removesuffix(".weight"))
        if kind == "peft":
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
        else:
            tensors[f"{module}.lora_a"] = a.T
            tensors[f"{module}.lora_b"] = b.T
        changes[name] = SCALE * b @ a
    directory.mkdir(parents=True)
    config: dict[str, Any]
    if kind == "peft":
        file = "adapter_model.safetensors"
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank, "base_model_name_or_path": "org/base"}
        config |= {"target_modules": [module.rpartition(".")[2] for module in modules], "bias": "none"}
    else:
        file = "adapters.safetensors"
        parameters = {"rank": rank, "scale": SCALE, "dropout": 0.0, "keys": list(modules)}
        config = {"fine_tune_type": "lora", "num_layers": 16, "model": "org/base", "lora_parameters": parameters}
    mx.save_safetensors(str(directory / file), {name: mx.contiguous(tensor) for name, tensor in tensors.items()})
    (directory / "adapter_config.json").write_text(json.dumps({**config, **(settings or {})}))
    return changes


def write_merged(directory: Path, base: Path, changes: Mapping[str, mx.array]) -> Path:
    """Write the plain model in `base` with the changes added to its weights."""
    weights = mx.load(str(base / "model.safetensors"))
    assert isinstance(weights, dict)
    merged = {name: array + changes[name] if name in changes else array for name, array in weights.items()}
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "model.safetensors"), merged)
    (directory / "config.json").write_text((base / "config.json").read_text())
    return directory


def logits_after(network: Decoder, prompt: list[int]) -> mx.array:
    """Return the logits after a prompt, the last token of which is decoded."""
    kv = network.kv_backend(KVOptions(64))
    cache = kv.acquire([0])
    for _ in prefill(network, kv, cache, prompt[:-1]):
        pass
    kv_pass = one_pass(kv, cache, 1, "decode")
    logits = network.logits(network.layers(network.embed(mx.array([prompt[-1:]])), kv_pass))
    mx.eval(logits)
    return logits
