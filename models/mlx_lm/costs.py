"""Step cost of an mlx-lm model, from the graph of a step and its caches, without evaluating an array.

    parameters          the share of each by `touched_shares`: tables are looked up, experts chosen by the router
    keys and values     every visible row of every layer's cache, sliding windows included; with an indexer, those that
                        it chooses for attention

Recurrent state is left out: it is constant, and small compared with the weights.

Guard: tests/models/mlx_lm/test_costs.py.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from msgspec import Struct
from msgspec.structs import replace

from headrace.models.architectures.fields import text_section
from headrace.models.mlx_lm.cache import CachePart, leaves
from headrace.runtime.metrics.cost import LayerKV, Matrix, StepCost, attention_flops_per_entry, step_cost

_UNDIVIDED = ("router", "q_a_proj", "kv_a_proj_with_mqa")  # modules that classes leave whole on every rank
_LISTED = 32  # experts that a class may have as a list of modules; a table's share of one row rounds to none
# Tokens of two lengths for measuring cache growth: multiples of every architecture's pooling.
_SHORT = 256
_LONG = 512


class StepReads(Struct, frozen=True):
    """Reads of a step."""

    vocab_size: int  # logits of a token
    shares: Mapping[str, float]  # read share of each parameter, by name
    matrices: Sequence[Matrix]  # that a step multiplies with
    vector_bytes: int  # of all other parameters that it reads
    kv: Sequence[LayerKV]  # of every cache
    attention_flops: int  # per visible entry of a layer

    @property
    def cost(self) -> StepCost:
        return step_cost(self.matrices, self.vector_bytes, self.kv, self.attention_flops, state_bytes=0)


def measure(model: nn.Module, config: Mapping[str, object], shares: Mapping[str, float] | None = None) -> StepReads:
    """Return the reads of a step of `model`. Raises what its class raises for an unexpected config.

    shares: read shares of parameters, if they are known.
    """
    vocab_size = int(model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1])
    kv = _chosen(model, layers_kv(model, lambda: list(make_prompt_cache(model))))
    if shares is None:
        shares = touched_shares(model, config, vocab_size)
    nbytes = round(sum(shares[name] * array.nbytes for name, array in tree_flatten(model.parameters())))
    matrices = _matrices(model, shares, vocab_size)
    vectors = max(0, nbytes - sum(matrix.step_bytes for matrix in matrices))
    text = text_section(config)
    heads = text.get("num_attention_heads", 0)
    width = text.get("hidden_size", 0)
    head_dim = text.get("head_dim") or width // max(heads, 1)
    return StepReads(vocab_size, shares, matrices, vectors, kv, attention_flops_per_entry(heads, head_dim))


def _matrices(model: nn.Module, shares: Mapping[str, float], vocab_size: int) -> list[Matrix]:
    """Return the matrices that a step multiplies with, equal ones merged; a stack of experts counts each expert."""
    modules = dict(model.named_modules())
    parameters = dict(tree_flatten(model.parameters()))
    matrices: Counter[Matrix] = Counter()
    for name, array in parameters.items():
        if not _is_matrix(name, array) or not shares[name]:
            continue
        module = name.removesuffix(".weight")
        extras = [parameters.get(f"{module}.{part}") for part in ("scales", "biases")]
        nbytes = array.nbytes + sum(part.nbytes for part in extras if part is not None)

        # A projection (N, K), or a stack of experts (X, N, K)
        count = 1
        rows = array.shape[0]
        kind = module.rpartition(".")[2]
        max_denominator = _LISTED
        if array.ndim == 3 and shares[name] < 1 and array.shape[0] > 1:
            count, rows, _ = array.shape
            kind = f"expert {kind}"
            max_denominator = count
        uses = Fraction(shares[name]).limit_denominator(max_denominator)  # of its elements, in a step
        matrix = Matrix(
            name=kind,
            count=count,
            rows=rows,
            columns=round(prod(array.shape) * _weights_per_element(modules, name, array)) // (rows * count),
            nbytes=nbytes // count,
            share=min(uses, Fraction(1)),
            reads=max(uses, Fraction(1)),
            output=array.shape[0] == vocab_size,
            part=_part(name),
            divided=kind not in _UNDIVIDED,
        )
        matrices[matrix] += 1
    return [replace(matrix, count=matrix.count * times) for matrix, times in matrices.items()]


def _part(name: str) -> str:
    """Return the part of the network that a parameter belongs to, by its name; empty for others."""
    parts = {"experts": "experts used", "switch_mlp": "experts used", "attn": "attention", "attention": "attention",
             "mlp": "MLP", "feed_forward": "MLP", "lm_head": "head", "embed_tokens": "head", "wte": "head"}  # fmt: skip
    modules = name.split(".")
    return next((part for word, part in parts.items() if any(word in module for module in modules)), "")


def layers_kv(model: nn.Module, make_parts: Callable[[], list[CachePart]]) -> list[LayerKV]:
    """Return the K/V of every cache that `make_parts` makes for `model`."""

    def probe(tokens: int) -> list[CachePart]:
        parts = make_parts()
        model(mx.zeros((1, tokens), mx.int32), cache=parts)  # shapes only: never evaluated
        return parts

    kinds = [_of_keys(part) for part in leaves(probe(1))]
    if None in kinds:
        grown = zip(leaves(probe(_SHORT)), leaves(probe(_LONG)), strict=True)
        for index, (short, long) in enumerate(grown):
            if kinds[index] is None:
                kinds[index] = _of_growth(short, long)
    return [layer for layers in kinds for layer in layers or ()]


def _chosen(model: nn.Module, kv: list[LayerKV]) -> list[LayerKV]:
    """Return the K/V with the rows that an indexer chooses: DeepSeek V3.2 and GLM 5 keep two caches a layer, the first
    for attention, the second with the indexer's keys, all of which it reads once there are more.
    """
    indexers = [
        module
        for name, module in model.named_modules()
        if name.endswith(".indexer") and type(module).__module__ == "mlx_lm.models.deepseek_v32"
    ]
    if 2 * len(indexers) != len(kv):
        return kv
    pairs = zip(indexers, kv[::2], kv[1::2], strict=True)
    return [
        part
        for indexer, rows, keys in pairs
        for part in (replace(rows, chosen=indexer.index_topk), replace(keys, unread=indexer.index_topk))
    ]


def _of_keys(part: CachePart) -> list[LayerKV] | None:
    """Return K/V from the shapes (1, Hkv, capacity, D) of keys and values, or None if unknown.

    State that does not grow has none. Quantized K/V are several arrays each: codes, scales and offsets.
    """
    stored = tree_flatten([getattr(part, "keys", None), getattr(part, "values", None)])
    arrays = [leaf for _, leaf in stored if isinstance(leaf, mx.array)]
    if arrays and len(arrays) == len(stored):
        row = sum(int(array.shape[1]) * int(array.shape[3]) * array.dtype.size for array in arrays)
        return [LayerKV(1, row, getattr(part, "max_size", None))]
    if isinstance(part, ArraysCache):
        return []
    return None


def _of_growth(short: CachePart, long: CachePart) -> list[LayerKV]:
    """Return K/V from the growth of a cache's arrays; arrays that no longer grow have the rows of its window.

    DeepSeek V4's caches say by an array's name how many tokens' entries a query attends to (`chosen`).
    """
    layers = []
    window = getattr(long, "window_size", None)
    chosen = getattr(long, "chosen", {})
    before = dict(tree_flatten({name: value for name, value in vars(short).items() if value is not None}))
    for name, array in tree_flatten({name: value for name, value in vars(long).items() if value is not None}):
        if not isinstance(array, mx.array) or not isinstance(before.get(name), mx.array):
            continue
        growth = (array.nbytes - before[name].nbytes) / (_LONG - _SHORT)
        if growth > 0:
            has_window = window and window > _LONG  # else the array would not have grown
            layers.append(LayerKV(1, round(growth), window if has_window else None, chosen=chosen.get(name)))
        elif isinstance(window, int) and window == array.shape[1]:
            layers.append(LayerKV(1, array.nbytes // window, window))
    return layers


def _is_matrix(name: str, array: mx.array) -> bool:
    """Return whether a parameter is a matrix, not scales or zero points of one."""
    return array.ndim >= 2 and not name.endswith((".scales", ".biases"))


def _weights_per_element(modules: Mapping[str, nn.Module], name: str, array: mx.array) -> float:
    """Return the number of weights in one element of the parameter: several if it is packed."""
    if array.dtype != mx.uint32:
        return 1
    return 32 / int(modules[owner(modules, name)].bits)


# --- shares of parameters that a step reads, from its traced graph ----------------------------------------------

# Operations that return their input, or a part of it, in another shape, without reading it.
_VIEWS = (
    "AsStrided", "Broadcast", "Contiguous", "Copy", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze",
    "StopGradient", "Transpose", "Unflatten",
)  # fmt: skip
# Config keys of the number of experts per token.
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
# Operations that read a matrix anew each time.
_PRODUCTS = frozenset({"AddMM", "GatherMM", "GatherQMM", "Matmul", "QuantizedMatmul"})
_POOLED = 256  # tokens: a multiple of the groups that caches with a window pool
_Value = tuple[str, tuple[int, ...], mx.Dtype]  # in a traced graph: name, shape, element type


def touched_shares(model: nn.Module, config: Mapping[str, object], vocab_size: int) -> dict[str, float]:
    """Return by parameter the share of its bytes that one step of one token reads. Logits: (B, T, `vocab_size`).

    Matrices count as a whole for every product, so those of layers that run several times have a share above 1. Stacks
    of experts count by the share that the router's indices select, tables by the gathered part. Rows looked up by the
    token itself do not count, and unused parameters have no share. If a step cannot be traced, tables are recognised by
    their class, and the share of experts follows from the config.
    """
    device = mx.default_device()
    mx.set_default_device(mx.cpu)  # custom GPU kernels of a class cannot be traced, their replacements can
    try:
        return _traced(model)
    except (ValueError, RuntimeError):
        return _assumed(model, config, vocab_size)
    finally:
        mx.set_default_device(device)


def _traced(model: nn.Module) -> dict[str, float]:
    """Return the shares by the graph of one step. Raises ValueError or RuntimeError if it cannot be exported."""
    parameters = [(name, array) for name, array in tree_flatten(model.parameters()) if isinstance(array, mx.array)]
    names = [name for name, _ in parameters]
    events: list[dict[str, Any]] = []  # of `mx.export_function`: inputs, then primitives in order
    states = _states(model)

    def step(token: mx.array, *arrays: mx.array) -> mx.array:
        model.update(tree_unflatten(list(zip(names, arrays, strict=True))))
        parts = make_prompt_cache(model)
        for part, state in zip(leaves(parts), states, strict=True):
            vars(part).update(tree_map(_zeros, state))
        logits: mx.array = model(token, cache=parts)
        return logits

    try:
        mx.export_function(events.append, step, mx.array([[0]]), *(array for _, array in parameters))
    finally:
        model.update(tree_unflatten(parameters))
    inputs = next(event["inputs"] for event in events if event["type"] == "inputs")
    read = _bytes_read(inputs, [event for event in events if event["type"] == "primitive"])
    return {
        name: read[value[0]] / max(array.nbytes, 1) for (name, array), value in zip(parameters, inputs[1:], strict=True)
    }


def _states(model: nn.Module) -> list[dict[str, Any]]:
    """Return attributes of each cache after some tokens, if a step reads parameters because of them; else none.

    The first step of a sequence has no recurrent state, so it would not read the parameters of its decay. Nor has it
    entries that are pooled from several tokens, so it would not read those of their index. Evaluates nothing.
    """
    parts = make_prompt_cache(model)
    model(mx.array([[0]]), cache=parts)
    if any(hasattr(part, "window_size") for part in leaves(parts)):
        parts = make_prompt_cache(model)
        model(mx.zeros((1, _POOLED), mx.int32), cache=parts)
    states: list[dict[str, Any]] = []
    for part in leaves(parts):
        if isinstance(part, ArraysCache) and all(isinstance(array, mx.array) for array in part.cache):
            states.append({"cache": part.cache})
        elif hasattr(part, "window_size"):
            states.append(dict(vars(part)))
        else:
            states.append({})
    return states


def _zeros(leaf: object) -> object:
    """Return zeros in place of an array."""
    return mx.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, mx.array) else leaf


def _bytes_read(inputs: Sequence[_Value], primitives: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return the bytes read of each input by name. The first input is the token."""
    from_token = {inputs[0][0]}  # the token and values computed from it alone
    seen = {value[0]: (value[0], _nbytes(value)) for value in inputs[1:]}  # view -> (input, bytes)
    read: defaultdict[str, float] = defaultdict(float)  # by operations that share one read: at most the whole input
    multiplied: defaultdict[str, float] = defaultdict(float)  # by products, each of which reads its matrix anew
    for primitive in primitives:
        kind = primitive["name"]
        operands = primitive["inputs"]
        results = primitive["outputs"]
        sources = [operand for operand in operands if operand[0] in seen]
        if not sources:
            if any(operand[0] in from_token for operand in operands):
                from_token.update(result[0] for result in results)
        elif kind in _VIEWS:
            origin, nbytes = seen[sources[0][0]]
            seen.update((result[0], (origin, min(nbytes, _nbytes(result)))) for result in results)
        elif kind == "Gather" and operands[0][0] in seen:
            if not any(operand[0] in from_token for operand in operands[1:]):  # else a table of tokens
                origin, _ = seen[operands[0][0]]
                read[origin] += sum(_nbytes(result) for result in results)
        else:
            sums = multiplied if kind in _PRODUCTS else read
            for name, shape, _ in sources:
                origin, nbytes = seen[name]
                if kind.startswith("Gather"):  # products with chosen experts of a stack (X, ...)
                    _, indices_shape, _ = operands[-1]  # the experts' indices
                    nbytes = nbytes * min(1.0, prod(indices_shape) / shape[0])
                sums[origin] += nbytes
    return {value[0]: max(multiplied[value[0]], min(read[value[0]], _nbytes(value))) for value in inputs[1:]}


def _nbytes(value: _Value) -> int:
    """Return the bytes of a value of the graph."""
    _, shape, dtype = value
    return prod(shape) * int(dtype.size)


def _assumed(model: nn.Module, config: Mapping[str, object], vocab_size: int) -> dict[str, float]:
    """Return the shares by classes of modules and the config's number of active experts."""
    text = text_section(config)
    sections = (text, text.get("ffn_config") or {})
    active = next((part[key] for part in sections for key in _ACTIVE_EXPERTS if isinstance(part.get(key), int)), None)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    tables = _looked_up(modules, vocab_size)
    shares = {}
    listed = _listed_experts(modules)
    for name, array in tree_flatten(model.parameters()):
        path = owner(modules, name)
        mixture, of_list, _ = path.partition(".experts.")
        stacked = isinstance(modules[path], QuantizedSwitchLinear | SwitchLinear)
        if stacked:
            count = array.shape[0]
        elif of_list:
            count = listed.get(mixture, 0)
        else:
            count = 0
        shares[name] = 1.0
        if active and count:
            shares[name] = min(1.0, active / count)
        if path in tables:
            shares[name] = 0.0
    return shares


def _listed_experts(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return by path of a mixture the number of its experts, if they are a list of modules."""
    numbers: defaultdict[str, set[str]] = defaultdict(set)
    for path in modules:
        mixture, _, rest = path.partition(".experts.")
        number = rest.partition(".")[0]
        if number.isdecimal():
            numbers[mixture].add(number)
    return {mixture: len(experts) for mixture, experts in numbers.items()}


def _looked_up(modules: Mapping[str, nn.Module], vocab_size: int) -> set[str]:
    """Return the embedding tables of which a step reads one row.

    These are all tables except the output table: the only one with a row per logit, or the narrowest of them, since
    Gemma's tables per layer are wider than the model.
    """
    rows = {path: module for path, module in modules.items() if "weight" in module}
    tables = {path: module for path, module in rows.items() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)}
    of_vocabulary = {path for path, module in rows.items() if module.weight.shape[0] == vocab_size}
    shared = of_vocabulary & tables.keys()
    if of_vocabulary == shared and shared:
        return tables.keys() - {min(shared, key=lambda path: tables[path].weight.shape[1])}
    return set(tables)


def owner(modules: Mapping[str, nn.Module], parameter: str) -> str:
    """Return the path of the module that has a parameter."""
    path = parameter
    while path not in modules:
        path = path.rpartition(".")[0]
    return path
