"""A rank of tensor parallelism reads its part of the files and holds no more than that, whatever the family."""

import mmap
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from headrace.models.checkpoint import file_parts
from headrace.models.checkpoint.arrays import read_arrays
from headrace.models.checkpoint.file_parts import FilePart
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.loading.decoder_choice import own_decoder
from headrace.models.loading.rank_part import Rank
from headrace.models.network.stacks import with_stacks
from headrace.runtime import ops
from headrace.runtime.ranks.group import Group
from headrace.runtime.ranks.split import Split
from tests.support import tiny

_WIDE = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096, "moe_intermediate_size": 512}
_WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
# Routers, norms, K/V projections of latent attention and the like are on every rank.
_FAMILIES = {"llama": 0.515, "phi3": 0.515, "qwen3-moe": 0.53, "gpt-oss": 0.53}


class _Rank(Group):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = 2


@pytest.mark.sampled
@pytest.mark.parametrize("name", _FAMILIES)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
def test_ranks_read_and_hold_half(tmp_path: Path, name: str, quantized: bool) -> None:
    path = tiny.write_model(tmp_path / "plain", name, dtype=mx.bfloat16, changes=_WIDE)
    if quantized:
        path = tiny.quantize_model(path, tmp_path / "quantized")
    checkpoint = open_checkpoint(path)
    most = _FAMILIES[name]
    whole = sum(info.nbytes for info in checkpoint.tensors.values())
    for rank in range(2):
        with patch.object(file_parts._Shard, "_advise", autospec=True) as advise:
            read, peak = _load(checkpoint, rank)
        asked = [call.args[1] for call in advise.call_args_list if call.args[2] == mmap.MADV_WILLNEED]
        assert sum(map(file_parts._span, asked)) < 0.7 * whole  # rows shorter than pages are fetched whole
        assert 0.48 * whole < read < most * whole
        assert peak < (most + 0.1) * whole  # a tensor at a time beside what stays


def _load(checkpoint: Any, rank: int) -> tuple[int, int]:
    """Return the bytes that a rank of two reads, and the most that it allocates."""
    loaded_rank = Rank(_Rank(rank), Split("tensor", (1, 1)))
    counted = list[int]()
    inner = FilePart.read

    def read(part: FilePart) -> mx.array:
        counted.append(part.nbytes)
        return inner(part)

    with patch.object(FilePart, "read", read), patch.object(file_parts, "read_arrays", return_value={}):
        sized = loaded_rank.sized(checkpoint, own_decoder(checkpoint), ops.select(), mx.bfloat16, None)
        assert not counted
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        tracemalloc.start()  # numpy's arrays
        network = sized.make()
        mx.eval(network.arrays)
        peak = mx.get_peak_memory() - before + tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return sum(counted), peak


def test_parts_of_files_are_cut_as_arrays_are(tmp_path: Path) -> None:
    oss = "model.layers.0.mlp.experts"
    fused = "model.layers.0.mlp.switch_mlp"
    tensors = {
        f"{oss}.gate_up_proj_blocks": mx.random.randint(0, 256, (3, 8, 2, 16)).astype(mx.uint8),
        f"{oss}.gate_up_proj_bias": mx.random.normal((3, 8)).astype(mx.bfloat16),
        f"{oss}.down_proj": mx.random.normal((3, 8, 6)).astype(mx.float16),
        f"{fused}.gate_up_proj": mx.random.normal((3, 6, 8)),
        f"{fused}.input_linear.weight": mx.random.normal((3, 8, 6)),
        "number": mx.array(7.5, mx.bfloat16),
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    checkpoint = open_checkpoint(tmp_path)
    parts = with_stacks(file_parts.file_parts(checkpoint))
    arrays = with_stacks(read_arrays(checkpoint))
    assert parts.keys() == arrays.keys()
    for name, part in parts.items():
        assert (part.shape, part.ndim, part.size, part.nbytes) == (
            arrays[name].shape, arrays[name].ndim, arrays[name].size, arrays[name].nbytes,
        )  # fmt: skip
        assert part.read().dtype == arrays[name].dtype
        assert mx.array_equal(part.read(), arrays[name])
        if part.ndim > 1:
            halves = part[:, 1:3].joined([part[:, :1]], 1).read()
            assert mx.array_equal(halves, mx.concatenate([arrays[name][:, 1:3], arrays[name][:, :1]], axis=1))
