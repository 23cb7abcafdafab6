"""Checkpoints as transformers 5 writes them, against the logits it gave: see `record_transformers`."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import checkpoint_cost
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.ops import native, reference
from tests.parity.record_transformers import LENGTHS, RECORDED, STEPS, TOKENS, prompts_of, weight
from tests.support.alone import new_cache
from tests.support.foreign import write_tensors
from tests.support.tiny import load_decoder

pytestmark = pytest.mark.peer
# What headrace has a decoder of its own for.
OWN = {"phi3", "phi3-longrope", "phi3-window", "phi4-mini", "llama-longrope", "llama-yarn", "gemma3_text", "ministral"}
OWN |= {"glm", "granitemoe", "phi", "stablelm", "cohere2_moe", "cohere2_moe-rms"}
OWN |= {"gemma3n_text", "gemma4-per-layer", "gemma4-shared", "gemma4-mixture", "gemma4-nested"}
OWN |= {"apertus", "deepseek_v2", "deepseek_v2-groups", "llama4_text", "llama4_text-dense", "llama4-nested"}
OWN |= {"hy_v3", "hy_v3-biased", "hunyuan_vl-nested", "sarvam_moe", "sarvam_mla", "bitnet"}
OWN |= {"gemma3-nested", "mistral3-nested", "mllama-nested", "pixtral-nested", "qwen3_vl-nested", "qwen2_5_vl-nested"}
if native.status().available:
    OWN |= {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_5_moe-nested", "qwen3_next", "lfm2_moe", "granite-hybrid"}
    OWN |= {"kimi-linear", "olmo-hybrid", "olmo-hybrid-rope", "nemotron-h", "nemotron-h-moe"}
CASES: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())


# name -> keys as the maker's own program has them, in place of those that transformers saves
PUBLISHED: dict[str, dict[str, Any]] = {
    "hy_v3": {"mlp_layer_types": None, "first_k_dense_replace": 1, "route_norm": True, "qk_norm": True},
    "sarvam_moe": {
        "n_routed_experts": None, "n_shared_experts": None, "num_experts": 8, "num_shared_experts": 1,
        "attention_bias": None, "use_qkv_bias": True, "rope_parameters": None, "rope_theta": 10000.0,
    },
    "sarvam_mla": {
        "n_routed_experts": None, "n_shared_experts": None, "num_experts": 8, "num_shared_experts": 1, "head_dim": 48,
        "q_head_dim": 48, "rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {
            "type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        },
    },
    "hunyuan_vl-nested": {  # flat
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "attention_head_dim": 32, "vocab_size": 96, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "text_config": None,
        "rope_scaling": {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [4, 4, 4, 4]},
    },
}  # fmt: skip


def write_case(
    directory: Path, case: dict[str, Any], stated: dict[str, Any] | None = None, *, half: bool = False
) -> Path:
    """Write a case's checkpoint.

    stated: entries of its config to change; None takes an entry out.
    half: its weights are rounded to float16, but for corrections of routers.
    """
    stated = stated or {}
    config = {key: value for key, value in case["config"].items() if key not in stated}
    config |= {key: value for key, value in stated.items() if value is not None}
    types = {np.dtype(np.int64): "I64", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
    values = {key: weight(key, shape) for key, shape in case["tensors"].items()}
    if half:
        exact = ("expert_bias", "e_score_correction_bias")
        values = {key: array if key.endswith(exact) else array.astype(np.float16) for key, array in values.items()}
    tensors = {key: (array, types[array.dtype]) for key, array in values.items()}
    return write_tensors(directory, tensors, config)


def last_logits(network: Any, count: int) -> np.ndarray[Any, Any]:
    cache = new_cache(network, 32)
    cache.reserve(count)
    return np.array(network.logits(network.layers(network.embed(mx.array([TOKENS[:count]])), cache)))[0, :12]


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    checkpoint = open_checkpoint(write_case(tmp_path, case))
    config = own_decoder(checkpoint)
    assert config is not None or name not in OWN
    recurrent = config is not None and any(layer.mixer for layer in config.layers)
    tolerance = 2e-3 if recurrent else 1e-4  # the kernels, which alone keep recurrent state, round to 16 bits
    network: Any = load_decoder(tmp_path) if config else MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu)
    for count, expected in zip(LENGTHS, case["logits"], strict=True):
        logits = last_logits(network, count)
        assert np.abs(logits - expected).max() < tolerance * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_the_logits_of_converted_ones(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    network = load_decoder(write_case(tmp_path, case, PUBLISHED[name]))
    expected = case["logits"][-1]
    logits = last_logits(network, LENGTHS[-1])
    assert np.abs(logits - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "turns" in case])
def test_turns_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """A first turn, a second one on its prefix and an edited one."""
    case = CASES[name]
    engine = Engine(load_decoder(write_case(tmp_path, case)), context_limit=128, keep_prefix=True)
    for prompt, expected in zip(prompts_of(case["turns"][0]), case["turns"], strict=True):
        events = engine.generate(Request(prompt, max_tokens=STEPS, speculate="off"))
        assert [token for event in events if isinstance(event, Step) for token in event.tokens] == expected


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "turns" in case])
def test_costs_of_a_header_are_those_of_its_arrays(tmp_path: Path, name: str) -> None:
    directory = write_case(tmp_path, CASES[name], half=True)
    assert checkpoint_cost(open_checkpoint(directory)) == load_decoder(directory, reference, mx.float16).cost
