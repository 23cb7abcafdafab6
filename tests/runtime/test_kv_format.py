"""What a format says is what arrays in it take."""

import mlx.core as mx
import pytest

from headrace.runtime.kv_format import AFFINE_8, BFLOAT16, FLOAT16, FLOAT32, KVFormat, plain


@pytest.mark.parametrize("kv", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda kv: kv.name)
def test_a_block_takes_what_its_rows_do(kv: KVFormat) -> None:
    block = mx.zeros(kv.block_shape(layers=3, kv_heads=2, entries=5, head_dim=16), kv.dtype)
    assert block.nbytes == 3 * 5 * kv.row_bytes(kv_heads=2, head_dim=16)
    assert plain(kv.dtype) is kv


def test_a_group_shares_what_is_stored_once() -> None:
    data, scales, biases = mx.quantize(mx.zeros((2 * 4, 128), mx.float16), group_size=64, bits=8)
    assert AFFINE_8.row_bytes(kv_heads=4, head_dim=128) == data.nbytes + scales.nbytes + biases.nbytes
    with pytest.raises(ValueError, match="counted, not stored"):
        _ = AFFINE_8.dtype


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="not stored as int32"):
        plain(mx.int32)
