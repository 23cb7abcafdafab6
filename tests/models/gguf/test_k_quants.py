"""An ordinary Q4_K_M file (Q4_K, with Q6_K for some of the matrices) is computed bit for bit as it says.

The same model is also written with every matrix in F32, as the reference dequantizer of the `gguf` package gives it:
whatever runs both has to give the same logits.
"""

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.gguf import convert_gguf
from headrace.models.loading.load import load_model
from headrace.runtime.ops import Ops, native
from tests.support.alone import new_cache
from tests.support.gguf_models import gguf_weights, header, hf_weights, random_blocks
from tests.support.kernels import FAST, Exact
from tests.support.rounding import logits_bound
from tests.support.tiny import load_decoder

SHAPE = {"hidden": 256, "inner": 512, "head_dim": 64, "layers": 2, "tied": True}
SIX = ("token_embd", "attn_v", "ffn_down")
BOUND = logits_bound(terms=512, layers=2)
PROMPT = [(7 * i * i + 3 * i + 5) % 900 for i in range(40)]
needs_native = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")


MIXTURE = {
    **SHAPE,
    "metadata": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": SHAPE["inner"]},
}


def write_q4_k_m(path: Path, variant: str = "llama", *, dequantized: bool = False) -> Path:
    shape = MIXTURE if variant == "qwen3moe" else SHAPE
    writer = header(path, variant, **shape)
    rng = np.random.default_rng(3)
    for name, values in gguf_weights(variant, hf_weights(variant, **shape), **shape).items():
        if values.ndim == 1 or "gate_inp" in name:
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType["Q6_K" if any(part in name for part in SIX) else "Q4_K"]
        blocks = random_blocks(rng, kind.name, *values.shape)
        if dequantized:
            writer.add_tensor(name, gguf.quants.dequantize(blocks, kind))
        else:
            writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(the file converted as the native kernels read it, as MLX does, and its dequantized copy)."""
    root = tmp_path_factory.mktemp("q4_k_m")
    mixed = write_q4_k_m(root / "mixed.gguf")
    plain = write_q4_k_m(root / "plain.gguf", dequantized=True)
    made = tuple(root / name for name in ("sixteen", "stock", "plain"))
    for directory, source in zip(made, (mixed, mixed, plain), strict=True):
        directory.mkdir()
        convert_gguf(source, directory, groups_of_16=lambda _, d=directory: d.name == "sixteen")
    return made[0], made[1], made[2]


def logits(directory: Path, ops: Ops = FAST) -> np.ndarray:
    """After the prompt, and after two more tokens one by one."""
    decoder = load_decoder(directory, ops)
    cache = new_cache(decoder, 64)
    cache.reserve(len(PROMPT) + 2)
    rows = []
    for piece in ([PROMPT], [[3]], [[4]]):
        x = decoder.layers(decoder.embed(mx.array(piece)), cache)
        rows.append(np.array(decoder.logits(x))[0])
    return np.stack(rows)


@needs_native
def test_q6_k_is_held_exactly_in_groups_of_16(directories: tuple[Path, Path, Path]) -> None:
    checkpoint = open_checkpoint(directories[0])
    assert checkpoint.inexact == []
    assert checkpoint.quantization is not None
    assert checkpoint.quantization["model.embed_tokens"] == {"group_size": 16, "bits": 6, "mode": "affine"}


@needs_native
def test_a_q4_k_m_file_gives_the_logits_of_its_dequantized_weights(directories: tuple[Path, Path, Path]) -> None:
    """Embedding rows are copied: equal in every bit. Logits: only the order of additions differs."""
    mixed, plain = (load_decoder(directory, Exact()) for directory in (directories[0], directories[2]))
    tokens = mx.array([PROMPT])
    assert mx.array_equal(mixed.embed(tokens), plain.embed(tokens))
    ours = logits(directories[0], Exact())
    theirs = logits(directories[2], Exact())
    assert np.abs(ours - theirs).max() < BOUND * np.abs(theirs).max()
    rounded = logits(directories[1], Exact())  # what 8 bits in groups of 32 make of Q6_K
    assert np.abs(rounded - theirs).max() > 1e-4 * np.abs(theirs).max()


@needs_native
def test_experts_of_a_q4_k_m_file_give_the_logits_of_their_weights(tmp_path: Path) -> None:
    made = []
    for name, dequantized in (("mixed", False), ("plain", True)):
        made.append(tmp_path / name)
        made[-1].mkdir()
        convert_gguf(write_q4_k_m(tmp_path / f"{name}.gguf", "qwen3moe", dequantized=dequantized), made[-1])
    assert open_checkpoint(made[0]).inexact == []
    ours = logits(made[0], Exact())
    theirs = logits(made[1], Exact())
    assert np.abs(ours - theirs).max() < BOUND * np.abs(theirs).max()


def test_a_note_reports_requantized_groups_of_16(
    directories: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    sixteen, stock = (load_model(directory, name="it") for directory in directories[:2])
    assert [("groups of 16" in note, "8 bits" in note) for note in sixteen.notes] == [(True, True)]
    assert stock.notes == ["it has 5 tensors from Q6_K of its GGUF file, requantized to 8 bits"]
    monkeypatch.delenv("HEADRACE_KERNELS")
    if native.status().available:
        assert load_model(directories[0], name="it").notes == []


@pytest.mark.peer
def test_mlx_lms_classes_get_8_bits(directories: tuple[Path, Path, Path]) -> None:
    from headrace.models.mlx_lm.network import MlxLmNetwork

    network = MlxLmNetwork(open_checkpoint(directories[0]), device=mx.DeviceType.cpu)
    cache = new_cache(network, 64).reserve(len(PROMPT))
    ours = np.array(network.logits(network.layers(mx.array([PROMPT]), cache)))[0]
    theirs = logits(directories[2])[0]
    assert np.abs(ours - theirs).max() < 0.1 * np.abs(theirs).max()
