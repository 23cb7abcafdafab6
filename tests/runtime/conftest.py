"""A network with no file behind it: the tiny llama's weights, built in memory."""

from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from tests.tiny import load_decoder, write_model


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A 3-layer llama of random weights, vocabulary of 96, on the reference operations."""
    directory: Path = tmp_path_factory.mktemp("tiny") / "llama"
    network = load_decoder(write_model(directory, "llama"))
    mx.eval(network.arrays)  # tests that weigh memory start from loaded weights, whichever runs first
    return network
