"""Checkpoints as transformers 5 writes them, against the logits it gave: see `record_transformers`."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.ops import native
from tests.parity.record_transformers import LENGTHS, RECORDED, TOKENS, weight
from tests.support.alone import new_cache
from tests.support.foreign import write_tensors
from tests.support.tiny import load_decoder

pytestmark = pytest.mark.peer
# What headrace has a decoder of its own for.
OWN = {"phi3", "phi3-longrope", "phi3-window", "phi4-mini", "llama-longrope", "llama-yarn", "gemma3_text", "ministral"}
OWN |= {"glm", "granitemoe", "phi", "stablelm", "cohere2_moe", "cohere2_moe-rms"}
OWN |= {"gemma3n_text", "gemma4-per-layer", "gemma4-shared", "gemma4-mixture", "gemma4-nested"}
OWN |= {"apertus", "deepseek_v2", "deepseek_v2-groups", "llama4_text", "llama4_text-dense", "llama4-nested"}
OWN |= {"gemma3-nested", "mistral3-nested", "mllama-nested", "pixtral-nested", "qwen3_vl-nested", "qwen2_5_vl-nested"}
if native.status().available:
    OWN |= {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_5_moe-nested", "qwen3_next", "lfm2_moe", "granite-hybrid"}
    OWN |= {"kimi-linear", "olmo-hybrid", "olmo-hybrid-rope", "nemotron-h", "nemotron-h-moe"}
CASES: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    values = {key: weight(key, shape) for key, shape in case["tensors"].items()}
    tensors = {key: (array, "I64" if array.dtype == np.int64 else "F32") for key, array in values.items()}
    checkpoint = open_checkpoint(write_tensors(tmp_path, tensors, case["config"]))
    config = own_decoder(checkpoint)
    assert config is not None or name not in OWN
    recurrent = config is not None and any(layer.mixer for layer in config.layers)
    tolerance = 2e-3 if recurrent else 1e-4  # the kernels, which alone keep recurrent state, round to 16 bits
    network: Any = load_decoder(tmp_path) if config else MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu)
    for count, expected in zip(LENGTHS, case["logits"], strict=True):
        cache = new_cache(network, 32)
        cache.reserve(count)
        logits = network.logits(network.layers(network.embed(mx.array([TOKENS[:count]])), cache))
        assert np.abs(np.array(logits)[0, :12] - expected).max() < tolerance * max(1.0, np.abs(expected).max())
