"""Check of a model's name before the running model is unloaded.

Reads names, the catalog and the store; no network, no mlx.
"""

from headrace.models.registry.catalog import find
from headrace.models.registry.resolve import find_source, names_on_disk
from headrace.models.registry.source import CatalogName
from headrace.models.registry.store import Store


def check_model_name(name: str) -> None:
    """Accept an existing path, a catalog name, an installed model or the form of a hub id.

    Raises UsageError for text of another form, ModelNotFoundError with the nearest names for an unknown name.
    """
    store = Store()
    source = find_source(name, store)
    if isinstance(source, CatalogName) and not store.has(source.name):
        find(source.name, names_on_disk(store))
