"""Table of the convertible GGUF architectures with equal layers: model type, and tensors in Hugging Face terms.

Rows contain facts of llama.cpp's converter and of the model classes only. The decoder is chosen at loading, from the
config.
"""

from dataclasses import dataclass, field, replace
from types import MappingProxyType

from headrace.models.gguf.layered.common import NORMS, POST_NORMS, attention, experts, head_norms, mlp, shared_expert
from headrace.models.gguf.layered.parts import Part, Parts

_ATTN_NORM = {"attn_norm": NORMS["attn_norm"]}
_FFN_NORM = {"ffn_norm": NORMS["ffn_norm"]}
_POST_NORM = {"post_attention_norm": POST_NORMS["post_attention_norm"]}
_POST_FFW_NORM = {"post_ffw_norm": Part("post_feedforward_layernorm", "hidden")}
_SANDWICH_NORMS = {**_POST_NORM, "ffn_norm": Part("pre_feedforward_layernorm", "hidden"), **_POST_FFW_NORM}
_PLAIN = {**_ATTN_NORM, **attention(), **_FFN_NORM, **mlp()}
_PERMUTED = {**_ATTN_NORM, **attention(permuted=True), **_FFN_NORM, **mlp()}
# Gate and up are stored as one.
_FUSED_UP = {"ffn_up": Part("mlp.gate_up_proj", "2*inner hidden"), "ffn_down": Part("mlp.down_proj", "hidden inner")}
QKV = ("attn_q", "attn_k", "attn_v")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def _mixture(router: str, stacks: str, *, permuted: bool = False) -> Parts:
    """Return a layer of attention and a mixture of experts, whose matrices are stacked in both formats."""
    return {**_ATTN_NORM, **attention(permuted=permuted), **_FFN_NORM, **experts(router, stacks)}


def _minus_one(parts: Parts) -> Parts:
    """Return the parts with norms whose weights the converter has added 1 to."""
    return {key: replace(part, values="minus_one") if key.endswith("norm") else part for key, part in parts.items()}


@dataclass(frozen=True)
class Architecture:
    """One row of the table. parts: tensors of a layer by GGUF name, in model order."""

    model_type: str
    model_class: str
    parts: Parts = field(default_factory=lambda: MappingProxyType(_PLAIN))
    biased: tuple[str, ...] = ()  # matrices that always have a bias
    gemma: bool = False  # norm weights include the added 1
    any_head_dim: bool = True  # the model class allows head sizes other than width / heads
    partial_rope: bool = False  # a part of each head may turn
    # Epsilon of the norms: its GGUF key, and its name in config.json.
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


_LLAMA = Architecture("llama", "LlamaForCausalLM", _PERMUTED)
_QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM", biased=QKV)
_QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM", {**_PLAIN, **head_norms()})
_QWEN3_MOE = Architecture(
    "qwen3_moe", "Qwen3MoeForCausalLM", {**_mixture("mlp.gate", "mlp.switch_mlp"), **head_norms()}
)
_SPARSE = "block_sparse_moe"

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "internlm2": _LLAMA,
    "exaone": Architecture("llama", "LlamaForCausalLM"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _PERMUTED),
    "granite": Architecture("granite", "GraniteForCausalLM", _PERMUTED, any_head_dim=False),
    "minicpm": Architecture("granite", "GraniteForCausalLM", _PERMUTED, any_head_dim=False),  # the same layers
    "granitemoe": Architecture(
        "granitemoe", "GraniteMoeForCausalLM",
        _mixture(f"{_SPARSE}.router.layer", f"{_SPARSE}.switch_mlp", permuted=True), any_head_dim=False,
    ),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM",
        {
            **_ATTN_NORM, "attn_qkv": Part("self_attn.qkv_proj", "qkv hidden"),
            "attn_output": attention()["attn_output"], **_FFN_NORM, **_FUSED_UP,
        },
        any_head_dim=False, partial_rope=True,
    ),
    "qwen2": _QWEN2,
    "qwen2vl": _QWEN2,  # text positions are equal in its three sections
    "qwen3": _QWEN3,
    "qwen3vl": _QWEN3,
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM",
        {
            **_mixture("mlp.gate", "mlp.switch_mlp"),
            "ffn_gate_inp_shexp": Part("mlp.shared_expert_gate", "hidden", stored="1 hidden"),
            **shared_expert("mlp.shared_expert"),
        },
        biased=QKV, any_head_dim=False,
    ),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM",
        {
            **_ATTN_NORM, **attention(), "attn_sinks": Part("self_attn", "heads", "sinks"), **_POST_NORM,
            **experts("mlp.router", "mlp.experts"),
        },
        biased=(*QKV, "attn_output", "ffn_gate_inp", *EXPERTS),
    ),
    "olmo2": Architecture(
        "olmo2", "Olmo2ForCausalLM",
        {
            **attention(), "attn_q_norm": Part("self_attn.q_norm", "heads*head"),
            "attn_k_norm": Part("self_attn.k_norm", "kv_heads*head"), **_POST_NORM, **mlp(), **_POST_FFW_NORM,
        },
    ),
    "seed_oss": Architecture(
        "seed_oss", "SeedOssForCausalLM",
        {**_ATTN_NORM, **attention(), **_POST_NORM, **mlp()}, biased=QKV,
    ),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", _PERMUTED),
    "cohere2": Architecture(
        "cohere2", "Cohere2ForCausalLM", {**_ATTN_NORM, **attention(), **mlp()},
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    ),
    "exaone4": Architecture(
        "exaone4", "Exaone4ForCausalLM",
        {**attention(), **head_norms(), **_POST_NORM, **mlp(), **_POST_FFW_NORM},
    ),
    "glm4": Architecture(
        "glm4", "Glm4ForCausalLM",
        {
            **_ATTN_NORM, **attention(), "post_attention_norm": Part("post_self_attn_layernorm", "hidden"),
            **_FFN_NORM, **_FUSED_UP, "post_ffw_norm": Part("post_mlp_layernorm", "hidden"),
        },
        partial_rope=True,
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM",
        {
            **_PLAIN, "attn_q_norm": Part("self_attn.query_layernorm", "head"),
            "attn_k_norm": Part("self_attn.key_layernorm", "head"),
        },
    ),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _minus_one(_PLAIN), gemma=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _minus_one({**_PLAIN, **_SANDWICH_NORMS}), gemma=True),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _minus_one({**_PLAIN, **_SANDWICH_NORMS, **head_norms()}), gemma=True
    ),
}  # fmt: skip
# Architecture `llama` with experts.
MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", _mixture(f"{_SPARSE}.gate", f"{_SPARSE}.switch_mlp", permuted=True),
    any_head_dim=False,
)  # fmt: skip


def has_experts(architecture: Architecture) -> bool:
    return "ffn_gate_inp" in architecture.parts


def find(name: str, *, experts: int) -> Architecture | None:
    return MIXTRAL if name == "llama" and experts else ARCHITECTURES.get(name)
