"""docs/workarounds.md lists every workaround of another project's fault, and nothing that is gone."""

import re
import tomllib
from pathlib import Path

from headrace.models.mlx_lm.fixes import FIXES
from tests.support.workarounds import PAGE, workarounds

ROOT = Path(__file__).resolve().parent.parent
NAME = "docs/workarounds.md"
TEXT = PAGE.read_text(encoding="utf-8")
_CLASSES = r"(`\w+`(?:, `\w+`)*)"


def test_listed_modules_are_those_that_name_the_page() -> None:
    listed = {entry.file for entry in workarounds()}
    modules = (path for folder in ("app", "models", "runtime") for path in (ROOT / folder).rglob("*.py"))
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in (*modules, ROOT / "pyproject.toml")
        if NAME in path.read_text(encoding="utf-8") and path.name != "__init__.py"
    }
    overrides = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "app/tui/textual_overrides").glob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == naming | overrides


def test_every_entry_names_its_upstream_reference_or_that_there_is_none() -> None:
    for entry in workarounds():
        assert re.search(r"[\w.-]+/[\w.-]+#\d+|no issue (found|known)|per row", entry.upstream, re.IGNORECASE), entry


def test_the_end_of_every_entry_and_row_names_a_test_that_exists() -> None:
    rows = re.findall(rf"^\| {_CLASSES} \| .*", TEXT, re.MULTILINE)
    table = re.findall(rf"^\| {_CLASSES} \|.*\| `(tests/[\w/.]+)::(\w+)` \|$", TEXT, re.MULTILINE)
    assert len(table) == len(rows)
    named = [(file, function) for _, file, function in table]
    for entry in workarounds():
        assert entry.tests or "no test shows it" in entry.end, entry
        named += entry.tests
    for file, function in named:
        assert (ROOT / file).exists(), file
        if function:
            assert re.search(
                rf"^(?:async )?def {function}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE
            ), f"{file} has no {function}"


def test_faults_of_pinned_projects_were_seen_in_the_pinned_version() -> None:
    """A change of a pin in pyproject.toml begins with a look at the entries of that project."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    pins = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==([\d.]+)", "\n".join(dependencies), re.MULTILINE))
    assert {"textual", "msgspec", "mlx"} <= pins.keys()
    for entry in workarounds():
        assert entry.seen_in == pins.get(entry.project, entry.seen_in), entry


def test_listed_classes_of_mlx_lm_are_those_with_a_fix() -> None:
    rows = re.findall(rf"^\| {_CLASSES} \|", TEXT, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == FIXES.keys()
