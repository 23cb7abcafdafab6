"""K/V of mlx-lm's classes in mlx-lm's own quantized caches: what it answers, what it costs, and who cannot."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_checkpoint
from headrace.models.mlx_lm.cache import make_parts
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import UsageError
from headrace.runtime.ops.kv_format import K8V4, Q4, Q8, KVFormat
from tests.models.mlx_lm.test_network import CONFIGS, PROMPT, load, write
from tests.support.alone import new_cache
from tests.support.watched import answer, split

pytestmark = pytest.mark.peer
STEPS = 24
LATENT = {
    **CONFIGS["olmo2"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
FORMATS = pytest.mark.parametrize("kv", [Q8, Q4], ids=lambda kv: kv.name)


@pytest.fixture(scope="module", params=["olmo2", "qwen3_moe", "gemma"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32, and of 64, whose groups may be larger."""
    config = {**CONFIGS[request.param], "head_dim": 64 if request.param == "gemma" else 32}
    if request.param == "olmo2":
        config |= {"hidden_size": 128}  # olmo2 divides it among the heads
    return write(tmp_path_factory.mktemp("quantized"), config)


def peers_answer(network: MlxLmNetwork, steps: int) -> list[int]:
    """By mlx-lm's own loop, its caches quantized from the first token on as ours are."""
    from mlx_lm.generate import generate_step

    stored = network.kv_format
    assert stored is not None
    tokens = generate_step(
        mx.array(PROMPT),
        network._model,
        max_tokens=steps,
        prompt_cache=make_parts(network._model, stored),
        kv_bits=stored.keys.bits,
        kv_group_size=stored.keys.group,
    )
    return [int(token) for token, _ in tokens]


@pytest.mark.sampled
@FORMATS
def test_greedy_tokens_equal_mlx_lms_own_loop(directory: Path, kv: KVFormat) -> None:
    network = load(directory, kv=kv)
    assert answer(network, Request(PROMPT, max_tokens=STEPS, speculate="off"))[0] == peers_answer(network, STEPS)


@FORMATS
def test_bytes_are_those_of_the_arrays(directory: Path, kv: KVFormat) -> None:
    network = load(directory, kv=kv)
    plain = load(directory)
    assert network.kv_format is not None
    assert network.kv_format.name == kv.name
    cache = new_cache(network, 512).reserve(2 * len(PROMPT))
    network.layers(mx.array([[*PROMPT, *PROMPT]]), cache)
    cache.advance(2 * len(PROMPT))
    cache.commit(2 * len(PROMPT))
    held = sum(array.nbytes / array.shape[2] for array in cache.arrays)
    assert network.cost.kv_bytes_per_token == held
    assert cache.committed_bytes == 2 * len(PROMPT) * held
    assert cache.allocated_bytes == sum(array.nbytes for _, array in tree_flatten([p.keys for p in cache.parts])) * 2
    # Scales and offsets are as wide as K/V, which are in float32 here.
    bits = {"q8": 8, "q4": 4}[kv.name]
    assert held == plain.cost.kv_bytes_per_token * (bits + 64 / network.kv_format.keys.group) / 32
    assert network.cost.weight_bytes == plain.cost.weight_bytes


def test_half_precision_takes_the_formats_bytes(tmp_path: Path) -> None:
    """As on a GPU: nothing is computed here, and predictions say the same."""
    directory = write(tmp_path, {**CONFIGS["gemma"], "head_dim": 64})
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(
        str(directory / "model.safetensors"), {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    )
    checkpoint = open_checkpoint(directory)
    shape = shape_of_mlx_lm_checkpoint(checkpoint)
    assert [kind.name for kind in shape.kv_formats] == ["f16", "q8", "q4"]
    plain, q8, q4 = (MlxLmNetwork(checkpoint, device=mx.DeviceType.gpu, kv=kv).cost for kv in (None, Q8, Q4))
    assert q8.kv_bytes_per_token <= 0.56 * plain.kv_bytes_per_token
    assert q4.kv_bytes_per_token <= 0.33 * plain.kv_bytes_per_token
    predicted = [shape.with_kv(kind).cost.kv_bytes_per_token for kind in shape.kv_formats]
    assert predicted == [cost.kv_bytes_per_token for cost in (plain, q8, q4)]


@pytest.mark.sampled
@FORMATS
def test_rollback_and_continuation_leave_output_unchanged(directory: Path, kv: KVFormat) -> None:
    """Guesses that are rolled back, and a second turn of a conversation."""
    network = load(directory, kv=kv)
    again = PROMPT + PROMPT
    alone = answer(network, Request(again, max_tokens=STEPS, speculate="off"))[0]
    engine = Engine(network, context_limit=256, keep_prefix=True)
    split(list(engine.generate(Request(PROMPT, max_tokens=STEPS, speculate="ngram"))))
    tokens, end = split(list(engine.generate(Request(again, max_tokens=STEPS, speculate="ngram"))))
    assert tokens == alone
    assert end.summary.reused_tokens == len(PROMPT)


@pytest.mark.sampled
def test_changing_the_kv_format_shares_the_weights(directory: Path) -> None:
    plain = load(directory)
    packed = plain.with_kv(Q8)
    assert packed.arrays is plain.arrays
    assert packed.kv_format is not None
    assert plain.kv_format is None
    request = Request(PROMPT, max_tokens=STEPS, speculate="off")
    assert answer(packed, request)[0] == answer(load(directory, kv=Q8), request)[0]
    assert answer(plain, request)[0] == answer(load(directory), request)[0]


@pytest.mark.parametrize(
    ("model", "changes", "kv", "reason"),
    [
        ("olmo2", {"hidden_size": 128}, K8V4, "keys and values in as many bits each"),
        ("olmo2", {}, Q8, "groups of 32, and this model has heads of 16"),
        ("cohere2", {}, Q8, "does not quantize a RotatingKVCache"),
        ("gpt_oss", {}, Q4, "does not quantize a RotatingKVCache"),
        ("mamba", {}, Q4, "does not quantize a ArraysCache"),
        ("deepseek_v3", {}, Q8, "class for this model does not attend to quantized caches"),
    ],
)
def test_classes_without_quantized_kv_are_refused_by_name(
    model: str, changes: dict[str, Any], kv: KVFormat, reason: str, tmp_path: Path
) -> None:
    directory = write(tmp_path, {**CONFIGS.get(model, LATENT), **changes})
    with pytest.raises(UsageError, match=f"K/V cannot be {kv.name} here: .*{reason}") as error:
        load(directory, kv=kv)
    assert error.value.hint == "--kv f16 keeps them unquantized"
