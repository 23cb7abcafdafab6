"""Hosts of a run: a hostfile of mlx.launch, or names that ssh reaches.

The first host is this machine, rank 0. `read_hosts` refuses anything that would fail later on another machine;
docs/hosts.md describes the file.

Guard: tests/app/hosts/test_hostfile.py.
"""

import ipaddress
import json
import re
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from headrace.runtime.config.typed import typed
from headrace.runtime.errors import UsageError

RING = "ring"
JACCL = "jaccl"
JACCL_RING = "jaccl-ring"
NCCL = "nccl"
_BACKENDS = (RING, JACCL, JACCL_RING, NCCL)
_FORM = 'a hostfile looks like [{"ssh": "mac1", "ips": ["10.0.0.1"]}, {"ssh": "mac2", "ips": ["10.0.0.2"]}]'
_NAMES = "names are separated by commas: localhost,mac2"
_OWN_ENVS = ("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_WORLD_SIZE")  # of each start
_LONGEST_NAME = 255  # characters, as in DNS
# NAME=VALUE without control characters: `HF_HOME=/data/hf`.
_ENV = re.compile(r"[A-Za-z_]\w*=[^\x00-\x1f\x7f\ud800-\udfff]*\Z", re.ASCII)
_LOCAL = ("localhost", "127.0.0.1", "::1")
MAX_HOSTS = 64
"""Hosts of one run."""
Device = str | tuple[str, ...] | None
"""RDMA device, or several, towards another rank; None: none."""


class _HostRow(Struct, forbid_unknown_fields=True):
    """A host of a hostfile, as MLX writes them; see `Host`."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[Device, ...] = ()
    python: str | None = None


class _HostfileDocument(Struct, forbid_unknown_fields=True):
    """A hostfile. It may be the list of hosts alone."""

    hosts: tuple[_HostRow, ...]
    backend: str | None = None
    envs: tuple[str, ...] = ()


class Host(Struct, frozen=True):
    """One rank's machine.

    rank: from 0, which is this machine.
    ssh: the name that ssh takes.
    ips: its addresses; ranks connect over the first.
    rdma: its device towards each rank, for JACCL.
    python: its interpreter; None: the path of this one.
    """

    rank: int
    ssh: str
    ips: tuple[str, ...]
    rdma: tuple[Device, ...] = ()
    python: str | None = None

    @property
    def local(self) -> bool:
        """Return whether its rank is started without ssh."""
        return self.rank == 0 or self.ssh in _LOCAL

    @property
    def address(self) -> str:
        return self.ips[0]

    @property
    def name(self) -> str:
        """Return how messages call it; ranks of one machine are told apart."""
        return f"rank {self.rank} ({self.ssh})"


class Hosts(Struct, frozen=True):
    """All ranks.

    hosts: in the order of ranks.
    backend: of MLX's collectives, one of `_BACKENDS`.
    envs: environment variables of each, NAME=VALUE.
    """

    hosts: tuple[Host, ...]
    backend: str = RING
    envs: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    @property
    def local_ranks(self) -> int:
        """Return how many ranks this machine has."""
        return sum(host.local for host in self.hosts)


def read_hosts(text: str) -> Hosts:
    """Return the hosts of a file, or of names with commas. Raises UsageError that names the fault."""
    read = _read(text)
    backend = read.backend or RING
    if backend not in _BACKENDS:
        raise UsageError(f"--hosts: {backend!r} is no backend here", f"use one of {', '.join(_BACKENDS)}")
    if not 2 <= len(read.hosts) <= MAX_HOSTS:
        raise UsageError(f"--hosts: {len(read.hosts)} hosts, where 2 to {MAX_HOSTS} are needed", _FORM)
    hosts = [_checked(rank, row) for rank, row in enumerate(read.hosts)]
    _check_rdma(backend, hosts)
    if not all(map(_ENV.match, read.envs)):
        raise UsageError("--hosts: envs must be a list of NAME=VALUE in printable characters", _FORM)
    own_env = next((name for name in _OWN_ENVS if any(env.startswith(f"{name}=") for env in read.envs)), None)
    if own_env is not None:
        raise UsageError(f"--hosts: envs has {own_env}, which every start sets itself", "leave it out")
    if not is_here(hosts[0].ssh):
        raise UsageError(
            f"--hosts: the first host must be this machine, not {hosts[0].ssh}", "put localhost or its own name first"
        )
    hosts = _addressed(hosts)
    if backend == RING:
        _check_ring(hosts)
    return Hosts(tuple(hosts), backend, read.envs)


def is_here(name: str) -> bool:
    """Return whether a host's name is this machine's: its own, or an address of its interfaces."""
    import psutil

    host_name = socket.gethostname()
    if name in (*_LOCAL, host_name, host_name.split(".")[0], f"{host_name.split('.')[0]}.local"):
        return True
    return any(address.address == name for addresses in psutil.net_if_addrs().values() for address in addresses)


def _file(text: str) -> Path | None:
    """Return the hostfile of this name, if there is one."""
    with suppress(OSError, RuntimeError):  # a name that is too long; a ~ of no user
        path = Path(text).expanduser()
        if path.is_file():
            return path
    return None


def _read(text: str) -> _HostfileDocument:
    """Return the content of the hostfile of this name, or hosts by their names. Raises UsageError."""
    path = _file(text)
    if path is None and "," not in text:
        raise UsageError(f"--hosts: no such hostfile: {text:.200}", f"or {_NAMES}")
    if path is None:
        return _HostfileDocument(tuple(_HostRow(name.strip(), _ips_of(name.strip())) for name in text.split(",")))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--hosts: {path} is not JSON: {error}", _FORM) from error
    except OSError as error:
        raise UsageError(f"--hosts: {error}", _FORM) from error
    if isinstance(document, list):
        document = {"hosts": document}
    try:
        return typed(_HostfileDocument, document)
    except ValueError as error:
        raise UsageError(f"--hosts: {path}: {error}", _FORM) from None


def _ips_of(name: str) -> tuple[str, ...]:
    """Return the name itself if it is an address."""
    with suppress(ValueError):
        return (str(ipaddress.ip_address(name)),)
    return ()


def _checked(rank: int, row: _HostRow) -> Host:
    """Return the host of a row. Raises UsageError."""
    ssh = row.ssh
    if not ssh.strip() or ssh.startswith("-") or not ssh.isprintable():
        raise UsageError(f"--hosts: {ssh!r:.60} is no host", _FORM)
    if len(ssh) > _LONGEST_NAME:
        raise UsageError(f"--hosts: {ssh[:60]}... is no host: a name of {len(ssh):,} characters", _FORM)
    if row.python is not None and not (row.python and row.python.isprintable()):
        raise UsageError(f"--hosts: {ssh}: python must be the path of an interpreter", _FORM)
    return Host(rank, ssh, tuple(_address(ssh, ip) for ip in row.ips), row.rdma, row.python)


def _address(ssh: str, text: str) -> str:
    """Return an address as others connect to it. Raises UsageError."""
    try:
        address = ipaddress.ip_address(text.strip())
        if not address.is_unspecified and not address.is_multicast:
            return str(address)
    except ValueError:
        pass
    raise UsageError(f"--hosts: {ssh}: {text!r:.60} is no machine's IP address", "headrace chooses ports itself")


def _check_ring(hosts: Sequence[Host]) -> None:
    """Raise UsageError for addresses that MLX's ring does not take."""
    if ip := next((ip for host in hosts for ip in host.ips if ":" in ip), None):
        raise UsageError(f"--hosts: MLX's ring takes no IPv6 address such as {ip}", "name an IPv4 address")
    if odd := next((host for host in hosts if len(host.ips) != len(hosts[0].ips)), None):
        raise UsageError(
            f"--hosts: {odd.name} has {len(odd.ips)} ips and {hosts[0].name} {len(hosts[0].ips)}",
            "MLX's ring needs as many of each host",
        )


def _check_rdma(backend: str, hosts: Sequence[Host]) -> None:
    """Raise UsageError for devices that do not match the hosts; JACCL's ring needs those of neighbours only."""
    if backend not in (JACCL, JACCL_RING):
        return
    count = len(hosts)
    for host in hosts:
        others = {rank for rank in range(count) if rank != host.rank}
        if backend == JACCL_RING:
            others &= {(host.rank - 1) % count, (host.rank + 1) % count}
        if len(host.rdma) != count or any(host.rdma[rank] is None for rank in others):
            raise UsageError(
                f"--hosts: {host.ssh} has no RDMA device for each other host",
                "`mlx.distributed_config --backend jaccl --over thunderbolt` writes such a hostfile",
            )


def _addressed(hosts: list[Host]) -> list[Host]:
    """Return hosts with addresses: those of the file, or else of their names as this machine resolves them."""
    addressed = [host if host.ips else replace(host, ips=(_resolved(host),)) for host in hosts]
    others = [host for host in addressed if not host.local]
    if not others:
        return addressed
    own_address = _own_address(others[0].address)
    for index, host in enumerate(addressed):
        if ipaddress.ip_address(host.address).is_loopback:  # other machines cannot reach it
            addressed[index] = replace(host, ips=(own_address,))
    return addressed


def _resolved(host: Host) -> str:
    if host.ssh in _LOCAL:
        return "127.0.0.1"
    name = _ssh_hostname(host.ssh)
    try:
        first, *_ = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        *_, (address, *_) = first
        return str(address)
    except (OSError, UnicodeError):
        if host.rank == 0:
            return "127.0.0.1"
        raise UsageError(
            f"--hosts: {name:.100} has no address here", "use another name for it, or a hostfile with its ips"
        ) from None


def _ssh_hostname(name: str) -> str:
    """Return the name that ssh connects to, which its configuration may set."""
    try:
        shown = subprocess.run(
            ["ssh", "-G", "--", name], capture_output=True, text=True, timeout=5.0, check=False
        ).stdout
    except FileNotFoundError:
        raise UsageError("--hosts: ssh is not installed here", "it starts the ranks of other machines") from None
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    hosts = (line.partition(" ")[2] for line in shown.splitlines() if line.startswith("hostname "))
    return next(hosts, name.rpartition("@")[2])


def _own_address(other: str) -> str:
    """Return this machine's address on the way to another one."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))  # sends nothing
        except OSError as error:
            raise UsageError(f"--hosts: no way to {other}: {error}", "check the network") from error
        return str(probe.getsockname()[0])
