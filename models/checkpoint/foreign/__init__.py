"""Weights that other tools quantized, seen as MLX's affine groups.

    formats     which format it is, and the tensors it will become: from headers and config.json alone
    scaled      8-bit floats and integers with scales per tensor, channel, group or block
    packed      2-, 4- and 8-bit integers in words: GPTQ, AWQ, compressed-tensors
    arrays      a shard's arrays, each foreign matrix replaced by what it becomes

`open_checkpoint` asks `formats`, whoever reads weights asks `arrays`; nothing else knows these formats. What affine
groups can hold exactly is regrouped and stays exact; everything else is dequantized exactly and quantized to 8 bits.
"""
