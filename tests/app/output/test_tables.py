"""Tables in narrow terminals: dropped columns, and no figure cut."""

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from headrace.app.bench.compare import compare_documents
from headrace.app.bench.show import terminal_views
from headrace.app.cli.models import models
from headrace.app.cli.predict import fit, predict
from headrace.app.cli.sessions import sessions
from headrace.app.output.tables import Column, table_lines
from headrace.app.sessions.store import SessionStore
from tests.app.bench.test_views import DOCUMENT
from tests.support.tiny import config_of

WIDTHS = (80, 60, 40)


def lines(columns: list[Column], width: int | None, **options: bool) -> list[str]:
    return [line.plain for line in table_lines(columns, width, **options)]


COLUMNS = [
    Column("name", ["one", "another"], right=False),
    Column("bar", ["━━━━━━━━━━", "━━━━"], leaves=2, right=False),
    Column("speed", ["1,234", "5"]),
    Column("detail", ["12", "3"], leaves=1),
]


def test_the_least_important_column_is_dropped_first() -> None:
    assert lines(COLUMNS, None)[0] == "name     bar         speed  detail"
    assert lines(COLUMNS, 34) == lines(COLUMNS, None)
    assert lines(COLUMNS, 33)[0] == "name     speed  detail"
    assert lines(COLUMNS, 14) == ["name     speed", "──────────────", "one      1,234", "another      5"]


def test_required_columns_move_to_a_second_line() -> None:
    assert lines(COLUMNS, 13, rule=False) == ["name", "  speed", "one", "  1,234", "another", "      5"]


def test_only_columns_marked_as_text_are_shortened() -> None:
    columns = [Column("title", ["a long title of a chat"], right=False, least=6), Column("n", ["123456789"])]
    assert lines(columns, 20, header=False) == ["a long t…  123456789"]
    assert all("123456789" in "".join(lines(columns, width)) for width in range(1, 40))


def test_a_column_without_figures_is_left_out() -> None:
    assert lines([Column("a", ["1"]), Column("b", [""], leaves=1)], None, header=False) == ["1"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run something as on a terminal of some width; its lines."""

    def shown(width: int, command: click.Command, *arguments: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("headrace.app.output.tables.table_width", lambda _: width)
        done = CliRunner().invoke(command, arguments, catch_exceptions=False)
        return str(done.stdout).splitlines()

    return shown


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))


def figures(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.]*\d|\d", text))


@pytest.mark.parametrize("width", WIDTHS)
def test_predict_shows_all_speeds_at_every_width(terminal: Any, width: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3")))
    arguments = ("-m", str(tmp_path), "--chip", "m4 max", "--chip", "rtx 4090", "--context", "0,100,200")
    document = json.loads("".join(terminal(width, predict, *arguments, "--json")))
    shown = terminal(width, predict, *arguments)
    table = [line for line in shown if "tok/s with" not in line]
    speeds = [found["expected"] for target in document["targets"] for found in target["predictions"]]
    assert all(f"{speed:,.0f}" in "\n".join(table) for speed in speeds if speed)
    first = next(index for index, line in enumerate(shown) if line.startswith("chip"))
    last = max(index for index, line in enumerate(shown) if "tok/s" in line or "@" in line)
    assert max(map(len, shown[first:last])) <= width  # sentences around the table are whole lines in a pipe
    assert "…" not in "\n".join(shown)


@pytest.mark.sampled
@pytest.mark.parametrize("width", WIDTHS)
def test_fit_chips_and_models_list_show_all_figures_at_every_width(
    terminal: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What fits follows the memory that is free: other tests must not change it between two of these tables.
    monkeypatch.setattr("headrace.app.cli.models.usable_memory", lambda: 20 << 30)
    for command, *arguments in (
        (fit, "--chip", "m2", "--memory", "8"),
        (predict, "--list-chips"),
        (models, "list"),
    ):
        shown = [line for line in terminal(width, command, *arguments) if not line.startswith(("MEMORY", "--chip"))]
        whole = terminal(400, command, *arguments)
        tables = [line for line in shown if line.startswith(("smollm2", "qwen3-4b", "M4", "RTX 5090", "  "))]
        assert max(map(len, tables)) <= width
        assert "…" not in "\n".join(shown)
        assert figures("\n".join(tables)) <= figures("\n".join(whole))
    assert any(re.search(r"smollm2-135m.*MiB", line) for line in terminal(width, models, "list"))
    assert re.search(r"RTX 5090\s+1,792", "\n".join(terminal(width, predict, "--list-chips")))


@pytest.mark.parametrize("width", WIDTHS)
def test_sessions_list_shows_ids_and_titles_at_every_width(terminal: Any, width: int) -> None:
    store = SessionStore()
    made = store.create(model="a/model")
    store.rename(made.id, "A long conversation about water mills and the channels that feed them")
    store.add(made.id, None, "user", "How does a mill wheel work?")
    store.close()
    (shown,) = terminal(width, sessions, "list")
    assert len(shown) <= width
    assert shown.startswith(made.id)
    assert "A long conver" in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_shows_ratio_and_verdict_at_every_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("headrace.app.output.tables.table_width", lambda _: width)
    comparison = compare_documents(DOCUMENT, DOCUMENT)
    terminal_views.show_comparison(comparison)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    for row in comparison.tests:
        assert f"{row.ratio:.3f}" in shown
        assert row.verdict in shown
