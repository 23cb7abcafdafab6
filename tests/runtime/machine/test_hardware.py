"""`runtime.machine.hardware` on recorded machines: folders under machines/ with the files and tool outputs."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.runtime.machine import hardware
from headrace.runtime.machine.hardware import Machine
from headrace.runtime.machine.hardware_text import core_kinds

MACHINES = Path(__file__).parent / "machines"
GIB = 2**30


def reader(name: str) -> Callable[[str], str]:
    def read(path: str) -> str:
        recorded = MACHINES / name / path.lstrip("/")
        return recorded.read_text() if recorded.is_file() else ""

    return read


def runner(name: str) -> Callable[..., str]:
    def run(*command: str) -> str:
        recorded = MACHINES / name / "tools" / " ".join(command)
        return recorded.read_text() if recorded.is_file() else ""

    return run


def notified(name: str) -> Callable[[str], int | None]:
    """Return the states of notifications from recorded output of notifyutil: the name and the state."""

    def state(notification: str) -> int | None:
        return int(words[1]) if (words := runner(name)("notifyutil", "-g", notification).split()) else None

    return state


def power(name: str) -> hardware.PowerState:
    return hardware.power_state(runner(name), notified(name))


def recorded(name: str) -> Machine:
    device = json.loads((MACHINES / name / "device.json").read_text())
    uname = os.uname_result(device["uname"])
    return hardware.assemble(device["backend"], device["device_info"], reader(name), uname, device["scheduled_cpus"])


def test_a_virtual_machine_without_limits_has_all_its_memory() -> None:
    host = recorded("epyc-vm")
    assert (host.backend, host.device_name, host.cpu) == ("cpu", "AMD EPYC", "AMD EPYC")
    assert (host.physical_cores, host.usable_cores) == (2, 2)
    assert host.memory_bytes == 24684092 * 1024
    assert host.device_memory_bytes is None
    assert {"avx512f", "avx512_vnni"} <= host.isa
    assert (host.gpu_cores, host.chip, host.nominal_bandwidth) == (None, None, None)
    assert hardware.memory_available(reader("epyc-vm"), runner("epyc-vm")) == 24284924 * 1024


def test_container_limits_count_as_the_machine() -> None:
    host = recorded("ryzen-docker")
    assert host.memory_bytes == 2 * GIB
    assert (host.physical_cores, host.usable_cores) == (6, 2)  # hyper-threads folded; 1.5 CPUs granted
    # 2 GiB less what is in use, but page cache that can be dropped is not in use.
    assert hardware.memory_available(reader("ryzen-docker"), runner("ryzen-docker")) == 2 * GIB - 500_000_000
    assert hardware.swap_used(reader("ryzen-docker"), runner("ryzen-docker")) == (8388604 - 7340028) * 1024


def test_a_limit_of_an_outer_v1_group_counts() -> None:
    host = recorded("kubernetes-v1")
    assert host.memory_bytes == 4 * GIB
    assert (host.physical_cores, host.usable_cores) == (4, 3)
    assert hardware.memory_available(reader("kubernetes-v1"), runner("kubernetes-v1")) == 4 * GIB - 1_000_000_000


def test_an_arm_linux_on_a_mac_has_its_cores_and_memory() -> None:
    host = recorded("docker-on-mac")
    assert host.cpu == "Apple (Arm part 0x000)"
    assert host.device_name == host.cpu
    assert (host.physical_cores, host.usable_cores) == (8, 8)
    assert {"asimd", "i8mm"} <= host.isa
    assert host.memory_bytes == 8128476 * 1024


def test_recorded_cuda_machines_have_their_cores_memory_and_bandwidth() -> None:
    spark = recorded("dgx-spark")
    server = recorded("h200-server")
    assert spark.cpu == "Cortex-A725 + Cortex-X925"
    assert (spark.physical_cores, spark.device_memory_bytes) == (20, 128525664256)
    assert spark.nominal_bandwidth == 273e9
    assert (server.device_name, server.architecture) == ("NVIDIA H200", "sm_90")
    assert server.nominal_bandwidth == 4800e9
    assert server.gpu_cores is None


@pytest.mark.parametrize(
    ("name", "cores", "bandwidth"),
    [("macbook-m4-max", 40, 546e9), ("mac-mini-m2-pro", 16, 200e9), ("macbook-neo", 5, 60e9)],
)
def test_recorded_macs_have_their_cores_memory_and_bandwidth(
    name: str, cores: int, bandwidth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "run_tool", runner(name))
    host = recorded(name)
    assert host.backend == "metal"
    assert host.gpu_cores == cores
    assert host.nominal_bandwidth == bandwidth
    assert host.memory_bytes in (128 * GIB, 16 * GIB, 8 * GIB)
    assert host.device_memory_bytes is not None
    assert host.device_memory_bytes < host.memory_bytes
    assert host.os.startswith("macOS")


def test_a_pickled_machine_keeps_its_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat's process would run `ioreg` again, while it draws."""
    monkeypatch.setattr(hardware, "run_tool", runner("macbook-m4-max"))
    host = recorded("macbook-m4-max")
    chip = host.chip
    monkeypatch.setattr(hardware, "run_tool", lambda *_: pytest.fail("looked up again"))
    received = pickle.loads(pickle.dumps(host))
    assert received == host
    assert (received.chip, received.gpu_cores) == (chip, 40)


def test_power_swap_and_memory_of_macs_are_read() -> None:
    run = runner("macbook-m4-max")
    assert power("macbook-m4-max") == hardware.PowerState(True, 78, True, True, "heavy")
    assert power("macbook-m4-max").slows_memory
    assert hardware.swap_used(reader("macbook-m4-max"), run) == int(8478.5 * 2**20)
    pages = 2411632 + 2652917 + 132203 + 10248
    assert hardware.memory_available(reader("macbook-m4-max"), run) == pages * 16384
    assert hardware.sysctl_facts(run)["kern.osproductversion"] == "26.1"
    mini = power("mac-mini-m2-pro")  # recorded without notifications: of heat nothing is known
    assert mini == hardware.PowerState(False, None, False, None)
    neo = power("macbook-neo")
    assert neo == hardware.PowerState(False, 100, False, False, "nominal")
    assert not mini.slows_memory
    assert not neo.slows_memory
    assert core_kinds(hardware.sysctl_facts(runner("macbook-neo"))) == {"Performance": 2, "Efficiency": 4}


def test_a_mac_without_tool_output_is_unknown() -> None:
    run = runner("no such machine")
    assert power("no such machine") == hardware.PowerState(None, None, None, None)
    assert hardware.swap_used(reader("no such machine"), run) is None
    assert hardware.memory_available(reader("no such machine"), run) is None
    assert hardware.ask_gpu_cores(run) is None


def test_this_machine_has_cores_and_memory() -> None:
    host = hardware.machine()
    assert host is hardware.machine()
    assert host.device_name
    assert 1 <= host.usable_cores <= host.physical_cores
    assert host.memory_bytes is not None
    available = hardware.memory_available()
    assert available is not None
    assert 0 < available <= host.memory_bytes


def test_missing_tools_and_files_are_empty() -> None:
    assert hardware.run_tool("/no/such/tool") == ""
    assert hardware.read_file("/no/such/file") == ""
