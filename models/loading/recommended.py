"""Recommended sampling of a model: its generation_config.json's, else the catalog's.

`load_resolved` gives it to the loaded model; settings of the user take precedence.

Guard: tests/models/loading/test_recommended.py.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from headrace.models.checkpoint.side_file import has_side_file, read_json_object
from headrace.models.registry.resolve import ResolvedModel
from headrace.runtime.config.paths import ASSETS
from headrace.runtime.errors import CheckpointError

_LARGEST_SETTING = 2.0**63  # bound on numbers in generation_config.json


def recommended_sampling(resolved: ResolvedModel, stated: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return generation_config.json, with the catalog's sampling if it recommends none.

    stated: the file's content, if it was read. Raises CheckpointError.
    """
    if stated is None:
        stated = generation_defaults(resolved.path)
    return {**stated, **_from_catalog(resolved, stated)}


def catalog_sampling(resolved: ResolvedModel) -> dict[str, float]:
    """Return the catalog's sampling of a model whose files recommend none, else nothing. Raises CheckpointError."""
    return _from_catalog(resolved, generation_defaults(resolved.path))


def _from_catalog(resolved: ResolvedModel, stated: Mapping[str, object]) -> dict[str, float]:
    """Return the catalog's sampling if the files state none. stated: see `recommended_sampling`."""
    if resolved.stored_as is None or {"temperature", "do_sample"} & stated.keys():
        return {}
    with (ASSETS / "sampling.toml").open("rb") as file:
        recommended: dict[str, dict[str, float]] = tomllib.load(file)
    return recommended.get(resolved.stored_as, {})


def generation_defaults(directory: Path) -> dict[str, object]:
    """Return the settings in generation_config.json; empty if there is no such file.

    Raises CheckpointError if the file is not a JSON object or a number is out of range.
    """
    file = directory / "generation_config.json"
    if not has_side_file(file):
        return {}
    recommended = read_json_object(file)
    for name, value in recommended.items():
        if isinstance(value, int | float) and not abs(value) < _LARGEST_SETTING:  # also true for infinity and NaN
            raise CheckpointError(f"{file.name}: {name} is out of range")
    return recommended
