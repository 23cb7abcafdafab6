"""Whether a model's name means anything, told before the model that runs is given up for it.

Looks at names, the catalog and the store's entries: nothing of mlx, nothing from the network.
"""

from headrace.models.registry.catalog import find
from headrace.models.registry.source import CatalogName, parse_source
from headrace.models.registry.store import Store


def check_model_name(name: str) -> None:
    """Let pass an existing path, a catalog name, an installed model and anything of a hub id's form.

    Raises UsageError for text that has none of these forms, ModelNotFoundError (with the nearest names) for the rest.
    """
    source = parse_source(name)
    if isinstance(source, CatalogName) and not (store := Store()).has(source.name):
        find(source.name, store.names())
