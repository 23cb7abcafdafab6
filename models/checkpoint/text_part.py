"""The language model within a checkpoint that has other parts too: vision towers, audio encoders, projectors.

Its config sits one level down (`text_config`), and its tensors stand under a prefix that differs from writer to writer.
Here it becomes what a checkpoint of text alone looks like; a checkpoint of text alone stays as it is. Headers only.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from headrace.models.checkpoint.safetensors import Checkpoint, quantization_section
from headrace.models.checkpoint.tensor_info import TensorInfo

# model_type of checkpoints whose text part is a decoder that knows nothing of the other parts: images come to it as
# embeddings. Of any other a `text_config` is not taken for the whole model.
_NESTING = ("gemma3", "mistral3", "pixtral", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# What transformers calls the text part on its own, and the family whose layers it has. Positions of text alone are
# equal on all axes of multimodal rotation, so that it turns as any other.
_FAMILIES = {"qwen3_vl_text": "qwen3", "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2"}
# Where the layers stand, the most particular first, and where the output projection may.
_BODIES = ("language_model.model.", "model.language_model.", "model.")
_HEADS = ("language_model.lm_head.", "lm_head.")
# Keys of the outer config that hold for the text part where that does not state them.
_OUTER = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization")


@dataclass(frozen=True, slots=True)
class TextPart:
    """`config` as of a model of text alone; `stored`: tensors' names there -> their names in the checkpoint."""

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    stored: dict[str, str]
    ignored: dict[str, int]  # top-level names of other parts -> bytes

    @property
    def quantization(self) -> dict[str, Any] | None:
        """MLX quantization settings as `Checkpoint` has them, modules by their names here."""
        return quantization_section(self.config)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of the text part."""
        return sum(info.nbytes for info in self.tensors.values())

    def describe_ignored(self) -> str | None:
        """What is left out, for people; None where nothing is."""
        if not self.ignored:
            return None
        parts = ", ".join(f"{part} ({size / 1e6:.0f} MB)" for part, size in self.ignored.items())
        return f"only text: {parts} is not loaded" if len(self.ignored) == 1 else f"only text: {parts} are not loaded"


def text_part(checkpoint: Checkpoint) -> TextPart:
    """The checkpoint's language model."""
    config = text_config(checkpoint.config)
    if config is checkpoint.config:
        same = {name: name for name in checkpoint.tensors}
        return TextPart(config, checkpoint.tensors, same, {})
    body = next((body for body in _BODIES if f"{body}embed_tokens.weight" in checkpoint.tensors), "model.")
    stored: dict[str, str] = {}
    ignored: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        ours = _ours(name, body)
        if ours is None:
            ignored[name.removeprefix("model.").partition(".")[0]] += info.nbytes
        else:
            stored[ours] = name
    tensors = {name: checkpoint.tensors[old] for name, old in stored.items()}
    return TextPart(config, tensors, stored, dict(ignored))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model: the one given, or what it says of its text part, modules named as there."""
    text, kind = config.get("text_config"), config.get("model_type")
    if kind not in _NESTING:
        return config
    if isinstance(section := config.get("quantization"), dict):
        config = {**config, "quantization": {_renamed(key): value for key, value in section.items()}}
    if not isinstance(text, dict):  # older Qwen-VL configs are flat
        return {**config, "model_type": _FAMILIES.get(f"{kind}_text", kind)}
    inherited = {key: config[key] for key in _OUTER if config.get(key) is not None}
    inner = {key: value for key, value in text.items() if value is not None or key not in inherited}
    family = text.get("model_type")
    return {**inherited, **inner, "model_type": _FAMILIES.get(family, family) if isinstance(family, str) else family}


def _renamed(module: str) -> str:
    return next((ours for body in _BODIES if (ours := _ours(f"{module}.", body)) is not None), f"{module}.")[:-1]


def _ours(name: str, body: str) -> str | None:
    """A stored tensor's name as it is in a model of text alone; None for another part's."""
    for head in _HEADS:
        if name.startswith(head):
            return "lm_head." + name.removeprefix(head)
    return "model." + name.removeprefix(body) if name.startswith(body) else None
