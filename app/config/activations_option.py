"""Bits of rounded activations of prompts, by their name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.models.network.activations import ActivationsChoice

ACTIVATION_NAMES = ("16", "8", "auto")


def activations_choice(name: str) -> "ActivationsChoice":
    """Return the bits for loading, or "auto". `name` is one of ACTIVATION_NAMES. Raises UsageError for others."""
    from headrace.runtime.errors import UsageError

    if name not in ACTIVATION_NAMES:
        raise UsageError(f"{name!r} is no width of activations", f"choose one of {', '.join(ACTIVATION_NAMES)}")
    return "auto" if name == "auto" else int(name)
