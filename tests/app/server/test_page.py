"""`docs/server.md` lists the endpoints and the fields that the server has."""

import re
from typing import Any

from headrace.app.answer.usage import openai_usage
from headrace.app.engine.events import Done
from headrace.app.server.application import routes
from headrace.app.server.responses import ResponseForm, read_call
from headrace.runtime.engine.request import Finished
from tests.support.pages import PAGES
from tests.support.summaries import make_summary
from tests.test_house import ROOT

PAGE = PAGES["docs/server.md"]


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def first_cells(title: str) -> set[str]:
    """Return the names in the first column of a section's table."""
    cells = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def names(document: dict[str, Any], inside: str = "") -> set[str]:
    """Return the paths of a document's fields. Percentiles are one figure."""
    paths: set[str] = set()
    for name, value in document.items():
        is_object = isinstance(value, dict) and name != "itl_ms"
        paths |= names(value, f"{inside}{name}.") if is_object else {inside + name}
    return paths


def test_the_fields_of_usage_are_listed() -> None:
    usage = openai_usage([Finished("stop", make_summary())])
    assert first_cells("What an answer costs") == names(usage)


def test_the_endpoints_are_listed() -> None:
    served: Any = None
    paths = {route.path.partition("{")[0].rstrip("/") for route in routes(served)} - {""}
    assert {name.split()[-1] for name in first_cells("Endpoints")} == paths


def test_the_fields_of_requests_are_read() -> None:
    """A field is a name with an underscore in code marks; the code that reads it has it as a text."""
    files = [
        *(ROOT / "app/answer").glob("*.py"),
        *(ROOT / "app/server").glob("*.py"),
        ROOT / "models/text/chat_prompt.py",
    ]
    source = "".join(file.read_text("utf-8") for file in files)
    fields = set(re.findall(r"`([a-z]+_[a-z_]+)(?:\.[a-z]+)*`", section("Fields")))
    assert {"max_tokens", "reasoning_effort", "tool_choice"} <= fields
    assert [field for field in sorted(fields) if not re.search(rf'"{field}"|\b{field}: ', source)] == []


def test_the_responses_api_has_all_figures_of_usage() -> None:
    form = ResponseForm(read_call({"input": "hello"}), "tiny")
    end = Finished("stop", make_summary(), thinking_tokens=2)
    form.begin()
    form.take(0, Done(1, end))
    usage: Any = form.document()["usage"]
    chat = openai_usage([end])
    assert sorted(map(str, usage.values())) == sorted(map(str, chat.values()))
    assert list(usage) == [
        *("input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens", "timings"),
    ]
