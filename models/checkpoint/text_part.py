"""The language model in a multimodal checkpoint (with vision towers, audio encoders, projectors). Headers only.

Its config is nested (`text_config`), and its tensors have a prefix that depends on the tool that wrote them. Both are
converted to those of a text-only checkpoint.

Names here are mlx-lm's of Llama ("model.layers.0.self_attn.q_proj.weight"); `network.tensors` lists them. A family with
other names has them in its row (`tensor_names`, `rename`).

Guards: tests/models/network/test_text_parts.py, and tests/models/architectures/test_published_names.py for the names
of published checkpoints.
"""

from collections import Counter

from msgspec import Struct

from headrace.models.architectures.families import architecture_named, architecture_of
from headrace.models.checkpoint.safetensors import Checkpoint, quantization_section
from headrace.models.checkpoint.shard_header import TensorInfo

# Prefixes of the layers, the most specific first, and of the output projection.
BODIES = (
    "language_model.model.",
    "model.language_model.",
    "model.text_model.",
    "thinker.language_model.model.",  # mlx-vlm's copies
    "thinker.model.",
    "model.",
    "backbone.",
    "transformer.",
    "gpt_neox.",
)
# Names of the embedding table below the prefix of the layers, by which that prefix is recognized
_TABLES = ("embed_tokens", "embeddings", "word_embeddings", "wte", "embed_in", "tok_embeddings", "token_embeddings")
_HEADS = (
    "language_model.lm_head.",
    "thinker.language_model.lm_head.",
    "thinker.lm_head.",
    "lm_head.",
    "output.",
    "embed_out.",
)
_DRAFTS = ("mtp.", "model.mtp_layers.")  # prefixes of layers that draft tokens
# Keys of the outer config that the text part inherits.
_OUTER = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization", "vocab_size")


class TextCheckpoint(Struct, frozen=True):
    """A text-only view of a checkpoint."""

    config: dict[str, object]  # of the language model
    tensors: dict[str, TensorInfo]  # by headrace's names
    stored: dict[str, str]  # names in `tensors` -> names in the checkpoint
    ignored: dict[str, int]  # top-level names of the other parts -> bytes
    whole_norms: bool | None = None  # norms include the one that a family stores them without; None: see `Parameters`

    @property
    def quantization(self) -> dict[str, object] | None:
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
        verb = "is" if len(self.ignored) == 1 else "are"
        return f"only text: {parts} {verb} not loaded"


def text_part(checkpoint: Checkpoint) -> TextCheckpoint:
    """Return the language model, without the layers that draft tokens."""
    config = text_config(checkpoint.config)
    is_unread = architecture_of(config).is_unread
    if config is checkpoint.config and not architecture_of(config).tensor_names:
        tensors = {name: info for name, info in checkpoint.tensors.items() if not _drafts(name, config)}
        return TextCheckpoint(config, tensors, {name: name for name in tensors}, {})

    # The prefix of the layers, by the name of the embedding table
    tables = ((body, f"{body}{table}.weight") for body in (*BODIES, "") for table in _TABLES)  # "": GPT-2's
    body = next((body for body, table in tables if table in checkpoint.tensors), "model.")

    stored: dict[str, str] = {}
    ignored: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        ours = text_name(name, body)
        if _drafts(ours or name, config):
            continue
        if ours is not None and is_unread is not None and is_unread(ours, config):
            continue
        if ours is None:
            ignored[name.removeprefix("model.").removeprefix("thinker.").partition(".")[0]] += info.nbytes
        else:
            stored[headrace_name(ours, config)] = name
    tensors = {name: checkpoint.tensors[old] for name, old in stored.items()}
    converted = architecture_of(config).converted
    whole_norms = None
    if converted:
        whole_norms = any(converted in name for name in checkpoint.tensors)
    return TextCheckpoint(config, tensors, stored, dict(ignored), whole_norms)


def _drafts(name: str, config: dict[str, object]) -> bool:
    """Return whether a tensor is of a layer that drafts tokens, after those of the network."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    layers = config.get("num_hidden_layers")
    # A name may have any number of digits, and `int` refuses thousands.
    is_beyond = number.isdecimal() and len(number) < 9 and isinstance(layers, int) and int(number) >= layers
    return name.startswith(_DRAFTS) or is_beyond


def text_config(config: dict[str, object]) -> dict[str, object]:
    """Return the config of the language model, with text-only module names; `config` itself for a text-only one.

    {"model_type": "qwen3"}                                          as it is
    {"model_type": "gemma3", "text_config": {...}, "dtype": ...}     the inner one, with the outer `dtype`
    {"model_type": "qwen2_vl", "hidden_size": ...}                   flat: as the type of its text part
    """
    text = config.get("text_config")
    architecture = architecture_of(config)
    section = config.get("quantization")
    # Text-only: at most the module names of its quantization differ.
    if not architecture.nests or (architecture.tensor_names and not isinstance(text, dict)):
        if not architecture.tensor_names or not isinstance(section, dict):
            return config
        return {
            **config,
            "quantization": {headrace_name(_renamed(key), config): value for key, value in section.items()},
        }

    # Multimodal: the inner config, with some keys of the outer one.
    inner_config = config  # older Qwen-VL configs are flat
    if isinstance(text, dict):
        inner_config = text
    if isinstance(section, dict):
        names = {headrace_name(_renamed(key), inner_config): value for key, value in section.items()}
        config = {**config, "quantization": names}
    if not isinstance(text, dict):
        nested = architecture_named(f"{architecture.name}_text")
        return {**config, "model_type": nested.layers_of or architecture.name}
    inherited = {key: config[key] for key in _OUTER if config.get(key) is not None}
    inner = {key: value for key, value in text.items() if value is not None or key not in inherited}
    return {**inherited, **inner, "model_type": architecture_of(text).layers_of or text.get("model_type")}


def headrace_name(name: str, config: dict[str, object]) -> str:
    """Return a tensor's or module's name with the parts that differ in this family replaced."""
    architecture = architecture_of(config)
    for theirs, ours in architecture.tensor_names:
        if theirs.endswith("."):  # a whole name, also the last
            name = f"{name}.".replace(theirs, ours)[:-1]
        else:
            name = name.replace(theirs, ours)
    if architecture.rename is not None:
        name = architecture.rename(name, config)
    return name


def _renamed(module: str) -> str:
    """Return a module's name in a text-only model, whatever prefix its tool gave it."""
    for body in BODIES:
        ours = text_name(f"{module}.", body)  # prefixes end in a dot, also of a whole name such as "lm_head"
        if ours is not None:
            return ours[:-1]
    return module


def text_name(name: str, body: str) -> str | None:
    """Return a stored tensor's name in a text-only model; None for a tensor of another part."""
    for head in _HEADS:
        if name.startswith(head):
            return "lm_head." + name.removeprefix(head)
    if name.startswith(body):
        return "model." + name.removeprefix(body)
    return None
