"""Checkpoints as their makers publish them, with other names than those of mlx-lm's classes."""

from pathlib import Path

import mlx.core as mx
import pytest

from headrace.runtime.ops import reference
from tests.support.alone import new_cache
from tests.support.mlx_lm_models import config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder

_STEP = (
    (".mlp.gate.gate.", ".moe.gate."), (".mlp.gate.router_bias", ".moe.router_bias"), (".mlp.switch_mlp.", ".moe."),
    (".mlp.share_expert.", ".share_expert."),
)  # fmt: skip
_NEOX = (("model.embed_out.", "embed_out."), ("model.h.", "gpt_neox.layers."), ("model.", "gpt_neox."))
_NANOCHAT = (
    ("transformer.h.", "model.layers."), ("transformer.wte.", "model.embed_tokens."),
    (".attn.c_proj.", ".self_attn.o_proj."), *((f".attn.c_{part}.", f".self_attn.{part}_proj.") for part in "qkv"),
    (".mlp.c_fc.", ".mlp.fc1."), (".mlp.c_proj.", ".mlp.fc2."),
)  # fmt: skip
_GPTJ = (("model.", "transformer."),)


def published(name: str, array: mx.array, names: tuple[tuple[str, str], ...], *, centred: bool) -> tuple[str, mx.array]:
    for converted, original in names:
        name = name.replace(converted, original)
    return name, array - 1 if centred and "norm" in name else array


@pytest.mark.parametrize(
    ("model", "names", "unread"),
    [
        ("step3.5", _STEP, ()),
        ("gpt-neox", _NEOX, (".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq")),
        ("nanochat", _NANOCHAT, ()),
        ("gptj", _GPTJ, (".attn.bias", ".attn.masked_bias")),
    ],
)
def test_published_tensors_equal_converted_ones(
    tmp_path: Path, model: str, names: tuple[tuple[str, str], ...], unread: tuple[str, ...]
) -> None:
    converted = write_mlx_lm_model(tmp_path / "converted", config_of(model))
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_bytes((converted / "config.json").read_bytes())
    arrays = mx.load(str(converted / "model.safetensors"))
    assert isinstance(arrays, dict)
    tensors = dict(published(name, array, names, centred=model == "step3.5") for name, array in arrays.items())
    layers = {name.partition("0.")[0] + "0" for name in tensors if ".0." in name}
    assert len(layers) == 1
    tensors |= {layer + end: mx.zeros((1,)) for layer in layers for end in unread}
    mx.save_safetensors(str(original / "model.safetensors"), tensors)
    logits = []
    for directory in (converted, original):
        network = load_decoder(directory, reference)
        cache = new_cache(network, 16)
        cache.reserve(5)
        logits.append(network.all_logits(network.layers(network.embed(mx.array([[1, 2, 3, 4, 5]])), cache)))
    assert mx.allclose(logits[0], logits[1], atol=1e-5).item()
