"""docs/workarounds.md lists every workaround of another project's fault, and nothing that is gone."""

import re
from pathlib import Path

from headrace.models.mlx_lm.fixes import FIXES

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/workarounds.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
ENTRY = re.compile(r"^- `([\w/.]+)`:(.*(?:\n  .*)*)", re.MULTILINE)


def test_listed_modules_are_those_that_name_the_page() -> None:
    listed = {path for path, _ in ENTRY.findall(TEXT)}
    naming = {
        path.relative_to(ROOT).as_posix()
        for folder in ("app", "models", "runtime")
        for path in (ROOT / folder).rglob("*.py")
        if PAGE in path.read_text(encoding="utf-8") and path.name != "__init__.py"
    }
    overrides = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "app/tui/textual_overrides").glob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == naming | overrides


def test_every_entry_names_its_upstream_reference_and_its_end() -> None:
    entries = ENTRY.findall(TEXT)
    assert entries
    for path, about in entries:
        assert re.search(r"Upstream: .*([\w.-]+/[\w.-]+#\d+|no issue found|per row)", about, re.IGNORECASE), path
        assert "Goes: " in about, path


def test_listed_classes_of_mlx_lm_are_those_with_a_fix() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", TEXT, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == FIXES.keys()
