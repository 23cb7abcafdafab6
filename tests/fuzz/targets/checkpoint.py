"""Model directories: headers, shard index, configs, recommended settings."""

import copy
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from headrace.app.answer.options import AnswerOptions, recommended_options
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.shape_sources import has_shape, shape_of_checkpoint
from headrace.models.loading.decoder_choice import context_length, own_decoder
from headrace.models.loading.recommended import generation_defaults
from headrace.runtime.errors import HeadraceError
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_value, value
from tests.support.alone import new_cache
from tests.support.checkpoints import header, shard, write

_ONE = "model.safetensors"
_WORDS = (b'"dtype"', b'"shape"', b'"data_offsets"', b'"F32"', b"[0,0]", b"[" * 3000, b"\xff", b"NaN", b'"a.weight"')


def opened(directory: Path) -> None:
    """Open a checkpoint: its metadata is bounded by its file size, or a HeadraceError is raised."""
    checkpoint = open_checkpoint(directory)
    size = (directory / _ONE).stat().st_size
    if checkpoint.foreign is None:
        assert checkpoint.nbytes <= size - 8
    for info in checkpoint.tensors.values():
        assert all(type(side) is int and side >= 0 for side in info.shape)


class Safetensors:
    """A shard with a header changed by field or by byte."""

    def __init__(self, folder: Path) -> None:
        self._folder = write(folder / "model")

    def make(self, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            changed = mutated_value(chance, header())
            return shard(json_bytes(chance, changed), chance.choice((36, 36, 36, 0, 35, 40)))
        whole = shard(header())
        return mutated_bytes(chance, whole, before=len(whole) - 36, words=_WORDS)

    def run(self, given: bytes) -> None:
        (self._folder / _ONE).write_bytes(given)
        opened(self._folder)


class Index:
    """The shard index, with a nonsensical config."""

    def __init__(self, folder: Path) -> None:
        self._folder = write(folder / "model")
        self._index = {
            "metadata": {"total_size": 36},
            "weight_map": dict.fromkeys(header().keys() - {"__metadata__"}, _ONE),
        }

    def make(self, chance: random.Random) -> tuple[bytes, bytes]:
        index = json_bytes(chance, mutated_value(chance, self._index))
        config = json_bytes(chance, mutated_value(chance, {"model_type": "llama", "text_config": {"auto_map": {}}}))
        return index, config if chance.random() < 0.5 else b'{"model_type": "llama"}'

    def run(self, given: tuple[bytes, bytes]) -> None:
        (self._folder / "model.safetensors.index.json").write_bytes(given[0])
        (self._folder / "config.json").write_bytes(given[1])
        opened(self._folder)


class Config:
    """config.json of every architecture, with its network, costs and a short run."""

    def __init__(self, folder: Path) -> None:
        import mlx.core as mx
        import numpy as np

        from tests.parity.record_transformers import RECORDED, weight
        from tests.support.foreign import write_tensors
        from tests.support.tiny import VARIANTS, config_of, random_tensors

        self._bases: list[tuple[Path, dict[str, Any]]] = []
        for name in VARIANTS:
            config = config_of(name)
            arrays = {
                key: (np.array(array.astype(mx.float32)), "F32") for key, array in random_tensors(config, 3).items()
            }
            self._bases.append((write_tensors(folder / name, arrays, config), config))
        for name, case in json.loads(RECORDED.read_text()).items():
            arrays = {key: (weight(key, shape), "F32") for key, shape in case["tensors"].items()}
            self._bases.append((write_tensors(folder / f"r-{name}", arrays, case["config"]), case["config"]))
        for place, (_, config) in enumerate(self._bases):  # what one of them is the first to import takes seconds
            with suppress(HeadraceError):
                self.run((place, json.dumps(config).encode()))

    def make(self, chance: random.Random) -> tuple[int, bytes]:
        place = chance.randrange(len(self._bases))
        return place, json_bytes(chance, mutated_value(chance, copy.deepcopy(self._bases[place][1])))

    def run(self, given: tuple[int, bytes]) -> None:
        import mlx.core as mx

        from headrace.models.mlx_lm.network import MlxLmNetwork
        from tests.support.tiny import load_decoder

        directory, _ = self._bases[given[0]]
        (directory / "config.json").write_bytes(given[1])
        checkpoint = open_checkpoint(directory)
        assert context_length(checkpoint) > 0
        if has_shape(checkpoint.config):
            with suppress(HeadraceError):
                shape_of_checkpoint(checkpoint)
        network: Any
        if own_decoder(checkpoint) is not None:
            network = load_decoder(directory)
        else:
            network = MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu)
        cache = new_cache(network, 16)
        cache.reserve(5)
        mx.eval(network.logits(network.layers(network.embed(mx.array([[1, 2, 3, 4, 5]])), cache)))


class GenerationConfig:
    """generation_config.json and its recommended settings."""

    _BASE: ClassVar = {
        "bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
        "min_p": 0.0, "repetition_penalty": 1.05, "max_length": 2048, "transformers_version": "4.51.0",
    }  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, chance: random.Random) -> bytes:
        changed = mutated_value(chance, self._BASE)
        if isinstance(changed, dict) and chance.random() < 0.5:
            changed[chance.choice(list(self._BASE))] = value(chance)
        return json_bytes(chance, changed)

    def run(self, given: bytes) -> None:
        (self._folder / "generation_config.json").write_bytes(given)
        recommended = generation_defaults(self._folder)
        AnswerOptions().resolved(recommended_options(recommended)).sampling_params()
