"""Opening of valid checkpoints, without heavy imports."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.runtime.errors import CheckpointError
from tests.support.checkpoints import header, shard, tensor, write


def test_describes_every_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m"))
    assert set(checkpoint.tensors) == {"a.weight", "a.scales", "b.weight"}
    info = checkpoint.tensors["a.scales"]
    assert (info.dtype, info.shape, info.nbytes, info.shard.name) == ("F16", (2, 3), 12, "model.safetensors")
    assert checkpoint.nbytes == 36
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.quantization is None
    assert checkpoint.origin is None


def test_quantization_and_origin_are_passed_on(tmp_path: Path) -> None:
    config = {"quantization": {"bits": 4, "group_size": 64, "a": {"bits": 8, "group_size": 32}}}
    (write(tmp_path, config=config) / "headrace.json").write_text('{"source": "somewhere"}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantization == config["quantization"]
    assert checkpoint.origin == {"source": "somewhere"}


def test_a_variant_next_to_the_weights_is_not_read(tmp_path: Path) -> None:
    plain = shard({"x": tensor("F32", [4], 0)}, 16)
    half = shard({"x": tensor("F16", [4], 0)}, 8)
    checkpoint = open_checkpoint(write(tmp_path, {"model.safetensors": plain, "model.fp16.safetensors": half}))
    assert [path.name for path in checkpoint.shards] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert open_checkpoint(tmp_path).tensors["x"].dtype == "F16"


def test_shards_with_index(tmp_path: Path) -> None:
    one = "model-00001-of-00002.safetensors"
    two = "model-00002-of-00002.safetensors"
    shards = {one: shard({"x": tensor("F32", [1], 0)}, 4), two: shard({"y": tensor("U8", [3], 0)}, 3)}
    checkpoint = open_checkpoint(write(tmp_path, shards, index={"weight_map": {"x": one, "y": two}}))
    assert [path.name for path in checkpoint.shards] == [one, two]
    assert checkpoint.tensors["y"].shard.name == two


def test_scalars_and_empty_tensors_have_the_right_size(tmp_path: Path) -> None:
    entries = {"empty": tensor("F32", [0, 5], 0), "scalar": tensor("F32", [], 0), "after": tensor("U8", [0], 4)}
    checkpoint = open_checkpoint(write(tmp_path, {"model.safetensors": shard(entries, 4)}))
    assert {name: info.nbytes for name, info in checkpoint.tensors.items()} == {"empty": 0, "scalar": 4, "after": 0}


def test_files_of_other_tools_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(b"not ours")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04N.")
    assert len(open_checkpoint(tmp_path).shards) == 1


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    """snapshots/<commit>/file -> ../../blobs/<etag> is how the hub keeps a model."""
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "0123abcd"
    blobs = write(repo / "blobs")
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (blobs / name).rename(blobs / f"etag-{name}")
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / f"etag-{name}")
    assert open_checkpoint(snapshot).nbytes == 36


def test_blobs_shared_between_cached_models_are_followed(tmp_path: Path) -> None:
    """blobs/<etag> may itself be a link, into the store that all models of the cache share."""
    snapshot = write(tmp_path / "models--org--name" / "snapshots" / "0123abcd")
    blobs = snapshot.parents[1] / "blobs"
    shared = tmp_path / "blobs" / "ab"
    blobs.mkdir()
    shared.mkdir(parents=True)
    (snapshot / "model.safetensors").rename(shared / "abcd")
    (blobs / "etag").symlink_to(Path("..") / ".." / "blobs" / "ab" / "abcd")
    (snapshot / "model.safetensors").symlink_to(Path("..") / ".." / "blobs" / "etag")
    assert open_checkpoint(snapshot).nbytes == 36


def test_a_link_to_the_model_directory_is_fine(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write(tmp_path / "real"))
    assert open_checkpoint(tmp_path / "link").nbytes == 36


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.int8, mx.bool_, mx.int64])
def test_checkpoints_written_by_mlx_are_read(tmp_path: Path, dtype: mx.Dtype) -> None:
    arrays = {"one": mx.zeros((3, 5), dtype), "two": mx.ones((7,), dtype)}
    write(tmp_path, {})
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    tensors = open_checkpoint(tmp_path).tensors
    assert {name: (info.shape, info.nbytes) for name, info in tensors.items()} == {
        name: (array.shape, array.nbytes) for name, array in arrays.items()
    }


def test_infinity_in_a_config_is_read(tmp_path: Path) -> None:
    config = b'{"time_step_limit": [0.0, Infinity], "model_type": "mamba2"}'
    assert open_checkpoint(write(tmp_path, config=config)).config["time_step_limit"][1] == float("inf")


def test_the_trust_flag_of_merge_tools_is_not_code(tmp_path: Path) -> None:
    assert open_checkpoint(write(tmp_path, config={"trust_remote_code": True})).tensors


def test_needs_neither_numpy_nor_mlx(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": shard(header())})
    script = (
        "import sys; from pathlib import Path; from headrace.models.checkpoint.safetensors import open_checkpoint;"
        f"open_checkpoint(Path({str(tmp_path)!r}));"
        "import json; print(json.dumps([n for n in ('numpy', 'mlx', 'safetensors', 'torch') if n in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_lone_surrogate_in_a_config_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_scaling": {"rope_type": "\\udfff\\ud800"}}')
    with pytest.raises(CheckpointError, match="surrogate"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "name": "\\ud83d\\ude00"}')
    assert open_checkpoint(tmp_path).config["name"] == "😀"


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are Unicode there")
@pytest.mark.parametrize("place", ["folder", "shard"])
def test_names_that_mlx_cannot_open_are_refused(tmp_path: Path, place: str) -> None:
    directory = write(tmp_path / ("caf\udce9" if place == "folder" else "model"))
    if place == "shard":
        (directory / "model.safetensors").rename(directory / "model\udce9.safetensors")
    with pytest.raises(CheckpointError, match="not UTF-8") as caught:
        open_checkpoint(directory)
    assert str(caught.value).isprintable()
