"""Files of a copy with a format for each projection: the tensors that it has, and those that stay plain."""

from itertools import cycle
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from headrace.models.checkpoint.quantization import Groups
from headrace.models.checkpoint.safetensors import Checkpoint, open_checkpoint
from headrace.models.gguf import convert_gguf, link_gguf
from headrace.models.loading import mixed_quantization
from headrace.models.loading.mixed_quantization import plain_model, write_mixed
from headrace.models.registry.progress import silent
from headrace.runtime.errors import UnsupportedModelError
from tests.parity.test_mlx_lm_families import difference, logits_of
from tests.support.gguf_layered_models import HIDDEN, LAYERED, tensors_of, write_layered
from tests.support.tiny import load_decoder

_FORMATS = (Groups(8, 32), Groups(6, 32))


def _copy(plain: Path, copy: Path) -> Checkpoint:
    """Write a copy with the formats in turn, whose bytes are those that a budget counts; return it."""
    model = plain_model(open_checkpoint(plain), "tiny")
    parts = list(zip(model.parts, cycle(_FORMATS), strict=False))
    copy.mkdir()
    write_mixed(model, parts, {}, copy, silent)
    written = open_checkpoint(copy)
    assert written.nbytes == model.other_bytes + sum(part.nbytes(groups) for part, groups in parts)
    return written


def _linked_with_head(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Link a plain GGUF whose last layer drafts tokens; its other tensors are those of the layer before."""
    architecture, keys, _ = LAYERED["qwen35"]
    tensors = tensors_of("qwen35")
    tensors |= {name.replace("blk.3.", "blk.4."): array for name, array in tensors.items() if "blk.3." in name}
    sizes = {"eh_proj": (HIDDEN, 2 * HIDDEN), "enorm": (HIDDEN,), "hnorm": (HIDDEN,), "shared_head_norm": (HIDDEN,)}
    tensors |= {f"blk.4.nextn.{name}.weight": np.ones(shape, np.float32) for name, shape in sizes.items()}
    known = {name: array.shape for name, array in tensors.items()}
    monkeypatch.setitem(LAYERED, "qwen35", (architecture, {**keys, "nextn_predict_layers": 1}, known))
    source = write_layered(directory / "m.gguf", "qwen35", tensors=tensors)
    linked = directory / "linked"
    linked.mkdir()
    link_gguf(source, linked)
    return linked


def test_a_copy_of_a_gguf_has_no_prediction_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = _linked_with_head(tmp_path, monkeypatch)
    assert any(name.startswith("mtp.") for name in open_checkpoint(linked).tensors)
    copy = _copy(linked, tmp_path / "copy")
    assert any(name.endswith(".self_attn.q_proj.scales") for name in copy.tensors)
    assert not [name for name in copy.tensors if name.startswith("mtp.")]


def _converted(directory: Path, variant: str) -> Path:
    """Convert a plain GGUF into safetensors."""
    directory.mkdir()
    convert_gguf(write_layered(directory.with_suffix(".gguf"), variant), directory)
    return directory


def test_no_file_of_a_copy_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_quantization, "_SHARD", 0)
    copy = _copy(_converted(tmp_path / "plain", "granite_swa"), tmp_path / "copy")
    assert len(copy.shards) > 1
    assert all(mx.load(str(shard)) for shard in copy.shards)


def test_a_model_without_a_class_in_mlx_lm_keeps_its_names(tmp_path: Path) -> None:
    plain = _converted(tmp_path / "plain", "granite_swa")
    copy = _copy(plain, tmp_path / "copy")
    names = {name for name in copy.tensors if not name.endswith((".scales", ".biases"))}
    assert names == open_checkpoint(plain).tensors.keys()
    assert len(names) < len(copy.tensors)
    before = logits_of(load_decoder(plain), [5, 6, 7])
    assert difference(logits_of(load_decoder(copy.path), [5, 6, 7]), before) < 0.1


@pytest.mark.parametrize("variant", ["falcon", "cohere2moe"])
def test_a_model_without_a_class_for_its_names_is_refused(tmp_path: Path, variant: str) -> None:
    plain = _converted(tmp_path / "plain", variant)
    with pytest.raises(UnsupportedModelError, match="tiny: mlx-lm has no class of it"):
        plain_model(open_checkpoint(plain), "tiny")
