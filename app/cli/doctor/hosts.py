"""`headrace doctor --hosts`: a row per machine, and every problem with its remedy."""

import sys
from typing import Any

import click

from headrace.app.cli.doctor.finding import Finding, draw_finding, plain_finding
from headrace.app.cli.say import print_json
from headrace.app.output.progress import drawn_progress
from headrace.app.output.terminal import can_redraw, may_style
from headrace.runtime.metrics.units import format_bytes


def doctor_hosts(hosts: str, model: str | None, *, as_json: bool) -> None:
    """Check the machines and print the result. Exits with 1 if something is broken. Raises UsageError."""
    from headrace.app.hosts.examine import examine
    from headrace.app.hosts.hostfile import read_hosts
    from headrace.models.registry.resolve import resolve

    read = read_hosts(hosts)
    resolved = None if model is None else resolve(model, fetch=False)
    with drawn_progress(quiet=not can_redraw(sys.stderr)) as progress:
        progress(f"asking {len(read.hosts)} machines", 0, None)
        document = examine(read, resolved)
    if as_json:
        print_json(document)
    else:
        _show(document)
    if not document["ok"]:
        raise SystemExit(1)


def _show(document: dict[str, Any]) -> None:
    from headrace.app.output.tables import Column, print_table

    rows = document["hosts"]
    print_table(
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
    found = [Finding(**problem) for problem in document["problems"]]
    for finding in found:
        draw_finding(finding) if may_style(sys.stdout) else click.echo(plain_finding(finding))
    if not found:
        click.echo("No problems found.")


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
