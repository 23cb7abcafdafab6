"""Output of benchmark documents: table, JSON or another text form."""

import sys
from collections.abc import Callable, Mapping

from headrace.app.cli.say import json_text, say
from headrace.app.output.document import Document


def print_document(
    document: Document,
    form: str | None,
    table: Callable[[Document], None],
    writers: Mapping[str, Callable[[Document], str]],
) -> None:
    """Print the document. form: "table", "json" or one of `writers`; None: the table on a terminal, "md" elsewhere."""
    form = form or ("table" if sys.stdout.isatty() else "md")
    if form == "table":
        table(document)
    else:
        say({"json": json_text, **writers}[form](document))
