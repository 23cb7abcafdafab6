"""Facts about models: catalog, checkpoint headers, context that fits."""
