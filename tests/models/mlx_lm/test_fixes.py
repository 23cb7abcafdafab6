"""Corrections of mlx-lm's classes, and refusals of settings that they would ignore."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from headrace.models.checkpoint.normalize import normalized
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.load import _notes
from headrace.models.mlx_lm import load as mlx_lm_load
from headrace.models.mlx_lm.fixes import FIXES
from headrace.runtime.errors import CheckpointError, UnsupportedModelError
from tests.support.alone import new_cache
from tests.support.every_module import VOCAB
from tests.support.every_module import config_of as _config
from tests.support.mlx_lm_models import write_mlx_lm_model
from tests.support.tiny import load_decoder

EXPERTS = 8
CHOSEN = 2
CONFIG = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "rope_theta": 10000.0,
    "use_bias": False,
    "tie_word_embeddings": True,
    "moe_num_experts": EXPERTS,
    "moe_layer_start_index": 1,
    "moe_intermediate_size": 32,
    "moe_k": CHOSEN,
    "moe_num_shared_experts": 1,
}
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def checkpoint(directory: Path, correction: mx.array | None):
    from mlx_lm.models import ernie4_5_moe

    directory.mkdir()
    mx.random.seed(5)
    model = ernie4_5_moe.Model(ernie4_5_moe.ModelArgs.from_dict(CONFIG))
    weights = {name: 0.5 * mx.random.normal(array.shape) for name, array in tree_flatten(model.parameters())}
    if correction is not None:
        weights["model.layers.1.mlp.moe_statics.e_score_correction_bias"] = correction[None]
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return open_checkpoint(directory)


def load(directory: Path, correction: mx.array | None):
    return mlx_lm_load.load(checkpoint(directory, correction), mx.DeviceType.cpu)[0]


def expected(mlp, x: np.ndarray, correction: np.ndarray) -> np.ndarray:
    """One expert after the other, with the formula of the model's authors."""
    logits = x @ np.array(mlp.gate.weight).T
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    rows = []
    for token, score in zip(x, scores, strict=True):
        chosen = np.argsort(-(score + correction))[:CHOSEN]
        out = np.array(mlp.shared_experts(mx.array(token[None])))[0]
        for expert in chosen:
            gate, up, down = (
                np.array(getattr(mlp.switch_mlp, part).weight[int(expert)])
                for part in ("gate_proj", "up_proj", "down_proj")
            )
            hidden = token @ gate.T
            out = out + score[expert] / score[chosen].sum() * (hidden / (1 + np.exp(-hidden)) * (token @ up.T)) @ down.T
        rows.append(out)
    return np.stack(rows)


def test_experts_are_chosen_by_corrected_scores(tmp_path: Path) -> None:
    correction = mx.array(np.random.default_rng(1).normal(size=EXPERTS).astype(np.float32))
    mlp = load(tmp_path / "a", correction).layers[1].mlp
    x = np.random.default_rng(2).normal(size=(7, 32)).astype(np.float32)
    ours = np.array(mlp(mx.array(x[None])))[0]
    np.testing.assert_allclose(ours, expected(mlp, x, np.array(correction)), rtol=1e-4, atol=1e-4)
    assert not np.allclose(ours, expected(mlp, x, np.zeros(EXPERTS)), atol=1e-2)


def test_without_corrections_to_add_the_class_answers_the_same(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    model = load(tmp_path / "a", mx.zeros((EXPERTS,)))
    stock, _ = load_model(tmp_path / "a")
    stock.set_dtype(mx.float32)
    assert mx.array_equal(model(TOKENS), stock(TOKENS))


def test_a_conversion_that_lost_the_corrections_runs_with_a_note(tmp_path: Path) -> None:
    """mlx-lm's converter drops them."""
    model = load(tmp_path / "a", None)
    corrected = load(tmp_path / "b", mx.zeros((EXPERTS,)))
    assert mx.allclose(model(TOKENS), corrected(TOKENS), atol=1e-5)
    assert any("corrections" in note for note in _notes("a", open_checkpoint(tmp_path / "a"), native=True))
    assert _notes("b", open_checkpoint(tmp_path / "b"), native=True) == []


def test_the_decoder_corrects_experts_as_the_class_does_here(tmp_path: Path) -> None:
    for name, correction in (("a", mx.array([3.0, -2, 0, 1, -1, 2, -3, 1][:EXPERTS])), ("b", None)):
        theirs = load(tmp_path / name, correction)(TOKENS)
        decoder = load_decoder(tmp_path / name)
        cache = new_cache(decoder, 16)
        cache.reserve(TOKENS.size)
        ours = decoder.all_logits(decoder.layers(decoder.embed(TOKENS), cache))
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_layer_alone_without_corrections_is_refused(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "a", mx.zeros((EXPERTS,))).path
    weights = mx.load(str(directory / "model.safetensors"))
    weights["model.layers.0.mlp.moe_statics.e_score_correction_bias"] = weights.pop(
        "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    )
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    with pytest.raises(CheckpointError, match="layer 1"):
        mlx_lm_load.load(open_checkpoint(directory), mx.DeviceType.cpu)


@pytest.mark.parametrize("kind", ["mixtral", "starcoder2"])
def test_layers_attend_in_windows_that_their_class_ignores(kind: str) -> None:
    """In one layer, the last token sees the window alone; positions are relative."""
    config = {**CONFIG, "model_type": kind, "num_local_experts": 2, "num_experts_per_tok": 1, "norm_epsilon": 1e-5}
    assert not hasattr(mlx_lm_load.of_config({**config, "sliding_window": 256}), "make_cache")  # never reached
    model = mlx_lm_load.of_config({**config, "num_hidden_layers": 1, "sliding_window": 8})
    mx.random.seed(3)
    model.update(tree_map(lambda array: 0.3 * mx.random.normal(array.shape), model.parameters()))
    tokens = mx.random.randint(0, CONFIG["vocab_size"], (1, 40))
    whole = model(tokens, cache=make_prompt_cache(model))
    cache = make_prompt_cache(model)
    for start in range(0, 40, 5):
        parts = model(tokens[:, start : start + 5], cache=cache)
    assert mx.allclose(parts[:, -1], whole[:, -1], atol=1e-4)
    assert mx.allclose(model(tokens[:, -8:])[:, -1], whole[:, -1], atol=1e-4)
    assert not mx.allclose(model(tokens[:, -7:])[:, -1], whole[:, -1], atol=1e-2)
    assert not mx.allclose(model(tokens[:, -9:])[:, -1], whole[:, -1], atol=1e-2)  # without a cache: no window


def test_sliding_windows_of_classes_with_custom_masks_are_refused() -> None:
    config = {**CONFIG, "model_type": "olmo2", "sliding_window": 8}
    with pytest.raises(UnsupportedModelError, match="window of 8"):
        mlx_lm_load.of_config(config)


@pytest.mark.parametrize("entry", [{"1": {"head_dim": 8}}, {"0": {"intermediate_size": 3}}, {"0": 3}])
def test_settings_of_single_layers_that_no_key_expresses_are_refused(entry: dict) -> None:
    config = {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "sliding_attention"]}
    with pytest.raises(CheckpointError, match="per_layer_config"):
        normalized({**config, "per_layer_config": entry})


def random_model(directory: Path, config: dict[str, Any]) -> Path:
    return write_mlx_lm_model(directory, {**_config("llama"), "sliding_window": None, "layer_types": None, **config})


def test_sparse_layers_of_phi3_small_do_not_see_later_tokens(tmp_path: Path) -> None:
    config = {
        "model_type": "phi3small", "vocab_size": 100352, "ff_intermediate_size": 96, "layer_norm_epsilon": 1e-5,
        "dense_attention_every_n_layers": 2, "gegelu_limit": 1.0,
    }  # fmt: skip
    model = mlx_lm_load.load(open_checkpoint(random_model(tmp_path / "a", config)), mx.DeviceType.cpu)[0]
    first, other = (model(mx.array([[3, 1, 4, last]]))[0, :3, :96] for last in (5, 9))
    assert mx.allclose(first, other, atol=1e-6)
    short = random_model(tmp_path / "b", {**config, "vocab_size": 96})
    with pytest.raises(CheckpointError, match="vocab_size"):
        mlx_lm_load.load(open_checkpoint(short), mx.DeviceType.cpu)


def test_windows_of_plamo3_do_not_depend_on_chunks(tmp_path: Path) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    directory = random_model(tmp_path, _config("plamo3"))
    model = mlx_lm_load.load(open_checkpoint(directory), mx.DeviceType.cpu)[0]
    tokens = [(7 * i * i + 3) % VOCAB for i in range(40)]
    whole = model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
    cache = make_prompt_cache(model)
    for chunk in (tokens[:20], *([token] for token in tokens[20:])):
        logits = model(mx.array([chunk]), cache=cache)
    assert mx.allclose(logits[0, -1], whole, atol=1e-4)


def test_norms_of_mamba_have_the_epsilon_of_the_config(tmp_path: Path) -> None:
    for number, kind in enumerate(("mamba", "mamba2")):
        directory = random_model(tmp_path / str(number), {**_config(kind), "layer_norm_epsilon": 0.25})
        model = mlx_lm_load.load(open_checkpoint(directory), mx.DeviceType.cpu)[0]
        assert {norm.eps for norm in (model.backbone.norm_f, *(layer.norm for layer in model.layers))} == {0.25}


def test_mlx_lm_has_no_class_of_the_names_that_fixes_add() -> None:
    """A class of mlx-lm may replace ours (docs/workarounds.md)."""
    added = [name for name, fix in FIXES.items() if fix.stock or fix.own]
    assert added == ["arcee", "deepseek_v4"]
    assert [name for name in added if find_spec(f"mlx_lm.models.{name}") is not None] == []


# Settings that make no difference to a class, so that they are refused.
IGNORED: dict[str, dict[str, Any]] = {
    name: {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}}
    for name, fix in FIXES.items()
    if fix.scalings == ("default",)
}
IGNORED["gemma3_text"] = {"final_logit_softcapping": 1.5}
_ROTATED = {"granitemoehybrid": {"position_embedding_type": "rope"}}


def class_logits(name: str, changes: dict[str, Any]) -> mx.array:
    """Return the logits of mlx-lm's class as it is, with random weights that depend on their shapes alone."""
    module = import_module(f"mlx_lm.models.{name}")
    config = {**_config(name), "rope_parameters": None, **_ROTATED.get(name, {}), **changes}
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(5)
    model.update(tree_map(lambda array: 0.3 * mx.random.normal(array.shape), model.parameters()))
    return model(mx.array([list(range(40))]))


@pytest.mark.parametrize("name", IGNORED)
def test_classes_ignore_the_settings_that_are_refused(name: str) -> None:
    """If one fails, its class has got the setting: the refusal goes (docs/workarounds.md)."""
    assert mx.array_equal(class_logits(name, {}), class_logits(name, IGNORED[name]))


def test_a_class_that_scales_positions_is_told_from_those_that_do_not() -> None:
    assert not mx.allclose(class_logits("llama", {}), class_logits("llama", IGNORED["mixtral"]), atol=1e-2)


def test_classes_that_need_a_mac_or_a_package_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    error = mlx_lm_load.refused({"model_type": "muse_spark"}, "it", RuntimeError("[metal_kernel] No Metal back-end."))
    assert isinstance(error, UnsupportedModelError)
    assert error.hint
    with pytest.raises(UnsupportedModelError, match="ai2-olmo"):
        mlx_lm_load.of_config({"model_type": "olmo"})
    assert capfd.readouterr().out == ""
    with pytest.raises(SystemExit):  # else it need not be refused (docs/workarounds.md)
        import_module("mlx_lm.models.olmo")


def test_falcon_h1s_norm_by_groups_is_refused_where_its_class_answers() -> None:
    config = {"model_type": "falcon_h1", "mamba_n_groups": 2, "mamba_rms_norm": True}
    with pytest.raises(UnsupportedModelError, match="norm by groups"):
        mlx_lm_load.of_config(config)
