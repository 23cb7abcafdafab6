"""Metadata keys that change logits: each is read for the config, or neutral, or refused.

The keys are those of llama.cpp's `llama-arch.cpp`. Keys of sizes are missing here, as tensors of another shape are
refused anyway.
"""

from headrace.models.gguf.header import Value
from headrace.models.gguf.metadata import Metadata
from headrace.runtime.errors import UnsupportedModelError

_OFF = (0,)
_OFF_OR_ONE = (0, 1)
# Values with which a key changes nothing.
_NEUTRAL: dict[str, tuple[Value, ...]] = {
    "rope.scaling.type": ("none", "linear"),
    "rope.scaling.factor": _OFF_OR_ONE,
    "rope.scale_linear": _OFF_OR_ONE,  # the old name of the factor
    "rope.scaling.alpha": _OFF,
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": _OFF,
    "rope.dimension_sections": _OFF,
    "attention.rope_pattern": (True,),
    "attention.causal": (True,),
    "attention.clamp_kqv": _OFF,
    "attention.max_alibi_bias": _OFF,
    "attention.output_scale": _OFF_OR_ONE,
    "attention.scale": _OFF,
    "attention.temperature_scale": _OFF,
    "attention.value_scale": _OFF_OR_ONE,
    "attn_logit_softcapping": _OFF,
    "embedding_scale": _OFF_OR_ONE,
    "expert_count": _OFF,
    "expert_gating_func": _OFF_OR_ONE,  # by softmax
    "expert_group_count": _OFF_OR_ONE,
    "expert_weights_scale": _OFF_OR_ONE,
    "final_logit_softcapping": _OFF,
    "logit_scale": _OFF_OR_ONE,
    "num_loops": _OFF_OR_ONE,
    "residual_scale": _OFF_OR_ONE,
    "router_logit_softcapping": _OFF,
    "swiglu_clamp_exp": _OFF,
    "swiglu_clamp_shexp": _OFF,
}


def refuse_unread(metadata: Metadata) -> None:
    """Raise UnsupportedModelError for the first key that nothing has read and that is not neutral."""
    head = _head_size(metadata)
    neutral = _NEUTRAL | {
        "attention.value_length": (head,),
        "rope.dimension_count": (head,),
        "rope.freq_base_swa": (metadata.number("{arch}.rope.freq_base", 10_000.0),),
    }
    for key, values in neutral.items():
        stated = metadata.unread(f"{{arch}}.{key}")
        each_layer = stated if isinstance(stated, list) else [stated]
        if stated is not None and not all(value in values for value in each_layer):
            shown = "a value for each layer" if isinstance(stated, list) else repr(stated)[:40]
            raise UnsupportedModelError(
                f"GGUF architecture {metadata.architecture!r} with {key} = {shown} is not supported"
            )


def _head_size(metadata: Metadata) -> int:
    """Return the size of a head, all of which turns unless a key states a part."""
    if metadata.has("{arch}.attention.key_length"):
        return metadata.integer("{arch}.attention.key_length")
    layers = metadata.integer("{arch}.block_count")
    heads = max(metadata.per_layer("{arch}.attention.head_count", layers))
    return metadata.integer("{arch}.embedding_length") // max(heads, 1)
