"""GGUF files that are read where they lie: the arrays of a converted copy, and files that changed or went away."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from headrace.models.checkpoint.gguf_link import LINK_FILE
from headrace.models.checkpoint.quantization import Quantization
from headrace.models.checkpoint.safetensors import ORIGIN_FILE, Checkpoint, open_checkpoint
from headrace.models.cost.shape_sources import has_shape, shape_of_checkpoint, shape_of_gguf
from headrace.models.gguf import convert_gguf, link_gguf, parts
from headrace.models.gguf.container import open_container
from headrace.models.gguf.convert import layout_of
from headrace.models.gguf.parts import gguf_parts
from headrace.models.loading.keep_quantized import keep_quantized
from headrace.models.loading.load import load_model
from headrace.models.network.weight_arrays import loaded, weight_arrays
from headrace.models.registry.import_gguf import import_gguf, needs_copy
from headrace.models.registry.resolve import ResolvedModel, resolve
from headrace.models.registry.store import Store
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import CheckpointError, ModelNotFoundError
from tests.support.gguf_layered_models import LAYERED, write_layered
from tests.support.gguf_models import VARIANTS, gguf_weights, header, hf_weights, write_gguf
from tests.support.watched import split

LARGE = {"hidden": 256, "inner": 512, "head_dim": 64, "layers": 1}
EXACT = (
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip


def both(source: Path) -> tuple[Path, Path]:
    """The file linked, and converted."""
    made = source.with_name("linked"), source.with_name("copied")
    for directory, make in zip(made, (link_gguf, convert_gguf), strict=True):
        directory.mkdir()
        make(source, directory)
    return made


def compare(source: Path) -> None:
    linked, copied = (open_checkpoint(directory) for directory in both(source))
    compare_shapes(source, linked)
    assert linked.gguf == [linked.path / source.name]
    assert linked.config == copied.config
    ours = weight_arrays(linked)
    theirs = weight_arrays(copied)
    assert ours.keys() == theirs.keys() == linked.tensors.keys()
    for name, array in theirs.items():
        read = loaded(ours[name])
        assert (read.shape, read.nbytes) == (linked.tensors[name].shape, linked.tensors[name].nbytes), name
        if name.endswith((".scales", ".biases")):  # tiny weights may fit half precision where a type's do not
            read = read.astype(array.dtype)
        assert read.dtype == array.dtype, name
        assert mx.array_equal(read, array), name


def compare_shapes(source: Path, linked: Checkpoint) -> None:
    """The file's own headers give the costs of the linked checkpoint."""
    if has_shape(linked.config):
        ours = shape_of_gguf(open_container(source))
        assert replace(ours, source="") == replace(shape_of_checkpoint(linked), source="")


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_linked_file_has_the_arrays_of_its_copy(variant: str, tmp_path: Path) -> None:
    compare(write_gguf(tmp_path / "m.gguf", variant))


@pytest.mark.sampled(always=["gemma3n"])  # has a matrix of several chunks
@pytest.mark.parametrize("variant", LAYERED)
def test_a_linked_file_of_layers_that_differ_has_the_arrays_of_its_copy(variant: str, tmp_path: Path) -> None:
    compare(write_layered(tmp_path / "m.gguf", variant))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", EXACT)
def test_every_exact_type_is_read_in_chunks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_CHUNK", 10_000)
    path = write_gguf(tmp_path / "m.gguf", "llama", matrices=kind, **LARGE)
    assert layout_of(open_container(path)).is_exact
    compare(path)


def test_experts_in_mxfp4_are_read_as_they_are(tmp_path: Path) -> None:
    compare(write_gguf(tmp_path / "m.gguf", "gpt-oss", experts="MXFP4"))


def test_requantized_types_are_copied(tmp_path: Path) -> None:
    for kind, copied in (("Q2_K", True), ("Q3_K", True), ("Q4_K", False), ("Q6_K", False)):
        path = write_gguf(tmp_path / f"{kind}.gguf", "llama", matrices=kind, **LARGE)
        assert needs_copy(layout_of(open_container(path))) == copied


def test_answers_are_those_of_the_copy(tmp_path: Path) -> None:
    said = []
    for directory in both(write_gguf(tmp_path / "m.gguf", "qwen3", matrices="Q8_0")):
        engine = Engine(load_model(directory, name="it").network, context_limit=64)
        said.append(split(list(engine.generate(Request([1, 2, 3], max_tokens=8))))[0])
    assert said[0] == said[1]


def test_the_matrices_outside_of_layers_are_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their conversion takes most memory, which is free while no layer is there."""
    linked, _ = both(write_gguf(tmp_path / "m.gguf", "llama", matrices="Q8_0"))
    order: list[str] = []
    take = parts._Conversion.take

    def noted(conversion: Any, name: str) -> mx.array:
        order.append(name)
        return take(conversion, name)

    monkeypatch.setattr(parts._Conversion, "take", noted)
    load_model(linked, name="it")
    first_of_layers = next(index for index, name in enumerate(order) if ".layers." in name)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(order[:first_of_layers])


def test_parts_are_cut_as_arrays_are(tmp_path: Path) -> None:
    linked, _ = both(write_gguf(tmp_path / "m.gguf", "llama", matrices="Q8_0"))
    for cut in (
        lambda array: array[3:9],
        lambda array: array[..., 2:4],
        lambda array: array.swapaxes(0, 1)[1],
        lambda array: array.reshape(2, -1)[:, 5:],
    ):
        part = gguf_parts(open_checkpoint(linked))["model.layers.0.mlp.up_proj.weight"]
        whole = part.read()
        assert mx.array_equal(cut(part).read(), cut(whole))
        assert (cut(part).shape, cut(part).nbytes) == (cut(whole).shape, cut(whole).nbytes)
    joined = part[4:6].joined([part[:2]], 0)
    assert joined.shape == (4, part.shape[1])
    assert mx.array_equal(joined.read(), mx.concatenate([whole[4:6], whole[:2]]))


def test_a_plain_file_is_quantized_as_its_copy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    made = []
    for directory in both(write_gguf(tmp_path / "m.gguf", "llama", matrices="F16")):
        model = ResolvedModel(directory.name, directory, "a test")
        made.append(weight_arrays(open_checkpoint(keep_quantized(model, Quantization(4, 32)).path)))
    assert made[0].keys() == made[1].keys()
    assert all(mx.array_equal(array, made[1][name]) for name, array in made[0].items())


def test_a_scale_beyond_half_precision_is_refused(tmp_path: Path) -> None:
    writer = header(tmp_path / "m.gguf", "llama")
    for name, values in gguf_weights("llama", hf_weights("llama")).items():
        kind = gguf.GGMLQuantizationType.Q8_0
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        blocks = gguf.quants.quantize(values, kind)
        if name == "blk.0.ffn_up.weight":
            blocks[0, :2] = np.frombuffer(np.float16(600).tobytes(), np.uint8)  # its bias is -76800
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    linked, _ = both(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight .*half precision"):
        load_model(linked, name="it")
    part = gguf_parts(open_checkpoint(linked))["model.layers.0.mlp.up_proj.weight"]
    for _ in range(2):  # the arrays of the first attempt are half filled
        with pytest.raises(CheckpointError, match="half precision"):
            part.read()


def test_a_file_that_changed_or_went_away_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    file = write_gguf(tmp_path / "m.gguf", "llama")
    model = import_gguf(file, store)
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"m\.gguf has changed") as caught:
        open_checkpoint(model.path)
    assert "rm" in str(caught.value.hint)
    assert import_gguf(file, store).name == model.name  # hashed again: the same content
    open_checkpoint(model.path)
    moved = file.rename(tmp_path / "moved.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf was moved or deleted"):
        open_checkpoint(model.path)
    with pytest.raises(ModelNotFoundError) as missing:
        resolve(str(file), store=store)
    assert model.name in str(missing.value.hint)
    again = resolve(str(moved), store=store)
    assert json.loads((again.path / ORIGIN_FILE).read_text())["source"] == f"local file {moved}"
    open_checkpoint(again.path)
    twin = tmp_path / "twin.gguf"
    twin.write_bytes(moved.read_bytes())
    assert resolve(str(twin), store=store) == again  # the same content
    moved.unlink()
    open_checkpoint(resolve(str(twin), store=store).path)


def edited(directory: Path, name: str, **changes: Any) -> None:
    file = directory / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_forged_entries_are_refused(tmp_path: Path) -> None:
    linked, _ = both(write_gguf(tmp_path / "m.gguf", "llama"))
    good = (linked / ORIGIN_FILE).read_text()
    for files in (None, {}, {"../m.gguf": {}}, {"m.gguf": {"bytes": 1, "mtime_ns": 1}}):
        edited(linked, ORIGIN_FILE, gguf=files)
        with pytest.raises(CheckpointError):
            open_checkpoint(linked)
    (linked / ORIGIN_FILE).write_text(good)
    tensors = json.loads((linked / LINK_FILE).read_text())["tensors"]
    for forged in ({"dtype": "F32", "shape": [-1]}, {"dtype": "Q4", "shape": [1]}, [], {"dtype": "F32"}):
        edited(linked, LINK_FILE, tensors=tensors | {"model.norm.weight": forged})
        with pytest.raises(CheckpointError):
            open_checkpoint(linked)
    edited(linked, LINK_FILE, tensors=tensors | {"other": {"dtype": "F32", "shape": [1]}})
    with pytest.raises(CheckpointError, match="other tensors"):
        gguf_parts(open_checkpoint(linked))
