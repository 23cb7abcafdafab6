"""K/V formats: computed sizes match real arrays."""

from fractions import Fraction

import mlx.core as mx
import pytest

from headrace.runtime.errors import UsageError
from headrace.runtime.ops import reference
from headrace.runtime.ops.kv_format import BFLOAT16, FLOAT16, FLOAT32, FORMATS, K8V4, Q4, Q8, KVFormat, kv_format, plain


@pytest.mark.parametrize("kv", [FLOAT32, BFLOAT16, *FORMATS], ids=lambda kv: kv.name)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_block_bytes_are_the_bytes_of_its_rows(kv: KVFormat, head_dim: int) -> None:
    block = mx.zeros(kv.block_shape(layers=3, kv_heads=2, entries=16, head_dim=head_dim), kv.dtype)
    assert block.nbytes == 3 * 16 * kv.row_bytes(kv_heads=2, head_dim=head_dim)
    assert kv.packed or plain(kv.dtype) is kv


@pytest.mark.parametrize(("kv", "most"), [(Q8, 0.56), (K8V4, 0.45), (Q4, 0.34)], ids=lambda it: getattr(it, "name", ""))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_relative_bytes_of_packed_formats(kv: KVFormat, most: float, head_dim: int) -> None:
    assert kv.row_bytes(1, head_dim) <= most * FLOAT16.row_bytes(1, head_dim)
    assert Fraction(kv.row_bytes(1, head_dim), 2 * head_dim) == kv.bytes_per_value


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_group_bytes_match_mlx(head_dim: int) -> None:
    coding = reference.packed_format(Q4, head_dim).keys
    codes = mx.quantize(mx.zeros((1, head_dim), mx.float16), group_size=coding.group, bits=coding.bits)
    assert coding.row_bytes(head_dim) == sum(part.nbytes for part in codes)


def test_last_part_of_a_row_is_a_group() -> None:
    assert Q8.row_bytes(1, 80) == 2 * (80 + 3 * 2)
    assert K8V4.row_bytes(1, 80) == 80 + 3 * 2 + 40 + 2 * (8 + 2)
    assert Q4.row_bytes(1, 80) == 40 + 2 * (16 + 2) + 40 + 3 * 2


@pytest.mark.parametrize(("kv", "most"), [(Q8, 0.54), (K8V4, 0.45), (Q4, 0.36)], ids=lambda it: getattr(it, "name", ""))
def test_heads_of_one_and_a_half_groups_take_little_more(kv: KVFormat, most: float) -> None:
    assert kv.row_bytes(1, 96) <= most * FLOAT16.row_bytes(1, 96)


def test_formats_are_known_by_name() -> None:
    assert [kv_format(name) for name in ("f16", "q8", "k8v4", "q4")] == list(FORMATS)
    with pytest.raises(UsageError, match="q3") as error:
        kv_format("q3")
    assert "f16, q8, k8v4, q4" in str(error.value.hint)


def test_part_shape_is_that_of_the_first_entries_of_a_block() -> None:
    assert FLOAT16.part_shape(FLOAT16.block_shape(3, 2, 128, 16), 5) == (3, 2, 2, 5, 16)
    assert Q8.part_shape(Q8.block_shape(3, 2, 128, 16), 5) == Q8.block_shape(3, 2, 128, 16)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        plain(mx.int32)
