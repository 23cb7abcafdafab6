"""The chip table: sourced rows, and names as drivers write them."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.machine import chips

GIB = 2**30


def test_every_row_is_sourced_and_plausible() -> None:
    assert len(chips.table()) > 60
    for chip in chips.table():
        assert chip.source.startswith("https://")
        assert 50e9 <= chip.bandwidth <= 10_000e9
        assert chip.note is None


def test_flops_of_apple_gpus_follow_from_their_cores() -> None:
    """M5: ten cores, 1,024 FLOP a cycle; before it 256."""
    for name, cores, flops in (
        ("Apple M5", 10, 10 * 1024 * 1.74e9),
        ("Apple M5", 8, 8 * 1024 * 1.74e9),
        ("Apple M4 Max", 40, 40 * 256 * 1.578e9),
    ):
        chip = chips.find(name, cores)
        assert chip is not None
        assert chip.fp16_flops == pytest.approx(flops)
    assert all(chip.fp16_flops for chip in chips.table() if chip.name.startswith("Apple"))


def test_variants_of_a_chip_differ_in_cores_or_memory() -> None:
    by_name = defaultdict(list)
    for chip in chips.table():
        by_name[chip.name.lower()].append(chip)
    for rows in by_name.values():
        variants = [
            (cores, memory) for row in rows for cores in row.gpu_cores or (None,) for memory in row.memory_gb or (None,)
        ]
        assert len(variants) == len(set(variants)), rows


@pytest.mark.parametrize(
    ("name", "cores", "gb_s"),
    [
        ("Apple M1", 7, 68.25),
        ("Apple M1 Max", 24, 400),
        ("Apple M3 Max", 30, 300),
        ("Apple M3 Max", 40, 400),
        ("Apple M4 Max", 32, 410),
        ("Apple M4 Max", 40, 546),
        ("Apple M5", 10, 153),
        ("NVIDIA H200", None, 4800),
        ("NVIDIA GeForce RTX 4090", None, 1008),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, 576),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", None, 672),
        ("NVIDIA A100-SXM4-80GB", None, 2039),
        ("NVIDIA A100 80GB PCIe", None, 1935),
        ("Tesla T4", None, 320),
    ],
)
def test_chips_are_found_by_the_names_of_drivers(name: str, cores: int | None, gb_s: float) -> None:
    chip = chips.find(name, cores)
    assert chip is not None
    assert chip.bandwidth == gb_s * 1e9
    assert chip.note is None


@pytest.mark.parametrize(
    "name", ["", "AMD EPYC", "Apple", "NVIDIA", "Apple M4 Max Pro", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"]
)
def test_unknown_names_are_unknown(name: str) -> None:
    assert chips.find(name) is None


def test_ambiguous_variants_take_the_lower_figure_with_a_note() -> None:
    chip = chips.find("Apple M4 Max")
    assert chip is not None
    assert (chip.bandwidth, chip.note) == (410e9, "variants of this chip differ: the lower figure was taken")


def test_unlisted_variants_take_the_lowest_figure_with_a_note() -> None:
    chip = chips.find("Apple M4 Max", gpu_cores=36)
    assert chip is not None
    assert chip.bandwidth == 410e9
    assert chip.note is not None


def test_memory_size_selects_the_variant() -> None:
    name = "NVIDIA GeForce RTX 3080"
    ten = chips.find(name, memory_bytes=int(9.75 * GIB))
    twelve = chips.find(name, memory_bytes=int(11.75 * GIB))
    assert ten is not None
    assert twelve is not None
    assert (ten.bandwidth, twelve.bandwidth) == (760e9, 912e9)


@given(st.text(), st.none() | st.integers(), st.none() | st.integers())
def test_looking_up_any_chip_name_never_raises(name: str, cores: int | None, memory: int | None) -> None:
    assert chips.find(name, cores, memory) is None or name


@given(st.sampled_from(chips.table()), st.none() | st.integers(1, 100), st.none() | st.integers(1, 2**40))
def test_every_listed_chip_has_a_bandwidth_under_its_name(
    chip: chips.Chip, cores: int | None, memory: int | None
) -> None:
    found = chips.find(chip.name, cores, memory)
    assert found is not None
    assert found.name == chip.name
    assert found.bandwidth <= chip.bandwidth or found.gpu_cores != chip.gpu_cores or found.memory_gb != chip.memory_gb
