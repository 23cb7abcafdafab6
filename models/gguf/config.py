"""`config.json` and `generation_config.json` in Hugging Face terms from GGUF metadata.

Key names follow gguf-py's constants and llama.cpp's converter. `architectures` has the entries of each architecture.

A setting that no function reads must not be ignored, as logits would be wrong. So `Metadata` notes every key that is
read (`has` does not count), and `refuse_unread` raises an error for other keys with values that change logits. It runs
after all functions that read keys.

Guards: tests/models/gguf/test_config.py, for each key of `_NEUTRAL`, and test_layered.py.
"""

from headrace.models.gguf.architecture import Config, Contents, Entries, GGUFArchitecture
from headrace.models.gguf.architectures import architecture_of
from headrace.models.gguf.header import Value
from headrace.models.gguf.keys import (
    HEADS,
    KEYS,
    check_sigmoid,
    layers_of,
    mixture,
    require_whole_heads,
    rotated_part,
    windows,
)
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import long_rope, rope_scaling
from headrace.models.gguf.vocabulary import SpecialIds
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

# Keys of the norms' epsilon: of RMSNorm, of LayerNorm
_EPSILONS = ("layer_norm_rms_epsilon", "layer_norm_epsilon")

# generation_config.json key: GGUF key.
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

_OFF = (0,)
_OFF_OR_ONE = (0, 1)  # of factors, for which llama.cpp takes 0 as 1
# Values with which a key changes nothing, of the keys that change logits in llama.cpp's `llama-arch.cpp`. Keys of sizes
# are missing here: tensors of another shape are refused anyway.
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
# Keys of positions in llama.cpp. Other converters use others for the same facts.
_ROPE_KEYS = {
    "dimension_count", "dimension_count_swa", "dimension_sections", "freq_base", "freq_base_swa", "scale_linear",
    "scaling.type", "scaling.factor", "scaling.alpha", "scaling.attn_factor", "scaling.original_context_length",
    "scaling.finetuned", "scaling.yarn_ext_factor", "scaling.yarn_attn_factor", "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow", "scaling.yarn_log_multiplier",
}  # fmt: skip


def model_config(metadata: Metadata, file: Contents) -> Entries:
    """Return `config.json` without its quantization section.

    Raises UnsupportedModelError for an unsupported architecture or feature.
    """
    row = architecture_of(metadata)
    metadata.ignore(*(f"{{arch}}.{key}" for key in row.unread))  # counted as read

    # Entries of any model, then those that the row names
    config = _sizes(metadata, row, file)
    if row.attends:
        config |= _attention(metadata, row, file, config)
    _refuse_other(metadata, row, config)
    config |= {key: KEYS[key].read(metadata) for key in row.keys}
    if row.experts is not None:
        config |= mixture(metadata, row.experts)
    if row.window_period:
        config |= windows(metadata, config["num_hidden_layers"], row.window_period)
    config |= {entry: file.has(tensor) for entry, tensor in row.by_tensor.items()}

    # Entries that its files state in their own way
    config |= row.entries(metadata, file, config)
    refuse_unread(metadata)  # last: a key that is only read after this could be refused
    if not row.wrapped:
        return {"architectures": [row.model_class], **config}
    return {
        "architectures": [row.model_class],
        "model_type": row.wrapped,
        "text_config": config,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def _sizes(metadata: Metadata, row: GGUFArchitecture, file: Contents) -> Entries:
    """Return the entries of any model."""
    count = layers_of(metadata)
    kind = next((kind for kind in _EPSILONS if metadata.has(f"{{arch}}.attention.{kind}")), _EPSILONS[0])
    return {
        "model_type": row.model_type,
        "hidden_size": metadata.integer("{arch}.embedding_length", minimum=1, maximum=1 << 20),
        "num_hidden_layers": count - metadata.integer("{arch}.nextn_predict_layers", 0, maximum=count - 1),
        "max_position_embeddings": metadata.integer("{arch}.context_length", minimum=1),
        row.epsilon: metadata.positive(f"{{arch}}.attention.{kind}"),
        "vocab_size": file.vocab_size,
        "tie_word_embeddings": "output.weight" not in file.shapes,
        **row.constants,
    }


def _attention(metadata: Metadata, row: GGUFArchitecture, file: Contents, sizes: Config) -> Entries:
    """Return the entries of attention and of its positions."""
    heads = _heads(metadata, row, "{arch}.attention.head_count")
    kv_heads = _heads(metadata, row, "{arch}.attention.head_count_kv", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads cannot share {kv_heads} key/value heads")

    # The size of a head, and of the part of it that turns
    usual = sizes["hidden_size"] // heads
    head_dim = metadata.integer("{arch}.attention.key_length", usual, minimum=1, maximum=HEADS)
    rotated = head_dim
    if row.rotates_part:
        rotated = rotated_part(metadata, head_dim)
    if rotated % 2:
        raise CheckpointError(f"a head size of {rotated} cannot be rotated")
    config: Entries = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": metadata.positive("{arch}.rope.freq_base", 10_000.0),
    }
    if row.rotates_part:
        config["partial_rotary_factor"] = rotated / head_dim

    # Scaling of positions beyond the trained context
    if not row.scales_rope:
        return config
    if file.long_factors is not None:
        return config | long_rope(metadata, sizes["max_position_embeddings"], rotated, file.long_factors)
    scaling = rope_scaling(metadata, rotated, config["rope_theta"], file.rope_factors)
    if scaling is None:
        return config
    return {**config, "rope_scaling": scaling}


def _heads(metadata: Metadata, row: GGUFArchitecture, key: str, default: int | None = None) -> int:
    """Return the number of heads, or the largest number of a layer."""
    if not row.head_counts:
        return metadata.integer(key, default, minimum=1, maximum=HEADS)
    heads = max(metadata.per_layer(key, layers_of(metadata), default, maximum=HEADS))
    if heads < 1:
        raise CheckpointError(f"no layer of this GGUF {metadata.architecture!r} has attention heads")
    return heads


def _refuse_other(metadata: Metadata, row: GGUFArchitecture, config: Config) -> None:
    """Raise UnsupportedModelError for a config that the model's class cannot run."""
    if row.whole_heads:
        require_whole_heads(config)
    if row.untied and config["tie_word_embeddings"]:
        raise UnsupportedModelError(f"a GGUF {metadata.architecture!r} with tied embeddings is not supported")
    if row.sigmoid:
        check_sigmoid(metadata)


def generation_config(metadata: Metadata, special: SpecialIds) -> dict[str, object]:
    """Return end-of-turn ids and the recommended sampling settings."""
    config: Entries = {"bos_token_id": special.bos, "eos_token_id": special.ends, "pad_token_id": special.pad}
    config = {key: value for key, value in config.items() if value not in (None, [])}
    for name, key in _SAMPLING.items():
        if metadata.has(key):
            config[name] = metadata.integer(key) if name == "top_k" else metadata.number(key)
    if "temperature" in config:
        config["do_sample"] = config["temperature"] > 0
    return config


def refuse_unread(metadata: Metadata) -> None:
    """Raise UnsupportedModelError for the first key of `_NEUTRAL` that was not read and has another value.

    `_NEUTRAL` has the values of a key that leave logits as they are; those of three more keys depend on the file. A key
    of positions that is in no list is refused with any value. Call this after all reading.
    """
    head = _head_size(metadata)
    neutral = _NEUTRAL | {
        "attention.value_length": (head,),
        "rope.dimension_count": (head,),
        "rope.freq_base_swa": (metadata.number("{arch}.rope.freq_base", 10_000.0),),
    }
    for key, values in neutral.items():
        stated = metadata.unread(f"{{arch}}.{key}")
        if stated is None:
            continue
        if isinstance(stated, list):
            each_layer = stated
            shown = "a value for each layer"
        else:
            each_layer = [stated]
            shown = repr(stated)[:40]
        if not all(value in values for value in each_layer):
            raise UnsupportedModelError(
                f"GGUF architecture {metadata.architecture!r} with {key} = {shown} is not supported"
            )
    prefix = f"{metadata.architecture}.rope."
    for key in metadata.keys_below(prefix):
        name = key.removeprefix(prefix)
        if name not in _ROPE_KEYS and metadata.unread(key) is not None:
            raise UnsupportedModelError(
                f"GGUF architecture {metadata.architecture!r} with rope.{name} is not supported",
                hint="take a file that llama.cpp's converter made",
            )


def _head_size(metadata: Metadata) -> int:
    """Return the size of a head, all of which turns unless a key states a part."""
    if metadata.has("{arch}.attention.key_length"):
        return metadata.integer("{arch}.attention.key_length")
    layers = metadata.integer("{arch}.block_count")
    heads = max(metadata.per_layer("{arch}.attention.head_count", layers))
    return metadata.integer("{arch}.embedding_length") // max(heads, 1)
