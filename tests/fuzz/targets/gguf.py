"""GGUF files: header bytes, and metadata of every type under every key."""

import random
import shutil
from pathlib import Path
from typing import Any

from headrace.models.cost.shape_sources import shape_of_gguf
from headrace.models.gguf import convert_gguf
from headrace.models.gguf.architecture import Contents
from headrace.models.gguf.architectures import architecture_of
from headrace.models.gguf.config import generation_config, model_config
from headrace.models.gguf.container import Container, open_container
from headrace.models.gguf.metadata import Metadata
from headrace.models.gguf.names import targets
from headrace.models.gguf.tokenizer import build_tokenizer, tokenizer_config
from headrace.models.gguf.vocabulary import read_vocabulary
from tests.faults.test_gguf import SMALL
from tests.fuzz.mutate import TEXTS, mutated_bytes, mutated_value, value
from tests.support.gguf_layered_models import LAYERED, write_layered
from tests.support.gguf_models import VARIANTS, write_gguf

_WORDS = (b"general.alignment", b"GGUF", b"\xff" * 8, b"\0" * 8, b"llama.", b"tokenizer.ggml.tokens", b"\x1b[2J")


class File:
    """A whole file with changed bytes, converted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole = [
            write_gguf(folder / "m.gguf", name, **SMALL).read_bytes() for name in ("llama", "qwen2", "gemma3")
        ]

    def make(self, chance: random.Random) -> bytes:
        whole = chance.choice(self._whole)
        return mutated_bytes(chance, whole, before=whole.index(b"output_norm.weight") + 400, words=_WORDS)

    def run(self, given: bytes) -> None:
        (self._folder / "m.gguf").write_bytes(given)
        target = self._folder / "out"
        target.mkdir()
        try:
            convert_gguf(self._folder / "m.gguf", target)
            shape_of_gguf(open_container(self._folder / "m.gguf"))
        finally:
            shutil.rmtree(target)


def _possible(part: Any) -> Any:
    """Return the value as a file can store it: Unicode text, 64-bit numbers."""
    if isinstance(part, str):
        return "".join(char for char in part if char.isprintable())
    if isinstance(part, int) and not isinstance(part, bool):
        return max(-(2**63), min(part, 2**64 - 1))
    if isinstance(part, list):
        return [_possible(each) for each in part]
    if isinstance(part, dict):
        return {str(_possible(key)): _possible(each) for key, each in part.items()}
    return part


def _header(container: Container) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    return dict(container.metadata), {name: tensor.shape for name, tensor in container.tensors.items()}


class MetadataValues:
    """Valid metadata with nonsensical values."""

    def __init__(self, folder: Path) -> None:
        self._models = []
        for name in VARIANTS:
            container = open_container(write_gguf(folder / f"{name}.gguf", name, **{**SMALL, "layers": 2}))
            self._models.append(_header(container))
        for name in LAYERED:
            self._models.append(_header(open_container(write_layered(folder / f"{name}.gguf", name))))

    def make(self, chance: random.Random) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        values, shapes = chance.choice(self._models)
        changed = mutated_value(chance, values)
        if not isinstance(changed, dict):
            changed = {chance.choice(list(values)): value(chance)}
        shapes = dict(shapes)
        if chance.random() < 0.2:
            shape = shapes.pop(chance.choice(list(shapes)))
            shapes[str(_possible(chance.choice((*TEXTS, *shapes)))) or "x"] = shape
        return _possible(changed), shapes

    def run(self, given: tuple[dict[str, Any], dict[str, tuple[int, ...]]]) -> None:
        values, shapes = given
        metadata = Metadata(values)
        vocabulary = read_vocabulary(metadata)
        config = model_config(metadata, Contents(shapes, len(vocabulary.tokens)))
        targets(architecture_of(metadata), config, shapes)
        _, special = build_tokenizer(metadata, vocabulary)
        tokenizer_config(vocabulary, special, 256)
        generation_config(metadata, special)
