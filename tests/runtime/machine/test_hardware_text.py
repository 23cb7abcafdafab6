"""Hardware parsers on arbitrary text: facts or None, never an exception."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.machine import hardware_text as text

PARSERS: list[Callable[[str], object]] = [
    text.cpuinfo,
    text.meminfo,
    lambda given: text.cgroup_paths(given, "memory"),
    text.cgroup_bytes,
    lambda given: text.cgroup_stat(given, "inactive_file"),
    text.cgroup_cpus,
    text.sysctl,
    text.swap_used,
    text.ioreg_gpu_cores,
    text.system_profiler_gpu_cores,
    text.power,
    text.low_power_mode,
    text.speed_limited,
    text.vm_stat_available,
]

# Fragments of the real formats, shuffled and interrupted by junk, reach further into the parsers than junk alone.
FRAGMENTS = st.sampled_from(
    [
        "processor\t: 0\n",
        "CPU implementer\t: 0x",
        "CPU part\t: zz\n",
        "physical id\t: 0\ncore id\t: ",
        "MemTotal: 99999999999999999999 kB\n",
        "0::/",
        "4:memory:/a/../..\n",
        "max 100000",
        "0 0",
        "inactive_file ",
        "Now drawing from '",
        " -InternalBattery-0 (id=1)\t999%",
        "CPU_Speed_Limit = ",
        '"gpu-core-count" = ',
        '{"SPDisplaysDataType": [{"sppci_cores": "',
        '{"SPDisplaysDataType": [{"sppci_cores": 1e999}]}',
        '"}]}',
        "vm.swapusage: total = 1.00M  used = 1e9",
        "(page size of 16384 bytes)\nPages free: ",
        "\n\n",
        "9223372036854771712",
        "²",
        "٣",
    ]
)
JUNK = st.lists(FRAGMENTS | st.text(max_size=20), max_size=12).map("".join)


@pytest.mark.sampled
@pytest.mark.parametrize("parse", PARSERS)
@given(given=JUNK)
def test_parsers_never_raise(parse: Callable[[str], object], given: str) -> None:
    parse(given)


@given(st.text())
def test_malformed_tool_output_gives_no_hardware_facts(junk: str) -> None:
    assert text.cgroup_bytes(f"x{junk}") is None
    assert text.ioreg_gpu_cores(junk.replace('"', "")) is None
    assert text.system_profiler_gpu_cores(f"]{junk}") is None


def test_an_infinite_number_of_gpu_cores_is_none() -> None:
    assert text.system_profiler_gpu_cores('{"SPDisplaysDataType": [{"sppci_cores": 1e999}]}') is None


@given(st.integers(0, 2**60 - 1))
def test_cgroup_limits_are_parsed_exactly(limit: int) -> None:
    assert text.cgroup_bytes(f"{limit}\n") == limit


def test_huge_cgroup_values_count_as_no_limit() -> None:
    assert text.cgroup_bytes("max\n") is None
    assert text.cgroup_bytes("9223372036854771712\n") is None
    assert text.cgroup_cpus("max 100000\n") is None
    assert text.cgroup_cpus("-1 100000") is None
    assert text.cgroup_cpus("50000 100000\n") == 0.5


def test_cgroup_paths_of_both_versions() -> None:
    listing = "5:cpu,cpuacct:/a\n4:memory:/b\n0::/c\n"
    assert text.cgroup_paths(listing, "memory") == ("/c", "/b")
    assert text.cgroup_paths(listing, "cpu") == ("/c", "/a")
    assert text.cgroup_paths("1:name=systemd:/\n", "memory") == (None, None)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("CPU_Speed_Limit = 100", False),
        ("CPU_Speed_Limit = 50\n", True),
        ("Note: No thermal warning level has been recorded\n", None),  # nor would it be on Apple silicon
        ("Thermal Warning Level = 1\n", True),
        ("thermal warning level: 0\n", False),
        ("", None),
    ],
)
def test_the_speed_limit_of_pmset_is_read(output: str, expected: bool | None) -> None:
    assert text.speed_limited(output) is expected


@pytest.mark.parametrize(
    ("level", "expected"), [(0, "nominal"), (1, "moderate"), (2, "heavy"), (4, "heavy"), (None, None)]
)
def test_thermal_pressure_is_read_as_a_word(level: int | None, expected: str | None) -> None:
    assert text.thermal_pressure(level) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (" lowpowermode         1\n", True),
        (" lowpowermode         0\n", False),
        (" powermode            0\n", False),  # automatic
        (" powermode            1\n", True),
        (" powermode            2\n", False),  # high power
        (" standby              1\n", None),
    ],
)
def test_low_power_mode_is_read(output: str, expected: bool | None) -> None:
    assert text.low_power_mode(output) is expected


def test_kinds_of_cores_are_counted_and_named() -> None:
    levels = {"hw.perflevel0.physicalcpu": "6", "hw.perflevel1.physicalcpu": "12"}
    assert text.core_kinds(levels) == {"Performance": 6, "Efficiency": 12}
    named = {**levels, "hw.perflevel0.name": "Super", "hw.perflevel1.name": "Performance"}
    assert text.core_kinds(named) == {"Super": 6, "Performance": 12}
    assert text.core_kinds({"hw.perflevel0.physicalcpu": "8"}) == {}
    assert text.core_kinds({}) == {}


def test_threads_of_one_core_count_once() -> None:
    block = "processor : {}\nmodel name : Xeon\nphysical id : 0\ncore id : 0\nflags : avx2\n\n"
    info = text.cpuinfo(block.format(0) + block.format(1))
    assert info == text.CpuInfo("Xeon", 1, frozenset({"avx2"}))
