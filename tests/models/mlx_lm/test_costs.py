"""The bytes of a step through mlx-lm's classes, held to the tensors that one really touches.

A tensor is touched if a NaN in it reaches the logits: the whole tensor, one expert of a stack, all rows of a table
but the one looked up, one row of a layer's keys.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_config
from headrace.models.cost.step_shape import total
from headrace.models.mlx_lm.costs import leaves
from headrace.models.mlx_lm.network import MlxLmNetwork
from tests.models.mlx_lm.test_network import CONFIGS, WINDOW, load, write
from tests.support.alone import new_cache, prefill
from tests.support.every_module import config_of

pytestmark = pytest.mark.peer

TOKEN = 7
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_ctx": 128,
    "n_positions": 128,
    "layer_norm_epsilon": 1e-5,
}
TALKIE: dict[str, Any] = {  # its output projection is no module of its own
    "model_type": "talkie",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "intermediate_size": 128,
}
# Two layers where all are alike: every tensor and row takes a step.
ALIKE = ("olmo2", "gemma", "mixtral", "qwen2_moe", "qwen3_moe")
ATTENTIVE = {
    "dbrx": config_of("dbrx"),  # its experts are a list, and its step cannot be traced
    **{name: {**CONFIGS[name], "num_hidden_layers": 2} for name in ALIKE},
    **{name: CONFIGS[name] for name in ("cohere2", "gpt_oss")},
    "gpt2": GPT2,
    "talkie": TALKIE,
}


@pytest.fixture(scope="module", params=ATTENTIVE)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("costs"), ATTENTIVE[request.param])


class Step:
    """One step of a network with `past` entries in its cache, to be repeated with something poisoned."""

    def __init__(self, network: MlxLmNetwork, past: int) -> None:
        self.model = network._model
        self.cache = new_cache(network, past + 8)
        for _ in prefill(network, self.cache, [(5 * i + 1) % 96 for i in range(past)]):
            pass
        assert not self.poisoned()

    def poisoned(self, parts: list[Any] | None = None) -> bool:
        """Return True if a NaN reaches the logits."""
        parts = deepcopy(self.cache.parts) if parts is None else parts
        logits = self.model(mx.array([[TOKEN]]), cache=parts)
        return bool(mx.isnan(logits).any().item())

    def reads(self, name: str, clean: mx.array, at: Any) -> bool:
        """Return True if the elements `at` of a parameter matter."""
        spoilt = mx.array(clean)
        spoilt[at] = mx.nan
        self.model.update(tree_unflatten([(name, spoilt)]))
        try:
            return self.poisoned()
        finally:
            self.model.update(tree_unflatten([(name, clean)]))

    def weight_bytes(self) -> int:
        return sum(
            self._bytes_read(name, array)
            for name, array in tree_flatten(self.model.parameters())
            if array.dtype != mx.uint32  # goes with its scales
        )

    def _bytes_read(self, name: str, array: mx.array) -> int:
        path, _, part = name.rpartition(".")
        owner = dict(self.model.named_modules())[path]
        nbytes = array.nbytes + (owner.weight.nbytes if part == "scales" else 0)
        if isinstance(owner, nn.Embedding | nn.QuantizedEmbedding):
            others = mx.array([row for row in range(array.shape[0]) if row != TOKEN])
            position = array.shape[0] == GPT2["n_positions"]
            return nbytes if self.reads(name, array, slice(0, 1) if position else others) else 0
        if type(owner).__name__.endswith("SwitchLinear"):
            experts = range(array.shape[0])
            return nbytes // len(experts) * sum(self.reads(name, array, expert) for expert in experts)
        return nbytes if self.reads(name, array, ...) else 0

    def rows_read(self, index: int) -> int:
        """Return how many past rows of a cache reach the logits; keys stand for values."""
        leaf = leaves(self.cache.parts)[index]
        return sum(self._reads_row(index, place) for place in range(min(leaf.keys.shape[2], leaf.offset)))

    def _reads_row(self, index: int, place: int) -> bool:
        parts = deepcopy(self.cache.parts)
        leaves(parts)[index].keys[..., place, :] = mx.nan
        return self.poisoned(parts)

    def kv_bytes(self) -> int:
        """Rows of the past that matter, the new row read, and the new row written."""
        total = 0
        for index, leaf in enumerate(leaves(self.cache.parts)):
            row = (leaf.keys.nbytes + leaf.values.nbytes) // leaf.keys.shape[2]
            total += (self.rows_read(index) + 2) * row
        return total


@pytest.mark.sampled(24)
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", ATTENTIVE)
def test_weight_bytes_of_a_step_are_those_of_the_tensors_touched(tmp_path: Path, name: str, bits: int | None) -> None:
    network = load(write(tmp_path, ATTENTIVE[name], bits))
    assert network.cost.weight_bytes == pytest.approx(Step(network, 3).weight_bytes(), rel=0.01)


@pytest.mark.parametrize("name", ["mamba", "recurrent_gemma"])
def test_weight_bytes_with_recurrent_state(tmp_path: Path, name: str) -> None:
    """The first step of a sequence does not read the parameters of its state's decay; all others do."""
    network = load(write(tmp_path, config_of(name)))
    assert network.cost.weight_bytes == pytest.approx(Step(network, 3).weight_bytes(), rel=0.01)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("past", [3, WINDOW + 3])
def test_cache_bytes_of_a_step_are_those_of_the_rows_touched(directory: Path, past: int) -> None:
    network = load(directory)
    step = Step(network, past)
    assert network.cost.step_bytes(past) - network.cost.weight_bytes == pytest.approx(step.kv_bytes(), rel=0.01)


DEEPSEEK: dict[str, Any] = {  # a cache of its own: a window, and entries pooled from several tokens
    "model_type": "deepseek_v41",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "compress_ratios": [1, 4, 4],
    "kv_source_layer_ids": [0, 1, 1],
    "index_source_layer_ids": [0, 1, 1],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    "max_position_embeddings": 4096,
}


def test_the_bytes_of_an_unknown_cache_class_are_measured(tmp_path: Path) -> None:
    network = load(write(tmp_path, DEEPSEEK))
    caches = [new_cache(network, 2048) for _ in range(2)]
    for cache, tokens in zip(caches, (400, 800), strict=True):
        for _ in prefill(network, cache, [1 + i % 90 for i in range(tokens)]):
            pass
    grown = caches[1].allocated_bytes - caches[0].allocated_bytes
    assert grown > 0
    expected = sum(layer.nbytes(800) - layer.nbytes(400) for layer in network.cost.kv)
    assert expected == pytest.approx(grown, rel=0.01)
    assert network.cost.kv_bytes_read(800) == pytest.approx(caches[1].allocated_bytes, rel=0.05)


@pytest.mark.parametrize("past", [3, 20])
def test_a_step_reads_the_rows_that_an_indexer_chooses(tmp_path: Path, past: int) -> None:
    config = config_of("deepseek_v32")
    network = load(write(tmp_path, config))
    assert [layer.chosen for layer in network.cost.kv] == [config["index_topk"], None] * config["num_hidden_layers"]
    counted = network.cost.kv[0].visible(past + 1)
    assert counted == min(past + 1, config["index_topk"])
    assert Step(network, past).rows_read(0) in (counted - 1, counted)  # the step's own row may be one of them


def test_layers_that_run_twice_are_read_twice() -> None:
    config = config_of("nanbeige") | {"vocab_size": 100}  # of no other matrix
    once = shape_of_mlx_lm_config(config | {"num_loops": 1})
    twice = shape_of_mlx_lm_config(config | {"num_loops": 2})
    layers = sum(matrix.step_bytes for matrix in once.matrices if not matrix.output)
    for batch in (1, 4):
        assert twice.weight_bytes(batch) == once.weight_bytes(batch) + layers
    assert twice.resident_bytes == once.resident_bytes
    for operations in (lambda shape: shape.step(8), lambda shape: shape.prefill(8)):
        reads, flops = total(operations(once))
        reads_twice, flops_twice = total(operations(twice))
        assert reads_twice > reads + layers  # K/V of the second run, too
        assert flops_twice > 1.5 * flops
