"""Tiny GGUF files of architectures whose layers differ, with tensors as llama.cpp's converter stores them.

llama.cpp's recorded answers (`llama_cpp_layered.json`) were computed on them, so none may change without recording
again: `python -m tests.parity.record_llama_cpp layered`.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.gguf_models import VOCABULARIES, Weights, add_vocabulary, llama3_factors, random_blocks

Shapes = dict[str, tuple[int, ...]]
HIDDEN = 64
INNER = 96
VOCAB = len(VOCABULARIES["byte_level"]["tokens"])


def _norms(*names: str, size: int = HIDDEN) -> Shapes:
    return {f"{name}.weight": (size,) for name in names}


def _attention(heads: int = 4, kv_heads: int = 2, head: int = 16, gate: int = 1) -> Shapes:
    return {
        "attn_q.weight": (heads * head * gate, HIDDEN), "attn_k.weight": (kv_heads * head, HIDDEN),
        "attn_v.weight": (kv_heads * head, HIDDEN), "attn_output.weight": (HIDDEN, heads * head),
    }  # fmt: skip


def _head_norms(head: int = 16) -> Shapes:
    return _norms("attn_q_norm", "attn_k_norm", size=head)


def _mlp(inner: int = INNER) -> Shapes:
    return {"ffn_gate.weight": (inner, HIDDEN), "ffn_up.weight": (inner, HIDDEN), "ffn_down.weight": (HIDDEN, inner)}


def _experts(count: int = 4, width: int = 32, shared: int = 0) -> Shapes:
    found: Shapes = {
        "ffn_gate_inp.weight": (count, HIDDEN), "ffn_gate_exps.weight": (count, width, HIDDEN),
        "ffn_up_exps.weight": (count, width, HIDDEN), "ffn_down_exps.weight": (count, HIDDEN, width),
    }  # fmt: skip
    if shared:
        found |= {
            "ffn_gate_shexp.weight": (shared, HIDDEN), "ffn_up_shexp.weight": (shared, HIDDEN),
            "ffn_down_shexp.weight": (HIDDEN, shared),
        }  # fmt: skip
    return found


def _biased(shapes: Shapes, *names: str) -> Shapes:
    return shapes | {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in names}


def _delta(keys: int = 2, values: int = 4, size: int = 32) -> Shapes:
    mixed = (2 * keys + values) * size
    inner = values * size
    return {
        "attn_qkv.weight": (mixed, HIDDEN), "attn_gate.weight": (inner, HIDDEN), "ssm_conv1d.weight": (mixed, 4),
        "ssm_dt.bias": (values,), "ssm_a": (values,), "ssm_beta.weight": (values, HIDDEN),
        "ssm_alpha.weight": (values, HIDDEN), "ssm_norm.weight": (size,), "ssm_out.weight": (HIDDEN, inner),
    }  # fmt: skip


def _mamba(heads: int = 4, head: int = 32, groups: int = 1, state: int = 16, norm: bool = True) -> Shapes:
    inner = heads * head
    mixed = heads * head + 2 * groups * state
    return {
        "ssm_in.weight": (inner + mixed + heads, HIDDEN), "ssm_conv1d.weight": (mixed, 4), "ssm_conv1d.bias": (mixed,),
        "ssm_dt.bias": (heads,), "ssm_a": (heads, 1), "ssm_d": (heads, 1), "ssm_out.weight": (HIDDEN, inner),
        **({"ssm_norm.weight": (groups, inner // groups)} if norm else {}),
    }  # fmt: skip


def _rwkv(value_rank: int = 32) -> Shapes:
    """Tensors of an RWKV-7 layer; the first has those of shared values, too, which no model reads."""
    square = (HIDDEN, HIDDEN)
    ranks = {"w": 16, "a": 16, "v": value_rank, "g": 48}
    found = _biased(_norms("attn_norm", "attn_norm_2", "time_mix_ln"), "attn_norm", "attn_norm_2", "time_mix_ln")
    found |= {f"time_mix_{name}.weight": (HIDDEN,) for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k")}
    found |= {f"time_mix_{name}.weight": square for name in ("receptance", "key", "value", "output")}
    for letter, rank in ranks.items():
        found |= {f"time_mix_{letter}1.weight": (rank, HIDDEN), f"time_mix_{letter}2.weight": (HIDDEN, rank)}
    return {
        **found, "time_mix_lerp_fused.weight": (6, 1, 1, HIDDEN), "channel_mix_lerp_k.weight": (1, 1, HIDDEN),
        "channel_mix_key.weight": (INNER, HIDDEN), "channel_mix_value.weight": (HIDDEN, INNER),
    }  # fmt: skip


def _layers(
    *layers: Shapes, tied: bool = False, norm: str = "output_norm.weight", **outside: tuple[int, ...]
) -> Shapes:
    found: Shapes = {"token_embd.weight": (VOCAB, HIDDEN), norm: (HIDDEN,)}
    found |= {} if tied else {"output.weight": (VOCAB, HIDDEN)}
    for number, layer in enumerate(layers):
        found |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    return found | {name.replace("__", "."): shape for name, shape in outside.items()}


_ATTENTION_KEYS: dict[str, Any] = {
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16,
    "feed_forward_length": INNER, "rope.freq_base": 10000.0,
}  # fmt: skip
_DELTA_KEYS: dict[str, Any] = {
    **_ATTENTION_KEYS, "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0], "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "ssm.inner_size": 128, "full_attention_interval": 4,
}  # fmt: skip
_EXPERT_KEYS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_SHARED_KEYS: dict[str, Any] = {**_EXPERT_KEYS, "expert_shared_feed_forward_length": 48}
_MAMBA_KEYS: dict[str, Any] = {
    **_ATTENTION_KEYS, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
}  # fmt: skip
_NEMOTRON_KEYS = {**_MAMBA_KEYS, "attention.layer_norm_epsilon": 1e-5}
_POST = ("attn_norm", "post_attention_norm")
_GROK = ("attn_norm", "attn_output_norm", "ffn_norm")
_SHARED_GATE: Shapes = {"ffn_gate_inp_shexp.weight": (HIDDEN,)}
_QWEN_ATTENTION = {**_norms(*_POST), **_attention(head=32, gate=2), **_head_norms(32)}
_QWEN_MIXED = {**_experts(shared=48), **_SHARED_GATE}
_NEXT_DELTA = {
    **{name: shape for name, shape in _delta().items() if name not in ("ssm_beta.weight", "ssm_alpha.weight")},
    "ssm_ba.weight": (8, HIDDEN),
}  # fmt: skip
_GEMMA_NORMS = _norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm") | {
    "layer_output_scale.weight": (1,)
}
_GEMMA_KEYS: dict[str, Any] = {
    "attention.head_count": 4, "attention.key_length": 32, "attention.value_length": 32,
    "attention.key_length_swa": 16, "attention.value_length_swa": 16, "attention.sliding_window": 12,
    "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA_EXPERTS: Shapes = {
    "ffn_gate_inp.weight": (4, HIDDEN), "ffn_gate_inp.scale": (HIDDEN,), "ffn_gate_up_exps.weight": (4, 64, HIDDEN),
    "ffn_down_exps.weight": (4, HIDDEN, 32), "ffn_down_exps.scale": (4,),
    **_norms("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"),
}  # fmt: skip
_INPUTS: Shapes = {"inp_gate.weight": (16, HIDDEN), "proj.weight": (HIDDEN, 16), "post_norm.weight": (HIDDEN,)}


def _gemma(full: bool, shared: bool = False, v: bool = True, kv_heads: int = 2, **more: Shapes) -> Shapes:
    head = 32 if full else 16
    found = {
        **_GEMMA_NORMS,
        **_attention(kv_heads=kv_heads, head=head),
        **_head_norms(head),
        **_mlp(2 * INNER if shared else INNER),
    }
    if shared:
        found = {name: shape for name, shape in found.items() if "attn_k" not in name and "attn_v" not in name}
    if not v:
        del found["attn_v.weight"]
    for shapes in more.values():
        found |= shapes
    return found


_LFM_NORMS = _norms("attn_norm", "ffn_norm")
_FALCON_NORMS: Shapes = {**_norms("attn_norm"), "ffn_norm": (HIDDEN,)}
_CONV: Shapes = {
    "shortconv.in_proj.weight": (3 * HIDDEN, HIDDEN), "shortconv.conv.weight": (HIDDEN, 3),
    "shortconv.out_proj.weight": (HIDDEN, HIDDEN),
}  # fmt: skip
_LFM_ATTENTION = {**_LFM_NORMS, **_attention(), **_head_norms()}
_SCORES: Shapes = {"exp_probs_b.bias": (4,)}
_GRANITE_KEYS: dict[str, Any] = {
    **_MAMBA_KEYS, "attention.scale": 0.2, "embedding_scale": 4.0, "residual_scale": 0.5, "logit_scale": 6.0,
    "rope.scaling.finetuned": False,
}  # fmt: skip
_ROUTED_KEYS: dict[str, Any] = {
    **_EXPERT_KEYS, "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_norm": True,
    "expert_weights_scale": 1.5, "expert_gating_func": 2,
}  # fmt: skip
_MLA: Shapes = {
    **_norms("attn_norm", "ffn_norm"), "attn_q_a.weight": (24, HIDDEN), "attn_q_a_norm.weight": (24,),
    "attn_q_b.weight": (4 * 24, 24), "attn_kv_a_mqa.weight": (32 + 8, HIDDEN), "attn_kv_a_norm.weight": (32,),
    "attn_k_b.weight": (4, 32, 16), "attn_v_b.weight": (4, 16, 32), "attn_output.weight": (HIDDEN, 4 * 16),
}  # fmt: skip
_MLA_KEYS: dict[str, Any] = {
    **_ATTENTION_KEYS, **_ROUTED_KEYS, "attention.head_count_kv": 1, "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 32, "attention.key_length": 40, "attention.value_length": 32,
    "attention.key_length_mla": 24, "attention.value_length_mla": 16, "rope.dimension_count": 8,
}  # fmt: skip
_DSA: Shapes = {
    **_MLA, "indexer.attn_q_b.weight": (32 * 64, 24), "indexer.attn_k.weight": (64, HIDDEN),
    "indexer.proj.weight": (32, HIDDEN), "indexer.k_norm.weight": (64,), "indexer.k_norm.bias": (64,),
}  # fmt: skip
_INDEXER_KEYS: dict[str, Any] = {
    "attention.indexer.head_count": 32, "attention.indexer.key_length": 64, "attention.indexer.top_k": 8,
    "attention.layer_norm_epsilon": 1e-6, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
_GEMMA3N: Shapes = {
    **_norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "altup_router_norm", "laurel_post_norm"),
    "inp_gate.weight": (256, HIDDEN), "proj.weight": (HIDDEN, 256), "post_norm.weight": (HIDDEN,),
    "altup_correct_coef.weight": (4, 4), "altup_correct_scale.weight": (HIDDEN,), "altup_predict_coef.weight": (16, 4),
    "altup_router.weight": (4, HIDDEN), "laurel_l.weight": (64, HIDDEN), "laurel_r.weight": (HIDDEN, 64),
}  # fmt: skip
_MLA_AT_ONCE = {name: shape for name, shape in _MLA.items() if "attn_q_" not in name} | {"attn_q.weight": (96, HIDDEN)}
_KDA: Shapes = {
    **_norms("attn_norm", "ffn_norm"), **{f"attn_{name}.weight": (4 * 32, HIDDEN) for name in "qkv"},
    **{f"ssm_conv1d_{name}.weight": (1, 4 * 32, 1, 4) for name in "qkv"}, "ssm_beta.weight": (4, HIDDEN),
    **{f"ssm_{name}_a.weight": (32, HIDDEN) for name in "fg"}, "ssm_a": (1, 1, 4, 1), "ssm_dt.bias": (4 * 32,),
    **{f"ssm_{name}_b.weight": (4 * 32, 32) for name in "fg"}, **_norms("ssm_norm", size=32),
    "attn_output.weight": (HIDDEN, 4 * 32),
}  # fmt: skip
_RESIDUALS = _norms("attn_res_score", "ffn_res_score")
_KDA3: Shapes = {
    **{name: shape for name, shape in _KDA.items() if not name.startswith("ssm_g_")}, "ssm_a": (4,),
    "ssm_g.weight": (4 * 32, HIDDEN), **_RESIDUALS,
}  # fmt: skip
_MLA3: Shapes = {
    **_MLA, "attn_q_b.weight": (4 * 32, 24), "attn_kv_a_mqa.weight": (32 + 16, HIDDEN),
    "attn_gate.weight": (4 * 16, HIDDEN), **_RESIDUALS,
}  # fmt: skip
_LATENT_EXPERTS: Shapes = {
    **_experts(shared=32), "ffn_gate_exps.weight": (4, 32, 32), "ffn_up_exps.weight": (4, 32, 32),
    "ffn_down_exps.weight": (4, 32, 32), "ffn_routed_down.weight": (32, HIDDEN),
    "ffn_routed_up.weight": (HIDDEN, 32), **_norms("ffn_routed_norm", size=32),
}  # fmt: skip
_LING3: Shapes = {
    **{name: shape for name, shape in _KDA.items() if not name.startswith(("ssm_f_", "ssm_g_"))},
    **{f"ssm_{name}_a.weight": (4 * 32, HIDDEN) for name in "fg"}, "ssm_a": (4, 1),
}  # fmt: skip
_LING3_FULL: Shapes = {**_MLA, "attn_gate.weight": (4, HIDDEN)}
_MLA_LITE: Shapes = {  # no latent of queries; K and V as one
    **{name: shape for name, shape in _MLA.items() if "attn_q_" not in name and "_b." not in name},
    "attn_q.weight": (4 * 24, HIDDEN), "attn_kv_b.weight": (4 * 32, 32),
}  # fmt: skip
_MINICPM3: Shapes = {  # K and V as one
    **{name: shape for name, shape in _MLA.items() if name not in ("attn_k_b.weight", "attn_v_b.weight")},
    "attn_kv_b.weight": (4 * 32, 32),
}  # fmt: skip
_V2_KEYS: dict[str, Any] = {
    "expert_gating_func": 1, "expert_weights_norm": False, "expert_weights_scale": 4.0, "expert_shared_count": 2,
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}  # fmt: skip
_NEMOTRON_NORM = _norms("attn_norm")
_SQUARED: Shapes = {"ffn_up.weight": (INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER)}
_NEMOTRON_EXPERTS: Shapes = {
    "ffn_gate_inp.weight": (4, HIDDEN), **_SCORES, "ffn_up_exps.weight": (4, 32, HIDDEN),
    "ffn_down_exps.weight": (4, HIDDEN, 32), "ffn_up_shexp.weight": (48, HIDDEN), "ffn_down_shexp.weight": (HIDDEN, 48),
}  # fmt: skip
_JAMBA_KEYS: dict[str, Any] = {
    "attention.head_count": 4, "feed_forward_length": INNER, "ssm.conv_kernel": 4, "ssm.state_size": 16,
    "ssm.time_step_rank": 8, "ssm.inner_size": 128,
}  # fmt: skip
_MAMBA1_KEYS = {**_JAMBA_KEYS, "attention.head_count": 0, "feed_forward_length": 0}
_MIXER1: Shapes = {
    "ssm_in.weight": (256, HIDDEN), "ssm_conv1d.weight": (128, 4), "ssm_conv1d.bias": (128,),
    "ssm_x.weight": (8 + 2 * 16, 128), "ssm_dt.weight": (128, 8), "ssm_dt.bias": (128,), "ssm_a": (128, 16),
    "ssm_d": (128,), "ssm_out.weight": (HIDDEN, 128),
}  # fmt: skip
_MAMBA1 = {**_MIXER1, **_norms("ssm_dt_norm", size=8), **_norms("ssm_b_norm", "ssm_c_norm", size=16)}
_STARCODER = {
    **_biased(_norms("attn_norm", "ffn_norm"), "attn_norm", "ffn_norm"),
    **_biased(_attention(), "attn_q", "attn_k", "attn_v", "attn_output"), **_biased(_SQUARED, "ffn_up", "ffn_down"),
}  # fmt: skip
_PHI = {
    **_biased(_norms("attn_norm"), "attn_norm"), **_biased({"attn_qkv.weight": (192, HIDDEN)}, "attn_qkv"),
    **_biased({"attn_output.weight": (HIDDEN, HIDDEN)}, "attn_output"), **_biased(_SQUARED, "ffn_up", "ffn_down"),
}  # fmt: skip

_EPSILON = {"attention.layer_norm_epsilon": 1e-5}
_LAYER_NORM = _biased(_norms("attn_norm"), "attn_norm")
_BOTH_LAYER_NORMS = _biased(_norms("attn_norm", "ffn_norm"), "attn_norm", "ffn_norm")
_WIDE_KEYS = {**_ATTENTION_KEYS, "attention.head_count_kv": 4, "feed_forward_length": 4 * HIDDEN}
_WIDE_LAYER = _biased(
    {
        "attn_qkv.weight": (3 * HIDDEN, HIDDEN), "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_up.weight": (4 * HIDDEN, HIDDEN), "ffn_down.weight": (HIDDEN, 4 * HIDDEN),
    },
    "attn_qkv", "attn_output", "ffn_up", "ffn_down",
)  # fmt: skip
_FALCON: Shapes = {
    "attn_output.weight": (HIDDEN, HIDDEN), "ffn_up.weight": (4 * HIDDEN, HIDDEN),
    "ffn_down.weight": (HIDDEN, 4 * HIDDEN),
}  # fmt: skip
_MULTI_QUERY = {**_WIDE_LAYER, "attn_qkv.weight": (HIDDEN + 32, HIDDEN), "attn_qkv.bias": (HIDDEN + 32,)}
_TOGETHER = {**_attention(4, 4), **_head_norms()}  # as many heads of keys as of queries
_AFMOE = {
    **_GEMMA_NORMS, **_attention(), **_head_norms(), "attn_gate.weight": (64, HIDDEN),
}  # fmt: skip
del _AFMOE["layer_output_scale.weight"]
_STEP = {**_LFM_NORMS, **_head_norms()}
_BAILING: Shapes = {
    "attn_qkv.weight": (128, HIDDEN), "attn_output.weight": (HIDDEN, 64), **_head_norms()
}  # fmt: skip
_MIMO: Shapes = {
    "attn_q.weight": (96, HIDDEN), "attn_k.weight": (24, HIDDEN), "attn_v.weight": (16, HIDDEN),
    "attn_output.weight": (HIDDEN, 64),
}  # fmt: skip
_PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output")
_FUSED_QKV = _biased(
    {"attn_qkv.weight": (128, HIDDEN), "attn_output.weight": (HIDDEN, HIDDEN)}, "attn_qkv"
)  # fmt: skip
_WIDE_QKV = _biased({"attn_qkv.weight": (192, HIDDEN), "attn_output.weight": (HIDDEN, HIDDEN)}, "attn_qkv")
_FUSED_MLP: Shapes = {"ffn_up.weight": (2 * INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER)}

# name -> (architecture, metadata below the architecture's name, tensors)
LAYERED: dict[str, tuple[str, dict[str, Any], Shapes]] = {
    "qwen35": (
        "qwen35", _DELTA_KEYS,
        _layers(*({**_norms(*_POST), **_delta(), **_mlp()},) * 3, {**_QWEN_ATTENTION, **_mlp()}, tied=True),
    ),
    "qwen35moe": (
        "qwen35moe", {**_DELTA_KEYS, **_SHARED_KEYS},
        _layers(*({**_norms(*_POST), **_delta(), **_QWEN_MIXED},) * 3, {**_QWEN_ATTENTION, **_QWEN_MIXED}),
    ),
    "qwen3next": (
        "qwen3next", {**_DELTA_KEYS, **_SHARED_KEYS},
        _layers(*({**_norms(*_POST), **_NEXT_DELTA, **_QWEN_MIXED},) * 3, {**_QWEN_ATTENTION, **_QWEN_MIXED}),
    ),
    "gemma4": (  # as E2B: shared K/V, wide feed-forwards, inputs per layer
        "gemma4",
        {
            **_GEMMA_KEYS, "attention.head_count_kv": 2, "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 16, "feed_forward_length": [INNER] * 3 + [2 * INNER] * 2,
            "attention.sliding_window_pattern": [True, True, False, True, False],
        },
        _layers(
            _gemma(False, i=_INPUTS), _gemma(False, i=_INPUTS), _gemma(True, i=_INPUTS),
            _gemma(False, shared=True, i=_INPUTS), _gemma(True, shared=True, i=_INPUTS), tied=True,
            per_layer_token_embd__weight=(VOCAB, 80), per_layer_model_proj__weight=(80, HIDDEN),
            per_layer_proj_norm__weight=(16,), rope_freqs__weight=(16,),
        ),
    ),
    "gemma4-mixture": (  # as 26B-A4B: values are keys in full attention, which has another count of heads
        "gemma4",
        {
            **_GEMMA_KEYS, **_EXPERT_KEYS, "attention.head_count_kv": [2, 2, 1], "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0, "feed_forward_length": INNER,
            "attention.sliding_window_pattern": [True, True, False],
        },
        _layers(
            _gemma(False, e=_GEMMA_EXPERTS), _gemma(False, e=_GEMMA_EXPERTS),
            _gemma(True, v=False, kv_heads=1, e=_GEMMA_EXPERTS), tied=True, rope_freqs__weight=(16,),
        ),
    ),
    "lfm2": (
        "lfm2", {**_ATTENTION_KEYS, "attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
        _layers(
            {**_LFM_NORMS, **_CONV, **_mlp()}, {**_LFM_ATTENTION, **_mlp()}, {**_LFM_NORMS, **_CONV, **_mlp()},
            tied=True, norm="token_embd_norm.weight",
        ),
    ),
    "lfm2moe": (
        "lfm2moe",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3,
            "leading_dense_block_count": 1, "expert_gating_func": 2,
        },
        _layers(
            {**_LFM_NORMS, **_CONV, **_mlp()}, {**_LFM_ATTENTION, **_experts(), **_SCORES},
            {**_LFM_NORMS, **_CONV, **_experts(), **_SCORES}, tied=True, norm="token_embd_norm.weight",
        ),
    ),
    "granitehybrid": (
        "granitehybrid", {**_GRANITE_KEYS, "attention.head_count_kv": [0, 2, 0]},
        _layers(
            {**_LFM_NORMS, **_mamba(), **_mlp()}, {**_LFM_NORMS, **_attention(), **_mlp()},
            {**_LFM_NORMS, **_mamba(), **_mlp()}, tied=True,
        ),
    ),
    "granitehybrid-moe": (
        "granitehybrid",
        {**_GRANITE_KEYS, **_SHARED_KEYS, "attention.head_count_kv": [0, 2], "feed_forward_length": 32},
        _layers(
            {**_LFM_NORMS, **_mamba(), **_experts(shared=48)}, {**_LFM_NORMS, **_attention(), **_experts(shared=48)},
            tied=True,
        ),
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_NEMOTRON_KEYS, "ssm.group_count": 2, "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, INNER, 0, 0],
        },
        _layers(
            {**_NEMOTRON_NORM, **_mamba(groups=2)}, {**_NEMOTRON_NORM, **_SQUARED},
            {**_NEMOTRON_NORM, **_attention()}, {**_NEMOTRON_NORM, **_mamba(groups=2)},
        ),
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        {
            **_NEMOTRON_KEYS, **_SHARED_KEYS, "ssm.group_count": 2, "attention.head_count_kv": [0, 0, 2],
            "feed_forward_length": [0, 32, 0], "expert_shared_count": 1, "expert_weights_norm": True,
            "expert_weights_scale": 2.5, "expert_group_count": 1, "expert_gating_func": 2,
        },
        _layers(
            {**_NEMOTRON_NORM, **_mamba(groups=2)}, {**_NEMOTRON_NORM, **_NEMOTRON_EXPERTS},
            {**_NEMOTRON_NORM, **_attention()},
        ),
    ),
    "falcon-h1": (
        "falcon-h1", _MAMBA_KEYS, _layers(*({**_FALCON_NORMS, **_attention(), **_mamba(norm=False), **_mlp()},) * 2),
    ),
    "mamba": (
        "mamba", {**_MAMBA1_KEYS, "ssm.dt_b_c_rms": False},
        _layers(*({**_norms("attn_norm"), **_MIXER1},) * 2, tied=True),
    ),
    "mamba-normed": (  # as Falcon Mamba
        "mamba", {**_MAMBA1_KEYS, "ssm.dt_b_c_rms": True}, _layers(*({**_norms("attn_norm"), **_MIXER1},) * 2),
    ),
    "mamba2": (
        "mamba2",
        {
            "attention.head_count": 0, "feed_forward_length": 0, "ssm.conv_kernel": 4, "ssm.state_size": 16,
            "ssm.group_count": 1, "ssm.time_step_rank": 4, "ssm.inner_size": 128,
        },
        _layers(*({**_norms("attn_norm"), **_mamba()},) * 2, tied=True),
    ),
    "mamba2-groups": (  # as Mamba-Codestral
        "mamba2",
        {
            "attention.head_count": 0, "feed_forward_length": 0, "ssm.conv_kernel": 4, "ssm.state_size": 16,
            "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 128,
        },
        _layers(*({**_norms("attn_norm"), **_mamba(groups=2)},) * 2),
    ),
    "rwkv7": (
        "rwkv7",
        {
            "attention.head_count": 0, "feed_forward_length": INNER, **_EPSILON, "wkv.head_size": 32,
            "attention.decay_lora_rank": 16, "attention.iclr_lora_rank": 16,
            "attention.value_residual_mix_lora_rank": 32, "attention.gate_lora_rank": 48,
        },
        _layers(
            _rwkv(value_rank=16), _rwkv(), _rwkv(), output_norm__bias=(HIDDEN,), token_embd_norm__weight=(HIDDEN,),
            token_embd_norm__bias=(HIDDEN,),
        ),
    ),
    "jamba": (
        "jamba", {**_JAMBA_KEYS, "attention.head_count_kv": [0, 2, 0], "expert_count": 1, "expert_used_count": 1},
        _layers({**_LFM_NORMS, **_MAMBA1, **_mlp()}, {**_LFM_NORMS, **_attention(), **_mlp()},
                {**_LFM_NORMS, **_MAMBA1, **_mlp()}),
    ),
    "jamba-moe": (
        "jamba", {**_JAMBA_KEYS, "attention.head_count_kv": [0, 0, 2, 0], "expert_count": 4, "expert_used_count": 2},
        _layers(
            {**_LFM_NORMS, **_MAMBA1, **_mlp()}, {**_LFM_NORMS, **_MAMBA1, **_experts(width=INNER)},
            {**_LFM_NORMS, **_attention(), **_mlp()}, {**_LFM_NORMS, **_MAMBA1, **_experts(width=INNER)}, tied=True,
        ),
    ),
    "glm4moe": (
        "glm4moe", {**_ATTENTION_KEYS, **_ROUTED_KEYS, "rope.dimension_count": 8, "nextn_predict_layers": 1},
        _layers(
            {**_norms(*_POST), **_biased(_attention(), "attn_q", "attn_k", "attn_v"), **_head_norms(), **_mlp()},
            *(
                {
                    **_norms(*_POST), **_biased(_attention(), "attn_q", "attn_k", "attn_v"), **_head_norms(),
                    **_experts(shared=32), **_SCORES, **more,
                }
                for more in ({}, {
                    "nextn.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
                    **_norms("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
                })
            ),
        ),
    ),
    "deepseek2": (
        "deepseek2", _MLA_KEYS, _layers({**_MLA, **_mlp()}, {**_MLA, **_experts(shared=32), **_SCORES}),
    ),
    "deepseek32": (
        "deepseek32", {**_MLA_KEYS, **_INDEXER_KEYS},
        _layers({**_DSA, **_mlp()}, {**_DSA, **_experts(shared=32), **_SCORES}),
    ),
    "glm-dsa": (
        "glm-dsa", {**_MLA_KEYS, **_INDEXER_KEYS},
        _layers({**_DSA, **_mlp()}, {**_DSA, **_experts(shared=32), **_SCORES}),
    ),
    "deepseek2-v2": (
        "deepseek2", {**_MLA_KEYS, **_V2_KEYS},
        _layers({**_MLA, **_mlp()}, {**_MLA, **_experts(shared=64)}),
    ),
    "deepseek2-lite": (  # llama.cpp knows it by its 27 layers
        "deepseek2",
        {
            **{key: value for key, value in _MLA_KEYS.items() if "mla" not in key and "q_lora" not in key}, **_V2_KEYS,
            "attention.head_count_kv": 4, "attention.key_length": 24, "attention.value_length": 16,
        },
        _layers({**_MLA_LITE, **_mlp()}, *({**_MLA_LITE, **_experts(shared=64)},) * 26),
    ),
    "kimi-k3": (  # two blocks of residual sums, experts with a width of their own
        "kimi-k3",
        {
            **_MLA_KEYS, "attention.head_count_kv": [0, 1, 0, 1], "kda.head_dim": 32, "kda.gate_lower_bound": -5.0,
            "ssm.conv_kernel": 4, "expert_latent_length": 32, "attn_res.block_size": 2, "activation.situ_beta": 1.5,
            "activation.situ_linear_beta": 2.0, "attention.key_length": 48, "attention.key_length_mla": 32,
            "rope.dimension_count": 16,
        },
        _layers(
            {**_KDA3, **_mlp()}, *({**layer, **_SCORES, **_LATENT_EXPERTS} for layer in (_MLA3, _KDA3, _MLA3)),
            output_res_score__weight=(HIDDEN,),
        ),
    ),
    "minimax-m3": (  # a dense layer first; the others attend to three blocks of four
        "minimax-m3",
        {
            **_ATTENTION_KEYS, **_ROUTED_KEYS, "rope.dimension_count": 8, "attention.indexer.head_count": 2,
            "attention.indexer.key_length": 16, "attention.indexer.top_k": 3, "attention.indexer.block_size": 4,
            "attention.indexer.local_blocks": 1,
        },
        _layers(
            {**_LFM_NORMS, **_attention(), **_head_norms(), **_mlp()},
            *({
                **_LFM_NORMS, **_attention(), **_head_norms(), **_experts(shared=32), **_SCORES,
                "indexer.q_proj.weight": (2 * 16, HIDDEN), "indexer.k_proj.weight": (16, HIDDEN),
                **_norms("indexer.q_norm", "indexer.k_norm", size=16),
            },) * 2,
        ),
    ),
    "minimax-m2": (
        "minimax-m2",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "feed_forward_length": 32, "rope.dimension_count": 8,
            "expert_gating_func": 2,
        },
        _layers(*(
            {
                **_LFM_NORMS, **_attention(), "attn_q_norm.weight": (64,), "attn_k_norm.weight": (32,), **_experts(),
                **_SCORES,
            },
        ) * 2),
    ),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "expert_shared_count": 2, "expert_shared_feed_forward_length": 64,
            "leading_dense_block_count": 1, "interleave_moe_layer_step": 1,
        },
        _layers(
            {**_LFM_NORMS, **_attention(), **_mlp()},
            {**_LFM_NORMS, **_attention(), **_experts(shared=64), **_SCORES}, tied=True,
        ),
    ),
    "starcoder2": (
        "starcoder2", {**_ATTENTION_KEYS, "attention.layer_norm_epsilon": 1e-5},
        _layers(*(_STARCODER,) * 2, tied=True, output_norm__bias=(HIDDEN,)),
    ),
    "phi2": (
        "phi2",
        {
            **_ATTENTION_KEYS, "attention.head_count_kv": 4, "attention.layer_norm_epsilon": 1e-5,
            "rope.dimension_count": 8,
        },
        _layers(*(_PHI,) * 2, output_norm__bias=(HIDDEN,), output__bias=(VOCAB,)),
    ),
    "apertus": (
        "apertus", {**_ATTENTION_KEYS, **{f"xielu.{name}": [0.3, 0.6] for name in ("alpha_p", "alpha_n")},
                    "xielu.beta": [0.5, 0.5], "xielu.eps": [-1e-6, -1e-6]},
        _layers(*({**_LFM_NORMS, **_attention(), **_head_norms(), **_SQUARED},) * 2),
    ),
    "gemma3n": (  # llama.cpp has fixed sizes, and shares the K/V of the first 20 layers
        "gemma3n",
        {
            **_ATTENTION_KEYS, "attention.sliding_window": 12,
            "attention.sliding_window_pattern": ([True] * 4 + [False]) * 5,
            "attention.shared_kv_layers": 5, "embedding_length_per_layer_input": 256, "altup.num_inputs": 4,
            "altup.active_idx": 0, "activation_sparsity_scale": [1.6448533535003662] * 10 + [-math.inf] * 15,
            "rope.freq_base_swa": 5e3, "final_logit_softcapping": 30.0,
        },
        _layers(
            *({**_GEMMA3N, **_attention(), **_head_norms(), **_mlp()},) * 25, tied=True,
            per_layer_token_embd__weight=(VOCAB, 25 * 256), per_layer_model_proj__weight=(25 * 256, HIDDEN),
            per_layer_proj_norm__weight=(256,), altup_proj__weight=(3, HIDDEN, HIDDEN),
            altup_unembd_proj__weight=(3, HIDDEN, HIDDEN),
        ),
    ),
    "kimi-linear": (
        "kimi-linear",
        {
            **_MLA_KEYS, "attention.q_lora_rank": 0, "attention.head_count_kv": [0, 1, 0], "kda.head_dim": 32,
            "ssm.conv_kernel": 4,
        },
        _layers(
            {**_KDA, **_mlp()}, {**_MLA_AT_ONCE, **_experts(shared=32), **_SCORES},
            {**_KDA, **_experts(shared=32), **_SCORES},
        ),
    ),
    "bailingmoe3": (
        "bailingmoe3",
        {
            **_MLA_KEYS, "attention.head_count_kv": [0, 1, 0, 1, 1], "kda.head_dim": 32, "kda.safe_gate": True,
            "kda.gate_lower_bound": -5.0, "ssm.conv_kernel": 4, "expert_shared_feed_forward_length": 32,
            "rope.freq_base": 6e6, "attention.layer_norm_rms_epsilon": 1e-6,
        },
        _layers(
            {**_LING3, **_mlp()},
            *({**kind, **_experts(shared=32), **_SCORES} for kind in (_LING3_FULL, _LING3, _LING3_FULL, _LING3_FULL)),
        ),
    ),
    "olmoe": (
        "olmoe",
        {
            **_ATTENTION_KEYS, "attention.head_count_kv": 4, "feed_forward_length": 32, "expert_count": 4,
            "expert_used_count": 2,
        },
        _layers(*({**_LFM_NORMS, **_attention(4, 4), **_norms("attn_q_norm", "attn_k_norm"), **_experts()},) * 2),
    ),
    "phimoe": (
        "phimoe",
        {
            **_ATTENTION_KEYS, "feed_forward_length": 32, "expert_count": 4, "expert_used_count": 2,
            "rope.dimension_count": 16, "rope.scaling.original_context_length": 64,
        },
        _layers(
            *({**_BOTH_LAYER_NORMS, **_biased(_attention(), *_PROJECTIONS), **_experts()},) * 2,
            output_norm__bias=(HIDDEN,), output__bias=(VOCAB,), rope_factors_long__weight=(8,),
            rope_factors_short__weight=(8,),
        ),
    ),
    "command-r": (
        "command-r", {**_ATTENTION_KEYS, **_EPSILON, "logit_scale": 0.25, "rope.scaling.type": "none"},
        _layers(*({**_norms("attn_norm"), **_attention(), **_mlp()},) * 2, tied=True),
    ),
    "gptneox": (
        "gptneox",
        {**_WIDE_KEYS, **_EPSILON, "rope.dimension_count": 8, "use_parallel_residual": True},
        _layers(*({**_BOTH_LAYER_NORMS, **_WIDE_LAYER},) * 2, output_norm__bias=(HIDDEN,)),
    ),
    "gptneox-sequential": (
        "gptneox",
        {**_WIDE_KEYS, **_EPSILON, "rope.dimension_count": 16, "use_parallel_residual": False},
        _layers(*({**_BOTH_LAYER_NORMS, **_WIDE_LAYER},) * 2, output_norm__bias=(HIDDEN,)),
    ),
    "falcon": (  # as 7B: keys and values have one head
        "falcon", {**_WIDE_KEYS, **_EPSILON, "attention.head_count_kv": 1},
        _layers(*({**_LAYER_NORM, **_FALCON, "attn_qkv.weight": (96, HIDDEN)},) * 2, output_norm__bias=(HIDDEN,)),
    ),
    "falcon-40b": (
        "falcon", {**_WIDE_KEYS, **_EPSILON, "attention.head_count_kv": 2},
        _layers(
            *({
                **_LAYER_NORM, **_biased(_norms("attn_norm_2"), "attn_norm_2"), **_FALCON,
                "attn_qkv.weight": (128, HIDDEN),
            },) * 2,
            tied=True, output_norm__bias=(HIDDEN,),
        ),
    ),
    "gpt2": (
        "gpt2", {**_WIDE_KEYS, **_EPSILON},
        _layers(
            *({**_BOTH_LAYER_NORMS, **_WIDE_LAYER},) * 2, tied=True, output_norm__bias=(HIDDEN,),
            position_embd__weight=(256, HIDDEN),
        ),
    ),
    "stablelm": (
        "stablelm", {**_ATTENTION_KEYS, **_EPSILON, "rope.dimension_count": 8, "use_parallel_residual": False},
        _layers(
            *({**_BOTH_LAYER_NORMS, **_biased(_attention(), "attn_q", "attn_k", "attn_v"), **_mlp()},) * 2,
            output_norm__bias=(HIDDEN,),
        ),
    ),
    "stablelm-parallel": (
        "stablelm", {**_ATTENTION_KEYS, **_EPSILON, "rope.dimension_count": 8, "use_parallel_residual": True},
        _layers(*({**_LAYER_NORM, **_attention(), **_mlp()},) * 2, output_norm__bias=(HIDDEN,)),
    ),
    "stablelm-12b": (  # norms of heads, with weights of each
        "stablelm", {**_ATTENTION_KEYS, **_EPSILON, "rope.dimension_count": 4, "use_parallel_residual": True},
        _layers(
            *({
                **_LAYER_NORM, **_attention(), "attn_q_norm.weight": (4, 16), "attn_k_norm.weight": (2, 16), **_mlp(),
            },) * 2,
            output_norm__bias=(HIDDEN,),
        ),
    ),
    "nemotron": (
        "nemotron",
        {
            **_ATTENTION_KEYS, **_EPSILON, "rope.dimension_count": 8, "rope.scaling.type": "linear",
            "rope.scaling.factor": 2.0,
        },
        _layers(*({**_BOTH_LAYER_NORMS, **_attention(), **_SQUARED},) * 2, output_norm__bias=(HIDDEN,)),
    ),
    "jais2": (
        "jais2", {**_ATTENTION_KEYS, **_EPSILON, "rope.dimension_count": 16},
        _layers(
            *({
                **_BOTH_LAYER_NORMS, **_biased(_attention(), *_PROJECTIONS), **_biased(_SQUARED, "ffn_up", "ffn_down"),
            },) * 2,
            output_norm__bias=(HIDDEN,),
        ),
    ),
    "arcee": (
        "arcee",
        {
            **_ATTENTION_KEYS, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        _layers(*({**_LFM_NORMS, **_attention(), **_SQUARED},) * 2),
    ),
    "mistral4": (
        "mistral4",
        {
            **_MLA_KEYS, "leading_dense_block_count": 0, "expert_gating_func": 1, "attention.temperature_scale": 0.1,
            "attention.temperature_length": 8, "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 8, "rope.scaling.yarn_log_multiplier": 0.1,
        },
        _layers(*({**_MLA, **_experts(shared=32)},) * 2),
    ),
    "deci": (  # layers with attention, with a matrix in its place, without, without anything, and with other sizes
        "deci",
        {
            **_ATTENTION_KEYS, "attention.head_count": [4, 4, 0, 0, 4], "attention.head_count_kv": [2, 0, 0, 0, 1],
            "feed_forward_length": [256, 512, 256, 0, 768], "rope.freq_base": 5e5, "rope.dimension_count": 16,
        },
        _layers(
            {**_LFM_NORMS, **_attention(), **_mlp(256)},
            {**_LFM_NORMS, "attn_output.weight": (HIDDEN, HIDDEN), **_mlp(512)},
            {**_norms("ffn_norm"), **_mlp(256)}, {}, {**_LFM_NORMS, **_attention(kv_heads=1), **_mlp(768)},
            rope_freqs__weight=(8,),
        ),
    ),
    "dots1": (
        "dots1", {**_ATTENTION_KEYS, **_ROUTED_KEYS, "attention.head_count_kv": 4},
        _layers(
            {**_LFM_NORMS, **_TOGETHER, **_mlp()}, {**_LFM_NORMS, **_TOGETHER, **_experts(shared=32), **_SCORES},
        ),
    ),
    "hy_v3": (
        "hy_v3", {**_ATTENTION_KEYS, **_ROUTED_KEYS, "expert_shared_feed_forward_length": 64},
        _layers(
            {**_LFM_NORMS, **_attention(), **_head_norms(), **_mlp()},
            *({**_LFM_NORMS, **_attention(), **_head_norms(), **_experts(shared=64), "exp_probs_b": (4,)},) * 2,
        ),
    ),
    "grok": (
        "grok",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "attention.output_scale": 0.25, "embedding_scale": 8.0,
            "attn_logit_softcapping": 2.0, "router_logit_softcapping": 30.0, "logit_scale": 0.5773502691896257,
        },
        _layers(*({**_norms(*_GROK, "layer_output_norm"), **_attention(), **_experts()},) * 2),
    ),
    "grok-2": (  # with a dense feed-forward next to experts
        "grok",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "attention.output_scale": 0.25, "embedding_scale": 8.0,
            "attn_logit_softcapping": 30.0, "router_logit_softcapping": 30.0, "logit_scale": 0.5,
            "final_logit_softcapping": 3.0, "attention.temperature_length": 1024,
        },
        _layers(*({**_norms(*_GROK, "post_ffw_norm"), **_attention(), **_experts(), **_mlp()},) * 2),
    ),
    "smallthinker": (  # the fifth layer neither rotates nor has a window
        "smallthinker",
        {**_ATTENTION_KEYS, **_EXPERT_KEYS, "expert_gating_func": 2, "attention.sliding_window": 4096},
        _layers(*({**_LFM_NORMS, **_attention(), **_experts()},) * 5),
    ),
    "smallthinker-softmax": (  # all layers rotate
        "smallthinker", {**_ATTENTION_KEYS, **_EXPERT_KEYS, "expert_gating_func": 1},
        _layers(*({**_LFM_NORMS, **_attention(), **_experts()},) * 2, tied=True),
    ),
    "deepseek": (
        "deepseek",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "expert_shared_count": 2, "leading_dense_block_count": 1,
            "expert_weights_scale": 1.0, "rope.dimension_count": 16, "rope.scaling.type": "none",
        },
        _layers({**_LFM_NORMS, **_attention(), **_mlp()}, {**_LFM_NORMS, **_attention(), **_experts(shared=64)}),
    ),
    "mellum": (
        "mellum",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "attention.sliding_window": 12,
            "attention.sliding_window_pattern": [True, False, True], "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        },
        _layers(*({**_LFM_NORMS, **_attention(), **_head_norms(), **_experts()},) * 3),
    ),
    "exaone-moe": (
        "exaone-moe",
        {**_ATTENTION_KEYS, **_ROUTED_KEYS, "attention.sliding_window": 12, "expert_shared_feed_forward_length": 32},
        _layers(
            {**_LFM_NORMS, **_attention(), **_head_norms(), **_mlp()},
            *({**_LFM_NORMS, **_attention(), **_head_norms(), **_experts(shared=32), **_SCORES},) * 4,
        ),
    ),
    "bailingmoe": (
        "bailingmoe",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "expert_shared_count": 2, "leading_dense_block_count": 0,
            "expert_weights_norm": True, "expert_weights_scale": 1.0, "rope.dimension_count": 16,
            "rope.scaling.type": "none",
        },
        _layers(*({**_LFM_NORMS, **_attention(), **_experts(shared=64)},) * 2),
    ),
    "bailingmoe2": (
        "bailingmoe2",
        {
            **_ATTENTION_KEYS, **_ROUTED_KEYS, "rope.dimension_count": 8, "expert_shared_feed_forward_length": 32,
            "expert_group_count": 2, "expert_group_used_count": 1, "expert_count": 8,
        },
        _layers(
            {**_LFM_NORMS, **_BAILING, **_mlp()},
            *({**_LFM_NORMS, **_BAILING, **_experts(count=8, shared=32), "exp_probs_b.bias": (8,)},) * 2,
        ),
    ),
    "afmoe": (
        "afmoe", {**_ATTENTION_KEYS, **_ROUTED_KEYS, "attention.sliding_window": 12},
        _layers({**_AFMOE, **_mlp()}, *({**_AFMOE, **_experts(shared=32), **_SCORES},) * 4),
    ),
    "hunyuan-moe": (
        "hunyuan-moe", {**_ATTENTION_KEYS, **_SHARED_KEYS, "feed_forward_length": 32},
        _layers(*({**_LFM_NORMS, **_attention(), **_head_norms(), **_experts(shared=48)},) * 2, tied=True),
    ),
    "hunyuan_vl": (
        "hunyuan_vl",
        {
            **_ATTENTION_KEYS, "rope.scaling.type": "none", "rope.scaling.alpha": 1000.0,
            "rope.dimension_sections": [2, 2, 2, 2],
        },
        _layers(*({**_LFM_NORMS, **_attention(), **_head_norms(), **_mlp()},) * 2, tied=True),
    ),
    "step35": (  # other counts of heads in layers with a window, and bounds of activations
        "step35",
        {
            **_ATTENTION_KEYS, **_ROUTED_KEYS, "attention.head_count": [4, 6, 6, 4],
            "attention.head_count_kv": [2, 3, 3, 2], "attention.sliding_window": 12,
            "attention.sliding_window_pattern": [False, True, True, False], "rope.freq_base": 5e5,
            "rope.freq_base_swa": 1e4, "expert_shared_feed_forward_length": 48,
            "swiglu_clamp_exp": [0.0, 0.0, 0.1, 0.0], "swiglu_clamp_shexp": [0.0, 0.0, 0.05, 0.1],
        },
        _layers(
            {**_STEP, **_attention(), "attn_gate.weight": (4, HIDDEN), **_mlp()},
            *({**_STEP, **_attention(6, 3), "attn_gate.weight": (6, HIDDEN), **_experts(shared=48), **_SCORES},) * 2,
            {**_STEP, **_attention(), "attn_gate.weight": (4, HIDDEN), **_experts(shared=48), **_SCORES},
        ),
    ),
    "mimo2": (  # values are narrower than keys; layers with a window have more heads, and sinks
        "mimo2",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "attention.head_count_kv": [1, 2, 2, 1], "attention.key_length": 24,
            "attention.sliding_window": 12, "attention.sliding_window_pattern": [0, 1, 1, 0],
            "rope.dimension_count": 8, "rope.freq_base": 5e6, "rope.freq_base_swa": 1e4, "expert_gating_func": 2,
            "attention.value_scale": 0.7,
        },
        _layers(
            {**_LFM_NORMS, **_MIMO, **_mlp()},
            *({
                **_LFM_NORMS, **_MIMO, "attn_k.weight": (48, HIDDEN), "attn_v.weight": (32, HIDDEN),
                "attn_sinks.weight": (4,), **_experts(), **_SCORES,
            },) * 2,
            {**_LFM_NORMS, **_MIMO, **_experts(), **_SCORES},
        ),
    ),
    "laguna": (  # every fourth layer, from the first, has no window, and fewer heads
        "laguna",
        {
            **_ATTENTION_KEYS, **_ROUTED_KEYS, "attention.head_count": [4, 6, 6, 6, 4], "attention.sliding_window": 12,
            "rope.freq_base": 5e5, "rope.freq_base_swa": 1e4, "rope.dimension_count": 8, "rope.dimension_count_swa": 16,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
            "expert_shared_feed_forward_length": 48,
        },
        _layers(
            {**_STEP, **_attention(), "attn_gate.weight": (4, HIDDEN), **_mlp()},
            *({**_STEP, **_attention(6), "attn_gate.weight": (6, HIDDEN), **_experts(shared=48), **_SCORES},) * 3,
            {**_STEP, **_attention(), "attn_gate.weight": (4, HIDDEN), **_experts(shared=48), **_SCORES},
        ),
    ),
    "starcoder": (
        "starcoder", {**_WIDE_KEYS, **_EPSILON, "attention.head_count_kv": 1},
        _layers(
            *({**_BOTH_LAYER_NORMS, **_MULTI_QUERY},) * 2, tied=True, output_norm__bias=(HIDDEN,),
            position_embd__weight=(256, HIDDEN),
        ),
    ),
    "chatglm": (  # as GLM-4 9B
        "chatglm", {**_ATTENTION_KEYS, "rope.dimension_count": 8, "rope.freq_base": 5e6},
        _layers(*({**_LFM_NORMS, **_FUSED_QKV, **_FUSED_MLP},) * 2),
    ),
    "qwen": (
        "qwen",
        {**_ATTENTION_KEYS, "attention.head_count_kv": 4, "feed_forward_length": 2 * INNER, "rope.dimension_count": 16},
        _layers(*({**_LFM_NORMS, **_WIDE_QKV, **_mlp()},) * 2),
    ),
    "baichuan": (  # llama.cpp rotates in the size of 32 layers alone
        "baichuan", {**_ATTENTION_KEYS, "attention.head_count_kv": 4, "rope.dimension_count": 16},
        _layers(*({**_LFM_NORMS, **_attention(4, 4), **_mlp()},) * 32),
    ),
    "granite_swa": (  # one layer does not rotate
        "granite_swa",
        {
            **_ATTENTION_KEYS, "attention.sliding_window": 12, "rope.dimension_count": 16, "attention.scale": 0.2,
            "attention.sliding_window_pattern": [False, True, True, True], "embedding_scale": 4.0,
            "attention.rope_pattern": [False, True, True, True], "residual_scale": 0.5, "logit_scale": 6.0,
        },
        _layers(*({**_LFM_NORMS, **_attention(), "attn_sinks.weight": (4,), **_mlp()},) * 4, tied=True),
    ),
    "xverse": (
        "xverse", {**_ATTENTION_KEYS, "rope.dimension_count": 16},
        _layers(*({**_LFM_NORMS, **_attention(), **_mlp()},) * 2),
    ),
    "maincoder": (  # heads are normalized after their rotation
        "maincoder", {**_ATTENTION_KEYS, "rope.dimension_count": 16},
        _layers(*({**_LFM_NORMS, **_attention(), **_head_norms(), **_mlp()},) * 2, tied=True),
    ),
    "pangu-embedded": (
        "pangu-embedded", {**_ATTENTION_KEYS, "rope.dimension_count": 16},
        _layers(*({**_LFM_NORMS, **_biased(_attention(), *_PROJECTIONS), **_mlp()},) * 2),
    ),
    "minicpm3": (
        "minicpm3",
        {
            **_ATTENTION_KEYS, "attention.head_count_kv": 4, "attention.q_lora_rank": 24, "attention.kv_lora_rank": 32,
            "attention.key_length": 24, "rope.dimension_count": 8, "rope.freq_base": 5e5,
        },
        _layers(
            *({**_MINICPM3, **_mlp()},) * 2, tied=True, rope_factors_long__weight=(4,), rope_factors_short__weight=(4,),
        ),
    ),
    "nanbeige": (
        "nanbeige", {**_ATTENTION_KEYS, "num_loops": 2, "skip_loop_final_norm": False},
        _layers(*({**_LFM_NORMS, **_attention(), **_mlp()},) * 2),
    ),
    "nanbeige-plain": (
        "nanbeige", {**_ATTENTION_KEYS, "num_loops": 2, "skip_loop_final_norm": True},
        _layers(*({**_LFM_NORMS, **_attention(), **_mlp()},) * 2, tied=True),
    ),
    "spark2_5": (
        "spark2_5",
        {
            **_ATTENTION_KEYS, "attention.sliding_window": 12, "rope.freq_base": 5e5, "rope.freq_base_swa": 1e4,
            "attention.sliding_window_pattern": [True, True, False], "rope.dimension_count": 8,
            "rope.dimension_count_swa": 16,
        },
        _layers(
            *({
                **_LFM_NORMS, "attn_qkv.weight": (128, HIDDEN), "attn_gate.weight": (4, HIDDEN),
                "attn_output.weight": (HIDDEN, HIDDEN), **_mlp(),
            },) * 3,
            tied=True,
        ),
    ),
    "muse-glimmer": (
        "muse-glimmer",
        {
            **_ATTENTION_KEYS, "attention.sliding_window": 12, "rope.freq_base": 5e5, "logit_scale": 0.2,
            "attention.sliding_window_pattern": [True, True, True, False], "final_logit_softcapping": 20.0,
        },
        _layers(
            *({
                **_norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), **_attention(),
                **_head_norms(), "attn_gate.weight": (64, HIDDEN), **_mlp(),
            },) * 4,
        ),
    ),
    "orion": (
        "orion", {**_ATTENTION_KEYS, **_EPSILON},
        _layers(*({**_BOTH_LAYER_NORMS, **_attention(), **_mlp()},) * 2, output_norm__bias=(HIDDEN,)),
    ),
    "olmo": (
        "olmo", {**_ATTENTION_KEYS, **_EPSILON},
        {
            name: shape
            for name, shape in _layers(*({**_attention(), **_mlp()},) * 2).items() if name != "output_norm.weight"
        },
    ),
    "codeshell": (
        "codeshell", {**_ATTENTION_KEYS, **_EPSILON, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        _layers(
            *({
                **_BOTH_LAYER_NORMS, **_FUSED_QKV, **_biased(_SQUARED, "ffn_up", "ffn_down"),
                "attn_output.bias": (HIDDEN,),
            },) * 2,
            output_norm__bias=(HIDDEN,),
        ),
    ),
    "cohere2moe": (  # a dense layer first, which rotates though it has no window
        "cohere2moe",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, **_EPSILON, "attention.sliding_window": 12,
            "attention.sliding_window_pattern": [False, True, True, False], "leading_dense_block_count": 1,
            "expert_shared_count": 2, "expert_shared_feed_forward_length": 64, "expert_weights_norm": True,
            "expert_gating_func": 2, "rope.dimension_count": 16, "rope.scaling.type": "none", "logit_scale": 0.25,
        },
        _layers(
            {**_norms("attn_norm"), **_attention(), **_mlp()},
            *({**_norms("attn_norm"), **_attention(), **_experts(shared=64)},) * 3, tied=True,
        ),
    ),
    "cohere2moe-rms": (  # RMSNorm, no expert that all tokens use, weights that are not normalized
        "cohere2moe",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "attention.sliding_window": 12,
            "attention.sliding_window_pattern": [True, False, True], "leading_dense_block_count": 0,
            "expert_gating_func": 2, "logit_scale": 1.0,
        },
        _layers(*({**_norms("attn_norm"), **_attention(), **_experts()},) * 3),
    ),
    "dbrx": (
        "dbrx",
        {
            **_EPSILON, "attention.head_count": 4, "attention.head_count_kv": 2, "feed_forward_length": 32,
            "rope.freq_base": 5e5, "attention.clamp_kqv": 0.7, "expert_count": 4, "expert_used_count": 2,
        },
        _layers(
            *({
                **_norms("attn_norm", "attn_output_norm"), "attn_qkv.weight": (128, HIDDEN),
                "attn_output.weight": (HIDDEN, HIDDEN), **_experts(),
            },) * 2,
        ),
    ),
    "openelm": (  # other heads and widths in each layer
        "openelm",
        {
            "attention.head_count": [4, 4, 8], "attention.head_count_kv": [1, 1, 2], "attention.key_length": 16,
            "attention.value_length": 16, "feed_forward_length": [64, INNER, 128], "rope.dimension_count": 16,
            "rope.freq_base": 1e4,
        },
        _layers(
            *({
                **_LFM_NORMS, "attn_qkv.weight": ((heads + heads // 2) * 16, HIDDEN), **_head_norms(),
                "attn_output.weight": (HIDDEN, heads * 16), **_mlp(width),
            } for heads, width in ((4, 64), (4, INNER), (8, 128))),
            tied=True,
        ),
    ),
    "llama4": (
        "llama4",
        {
            **_ATTENTION_KEYS, **_EXPERT_KEYS, "expert_used_count": 1, "interleave_moe_layer_step": 2,
            "attention.head_count": 4, "rope.dimension_count": 16,
        },
        _layers(*(
            {**_LFM_NORMS, **_attention(), **_mlp()}, {**_LFM_NORMS, **_attention(), **_experts(shared=32)},
        ) * 2),
    ),
}  # fmt: skip


def tensors_of(variant: str, seed: int = 0) -> Weights:
    """Random tensors in float32, as the file has them."""
    rng = np.random.default_rng(seed)
    made = {name: _random(rng, name, shape) for name, shape in LAYERED[variant][2].items()}
    if variant == "bailingmoe3":
        made = {name: -values if name.endswith("ssm_a") else values for name, values in made.items()}
    if variant == "muse-glimmer":  # the converter makes them from a factor of queries
        made |= {name: np.full_like(values, 3.87) for name, values in made.items() if "attn_q_norm" in name}
        made |= {name: np.ones_like(values) for name, values in made.items() if "attn_k_norm" in name}
    if variant == "deci":
        made["rope_freqs.weight"] = llama3_factors(8.0, 16)
    for name in made:
        if variant == "gemma3n" and name.endswith("post_ffw_norm.weight"):
            made[name] /= 64  # llama.cpp divides a variance by one less, which shows in so few numbers
    return made


def write_layered(path: Path, variant: str, *, matrices: str = "F32", tensors: Weights | None = None) -> Path:
    """Write the variant, with matrices of multiples of 32 columns stored as the type `matrices`."""
    writer = layered_header(path, variant)
    rng = np.random.default_rng(1)
    for name, values in (tensors_of(variant) if tensors is None else tensors).items():
        routed = any(part in name for part in ("ffn_gate_inp", "conv", "ssm_norm", "_lerp_"))
        block = 1 if matrices == "F32" else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[matrices]][0]
        if values.ndim == 1 or matrices == "F32" or routed or values.shape[-1] % block or name.endswith("ssm_a"):
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            kind = gguf.GGMLQuantizationType[matrices]
            writer.add_tensor(name, random_blocks(rng, matrices, *values.shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layered_header(path: Path, variant: str) -> gguf.GGUFWriter:
    arch, keys, shapes = LAYERED[variant]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blk.")))
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_vocab_size(VOCAB)
    if not any("norm" in key and "epsilon" in key for key in keys):
        writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys.items():
        name = key if key.startswith("xielu") else f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(name, value)
    add_vocabulary(writer, "byte_level")
    return writer


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name == "rope_freqs.weight":  # a quarter of each head turns
        return np.where(np.arange(shape[0]) < shape[0] // 4, 1, 1e30).astype(np.float32)
    if name.startswith("rope_factors"):
        return np.linspace(1, 9 if "long" in name else 1.2, shape[0], dtype=np.float32)
    values = rng.standard_normal(shape)
    if name.endswith("ssm_a"):
        values = -np.exp(0.5 * values)
    elif name.endswith(("norm.weight", "ffn_norm", "norm_1.weight", "norm_2.weight", "scale.weight", ".scale")):
        values = 1 + 0.2 * values
    elif len(shape) == 1 or name.endswith(("ssm_d", "conv1d.weight", "conv.weight")):
        values = 0.3 * values
    else:
        values = values * 1.5 / math.sqrt(shape[-1])
    return values.astype(np.float32)
