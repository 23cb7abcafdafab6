"""The random benchmark models: both files load and give the same tokens."""

from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.gguf.container import open_container
from headrace.models.loading.load import load_model
from headrace.models.registry.import_gguf import convert
from headrace.models.registry.progress import silent
from tests.bench.make_model import write_checkpoint, write_gguf
from tests.bench.shapes import TINY, TINY_MIXTURE
from tests.support.alone import new_cache


def _logits(directory: Path, tokens: list[int]) -> mx.array:
    model = load_model(directory, name="random", context=64)
    network = model.network
    cache = new_cache(network, len(tokens))
    cache.reserve(len(tokens))
    hidden = network.layers(network.embed(mx.array([tokens])), cache)
    return network.logits(hidden)


def test_checkpoint_and_gguf_hold_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_EXACT", "1")  # rounding goes by groups, and theirs differ in size
    write_checkpoint(tmp_path / "mlx", TINY)
    write_gguf(tmp_path / "tiny.gguf", TINY)
    (tmp_path / "imported").mkdir()
    convert(tmp_path / "tiny.gguf", tmp_path / "imported", silent)
    tokens = [5, 200, 17, 319, 64, 64, 1]
    ours = _logits(tmp_path / "mlx", tokens)
    theirs = _logits(tmp_path / "imported", tokens)
    assert ours.shape == (1, TINY.vocab)
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4).item()
    assert float(mx.std(ours).item()) > 0.1  # neither is all zeros


def test_a_mixture_of_experts_is_written_in_both_formats(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mlx", TINY_MIXTURE)
    assert float(mx.std(_logits(tmp_path / "mlx", [5, 200, 17, 319])).item()) > 0.1
    write_gguf(tmp_path / "tiny.gguf", TINY_MIXTURE)
    container = open_container(tmp_path / "tiny.gguf")
    assert container.tensors["blk.1.ffn_up_exps.weight"].shape == (6, 64, 128)


def test_the_tokenizer_fills_the_vocabulary(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    tokenizer = load_model(tmp_path, name="random", context=64).tokenizer
    assert tokenizer.vocab_size == TINY.vocab
    assert tokenizer.decode(tokenizer.encode("Größe 1")) == "Größe 1"
    assert len(tokenizer.eos_ids) == 1
