"""Dense models: Llama and its kin, Qwen 1 to 3, Granite, MiniCPM, Phi-3, OLMo 2, Cohere 2, EXAONE, GLM-4 and others.

Functions before the rows return entries of config.json that a family's files state in their own way. `_baichuan` only
refuses files, `_permuted_head` orders a norm's weights, and `_xielu` makes parameters from metadata. `GGUFArchitecture`
explains the fields of a row.

Guards: tests/models/gguf/test_convert.py, test_layered.py and test_config.py.
"""

import numpy as np
from msgspec.structs import replace

from headrace.models.gguf.architecture import Config, Contents, Entries, GGUFArchitecture, TensorRule, Vector
from headrace.models.gguf.architectures.blocks import (
    FUSED_MLP,
    LATENT_QUERIES,
    LATENTS,
    NORMS,
    POST_NORMS,
    SANDWICH_NORMS,
    WIDE_NORMS,
    attention,
    equal_layers,
    head_norms,
    minus_one,
    mlp,
    tables,
    ungated_mlp,
)
from headrace.models.gguf.keys import SECTIONS, layer_type, window_period, windows
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.target import Order, interleaved
from headrace.runtime.errors import UnsupportedModelError

_EXAONE4_WINDOWED = 64  # layers of the size with sliding windows
_MINICPM3_EPSILON = 1e-5  # of its class for latents
_BAICHUAN_ALIBI = 40  # layers of the size with ALiBi, by which llama.cpp knows it

_ATTN_NORM = {"attn_norm": NORMS["attn_norm"]}
_POST_NORM = {"post_attention_norm": POST_NORMS["post_attention_norm"]}
_POST_FFW_NORM = {"post_ffw_norm": TensorRule("post_feedforward_layernorm", "hidden")}
PLAIN = {**NORMS, **attention(), **mlp()}
PERMUTED = {**NORMS, **attention(permuted=True), **mlp()}
# Biases of llama.cpp's `llama`, which the file has or not.
LLAMA_BIASES = {"attention_bias": "attn_output.bias", "mlp_bias": "ffn_down.bias"}
_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
GRANITE_KEYS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def granite(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the factor of scores. Raises UnsupportedModelError for a model without positions."""
    if not metadata.flag("{arch}.rope.scaling.finetuned", True):
        raise UnsupportedModelError("a Granite without RoPE is not supported")
    return {"attention_multiplier": metadata.positive("{arch}.attention.scale", config["head_dim"] ** -0.5)}


def _hunyuan_vl(metadata: Metadata, _file: Contents, _config: Config) -> Entries:
    """Return the factor of the base of rotation, which files of dense models have in the base itself."""
    alpha = metadata.number("{arch}.rope.scaling.alpha", 0.0)
    if not alpha:
        return {}
    return {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "alpha": alpha, "factor": 1.0}}


def _granite_swa(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the windows and rotations of each layer; a base of 0 stands for no rotation."""
    layers = config["num_hidden_layers"]
    pattern = "{arch}.attention.rope_pattern"
    rotates = metadata.flags(pattern, layers) if metadata.is_list(pattern) else [True] * layers
    slides = metadata.flags("{arch}.attention.sliding_window_pattern", layers)
    return {
        **granite(metadata, file, config),
        "layer_types": [layer_type(slide) for slide in slides],
        "layer_rope_theta": [config["rope_theta"] if rotate else 0 for rotate in rotates],
    }


def _phi3(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the window, if there is one; the share of a head is stated only if it is a part."""
    if config["partial_rotary_factor"] == 1:
        config.pop("partial_rotary_factor")
    window = metadata.integer("{arch}.attention.sliding_window", 0)
    return {"sliding_window": window} if window else {}


def _olmo2(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the entries of OLMo 3, if there is a window."""
    if not metadata.integer("{arch}.attention.sliding_window", 0):
        return {}
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return olmo3 | windows(metadata, config["num_hidden_layers"], 4)


def _ministral(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the nested RoPE section that Ministral 3's class reads."""
    yarn = config.pop("rope_scaling", None)
    if yarn is None or yarn["rope_type"] != "yarn":
        raise UnsupportedModelError("GGUF architecture 'mistral3' without YaRN is not supported")
    return {
        "rope_parameters": {
            **yarn, "type": "yarn", "rope_theta": config["rope_theta"], "mscale": 1.0,
            "mscale_all_dim": metadata.number("{arch}.rope.scaling.yarn_log_multiplier", 0.0),
            "llama_4_scaling_beta": metadata.number("{arch}.attention.temperature_scale", 0.0),
        }
    }  # fmt: skip


def _cohere2(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the period of layers without windows."""
    return {"sliding_window_pattern": window_period(metadata, config["num_hidden_layers"], 4)}


def _exaone4(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the windows of EXAONE 4: llama.cpp gives one to its size of 64 layers alone."""
    layers = config["num_hidden_layers"]
    if layers != _EXAONE4_WINDOWED:
        return {"sliding_window": None, "sliding_window_pattern": None}
    window = metadata.integer("{arch}.attention.sliding_window", 4096, minimum=1)
    pattern = "L" * (window_period(metadata, layers, 4) - 1) + "G"
    return {"sliding_window": window, "sliding_window_pattern": pattern}


def _chatglm(_metadata: Metadata, file: Contents, _config: Config) -> Entries:
    """Return whether queries, keys and values have biases, stored as one or apart."""
    return {"attention_bias": file.has("attn_qkv.bias") or file.has("attn_q.bias")}


def _qwen(_metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the width of Qwen 1's feed-forwards: the file states that of gate and up together."""
    return {"intermediate_size": config["intermediate_size"] // 2}


def _baichuan(_metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Raise UnsupportedModelError for the size with ALiBi."""
    if config["num_hidden_layers"] == _BAICHUAN_ALIBI:
        raise UnsupportedModelError("a Baichuan 13B is not supported: it has ALiBi in place of RoPE")
    return {}


def _minicpm3(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the sizes of heads of attention over latents. The row has the factors, llama.cpp's constants."""
    if config["rms_norm_eps"] != _MINICPM3_EPSILON:
        raise UnsupportedModelError("a MiniCPM3 with another epsilon is not supported")
    query = config.pop("head_dim")
    rotated = round(query * config.pop("partial_rotary_factor"))
    value = config["hidden_size"] // config["num_attention_heads"]
    if not rotated < query or metadata.integer("{arch}.attention.value_length", value) != value:
        raise UnsupportedModelError("a MiniCPM3 with other heads is not supported")
    return {"qk_rope_head_dim": rotated, "qk_nope_head_dim": query - rotated, "v_head_dim": value}


def _permuted_head(config: Config) -> Order:
    """Return the numbers of a norm of heads in Hugging Face order."""
    return interleaved(1, config["head_dim"])


def _nanbeige(metadata: Metadata, _file: Contents, _config: Config) -> Entries:
    """Return the times that all layers run in a step."""
    return {
        "num_loops": metadata.integer("{arch}.num_loops", 1, minimum=1, maximum=64),
        "skip_loop_final_norm": metadata.flag("{arch}.skip_loop_final_norm", False),
    }


_QUERY_NORM = "blk.0.attn_q_norm.weight"
_KEY_NORM = "blk.0.attn_k_norm.weight"


def _muse(metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the factors and the rotation of Muse. Raises UnsupportedModelError for norms of heads with weights.

    llama.cpp's converter writes the factor of scores as all weights of each layer's norm of queries, and ones as those
    of keys. Layer 0 is read for all layers.
    """
    queries = set(file.values(_QUERY_NORM) or ())
    if len(queries) != 1 or set(file.values(_KEY_NORM) or ()) != {1.0}:
        raise UnsupportedModelError("a Muse with weights of its norms of heads is not supported")
    return {
        "qk_scale_factor": round(queries.pop(), 6), "output_multiplier": metadata.positive("{arch}.logit_scale"),
        "final_logit_softcapping": metadata.positive("{arch}.final_logit_softcapping"),
        "rope_parameters": {"rope_theta": config["rope_theta"]},
    }  # fmt: skip


def _spark(metadata: Metadata, _file: Contents, config: Entries) -> Entries:
    """Return the rotations of layers with and without windows, in place of the entries for all layers."""
    theta = config.pop("rope_theta")
    head = config["head_dim"]
    local = metadata.integer("{arch}.rope.dimension_count_swa", head, minimum=2, maximum=head)
    return {
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, "partial_rotary_factor": config.pop("partial_rotary_factor")},
            "sliding_attention": {
                "rope_theta": metadata.positive("{arch}.rope.freq_base_swa", theta),
                "partial_rotary_factor": local / head,
            },
        },
    }  # fmt: skip


def _xielu(metadata: Metadata, config: Config) -> dict[str, Vector]:
    """Return the parameters of the activations, which the file has as metadata."""
    layers = config["num_hidden_layers"]
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    return {
        f"model.layers.{layer}.mlp.act_fn.{name}": np.full(shape, value, np.float32)
        for name, shape in shapes.items()
        for layer, value in enumerate(metadata.numbers(f"xielu.{name}", layers))
    }


_LLAMA = equal_layers("LlamaForCausalLM", "llama", PERMUTED, by_tensor=LLAMA_BIASES)
_GRANITE = equal_layers(
    "GraniteForCausalLM", "granite", PERMUTED, keys=("intermediate_size", *GRANITE_KEYS), constants=_NO_BIASES,
    entries=granite, whole_heads=True,
)  # fmt: skip
_QWEN2 = equal_layers("Qwen2ForCausalLM", "qwen2", PLAIN, constants={"attention_bias": True})
_QWEN3 = equal_layers("Qwen3ForCausalLM", "qwen3", {**PLAIN, **head_norms()}, constants={"attention_bias": False})

ROWS: dict[str, GGUFArchitecture] = {
    "llama": _LLAMA,
    "internlm2": _LLAMA,
    "exaone": equal_layers("LlamaForCausalLM", "llama", PLAIN, by_tensor=LLAMA_BIASES),
    "smollm3": equal_layers(
        "SmolLM3ForCausalLM", "smollm3", PERMUTED, by_tensor=LLAMA_BIASES,
        constants={"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "granite": _GRANITE,
    "granite_swa": equal_layers(
        "GraniteSWAForCausalLM", "granite_swa", {**PERMUTED, "attn_sinks": TensorRule("self_attn", "heads", "sinks")},
        keys=("intermediate_size", "sliding_window", *GRANITE_KEYS), by_tensor=LLAMA_BIASES, entries=_granite_swa,
        whole_heads=True,
    ),
    "minicpm": _GRANITE,  # the same layers
    "minicpm3": equal_layers(
        "MiniCPM3ForCausalLM", "minicpm3",
        {
            **NORMS, **LATENTS, **LATENT_QUERIES,
            "attn_kv_b": TensorRule("self_attn.kv_b_proj", "heads*both kv_lora"), **mlp(),
        },
        keys=("intermediate_size", "q_lora_rank", "kv_lora_rank"), entries=_minicpm3, rotates_part=True,
        half="bfloat16",
        constants={"attention_bias": False, "dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12},
    ),
    "nanbeige": equal_layers(
        "NanbeigeForCausalLM", "nanbeige", PERMUTED, constants=_NO_BIASES, entries=_nanbeige, half="bfloat16",
    ),
    "muse-glimmer": GGUFArchitecture(
        "MuseGlimmerForCausalLM", "muse_glimmer",
        {
            "layer": {
                **minus_one(SANDWICH_NORMS), **attention(permuted=True), **mlp(),
                "attn_gate": TensorRule("self_attn.gate_proj", "heads*head hidden"),
            },
        },
        tables(), entries=_muse, window_period=4, ignored=("attn_q_norm.weight", "attn_k_norm.weight"),
        config_tensors=(_QUERY_NORM, _KEY_NORM), constants={"post_norm_eps": 1e-8, "hidden_activation": "silu"},
    ),
    "spark2_5": GGUFArchitecture(
        "Spark2_5ForCausalLM", "spark2_5",
        {
            "layer": {
                **NORMS, **mlp(), "attn_qkv": TensorRule("self_attn.q_k_v_proj", "qkv hidden"),
                "attn_gate": TensorRule("self_attn.g_proj", "heads hidden", plain=True),
                "attn_output": TensorRule("self_attn.out_proj", "hidden heads*head"),
            },
        },
        tables(embedding="model.embedding"), entries=_spark, rotates_part=True, window_period=4,
        constants={
            **_NO_BIASES, "hidden_act": "gelu", "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True,
        },
    ),
    "phi3": equal_layers(
        "Phi3ForCausalLM", "phi3",
        {
            **NORMS, "attn_qkv": TensorRule("self_attn.qkv_proj", "qkv hidden"),
            "attn_output": attention()["attn_output"], **FUSED_MLP,
        },
        constants={"attention_bias": False}, entries=_phi3, rotates_part=True, whole_heads=True,
    ),
    "xverse": equal_layers("LlamaForCausalLM", "llama", PERMUTED, constants=_NO_BIASES, whole_heads=True, untied=True),
    "baichuan": equal_layers("LlamaForCausalLM", "llama", PERMUTED, constants=_NO_BIASES, entries=_baichuan),
    "pangu-embedded": equal_layers("LlamaForCausalLM", "llama", PLAIN, by_tensor=LLAMA_BIASES),
    "qwen": equal_layers(
        "Qwen2ForCausalLM", "qwen2", PLAIN, constants={"attention_bias": True}, entries=_qwen, whole_heads=True,
    ),
    "qwen2": _QWEN2,
    "qwen2vl": replace(_QWEN2, unread=SECTIONS),
    "qwen3": _QWEN3,
    "qwen3vl": replace(_QWEN3, unread=SECTIONS),
    "olmo2": equal_layers(
        "Olmo2ForCausalLM", "olmo2", {**attention(), **WIDE_NORMS, **_POST_NORM, **mlp(), **_POST_FFW_NORM},
        constants={"attention_bias": False}, entries=_olmo2,
    ),
    "seed_oss": equal_layers(
        "SeedOssForCausalLM", "seed_oss", {**POST_NORMS, **attention(), **mlp()},
        constants={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
    "mistral3": equal_layers("Ministral3ForCausalLM", "ministral3", PERMUTED, entries=_ministral),
    "cohere2": equal_layers(
        "Cohere2ForCausalLM", "cohere2", {**_ATTN_NORM, **attention(), **mlp()}, epsilon="layer_norm_eps",
        keys=("intermediate_size", "sliding_window", "logit_scale"), constants={"attention_bias": False},
        entries=_cohere2,
    ),
    "exaone4": equal_layers(
        "Exaone4ForCausalLM", "exaone4", {**attention(), **head_norms(), **_POST_NORM, **mlp(), **_POST_FFW_NORM},
        entries=_exaone4,
    ),
    "glm4": equal_layers(
        "Glm4ForCausalLM", "glm4",
        {
            **NORMS, **attention(), "post_attention_norm": TensorRule("post_self_attn_layernorm", "hidden"),
            **FUSED_MLP, "post_ffw_norm": TensorRule("post_mlp_layernorm", "hidden"),
        },
        by_tensor={"attention_bias": "attn_q.bias"}, rotates_part=True,
    ),
    "chatglm": equal_layers(
        "GlmForCausalLM", "glm", {**NORMS, **attention(), **FUSED_MLP}, entries=_chatglm, rotates_part=True,
        whole_heads=True, half="bfloat16",
    ),
    "hunyuan-dense": equal_layers(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
        {**PLAIN, **head_norms("self_attn.query_layernorm", "self_attn.key_layernorm")},
        constants={"attention_bias": False, "use_qk_norm": True},
    ),
    "hunyuan_vl": equal_layers(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
        {**PLAIN, **head_norms("self_attn.query_layernorm", "self_attn.key_layernorm")},
        constants={"attention_bias": False, "use_qk_norm": True}, entries=_hunyuan_vl, unread=SECTIONS,
    ),
    "maincoder": equal_layers(  # the same layers, with the rotation of neighbouring numbers
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
        {
            **PERMUTED,
            "attn_q_norm": TensorRule("self_attn.query_layernorm", "head", rows=_permuted_head),
            "attn_k_norm": TensorRule("self_attn.key_layernorm", "head", rows=_permuted_head),
        },
        constants={"attention_bias": False, "use_qk_norm": True},
    ),
    "ernie4_5": equal_layers("Ernie4_5ForCausalLM", "ernie4_5", PLAIN, constants={"use_bias": False}),
    "apertus": GGUFArchitecture(
        "ApertusForCausalLM", "apertus",
        {
            "layer": {
                "attn_norm": TensorRule("attention_layernorm", "hidden"),
                "ffn_norm": TensorRule("feedforward_layernorm", "hidden"),
                **attention(), **head_norms(), **ungated_mlp(),
            },
        },
        tables(), made=_xielu, scales_rope=True, whole_heads=True,
        constants={
            **_NO_BIASES, "rope_scaling": None, "post_norm": False, "qk_norm": True, "hidden_act": "xielu",
        },
    ),
    "arcee": GGUFArchitecture(
        "ArceeForCausalLM", "arcee", {"layer": {**NORMS, **attention(permuted=True), **ungated_mlp()}}, tables(),
        scales_rope=True,
        constants={**_NO_BIASES, "rope_scaling": None, "hidden_act": "relu2"},
    ),
}  # fmt: skip
