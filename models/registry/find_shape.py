"""Shape of a model named on the command line, without downloading, converting or reading weights.

Installed and local models are read from their headers. Otherwise the catalog's facts are used for a catalog name. Of a
hub id, config.json or the header of its GGUF is fetched, no weights.

Guard: tests/models/registry/test_find_shape.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.models.checkpoint.gguf_link import LINK_FILE
from headrace.models.checkpoint.side_file import read_json_object
from headrace.models.cost.shape_sources import (
    has_shape,
    shape_of_checkpoint,
    shape_of_config,
    shape_of_gguf,
)
from headrace.models.cost.step_shape import StepShape
from headrace.models.registry.hub_id import HubId
from headrace.models.registry.resolve import DEFAULT_MODEL, find_source, stored_name
from headrace.models.registry.source import CatalogName, LocalDirectory, LocalGGUF
from headrace.models.registry.store import Store
from headrace.runtime.config.paths import shown_name

if TYPE_CHECKING:
    from headrace.models.registry.fetch_hub import HubHeader


def find_shape(name: str | None, store: Store | None = None) -> tuple[str, StepShape]:
    """Return (display name, shape).

    Raises ModelNotFoundError, UnsupportedModelError, CheckpointError or FetchError.
    """
    store = store or Store()
    text = DEFAULT_MODEL if name is None else name
    source = find_source(text, store)
    match source:
        case LocalDirectory(path):
            return shown_name(path), _of_directory(path)
        case LocalGGUF(file):
            from headrace.models.gguf.container import open_container  # late: numpy

            return shown_name(file), shape_of_gguf(open_container(file))
        case CatalogName() | HubId():
            name = source.name if isinstance(source, CatalogName) else stored_name(str(source))
            here = store.get(name or text)
            if here is not None:
                return text, _of_directory(here.path)
            if isinstance(source, HubId):
                from headrace.models.registry.fetch_hub import fetch_header

                return str(source), shape_of_header(fetch_header(source))
            from headrace.models.registry.catalog import find

            return text, find(source.name).step_shape


def shape_of_header(header: "HubHeader") -> StepShape:
    """Return the shape of a model on the hub. Raises UnsupportedModelError and CheckpointError."""
    if header.container is not None:
        return shape_of_gguf(header.container)
    return _of_config(header.config or {})


def _of_directory(path: Path) -> StepShape:
    """Use the headers if there are weights, otherwise config.json alone."""
    if not any(path.glob("*.safetensors")) and not (path / LINK_FILE).exists():
        return _of_config(read_json_object(path / "config.json"))
    from headrace.models.checkpoint.safetensors import open_checkpoint

    checkpoint = open_checkpoint(path)
    if has_shape(checkpoint.config):
        return shape_of_checkpoint(checkpoint)
    from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_checkpoint  # half a second of imports

    return shape_of_mlx_lm_checkpoint(checkpoint)


def _of_config(config: dict[str, object]) -> StepShape:
    if has_shape(config):
        return shape_of_config(config)
    from headrace.models.cost.mlx_lm_shape import shape_of_mlx_lm_config

    return shape_of_mlx_lm_config(config)
