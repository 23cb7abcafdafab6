"""`headrace doctor`: machine, bandwidth, software and problems, on one screen or as JSON.

Exit code 1 if something is broken. `app.cli.doctor.diagnosis` gathers the facts; this module prints them.

Guard: tests/app/cli/test_doctor.py.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from headrace.app.cli.completion import files
from headrace.app.cli.decorators import json_option
from headrace.app.cli.doctor.diagnosis import DoctorReport, Finding, findings, gather
from headrace.app.cli.model_options import named_model_option
from headrace.app.cli.say import print_json
from headrace.app.output.progress import drawn_progress
from headrace.app.output.sanitise import sanitise
from headrace.app.output.tables import Column, print_apart, print_lines
from headrace.app.output.terminal import can_redraw, console, table_width
from headrace.app.versions import NOT_INSTALLED
from headrace.runtime.errors import UsageError
from headrace.runtime.machine.hardware_text import core_kinds
from headrace.runtime.machine.peaks import RECENT_DAYS
from headrace.runtime.metrics.units import format_bytes, format_rate, percent

if TYPE_CHECKING:
    from rich.text import Text

# Instruction sets that matter to the CPU kernels, by Linux flag; the first hit of a group is shown.
_ISA_GROUPS = (
    (("avx512f", "AVX-512"), ("avx2", "AVX2")),
    (("avx512_vnni", "VNNI"), ("avx_vnni", "VNNI")),
    (("avx512_bf16", "BF16"), ("bf16", "BF16")),
    (("amx_tile", "AMX"),),
    (("sve2", "SVE2"), ("sve", "SVE"), ("asimd", "NEON")),
    (("i8mm", "I8MM"), ("asimddp", "DOTPROD")),
)
_STYLES = {"broken": "bold red", "advice": "bold yellow"}  # of problems, by severity
_BAR = 24  # columns
_LABEL = 12  # columns of a row's label

Rows = list[tuple[str, str]]


@click.command()
@json_option
@click.option(
    "--hosts",
    metavar="FILE|NAME,...",
    shell_complete=files,
    help="Check of the machines for `run --hosts`, and no other.",
)
@named_model_option("With --hosts: model that they must have.")
@click.option("--calibrate", is_flag=True, help="New measurement of the memory bandwidth (about a second).")
def doctor(as_json: bool, calibrate: bool, hosts: str | None, model: str | None) -> None:
    """Show this machine's hardware, software and folders, and any problems. Exit code 1 if something is broken."""
    if hosts is not None:
        doctor_hosts(hosts, model, as_json=as_json)
        return
    if model is not None:
        raise UsageError("-m needs --hosts")
    with drawn_progress(quiet=not can_redraw(sys.stderr)) as progress:
        report = gather(calibrate, lambda _done: progress("measuring memory bandwidth", 0, None))
    problems = findings(report)
    if as_json:
        print_json(document(report, problems))
    else:
        print_lines(report_lines(sections(report), problems, table_width(sys.stdout)))
    if any(finding.severity == "broken" for finding in problems):
        raise SystemExit(1)


def sections(report: DoctorReport) -> list[tuple[str, Rows]]:
    """Return the report as titled rows of (label, text)."""
    titled = [
        ("Machine", _machine_rows(report)),
        ("Memory bandwidth", _bandwidth_rows(report)),
        ("Kernels", list(report.kernels.items()) or [("kernels", "unknown")]),
        ("Software", _software_rows(report)),
        ("Places", _folder_rows(report)),
    ]
    if report.user_files:
        titled.append(("Your files", list(report.user_files.items())))
    return titled


def document(report: DoctorReport, problems: list[Finding]) -> dict[str, object]:
    """Return the report as JSON types: sizes in bytes, rates in GB/s (1e9), unknown is null."""
    machine: dict[str, object] | None = None
    nominal: dict[str, object] | None = None
    memory: dict[str, object] | None = None
    measured: dict[str, object] | None = None
    if host := report.machine:
        machine = {**asdict(host), "isa": sorted(host.isa), "gpu_cores": host.gpu_cores}
    if chip := report.chip:
        nominal = {"gb_s": chip.bandwidth / 1e9, "source": chip.source, "note": chip.note}
    if budget := report.budget:
        memory = {**asdict(budget), "usable": budget.usable}
    if peak := report.peak:
        measured = {**asdict(peak), "gb_s": peak.gb_s}
    model_path = report.default_model.path
    return {
        "ok": all(finding.severity != "broken" for finding in problems),
        "machine": machine,
        "core_kinds": core_kinds(report.system),
        "os": report.os_name,
        "memory": memory,
        "swap_used_bytes": report.swap_used,
        "measured_peak": measured,
        "nominal_peak": nominal,
        "power": asdict(report.power),
        "energy_parts": report.energy_parts,
        "kernels": report.kernels,
        "versions": report.versions,
        "paths": {folder.name: {**asdict(folder), "path": str(folder.path)} for folder in report.folders},
        "user_files": report.user_files,
        "default_model": {"name": report.default_model.name, "path": model_path and str(model_path)},
        "problems": [asdict(finding) for finding in problems],
    }


def _machine_rows(report: DoctorReport) -> Rows:
    host = report.machine
    if host is None:
        return [("system", report.os_name)]
    cores = f"{host.physical_cores} cores"
    if kinds := core_kinds(report.system):
        cores += f" ({', '.join(f'{count} {kind.lower()}' for kind, count in kinds.items())})"
    if host.usable_cores < host.physical_cores:
        cores += f", {host.usable_cores} of them usable here"
    if host.gpu_cores:
        cores += f", {host.gpu_cores} GPU cores"
    backend = {"metal": "Metal", "cuda": "CUDA", "cpu": "CPU"}[host.backend]
    if host.backend == "cuda":  # a device of its own, next to the CPU
        rows = [("device", host.device_name), ("backend", backend), ("cpu", f"{host.cpu}, {cores}")]
    else:
        rows = [("device", f"{host.device_name}, {cores}"), ("backend", backend)]
    if isa := _isa(host.isa):
        rows.append(("instructions", isa))
    if host.memory_bytes:
        rows.append(("memory", format_bytes(host.memory_bytes)))
    if limit := report.budget:
        share = f"{limit.source} {format_bytes(limit.free)}, less a reserve"
        rows.append(("for models", f"{format_bytes(limit.usable)}  ({share})"))
    if report.power.battery_percent is not None:
        source = "mains"
        if report.power.on_battery:
            source = "battery"
        rows.append(("power", f"{source}, {percent(report.power.battery_percent / 100)}"))
    if report.power.thermal_pressure:
        rows.append(("heat", f"{report.power.thermal_pressure} thermal pressure"))
    energy = "no readable counter"
    if report.energy_parts:
        energy = f"read for {report.energy_parts}"
    return [*rows, ("energy", energy), ("system", report.os_name)]


def _bandwidth_rows(report: DoctorReport) -> Rows:
    rows: Rows = []
    chip = report.chip
    if peak := report.peak:
        when = f"{peak.measured_at[:10]} {peak.measured_at[11:16]} UTC"
        rows.append(("measured", f"{format_rate(peak.bytes_per_second)}  ({peak.method}; {when})"))
        rows.append(("", f"fastest of the last {RECENT_DAYS} days"))
        rows.append(("range", f"median {format_rate(peak.median)}, best {format_rate(peak.best)}"))
    else:
        rows.append(("measured", "never"))
    if chip is None:
        return [*rows, ("nominal", "not in the chip table")]
    rows.append(("nominal", format_rate(chip.bandwidth)))
    if peak:
        share = peak.bytes_per_second / chip.bandwidth
        filled = min(_BAR, round(share * _BAR))
        rows.append(("", f"{'━' * filled}{'╌' * (_BAR - filled)}  {percent(share)} of nominal"))
    if chip.note:
        rows.append(("note", chip.note))
    return rows


def _software_rows(report: DoctorReport) -> Rows:
    named = [f"{name.replace('_', '-')} {version or 'missing'}" for name, version in report.versions.items()]
    headrace = report.versions.get("headrace") or NOT_INSTALLED
    others = [text for text in named if not text.startswith("headrace ")]
    # Python leads `versions`, then `diagnosis.PACKAGES` in their order: MLX, mlx-lm, and the rest.
    return [("headrace", headrace), ("runs on", ", ".join(others[:3])), ("with", ", ".join(others[3:]))]


def _folder_rows(report: DoctorReport) -> Rows:
    model = report.default_model
    state = "fetched on first use"
    if model.path is not None:
        state = "installed"
    rows = [("default", f"{model.name}, {state}")]
    for folder in report.folders:
        line = _shorten(folder.path)
        if not folder.writable:
            line += ", not writable"
        elif folder.free_bytes is not None:
            line += f", {format_bytes(folder.free_bytes)} free"
        rows.append((folder.name, line))
    return rows


def report_lines(titled: list[tuple[str, Rows]], problems: list[Finding], width: int | None) -> list["Text"]:
    """Return the report as lines of at most `width` cells; None: not folded."""
    from rich.text import Text

    lines: list[Text] = []
    for title, rows in titled:
        lines.append(Text(title, style="bold cyan"))
        for label, value in rows:
            lines += _hanging(f"  {label:<{_LABEL}}  ", "dim", value, width)
        lines.append(Text())
    return [*lines, *finding_lines(problems, width)]


def finding_lines(problems: list[Finding], width: int | None) -> list["Text"]:
    """Return each problem and its remedy, or that there is none. width: as for `report_lines`."""
    from rich.text import Text

    lines: list[Text] = []
    for finding in problems:
        lines += _hanging(f"{finding.severity}: ", _STYLES[finding.severity], finding.what, width)
        lines += _hanging("  -> ", "dim", finding.do, width)
    return lines or [Text("No problems found.", style="bold green")]


def _hanging(head: str, style: str, text: str, width: int | None) -> list["Text"]:
    """Return a text after a head in this style, and its other lines below the first."""
    from rich.cells import cell_len
    from rich.text import Text

    parts = [text]
    indent = cell_len(head)
    if width is not None:
        safe = sanitise(text)  # before the cells are counted: a control character becomes several
        # In a single column rich would drop a wide character (docs/workarounds.md).
        room = max(2, width - indent)
        parts = [part.plain for part in Text(safe).wrap(console(), room)] or [""]
    lines = [Text.assemble((head, style), parts[0]), *(Text(" " * indent + part) for part in parts[1:])]
    for line in lines:
        line.rstrip()
    return lines


def _isa(flags: frozenset[str]) -> str:
    hits = (next((name for flag, name in group if flag in flags), None) for group in _ISA_GROUPS)
    return ", ".join(name for name in hits if name)


def _shorten(path: object) -> str:
    text = str(path)
    home = os.path.expanduser("~")  # noqa: PTH111
    if home == "/" or not text.startswith(f"{home}/"):
        return text
    return f"~{text.removeprefix(home)}"


def doctor_hosts(hosts: str, model: str | None, *, as_json: bool) -> None:
    """Check the machines and print the result. Exits with 1 if something is broken. Raises UsageError."""
    from headrace.app.hosts.examine import examine
    from headrace.app.hosts.hostfile import read_hosts
    from headrace.models.registry.resolve import resolve

    read = read_hosts(hosts)
    resolved = None
    if model is not None:
        resolved = resolve(model, fetch=False)
    with drawn_progress(quiet=not can_redraw(sys.stderr)) as progress:
        progress(f"asking {len(read.hosts)} machines", 0, None)
        document = examine(read, resolved)
    if as_json:
        print_json(document)
    else:
        _show_hosts(document)
    if not document["ok"]:
        raise SystemExit(1)


def _show_hosts(document: dict[str, Any]) -> None:
    rows = document["hosts"]
    print_apart(
        Column("rank", [str(row["rank"]) for row in rows]),
        Column("host", [row["name"] for row in rows], right=False, least=8),
        Column("address", [row["address"] for row in rows], leaves=5, right=False),
        Column("headrace", [row["headrace"] or "–" for row in rows], right=False),
        Column("MLX", [row["mlx"] or "–" for row in rows], leaves=4, right=False),
        Column("device", [row["device"] or "–" for row in rows], leaves=6, right=False),
        Column("for models", [format_bytes(row["usable_memory_bytes"]) for row in rows], leaves=2),
        Column("model", [{True: "yes", False: "no", None: ""}[row["model"]] for row in rows], leaves=1),
        Column("latency", [_figure(row["latency_us"], "{:,.0f} us") for row in rows]),
        Column("bandwidth", [_figure(row["bandwidth_gb_s"], "{:.2f} GB/s") for row in rows]),
        Column("RDMA", [row["rdma"] or "" for row in rows], leaves=3, right=False),
        Column("clock", [_figure(row["clock_offset_s"], "{:+.1f} s") for row in rows], leaves=7),
    )
    problems = [Finding(**problem) for problem in document["problems"]]
    print_lines(finding_lines(problems, table_width(sys.stdout)))


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
