"""A network with no file behind it: the tiny llama's weights, built in memory."""

from copy import copy
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.network.decoder import Decoder
from tests.support.tiny import load_decoder, write_model


@pytest.fixture(scope="session")
def buffered(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A 2-layer llama of random weights, vocabulary of 96, on the reference operations."""
    directory: Path = tmp_path_factory.mktemp("tiny") / "llama"
    network = load_decoder(write_model(directory, "llama", changes={"num_hidden_layers": 2}))
    mx.eval(network.arrays)  # tests that weigh memory start from loaded weights, whichever runs first
    return network


@pytest.fixture(scope="session")
def paged(buffered: Decoder) -> Decoder:
    """The same, with its K/V in blocks of a pool."""
    twin = copy(buffered)
    twin.pages = True
    return twin


@pytest.fixture(scope="session", params=["buffers", "blocks"])
def either(request: pytest.FixtureRequest, buffered: Decoder, paged: Decoder) -> Decoder:
    """Both of them in turn."""
    return paged if request.param == "blocks" else buffered


@pytest.fixture(scope="session")
def network(buffered: Decoder) -> Decoder:
    """Backend of most tests; a module that is to run with both layouts overrides it by `either`."""
    return buffered
