"""GGUFs of architectures whose layers differ: llama.cpp's logits and answers, layouts, and what is refused."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.shape_sources import shape_of_gguf
from headrace.models.gguf import convert_gguf
from headrace.models.gguf.architectures import ARCHITECTURES
from headrace.models.gguf.container import open_container, remote_container
from headrace.models.gguf.convert import config_tensors, plan_of
from headrace.models.gguf.rope import llama3_factor
from headrace.models.loading.load import load_model
from headrace.models.mlx_lm.load import load
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.alone import new_cache
from tests.support.gguf_layered_models import LAYERED, tensors_of, write_layered
from tests.support.gguf_models import VARIANTS
from tests.support.rounding import logits_bound
from tests.support.watched import split

RECORDED = json.loads(Path(__file__).with_name("llama_cpp_layered.json").read_text())
# llama.cpp's CPU kernels take GELU from a table in half precision.
TOLERANCE = {
    "gemma3n": 8e-3,
    "minimax-m3": 3e-3,  # sparse attention there is in half precision
    **dict.fromkeys(
        (
            "gemma4", "gemma4-mixture", "starcoder2", "codeshell", "phi2", "gptneox", "gptneox-sequential", "gpt2",
            "starcoder", "spark2_5", "falcon", "falcon-40b", "grok", "grok-2",
        ),
        2e-3,
    ),
}  # fmt: skip

# Text models of multimodal families, with the tensors of `qwen2`, `qwen3` and `qwen3moe`.
TEXT_PARTS = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}
# llama.cpp takes RMSNorm for PhiMoE's LayerNorm, and weighs its experts by softmax.
UNLIKE_LLAMA_CPP = {"phimoe"}
LONGEST_SUM = 256
"""Terms of a product with these models' widest matrix, at most."""


def convert(source: Path) -> Path:
    (target := source.with_suffix("")).mkdir()
    convert_gguf(source, target)
    return target


def logits_of(directory: Path, prompt: list[int]) -> np.ndarray:
    network: Any = load_model(directory, name="tiny").network
    cache = new_cache(network, 256)
    cache.reserve(len(prompt))
    return np.array(network.logits(network.layers(network.embed(mx.array([prompt])), cache)))[0]


def _rounding(directory: Path) -> float:
    """Return the bound for a model's number of layers."""
    numbers = [re.search(r"\b(?:layers|blocks|h)\.(\d+)\.", name) for name in open_checkpoint(directory).tensors]
    return logits_bound(LONGEST_SUM, 1 + max(int(number[1]) for number in numbers if number is not None))


def test_every_architecture_is_covered() -> None:
    written = {architecture for architecture, *_ in (*LAYERED.values(), *VARIANTS.values())}
    assert written | TEXT_PARTS == ARCHITECTURES.keys()


# Always: permuted keys of fewer heads than queries, a share of rotated dimensions, a norm of experts' weights, windows.
@pytest.mark.sampled(16, always=["arcee", "gemma4", "glm4moe", "laguna"])
@pytest.mark.parametrize("variant", [variant for variant in LAYERED if variant not in UNLIKE_LLAMA_CPP])
def test_logits_and_answers_are_llama_cpps(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a prompt; then first turn, second turn and an edited first turn of one conversation."""
    monkeypatch.setenv("HEADRACE_EXACT", "1")
    directory = convert(write_layered(tmp_path / "m.gguf", variant))
    prompt = RECORDED["prompt"]
    ours = logits_of(directory, prompt)
    if variant in RECORDED["log_probabilities"]:  # recorded from llama.cpp's server
        recorded = RECORDED["log_probabilities"][variant]
        ours = ours - np.logaddexp.reduce(ours)
    else:
        recorded = RECORDED["logits"][variant]
    theirs = np.array(recorded)
    ours = ours[:: RECORDED["every"]]
    assert np.abs(ours - theirs).max() < TOLERANCE.get(variant, _rounding(directory)) * np.abs(theirs).max()
    loaded = load_model(directory, name=variant)
    assert loaded.notes == []
    engine = Engine(loaded.network, context_limit=64, keep_prefix=True)
    wanted = RECORDED["turns"][variant]
    second = [*prompt, *wanted[0], *RECORDED["said_next"]]
    for turn, answer in zip((prompt, second, RECORDED["edited"]), wanted, strict=True):
        said, _ = split(list(engine.generate(Request(turn, max_tokens=len(answer)))))
        assert said == answer


@pytest.mark.sampled
@pytest.mark.parametrize(
    "variant",
    [
        "qwen35",
        "qwen35moe",
        "gemma4",
        "granitehybrid-moe",
        "deepseek2",
        "deepseek2-lite",
        "llama4",
        "deepseek",
        "bailingmoe2",
        "afmoe",
        "dots1",
        "exaone-moe",
        "hunyuan-moe",
        "nemotron",
        "command-r",
        "arcee",
        "bailingmoe",
        "deci",
        "mamba",
        "mamba2",
        "rwkv7",
        "mistral4",
        "jamba-moe",
        "step35",
        "laguna",
        "starcoder",
        "chatglm",
        "qwen",
        "baichuan",
        "olmo",
        "codeshell",
        "minicpm3",
        "nanbeige",
        "spark2_5",
        "hy_v3",
        "smallthinker",
        "grok-2",
        "jais2",
        "mimo2",
        "muse-glimmer",
        "phimoe",
        "bailingmoe3",
        "falcon-40b",
        "maincoder",
        "stablelm-12b",
        "cohere2moe",
        "dbrx",
        "openelm",
    ],
)
def test_quantized_tensors_keep_their_values(variant: str, tmp_path: Path) -> None:
    """Rows and columns in another order, joined tensors and stacks: as from the dequantized tensors."""
    import gguf

    path = write_layered(tmp_path / "m.gguf", variant, matrices="Q8_0")
    plain = {
        name: gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.type]).reshape(tensor.shape)
        for name, tensor in open_container(path).tensors.items()
    }
    plain = {name: values.astype(np.float32) for name, values in plain.items()}
    quantized = convert(path)
    section = json.loads((quantized / "config.json").read_text())["quantization"]
    assert (section["bits"], section["group_size"]) == (8, 32)
    whole = convert(write_layered(tmp_path / "plain.gguf", variant, tensors=plain))
    prompt = RECORDED["prompt"]
    ours = logits_of(quantized, prompt)
    theirs = logits_of(whole, prompt)
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()


def test_fused_projections_and_experts_are_split(tmp_path: Path) -> None:
    tensors = tensors_of("minimax-m2")
    for layer in range(2):
        at = f"blk.{layer}"
        names = [f"{at}.attn_{part}.weight" for part in "qkv"]
        tensors[f"{at}.attn_qkv.weight"] = np.concatenate([tensors.pop(name) for name in names])
        names = [f"{at}.ffn_{part}_exps.weight" for part in ("gate", "up")]
        tensors[f"{at}.ffn_gate_up_exps.weight"] = np.concatenate([tensors.pop(name) for name in names], axis=1)
    fused = convert(write_layered(tmp_path / "fused.gguf", "minimax-m2", tensors=tensors))
    apart = convert(write_layered(tmp_path / "apart.gguf", "minimax-m2"))
    ours, theirs = (mx.load(str(each / "model.safetensors")) for each in (fused, apart))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "variant",
    [
        "qwen35moe",
        "gemma4",
        "granitehybrid-moe",
        "nemotron_h_moe",
        "lfm2",
        "deci",
        "jamba-moe",
        "step35",
        "mistral4",
        "bailingmoe",
        "chatglm",
        "olmo",
        "minicpm3",
        "nanbeige",
        "spark2_5",
        "mimo2",
        "muse-glimmer",
        "phimoe",
        "bailingmoe3",
    ],
)
def test_a_gpu_computes_in_half_precision(variant: str, tmp_path: Path) -> None:
    """The files' norms are in float32; one of them would promote all activations and the cache."""
    from mlx_lm.models.cache import make_prompt_cache

    directory = convert(write_layered(tmp_path / "m.gguf", variant, matrices="Q8_0"))
    model, _ = load(open_checkpoint(directory), mx.DeviceType.gpu)
    cache = make_prompt_cache(model)
    assert model(mx.array([[1, 2, 3]]), cache=cache).dtype == mx.bfloat16
    keys = [part.keys for part in cache if getattr(part, "keys", None) is not None]
    assert {each.dtype for each in keys} == {mx.bfloat16}


def test_step_3_5_has_the_rope_scaling_of_its_checkpoint(tmp_path: Path) -> None:
    """Its file states factors for whole heads, from which the parameters follow."""
    wanted = {
        "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    wavelengths = [2 * math.pi * 5e5 ** (index / 8) for index in range(8)]
    factors = np.array([llama3_factor(each, wanted) for each in wavelengths], np.float32)
    assert sum(1 < each < 2 for each in factors) > 1  # some lie on the slope
    tensors = tensors_of("step35") | {"rope_freqs.weight": factors}
    directory = convert(write_layered(tmp_path / "m.gguf", "step35", tensors=tensors))
    config = json.loads((directory / "config.json").read_text())
    assert config["rope_scaling"] == wanted
    assert config["yarn_only_types"] == ["full_attention"]
    plain = convert(write_layered(tmp_path / "plain.gguf", "step35"))
    (plain / "config.json").write_text(json.dumps(config))
    prompt = RECORDED["prompt"]
    assert np.array_equal(logits_of(directory, prompt), logits_of(plain, prompt))


_TABLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
_COHERE = {
    **_TABLES, **_ATTENTION, "attn_norm": "input_layernorm", "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip
# name -> (prefix of layers, experts below it, names of tensors), of checkpoints as transformers or mlx-lm have them
_PUBLISHED = {
    "phimoe": (
        "model.layers", "block_sparse_moe.experts",
        {
            **_TABLES, **_ATTENTION, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3",
        },
    ),
    "cohere2moe": ("model.layers", "mlp.experts", _COHERE),
    "cohere2moe-rms": ("model.layers", "mlp.experts", _COHERE),
    "smallthinker": (
        "model.layers", "block_sparse_moe.experts",
        {
            **_TABLES, **_ATTENTION, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "ffn_gate_inp": "block_sparse_moe.primary_router", "ffn_gate_exps": "gate", "ffn_up_exps": "up",
            "ffn_down_exps": "down",
        },
    ),
    "dbrx": (
        "transformer.blocks", "ffn.experts",
        {
            "token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head",
            "attn_norm": "norm_attn_norm.norm_1", "attn_output_norm": "norm_attn_norm.norm_2",
            "attn_qkv": "norm_attn_norm.attn.Wqkv", "attn_output": "norm_attn_norm.attn.out_proj",
            "ffn_gate_inp": "ffn.router.layer", "ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "v1",
        },
    ),
    "openelm": (
        "transformer.layers", "",
        {
            "token_embd": "transformer.token_embeddings", "output_norm": "transformer.norm", "attn_norm": "attn_norm",
            "ffn_norm": "ffn_norm", "attn_qkv": "attn.qkv_proj", "attn_q_norm": "attn.q_norm",
            "attn_k_norm": "attn.k_norm", "attn_output": "attn.out_proj", "ffn_gate": "ffn.proj_1",
            "ffn_up": "ffn.proj_1", "ffn_down": "ffn.proj_2",
        },
    ),
}  # fmt: skip


def published(variant: str, directory: Path) -> Path:
    """Write the tensors of a variant under their names in checkpoints, with the config in `directory`."""
    layers, experts, names = _PUBLISHED[variant]
    stored: dict[str, np.ndarray] = {}
    for name, values in tensors_of(variant).items():
        *block, kind, leaf = name.split(".")
        if kind.startswith("rope_factors"):
            continue
        at = f"{layers}.{block[1]}." if block else ""
        key = f"{at}{names[kind]}.{leaf}"
        if kind.endswith("_exps"):
            stored |= {f"{at}{experts}.{i}.{names[kind]}.{leaf}": each for i, each in enumerate(values)}
        elif key in stored:  # gate, and up below it
            stored[key] = np.concatenate([stored[key], values])
        else:
            stored[key] = values
    other = directory.with_name("safetensors")
    shutil.copytree(directory, other)
    mx.save_safetensors(str(other / "model.safetensors"), {name: mx.array(values) for name, values in stored.items()})
    return other


@pytest.mark.parametrize("variant", [variant for variant in _PUBLISHED if variant != "phimoe"])
def test_files_are_checkpoints_under_published_names(variant: str, tmp_path: Path) -> None:
    directory = convert(write_layered(tmp_path / "m.gguf", variant))
    prompt = RECORDED["prompt"]
    assert np.array_equal(logits_of(directory, prompt), logits_of(published(variant, directory), prompt))


def test_phi_moe_is_its_checkpoint_under_the_names_of_transformers(tmp_path: Path) -> None:
    directory = convert(write_layered(tmp_path / "m.gguf", "phimoe"))
    config = json.loads((directory / "config.json").read_text())
    assert config["rope_scaling"]["long_mscale"] == 1.243163121016122
    prompt = RECORDED["prompt"]
    assert np.array_equal(logits_of(directory, prompt), logits_of(published("phimoe", directory), prompt))


class FilePart:
    """A file that is read in parts, as from a hub."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._content = path.read_bytes()
        self.size = len(self._content)

    def read(self, start: int, count: int) -> bytes:
        return self._content[start : start + count]


def test_a_factor_of_muses_queries_is_read_from_a_norm(tmp_path: Path) -> None:
    path = write_layered(tmp_path / "m.gguf", "muse-glimmer")
    remote = remote_container([FilePart(path)], config_tensors)
    for container in (open_container(path), remote):
        assert plan_of(container).config["qk_scale_factor"] == 3.87
    tensors = tensors_of("muse-glimmer")
    tensors["blk.0.attn_q_norm.weight"][3] = 4
    with pytest.raises(UnsupportedModelError, match="norms of heads"):
        convert(write_layered(tmp_path / "other.gguf", "muse-glimmer", tensors=tensors))


def test_a_wide_layer_for_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    config = json.loads((convert(write_layered(tmp_path / "m.gguf", "glm4moe")) / "config.json").read_text())
    assert config["num_hidden_layers"] == 2


@pytest.mark.parametrize("variant", ["qwen35", "qwen35moe", "qwen3next", "deepseek2"])
def test_a_layer_for_multi_token_prediction_is_kept(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own parts in their places, and all others as in the layer before, of which they are copies here."""
    architecture, keys, shapes = LAYERED[variant]
    layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blk."))
    before = f"blk.{layers - 1}."
    own = f"blk.{layers}.nextn."
    tensors = tensors_of(variant)
    draw = np.random.default_rng(3)
    tensors |= {f"blk.{layers}.{name.removeprefix(before)}": a for name, a in tensors.items() if before in name}
    width = tensors["output_norm.weight"].size
    sizes = {"eh_proj": (width, 2 * width), "enorm": (width,), "hnorm": (width,), "shared_head_norm": (width,)}
    more = {f"{own}{name}.weight": draw.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}
    known = {name: array.shape for name, array in (tensors | more).items()}
    monkeypatch.setitem(LAYERED, variant, (architecture, {**keys, "nextn_predict_layers": 1}, known))
    directory = convert(write_layered(tmp_path / "m.gguf", variant, tensors=tensors | more))
    stored: Any = mx.load(str(directory / "model.safetensors"))
    layer = f"model.layers.{layers}."
    modules = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    if variant != "deepseek2":
        layer = "mtp.layers.0."
        modules = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    at = layer.removesuffix("layers.0.")
    for module, array in zip(modules, more.values(), strict=True):
        assert np.array_equal(np.array(stored[f"{at}{module}.weight"]), array)
    last = {name.partition(f"layers.{layers - 1}.")[2]: array for name, array in stored.items()}
    last.pop("")
    assert last
    assert all(mx.array_equal(stored[layer + name], array) for name, array in last.items())
    network: Any = load_model(directory, name=variant).network
    assert network.draft_head is not None
    answers = [
        split(list(Engine(network, context_limit=64).generate(Request([3, 1, 4], max_tokens=9, speculate=source))))[0]
        for source in ("off", "mtp")
    ]
    assert answers[0] == answers[1]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "variant",
    [
        "qwen35",
        "lfm2",
        "granitehybrid",
        "qwen35moe",
        "lfm2moe",
        "gemma4-mixture",
        "nemotron_h_moe",
        "falcon-h1",
        "deepseek2",
        "deepseek2-v2",
        "deepseek2-lite",
        "apertus",
        "llama4",
        "arcee",
        "bailingmoe",
        "deci",
        "mamba-normed",
        "mamba2",
        "rwkv7",
        "mistral4",
        "jamba",
        "step35",
        "chatglm",
        "olmo",
        "codeshell",
        "minicpm3",
        "nanbeige",
        "spark2_5",
        "mimo2",
        "muse-glimmer",
        "phimoe",
        "bailingmoe3",
        "falcon-40b",
        "granite_swa",
        "cohere2moe",
        "dbrx",
        "openelm",
        "gemma3n",
        "minimax-m3",
        "kimi-k3",
        "smallthinker",
        "grok-2",
    ],
)
def test_headers_alone_give_the_shape(variant: str, tmp_path: Path) -> None:
    path = write_layered(tmp_path / "m.gguf", variant, matrices="Q8_0")
    shape = shape_of_gguf(open_container(path))
    network = load_model(convert(path), name=variant).network
    wide = isinstance(network, MlxLmNetwork)  # loaded in single precision
    assert (2 if wide else 1) * shape.cost.kv_bytes(100) == network.cost.kv_bytes(100)
    assert shape.cost.weight_flops == network.cost.weight_flops
    # The kernels fill up rows to 16, and drop the offsets of Q8_0, one byte in eighteen. mlx-lm's vectors and routers
    # are wide: a fifth of so small a model.
    assert shape.cost.weight_bytes == pytest.approx(network.cost.weight_bytes, rel=0.2 if wide else 0.06)


@pytest.mark.parametrize(
    ("variant", "name", "values", "message"),
    [
        ("qwen35", "blk.0.ssm_out.weight", None, r"blk\.0\.ssm_out\.weight is missing"),
        ("qwen35", "blk.0.ssm_a", np.ones(4, np.float32), "not negative"),
        ("bailingmoe3", "blk.0.ssm_a", np.full((4, 1), -1, np.float32), "not positive"),
        ("lfm2", "blk.0.attn_q.weight", np.ones((64, 64), np.float32), "has no place in a lfm2"),
        ("gemma4", "rope_freqs.weight", np.full(16, 2, np.float32), "does not turn a part"),
        ("granitehybrid", "blk.0.ssm_d", np.ones((4, 2), np.float32), r"ssm_d has shape \(4, 2\)"),
    ],
)
def test_broken_files_are_one_error(
    variant: str, name: str, values: np.ndarray | None, message: str, tmp_path: Path
) -> None:
    tensors = tensors_of(variant)
    tensors.pop(name, None)
    tensors |= {} if values is None else {name: values}
    with pytest.raises(CheckpointError, match=message):
        convert(write_layered(tmp_path / "m.gguf", variant, tensors=tensors))


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("deci", {"attention.head_count": [4, 4, 0, 4, 4]}, "4 heads and width 0"),
        ("deci", {"attention.head_count": [4, 2, 0, 0, 4]}, "2 heads"),
        ("deci", {"feed_forward_length": [100, 512, 256, 0, 768]}, "feed-forwards of 100"),
        ("jamba", {"attention.head_count_kv": 2}, "without Mamba layers"),
        ("bailingmoe", {"expert_weights_norm": False}, "normalized weights"),
        ("mistral4", {"expert_gating_func": 2}, "variant"),
        ("mistral4", {"attention.temperature_length": 16}, "another context"),
        ("step35", {"attention.head_count": [4, 6, 5, 4]}, "other heads"),
        ("step35", {"rope.dimension_count": 8}, "dimension_count = 8"),
        ("baichuan", {"block_count": 40}, "ALiBi"),
        ("olmo", {"attention.clamp_kqv": 8.0}, "clamp_kqv = 8.0"),
        ("minicpm3", {"attention.layer_norm_rms_epsilon": 1e-6}, "another epsilon"),
        ("minicpm3", {"attention.value_length": 24}, "other heads"),
        ("mimo2", {"attention.head_count_kv": [1, 2, 4, 1]}, "other heads"),
        ("bailingmoe3", {"kda.safe_gate": False}, "variant"),
        ("bailingmoe3", {"attention.head_count_kv": [0, 1, 0, 1, 0]}, "variant"),
        ("bailingmoe3", {"rope.dimension_sections": [2, 1, 1, 0]}, "dimension_sections"),
        ("hy_v3", {"expert_shared_feed_forward_length": 48}, "shared experts of 48"),
        ("minimax-m3", {"expert_weights_norm": False}, "without normalized weights"),
        ("laguna", {"expert_weights_norm": False}, "other experts"),
        ("cohere2moe", {"attention.sliding_window_pattern": 4}, "does not list its layers"),
        ("cohere2moe", {"expert_gating_func": 1}, "experts by softmax"),
    ],
)
def test_settings_that_a_class_cannot_run_are_refused(
    variant: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, keys, shapes = LAYERED[variant]
    monkeypatch.setitem(LAYERED, variant, (architecture, {**keys, **changes}, shapes))
    with pytest.raises(UnsupportedModelError, match=message):
        convert(write_layered(tmp_path / "m.gguf", variant))


def test_heads_that_are_no_multiple_of_a_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, keys, shapes = LAYERED["qwen35"]
    keys = {**keys, "ssm.time_step_rank": 8, "ssm.group_count": 4}
    sizes = {"ssm_dt.bias": (8,), "ssm_a": (8,), "ssm_beta.weight": (8, 64), "ssm_alpha.weight": (8, 64)}
    sizes |= {"attn_qkv.weight": (384, 64), "ssm_conv1d.weight": (384, 4), "ssm_norm.weight": (16,)}
    shapes = {name: sizes.get(name.partition(".")[2].partition(".")[2], shape) for name, shape in shapes.items()}
    monkeypatch.setitem(LAYERED, "qwen35", (architecture, keys, shapes))
    with pytest.raises(UnsupportedModelError, match="across heads"):
        convert(write_layered(tmp_path / "m.gguf", "qwen35", matrices="Q8_0"))
