"""Architectures: from a family's config.json to the configuration of a decoder, and its tensors' names."""
