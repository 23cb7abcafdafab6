"""Tensors of GGUF architectures with layers that differ, in the layout of mlx-lm's classes.

A `LayeredArchitecture` names the tensors of each kind of layer. Sizes are products of named sizes: `heads*head`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.models.gguf.layered.sizes import sizes_of
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.target import Order, Target, Values, unfused
from headrace.runtime.errors import CheckpointError

Config = dict[str, Any]
Sizes = Mapping[str, int]
Orders = Mapping[str, Order]
Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor in the file."""

Vector = npt.NDArray[np.float32]


class Contents(NamedTuple):
    """Facts of a file's tensors that the config follows from. rope_factors: content of `rope_freqs.weight`."""

    shapes: Shapes
    rope_factors: list[float] | None = None


@dataclass(frozen=True)
class Part:
    """Destination of one tensor of a layer.

    shape: names of the sizes in the file, slowest axis first. leaf: parameter of the module. rows, columns: names of
    orders. values: change of the numbers. stored: shape of an unquantized tensor in the network, if another. plain:
    never quantized in the network. optional: some files lack it. source: the tensor's name, if it is not the key.
    """

    module: str
    shape: str
    leaf: str = "weight"
    rows: str = ""
    columns: str = ""
    values: Values = "same"
    stored: str = ""
    plain: bool = False
    optional: bool = False
    source: str = ""
    below: str = ""  # a further tensor of this shape, whose rows follow
    index: int | None = None  # of one matrix, where the tensor is a stack


Parts = Mapping[str, Part]
_NO_ORDERS: Orders = MappingProxyType({})
_NO_SIZES: Sizes = MappingProxyType({})
_BY_ROUTER = ("ffn_gate_inp", "dense")


class DraftLayer(NamedTuple):
    """Modules of a layer for multi-token prediction, which follows the others; `{}` is their number.

    at: prefix of all. layer: prefix, below it, of the parts that any layer has.
    """

    at: str
    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str

    @property
    def parts(self) -> Parts:
        return {
            "nextn.eh_proj.weight": Part(self.projection, "hidden 2*hidden"),
            "nextn.enorm.weight": Part(self.embedding_norm, "hidden"),
            "nextn.hnorm.weight": Part(self.hidden_norm, "hidden"),
            "nextn.shared_head_norm.weight": Part(self.norm, "hidden"),
        }


@dataclass(frozen=True)
class LayeredArchitecture:
    """Facts of one architecture.

    config: text part of config.json.
    groups: tensors of layers. A layer has those of `layer`, of its type in the config, and of `sparse`, where there are
        such groups. A layer without a router has those of `dense` in place of `sparse`.
    tables: tensors outside layers.
    layer: prefix of a layer; `{}` is its number.
    kinds: groups of each layer, if it has others.
    sizes: beyond those of `sizes_of`.
    orders: of rows and of blocks of columns.
    wrapped: model_type of the multimodal family that has the class; its text part is nested.
    made: parameters from metadata.
    unused: tensors of layers that the model does not read.
    otherwise: (a tensor of a group, the group for layers without it).
    drafts: the layer that drafts tokens, in files that have one.
    rope_tensors: tensors that become part of the config.
    """

    model_class: str
    config: Callable[[Metadata, Contents], Config]
    groups: Mapping[str, Parts]
    tables: Parts
    layer: str = "model.layers.{}"
    kinds: Callable[[Config], list[tuple[str, ...]]] | None = None
    sizes: Callable[[Config], Sizes] = field(default=lambda _: _NO_SIZES)
    orders: Callable[[Config], Orders] = field(default=lambda _: _NO_ORDERS)
    wrapped: str = ""
    made: Callable[[Metadata, Config], dict[str, Vector]] = field(default=lambda *_: {})
    unused: tuple[str, ...] = ()
    otherwise: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    drafts: DraftLayer | None = None
    rope_tensors: tuple[str, ...] = ()

    def complete(self, text: Config) -> Config:
        """Return config.json from its text part."""
        if not self.wrapped:
            return {"architectures": [self.model_class], **text}
        tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
        return {"architectures": [self.model_class], "model_type": self.wrapped, "text_config": text, **tied}

    def ignores(self, name: str, config: Config) -> bool:
        """Return whether a tensor is not read: it is of a layer for multi-token prediction, or `unused`."""
        block, _, key = name.removeprefix("blk.").partition(".")
        layers = config.get("text_config", config)["num_hidden_layers"]
        return name.startswith("blk.") and (key in self.unused or (block.isdigit() and int(block) >= layers))

    def targets(self, config: Config, present: Shapes) -> Iterator[Target]:
        """Yield the targets of all tensors in model order. Raises CheckpointError for a missing tensor."""
        config = config.get("text_config", config)
        sizes = {**sizes_of(config), **self.sizes(config)}
        orders = self.orders(config)
        prefix = "language_model." if self.wrapped else ""

        def wanted(parts: Parts, block: str, at: str) -> Iterator[Target]:
            made = {
                _named(key): target_of(part, block + _named(part.source or key), at, sizes, orders)
                for key, part in parts.items()
            }
            optional = {made[_named(key)].source for key, part in parts.items() if part.optional}
            for target in unfused(made, present):
                missing = [source for source in target.sources if source not in present]
                if missing and target.source not in optional:
                    raise CheckpointError(f"tensor {missing[0]} is missing")
                if not missing:
                    yield target

        def layer(kinds: tuple[str, ...], number: int, at: str) -> Iterator[Target]:
            names = [self._group(kind, number, present) for kind in kinds]
            parts = {key: part for name in names for key, part in self.groups[name].items()}
            return wanted(parts, f"blk.{number}.", at)

        yield from wanted(self.tables, "", prefix)
        for number, kinds in enumerate(self._kinds(config)):
            yield from layer(kinds, number, f"{prefix}{self.layer.format(number)}.")
        count = config["num_hidden_layers"]
        drafts = self.drafts
        if drafts is not None and all(f"blk.{count}.{key}" in present for key in drafts.parts):
            at = drafts.at.format(count)
            types = [*config.get("layer_types", [""] * count), "full_attention"]
            kinds = self._kinds({**config, "num_hidden_layers": count + 1, "layer_types": types})[-1]
            yield from layer(kinds, count, at + drafts.layer)
            yield from wanted(drafts.parts, f"blk.{count}.", at)

    def _kinds(self, config: Config) -> list[tuple[str, ...]]:
        if self.kinds is not None:
            return self.kinds(config)
        types = config.get("layer_types") or config.get("layers_block_type") or [""] * config["num_hidden_layers"]
        return [tuple(group for group in ("layer", kind, "sparse") if group in self.groups) for kind in types]

    def _group(self, kind: str, number: int, present: Shapes) -> str:
        usual = _BY_ROUTER if kind == "sparse" and "dense" in self.groups else ("", kind)
        key, other = self.otherwise.get(kind, usual)
        return kind if f"blk.{number}.{_named(key)}" in present else other


def _named(key: str) -> str:
    """Return a tensor's name from its key: `attn_q` is a weight, and a dot at the end stands for no suffix."""
    return key.removesuffix(".") if "." in key else f"{key}.weight"


def target_of(part: Part, source: str, at: str, sizes: Sizes, orders: Orders) -> Target:
    """Return the target of the tensor `source`. at: prefix of its module."""
    block = source.rpartition(".")[0].rpartition(".")[0]
    return Target(
        source=source,
        module=(at + part.module).removesuffix("."),
        leaf=part.leaf,
        shape=shape_of(part.shape, sizes),
        rows=orders[part.rows] if part.rows else None,
        columns=orders[part.columns] if part.columns else None,
        values=part.values,
        stored=shape_of(part.stored, sizes) if part.stored else None,
        plain=part.plain,
        below=f"{block}.{_named(part.below)}" if part.below else "",
        index=part.index,
    )


def shape_of(axes: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the sizes of axes that are products of names and numbers: "heads*head hidden"."""
    return tuple(prod(sizes[name] if name in sizes else int(name) for name in axis.split("*")) for axis in axes.split())


def tables(norm: str = "model.norm", embedding: str = "model.embed_tokens", head: str = "lm_head") -> dict[str, Part]:
    """Return the tensors outside layers that most models have."""
    return {
        "token_embd": Part(embedding, "vocab hidden"),
        "output_norm": Part(norm, "hidden"),
        "output": Part(head, "vocab hidden", optional=True),
    }
