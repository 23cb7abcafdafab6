"""Ranks of this machine give the tokens of one rank, for every family of the decoder, however it is divided."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from headrace.models.checkpoint.quantization import Quantization
from headrace.models.gguf import convert_gguf
from headrace.models.loading import load
from headrace.models.loading.keep_quantized import keep_quantized
from headrace.models.loading.load import load_model
from headrace.models.registry.resolve import resolve
from headrace.runtime.ops import native
from headrace.runtime.ops.kv_format import kv_format
from tests.parity.record_transformers import RECORDED, weight
from tests.support import every_module, mlx_lm_models, mtp_models, tiny
from tests.support.foreign import write_tensors
from tests.support.gguf_layered_models import write_layered
from tests.support.rank_process import Ranks, answers, heads

_LONG = [(5 * i) % 90 for i in range(140)]
_BATCHES = [[_LONG], [[*_LONG, 7, 8], [1, 2, 3], _LONG[30:60]]]  # the second begins with a cached prefix
_EIGHT = [[[*_LONG[start : start + 9], *_LONG[:start]] for start in range(0, 40, 5)]]
_EXACT = {"HEADRACE_EXACT": "1"}
_STOCK = {"HEADRACE_KERNELS": "reference"}

pytestmark = pytest.mark.skipif(not native.status().available, reason="stock MLX on a CPU takes too long")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from _ranks(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from _ranks(tmp_path_factory, 3)


def _ranks(factory: pytest.TempPathFactory, size: int) -> Iterator[Ranks]:
    ranks = Ranks(factory.mktemp("ranks"), size)
    yield ranks
    ranks.close()


# Refused: keys are rotated by the length of the whole prompt; several residual streams, or sums; several states.
_ALONE = ("minicpm3-long", "gemma3n", "gemma3n-unbound", "kimi-k3")
_ALONE += ("mamba", "mamba-normed", "rwkv7", "rwkv7-tied")
_LOOPS = ("nanbeige", "nanbeige-unnormed", "iquest-loop", "iquest-loop-biased")  # refused by a pipeline


def models() -> list[Any]:
    """Return one model of each family, and the others for the nightly campaign."""
    seen = set[str]()
    every = []
    for name in (*tiny.EVERY, *mlx_lm_models.MODELS):
        if name in _ALONE or name in _LOOPS:
            continue
        kind = str(config_of(name)["model_type"])
        every.append(pytest.param(name, marks=[pytest.mark.nightly] if kind in seen else []))
        seen.add(kind)
    return every


def config_of(name: str) -> dict[str, Any]:
    return tiny.config_of(name) if name in tiny.EVERY else mlx_lm_models.config_of(name)


def written(name: str, folder: Path) -> Path:
    if name in tiny.EVERY:
        return tiny.write_model(folder / name, name)
    return mlx_lm_models.write_mlx_lm_model(folder / name, config_of(name))


def job_of(path: Path, **changes: Any) -> dict[str, Any]:
    return {"path": str(path), "batches": _BATCHES, "tokens": 8, "environment": {}, **changes}


def alone(job: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of one rank."""
    kv = kv_format(job["kv"]) if job.get("kv", "auto") != "auto" else None
    with patch.dict(os.environ, job["environment"]), patch.object(load, "_tokenizer"):
        activations = job.get("activations", 16)
        loaded = load_model(Path(job["path"]), name="tiny", context=256, kv=kv, activations=activations)
        return answers(loaded.network, loaded.context_limit, job)


def heads_alone(job: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of one rank whose prediction head drafts."""
    with patch.dict(os.environ, job["environment"]), patch.object(load, "_tokenizer"):
        return heads(load_model(Path(job["path"]), name="tiny", context=128).network, job)


def differences(answer: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the largest difference of a log probability, relative to the largest, and check that tokens are equal."""
    assert answer.get("tokens") == wanted["tokens"], answer
    pairs = zip(answer["logprobs"], wanted["logprobs"], strict=True)
    both = [pair for own, others in pairs for pair in zip(own, others, strict=True)]
    return max(abs(a - b) for a, b in both) / max(abs(b) for _, b in both)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", models())
def test_every_family_is_divided_by_heads_and_by_layers(two: Ranks, tmp_path: Path, name: str) -> None:
    job = job_of(written(name, tmp_path), environment=_EXACT)
    wanted = alone(job)
    assert differences(two.ask(**job, kind="pipeline", shares=[1, 1.2]), wanted) == 0
    assert differences(two.ask(**job, kind="tensor", shares=[1, 1]), wanted) < 2e-6


@pytest.mark.sampled
@pytest.mark.parametrize("name", _LOOPS)
def test_layers_that_run_several_times_are_divided_by_heads(two: Ranks, tmp_path: Path, name: str) -> None:
    job = job_of(written(name, tmp_path), environment=_EXACT)
    assert differences(two.ask(**job, kind="tensor", shares=[1, 1]), alone(job)) < 2e-6
    assert two.ask(**job, kind="pipeline", shares=[1, 1])["error"] == "UsageError"


def test_norms_inside_of_layers_are_divided_by_layers(two: Ranks, tmp_path: Path) -> None:
    case = json.loads(RECORDED.read_text())["bitnet"]
    tensors = {name: (weight(name, shape), "F32") for name, shape in case["tensors"].items()}
    job = job_of(write_tensors(tmp_path, tensors, case["config"]), environment=_EXACT)
    assert differences(two.ask(**job, kind="pipeline", shares=[1, 1.2]), alone(job)) == 0
    assert two.ask(**job, kind="tensor", shares=[1, 1])["error"] == "UsageError"


@pytest.mark.parametrize("variant", ["cohere2moe", "smallthinker", "grok-2"])
def test_experts_that_mlx_lm_lacks_are_divided(two: Ranks, tmp_path: Path, variant: str) -> None:
    """Next to attention; routed before it; next to a dense feed-forward."""
    (directory := tmp_path / variant).mkdir()
    convert_gguf(write_layered(tmp_path / "m.gguf", variant), directory)
    job = job_of(directory, environment=_EXACT)
    wanted = alone(job)
    assert differences(two.ask(**job, kind="pipeline", shares=[1, 1]), wanted) == 0
    assert differences(two.ask(**job, kind="tensor", shares=[1, 1]), wanted) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "changes", "shares", "environment"),
    [
        ("olmo2", {"num_key_value_heads": 1, "num_attention_heads": 8}, [3, 1], _EXACT),  # a K/V head of both ranks
        ("olmo2", {"num_key_value_heads": 1, "num_attention_heads": 8}, [3, 1], _STOCK),
        ("granite-hybrid", {"mamba_n_groups": 1}, [3, 1], _EXACT),  # a group of both ranks
        ("falcon-h1-normed", {"mamba_n_groups": 1}, [1, 3], _EXACT),
        ("olmo-hybrid", {"linear_num_key_heads": 1}, [1, 1], _EXACT),
    ],
)
def test_norms_that_span_ranks_equal_those_of_one_machine(
    two: Ranks, tmp_path: Path, name: str, changes: dict[str, Any], shares: list[int], environment: dict[str, str]
) -> None:
    path = mlx_lm_models.write_mlx_lm_model(tmp_path / name, {**config_of(name), **changes})
    job = job_of(path, environment=environment)
    assert differences(two.ask(**job, kind="tensor", shares=shares), alone(job)) < 1e-6


# mlx-lm's classes, and the ways in which they cannot be divided.
_CLASSES = {
    "bailing_hybrid": "tensor",
    "kimi-k3": "", "deepseek_v41": "",
    "longcat_flash": "pipeline", "qwen3.5": "", "qwen3.5-moe": "", "qwen3-next": "tensor",
    "lfm2": "tensor pipeline", "plamo2": "tensor pipeline",
}  # fmt: skip
_OTHERS = {
    "longcat_flash": {
        "attention_method": "MLA", "zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
        "num_layers": 3,
    },
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", _CLASSES)
def test_classes_of_mlx_lm_are_divided(two: Ranks, tmp_path: Path, name: str) -> None:
    own = name in mlx_lm_models.MODELS
    config = config_of(name) if own else {**every_module.config_of(name), **_OTHERS.get(name, {})}
    path = mlx_lm_models.write_mlx_lm_model(tmp_path / name, config)
    few = {"batches": [[_LONG[:60]], [[*_LONG[:60], 7, 8], [1, 2, 3]]], "environment": _STOCK if own else {}}
    wanted = alone(job_of(path, **few))
    for kind in ("tensor", "pipeline"):
        answer = two.ask(**job_of(path, **few), kind=kind, shares=[1, 1])
        if kind in _CLASSES[name]:
            assert (answer["error"], config["model_type"] in answer["message"]) == ("UsageError", True)
        else:
            assert differences(answer, wanted) < 5e-6


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "shares"), [("tensor", [1, 1]), ("pipeline", [3, 1])])
def test_quantized_classes_with_draft_tokens_are_divided(
    two: Ranks, tmp_path: Path, kind: str, shares: list[int]
) -> None:
    wide = {"intermediate_size": 128, "q_lora_rank": 64, "first_k_dense_replace": 4}
    config = every_module.config_of("kimi_k25")
    text = {**config["text_config"], **wide, "rope_traditional": False}  # not of our decoder, and ignored by the class
    config = {**config, "text_config": text}
    path = mlx_lm_models.write_mlx_lm_model(tmp_path / "plain", config)
    quantized = tiny.quantize_model(path, tmp_path / "quantized")
    job = job_of(quantized, batches=[[_LONG], [_LONG[:90]] * 2], tokens=40, speculate="ngram")
    answer = two.ask(**job, kind=kind, shares=shares)
    wanted = alone(job)
    assert differences(answer, wanted) < 2e-3
    assert answer["drafted"]
    unequal = two.ask(**job, kind="tensor", shares=[1, 2])
    assert "evenly" in unequal["message"]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
@pytest.mark.parametrize(
    "changes",
    [
        {"batches": _EIGHT, "sampled": True},
        {"batches": _EIGHT, "kv": "q8"},
        {"batches": [[_LONG], [_LONG[:90]] * 2], "tokens": 40, "speculate": "ngram"},
        {"batches": [[*_EIGHT[0][:2], _LONG], _EIGHT[0][:2]], "tokens": 12, "apart": 3},
        {"dropped": 1},
        {"dropped": 4},
        {"environment": _STOCK},
        {"environment": _STOCK, "batches": _EIGHT},
    ],
    ids=["sampled", "q8", "guesses", "joining", "error-in-prefill", "error", "stock", "stock-batch"],
)
def test_two_ranks_sample_and_draft_as_one(two: Ranks, tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    plain = tiny.write_model(tmp_path / "plain", "qwen3", dtype=mx.float16)
    job = job_of(tiny.quantize_model(plain, tmp_path / "quantized"), **changes)
    answer = two.ask(**job, kind=kind, shares=[1, 1])
    wanted = alone(job)
    assert differences(answer, wanted) < 2e-3
    assert (answer["drafted"] > 0) == ("speculate" in changes)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "environment"),
    [
        *[(kind, _EXACT) for kind in mtp_models.WITH_HEADS],
        ("glm4_moe", _STOCK),
        ("qwen3_5_moe", _STOCK),
        ("qwen3_next", _STOCK),
    ],
)
def test_prediction_heads_draft_as_on_one_rank(
    two: Ranks, tmp_path: Path, kind: str, environment: dict[str, str]
) -> None:
    mtp_models.write_model(tmp_path, kind)
    prompts = [[11, 3, 5, 8, 60, 2, 9], [4, 4, 31, 1]]
    job = job_of(tmp_path, batches=[prompts], tokens=20, environment=environment, prompts=prompts, context=128)
    said = alone(job)["tokens"]
    job["wholes"] = [[*prompt, *answer] for prompt, answer in zip(prompts, said, strict=True)]
    wanted = heads_alone(job)
    assert wanted["tokens"] == job["wholes"]
    assert min(len(firsts) for firsts in wanted["firsts"]) > 4
    assert two.ask(**job, kind="pipeline", shares=[1, 1]) == wanted
    divided = two.ask(**job, kind="tensor", shares=[1, 1])
    if environment == _STOCK and kind.startswith("qwen3"):  # mlx-lm's class divides the output projection, too, or not
        assert divided["error"] == "UsageError"
    else:
        assert divided == wanted


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
@pytest.mark.parametrize("changes", [{}, {"sampled": True}, {"kv": "q8"}], ids=["greedy", "sampled", "q8"])
def test_prediction_heads_leave_output_unchanged(
    two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    mtp_models.write_model(tmp_path / "plain", "glm4_moe")
    kept = keep_quantized(resolve(str(tmp_path / "plain")), Quantization(8, 32))
    batches = [[[token % mtp_models.VOCAB for token in prompt] for prompt in batch] for batch in (_BATCHES[0], *_EIGHT)]
    job = job_of(kept.path, batches=batches, tokens=16, speculate="mtp", always=True, **changes)
    answer = two.ask(**job, kind=kind, shares=[1, 1])
    wanted = alone({**job, "speculate": "off"})
    assert differences(answer, wanted) < 2e-3
    assert answer["drafted"] > 50


def test_quantized_weights_are_divided(two: Ranks, tmp_path: Path) -> None:
    plain = tiny.write_model(tmp_path / "plain", "qwen3", dtype=mx.float16)
    job = job_of(tiny.quantize_model(plain, tmp_path / "quantized"), kv="auto", environment=_EXACT)
    wanted = alone(job)
    assert differences(two.ask(**job, kind="pipeline", shares=[1, 1]), wanted) == 0
    divided = two.ask(**job, kind="tensor", shares=[1, 1])
    assert differences(divided, wanted) < 1e-6
    assert divided["fused"]  # all layers are one node


def test_a_pipeline_rounds_activations_to_8_bits(two: Ranks, tmp_path: Path) -> None:
    plain = tiny.write_model(tmp_path / "plain", "qwen3", dtype=mx.float16)
    job = job_of(tiny.quantize_model(plain, tmp_path / "quantized"), batches=[[_LONG]])
    wanted = alone({**job, "activations": 8})
    assert differences(wanted, {**alone(job), "tokens": wanted["tokens"]}) > 0
    assert differences(two.ask(**job, activations=8, kind="pipeline", shares=[1, 1]), wanted) == 0
    assert two.ask(**job, activations=8, kind="tensor", shares=[1, 1])["error"] == "UsageError"
    assert differences(two.ask(**job, activations="auto", kind="pipeline", shares=[1, 1]), alone(job)) == 0


def test_ranks_of_a_pipeline_compute_different_sequences(two: Ranks, tmp_path: Path) -> None:
    """Eight sequences decode in two passes, chosen from one after the other; fewer share one."""
    job = job_of(written("llama", tmp_path), batches=[_EIGHT[0][:3], _EIGHT[0]], tokens=40, environment=_EXACT)
    answer = two.ask(**job, kind="pipeline", shares=[1, 1])
    wanted = alone(job)
    assert differences(answer, wanted) == 0
    for sequence in range(3):
        assert [3, 1] in answer["steps"][sequence]
    for sequence in range(3, 11):
        assert [8, 1] in wanted["steps"][sequence]
        assert [8, 1] not in answer["steps"][sequence]
        assert [8, 2] in answer["steps"][sequence]


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "shares"), [("tensor", [3, 1, 4]), ("pipeline", [1, 3, 1])])
def test_three_ranks_with_unequal_shares_answer_as_one(
    three: Ranks, tmp_path: Path, kind: str, shares: list[float]
) -> None:
    wide = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "num_hidden_layers": 5}
    few = {"batches": [[_LONG[:20], [1, 2, 3]]], "tokens": 3}  # three ranks that poll share two cores
    job = job_of(tiny.write_model(tmp_path / "wide", "llama", changes=wide), environment=_EXACT, **few)
    assert differences(three.ask(**job, kind=kind, shares=shares), alone(job)) < 1e-6


def test_each_of_two_ranks_holds_half_of_the_weights(two: Ranks, tmp_path: Path) -> None:
    job = job_of(written("llama", tmp_path))
    assert two.ask(**job, kind="tensor", shares=[1, 1])["weights"] <= 0.52 * alone(job)["weights"]


def test_models_that_cannot_be_divided_are_refused_by_name(three: Ranks, tmp_path: Path) -> None:
    path = written("llama", tmp_path)
    answer = three.ask(**job_of(path), kind="tensor", shares=[1, 1, 1])
    assert answer["error"] == "UsageError"
    assert "2 K/V heads" in answer["message"]
    assert three.ask(**job_of(path), kind="pipeline", shares=[1, 1])["error"] == "UsageError"
    assert "tokens" in three.ask(**job_of(path), kind="pipeline", shares=[1, 1, 1])
    for name in _ALONE:
        answer = three.ask(**job_of(written(name, tmp_path)), kind="pipeline", shares=[1, 1, 1])
        assert (answer["error"], name.partition("-")[0] in answer["message"]) == ("UsageError", True)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_mismatch_between_ranks_is_an_engine_error(tmp_path: Path, kind: str) -> None:
    ranks = Ranks(tmp_path, 2)
    try:
        answer = ranks.ask(**job_of(written("llama", tmp_path)), kind=kind, shares=[1, 1], torn=True)
        assert (answer["error"], "interrupted" in answer["message"]) == ("EngineError", True)
    finally:
        ranks.close()
