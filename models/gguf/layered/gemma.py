"""Gemma 4: two sizes of heads, K/V shared by the last layers, inputs per layer, and a mixture in one size.

RoPE of full attention turns a part of each head ("proportional"); `rope_freqs.weight` divides the frequencies of the
rest by 1e30.
"""

from headrace.models.gguf.layered.common import base_config, layers_of, mixture
from headrace.models.gguf.layered.parts import Config, Contents, LayeredArchitecture, Part, tables
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _config(metadata: Metadata, file: Contents) -> Config:
    count = layers_of(metadata)
    config = base_config(metadata, file, "gemma4_text")
    windowed = metadata.flags("{arch}.attention.sliding_window_pattern", count)
    kinds = [_SLIDING if slides else _FULL for slides in windowed]
    shared = metadata.integer("{arch}.attention.shared_kv_layers", 0, maximum=count - 1)
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", count, minimum=1, maximum=1 << 16)
    inner = metadata.per_layer("{arch}.feed_forward_length", count, minimum=1, maximum=1 << 22)
    heads = {kind: {n for n, each in zip(kv_heads, kinds, strict=True) if each == kind} for kind in (_SLIDING, _FULL)}
    widths = {tuple(inner[: count - shared]), tuple(inner[count - shared :])}
    double = bool(shared) and inner[-1] == 2 * inner[0]
    if any(len(each) > 1 for each in heads.values()) or any(len(set(each)) > 1 for each in widths):
        raise UnsupportedModelError("a Gemma 4 with other sizes in each layer is not supported")
    if inner[-1] != inner[0] * (2 if double else 1):
        raise UnsupportedModelError(f"a Gemma 4 with feed-forwards of {inner[0]} and {inner[-1]} is not supported")
    own = next((layer for layer, kind in enumerate(kinds[: count - shared]) if kind == _FULL), None)
    full = next(iter(heads[_FULL]), kv_heads[0])
    per_layer = metadata.integer("{arch}.embedding_length_per_layer_input", 0, maximum=1 << 16)
    table = file.shapes.get("per_layer_token_embd.weight", (config["vocab_size"],))
    theta, local = config["rope_theta"], metadata.positive("{arch}.rope.freq_base_swa", 10_000.0)
    config |= {
        "head_dim": metadata.integer("{arch}.attention.key_length_swa", minimum=1, maximum=1 << 16),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": next(iter(heads[_SLIDING]), full),
        "num_global_key_value_heads": full,
        "num_kv_shared_layers": shared,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": double,
        "layer_types": kinds,
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", minimum=1),
        "attention_k_eq_v": own is not None and f"blk.{own}.attn_v.weight" not in file.shapes,
        "final_logit_softcapping": metadata.number("{arch}.final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": table[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": metadata.has("{arch}.expert_count"),
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": _share(metadata, file.rope_factors),
            },
            _SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }
    if not config["attention_k_eq_v"] and full != config["num_key_value_heads"]:
        raise UnsupportedModelError("a Gemma 4 with two counts of K/V heads and values of their own is not supported")
    return config | (
        mixture(metadata, "num_experts", "top_k_experts", "moe_intermediate_size") if config["enable_moe_block"] else {}
    )


def _share(metadata: Metadata, factors: list[float] | None) -> float:
    """Return the rotated part of a head of full attention, from the content of `rope_freqs.weight`."""
    if factors is None:
        return 1.0
    turned = sum(factor == 1 for factor in factors)
    if factors[:turned] != [1.0] * turned or any(factor < 1e20 for factor in factors[turned:]):
        raise UnsupportedModelError("rope_freqs.weight does not turn a part of each head")
    if 2 * len(factors) != metadata.integer("{arch}.attention.key_length"):
        raise CheckpointError(f"rope_freqs.weight has {len(factors)} factors for heads of another size")
    return turned / len(factors)


def _kinds(config: Config) -> list[tuple[str, ...]]:
    count, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    both = ["inputs"] if config["hidden_size_per_layer_input"] else []
    both += ["experts"] if config["enable_moe_block"] else []
    found = []
    for layer, kind in enumerate(config["layer_types"]):
        name = "full" if kind == _FULL else "sliding"
        wide = config["use_double_wide_mlp"] and layer >= count - shared
        without_v = kind == _FULL and config["attention_k_eq_v"]
        keys = () if layer >= count - shared else (f"{name}_k",) if without_v else (f"{name}_k", f"{name}_v")
        found.append(("norms", name, *keys, "wide" if wide else "mlp", *both))
    return found


def _sizes(config: Config) -> dict[str, int]:
    per_layer = config["hidden_size_per_layer_input"]
    return {
        "hidden": config["hidden_size"], "vocab": config["vocab_size"], "heads": config["num_attention_heads"],
        "head": config["head_dim"], "full_head": config["global_head_dim"], "kv_heads": config["num_key_value_heads"],
        "full_kv_heads": config["num_global_key_value_heads"], "inner": config["intermediate_size"],
        "inputs": per_layer, "all_inputs": per_layer * config["num_hidden_layers"],
        "input_vocab": config["vocab_size_per_layer_input"], "experts": config.get("num_experts", 0),
        "width": config.get("moe_intermediate_size", 0),
    }  # fmt: skip


def _attention(full: str) -> dict[str, dict[str, Part]]:
    name = "full" if full else "sliding"
    kv = f"{full}kv_heads*{full}head"
    return {
        name: {
            "attn_q": Part("self_attn.q_proj", f"heads*{full}head hidden"),
            "attn_output": Part("self_attn.o_proj", f"hidden heads*{full}head"),
            "attn_q_norm": Part("self_attn.q_norm", f"{full}head"),
        },
        f"{name}_k": {
            "attn_k": Part("self_attn.k_proj", f"{kv} hidden"),
            "attn_k_norm": Part("self_attn.k_norm", f"{full}head"),
        },
        f"{name}_v": {"attn_v": Part("self_attn.v_proj", f"{kv} hidden")},
    }


def _mlp(inner: str) -> dict[str, Part]:
    return {
        "ffn_gate": Part("mlp.gate_proj", f"{inner} hidden"),
        "ffn_up": Part("mlp.up_proj", f"{inner} hidden"),
        "ffn_down": Part("mlp.down_proj", f"hidden {inner}"),
    }


_EXPERTS = "experts.switch_glu"
GEMMA4 = LayeredArchitecture(
    "Gemma4ForCausalLM", _config, _kinds, _sizes,
    {
        "norms": {
            "attn_norm": Part("input_layernorm", "hidden"),
            "post_attention_norm": Part("post_attention_layernorm", "hidden"),
            "ffn_norm": Part("pre_feedforward_layernorm", "hidden"),
            "post_ffw_norm": Part("post_feedforward_layernorm", "hidden"),
            "layer_output_scale": Part("", "1", "layer_scalar", optional=True),
        },
        **_attention(""), **_attention("full_"), "mlp": _mlp("inner"), "wide": _mlp("2*inner"),
        "inputs": {
            "inp_gate": Part("per_layer_input_gate", "inputs hidden"),
            "proj": Part("per_layer_projection", "hidden inputs"),
            "post_norm": Part("post_per_layer_input_norm", "hidden"),
        },
        "experts": {
            "ffn_gate_inp": Part("router.proj", "experts hidden"),
            "ffn_gate_inp.scale": Part("router", "hidden", "scale"),
            "ffn_gate_exps": Part(f"{_EXPERTS}.gate_proj", "experts width hidden"),
            "ffn_up_exps": Part(f"{_EXPERTS}.up_proj", "experts width hidden"),
            "ffn_down_exps": Part(f"{_EXPERTS}.down_proj", "experts hidden width"),
            "ffn_down_exps.scale": Part("router", "experts", "per_expert_scale"),
            "pre_ffw_norm_2": Part("pre_feedforward_layernorm_2", "hidden"),
            "post_ffw_norm_1": Part("post_feedforward_layernorm_1", "hidden"),
            "post_ffw_norm_2": Part("post_feedforward_layernorm_2", "hidden"),
        },
    },
    {
        **tables(),
        "per_layer_token_embd": Part("model.embed_tokens_per_layer", "input_vocab all_inputs", optional=True),
        "per_layer_model_proj": Part("model.per_layer_model_projection", "all_inputs hidden", optional=True),
        "per_layer_proj_norm": Part("model.per_layer_projection_norm", "inputs", optional=True),
    },
    unused=("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"),
)  # fmt: skip
