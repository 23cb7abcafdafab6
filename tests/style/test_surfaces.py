"""The wording of help and errors is reviewed in two files: a change of either shows up in them."""

from tests.style import surfaces


def test_help_texts_are_those_reviewed() -> None:
    assert surfaces.help_texts() == surfaces.HELP.read_text(encoding="utf-8"), "python -m tests.style.surfaces"


def test_error_texts_are_those_reviewed() -> None:
    assert surfaces.error_texts() == surfaces.ERRORS.read_text(encoding="utf-8"), "python -m tests.style.surfaces"


def test_errors_are_found() -> None:
    """The catalogue is not empty by mistake: each class that commands exit with stands in it."""
    classes = {line for line in surfaces.error_texts().splitlines() if line and not line.startswith(" ")}
    assert {"UsageError", "CheckpointError", "UnsupportedModelError", "ContextLimitError"} <= classes
