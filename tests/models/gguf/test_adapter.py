"""LoRA adapters in GGUF files: the logits of merged weights, and refusals of what is not applied."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.models.loading.load import load_resolved
from headrace.models.network.decoder import Decoder
from headrace.models.registry.resolve import resolve
from headrace.models.registry.store import Store
from headrace.runtime.errors import HeadraceError, UnsupportedModelError
from tests.support.adapters import logits_after
from tests.support.gguf_models import write_adapter, write_gguf
from tests.support.tiny import write_model

LLAMA_CPP: dict[str, Any] = json.loads(Path(__file__).with_name("llama_cpp.json").read_text())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return Store()


def logits(name: str, store: Store) -> np.ndarray:
    network = load_resolved(resolve(name, store=store), context=64).network
    assert isinstance(network, Decoder)
    return np.array(logits_after(network, LLAMA_CPP["prompt"])).reshape(-1)


@pytest.mark.parametrize("variant", LLAMA_CPP["adapters"])
def test_an_adapter_gives_llama_cpps_logits(variant: str, tmp_path: Path, store: Store) -> None:
    base = write_gguf(tmp_path / "base.gguf", variant)
    adapter = write_adapter(tmp_path / "lora.gguf", variant)
    ours = logits(f"{base}+{adapter}", store)
    theirs = np.array(LLAMA_CPP["adapters"][variant])
    assert np.abs(ours[:: LLAMA_CPP["every"]] - theirs).max() < 1e-3 * np.abs(theirs).max()
    plain = np.array(LLAMA_CPP["logits"][variant])
    assert np.abs(plain - theirs).max() > 0.1 * np.abs(theirs).max()


def test_an_adapter_is_converted_once_for_each_base(tmp_path: Path, store: Store) -> None:
    base = write_gguf(tmp_path / "base.gguf", "llama")
    adapter = write_adapter(tmp_path / "lora.gguf", "llama")
    model = resolve(f"{base}+{adapter}", store=store)
    assert model.name.endswith("+lora.gguf")
    assert model.adapter is not None
    made = model.adapter.file.stat().st_mtime_ns
    assert resolve(f"{base}+{adapter}", store=store).adapter == model.adapter
    assert model.adapter.file.stat().st_mtime_ns == made
    other = write_gguf(tmp_path / "other.gguf", "llama", seed=1)
    assert resolve(f"{other}+{adapter}", store=store).adapter != model.adapter
    assert len(list(model.adapter.path.parent.iterdir())) == 2


def test_converted_adapters_that_are_not_used_are_deleted(tmp_path: Path, store: Store) -> None:
    base = write_gguf(tmp_path / "base.gguf", "llama")
    folders = []
    for name in "abc":
        adapter = resolve(f"{base}+{write_adapter(tmp_path / f'{name}.gguf', 'llama')}", store=store).adapter
        assert adapter is not None
        folders.append(adapter.path)
        os.utime(adapter.path, (0, 0))
        if name == "b":
            resolve(f"{base}+{tmp_path / 'b.gguf'}", store=store)
    assert [folder.is_dir() for folder in folders] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen3"}, "adapter for 'qwen3', the base is 'llama'"),
        ({"kind": "control_vector"}, "of type 'control_vector'"),
        ({"tensors": {"blk.9.attn_q.weight": (64, 64)}}, "changes blk.9.attn_q.weight, which base.gguf does not have"),
        ({"tensors": {"token_embd.weight": (900, 64)}}, "changes token_embd.weight"),
        ({"tensors": {"blk.0.attn_q.weight": (128, 64)}}, "as a matrix of 128 x 64, the base has 64 x 64"),
        ({"tensors": {"blk.0.attn_q.weight": (32, 64)}}, "as a matrix of 32 x 64, the base has 64 x 64"),
        ({"extra": {"blk.0.attn_norm.weight": (64,)}}, "attn_norm.weight, which is no low-rank factor"),
        ({"extra": {"blk.0.attn_q.weight.lora_c": (64, 4)}}, "lora_c, which is no low-rank factor"),
        ({"extra": {"output.weight.lora_a": (4, 64)}}, "one factor of output.weight is missing"),
        ({"invoked": True}, "that certain tokens invoke"),
    ],
)
def test_adapters_that_do_more_are_refused(changes: dict[str, Any], message: str, tmp_path: Path, store: Store) -> None:
    base = write_gguf(tmp_path / "base.gguf", "llama")
    adapter = write_adapter(tmp_path / "lora.gguf", "llama", **changes)
    with pytest.raises(HeadraceError, match=message):
        resolve(f"{base}+{adapter}", store=store)


def test_a_file_that_is_alone_or_no_adapter_is_named(tmp_path: Path, store: Store) -> None:
    base = write_gguf(tmp_path / "base.gguf", "llama")
    adapter = write_adapter(tmp_path / "lora.gguf", "llama")
    with pytest.raises(HeadraceError, match=r"lora\.gguf is an adapter") as caught:
        resolve(str(adapter), store=store)
    assert caught.value.hint == "pass it after its base: BASE.gguf+lora.gguf"
    with pytest.raises(HeadraceError, match=r"base\.gguf is a model, not an adapter"):
        resolve(f"{base}+{base}", store=store)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{write_gguf(tmp_path / 'base.gguf', 'llama')}+{write_adapter(tmp_path / 'lora.gguf', 'llama')}"

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[write] Unable to write 8 bytes to file.")

    monkeypatch.setattr("mlx.core.save_safetensors", fail)
    with pytest.raises(HeadraceError, match=r"adapters cannot be written: writing failed; the disk may be full"):
        resolve(name, store=store)
    folder = tmp_path / "home" / "cache"
    assert list((folder / "adapters").iterdir()) == []
    (folder / "adapters").rmdir()
    (folder / "adapters").write_text("")
    with pytest.raises(HeadraceError, match="adapters cannot be written"):
        resolve(name, store=store)


def test_an_adapter_wants_its_base_in_a_gguf_file(tmp_path: Path, store: Store) -> None:
    folder = write_model(tmp_path / "folder", "llama")
    adapter = write_adapter(tmp_path / "lora.gguf", "llama")
    with pytest.raises(UnsupportedModelError, match="changes a model in a GGUF file"):
        resolve(f"{folder}+{adapter}", store=store)
