"""Our decoder against mlx-lm's own model class for every architecture, on tiny random weights in float32."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request, Step
from headrace.runtime.metrics.cost import FLOAT_MODES
from headrace.runtime.ops import Ops
from tests.support.alone import new_cache
from tests.support.kernels import KERNELS, name_of
from tests.support.tiny import VARIANTS, VOCAB, load_decoder, quantize_model, write_model

pytestmark = pytest.mark.peer

# mlx-lm runs sliding-window Gemma 2 layers as full attention; these prompts are shorter than its window.
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(40)]


def logits_of(network: Any, tokens: list[int]) -> mx.array:
    cache = new_cache(network, 256)
    cache.reserve(len(tokens))
    x = network.layers(network.embed(mx.array([tokens])), cache)
    cache.advance(len(tokens))
    return x if isinstance(network, MlxLmNetwork) else network.all_logits(x)


def relative_difference(a: mx.array, b: mx.array) -> float:
    return float((mx.abs(a - b).max() / mx.abs(b).max()).item())


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "4-bit"])
def test_logits_equal_mlx_lm(tmp_path: Path, variant: str, quantized: bool) -> None:
    directory = write_model(tmp_path / "plain", variant)
    if quantized:
        directory = quantize_model(
            directory, tmp_path / "quantized", {"model.layers.1.self_attn.v_proj": {"bits": 8, "group_size": 32}}
        )
    peer = MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu)
    mine = logits_of(load_decoder(directory), PROMPT)
    theirs = logits_of(peer, PROMPT)
    assert mine.shape == theirs.shape == (1, len(PROMPT), VOCAB)
    assert relative_difference(mine, theirs) < 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_logits_of_float_quantized_weights_equal_mlx_lms(tmp_path: Path, variant: str, mode: str) -> None:
    table = {"model.embed_tokens": {"bits": 8, "group_size": 64}}  # states no mode: affine
    directory = quantize_model(write_model(tmp_path / "plain", variant), tmp_path / mode, table, mode)
    peer = MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu)
    assert relative_difference(logits_of(load_decoder(directory), PROMPT), logits_of(peer, PROMPT)) < 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.parametrize("variant", ["qwen3-moe", "gpt-oss"])
def test_tokens_of_every_turn_of_a_mixture_equal_mlx_lms(tmp_path: Path, variant: str, ops: Ops) -> None:
    """A first turn, a second one, and the first one edited; past the window, and with a cache that goes back."""
    directory = write_model(tmp_path, variant)
    peer = MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu)
    engine = Engine(load_decoder(directory, ops), context_limit=256, keep_prefix=True)

    def said(prompt: list[int]) -> list[int]:
        events = engine.generate(Request(prompt, max_tokens=12))
        return [token for event in events if isinstance(event, Step) for token in event.tokens]

    def expected(prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(logits_of(peer, tokens)[0, -1].argmax().item()))
        return tokens[len(prompt) :]

    first = said(PROMPT)
    assert first == expected(PROMPT)
    second = [*PROMPT, *first, 3, 1, 4, 1, 5]
    assert said(second) == expected(second)
    edited = [*PROMPT[:25], 9, 2, 6, *PROMPT[28:]]
    assert said(edited) == expected(edited)
