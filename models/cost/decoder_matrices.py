"""Matrices of the layers of headrace's decoder, with their sizes, from its configuration."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby

from headrace.models.cost.step_shape import Matrix
from headrace.models.network.config import DecoderConfig
from headrace.models.network.latent_config import projections_of
from headrace.models.network.layer_config import LayerConfig
from headrace.models.network.mixer_config import gates_of, projections_into

SizeOf = Callable[[str, int, int], int]
"""(module, rows, columns) -> stored bytes of that projection with bias; for stacked experts, of one expert."""

# Projections before the entry that a layer's token appends, or computed with them.
_BEFORE = ("q_", "k_", "v_", "kv_", "in_", "g_", "f_", "a_", "b_", "embed_q", "unembed_out")


@dataclass(slots=True)
class _Matrices:
    """Matrices of layers, collected by kind and size."""

    size_of: SizeOf
    inputs: Sequence[str]  # projections into a feed-forward
    last: int  # the last layer that appends
    found: list[Matrix] = field(default_factory=list)

    def add(
        self, name: str, module: str, layers: Sequence[int], rows: int, columns: int, of: int = 1, active: int = 1
    ) -> None:
        """Add a projection of these layers. of, active: experts in each, and how many of them a token uses."""
        behind = self.last + name.startswith(_BEFORE)  # the first layer that is late
        sizes = sorted((self.size_of(f"model.layers.{i}.{module}", rows, columns), i >= behind) for i in layers)
        for size, same in groupby(sizes, lambda found: found[0]):
            late = [is_late for _, is_late in same]
            share = Fraction(active, of)
            self.found.append(Matrix(name, of * len(late), rows, columns, size, share, late=of * sum(late)))

    def add_feed_forward(
        self, kind: str, at: str, layers: Sequence[int], inner: int, width: int, of: int = 1, active: int = 1
    ) -> None:
        shapes = dict.fromkeys(self.inputs, (inner, width)) | {"down_proj": (width, inner)}
        for name, (rows, columns) in shapes.items():
            self.add(kind + name, f"{at}.{name}", layers, rows, columns, of, active)


def layer_matrices(config: DecoderConfig, size_of: SizeOf) -> list[Matrix]:
    """Return all matrices but the tables and the output projection."""
    width, every = config.hidden_size, range(len(config.layers))
    matrices = _Matrices(size_of, config.family.inputs, config.appending - 1)
    attends = [i for i in every if config.layers[i].attends]
    kinds = {i: (*config.heads_of(config.layers[i]), config.layers[i].projects) for i in attends}
    for kind in dict.fromkeys(kinds.values()):
        layers = [i for i in attends if kinds[i] == kind]
        for name, (rows, columns) in _attention_matrices(config, config.layers[layers[0]]).items():
            matrices.add(name, f"self_attn.{name}", layers, rows, columns)
    for mixer in {layer.mixer for layer in config.layers if layer.mixer}:
        layers = [i for i in every if config.layers[i].mixer == mixer]
        for name, rows in projections_into(mixer).items():
            matrices.add(name, f"mixer.{name}", layers, rows, width)
        for name, rows in gates_of(mixer).items():
            matrices.add(name, f"mixer.{name}", layers, rows, mixer.rank)
        matrices.add("out_proj", "mixer.out_proj", layers, width, mixer.sizes.inner)
    dense = [i for i in every if (experts := config.layers[i].experts) is None or experts.branch]
    dense = [i for i in dense if config.layers[i].feeds]
    widths = {i: config.layers[i].inner or config.intermediate_size for i in dense}
    for inner in dict.fromkeys(widths.values()):
        matrices.add_feed_forward("", "mlp", [i for i in dense if widths[i] == inner], inner, width)
    for experts in {layer.experts for layer in config.layers if layer.experts}:
        layers = [i for i in every if config.layers[i].experts == experts]
        matrices.add("router", f"mlp.{experts.router}", layers, experts.count, width)
        at, counts = f"mlp.{experts.stacked}", (experts.count, experts.active)
        matrices.add_feed_forward("expert ", at, layers, experts.size, width, *counts)
        if experts.shared:
            matrices.add_feed_forward("shared ", f"mlp.{experts.beside}".rstrip("."), layers, experts.shared, width)
        if experts.beside_gate:
            matrices.add("shared gate", f"mlp.{experts.beside_gate}", layers, 1, width)
    return matrices.found + _input_matrices(config, size_of)


def _input_matrices(config: DecoderConfig, size_of: SizeOf) -> list[Matrix]:
    """Return the projections of single layers' inputs."""
    size, width, count = config.input_size, config.hidden_size, len(config.layers)
    if not size:
        return []
    whole = "per_layer_model_projection"
    found = [Matrix(whole, 1, count * size, width, size_of(f"model.{whole}", count * size, width))]
    for name, rows, columns in (("per_layer_input_gate", size, width), ("per_layer_projection", width, size)):
        matrices = _Matrices(size_of, (), config.appending - 1)
        matrices.add(name, name, range(count), rows, columns)
        found += matrices.found
    return found


def input_table_bytes(config: DecoderConfig, size_of: SizeOf) -> int:
    """Return the bytes of the table of single layers' inputs, of which a step looks up rows."""
    wide = len(config.layers) * config.input_size
    return size_of("model.embed_tokens_per_layer", config.input_vocab, wide) if wide else 0


def _attention_matrices(config: DecoderConfig, layer: LayerConfig) -> dict[str, tuple[int, int]]:
    """Return the projections of a layer's attention, with rows and columns."""
    kv_heads, head_dim = config.heads_of(layer)
    width, q_rows, kv_rows = config.hidden_size, config.heads * head_dim, kv_heads * head_dim
    if (latent := config.latent) is not None:
        return {**projections_of(latent, config.heads, width), "o_proj": (width, config.heads * latent.value)}
    queries = q_rows * (2 if config.family.gated else 1)
    rows = {"q": queries, "k": kv_rows, "v": kv_rows}
    return {**{f"{part}_proj": (rows[part], width) for part in layer.projects}, "o_proj": (width, q_rows)}


def split_latents(sizes: Counter[str], config: DecoderConfig) -> int:
    """Divide the bytes of K/V projections that are stored as one; return the bytes by which the first half grows.

    It is transposed while loading, in half precision (`Parameters.halves_of_heads`).
    """
    more, latent = 0, config.latent
    for at in () if latent is None else (f"model.layers.{i}.self_attn" for i in range(len(config.layers))):
        if latent is None or not (whole := sizes.pop(f"{at}.kv_b_proj", 0)):
            continue
        share = whole * latent.other // (latent.other + latent.value)
        sizes[f"{at}.embed_q"] = max(share, 2 * config.heads * latent.other * latent.size)
        sizes[f"{at}.unembed_out"] = whole - share
        more += sizes[f"{at}.embed_q"] - share
    return more


def unstacking(size_of: SizeOf, config: DecoderConfig) -> SizeOf:
    """Wrap `size_of` for projections that Phi-3 stores stacked with others of the same input."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    wholes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    wholes |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")

    def size(module: str, rows: int, columns: int) -> int:
        owner, _, name = module.rpartition(".")
        found = size_of(module, rows, columns)
        if found or name not in wholes:
            return found
        stacked = qkv if wholes[name] == "qkv_proj" else 2 * rows
        return size_of(f"{owner}.{wholes[name]}", stacked, columns) * rows // stacked

    return size


def norm_weights(config: DecoderConfig) -> int:
    """Return the number of weights in norms and other vectors."""
    names, width = config.family.norms, config.hidden_size
    places = len({names.attention, names.after_attention, names.mlp, names.after_mlp} - {None})
    total = width + config.input_size
    for layer in config.layers:
        kv_heads, head_dim = config.heads_of(layer)
        heads = {None: 0, "unit": 0, "head": 1 + ("k" in layer.projects), "heads": config.heads + kv_heads}[
            config.family.qk_norm
        ]
        total += places * width + heads * head_dim + (config.heads if config.sinks else 0)
        total += (width if config.input_size else 0) + config.family.scaled
        total += config.latent.queries + config.latent.size if config.latent is not None else 0
        if layer.experts is not None and layer.experts.branch:
            total += 4 * width + layer.experts.count
    return total
