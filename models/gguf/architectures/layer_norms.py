"""Dense models with LayerNorm: Command R, StableLM, Orion, OLMo 1, Nemotron, StarCoder, Phi-2, NeoX, Falcon, GPT-2.

Guard: tests/models/gguf/test_layered.py.
"""

import numpy as np
from msgspec.structs import replace

from headrace.models.gguf.architecture import (
    Config,
    Contents,
    Entries,
    GGUFArchitecture,
    TensorRule,
    TensorRules,
    Vector,
)
from headrace.models.gguf.architectures.blocks import NORMS, attention, biases, minus_one, mlp, tables, ungated_mlp
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.target import Order
from headrace.runtime.errors import UnsupportedModelError

_ATTN_NORM = {"attn_norm": NORMS["attn_norm"]}
_FINAL_BIAS = {"output_norm.bias": tables()["output_norm"].bias}


def _stablelm(_metadata: Metadata, file: Contents, _config: Config) -> Entries:
    """Return whether both halves of a layer have the same input: they then have one norm."""
    return {"use_parallel_residual": not file.has("ffn_norm.weight")}


_STABLELM_LAYER = {
    **biases(_ATTN_NORM), **mlp(), **attention(),
    **biases({"ffn_norm": replace(NORMS["ffn_norm"], optional=True)}, optional=True),
}  # fmt: skip


def _stablelm_layers(config: Config) -> list[TensorRules]:
    """Return the tensors of each layer, with norms of single heads where the file has them."""
    layer = _STABLELM_LAYER
    if config["qk_layernorm"]:
        queries = _single_norms("q", "heads", config["num_attention_heads"])
        layer = layer | queries | _single_norms("k", "kv_heads", config["num_key_value_heads"])
    return [layer] * config["num_hidden_layers"]


def _single_norms(letter: str, heads: str, count: int) -> dict[str, TensorRule]:
    """Return the norms of single heads, which have a module each in the class, and are one tensor of the file.

    letter: of queries or keys. heads: name of their number, which is `count`.
    """
    source = f"attn_{letter}_norm"
    module = f"self_attn.{letter}_layernorm.norms"
    return {
        f"{source}_{head}": TensorRule(f"{module}.{head}", f"{heads} head", plain=True, source=source, index=head)
        for head in range(count)
    }


def _unit_norms(_: Metadata, config: Config) -> dict[str, Vector]:
    """Return the weights and biases of OLMo 1's norms, which have none."""
    layers = range(config["num_hidden_layers"])
    norms = ["model.norm", *(f"model.layers.{layer}.{part.module}" for layer in layers for part in NORMS.values())]
    size = config["hidden_size"]
    return {
        **{f"{norm}.weight": np.ones(size, np.float32) for norm in norms},
        **{f"{norm}.bias": np.zeros(size, np.float32) for norm in norms},
    }


def _nemotron(_metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the scaling of rotation under both of its names. Raises UnsupportedModelError for other kinds."""
    scaling = config.get("rope_scaling")
    if scaling is None:
        return {}
    if scaling["rope_type"] != "linear":
        raise UnsupportedModelError(f"a Nemotron with {scaling['rope_type']} RoPE scaling is not supported")
    return {"rope_scaling": scaling | {"type": "linear"}}


def _neox(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the rotation under the names of GPT-NeoX's class."""
    _check_inner(config)
    return {
        "rotary_emb_base": config["rope_theta"],
        "rotary_pct": config["partial_rotary_factor"],
        "use_parallel_residual": metadata.flag("{arch}.use_parallel_residual", True),
    }


def _gpt2(_metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the sizes under the names of GPT-2's class."""
    _check_inner(config)
    positions = config["max_position_embeddings"]
    return {
        "n_ctx": positions, "n_positions": positions, "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"], "n_layer": config["num_hidden_layers"],
    }  # fmt: skip


def _starcoder(_metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the sizes under the names of StarCoder's class, whose queries share one K/V head."""
    if config["num_key_value_heads"] != 1:
        raise UnsupportedModelError("a StarCoder with several key/value heads is not supported")
    positions = config["max_position_embeddings"]
    return {
        "n_positions": positions, "n_embd": config["hidden_size"], "n_head": config["num_attention_heads"],
        "n_layer": config["num_hidden_layers"], "n_inner": config["intermediate_size"],
    }  # fmt: skip


def _gpt2_layers(qkv: str) -> dict[str, dict[str, TensorRule]]:
    """Return the tensors of GPT-2's layers. qkv: shape of the joint projection."""
    return {
        "layer": biases({
            "attn_norm": TensorRule("ln_1", "hidden"), "ffn_norm": TensorRule("ln_2", "hidden"),
            **ungated_mlp("mlp.c_fc", "mlp.c_proj"),
            "attn_qkv": TensorRule("attn.c_attn", qkv), "attn_output": TensorRule("attn.c_proj", "hidden hidden"),
        }),
    }  # fmt: skip


def _check_inner(config: Config) -> None:
    """Raise UnsupportedModelError unless feed-forwards are four times as wide as the model, as in the classes."""
    if config["intermediate_size"] != 4 * config["hidden_size"]:
        width = config["intermediate_size"]
        raise UnsupportedModelError(f"a {config['model_type']} with feed-forwards of {width} is not supported")


def _by_head(config: Config) -> Order:
    """Return the rows with query, key and value of each head together: (3, H, D) -> (H, 3, D)."""
    rows = np.arange(3 * config["hidden_size"])
    return rows.reshape(3, config["num_attention_heads"], -1).swapaxes(0, 1).reshape(-1)


def _falcon(_metadata: Metadata, file: Contents, config: Config) -> Entries:
    """Return the form of Falcon's layers. Newer ones have two norms or several K/V heads."""
    _check_inner(config)
    newer = file.has("attn_norm_2.weight") or config["num_key_value_heads"] > 1
    return {
        "new_decoder_architecture": newer,
        "num_ln_in_parallel_attn": 2 if file.has("attn_norm_2.weight") else 1,
        "multi_query": not newer,
        "num_kv_heads": config["num_key_value_heads"],
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }


def _by_kv_head(config: Config) -> Order:
    """Return the rows with the queries, key and value of each K/V head together: (H + 2 G, D) -> (G, H / G + 2, D)."""
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    rows = np.arange((heads + 2 * kv_heads) * config["head_dim"]).reshape(-1, config["head_dim"])
    queries = rows[:heads].reshape(kv_heads, heads // kv_heads, -1)
    keys = rows[heads : heads + kv_heads, None]
    values = rows[heads + kv_heads :, None]
    return np.concatenate([queries, keys, values], axis=1).reshape(-1)


# The layers of StableLM, one half after the other
_SEQUENTIAL = GGUFArchitecture(
    "StableLmForCausalLM", "stablelm", {"layer": {**biases(NORMS), **mlp(), **attention()}}, tables() | _FINAL_BIAS,
    epsilon="layer_norm_eps", whole_heads=True, untied=True,
    constants={
        "qk_layernorm": False, "use_qkv_bias": False, "use_parallel_residual": False, "partial_rotary_factor": 1.0,
    },
)  # fmt: skip
_NEMOTRON = GGUFArchitecture(
    "NemotronForCausalLM", "nemotron", {"layer": {**biases(minus_one(NORMS)), **attention(), **ungated_mlp()}},
    minus_one(tables()) | _FINAL_BIAS, epsilon="norm_eps", rotates_part=True, scales_rope=True,
    constants={"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False}, entries=_nemotron,
)  # fmt: skip
_STARCODER2 = GGUFArchitecture(
    "Starcoder2ForCausalLM", "starcoder2",
    {"layer": {**biases({**NORMS, **ungated_mlp("mlp.c_fc", "mlp.c_proj")}), **attention()}},
    tables() | _FINAL_BIAS, epsilon="norm_epsilon", whole_heads=True,
    constants={"use_bias": True, "hidden_act": "gelu_pytorch_tanh"},
)  # fmt: skip

ROWS: dict[str, GGUFArchitecture] = {
    "command-r": GGUFArchitecture(
        "CohereForCausalLM", "cohere",
        {
            "layer": {
                **_ATTN_NORM, **attention(), **mlp(),
                "attn_q_norm": TensorRule("self_attn.q_norm", "heads head", plain=True, optional=True),
                "attn_k_norm": TensorRule("self_attn.k_norm", "kv_heads head", plain=True, optional=True),
            },
        },
        tables(head=None), keys=("intermediate_size", "logit_scale"), epsilon="layer_norm_eps", whole_heads=True,
        constants={"attention_bias": False, "layer_norm_bias": False},
        by_tensor={"use_qk_norm": "attn_q_norm.weight"},
    ),
    "stablelm": GGUFArchitecture(
        "StableLmForCausalLM", "stablelm", {},
        tables() | _FINAL_BIAS, epsilon="layer_norm_eps", whole_heads=True, untied=True, rotates_part=True,
        by_tensor={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"}, entries=_stablelm,
        layers=_stablelm_layers,
    ),
    "nemotron": _NEMOTRON,
    # The same layers, with biases; its norms have no 1 added, which those of the class add.
    "jais2": replace(_NEMOTRON, constants={"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}),
    "orion": _SEQUENTIAL,
    "olmo": replace(
        _SEQUENTIAL, groups={"layer": {**mlp(), **attention(permuted=True)}}, made=_unit_norms,
        tables={key: part for key, part in tables().items() if key != "output_norm"},
    ),
    "starcoder2": _STARCODER2,
    "codeshell": _STARCODER2,
    "phi2": GGUFArchitecture(
        "PhiForCausalLM", "phi",
        {
            "layer": {
                **biases({**_ATTN_NORM, **ungated_mlp("mlp.fc1", "mlp.fc2")}),
                **biases(attention(output="dense"), "attn_output"),
            },
        },
        biases(tables("model.final_layernorm"), "output_norm", "output"), epsilon="layer_norm_eps", whole_heads=True,
        rotates_part=True, constants={"tie_word_embeddings": False},
    ),
    "gptneox": GGUFArchitecture(
        "GPTNeoXForCausalLM", "gpt_neox",
        {
            "layer": biases({
                **NORMS, **ungated_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
                "attn_qkv": TensorRule("attention.query_key_value", "3*hidden hidden", rows=_by_head),
                "attn_output": TensorRule("attention.dense", "hidden hidden"),
            }),
        },
        biases(tables("model.final_layer_norm", "model.embed_in", "model.embed_out"), "output_norm"),
        epsilon="layer_norm_eps", whole_heads=True, untied=True, rotates_part=True, layer="model.h.{}", entries=_neox,
    ),
    "falcon": GGUFArchitecture(
        "FalconForCausalLM", "falcon",
        {
            "layer": {
                **ungated_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
                "attn_qkv": TensorRule("self_attention.query_key_value", "qkv hidden", rows=_by_kv_head),
                "attn_output": TensorRule("self_attention.dense", "hidden hidden"),
            },
            "two_norms": biases(
                {"attn_norm": TensorRule("ln_mlp", "hidden"), "attn_norm_2": TensorRule("ln_attn", "hidden")}
            ),
            "one_norm": biases(_ATTN_NORM),
        },
        biases(tables("transformer.ln_f", "transformer.word_embeddings"), "output_norm"), entries=_falcon,
        epsilon="layer_norm_epsilon", whole_heads=True, layer="transformer.h.{}",
        kinds=lambda config: [("layer", "two_norms")] * config["num_hidden_layers"],
        otherwise={"two_norms": ("attn_norm_2", "one_norm")},
    ),
    "gpt2": GGUFArchitecture(
        "GPT2LMHeadModel", "gpt2",
        _gpt2_layers("3*hidden hidden"),
        {
            **biases(tables("model.ln_f", "model.wte", None), "output_norm"),
            "position_embd": TensorRule("model.wpe", "positions hidden"),
        },
        epsilon="layer_norm_epsilon", whole_heads=True, layer="model.h.{}", entries=_gpt2,
        sizes=lambda config: {"positions": config["max_position_embeddings"]},
    ),
    "starcoder": GGUFArchitecture(
        "GPTBigCodeForCausalLM", "gpt_bigcode",
        _gpt2_layers("qkv hidden"),
        {
            **biases(tables("transformer.ln_f", "transformer.wte"), "output_norm"),
            "position_embd": TensorRule("transformer.wpe", "positions hidden"),
        },
        epsilon="layer_norm_epsilon", whole_heads=True, layer="transformer.h.{}", entries=_starcoder,
        sizes=lambda config: {"positions": config["max_position_embeddings"]},
    ),
}  # fmt: skip
