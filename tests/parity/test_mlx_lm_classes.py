"""Our decoder against mlx-lm's own model class for every architecture, on tiny random weights in float32."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.network.mlx_lm import MlxLmNetwork
from tests.tiny import VARIANTS, VOCAB, load_decoder, quantize_model, write_model

pytestmark = pytest.mark.peer

# mlx-lm runs sliding-window Gemma 2 layers as full attention; these prompts are shorter than its window.
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(40)]


def logits_of(network: Any, tokens: list[int]) -> mx.array:
    cache = network.make_cache(256)
    cache.reserve(len(tokens))
    x = network.layers(network.embed(mx.array([tokens])), cache)
    cache.advance(len(tokens))
    return x if isinstance(network, MlxLmNetwork) else network.all_logits(x)


def relative_difference(a: mx.array, b: mx.array) -> float:
    return float((mx.abs(a - b).max() / mx.abs(b).max()).item())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "4-bit"])
def test_logits_equal_mlx_lm(tmp_path: Path, variant: str, quantized: bool) -> None:
    directory = write_model(tmp_path / "plain", variant)
    if quantized:
        directory = quantize_model(
            directory, tmp_path / "quantized", {"model.layers.1.self_attn.v_proj": {"bits": 8, "group_size": 32}}
        )
    peer = MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu)
    mine, theirs = logits_of(load_decoder(directory), PROMPT), logits_of(peer, PROMPT)
    assert mine.shape == theirs.shape == (1, len(PROMPT), VOCAB)
    assert relative_difference(mine, theirs) < 1e-5
