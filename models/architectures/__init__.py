"""Architectures: from a family's config.json to the configuration of a decoder, and its tensors' names.

read.py           config.json -> DecoderConfig (config.py), by the row of its family
architecture.py   the fields of a row; families.py has all rows, each in a file of its group
fields.py, layers.py, experts.py, mixers.py, latent.py   what several families state alike
"""
