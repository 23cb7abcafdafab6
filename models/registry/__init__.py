"""Where models come from and where they are kept: catalog, names, fetching, the store."""
