"""The random models of newer families: their GGUFs state the shapes of their configs."""

import pytest

from headrace.models.architectures.fields import text_section
from headrace.models.gguf.architecture import Contents
from headrace.models.gguf.config import model_config
from headrace.models.gguf.metadata import Metadata
from tests.bench.make_family import FAMILIES, tensors
from tests.bench.published_shapes import PUBLISHED


@pytest.mark.sampled
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_metadata_state_the_sizes_of_the_config(name: str) -> None:
    family = PUBLISHED[name]
    values = {f"{family.architecture}.{key}": value for key, value in family.keys.items()}
    shapes = {t.destination.name: t.shape for t in tensors(family) if t.destination is not None}
    file = Contents(shapes, family.config["vocab_size"], values=family.vectors.get)
    stated = text_section(model_config(Metadata({"general.architecture": family.architecture, **values}), file))
    config = text_section(family.config)
    sizes = {key for key, value in config.items() if isinstance(value, int | str) and key in stated}
    assert len(sizes) > 5
    assert {key: stated[key] for key in sizes} == {key: config[key] for key in sizes}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_becomes_a_tensor_of_its_layer(name: str) -> None:
    family = FAMILIES[name]
    for tensor in tensors(family):
        if tensor.destination is not None and ".layers." in tensor.name:
            layer = tensor.name.partition(".layers.")[2].partition(".")[0]
            assert tensor.destination.name.startswith(f"blk.{layer}.") or "embd" in tensor.destination.name
    assert text_section(family.config)["num_hidden_layers"] == family.keys["block_count"]
