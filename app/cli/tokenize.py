"""`headrace tokenize`: the tokens of a text, one a line.

Guard: tests/app/cli/test_tokenize.py.
"""

import json
import sys

import click

from headrace.app.cli.decorators import json_option
from headrace.app.cli.model_options import named_model_option
from headrace.app.cli.say import print_json, say
from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.units import counted


@click.command()
@click.argument("text", required=False)
@named_model_option("Model, as for run [HEADRACE_MODEL or settings].")
@click.option("--special", is_flag=True, help="Written-out control tokens as control tokens.")
@json_option
def tokenize(text: str | None, model: str | None, special: bool, as_json: bool) -> None:
    """Print id and text of each token of TEXT, or of piped text. Reads the tokenizer alone, no weights."""
    from headrace.app.cli.load_for_answers import resolved_model
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.models.text.tokenizer import Tokenizer

    content = _content(text)
    resolved = resolved_model(chosen_model(model, load_settings()), quiet=as_json)
    tokenizer = Tokenizer.load(resolved.path)
    ids = tokenizer.encode(content, special=special)
    rows = [{"id": token, "text": tokenizer.token_text(token)} for token in ids]
    if as_json:
        print_json({"model": resolved.name, "count": len(rows), "tokens": rows})
        return
    for row in rows:
        say(f"{row['id']:>7}  {json.dumps(row['text'], ensure_ascii=False)}")
    say(counted(len(rows), "token"), err=True)


def _content(text: str | None) -> str:
    from headrace.app.cli.run.prompt import STDIN, piped_text

    if text is not None and text != STDIN:
        return text
    if text is None and sys.stdin.isatty():
        raise UsageError("no text", 'headrace tokenize "Why is the sky blue?", or pipe text in')
    return piped_text()
