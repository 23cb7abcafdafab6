"""`headrace explain`: figures of the decode view, `run --stats` and `bench`.

Guard: tests/app/output/test_explanations.py.
"""

from textwrap import fill

import click
from click.shell_completion import CompletionItem
from msgspec.structs import asdict

from headrace.app.cli.decorators import json_option
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
    if name:
        figure = explanation(" ".join(name))
        if as_json:
            print_json(_document(figure))
        else:
            say(_text(figure))
        return
    figures = explanations()
    if as_json:
        print_json([_document(figure) for figure in figures])
    else:
        width = max(len(figure.name) for figure in figures) + 2
        say("\n".join(_wrapped(f"{figure.name:<{width}}", figure.sentence) for figure in figures))


def _document(figure: Explanation) -> dict[str, object]:
    return {key: value for key, value in asdict(figure).items() if key != "sections"}


def _text(figure: Explanation) -> str:
    name = figure.name
    if figure.aliases:
        name += f" ({', '.join(figure.aliases)})"
    rows = [_wrapped(f"{title:<15}", getattr(figure, field)) for field, title in FIELDS]  # the longest title has 13
    return "\n".join([_wrapped("", name), fill(figure.sentence, _COLUMNS), *rows])


def _wrapped(label: str, text: str) -> str:
    return fill(text, _COLUMNS, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False)
