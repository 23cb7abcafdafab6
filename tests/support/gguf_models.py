"""Tiny GGUF files for every architecture headrace converts, made from Hugging Face weights the way llama.cpp's
converter does it: names mapped, Q and K rows of llama-family models permuted, 1 added to Gemma's norm weights.

`VARIANTS` are the models, `VOCABULARIES` the frozen vocabularies; both are also what llama.cpp's recorded answers
(`llama_cpp.json`) were computed on, so neither may change without recording again.
"""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from headrace.models.text.detokenizer import byte_alphabet
from headrace.models.text.vocabulary import Vocabulary, merges_by_score

_VOCABULARIES = Path(__file__).with_name("gguf_vocabularies.json")
VOCABULARIES: dict[str, dict[str, list[Any]]] = json.loads(_VOCABULARIES.read_text()) | {
    "minimal": {"tokens": ["<s>", "</s>", "a", "b", "ab"], "types": [3, 3, 1, 1, 1], "merges": ["a b"]}
}


def _of_characters() -> dict[str, list[Any]]:
    """The SentencePiece vocabulary with merges in place of scores."""
    stored = VOCABULARIES["sentencepiece"]
    pairs = merges_by_score(Vocabulary(stored["tokens"], stored["types"]), stored["scores"])
    merges = [" ".join(pair) for pair in pairs]
    return {"tokens": stored["tokens"], "types": stored["types"], "merges": merges}


VOCABULARIES["characters"] = _of_characters()


def _of_bytes() -> dict[str, list[Any]]:
    """The byte-level vocabulary as llama.cpp's converter writes RWKV's, with parts of characters as tokens."""
    stored = VOCABULARIES["byte_level"]
    alphabet = byte_alphabet()
    tokens = [
        repr(bytes(alphabet[char] for char in token))[2:-1] if kind == 1 else token
        for token, kind in zip(stored["tokens"], stored["types"], strict=True)
    ]
    parts = [repr(part)[2:-1] for part in (b"\xe2\x80", b" \xe2\x80", b"\n\xe6")]
    parts = [part for part in parts if part not in tokens]
    return {"tokens": [*tokens, *parts], "types": [*stored["types"], *[1] * len(parts)]}


VOCABULARIES["rwkv"] = _of_bytes()

Weights = dict[str, np.ndarray]
_PERMUTED = ("llama", "internlm2", "smollm3", "granite", "granitemoe", "minicpm", "mistral3")  # rows of Q and K

# Byte offsets of the float16 scales in a block.
SCALES_AT = {
    "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,),
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
    "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip

_BASE: dict[str, Any] = {
    "hidden": 64, "inner": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocabulary": "byte_level",
    "tied": False, "biases": (), "qk_norm": False, "sandwich": False, "metadata": {}, "rope_factor": None,
    "experts": 0, "shared": 0, "kinds": None, "names": {}, "context": 256,
}  # fmt: skip
_O_BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}

_QKV = ("attn_q", "attn_k", "attn_v")
_STACKED = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_MIXED = ("attn_norm", *_QKV, "attn_output", "ffn_norm", "ffn_gate_inp", *_STACKED)


def _expert_names(router: str, experts: str) -> dict[str, str]:
    parts = {f"ffn_{part}_exps": f"model.layers.{{}}.{experts}.{part}_proj" for part in ("gate", "up", "down")}
    return {"ffn_gate_inp": f"model.layers.{{}}.{router}", **parts}


_GRANITE = {"attention.scale": 0.2, "embedding_scale": 4.0, "residual_scale": 0.5, "logit_scale": 6.0}
_MINICPM = {"embedding_scale": 12.0, "residual_scale": 1.4 / math.sqrt(2), "logit_scale": 2.0}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2}
_PHI3 = {"kinds": ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")}
_LONG = {
    "rope.dimension_count": 12, "rope.scaling.original_context_length": 256,  # llama.cpp's least
    "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(256)),
}  # fmt: skip

_OLMO = (
    *_QKV, "attn_output", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down",
    "post_ffw_norm",
)  # fmt: skip

# name -> (GGUF architecture, what it adds to the base). Metadata keys get the architecture in front.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-spm": ("llama", {"vocabulary": "sentencepiece", "tied": True}),
    "llama-3": ("llama", {"rope_factor": 8.0, "head_dim": 32, "metadata": {"rope.freq_base": 5e5}}),
    "llama-linear": ("llama", {"metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}}),
    "llama-biased": ("llama", {"biases": _O_BIASED}),
    "qwen2": ("qwen2", {"biases": ("attn_q", "attn_k", "attn_v"), "tied": True}),
    "qwen2-yarn": ("qwen2", {"biases": ("attn_q", "attn_k", "attn_v"), "metadata": _YARN}),
    "qwen2-yarn-attn": (
        "qwen2",
        {"biases": ("attn_q", "attn_k", "attn_v"), "metadata": {**_YARN, "rope.scaling.attn_factor": 1.5}},
    ),
    "qwen3": ("qwen3", {"qk_norm": True, "head_dim": 32}),
    "gemma": ("gemma", {"vocabulary": "sentencepiece", "tied": True, "head_dim": 32}),
    "gemma2": (
        "gemma2",
        {
            "vocabulary": "sentencepiece", "tied": True, "sandwich": True, "head_dim": 32,
            "metadata": {
                "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096
            },
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "vocabulary": "sentencepiece", "tied": True, "sandwich": True, "head_dim": 32, "qk_norm": True,
            "layers": 7, "metadata": {"attention.sliding_window": 12, "rope.freq_base": 1e6},
        },
    ),
    "mixtral": (
        "llama",
        {
            "experts": 4, "kinds": _MIXED, "metadata": _EXPERTS,
            "names": _expert_names("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"),
        },
    ),
    "internlm2": ("internlm2", {}),
    "exaone": ("exaone", {"rope_factor": 8.0, "head_dim": 16, "metadata": {"rope.freq_base": 5e5}}),
    "smollm3": ("smollm3", {"layers": 5, "tied": True}),
    "granite": ("granite", {"tied": True, "metadata": _GRANITE}),
    "minicpm": ("minicpm", {"metadata": _MINICPM}),
    "minicpm-long": (
        "minicpm",
        {
            "tied": True, "long_factors": True, "context": 256,
            "metadata": {**_MINICPM, "rope.scaling.type": "longrope", "rope.scaling.original_context_length": 256},
        },
    ),
    "granitemoe": (
        "granitemoe",
        {
            "tied": True, "experts": 4, "kinds": _MIXED, "metadata": {**_GRANITE, **_EXPERTS},
            "names": _expert_names("block_sparse_moe.router.layer", "block_sparse_moe.switch_mlp"),
        },
    ),
    "phi3": ("phi3", _PHI3),
    "phi3-long": ("phi3", {**_PHI3, "tied": True, "long_factors": True, "context": 1024, "metadata": _LONG}),
    "qwen2moe": (
        "qwen2moe",
        {
            "experts": 4, "shared": 48, "biases": _QKV,
            "kinds": (*_MIXED, "ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
            "metadata": {**_EXPERTS, "expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 48},
        },
    ),
    "qwen3moe": (
        "qwen3moe",
        {
            "experts": 4, "head_dim": 32, "kinds": (*_MIXED, "attn_q_norm", "attn_k_norm"),
            "metadata": {**_EXPERTS, "expert_feed_forward_length": 96},
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        {
            "experts": 4, "layers": 4, "head_dim": 32,
            "kinds": tuple(kind if kind != "ffn_norm" else "post_attention_norm" for kind in (*_MIXED, "attn_sinks")),
            "biases": (*_QKV, "attn_output", "ffn_gate_inp", *_STACKED),
            "names": _expert_names("mlp.router", "mlp.experts"),
            "metadata": {
                **_EXPERTS, "expert_feed_forward_length": 96, "attention.sliding_window": 12, "rope.freq_base": 1.5e5,
                "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
            },
        },
    ),
    "olmo2": (
        "olmo2",
        {
            "wide_norms": True, "kinds": _OLMO,
        },
    ),
    "seed_oss": (
        "seed_oss",
        {
            "biases": _QKV, "head_dim": 32,
            "kinds": ("attn_norm", *_QKV, "attn_output", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down"),
        },
    ),
    "ernie4_5": ("ernie4_5", {"tied": True}),
    "olmo3": (
        "olmo2",
        {
            "wide_norms": True, "layers": 4, "kinds": _OLMO, "metadata": {**_YARN, "attention.sliding_window": 12},
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "head_dim": 32, "metadata": {
                **_YARN, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1,
                "rope.scaling.original_context_length": 8,
            },
        },
    ),
    "cohere2": (
        "cohere2",
        {
            "tied": True, "layers": 5, "epsilon": "layer_norm",
            "kinds": ("attn_norm", *_QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
            "metadata": {"attention.sliding_window": 12, "logit_scale": 0.25},
        },
    ),
    "exaone4": ("exaone4", {"kinds": _OLMO, "rope_factor": 8.0, "metadata": {"rope.freq_base": 5e5}}),
    "glm4": (
        "glm4",
        {
            "head_dim": 32, "biases": _QKV, "metadata": {"rope.dimension_count": 16}, "fused_up": True,
            "kinds": (
                "attn_norm", *_QKV, "attn_output", "post_attention_norm", "ffn_norm", "ffn_up", "ffn_down",
                "post_ffw_norm",
            ),
            "names": {
                "post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
                "pre_ffn_norm": "model.layers.{}.post_attention_layernorm",
                "post_ffw_norm": "model.layers.{}.post_mlp_layernorm",
            },
            "sandwich": True,
        },
    ),
    "hunyuan-dense": (
        "hunyuan-dense",
        {
            "qk_norm": True, "head_dim": 32,
            "names": {
                "attn_q_norm": "model.layers.{}.self_attn.query_layernorm",
                "attn_k_norm": "model.layers.{}.self_attn.key_layernorm",
            },
        },
    ),
}  # fmt: skip


def shape_of(variant: str, **changes: Any) -> dict[str, Any]:
    """Sizes and features of a variant, with `changes` on top."""
    return {**_BASE, **VARIANTS[variant][1], **changes}


def hf_weights(variant: str, seed: int = 0, **changes: Any) -> Weights:
    """Random float32 weights under Hugging Face names and layout."""
    shape = shape_of(variant, **changes)
    rng = np.random.default_rng(seed)
    return {_hf_name(kind, layer, leaf, shape): _random(rng, leaf, dims) for kind, layer, leaf, dims in _tensors(shape)}


def gguf_weights(variant: str, weights: Weights, **changes: Any) -> Weights:
    """The same weights under GGUF names and in llama.cpp's layout."""
    arch = VARIANTS[variant][0]
    shape = shape_of(variant, **changes)
    result: Weights = {}
    for kind, layer, leaf, _ in _tensors(shape):
        values = weights[_hf_name(kind, layer, leaf, shape)]
        if arch in _PERMUTED and kind in ("attn_q", "attn_k"):
            values = _interleave(values, shape["heads"] if kind == "attn_q" else shape["kv_heads"])
        if arch.startswith("gemma") and kind.endswith("norm"):
            values = values + np.float32(1)
        if kind == "ffn_gate_inp_shexp":
            values = values.reshape(-1)
        prefix = "" if layer is None else f"blk.{layer}."
        result[f"{prefix}{kind}.{leaf}"] = values
    if shape["rope_factor"]:
        result["rope_freqs.weight"] = llama3_factors(shape["rope_factor"], shape["head_dim"])
    if shape.get("long_factors"):
        count = shape["metadata"].get("rope.dimension_count", shape["head_dim"]) // 2
        result["rope_factors_short.weight"] = np.linspace(1, 1.2, count, dtype=np.float32)
        result["rope_factors_long.weight"] = np.linspace(1, 9, count, dtype=np.float32)
    return result


def write_gguf(
    path: Path, variant: str, *, matrices: str = "F32", experts: str | None = None, seed: int = 0, **changes: Any
) -> Path:
    """Write the variant with its matrices stored as the tensor type `matrices`, those of experts as `experts`."""
    tensors = gguf_weights(variant, hf_weights(variant, seed, **changes), **changes)
    writer = header(path, variant, **changes)
    rng = np.random.default_rng(seed)
    for name, values in tensors.items():
        stored = experts or matrices if values.ndim == 3 else matrices
        if values.ndim == 1 or name.endswith("bias") or stored == "F32":
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(
                name, random_blocks(rng, stored, *values.shape), raw_dtype=gguf.GGMLQuantizationType[stored]
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


RANK = 4  # of adapters
ADAPTER_SCALE = 2.0


def write_split(folder: Path, most: int = 8) -> list[Path]:
    """Write a llama in parts of at most `most` tensors; return their paths."""
    folder.mkdir()
    writer = header(folder / "m.gguf", "llama")
    writer.split_max_tensors = most
    for name, values in gguf_weights("llama", hf_weights("llama")).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file(folder / "m.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def adapter_factors(variant: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A (r, K) and B (N, r) of an adapter by the tensor that they change: all matrices of layers."""
    rng = np.random.default_rng(3)
    weights = gguf_weights(variant, hf_weights(variant))
    return {
        name: (
            0.05 * rng.standard_normal((RANK, values.shape[1])).astype(np.float32),
            rng.standard_normal((values.shape[0], RANK)).astype(np.float32),
        )
        for name, values in weights.items()
        if name.startswith("blk.") and values.ndim == 2
    }


def write_adapter(
    path: Path,
    variant: str,
    *,
    architecture: str | None = None,
    kind: str = "lora",
    tensors: dict[str, tuple[int, int]] | None = None,
    extra: dict[str, tuple[int, ...]] | None = None,
    invoked: bool = False,
) -> Path:
    """Write an adapter of the variant as llama.cpp's converter does.

    tensors: shapes of the matrices that it changes, in place of all. extra: shapes of further tensors.
    """
    writer = gguf.GGUFWriter(path, architecture or VARIANTS[variant][0])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, kind)
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, ADAPTER_SCALE * RANK)
    if invoked:
        writer.add_array(gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS, [5, 6])
    factors = adapter_factors(variant)
    if tensors is not None:
        shapes = tensors.items()
        factors = {name: (np.ones((RANK, k), np.float32), np.ones((n, RANK), np.float32)) for name, (n, k) in shapes}
    for name, (a, b) in factors.items():
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
    for name, shape in (extra or {}).items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header(path: Path, variant: str, **changes: Any) -> gguf.GGUFWriter:
    """A writer with the variant's metadata and vocabulary, no tensors yet."""
    arch = VARIANTS[variant][0]
    shape = shape_of(variant, **changes)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(shape["layers"])
    writer.add_context_length(shape["context"])
    writer.add_embedding_length(shape["hidden"])
    writer.add_feed_forward_length(shape["inner"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    (writer.add_layer_norm_eps if shape.get("epsilon") else writer.add_layer_norm_rms_eps)(1e-5)
    for key, value in shape["metadata"].items():
        add = {
            str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool,
            list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(f"{arch}.{key}", value)
    add_vocabulary(writer, shape["vocabulary"])
    if (template := shape.get("template", "{{ messages[0]['content'] }}")) is not None:
        writer.add_chat_template(template)
    return writer


def add_vocabulary(writer: gguf.GGUFWriter, name: str, *, pre: str = "smollm", space_prefix: bool = False) -> None:
    """Add one of `VOCABULARIES` the way its kind is stored."""
    vocabulary = VOCABULARIES[name]
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if name == "rwkv":
        writer.add_tokenizer_model("rwkv")
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
    elif "merges" in vocabulary:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(vocabulary["merges"])
        bos = int(name == "characters")
        writer.add_bos_token_id(bos)
        writer.add_eos_token_id(bos + 1)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(vocabulary["scores"])
        writer.add_add_space_prefix(space_prefix)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)


def random_blocks(rng: np.random.Generator, kind: str, *dims: int) -> np.ndarray:
    """(..., bytes per row) of arbitrary blocks of a tensor type, only their float16 scales kept sane."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if kind in ("F16", "BF16", "F32"):
        values = rng.standard_normal(dims).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(*dims[:-1], -1)
    blocks = rng.integers(0, 256, (math.prod(dims) // block, size), dtype=np.uint8)
    for start in SCALES_AT[kind]:
        scales = (rng.standard_normal(len(blocks)) * 1e-3).astype(np.float16)
        blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    if kind == "IQ1_M":  # its scale is in the high bits of four numbers
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x10
    if kind == "MXFP4":  # an exponent in its place
        blocks[:, 0] = rng.integers(112, 120, len(blocks))
    return blocks.reshape(*dims[:-1], -1)


_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "pre_ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    "attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "attn_sinks": "model.layers.{}.self_attn",
    "ffn_gate_up": "model.layers.{}.mlp.gate_up_proj",
    "ffn_gate_inp": "model.layers.{}.mlp.gate",
    "ffn_gate_exps": "model.layers.{}.mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "model.layers.{}.mlp.switch_mlp.up_proj",
    "ffn_down_exps": "model.layers.{}.mlp.switch_mlp.down_proj",
    "ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
    "ffn_gate_shexp": "model.layers.{}.mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "model.layers.{}.mlp.shared_expert.up_proj",
    "ffn_down_shexp": "model.layers.{}.mlp.shared_expert.down_proj",
}


def _hf_name(kind: str, layer: int | None, leaf: str, shape: dict[str, Any]) -> str:
    """llama.cpp's ffn_norm stands before the feed-forward half; Hugging Face's plain name for it is by what it
    follows, unless there is also a norm behind the attention half."""
    if kind == "ffn_norm":
        kind = "pre_ffn_norm" if shape["sandwich"] else "post_attention_norm"
    if kind == "ffn_up" and _fused_up(shape):
        kind = "ffn_gate_up"
    leaf = "sinks" if kind == "attn_sinks" else leaf
    return f"{shape['names'].get(kind, _HF_NAMES[kind]).format(layer)}.{leaf}"


def _fused_up(shape: dict[str, Any]) -> bool:
    return "attn_qkv" in (shape["kinds"] or ()) or bool(shape.get("fused_up"))


def _tensors(shape: dict[str, Any]) -> list[tuple[str, int | None, str, tuple[int, ...]]]:
    """(GGUF kind, layer, leaf, dimensions) of every tensor, in file order."""
    hidden = shape["hidden"]
    inner = shape["inner"]
    head = shape["head_dim"]
    vocab = len(VOCABULARIES[shape["vocabulary"]]["tokens"])
    queries = shape["heads"] * head
    keys = shape["kv_heads"] * head
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    if shape["qk_norm"]:
        block |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    if shape["sandwich"]:
        block |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
    count = shape["experts"]
    shared = shape["shared"]
    wide = shape.get("wide_norms")
    every = block | {
        "attn_q_norm": (queries if wide else head,), "attn_k_norm": (keys if wide else head,),
        "post_attention_norm": (hidden,), "post_ffw_norm": (hidden,), "attn_qkv": (queries + 2 * keys, hidden),
        "attn_sinks": (shape["heads"],), "ffn_gate_inp": (count, hidden), "ffn_gate_exps": (count, inner, hidden),
        "ffn_up_exps": (count, inner, hidden), "ffn_down_exps": (count, hidden, inner),
        "ffn_gate_inp_shexp": (1, hidden), "ffn_gate_shexp": (shared, hidden), "ffn_up_shexp": (shared, hidden),
        "ffn_down_shexp": (hidden, shared),
    }  # fmt: skip
    if shape["kinds"]:
        if _fused_up(shape):
            every["ffn_up"] = (2 * inner, hidden)
        block = {kind: every[kind] for kind in shape["kinds"]}
    result: list[tuple[str, int | None, str, tuple[int, ...]]] = [("token_embd", None, "weight", (vocab, hidden))]
    for layer in range(shape["layers"]):
        result += [(kind, layer, "weight", dims) for kind, dims in block.items()]
        result += [(kind, layer, "bias", block[kind][:-1]) for kind in shape["biases"]]
    result.append(("output_norm", None, "weight", (hidden,)))
    if not shape["tied"]:
        result.append(("output", None, "weight", (vocab, hidden)))
    return result


def _random(rng: np.random.Generator, leaf: str, dims: tuple[int, ...]) -> np.ndarray:
    scale = 0.1 if len(dims) == 1 or leaf == "bias" else 1.5 / math.sqrt(dims[-1])
    offset = 0.0 if leaf == "bias" or len(dims) > 1 else 0.5
    return (rng.standard_normal(dims) * scale + offset).astype(np.float32)


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves (0..D/2, D/2..D) to pairs (0, D/2, 1, D/2 + 1, ...)."""
    split = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def llama3_factors(factor: float, head_dim: int, theta: float = 5e5) -> np.ndarray:
    """The content of `rope_freqs.weight` for Llama 3.1 and later."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
