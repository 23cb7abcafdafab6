"""Table of the convertible GGUF architectures: model type and tensor names in Hugging Face terms.

Rows contain facts of llama.cpp's converter and of the model classes only. The decoder is chosen at loading, from the
config.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
_FFN = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PLAIN = {**_ATTENTION, **_FFN_NORM, **_FFN}
QKV = ("attn_q", "attn_k", "attn_v")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def _experts(router: str, experts: str) -> dict[str, str]:
    """Return the modules of a mixture of experts, whose matrices are stacked in both formats."""
    names = dict(zip(EXPERTS, ("gate_proj", "up_proj", "down_proj"), strict=True))
    return {"ffn_gate_inp": router, **{source: f"{experts}.{name}" for source, name in names.items()}}


def _mixture(router: str, experts: str) -> dict[str, str]:
    return {**_ATTENTION, **_FFN_NORM, **_experts(router, experts)}


@dataclass(frozen=True)
class Architecture:
    """One row of the table. modules: GGUF tensor name in a layer -> Hugging Face module, in model order."""

    model_type: str
    model_class: str
    modules: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_PLAIN))
    permuted: bool = False  # rows of Q and K are interleaved per head by llama.cpp's converter
    biased: tuple[str, ...] = ()  # matrices that always have a bias
    fused_up: bool = False  # ffn_up has gate and up stacked
    gemma: bool = False  # norm weights include the added 1
    any_head_dim: bool = True  # the model class allows head sizes other than width / heads
    wide_head_norms: bool = False  # attn_q_norm and attn_k_norm cover all heads together
    partial_rope: bool = False  # a part of each head may turn
    # Epsilon of the norms: its GGUF key, and its name in config.json.
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


_LLAMA = Architecture("llama", "LlamaForCausalLM", permuted=True)
_QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM", biased=QKV)
_QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM", {**_PLAIN, **_HEAD_NORMS})
_QWEN3_MOE = Architecture("qwen3_moe", "Qwen3MoeForCausalLM", {**_mixture("mlp.gate", "mlp.switch_mlp"), **_HEAD_NORMS})
_SPARSE = "block_sparse_moe"

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "internlm2": _LLAMA,
    "exaone": Architecture("llama", "LlamaForCausalLM"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True),
    "granite": Architecture("granite", "GraniteForCausalLM", permuted=True, any_head_dim=False),
    "minicpm": Architecture("granite", "GraniteForCausalLM", permuted=True, any_head_dim=False),  # the same layers
    "granitemoe": Architecture(
        "granitemoe", "GraniteMoeForCausalLM", _mixture(f"{_SPARSE}.router.layer", f"{_SPARSE}.switch_mlp"),
        permuted=True, any_head_dim=False,
    ),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
            **_FFN_NORM, "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
        },
        fused_up=True, any_head_dim=False, partial_rope=True,
    ),
    "qwen2": _QWEN2,
    "qwen2vl": _QWEN2,  # text positions are equal in its three sections
    "qwen3": _QWEN3,
    "qwen3vl": _QWEN3,
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM",
        {
            **_mixture("mlp.gate", "mlp.switch_mlp"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        biased=QKV, any_head_dim=False,
    ),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM",
        {
            **_ATTENTION, "attn_sinks": "self_attn", "post_attention_norm": "post_attention_layernorm",
            **_experts("mlp.router", "mlp.experts"),
        },
        biased=(*QKV, "attn_output", "ffn_gate_inp", *EXPERTS),
    ),
    "olmo2": Architecture(
        "olmo2", "Olmo2ForCausalLM",
        {
            **{source: module for source, module in _ATTENTION.items() if source != "attn_norm"}, **_HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm", **_FFN, "post_ffw_norm": "post_feedforward_layernorm",
        },
        wide_head_norms=True,
    ),
    "seed_oss": Architecture(
        "seed_oss", "SeedOssForCausalLM",
        {**_ATTENTION, "post_attention_norm": "post_attention_layernorm", **_FFN}, biased=QKV,
    ),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", permuted=True),
    "cohere2": Architecture(
        "cohere2", "Cohere2ForCausalLM", {**_ATTENTION, **_FFN},
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    ),
    "exaone4": Architecture(
        "exaone4", "Exaone4ForCausalLM",
        {
            **{source: module for source, module in _ATTENTION.items() if source != "attn_norm"}, **_HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm", **_FFN, "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "glm4": Architecture(
        "glm4", "Glm4ForCausalLM",
        {
            **_ATTENTION, "post_attention_norm": "post_self_attn_layernorm", **_FFN_NORM,
            "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_mlp_layernorm",
        },
        fused_up=True, partial_rope=True,
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM",
        {**_PLAIN, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    "gemma": Architecture("gemma", "GemmaForCausalLM", gemma=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", {**_PLAIN, **_SANDWICH_NORMS}, gemma=True),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", {**_PLAIN, **_SANDWICH_NORMS, **_HEAD_NORMS}, gemma=True
    ),
}  # fmt: skip
# Architecture `llama` with experts.
MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", _mixture(f"{_SPARSE}.gate", f"{_SPARSE}.switch_mlp"), permuted=True,
    any_head_dim=False,
)  # fmt: skip


def has_experts(architecture: Architecture) -> bool:
    return "ffn_gate_inp" in architecture.modules


def find(name: str, *, experts: int) -> Architecture | None:
    return MIXTRAL if name == "llama" and experts else ARCHITECTURES.get(name)
