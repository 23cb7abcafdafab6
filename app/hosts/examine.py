"""Examination of hosts before a run: reachability, versions, copies of the model, links, RDMA, clocks, memory.

`headrace doctor --hosts` prints the document. It starts ranks as a run does, so a rank that passes here can take part.
Reports have the keys of `facts.py`, `clock_offset` (`processes.py`) and `link_error` (`start.py`); a rank that was not
reached has none of the first two.
Guard: tests/app/hosts/test_start.py.
"""

from collections.abc import Sequence
from typing import Any, Literal

from headrace.app.hosts.facts import Facts, rdma_state
from headrace.app.hosts.hostfile import JACCL, JACCL_RING, Host, Hosts
from headrace.app.hosts.probe import LinkSpeed
from headrace.app.hosts.start import Ranks, described_model, missing_backend, refusal
from headrace.models.registry.resolve import ResolvedModel
from headrace.runtime.errors import HeadraceError

_CLOCK_S = 2.0  # of difference between clocks, which confuses logs
_SLOW_S = 0.3e-3  # a latency from which tensor parallel waits longer than it computes
_LITTLE_MEMORY = 1 << 30  # bytes; less holds no part of a model worth dividing
_ASK_THERE = "`headrace doctor` there"


def examine(hosts: Hosts, model: ResolvedModel | None) -> dict[str, Any]:
    """Start a process on every host, ask it, measure its link, and end it. model: one that all must have.

    Raises UsageError and OSError for this machine's own address.
    """
    ranks = Ranks(hosts, lambda _error: None)
    described = described_model(model) if model else None
    try:
        ranks.start(described, examine=True)
    finally:
        ranks.close()
    own_report = ranks.reports[0]
    own_report["rdma"] = rdma_state()
    rows = []
    problems: list[dict[str, str]] = []
    for host, report in zip(hosts.hosts, ranks.reports, strict=True):
        link = ranks.links.get(host.rank)
        rows.append(_row(host, report, link))
        problems += _problems(host, report, own_report, described, link, hosts.backend)
    return {
        "ok": all(problem["severity"] != "broken" for problem in problems),
        "backend": hosts.backend,
        "model": model.name if model else None,
        "hosts": rows,
        "problems": problems,
    }


def _row(host: Host, report: Facts, link: LinkSpeed | None) -> dict[str, Any]:
    """Return a host's row of the document; facts that its report lacks are None."""
    machine = report.get("machine") or {}
    versions = report.get("versions") or {}
    copy = report.get("model")
    offset = report.get("clock_offset")
    if host.rank == 0:  # the clock that others are compared with
        offset = 0.0
    return {
        "rank": host.rank,
        "name": host.ssh,
        "address": host.address,
        "reached": "versions" in report,
        "headrace": versions.get("headrace"),
        "mlx": versions.get("mlx"),
        "device": machine.get("device"),
        "usable_memory_bytes": machine.get("usable_memory"),
        "model": None if copy is None else "error" not in copy,
        "latency_us": link.latency_s * 1e6 if link else None,
        "bandwidth_gb_s": link.bytes_per_second / 1e9 if link else None,
        "rdma": report.get("rdma"),
        "clock_offset_s": offset,
    }


def _problems(
    host: Host, report: Facts, own_report: Facts, model: Facts | None, link: LinkSpeed | None, backend: str
) -> Sequence[dict[str, str]]:
    """Return a host's problems, each with what to do. "broken": a run would fail.

    host: the machine.
    report: its facts.
    own_report: those of rank 0, with which others are compared.
    model: facts on the model, as rank 0 has it.
    link: between the host and rank 0.
    backend: of MLX's collectives.
    """
    problems = []

    def add(severity: Literal["broken", "advice"], problem: str, do: str) -> None:
        problems.append({"severity": severity, "what": problem, "do": do})

    error: HeadraceError | None = missing_backend(backend)  # here, on rank 0
    if host.rank:
        error = refusal(host, report, own_report, model)
    if error is not None:
        add("broken", str(error), error.hint or _ASK_THERE)
    if "link_error" in report:
        problem, hint = report["link_error"]
        add("broken", problem, hint or _ASK_THERE)
    if "machine" not in report:
        return problems
    offset = report.get("clock_offset", 0.0)
    if abs(offset) > _CLOCK_S:
        add("advice", f"{host.name}: the clock is {offset:+.0f} s off", "turn on automatic time there")
    memory = report["machine"]["usable_memory"]
    if memory is not None and memory < _LITTLE_MEMORY:
        add("advice", f"{host.name}: little memory is free for a model", "close other programs there")
    if link is not None and link.latency_s > _SLOW_S:
        slow = f"{host.name}: messages take {link.latency_s * 1e6:,.0f} us: tensor parallel will be slow"
        add("advice", slow, "use --split pipeline, a cable instead of Wi-Fi, or RDMA over Thunderbolt 5")
    if backend in (JACCL, JACCL_RING) and not str(report.get("rdma")).startswith("enabled"):
        off = f"{host.name}: RDMA is not enabled: {report.get('rdma') or 'no macOS'}"
        add("broken", off, "start in recovery, run `rdma_ctl enable` in its terminal, restart")
    return problems
