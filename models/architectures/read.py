"""Configuration of headrace's decoder from a checkpoint's config.json.

`decoder_config` returns None for other architectures and variants, which mlx-lm's classes run, and raises
CheckpointError for contradictory values and for values that both would ignore.

`models.loading` calls it for a checkpoint, `models.cost` for a config without weights, such as the catalog's. The
functions of a row are called in the order that `Architecture` states.

Guards: tests/models/architectures/test_config.py, and tests/parity/test_mlx_lm_families.py by logits.
"""

from collections.abc import Mapping
from itertools import chain

from msgspec.structs import replace

from headrace.models.architectures.architecture import Architecture
from headrace.models.architectures.config import Activation, DecoderConfig, Family, RopeConfig
from headrace.models.architectures.families import architecture_of
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.latent import latent_scale
from headrace.models.architectures.layers import check_shared_heads, head_size, layers_of, ropes_of
from headrace.runtime.errors import UnsupportedModelError

# Names of GELU in configs -> activation of a feed-forward without a gate. Of these families the config states it.
_UNGATED_GELU: dict[str, Activation] = {
    "gelu": "erf_gelu", "gelu_new": "tanh_gelu", "gelu_fast": "tanh_gelu", "gelu_pytorch_tanh": "tanh_gelu",
}  # fmt: skip
_BLOCK_HEADS = 16  # of which head sizes are multiples, as `attention_plan` of `runtime.ops.native_plans` asks for
# "mrope" has separate axes for time, height and width, which are equal for text.
_ROPES = ("default", "linear", "llama3", "yarn", "longrope", "mrope", "proportional")


def decoder_config(config: Mapping[str, object]) -> DecoderConfig | None:
    """Return the decoder configuration, or None if headrace's own decoder does not support the config.

    config: of a text-only model, as `models.checkpoint.text_part` returns it.
    Raises UnsupportedModelError for an activation or a value that the decoder does not compute, and CheckpointError for
    missing or contradictory values.
    """
    architecture = architecture_of(config)
    family = architecture.family
    if family is None:
        return None
    fields = Fields(config)

    # The family's facts, as this config changes them
    if not config.get("use_qk_norm", True):
        family = replace(family, qk_norm=None)
    stated = config.get(architecture.activation_key or "")
    if family.activation in _UNGATED_GELU.values() and isinstance(stated, str):
        family = replace(family, activation=_UNGATED_GELU.get(stated, family.activation))

    rope, local_rope = ropes_of(fields, architecture)
    if not _runs(fields, architecture, family, (rope, local_rope)):
        return None
    _refuse_other(config, architecture)

    # Sizes of attention
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    head_dim = fields.count("head_dim", default=hidden // heads)
    scale = head_dim**-0.5
    latent = None if architecture.latent is None else architecture.latent(fields)
    if latent is not None:
        kv_heads = 1  # every query head reads the same entries, of which values are a part
        head_dim = latent.head_dim
        scale = latent_scale(fields, latent)
        rope = replace(rope, share=latent.rotated / latent.head_dim)
        local_rope = rope
    check_shared_heads(heads, kv_heads)

    decoder = DecoderConfig(
        architecture=architecture.name,
        family=family,
        hidden_size=hidden,
        intermediate_size=architecture.inner_size(fields),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size"),
        context_length=fields.count("max_position_embeddings", default=2048),  # as in transformers' LlamaConfig
        norm_eps=fields.positive(architecture.eps),
        tied_embeddings=bool(config.get("tie_word_embeddings", architecture.tied)),
        layers=layers_of(fields, architecture, family, rope, local_rope),
        attention_scale=scale,
        latent=latent,
        biased=biased_modules(config),
    )
    return architecture.complete(fields, decoder)


def biased_modules(config: Mapping[str, object]) -> frozenset[str]:
    """Return the modules of a layer that have a bias, by the keys of the config."""
    architecture = architecture_of(config)
    stated = [modules for key, modules in architecture.biases.items() if config.get(key)]
    return frozenset(chain(architecture.biased, *stated))


def _runs(fields: Fields, architecture: Architecture, family: Family, ropes: tuple[RopeConfig, RopeConfig]) -> bool:
    """Return whether the decoder runs this variant of a family."""
    config = fields.values
    if any(rope.kind not in _ROPES for rope in ropes):
        return False
    if bool(config.get("rope_traditional", family.interleaved)) != family.interleaved:
        return False
    for rope in ropes:
        if rope.kind == "proportional" and not architecture.proportional:
            return False
        if rope.kind != "proportional" and rope.share != 1 and architecture.rotated is None:
            return False
    if not architecture.runs(fields):
        return False
    mixer = None if architecture.mixer is None else architecture.mixer(fields)
    if mixer is None:
        return True
    head_dim = head_size(fields) if architecture.latent is None else architecture.latent(fields).head_dim
    # Recurrent state is kept next to blocks only, and the kernels read blocks of these head sizes only.
    return mixer.fits and head_dim % _BLOCK_HEADS == 0


def _refuse_other(config: Mapping[str, object], architecture: Architecture) -> None:
    """Raise UnsupportedModelError for an activation or a value that the decoder does not compute."""
    key = architecture.activation_key
    if key is not None and config.get(key, architecture.activations[0]) not in architecture.activations:
        raise UnsupportedModelError(f"config.json: a {architecture.name} with the activation {config[key]!r}")
    for key, only in architecture.only.items():
        if config.get(key) not in (None, only):
            raise UnsupportedModelError(f"config.json: a {architecture.name} with {key} {config[key]!r:.40}")
