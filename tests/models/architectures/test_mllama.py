"""Text part of Mllama: the Llama that is left without the layers that attend to images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.text_part import text_config
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import CheckpointError
from tests.parity.record_transformers import RECORDED, weight
from tests.support.foreign import write_tensors
from tests.support.tiny import load_decoder, quantize_model
from tests.support.watched import split

_CASE = json.loads(RECORDED.read_text())["mllama-nested"]
_LLAMAS = {"0": "0", "2": "1", "4": "2"}  # layer of text in the Mllama -> in the Llama
_BODY = "language_model.model."


def write_mllama(directory: Path) -> Path:
    tensors = {name: (weight(name, shape), "F32") for name, shape in _CASE["tensors"].items()}
    return write_tensors(directory, tensors, _CASE["config"])


def write_llama(directory: Path) -> Path:
    """Write the layers of text, and the rows of the table for text, as a Llama has them."""
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for name, shape in _CASE["tensors"].items():
        values = weight(name, shape)
        if name == f"{_BODY}embed_tokens.weight":
            values = values[:96]
        layer, _, rest = name.removeprefix(f"{_BODY}layers.").partition(".")
        if name.startswith(f"{_BODY}layers."):
            if layer in _LLAMAS:
                tensors[f"model.layers.{_LLAMAS[layer]}.{rest}"] = values, "F32"
        elif name.startswith("language_model."):
            tensors[name.replace(_BODY, "model.").removeprefix("language_model.")] = values, "F32"
    config = {**_CASE["config"]["text_config"], "model_type": "llama", "num_hidden_layers": 3}
    return write_tensors(directory, tensors, config)


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "4-bit"])
def test_turns_logits_and_costs_are_those_of_a_llama(tmp_path: Path, quantized: bool) -> None:
    folders = [write_mllama(tmp_path / "mllama"), write_llama(tmp_path / "llama")]
    if quantized:
        folders = [quantize_model(folder, folder.with_suffix(".4")) for folder in folders]
    mllama, llama = (load_decoder(folder) for folder in folders)
    assert mllama.cost == llama.cost
    shapes = [shape_of_checkpoint(open_checkpoint(folder)) for folder in folders]
    assert shapes[0].cost == shapes[1].cost
    assert shapes[0].matrices == shapes[1].matrices
    engines = [Engine(network, context_limit=128, keep_prefix=True) for network in (mllama, llama)]
    prompt = [(7 * i * i + 3 * i + 5) % 96 for i in range(40)]
    first, _ = split(list(engines[0].generate(Request(prompt, max_tokens=8))))
    assert split(list(engines[1].generate(Request(prompt, max_tokens=8))))[0] == first
    for turn in ([*prompt, *first, 3, 1, 4], [*prompt[:25], 9, 2, 6, *prompt[28:]]):
        answers = [split(list(engine.generate(Request(turn, max_tokens=8))))[0] for engine in engines]
        assert answers[0] == answers[1]
        assert len(answers[0]) == 8


def test_settings_of_single_modules_are_those_of_their_layers(tmp_path: Path) -> None:
    """Also where a layer of images has the number that a layer of text gets."""
    changes: dict[str, Any] = {
        f"{_BODY}layers.{layer}.mlp.gate_proj": {"bits": bits, "group_size": 32}
        for layer, bits in ((1, 2), (2, 8), (3, 2))
    }
    folder = quantize_model(write_mllama(tmp_path / "mllama"), tmp_path / "4", changes)
    layers = load_decoder(folder)._layers
    assert [[weight.bits for weight in layer.gate_up] for layer in layers] == [[4], [8, 4], [4]]


def test_a_text_only_folder_is_read_as_the_text_part_of_a_whole(tmp_path: Path) -> None:
    tensors = {
        name.removeprefix("language_model."): (weight(name, shape), "F32")
        for name, shape in _CASE["tensors"].items()
        if name.startswith("language_model.")
    }
    text = write_tensors(tmp_path / "text", tensors, _CASE["config"]["text_config"])
    whole = write_mllama(tmp_path / "whole")
    quantized = [quantize_model(folder, folder.with_suffix(".4")) for folder in (text, whole)]
    for folders in ([text, whole], quantized):
        engines = [Engine(load_decoder(folder), context_limit=64) for folder in folders]
        answers = [split(list(engine.generate(Request([3, 1, 4, 15], max_tokens=8))))[0] for engine in engines]
        assert answers[0] == answers[1]


@pytest.mark.parametrize("layers", [None, "3", [0, 1, 2, 3, 4]])
def test_other_lists_of_layers_are_refused(layers: object) -> None:
    config = {**_CASE["config"]["text_config"], "cross_attention_layers": layers}
    with pytest.raises(CheckpointError, match="cross_attention_layers"):
        decoder_config(text_config(normalized(config)))


def test_an_empty_mllama_config_has_transformers_defaults() -> None:
    text = {"model_type": "mllama_text_model"}
    config = decoder_config(text_config(normalized({"model_type": "mllama", "text_config": text})))
    assert config is not None
    assert (len(config.layers), config.vocab_size) == (32, 128256)
