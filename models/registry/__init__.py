"""Model names, catalog, downloads and the local store."""
