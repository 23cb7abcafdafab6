"""The copy that some .gguf files need in the store: announced with its size, and asked for on a terminal."""

import sys

import click

from headrace.app.cli.say import say
from headrace.app.output.sanitise import sanitise
from headrace.runtime.errors import HeadraceError, UsageError
from headrace.runtime.metrics.units import format_bytes

_ELSEWHERE = "HEADRACE_HOME=DIR puts the store somewhere else"


def agree_to_copy(name: str | None, *, quiet: bool = False, ask: bool = True, chat: bool = False) -> None:
    """Announce the copy of the .gguf file `name`; on a terminal ask for it first. Most models need none.

    ask: whether to ask at all. chat: refuse a file without a chat template. Raises UsageError then, HeadraceError for
    "no" and for a full disk, and the errors of reading the file.
    """
    from headrace.models.registry.adapters import split_adapter
    from headrace.models.registry.resolve import find_source
    from headrace.models.registry.source import LocalGGUF
    from headrace.models.registry.store import Store

    store = Store()
    try:
        name = name if name is None else split_adapter(name)[0]
        source = find_source(name, store) if name is not None else None
    except HeadraceError:  # reported when the model is loaded
        return
    if name is None or not isinstance(source, LocalGGUF):
        return
    from headrace.app.chat.download_plan import download_plan
    from headrace.app.output.progress import drawn_progress
    from headrace.models.registry.import_gguf import find_copy, has_chat_template

    if find_copy(source.path, store) is not None:
        return
    if chat and not has_chat_template(source.path):
        raise UsageError("this model has no chat template", hint="give it plain text with --raw")
    plan = download_plan(name)
    if plan is None:
        return
    with drawn_progress(quiet=quiet) as progress:
        if find_copy(source.path, store, progress=progress) is not None:
            return
    size = format_bytes(plan.bytes or 0)
    free = format_bytes(plan.free_bytes)
    if not plan.fits:
        raise HeadraceError(f"{plan.name}: its copy in the store takes {size}, and {free} are free", _ELSEWHERE)
    if ask and sys.stdin.isatty() and sys.stderr.isatty():
        question = f"Copy {plan.name} into the store ({size}; {free} are free)?"
        if not click.confirm(sanitise(question), default=True, err=True):
            raise HeadraceError(f"{plan.name} was not copied, so it cannot run", _ELSEWHERE)
    elif not quiet:
        say(f"copying {plan.name} into the store: {size}; `headrace rm {name}` removes the copy", err=True)
