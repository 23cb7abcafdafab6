"""Our decoder against a plain numpy forward pass: every architecture, and the windows where mlx-lm differs."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from headrace.runtime.ops import Ops
from tests.support.alone import new_cache
from tests.support.kernels import KERNELS, name_of, tolerance
from tests.support.numpy_decoder import logits
from tests.support.tiny import EVERY, VOCAB, load_decoder, write_model

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(61)]


@pytest.mark.sampled(always=["gemma2"])  # caps logits and attention scores
@pytest.mark.parametrize("ops", KERNELS, ids=name_of)
@pytest.mark.parametrize("variant", EVERY)
def test_logits_equal_the_plain_computation(tmp_path: Path, variant: str, ops: Ops) -> None:
    directory = write_model(tmp_path, variant)
    stored = mx.load(str(directory / "model.safetensors"))
    assert isinstance(stored, dict)
    weights = {name: np.array(array, np.float64) for name, array in stored.items()}
    expected = logits(json.loads((directory / "config.json").read_text()), weights, PROMPT)

    network = load_decoder(directory, ops)
    cache = new_cache(network, len(PROMPT))
    cache.reserve(len(PROMPT))
    found = np.array(network.all_logits(network.layers(network.embed(mx.array([PROMPT])), cache))[0], np.float64)
    assert found.shape == expected.shape == (len(PROMPT), VOCAB)
    assert np.abs(found - expected).max() / np.abs(expected).max() < tolerance(ops)
