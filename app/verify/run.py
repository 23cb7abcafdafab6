"""A verification from model to document; Ctrl-C ends it with the finished checks."""

from headrace.app.output.document import Document
from headrace.app.output.progress import NumberedStages, drawn_progress
from headrace.app.verify.checks import Plan, Row, Verification
from headrace.app.verify.expectation import expectation
from headrace.app.verify.report import document
from headrace.models.loading.load import LoadedModel


def verify(loaded: LoadedModel, plan: Plan) -> Document:
    """Run all checks with progress on stderr. Raises UsageError for too short a context, and the engine's errors."""
    expected, rows, interrupted = expectation(loaded), list[Row](), False
    try:
        with drawn_progress() as progress:
            stages = NumberedStages("check", progress)
            for row in Verification(loaded, expected, plan, stages.tick).run(stages.begin):
                rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    return document(loaded, expected, plan, rows, interrupted=interrupted)
