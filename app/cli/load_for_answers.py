"""Models for commands that answer: found, fetched with progress drawn, loaded, and their files checked."""

from typing import TYPE_CHECKING

from headrace.app.cli.say import say

if TYPE_CHECKING:
    from headrace.app.hosts.choice import HostsChoice
    from headrace.models.checkpoint.quantization import Quantization
    from headrace.models.loading.load import LoadedModel
    from headrace.models.registry.background_check import BackgroundCheck
    from headrace.models.registry.resolve import ResolvedModel

_CHECK_BYTES = 256 << 20  # a checksum takes a fraction of a second


def resolved_model(model: str | None, *, quiet: bool, chat: bool = False) -> "ResolvedModel":
    """Find the model's directory, fetched first if need be. Raises the errors of `agree_to_copy` and `resolve`.

    chat: see `agree_to_copy`.
    """
    from headrace.app.cli.gguf_copy import agree_to_copy
    from headrace.app.output.progress import drawn_progress
    from headrace.models.registry.resolve import resolve

    agree_to_copy(model, quiet=quiet, chat=chat)
    with drawn_progress(quiet=quiet) as progress:
        return resolve(model, progress=progress)


def load_noted(
    resolved: "ResolvedModel",
    *,
    context: int | None,
    requantize: "Quantization | None" = None,
    kv: str = "f16",
    activations: str = "16",
    force: bool,
    hosts: "HostsChoice | None" = None,
) -> "LoadedModel":
    """Load the model, and print its notes on standard error. Raises the errors of `load_model`.

    hosts: machines that share it.
    """
    from headrace.app.config.load_options import activations_choice, kv_choice
    from headrace.app.hosts.load import load_model

    loaded = load_model(
        resolved,
        hosts,
        context=context,
        requantize=requantize,
        kv=kv_choice(kv),
        activations=activations_choice(activations),
        force=force,
    )
    for note in loaded.notes:
        say(note, err=True)
    return loaded


def raise_damage(check: "BackgroundCheck") -> None:
    """Raises CheckpointError if the model's files are known to be damaged.

    A small model's files are read here, once; those of larger ones in chats, in benchmarks and by `models verify`.
    """
    if 0 < check.unread_bytes <= _CHECK_BYTES:
        check.read()
    if check.damage is not None:
        raise check.damage
