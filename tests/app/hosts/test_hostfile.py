"""Hostfiles and names: what is understood, and what is refused by name."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from headrace.app.hosts import hostfile
from headrace.app.hosts.hostfile import read_hosts
from headrace.runtime.errors import UsageError
from tests.support.pages import blocks

TWO = [{"ssh": "localhost", "ips": ["127.0.0.1"]}, {"ssh": "localhost", "ips": ["127.0.0.2"]}]
LONG = ["a" * 5000, "~no-such/x", f"localhost,{'b' * 70}"]
RDMA = [[None, "rdma_en2"], ["rdma_en3", None]]


def written(folder: Path, content: Any) -> str:
    file = folder / "hosts.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_host_names_become_ranks() -> None:
    hosts = read_hosts("localhost,127.0.0.1")
    assert [(host.name, host.address, host.local) for host in hosts.hosts] == [
        ("rank 0 (localhost)", "127.0.0.1", True),
        ("rank 1 (127.0.0.1)", "127.0.0.1", True),
    ]
    assert (hosts.backend, hosts.local_ranks) == ("ring", 2)
    assert read_hosts(f"{socket.gethostname()}, localhost").hosts[0].local


def test_the_hostfile_of_the_guide_is_read(tmp_path: Path) -> None:
    [text] = blocks("docs/hosts.md", "json")
    hosts = read_hosts(written(tmp_path, text.replace("mac2", "localhost")))  # no such machine is here
    assert [host.address for host in hosts.hosts] == ["10.0.0.1", "10.0.0.2"]


def test_a_hostfile_gives_hosts_backend_and_addresses(tmp_path: Path) -> None:
    hosts = read_hosts(written(tmp_path, TWO))
    assert [host.address for host in hosts.hosts] == ["127.0.0.1", "127.0.0.2"]
    rows = [{**row, "rdma": devices} for row, devices in zip(TWO, RDMA, strict=True)]
    rows[1]["python"] = "/usr/bin/python3"
    hosts = read_hosts(written(tmp_path, {"hosts": rows, "backend": "jaccl", "envs": ["A=1"]}))
    assert (hosts.backend, hosts.envs, hosts.hosts[1].python) == ("jaccl", ("A=1",), "/usr/bin/python3")
    assert hosts.hosts[1].rdma == ("rdma_en3", None)


def test_a_hostfile_with_a_comma_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "a,b.json").write_text(json.dumps(TWO))
    assert len(read_hosts(str(tmp_path / "a,b.json")).hosts) == 2


def test_local_ranks_of_a_list_have_this_machines_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfile, "_own_address", lambda other: f"own of {other}")
    hosts = read_hosts("localhost,192.0.2.7,localhost")
    assert [host.address for host in hosts.hosts] == ["own of 192.0.2.7", "192.0.2.7", "own of 192.0.2.7"]
    assert [host.local for host in hosts.hosts] == [True, False, True]


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[]",
        "{}",
        TWO[:1],
        [{"ips": ["127.0.0.1"]}, TWO[1]],
        [TWO[0], {"ssh": "-oProxyCommand=x", "ips": ["127.0.0.2"]}],
        [TWO[0], {"ssh": "", "ips": ["127.0.0.2"]}],
        [TWO[0], {"ssh": 5, "ips": ["127.0.0.2"]}],
        [TWO[0], {"ssh": "b", "ips": ["nonsense"]}],
        [TWO[0], {"ssh": "b", "ips": "127.0.0.1"}],
        [TWO[0], {"ssh": "b", "ips": [], "python": 5}],
        [TWO[0], {"ssh": "a\nb", "ips": ["127.0.0.2"]}],
        [{"ssh": "elsewhere.invalid", "ips": ["192.0.2.7"]}, TWO[0]],
        {"hosts": TWO, "backend": "mpi"},
        {"hosts": TWO, "backend": "jaccl"},
        {"hosts": TWO, "envs": ["A"]},
        {"hosts": TWO, "envs": 5},
        {"hosts": TWO, "envs": ["=1"]},
        {"hosts": TWO, "envs": ["A B=1"]},
        {"hosts": TWO, "envs": ["A=\0"]},
        {"hosts": TWO, "envs": ["A=\ud800"]},
        {"hosts": TWO, "bakend": "ring"},
        "[" * 100_000,
        [TWO[0], {"ssh": "b", "ip": ["127.0.0.1"]}],
        [TWO[0], {"ssh": "b", "ips": [5]}],
        [TWO[0], {"ssh": "b", "ips": {"127.0.0.1": 1}}],
        [TWO[0], {"ssh": "b", "ips": ["0.0.0.0"]}],
        [TWO[0], {"ssh": "b", "ips": ["224.0.0.1"]}],
        [TWO[0], {"ssh": "localhost", "ips": ["::1"]}],
        [TWO[0], {"ssh": "b", "ips": ["127.0.0.1"], "rdma": None}],
        [TWO[0], {"ssh": "b", "ips": ["127.0.0.1"], "python": "\0"}],
        [TWO[0], {"ssh": "b" * 256, "ips": ["127.0.0.1"]}],
        [TWO[0], {"ssh": "localhost", "ips": ["127.0.0.1", "127.0.0.2"]}],
        {"hosts": TWO, "envs": ["A=1", "MLX_RANK=1"]},
    ],
)
def test_invalid_hostfiles_are_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        read_hosts(written(tmp_path, content))


@pytest.mark.parametrize(
    "text",
    [
        "nofile.json",
        "localhost",
        "localhost,",
        "localhost,no.such.host.invalid",
        "localhost,local host",
        "a" * 5000,
        "~no-such/x",
        f"localhost,{'b' * 70}",
    ],
)
def test_invalid_host_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        read_hosts(text)
