"""Errors of huggingface_hub as headrace's own, with a hint for the user."""

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.models.registry.source import HubId
from headrace.runtime.errors import FetchError, HeadraceError, ModelNotFoundError

_KEPT = "run it again: complete files are kept"


def unreachable(hub: HubId) -> FetchError:
    """Return the error for a repository that is neither reachable nor cached."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return FetchError(
            f"cannot fetch {hub}: HF_HUB_OFFLINE is set, and the local cache has no complete copy",
            "unset HF_HUB_OFFLINE, or pass a local directory or .gguf file",
        )
    return FetchError(
        f"cannot fetch {hub}: the hub cannot be reached, and the local cache has no complete copy",
        "check the network (HF_ENDPOINT and proxies apply), or pass a local directory or .gguf file",
    )


def is_offline(error: Exception) -> bool:
    """Return whether there was no response at all. Matches by name: the HTTP library differs between releases."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OfflineModeIsEnabled) or "TransportError" in kinds


@contextmanager
def explained(hub: HubId) -> Iterator[None]:
    """Convert exceptions of the block to headrace's errors."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        raise explain(error, hub) from error


def explain(error: Exception, hub: HubId) -> HeadraceError:
    """Return the error to raise for one of huggingface_hub's or its HTTP library's."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return FetchError(
            f"{hub.repo} is gated: its terms have to be accepted first",
            f"accept them at https://huggingface.co/{hub.repo}, then log in (`hf auth login`) or set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{hub.repo} has no revision {hub.revision}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"the hub has no model {hub.repo}, or it is private",
            "check the spelling; for a private one log in (`hf auth login`) or set HF_TOKEN",
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or is_offline(error):
        return FetchError(f"the connection to the hub broke while fetching {hub}", _KEPT)
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        hint = "the token in use is not accepted: check HF_TOKEN" if status in {401, 403} else "try again later"
        return FetchError(f"the hub answered {status} for {hub}", hint)
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{hub} is not a name the hub allows")
    reason = "".join(character if character.isprintable() else " " for character in str(error))[:200]
    return FetchError(f"fetching {hub} failed: {reason}", _KEPT)
