"""`headrace explain`: figures of the decode view, `run --stats` and `bench`.

Guard: tests/app/output/test_explanations.py.
"""

from dataclasses import asdict
from textwrap import fill

import click
from click.shell_completion import CompletionItem

from headrace.app.cli.model_options import json_option
from headrace.app.cli.say import print_json, say
from headrace.app.output.explanations import FIELDS, Explanation, explanation, explanations

_COLUMNS = 80  # of the wrapped text, also on wider terminals


def _names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    items = [CompletionItem(each.name, help=each.sentence) for each in explanations()]
    return [item for item in items if item.value.casefold().startswith(incomplete.casefold())]


@click.command()
@click.argument("name", nargs=-1, shell_complete=_names)
@json_option
def explain(name: tuple[str, ...], as_json: bool) -> None:
    """Explain the figure NAME: its meaning, formula and good values. Without NAME, lists the figures."""
    explained = [explanation(" ".join(name))] if name else list(explanations())
    if as_json:
        documents = [{key: value for key, value in asdict(each).items() if key != "sections"} for each in explained]
        print_json(documents[0] if name else documents)
    elif name:
        say(_text(explained[0]))
    else:
        width = max(len(each.name) for each in explained) + 2
        say("\n".join(_wrapped(f"{each.name:<{width}}", each.sentence) for each in explained))


def _text(each: Explanation) -> str:
    also = f" ({', '.join(each.aliases)})" if each.aliases else ""
    rows = [_wrapped(f"{title:<15}", getattr(each, field)) for field, title in FIELDS]  # the longest title has 13
    return "\n".join([_wrapped("", f"{each.name}{also}"), fill(each.sentence, _COLUMNS), *rows])


def _wrapped(label: str, text: str) -> str:
    return fill(text, _COLUMNS, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False)
