"""The model catalog: assets/catalog.toml as typed entries.

A new model is a table in that file, whose head explains the keys; tests/models/registry/test_catalog.py checks each.
Starting an installed model does not import this module: reading the file costs milliseconds. Completion of names
does, so costs, which need mlx, are imported only where they are computed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from headrace.models.registry.hub_id import HubId
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.errors import ModelNotFoundError

if TYPE_CHECKING:
    from headrace.models.cost.step_shape import StepShape
    from headrace.runtime.metrics.cost import LayerKV

_FAMILY_ALIKE = 0.75  # of their letters: qwn and qwen, not minimax and gemma
# Models of the hub without an organisation, which their names alone mean.
_HUB_GPT2 = re.compile(r"(distil)?gpt2(-(medium|large|xl))?", re.IGNORECASE)
_NO_HINT = "`headrace models list` lists all models; any other of the hub is org/name"


class Wheel(Struct, frozen=True):
    """A GGUF in a Python wheel of the package index, pinned by hash."""

    requirement: str  # "name==version"
    filename: str
    bytes: int
    sha256: str
    member: str  # path inside the wheel
    member_bytes: int
    member_sha256: str


class KVRow(NamedTuple):
    """K/V of several equal layers."""

    layers: int  # their number
    kv_heads: int
    width: int  # of a head
    window: int  # 0 for none


class Shape(Struct, frozen=True):
    """Sizes of a model's layers, as the catalog states them: enough for costs, not for running it."""

    layers: int
    hidden: int
    ffn: int  # for a mixture of experts: of one expert
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 1
    active_experts: int = 1  # per token
    others: int = 0  # weights that layers of other kinds have beyond these sizes
    looked_up: int = 0  # weights in tables per layer, of which a token reads a row
    kv: tuple[KVRow, ...] = ()  # unless all layers are equal
    chosen: int = 0  # positions that an indexer leaves to attention, of `kv`'s first row; its keys: the last; 0: all
    block: int = 1  # positions that it chooses together

    @property
    def parameters(self) -> int:
        """Return the number of weights in all matrices (norms and biases are left out: under 0.1 %)."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        feed_forward = 3 * self.hidden * self.ffn * self.experts
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return tables + self.layers * (attention + router + feed_forward) + self.further

    @property
    def further(self) -> int:
        """Weights that the other sizes do not tell."""
        return self.others + self.looked_up

    @property
    def kv_rows(self) -> "list[LayerKV]":
        """Return the layers' K/V in half precision, an upper bound where the windows are not stated."""
        from headrace.models.cost.shape_sources import KV
        from headrace.runtime.metrics.cost import LayerKV

        rows = self.kv or (KVRow(self.layers, self.kv_heads, self.head_dim, 0),)
        kv = [LayerKV(row.layers, KV.row_bytes(row.kv_heads, row.width), row.window or None) for row in rows]
        if self.chosen:
            kv[0] = replace(kv[0], chosen=self.chosen, block=self.block)
            kv[-1] = replace(kv[-1], unread=self.chosen)
        return kv

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes that a token adds to the cache, before a window is full."""
        return sum(layer.count * layer.bytes_per_token for layer in self.kv_rows)


class CatalogEntry(Struct, frozen=True, dict=True):
    """A model of the catalog, which can be fetched by its name."""

    name: str
    title: str  # for people
    source: Wheel | HubId
    quantization: str
    download_bytes: int
    weight_bytes: int  # in memory, quantized
    context: int  # maximum context in tokens
    licence: str
    shape: Shape
    checked: str  # source of the facts above
    unread_bytes: int = 0  # of the download: vision and audio parts, which are not loaded
    whole_on_gpu: bool = False  # mlx-lm's class, which runs it on a GPU, cannot be divided among machines

    @cached_property
    def step_shape(self) -> "StepShape":
        """Return the shape of a decode step from the catalog's facts alone."""
        from headrace.models.architectures.config import DecoderConfig, ExpertsConfig, LayerConfig
        from headrace.models.cost.shape_sources import shape_of_decoder
        from headrace.runtime.metrics.cost import Matrix, quantized_bytes

        # A decoder of equal layers, of the stated sizes. Costs do not depend on rotation, epsilon and scale.
        shape = self.shape
        quantization = self.quantization.upper()
        mixture = None
        if shape.experts > 1:
            mixture = ExpertsConfig(shape.experts, shape.active_experts, shape.ffn, normalized=True)
        config = DecoderConfig(
            architecture="catalog", hidden_size=shape.hidden, intermediate_size=shape.ffn, heads=shape.heads,
            kv_heads=shape.kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab, context_length=self.context,
            norm_eps=1e-5, tied_embeddings=shape.tied, layers=(LayerConfig(rope=None, experts=mixture),) * shape.layers,
            attention_scale=1.0,
        )  # fmt: skip
        # GGUF types such as Q4_1 have groups of 32, MLX's builds such as "4-bit" of 64.
        bits = 8 if "Q8" in quantization else 4
        group_size = 32 if quantization.startswith("Q") else 64
        built = shape_of_decoder(
            config, bits, group_size, f"catalog, {self.quantization}", mxfp4_experts=quantization.startswith("MXFP4")
        )
        # The other weights, as one more matrix in each layer.
        rows = round(shape.others / shape.hidden / shape.layers)
        other = Matrix(
            "other", shape.layers, rows, shape.hidden, quantized_bytes(rows * shape.hidden, bits, group_size)
        )
        # All matrices in proportion, so that their sum is the stated one: tables may have more bits than layers.
        scale = self.weight_bytes / (built.resident_bytes + quantized_bytes(shape.further, bits, group_size))
        matrices = [replace(each, nbytes=round(each.nbytes * scale)) for each in (other, *built.matrices)]
        native, gpu = built.splits
        splits = native, () if self.whole_on_gpu else gpu
        built = replace(built, matrices=matrices, kv=shape.kv_rows, resident_bytes=self.weight_bytes)
        return replace(built, splits=splits, family=self.name)

    def memory_bytes(self, context: int) -> int:
        """Return the memory to run with `context` tokens: weights, K/V cache and the program itself."""
        from headrace.models.cost.costs import working_memory

        shape = self.step_shape
        return self.weight_bytes + shape.cost.kv_bytes(min(context, self.context)) + working_memory(shape)


@cache
def _document() -> dict[str, Any]:
    import tomllib  # 4 ms that an installed model's start does not need

    with (ASSETS / "catalog.toml").open("rb") as file:
        return tomllib.load(file)


@cache
def load_catalog() -> dict[str, CatalogEntry]:
    """Return all entries by name, in the order of the file (smallest first)."""
    return {name: _entry(name, row) for name, row in _document()["models"].items()}


def load_ranks() -> dict[str, list[str]]:
    """Return the names of the best models by use (`chat`, `code`, `fastest`), the best first."""
    ranks: dict[str, list[str]] = _document()["ranks"]
    return ranks


def find(name: str, others: Callable[[], Sequence[str]] = list) -> CatalogEntry:
    """Return the entry called `name`.

    others: returns names of models that are on this disk. It is called for unknown names alone, since it may read
    folders of other programs. Raises ModelNotFoundError with similar names, those of `others` before the catalog's.
    """
    catalog = load_catalog()
    if name in catalog:
        return catalog[name]
    present = others()
    near = sorted(_similar(name, list(dict.fromkeys([*present, *catalog]))), key=lambda known: known not in present)
    hint = f"did you mean {' or '.join(near)}?" if near else _NO_HINT
    if _HUB_GPT2.fullmatch(name):
        hint = f"the hub's is hf.co/{name.lower()}"
    if Path(name).is_dir():  # a bare word is only a path if a model is found there
        hint = f"the directory ./{name} has neither a config.json nor a single .gguf file; pass the file you mean"
    raise ModelNotFoundError(f"no model called {name!r}", hint)


def respelled(name: str) -> str | None:
    """Return the catalog's name that differs from `name` in case and dashes alone: llama3.2-1b, Qwen3-4B."""
    return next((known for known in load_catalog() if squashed(known) == squashed(name)), None)


def _similar(name: str, known: list[str]) -> list[str]:
    """Return up to three names: the same but for dashes, or of the same family, misspelt perhaps."""
    from difflib import get_close_matches

    wanted = squashed(name)
    parts = [known_name for known_name in known if len(wanted) > 2 and wanted in squashed(known_name)]
    families = {known_name: _family(known_name) for known_name in known}
    alike = get_close_matches(_family(name), set(families.values()), cutoff=_FAMILY_ALIKE)
    family = [known_name for known_name in known if families[known_name] in alike]
    return (parts or get_close_matches(name.lower(), family, n=3, cutoff=0.5) or family)[:3]


def _family(name: str) -> str:
    """Return the letters that a name begins with: `qwen` of qwen3-4b."""
    match = re.match("[a-z]*", name.lower())
    return match[0] if match else ""


def squashed(name: str) -> str:
    """Return a name in small letters, without dashes, to compare spellings."""
    return re.sub("[-_: ]", "", name.lower())


def _entry(name: str, row: Mapping[str, Any]) -> CatalogEntry:
    """Return an entry from its table in the file: its source is a `wheel` or a `hub`."""
    facts = dict(row)
    wheel = facts.pop("wheel", None)
    hub = facts.pop("hub", None)
    source = Wheel(**wheel) if wheel is not None else HubId(**hub)
    sizes = facts.pop("shape")
    shape = Shape(**sizes | {"kv": tuple(KVRow(*row) for row in sizes.get("kv", ()))})
    return CatalogEntry(name=name, source=source, shape=shape, **facts)  # the other keys are the fields' names
