"""Architectures headrace has no decoder for, through mlx-lm's classes and our engine, against mlx-lm's own loop."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.mlx_lm.load import of_config
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import CancelFlag, Request, Step
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.alone import new_cache
from tests.support.watched import WatchedNetwork, answer, split, step_by_step

pytestmark = pytest.mark.peer

VOCAB = 96
WINDOW = 16
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(41)]  # two chunks of prefill
STEPS = 24

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "olmo2": {**_BASE, "model_type": "olmo2", "tie_word_embeddings": False},
    "gemma": {**_BASE, "model_type": "gemma", "head_dim": 16},  # always tied, whether or not the config says so
    "mixtral": {**_BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_BASE,
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        **_BASE,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
    },
    "cohere2": {
        **_BASE,
        "model_type": "cohere2",
        "head_dim": 16,
        "logit_scale": 1.0,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 4,
    },
    "gpt_oss": {
        **_BASE,
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": False,
    },
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 8,
        "num_hidden_layers": 3,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
}
ROTATING = ("cohere2", "gpt_oss")


@dataclass
class ShortRun:
    """An answer to a short prompt that crosses the rotating window. positions: (length, committed) before each pass."""

    tokens: list[int]
    fed: list[int]
    positions: list[tuple[int, int]]


@pytest.fixture(scope="module", params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("peer"), CONFIGS[request.param])


@pytest.fixture(scope="module")
def network(directory: Path) -> MlxLmNetwork:
    return load(directory)


@pytest.fixture(scope="module")
def short_run(network: MlxLmNetwork) -> ShortRun:
    watched = WatchedNetwork(network)
    tokens, _ = answer(watched, Request(PROMPT[:5], speculate="off", max_tokens=2 * WINDOW))
    return ShortRun(tokens, [token for batch in watched.fed for token in batch[0].tolist()], watched.positions)


def write(target: Path, config: dict[str, Any], bits: int | None = None) -> Path:
    """A checkpoint of the architecture with weights as mlx-lm's class draws them, and as its converter quantizes."""
    from mlx_lm.utils import _get_classes, quantize_model

    mx.random.seed(3)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    if bits is not None:
        model, config = quantize_model(model, config, group_size=32, bits=bits)
    target.mkdir(exist_ok=True)
    mx.save_safetensors(str(target / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (target / "config.json").write_text(json.dumps(config))
    return target


def load(directory: Path, **options: Any) -> MlxLmNetwork:
    return MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.cpu, **options)


def peers_answer(network: MlxLmNetwork, steps: int) -> list[int]:
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(PROMPT), network._model, max_tokens=steps)]


def kind(directory: Path) -> str:
    return str(json.loads((directory / "config.json").read_text())["model_type"])


@pytest.mark.sampled
def test_greedy_tokens_equal_mlx_lms_own_loop(network: MlxLmNetwork) -> None:
    watched = WatchedNetwork(network)
    tokens, end = answer(watched, Request(PROMPT, max_tokens=STEPS, speculate="off"))  # far beyond the rotating window
    assert tokens == peers_answer(network, STEPS)
    cache = new_cache(network, 256).reserve(len(PROMPT) + STEPS - 1)
    whole = network.layers(mx.array([[*PROMPT, *tokens[:-1]]]), cache)[0, -STEPS:]
    stepwise = mx.concatenate(watched.logits_seen)
    assert (mx.abs(stepwise - whole).max() / mx.abs(whole).max()).item() < 1e-4
    assert end.summary.prefill_tokens == len(PROMPT) - 1


@pytest.mark.sampled
def test_a_short_prompt_crosses_the_window_while_decoding(network: MlxLmNetwork, short_run: ShortRun) -> None:
    """The step built ahead must neither be fed twice nor lost where a rotating cache starts to rotate."""
    assert short_run.fed == [*PROMPT[:5], *short_run.tokens[:-1]]
    assert short_run.tokens == step_by_step(network, PROMPT[:5], 2 * WINDOW)[0]


@pytest.mark.sampled
def test_steps_are_queued_ahead_for_every_cache(short_run: ShortRun) -> None:
    ahead = [length - committed for length, committed in short_run.positions[1:]]
    assert ahead == [0] + [1] * (2 * WINDOW - 1)


@pytest.mark.sampled
@pytest.mark.parametrize("after", [1, 9, 11, 12, 20])
def test_cancel_leaves_output_tokens_only(network: MlxLmNetwork, after: int) -> None:
    watched = WatchedNetwork(network)
    cancel = CancelFlag()
    said = 0
    for event in Engine(watched, context_limit=256).generate(Request(PROMPT[:5], speculate="off", cancel=cancel)):
        said += isinstance(event, Step)
        if said == after:
            cancel.set()
    cache = watched.caches[0]
    assert said == after
    assert cache.length == cache.committed == 5 + after  # what was said last went in with the step ahead
    for part in cache.parts:
        assert getattr(part, "offset", 5 + after) == 5 + after


def test_the_context_limit_holds(network: MlxLmNetwork) -> None:
    tokens, end = answer(network, Request(PROMPT), context_limit=len(PROMPT) + 2)
    assert (len(tokens), end.reason) == (3, "length")


@pytest.mark.sampled
def test_a_second_answer_equals_the_first(network: MlxLmNetwork) -> None:
    engine = Engine(network, context_limit=256)
    runs = [split(list(engine.generate(Request(PROMPT, max_tokens=6))))[0] for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.sampled
def test_a_step_of_sequences_that_take_turns_reads_the_weights_for_each(network: MlxLmNetwork) -> None:
    engine = Engine(network, context_limit=256)
    for first in range(3):
        engine.submit(Request([first, *PROMPT], max_tokens=12))
    events = []
    while engine.has_work:
        events += engine.step()
    records = [event.record for _, event in events if isinstance(event, Step)]
    together = [record for record in records if record.batch == 3]
    assert {record.weight_bytes for record in together} == {3 * network.cost.weight_bytes}


def test_kv_bytes_follow_the_shapes(network: MlxLmNetwork, directory: Path) -> None:
    """Weights: see test_mlx_lm_costs."""
    cost = network.cost
    config = CONFIGS[kind(directory)]
    row = 2 * config.get("num_key_value_heads", 0) * config.get("head_dim", 16) * 4  # float32
    assert cost.kv_bytes_per_token == 4 * row  # four layers; nothing where state is recurrent
    if kind(directory) in ROTATING:
        assert cost.kv_bytes_read(100) < 101 * cost.kv_bytes_per_token


@pytest.mark.sampled
def test_quantized_weights_reduce_the_bytes_of_a_step(network: MlxLmNetwork, directory: Path, tmp_path: Path) -> None:
    plain = network
    small = load(write(tmp_path, CONFIGS[kind(directory)], bits=8))
    assert small.cost.weight_bytes < 0.45 * plain.cost.weight_bytes
    assert small.cost.weight_flops == pytest.approx(plain.cost.weight_flops, rel=0.02)
    assert len(answer(small, Request(PROMPT, max_tokens=5))[0]) == 5


def test_classes_on_a_cpu_need_no_compiler(tmp_path: Path) -> None:
    mx.enable_compile()
    load(write(tmp_path, CONFIGS["olmo2"]))
    calls = []

    @mx.compile
    def traced(x: mx.array) -> mx.array:
        calls.append(x)
        return x + 1

    traced(mx.array(1))
    traced(mx.array(1))
    assert len(calls) == 2  # once, where it is compiled


def test_an_unknown_architecture_is_a_one_line_error(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros(3)})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "perpetuum_mobile"}))
    with pytest.raises(UnsupportedModelError, match="perpetuum_mobile"):
        load(tmp_path)


def test_a_scaling_that_a_class_leaves_out_is_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    directory = write(tmp_path, {**CONFIGS["mixtral"], "rope_scaling": scaling})
    with pytest.raises(UnsupportedModelError, match=r"mixtral.*'yarn'"):
        load(directory)
    for kind, other in (("deepseek_v2", "dynamic"), ("lfm2", "yarn"), ("glm4_moe", "dynamic")):
        with pytest.raises(UnsupportedModelError, match=f"{kind} with '{other}'"):
            of_config({"model_type": kind, "rope_scaling": {**scaling, "rope_type": other}})
    with pytest.raises(UnsupportedModelError, match="attention_factor of 2"):
        of_config({"model_type": "qwen2", "rope_scaling": {**scaling, "attention_factor": 2.0}})


@pytest.mark.parametrize("change", ["missing tensor", "wrong shape", "missing key", "wrong type"])
def test_broken_checkpoints_are_one_line(tmp_path: Path, change: str) -> None:
    write(tmp_path, CONFIGS["olmo2"])
    weights = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(weights, dict)
    config = dict(CONFIGS["olmo2"])
    name = "model.layers.1.mlp.up_proj.weight"
    match change:
        case "missing tensor":
            del weights[name]
        case "wrong shape":
            weights[name] = weights[name].T
        case "missing key":
            del config["hidden_size"]
        case "wrong type":
            config["hidden_size"] = "64"
    mx.eval(list(weights.values()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r" cannot load |must be a positive integer") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
