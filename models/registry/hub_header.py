"""Headers of hub files, read before weights are fetched: config.json, or the first bytes of a GGUF.

A model that nothing here can run is refused from its header, so that no gigabytes are fetched for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from headrace.runtime.errors import CheckpointError, FetchError, UnsupportedModelError

if TYPE_CHECKING:
    from headrace.models.gguf.container import Container

_TIMEOUT_SECONDS = 30.0


class WholeFilesError(FetchError):
    """The hub ignores ranges."""


@dataclass(frozen=True)
class HubFile:
    """A file of one commit that is read in parts. size: bytes, as the hub states them."""

    repo: str
    commit: str
    name: str
    size: int

    def read(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start`. Raises FetchError if the hub sends fewer, and the client's errors."""
        url = hf_hub_url(self.repo, self.name, revision=self.commit)
        headers = {**build_hf_headers(library_name="headrace"), "Range": f"bytes={start}-{start + count - 1}"}
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response:
            hf_raise_for_status(response)
            if response.status_code != 206 and start:  # the whole file follows
                raise WholeFilesError(f"the hub does not send parts of {self.name}")
            content = bytearray()
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) >= count:
                    break
        if len(content) < count:
            raise FetchError(f"the hub sent {len(content)} of {count} bytes of {self.name}", "run it again")
        return bytes(content[:count])


def read_gguf_header(files: Sequence[HubFile]) -> "Container":
    """Return the container of a GGUF's parts without their weights. Raises as `open_container`, and FetchError."""
    from headrace.models.gguf.container import remote_container  # late: numpy
    from headrace.models.gguf.convert import CONFIG_TENSORS

    return remote_container(files, CONFIG_TENSORS)


def check_gguf(container: "Container") -> None:
    """Raise UnsupportedModelError or CheckpointError for a GGUF that cannot be converted."""
    from headrace.models.gguf.convert import plan_of

    plan_of(container)


def check_config(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a config.json that neither headrace's decoder nor mlx-lm's classes run.

    Also raises CheckpointError for broken values. Of quantization only the method is checked.
    """
    from headrace.models.checkpoint.foreign.formats import recognise
    from headrace.models.cost.shape_sources import has_shape

    try:
        recognise(config, {})
    except UnsupportedModelError:
        raise
    except CheckpointError:  # about tensors, which are not known yet
        pass
    if not has_shape(config):
        from headrace.models.checkpoint.normalize import normalized
        from headrace.models.mlx_lm.load import of_config  # half a second of imports

        plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
        of_config(normalized(plain))
