"""In both decoders LongRoPE turns by its short factors up to the original context, wherever a sequence comes from."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.models.network.long_rope_decoder import LongRopeDecoder
from headrace.models.network.parameters import Parameters
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from headrace.runtime.ops import reference
from tests.support.alone import new_cache
from tests.support.tiny import load_decoder
from tests.support.watched import WatchedNetwork, answer

pytestmark = pytest.mark.peer
ORIGINAL = 16
PAIRS = 8
TOKENS = [(7 * i * i + 3 * i + 5) % 96 for i in range(40)]
SHORT = [1.0 + 0.05 * i for i in range(PAIRS)]
LONG = [1.5 + 0.5 * i for i in range(PAIRS)]
CONFIG: dict[str, Any] = {
    "model_type": "phi3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG},
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mlx_lm.models.phi3 import Model, ModelArgs

    mx.random.seed(5)
    target = tmp_path_factory.mktemp("phi3")
    older = {**CONFIG, "rope_scaling": None}
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(older)).parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), {k: 2 * v for k, v in weights.items()})
    (target / "config.json").write_text(json.dumps(CONFIG))
    return target


def with_factors(directory: Path, target: Path, factors: list[float]) -> Path:
    """The same model with one list of factors for any length."""
    target.mkdir()
    rope = {**CONFIG["rope_parameters"], "short_factor": factors, "long_factor": factors}
    (target / "config.json").write_text(json.dumps({**CONFIG, "rope_parameters": rope}))
    (target / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    return target


def peer(directory: Path) -> Any:
    return MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu)


def own(directory: Path) -> Any:
    return load_decoder(directory)


def feed(network: Any, cache: Any, tokens: list[int], size: int) -> mx.array:
    """Logits of the last position after feeding `tokens`, `size` at a time."""
    out = mx.zeros(1)
    for start in range(0, len(tokens), size):
        piece = mx.array([tokens[start : start + size]])
        cache.reserve(piece.shape[1])
        out = network.logits(network.layers(network.embed(piece), cache))
        cache.advance(piece.shape[1])
        cache.commit(piece.shape[1])
    return out


both = pytest.mark.parametrize("load", [own, peer])


@pytest.mark.sampled
@both
@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("count", [5, ORIGINAL, ORIGINAL + 1, 40])
def test_the_context_length_selects_the_factors(
    load: Any, directory: Path, tmp_path: Path, count: int, size: int
) -> None:
    plain = load(with_factors(directory, tmp_path / "one", SHORT if count <= ORIGINAL else LONG))
    other = load(with_factors(directory, tmp_path / "other", LONG if count <= ORIGINAL else SHORT))
    wanted = feed(plain, new_cache(plain, 64), TOKENS[:count], 40)
    network = load(directory)
    found = feed(network, new_cache(network, 64), TOKENS[:count], size)
    assert mx.allclose(found, wanted, atol=1e-4)
    assert not mx.allclose(found, feed(other, new_cache(other, 64), TOKENS[:count], 40), atol=1e-2)


@both
def test_rollback_below_the_original_context_rotates_all_keys_again(load: Any, directory: Path) -> None:
    network = load(directory)
    cache = new_cache(network, 64)
    feed(network, cache, TOKENS, 40)
    cache.trim(6)
    found = feed(network, cache, TOKENS[6:9], 1)
    assert mx.allclose(found, feed(network, new_cache(network, 64), TOKENS[:9], 9), atol=1e-4)


def test_scaling_that_the_class_would_ignore_is_refused(directory: Path, tmp_path: Path) -> None:
    target = with_factors(directory, tmp_path / "yarn", SHORT)
    (target / "config.json").write_text(
        json.dumps({**CONFIG, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}})
    )
    with pytest.raises(UnsupportedModelError, match="phi3 with 'yarn' rope scaling"):
        peer(target)


def with_amplitudes(directory: Path, target: Path, amplitudes: dict[str, Any]) -> Path:
    """The same model, with stated amplitudes."""
    target.mkdir()
    rope = {**CONFIG["rope_parameters"], **amplitudes}
    (target / "config.json").write_text(json.dumps({**CONFIG, "rope_parameters": rope}))
    (target / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    return target


def test_each_list_of_factors_has_its_amplitude(directory: Path, tmp_path: Path) -> None:
    both = peer(with_amplitudes(directory, tmp_path / "both", {"short_mscale": 1.5, "long_mscale": 2.0}))
    short = peer(with_amplitudes(directory, tmp_path / "short", {"short_mscale": 1.5, "long_mscale": 1.5}))
    long = peer(with_amplitudes(directory, tmp_path / "long", {"short_mscale": 2.0, "long_mscale": 2.0}))
    for count, same, other in ((9, short, long), (30, long, short), (9, short, long)):
        found = feed(both, new_cache(both, 64), TOKENS[:count], 40)
        assert mx.allclose(found, feed(same, new_cache(same, 64), TOKENS[:count], 40), atol=1e-4)
        assert not mx.allclose(found, feed(other, new_cache(other, 64), TOKENS[:count], 40), atol=1e-2)


@pytest.mark.parametrize("amplitudes", [{"short_mscale": 1.5}, {"long_mscale": 1.5}, {"long_mscale": [1.5]}])
def test_one_amplitude_alone_is_refused(directory: Path, tmp_path: Path, amplitudes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="short_mscale and long_mscale"):
        peer(with_amplitudes(directory, tmp_path / "alone", amplitudes))


def test_both_decoders_give_the_same_tokens(directory: Path) -> None:
    mine = WatchedNetwork(own(directory))
    theirs = WatchedNetwork(peer(directory))
    request = Request(TOKENS[:10], max_tokens=20)  # across the original context, with a step built ahead
    assert answer(mine, request)[0] == answer(theirs, request)[0]
    found = mx.concatenate(mine.logits_seen)
    wanted = mx.concatenate(theirs.logits_seen)
    assert (mx.abs(found - wanted).max() / mx.abs(wanted).max()).item() < 1e-4


def test_a_copy_with_other_operations_keeps_long_rope(directory: Path) -> None:
    network = own(directory)
    twin = network.with_ops(reference)
    assert type(twin) is type(network)
    for count in (9, 30):
        wanted = feed(network, new_cache(network, 64), TOKENS[:count], 40)
        assert mx.allclose(feed(twin, new_cache(twin, 64), TOKENS[:count], 40), wanted, atol=1e-4)


@pytest.mark.parametrize("layer", [1, None])
def test_a_part_that_is_read_anew_changes_on_both_sides_of_the_original_context(
    directory: Path, tmp_path: Path, layer: int | None
) -> None:
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    within = "model.layers.1."
    new = {
        name: 1.5 * array if name.startswith(within) or (layer is None and "layers." not in name) else array
        for name, array in weights.items()
    }
    expected = with_factors(directory, tmp_path / "new", SHORT)
    (expected / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(str(expected / "model.safetensors"), new)
    parameters = Parameters(open_checkpoint(expected), reference, mx.float32)
    old = load_decoder(directory, reference)
    changed = old.with_part(parameters, 1)
    if layer is None:
        changed = changed.with_part(parameters, None)
    wanted = load_decoder(expected, reference)
    for count in (ORIGINAL, 30):
        logits = feed(wanted, new_cache(wanted, 64), TOKENS[:count], 40)
        assert mx.allclose(feed(changed, new_cache(changed, 64), TOKENS[:count], 40), logits, atol=1e-4)
        assert not mx.allclose(feed(old, new_cache(old, 64), TOKENS[:count], 40), logits, atol=1e-2)


def test_a_copy_without_layers_keeps_none_for_long_texts(directory: Path) -> None:
    ends = load_decoder(directory, reference).without_layers()
    assert isinstance(ends, LongRopeDecoder)
    assert ends._long is ends


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_stays_half(directory: Path, dtype: mx.Dtype) -> None:
    network = load_decoder(directory, reference, dtype)
    cache = new_cache(network, 64)
    logits = feed(network, cache, TOKENS, 9)
    assert {logits.dtype, *(array.dtype for array in cache.arrays)} == {dtype}
    exact = feed(own(directory), new_cache(own(directory), 64), TOKENS, 40)
    bound = 2**-6 if dtype == mx.float16 else 2**-3
    assert (mx.abs(logits.astype(mx.float32) - exact).max() / mx.abs(exact).max()).item() < bound
