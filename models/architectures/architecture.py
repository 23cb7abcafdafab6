"""Rows of the table of architectures: facts of a model_type, keys of its config.json, names of its tensors.

A file here lists the rows of a group of families as `ROWS`, and `families.ARCHITECTURES` has all of them by model_type.
A new row needs a variant in `tests/support/mlx_lm_models.py`: the parity tests then compare it with mlx-lm's class, and
`docs/models.md` lists it. Without a class in mlx-lm it needs a case in `tests/parity/test_transformers.py`.
Tensor names on the right side of a row are those of `models.network.tensors`. The default that a function gives a
missing key is that of the family's class; `test_every_field_of_the_class_counts_or_is_refused` changes every key.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field

from headrace.models.architectures.config import (
    DecoderConfig,
    ExpertLayers,
    Family,
    LatentConfig,
    MixerConfig,
    RopeConfig,
)
from headrace.models.architectures.fields import Fields
from headrace.models.architectures.mixers import recurrent_layers

if TYPE_CHECKING:
    import mlx.core as mx

Config = dict[str, Any]

# Projections by their names below a layer, for `Architecture.biases`
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (*QKV, "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj")
FEED_FORWARD = tuple(
    f"{at}.{name}" for at in ("mlp", "mlp.shared_experts") for name in ("gate_proj", "up_proj", "down_proj")
)
MIXER = ("mixer.in_proj", "mixer.out_proj")
BIASES: Mapping[str, Sequence[str]] = {"attention_bias": ATTENTION, "mlp_bias": FEED_FORWARD}
# Names in GPT-2's class, and in those of GPT-J, EXAONE 3, Qwen 1 and nanochat, which have some of these modules
GPT_NAMES = (
    ("model.h.", "model.layers."),
    ("model.wte.", "model.embed_tokens."),
    ("model.ln_f.", "model.norm."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
)


class HeadNames(Struct, frozen=True):
    """Names of a multi-token prediction head's tensors."""

    prefix: str  # `{}` is the number of the network's layers
    layer: str  # prefix of its layer's own, below that
    embedding_norm: str  # of the next token's embedding
    hidden_norm: str  # of the network's last hidden state
    projection: str  # of both together, see `models.network.mtp`
    norm: str  # after the layer
    hidden_first: bool = False  # the projection's input begins with the hidden state
    centred: bool = False  # norms are stored minus one


def uses_positions(fields: Fields) -> bool:
    """Return whether attention rotates queries and keys, unless the config says that nothing does."""
    return bool(fields.values.get("position_embedding_type", "rope") != "nope")


class Architecture(Struct, frozen=True):
    """One model_type. Fields are what its config.json does not state; functions read what it does.

    The functions are called in this order:

    1. When a checkpoint is opened (`checkpoint.normalize`): `add_keys`, which changes the config, after `defaults`,
       `older_keys` and `constants` are in it. A multimodal config has it called for its text part, then for the whole,
       each by its own row. Then `outer`. mlx-lm's classes get this config.
    2. For each tensor (`checkpoint.text_part`): `is_unread`, by the name with the usual prefix "model."; `rename`, by
       the name after `tensor_names`. Neither is called for a text-only config whose row has no `tensor_names`:
       such a row needs `outer`, as "gemma3n_text" has, to be read as a multimodal one.
    3. For the decoder's configuration (`read.decoder_config`): `ropes`, `runs`, `latent`, `inner_size`; for its layers
       `pairs`, `rotates`, `experts`, `mixer`, `recurrent`. Last comes `complete`: it gets the result of all others, and
       may replace any of it. `mixer` and `latent` are called several times.
    4. For the weights of headrace's decoder (`network.parameters`), before any is prepared: `turn`, then `multiply`,
       with all arrays by their names here. `multiply` is also told whether a conversion, such as MLX's, has
       applied most factors.
    """

    name: str
    family: Family | None = None  # facts of the decoder's layers; None: only mlx-lm's classes run it
    # Keys of config.json
    same_as: str = ""  # model_type with the same keys and layers
    layers_of: str = ""  # model_type with the same layers, for the text part of a multimodal one
    defaults: Mapping[str, object] = field(default_factory=dict)  # of transformers, if others have none or other ones
    nested_defaults: Mapping[str, object] = field(default_factory=dict)  # that transformers omits from nested sections
    constants: Mapping[str, object] = field(default_factory=dict)  # of transformers' class, which mlx-lm reads as keys
    older_keys: Mapping[str, str] = field(default_factory=dict)  # older key -> newer one, whose value it gets if absent
    add_keys: Callable[[Config], None] | None = None  # changes the config, where `older_keys` cannot
    states_head_dim: bool = False  # older configs always have head_dim
    context: int | None = None  # default of transformers' class
    period_key: str = ""  # older key of the period of `layer_types`
    only_periodic: bool = False  # `layer_types` without a period are refused
    dense_first: bool = False  # `mlp_layer_types` begins with all dense layers
    nests: bool = False  # multimodal, with an ordinary decoder that gets images as embeddings
    outer_keys: tuple[str, ...] = ()  # keys of the text part that mlx-lm's class of the whole reads outside it
    outer: Callable[[Config], str | None] | None = None  # multimodal model_type that a text-only config is read as
    # Tensors
    # Parts of names and their names here. They are replaced in this order, each in the result of the one before.
    tensor_names: tuple[tuple[str, str], ...] = ()
    rename: Callable[[str, Config], str] | None = None  # by the kind of their layer
    is_unread: Callable[[str, Config], bool] | None = None  # tensors that no layer reads
    converted: str = ""  # part of names in conversions with whole norms alone, see `TextCheckpoint.whole_norms`
    turn: "Callable[[dict[str, mx.array], Fields], dict[str, mx.array]] | None" = None  # transposes matrices
    multiply: "Callable[[dict[str, mx.array], Fields, bool], dict[str, mx.array]] | None" = None  # see `falcon`
    head: HeadNames | None = None
    # The decoder's configuration
    tied: bool = False  # default of `tie_word_embeddings`
    eps: str = "rms_norm_eps"  # key of the norms' epsilon
    activations: tuple[str, ...] = ("silu", "swish")  # values of `activation_key`, its default first
    activation_key: str | None = "hidden_act"  # None: the family reads its activation itself
    only: Mapping[str, object] = field(default_factory=dict)  # keys that may have one value
    theta: float = 1e4  # default of `rope_theta`
    rotated: float | None = None  # default of `partial_rotary_factor`; None: only whole heads turn
    proportional: bool = False  # the periods of a rotated part are those of the whole head
    # of full and of sliding layers
    ropes: Callable[[Fields, "Architecture"], tuple[RopeConfig, RopeConfig]] | None = None
    rotates: Callable[[Fields], bool] = uses_positions
    sliding: Literal["all", "even", "period", "tail"] | None = None  # layers with a window, without `layer_types`
    period: int = 0  # default of `sliding_window_pattern`: every such layer has no window
    window_switches: tuple[str, ...] = ()  # keys of which one must be set for windows
    position_free: Literal["listed", "full"] | None = None  # layers without RoPE
    pairs: Callable[[Mapping[str, object]], list[str]] | None = None  # letters of each layer, see `nemotron`
    inner_size: Callable[[Fields], int] = lambda fields: fields.count("intermediate_size")
    experts: Callable[[Fields, int], ExpertLayers] | None = None  # of each layer; None: all are dense
    mixer: Callable[[Fields], MixerConfig | None] | None = None  # of layers with recurrent state
    recurrent: Callable[[Fields, int], list[bool]] = recurrent_layers  # those layers
    latent: Callable[[Fields], LatentConfig] | None = None  # attention over latents
    runs: Callable[[Fields], bool] = lambda _fields: True  # False: mlx-lm's class runs this variant
    biases: Mapping[str, Sequence[str]] = field(default_factory=lambda: BIASES)  # key -> projections with a bias
    biased: Sequence[str] = ()  # projections with a bias, whatever the config says
    complete: Callable[[Fields, DecoderConfig], DecoderConfig] = lambda _fields, decoder: decoder
    # Costs and mlx-lm
    plain: tuple[str, ...] = ()  # ends of modules that a quantized checkpoint of mlx-lm has plain
    class_splits: tuple[str, ...] = ()  # ways in which mlx-lm divides its class with recurrent state
    loses_corrections: bool = False  # mlx-lm's conversions drop the corrections of its routers
