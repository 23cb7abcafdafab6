"""Adapters: the logits are those of merged weights, for plain and quantized bases; what is not applied is refused."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.app.engine.kv_disk_cache import kv_key
from headrace.models.checkpoint.adapter import open_adapter
from headrace.models.loading.load import load_model
from headrace.models.network.decoder import Decoder
from headrace.runtime.errors import CheckpointError, HeadraceError, UnsupportedModelError
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.ops import Phase, native
from tests.support.adapters import EVERY, RANK, logits_after, write_adapter, write_merged
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import VARIANTS, quantize_model, write_model
from tests.support.tiny_chat import write_byte_tokenizer

PROMPT = [1 + i * 7 % 90 for i in range(30)]


def _model(folder: Path, variant: str = "llama") -> Path:
    if variant in VARIANTS:
        base = write_model(folder / "base", variant)
    else:
        base = write_mlx_lm_model(folder / "base", config_of(variant))
    write_byte_tokenizer(base)
    return base


def _quantized(folder: Path, base: Path) -> Path:
    quantized = quantize_model(base, folder / "quantized")
    write_byte_tokenizer(quantized)
    return quantized


def _network(directory: Path, adapter: Path | None = None) -> Decoder:
    network = load_model(directory, name="tiny", context=64, adapter=adapter and open_adapter(adapter)).network
    assert isinstance(network, Decoder)
    return network


def _logits(network: Decoder) -> mx.array:
    return logits_after(network, [*PROMPT, 5])


def _distance(ours: mx.array, theirs: mx.array) -> float:
    return float(mx.abs(ours - theirs).max().item() / mx.abs(theirs).max().item())


@pytest.mark.parametrize("kind", ["peft", "mlx-lm"])
def test_an_adapter_of_a_plain_model_is_merged(tmp_path: Path, kind: Any) -> None:
    base = _model(tmp_path)
    changes = write_adapter(tmp_path / "adapter", base, kind)
    merged = _model_of(write_merged(tmp_path / "merged", base, changes))
    with_adapter = _logits(_network(base, tmp_path / "adapter"))
    assert _distance(with_adapter, _logits(_network(merged))) < 1e-5
    assert _distance(with_adapter, _logits(_network(base))) > 0.05


def _model_of(directory: Path) -> Path:
    write_byte_tokenizer(directory)
    return directory


def _dequantized(folder: Path, quantized: Path) -> Path:
    """Write a quantized model's values as a plain one."""
    stored = mx.load(str(quantized / "model.safetensors"))
    assert isinstance(stored, dict)
    plain = {}
    for name, array in stored.items():
        module = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" in stored:
            array = mx.dequantize(array, stored[f"{module}.scales"], stored[f"{module}.biases"], group_size=32, bits=4)
        plain[name] = array
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), plain)
    (folder / "config.json").write_text((quantized.parent / "base" / "config.json").read_text())
    return _model_of(folder)


@pytest.mark.sampled
@pytest.mark.parametrize("modules", [EVERY, ("self_attn.q_proj", "self_attn.v_proj"), ("mlp.down_proj",)])
@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3", "qwen2", "gpt-oss", "cohere", "qwen3.5"])
def test_a_quantized_base_stays_as_it_is(tmp_path: Path, variant: str, modules: tuple[str, ...]) -> None:
    if variant == "gpt-oss" and modules[0].startswith("mlp"):
        pytest.skip("it has experts alone")
    base = _model(tmp_path, variant)
    changes = write_adapter(tmp_path / "adapter", base, "peft", modules)
    quantized = _quantized(tmp_path, base)
    merged = _model_of(write_merged(tmp_path / "merged", _dequantized(tmp_path / "plain", quantized), changes))
    network = _network(quantized, tmp_path / "adapter")
    ours = _logits(network)
    assert _distance(ours, _logits(_network(merged))) < 2e-3  # activations are rounded to 16 bits
    assert _distance(ours, _logits(_network(quantized))) > 0.01


def test_the_reference_adapts_both_products_of_a_parallel_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and feed-forward add to one residual, one product after the other."""
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    base = _model(tmp_path, "cohere")
    changes = write_adapter(tmp_path / "adapter", base, "peft", EVERY)
    quantized = _quantized(tmp_path, base)
    merged = _model_of(write_merged(tmp_path / "merged", _dequantized(tmp_path / "plain", quantized), changes))
    ours = _logits(_network(quantized, tmp_path / "adapter"))
    assert _distance(ours, _logits(_network(merged))) < 2e-3
    assert _distance(ours, _logits(_network(quantized))) > 0.01


@pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")
@pytest.mark.sampled
@pytest.mark.parametrize("rank", [1, 8, 16, 64])
@pytest.mark.parametrize("modules", [EVERY, ("self_attn.q_proj", "self_attn.v_proj"), ("mlp.up_proj",)])
@pytest.mark.parametrize("variant", ["llama", "gemma3", "qwen2", "qwen3-moe", "gpt-oss"])
def test_three_turns_are_those_of_stock_mlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, modules: tuple[str, ...], rank: int
) -> None:
    """The kernels add the products within the nodes that they have without an adapter."""
    if variant in ("qwen3-moe", "gpt-oss"):
        if modules[0].startswith("mlp"):
            pytest.skip("it has experts alone")
        modules = tuple(module for module in modules if module.startswith("self_attn"))
    base = _model(tmp_path, variant)
    write_adapter(tmp_path / "adapter", base, "peft", modules, size=0.02, rank=rank)
    quantized = _quantized(tmp_path, base)
    monkeypatch.setenv("HEADRACE_EXACT", "1")
    network = _network(quantized, tmp_path / "adapter")
    nodes = [node for _, node in network._layer_groups]
    assert len(nodes) == len(_network(quantized)._layer_groups)
    assert None not in nodes
    ours = _turns(network)
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    for logits, theirs in zip(ours, _turns(_network(quantized, tmp_path / "adapter")), strict=True):
        assert _distance(logits, theirs) < 1e-4


def _turns(network: Decoder) -> list[mx.array]:
    """Return the logits after each of three prompts, and of the tokens after it."""
    kv = network.kv_backend(KVOptions(64))
    cache = kv.acquire([0])
    logits = []
    for begin in (0, 11, 17):
        chunks: list[tuple[list[int], Phase]] = [(PROMPT[begin : begin + 9], "prefill")]
        chunks += [([token], "decode") for token in (5, 9, 2)]
        for tokens, phase in chunks:
            kv_pass = one_pass(kv, cache, len(tokens), phase)
            logits.append(network.logits(network.layers(network.embed(mx.array([tokens])), kv_pass)))
            kv_pass.advance()
            mx.eval(logits[-1], kv_pass.arrays)
    return logits


def test_prompt_chunks_do_not_change_bits_with_an_adapter(tmp_path: Path) -> None:
    base = _model(tmp_path)
    write_adapter(tmp_path / "adapter", base)
    network = _network(_quantized(tmp_path, base), tmp_path / "adapter")
    whole = _rows(network, [PROMPT])
    assert mx.array_equal(_rows(network, [PROMPT[:11], PROMPT[11:]]), whole)


def _rows(network: Decoder, chunks: list[list[int]]) -> mx.array:
    """Return the last layer's output of every token, fed in these chunks."""
    kv = network.kv_backend(KVOptions(64))
    cache = kv.acquire([0])
    parts = []
    for chunk in chunks:
        kv_pass = one_pass(kv, cache, len(chunk), "prefill")
        parts.append(network.layers(network.embed(mx.array([chunk])), kv_pass))
        kv_pass.advance()
        mx.eval(parts[-1], kv_pass.arrays)
    return mx.concatenate(parts, axis=1)


def test_a_step_counts_the_adapters_bytes(tmp_path: Path) -> None:
    base = _model(tmp_path)
    write_adapter(tmp_path / "adapter", base)
    quantized = _quantized(tmp_path, base)
    plain = _network(quantized).cost
    adapted = _network(quantized, tmp_path / "adapter").cost
    added = adapted.step_bytes(10) - plain.step_bytes(10)
    if native.status().available:  # each rank has a scale in float32, and matrices have no rows of other modules
        adapter = open_adapter(tmp_path / "adapter")
        assert added == adapter.nbytes + 4 * RANK * len(adapter.modules)
    assert added > 0
    assert adapted.step_flops(10) > plain.step_flops(10)


def test_every_loop_reads_the_adapter(tmp_path: Path) -> None:
    added = []
    for loops in (1, 2):
        folder = tmp_path / str(loops)
        base = write_mlx_lm_model(folder / "base", {**config_of("nanbeige"), "num_loops": loops})
        write_byte_tokenizer(base)
        write_adapter(folder / "adapter", base)
        quantized = _quantized(folder, base)
        plain = _network(quantized).cost
        adapted = _network(quantized, folder / "adapter").cost
        added.append((adapted.weight_bytes - plain.weight_bytes, adapted.weight_flops - plain.weight_flops))
    [(nbytes, flops), twice] = added
    assert twice == (2 * nbytes, 2 * flops)


def test_kv_keys_differ_by_adapter(tmp_path: Path) -> None:
    base = _model(tmp_path)
    write_adapter(tmp_path / "a", base)
    write_adapter(tmp_path / "b", base)
    network = _network(base)
    keys = {kv_key(base, network, open_adapter(tmp_path / name)) for name in "ab"}
    keys.add(kv_key(base, network))
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"alpha_pattern": {"(?:a|b)*": 3}}, "alpha_pattern"),
        ({"alpha_pattern": {"\\q": 3}}, "alpha_pattern"),
        ({"alpha_pattern": {"a" * (1 << 20): 3}}, "alpha_pattern"),
    ],
)
def test_an_adapter_that_does_more_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    write_adapter(tmp_path / "adapter", _model(tmp_path), settings=settings)
    with pytest.raises(HeadraceError, match=named):
        open_adapter(tmp_path / "adapter")


def test_patterns_that_take_hours_to_match_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", _model(tmp_path), settings={"alpha_pattern": dict.fromkeys(_names(4000), 8)})
    names = [f"base_model.model.{module}.lora_{factor}.weight" for module in _names(400) for factor in "AB"]
    one = mx.zeros((1, 1), mx.float16)
    mx.save_safetensors(str(tmp_path / "adapter" / "adapter_model.safetensors"), dict.fromkeys(names, one))
    with pytest.raises(UnsupportedModelError, match="alpha_pattern") as error:
        open_adapter(tmp_path / "adapter")
    assert "merge the adapter" in str(error.value.hint)


def _names(count: int) -> list[str]:
    return [f"layers.{number}.q_proj" for number in range(count)]


@pytest.mark.parametrize("settings", [{"lora_alpha": 1e300}, {}])
def test_factors_that_are_no_numbers_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    base = _model(tmp_path)
    size = 0.05 if settings else float("nan")
    write_adapter(tmp_path / "adapter", base, settings=settings, size=size)
    with pytest.raises(CheckpointError, match="adapter has factors that are infinite or no numbers"):
        _network(base, tmp_path / "adapter")


def test_scales_follow_the_config(tmp_path: Path) -> None:
    settings = {"lora_alpha": 8, "use_rslora": True, "alpha_pattern": {"q_proj": 2}}
    write_adapter(tmp_path / "adapter", _model(tmp_path), settings=settings)
    modules = open_adapter(tmp_path / "adapter").modules
    assert modules["model.layers.0.self_attn.q_proj"].scale == 1.0  # 2 / sqrt(4)
    assert modules["model.layers.0.self_attn.k_proj"].scale == 4.0


@pytest.mark.parametrize("inputs_first", [False, True])
def test_adapters_of_gpt2_change_outputs_by_inputs(tmp_path: Path, inputs_first: bool) -> None:
    """GPT-2's own checkpoints store matrices as inputs by outputs, and PEFT says so; its factors are as of others."""
    base = _model(tmp_path, "gpt2")
    modules = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    changes = write_adapter(tmp_path / "adapter", base, modules=modules, settings={"fan_in_fan_out": inputs_first})
    merged = _model_of(write_merged(tmp_path / "merged", base, changes))
    if inputs_first:
        weights = mx.load(str(base / "model.safetensors"))
        assert isinstance(weights, dict)
        turned = {
            name: array.T if name.removesuffix(".weight").endswith(modules) else array
            for name, array in weights.items()
        }
        mx.save_safetensors(str(base / "turned"), {name: mx.contiguous(array) for name, array in turned.items()})
        (base / "turned.safetensors").rename(base / "model.safetensors")
    with_adapter = _logits(_network(base, tmp_path / "adapter"))
    assert _distance(with_adapter, _logits(_network(merged))) < 1e-5
    assert _distance(with_adapter, _logits(_network(base))) > 0.05


def test_no_adapter_changes_weights_that_are_multiplied(tmp_path: Path) -> None:
    base = _model(tmp_path, "falcon-h1")
    write_adapter(tmp_path / "adapter", base, modules=("self_attn.q_proj",))
    with pytest.raises(UnsupportedModelError, match="no adapter to falcon_h1"):
        _network(base, tmp_path / "adapter")


def test_another_models_adapter_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", _model(tmp_path))
    phi = _model_of(write_model(tmp_path / "phi", "phi3"))
    with pytest.raises(UnsupportedModelError, match=r"changes model\.layers\.0\.mlp\.gate_proj") as caught:
        _network(phi, tmp_path / "adapter")
    assert caught.value.hint == "it was made for org/base"
    small = _model_of(write_model(tmp_path / "small", "llama", changes={"intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"changes model\.layers\.0\.mlp\.\w+ as a matrix of"):
        _network(small, tmp_path / "adapter")


def test_adapter_changes_of_another_tower_are_refused(tmp_path: Path) -> None:
    base = _model(tmp_path)
    write_adapter(tmp_path / "adapter", base, rename=lambda module: module.replace("model.", "model.vision_tower.", 1))
    with pytest.raises(UnsupportedModelError, match="vision_tower"):
        _network(base, tmp_path / "adapter")
    write_adapter(tmp_path / "text", base, rename=lambda module: module.replace("model.", "model.language_model.", 1))
    assert _distance(_logits(_network(base, tmp_path / "text")), _logits(_network(base))) > 0.05


def test_changes_of_a_norm_are_refused(tmp_path: Path) -> None:
    base = _model(tmp_path)
    write_adapter(
        tmp_path / "adapter",
        base,
        modules=("self_attn.o_proj",),
        rename=lambda module: module.replace("self_attn.o_proj", "input_layernorm"),
    )
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.input_layernorm, to which headrace applies no"):
        _network(base, tmp_path / "adapter")


def test_changes_of_a_router_are_applied_and_those_of_experts_refused(tmp_path: Path) -> None:
    base = _model(tmp_path, "qwen3-moe")
    write_adapter(tmp_path / "router", base, modules=("mlp.gate",))
    network = _network(base, tmp_path / "router")
    assert _distance(_logits(network), _logits(_network(base))) > 0
    write_adapter(
        tmp_path / "experts",
        base,
        modules=("mlp.gate",),
        rename=lambda module: module.replace("mlp.gate", "mlp.experts.0.up_proj"),
    )
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.up_proj"):
        _network(base, tmp_path / "experts")


def test_changes_of_a_quantized_router_are_refused(tmp_path: Path) -> None:
    """Experts are one operation, to which factors next to a router would not be added."""
    base = _model(tmp_path, "qwen3-moe")
    write_adapter(tmp_path / "router", base, modules=("mlp.gate",))
    quantized = _quantized(tmp_path, base)
    with pytest.raises(UnsupportedModelError, match="changes a quantized router"):
        _network(quantized, tmp_path / "router")
