"""Start of all ranks of a run: processes, checks of versions and copies, links, and the split.

Nothing of a model is read before every rank has the same versions and the same copy of it.

Order, in `start_ranks`: read the hosts, listen, start a process for each other rank, check their reports, measure their
links, choose the split, then `go`: the ranks connect. After that a lost rank ends the run (`Ranks._lost`).

Guards: tests/app/hosts/test_start.py and test_kills.py.
"""

import atexit
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import mlx.core as mx

from headrace.app.config.load_options import HostsChoice
from headrace.app.hosts.facts import Facts, give_files, machine_facts, model_digest, own_versions
from headrace.app.hosts.hostfile import JACCL, JACCL_RING, NCCL, Host, Hosts, read_hosts
from headrace.app.hosts.probe import LinkSpeed, measure_link
from headrace.app.hosts.processes import AT_ONCE_S, END_S, RankProcess, end_all
from headrace.app.hosts.split_choice import chosen_split
from headrace.app.output.sanitise import sanitise
from headrace.models.registry.resolve import ResolvedModel
from headrace.runtime.config import environment
from headrace.runtime.errors import EngineError, HeadraceError, UsageError
from headrace.runtime.machine.hardware import machine
from headrace.runtime.metrics.units import format_link, percent
from headrace.runtime.ops import native
from headrace.runtime.ranks.leader import Leader, listen
from headrace.runtime.ranks.peer_connection import RankLostError, Reception
from headrace.runtime.ranks.split import Split

START_S = 60.0  # for a process to report; silence ends the start earlier
_CONNECT_S = 10.0  # for all ranks to connect: to the probe of links, then to the control channel
_POLL_S = 0.5  # between two looks at the processes
_PORTS = (20_000, 60_000)  # from which other machines' ports are drawn
_FAST_SYNCH = "MLX_METAL_FAST_SYNCH=1"  # MLX advises it for RDMA

Say = Callable[[RankLostError], None]


class Ranks:
    """Running ranks: rank 0's control channel, and the processes of the others.

    processes: of the ranks from 1 on.
    reports: by rank, rank 0's first.
    links: by rank, measured before the model is loaded.
    split: None until it is chosen.
    leader: the control channel.
    """

    def __init__(self, hosts: Hosts, say: Say) -> None:
        self.hosts = hosts
        self.processes: list[RankProcess] = []
        self.reports: list[Facts] = []
        self.links: dict[int, LinkSpeed] = {}
        self.split: Split | None = None
        self._say = say
        self._key = secrets.token_bytes(32)
        self._listener = _listener(hosts.hosts[0])
        self.leader = Leader(self._listener, self._key, hosts.names, self._lost)
        self._closing = threading.Lock()
        self._closed = False

    def start(self, model: Facts | None, *, examine: bool = False) -> None:
        """Start the other ranks and check their reports. model: see `model_facts`; its digest is rank 0's.

        examine: for `doctor`: ranks run no model, and nothing is refused. Raises HeadraceError.
        """
        env, files = self._environment()
        threads = self._threads()  # of ranks on this machine
        with listen(self.hosts.hosts[0].address) as probe:
            address = None  # ranks that are only examined connect to nothing
            if not examine:
                address = list(self._listener.getsockname()[:2])
            order = {"versions": own_versions(), "model": model, "key": self._key.hex(), "address": address}
            order |= {"probe": list(probe.getsockname()[:2]), "files": files}

            # All ranks start at once; then their reports are taken one after the other, within START_S in all.
            for host in self.hosts.hosts[1:]:
                process = RankProcess(host, [*env, *threads] if host.local else env)
                self.processes.append(process)
                process.send({**order, "rank": host.rank})
            self.reports = [{"versions": own_versions(), "machine": machine_facts(), "model": model}]
            until = time.monotonic() + START_S
            for process in self.processes:
                self._take_report(process, until, model, examine=examine)
            self._measure(probe, examine=examine)

    def _take_report(self, process: RankProcess, until: float, model: Facts | None, *, examine: bool) -> None:
        """Add the process's report to `reports`, and raise why its rank cannot take part, unless it is only examined.

        A rank that does not report has its error instead.
        """
        try:
            report = process.report(until)
            error = refusal(process.host, report, self.reports[0], model)
        except HeadraceError as failure:
            report = {"error": str(failure), "hint": failure.hint}
            error = failure
        if error is not None and not examine:
            raise error
        self.reports.append(report)

    def _measure(self, probe: socket.socket, *, examine: bool) -> None:
        """Measure the link to every rank that has no error. Raises HeadraceError that names one without a link."""
        # Ranks that have not connected to the probe yet.
        waiting = {p.host.rank: p for p in self.processes if measurable(self.reports[p.host.rank], self.reports[0])}
        until = time.monotonic() + _CONNECT_S
        with closing(Reception(probe, self._key)) as reception:
            while waiting:
                accepted = reception.take(_POLL_S)
                if accepted is not None:
                    rank, connection = accepted
                    with connection, suppress(OSError):
                        self.links[rank] = measure_link(connection)
                        waiting.pop(rank, None)
                    continue
                is_late = time.monotonic() > until
                for process in list(waiting.values()):
                    error = _link_error(process, probe, is_late=is_late)
                    if error is None:
                        continue
                    if not examine:
                        raise error
                    self.reports[process.host.rank]["link_error"] = str(error), error.hint
                    waiting.pop(process.host.rank)

    @property
    def backend(self) -> str:
        """MLX's name of the backend."""
        return mlx_backend(self.hosts.backend)

    def go(self) -> None:
        """Let the ranks connect to the control channel and to each other. Raises EngineError."""
        for process in self.processes:
            process.send({"go": True})
        until = time.monotonic() + _CONNECT_S
        while True:
            try:
                self.leader.accept(_POLL_S)
                return
            except RankLostError as error:
                for process in self.processes:
                    if how := process.lost():
                        raise EngineError(f"{process.host.name} {how}") from error
                if time.monotonic() > until:
                    raise

    def lines(self) -> Iterator[str]:
        """Yield a line per rank: its part of the model, and the link to it."""
        assert self.split is not None
        for host, share in zip(self.hosts.hosts, self.split.fractions, strict=True):
            part = f"{percent(share)} of {'each layer' if self.split.kind == 'tensor' else 'layers'}"
            link = self.links.get(host.rank)
            speed = ""
            if link:
                speed = f", link {format_link(link.latency_s * 1e6, link.bytes_per_second / 1e9)}"
            yield f"{host.name}: {part}{speed}"

    def close(self, grace_s: float = END_S) -> None:
        """End all ranks; a second call does nothing. grace_s: that they get to end by themselves."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with suppress(Exception):  # the connection may be broken; the processes are ended in any case
                self.leader.close()
            end_all(self.processes, grace_s=grace_s)

    def _lost(self, error: RankLostError) -> None:
        """Report a lost rank with the way it ended, and end the others. The process ends afterwards."""
        with self._closing:
            self._closed = True
            for process in self.processes:
                if error.rank not in (None, process.host.rank):
                    continue
                # A rank that is not known is any of them, so those that run cost their wait each.
                how = process.ended(_POLL_S)
                if how is not None:
                    error = RankLostError(f"{error} (it {how})", error.hint, process.host.rank)
                    break
            self._say(error)
            end_all(self.processes, grace_s=AT_ONCE_S)

    def _environment(self) -> tuple[list[str], dict[str, str]]:
        """Return the variables and files of the other ranks, and set those of rank 0."""
        env, files = self._connections()
        env += self.hosts.envs
        os.environ.update(dict(line.split("=", 1) for line in env) | {"MLX_RANK": "0"})
        give_files(files)
        return env, files

    def _threads(self) -> list[str]:
        """Divide this machine's cores among its ranks, unless told otherwise; return the others' variable."""
        if self.hosts.local_ranks < 2 or environment.threads():
            return []
        threads = max(1, machine().physical_cores // self.hosts.local_ranks)
        if native.status().available:
            native.set_threads(threads)
        return [f"{environment.THREADS}={threads}"]

    def _connections(self) -> tuple[list[str], dict[str, str]]:
        hosts = self.hosts.hosts
        backend = self.hosts.backend
        at = f"{hosts[0].address}:{free_port(hosts[0])}"
        if backend in (JACCL, JACCL_RING):
            env = [f"MLX_JACCL_COORDINATOR={at}", _FAST_SYNCH]
            if backend == JACCL_RING:
                env.append("MLX_JACCL_RING=1")
            return env, {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in hosts])}
        if backend == NCCL:
            address, _, port = at.rpartition(":")
            return [f"NCCL_HOST_IP={address}", f"NCCL_PORT={port}", f"MLX_WORLD_SIZE={len(hosts)}"], {}
        rows = [[f"{ip}:{free_port(host)}" for ip in host.ips] for host in hosts]
        return [], {"MLX_HOSTFILE": json.dumps(rows)}


def mlx_backend(backend: str) -> str:
    """Return MLX's name of a hostfile's backend."""
    return JACCL if backend == JACCL_RING else backend


def missing_backend(backend: str) -> UsageError | None:
    """Return an error if MLX on this machine does not have a backend."""
    if mx.distributed.is_available(mlx_backend(backend)):
        return None
    return UsageError(f"--hosts: MLX here has no {backend}", 'a hostfile with "backend": "ring" runs over TCP')


def refusal(host: Host, report: Facts, own_report: Facts, model: Facts | None) -> HeadraceError | None:
    """Return why a rank cannot take part, None if it can.

    report: the rank's; `rank.py` makes it.
    own_report: rank 0's, with whose versions it must agree.
    model: rank 0's copy of the model, with which the rank's must agree; None if no model is run.
    """
    if "versions" not in report:
        return EngineError(report["error"], report.get("hint"))
    for name, version in own_report["versions"].items():
        if (there := report["versions"].get(name)) != version:
            return EngineError(
                f"{host.name} has {name} {there}, this machine {version}", f"install the same {name} on both"
            )
    if "error" in report:
        return EngineError(f"{host.name}: {report['error']}", "`headrace doctor` there")
    copy = report.get("model")
    if model is None or copy is None:
        return None
    if "error" in copy:
        return EngineError(f"{host.name}: {copy['error']}", copy.get("hint"))
    if copy["digest"] != model["digest"]:
        return EngineError(
            f"{host.name} has another copy of {model['name']}: {copy['path']} differs from this machine's",
            f"`headrace models pull {model['name']}` on both, or copy the folder",
        )
    return None


def _link_error(process: RankProcess, probe: socket.socket, *, is_late: bool) -> EngineError | None:
    """Return why a rank has not connected to the probe of its link; None while it may still do so."""
    how = process.lost()
    if how is not None:
        return EngineError(f"{process.host.name} {how}")
    if not is_late:
        return None
    address, port = probe.getsockname()[:2]
    return EngineError(
        f"{process.host.name} cannot connect to this machine at {address}:{port}",
        "allow it in the firewall, or name another ip",
    )


def measurable(report: Facts, own_report: Facts) -> bool:
    """Return whether a rank answers the probe of its link."""
    return "error" not in report and report.get("versions") == own_report["versions"]


def described_model(resolved: ResolvedModel) -> Facts:
    """Return the facts by which other ranks find their copy."""
    return {
        "name": resolved.name,
        "stored_as": resolved.stored_as,
        "path": str(resolved.path),
        "digest": model_digest(resolved.path),
    }


def start_ranks(choice: HostsChoice, resolved: ResolvedModel, say: Say) -> Ranks:
    """Start all ranks for a model and divide it. They end with this process, or with `Ranks.close`.

    Raises UsageError for the hosts, EngineError that names a rank that cannot take part.
    """
    hosts = read_hosts(choice.hosts)
    if error := missing_backend(hosts.backend):
        raise error
    ranks = Ranks(hosts, say)
    atexit.register(ranks.close)
    try:
        ranks.start(described_model(resolved))
        ranks.split = chosen_split(choice.split, resolved.path, ranks.hosts, ranks.reports, list(ranks.links.values()))
        ranks.go()
    except BaseException:  # Ctrl-C, too: processes on other machines end
        ranks.close(AT_ONCE_S)
        raise
    return ranks


def say_lost(error: RankLostError) -> None:
    """Print the line of a lost rank on standard error; `app.engine.link` reads it in the log."""
    with suppress(OSError):
        start = "\n" if sys.stdout is not None and sys.stdout.isatty() else ""  # an answer may be in mid-line
        text = sanitise(f"{start}headrace: {error}\n  hint: {error.hint}")  # the error may be the other machine's
        print(text, file=sys.stderr, flush=True)


def free_port(host: Host) -> int:
    """Return a port that is free here, or for another machine a random one."""
    if not host.local:
        return secrets.SystemRandom().randrange(*_PORTS)
    with _listener(host) as listener:
        return int(listener.getsockname()[1])


def _listener(host: Host) -> socket.socket:
    try:
        return listen(host.address)
    except OSError as error:
        raise UsageError(
            f"--hosts: {host.name} cannot listen on {host.address}: {error.strerror or error}", "name its own address"
        ) from error
