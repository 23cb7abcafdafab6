"""Shapes without weights: local configs and headers, the catalog, and config.json from a hub."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.registry.find_shape import find_shape
from headrace.models.registry.store import Store
from headrace.runtime.errors import CheckpointError, HeadraceError, ModelNotFoundError, UnsupportedModelError
from tests.support.hub_server import HubServer
from tests.support.tiny import config_of, write_model

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # huggingface_hub keeps its connections open


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_directory_with_weights_is_read_from_its_headers(tmp_path: Path, store: Store) -> None:
    directory = write_model(tmp_path / "tiny", "gemma3", dtype=mx.float16)
    name, shape = find_shape(str(directory), store)
    assert (name, shape) == ("tiny", shape_of_checkpoint(open_checkpoint(directory)))


def test_a_config_alone_is_enough(tmp_path: Path, store: Store) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")))
    _, shape = find_shape(str(tmp_path), store)
    assert shape.source.startswith("config.json")
    assert shape.layers == config_of("qwen2")["num_hidden_layers"]


def test_a_catalog_name_needs_no_installed_model(store: Store) -> None:
    name, shape = find_shape("qwen3-30b-a3b", store)
    assert name == "qwen3-30b-a3b"
    assert shape.cost.weight_bytes < shape.resident_bytes / 8  # 8 of 128 experts
    with pytest.raises(ModelNotFoundError):
        find_shape("qwen3-31b", store)


def test_of_a_hub_model_only_the_config_is_fetched(hub: HubServer, store: Store) -> None:
    config = {**config_of("llama"), "quantization": {"bits": 4, "group_size": 32}}
    hub.add("org/name", {"config.json": json.dumps(config).encode(), "model.safetensors": b"never read"})
    name, shape = find_shape("org/name", store)
    assert name == "org/name"
    assert shape.source == "config.json, 4-bit, groups of 32"
    assert hub.fetched("model.safetensors") == 0


def test_a_repository_without_a_config_is_an_error(hub: HubServer, store: Store) -> None:
    hub.add("org/gguf", {"m-Q4_K_M.gguf": b""})
    for name in ("org/gguf", "org/nothing"):
        with pytest.raises(HeadraceError) as caught:
            find_shape(name, store)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_an_invalid_config_is_an_error(text: str, tmp_path: Path, store: Store) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError):
        find_shape(str(tmp_path), store)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path, store: Store) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(UnsupportedModelError, match="rwkv"):
        find_shape(str(tmp_path), store)
