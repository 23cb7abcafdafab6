"""Activations in 8 bits as a choice of a network: what may have them, what changes, and what stays apart."""

from pathlib import Path
from types import ModuleType

import mlx.core as mx
import pytest

from headrace import models, runtime
from headrace.app.engine.kv_disk_cache import kv_key
from headrace.models.network.activations import with_activations
from headrace.models.network.decoder import Decoder
from headrace.runtime.engine.prefill import prefill
from headrace.runtime.errors import UsageError
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.ops import native, reference
from tests.support.tiny import load_decoder, quantize_model, write_model

needs_kernels = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")


def _made(folder: Path, variant: str, bits: int = 4) -> Path:
    plain = write_model(folder / "plain", variant)
    return quantize_model(plain, folder / "quantized") if bits else plain


def _logits(network: Decoder, prompt: int) -> list[mx.array]:
    """Return the logits of the token behind a prompt, and those of the one after that."""
    kv = network.kv_backend(KVOptions(64))
    cache = kv.acquire([0])
    for _ in prefill(network, kv, cache, [1 + i * 7 % 90 for i in range(prompt)]):
        pass
    found = []
    for token in (5, 9):
        kv_pass = one_pass(kv, cache, 1, "decode")
        found.append(network.logits(network.layers(network.embed(mx.array([[token]])), kv_pass)))
        kv_pass.advance()
        mx.eval(found[-1], kv_pass.arrays)
    return found


@needs_kernels
def test_8_bit_activations_apply_to_prompts_only(tmp_path: Path) -> None:
    plain = load_decoder(_made(tmp_path, "llama"), native)
    coarse = with_activations(plain, 8)
    assert isinstance(coarse, Decoder)
    assert (plain.activations, coarse.activations) == (16, 8)
    assert all(ours is theirs for ours, theirs in zip(coarse.arrays, plain.arrays, strict=True))
    for ours, theirs in zip(_logits(coarse, 0), _logits(plain, 0), strict=True):
        assert mx.array_equal(ours, theirs)
    for ours, theirs in zip(_logits(coarse, 30), _logits(plain, 30), strict=True):
        assert 0 < mx.abs(ours - theirs).max().item() < 0.05 * mx.abs(theirs).max().item()
    again = with_activations(coarse, 16)
    assert isinstance(again, Decoder)
    assert mx.array_equal(_logits(again, 30)[0], _logits(plain, 30)[0])


@needs_kernels
def test_kv_on_disk_is_not_shared_between_activation_widths(tmp_path: Path) -> None:
    directory = _made(tmp_path, "llama")
    plain = load_decoder(directory, native)
    assert kv_key(directory, plain) == kv_key(directory, with_activations(plain, 16))
    assert kv_key(directory, plain) != kv_key(directory, with_activations(plain, 8))


@pytest.mark.parametrize(
    ("package", "file"),
    [(runtime, "decode.py"), (models, "network/mixer.py"), (models, "mlx_lm/network.py"), (models, "gguf/convert.py")],
)
def test_kv_on_disk_is_not_shared_with_an_older_build(
    package: ModuleType, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _made(tmp_path, "llama")
    network = load_decoder(directory, reference)
    before = kv_key(directory, network)
    newer = tmp_path / "build" / file
    newer.parent.mkdir(parents=True)
    newer.touch()
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "build")])
    assert kv_key(directory, network) != before


@pytest.mark.parametrize("case", ["reference", "plain weights"])
def test_networks_without_rounded_layers_are_refused(tmp_path: Path, case: str) -> None:
    if case != "reference" and not native.status().available:
        pytest.skip("the native kernels are not built here")
    variant, bits = {"reference": ("llama", 4), "plain weights": ("llama", 0)}[case]
    network = load_decoder(_made(tmp_path, variant, bits), reference if case == "reference" else native)
    with pytest.raises(UsageError, match="8 bits"):
        with_activations(network, 8)
