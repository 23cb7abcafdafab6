"""Explanations of figures: complete, found by any name, and the same in the command, the page and the view.

`python -m tests.app.output.test_explanations` writes the page.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.app.cli.explain import explain
from headrace.app.output.explanations import FIELDS, explanation, explanations, of_section
from headrace.app.tui.decode.panel import SECTIONS
from headrace.runtime.errors import UsageError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_every_figure_is_explained_in_full() -> None:
    names = [name.casefold() for each in explanations() for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))
    for each in explanations():
        for text in (each.sentence, each.formula, each.good, each.improve):
            assert text.strip() == text
            assert text
            assert len(text) <= 120


def markdown() -> str:
    """Return docs/metrics.md."""
    lines = [
        "# Figures",
        "",
        "Every figure of the decode view, `headrace run --stats` and `headrace bench`. `headrace explain NAME` prints",
        "one entry, F1 in the decode view those on its screen. Bytes and FLOPs are computed from shapes; times and",
        "bandwidth are measured. This page is made from `assets/explain.toml`.",
    ]
    for each in explanations():
        lines += ["", f"## {each.name}", ""]
        if each.aliases:
            lines += [f"Also: {', '.join(each.aliases)}.", ""]
        lines += [each.sentence, ""]
        for field, title in FIELDS:
            lines.append(f"- {title.capitalize()}: {getattr(each, field)}")
    return "\n".join(lines) + "\n"


def test_the_metrics_page_is_generated_from_explain_toml() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "python -m tests.app.output.test_explanations"


def test_explanations_are_found_regardless_of_case_and_spaces() -> None:
    assert explanation("mbu").name == explanation("Model Bandwidth  Utilisation").name == "MBU"
    with pytest.raises(UsageError) as error:
        explanation("MBV")
    assert error.value.hint == "did you mean MBU?"
    with pytest.raises(UsageError) as error:
        explanation("\x1b[31m")
    assert "lists" in (error.value.hint or "")


def test_explain_prints_one_figure_or_all() -> None:
    listed = CliRunner().invoke(explain, [])
    assert all(each.name in listed.stdout for each in explanations())
    assert all(len(line) <= 80 for line in listed.stdout.splitlines())
    one = CliRunner().invoke(explain, ["time", "to", "first", "token", "--json"])
    document = json.loads(one.stdout)
    assert document["name"] == "TTFT"
    assert set(document) == {"name", "aliases", "sentence", "formula", "good", "improve"}
    every = json.loads(CliRunner().invoke(explain, ["--json"]).stdout)
    assert [each["name"] for each in every] == [each.name for each in explanations()]
    assert "t(first text) - t(request)" in CliRunner().invoke(explain, ["TTFT"]).stdout


def test_sections_are_those_of_the_decode_view() -> None:
    sections = {section for each in explanations() for section in each.sections}
    assert sections == {"meters", *(section.NAME for section in SECTIONS)}
    assert of_section("latency")


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
