"""Find, fetch and load a command's models, with progress drawn on standard error.

A command calls `resolved_model`, then `load_with_notes`, and `load_draft` for a draft model. A command whose model is
resolved elsewhere, such as in the engine's process, calls `install_file` before, so that a header is read once. `chat`
calls `agree_to_copy` alone: its first frame comes before its model.

Some .gguf files need a copy in the store. It is announced with its size, and asked for on a terminal.

Guard: tests/app/cli/test_models.py.
"""

import sys
from typing import TYPE_CHECKING

import click

from headrace.app.cli.say import say
from headrace.app.output.sanitise import sanitise
from headrace.runtime.errors import HeadraceError, UsageError
from headrace.runtime.metrics.units import format_bytes

if TYPE_CHECKING:
    from headrace.app.config.load_options import ModelSpec
    from headrace.models.loading.load import LoadedModel
    from headrace.models.registry.background_check import BackgroundCheck
    from headrace.models.registry.import_gguf import OpenedGGUF
    from headrace.models.registry.resolve import ResolvedModel
    from headrace.runtime.network import Network

_ELSEWHERE = "HEADRACE_HOME=DIR puts the store somewhere else"
_CHECK_BYTES = 256 << 20  # bytes whose checksum takes a fraction of a second


def agree_to_copy(
    name: str | None, *, quiet: bool = False, ask: bool = True, chat: bool = False, plain: bool = False
) -> "OpenedGGUF | None":
    """Announce the copy of a .gguf file; on a terminal ask for it first. Most models need none.

    name: of the model; None: the default model.
    quiet: announce nothing.
    ask: False: do not ask at all.
    chat: refuse a file without a chat template.
    plain: refuse a file that is quantized, before it is hashed.
    Returns the opened file, for `resolve`; None if its header was not read.
    Raises UsageError for such files, HeadraceError for "no" and for a full disk, and the errors of reading the file.
    """
    from headrace.models.registry.adapters import split_adapter
    from headrace.models.registry.resolve import find_source
    from headrace.models.registry.source import LocalGGUF
    from headrace.models.registry.store import Store

    if name is None:  # the default model is no local file
        return None
    store = Store()
    try:
        name, _ = split_adapter(name)
        source = find_source(name, store)
    except HeadraceError:  # reported when the model is loaded
        return None
    if not isinstance(source, LocalGGUF):
        return None
    from headrace.app.chat.download_plan import copy_plan
    from headrace.app.output.progress import drawn_progress
    from headrace.models.checkpoint.shard_header import FLOATS
    from headrace.models.registry.import_gguf import find_copy, has_chat_template, open_gguf

    if find_copy(source.path, store) is not None:  # by path, size and time: quick
        return None
    opened = open_gguf(source.path)
    if plain and any(tensor.type not in FLOATS for tensor in opened.container.tensors.values()):
        from headrace.models.loading.mixed_quantization import quantized_already  # late: imports MLX

        raise quantized_already(source.path.name)
    if chat and not has_chat_template(opened.container):
        raise UsageError("this model has no chat template", hint="give it plain text with --raw")
    plan = copy_plan(name, source.path, opened, store)
    if plan is None:  # the model runs from its file
        return opened
    # With `progress`, the content is compared, too, which may hash the whole file.
    with drawn_progress(quiet=quiet) as progress:
        if find_copy(source.path, store, progress=progress) is not None:
            return None
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
    return opened


def install_file(name: str | None, *, quiet: bool = False, ask: bool = True, plain: bool = False) -> None:
    """Install a .gguf file that the store lacks, after `agree_to_copy`. Do nothing for other models.

    Arguments: see `agree_to_copy`. Raises its errors and those of `resolve`.
    """
    from headrace.app.output.progress import drawn_progress
    from headrace.models.registry.resolve import resolve

    opened = agree_to_copy(name, quiet=quiet, ask=ask, plain=plain)
    if opened is not None:
        with drawn_progress(quiet=quiet) as progress:
            resolve(name, progress=progress, opened=opened)


def resolved_model(model: str | None, *, quiet: bool, chat: bool = False) -> "ResolvedModel":
    """Find the model's directory, fetched first if need be. Raises the errors of `agree_to_copy` and `resolve`.

    chat: see `agree_to_copy`.
    """
    from headrace.app.output.progress import drawn_progress
    from headrace.models.registry.resolve import resolve

    opened = agree_to_copy(model, quiet=quiet, chat=chat)
    with drawn_progress(quiet=quiet) as progress:
        return resolve(model, progress=progress, opened=opened)


def load_with_notes(resolved: "ResolvedModel", spec: "ModelSpec", *, quiet: bool = False) -> "LoadedModel":
    """Load the model, and print its notes on standard error. Raises the errors of `load_model`.

    Most models load in seconds: a log has no line about those.

    resolved, spec: see `load_model`.
    quiet: draw no progress.
    """
    from headrace.app.hosts.load import load_model
    from headrace.app.output.progress import LOG_S, drawn_progress

    with drawn_progress(quiet=quiet, log_after_s=LOG_S) as progress:
        loaded = load_model(resolved, spec, progress)
    for note in loaded.notes:
        say(note, err=True)
    return loaded


def load_draft(name: str | None, model: "LoadedModel", *, quiet: bool) -> "Network | None":
    """Load the network of a draft model, fetched if need be; None for no name.

    Raises UsageError for another vocabulary, and the errors of loading a model.
    """
    if name is None:
        return None
    from headrace.app.output.progress import LOG_S, drawn_progress
    from headrace.models.loading import draft

    resolved = resolved_model(name, quiet=quiet)
    with drawn_progress(quiet=quiet, log_after_s=LOG_S) as progress:
        return draft.load_draft(resolved, model, progress).network


def raise_damage(check: "BackgroundCheck") -> None:
    """Raise CheckpointError if the model's files are known to be damaged.

    A small model's files are read here, once; those of larger ones in chats, in benchmarks and by `models verify`.
    """
    if 0 < check.unread_bytes <= _CHECK_BYTES:
        check.read()
    if check.damage is not None:
        raise check.damage
