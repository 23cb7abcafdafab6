"""Headers decide before weights are fetched: bytes that a hub sends until a model is refused or described."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.models.cost.shape_sources import shape_of_gguf
from headrace.models.gguf.container import open_container
from headrace.models.registry.fetch_hub import fetch_hub
from headrace.models.registry.find_shape import find_shape
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.store import Store
from headrace.runtime.errors import CheckpointError, FetchError, UnsupportedModelError
from tests.models.gguf.test_split import write_split
from tests.support.checkpoints import WHOLE_CONFIG
from tests.support.gguf_models import write_gguf
from tests.support.hub_server import HubServer

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # huggingface_hub keeps its connections open

WEIGHTS = bytes(24 << 20)
HUB = HubId("org/name")


def gguf(folder: Path, variant: str = "llama", **changes: Any) -> bytes:
    """A small GGUF, with as many bytes after its tensors as a model has."""
    return write_gguf(folder / f"{variant}.gguf", variant, **changes).read_bytes() + WEIGHTS


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "cwm"}, "cwm"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"model_type": "qwen2", "rope_scaling": {"rope_type": "mystery"}}, "mystery"),
    ],
)
def test_a_config_that_nothing_runs_is_refused_before_weights(hub: HubServer, changes: dict, word: str) -> None:
    config = json.dumps(WHOLE_CONFIG | changes).encode()
    hub.add("org/name", {"config.json": config, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"})
    with pytest.raises(CheckpointError, match=word):
        fetch_hub(HUB)
    assert hub.sent < 1 << 20


@pytest.mark.sampled
@pytest.mark.parametrize(("known", "unknown"), [(b"llama", b"plamo"), (b"smollm", b"smolln")])
def test_a_gguf_that_nothing_runs_is_refused_before_weights(
    hub: HubServer, tmp_path: Path, known: bytes, unknown: bytes
) -> None:
    """Its architecture or its tokenizer is not supported."""
    hub.add("org/name", {"m-Q8_0.gguf": gguf(tmp_path).replace(known, unknown)})
    with pytest.raises(UnsupportedModelError, match=unknown.decode()):
        fetch_hub(HUB)
    assert hub.sent < 2 << 20


def test_a_long_header_is_read_in_parts_and_the_file_then_fetched(hub: HubServer, tmp_path: Path) -> None:
    content = gguf(tmp_path, template="x" * (3 << 20))
    hub.add("org/name", {"m-Q8_0.gguf": content})
    files = fetch_hub(HUB)
    assert files.gguf is not None
    assert files.gguf.read_bytes() == content
    assert len(content) < hub.sent < len(content) + (6 << 20)


def test_a_hub_without_ranges_sends_the_whole_file(hub: HubServer, tmp_path: Path, store: Store) -> None:
    content = gguf(tmp_path, template="x" * (3 << 20))
    hub.add("org/name", {"m-Q8_0.gguf": content})
    hub.whole = True
    with pytest.raises(FetchError, match="parts"):
        find_shape("org/name", store)
    files = fetch_hub(HUB)
    assert files.gguf is not None
    assert files.gguf.read_bytes() == content


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["llama-3", "phi3-long", "qwen3moe"])
def test_the_shape_of_a_gguf_on_a_hub_is_that_of_the_file(
    hub: HubServer, tmp_path: Path, store: Store, variant: str
) -> None:
    """Also where its config follows from the values of a tensor."""
    content = gguf(tmp_path, variant)
    hub.add("org/name", {"m-Q8_0.gguf": content})
    name, shape = find_shape("org/name:q8_0", store)
    assert name == "org/name:Q8_0"
    assert shape == shape_of_gguf(open_container(tmp_path / f"{variant}.gguf"))
    assert hub.sent < 2 << 20


def test_the_shape_of_a_split_gguf_follows_from_the_headers_of_its_parts(
    hub: HubServer, tmp_path: Path, store: Store
) -> None:
    parts = write_split(tmp_path / "split")
    hub.add("org/name", {part.name: part.read_bytes() + WEIGHTS for part in parts})
    shape = shape_of_gguf(open_container(write_gguf(tmp_path / "m.gguf", "llama")))
    assert find_shape("org/name", store)[1] == shape
    assert hub.sent < 4 << 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")
