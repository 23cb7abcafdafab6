"""The language model in a multimodal checkpoint (with vision towers, audio encoders, projectors). Headers only.

Its config is nested (`text_config`), and its tensors have a prefix that depends on the tool that wrote them. Both are
converted to those of a text-only checkpoint.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from headrace.models.architectures.layer_pairs import named_by_layer
from headrace.models.checkpoint.safetensors import Checkpoint, quantization_section
from headrace.models.checkpoint.tensor_info import TensorInfo

# model_type of checkpoints whose text part is an ordinary decoder that gets images as embeddings. For all others the
# `text_config` is not used as the model.
_NESTING = (
    "gemma3", "mistral3", "pixtral", "llava", "llava_next", "llava_next_video", "llava_onevision", "vipllava",
    "video_llava", "video_llama_3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "lfm2_vl", "internvl", "idefics2", "idefics3",
    "smolvlm", "got_ocr2", "lighton_ocr", "granite_docling", "exaone4_5", "qwen3_5", "qwen3_5_moe", "gemma4",
    "gemma4_unified", "llama4",
)  # fmt: skip
# model_type of the text part -> family with the same layers. Text positions are equal on all axes of multimodal
# rotation, so it equals ordinary rotation.
_FAMILIES = {"qwen3_vl_text": "qwen3", "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2"}
# Prefixes of the layers, the most specific first, and of the output projection.
BODIES = ("language_model.model.", "model.language_model.", "model.text_model.", "model.", "backbone.")
_TABLES = ("embed_tokens", "embeddings")
_HEADS = ("language_model.lm_head.", "lm_head.", "output.")
_DELTA = (
    (".linear_attn.", ".mixer."), (".experts.gate_up_proj", ".switch_mlp.input_linear.weight"),
    (".experts.down_proj", ".switch_mlp.down_proj.weight"),
)  # fmt: skip
_LFM2 = (
    (".conv.conv.", ".mixer.conv1d."), (".conv.", ".mixer."), (".self_attn.out_proj", ".self_attn.o_proj"),
    ("_layernorm.", "_norm."), (".operator_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm."),
    (".feed_forward.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."),
    ("model.embedding_norm", "model.norm"),
)  # fmt: skip
# Parts of module names by model_type of the text part, and what they are called here.
_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen3_5": _DELTA, "qwen3_5_moe": _DELTA, "qwen3_next": _DELTA, "lfm2": _LFM2, "lfm2_moe": _LFM2,
    "gemma4_text": (
        (".router.proj.", ".mlp.gate."), (".router.scale", ".mlp.router_norm.weight"),
        (".router.per_expert_scale", ".mlp.expert_scale"), (".experts.switch_glu.", ".mlp.switch_mlp."),
        (".experts.gate_up_proj", ".mlp.switch_mlp.input_linear.weight"),
        (".experts.down_proj", ".mlp.switch_mlp.down_proj.weight"),
    ),
    "llama4_text": ((".feed_forward.", ".mlp."), (".experts.", ".switch_mlp.")),
    "hunyuan_v1_dense": ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm.")),
    "minimax": (
        (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
    ),
    "falcon_h1": (
        (".mamba.", ".mixer."), (".feed_forward.", ".mlp."), (".pre_ff_layernorm.", ".post_attention_layernorm."),
        ("model.final_layernorm", "model.norm"),
    ),
    "olmo_hybrid": (
        (".linear_attn.o_proj", ".mixer.out_proj"), (".linear_attn.o_norm", ".mixer.norm"),
        (".linear_attn.", ".mixer."), (".attention_layer_norm.", ".input_layernorm."),
        (".feedforward_layer_norm.", ".post_attention_layernorm."),
    ),
    "kimi_linear": (
        (".block_sparse_moe.gate.e_score", ".mlp.e_score"), (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."), (".w3.", ".up_proj."),
    ),
    "nemotron_h": (("model.embeddings", "model.embed_tokens"), ("model.norm_f", "model.norm")),
    "granitemoehybrid": (
        (".mamba.", ".mixer."), (".shared_mlp.input_linear", ".mlp.gate_up_proj"),
        (".shared_mlp.output_linear", ".mlp.down_proj"),
        (".block_sparse_moe.input_linear.", ".mlp.switch_mlp.input_linear."),
        (".block_sparse_moe.output_linear.", ".mlp.switch_mlp.down_proj."), (".block_sparse_moe.", ".mlp."),
    ),
}  # fmt: skip
_DRAFTS = ("mtp.", "model.mtp_layers.")  # prefixes of layers that draft tokens
_OF_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\..*")
# Keys of the outer config that the text part inherits.
_OUTER = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization", "vocab_size")


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text-only view of a checkpoint. stored: tensor names in `tensors` -> names in the checkpoint.

    whole_norms: norms include what their family stores them without; None: as the convolutions show.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    stored: dict[str, str]
    ignored: dict[str, int]  # top-level names of the other parts -> bytes
    whole_norms: bool | None = None

    @property
    def quantization(self) -> dict[str, Any] | None:
        """Return MLX quantization settings as `Checkpoint` does, with the module names of the text part."""
        return quantization_section(self.config)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def describe_ignored(self) -> str | None:
        """Return a message on the parts that are not loaded; None if there are none."""
        if not self.ignored:
            return None
        parts = ", ".join(f"{part} ({size / 1e6:.0f} MB)" for part, size in self.ignored.items())
        return f"only text: {parts} is not loaded" if len(self.ignored) == 1 else f"only text: {parts} are not loaded"


def text_part(checkpoint: Checkpoint) -> TextPart:
    config = text_config(checkpoint.config)
    if config is checkpoint.config and config.get("model_type") not in _NAMES:
        tensors = {name: info for name, info in checkpoint.tensors.items() if not _drafts(name, config)}
        return TextPart(config, tensors, {name: name for name in tensors}, {})
    tables = ((body, f"{body}{table}.weight") for body in BODIES for table in _TABLES)
    body = next((body for body, table in tables if table in checkpoint.tensors), "model.")
    stored: dict[str, str] = {}
    ignored: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        ours = text_name(name, body)
        if _drafts(name if ours is None else ours, config) or (ours is not None and _is_shared(ours, config)):
            continue
        if ours is None:
            ignored[name.removeprefix("model.").partition(".")[0]] += info.nbytes
        else:
            stored[called_here(ours, config)] = name
    tensors = {name: checkpoint.tensors[old] for name, old in stored.items()}
    return TextPart(config, tensors, stored, dict(ignored))


def _drafts(name: str, config: dict[str, Any]) -> bool:
    """Return whether a tensor is of a layer that drafts tokens, behind those of the network."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    layers = config.get("num_hidden_layers")
    behind = number.isdecimal() and len(number) < 9 and isinstance(layers, int) and int(number) >= layers
    return name.startswith(_DRAFTS) or behind


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, with text-only module names; `config` itself for a text-only one."""
    text = config.get("text_config")
    kind = config.get("model_type")
    section = config.get("quantization")
    if kind not in _NESTING or (kind in _NAMES and not isinstance(text, dict)):
        if kind not in _NAMES or not isinstance(section, dict):
            return config
        return {
            **config,
            "quantization": {called_here(_renamed(key), config): value for key, value in section.items()},
        }
    inner_config = text if isinstance(text, dict) else config
    if isinstance(section, dict):
        names = {called_here(_renamed(key), inner_config): value for key, value in section.items()}
        config = {**config, "quantization": names}
    if not isinstance(text, dict):  # older Qwen-VL configs are flat
        return {**config, "model_type": _FAMILIES.get(f"{kind}_text", kind)}
    inherited = {key: config[key] for key in _OUTER if config.get(key) is not None}
    inner = {key: value for key, value in text.items() if value is not None or key not in inherited}
    family = text.get("model_type")
    return {**inherited, **inner, "model_type": _FAMILIES.get(family, family) if isinstance(family, str) else family}


def _is_shared(name: str, config: dict[str, Any]) -> bool:
    """Return whether this tensor is of keys or values in a layer that reads those of an earlier one (Gemma 4)."""
    if config.get("model_type") != "gemma4_text" or (found := _OF_KEYS.fullmatch(name)) is None:
        return False
    layers = config.get("num_hidden_layers")
    shared = config.get("num_kv_shared_layers", 20)
    return type(layers) is int and type(shared) is int and 0 < layers - shared <= int(found[1])


def called_here(name: str, config: dict[str, Any]) -> str:
    """Return a tensor's or module's name with the parts that differ in this family replaced."""
    kind = config.get("model_type")
    for theirs, ours in _NAMES.get(kind, ()) if isinstance(kind, str) else ():
        name = f"{name}.".replace(theirs, ours)[:-1] if theirs.endswith(".") else name.replace(theirs, ours)
    return named_by_layer(name, config) if kind in ("nemotron_h", "kimi_linear") else name


def _renamed(module: str) -> str:
    return next((ours for body in BODIES if (ours := text_name(f"{module}.", body)) is not None), f"{module}.")[:-1]


def text_name(name: str, body: str) -> str | None:
    """Return a stored tensor's name in a text-only model; None for a tensor of another part."""
    for head in _HEADS:
        if name.startswith(head):
            return "lm_head." + name.removeprefix(head)
    return "model." + name.removeprefix(body) if name.startswith(body) else None
