"""Configs with known keys removed, renamed or retyped: the right answer, or one clear line; never another answer.

What is right where a key is missing, transformers' config classes say: the same config with every default written out
gives the same logits.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.errors import HeadraceError
from tests.parity.record_transformers import RECORDED, weight
from tests.support.alone import new_cache
from tests.support.foreign import write_tensors
from tests.support.tiny import config_of, load_decoder, random_tensors

pytestmark = pytest.mark.peer

TOKENS = [(7 * i * i + 3 * i + 5) % 96 for i in range(20)]
# Says nothing of the network, or (the kind of model) everything.
SILENT = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "model_type",
    "num_logits_to_keep", "output_router_logits", "pad_token_id", "residual_dropout", "router_aux_loss_coef",
    "router_jitter_noise", "transformers_version", "use_cache", "_sliding_window_pattern",
}  # fmt: skip
WRITTEN = ["granitemoe", "phi", "phi3-longrope", "dots1", "qwen3_moe", "qwen3_next", "llama-yarn", "gemma3_text"]
TINY = ["llama3-scaled", "gemma3", "qwen2"]


@pytest.fixture(scope="module", params=[*WRITTEN, *TINY])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Fuzzed":
    directory = tmp_path_factory.mktemp("fuzz")
    name = request.param
    if name in TINY:
        config = config_of(name)
        arrays = {key: (np.array(array.astype(mx.float32)), "F32") for key, array in random_tensors(config, 3).items()}
    else:
        case = json.loads(RECORDED.read_text())[name]
        config = case["config"]
        arrays = {key: (weight(key, shape), "F32") for key, shape in case["tensors"].items()}
    return Fuzzed(write_tensors(directory, arrays, config), config)


class Fuzzed:
    """A checkpoint whose config is changed again and again."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.directory = directory
        self.config = config
        logits = self.logits(config)
        assert logits is not None
        self.full = logits

    def logits(self, config: dict[str, Any]) -> np.ndarray | None:
        """Return its answer; None where it is refused in one line."""
        (self.directory / "config.json").write_text(json.dumps(config))
        try:
            checkpoint = open_checkpoint(self.directory)
            own = own_decoder(checkpoint) is not None
            network: Any = load_decoder(self.directory) if own else MlxLmNetwork(checkpoint, device=mx.DeviceType.cpu)
        except HeadraceError as error:
            return None if "\n" not in str(error) else pytest.fail(f"more than one line: {error}")
        cache = new_cache(network, 64)
        cache.reserve(len(TOKENS))
        return np.array(network.logits(network.layers(network.embed(mx.array([TOKENS])), cache)))[0]

    def with_defaults(self, config: dict[str, Any]) -> np.ndarray | None:
        """Return its answer with every key that transformers knows written out; None where that refuses it too."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        try:
            whole = CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
        except Exception:  # whatever it raises for a value it does not take
            return None
        return self.logits(json.loads(json.dumps(whole.to_dict(), default=str)))

    def keys(self) -> Iterator[tuple[str, ...]]:
        """Paths to everything the config says of the network."""
        for key, value in self.config.items():
            if key in SILENT:
                continue
            yield (key,)
            yield from ((key, inner) for inner in (value if isinstance(value, dict) else ()))

    def changed(self, path: tuple[str, ...], *value: Any) -> dict[str, Any]:
        """The config with a key set, or, without a value, removed."""
        config = deepcopy(self.config)
        section = config
        for key in path[:-1]:
            section = section[key]
        if value:
            section[path[-1]] = value[0]
        else:
            section[path[-1] + "_"] = section.pop(path[-1])  # renamed to what nobody knows
        return config

    def value(self, path: tuple[str, ...]) -> Any:
        value: Any = self.config
        for key in path:
            value = value[key]
        return value


def alike(a: np.ndarray, b: np.ndarray | None) -> bool:
    return b is not None and bool(np.abs(a - b).max() <= 1e-4 * max(1.0, np.abs(b).max()))


@pytest.mark.sampled
def test_a_missing_config_key_has_its_default(model: Fuzzed) -> None:
    for path in model.keys():  # noqa: SIM118
        config = model.changed(path)
        got = model.logits(config)
        if got is not None and not alike(got, model.full):
            assert alike(got, model.with_defaults(config)), path


@pytest.mark.sampled
def test_a_config_value_of_a_wrong_type_never_changes_logits_silently(model: Fuzzed) -> None:
    for path in model.keys():  # noqa: SIM118
        value = model.value(path)
        for other in _mistyped(value):
            config = model.changed(path, other)
            got = model.logits(config)
            if got is not None and not alike(got, model.full):
                assert other in (None, 0), (path, other)
                unsaid = model.changed(path) if other is None else config
                assert alike(got, model.with_defaults(unsaid)), (path, other)


def _mistyped(value: Any) -> list[Any]:
    found: list[Any] = [str(value), [value], {"a": value}, None]
    if isinstance(value, bool):
        return [*found, str(value).lower(), 5]
    if isinstance(value, int | float):
        return [*found, True, -value, 0, float(value), 1e40]
    if isinstance(value, str):
        return [*found, 5, value + "x"]
    if isinstance(value, list):
        return [*found, value[:-1], [str(entry) for entry in value], [None] * len(value)]
    return found
