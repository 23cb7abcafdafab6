"""Targets of a GGUF's tensors from the row of its architecture: names, shapes and layout in the network.

Sizes of axes are products of named sizes, `heads*head`: those of `_SIZES`, and those of
`GGUFArchitecture.sizes`. A layer has the tensors of several groups of its row: "layer", the group of its type in
`layer_types`, and "sparse" or in its place "dense".

Guards: tests/faults/test_gguf.py and tests/models/gguf/test_convert.py.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from headrace.models.architectures.fields import text_section
from headrace.models.architectures.read import biased_modules
from headrace.models.gguf.architecture import Config, GGUFArchitecture, OrderOf, Shapes, Sizes, TensorRule, TensorRules
from headrace.models.gguf.rope import ROPE_FACTORS
from headrace.models.gguf.target import Order, Target, unfused
from headrace.runtime.errors import CheckpointError, UnsupportedModelError

_BY_ROUTER = ("ffn_gate_inp", "dense")  # a layer without this tensor, the router, has this group in place of "sparse"
# Sizes of tensors, and the keys of configs that state them; the first one counts.
_SIZES = {
    "hidden": ("hidden_size",),
    "vocab": ("vocab_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head": ("head_dim",),
    "inner": ("intermediate_size_mlp", "intermediate_size"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "width": ("moe_intermediate_size", "intermediate_size"),
    "shared": ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"),
    "kernel": ("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "q_lora": ("q_lora_rank",),
    "kv_lora": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
    "index": ("index_head_dim",),
    "index_heads": ("index_n_heads",),
}
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def targets(row: GGUFArchitecture, config: Config, present: Shapes) -> list[Target]:
    """Return one `Target` for every tensor that the network reads, in model order.

    present: shapes of the file's tensors. Raises CheckpointError for a missing tensor, UnsupportedModelError for an
    unknown one.
    """
    text = text_section(config)
    wanted = list(_Names(row, text, present).targets())
    used = {source for target in wanted for source in target.sources}
    unknown = {name for name in present.keys() - used if not _is_ignored(row, name, text)}
    if unknown:
        raise UnsupportedModelError(f"tensor {min(unknown)} has no place in a {row.model_type} model")
    return wanted


def _is_ignored(row: GGUFArchitecture, name: str, config: Config) -> bool:
    """Return whether a tensor is part of the config, or of a layer for multi-token prediction, or `ignored`."""
    block, _, key = name.removeprefix("blk.").partition(".")
    if not name.startswith("blk."):
        return name in row.config_tensors or (row.scales_rope and name == ROPE_FACTORS)
    return key in row.ignored or (block.isdigit() and int(block) >= config["num_hidden_layers"])


class _Names:
    """Targets of one file. config: its text part."""

    def __init__(self, row: GGUFArchitecture, config: Config, present: Shapes) -> None:
        self._row = row
        self._config = config
        self._present = present
        self._sizes = {**sizes_of(config), **row.sizes(config)}
        self._orders: dict[OrderOf, Order] = {}
        self._biased = biased_modules(config)

    def targets(self) -> Iterator[Target]:
        """Yield the targets of all tensors. Raises CheckpointError for a missing tensor."""
        row = self._row
        prefix = "language_model." if row.wrapped else ""
        yield from self._targets_of(row.tables, "", prefix)
        for number, rules in enumerate(self._layers()):
            yield from self._layer(rules, number, f"{prefix}{row.layer.format(number)}.")
        yield from self._draft_layer()

    def _draft_layer(self) -> Iterator[Target]:
        """Yield the targets of the layer that drafts tokens, if the file has all of it. It has full attention."""
        count = self._config["num_hidden_layers"]
        drafts = self._row.drafts
        if drafts is None or not all(f"blk.{count}.{key}" in self._present for key in drafts.parts):
            return
        # Groups are read from whole configs: from one that has this layer, too.
        layer_types = [*self._config.get("layer_types", [""] * count), "full_attention"]
        longer = {**self._config, "num_hidden_layers": count + 1, "layer_types": layer_types}
        groups = self._groups(longer)[-1]
        module_prefix = drafts.at.format(count)
        yield from self._layer(self._rules_of(groups, count), count, module_prefix + drafts.layer)
        yield from self._targets_of(drafts.parts, f"blk.{count}.", module_prefix)

    def _layers(self) -> list[TensorRules]:
        """Return the tensors of each layer."""
        if self._row.layers is not None:
            return self._row.layers(self._config)
        return [self._rules_of(groups, number) for number, groups in enumerate(self._groups(self._config))]

    def _rules_of(self, groups: tuple[str, ...], number: int) -> TensorRules:
        """Return the tensors of a layer with these groups."""
        rules: dict[str, TensorRule] = {}
        for group in groups:
            rules |= self._row.groups[self._present_group(group, number)]
        return rules

    def _layer(self, rules: TensorRules, number: int, module_prefix: str) -> Iterator[Target]:
        """Return the targets of a layer, with the biases that the config states."""
        biased: dict[str, TensorRule] = {}
        for key, rule in rules.items():
            biased[key] = rule
            if rule.leaf == "weight" and rule.module in self._biased:
                biased[f"{key}.bias"] = rule.bias
        return self._targets_of(biased, f"blk.{number}.", module_prefix)

    def _targets_of(self, rules: TensorRules, block: str, module_prefix: str) -> Iterator[Target]:
        """Yield the targets of tensors. block: prefix of their names in the file."""
        by_name = {
            named(key): self._target(rule, block + named(rule.source or key), module_prefix)
            for key, rule in rules.items()
        }
        optional = {by_name[named(key)].source for key, rule in rules.items() if rule.optional}
        for target in unfused(by_name, self._present):
            missing = [source for source in target.sources if source not in self._present]
            if missing and target.source not in optional:
                raise CheckpointError(f"tensor {missing[0]} is missing")
            if not missing:
                yield target

    def _target(self, rule: TensorRule, source: str, module_prefix: str) -> Target:
        """Return the target of the tensor `source`."""
        block = source.rpartition(".")[0].rpartition(".")[0]
        return Target(
            source=source,
            module=(module_prefix + rule.module).removesuffix("."),
            leaf=rule.leaf,
            shape=shape_of(rule.shape, self._sizes),
            rows=self._order(rule.rows),
            columns=self._order(rule.columns),
            values=rule.values,
            stored=shape_of(rule.stored, self._sizes) if rule.stored else None,
            plain=rule.plain,
            below=f"{block}.{named(rule.below)}" if rule.below else "",
            index=rule.index,
        )

    def _order(self, order_of: OrderOf | None) -> Order | None:
        """Return an order; layers share it."""
        if order_of is None:
            return None
        if order_of not in self._orders:
            self._orders[order_of] = order_of(self._config)
        return self._orders[order_of]

    def _groups(self, config: Config) -> list[tuple[str, ...]]:
        """Return the groups of each layer."""
        if self._row.kinds is not None:
            return self._row.kinds(config)
        groups = self._row.groups
        types = config.get("layer_types") or config.get("layers_block_type") or [""] * config["num_hidden_layers"]
        return [tuple(group for group in ("layer", layer_type, "sparse") if group in groups) for layer_type in types]

    def _present_group(self, group: str, number: int) -> str:
        """Return the group; the other one in its place, if the layer lacks the tensor that tells them apart."""
        tensor_and_other = self._row.otherwise.get(group)
        if tensor_and_other is None and group == "sparse" and "dense" in self._row.groups:
            tensor_and_other = _BY_ROUTER
        if tensor_and_other is None:
            return group
        key, other = tensor_and_other
        return group if f"blk.{number}.{named(key)}" in self._present else other


def named(key: str) -> str:
    """Return a tensor's name from its key: `attn_q` is a weight, and a dot at the end stands for no suffix."""
    return key.removesuffix(".") if "." in key else f"{key}.weight"


def shape_of(axes: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the sizes of axes that are products of names and numbers: "heads*head hidden"."""

    def size(axis: str) -> int:
        return prod(sizes[name] if name in sizes else int(name) for name in axis.split("*"))

    return tuple(size(axis) for axis in axes.split())


def stated(config: Mapping[str, Any], *keys: str) -> int:
    """Return the value of the first key that a config states, 0 for none."""
    return next((int(config[key]) for key in keys if config.get(key)), 0)


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that parts are made of; 0 for those that a config does not state."""
    sizes = {name: stated(config, *keys) for name, keys in _SIZES.items()}
    if not sizes["shared"]:
        width = config.get("moe_shared_expert_intermediate_size", sizes["width"])
        sizes["shared"] = width * stated(config, *_SHARED_EXPERTS)
    return sizes | {
        "both": sizes["nope"] + sizes["value"],
        "qkv": (sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["head"],
        "query": sizes["rope"] + sizes["nope"],
        "latent": sizes["kv_lora"] + sizes["rope"],
    }
