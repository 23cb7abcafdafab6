"""Graph size of a decode step per layer, as on a GPU: `python -m tests.bench.graph_counts`. Measures no time.

For headrace's decoder on stock MLX operations and for mlx-lm's class of the same checkpoint, one step (one token of one
sequence, or of each of ROWS sequences) is built and its graph counted:

- nodes: everything that is made and scheduled, views included
- kernels: launches on Metal and CUDA, all nodes but views
- levels: kernels on the longest chain of dependencies

Norms, rotations and attention, many operations on the CPU but one kernel on a GPU, are replaced by single nodes. The
figures of a layer are the difference between models of n and 2n layers. Sampling is counted once, from logits to token.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.buffers import BufferBackend
from headrace.runtime.kv.cache import PassRow
from headrace.runtime.ops import metal, reference
from headrace.runtime.ops.kv_format import Q8
from headrace.runtime.ops.weights import SampleRule
from tests.support.alone import new_cache
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder, quantize_model, write_model

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "qwen3-moe", "gpt-oss")
OTHERS: dict[str, Callable[[int], dict[str, Any]]] = {  # as mlx-lm's classes write them; changes by number of layers
    "apertus": lambda _: {},
    "ministral3": lambda _: {},
    "glm4": lambda _: {},
    "glm4-moe": lambda _: {"first_k_dense_replace": 0, "moe_intermediate_size": 64, "head_dim": 128},
    "glm4-lite": lambda _: _LATENT,
    "deepseek-v3": lambda _: (
        _LATENT | {"rope_scaling": config_of("deepseek-v3")["rope_scaling"] | {"mscale_all_dim": 1}}
    ),
    "gemma4": lambda layers: _GEMMA4 | {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)},
    "gemma4-mixture": lambda layers: {
        "moe_intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    },
}
_GEMMA4 = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
_LATENT = {
    "first_k_dense_replace": 0, "moe_intermediate_size": 64, "head_dim": None, "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
}  # fmt: skip
PACKED = ("llama", "qwen3")  # with packed K/V
BATCHED = ("llama", "qwen3", "gemma3")
ROWS = 4  # sequences of a batch, of different lengths
RULES = {  # for both: temperature, top-k, top-p, min-p
    "temperature": SampleRule(0.7),
    "top-k 20": SampleRule(0.7, top_k=20),
    "top-p 0.9": SampleRule(0.7, top_p=0.9),
    "top-k 20, top-p 0.9": SampleRule(0.7, top_k=20, top_p=0.9),
    "min-p 0.1": SampleRule(0.7, min_p=0.1),
}
LAYERS = 2  # of every kind of layer that a family has
PROMPT = [5, 17, 3, 88]
DTYPE = mx.float16

_STAND_INS = {"LogAddExp": "RMSNorm", "ArcTanh": "RoPE", "Depends": "Attention"}
_VIEWS = {"Broadcast", "Reshape", "Flatten", "Unflatten", "Transpose", "Split", "Slice", "ExpandDims", "Squeeze"}
_VIEWS |= {"StopGradient"}  # shares its input's buffer


@dataclass(frozen=True)
class Counts:
    """Counts of one layer."""

    nodes: float
    kernels: float
    levels: float


@dataclass(frozen=True)
class Node:
    """One primitive of a graph, with its input nodes."""

    name: str
    inputs: tuple[int, ...]

    @property
    def is_view(self) -> bool:
        return self.name in _VIEWS


def count_layer(step_of: Any, family: str, folder: Path, mixed: bool = False) -> Counts:
    """Count one layer of `family`.

    step_of: builds a step's logits from a model directory. mixed: V and up projections have other bits than their
    neighbours, as in many published files.
    """
    few, many = (_counted(step_of(model_of(folder, family, layers, mixed))) for layers in (LAYERS, 2 * LAYERS))
    return Counts(*((b - a) / LAYERS for a, b in zip(few, many, strict=True)))


def own_step(directory: Path) -> Any:
    """Build a step of headrace's decoder with a few tokens in its cache."""
    network = load_decoder(directory, reference, DTYPE)
    cache = new_cache(network, 64)

    def step(tokens: Sequence[int]) -> mx.array:
        cache.reserve(len(tokens))
        return network.logits(network.layers(network.embed(mx.array([tokens])), cache))

    mx.eval(step(PROMPT), cache.arrays)
    cache.advance(len(PROMPT))
    cache.cache._before = None  # one dependency between steps, which is no attention
    return step


def own_packed_step(directory: Path) -> Any:
    """Build a step with packed K/V."""
    network = load_decoder(directory, reference, DTYPE).with_kv(Q8)
    kv = network.kv_backend(KVOptions(64))
    cache: Any = kv.acquire(())

    def step(tokens: Sequence[int]) -> mx.array:
        [one] = kv.make_passes([PassRow(cache, len(tokens), "decode")])
        logits = network.logits(network.layers(network.embed(mx.array([tokens])), one))
        one.advance()
        return logits

    mx.eval(step(PROMPT), cache.arrays)
    cache.commit(len(PROMPT))
    cache._before = None
    return step


def own_batch_step(directory: Path) -> Any:
    """Build a step of ROWS sequences with contexts of different lengths, in slots of shared buffers."""
    network = load_decoder(directory, reference, DTYPE)
    kv = network.kv_backend(KVOptions(64, max_running=ROWS))
    assert isinstance(kv, BufferBackend)
    caches = [kv.acquire(()) for _ in range(ROWS)]
    for row, cache in enumerate(caches):
        tokens = PROMPT[: row + 1]
        [one] = kv.make_passes([PassRow(cache, len(tokens), "prefill")])
        x = network.layers(network.embed(mx.array([tokens])), one)
        one.advance()
        mx.eval(x, cache.arrays)
        cache.commit(len(tokens))

    def step(tokens: Sequence[int]) -> mx.array:
        [one] = kv.make_passes([PassRow(cache, 1, "decode") for cache in caches])
        x = network.layers(network.embed(mx.array([tokens * ROWS])), one)
        return network.logits(x[0][:, None])

    return step


def mlx_lm_step(directory: Path) -> Any:
    """Build a step of mlx-lm's class with its cache."""
    return _mlx_lm_step(directory)


def mlx_lm_packed_step(directory: Path) -> Any:
    """Build a step of mlx-lm's class with its quantized cache."""
    return _mlx_lm_step(directory, packed=True)


def _mlx_lm_step(directory: Path, packed: bool = False) -> Any:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(directory)
    cache = make_prompt_cache(model)
    if packed:
        cache = [layer.to_quantized(group_size=32, bits=8) for layer in cache]
    mx.eval(model(mx.array([PROMPT]), cache=cache), [layer.state for layer in cache])
    return lambda tokens: model(mx.array([tokens]), cache=cache)


def mlx_lm_batch_step(directory: Path) -> Any:
    """Build a step of mlx-lm's class for ROWS sequences, as its batch generation does."""
    from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(directory)
    padding = [ROWS - 1 - row for row in range(ROWS)]
    cache = [
        BatchKVCache(padding) if isinstance(layer, KVCache) else BatchRotatingKVCache(layer.max_size, padding)
        for layer in make_prompt_cache(model)
    ]
    prompts = [[0] * left + PROMPT[: ROWS - left] for left in padding]
    mx.eval(model(mx.array(prompts), cache=cache), [layer.state for layer in cache])
    return lambda tokens: model(mx.array([tokens] * ROWS), cache=cache)


def count_sampling(rule: SampleRule, vocabulary: int = 1000) -> tuple[Counts, Counts]:
    """Count from logits (1, V) to a token: headrace's, mlx-lm's with its log probabilities."""
    from mlx_lm.sample_utils import make_sampler

    logits = mx.random.normal((1, vocabulary)).astype(DTYPE)
    sampler = make_sampler(rule.temperature, 0.0 if rule.top_p == 1 else rule.top_p, rule.min_p, 1, rule.top_k)
    mx.eval(logits)

    def ours(_: Sequence[int]) -> mx.array:
        return reference.sample(logits, [rule], [7 << 45])

    def theirs(_: Sequence[int]) -> mx.array:
        return sampler(logits - mx.logsumexp(logits, keepdims=True))

    one = _counted(ours)
    other = _counted(theirs)
    return Counts(*one), Counts(*other)


def model_of(folder: Path, family: str, layers: int, mixed: bool) -> Path:
    plain = folder / f"{family}-{layers}"
    if not plain.exists() and family in OTHERS:
        wide = {"num_hidden_layers": layers, "hidden_size": 256, "head_dim": 64, "max_position_embeddings": 256}
        write_mlx_lm_model(plain, {**config_of(family), **wide, **OTHERS[family](layers)}, dtype=DTYPE)
    elif not plain.exists():
        changes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": 256, "head_dim": 64}
        if family == "gpt-oss":
            changes["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
        if family == "qwen3-moe":
            changes["mlp_only_layers"] = []
        write_model(plain, family, dtype=DTYPE, changes=changes)
    other = {"group_size": 32, "bits": 8}
    modules = [f"model.layers.{i}.{name}" for i in range(layers) for name in ("self_attn.v_proj", "mlp.up_proj")]
    name = f"{family}-{layers}-{'mixed' if mixed else 'even'}"
    kinds: dict[str, Any] = dict.fromkeys(modules, other) if mixed else {}
    if family in ("glm4-moe", "glm4-lite", "deepseek-v3"):  # mlx-lm's classes keep their routers whole
        kinds |= {f"model.layers.{i}.mlp.gate": False for i in range(layers)}
    return quantize_model(plain, folder / name, kinds)


def _counted(step: Any) -> tuple[int, int, int]:
    """Return (nodes, kernels, levels) of one step of one token."""
    with _as_on_a_gpu():
        logits = step([7])
        graph = _graph(logits)
    levels: dict[int, int] = {}
    for key, node in graph.items():  # inputs come before what takes them
        levels[key] = (not node.is_view) + max((levels[number] for number in node.inputs), default=0)
    return len(graph), sum(not node.is_view for node in graph.values()), max(levels.values())


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Replace MLX's fast operations, and functions compiled on a GPU, by one node each. Nothing is computed."""

    def rms_norm(x: mx.array, weight: mx.array | None, *_: float, **_options: float) -> mx.array:
        return x if weight is None else mx.logaddexp(x, weight)

    def rope(x: mx.array, *_arguments: Any, **_options: Any) -> mx.array:
        return mx.arctanh(x)

    def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> Any:
        beside = [option for option in (options.get("mask"), options.get("sinks")) if isinstance(option, mx.array)]
        return mx.depends(q, [k, v, *beside])

    def launch(_name: str, _source: str, inputs: dict[str, mx.array], outputs: dict[str, Any], **_options: Any) -> Any:
        results = [mx.zeros(*output) for output in outputs.values()]
        mx.eval(results)
        return mx.depends(results, list(inputs.values()))

    with (
        patch.object(mx.fast, "rms_norm", rms_norm),
        patch.object(mx.fast, "rope", rope),
        patch.object(mx.fast, "scaled_dot_product_attention", attention),
        patch.object(reference, "on_gpu", lambda: True),
        patch.object(metal, "launch", launch),
        metal.forced(True),
    ):
        mx.enable_compile()
        try:
            yield
        finally:
            mx.disable_compile()  # what is computed outside needs no C++ compiler


def _graph(output: mx.array) -> dict[int, Node]:
    """Return the primitives behind `output`, inputs first, from MLX's export."""
    with tempfile.TemporaryDirectory() as folder:
        drawing = Path(folder) / "graph.dot"
        mx.export_to_dot(str(drawing), output)
        text = drawing.read_text()
    graph: dict[int, Node] = {}
    maker: dict[str, int] = {}  # of each array, by its letters
    number = -1
    takes = []
    for line in text.splitlines():
        if found := re.match(r'\{ \d+ \[label ="(\w+)"', line):
            number = len(graph)
            takes = []
            graph[number] = Node(_STAND_INS.get(found[1], found[1]), ())
        elif found := re.match(r'"(\w+)" -> \d+', line):
            takes.append(found[1])
        elif found := re.match(r'\d+ -> "(\w+)"', line):
            maker[found[1]] = number
            inputs = tuple(sorted({maker[name] for name in takes if name in maker}))
            graph[number] = Node(graph[number].name, inputs)
    return graph


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kinds = f"{'kernels':>9}{'levels':>8}"
        print(f"{'a layer of':<24}{'headrace: nodes':>16}{kinds}{'mlx-lm: nodes':>16}{kinds}")
        for name, (own, other, family, mixed) in rows().items():
            _print(name, *(count_layer(step, family, Path(folder), mixed) for step in (own, other)))
        print("sampling")
        for name, rule in RULES.items():
            _print(name, *count_sampling(rule))


def rows() -> dict[str, tuple[Any, Any, str, bool]]:
    """Return the rows of layers: name -> (step of headrace, of mlx-lm, family, mixed bits)."""
    found: dict[str, tuple[Any, Any, str, bool]] = {}
    for family in FAMILIES:
        found[family] = own_step, mlx_lm_step, family, False
        found[f"{family}, mixed bits"] = own_step, mlx_lm_step, family, True
    for family in OTHERS:
        found[family] = own_step, mlx_lm_step, family, False
    for family in PACKED:
        found[f"{family}, packed K/V"] = own_packed_step, mlx_lm_packed_step, family, False
    for family in BATCHED:
        found[f"{family}, {ROWS} sequences"] = own_batch_step, mlx_lm_batch_step, family, False
    return found


def _print(name: str, ours: Counts, theirs: Counts) -> None:
    print(
        f"{name:<24}{ours.nodes:>16g}{ours.kernels:>9g}{ours.levels:>8g}"
        f"{theirs.nodes:>16g}{theirs.kernels:>9g}{theirs.levels:>8g}"
    )


if __name__ == "__main__":
    main()
