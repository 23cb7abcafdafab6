"""Passes whose output no one wants stop at the last layer's K/V and state: the same bits behind them, and less work."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.cost.step_shape import total
from headrace.models.network.decoder import Decoder
from headrace.runtime.kv.backend import KVBackend, KVOptions, PassRow
from headrace.runtime.ops import native, reference
from tests.support.mlx_lm_models import VOCAB, config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder, quantize_model, write_model

needs_kernels = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")
# Attention in the last layer: fused, by itself, of latents; recurrent state, beside attention; K/V of an earlier layer.
NAMES = ["olmo2", "glm4-lite", "qwen3.5", "granite-hybrid", "falcon-h1", "nemotron-h", "gemma4", "gemma4-mixture"]
NAMES += ["olmo-hybrid", "kimi-linear", "kimi-k3", "gemma3n", "mamba2", "mamba", "rwkv7"]
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(80)]


def run(network: Decoder, kv: KVBackend, rows: list[tuple[Any, list[int], Any, bool]]) -> mx.array:
    [kv_pass] = kv.make_passes([PassRow(cache, len(tokens), phase, output) for cache, tokens, phase, output in rows])
    x = network.layers(network.embed(mx.array([[token for _, tokens, *_ in rows for token in tokens]])), kv_pass)
    kv_pass.advance()
    mx.eval(x, kv_pass.arrays)
    for cache, tokens, *_ in rows:
        cache.commit(len(tokens))
    return x


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_prefill_without_output_leaves_the_same_kv_bits(name: str, tmp_path: Path) -> None:
    directory = write_mlx_lm_model(tmp_path / "plain", {**config_of(name), "vocab_size": VOCAB})
    network = load_decoder(quantize_model(directory, tmp_path / "4-bit"), native)
    kv = network.kv_backend(KVOptions(400))
    found = []
    for output in (True, False):
        first = kv.acquire(())
        second = kv.acquire(())
        run(network, kv, [(first, PROMPT[:40], "prefill", output)])
        both = [(first, [PROMPT[40]], "decode", True), (second, PROMPT[:33], "prefill", output)]
        mixed = run(network, kv, both)
        last = run(network, kv, [(first, [5], "decode", True), (second, [6], "decode", True)])
        found.append([network.logits(x) for x in (mixed[:, :1], last[:, :1], last[:, 1:])])
    for whole, without in zip(*found, strict=True):
        assert mx.array_equal(whole, without)


@needs_kernels
def test_prefill_skips_the_last_layer_after_its_kv(tmp_path: Path) -> None:
    network = load_decoder(write_model(tmp_path, "llama"), native)
    layers = 3
    kv = network.kv_backend(KVOptions(400))
    regions = []
    for output in (True, False):
        cache = kv.acquire(())
        x = network.embed(mx.array([PROMPT]))
        mx.eval(x)
        [kv_pass] = kv.make_passes([PassRow(cache, len(PROMPT), "prefill", output)])
        native.measure_regions(True)
        mx.eval(network.layers(x, kv_pass), kv_pass.arrays)
        times = native.region_times()
        native.measure_regions(False)
        regions.append((times["weights"].regions, times["attention"].regions))
    (products, attends), (fewer_products, fewer_attends) = regions
    assert (products, fewer_products) == (2 * 4 * layers, 2 * (4 * layers - 3))  # all but output, gate and up, down
    assert (attends, fewer_attends) == (2 * layers, 2 * layers - 1)  # keys and values are placed alone


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", *NAMES])
def test_flops_of_a_prompt_are_those_of_its_operations(name: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama") if name == "llama" else write_mlx_lm_model(tmp_path, config_of(name))
    network = load_decoder(directory, reference)
    shape = shape_of_checkpoint(open_checkpoint(directory))
    cost = network.cost
    assert cost.late_flops == shape.cost.late_flops
    for past, tokens in ((0, 1), (0, 40), (30, 7)):
        assert total(shape.prefill(tokens, past))[1] == shape.cost.prompt_flops(past, tokens)
        assert cost.prompt_flops(past, tokens) < cost.step_flops(past, tokens) - tokens * network.config.hidden_size**2


def test_flops_after_the_last_kv_equal_those_counted_by_hand(tmp_path: Path) -> None:
    network = load_decoder(write_model(tmp_path, "llama"), reference)
    config = network.config
    width = config.hidden_size
    heads = config.heads * config.head_dim
    assert network.cost.late_flops == 2 * width * (heads + 3 * config.intermediate_size + config.vocab_size)
    layers = len(config.layers)
    per_entry = 4 * heads
    assert network.cost.prompt_flops(0, 2) == (
        2 * (network.cost.weight_flops - network.cost.late_flops) + (layers - 1) * per_entry * 3
    )
