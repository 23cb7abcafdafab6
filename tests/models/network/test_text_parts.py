"""The text part of multimodal checkpoints, under every prefix in use, and the report of other parts."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.checkpoint.text_part import text_part
from headrace.models.cost.shape_sources import shape_of_checkpoint, shape_of_config
from headrace.models.loading.decoder_choice import network_kind
from headrace.runtime.engine.request import Request
from headrace.runtime.ops import Ops
from tests.support import mlx_lm_models
from tests.support.kernels import KERNELS, name_of
from tests.support.tiny import config_of, load_decoder, quantize_model, random_tensors, write_model
from tests.support.watched import answer

PROMPT = [5, 17, 3, 88, 42, 9, 61, 30, 2, 77, 14, 50, 50, 8, 31, 4, 19, 72]
# writer -> (before the layers, before the output projection, a tensor of another part)
STYLES = {
    "mlx-lm": ("language_model.model.", "language_model.lm_head.", None),
    "older": ("language_model.model.", "language_model.lm_head.", "vision_tower.patch.weight"),
    "newer": ("model.language_model.", "lm_head.", "model.visual.patch.weight"),
    "flat": ("model.", "lm_head.", "visual.patch.weight"),
}
# outer model_type -> (variant of tests.support.tiny, what transformers calls it there)
FAMILIES = {
    "gemma3": ("gemma3", "gemma3_text"),
    "mistral3": ("mistral", "mistral"),
    "llava": ("mistral-window", "mistral"),
    "pixtral": ("llama", "llama"),
    "qwen3_vl": ("qwen3", "qwen3_vl_text"),
    "qwen2_5_vl": ("qwen2", "qwen2_5_vl_text"),
}


def nested(target: Path, family: str, style: str) -> Path:
    """A multimodal checkpoint whose text part is the variant that `FAMILIES` names."""
    variant, kind = FAMILIES[family]
    body, head, other = STYLES[style]
    config = config_of(variant)
    tensors = {
        name.replace("model.", body, 1) if name.startswith("model.") else name.replace("lm_head.", head, 1): array
        for name, array in random_tensors(config, 0).items()
    }
    if other is not None:
        tensors[other] = mx.zeros((3, 32))
    target.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    outer = {"model_type": family, "text_config": {**config, "model_type": kind}, "vision_config": {"hidden_size": 5}}
    (target / "config.json").write_text(json.dumps(outer))
    return target


def greedy(directory: Path, ops: Ops) -> list[int]:
    return answer(load_decoder(directory, ops), Request(PROMPT, max_tokens=12))[0]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("ops", KERNELS[:2], ids=name_of)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_part_gives_the_logits_of_a_text_only_model(tmp_path: Path, family: str, style: str, ops: Ops) -> None:
    directory = nested(tmp_path / "nested", family, style)
    alone = write_model(tmp_path / "alone", FAMILIES[family][0])
    assert network_kind(open_checkpoint(directory)) == "headrace"
    assert greedy(directory, ops) == greedy(alone, ops)


_TURNED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}


@pytest.mark.parametrize(
    ("family", "variant", "kind", "stated"),
    [
        ("glm4v", "glm4", "glm4v_text", {"rope_parameters": _TURNED}),
        ("glm4v_moe", "glm4-moe-groups", "glm4v_moe_text", {"rope_parameters": _TURNED}),
        ("cohere2_vision", "cohere2", "cohere2", {}),
        ("aya_vision", "cohere2", "cohere2", {}),
    ],
)
def test_text_parts_that_mlx_lm_lacks_give_the_logits_of_a_text_only_model(
    tmp_path: Path, family: str, variant: str, kind: str, stated: dict[str, Any]
) -> None:
    """The text part is the text-only model whose layers it has, though transformers alone knows the whole."""
    text = mlx_lm_models.config_of(variant)
    alone = mlx_lm_models.write_mlx_lm_model(tmp_path / "alone", text)
    for key in ("partial_rotary_factor", "rope_theta", "use_qk_norm") if stated else ():
        text.pop(key, None)  # stated elsewhere, or not at all
    whole = tmp_path / "whole"
    whole.mkdir()
    arrays = mx.load(str(alone / "model.safetensors"))
    assert isinstance(arrays, dict)
    renamed = {name.replace("model.", "model.language_model.", 1): array for name, array in arrays.items()}
    mx.save_safetensors(str(whole / "model.safetensors"), {**renamed, "model.visual.patch.weight": mx.zeros((3, 32))})
    outer = {"model_type": family, "text_config": {**text, **stated, "model_type": kind}}
    (whole / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": text["tie_word_embeddings"]}))
    assert greedy(whole, KERNELS[0]) == greedy(alone, KERNELS[0])


@pytest.mark.parametrize(
    ("family", "variant", "prefix"),
    [
        ("qwen3_omni_moe", "qwen3-moe", "thinker."),
        ("qwen2_5_omni", "qwen2", "thinker."),
        ("qwen2_5_omni", "qwen2", "thinker.language_model."),  # as mlx-vlm's copies have it
    ],
)
def test_the_thinker_of_an_omni_model_gives_the_logits_of_a_text_only_model(
    tmp_path: Path, family: str, variant: str, prefix: str
) -> None:
    """Its config and its tensors are a level deeper; the talker, which speaks, is not loaded."""
    alone = write_model(tmp_path / "alone", variant)
    text = json.loads((alone / "config.json").read_text())
    arrays = mx.load(str(alone / "model.safetensors"))
    assert isinstance(arrays, dict)
    renamed = {f"{prefix}{name}": array for name, array in arrays.items()}
    others = ("thinker.visual.patch.weight", "thinker.audio_tower.conv1.weight", "talker.model.norm.weight")
    whole = tmp_path / "whole"
    whole.mkdir()
    mx.save_safetensors(str(whole / "model.safetensors"), {**renamed, **{name: mx.zeros((3, 32)) for name in others}})
    thinker = {"model_type": f"{family}_thinker", "text_config": {**text, "model_type": f"{family}_text"}}
    outer = {"model_type": family, "thinker_config": thinker, "talker_config": {"model_type": f"{family}_talker"}}
    (whole / "config.json").write_text(json.dumps(outer))
    part = text_part(open_checkpoint(whole))
    assert part.ignored.keys() == {"visual", "audio_tower", "talker"}
    assert network_kind(open_checkpoint(whole)) == "headrace"
    assert greedy(whole, KERNELS[0]) == greedy(alone, KERNELS[0])


@pytest.mark.sampled
@pytest.mark.parametrize("style", STYLES)
def test_quantized_parts_are_found_under_their_stored_names(tmp_path: Path, style: str) -> None:
    directory = nested(tmp_path / "nested", "qwen3_vl", style)
    body = STYLES[style][0]
    odd = "layers.1.self_attn.v_proj"
    mixed = quantize_model(directory, tmp_path / "quantized", {f"{body}{odd}": {"bits": 8, "group_size": 32}})
    alone = write_model(tmp_path / "alone", "qwen3")
    plain = quantize_model(alone, tmp_path / "plain", {f"model.{odd}": {"bits": 8, "group_size": 32}})
    assert greedy(mixed, KERNELS[0]) == greedy(plain, KERNELS[0])
    shape = shape_of_checkpoint(open_checkpoint(mixed))
    assert shape.cost == shape_of_checkpoint(open_checkpoint(plain)).cost
    config = json.loads((mixed / "config.json").read_text()) | {"torch_dtype": "float16"}
    rows = {(m.name, m.count) for m in shape.matrices}
    assert {(m.name, m.count) for m in shape_of_config(config).matrices} == rows


@pytest.mark.parametrize(("style", "said"), [("older", "vision_tower"), ("newer", "visual"), ("mlx-lm", None)])
def test_ignored_parts_are_reported_and_not_counted(tmp_path: Path, style: str, said: str | None) -> None:
    directory = nested(tmp_path / "nested", "gemma3", style)
    part = text_part(open_checkpoint(directory))
    line = part.describe_ignored()
    assert (said in line and "MB" in line) if line and said else line == said
    network = load_decoder(directory)
    assert part.nbytes == sum({id(array): array.nbytes for array in network.arrays}.values())
    assert shape_of_checkpoint(open_checkpoint(directory)).resident_bytes == part.nbytes


def test_a_text_config_of_an_unknown_family_is_not_used_alone() -> None:
    from headrace.models.architectures.read import decoder_config
    from headrace.models.checkpoint.text_part import text_config

    outer: dict[str, Any] = {"model_type": "chameleon", "text_config": config_of("llama")}
    assert decoder_config(text_config(outer)) is None


def test_omitted_defaults_of_the_first_gemma3_are_known() -> None:
    """google/gemma-3-4b-it states six keys of its text part."""
    stated = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    shape = shape_of_config({"model_type": "gemma3", "text_config": stated, "torch_dtype": "bfloat16"})
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.context_length) == (8, 4, 256, 131072)
    assert [(layer.count, layer.window) for layer in shape.kv] == [(5, None), (29, 1024)]
    assert shape.resident_bytes == pytest.approx(3.88e9 * 2, rel=0.01)
