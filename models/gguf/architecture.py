"""A row of the table of GGUF architectures: entries of config.json, and tensors in the layout of the model's class.

Facts of the files are those of llama.cpp's converter; modules and entries are those of mlx-lm's class, or of
transformers' where mlx-lm reads its names.

Rows stand in `gguf.architectures`. `config` makes the config of a row, `names` the targets of its tensors. A new row
needs a variant in `tests/support/gguf_layered_models.py`, and llama.cpp's answers (CONTRIBUTING.md, "GGUF
architecture").
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.rope import LongFactors
from headrace.models.gguf.target import Order, Values

Config = Mapping[str, Any]
Entries = dict[str, Any]
"""Entries of a config that is being made."""

Sizes = Mapping[str, int]
OrderOf = Callable[[Config], Order]
"""Order of rows or of blocks of columns, from the text part of the config."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor in the file."""

Vector = npt.NDArray[np.float32]


class Contents(NamedTuple):
    """Facts of a file that the config follows from, beyond its metadata."""

    shapes: Shapes  # of its tensors
    vocab_size: int
    rope_factors: list[float] | None = None  # content of `rope_freqs.weight`
    long_factors: LongFactors | None = None  # content of LongRoPE's two tensors
    values: Callable[[str], list[float] | None] = lambda _: None  # content of a vector in float32, None if missing

    def has(self, tensor: str) -> bool:
        """Return whether a layer has this tensor."""
        return any(name.endswith(f".{tensor}") for name in self.shapes)


class TensorRule(Struct, frozen=True):
    """Destination of one tensor of a layer, in a group by the tensor's name below "blk.N." (`names.named`)."""

    module: str  # below the layer
    shape: str  # sizes in the file by their names, slowest axis first: "heads*head hidden"
    leaf: str = "weight"  # parameter of the module
    rows: OrderOf | None = None  # their order in the network; None: as in the file
    columns: OrderOf | None = None  # order of blocks of columns
    values: Values = "same"  # change of the numbers
    stored: str = ""  # shape of an unquantized tensor in the network, if another
    plain: bool = False  # never quantized in the network
    optional: bool = False  # some files lack it
    source: str = ""  # the tensor's name, if it is not the key
    below: str = ""  # a further tensor of this shape, whose rows follow
    index: int | None = None  # of one matrix, where the tensor is a stack

    @property
    def bias(self) -> "TensorRule":
        """The bias of a matrix, a stack or a norm: a number for each row."""
        axes = self.shape.split()
        return replace(self, shape=" ".join(axes[:-1] or axes), leaf="bias", stored="", values="same")


TensorRules = Mapping[str, TensorRule]


class DraftLayer(NamedTuple):
    """Modules of a layer for multi-token prediction, which follows the others; `{}` is their number."""

    at: str  # prefix of all
    layer: str  # prefix, below it, of the parts that any layer has
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str

    @property
    def parts(self) -> TensorRules:
        """The tensors that only this layer has."""
        return {
            "nextn.eh_proj.weight": TensorRule(self.projection, "hidden 2*hidden"),
            "nextn.enorm.weight": TensorRule(self.embedding_norm, "hidden"),
            "nextn.hnorm.weight": TensorRule(self.hidden_norm, "hidden"),
            "nextn.shared_head_norm.weight": TensorRule(self.norm, "hidden"),
        }


class GGUFArchitecture(Struct, frozen=True):
    """Facts of one architecture. Functions are for facts that its files or its class state otherwise."""

    model_class: str  # in "architectures" of config.json
    model_type: str
    # Tensors of layers. A layer has those of `layer`, of its type in the config, and of `sparse`, where there are such
    # groups. A layer without a router has those of `dense` in place of `sparse`.
    groups: Mapping[str, TensorRules]
    tables: TensorRules  # tensors outside layers
    # Entries of config.json
    keys: tuple[str, ...] = ("intermediate_size",)  # values of the metadata, see `keys.KEYS`
    experts: tuple[str, str, str] | None = None  # entries for experts: their number, those for each token, their width
    constants: Entries = field(default_factory=dict)  # entries that no file states
    by_tensor: Mapping[str, str] = field(default_factory=dict)  # entry -> tensor: whether layers have it
    entries: Callable[[Metadata, Contents, Entries], Entries] = lambda *_: {}  # further ones, from those so far
    epsilon: str = "rms_norm_eps"  # entry for the epsilon of norms
    attends: bool = True  # False: no layer has attention
    head_counts: bool = False  # layers differ in their number of heads; the largest is the entry
    scales_rope: bool = False  # metadata, or the tensor of its factors, may ask for scaled RoPE
    rotates_part: bool = False  # metadata may ask for RoPE over a part of each head
    window_period: int = 0  # every n-th layer has no window, unless the metadata lists them; 0: without windows
    wrapped: str = ""  # model_type of the multimodal family that has the class; its text part is nested
    unread: tuple[str, ...] = ()  # keys of the metadata that change nothing here
    # Limits of the class
    whole_heads: bool = False  # True: refuses heads that are not together as wide as the model
    untied: bool = False  # True: refuses embeddings that are the output matrix too
    sigmoid: bool = False  # True: refuses experts that are not chosen by sigmoids of their scores
    # Layout of the tensors
    layer: str = "model.layers.{}"  # prefix of a layer; `{}` is its number
    kinds: Callable[[Config], list[tuple[str, ...]]] | None = None  # groups of each layer, if it has others
    layers: Callable[[Config], list[TensorRules]] | None = None  # tensors of each layer, in place of `groups`
    otherwise: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # group -> (a tensor, group without it)
    sizes: Callable[[Config], Sizes] = lambda _: {}  # beyond those of `sizes_of`
    made: Callable[[Metadata, Config], dict[str, Vector]] = lambda *_: {}  # parameters from metadata
    drafts: DraftLayer | None = None  # the layer that drafts tokens, in files that have one
    ignored: tuple[str, ...] = ()  # tensors of layers that the model does not read
    config_tensors: tuple[str, ...] = ()  # tensors that become part of the config, beside the factors of `scales_rope`
    half: str = "bfloat16"  # half precision that its activations fit; those of Gemma overflow float16
