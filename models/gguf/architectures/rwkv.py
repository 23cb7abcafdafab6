"""RWKV-7. A file has the six shares of the row before as one tensor, and of each product of low rank three tensors.

Guard: tests/models/gguf/test_layered.py.
"""

from headrace.models.gguf.architecture import Config, Contents, Entries, GGUFArchitecture, TensorRule
from headrace.models.gguf.architectures.blocks import ungated_mlp
from headrace.models.gguf.keys import HEADS
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import CheckpointError

_FUSED_SHARES = "time_mix_lerp_fused"
_SHARES = ("r", "w", "k", "v", "a", "g")  # in the order of that tensor


def _low_rank(letter: str, size: str, *, biased: bool = True) -> dict[str, TensorRule]:
    """Return a product of low rank: its matrices have the numbers 1 and 2 in the file, its bias 0."""
    at = f"attn.{letter}_lora.lora"
    tensor = f"time_mix_{letter}"
    parts = {
        f"{letter}1": TensorRule(f"{at}.0", f"{size} hidden", source=f"{tensor}1"),
        f"{letter}2": TensorRule(f"{at}.2", f"hidden {size}", source=f"{tensor}2"),
    }
    if biased:
        parts[f"{letter}2.bias"] = TensorRule(f"{at}.2", "hidden", "bias", source=f"{tensor}0")
    return parts


_LAYER = {
    **{f"{name}.{leaf}": TensorRule(module, "hidden", leaf)
       for name, module in (("attn_norm", "attn_norm"), ("attn_norm_2", "ffn_norm"), ("time_mix_ln", "attn.g_norm"))
       for leaf in ("weight", "bias")},
    **{f"share_{letter}": TensorRule("attn", "6 1 1 hidden", f"x_{letter}", index=i, source=_FUSED_SHARES, plain=True)
       for i, letter in enumerate(_SHARES)},
    **{f"time_mix_{name}": TensorRule("attn", "hidden", name, stored="heads head") for name in ("k_k", "k_a", "r_k")},
    "time_mix_receptance": TensorRule("attn.r_proj", "hidden hidden"),
    "time_mix_key": TensorRule("attn.k_proj", "hidden hidden"),
    "time_mix_value": TensorRule("attn.v_proj", "hidden hidden"),
    "time_mix_output": TensorRule("attn.o_proj", "hidden hidden"),
    **_low_rank("w", "decay"), **_low_rank("a", "rate"), **_low_rank("g", "gate", biased=False),
    "channel_mix_lerp_k": TensorRule("ffn", "1 1 hidden", "x_k", stored="hidden", plain=True),
    "channel_mix_key": ungated_mlp("ffn.key", "ffn.value")["ffn_up"],
    "channel_mix_value": ungated_mlp("ffn.key", "ffn.value")["ffn_down"],
}  # fmt: skip


def _entries(metadata: Metadata, _file: Contents, config: Config) -> Entries:
    """Return the heads. Raises CheckpointError for a size that does not divide the width."""
    size = metadata.integer("{arch}.wkv.head_size", minimum=1, maximum=HEADS)
    width = config["hidden_size"]
    if width % size:
        raise CheckpointError(f"heads of {size} do not divide a width of {width}")
    return {"head_dim": size, "num_attention_heads": width // size}


def _sizes(config: Config) -> dict[str, int]:
    """Return the sizes that `_low_rank` names: `decay` is config's `decay_low_rank_dim`."""
    names = {"decay": "decay", "rate": "a", "gate": "gate", "value": "v"}
    return {size: config[f"{name}_low_rank_dim"] for size, name in names.items()}


_NORMED_TABLES = {
    "token_embd": TensorRule("model.embeddings", "vocab hidden"),
    "output": TensorRule("lm_head", "vocab hidden", optional=True),
    **{f"{name}.{leaf}": TensorRule(module, "hidden", leaf)
       for name, module in (("token_embd_norm", "model.layers.0.pre_norm"), ("output_norm", "model.norm"))
       for leaf in ("weight", "bias")},
}  # fmt: skip
ROWS = {
    "rwkv7": GGUFArchitecture(
        "RWKV7ForCausalLM", "rwkv7", {"layer": _LAYER, "value": _low_rank("v", "value")}, _NORMED_TABLES,
        keys=("intermediate_size", "decay_low_rank_dim", "a_low_rank_dim", "gate_low_rank_dim", "v_low_rank_dim"),
        epsilon="norm_eps", attends=False, entries=_entries, sizes=_sizes,
        kinds=lambda config: [("layer",), *[("layer", "value")] * (config["num_hidden_layers"] - 1)],
        # The first layer's values are those that others share: nothing reads these tensors there.
        ignored=tuple(f"time_mix_v{number}.weight" for number in range(3)),
    ),
}  # fmt: skip
